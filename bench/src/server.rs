//! Starts a tensor-relay server for a measurement.

use anyhow::Result;
use std::net::SocketAddr;
use tensor_relay_server::{Access, Config, Identity, Listener, Server, Ticket, Topic, Tuning};

/// Starts a server at `listen`, with a new identity and without access control, and returns it with its ticket.
///
/// # Errors
/// When the address is taken.
pub(crate) fn start(
    listen: SocketAddr,
    udp_payload_max: Option<u16>,
    config: Config,
    topic: Option<Topic>,
) -> Result<(Server, Ticket)> {
    let identity = Identity::ephemeral()?;
    let listener = Listener::bind(listen, &identity, Tuning { udp_payload_max, ..Tuning::default() })?;
    let server = Server::start(listener, Access::open(), config);
    let address = server.local_address().to_string();
    Ok((server, Ticket::new(vec![address], vec![identity.fingerprint().0], topic)?))
}
