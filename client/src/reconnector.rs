//! The reconnector: opens a new connection for the session after a loss, or to try another transport.

use crate::{
    ClientError, Config,
    command::Command,
    connection::{CloseReason, Connection, Handshake, LaneRegistry, Path, Target},
    error::SessionError,
    other_servers::{LinkEvent, Links, OtherServers},
    peers::PeerReports,
    recovery::{LostConnection, Recovery},
    session::Session,
    transport_trial::TransportTrial,
};
use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tensor_relay_device::{HostMemory, Lock};
use tensor_relay_protocol::{CloseCode, InstanceId};
use tensor_relay_transport::{Lane, LaneKind, LaneStats, Transport, Way, ingress::Ingress};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

/// The state that the client's handles read.
#[derive(Debug)]
pub(crate) struct State {
    /// The control lane of the current connection, or of the last one.
    pub(crate) lane: watch::Sender<Lane>,
    /// The lanes of the connection to each server, the first origin's first.
    pub(crate) registries: Vec<Arc<LaneRegistry>>,
    /// What became of the peers that were named.
    pub(crate) peers: PeerReports,
    /// The ingress of all chunks.
    pub(crate) ingress: Ingress,
    /// The memory of host snapshots.
    pub(crate) memory: HostMemory,
    /// The memory of all bases, if any are kept.
    pub(crate) bases: Option<HostMemory>,
    /// The server process of the current connection, or of the last one.
    pub(crate) instance: Lock<InstanceId>,
    /// The number of reconnections.
    pub(crate) reconnects: AtomicU64,
    /// Why the connection was lost, while reconnecting.
    pub(crate) lost: watch::Sender<Option<Arc<ClientError>>>,
    /// Why the session ended.
    pub(crate) ended: watch::Sender<Option<Arc<ClientError>>>,
}

impl State {
    /// The counters of each current lane, those of one server after those of another, each control lane first.
    pub(crate) fn lanes(&self) -> Vec<LaneStats> {
        let lanes = self.registries.iter().flat_map(|registry| registry.lanes());
        lanes.map(|lane| lane.stats()).collect()
    }
}

/// Keeps a session connected: replaces each lost connection.
#[derive(Debug)]
pub(crate) struct Reconnector {
    pub(crate) target: Target,
    /// The other servers with the same content.
    pub(crate) others: OtherServers,
    pub(crate) session: Session,
    pub(crate) commands: mpsc::UnboundedReceiver<Command>,
    pub(crate) state: Arc<State>,
}

impl Reconnector {
    /// Runs the session on `connection` and its successors, until the user closes it or reconnecting fails.
    #[tracing::instrument(name = "session", skip_all, fields(peer = %connection.control().peer()))]
    pub(crate) async fn run(mut self, mut connection: Connection) {
        let config = self.session.config().clone();
        let transport = self.target.connector.transport();
        let mut trial =
            (transport == Transport::Auto).then(|| TransportTrial::new(connection.control().kind()));
        let idle_timeout = self.target.connector.tuning().idle_timeout();
        let mut recovery = Recovery::new(transport, idle_timeout, config.reconnect_timeout);
        let error = loop {
            let (path, kind) = (connection.path(), connection.control().kind());
            let usable_trial = trial.as_mut().filter(|_| recovery.way().is_none() && kind != LaneKind::Unix);
            let mut links = Links { origin: Some(&mut connection), others: &mut self.others };
            let lost = tokio::select! {
                lost = self.session.run(&mut links, &mut self.commands) => lost,
                handshake = next_transport(usable_trial, path, kind, &self.target, &config) => {
                    let text = format!("the session continues over {}", handshake.kind());
                    let close_reason = CloseReason { code: CloseCode::Done, text, by_user: false };
                    self.session.detach(connection.give_up(close_reason).await, &mut self.others);
                    connection = Connection::begin(handshake, &self.target, &config);
                    self.state.lane.send_replace(connection.control().clone());
                    continue;
                }
            };
            let may_reconnect = lost.is_retryable() && !config.reconnect_timeout.is_zero();
            let may_change = !matches!(lost, SessionError::ClosedLocally) && !self.others.usable().is_empty();
            if !may_reconnect && !may_change {
                self.end(lost, Some(connection)).await;
                return;
            }
            match self.session.needs_connection() {
                true => tracing::warn!(error = %lost, "The connection was lost; reconnecting."),
                // No warning: often the program is ending and its server closes first.
                false => {
                    tracing::debug!(error = %lost, "The connection was lost while nothing needs it; reconnecting.")
                }
            }
            let (close_reason, is_by_path) = (lost.close_reason(), lost.is_by_path());
            let lost = Arc::new(ClientError::from(lost));
            self.state.lost.send_replace(Some(Arc::clone(&lost)));
            let (age, was_receiving) = (connection.age(), self.session.is_receiving());
            let received = connection.received();
            self.session.detach(connection.give_up(close_reason).await, &mut self.others);
            let has_verified = received.verified_bytes.load(Ordering::Relaxed) > 0;
            let lost_connection = LostConnection { kind, age, has_verified, was_receiving, is_by_path };
            if let Some(failed) = recovery.handle_lost(Instant::now(), lost_connection) {
                warn_of_failed_way(failed, recovery.way());
            }
            if let Some(connections) = recovery.fruitless(Instant::now()) {
                break ClientError::NoProgress { lost, connections }.into();
            }
            if let Some(promoted) = self.others.promote(&self.target, &self.session.sending()) {
                (connection, self.target) = self.session.handle_promoted(promoted);
                self.handle_connected(
                    &connection,
                    "Another server with the same content takes its place; transfers continue.",
                );
                continue;
            }
            match self.reconnect(lost, &mut recovery).await {
                Ok(next) => connection = next,
                Err(error) => break error,
            }
            if let Some(trial) = &mut trial {
                trial.handle_reconnected(connection.control().kind());
            }
            self.handle_connected(&connection, "Connected again; transfers resume.");
        };
        self.end(error, None).await;
    }

    /// Reports that `connection` replaces a lost one, and `how`.
    fn handle_connected(&self, connection: &Connection, how: &str) {
        *self.state.instance.lock() = connection.instance();
        self.state.lost.send_replace(None);
        self.state.reconnects.fetch_add(1, Ordering::Relaxed);
        self.state.lane.send_replace(connection.control().clone());
        tracing::warn!(peer = %connection.control().peer(), "{how}");
    }

    /// Tries with backoff until it is connected, the timeout has passed, or a retry is useless.
    async fn reconnect(
        &mut self,
        lost: Arc<ClientError>,
        recovery: &mut Recovery,
    ) -> Result<Connection, SessionError> {
        let config = self.session.config().clone();
        let timeout_ms = config.reconnect_timeout.as_millis();
        let deadline = Instant::now() + config.reconnect_timeout;
        let (target, last) = (self.target.clone(), Lock::new(None));
        let attempts = async {
            loop {
                tokio::time::sleep(recovery.next_wait(rand::random())).await;
                match Connection::open(&target.over(recovery.way()), &config).await {
                    Ok((connection, _)) => return Ok(connection),
                    Err(error) if error.is_retryable() => {
                        tracing::debug!(%error, "Not connected yet.");
                        recovery.handle_unreachable();
                        *last.lock() = Some(Arc::new(error));
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        tokio::pin!(attempts);
        loop {
            tokio::select! {
                event = next_of_others(&mut self.others) => {
                    let mut links = Links { origin: None, others: &mut self.others };
                    self.session.handle_link_event(event?, &mut links)?;
                    if let Some(promoted) = self.others.promote(&self.target, &self.session.sending()) {
                        let (connection, target) = self.session.handle_promoted(promoted);
                        self.target = target;
                        return Ok(connection);
                    }
                }
                command = self.commands.recv() => {
                    self.session.handle_command_unconnected(command.unwrap_or(Command::Close))?;
                }
                attempt = tokio::time::timeout_at(deadline, &mut attempts) => return match attempt {
                    Ok(Ok(connection)) => Ok(connection),
                    Ok(Err(error)) => Err(error.into()),
                    Err(_) => {
                        let last = last.lock().take();
                        Err(ClientError::NotReconnected { lost, last, timeout_ms }.into())
                    }
                },
            }
        }
    }

    /// Ends every subscription, the connection and the client's handles.
    async fn end(self, error: SessionError, connection: Option<Connection>) {
        let close_reason = error.close_reason();
        let error = Arc::new(ClientError::from(error));
        tracing::debug!(%error, "The session ended.");
        // Set before pending requests are dropped, because their callers read the reason here.
        self.state.ended.send_replace(Some(Arc::clone(&error)));
        self.session.end(&error);
        drop(self.session);
        let others = self.others.close_all();
        if let Some(connection) = connection {
            connection.close(close_reason).await;
        }
        others.await;
    }
}

/// The next event of the other servers, while the origin is lost. Cancel safe.
async fn next_of_others(others: &mut OtherServers) -> Result<LinkEvent, SessionError> {
    Links { origin: None, others }.next().await
}

/// Reports that connections over `failed` opened but carried no chunk to its end.
fn warn_of_failed_way(failed: Way, next: Option<Way>) {
    let Some(next) = next else {
        tracing::warn!(
            "Connections over {failed} open, but carry no chunk to its end. All ways to the server were tried."
        );
        return;
    };
    tracing::warn!(
        "Connections over {failed} open, but carry no chunk to its end: the path may lose large packets without a notice, \
         or end its connections. Next: {next}. `tensor-relay doctor TICKET` measures both transports."
    );
}

/// Resolves with a lane over another transport, once `trial` wants that transport and it reaches the same server.
async fn next_transport(
    trial: Option<&mut TransportTrial>,
    mut path: Path,
    current: LaneKind,
    target: &Target,
    config: &Config,
) -> Handshake {
    let Some(trial) = trial else { return pending().await };
    trial.handle_connected(current);
    loop {
        let Some(sample) = path.sample().await else { return pending().await };
        let Some(kind) = trial.handle_sample(Instant::now(), sample) else { continue };
        match Handshake::over(kind, &path, target, config).await {
            Ok(Some(handshake)) => return handshake,
            Ok(None) => tracing::warn!(
                "{kind} reaches another server than this session's transport, which stays in use: publish the UDP \
                 and the TCP port of one server under one address."
            ),
            Err(error) => tracing::debug!(%kind, %error, "The other transport cannot be tried."),
        }
        trial.handle_unreachable();
    }
}
