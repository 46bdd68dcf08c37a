//! The tickets of a relay, and the servers that tickets name.

use crate::{errors::Kind, range::positive_seconds, runtime};
use pyo3::prelude::*;
use tensor_relay_server::{Access, AccessStore, Grant, Ticket, Verbs};

/// Issues the tickets of a relay.
#[derive(Debug)]
pub(crate) struct Tickets {
    /// A ticket with the server's addresses and key only.
    pub(crate) bare: Ticket,
    /// The access rules.
    pub(crate) access: Access,
    /// The list of separate tickets, which can be revoked; `None` for an ephemeral or open relay.
    pub(crate) store: Option<AccessStore>,
}

impl Tickets {
    /// `ticket` with the server's own token, if its access rules require one.
    pub(crate) fn own(&self, ticket: Ticket) -> String {
        self.access.rules().own_ticket(ticket).to_string()
    }

    /// `ticket` with a new token, which is added to the list.
    ///
    /// # Errors
    /// `RequestError` if the relay keeps no list, or the ticket names no topic.
    pub(crate) fn issue(
        &self,
        py: Python<'_>,
        ticket: Ticket,
        expires: Option<f64>,
        holder: &str,
    ) -> PyResult<String> {
        let wrong = |why: &str| Kind::Request.raise(py, why);
        let Some(store) = &self.store else {
            return Err(wrong(
                "this server keeps no list of tickets, because it is open or ephemeral: use neither option",
            ));
        };
        let valid_for = expires.map(|seconds| positive_seconds(py, "expires", seconds)).transpose()?;
        let topic = ticket.topic().ok_or_else(|| wrong("the ticket names no topic"))?;
        let grants = vec![Grant::for_topic(topic, Verbs::CONSUME)];
        let (_, token) = store.issue(holder, grants, valid_for).map_err(Kind::Request.because(py))?;
        Ok(ticket.with_token(token).to_string())
    }
}

/// The ticket without its topic: the same text for all tickets with the same server addresses, keys, user of the socket and
/// token. Tickets with different tokens have different rights, so their texts differ.
///
/// # Errors
/// `TicketError` for an invalid ticket; `ForkError` in a forked process that cannot connect.
#[pyfunction]
pub(crate) fn server_of(py: Python<'_>, ticket: &str) -> PyResult<String> {
    runtime::handle(py)?;
    let ticket: Ticket = ticket.parse().map_err(Kind::Ticket.because(py))?;
    Ok(ticket.without_topic().to_string())
}
