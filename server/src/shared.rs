//! The state shared by all sessions of a server, and its gauges.

use crate::{
    Access, Config, catalogue::Catalogue, chunk_times::ChunkTimes, effort::EffortMeters, failures::Failures,
    joining::Joinable, logins::Logins, refusals::Refusals, subscribers::Subscribers, traffic::Traffic,
};
use std::sync::{Arc, atomic::AtomicU64};
use tensor_relay_protocol::InstanceId;
use tensor_relay_transport::{LaneThreads, Tally, egress::Encoder};
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
    pub(crate) failures: Failures,
    /// The chunks sent, of all topics.
    pub(crate) tally: Tally,
    /// Sessions that are open.
    pub(crate) sessions: Gauge,
    /// Probes being answered, over all sessions.
    pub(crate) probes: Gauge,
    /// Transfers in progress, each of one version to one subscription.
    pub(crate) transfers: Gauge,
    /// The subscriptions of all sessions.
    pub(crate) subscriptions: Gauge,
    /// Subscriptions that a shutdown waits for: each until it has no transfer to finish.
    pub(crate) unfinished: Gauge,
    /// The unauthenticated connections.
    pub(crate) logins: Logins,
    /// Rate-limits the log of refused clients.
    pub(crate) refusals: Refusals,
    /// The connections that joined a session as lanes.
    pub(crate) joined_lanes: Gauge,
    /// The registry of sessions for joining lanes.
    pub(crate) joinable: Joinable,
    pub(crate) lane_threads: LaneThreads,
    /// Whether the server drains: only ended topics and mode `every` start transfers.
    pub(crate) draining: watch::Sender<bool>,
    /// Whether sessions must end.
    pub(crate) ending: watch::Sender<bool>,
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
            logins: Logins::new(config.logins_max),
            effort_meters: EffortMeters::new(config.workers),
            joinable: Joinable::default(),
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
            probes: Gauge::default(),
            transfers: Gauge::default(),
            subscriptions: Gauge::default(),
            unfinished: Gauge::default(),
            refusals: Refusals::default(),
            joined_lanes: Gauge::default(),
            draining: watch::Sender::new(false),
            ending: watch::Sender::new(false),
        }
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

    /// Adds one, or returns `None` at `max`.
    pub(crate) fn count_below(&self, max: u64) -> Option<Counted> {
        let has_room = self.0.send_if_modified(|count| {
            let has_room = *count < max;
            *count += u64::from(has_room);
            has_room
        });
        has_room.then(|| Counted(Arc::clone(&self.0)))
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
        let first = gauge.count_below(2).unwrap();
        let second = gauge.count();
        assert_eq!(gauge.get(), 2);
        assert!(gauge.count_below(2).is_none());
        drop((first, second));
        gauge.wait_for_zero().await;
        assert_eq!(gauge.get(), 0);
    }
}
