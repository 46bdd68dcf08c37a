//! A connection to the server: its control stream, its lanes, and the tasks that receive their data. It
//! yields events; a session outlives it.

mod lane_task;
mod lanes;
mod plan;

pub(crate) use lanes::{LaneRegistry, Path, Received};

use crate::{
    ClientError, Config, base,
    error::SessionError,
    gpu_memory::GpuMemory,
    progress::{Counters, Giver},
    server_memory::{self, NotCopied},
    source_progress::ChunkProgress,
};
use futures_util::FutureExt;
use lanes::LaneSet;
use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};
use tensor_relay_device::{Device, Sink, VolatileBytes};
use tensor_relay_protocol::{
    ChunkHeader, ClientMessage, CloseCode, Dtype, EncodingHash, Epoch, FeatureSet, Hello, InstanceId,
    LaneGrant, LaneId, Limits, Manifest, ManifestHeader, PROTOCOL_REVISIONS, ProbeHeader, ProtocolViolation,
    Selection, ServerMessage, StreamHeader, StreamToken, SubscriptionId, Token, Verified, Version, Welcome,
};
use tensor_relay_transport::{
    Connector, DataIn, Fingerprint, HeaderError, Lane, LaneError, LaneKind, LaneKindReason, ProbeResult,
    Progress, Tally, Way, Workers, control,
    control::ControlError,
    forwarding::Forwarded,
    ingress::{Gathered, Ingress, ReceiveError, ReceiveManifestError, receive_manifest},
    receive_probe,
};
use tokio::{
    task::{AbortHandle, JoinError, JoinSet},
    time::Instant,
};

/// The deadline for decoding completely received chunks after the connection is lost.
const DECODE_TIMEOUT: Duration = Duration::from_secs(1);

/// The maximum encoded length of a chunk of lane 0 that is received in the session's task, if all of it has arrived. More
/// work would delay the session's other events; [`Workers`] have the same limit.
const SMALL_CHUNK_BYTES: u32 = 64 << 10;

/// A connection whose `Hello` was answered.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The lane of the control stream. The connection ends with it.
    control: Lane,
    sender: control::Sender<ClientMessage>,
    receiver: control::Receiver<ServerMessage>,
    lanes: LaneSet,
    instance: InstanceId,
    /// The server's name and version, and the features that it offers.
    server: (String, FeatureSet),
    /// The session's number, and its grant of lanes.
    session: (u64, Option<LaneGrant>),
    began: Instant,
    workers: Workers,
    /// The events of chunks received in place, which [`next`](Self::next) returns first.
    received: VecDeque<Event>,
    tasks: JoinSet<Event>,
}

/// An event of a connection.
#[derive(Debug)]
pub(crate) enum Event {
    /// A control message was received.
    Message(ServerMessage),
    /// A data stream was opened on a lane, and its header was read.
    Opened(LaneId, StreamHeader, DataIn),
    /// A data stream has an unreadable header.
    Unreadable(HeaderError),
    /// A manifest was received, or failed.
    Manifest(SubscriptionId, Result<Manifest, ReceiveManifestError>),
    /// A chunk of this subscription of the user was received, from whichever source, or failed.
    Chunk(SubscriptionId, StreamToken, Result<Verified, ReceiveError>),
    /// The lent memory of a version of this subscription was copied to its places, or that failed.
    Copied(SubscriptionId, (Epoch, Version), Result<(), NotCopied>),
    /// A probe was received, or failed.
    Probe(Result<ProbeResult, LaneError>),
    /// A lane joined the session.
    Joined,
    /// A lane ended that may have sent `Join`. Even without an answer, the server may have started chunks on it.
    Ended(LaneId),
    /// A data stream ended before its header, or a task was aborted.
    Nothing,
}

/// The destination of one chunk.
#[derive(Debug)]
pub(crate) struct ChunkTarget {
    pub(crate) sink: Arc<dyn Sink>,
    pub(crate) range: Range<u64>,
    pub(crate) dtype: Dtype,
    /// The base's chunk, if a delta may need it or it becomes a chunk of the new base.
    pub(crate) base: Option<base::Chunk>,
    /// The counters of the version, by codec.
    pub(crate) tally: Arc<Tally>,
    /// From whom the chunk comes.
    pub(crate) giver: Giver,
    /// The progress of the version.
    pub(crate) counters: Arc<Counters>,
    /// The progress of the chunk.
    pub(crate) progress: Arc<ChunkProgress>,
    /// The encoding that the origin named, if nothing else may be decoded.
    pub(crate) encoding: Option<EncodingHash>,
    /// The version, if it is offered to others.
    pub(crate) forwarded: Option<Weak<dyn Forwarded>>,
}

/// The reason sent to the server when the client closes a connection.
#[derive(Debug)]
pub(crate) struct CloseReason {
    pub(crate) code: CloseCode,
    pub(crate) text: String,
    pub(crate) by_user: bool,
}

/// The server to connect to: its addresses and keys, the client's token, and the connector.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) connector: Connector,
    pub(crate) hosts: Vec<String>,
    pub(crate) keys: Vec<Fingerprint>,
    /// The ticket's token.
    pub(crate) token: Option<Token>,
    /// The lanes of the current connection.
    pub(crate) registry: Arc<LaneRegistry>,
}

impl Target {
    /// The same server over `way`, if that is given.
    pub(crate) fn over(&self, way: Option<Way>) -> Self {
        let connector = || self.connector.clone();
        Self { connector: way.map_or_else(connector, |way| connector().with_way(way)), ..self.clone() }
    }
}

impl Connection {
    /// Connects, sends `Hello`, and waits for `Welcome`, which admits the client.
    pub(crate) async fn open(target: &Target, config: &Config) -> Result<(Self, Welcome), ClientError> {
        let lane = target.connector.connect(&target.hosts, &target.keys).await?;
        let handshake = Handshake::new(lane, target, config).await?;
        let welcome = handshake.welcome.clone();
        Ok((Self::begin(handshake, target, config), welcome))
    }

    /// Begins with a lane whose `Hello` was answered.
    pub(crate) fn begin(handshake: Handshake, target: &Target, config: &Config) -> Self {
        let Handshake { lane: control, sender, receiver, welcome } = handshake;
        log_connected(&control);
        let lanes = LaneSet::begin(target, config, &welcome, &control);
        Self {
            control,
            sender,
            receiver,
            lanes,
            instance: welcome.instance,
            server: (welcome.agent, welcome.features),
            session: (welcome.session, welcome.lanes.map(|lanes| lanes.grant)),
            began: Instant::now(),
            workers: config.workers,
            received: VecDeque::new(),
            tasks: JoinSet::new(),
        }
    }

    /// The path of this connection, to decide on the session's transport.
    pub(crate) fn path(&self) -> Path {
        self.lanes.path(self.control.peer().address(), self.instance, self.workers)
    }

    /// The server process.
    pub(crate) fn instance(&self) -> InstanceId {
        self.instance
    }

    /// The lane of the control stream.
    pub(crate) fn control(&self) -> &Lane {
        &self.control
    }

    /// The server's name and version, and the features that it offers.
    pub(crate) fn server(&self) -> (&str, FeatureSet) {
        (&self.server.0, self.server.1)
    }

    /// The session's number, and its grant of lanes, if it has one.
    pub(crate) fn session(&self) -> (u64, Option<LaneGrant>) {
        self.session
    }

    pub(crate) fn lanes(&mut self) -> &mut LaneSet {
        &mut self.lanes
    }

    /// The time since it was opened.
    pub(crate) fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// The counters of the bytes that were received on it.
    pub(crate) fn received(&self) -> Arc<Received> {
        self.lanes.received()
    }

    pub(crate) async fn send(&mut self, message: ClientMessage) -> Result<(), LaneError> {
        self.sender.send(message).await
    }

    /// The next event. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<Event, SessionError> {
        if let Some(event) = self.received.pop_front() {
            return Ok(event);
        }
        tokio::select! {
            message = self.receiver.next() => Ok(Event::Message(message?)),
            event = self.lanes.next() => Ok(event),
            Some(event) = self.tasks.join_next() => Ok(event.unwrap_or_else(aborted)),
        }
    }

    /// Starts to receive a manifest.
    pub(crate) fn receive_manifest(
        &mut self,
        header: ManifestHeader,
        stream: DataIn,
        limits: Limits,
        counters: Arc<Counters>,
    ) {
        self.tasks.spawn(async move {
            let progress = |bytes| counters.add_received(bytes);
            let manifest = receive_manifest(stream, &header, &limits, &progress).await;
            Event::Manifest(header.subscription, manifest)
        });
    }

    /// Starts to receive a probe.
    pub(crate) fn receive_probe(&mut self, stream: DataIn, header: ProbeHeader) {
        self.tasks
            .spawn(async move { Event::Probe(receive_probe(stream, header).await) });
    }

    /// Starts to receive a chunk in a task on the thread of its lane, and returns the task's handle; `None` if the chunk
    /// is small, has arrived, and was received in place. Its event names the user's subscription `id`. A task that is aborted before all bytes are received writes
    /// nothing more; if it is aborted later, a worker may still write until the chunk is decoded.
    pub(crate) fn receive_chunk(
        &mut self,
        (id, token): (SubscriptionId, StreamToken),
        header: ChunkHeader,
        stream: DataIn,
        target: ChunkTarget,
        ingress: &Ingress,
    ) -> Option<AbortHandle> {
        let ingress = ingress.clone().with_tally(&target.tally);
        let (lane, received) = (stream.lane().clone(), self.lanes.received());
        let alive = lane.clone(); // Keeps the lane's thread, which ends with the last clone of the lane.
        // Boxed: spawning moves a future several times, and this one is kilobytes large.
        let mut receive = Box::pin(async move {
            let (counters, giver) = (Arc::clone(&target.counters), target.giver);
            let of_chunk = Arc::clone(&target.progress);
            let (raw_bytes, encoded_bytes) =
                (header.raw_bytes.into(), u64::from(header.encoded_bytes.max(1)));
            let arrived = Arc::clone(&received);
            let progress: Progress = Arc::new(move |bytes: u64| {
                counters.add_wire(giver, bytes);
                of_chunk.add(bytes);
                arrived
                    .arrived_bytes
                    .fetch_add(bytes * raw_bytes / encoded_bytes, Ordering::Relaxed);
            });
            let range = target.range.clone();
            let gathered =
                ingress.gather_chunk(stream, &header, range, &*target.sink, &progress, target.encoding);
            let outcome = match gathered.await {
                Ok(gathered) => finish_chunk(&ingress, gathered, &header, &target).await,
                Err(error) => Err(error),
            };
            if outcome.is_ok() {
                received.verified_bytes.fetch_add(raw_bytes, Ordering::Relaxed);
            }
            drop(alive);
            Event::Chunk(id, token, outcome)
        });
        if lane.number() == 0
            && header.encoded_bytes <= SMALL_CHUNK_BYTES
            && let Some(event) = receive.as_mut().now_or_never()
        {
            self.received.push_back(event);
            return None;
        }
        Some(lane.spawn_in(&mut self.tasks, receive))
    }

    /// Starts to copy lent memory to the places of a version, in a task; returns the task's handle. Its event names the
    /// user's subscription and the version.
    pub(crate) fn copy_server_memory(
        &mut self,
        (id, version): (SubscriptionId, (Epoch, Version)),
        bytes: VolatileBytes,
        selection: Arc<Selection>,
        sink: Arc<dyn Sink>,
        counters: Arc<Counters>,
    ) -> AbortHandle {
        let workers = self.workers;
        self.tasks.spawn(async move {
            let copied = server_memory::copy(bytes, &selection, &*sink, workers, &counters).await;
            Event::Copied(id, version, copied.map_err(NotCopied::Sink))
        })
    }

    /// Like [`copy_server_memory`](Self::copy_server_memory), within `device`.
    pub(crate) fn copy_gpu_memory(
        &mut self,
        (id, version): (SubscriptionId, (Epoch, Version)),
        (memory, device): (GpuMemory, Device),
        selection: Arc<Selection>,
        sink: Arc<dyn Sink>,
        counters: Arc<Counters>,
    ) -> AbortHandle {
        self.tasks.spawn(async move {
            let copied = memory.copy(device, &selection, &*sink).await;
            if copied.is_ok() {
                counters.add_received(selection.payload_bytes());
            }
            Event::Copied(id, version, copied)
        })
    }

    /// Closes a connection that is lost or replaced, and waits until completely received chunks are decoded, at most
    /// [`DECODE_TIMEOUT`]. Returns the events that were still pending. Afterwards, only workers that exceed this
    /// deadline may still write to a version's memory.
    pub(crate) async fn give_up(mut self, reason: CloseReason) -> Vec<Event> {
        self.lanes.close(reason.code, &reason.text);
        let mut events: Vec<_> = self.received.into();
        let finish = async {
            while let Some(event) = self.tasks.join_next().await {
                events.push(event.unwrap_or_else(aborted));
            }
        };
        let _ = tokio::time::timeout(DECODE_TIMEOUT, finish).await;
        self.tasks.shutdown().await;
        events
    }

    /// Closes the connection. Messages queued before a close by the user are sent first.
    pub(crate) async fn close(self, reason: CloseReason) {
        let Self { mut lanes, sender, receiver, .. } = self;
        drop(sender);
        if reason.by_user {
            receiver.flush().await;
        }
        lanes.close(reason.code, &reason.text);
        lanes.flush_close().await;
    }
}

/// Logs the chosen transport and the reason.
fn log_connected(lane: &Lane) {
    let (peer, transport, why) = (lane.peer(), lane.kind(), lane.reason().text());
    match lane.reason() {
        LaneKindReason::OthersFailed => {} // The failure was reported.
        LaneKindReason::UdpSilent => {
            tracing::warn!(%peer, "Connected over TCP, because UDP is not answered. On a long path QUIC would be faster: publish the server's UDP port too, and allow it in firewalls.")
        }
        _ => tracing::info!(%peer, %transport, why, "Connected."),
    }
}

/// Decodes and verifies a received chunk, and stores it in its place and in the base. The base's chunk is taken only
/// here, with all bytes received, so that only one task uses it; if it is not put back, it is lost to the base.
async fn finish_chunk(
    ingress: &Ingress,
    gathered: Gathered<'_>,
    header: &ChunkHeader,
    target: &ChunkTarget,
) -> Result<Verified, ReceiveError> {
    let taken = target.base.as_ref().and_then(|base| base.take(header.base.is_some()));
    let forwarded = target.forwarded.as_ref().and_then(Weak::upgrade);
    let finished = ingress
        .finish_chunk(gathered, target.dtype, &*target.sink, taken, forwarded)
        .await;
    let (verified, taken) = finished?;
    if let (Some(base), Some(taken)) = (&target.base, taken) {
        base.put(taken);
    }
    Ok(verified)
}

/// The event of an aborted task. A panic is propagated.
fn aborted(error: JoinError) -> Event {
    match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => Event::Nothing,
    }
}

/// A lane whose `Hello` was answered.
#[derive(Debug)]
pub(crate) struct Handshake {
    lane: Lane,
    sender: control::Sender<ClientMessage>,
    receiver: control::Receiver<ServerMessage>,
    welcome: Welcome,
}

impl Handshake {
    /// Sends `Hello` on `lane`, and waits for the answer.
    async fn new(lane: Lane, target: &Target, config: &Config) -> Result<Self, ClientError> {
        let timeout = target.connector.tuning().control_timeout();
        let (sender, receiver, welcome) =
            complete_handshake(&lane, timeout, exchange_hello(&lane, target, config, timeout)).await?;
        Ok(Self { lane, sender, receiver, welcome })
    }

    /// Opens a lane over `kind` to the server of `path`; `None` if another server answers there.
    pub(crate) async fn over(
        kind: LaneKind,
        path: &Path,
        target: &Target,
        config: &Config,
    ) -> Result<Option<Self>, ClientError> {
        let Some(peer) = path.peer else { return Ok(None) };
        let lane = target.connector.connect_over(kind, peer, &target.keys).await?;
        let handshake = Self::new(lane, target, config).await?;
        if handshake.welcome.instance != path.instance {
            handshake.lane.close(CloseCode::Done, "");
            return Ok(None);
        }
        Ok(Some(handshake))
    }

    /// The transport of the lane.
    pub(crate) fn kind(&self) -> LaneKind {
        self.lane.kind()
    }
}

type HandshakeParts = (control::Sender<ClientMessage>, control::Receiver<ServerMessage>, Welcome);

/// Waits for `handshake` on `lane`, and closes the lane if that fails.
async fn complete_handshake<T>(
    lane: &Lane,
    timeout: Duration,
    handshake: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, ClientError> {
    let outcome = tokio::time::timeout(timeout, handshake).await;
    match outcome.unwrap_or_else(|_| Err(ClientError::NoWelcome { timeout_ms: timeout.as_millis() })) {
        Ok(value) => Ok(value),
        Err(error) => {
            lane.close(error.close_code(), &error.to_string());
            lane.flush_close().await;
            Err(error)
        }
    }
}

async fn exchange_hello(
    lane: &Lane,
    target: &Target,
    config: &Config,
    timeout: Duration,
) -> Result<HandshakeParts, ClientError> {
    let (sender, mut receiver) = control::open(lane, timeout).await?;
    let hello = Hello {
        revision_min: *PROTOCOL_REVISIONS.start(),
        revision_max: *PROTOCOL_REVISIONS.end(),
        agent: config.agent.clone(),
        codecs: config.codecs,
        token: target.token.clone(),
        features: config.features(),
    };
    sender.send(ClientMessage::Hello(hello)).await?;
    let answer = first_message(&mut receiver)
        .await
        .map_err(|error| match error.is_unauthorised() {
            true => ClientError::Unauthorised {
                peer: lane.peer(),
                with_token: target.token.is_some(),
                text: error.refusal_text().to_owned(),
            },
            false => error,
        });
    match answer? {
        ServerMessage::Welcome(welcome) if PROTOCOL_REVISIONS.contains(&welcome.revision) => {
            Ok((sender, receiver, welcome))
        }
        _ => {
            let expected = "a Welcome of a known revision";
            Err(ProtocolViolation::OutOfTurn { found: "another message", expected }.into())
        }
    }
}

/// The server's answer to the first message of a connection.
async fn first_message(
    receiver: &mut control::Receiver<ServerMessage>,
) -> Result<ServerMessage, ClientError> {
    receiver.next().await.map_err(|error| match error {
        ControlError::Lane(error @ LaneError::ClosedByPeer { .. }) => ClientError::Refused(error),
        error => error.into(),
    })
}
