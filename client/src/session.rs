//! The task behind a client: hears the server, the network and the user, and lets each subscription decide.
//!
//! A session outlives its connections: [`keeper`](crate::keeper) gives it one [`Link`] after another.

mod commands;
mod slots;

pub(crate) use commands::Command;

use crate::{
    ClientError, Config, SubscriptionError,
    arrivals::Ready,
    error::{SessionError, TransferError},
    landing::{Ground, Landing},
    link::{Event, Link},
    receiving::{Failure, Receiving},
    watches::Watches,
};
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};
use tensor_relay_device::{AllocError, Capacity, HostMemory, SlotPool};
use tensor_relay_protocol::{
    ChunkHeader, ClientMessage, Credit, EndReason, Epoch, Misbehaved, ServerMessage, StreamHeader,
    SubscriptionId, TopicEntry, Verified, Version, VersionId,
};
use tensor_relay_transport::{
    DataIn, HeaderError, LaneError,
    ingress::{Ingress, ReceiveError, ReceiveManifestError},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

/// The size that chunks are taken to have until a manifest says otherwise: what servers use by default.
const CHUNK_BYTES_USUAL: u32 = 4 << 20;

/// The most topics kept of one answer to `List`. A server that offers more is broken or hostile.
const TOPICS_MAX: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct Session {
    /// For the subscriptions that this session hands out: dropping one is a command too.
    commands: mpsc::UnboundedSender<Command>,
    config: Config,
    /// The credit of each subscription: that of one lane for each lane that there was on this connection.
    credit: u32,
    ground: Ground,
    /// Where the bases of all subscriptions lie; `None` where there are to be none.
    bases: Option<HostMemory>,
    ingress: Ingress,
    next_id: u32,
    receivings: HashMap<SubscriptionId, Receiving>,
    watches: Watches,
    /// Answers to `List` under way; they come in the order of the questions.
    lists: VecDeque<(oneshot::Sender<Vec<TopicEntry>>, Vec<TopicEntry>)>,
    /// What the server is to be told. It is sent after each step, or with the next connection.
    outbox: VecDeque<ClientMessage>,
    /// Whether the user is done with it.
    closing: bool,
}

impl Session {
    pub(crate) fn new(commands: mpsc::UnboundedSender<Command>, config: Config) -> Result<Self, AllocError> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let capacity = Capacity {
            slots: slots::count(config.credit_chunks, config.lanes.most(), processors),
            slot_bytes: config.limits.chunk_bytes as usize, // Address space; only what is used takes memory.
        };
        let ingress = Ingress::new(SlotPool::new(capacity)?, config.workers);
        Ok(Self {
            ground: Ground {
                memory: HostMemory::on_demand(config.memory_bytes),
                device: config.device.clone(),
            },
            bases: config.keeps_bases().then(|| HostMemory::new(config.base_bytes)),
            commands,
            credit: config.credit_chunks,
            config,
            ingress,
            next_id: 1,
            receivings: HashMap::new(),
            watches: Watches::default(),
            lists: VecDeque::new(),
            outbox: VecDeque::new(),
            closing: false,
        })
    }

    /// Whether a user waits for anything that takes a connection.
    pub(crate) fn is_waited_for(&self) -> bool {
        !(self.receivings.is_empty() && self.watches.is_empty() && self.lists.is_empty())
    }

    /// The way in of all its chunks, for who wants to know how they overlap.
    pub(crate) fn ingress(&self) -> &Ingress {
        &self.ingress
    }

    /// Where its snapshots lie, for statistics.
    pub(crate) fn memory(&self) -> &HostMemory {
        &self.ground.memory
    }

    /// Where its bases lie, for who wants to know how much they take.
    pub(crate) fn bases(&self) -> Option<&HostMemory> {
        self.bases.as_ref()
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Runs on `link` until the user closes the session or the link is lost.
    pub(crate) async fn run(
        &mut self,
        link: &mut Link,
        commands: &mut mpsc::UnboundedReceiver<Command>,
    ) -> SessionError {
        self.attach(link);
        loop {
            if let Err(error) = self.step(link, commands).await {
                return error;
            }
        }
    }

    /// Asks the server for everything that the user wants.
    fn attach(&mut self, link: &Link) {
        self.allow_unread(link);
        let subscribe = self.receivings.iter_mut().map(|(id, receiving)| receiving.subscribe(*id));
        self.outbox.extend(subscribe.map(ClientMessage::Subscribe));
        let acknowledged = self.receivings.iter().filter_map(|(id, receiving)| {
            let (epoch, version) = receiving.history.acknowledged()?;
            Some(ClientMessage::Acknowledge { subscription: *id, epoch, version })
        });
        self.outbox.extend(acknowledged);
        self.outbox.extend(self.watches.messages());
        self.outbox.extend(self.lists.iter().map(|_| ClientMessage::List));
    }

    /// Takes what came last over a connection that is lost, and forgets the rest of it.
    pub(crate) fn detach(&mut self, last: Vec<Event>) {
        for event in last {
            if let Event::Chunk(header, generation, Ok(verified)) = event
                && let Some(receiving) = self.receivings.get_mut(&header.subscription)
            {
                receiving.handle_verified(generation, verified);
            }
        }
        self.outbox.clear();
        self.credit = self.config.credit_chunks;
        self.lists.iter_mut().for_each(|(_, known)| known.clear());
        for receiving in self.receivings.values_mut() {
            receiving.handle_detached(self.credit);
        }
    }

    /// Tells every subscription why nothing more comes.
    pub(crate) fn end(&self, error: &Arc<ClientError>) {
        for receiving in self.receivings.values() {
            receiving.end(SubscriptionError::disconnected(receiving.topic(), error));
        }
    }

    /// Sends what is to be said, then waits for one thing to happen.
    async fn step(
        &mut self,
        link: &mut Link,
        commands: &mut mpsc::UnboundedReceiver<Command>,
    ) -> Result<(), SessionError> {
        while let Some(message) = self.outbox.pop_front() {
            link.send(message).await?;
        }
        if self.closing {
            return Err(SessionError::ClosedHere);
        }
        link.note_bulky(|| self.receivings.values().any(Receiving::is_bulky));
        let look = self.receivings.values().filter_map(Receiving::look_at).min();
        let look_at = async {
            match look {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            command = commands.recv() => self.handle_command(command.unwrap_or(Command::Close), link),
            event = link.next() => self.handle_event(event?, link),
            () = look_at => self.handle_look(),
        }
    }

    /// Lets the server have all chunks on their way that credit was given for, and no more: then chunks that wait for
    /// memory can never block the control stream, and no subscription can starve another.
    fn allow_unread(&self, link: &Link) {
        let credit = u64::from(self.credit);
        let chunk_bytes = |r: &Receiving| r.chunk_bytes().unwrap_or(0).max(CHUNK_BYTES_USUAL);
        link.allow_unread(self.receivings.values().map(|r| credit * u64::from(chunk_bytes(r))).sum());
    }

    fn handle_event(&mut self, event: Event, link: &mut Link) -> Result<(), SessionError> {
        match event {
            Event::Message(message) => self.handle_message(message, link),
            Event::Opened(StreamHeader::Manifest(header), stream) => {
                if stream.lane().number() != 0 {
                    let found = "a manifest on a further lane";
                    return Err(Misbehaved::OutOfTurn { found, expected: "it on the first one" }.into());
                }
                let id = header.subscription;
                let Some(receiving) = find(&mut self.receivings, self.next_id, id)? else { return Ok(()) };
                receiving.handle_manifest_header(id)?;
                let counters = Arc::clone(&receiving.counters);
                link.receive_manifest(header, stream, self.config.limits, counters);
                Ok(())
            }
            Event::Opened(StreamHeader::Chunk(header), stream) => self.handle_chunk(header, stream, link),
            Event::Unreadable(HeaderError::Lane(error)) => Err(error.into()),
            Event::Unreadable(HeaderError::Message(error)) => Err(ClientError::from(error).into()),
            Event::Opened(..) | Event::Unreadable(_) | Event::GivenUp => Ok(()),
            Event::Manifest(id, manifest) => {
                let Some(receiving) = self.receivings.get_mut(&id) else { return Ok(()) };
                if let Err(ReceiveManifestError::Lane(LaneError::StreamGivenUp)) = manifest {
                    // The server gave the version up; its word on that is on the way.
                    receiving.handle_manifest_lost();
                    return Ok(());
                }
                let begun = receiving.handle_manifest(manifest?, &self.ground);
                self.allow_unread(link);
                self.start(id, begun, link)
            }
            Event::Chunk(header, generation, result) => {
                self.handle_received(header, generation, result, link)
            }
            Event::Joined => {
                self.handle_joined(link);
                Ok(())
            }
        }
    }

    /// Gives credit for a further lane, so that it is kept as busy as the first one, and takes it back no more: a lane that
    /// goes leaves its credit to the others.
    fn handle_joined(&mut self, link: &Link) {
        let lanes = u32::try_from(link.lanes()).unwrap_or(u32::MAX);
        let credit = self.config.credit_chunks.saturating_mul(lanes).min(Credit::MAX);
        let chunks = credit.saturating_sub(self.credit);
        self.credit += chunks;
        self.allow_unread(link);
        if chunks > 0 {
            for (subscription, receiving) in &mut self.receivings {
                receiving.handle_granted(chunks);
                self.outbox
                    .push_back(ClientMessage::Credit { subscription: *subscription, chunks });
            }
        }
    }

    fn handle_message(&mut self, message: ServerMessage, link: &mut Link) -> Result<(), SessionError> {
        match message {
            ServerMessage::Announce(announce) => {
                let id = announce.subscription;
                let Some(receiving) = find(&mut self.receivings, self.next_id, id)? else {
                    return Ok(());
                };
                let begun = receiving.handle_announce(announce, &self.ground);
                self.start(id, begun, link)
            }
            ServerMessage::Complete { subscription, epoch, version, digest } => {
                let Some(receiving) = find(&mut self.receivings, self.next_id, subscription)? else {
                    return Ok(());
                };
                if receiving.has_given_up((epoch, version)) {
                    return Ok(()); // The last word of this end was on the way when the server spoke.
                }
                receiving.handle_complete((epoch, version), digest)?;
                self.poll(subscription)
            }
            ServerMessage::Abort { subscription, epoch, version, reason } => {
                let credit = self.credit;
                let Some(receiving) = find(&mut self.receivings, self.next_id, subscription)? else {
                    return Ok(());
                };
                if receiving.has_ended((epoch, version)) {
                    return Ok(()); // The last word of this end, its commit, was on the way when the server spoke.
                }
                if !receiving.handle_abort((epoch, version), reason, credit) {
                    return Err(Misbehaved::WrongVersion { epoch, version }.into());
                }
                tracing::warn!(topic = %receiving.topic(), %version, "The server gave a version up: {reason}.");
                self.outbox
                    .push_back(ClientMessage::Abort { subscription, epoch, version, reason });
                self.outbox.push_back(ClientMessage::Credit { subscription, chunks: credit });
                Ok(())
            }
            ServerMessage::End { subscription, reason } => {
                find(&mut self.receivings, self.next_id, subscription)?;
                if let Some(receiving) = self.receivings.remove(&subscription) {
                    let topic = receiving.topic().clone();
                    if matches!(reason, EndReason::Withdrawn | EndReason::Expired) {
                        self.watches.handle_gone(&topic);
                    }
                    receiving.end(SubscriptionError::Ended { topic, reason });
                }
                Ok(())
            }
            ServerMessage::Topics { topics, more } => self.handle_topics(topics, more),
            ServerMessage::Found { watch, topics } => Ok(self.watches.handle_found(watch, topics)?),
            ServerMessage::Welcome(_) | _ => {
                Err(Misbehaved::OutOfTurn { found: "Welcome", expected: "an answer" }.into())
            }
        }
    }

    fn handle_topics(&mut self, topics: Vec<TopicEntry>, more: bool) -> Result<(), SessionError> {
        let unasked = Misbehaved::OutOfTurn { found: "Topics", expected: "no answer without a question" };
        let (_, known) = self.lists.front_mut().ok_or(unasked)?;
        known.extend(topics);
        if known.len() > TOPICS_MAX {
            return Err(Misbehaved::TooManyTopics(TOPICS_MAX).into());
        }
        if more {
            return Ok(());
        }
        if let Some((reply, known)) = self.lists.pop_front() {
            let _ = reply.send(known);
        }
        Ok(())
    }

    fn handle_chunk(
        &mut self,
        header: ChunkHeader,
        stream: DataIn,
        link: &mut Link,
    ) -> Result<(), SessionError> {
        let id = header.subscription;
        if !self.config.codecs.contains(header.codec) {
            return Err(Misbehaved::CodecNotOffered(header.codec.name()).into());
        }
        if header.attempt > 0 && !link.further().has_asked() {
            let found = "a chunk for another time";
            return Err(
                Misbehaved::OutOfTurn { found, expected: "each once, on a session's only lane" }.into()
            );
        }
        let Some(receiving) = find(&mut self.receivings, self.next_id, id)? else {
            return Ok(());
        };
        if let Some(ready) = receiving.handle_header(header, stream)? {
            self.receive(id, ready, link);
        }
        Ok(())
    }

    fn handle_received(
        &mut self,
        header: ChunkHeader,
        generation: u64,
        result: Result<Verified, ReceiveError>,
        link: &mut Link,
    ) -> Result<(), SessionError> {
        let subscription = header.subscription;
        let Some(receiving) = self.receivings.get_mut(&subscription) else {
            return Ok(());
        };
        match result {
            Ok(verified) => {
                if receiving.handle_verified(generation, verified) {
                    self.outbox.push_back(ClientMessage::Credit { subscription, chunks: 1 });
                }
                self.poll(subscription)
            }
            // The server gave the version up, and its word on that is on the way; or another lane has the chunk, or will.
            Err(ReceiveError::Lane(error)) => match link.lane().ended() {
                // With the first lane the session is lost, and its end is why, whichever lane this chunk came over.
                Some(ended) if error != LaneError::StreamGivenUp => Err(ended.into()),
                _ => {
                    if let Some(ready) = receiving.handle_lost(generation, header.chunk) {
                        self.receive(subscription, ready, link);
                    }
                    Ok(())
                }
            },
            Err(error) => match receiving.id().filter(|_| receiving.is_under_way(generation)) {
                Some(id) => {
                    let error = TransferError::chunk(error, receiving.landing().and_then(Landing::device));
                    self.fail(subscription, Failure::transfer(&id, error))
                }
                None => Ok(()),
            },
        }
    }

    /// Begins to receive what may be received now, or ends the subscription.
    fn start(
        &mut self,
        id: SubscriptionId,
        begun: Result<Vec<Ready>, Failure>,
        link: &mut Link,
    ) -> Result<(), SessionError> {
        match begun {
            Ok(chunks) => {
                for ready in chunks {
                    self.receive(id, ready, link);
                }
                self.poll(id)
            }
            Err(failure) => self.fail(id, failure),
        }
    }

    fn receive(&mut self, id: SubscriptionId, ready: Ready, link: &mut Link) {
        let Some(receiving) = self.receivings.get_mut(&id) else { return };
        let base = receiving.base.chunk(ready.header.chunk);
        let counters = Arc::clone(&receiving.counters);
        let task = link.receive_chunk(ready, base, self.ingress.clone(), counters);
        receiving.handle_begun(task);
    }

    /// Commits the version of a subscription once it is whole.
    fn poll(&mut self, subscription: SubscriptionId) -> Result<(), SessionError> {
        let Some(receiving) = self.receivings.get_mut(&subscription) else {
            return Ok(());
        };
        match receiving.poll() {
            Ok(None) => Ok(()),
            Ok(Some((snapshot, kept))) => {
                let (epoch, version): (Epoch, Version) = (snapshot.id().epoch, snapshot.id().version);
                receiving.delivery.put(snapshot);
                self.outbox
                    .push_back(ClientMessage::Committed { subscription, epoch, version, kept });
                Ok(())
            }
            Err(failure) => self.fail(subscription, failure),
        }
    }

    fn handle_look(&mut self) -> Result<(), SessionError> {
        let now = Instant::now();
        let looked = self
            .receivings
            .iter_mut()
            .map(|(id, receiving)| (*id, receiving.handle_look(now)));
        let stalled: Vec<_> = looked.filter_map(|(id, result)| Some((id, result.err()?))).collect();
        for (id, failure) in stalled {
            self.fail(id, failure)?;
        }
        Ok(())
    }

    /// Ends a subscription whose version is lost, and tells both ends; passes on what ends the session.
    fn fail(&mut self, subscription: SubscriptionId, failure: Failure) -> Result<(), SessionError> {
        let (id, error) = match failure {
            Failure::Misbehaved(error) => return Err(error.into()),
            Failure::Transfer(id, error) => (id, error),
        };
        if !error.is_final() {
            self.give_up(subscription, &id, &error);
            return Ok(());
        }
        let mut keep_place = false;
        if let Some(receiving) = self.receivings.remove(&subscription) {
            keep_place = receiving.keeps_place();
            receiving.end(error.for_user(&id));
        }
        let (epoch, version, reason) = (id.epoch, id.version, error.abort_reason());
        self.outbox
            .push_back(ClientMessage::Abort { subscription, epoch, version, reason });
        self.outbox.push_back(ClientMessage::Unsubscribe { subscription, keep_place });
        Ok(())
    }

    /// Gives up a version alone, and tells both ends; the subscription goes on with the next one.
    fn give_up(&mut self, subscription: SubscriptionId, id: &VersionId, error: &TransferError) {
        let credit = self.credit;
        let Some(receiving) = self.receivings.get_mut(&subscription) else { return };
        tracing::warn!(%id, %error, "A version is given up.");
        receiving.give_up(id, credit);
        receiving.delivery.put_failure(error.for_user(id));
        let (epoch, version, reason) = (id.epoch, id.version, error.abort_reason());
        self.outbox
            .push_back(ClientMessage::Abort { subscription, epoch, version, reason });
        self.outbox.push_back(ClientMessage::Credit { subscription, chunks: credit });
    }
}

/// The subscription called `id`; `None` when it has ended, which the server may not know yet.
fn find(
    receivings: &mut HashMap<SubscriptionId, Receiving>,
    next_id: u32,
    id: SubscriptionId,
) -> Result<Option<&mut Receiving>, Misbehaved> {
    match id.0 != 0 && id.0 < next_id {
        true => Ok(receivings.get_mut(&id)),
        false => Err(Misbehaved::UnknownSubscription(id)),
    }
}
