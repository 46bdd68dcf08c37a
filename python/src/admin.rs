//! The admin ports of relays and clients.

use crate::{
    errors::Kind,
    serve::{addresses_of, no_address},
};
use pyo3::prelude::*;
use std::{
    fmt::Display,
    net::SocketAddr,
    path::{Path, PathBuf},
};
use tensor_relay_cli::AdminPort;

/// The options of an admin port.
pub(crate) struct AdminOptions<'a> {
    /// The address that it listens on, as `IP:PORT`; `None` without a port.
    pub(crate) address: Option<&'a str>,
    pub(crate) token_file: Option<PathBuf>,
}

impl AdminOptions<'_> {
    /// Opens the port with `open`, if an address is given. Must run in the runtime.
    ///
    /// # Errors
    /// `RequestError` for an invalid address and for a token without an address; `TensorRelayError` for an address that
    /// cannot be bound, or that needs a token.
    pub(crate) fn open<E: Display>(
        self,
        py: Python<'_>,
        open: impl FnOnce(SocketAddr, Option<&Path>) -> Result<AdminPort, E>,
    ) -> PyResult<Option<AdminPort>> {
        let Some(admin) = self.address else {
            return match self.token_file {
                Some(_) => {
                    Err(Kind::Request.raise(py, "admin_token_file has no effect without admin=\"IP:PORT\""))
                }
                None => Ok(None),
            };
        };
        let address = addresses_of(py, admin)?.first().copied();
        let address = address.ok_or_else(|| no_address(py, admin, &"the name has no address"))?;
        let opened = open(address, self.token_file.as_deref());
        opened.map(Some).map_err(|error| Kind::Other.raise(py, format!("{error:#}")))
    }
}
