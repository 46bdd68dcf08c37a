//! [`Membership`]: how a client takes part in the swarms of shared versions (PROTOCOL.md §3.15).

use crate::connection::Connection;
use std::sync::Arc;
use tensor_relay_protocol::{ClientMessage, Feature, PEER_ADDRESSES_MAX, PeerAddress, Share, Site};
use tensor_relay_transport::{
    Identity, LaneKind,
    forwarding::{Forward, Origin},
};

/// A client's membership of the swarms of shared versions: it takes verified chunks from other members, and offers its
/// own to them if it says where.
#[derive(Debug, Clone)]
pub struct Membership {
    /// The member's key, which it shows to the members from which it takes chunks. The port at which it offers its own
    /// must have the same.
    pub identity: Arc<Identity>,
    /// Where it offers chunks, at most one address for each transport. An unspecified IP address stands for the one from
    /// which the server sees the session. None: it only takes.
    pub addresses: Vec<PeerAddress>,
    /// Where it is: peers of the same site are preferred.
    pub site: Site,
    /// What offers the chunks there. `None`: it only takes, and the addresses are not told.
    pub forward: Option<Arc<dyn Forward>>,
}

impl Membership {
    /// Begins a session with the server of `origin`, and returns the message that asks it for membership; `None` if the
    /// server does not offer that, or is on this host: over a Unix socket it lends its memory instead.
    pub(crate) fn begin(&self, origin: &Connection) -> Option<ClientMessage> {
        let (session, grant) = origin.session();
        let is_offered =
            origin.server().1.contains(Feature::Peers) && origin.control().kind() != LaneKind::Unix;
        let Some(grant) = grant.filter(|_| is_offered) else {
            tracing::info!(
                "The server does not let its clients take from each other: it sends everything itself."
            );
            return None;
        };
        let mut addresses = vec![];
        if let Some(forward) = &self.forward {
            forward.set_origin(Origin::Session(session, grant));
            addresses = self.addresses.iter().take(PEER_ADDRESSES_MAX).copied().collect();
        }
        let (key, site) = (Some(self.identity.fingerprint().0), self.site.clone());
        Some(ClientMessage::Share(Share { addresses, key, site }))
    }

    /// The number from which this member's random choices follow: every member has another one.
    pub(crate) fn seed(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.identity.fingerprint().0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// Reports that the connection to the origin was lost, or that the session has ended.
    pub(crate) fn set_origin(&self, origin: Origin) {
        if let Some(forward) = &self.forward {
            forward.set_origin(origin);
        }
    }
}
