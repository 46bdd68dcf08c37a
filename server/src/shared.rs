//! The state shared by all sessions of a server, and its gauges.

use crate::{
    Access, Config,
    catalogue::Catalogue,
    counters::Counters,
    failures::Failures,
    forwarding::Forwarding,
    gauge::Gauge,
    handshakes::Handshakes,
    joinable::{Joinable, LaneHolder},
    logins::Logins,
    refusals::Refusals,
    shares::{Eviction, Place, Shares},
    staged::Staging,
    subscribers::Subscribers,
    takers::Takers,
    traffic::Traffic,
};
use std::sync::Arc;
use tensor_relay_device::{AllocError, Lock, Reservation};
use tensor_relay_protocol::InstanceId;
use tensor_relay_transport::{
    ChunkTimes, InUse, LaneKind, LaneThreads, Tally,
    egress::{Egress, Encoder},
    sending::EffortMeters,
};
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
    pub(crate) egress: Arc<Egress>,
    pub(crate) counters: Arc<Counters>,
    /// The choice of encoding efforts, for each client address and kind of lane.
    pub(crate) effort_meters: EffortMeters,
    pub(crate) traffic: Traffic,
    /// The open subscriptions, for status.
    pub(crate) subscribers: Arc<Subscribers>,
    pub(crate) failures: Arc<Failures>,
    /// The versions that clients of this host map.
    pub(crate) takers: Arc<Takers>,
    /// What members of this process receive, for their peers.
    pub(crate) forwarding: Arc<Forwarding>,
    /// Sessions that are open.
    pub(crate) sessions: Gauge,
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
    /// Sessions, by which memory is shared where it is less than the places need.
    pub(crate) connections: Shares<Arc<str>>,
    /// The connections that joined a session as lanes. Their memory is given back where a session needs it.
    pub(crate) lanes: Shares<LaneHolder>,
    pub(crate) subscriptions: Shares<Arc<str>>,
    pub(crate) probes: Shares<Arc<str>>,
}

impl PlacesForPrincipals {
    fn new(config: &Config) -> Self {
        let shares = |max: u64| Shares::new(usize::try_from(max).unwrap_or(usize::MAX));
        Self {
            sessions: Shares::new(config.sessions_max),
            connections: Shares::new(usize::MAX),
            lanes: Shares::new(usize::try_from(config.lanes_total_max()).unwrap_or(usize::MAX)),
            subscriptions: shares(config.subscriptions_total_max()),
            probes: shares(PROBES_MAX),
        }
    }

    /// Reserves memory for a session of `holder`, if necessary that of further lanes, and then of another principal with
    /// more sessions.
    ///
    /// # Errors
    /// [`AllocError`] if there is none.
    pub(crate) async fn reserve(
        &self,
        holder: Arc<str>,
        kind: LaneKind,
    ) -> Result<(ConnectionMemory, Eviction), AllocError> {
        let fitting = || Reservation::fitting(kind.memory_bytes_max());
        let given = Lock::new(self.lanes.give_way(fitting).await.ok());
        let reserve = || given.lock().take().map_or_else(fitting, Ok);
        let (memory, place, eviction) = self.connections.enter_reserving(holder, reserve).await?;
        Ok((ConnectionMemory { _memory: memory, _place: place }, eviction))
    }
}

/// The memory of a session's first connection, until this is dropped.
#[derive(Debug)]
pub(crate) struct ConnectionMemory {
    _memory: Reservation,
    _place: Place<Arc<str>>,
}

impl Shared {
    pub(crate) fn new(
        config: Config,
        access: Access,
        catalogue: Arc<Catalogue>,
        encoder: Encoder,
        staging: &Staging,
    ) -> Self {
        let egress = Egress {
            encoder,
            chunks_in_flight: config.chunks_in_flight,
            stall_timeout: config.stall_timeout,
            copies: InUse::default(),
            copies_max_bytes: config.encoded_bytes,
            tally: Tally::default(),
            chunk_times: ChunkTimes::default(),
            transfers: InUse::default(),
        };
        Self {
            lane_threads: LaneThreads::new(config.lane_threads),
            handshakes: Handshakes::default(),
            logins: Logins::new(config.logins_max),
            effort_meters: EffortMeters::new(config.workers),
            joinable: Arc::default(),
            places: PlacesForPrincipals::new(&config),
            egress: Arc::new(egress),
            counters: Arc::default(),
            instance: InstanceId(rand::random()),
            takers: Arc::new(Takers::new(staging, config.share_gpu)),
            config,
            access,
            catalogue,
            traffic: Traffic::default(),
            subscribers: Arc::default(),
            failures: Arc::default(),
            forwarding: Arc::default(),
            sessions: Gauge::default(),
            unfinished: Gauge::default(),
            refusals: Refusals::default(),
            draining: watch::Sender::new(false),
            ending: watch::Sender::new(false),
        }
    }
}
