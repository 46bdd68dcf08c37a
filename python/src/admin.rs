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
    /// Opens it with `open`, if there is to be one. Call it in the runtime.
    ///
    /// # Errors
    /// `RequestError` for what is no address and for a token without one, `TensorRelayError` for what cannot be bound or may not
    /// be open.
    pub(crate) fn open<E: Display>(
        self,
        py: Python<'_>,
        open: impl FnOnce(SocketAddr, Option<&Path>) -> Result<AdminPort, E>,
    ) -> PyResult<Option<AdminPort>> {
        let Some(admin) = self.address else {
            return match self.token_file {
                Some(_) => {
                    Err(Kind::Request.raise(py, "admin_token_file means nothing without admin=\"IP:PORT\""))
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
