//! [`PeerDialling`]: how a server reaches the ports of clients that share.

use super::{PeerNetwork, turns::Turns};
use std::sync::Arc;
use tensor_relay_transport::{Connector, Tuning};

/// How a server reaches the ports of clients that share, to find out whether they are their own. With it, a server lets
/// clients take chunks from each other. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PeerDialling {
    pub(super) connector: Connector,
    pub(super) networks: Arc<[PeerNetwork]>,
    pub(super) turns: Arc<Turns>,
}

impl PeerDialling {
    /// Dials over this machine's network: see [`new`](Self::new).
    pub fn over_network(networks: &[PeerNetwork]) -> Self {
        Self::new(Connector::new(Tuning::default()), networks)
    }

    /// Dials by `connector`: the addresses that sessions come from, and those in `networks`.
    pub fn new(connector: Connector, networks: &[PeerNetwork]) -> Self {
        Self { connector, networks: networks.into(), turns: Arc::default() }
    }
}
