//! Keeps a session alive: when its connection is lost, makes another one and lets the session go on.

use crate::{
    ClientError,
    backoff::Backoff,
    command::Command,
    connection::{Connection, LaneRegistry, Target},
    error::SessionError,
    session::Session,
};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use tensor_relay_device::HostMemory;
use tensor_relay_transport::{Lane, LaneStats, ingress::Ingress};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

/// The state that a reconnector shows to the client's handles.
#[derive(Debug)]
pub(crate) struct State {
    /// The connection of now, or the last one.
    pub(crate) lane: watch::Sender<Lane>,
    /// The further lanes of that connection.
    pub(crate) roster: Arc<LaneRegistry>,
    /// The ingress of all chunks.
    pub(crate) ingress: Ingress,
    /// Where snapshots on the host lie.
    pub(crate) memory: HostMemory,
    /// Where the bases of all subscriptions lie, if there are to be any.
    pub(crate) bases: Option<HostMemory>,
    /// How often a connection was made again.
    pub(crate) reconnects: AtomicU64,
    /// Why there is no connection now, while another one is being made.
    pub(crate) lost: watch::Sender<Option<Arc<ClientError>>>,
    /// Why there will be none any more.
    pub(crate) ended: watch::Sender<Option<Arc<ClientError>>>,
}

impl State {
    /// What each lane of now has done so far, the first one first.
    pub(crate) fn lanes(&self) -> Vec<LaneStats> {
        self.roster.lanes().iter().map(|lane| lane.stats()).collect()
    }
}

/// Keeps a session connected: makes a connection anew whenever one is lost.
#[derive(Debug)]
pub(crate) struct Reconnector {
    pub(crate) target: Target,
    pub(crate) session: Session,
    pub(crate) commands: mpsc::UnboundedReceiver<Command>,
    pub(crate) state: Arc<State>,
}

impl Reconnector {
    /// Runs the session on `connection`, and on those that follow it, until the user closes it or no connection can be made.
    #[tracing::instrument(name = "session", skip_all, fields(peer = %connection.control().peer()))]
    pub(crate) async fn run(mut self, mut connection: Connection) {
        let error = loop {
            let lost = self.session.run(&mut connection, &mut self.commands).await;
            if !lost.is_worth_a_retry() || self.session.config().reconnect_timeout.is_zero() {
                self.end(lost, Some(connection)).await;
                return;
            }
            match self.session.is_waited_for() {
                true => tracing::warn!(error = %lost, "The connection was lost; making another one."),
                // As at the end of a program that has all it wanted, when its server is faster.
                false => {
                    tracing::debug!(error = %lost, "The connection was lost while nobody waits; making another one.")
                }
            }
            let last_word = lost.last_word();
            let lost = Arc::new(ClientError::from(lost));
            self.state.lost.send_replace(Some(Arc::clone(&lost)));
            self.session.detach(connection.give_up(last_word).await);
            match self.reconnect(lost).await {
                Ok(next) => connection = next,
                Err(error) => break error,
            }
            self.state.lost.send_replace(None);
            self.state.reconnects.fetch_add(1, Ordering::Relaxed);
            self.state.lane.send_replace(connection.control().clone());
            tracing::warn!(peer = %connection.control().peer(), "Connected again; what is missing follows.");
        };
        self.end(error, None).await;
    }

    /// Tries, with growing waits, until a connection is made, the time is over, or trying is no use.
    async fn reconnect(&mut self, lost: Arc<ClientError>) -> Result<Connection, SessionError> {
        let config = self.session.config().clone();
        let timeout_ms = config.reconnect_timeout.as_millis();
        let deadline = Instant::now() + config.reconnect_timeout;
        let target = self.target.clone();
        let attempts = async {
            let mut backoff = Backoff::new();
            loop {
                tokio::time::sleep(backoff.next(rand::random())).await;
                match Connection::open(&target, &config).await {
                    Ok((connection, _)) => return Ok(connection),
                    Err(error) if error.is_worth_a_retry() => {
                        tracing::debug!(%error, "Not connected yet.");
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        tokio::pin!(attempts);
        loop {
            tokio::select! {
                command = self.commands.recv() => {
                    self.session.handle_command_unconnected(command.unwrap_or(Command::Close))?;
                }
                attempt = tokio::time::timeout_at(deadline, &mut attempts) => return match attempt {
                    Ok(Ok(connection)) => Ok(connection),
                    Ok(Err(error)) => Err(error.into()),
                    Err(_) => Err(ClientError::NotReconnected { lost, timeout_ms }.into()),
                },
            }
        }
    }

    /// Tells every subscription, the server and the user.
    async fn end(self, error: SessionError, connection: Option<Connection>) {
        let last_word = error.last_word();
        let told = Arc::new(ClientError::from(error));
        tracing::debug!(error = %told, "The session ended.");
        // Before the session drops what it was asked: whoever asked looks here for the reason.
        self.state.ended.send_replace(Some(Arc::clone(&told)));
        self.session.end(&told);
        drop(self.session);
        if let Some(connection) = connection {
            connection.close(last_word).await;
        }
    }
}
