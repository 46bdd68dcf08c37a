//! The connections of a session: one to the origin, and those to other servers with the same content, of which chunks of
//! large versions are requested, too.

use crate::{
    ClientError, Config,
    backoff::Backoff,
    connection::{CloseReason, Connection, Event, Target},
    error::SessionError,
};
use futures_util::future::{join_all, pending, select_all};
use std::{collections::VecDeque, sync::atomic::Ordering, time::Duration};
use tensor_relay_protocol::{
    ClientMessage, CloseCode, Feature, FeatureSet, ProtocolViolation, SubscriptionId,
};
use tokio::task::JoinSet;

/// A connection of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Link {
    /// The one on which the user's subscriptions are requested.
    Origin,
    /// The one to another server, by the server's index.
    Other(usize),
}

/// The servers with the same content, except the origin. Each is connected in the background, and again after a loss.
#[derive(Debug)]
pub(crate) struct OtherServers {
    config: Config,
    servers: Vec<Server>,
    tasks: JoinSet<Outcome>,
}

#[derive(Debug)]
struct Server {
    target: Target,
    /// `None` while it is being connected.
    connection: Option<Connection>,
    /// Messages to it, which are sent before its next event.
    outbox: VecDeque<ClientMessage>,
    /// The waits grow until a connection carries a chunk to its end: a server that opens connections and breaks rules on
    /// them costs little.
    backoff: Backoff,
    /// Whether a failure was reported, until it is connected.
    has_failed: bool,
    /// The number of the next subscription to it.
    next_number: u32,
}

/// The subscription numbers of one server: those of the user's subscriptions are below. So a server sees consecutive
/// numbers.
const NUMBERS: u32 = 1 << 27;

/// Whether a subscription with this number is to a further source, now or earlier.
pub(crate) fn is_to_source(number: SubscriptionId) -> bool {
    number.0 >= NUMBERS
}

/// The end of a background task for a server.
#[derive(Debug)]
enum Outcome {
    Opened(usize, Box<Result<Connection, ClientError>>),
    Closed(usize, Vec<Event>),
}

/// An event of a session's connections.
#[expect(clippy::large_enum_variant, reason = "one exists at a time, and almost all are the large one")]
#[derive(Debug)]
pub(crate) enum LinkEvent {
    /// An event of one connection.
    Event(Link, Event),
    /// Another server was connected.
    Opened,
    /// The connection to the server with this index was lost. Its last events are these, and its tasks have ended.
    Closed(usize, Vec<Event>),
}

/// What a server hands over when it becomes the origin.
#[derive(Debug)]
pub(crate) struct Promoted {
    /// The index under which the previous origin is connected from now on.
    pub(crate) index: usize,
    pub(crate) connection: Connection,
    pub(crate) target: Target,
    /// The messages to it that were not sent yet.
    pub(crate) outbox: VecDeque<ClientMessage>,
}

/// All connections of a session, for the handling of one event.
#[derive(Debug)]
pub(crate) struct Links<'a> {
    /// `None` while the origin is lost.
    pub(crate) origin: Option<&'a mut Connection>,
    pub(crate) others: &'a mut OtherServers,
}

impl OtherServers {
    /// Begins to connect to `targets`.
    pub(crate) fn new(targets: Vec<Target>, config: Config) -> Self {
        let server = |(index, target)| Server {
            target,
            connection: None,
            outbox: VecDeque::new(),
            backoff: Backoff::new(),
            has_failed: false,
            next_number: NUMBERS * (index + 1),
        };
        let mut others =
            Self { config, servers: (0u32..).zip(targets).map(server).collect(), tasks: JoinSet::new() };
        for index in 0..others.servers.len() {
            others.open(index, Duration::ZERO);
        }
        others
    }

    /// The next event; none without other servers. Cancel safe.
    async fn next(&mut self) -> LinkEvent {
        loop {
            let (index, event) = tokio::select! {
                Some(outcome) = self.tasks.join_next() => match outcome {
                    Ok(Outcome::Closed(index, events)) => return LinkEvent::Closed(index, events),
                    Ok(Outcome::Opened(index, opened)) => match self.handle_opened(index, *opened) {
                        true => return LinkEvent::Opened,
                        false => continue,
                    },
                    Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                    Err(_) => continue,
                },
                event = next_of(&mut self.servers) => event,
            };
            match event {
                Ok(event) => return LinkEvent::Event(Link::Other(index), event),
                Err(error) => self.close(index, &error),
            }
        }
    }

    /// Handles the end of an attempt to connect; returns whether it succeeded.
    fn handle_opened(&mut self, index: usize, opened: Result<Connection, ClientError>) -> bool {
        let server = &mut self.servers[index];
        let error = match opened {
            Ok(connection) => {
                tracing::info!(peer = %connection.control().peer(), "Another server with the same content is connected.");
                (server.connection, server.has_failed) = (Some(connection), false);
                return true;
            }
            Err(error) => error,
        };
        let (hosts, is_retryable) = (&server.target.hosts, error.is_retryable());
        if !std::mem::replace(&mut server.has_failed, true) || !is_retryable {
            tracing::warn!(?hosts, %error, is_retried = is_retryable, "Another server with the same content cannot be used.");
        }
        if is_retryable {
            let wait = server.backoff.next(rand::random());
            self.open(index, wait);
        }
        false
    }

    /// Connects to a server after `wait`.
    fn open(&mut self, index: usize, wait: Duration) {
        let (target, config) = (self.servers[index].target.clone(), self.config.clone());
        self.tasks.spawn(async move {
            tokio::time::sleep(wait).await;
            let opened = Connection::open(&target, &config).await;
            Outcome::Opened(index, Box::new(opened.map(|(connection, _)| connection)))
        });
    }

    /// Closes the connection to a server because of `error`. Its [`Closed`](LinkEvent::Closed) follows.
    pub(crate) fn close(&mut self, index: usize, error: &SessionError) {
        let server = &mut self.servers[index];
        server.outbox.clear();
        let Some(connection) = server.connection.take() else { return };
        if connection.received().verified_bytes.load(Ordering::Relaxed) > 0 {
            server.backoff = Backoff::new();
        }
        tracing::warn!(peer = %connection.control().peer(), %error, "The connection to another server was lost; reconnecting.");
        self.tasks.spawn(give_up(index, connection, error.close_reason()));
    }

    /// Closes the connection to a server that sends nothing.
    pub(crate) fn close_silent(&mut self, index: usize) {
        let server = &mut self.servers[index];
        server.outbox.clear();
        let Some(connection) = server.connection.take() else { return };
        let text = "it owes chunks, and sends none";
        tracing::warn!(peer = %connection.control().peer(), "Another server is not used any more: {text}; reconnecting.");
        let reason = CloseReason { code: CloseCode::TimedOut, text: text.into(), by_user: false };
        self.tasks.spawn(give_up(index, connection, reason));
    }

    /// Handles the end of a connection: makes another one.
    pub(crate) fn handle_closed(&mut self, index: usize) {
        let wait = self.servers[index].backoff.next(rand::random());
        self.open(index, wait);
    }

    /// Makes a connected server the origin, if possible one that is `sending` a version. The server `lost`, so far the
    /// origin, takes its place and is connected again.
    pub(crate) fn promote(&mut self, lost: &Target, sending: &[usize]) -> Option<Promoted> {
        let usable = self.usable();
        let index = *usable.iter().find(|index| sending.contains(index)).or_else(|| usable.first())?;
        let server = &mut self.servers[index];
        let connection = server.connection.take()?;
        let target = std::mem::replace(&mut server.target, lost.clone());
        let outbox = std::mem::take(&mut server.outbox);
        server.backoff = Backoff::new();
        let wait = server.backoff.next(rand::random());
        self.open(index, wait);
        Some(Promoted { index, connection, target, outbox })
    }

    /// Takes the number of a new subscription to a server.
    pub(crate) fn take_number(&mut self, index: usize) -> SubscriptionId {
        let number = &mut self.servers[index].next_number;
        *number += 1;
        SubscriptionId(*number)
    }

    /// The servers that are connected and offer what several sources of a version need.
    pub(crate) fn usable(&self) -> Vec<usize> {
        let is_usable =
            |server: &Server| server.connection.as_ref().is_some_and(|it| offers_sources(it.server().1));
        (0..self.servers.len())
            .filter(|index| is_usable(&self.servers[*index]))
            .collect()
    }

    fn connections(&mut self) -> impl Iterator<Item = &mut Connection> {
        self.servers.iter_mut().filter_map(|server| server.connection.as_mut())
    }

    /// Closes all connections.
    pub(crate) async fn close_all(mut self) {
        self.tasks.abort_all();
        let connections = self.servers.iter_mut().filter_map(|server| server.connection.take());
        let reason = || CloseReason { code: CloseCode::Done, text: String::new(), by_user: true };
        join_all(connections.map(|connection| connection.close(reason()))).await;
    }
}

impl Links<'_> {
    /// The next event. Cancel safe.
    ///
    /// # Errors
    /// [`SessionError`] when the connection to the origin is lost.
    pub(crate) async fn next(&mut self) -> Result<LinkEvent, SessionError> {
        let Some(origin) = &mut self.origin else { return Ok(self.others.next().await) };
        if self.others.servers.is_empty() {
            return Ok(LinkEvent::Event(Link::Origin, origin.next().await?));
        }
        tokio::select! {
            event = origin.next() => Ok(LinkEvent::Event(Link::Origin, event?)),
            event = self.others.next() => Ok(event),
        }
    }

    /// A connection; `None` while it is lost.
    pub(crate) fn get(&mut self, link: Link) -> Option<&mut Connection> {
        match link {
            Link::Origin => self.origin.as_deref_mut(),
            Link::Other(index) => self.others.servers[index].connection.as_mut(),
        }
    }

    /// Sends a message to another server, unless that is lost.
    pub(crate) fn send_to_other(&mut self, index: usize, message: ClientMessage) {
        let server = &mut self.others.servers[index];
        if server.connection.is_some() {
            server.outbox.push_back(message);
        }
    }

    /// Every connection, the origin's first.
    pub(crate) fn all(&mut self) -> impl Iterator<Item = &mut Connection> {
        let origin = self.origin.as_deref_mut();
        origin.into_iter().chain(self.others.connections())
    }

    /// Whether the origin offers what several sources of a version need.
    pub(crate) fn may_have_sources(&self) -> bool {
        !self.others.servers.is_empty()
            && self.origin.as_ref().is_none_or(|origin| offers_sources(origin.server().1))
    }

    /// Checks that the origin offers the features that `message` needs. On an error returns the origin's name, too.
    pub(crate) fn check_features(&self, message: &ClientMessage) -> Result<(), (ProtocolViolation, String)> {
        let Some(origin) = &self.origin else { return Ok(()) };
        let (agent, offered) = origin.server();
        message
            .check_features(offered)
            .map_err(|violation| (violation, agent.to_owned()))
    }
}

/// Whether a server with these features can be one of several sources.
fn offers_sources(offered: FeatureSet) -> bool {
    offered.contains(Feature::Get) && offered.contains(Feature::Hashes)
}

async fn give_up(index: usize, connection: Connection, reason: CloseReason) -> Outcome {
    Outcome::Closed(index, connection.give_up(reason).await)
}

/// The next event of any connected server, and its index. Cancel safe.
async fn next_of(servers: &mut [Server]) -> (usize, Result<Event, SessionError>) {
    let connected = servers.iter_mut().enumerate().filter(|(_, server)| server.connection.is_some());
    let next: Vec<_> = connected
        .map(|(index, server)| Box::pin(async move { (index, server.next().await) }))
        .collect();
    match next.is_empty() {
        true => pending().await,
        false => select_all(next).await.0,
    }
}

impl Server {
    /// Sends the queued messages, then returns the next event. Cancel safe.
    async fn next(&mut self) -> Result<Event, SessionError> {
        let Some(connection) = &mut self.connection else { return pending().await };
        while let Some(message) = self.outbox.front() {
            connection.send(message.clone()).await?;
            self.outbox.pop_front();
        }
        connection.next().await
    }
}
