//! The [`Server`]: accepts clients, owns the catalogue, shuts down gracefully.

use crate::{
    Access, Config, ForwardOptions, Forwarder, Publisher, Relay, RelayOptions, Staging, StatusReader,
    TopicOptions, TopicTaken, TrafficStats,
    bases::{BaseStats, Bases},
    catalogue::Catalogue,
    failures::FailedAt,
    logins::Login,
    session,
    shared::Shared,
    shares::Eviction,
};
use std::{
    net::SocketAddr,
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tensor_relay_device::{HostMemory, Reservation};
use tensor_relay_protocol::{CloseCode, Epoch, Topic};
use tensor_relay_transport::{
    Arrival, CodecStats, Listener, StageStats,
    egress::{Encoder, EncoderStats},
    forwarding::Forward,
};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::Instant,
};

/// The deadline for sessions to end; then the same time again for sending the last packets of their lanes.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// A running server. Dropping it closes all connections immediately; [`shutdown`](Self::shutdown) ends it gracefully.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    staging: Staging,
    listener: Arc<Listener>,
    accepting: JoinHandle<()>,
    reserved: Option<Reservation>,
}

/// The counters of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerStats {
    /// Sessions that are open.
    pub sessions: u64,
    /// Transfers in progress, each of one version to one subscription.
    pub transfers: u64,
    /// Commits: one for each version and subscriber.
    pub committed: u64,
    /// Subscribers that were evicted: they accepted no byte within the deadline, or did not keep up with their
    /// publisher.
    pub evicted: u64,
    /// Bytes of staged versions: retained, in transfer, or held as bases.
    pub staged_bytes: u64,
    /// Bytes of staged versions in memory that processes of this host map.
    pub lent_bytes: u64,
    /// Bytes of memory of released staged versions, cached for the next ones while any topic has a publisher, and two
    /// seconds longer.
    pub reusable_bytes: u64,
    /// The bases that left retention.
    pub bases: BaseStats,
    /// The traffic of its lanes.
    pub traffic: TrafficStats,
    /// The chunks sent to all subscribers and the cost of encoding them, by codec. Less than the traffic of lanes: a
    /// chunk counts once it is written, without headers and retransmissions.
    pub codecs: CodecStats,
    /// The counters of the encoder.
    pub encoder: EncoderStats,
    /// The numbers of chunks read, encoded and sent, and the overlap of these stages.
    pub stages: StageStats,
}

impl Server {
    /// Starts to serve on `listener`, on the caller's tokio runtime. A current-thread runtime without other work costs
    /// least: one lane is one task, and a second thread only adds hand-overs. `access` decides who may connect;
    /// [`AccessStore::watch_changes`](crate::AccessStore::watch_changes) makes one from a state directory.
    pub fn start(listener: Listener, access: Access, config: Config) -> Self {
        let config = config.clamped();
        let bases = Arc::new(Bases::new(config.base_bytes));
        let memory = HostMemory::on_demand(config.staged_bytes);
        let staging = Staging {
            // Clients of this host share the memory of versions.
            memory: if listener.socket_path().is_some() { memory.shareable() } else { memory },
            bases: Arc::clone(&bases),
            layouts: Arc::default(),
            chunk_bytes: config.chunk_bytes,
            limits: config.limits,
            workers: config.workers,
        };
        let encoder = Encoder::new(config.encoded_bytes, config.device_cache_bytes, config.workers);
        let catalogue = Arc::new(Catalogue::new(config.reader_linger, bases));
        let shared = Arc::new(Shared::new(config, access, catalogue, encoder, &staging));
        let listener = Arc::new(listener);
        let accepting = tokio::spawn(accept(Arc::clone(&listener), Arc::clone(&shared)));
        Self { shared, staging, listener, accepting, reserved: None }
    }

    /// Holds a reservation of the container's memory until the server is dropped: see [`Config::reserve`].
    #[must_use]
    pub fn with_reservation(mut self, reserved: Option<Reservation>) -> Self {
        self.reserved = reserved;
        self
    }

    /// The local address; 0.0.0.0 with port 0 without a network.
    pub fn local_address(&self) -> SocketAddr {
        self.listener.local_address()
    }

    /// The local address on the network, if it listens there.
    pub fn network_address(&self) -> Option<SocketAddr> {
        Some(self.local_address()).filter(|address| address.port() != 0)
    }

    /// The path of the Unix socket for clients of this host, if it listens there.
    pub fn socket_path(&self) -> Option<&Path> {
        self.listener.socket_path()
    }

    /// Opens `topic` for publishing, in a new epoch.
    ///
    /// # Errors
    /// [`TopicTaken`] if it is open already.
    pub fn publisher(&self, topic: Topic) -> Result<Publisher, TopicTaken> {
        self.publisher_with(topic, None, TopicOptions::default())
    }

    /// Opens `topic` for publishing with its own `options`. With an `epoch`, uses that instead of a new one: if the
    /// content is the same after a restart, subscribers that hold it do not receive it again.
    ///
    /// # Errors
    /// [`TopicTaken`] if it is open already.
    pub fn publisher_with(
        &self,
        topic: Topic,
        epoch: Option<Epoch>,
        options: TopicOptions,
    ) -> Result<Publisher, TopicTaken> {
        let publisher = open_publisher(&self.shared, topic, epoch, options)?;
        Ok(publisher.with_staging_cache(self.staging.memory.demand()))
    }

    /// Offers the versions of `topic` that this process receives from another server, under their own ids.
    pub fn forwarder(&self, topic: Topic) -> Forwarder {
        Forwarder::new(&self.shared, topic)
    }

    /// Offers what clients of this process receive from other servers, while it arrives, to the clients of this one. Call it
    /// on a runtime, which publishes the versions.
    pub fn relay(&self, options: RelayOptions) -> Relay {
        Relay::new(&self.shared, options)
    }

    /// Offers what a client session of this process receives to its peers, while it arrives: give the result to the client.
    /// Whoever shows a grant of the session's origin takes it here, and needs no ticket of this server. The offers end when
    /// the result is dropped.
    pub fn forward(&self, options: ForwardOptions) -> Arc<dyn Forward> {
        self.shared.forwarding.join(options, self.shared.config.workers)
    }

    /// The state shared by all sessions, for publishers that do not own the server.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The [`Staging`] for versions of this server.
    pub fn staging(&self) -> Staging {
        self.staging.clone()
    }

    /// The current counters.
    pub fn stats(&self) -> ServerStats {
        stats(&self.shared, &self.staging.memory)
    }

    /// A reader of the server's status, usable from any thread until the server is dropped.
    pub fn status_reader(&self) -> StatusReader {
        StatusReader::new(&self.shared, self.staging.memory.clone(), &self.listener)
    }

    /// The sent chunks of each topic that has a version, by codec.
    pub fn sent(&self) -> Vec<(Topic, CodecStats)> {
        self.sent_reader()()
    }

    /// A function that returns [`sent`](Self::sent) whenever it is called, also after the server has ended.
    pub fn sent_reader(&self) -> impl Fn() -> Vec<(Topic, CodecStats)> + Send + Sync + use<> {
        let catalogue = Arc::clone(&self.shared.catalogue);
        move || catalogue.sent()
    }

    /// Shuts down gracefully. The server admits no new sessions and sends `Drain` to its clients. Within `grace`,
    /// transfers finish; subscribers of ended topics, and readers in mode `every`, also receive the remaining versions.
    /// Then every session is closed. Returns whether all transfers finished.
    pub async fn shutdown(mut self, grace: Duration) -> bool {
        self.shared.draining.send_replace(true);
        let finished = tokio::time::timeout(grace, self.shared.unfinished.wait_for_zero())
            .await
            .is_ok();
        self.shared.ending.send_replace(true);
        let _ = tokio::time::timeout(FLUSH_TIMEOUT, self.shared.sessions.wait_for_zero()).await;
        self.listener.close(CloseCode::ShuttingDown);
        let _ = tokio::time::timeout(FLUSH_TIMEOUT, self.listener.wait_idle()).await;
        self.accepting.abort();
        let _ = (&mut self.accepting).await; // It has the listener: the ports, and the socket's file, are free from here on.
        finished
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
        self.listener.close(CloseCode::ShuttingDown);
    }
}

/// The counters of a server that stages versions in `memory`.
pub(crate) fn stats(shared: &Shared, memory: &HostMemory) -> ServerStats {
    let (counters, staged) = (&shared.counters, memory.stats());
    ServerStats {
        sessions: shared.sessions.get(),
        transfers: shared.egress.transfers.get(),
        committed: counters.committed.load(Ordering::Relaxed),
        evicted: counters.evicted.load(Ordering::Relaxed),
        staged_bytes: staged.in_use_bytes,
        lent_bytes: shared.takers.lent_bytes(),
        reusable_bytes: staged.cached_bytes,
        bases: shared.catalogue.bases().stats(),
        traffic: shared.traffic.stats(),
        codecs: shared.egress.tally.stats(),
        encoder: shared.egress.encoder.stats(),
        stages: shared.egress.encoder.stages().stats(),
    }
}

/// Opens `topic` for publishing, as [`Server::publisher_with`] does.
pub(crate) fn open_publisher(
    shared: &Shared,
    topic: Topic,
    epoch: Option<Epoch>,
    options: TopicOptions,
) -> Result<Publisher, TopicTaken> {
    let Some(state) = shared.catalogue.open(&topic) else {
        return Err(TopicTaken { topic });
    };
    let epoch = epoch.unwrap_or_else(|| Epoch(rand::random()));
    let (catalogue, counters) = (Arc::clone(&shared.catalogue), Arc::clone(&shared.counters));
    Ok(Publisher::new(state, catalogue, counters, shared.config.workers, options, epoch))
}

/// Accepts clients until the server drains; then refuses them. Sessions end with this task.
async fn accept(listener: Arc<Listener>, shared: Arc<Shared>) {
    let mut sessions = JoinSet::new();
    while let Some(arrival) = listener.accept().await {
        while sessions.try_join_next().is_some() {}
        if *shared.draining.borrow() {
            shared.failures.note(FailedAt::Connection, "draining");
            arrival.refuse();
            continue;
        }
        let Some(begins_at) = shared.handshakes.admit(arrival.peer().ip(), Instant::now()) else {
            shared.failures.note(FailedAt::Connection, "too_many_handshakes");
            arrival.refuse();
            continue;
        };
        let place = shared.logins.enter(arrival.peer().ip());
        let timeout = listener.tuning().control_timeout();
        sessions.spawn(serve_arrival(arrival, begins_at, place, timeout, Arc::clone(&shared)));
    }
}

/// Performs the handshake when its network may begin one, with a deadline, and serves the session to its end. A failed
/// client affects no other; an unauthenticated one may be evicted to make room.
async fn serve_arrival(
    arrival: Arrival,
    begins_at: Instant,
    (login, mut eviction): (Login, Eviction),
    timeout: Duration,
    shared: Arc<Shared>,
) {
    let peer = arrival.peer();
    let served = async {
        if begins_at > Instant::now() {
            tokio::time::sleep_until(begins_at).await;
        }
        match tokio::time::timeout(timeout, arrival.accept()).await {
            Ok(Ok(lane)) => session::serve(lane, login, timeout, Arc::clone(&shared)).await,
            Ok(Err(error)) => {
                shared.failures.note(FailedAt::Connection, "handshake_failed");
                tracing::debug!(%peer, %error, "The handshake with a client failed.");
            }
            Err(_) => {
                shared.failures.note(FailedAt::Connection, "handshake_timeout");
                tracing::debug!(%peer, "A client did not finish its handshake within the deadline.");
            }
        }
    };
    tokio::select! {
        () = served => {}
        () = eviction.evicted() => {
            shared.failures.note(FailedAt::Connection, "evicted");
            tracing::debug!(%peer, "An unauthenticated client was evicted to make room for another.");
        }
    }
}
