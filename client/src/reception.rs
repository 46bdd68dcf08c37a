//! A reception: executes the decisions of one subscription's [`Subscriber`]. It owns the memory, the tasks that write
//! to it, and the user's queue.

mod forwarding;
mod peers;
mod placing;

use crate::{
    Receipt, Relaying, Request, Snapshot, SubscriptionError,
    base::Base,
    buffers::Lent,
    command::Command,
    connection::ChunkTarget,
    destination::{Allocators, Destination},
    error::TransferError,
    held::HeldReport,
    holding::HoldCounter,
    load_report::LoadReport,
    other_servers::{Link, Links},
    progress::Counters,
    server_memory::{ServerMemory, Sharing},
    snapshot_queue::SnapshotQueue,
    source_progress::SourceProgress,
    source_table::SourceTable,
};
use forwarding::Forwarding;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};
use tensor_relay_device::{CacheLease, Device};
use tensor_relay_protocol::{
    AbortReason, Action, Announce, ChunkHeader, ClientMessage, Commit, Dtype, EncodingHash, EndReason, Epoch,
    Feature, ProtocolViolation, RelayId, Released, StreamToken, Subscriber, SubscriptionId, Topic, Verified,
    Version, VersionFault, VersionId, WantedGpu, sidecar::CudaDevice,
};
use tensor_relay_transport::{
    AbortOnDrop, DataIn, LaneKind, LaneKindReason, Tally,
    forwarding::Forward,
    ingress::{Ingress, ReceiveError},
};
use tokio::{sync::mpsc, time::Instant};

/// The size from which a version takes long enough to measure its rate.
const BULKY_BYTES: u64 = 64 << 20;

/// The time after which a smaller version takes long enough too: the path is slow, or lossy.
const BULKY_DURATION: Duration = Duration::from_secs(2);

/// The state of one subscription. It outlives connections.
#[derive(Debug)]
pub(crate) struct Reception {
    pub(crate) machine: Subscriber,
    pub(crate) queue: Arc<SnapshotQueue>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) holding: Arc<HoldCounter>,
    topic: Topic,
    keep_place: bool,
    /// The user's commands, for the reports of its snapshots.
    commands: mpsc::UnboundedSender<Command>,
    /// The last report that a version was loaded. Repeated on each connection, because the previous one may have lost
    /// it.
    loaded: Option<ClientMessage>,
    /// The user's buffers for the next version that starts.
    lent: Option<Lent>,
    /// The base for deltas.
    base: Base,
    /// Keeps the memory of dropped snapshots cached for later ones.
    #[expect(dead_code, reason = "it is only dropped")]
    cache_lease: CacheLease,
    /// When the current version was first announced.
    began: Instant,
    /// The destination of the current version.
    destination: Option<Destination>,
    /// The transport to the server that announced the current version last, and why it was chosen.
    transport: Option<(LaneKind, LaneKindReason)>,
    /// The counters of the current version, by codec.
    tally: Arc<Tally>,
    /// The sources from which parts of chunks arrive.
    progress: SourceProgress,
    /// The chunk streams that are not being read yet.
    streams: BTreeMap<StreamToken, (Link, DataIn)>,
    /// The tasks that receive chunks of the version in transfer. They are aborted when the version ends, so that none
    /// keeps its memory longer.
    tasks: Vec<AbortOnDrop>,
    /// The memory that the server lends for the current version, until it is placed.
    memory: Option<ServerMemory>,
    /// How the bytes of the current version come.
    sharing: Sharing,
    /// What the origin knows of the chunks that are here.
    held: HeldReport,
    /// The peers that sent chunks of the current version.
    givers: BTreeSet<[u8; 32]>,
    /// Offers versions to other members of their swarms, or through a relay.
    forwarding: Forwarding,
    /// The relay of which this is the receiving half.
    relay: Option<RelayId>,
    /// Whether the server waits for the source of the current version.
    is_waiting: bool,
    /// Whether the subscription is over.
    is_over: bool,
}

/// The session's state that a reception needs.
pub(crate) struct Context<'a, 'l> {
    /// The number of the subscription.
    pub(crate) id: SubscriptionId,
    pub(crate) links: &'a mut Links<'l>,
    pub(crate) allocators: &'a Allocators,
    pub(crate) ingress: &'a Ingress,
    /// Messages to the origin.
    pub(crate) outbox: &'a mut VecDeque<ClientMessage>,
    pub(crate) sources: &'a mut SourceTable,
}

impl Context<'_, '_> {
    /// Sends a message to the server of its subscription.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the origin does not offer a feature that it needs; and the origin's name.
    fn send(&mut self, mut message: ClientMessage) -> Result<(), (ProtocolViolation, String)> {
        if let ClientMessage::Subscribe(subscribe) = &mut message
            && subscribe.subscription == self.id
        {
            subscribe.memory = self.links.offers(Link::Origin, Feature::Memory);
            let (uuid, in_place) =
                (self.allocators.device.as_ref().and_then(Device::uuid), self.allocators.share_gpu);
            let wanted = uuid.map(|uuid| Box::new(WantedGpu { device: CudaDevice(uuid.bytes()), in_place }));
            subscribe.gpu = wanted.filter(|_| subscribe.memory);
        }
        let number = message.subscription().unwrap_or(self.id);
        let origin = (number == self.id).then_some(Link::Origin);
        let Some(link) = self.sources.link(number).or(origin) else { return Ok(()) }; // A source that was lost.
        if matches!(message, ClientMessage::Unsubscribe { .. }) {
            self.sources.leave(number);
        }
        match link {
            Link::Other(index) => self.links.send_to_other(index, message),
            Link::Origin => {
                self.links.check_features(&message)?;
                self.outbox.push_back(message);
            }
        }
        Ok(())
    }

    fn close_source(&mut self, source: SubscriptionId) {
        match self.sources.link(source) {
            Some(Link::Other(index)) => self.links.others.close_silent(index),
            _ => drop(self.send(ClientMessage::Unsubscribe { subscription: source, keep_place: false })),
        }
    }
}

impl Drop for Reception {
    /// Ends the user's queue. Usually a more precise error was queued before, and is the one reported.
    fn drop(&mut self) {
        let closed = Arc::new(tensor_relay_transport::LaneError::ClosedLocally.into());
        self.end(SubscriptionError::disconnected(&self.topic, &closed));
    }
}

impl Reception {
    /// A reception for `request`.
    pub(crate) fn new(
        request: &Request,
        machine: Subscriber,
        base: Base,
        cache_lease: CacheLease,
        commands: mpsc::UnboundedSender<Command>,
    ) -> Self {
        Self {
            machine,
            queue: Arc::new(SnapshotQueue::new(request.mode)),
            counters: Arc::default(),
            holding: Arc::default(),
            topic: request.topic.clone(),
            keep_place: request.keep_place,
            commands,
            loaded: None,
            lent: None,
            base,
            cache_lease,
            began: Instant::now(),
            destination: None,
            transport: None,
            tally: Arc::default(),
            progress: SourceProgress::default(),
            streams: BTreeMap::new(),
            tasks: vec![],
            memory: None,
            sharing: Sharing::Network,
            held: HeldReport::default(),
            givers: BTreeSet::new(),
            forwarding: Forwarding::default(),
            relay: None,
            is_waiting: false,
            is_over: false,
        }
    }

    /// Offers to `forward` what it receives.
    pub(crate) fn forward(&mut self, forward: &Arc<dyn Forward>) {
        self.forwarding = Forwarding::new(Arc::clone(forward));
    }

    /// Offers what it receives through a relay.
    pub(crate) fn relay(&mut self, relay: &Relaying) {
        self.relay = Some(relay.id);
        self.forward(&relay.forward);
    }

    /// The last report that a version was loaded.
    pub(crate) fn loaded(&self) -> Option<&ClientMessage> {
        self.loaded.as_ref()
    }

    pub(crate) fn set_loaded(&mut self, loaded: ClientMessage) {
        self.loaded = Some(loaded);
    }

    pub(crate) fn topic(&self) -> &Topic {
        &self.topic
    }

    /// Whether the server keeps the place of this named reader after the subscription.
    pub(crate) fn keeps_place(&self) -> bool {
        self.keep_place
    }

    /// Whether the subscription is over and can be dropped.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// The chunk size of the current manifest.
    pub(crate) fn chunk_bytes(&self) -> Option<u32> {
        self.machine.selection().map(|selection| selection.manifest().chunk_bytes())
    }

    /// The size of the version that is being received, if it is large or slow enough to measure its rate, and comes as fast as
    /// its path allows.
    pub(crate) fn bulky_bytes(&self) -> Option<u64> {
        let bytes = self.machine.selection().map_or(0, |selection| selection.payload_bytes());
        let is_bulky = bytes >= BULKY_BYTES || self.began.elapsed() >= BULKY_DURATION;
        (self.machine.is_receiving() && is_bulky && !self.machine.has_peers()).then_some(bytes)
    }

    /// Subscribes on a new connection.
    pub(crate) fn subscribe(&mut self) {
        self.queue.set_subscribe_sent(Some(Instant::now()));
        let base = self.base.offer(self.machine.resumable_chunks().as_ref());
        self.machine.subscribe(base);
    }

    /// Accepts the user's buffers for the next version. They are returned immediately if that version has arrived or is
    /// being received.
    pub(crate) fn handle_lent(&mut self, lent: Lent) {
        let is_next = !self.machine.is_receiving() && self.queue.is_empty();
        self.lent = is_next.then_some(lent);
    }

    /// Returns the user's buffers if no version is received into them yet.
    pub(crate) fn drop_unused_buffers(&mut self) {
        self.lent = None;
    }

    /// Whether a version is being received into the user's buffers.
    pub(crate) fn is_in_lent_buffers(&self) -> bool {
        self.destination.as_ref().is_some_and(Destination::is_lent)
    }

    /// Stops receiving the current version into the user's buffers, which are returned when their last writer has
    /// ended. The version is requested again under the number `id`, with `credit`.
    pub(crate) fn leave_buffers(&mut self, id: SubscriptionId, credit: u32) {
        self.machine.leave_memory(id, credit);
        self.streams.clear();
        self.tasks.clear();
        self.destination = None;
        self.forwarding.give_up();
        self.base.handle_given_up();
        self.counters.set_verified(0);
        self.queue.forget_topic(); // It may be withdrawn before the server has the request.
    }

    /// Handles `Announce`.
    pub(crate) fn handle_announce(
        &mut self,
        announce: Announce,
        memory: Option<ServerMemory>,
    ) -> Result<(), ProtocolViolation> {
        let passed_on = self.relay.map_or(Ok(()), |relay| announce.relays.through(relay).map(drop));
        let unwanted = match passed_on {
            _ if self.is_unwanted(&announce.id) => {
                Some(self.not_found(format!("{} is the oldest version in its place", announce.id)))
            }
            Err(reason) => Some(SubscriptionError::NotRelayed { id: announce.id.clone(), reason }),
            Ok(()) => None,
        };
        if let Some(error) = unwanted {
            self.is_over = true;
            self.machine.end_subscription(AbortReason::Superseded, self.keep_place);
            self.end(error);
            return Ok(());
        }
        let now = Instant::now();
        let resumes = self.machine.is_receiving();
        let shared = announce.shared.then_some((announce.id.epoch, announce.id.version));
        let (version, afresh) = (announce.id.version.0, announce.afresh.then(|| announce.id.clone()));
        self.machine
            .handle_announce(announce, now.into_std(), self.counters.received_bytes())?;
        self.memory = memory.filter(|_| self.machine.is_lent());
        self.held.begin(shared);
        if !resumes {
            self.givers.clear();
            self.began = now;
            self.counters.begin(version, 0); // Until its manifest has arrived.
        }
        if let Some(version) = afresh {
            self.base.handle_given_up(); // The base may hold the earlier, different content: drop it.
            tracing::warn!(%version, "The server's content differs from what was received before under this epoch and number, or it never had a version as new: it sends this one in full. Different bytes were published under one epoch.");
        }
        self.is_waiting = false;
        self.queue.announce();
        Ok(())
    }

    /// Handles `Waiting`.
    pub(crate) fn handle_waiting(&mut self, epoch: Epoch, version: Version) -> Result<(), ProtocolViolation> {
        let (now, received_bytes) = (Instant::now().into_std(), self.counters.received_bytes());
        self.machine.handle_waiting((epoch, version), now, received_bytes)
    }

    /// Whether the user wants another version and no other.
    fn is_unwanted(&self, id: &VersionId) -> bool {
        self.machine.only_version().is_some_and(|(epoch, version)| {
            version != id.version || epoch.is_some_and(|epoch| epoch != id.epoch)
        })
    }

    fn not_found(&self, detail: String) -> SubscriptionError {
        let (_, version) = self.machine.only_version().expect("the user wants only one version");
        SubscriptionError::VersionNotFound { topic: self.topic.clone(), version, detail }
    }

    /// Handles `End`.
    pub(crate) fn handle_end(&mut self, reason: EndReason) {
        self.forwarding.end(&self.topic, reason);
        let error = match (self.machine.only_version(), reason, self.queue.given_up()) {
            (Some(_), EndReason::NotFound, _) => {
                self.not_found("it was replaced or withdrawn, or is not published yet".into())
            }
            (Some(_), EndReason::Done, Some((_, reason))) => {
                self.not_found(format!("the server aborted its transfer: {reason}"))
            }
            _ => SubscriptionError::Ended { topic: self.topic.clone(), reason },
        };
        self.end(error);
    }

    /// Handles a chunk's stream after its header.
    pub(crate) fn handle_chunk(
        &mut self,
        header: ChunkHeader,
        token: StreamToken,
        stream: (Link, DataIn),
    ) -> Result<(), ProtocolViolation> {
        self.streams.insert(token, stream);
        self.note_time();
        self.machine
            .handle_chunk(header, token)
            .inspect_err(|_| drop(self.streams.remove(&token)))
    }

    /// Handles a chunk that is verified and in its place.
    pub(crate) fn handle_verified(&mut self, token: StreamToken, verified: Verified) {
        self.note_time();
        self.machine.handle_verified(token, verified);
        self.held.note_change();
        self.counters.set_verified(self.machine.held_bytes());
        if std::mem::replace(&mut self.is_waiting, false) {
            self.queue.announce();
        }
    }

    /// Handles a stream whose chunk is invalid or cannot be placed. An invalid one of a further source is requested of
    /// others, the source is left, and the error is returned; any other one fails the version.
    pub(crate) fn handle_failed(&mut self, token: StreamToken, error: ReceiveError) -> Option<ReceiveError> {
        if is_other_encoding(&error) && self.machine.handle_wrong_encoding(token) {
            return None; // The peer is barred, which is logged.
        }
        if error.is_invalid() && self.machine.handle_corrupt(token) {
            return Some(error);
        }
        if self.machine.is_receiving_chunk(token) {
            let device = self.destination.as_ref().and_then(Destination::device);
            self.fail(&TransferError::chunk(error, device));
        }
        None
    }

    /// Handles the same on a connection that has ended: a peer that lied and closed it is no better.
    pub(crate) fn handle_last_failure(&mut self, token: StreamToken, error: &ReceiveError) {
        if is_other_encoding(error) {
            self.machine.handle_wrong_encoding(token);
        }
    }

    /// Checks whether there was progress since the last check.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        for source in self.progress.take() {
            self.machine.handle_part(source);
        }
        self.machine.handle_timeout(now.into_std(), self.counters.received_bytes());
    }

    /// Handles the end of the connection to the origin, once its tasks have ended: keeps verified chunks, and drops the
    /// connection's state. The next connection begins with `allowance` as credit.
    pub(crate) fn handle_detached(&mut self, allowance: u32) {
        self.queue.set_subscribe_sent(None);
        if !self.machine.has_committed() {
            self.queue.forget_topic(); // Its only version may be withdrawn before the next connection.
        }
        if !self.machine.has_other_sources() {
            self.streams.clear();
            self.tasks.clear();
        }
        self.memory = None;
        self.held.end();
        self.machine.handle_detached(allowance);
        self.counters.set_verified(self.machine.held_bytes());
    }

    /// Handles `Announce` of a further source of the current version.
    pub(crate) fn handle_source_announce(&mut self, announce: Announce) -> Result<(), ProtocolViolation> {
        let (now, received_bytes) = (Instant::now().into_std(), self.counters.received_bytes());
        self.machine.handle_announce(announce, now, received_bytes)
    }

    /// Ends the user's queue.
    pub(crate) fn end(&self, error: SubscriptionError) {
        self.queue.end(error);
    }

    /// Executes all pending actions of the state machine. Afterwards the subscription may be [over](Self::is_over).
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the server broke a rule: the session ends.
    pub(crate) fn act(&mut self, context: &mut Context<'_, '_>) -> Result<(), ProtocolViolation> {
        self.note_time();
        while let Some(action) = self.machine.poll() {
            match action {
                Action::Send(message) => {
                    self.allow_ordered(&message, context);
                    if let Err((ProtocolViolation::FeatureNotOffered { feature, .. }, agent)) =
                        context.send(message)
                    {
                        let topic = self.topic.clone();
                        self.is_over = true;
                        self.end(SubscriptionError::NotSupported { topic, feature, agent });
                        return Ok(());
                    }
                }
                Action::Place { announce, selection, resumes } => {
                    context.sources.end_version(context.id);
                    if let Some(origin) = context.links.get(Link::Origin) {
                        self.transport = Some((origin.control().kind(), origin.control().reason()));
                    }
                    if let Err(error) = self.place(&announce, &selection, resumes, context)? {
                        self.fail(&error);
                    }
                }
                Action::Receive { stream, header, range, dtype, encoding } => {
                    self.receive(stream, header, (range, dtype, encoding), context);
                }
                Action::Discard(stream) => drop(self.streams.remove(&stream)),
                Action::Commit(commit) => {
                    context.links.others.handle_version_ended(context.id);
                    self.commit(commit);
                }
                Action::Seek => self.ask_sources(context),
                Action::Peers(sources) => {
                    context.links.others.name_peers(context.id, sources);
                    self.ask_peers(context);
                }
                Action::PeerLied(source) => self.bar(source, context),
                Action::SourceDiffers(source) => self.warn_of_differing(source, context),
                Action::CloseSource(source) => context.close_source(source),
                Action::Release { id, reason } => {
                    context.links.others.handle_version_ended(context.id);
                    self.release(id, reason);
                }
                Action::Waiting => self.report_waiting(),
                Action::Fail(fault) => self.fail(&self.transfer_error(fault)),
            }
        }
        Ok(())
    }

    fn receive(
        &mut self,
        token: StreamToken,
        header: ChunkHeader,
        (range, dtype, encoding): (std::ops::Range<u64>, Dtype, Option<EncodingHash>),
        context: &mut Context<'_, '_>,
    ) {
        let (Some((link, stream)), Some(destination)) = (self.streams.remove(&token), &self.destination)
        else {
            return;
        };
        let link = context.sources.link(header.subscription).unwrap_or(link);
        let (Some(id), Some(connection)) = (self.machine.current_version(), context.links.get(link)) else {
            return self.machine.handle_lost(token); // Its connection was lost.
        };
        // Another server that was not named by the origin may encode chunks otherwise than the origin says.
        let is_vouched = link == Link::Origin || encoding.is_some();
        let target = ChunkTarget {
            encoding,
            forwarded: self.forwarding.arriving().filter(|_| is_vouched),
            sink: destination.sink(id),
            range,
            dtype,
            base: self.base.chunk(header.chunk),
            tally: Arc::clone(&self.tally),
            giver: link.giver(),
            counters: Arc::clone(&self.counters),
            progress: Arc::new(self.progress.begin(&header)),
        };
        if self.tasks.len() == self.tasks.capacity() {
            self.tasks.retain(|task| !task.0.is_finished()); // Finished tasks need no abort.
        }
        let task = connection.receive_chunk((context.id, token), header, stream, target, context.ingress);
        self.tasks.extend(task.map(AbortOnDrop));
    }

    /// Asks each further server that is connected for chunks of the current version, unless it was asked already.
    fn ask_sources(&mut self, context: &mut Context<'_, '_>) {
        if !context.links.may_have_sources() {
            return;
        }
        for index in context.links.others.usable() {
            let link = Link::Other(index);
            if self.machine.wants_boxes() && !context.links.offers(link, Feature::Boxes) {
                continue;
            }
            if self.machine.wants_sources() && !context.sources.is_asked(context.id, link) {
                let source = context.links.others.take_number(index);
                context.sources.insert(source, context.id, link);
                self.machine.ask_source(source);
            }
        }
    }

    fn warn_of_differing(&self, source: SubscriptionId, context: &mut Context<'_, '_>) {
        let link = context.sources.link(source);
        let peer = link.and_then(|link| context.links.get(link)).map(|it| it.control().peer());
        tracing::warn!(
            topic = %self.topic, version = ?self.machine.current_version(), ?peer,
            "Another server has other content than the origin under the same epoch and version, or sent an invalid chunk: it \
             is not used for this version. Name only servers with the same content."
        );
    }

    /// Delivers the version to the user.
    fn commit(&mut self, commit: Commit) {
        let (Some(destination), Some((transport, transport_reason))) = (&self.destination, self.transport)
        else {
            return;
        };
        let payload = match self.forwarding.commit(|| destination.commit()) {
            Ok(payload) => payload,
            Err(error) => return self.fail(&error.into()),
        };
        self.destination = None;
        self.tasks.clear();
        // The gap is reported only now: an announcement may be repeated after a lost connection, or aborted.
        if let Some(gap) = commit.gap {
            self.queue.put_gap(gap);
        }
        let (version, took_ms) = (&commit.announce.id, self.began.elapsed().as_millis() as u64);
        let wire_bytes = self.counters.get().wire_bytes;
        tracing::debug!(%version, took_ms, wire_bytes, "A version is complete and verified.");
        let wanted_bytes = commit.selection.wanted_bytes();
        let received_bytes = match self.sharing {
            sharing if sharing.is_memory() => 0,
            _ => commit.selection.payload_bytes(),
        };
        self.finish_held();
        let is_base = self.base.handle_committed();
        self.machine.handle_committed(is_base);
        let (subscription, key) = (commit.announce.subscription, (version.epoch, version.version));
        self.queue.put(Snapshot {
            load_report: LoadReport::new(self.commands.clone(), subscription, key, commit.digest),
            id: commit.announce.id,
            selection: payload.narrow_selection(&commit.selection),
            payload,
            metadata: commit.announce.metadata,
            relays: commit.announce.relays,
            skipped: commit.announce.skipped,
            new_epoch: commit.new_epoch,
            receipt: Receipt {
                duration: self.began.elapsed(),
                wire_bytes,
                wanted_bytes,
                received_bytes,
                chunks: commit.chunks,
                resumed: commit.reconnections,
                transport,
                transport_reason,
                codecs: self.tally.stats(),
                sharing: self.sharing,
                sources: self.sources(wire_bytes),
            },
        });
        if self.machine.is_done() {
            self.is_over = true;
            self.end(SubscriptionError::Ended { topic: self.topic.clone(), reason: EndReason::Done });
        }
    }

    fn release(&mut self, id: VersionId, reason: Released) {
        self.tasks.clear();
        self.memory = None;
        self.held.end();
        self.destination = None;
        self.forwarding.give_up();
        self.base.handle_given_up();
        match reason {
            Released::ByServer(reason) => {
                tracing::warn!(%id, "The server aborted a version: {reason}.");
                if !self.machine.has_committed() {
                    self.queue.handle_given_up(id, reason);
                }
            }
            Released::Replaced => {
                self.began = Instant::now();
                tracing::warn!(given_up = %id, "The received part of a version is discarded: the server has another version.");
            }
            Released::ByClient => {}
        }
    }

    /// Reports once that the server cannot read the version at the moment. A user without any version waits for it as
    /// for a topic that does not exist.
    fn report_waiting(&mut self) {
        let Some(id) = self.machine.current_version().cloned() else { return };
        if std::mem::replace(&mut self.is_waiting, true) {
            return;
        }
        tracing::warn!(%id, "The server cannot read a version at the moment. It tries again, and the transfer continues then.");
        if !self.machine.has_committed() {
            self.queue.handle_given_up(id, AbortReason::SourceLost);
        }
    }

    fn transfer_error(&self, fault: VersionFault) -> TransferError {
        match fault {
            VersionFault::Mismatch { expected, found } => TransferError::Mismatch { expected, found },
            VersionFault::OtherHash(chunk) => TransferError::OtherHash(chunk),
            VersionFault::Box(misfit) => TransferError::Box(misfit),
            VersionFault::Stalled(timeout) => {
                // The device is at fault if the version waits for it, otherwise the server.
                let device: Option<&Device> = self.destination.as_ref().and_then(Destination::awaited_device);
                TransferError::stalled(timeout.as_millis(), device)
            }
        }
    }

    /// Gives up the current version, and the subscription too if later versions would fail as well. Reports the error
    /// to the server and to the user.
    fn fail(&mut self, error: &TransferError) {
        let Some(id) = self.machine.current_version().cloned() else { return };
        let (reason, user_error) = (error.abort_reason(), error.for_user(&id));
        if error.is_final() {
            self.is_over = true;
            self.machine.end_subscription(reason, self.keep_place);
            self.end(user_error);
        } else {
            tracing::warn!(%id, %error, "A version is given up.");
            self.machine.give_up(reason);
            self.queue.put_failure(user_error);
        }
    }
}

/// Whether a peer sent other bytes than the origin named.
fn is_other_encoding(error: &ReceiveError) -> bool {
    matches!(error, ReceiveError::OtherEncoding { .. } | ReceiveError::WrongLength { .. })
}

#[cfg(test)]
mod tests;
