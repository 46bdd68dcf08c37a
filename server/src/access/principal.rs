//! Whoever is on the other end, once it has proved that.

use std::fmt;
use tensor_relay_protocol::{Grant, TicketId, Topic, Verb};

/// Who a client is, and what it may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    identity: Identity,
    grants: Vec<Grant>,
    expires_s: Option<u64>,
}

/// How it proved who it is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Identity {
    /// Not at all: the server lets everybody in.
    Anybody,
    /// By a ticket of this server.
    Ticket(TicketId, String),
    /// By a key that the server knows under this name.
    Key(String),
    /// By a certificate with these names, of an authority that the server trusts.
    Names(Vec<String>),
}

impl Principal {
    pub(super) fn anybody(grants: Vec<Grant>) -> Self {
        Self { identity: Identity::Anybody, grants, expires_s: None }
    }

    pub(super) fn with_ticket(
        id: TicketId,
        holder: String,
        grants: Vec<Grant>,
        expires_s: Option<u64>,
    ) -> Self {
        Self { identity: Identity::Ticket(id, holder), grants, expires_s }
    }

    pub(super) fn with_key(name: &str, grants: Vec<Grant>) -> Self {
        Self { identity: Identity::Key(name.to_owned()), grants, expires_s: None }
    }

    pub(super) fn with_names(names: Vec<String>, grants: Vec<Grant>) -> Self {
        Self { identity: Identity::Names(names), grants, expires_s: None }
    }

    /// Whether it may do `verb` with `topic`.
    pub fn may(&self, verb: Verb, topic: &Topic) -> bool {
        self.grants.iter().any(|grant| grant.allows(verb, topic))
    }

    /// Its ticket, if it came with one.
    pub fn ticket(&self) -> Option<TicketId> {
        match self.identity {
            Identity::Ticket(id, _) => Some(id),
            Identity::Anybody | Identity::Key(_) | Identity::Names(_) => None,
        }
    }

    /// Whether it may be here for a time alone.
    pub(super) fn is_temporary(&self) -> bool {
        self.expires_s.is_some() || matches!(self.identity, Identity::Names(_))
    }

    /// For whom its ticket was made.
    pub fn holder(&self) -> Option<&str> {
        match &self.identity {
            Identity::Ticket(_, holder) => Some(holder),
            Identity::Anybody | Identity::Key(_) | Identity::Names(_) => None,
        }
    }
}

/// Its name in access control lists and logs: `ticket:ID`, `key:NAME`, `name:` and the first of its names, or `anybody`.
impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.identity {
            Identity::Anybody => f.write_str("anybody"),
            Identity::Ticket(id, _) => write!(f, "ticket:{id}"),
            Identity::Key(name) => write!(f, "key:{name}"),
            Identity::Names(names) => {
                write!(f, "name:{}", names.first().map_or("", String::as_str).escape_debug())
            }
        }
    }
}
