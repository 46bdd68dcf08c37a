//! The server: accepts clients, holds the catalogue, shuts down in order.

use crate::{
    Access, Config, Publisher, Staging, StatusReader, TopicOptions, TopicTaken, TrafficStats,
    bases::{BaseStats, Bases},
    catalogue::Catalogue,
    failures::FailedAt,
    session,
    shared::Shared,
    strangers::{Eviction, Stranger},
};
use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tensor_relay_device::{HostMemory, Reservation};
use tensor_relay_protocol::{CloseCode, Epoch, Topic};
use tensor_relay_transport::{
    Arrival, CodecStats, Listener, StageStats,
    egress::{Encoder, EncoderStats},
};
use tokio::task::{JoinHandle, JoinSet};

/// How long sessions may take to end, and after that the last packets of their lanes to leave.
const FLUSH: Duration = Duration::from_secs(1);

/// A running server. Dropping it ends it at once; [`shutdown`](Self::shutdown) ends it in order.
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
    /// Versions that are being sent to one subscription each.
    pub transfers: u64,
    /// Versions that a subscriber committed.
    pub committed: u64,
    /// Subscriptions that were evicted: they took no byte within the deadline, or did not keep up with their publisher.
    pub evicted: u64,
    /// Bytes of staged versions: retained, in transfer, or kept to code later ones against.
    pub staged_bytes: u64,
    /// Bytes of staged versions that are gone, which are kept for the next ones while their topics have publishers, and two seconds
    /// longer.
    pub reusable_bytes: u64,
    /// Of versions that left retention, those that are kept to code later ones against.
    pub bases: BaseStats,
    /// What its lanes carried.
    pub traffic: TrafficStats,
    /// What was sent to all subscribers, codec by codec, and what it took to encode it. Less than what lanes carried: a
    /// chunk counts once it is written, without headers and packets sent again.
    pub codecs: CodecStats,
    /// What the encoder did.
    pub encoder: EncoderStats,
    /// How many chunks were read, encoded and sent, and what was under way meanwhile.
    pub stages: StageStats,
}

impl Server {
    /// Starts to serve on `listener`, on the tokio runtime of the caller. A current-thread runtime that does nothing
    /// else costs least: one lane is one task, and a second thread only adds hand-overs. `access` says who may come in;
    /// [`AccessStore::follow`](crate::AccessStore::follow) makes one from a state directory.
    pub fn start(listener: Listener, access: Access, config: Config) -> Self {
        let config = config.within_reason();
        let bases = Arc::new(Bases::new(config.base_bytes));
        let staging = Staging {
            memory: HostMemory::on_demand(config.staged_bytes),
            bases: Arc::clone(&bases),
            chunk_bytes: config.chunk_bytes,
            limits: config.limits,
            workers: config.workers,
        };
        let encoder = Encoder::new(config.encoded_bytes, config.device_cache_bytes, config.workers);
        let catalogue = Arc::new(Catalogue::new(config.reader_linger, bases));
        let shared = Arc::new(Shared::new(config, access, catalogue, encoder));
        let listener = Arc::new(listener);
        let accepting = tokio::spawn(accept(Arc::clone(&listener), Arc::clone(&shared)));
        Self { shared, staging, listener, accepting, reserved: None }
    }

    /// Keeps this memory of the container's limit free while the server lives: see [`Config::reserve`].
    #[must_use]
    pub fn keeping_free(mut self, reserved: Option<Reservation>) -> Self {
        self.reserved = reserved;
        self
    }

    /// The local address.
    pub fn local_address(&self) -> SocketAddr {
        self.listener.local_address()
    }

    /// Opens `topic` for publishing, in a new epoch.
    ///
    /// # Errors
    /// [`TopicTaken`] when it is open already.
    pub fn publisher(&self, topic: Topic) -> Result<Publisher, TopicTaken> {
        self.publisher_with(topic, None, TopicOptions::default())
    }

    /// Opens `topic` for publishing with its own `options`. With an `epoch`, in that one instead of a new one: for content
    /// that is the same after a restart, so that subscribers who hold it need not receive it again.
    ///
    /// # Errors
    /// [`TopicTaken`] when it is open already.
    pub fn publisher_with(
        &self,
        topic: Topic,
        epoch: Option<Epoch>,
        options: TopicOptions,
    ) -> Result<Publisher, TopicTaken> {
        let publisher = open_publisher(&self.shared, topic, epoch, options)?;
        Ok(publisher.staging_again_and_again(self.staging.memory.demand()))
    }

    /// The state shared by its sessions, for publishers that do not own the server.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The staging of versions for this server.
    pub fn staging(&self) -> Staging {
        self.staging.clone()
    }

    /// The current counters.
    pub fn stats(&self) -> ServerStats {
        stats(&self.shared, &self.staging.memory)
    }

    /// A reader of its status, for any time and thread, until the server is gone.
    pub fn status_reader(&self) -> StatusReader {
        StatusReader::new(&self.shared, self.staging.memory.clone(), self.local_address())
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

    /// Ends in order: no new sessions, and clients are told that it drains; within `grace`, transfers under way finish,
    /// subscribers of topics that ended and readers in mode `every` take what was published; then every client is told of the
    /// end, and the last packets leave. Returns whether all of them finished. Readers in mode `every` take as long as their
    /// users do.
    pub async fn shutdown(self, grace: Duration) -> bool {
        self.shared.draining.send_replace(true);
        let finished = tokio::time::timeout(grace, self.shared.unfinished.none_left()).await.is_ok();
        self.shared.ending.send_replace(true);
        let _ = tokio::time::timeout(FLUSH, self.shared.sessions.none_left()).await;
        self.listener.close(CloseCode::ShuttingDown);
        let _ = tokio::time::timeout(FLUSH, self.listener.wait_idle()).await;
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
        transfers: shared.transfers.get(),
        committed: counters.committed.load(Ordering::Relaxed),
        evicted: counters.evicted.load(Ordering::Relaxed),
        staged_bytes: staged.in_use_bytes,
        reusable_bytes: staged.cached_bytes,
        bases: shared.catalogue.bases().stats(),
        traffic: shared.traffic.stats(),
        codecs: shared.tally.stats(),
        encoder: shared.encoder.stats(),
        stages: shared.encoder.stages().stats(),
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
    Ok(Publisher::new(state, catalogue, counters, options, epoch))
}

/// Accepts clients until the server drains, and rejects them from then on. Sessions end with this task.
async fn accept(listener: Arc<Listener>, shared: Arc<Shared>) {
    let mut sessions = JoinSet::new();
    while let Some(arrival) = listener.accept().await {
        while sessions.try_join_next().is_some() {}
        if *shared.draining.borrow() {
            shared.failures.note(FailedAt::Connection, "draining");
            arrival.refuse();
            continue;
        }
        let (stranger, eviction) = shared.strangers.enter(arrival.peer().ip());
        let timeout = listener.tuning().control_timeout();
        sessions.spawn(let_in(arrival, stranger, eviction, timeout, Arc::clone(&shared)));
    }
}

/// Performs the handshake, with a deadline, and serves the session to its end. A failed client affects nobody else; an
/// unauthenticated one makes room for others.
async fn let_in(
    arrival: Arrival,
    stranger: Stranger,
    mut eviction: Eviction,
    timeout: Duration,
    shared: Arc<Shared>,
) {
    let peer = arrival.peer();
    let served = async {
        match tokio::time::timeout(timeout, arrival.accept()).await {
            Ok(Ok(lane)) => session::serve(lane, stranger, timeout, Arc::clone(&shared)).await,
            Ok(Err(error)) => {
                shared.failures.note(FailedAt::Connection, "handshake_failed");
                tracing::debug!(%peer, %error, "A client did not get through the handshake.");
            }
            Err(_) => {
                shared.failures.note(FailedAt::Connection, "handshake_timeout");
                tracing::debug!(%peer, "A client did not finish its handshake within the deadline.");
            }
        }
    };
    tokio::select! {
        () = served => {}
        () = eviction.came() => {
            shared.failures.note(FailedAt::Connection, "evicted");
            tracing::debug!(%peer, "A client that did not say who it is made room for another.");
        }
    }
}
