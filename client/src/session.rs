//! The task behind a client: hears the server, the network and the user, and lets each subscription decide.

use crate::{
    ClientError, Config, Subscription, SubscriptionError,
    error::{SessionError, TransferError},
    receiving::{Failure, Ready, Receiving},
};
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};
use tensor_relay_device::{AllocError, Capacity, HostMemory, SlotPool};
use tensor_relay_protocol::{
    ChunkHeader, ClientMessage, Epoch, Manifest, Misbehaved, Mode, ServerMessage, StreamHeader, Subscribe,
    SubscriptionId, Topic, TopicEntry, Verified, Version,
};
use tensor_relay_transport::{
    DataIn, HeaderError, Lane, LaneError, control,
    ingress::{Ingress, ReceiveError, ReceiveManifestError, receive_manifest},
};
use tokio::{
    sync::{mpsc, oneshot},
    task::{JoinError, JoinSet},
    time::Instant,
};

/// What a user wants.
#[derive(Debug)]
pub(crate) enum Command {
    Subscribe(Topic, oneshot::Sender<Subscription>),
    Unsubscribe(SubscriptionId),
    List(oneshot::Sender<Vec<TopicEntry>>),
    Close,
}

/// The size that chunks are taken to have until a manifest says otherwise: what servers use by default.
const CHUNK_BYTES_USUAL: u32 = 4 << 20;

/// The most topics kept of one answer to `List`. A server that offers more is broken or hostile.
const TOPICS_MAX: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct Session {
    lane: Lane,
    sender: control::Sender<ClientMessage>,
    /// For the subscriptions that this session hands out: dropping one is a command too.
    commands: mpsc::UnboundedSender<Command>,
    config: Config,
    memory: HostMemory,
    ingress: Ingress,
    next_id: u32,
    receivings: HashMap<SubscriptionId, Receiving>,
    /// Answers to `List` under way; they come in the order of the questions.
    lists: VecDeque<(oneshot::Sender<Vec<TopicEntry>>, Vec<TopicEntry>)>,
    tasks: JoinSet<Event>,
}

/// What the session's own tasks come back with.
#[derive(Debug)]
enum Event {
    Opened(Result<(StreamHeader, DataIn), HeaderError>),
    Manifest(SubscriptionId, Result<Manifest, ReceiveManifestError>),
    Chunk(ChunkHeader, u64, Result<Verified, ReceiveError>),
    /// A task that was cut off with the version it belonged to.
    CutOff,
}

impl Event {
    /// What a task that did not end by itself came to. A panic is passed on.
    fn cut_off(error: JoinError) -> Self {
        match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Self::CutOff,
        }
    }
}

impl Session {
    pub(crate) fn new(
        lane: Lane,
        sender: control::Sender<ClientMessage>,
        commands: mpsc::UnboundedSender<Command>,
        config: Config,
    ) -> Result<Self, AllocError> {
        let capacity = Capacity {
            slots: config.credit_chunks.max(1) as usize, // As many encoded chunks as one subscription has credit for.
            slot_bytes: config.limits.chunk_bytes as usize, // Address space; only what is used takes memory.
        };
        let ingress = Ingress::new(SlotPool::new(capacity)?, config.workers);
        Ok(Self {
            memory: HostMemory::new(config.memory_bytes),
            lane,
            sender,
            commands,
            config,
            ingress,
            next_id: 1,
            receivings: HashMap::new(),
            lists: VecDeque::new(),
            tasks: JoinSet::new(),
        })
    }

    /// Runs until the user closes it or the connection ends, and tells every subscription why.
    #[tracing::instrument(name = "session", skip_all, fields(peer = %self.lane.peer()))]
    pub(crate) async fn run(
        mut self,
        mut receiver: control::Receiver<ServerMessage>,
        mut commands: mpsc::UnboundedReceiver<Command>,
    ) {
        let error = loop {
            if let Err(error) = self.step(&mut receiver, &mut commands).await {
                break error;
            }
        };
        let (code, text) = (error.close_code(), error.to_string());
        let by_user = matches!(error, SessionError::ClosedHere);
        let error = Arc::new(ClientError::from(error));
        tracing::debug!(%error, "The session ended.");
        for receiving in self.receivings.values() {
            receiving.end(SubscriptionError::disconnected(receiving.topic(), &error));
        }
        let lane = self.lane.clone();
        drop(self);
        if by_user {
            // What was committed is to be told before good-bye.
            receiver.flush().await;
        }
        lane.close(code, &text);
    }

    async fn step(
        &mut self,
        receiver: &mut control::Receiver<ServerMessage>,
        commands: &mut mpsc::UnboundedReceiver<Command>,
    ) -> Result<(), SessionError> {
        let look = self.receivings.values().filter_map(Receiving::look_at).min();
        let look_at = async {
            match look {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            command = commands.recv() => self.handle_command(command.unwrap_or(Command::Close)).await,
            message = receiver.next() => self.handle_message(message?).await,
            stream = self.lane.accept_data() => {
                let mut stream = stream?;
                let timeout = self.config.stall_timeout;
                self.tasks.spawn(async move {
                    match tokio::time::timeout(timeout, stream.read_header()).await {
                        Ok(header) => Event::Opened(header.map(|header| (header, stream))),
                        Err(_) => Event::Opened(Err(LaneError::StreamGivenUp.into())),
                    }
                });
                Ok(())
            }
            Some(event) = self.tasks.join_next() => {
                let event = event.unwrap_or_else(Event::cut_off);
                self.handle_event(event).await
            }
            () = look_at => self.handle_look().await,
        }
    }

    async fn handle_command(&mut self, command: Command) -> Result<(), SessionError> {
        match command {
            Command::Subscribe(topic, reply) => self.subscribe(topic, reply).await,
            Command::Unsubscribe(id) => {
                if self.receivings.remove(&id).is_some() {
                    self.sender.send(ClientMessage::Unsubscribe(id)).await?;
                }
                Ok(())
            }
            Command::List(reply) => {
                self.lists.push_back((reply, vec![]));
                Ok(self.sender.send(ClientMessage::List).await?)
            }
            Command::Close => Err(SessionError::ClosedHere),
        }
    }

    async fn subscribe(
        &mut self,
        topic: Topic,
        reply: oneshot::Sender<Subscription>,
    ) -> Result<(), SessionError> {
        let subscription = SubscriptionId(self.next_id);
        self.next_id += 1;
        let credit = self.config.credit_chunks;
        let topic_name = topic.clone();
        let receiving = Receiving::new(topic.clone(), credit, self.config.stall_timeout);
        let ends = (Arc::clone(&receiving.delivery), Arc::clone(&receiving.counters));
        self.receivings.insert(subscription, receiving);
        self.allow_unread();
        let subscribe = Subscribe { subscription, topic, mode: Mode::Latest, credit, have: None };
        self.sender.send(ClientMessage::Subscribe(subscribe)).await?;
        // A user who went away meanwhile drops the handle, which unsubscribes.
        let commands = self.commands.clone();
        let _ = reply.send(Subscription::new(
            subscription,
            topic_name,
            ends,
            commands,
            self.config.topic_timeout,
        ));
        Ok(())
    }

    /// Lets the server have all chunks on their way that credit was given for, and no more: then chunks that wait for
    /// memory can never block the control stream, and no subscription can starve another.
    fn allow_unread(&self) {
        let credit = u64::from(self.config.credit_chunks);
        let chunk_bytes = |r: &Receiving| r.chunk_bytes().unwrap_or(0).max(CHUNK_BYTES_USUAL);
        self.lane
            .allow_unread(self.receivings.values().map(|r| credit * u64::from(chunk_bytes(r))).sum());
    }

    async fn handle_message(&mut self, message: ServerMessage) -> Result<(), SessionError> {
        match message {
            ServerMessage::Announce(announce) => {
                let id = announce.subscription;
                let Some(receiving) = find(&mut self.receivings, self.next_id, id)? else {
                    return Ok(());
                };
                let begun = receiving.handle_announce(announce, &self.memory);
                self.start(id, begun).await
            }
            ServerMessage::Complete { subscription, epoch, version, digest } => {
                let Some(receiving) = find(&mut self.receivings, self.next_id, subscription)? else {
                    return Ok(());
                };
                receiving.handle_complete((epoch, version), digest)?;
                self.poll(subscription).await
            }
            ServerMessage::Abort { subscription, epoch, version, reason } => {
                let credit = self.config.credit_chunks;
                let Some(receiving) = find(&mut self.receivings, self.next_id, subscription)? else {
                    return Ok(());
                };
                if !receiving.handle_abort((epoch, version), credit) {
                    return Err(Misbehaved::WrongVersion { epoch, version }.into());
                }
                tracing::warn!(topic = %receiving.topic(), %version, "The server gave a version up: {reason}.");
                self.sender
                    .send(ClientMessage::Abort { subscription, epoch, version, reason })
                    .await?;
                Ok(self.sender.send(ClientMessage::Credit { subscription, chunks: credit }).await?)
            }
            ServerMessage::End { subscription, reason } => {
                find(&mut self.receivings, self.next_id, subscription)?;
                if let Some(receiving) = self.receivings.remove(&subscription) {
                    let topic = receiving.topic().clone();
                    receiving.end(SubscriptionError::Ended { topic, reason });
                }
                Ok(())
            }
            ServerMessage::Topics { topics, more } => self.handle_topics(topics, more),
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

    async fn handle_event(&mut self, event: Event) -> Result<(), SessionError> {
        match event {
            Event::Opened(Ok((StreamHeader::Manifest(header), stream))) => {
                let (id, limits) = (header.subscription, self.config.limits);
                let Some(receiving) = find(&mut self.receivings, self.next_id, id)? else { return Ok(()) };
                receiving.handle_manifest_header(id)?;
                let counters = Arc::clone(&receiving.counters);
                self.tasks.spawn(async move {
                    let progress = |bytes| counters.add_moved(bytes);
                    Event::Manifest(id, receive_manifest(stream, &header, &limits, &progress).await)
                });
                Ok(())
            }
            Event::Opened(Ok((StreamHeader::Chunk(header), stream))) => self.handle_chunk(header, stream),
            Event::Opened(Ok(_) | Err(HeaderError::Lane(LaneError::StreamGivenUp))) => Ok(()),
            Event::Opened(Err(HeaderError::Lane(error))) => Err(error.into()),
            Event::Opened(Err(HeaderError::Message(error))) => Err(ClientError::from(error).into()),
            Event::Opened(Err(_)) => Ok(()),
            Event::Manifest(id, manifest) => {
                let Some(receiving) = self.receivings.get_mut(&id) else { return Ok(()) };
                if let Err(ReceiveManifestError::Lane(LaneError::StreamGivenUp)) = manifest {
                    // The server gave the version up; its word on that is on the way.
                    receiving.handle_manifest_lost();
                    return Ok(());
                }
                let manifest = manifest?;
                let begun = receiving.handle_manifest(manifest, &self.memory);
                self.allow_unread();
                self.start(id, begun).await
            }
            Event::Chunk(header, generation, result) => {
                self.handle_received(header, generation, result).await
            }
            Event::CutOff => Ok(()),
        }
    }

    fn handle_chunk(&mut self, header: ChunkHeader, stream: DataIn) -> Result<(), SessionError> {
        let id = header.subscription;
        if !self.config.codecs.contains(header.codec) {
            return Err(Misbehaved::CodecNotOffered(header.codec.name()).into());
        }
        let Some(receiving) = find(&mut self.receivings, self.next_id, id)? else {
            return Ok(());
        };
        if let Some(ready) = receiving.handle_header(header, stream)? {
            self.receive(id, ready);
        }
        Ok(())
    }

    async fn handle_received(
        &mut self,
        header: ChunkHeader,
        generation: u64,
        result: Result<Verified, ReceiveError>,
    ) -> Result<(), SessionError> {
        let subscription = header.subscription;
        let Some(receiving) = self.receivings.get_mut(&subscription) else {
            return Ok(());
        };
        match result {
            Ok(verified) => {
                if receiving.handle_verified(generation, verified) {
                    self.sender.send(ClientMessage::Credit { subscription, chunks: 1 }).await?;
                }
                self.poll(subscription).await
            }
            // The server gave the version up; its word on that is on the way.
            Err(ReceiveError::Lane(LaneError::StreamGivenUp)) => Ok(()),
            Err(ReceiveError::Lane(error)) => Err(error.into()),
            Err(error) => match receiving.id().filter(|_| receiving.is_under_way(generation)) {
                Some(id) => {
                    self.fail(subscription, Failure::Transfer(id, TransferError::Chunk(error)))
                        .await
                }
                None => Ok(()),
            },
        }
    }

    /// Begins to receive what may be received now, or ends the subscription.
    async fn start(
        &mut self,
        id: SubscriptionId,
        begun: Result<Vec<Ready>, Failure>,
    ) -> Result<(), SessionError> {
        match begun {
            Ok(chunks) => {
                for ready in chunks {
                    self.receive(id, ready);
                }
                self.poll(id).await
            }
            Err(failure) => self.fail(id, failure).await,
        }
    }

    fn receive(&mut self, id: SubscriptionId, Ready { header, stream, place, generation }: Ready) {
        let Some(receiving) = self.receivings.get_mut(&id) else { return };
        let (ingress, counters) = (self.ingress.clone(), Arc::clone(&receiving.counters));
        let task = self.tasks.spawn(async move {
            let progress = |bytes| counters.add_wire(bytes);
            let received = ingress
                .receive_chunk(stream, &header, place.dtype, place.range, &*place.sink, &progress)
                .await;
            Event::Chunk(header, generation, received)
        });
        receiving.handle_begun(task);
    }

    /// Commits the version of a subscription once it is whole.
    async fn poll(&mut self, subscription: SubscriptionId) -> Result<(), SessionError> {
        let Some(receiving) = self.receivings.get_mut(&subscription) else {
            return Ok(());
        };
        match receiving.poll() {
            Ok(None) => Ok(()),
            Ok(Some(snapshot)) => {
                let (epoch, version): (Epoch, Version) = (snapshot.id().epoch, snapshot.id().version);
                receiving.delivery.put(snapshot);
                Ok(self
                    .sender
                    .send(ClientMessage::Committed { subscription, epoch, version })
                    .await?)
            }
            Err(failure) => self.fail(subscription, failure).await,
        }
    }

    async fn handle_look(&mut self) -> Result<(), SessionError> {
        let now = Instant::now();
        let looked = self
            .receivings
            .iter_mut()
            .map(|(id, receiving)| (*id, receiving.handle_look(now)));
        let stalled: Vec<_> = looked.filter_map(|(id, result)| Some((id, result.err()?))).collect();
        for (id, failure) in stalled {
            self.fail(id, failure).await?;
        }
        Ok(())
    }

    /// Ends a subscription whose version is lost, and tells both ends; passes on what ends the session.
    async fn fail(&mut self, subscription: SubscriptionId, failure: Failure) -> Result<(), SessionError> {
        let (id, error) = match failure {
            Failure::Misbehaved(error) => return Err(error.into()),
            Failure::Transfer(id, error) => (id, error),
        };
        if let Some(receiving) = self.receivings.remove(&subscription) {
            receiving.end(error.for_user(&id));
        }
        let (epoch, version, reason) = (id.epoch, id.version, error.abort_reason());
        self.sender
            .send(ClientMessage::Abort { subscription, epoch, version, reason })
            .await?;
        Ok(self.sender.send(ClientMessage::Unsubscribe(subscription)).await?)
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
