//! A connection to a server.

use crate::{
    ClientError, Config, Subscription,
    session::{Command, Session},
};
use std::time::Duration;
use tensor_relay_protocol::{
    ClientMessage, Hello, Misbehaved, PROTOCOL_REVISIONS, ServerMessage, Ticket, Topic, TopicEntry, Welcome,
};
use tensor_relay_transport::{
    Connector, Fingerprint, Lane, LaneError, LaneStats, Tuning, control, control::ControlError,
};
use tokio::sync::{mpsc, oneshot};

/// A session with one server. Dropping it ends its subscriptions and the connection.
#[derive(Debug)]
pub struct Client {
    server: Welcome,
    lane: Lane,
    /// Unbounded, because users must be able to unsubscribe from a drop; what is queued is bounded by what users do: a
    /// command per call, and the session takes them at once.
    commands: mpsc::UnboundedSender<Command>,
    answer_timeout: Duration,
}

impl Client {
    /// Connects to the server that `ticket` names, over this machine's network with the default tuning.
    ///
    /// # Errors
    /// [`ClientError`] says whether nobody answered, the wrong server did, or the right one refused.
    pub async fn connect(ticket: &Ticket, config: Config) -> Result<Self, ClientError> {
        Self::connect_with(&Connector::new(Tuning::default()), ticket, config).await
    }

    /// Connects through `connector`.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn connect_with(
        connector: &Connector,
        ticket: &Ticket,
        config: Config,
    ) -> Result<Self, ClientError> {
        let config = config.within_reason();
        let keys: Vec<Fingerprint> = ticket.keys().iter().copied().map(Fingerprint).collect();
        let lane = connector.connect(ticket.addresses(), &keys).await?;
        let timeout = connector.tuning().control_timeout();
        let greeting = tokio::time::timeout(timeout, greet(&lane, &config, timeout)).await;
        let greeting =
            greeting.unwrap_or_else(|_| Err(ClientError::NoWelcome { timeout_ms: timeout.as_millis() }));
        let (sender, receiver, server) = match greeting {
            Ok(greeting) => greeting,
            Err(error) => {
                lane.close(error.close_code(), &error.to_string());
                lane.flush_close().await;
                return Err(error);
            }
        };
        let (commands, inbox) = mpsc::unbounded_channel();
        let session = Session::new(lane.clone(), sender, commands.clone(), config);
        tokio::spawn(session.map_err(ClientError::Memory)?.run(receiver, inbox));
        Ok(Self { server, lane, commands, answer_timeout: timeout })
    }

    /// What the server said of itself.
    pub fn server(&self) -> &Welcome {
        &self.server
    }

    /// Subscribes to the newest versions of `topic`, which need not exist yet.
    ///
    /// # Errors
    /// [`ClientError`] when the session is gone. What happens to the subscription is told by its
    /// [`next`](Subscription::next).
    pub async fn subscribe(&self, topic: &Topic) -> Result<Subscription, ClientError> {
        let (reply, answer) = oneshot::channel();
        self.command(Command::Subscribe(topic.clone(), reply)).await?;
        match answer.await {
            Ok(subscription) => Ok(subscription),
            Err(_) => Err(self.gone().await),
        }
    }

    /// Asks for the topics that have a version, in order of name.
    ///
    /// # Errors
    /// [`ClientError`] when the session is gone or no answer comes within the control timeout.
    pub async fn list(&self) -> Result<Vec<TopicEntry>, ClientError> {
        let (reply, answer) = oneshot::channel();
        self.command(Command::List(reply)).await?;
        match tokio::time::timeout(self.answer_timeout, answer).await {
            Ok(Ok(topics)) => Ok(topics),
            Ok(Err(_)) => Err(self.gone().await),
            Err(_) => Err(ClientError::NoAnswer { timeout_ms: self.answer_timeout.as_millis() }),
        }
    }

    /// What the connection has done so far.
    pub fn lane_stats(&self) -> LaneStats {
        self.lane.stats()
    }

    /// Ends the session and waits until the server is told.
    pub async fn close(self) {
        let _ = self.commands.send(Command::Close);
        let lane = self.lane.clone();
        drop(self);
        lane.closed().await;
        lane.flush_close().await;
    }

    async fn command(&self, command: Command) -> Result<(), ClientError> {
        match self.commands.send(command) {
            Ok(()) => Ok(()),
            Err(_) => Err(self.gone().await),
        }
    }

    async fn gone(&self) -> ClientError {
        self.lane.closed().await.into()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // The session is not aborted but asked, so that it closes the lane and gives back what it holds in order.
        let _ = self.commands.send(Command::Close);
    }
}

type Greeting = (control::Sender<ClientMessage>, control::Receiver<ServerMessage>, Welcome);

/// Says hello and waits for the welcome: only then is the client let in, whatever QUIC thought before.
async fn greet(lane: &Lane, config: &Config, timeout: Duration) -> Result<Greeting, ClientError> {
    let (sender, mut receiver) = control::open(lane, timeout).await?;
    let hello = Hello {
        revision_min: *PROTOCOL_REVISIONS.start(),
        revision_max: *PROTOCOL_REVISIONS.end(),
        agent: config.agent.clone(),
        codecs: config.codecs,
        token: None,
    };
    sender.send(ClientMessage::Hello(hello)).await?;
    match receiver.next().await {
        Ok(ServerMessage::Welcome(welcome)) if PROTOCOL_REVISIONS.contains(&welcome.revision) => {
            Ok((sender, receiver, welcome))
        }
        Ok(_) => Err(Misbehaved::OutOfTurn { found: "another message", expected: "Welcome" }.into()),
        Err(ControlError::Lane(error @ LaneError::ClosedByPeer { .. })) => Err(ClientError::Refused(error)),
        Err(error) => Err(error.into()),
    }
}
