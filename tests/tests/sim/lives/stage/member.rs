//! A client in one of its lives, with a reader of each topic; and what it may do.

use super::{CHUNK_BYTES, LANES_MAX, LIFE_MAX, Log, TOPIC_NAMES, card, content, seconds};
use crate::lives::{
    judge::{Answer, End, Got, Id, Mode, Reader, Right, Seen},
    operation::{CLIENTS, TOPICS, TicketTerms, Wish},
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
pub(super) struct Style {
    pub(super) tcp: bool,
    pub(super) lanes: u8,
    pub(super) wish: Wish,
    pub(super) pause_ms: u64,
}

/// A client that is connected, or tries to be again.
pub(super) struct Member {
    pub(super) style: Style,
    client: Client,
    principal: usize,
    readers: Vec<(usize, JoinHandle<()>)>,
    cuts: Arc<AtomicU64>,
    log: Log,
}

/// How many chunks of a subscription may be on their way on one lane.
const CREDIT_CHUNKS: u32 = 4;

impl Member {
    /// Connects and subscribes to all topics; `None` where that fails.
    pub(super) async fn join(
        sim: &Sim,
        log: &Log,
        principals: &Principals,
        client: u8,
        style: Style,
        blocks: bool,
    ) -> Option<Self> {
        let (principal, ticket, identity) = principals.credentials(sim, client)?;
        let config = Config {
            lanes: Lanes::Fixed(style.lanes.into()),
            lane_addresses: (0..style.lanes.min(LANES_MAX)).map(|lane| card(client, lane)).collect(),
            transport: if style.tcp { Transport::Tcp } else { Transport::Quic },
            credit_chunks: CREDIT_CHUNKS,
            topic_timeout: LIFE_MAX, // A topic may be late.
            identity,
            ..reconnecting()
        };
        let transport = config.transport;
        let connector = sim.connector(client).with_transport(transport);
        let connected = match Client::connect_with(&connector, &ticket, config).await {
            Ok(connected) => connected,
            Err(error) => {
                if error.is_unauthorised() {
                    log.answered(principal, Answer::Refused);
                }
                return None;
            }
        };
        if client != CLIENTS {
            log.answered(principal, Answer::LetIn); // A key that is known is let in whatever it may do.
        }
        let (readers, cuts) = (vec![], Arc::default());
        let mut member = Self { style, client: connected, principal, readers, cuts, log: log.clone() };
        for number in 0..TOPICS {
            member.subscribe(client, number, blocks).await;
        }
        member.list().await;
        Some(member)
    }

    async fn subscribe(&mut self, client: u8, number: usize, blocks: bool) {
        let last = self.log.last_of(self.principal, number);
        let name = topic(TOPIC_NAMES[number]);
        let every = |window| Request::every(name.clone()).window(window);
        let (request, after) = match (self.style.wish, last) {
            (Wish::Latest { preempt }, _) => (Request::latest(name).preempt(preempt), None),
            (Wish::Named { window }, _) => {
                let reader = ReaderName::new(&format!("client-{client}")).unwrap();
                (every(window).reader(reader), None)
            }
            (Wish::Continue { window }, Some(last)) => {
                let start = Start::At(Some(Epoch(last.epoch)), Version(last.version + 1));
                (every(window).from(start), Some(last))
            }
            (Wish::Every { window } | Wish::Continue { window }, _) => (every(window), None),
        };
        let mode = if matches!(self.style.wish, Wish::Latest { .. }) { Mode::Latest } else { Mode::Every };
        let Ok(subscription) = self.client.subscribe_to(request).await else { return };
        let reader = Reader {
            principal: self.principal,
            topic: number,
            mode,
            after,
            has_place: blocks && matches!(self.style.wish, Wish::Named { .. }),
            opened_ms: self.log.now_ms(),
            cuts_ms: vec![],
            cut_bytes: u64::from(CREDIT_CHUNKS * CHUNK_BYTES) * u64::from(self.style.lanes),
            seen: vec![],
        };
        let reader = self.log.add(reader);
        let reading = Reading {
            log: self.log.clone(),
            reader,
            pause: Duration::from_millis(self.style.pause_ms),
            cuts: Arc::clone(&self.cuts),
        };
        self.readers.push((reader, tokio::spawn(reading.run(subscription))));
    }

    /// Asks which topics there are, and writes the answer down if there is one in time.
    pub(super) async fn list(&self) {
        if let Ok(Ok(topics)) = timeout(Duration::from_secs(15), self.client.list()).await {
            let number = |name: &str| TOPIC_NAMES.iter().position(|topic| *topic == name);
            let listed = topics.iter().filter_map(|entry| number(entry.id.topic.as_str()));
            self.log.answered(self.principal, Answer::Listed(listed.collect()));
        }
    }

    /// Its connection, or a lane of it, is being cut.
    pub(super) fn note_cut(&self) {
        self.cuts.fetch_add(1, Ordering::Relaxed);
        let now = self.log.now_ms();
        for (reader, _) in &self.readers {
            self.log.history().readers[*reader].cuts_ms.push(now);
        }
    }

    pub(super) async fn leave(self) {
        for (reader, task) in self.readers {
            task.abort();
            let _ = task.await; // What it was doing is dropped by then.
            self.log.see(reader, Seen::Ended(End::Left));
        }
        self.client.close().await;
    }
}

/// A reader at work.
struct Reading {
    log: Log,
    reader: usize,
    pause: Duration,
    cuts: Arc<AtomicU64>,
}

impl Reading {
    async fn run(self, mut subscription: Subscription) {
        loop {
            let seen = {
                let mut next = pin!(unconstrained(subscription.next()));
                let (was_awaited, next) = match next.as_mut().now_or_never() {
                    Some(next) => (false, next),
                    None => (true, next.await),
                };
                match next {
                    Ok(snapshot) => Seen::Version(self.got(&snapshot, was_awaited)),
                    Err(SubscriptionError::Gap(gap)) => {
                        Seen::Gap { after: gap.after.as_ref().map(id_of), found: id_of(&gap.found) }
                    }
                    Err(error) => Seen::Ended(end_of(&error)),
                }
            };
            let is_over = matches!(seen, Seen::Ended(_));
            let is_version = matches!(seen, Seen::Version(_));
            self.log.see(self.reader, seen);
            if is_over {
                return;
            }
            if is_version {
                self.pause().await;
            }
        }
    }

    async fn pause(&self) {
        let until = Instant::now() + self.pause;
        while Instant::now() < until && !self.log.hurry.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(100)).await;
        }
    }

    fn got(&self, snapshot: &Snapshot, was_awaited: bool) -> Got {
        let id = id_of(snapshot.id());
        Got {
            id,
            skipped: snapshot.skipped(),
            is_new_epoch: snapshot.is_new_epoch(),
            torn: tensors::difference(snapshot, content(id)),
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
        | SubscriptionError::NotFound { .. } => End::Told,
        SubscriptionError::Disconnected { source, .. }
            if matches!(**source, ClientError::NotReconnected { .. }) =>
        {
            End::Told
        }
        other => End::Failed(other.to_string()),
    }
}

/// Who clients are, and what each may do.
pub(super) struct Principals {
    /// The ticket of each client but the last.
    tickets: HashMap<u8, Issued>,
    /// The key of the last client, whose principal is the first.
    key: Arc<Identity>,
    /// The number of clients.
    count: usize,
}

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

    /// Gives a client a ticket with these terms, unless it has one that is good.
    pub(super) fn issue(&mut self, log: &Log, client: u8, terms: TicketTerms) {
        let is_good =
            |issued: &Issued| issued.terms == terms && !issued.is_revoked && terms.expires_s.is_none();
        if client == CLIENTS || self.tickets.get(&client).is_some_and(is_good) {
            return;
        }
        let principal = self.count;
        self.count += 1;
        let expires_s = terms.expires_s.map(|after| seconds() + after);
        let until_ms = expires_s.map_or(u64::MAX, |at| (at - super::CLOCK_BEGAN_S) * 1_000);
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

    /// Takes the ticket of a client back.
    pub(super) fn revoke(&mut self, log: &Log, client: u8) -> Option<TicketId> {
        let issued = self.tickets.get_mut(&client)?;
        issued.is_revoked = true;
        log.end_rights(issued.principal, |_| true);
        Some(issued.claims.id)
    }

    /// What the list must say, and of which keys, so that the client with the key has these topics.
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

    /// What a principal got last of a topic.
    fn last_of(&self, principal: usize, topic: usize) -> Option<Id> {
        let history = self.history();
        let readers = history.readers.iter().rev();
        let mut of = readers.filter(|reader| (reader.principal, reader.topic) == (principal, topic));
        of.find_map(|reader| {
            reader.seen.iter().rev().find_map(|(_, seen)| match seen {
                Seen::Version(got) => Some(got.id),
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
        let is_there = |right: &Right| {
            (right.principal, right.topic) == (principal, topic) && right.until_ms == u64::MAX
        };
        if !rights.any(is_there) {
            history
                .rights
                .push(Right { principal, topic, from_ms: now, until_ms: u64::MAX });
        }
    }
}
