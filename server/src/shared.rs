//! The state shared by all sessions of a server, and its gauges.

use crate::{
    Access, Config,
    catalogue::Catalogue,
    chunk_times::ChunkTimes,
    effort::EffortMeters,
    failures::Failures,
    handshakes::Handshakes,
    joinable::Joinable,
    logins::Logins,
    refusals::Refusals,
    shares::{Eviction, Place, Shares},
    subscribers::Subscribers,
    traffic::Traffic,
};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use tensor_relay_device::{AllocError, Reservation};
use tensor_relay_protocol::InstanceId;
use tensor_relay_transport::{LaneKind, LaneThreads, Tally, egress::Encoder};
use tokio::sync::watch;

/// The state shared by all sessions of a server.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Config,
    /// Access control.
    pub(crate) access: Access,
    /// The id of this server process, made at its start.
    pub(crate) instance: InstanceId,
    pub(crate) catalogue: Arc<Catalogue>,
    pub(crate) encoder: Encoder,
    /// The choice of encoding efforts, for each client address and kind of lane.
    pub(crate) effort_meters: EffortMeters,
    pub(crate) counters: Arc<Counters>,
    pub(crate) traffic: Traffic,
    /// The open subscriptions, for status.
    pub(crate) subscribers: Arc<Subscribers>,
    pub(crate) chunk_times: ChunkTimes,
    /// The copies of chunks of borrowed versions that are being sent, in bytes.
    pub(crate) copies: Copies,
    pub(crate) failures: Failures,
    /// The chunks sent, of all topics.
    pub(crate) tally: Tally,
    /// Sessions that are open.
    pub(crate) sessions: Gauge,
    /// Transfers in progress, each of one version to one subscription.
    pub(crate) transfers: Gauge,
    /// What principals share.
    pub(crate) places: PlacesForPrincipals,
    /// Subscriptions that a shutdown waits for: each until it has no transfer to finish.
    pub(crate) unfinished: Gauge,
    pub(crate) handshakes: Handshakes,
    /// The unauthenticated connections.
    pub(crate) logins: Logins,
    /// Rate-limits the log of refused clients.
    pub(crate) refusals: Refusals,
    /// The registry of sessions for joining lanes.
    pub(crate) joinable: Arc<Joinable>,
    pub(crate) lane_threads: LaneThreads,
    /// Whether the server drains: only ended topics and mode `every` start transfers.
    pub(crate) draining: watch::Sender<bool>,
    /// Whether sessions must end.
    pub(crate) ending: watch::Sender<bool>,
}

/// The maximum number of concurrent probes over all clients. Further ones would distort the others, so they get an
/// empty answer.
pub(crate) const PROBES_MAX: u64 = 4;

/// The bounded resources that clients hold, over all sessions: none of them can be filled by one principal.
#[derive(Debug)]
pub(crate) struct PlacesForPrincipals {
    pub(crate) sessions: Shares<Arc<str>>,
    /// Sessions and further lanes, by which memory is shared where it is less than the places need.
    pub(crate) connections: Shares<Arc<str>>,
    /// The connections that joined a session as lanes.
    pub(crate) lanes: Shares<Arc<str>>,
    pub(crate) subscriptions: Shares<Arc<str>>,
    pub(crate) probes: Shares<Arc<str>>,
}

impl PlacesForPrincipals {
    fn new(config: &Config) -> Self {
        let shares = |max: u64| Shares::new(usize::try_from(max).unwrap_or(usize::MAX));
        Self {
            sessions: Shares::new(config.sessions_max),
            connections: Shares::new(usize::MAX),
            lanes: shares(config.lanes_total_max()),
            subscriptions: shares(config.subscriptions_total_max()),
            probes: shares(PROBES_MAX),
        }
    }

    /// Reserves memory for a connection of `holder`, if necessary of another principal with more connections.
    ///
    /// # Errors
    /// [`AllocError`] if there is none.
    pub(crate) async fn reserve(
        &self,
        holder: Arc<str>,
        kind: LaneKind,
    ) -> Result<(ConnectionMemory, Eviction), AllocError> {
        let fitting = || Reservation::fitting(kind.memory_bytes_max());
        let (memory, place, eviction) = self.connections.enter_reserving(holder, fitting).await?;
        Ok((ConnectionMemory { _memory: memory, _place: place }, eviction))
    }
}

/// The memory of a connection, until this is dropped.
#[derive(Debug)]
pub(crate) struct ConnectionMemory {
    _memory: Reservation,
    _place: Place<Arc<str>>,
}

/// The counters of a server.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Commits: one for each version and subscriber.
    pub(crate) committed: AtomicU64,
    /// Subscribers that accepted no byte within the deadline, or did not keep up with their publisher.
    pub(crate) evicted: AtomicU64,
}

impl Shared {
    pub(crate) fn new(config: Config, access: Access, catalogue: Arc<Catalogue>, encoder: Encoder) -> Self {
        Self {
            lane_threads: LaneThreads::new(config.lane_threads),
            handshakes: Handshakes::default(),
            logins: Logins::new(config.logins_max),
            effort_meters: EffortMeters::new(config.workers),
            joinable: Arc::default(),
            places: PlacesForPrincipals::new(&config),
            copies: Copies::new(config.encoded_bytes),
            instance: InstanceId(rand::random()),
            config,
            access,
            catalogue,
            encoder,
            counters: Arc::default(),
            traffic: Traffic::default(),
            subscribers: Arc::default(),
            chunk_times: ChunkTimes::default(),
            failures: Failures::default(),
            tally: Tally::default(),
            sessions: Gauge::default(),
            transfers: Gauge::default(),
            unfinished: Gauge::default(),
            refusals: Refusals::default(),
            draining: watch::Sender::new(false),
            ending: watch::Sender::new(false),
        }
    }
}

/// The budget for copies of chunks whose source is not in memory in one piece.
///
/// A slow subscriber may hold its copies for long, so nobody waits for the budget: while it is used up, each
/// subscription sends one such chunk at a time.
#[derive(Debug)]
pub(crate) struct Copies {
    bytes: Arc<AtomicU64>,
    max_bytes: u64,
}

/// The copy of one chunk, counted until this is dropped.
#[derive(Debug)]
pub(crate) struct ChunkCopy {
    all: Arc<AtomicU64>,
    bytes: u64,
}

impl Copies {
    fn new(max_bytes: u64) -> Self {
        Self { bytes: Arc::default(), max_bytes }
    }

    pub(crate) fn has_room(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) < self.max_bytes
    }

    pub(crate) fn count(&self, bytes: u64) -> ChunkCopy {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        ChunkCopy { all: Arc::clone(&self.bytes), bytes }
    }
}

impl Drop for ChunkCopy {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A gauge of live objects. Clones share one count.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gauge(Arc<watch::Sender<u64>>);

/// One unit of a [`Gauge`], until it is dropped.
#[derive(Debug)]
#[must_use = "it is counted until this is dropped"]
pub(crate) struct Counted(Arc<watch::Sender<u64>>);

impl Gauge {
    pub(crate) fn get(&self) -> u64 {
        *self.0.borrow()
    }

    pub(crate) fn count(&self) -> Counted {
        self.0.send_modify(|count| *count += 1);
        Counted(Arc::clone(&self.0))
    }

    /// Waits until the count is zero. Cancel safe.
    pub(crate) async fn wait_for_zero(&self) {
        // The sender is borrowed, so it cannot be gone.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_gauge_counts_live_units() {
        let gauge = Gauge::default();
        let (first, second) = (gauge.count(), gauge.count());
        assert_eq!(gauge.get(), 2);
        drop((first, second));
        gauge.wait_for_zero().await;
        assert_eq!(gauge.get(), 0);
    }
}
