//! Principals: admitted clients with their rights.

use crate::logins::network_of;
use std::{fmt, net::IpAddr, sync::Arc};
use tensor_relay_protocol::{Grant, TicketId, Topic, Verb};
use tensor_relay_transport::Fingerprint;

/// An admitted client, with its rights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    identity: ClientIdentity,
    grants: Vec<Grant>,
    expires_s: Option<u64>,
}

/// How a client was identified.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ClientIdentity {
    /// Not authenticated: the server admits everybody.
    Anybody,
    /// By a ticket of this server.
    Ticket(TicketId, String),
    /// By a key that is listed under this name.
    Key(String),
    /// By a certificate with these names, as `dns:NAME` and `uri:URI`, from a trusted authority. Sorted, so that the
    /// order in a certificate does not matter.
    Names(Vec<String>),
    /// By the number of its user, at the server's socket.
    User(u32),
    /// By a key that has no rights of its own, but may show grants for single versions.
    Peer(Fingerprint),
}

impl Principal {
    pub(super) fn anybody(grants: Vec<Grant>) -> Self {
        Self { identity: ClientIdentity::Anybody, grants, expires_s: None }
    }

    pub(super) fn with_ticket(
        id: TicketId,
        holder: String,
        grants: Vec<Grant>,
        expires_s: Option<u64>,
    ) -> Self {
        Self { identity: ClientIdentity::Ticket(id, holder), grants, expires_s }
    }

    pub(super) fn with_key(name: &str, grants: Vec<Grant>) -> Self {
        Self { identity: ClientIdentity::Key(name.to_owned()), grants, expires_s: None }
    }

    pub(super) fn with_names(mut names: Vec<String>, grants: Vec<Grant>) -> Self {
        names.sort_unstable();
        names.dedup();
        Self { identity: ClientIdentity::Names(names), grants, expires_s: None }
    }

    pub(super) fn with_user(uid: u32, grants: Vec<Grant>) -> Self {
        Self { identity: ClientIdentity::User(uid), grants, expires_s: None }
    }

    pub(super) fn peer(key: Fingerprint) -> Self {
        Self { identity: ClientIdentity::Peer(key), grants: vec![], expires_s: None }
    }

    /// Whether it may do `verb` with `topic`.
    pub fn may(&self, verb: Verb, topic: &Topic) -> bool {
        self.grants.iter().any(|grant| grant.allows(verb, topic))
    }

    /// Whether it may do `verb` with every topic, by one grant.
    pub(crate) fn may_everywhere(&self, verb: Verb) -> bool {
        let is_everywhere = |grant: &Grant| *grant == Grant::everywhere(grant.verbs);
        self.grants
            .iter()
            .any(|grant| grant.verbs.contains(verb) && is_everywhere(grant))
    }

    /// Whether it may do `verb` with any topic at all.
    pub fn may_anywhere(&self, verb: Verb) -> bool {
        self.grants.iter().any(|grant| grant.verbs.contains(verb))
    }

    /// Whether it has the same identity as `other`; rights may differ.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// The holder of its share of the server: itself, or its network if everybody is admitted.
    pub(crate) fn share(&self, address: IpAddr) -> Arc<str> {
        match self.identity {
            ClientIdentity::Anybody => network_of(address).to_string().into(),
            _ => self.to_string().into(),
        }
    }

    /// Its ticket, if it was authenticated by one.
    pub fn ticket(&self) -> Option<TicketId> {
        match self.identity {
            ClientIdentity::Ticket(id, _) => Some(id),
            _ => None,
        }
    }

    /// Whether its admission can expire.
    pub(super) fn is_temporary(&self) -> bool {
        self.expires_s.is_some() || matches!(self.identity, ClientIdentity::Names(_))
    }

    /// The holder named in its ticket.
    pub fn holder(&self) -> Option<&str> {
        match &self.identity {
            ClientIdentity::Ticket(_, holder) => Some(holder),
            _ => None,
        }
    }
}

/// Its name in logs, and as the owner of readers: `ticket:ID`, `key:NAME`, `uid:NUMBER`, `peer:KEY`, all names of its
/// certificate, or `anybody`.
impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.identity {
            ClientIdentity::Anybody => f.write_str("anybody"),
            ClientIdentity::Ticket(id, _) => write!(f, "ticket:{id}"),
            ClientIdentity::Key(name) => write!(f, "key:{name}"),
            ClientIdentity::User(uid) => write!(f, "uid:{uid}"),
            ClientIdentity::Peer(key) => write!(f, "peer:{key}"),
            ClientIdentity::Names(names) if names.is_empty() => f.write_str("certificate without names"),
            ClientIdentity::Names(names) => {
                // A comma within a name is marked: otherwise one name could equal several of another client.
                let names = names.iter().map(|name| name.escape_debug().to_string().replace(',', "\\,"));
                f.write_str(&names.collect::<Vec<_>>().join(","))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Readers belong to principals by name, so no name may equal those of another client.
    #[test]
    fn a_name_with_a_comma_equals_no_other_names() {
        let shown = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            Principal::with_names(names, vec![]).to_string()
        };
        assert_eq!(shown(&["uri:b", "dns:a"]), "dns:a,uri:b");
        let all = [
            shown(&["uri:a", "uri:b"]),
            shown(&["uri:a,uri:b"]),
            shown(&["uri:a\\,uri:b"]),
            shown(&["uri:a\\", "uri:b"]),
        ];
        let distinct: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len(), "{all:?}");
    }
}
