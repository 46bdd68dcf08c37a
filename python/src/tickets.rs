//! The tickets of a relay.

use crate::{errors::Kind, range::positive_seconds};
use pyo3::prelude::*;
use tensor_relay_server::{Access, AccessStore, Grant, Ticket, Verbs};

/// The tickets of a relay.
#[derive(Debug)]
pub(crate) struct Tickets {
    /// The server's addresses and key.
    pub(crate) bare: Ticket,
    /// The access rules.
    pub(crate) access: Access,
    /// The list of separately made tickets; `None` for an ephemeral or open relay.
    pub(crate) store: Option<AccessStore>,
}

impl Tickets {
    /// The ticket with what lets its holder in.
    pub(crate) fn own(&self, ticket: Ticket) -> String {
        self.access.rules().own_ticket(ticket).to_string()
    }

    /// A ticket of its own, that is listed.
    ///
    /// # Errors
    /// `RequestError` where no tickets are listed, or the ticket names no topic.
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
                "this server keeps no list of tickets, since it is open or ephemeral: serve without both",
            ));
        };
        let valid_for = expires.map(|seconds| positive_seconds(py, "expires", seconds)).transpose()?;
        let topic = ticket.topic().ok_or_else(|| wrong("the ticket names no topic"))?;
        let grants = vec![Grant::on(topic, Verbs::CONSUME)];
        let (_, token) = store.issue(holder, grants, valid_for).map_err(Kind::Request.because(py))?;
        Ok(ticket.with_token(token).to_string())
    }
}
