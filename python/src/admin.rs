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

/// Opens the port at the address `admin`, `IP:PORT`, with `open`, if the address is given. Must run in the runtime.
///
/// # Errors
/// `RequestError` for an invalid address and for a token without an address; `TensorRelayError` for an address that
/// cannot be bound, or that needs a token.
pub(crate) fn open<E: Display>(
    py: Python<'_>,
    admin: Option<&str>,
    token_file: Option<PathBuf>,
    open: impl FnOnce(SocketAddr, Option<&Path>) -> Result<AdminPort, E>,
) -> PyResult<Option<AdminPort>> {
    let Some(admin) = admin else {
        return match token_file {
            Some(_) => {
                Err(Kind::Request.raise(py, "admin_token_file has no effect without admin=\"IP:PORT\""))
            }
            None => Ok(None),
        };
    };
    let address = addresses_of(py, admin)?.first().copied();
    let address = address.ok_or_else(|| no_address(py, admin, &"the name has no address"))?;
    let opened = open(address, token_file.as_deref());
    opened.map(Some).map_err(|error| Kind::Other.raise(py, format!("{error:#}")))
}
