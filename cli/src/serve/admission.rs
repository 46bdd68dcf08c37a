//! Access to this server, and the tickets that it issues.

use crate::args::ServeArgs;
use anyhow::Context;
use std::{
    io::Write,
    path::{Path, PathBuf},
};
use tensor_relay_client::replace_file;
use tensor_relay_server::{Access, AccessStore, Fingerprint, Ticket, Topic};

/// The file in the state directory that tickets are written to where no other is named.
pub(crate) const TICKETS_FILE: &str = "tickets";

/// Who may come in, as `args` say: who has a ticket of this server, or everybody. In the runtime.
pub(super) fn access(args: &ServeArgs, state_dir: &Path) -> anyhow::Result<Access> {
    if args.open {
        crate::log::say!(
            "warning: --open lets everybody in who reaches this server and knows its key, to every topic"
        );
        return Ok(Access::open());
    }
    let store = AccessStore::open(state_dir)
        .context("cannot keep the secrets that tickets are made with; --state-dir names another place")?;
    Ok(store.follow()?)
}

/// The ticket for `topic`, or for all.
pub(super) fn ticket(
    access: &Access,
    addresses: &[String],
    key: Fingerprint,
    topic: Option<&Topic>,
) -> anyhow::Result<Ticket> {
    let ticket = Ticket::new(addresses.to_vec(), vec![key.0], topic.cloned());
    Ok(access
        .rules()
        .own_ticket(ticket.context("cannot make a ticket; check --advertise")?))
}

/// Where tickets are written: to `--ticket-file`, or else into the state directory where nobody else can read them.
pub(super) fn ticket_file(args: &ServeArgs, state_dir: &Path) -> PathBuf {
    let path = args.ticket_file.clone().unwrap_or_else(|| state_dir.join(TICKETS_FILE));
    std::path::absolute(&path).unwrap_or(path) // Whoever is told may be elsewhere.
}

/// A ticket lets its holder in, so the file is its owner's alone, whatever it was before. It is replaced in one step.
pub(crate) fn write_tickets(path: &Path, tickets: &[String]) -> anyhow::Result<()> {
    let written =
        replace_file(path, 0o600, |file| tickets.iter().try_for_each(|ticket| writeln!(file, "{ticket}")));
    written.with_context(|| format!("cannot write the ticket file {}", path.display()))
}
