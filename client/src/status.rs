//! A client as it is at one moment, for those who run it.

use crate::{MemoryStats, reconnector::State};
use std::sync::{Arc, Weak, atomic::Ordering};
use tensor_relay_device::HostMemory;
use tensor_relay_transport::{KindReason, LaneKind, LaneStats};

/// Reads the status of a client for as long as there is one. It keeps nothing alive, so it may be held anywhere.
#[derive(Debug, Clone)]
pub struct StatusReader(Weak<State>);

/// What a client's connection is like, and what its versions take.
#[derive(Debug, Clone)]
pub struct ClientStatus {
    /// What the session runs over.
    pub transport: LaneKind,
    /// Why over that.
    pub transport_reason: KindReason,
    /// What each lane of the connection of now, or of the last one, did.
    pub lanes: Vec<LaneStats>,
    /// Why there is no connection now, while another one is being made.
    pub lost: Option<String>,
    /// How often a lost connection was made again.
    pub reconnects: u64,
    /// What its versions take of the host's memory.
    pub memory: MemoryStats,
}

impl StatusReader {
    pub(crate) fn new(state: &Arc<State>) -> Self {
        Self(Arc::downgrade(state))
    }

    /// The status now; `None` when the client is gone.
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
            memory: memory(&state),
        })
    }
}

/// What the versions of a client take of the host's memory now.
pub(crate) fn memory(state: &State) -> MemoryStats {
    let snapshots = state.memory.stats();
    let bases = state.bases.as_ref().map(HostMemory::stats);
    MemoryStats {
        snapshot_bytes: snapshots.in_use_bytes,
        reusable_bytes: snapshots.cached_bytes,
        base_bytes: bases.map_or(0, |bases| bases.in_use_bytes + bases.cached_bytes),
    }
}
