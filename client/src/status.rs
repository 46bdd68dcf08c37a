//! Client status, for operators.

use crate::{MemoryStats, PeerReport, reconnector::State};
use std::sync::{Arc, Weak, atomic::Ordering};
use tensor_relay_device::HostMemory;
use tensor_relay_transport::{LaneKind, LaneKindReason, LaneStats};

/// Reads the status of a client while it exists. A weak reference: it keeps no session or memory.
#[derive(Debug, Clone)]
pub struct StatusReader(Weak<State>);

/// The connection state and memory use of a client.
#[derive(Debug, Clone)]
pub struct ClientStatus {
    /// The transport of the session.
    pub transport: LaneKind,
    /// The reason for that transport.
    pub transport_reason: LaneKindReason,
    /// The counters of each lane of the current or last connection.
    pub lanes: Vec<LaneStats>,
    /// Why the connection was lost, while reconnecting.
    pub lost: Option<String>,
    /// The number of reconnections.
    pub reconnects: u64,
    /// What became of the peers that the server named lately; none without [sharing](crate::Config::sharing).
    pub peers: Vec<PeerReport>,
    /// The host memory used by its versions.
    pub memory: MemoryStats,
}

impl StatusReader {
    pub(crate) fn new(state: &Arc<State>) -> Self {
        Self(Arc::downgrade(state))
    }

    /// The status now; `None` once the client was dropped and its session has ended.
    pub fn read(&self) -> Option<ClientStatus> {
        let state = self.0.upgrade()?;
        let (transport, transport_reason) = {
            let lane = state.lane.borrow();
            (lane.kind(), lane.reason())
        };
        let lost = state.lost.borrow().as_ref().map(ToString::to_string);
        Some(ClientStatus {
            transport,
            transport_reason,
            lanes: state.lanes(),
            lost,
            reconnects: state.reconnects.load(Ordering::Relaxed),
            peers: state.peers.get(),
            memory: memory(&state),
        })
    }
}

/// The host memory used by a client's versions now.
pub(crate) fn memory(state: &State) -> MemoryStats {
    let snapshots = state.memory.stats();
    let bases = state.bases.as_ref().map(HostMemory::stats);
    MemoryStats {
        snapshot_bytes: snapshots.in_use_bytes,
        reusable_bytes: snapshots.cached_bytes,
        base_bytes: bases.map_or(0, |bases| bases.in_use_bytes + bases.cached_bytes),
    }
}
