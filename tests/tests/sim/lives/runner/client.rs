//! A connected client with a reader of each topic; and the rights of all clients.

use super::{CHUNK_BYTES, LANES_MAX, LIFE_DURATION, Log, TOPIC_NAMES, clock_s, lane_address};
use crate::lives::{
    checker::{Answer, End, Event, Id, Mode, Reader, Received, Right},
    operation::{CLIENTS, SubscriptionKind, TOPICS, TicketTerms},
};
use futures_util::FutureExt;
use std::{
    collections::HashMap,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tensor_relay_client::{
    Client, ClientError, Config, EndReason, Lanes, ReaderName, Request, Snapshot, Start, Subscription,
    SubscriptionError, Ticket, Version,
};
use tensor_relay_protocol::{Claims, Epoch, Glob, Grant, TicketId, Verbs, VersionId};
use tensor_relay_server::{Acl, Fingerprint, Identity};
use tensor_relay_tests::{
    pair::{Sim, reconnecting, rules, topic},
    tensors,
};
use tensor_relay_transport::Transport;
use tokio::{
    task::{JoinHandle, unconstrained},
    time::{Instant, sleep, timeout},
};

/// How a client connects and reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClientOptions {
    pub(super) tcp: bool,
    pub(super) lanes: u8,
    pub(super) kind: SubscriptionKind,
    pub(super) pause_ms: u64,
}

/// A client that is connected, or reconnecting.
pub(super) struct ConnectedClient {
    pub(super) options: ClientOptions,
    client: Client,
    principal: usize,
    readers: Vec<(usize, JoinHandle<()>)>,
    cuts: Arc<AtomicU64>,
    log: Log,
}

/// The maximum number of a subscription's chunks in flight on one lane.
const CREDIT_CHUNKS: u32 = 4;

impl ConnectedClient {
    /// Connects and subscribes to all topics; `None` if connecting fails.
    pub(super) async fn join(
        sim: &Sim,
        log: &Log,
        principals: &Principals,
        client: u8,
        options: ClientOptions,
        blocks: bool,
    ) -> Option<Self> {
        let (principal, ticket, identity) = principals.credentials(sim, client)?;
        let config = Config {
            lanes: Lanes::Fixed(options.lanes.into()),
            lane_addresses: (0..options.lanes.min(LANES_MAX))
                .map(|lane| lane_address(client, lane))
                .collect(),
            transport: if options.tcp { Transport::Tcp } else { Transport::Quic },
            credit_chunks: CREDIT_CHUNKS,
            topic_timeout: LIFE_DURATION, // A topic may be late.
            identity,
            ..reconnecting()
        };
        let transport = config.transport;
        let connector = sim.connector(client).with_transport(transport);
        let connected = match Client::connect_with(&connector, &ticket, config).await {
            Ok(connected) => connected,
            Err(error) => {
                if error.is_unauthorised() {
                    log.record_answer(principal, Answer::Refused);
                }
                return None;
            }
        };
        if client != CLIENTS {
            log.record_answer(principal, Answer::Admitted); // A known key is admitted even without rights.
        }
        let (readers, cuts) = (vec![], Arc::default());
        let mut connected = Self { options, client: connected, principal, readers, cuts, log: log.clone() };
        for number in 0..TOPICS {
            connected.subscribe(client, number, blocks).await;
        }
        connected.list().await;
        Some(connected)
    }

    async fn subscribe(&mut self, client: u8, number: usize, blocks: bool) {
        let last = self.log.last_of(self.principal, number);
        let name = topic(TOPIC_NAMES[number]);
        let every = |window| Request::every(name.clone()).window(window);
        let (request, after) = match (self.options.kind, last) {
            (SubscriptionKind::Latest { preempt }, _) => (Request::latest(name).preempt(preempt), None),
            (SubscriptionKind::Named { window }, _) => {
                let reader = ReaderName::new(&format!("client-{client}")).unwrap();
                (every(window).reader(reader), None)
            }
            (SubscriptionKind::Continue { window }, Some(last)) => {
                let start = Start::At(Some(Epoch(last.epoch)), Version(last.version + 1));
                (every(window).from(start), Some(last))
            }
            (SubscriptionKind::Every { window } | SubscriptionKind::Continue { window }, _) => {
                (every(window), None)
            }
        };
        let mode = if matches!(self.options.kind, SubscriptionKind::Latest { .. }) {
            Mode::Latest
        } else {
            Mode::Every
        };
        let is_named = matches!(self.options.kind, SubscriptionKind::Named { .. });
        let Ok(subscription) = self.client.subscribe_to(request).await else { return };
        let reader = Reader {
            principal: self.principal,
            topic: number,
            mode,
            after,
            is_named,
            has_place: blocks && is_named,
            opened_ms: self.log.now_ms(),
            cuts_ms: vec![],
            cut_bytes: u64::from(CREDIT_CHUNKS * CHUNK_BYTES) * u64::from(self.options.lanes),
            events: vec![],
        };
        let reader = self.log.add(reader);
        let task = ReaderTask {
            log: self.log.clone(),
            reader,
            pause: Duration::from_millis(self.options.pause_ms),
            cuts: Arc::clone(&self.cuts),
        };
        self.readers.push((reader, tokio::spawn(task.run(subscription))));
    }

    /// Lists the topics, and records the answer if it arrives in time.
    pub(super) async fn list(&self) {
        if let Ok(Ok(topics)) = timeout(Duration::from_secs(15), self.client.list()).await {
            let number = |name: &str| TOPIC_NAMES.iter().position(|topic| *topic == name);
            let listed = topics.iter().filter_map(|entry| number(entry.id.topic.as_str()));
            self.log.record_answer(self.principal, Answer::Listed(listed.collect()));
        }
    }

    /// Records that the connection, or one of its lanes, is being cut.
    pub(super) fn record_cut(&self) {
        self.cuts.fetch_add(1, Ordering::Relaxed);
        let now = self.log.now_ms();
        for (reader, _) in &self.readers {
            self.log.history().readers[*reader].cuts_ms.push(now);
        }
    }

    pub(super) async fn leave(self) {
        for (reader, task) in self.readers {
            task.abort();
            let _ = task.await; // Until its subscription is dropped.
            self.log.record(reader, Event::Ended(End::Left));
        }
        self.client.close().await;
    }
}

/// The task of a reader, which takes versions and records the events.
struct ReaderTask {
    log: Log,
    reader: usize,
    pause: Duration,
    cuts: Arc<AtomicU64>,
}

impl ReaderTask {
    async fn run(self, mut subscription: Subscription) {
        loop {
            let event = {
                let mut next = pin!(unconstrained(subscription.next()));
                let (was_awaited, next) = match next.as_mut().now_or_never() {
                    Some(next) => (false, next),
                    None => (true, next.await),
                };
                match next {
                    Ok(snapshot) => Event::Version(self.received(&snapshot, was_awaited)),
                    Err(SubscriptionError::Gap(gap)) => {
                        Event::Gap { after: gap.after.as_ref().map(id_of), found: id_of(&gap.found) }
                    }
                    Err(error) => Event::Ended(end_of(&error)),
                }
            };
            let has_ended = matches!(event, Event::Ended(_));
            let is_version = matches!(event, Event::Version(_));
            self.log.record(self.reader, event);
            if has_ended {
                return;
            }
            if is_version {
                self.pause().await;
            }
        }
    }

    async fn pause(&self) {
        let until = Instant::now() + self.pause;
        while Instant::now() < until && !self.log.no_pauses.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(100)).await;
        }
    }

    fn received(&self, snapshot: &Snapshot, was_awaited: bool) -> Received {
        let content = snapshot
            .metadata()
            .iter()
            .find_map(|(_, content)| content.parse().ok())
            .unwrap();
        Received {
            id: id_of(snapshot.id()),
            content,
            skipped: snapshot.skipped(),
            is_new_epoch: snapshot.is_new_epoch(),
            torn: tensors::difference(snapshot, content),
            was_awaited,
            wire_bytes: snapshot.receipt().wire_bytes,
            payload_bytes: snapshot.payload_bytes(),
            cuts: self.cuts.load(Ordering::Relaxed),
        }
    }
}

fn id_of(id: &VersionId) -> Id {
    Id { epoch: id.epoch.0, version: id.version.0 }
}

fn end_of(error: &SubscriptionError) -> End {
    match error {
        SubscriptionError::Ended { reason: EndReason::Forbidden, .. } => End::Unauthorised,
        SubscriptionError::Ended { reason: EndReason::TooSlow, .. } => End::TooSlow,
        SubscriptionError::Disconnected { source, .. } if source.is_unauthorised() => End::Unauthorised,
        SubscriptionError::Ended { reason: EndReason::Withdrawn, .. }
        | SubscriptionError::NotFound { .. } => End::Explained,
        SubscriptionError::Disconnected { source, .. }
            if matches!(**source, ClientError::NotReconnected { .. } | ClientError::NoProgress { .. }) =>
        {
            End::Explained
        }
        other => End::Failed(other.to_string()),
    }
}

/// The principals of clients: their tickets, their key and their rights.
pub(super) struct Principals {
    /// The ticket of each client but the last.
    tickets: HashMap<u8, Issued>,
    /// The key of the last client, whose principal is [`KEY_HOLDER`].
    key: Arc<Identity>,
    /// The number of principals so far: the key, and all issued tickets.
    count: usize,
}

/// An issued ticket.
struct Issued {
    principal: usize,
    terms: TicketTerms,
    claims: Claims,
    is_revoked: bool,
}

/// The principal of the client with the key.
const KEY_HOLDER: usize = 0;

impl Principals {
    pub(super) fn new(sim: &Sim) -> Self {
        let key = Arc::new(sim.with_key_of(sim.seed + (1 << 40)).identity());
        Self { tickets: HashMap::new(), key, count: 1 }
    }

    /// Issues a ticket with these terms to a client, unless it has a valid one.
    pub(super) fn issue(&mut self, log: &Log, client: u8, terms: TicketTerms) {
        let is_valid =
            |issued: &Issued| issued.terms == terms && !issued.is_revoked && terms.expires_s.is_none();
        if client == CLIENTS || self.tickets.get(&client).is_some_and(is_valid) {
            return;
        }
        let principal = self.count;
        self.count += 1;
        let expires_s = terms.expires_s.map(|after| clock_s() + after);
        let until_ms = expires_s.map_or(u64::MAX, |at| (at - super::CLOCK_START_S) * 1_000);
        let topics = if terms.is_narrow { "a/*" } else { "**" };
        let claims = Claims {
            id: TicketId((principal as u64).to_be_bytes()),
            holder: format!("client {client}"),
            expires_s,
            grants: vec![Grant { topics: Glob::new(topics).unwrap(), verbs: Verbs::CONSUME }],
        };
        let from_ms = log.now_ms();
        for topic in 0..if terms.is_narrow { 1 } else { TOPICS } {
            log.history().rights.push(Right { principal, topic, from_ms, until_ms });
        }
        self.tickets
            .insert(client, Issued { principal, terms, claims, is_revoked: false });
    }

    /// Revokes a client's ticket, and returns the ticket's id.
    pub(super) fn revoke(&mut self, log: &Log, client: u8) -> Option<TicketId> {
        let issued = self.tickets.get_mut(&client)?;
        issued.is_revoked = true;
        log.end_rights(issued.principal, |_| true);
        Some(issued.claims.id)
    }

    /// Returns an access list, and its keys, that allow the client with the key these topics. Records the client's
    /// rights.
    pub(super) fn allow(&self, log: &Log, topics: u8) -> (Acl, HashMap<Fingerprint, String>) {
        let is_allowed = |topic: usize| topics & (1 << topic) != 0;
        log.end_rights(KEY_HOLDER, |topic| !is_allowed(topic));
        let mut lines = String::new();
        for topic in (0..TOPICS).filter(|topic| is_allowed(*topic)) {
            lines += &format!("key:holder list,subscribe {}\n", TOPIC_NAMES[topic]);
            log.begin_right(KEY_HOLDER, topic);
        }
        (lines.parse().unwrap(), [(self.key.fingerprint(), "holder".to_owned())].into())
    }

    fn credentials(&self, sim: &Sim, client: u8) -> Option<(usize, Ticket, Option<Arc<Identity>>)> {
        if client == CLIENTS {
            return Some((KEY_HOLDER, sim.bare_ticket(), Some(Arc::clone(&self.key))));
        }
        let issued = self.tickets.get(&client)?;
        let token = rules().secrets[0].seal(&issued.claims);
        Some((issued.principal, sim.bare_ticket().with_token(token), None))
    }
}

impl Log {
    fn add(&self, reader: Reader) -> usize {
        let mut history = self.history();
        history.readers.push(reader);
        history.readers.len() - 1
    }

    /// The last version of a topic that a principal received.
    fn last_of(&self, principal: usize, topic: usize) -> Option<Id> {
        let history = self.history();
        let readers = history.readers.iter().rev();
        let mut readers = readers.filter(|reader| (reader.principal, reader.topic) == (principal, topic));
        readers.find_map(|reader| {
            reader.events.iter().rev().find_map(|(_, event)| match event {
                Event::Version(received) => Some(received.id),
                _ => None,
            })
        })
    }

    fn end_rights(&self, principal: usize, which: impl Fn(usize) -> bool) {
        let now = self.now_ms();
        let mut history = self.history();
        let rights = history.rights.iter_mut();
        for right in rights.filter(|right| right.principal == principal && which(right.topic)) {
            right.until_ms = right.until_ms.min(now);
        }
    }

    fn begin_right(&self, principal: usize, topic: usize) {
        let now = self.now_ms();
        let mut history = self.history();
        let mut rights = history.rights.iter();
        let is_current = |right: &Right| {
            (right.principal, right.topic) == (principal, topic) && right.until_ms == u64::MAX
        };
        if !rights.any(is_current) {
            history
                .rights
                .push(Right { principal, topic, from_ms: now, until_ms: u64::MAX });
        }
    }
}
