//! The progress of the current version, for progress bars.

use std::sync::atomic::{AtomicU64, Ordering};

/// The progress of the version being received.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// The version's number, from its announcement on; 0 before the first.
    pub version: u64,
    /// The size of the selected payload in bytes; 0 until the manifest has arrived.
    pub payload_bytes: u64,
    /// The payload bytes that are verified and in place.
    pub verified_bytes: u64,
    /// The encoded bytes received over the network for it.
    pub wire_bytes: u64,
}

/// From whom the bytes of a version come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Giver {
    /// The server that announced it.
    Origin,
    /// Another server with the same content.
    Server,
    /// Another client of the server.
    Peer,
}

/// Atomic counters of a transfer's progress. [`get`](Self::get) reads them one by one, so they may be inconsistent.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    version: AtomicU64,
    payload_bytes: AtomicU64,
    verified_bytes: AtomicU64,
    wire_bytes: AtomicU64,
    /// Those of other servers and those of peers.
    server_bytes: AtomicU64,
    peer_bytes: AtomicU64,
    /// The bytes ever received for the subscription, which distinguish a slow transfer from a stalled one.
    received_bytes: AtomicU64,
}

impl Counters {
    pub(crate) fn begin(&self, version: u64, payload_bytes: u64) {
        self.version.store(version, Ordering::Relaxed);
        self.payload_bytes.store(payload_bytes, Ordering::Relaxed);
        self.set_verified(0);
        for counter in [&self.wire_bytes, &self.server_bytes, &self.peer_bytes] {
            counter.store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn add_wire(&self, giver: Giver, bytes: u64) {
        self.wire_bytes.fetch_add(bytes, Ordering::Relaxed);
        match giver {
            Giver::Origin => {}
            Giver::Server => drop(self.server_bytes.fetch_add(bytes, Ordering::Relaxed)),
            Giver::Peer => drop(self.peer_bytes.fetch_add(bytes, Ordering::Relaxed)),
        }
        self.add_received(bytes);
    }

    pub(crate) fn add_received(&self, bytes: u64) {
        self.received_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn received_bytes(&self) -> u64 {
        self.received_bytes.load(Ordering::Relaxed)
    }

    /// The encoded bytes of the version that came from other servers, and from peers.
    pub(crate) fn bytes_of_others(&self) -> (u64, u64) {
        (self.server_bytes.load(Ordering::Relaxed), self.peer_bytes.load(Ordering::Relaxed))
    }

    pub(crate) fn set_verified(&self, bytes: u64) {
        self.verified_bytes.store(bytes, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Progress {
        Progress {
            version: self.version.load(Ordering::Relaxed),
            payload_bytes: self.payload_bytes.load(Ordering::Relaxed),
            verified_bytes: self.verified_bytes.load(Ordering::Relaxed),
            wire_bytes: self.wire_bytes.load(Ordering::Relaxed),
        }
    }
}
