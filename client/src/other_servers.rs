//! The connections of a session: one to the origin, and those to other servers with the same content and to peers, of
//! which chunks of large versions are requested, too.

mod peer_links;

pub(crate) use peer_links::{PeerLinks, UsablePeer};

use crate::{
    ClientError, Config,
    backoff::Backoff,
    config::SOURCES_MAX,
    connection::{CloseReason, Connection, Event, Target},
    error::SessionError,
    peers::PEERS_MAX,
    progress::Giver,
};
use futures_util::future::{join_all, pending, select_all};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::atomic::Ordering,
    time::Duration,
};
use tensor_relay_protocol::{
    ClientMessage, CloseCode, Feature, FeatureSet, ProtocolViolation, SubscriptionId,
};
use tensor_relay_transport::AbortOnDrop;
use tokio::task::JoinSet;

/// A connection of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Link {
    /// The one on which the user's subscriptions are requested.
    Origin,
    /// The one to another server or to a peer, by its index.
    Other(usize),
}

/// The servers with the same content, except the origin, and peers. Each is connected in the background, and again after
/// a loss.
#[derive(Debug)]
pub(crate) struct OtherServers {
    config: Config,
    /// By index: first the servers that the user named, then peers.
    servers: BTreeMap<usize, Server>,
    /// `None` unless this client takes part in swarms.
    peers: Option<PeerLinks>,
    /// The number of subscriptions so far to the servers of each index.
    numbers: [u32; INDICES],
    /// The number of attempts to connect so far.
    attempts: u64,
    tasks: JoinSet<Outcome>,
}

/// The indices below this one are of servers that the user named, the others of peers.
const FIRST_PEER: usize = SOURCES_MAX;

const INDICES: usize = FIRST_PEER + PEERS_MAX;

#[derive(Debug)]
struct Server {
    target: Target,
    /// `None` while it is being connected.
    connection: Option<Connection>,
    /// The attempt to connect that is under way.
    attempt: Option<(u64, AbortOnDrop)>,
    /// Messages to it, which are sent before its next event.
    outbox: VecDeque<ClientMessage>,
    /// The waits grow until a connection carries a chunk to its end: a server that opens connections and breaks rules on
    /// them costs little.
    backoff: Backoff,
    /// The bytes that subscriptions ordered, if it is a peer.
    unread: BTreeMap<SubscriptionId, u64>,
    /// Whether a failure was reported, until it is connected.
    has_failed: bool,
}

/// The subscription numbers of one index: those of the user's subscriptions are below. So a server sees consecutive
/// numbers.
const NUMBERS: u32 = 1 << 27;

const _: () = assert!((INDICES as u64 + 1) * NUMBERS as u64 <= 1 << 32);

/// Whether a subscription with this number is to a further source, now or earlier.
pub(crate) fn is_to_source(number: SubscriptionId) -> bool {
    number.0 >= NUMBERS
}

/// The end of a background task for a server.
#[derive(Debug)]
enum Outcome {
    Opened(usize, u64, Box<Result<Connection, ClientError>>),
    Closed(usize, Vec<Event>),
}

/// An event of a session's connections.
#[expect(clippy::large_enum_variant, reason = "one exists at a time, and almost all are the large one")]
#[derive(Debug)]
pub(crate) enum LinkEvent {
    /// An event of one connection.
    Event(Link, Event),
    /// The server or the peer with this index was connected.
    Opened(usize),
    /// The connection to the server or the peer with this index was lost. Its last events are these, and its tasks have
    /// ended.
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
    /// Begins to connect to `targets`; and to the peers that will be named, if `peers` says how.
    pub(crate) fn new(targets: Vec<Target>, config: Config, peers: Option<PeerLinks>) -> Self {
        let mut others = Self {
            config,
            servers: targets.into_iter().take(FIRST_PEER).map(Server::new).enumerate().collect(),
            peers,
            numbers: [0; INDICES],
            attempts: 0,
            tasks: JoinSet::new(),
        };
        for index in 0..others.servers.len() {
            others.open(index, Duration::ZERO);
        }
        others
    }

    fn is_empty(&self) -> bool {
        self.servers.is_empty() && self.tasks.is_empty()
    }

    /// The next event; none without other servers. Cancel safe.
    async fn next(&mut self) -> LinkEvent {
        loop {
            let (index, event) = tokio::select! {
                Some(outcome) = self.tasks.join_next() => match outcome {
                    Ok(Outcome::Closed(index, events)) => return LinkEvent::Closed(index, events),
                    Ok(Outcome::Opened(index, attempt, opened)) => {
                        match self.handle_opened((index, attempt), *opened) {
                            true => return LinkEvent::Opened(index),
                            false => continue,
                        }
                    }
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
    fn handle_opened(
        &mut self,
        (index, attempt): (usize, u64),
        opened: Result<Connection, ClientError>,
    ) -> bool {
        let is_current =
            |server: &&mut Server| server.attempt.as_ref().is_some_and(|(number, _)| *number == attempt);
        let Some(server) = self.servers.get_mut(&index).filter(is_current) else { return false };
        server.attempt = None;
        if is_peer(index) {
            return self.handle_peer_opened(index, opened);
        }
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
            self.open_later(index);
        }
        false
    }

    /// Connects to a server after `wait`.
    fn open(&mut self, index: usize, wait: Duration) {
        let Some(server) = self.servers.get_mut(&index) else { return };
        self.attempts += 1;
        let (target, attempt) = (server.target.clone(), self.attempts);
        let peers = self.peers.as_ref().filter(|_| is_peer(index));
        let config = peers.map_or(&self.config, PeerLinks::config).clone();
        let task = self.tasks.spawn(async move {
            tokio::time::sleep(wait).await;
            let opened = match is_peer(index) {
                true => peer_links::open(&target, &config).await,
                false => Connection::open(&target, &config).await.map(|(connection, _)| connection),
            };
            Outcome::Opened(index, attempt, Box::new(opened))
        });
        server.attempt = Some((attempt, AbortOnDrop(task)));
    }

    /// Connects to a server after the wait that is due.
    fn open_later(&mut self, index: usize) {
        if let Some(server) = self.servers.get_mut(&index) {
            let wait = server.backoff.next(rand::random());
            self.open(index, wait);
        }
    }

    /// Closes the connection to a server or a peer because of `error`. Its [`Closed`](LinkEvent::Closed) follows.
    pub(crate) fn close(&mut self, index: usize, error: &SessionError) {
        let Some(connection) = self.take_connection(index) else { return };
        match is_peer(index) {
            true => self.note_unused(index, error.to_string()),
            false => {
                tracing::warn!(peer = %connection.control().peer(), %error, "The connection to another server was lost; reconnecting.");
            }
        }
        self.tasks.spawn(give_up(index, connection, error.close_reason()));
    }

    /// Closes the connection to a server or a peer that sends nothing.
    pub(crate) fn close_silent(&mut self, index: usize) {
        let Some(connection) = self.take_connection(index) else { return };
        let text = "it owes chunks, and sends none";
        match is_peer(index) {
            true => self.note_unused(index, text.into()),
            false => {
                tracing::warn!(peer = %connection.control().peer(), "Another server is not used any more: {text}; reconnecting.");
            }
        }
        let reason = CloseReason { code: CloseCode::TimedOut, text: text.into(), by_user: false };
        self.tasks.spawn(give_up(index, connection, reason));
    }

    /// Takes the connection to a server, to close it.
    fn take_connection(&mut self, index: usize) -> Option<Connection> {
        let server = self.servers.get_mut(&index)?;
        server.outbox.clear();
        server.unread.clear();
        let connection = server.connection.take()?;
        if connection.received().verified_bytes.load(Ordering::Relaxed) > 0 {
            server.backoff.reset();
        }
        Some(connection)
    }

    /// Handles the end of a connection: makes another one, if the server is still wanted.
    pub(crate) fn handle_closed(&mut self, index: usize) {
        match is_peer(index) {
            true => self.handle_peer_closed(index),
            false => self.open_later(index),
        }
    }

    /// Makes a connected server the origin, if possible one that is `sending` a version. The server `lost`, so far the
    /// origin, takes its place and is connected again.
    pub(crate) fn promote(&mut self, lost: &Target, sending: &[usize]) -> Option<Promoted> {
        let usable = self.usable();
        let index = *usable.iter().find(|index| sending.contains(index)).or_else(|| usable.first())?;
        let server = self.servers.get_mut(&index)?;
        let connection = server.connection.take()?;
        let target = std::mem::replace(&mut server.target, lost.clone());
        let outbox = std::mem::take(&mut server.outbox);
        server.backoff.reset();
        self.open_later(index);
        Some(Promoted { index, connection, target, outbox })
    }

    /// Takes the number of a new subscription to a server.
    pub(crate) fn take_number(&mut self, index: usize) -> SubscriptionId {
        let number = SubscriptionId(NUMBERS * (index as u32 + 1) + self.numbers[index] % NUMBERS);
        self.numbers[index] += 1;
        number
    }

    /// The servers that the user named which are connected and offer what several sources of a version need. A peer speaks
    /// for a single version, so it is none of them.
    pub(crate) fn usable(&self) -> Vec<usize> {
        let is_usable =
            |server: &Server| server.connection.as_ref().is_some_and(|it| offers_sources(it.server().1));
        let named = self.servers.range(..FIRST_PEER);
        named.filter(|(_, server)| is_usable(server)).map(|(index, _)| *index).collect()
    }

    fn connections(&mut self) -> impl Iterator<Item = &mut Connection> {
        self.servers.values_mut().filter_map(|server| server.connection.as_mut())
    }

    /// Closes all connections.
    pub(crate) async fn close_all(mut self) {
        self.tasks.abort_all();
        let connections = self.servers.values_mut().filter_map(|server| server.connection.take());
        let reason = || CloseReason { code: CloseCode::Done, text: String::new(), by_user: true };
        join_all(connections.map(|connection| connection.close(reason()))).await;
    }
}

impl Link {
    /// Whether a peer is at the other end.
    pub(crate) fn is_peer(self) -> bool {
        matches!(self, Self::Other(index) if is_peer(index))
    }

    /// Who is at the other end.
    pub(crate) fn giver(self) -> Giver {
        match self {
            Self::Origin => Giver::Origin,
            Self::Other(_) if self.is_peer() => Giver::Peer,
            Self::Other(_) => Giver::Server,
        }
    }
}

impl Links<'_> {
    /// The next event. Cancel safe.
    ///
    /// # Errors
    /// [`SessionError`] when the connection to the origin is lost.
    pub(crate) async fn next(&mut self) -> Result<LinkEvent, SessionError> {
        let Some(origin) = &mut self.origin else { return Ok(self.others.next().await) };
        if self.others.is_empty() {
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
            Link::Other(index) => self.others.servers.get_mut(&index)?.connection.as_mut(),
        }
    }

    /// Sends a message to another server, unless that is lost.
    pub(crate) fn send_to_other(&mut self, index: usize, message: ClientMessage) {
        let server = self.others.servers.get_mut(&index);
        if let Some(server) = server.filter(|server| server.connection.is_some()) {
            server.outbox.push_back(message);
        }
    }

    /// Every connection, the origin's first.
    pub(crate) fn all(&mut self) -> impl Iterator<Item = &mut Connection> {
        let origin = self.origin.as_deref_mut();
        origin.into_iter().chain(self.others.connections())
    }

    /// Every connection but those to peers, whose windows are what is ordered of them.
    pub(crate) fn all_but_peers(&mut self) -> impl Iterator<Item = &mut Connection> {
        let servers = self.others.servers.range_mut(..FIRST_PEER);
        let others = servers.filter_map(|(_, server)| server.connection.as_mut());
        self.origin.as_deref_mut().into_iter().chain(others)
    }

    /// Whether the origin offers what several sources of a version need.
    pub(crate) fn may_have_sources(&self) -> bool {
        self.others.servers.range(..FIRST_PEER).next().is_some()
            && self.origin.as_ref().is_none_or(|origin| offers_sources(origin.server().1))
    }

    /// Whether the server of a connection offers `feature`.
    pub(crate) fn offers(&mut self, link: Link, feature: Feature) -> bool {
        self.get(link).is_some_and(|connection| connection.server().1.contains(feature))
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

/// Whether an index is of a peer.
fn is_peer(index: usize) -> bool {
    index >= FIRST_PEER
}

/// The next event of any connected server, and its index. Cancel safe.
async fn next_of(servers: &mut BTreeMap<usize, Server>) -> (usize, Result<Event, SessionError>) {
    let connected = servers.iter_mut().filter(|(_, server)| server.connection.is_some());
    let next: Vec<_> = connected
        .map(|(index, server)| Box::pin(async move { (*index, server.next().await) }))
        .collect();
    match next.is_empty() {
        true => pending().await,
        false => select_all(next).await.0,
    }
}

impl Server {
    fn new(target: Target) -> Self {
        Self {
            target,
            connection: None,
            attempt: None,
            outbox: VecDeque::new(),
            backoff: Backoff::new(),
            unread: BTreeMap::new(),
            has_failed: false,
        }
    }

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
