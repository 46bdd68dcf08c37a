//! The client: a session with a server.

use crate::{
    ClientError, Config, GetError, Request, Snapshot, StatusReader, Subscription, TopicWatch,
    command::Command,
    connection::{Connection, Target},
    other_servers::{OtherServers, PeerLinks},
    peers::{PeerReport, PeerReports},
    reconnector::{Reconnector, State},
    session::Session,
    status,
    subscription::SubscriptionLimits,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{
    Feature, Glob, InstanceId, ProbeBytes, Ticket, Topic, TopicEntry, WATCHES_MAX, Welcome,
};
use tensor_relay_transport::{
    Connector, Fingerprint, LaneError, LaneKind, LaneKindReason, LaneStats, Peer, ProbeResult, StageStats,
    Tuning,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
};

/// The deadline of a probe: somewhat longer than the server's.
const PROBE_TIMEOUT: Duration = Duration::from_secs(12);

/// A session with one server. Dropping it ends its subscriptions and the connection.
///
/// When the connection is lost, another one is made, with growing waits, for [`Config::reconnect_timeout`].
/// Subscriptions resume: only the missing chunks of a version in transfer are sent.
#[derive(Debug)]
pub struct Client {
    server: Welcome,
    state: Arc<State>,
    /// Unbounded, because a destructor must be able to unsubscribe. It stays short: each call sends one command, which
    /// is handled promptly.
    commands: mpsc::UnboundedSender<Command>,
    reconnector: JoinHandle<()>,
    answer_timeout: Duration,
    /// The timeouts and limits of its subscriptions.
    limits: SubscriptionLimits,
}

/// The host memory used by a client's versions. Not included are the buffers of transfers: up to twice the credit
/// of each subscription, for bytes received by QUIC and for encoded chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryStats {
    /// Snapshots that are being received, are ready, or are held by their user.
    pub snapshot_bytes: u64,
    /// Memory of dropped snapshots, kept for later ones while there are subscriptions and for two seconds after.
    pub reusable_bytes: u64,
    /// Copies of versions, to which deltas are applied.
    pub base_bytes: u64,
}

impl Client {
    /// Connects to the server that `ticket` names, over this machine's network with the default tuning.
    ///
    /// # Errors
    /// [`ClientError`], which distinguishes no answer, the wrong server and a refusal.
    pub async fn connect(ticket: &Ticket, config: Config) -> Result<Self, ClientError> {
        Self::connect_with(&Connector::new(Tuning::default()), ticket, config).await
    }

    /// Connects as [`connect`](Self::connect) does, and waits for the server's answer for `timeout`.
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect).
    pub async fn connect_within(
        timeout: Duration,
        ticket: &Ticket,
        config: Config,
    ) -> Result<Self, ClientError> {
        let connect_timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        let connector = Connector::new(Tuning { connect_timeout_ms, ..Tuning::default() });
        Self::connect_with(&connector, ticket, config).await
    }

    /// Connects through `connector`. A failed first connection is not retried; a lost connection is replaced.
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect).
    pub async fn connect_with(
        connector: &Connector,
        ticket: &Ticket,
        config: Config,
    ) -> Result<Self, ClientError> {
        let config = config.clamped();
        let bare = connector
            .clone()
            .with_local_addresses(&config.lane_addresses)
            .with_transport(config.transport);
        let connector = match &config.identity {
            Some(identity) => bare.clone().with_identity(Arc::clone(identity)),
            None => bare.clone(),
        };
        let target_of = |ticket: &Ticket| Target {
            connector: connector.clone().with_server_uid(ticket.server_uid()),
            hosts: ticket.addresses().to_vec(),
            keys: ticket.keys().iter().copied().map(Fingerprint).collect(),
            token: ticket.token().cloned(),
            registry: Arc::default(),
        };
        let target = target_of(ticket);
        let others: Vec<Target> = config.sources.iter().map(target_of).collect();
        let registries = std::iter::once(&target)
            .chain(&others)
            .map(|target| Arc::clone(&target.registry))
            .collect();
        #[expect(
            clippy::disallowed_methods,
            reason = "a handle's drop cannot wait; each command is a call or a drop of this process, which the session \
                      handles with or without a connection"
        )]
        let (commands, inbox) = mpsc::unbounded_channel();
        let session = Session::new(commands.clone(), config.clone()).map_err(ClientError::Memory)?;
        let (connection, server) = Connection::open(&target, &config).await?;
        let state = Arc::new(State {
            lane: watch::Sender::new(connection.control().clone()),
            registries,
            peers: PeerReports::default(),
            ingress: session.ingress().clone(),
            memory: session.memory().clone(),
            bases: session.bases().cloned(),
            instance: Lock::new(server.instance),
            reconnects: AtomicU64::new(0),
            lost: watch::Sender::new(None),
            ended: watch::Sender::new(None),
        });
        let answer_timeout = connector.tuning().control_timeout();
        let peers = config.sharing.as_ref().map(|sharing| {
            let mut connector = bare.with_identity(Arc::clone(&sharing.identity));
            if connection.control().kind() == LaneKind::Tcp {
                connector = connector.expecting_tcp();
            }
            PeerLinks::new(connector, sharing.identity.fingerprint(), &config, state.peers.clone())
        });
        let others = OtherServers::new(others, config.clone(), peers);
        let reconnector = Reconnector { target, others, session, commands: inbox, state: Arc::clone(&state) };
        let reconnector = tokio::spawn(reconnector.run(connection));
        let limits = SubscriptionLimits {
            topic_timeout: config.topic_timeout,
            held_max: config.versions_held_max,
            hold_timeout: config.hold_timeout,
        };
        Ok(Self { server, state, commands, reconnector, answer_timeout, limits })
    }

    /// The server's `Welcome`.
    pub fn server(&self) -> &Welcome {
        &self.server
    }

    /// Subscribes to the newest versions of `topic`, which need not exist yet.
    ///
    /// # Errors
    /// Those of [`subscribe_to`](Self::subscribe_to).
    pub async fn subscribe(&self, topic: &Topic) -> Result<Subscription, ClientError> {
        self.subscribe_to(Request::latest(topic.clone())).await
    }

    /// Subscribes according to `request`. Its topic need not exist yet.
    ///
    /// # Errors
    /// [`ClientError`] when the session has ended, the selection is too large for a message, or a request in mode
    /// `latest` starts at another version than the newest or the next. Later errors are returned by
    /// [`next`](Subscription::next).
    pub async fn subscribe_to(&self, request: Request) -> Result<Subscription, ClientError> {
        request.check()?;
        let (reply, answer) = oneshot::channel();
        self.command(Command::Subscribe(Box::new(request.clone()), reply))?;
        let opened = answer.await.map_err(|_| self.ended_error())?;
        Ok(Subscription::new(request, opened, self.limits))
    }

    /// Receives one version, usually by a request for the [newest](Request::newest) one or
    /// [exactly](Request::exactly) one. Also over several connections; what was verified is not sent again.
    ///
    /// ```no_run
    /// # async fn example(client: tensor_relay_client::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// use tensor_relay_client::{Request, Topic, Version};
    ///
    /// let topic = Topic::new("policy")?;
    /// let described = client.get(Request::newest(topic.clone()).describe()).await?; // No tensor is sent.
    /// let id = described.id();
    /// let snapshot = client.get(Request::exactly(topic, Some(id.epoch), id.version)).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`subscribe_to`](Self::subscribe_to) and [`Subscription::next`], whose waits are these too.
    pub async fn get(&self, request: Request) -> Result<Snapshot, GetError> {
        Ok(self.subscribe_to(request).await?.next().await?)
    }

    /// Watches for topics whose name matches `glob`, present and future.
    ///
    /// # Errors
    /// [`ClientError`] when the session has ended or has the maximum number of watches.
    pub async fn watch(&self, glob: &Glob) -> Result<TopicWatch, ClientError> {
        let (reply, answer) = oneshot::channel();
        self.command(Command::Watch(glob.clone(), reply))?;
        let watching = answer.await.map_err(|_| self.ended_error())?;
        watching
            .map(TopicWatch::new)
            .ok_or(ClientError::TooManyWatches { max: WATCHES_MAX })
    }

    /// Lists the topics that have a version, in order of name.
    ///
    /// # Errors
    /// [`ClientError`] when the session has ended or the server does not answer within the control timeout.
    pub async fn list(&self) -> Result<Vec<TopicEntry>, ClientError> {
        let (reply, answer) = oneshot::channel();
        self.command(Command::List(reply))?;
        match tokio::time::timeout(self.answer_timeout, answer).await {
            Ok(Ok(topics)) => Ok(topics),
            Ok(Err(_)) => Err(self.ended_error()),
            Err(_) => Err(self.answer_error()),
        }
    }

    /// Measures the rate of the session's first lane: the server sends `bytes` filler bytes, at most
    /// [`ProbeBytes::MAX`], in addition to its other traffic. `None` if the server does not support probes, answers too
    /// many already, or grants this client no topic.
    ///
    /// # Errors
    /// [`ClientError`] when there is no connection, another probe is in progress, or this one takes more than twelve
    /// seconds.
    pub async fn probe(&self, bytes: ProbeBytes) -> Result<Option<ProbeResult>, ClientError> {
        if !self.server.features.contains(Feature::Probe) {
            return Ok(None);
        }
        let (reply, answer) = oneshot::channel();
        self.command(Command::Probe(bytes, reply))?;
        match tokio::time::timeout(PROBE_TIMEOUT, answer).await {
            Ok(Ok(Ok(result))) => Ok((result.bytes == u64::from(bytes.get())).then_some(result)),
            Ok(Ok(Err(error))) => Err(error),
            Ok(Err(_)) => Err(self.ended_error()),
            Err(_) => Err(ClientError::NoAnswer { timeout_ms: PROBE_TIMEOUT.as_millis() }),
        }
    }

    /// Why the connection was lost, while reconnecting; `None` while connected.
    pub fn connection_lost(&self) -> Option<Arc<ClientError>> {
        self.state.lost.borrow().clone()
    }

    /// The session's current transport, and why it was chosen.
    pub fn transport(&self) -> (LaneKind, LaneKindReason) {
        let lane = self.state.lane.borrow();
        (lane.kind(), lane.reason())
    }

    /// The server in the current connection: its address, or its process.
    pub fn peer(&self) -> Peer {
        self.state.lane.borrow().peer()
    }

    /// The counters of the control lane of the current connection.
    pub fn lane_stats(&self) -> LaneStats {
        self.state.lane.borrow().stats()
    }

    /// The counters of each lane of the current connection, the control lane first. Ended lanes are not included.
    pub fn lanes(&self) -> Vec<LaneStats> {
        self.state.lanes()
    }

    /// A function that returns [`lanes`](Self::lanes) and may outlive the client.
    pub fn lanes_reader(&self) -> impl Fn() -> Vec<LaneStats> + Send + Sync + 'static {
        let state = Arc::clone(&self.state);
        move || state.lanes()
    }

    /// The memory of the bases of all subscriptions, cached memory included: at most [`Config::base_bytes`].
    pub fn base_bytes(&self) -> u64 {
        self.memory().base_bytes
    }

    /// The host memory used by the client's versions now.
    pub fn memory(&self) -> MemoryStats {
        status::memory(&self.state)
    }

    /// Returns a handle that reads the client's status from any thread until the client is dropped.
    pub fn status_reader(&self) -> StatusReader {
        StatusReader::new(&self.state)
    }

    /// The pipeline stages of the chunks of all subscriptions, and their overlap.
    pub fn stages(&self) -> StageStats {
        self.state.ingress.stages()
    }

    /// What became of the peers that the server named lately, and why some are not used; none without
    /// [sharing](Config::sharing).
    pub fn peers(&self) -> Vec<PeerReport> {
        self.state.peers.get()
    }

    /// The server process of the current connection, or of the last one. Another process may have other content under
    /// an epoch and number, as after a restored backup.
    pub fn instance(&self) -> InstanceId {
        *self.state.instance.lock()
    }

    /// The number of reconnections.
    pub fn reconnects(&self) -> u64 {
        self.state.reconnects.load(Ordering::Relaxed)
    }

    /// Ends the session and waits until the server is notified.
    pub async fn close(mut self) {
        let _ = self.commands.send(Command::Close);
        let _ = (&mut self.reconnector).await;
    }

    /// Whether the session has ended: only a new client can connect again.
    pub fn has_ended(&self) -> bool {
        self.state.ended.borrow().is_some()
    }

    fn command(&self, command: Command) -> Result<(), ClientError> {
        self.commands.send(command).map_err(|_| self.ended_error())
    }

    fn answer_error(&self) -> ClientError {
        let timeout_ms = self.answer_timeout.as_millis();
        match self.connection_lost() {
            Some(lost) => ClientError::NotReconnected { lost, last: None, timeout_ms },
            None => ClientError::NoAnswer { timeout_ms },
        }
    }

    /// Why a request was dropped: the session has ended or, for a probe, the connection was lost.
    fn ended_error(&self) -> ClientError {
        let ended = self.state.ended.borrow().clone().or_else(|| self.connection_lost());
        ended.map_or(ClientError::Lane(LaneError::ClosedLocally), ClientError::Ended)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // A command instead of an abort, so that the session closes its connection and then releases its memory.
        let _ = self.commands.send(Command::Close);
    }
}
