//! Access to this server, and the tickets that it issues.

use anyhow::Context;
use std::{
    io::Write,
    path::{Path, PathBuf},
};
use tensor_relay_client::{TicketError, replace_file};
use tensor_relay_server::{Access, AccessStore, Fingerprint, Ticket, Topic};

/// The name of the ticket file in the state directory, without `--ticket-file`.
pub(crate) const TICKETS_FILE: &str = "tickets";

/// The access rules of this server; if `is_open`, everybody has access, and only users of the publish socket are
/// restricted. Must be called within the runtime.
pub(crate) fn access(is_open: bool, state_dir: &Path) -> anyhow::Result<Access> {
    if is_open {
        crate::log::message!(
            "warning: --open gives everybody who can reach this server and knows its key access to every topic"
        );
        return Ok(AccessStore::existing(state_dir).admitting_everybody().watch_changes()?);
    }
    let store = AccessStore::open(state_dir)
        .context("cannot store the secrets of tickets; choose another directory with --state-dir")?;
    Ok(store.watch_changes()?)
}

/// The ticket for `topic`, or for all topics.
pub(crate) fn ticket(
    access: &Access,
    addresses: &[String],
    key: Fingerprint,
    topic: Option<&Topic>,
) -> anyhow::Result<Ticket> {
    let ticket = bare_ticket(addresses.to_vec(), key, topic.cloned());
    Ok(access
        .rules()
        .own_ticket(ticket.context("cannot make a ticket; check --advertise and --socket")?))
}

/// A ticket without a token for the server with `key` at `addresses`. A socket needs no key.
pub(crate) fn bare_ticket(
    addresses: Vec<String>,
    key: Fingerprint,
    topic: Option<Topic>,
) -> Result<Ticket, TicketError> {
    let is_socket = addresses.iter().any(|address| address.starts_with("unix:"));
    Ticket::new(addresses, if is_socket { vec![] } else { vec![key.0] }, topic)
}

/// The path of the ticket file: `--ticket-file`, or else a file in the state directory, which is private.
pub(crate) fn ticket_file(given: Option<&Path>, state_dir: &Path) -> PathBuf {
    let path = given.map_or_else(|| state_dir.join(TICKETS_FILE), PathBuf::from);
    std::path::absolute(&path).unwrap_or(path) // The reader of the output may have another working directory.
}

/// If the tickets are in another file, writes them to the state directory too, from where `tickets create` knows the server's
/// addresses. A state directory that is only read stays as it is.
pub(crate) fn keep_addresses(ticket_file: &Path, state_dir: &Path, tickets: &[String]) {
    let kept = self::ticket_file(None, state_dir);
    if kept != ticket_file
        && let Err(error) = write_tickets(&kept, tickets)
    {
        tracing::info!(
            %error,
            "The state directory keeps no tickets, so `tickets create` will require --address."
        );
    }
}

/// Replaces the ticket file in one step. Only its owner can read the new file, because tickets are secrets.
pub(crate) fn write_tickets(path: &Path, tickets: &[String]) -> anyhow::Result<()> {
    let written =
        replace_file(path, 0o600, |file| tickets.iter().try_for_each(|ticket| writeln!(file, "{ticket}")));
    written.with_context(|| format!("cannot write the ticket file {}", path.display()))
}
