//! The driver of a client's session: dispatches server messages, network events and user commands to the subscriptions,
//! and executes their decisions.
//!
//! A session outlives its connections: the [`reconnector`](crate::reconnector) gives it one [`Connection`] after
//! another.

mod alarm;
mod allowance;
mod commands;
mod from_peers;
mod from_sources;
mod messages;
mod slots;

use crate::{
    ClientError, Config, SubscriptionError,
    command::Command,
    connection::{Connection, Event, Target},
    destination::{Allocators, SnapshotMemory},
    error::SessionError,
    other_servers::{Link, LinkEvent, Links, OtherServers, Promoted},
    probing::{PROBE_UNREAD_BYTES, Probing},
    reception::{Context, Reception},
    source_table::{Owner, SourceTable},
    watches::Watches,
};
use alarm::Alarm;
use allowance::Allowance;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};
use tensor_relay_device::{AllocError, Capacity, HostMemory, SlotPool};
use tensor_relay_protocol::{
    ChunkHeader, ClientMessage, Feature, LaneId, ManifestHeader, ProtocolViolation, StreamHeader,
    StreamToken, SubscriptionId, TopicEntry, Verified,
};
use tensor_relay_transport::{
    DataIn, HeaderError, LaneError,
    forwarding::Origin,
    ingress::{Ingress, ReceiveError, ReceiveManifestError},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

#[derive(Debug)]
pub(crate) struct Session {
    /// Cloned into each subscription's handle, whose destructor sends a command too.
    commands: mpsc::UnboundedSender<Command>,
    config: Config,
    allowance: Allowance,
    allocators: Allocators,
    /// The memory for the bases of all subscriptions; `None` without bases.
    bases: Option<HostMemory>,
    ingress: Ingress,
    next_id: u32,
    receptions: BTreeMap<SubscriptionId, Reception>,
    /// The numbers of subscriptions that were renewed, by the number under which they were opened.
    renumbered: BTreeMap<SubscriptionId, SubscriptionId>,
    sources: SourceTable,
    /// The token of the next chunk stream.
    next_stream: u64,
    watches: Watches,
    /// The callers of `List`, with the topics received so far. The server answers in the order of the requests.
    lists: VecDeque<(oneshot::Sender<Vec<TopicEntry>>, Vec<TopicEntry>)>,
    probing: Probing,
    /// Rings when a version's progress is to be checked.
    alarm: Alarm,
    /// Messages to the server, sent before the next step. A new connection discards them, since its own requests
    /// replace them.
    outbox: VecDeque<ClientMessage>,
    /// The unsent messages about the subscriptions to a source that has become the origin.
    carried: VecDeque<ClientMessage>,
    /// Whether there is a connection, on which subscriptions have been requested.
    is_connected: bool,
    /// Whether the server has sent `Drain` on this connection.
    is_draining: bool,
    /// Whether the user has closed the client.
    is_closing: bool,
}

impl Session {
    pub(crate) fn new(commands: mpsc::UnboundedSender<Command>, config: Config) -> Result<Self, AllocError> {
        let lanes_max = config.lanes.max().saturating_mul(1 + config.sources.len() as u32);
        let capacity = Capacity {
            slots: slots::count(config.credit_chunks, lanes_max, config.processors as usize)
                + config.sharing.as_ref().map_or(0, |_| slots::FOR_PEERS),
            slot_bytes: config.limits.chunk_bytes as usize, // Address space; memory is used only for received bytes.
        };
        let ingress = Ingress::new(SlotPool::new(capacity)?, config.workers);
        Ok(Self {
            allocators: Allocators {
                memory: SnapshotMemory {
                    memory: match config.shareable {
                        true => HostMemory::on_demand(config.memory_bytes).shareable(),
                        false => HostMemory::on_demand(config.memory_bytes),
                    },
                    staging: HostMemory::new(u64::MAX),
                    is_volatile: config.volatile_snapshots,
                },
                device: config.device.clone(),
                share_gpu: config.share_gpu,
            },
            bases: config.keeps_bases().then(|| HostMemory::new(config.base_bytes)),
            commands,
            allowance: Allowance::new(config.credit_chunks),
            config,
            ingress,
            next_id: 1,
            receptions: BTreeMap::new(),
            renumbered: BTreeMap::new(),
            sources: SourceTable::default(),
            next_stream: 0,
            watches: Watches::default(),
            lists: VecDeque::new(),
            probing: Probing::default(),
            alarm: Alarm::default(),
            outbox: VecDeque::new(),
            carried: VecDeque::new(),
            is_connected: false,
            is_draining: false,
            is_closing: false,
        })
    }

    /// Whether a user's request needs a connection.
    pub(crate) fn needs_connection(&self) -> bool {
        !(self.receptions.is_empty() && self.watches.is_empty() && self.lists.is_empty())
    }

    /// Whether a version is being received.
    pub(crate) fn is_receiving(&self) -> bool {
        let machines = self.receptions.values().map(|reception| &reception.machine);
        machines
            .into_iter()
            .any(|machine| machine.is_receiving() || machine.current_version().is_some())
    }

    /// The ingress of all its chunks, for statistics.
    pub(crate) fn ingress(&self) -> &Ingress {
        &self.ingress
    }

    /// The memory of its snapshots, for statistics.
    pub(crate) fn memory(&self) -> &HostMemory {
        &self.allocators.memory.memory
    }

    /// The memory of its bases, for statistics.
    pub(crate) fn bases(&self) -> Option<&HostMemory> {
        self.bases.as_ref()
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Runs on the connections `links` until the user closes the session or the connection to the origin is lost.
    pub(crate) async fn run(
        &mut self,
        links: &mut Links<'_>,
        commands: &mut mpsc::UnboundedReceiver<Command>,
    ) -> SessionError {
        if let Err(error) = self.attach(links) {
            return error;
        }
        loop {
            if let Err(error) = self.step(links, commands).await {
                return error;
            }
        }
    }

    /// Requests the user's subscriptions, watches and lists on a new connection to the origin.
    fn attach(&mut self, links: &mut Links<'_>) -> Result<(), SessionError> {
        self.outbox = std::mem::take(&mut self.carried); // The requests below replace other unsent messages.
        let sharing = self.config.sharing.as_ref().zip(links.origin.as_deref());
        self.outbox.extend(sharing.and_then(|(sharing, origin)| sharing.begin(origin)));
        (self.is_connected, self.is_draining) = (true, false);
        self.raise_credit(links);
        self.receptions.values_mut().for_each(Reception::subscribe);
        self.act_all(links)?;
        self.outbox
            .extend(self.receptions.values().filter_map(Reception::loaded).cloned());
        self.outbox.extend(self.watches.messages());
        self.outbox.extend(self.lists.iter().map(|_| ClientMessage::List));
        Ok(())
    }

    /// Handles the last events of the lost connection to the origin, and drops its other state. Versions that come from
    /// other sources, too, continue.
    pub(crate) fn detach(&mut self, last: Vec<Event>, others: &mut OtherServers) {
        self.handle_last(last);
        self.is_connected = false;
        self.probing.handle_detached();
        self.allowance.handle_detached();
        self.lists.iter_mut().for_each(|(_, received)| received.clear());
        if let Some(sharing) = &self.config.sharing {
            sharing.set_origin(Origin::Lost);
        }
        let mut links = Links { origin: None, others };
        self.handle_link_lost(Link::Origin, &mut links);
        for reception in self.receptions.values_mut() {
            reception.handle_detached(self.allowance.credit());
        }
        if let Err(error) = self.act_all(&mut links) {
            tracing::debug!(%error, "A server's earlier message broke a rule."); // The lost connection's, or it is found again.
        }
    }

    /// Handles the last events of a lost connection.
    fn handle_last(&mut self, last: Vec<Event>) {
        for event in last {
            let Event::Chunk(id, token, result) = event else { continue };
            let Some(reception) = self.receptions.get_mut(&id) else { continue };
            match result {
                Ok(verified) => reception.handle_verified(token, verified),
                Err(error) => reception.handle_last_failure(token, &error),
            }
        }
    }

    /// Handles the loss of a connection for the subscriptions to further sources on it.
    fn handle_link_lost(&mut self, lost: Link, links: &mut Links<'_>) {
        for (source, reception) in self.sources.take_lost(lost) {
            if let Some(found) = self.receptions.get_mut(&reception) {
                found.machine.handle_source_lost(source);
            }
            if let Err(error) = self.act(reception, links) {
                tracing::debug!(%error, "A server's earlier message broke a rule.");
            }
        }
    }

    /// The other servers that send a version at the moment.
    pub(crate) fn sending(&self) -> Vec<usize> {
        self.sources.servers()
    }

    /// Handles the change of the origin to another server, which was connected under this index before.
    pub(crate) fn handle_promoted(&mut self, promoted: Promoted) -> (Connection, Target) {
        let Promoted { index, connection, target, outbox } = promoted;
        self.carried = outbox;
        self.sources.handle_promoted(index);
        (connection, target)
    }

    /// Ends every subscription with `error`.
    pub(crate) fn end(&self, error: &Arc<ClientError>) {
        if let Some(sharing) = &self.config.sharing {
            sharing.set_origin(Origin::Ended);
        }
        for reception in self.receptions.values() {
            reception.end(SubscriptionError::disconnected(reception.topic(), error));
        }
    }

    /// Sends the queued messages, then handles one command, event or timeout.
    async fn step(
        &mut self,
        links: &mut Links<'_>,
        commands: &mut mpsc::UnboundedReceiver<Command>,
    ) -> Result<(), SessionError> {
        self.leave_orphans(links);
        while let Some(origin) = &mut links.origin
            && let Some(message) = self.outbox.pop_front()
        {
            match message.check_features(origin.server().1) {
                Ok(()) => origin.send(message).await?,
                Err(error) => tracing::debug!(%error, "A message is not sent: the server does not know it."),
            }
        }
        if self.is_closing {
            return Err(SessionError::ClosedLocally);
        }
        for connection in links.all() {
            connection
                .lanes()
                .note_bulky(|| self.receptions.values().filter_map(Reception::bulky_bytes).max());
        }
        let deadline = self.deadline();
        tokio::select! {
            command = commands.recv() => {
                let subscription = self.handle_command(command.unwrap_or(Command::Close));
                self.allow_unread(links);
                subscription.map_or(Ok(()), |id| self.act(id, links))
            }
            event = links.next() => self.handle_link_event(event?, links),
            () = self.alarm.ring(deadline) => {
                let now = Instant::now();
                self.receptions.values_mut().for_each(|reception| reception.handle_timeout(now));
                self.report_held(now);
                self.act_all(links)
            }
        }
    }

    /// Handles an event of one of the connections.
    ///
    /// # Errors
    /// [`SessionError`] when the connection to the origin must end.
    pub(crate) fn handle_link_event(
        &mut self,
        event: LinkEvent,
        links: &mut Links<'_>,
    ) -> Result<(), SessionError> {
        match event {
            LinkEvent::Event(Link::Origin, event) => self.handle_event(event, Link::Origin, links),
            LinkEvent::Event(Link::Other(index), event) => {
                if let Err(error) = self.handle_event(event, Link::Other(index), links) {
                    links.others.close(index, &error);
                }
                Ok(())
            }
            LinkEvent::Opened(index) if Link::Other(index).is_peer() => {
                self.raise_credit(links);
                self.ask_peers(links)
            }
            LinkEvent::Opened(_) => {
                self.raise_credit(links);
                self.receptions
                    .values_mut()
                    .for_each(|reception| reception.machine.seek_sources());
                self.act_all(links)
            }
            LinkEvent::Closed(index, last) => {
                self.handle_last(last);
                let acted = self.act_all(links); // While it is known whose chunks they are: a peer may have lied in them.
                self.handle_link_lost(Link::Other(index), links);
                links.others.handle_closed(index);
                acted?;
                self.act_all(links)
            }
        }
    }

    /// Handles a command without a connection: its request is sent on the next one.
    ///
    /// # Errors
    /// [`SessionError::ClosedLocally`] when the user closes the session.
    pub(crate) fn handle_command_unconnected(&mut self, command: Command) -> Result<(), SessionError> {
        self.handle_command(command);
        if self.is_closing { Err(SessionError::ClosedLocally) } else { Ok(()) }
    }

    /// Sets the flow-control windows to the bytes of the outstanding chunks and of a probe in progress.
    fn allow_unread(&self, links: &mut Links<'_>) {
        let bytes = self
            .allowance
            .unread_bytes(self.receptions.values().map(Reception::chunk_bytes));
        let probe_bytes = if self.probing.is_in_progress() { PROBE_UNREAD_BYTES } else { 0 };
        for connection in links.all_but_peers() {
            connection.lanes().allow_unread(bytes + probe_bytes);
        }
    }

    /// When the next deadline of a subscription passes.
    fn deadline(&self) -> Option<Instant> {
        let stalls = self.receptions.values().filter_map(|reception| reception.machine.timeout_at());
        let stalls = stalls.map(Instant::from).min();
        stalls.into_iter().chain(self.held_due_at()).min()
    }

    /// Executes the pending actions of a subscription.
    fn act(&mut self, id: SubscriptionId, links: &mut Links<'_>) -> Result<(), SessionError> {
        let Some(reception) = self.receptions.get_mut(&id) else { return Ok(()) };
        let mut context = Context {
            id,
            links,
            allocators: &self.allocators,
            ingress: &self.ingress,
            outbox: &mut self.outbox,
            sources: &mut self.sources,
        };
        reception.act(&mut context)?;
        if reception.is_over() {
            self.receptions.remove(&id);
        }
        Ok(())
    }

    fn act_all(&mut self, links: &mut Links<'_>) -> Result<(), SessionError> {
        let ids: Vec<_> = self.receptions.keys().copied().collect();
        ids.into_iter().try_for_each(|id| self.act(id, links))
    }

    fn handle_event(&mut self, event: Event, link: Link, links: &mut Links<'_>) -> Result<(), SessionError> {
        match event {
            Event::Message(message) => self.handle_message(message, link, links),
            Event::Opened(lane, StreamHeader::Manifest(header), stream) => {
                match (self.owner(header.subscription, link)?, links.get(link)) {
                    (Owner::User, Some(connection)) => {
                        self.handle_manifest_header(lane, header, stream, connection)
                    }
                    _ => Ok(()), // A further source has another manifest, which its `Announce` names.
                }
            }
            Event::Opened(lane, StreamHeader::Chunk(header), stream) => {
                self.handle_chunk((link, lane), header, stream, links)
            }
            Event::Unreadable(HeaderError::Lane(error)) => Err(error.into()),
            Event::Unreadable(HeaderError::Message(error)) => Err(ClientError::from(error).into()),
            Event::Opened(_, StreamHeader::Probe(header), stream)
                if link == Link::Origin && self.probing.expects(&header) =>
            {
                if let Some(origin) = &mut links.origin {
                    origin.receive_probe(stream, header);
                }
                Ok(())
            }
            Event::Probe(result) => {
                self.probing.handle_result(result);
                self.allow_unread(links);
                Ok(())
            }
            Event::Opened(_, StreamHeader::Probe(_), _) => {
                Ok(self.config.features().permit("a probe's bytes", Feature::Probe)?)
            }
            Event::Opened(..) | Event::Unreadable(_) | Event::Nothing => Ok(()),
            Event::Manifest(id, manifest) => {
                let Some(reception) = self.receptions.get_mut(&id) else { return Ok(()) };
                match manifest {
                    // The server aborted the version; its `Abort` will follow.
                    Err(ReceiveManifestError::Lane(LaneError::StreamAborted)) => {
                        reception.machine.handle_manifest_lost();
                    }
                    manifest => reception.machine.handle_manifest(manifest?)?,
                }
                self.allow_unread(links);
                self.act(id, links)
            }
            Event::Chunk(id, token, result) => self.handle_received(id, token, result, link, links),
            Event::Copied(id, version, copied) => {
                let Some(reception) = self.receptions.get_mut(&id) else { return Ok(()) };
                reception.handle_copied(version, copied);
                self.act(id, links)
            }
            Event::Joined => {
                self.raise_credit(links);
                self.act_all(links)
            }
            Event::Ended(lane) => {
                let retire = links.get(link).and_then(|connection| connection.lanes().retire(lane));
                match link {
                    Link::Origin => self.outbox.extend(retire),
                    Link::Other(index) => {
                        retire.into_iter().for_each(|retire| links.send_to_other(index, retire));
                    }
                }
                Ok(())
            }
        }
    }

    /// Raises the credit for a new lane, so that it is kept as busy as the other lanes.
    fn raise_credit(&mut self, links: &mut Links<'_>) {
        let of_origin = links.origin.as_mut().map_or(0, |origin| origin.lanes().len());
        let of_all: u32 = links.all().map(|connection| connection.lanes().len()).sum();
        self.allowance.handle_lanes(of_origin, of_all - of_origin);
        self.allow_unread(links);
        for reception in self.receptions.values_mut() {
            reception.machine.set_allowance(self.allowance.credit());
            reception.machine.set_further_allowance(self.allowance.further());
        }
    }

    fn handle_manifest_header(
        &mut self,
        lane: LaneId,
        header: ManifestHeader,
        stream: DataIn,
        connection: &mut Connection,
    ) -> Result<(), SessionError> {
        if lane != LaneId(0) {
            let found = "a manifest on another lane";
            return Err(ProtocolViolation::OutOfTurn { found, expected: "a manifest on lane 0" }.into());
        }
        let limits = self.config.limits;
        let Some(reception) = self.receptions.get_mut(&header.subscription) else { return Ok(()) };
        reception.machine.handle_manifest_header()?;
        connection.receive_manifest(header, stream, limits, Arc::clone(&reception.counters));
        Ok(())
    }

    fn handle_chunk(
        &mut self,
        (link, lane): (Link, LaneId),
        header: ChunkHeader,
        stream: DataIn,
        links: &mut Links<'_>,
    ) -> Result<(), SessionError> {
        let token = StreamToken(self.next_stream);
        self.next_stream += 1;
        let id = match self.owner(header.subscription, link)? {
            Owner::User => header.subscription,
            Owner::Source { reception, .. } => reception,
            Owner::Nobody => return Ok(()),
        };
        let Some(reception) = self.receptions.get_mut(&id) else { return Ok(()) };
        if links.get(link).is_none_or(|connection| connection.lanes().is_retired(lane)) {
            return Ok(()); // It was requested again when the lane was retired.
        }
        reception.handle_chunk(header, token, (link, stream))?;
        self.act(id, links)
    }

    fn handle_received(
        &mut self,
        id: SubscriptionId,
        token: StreamToken,
        result: Result<Verified, ReceiveError>,
        link: Link,
        links: &mut Links<'_>,
    ) -> Result<(), SessionError> {
        let Some(reception) = self.receptions.get_mut(&id) else { return Ok(()) };
        match result {
            Ok(verified) => {
                if let Link::Other(index) = link
                    && let Some(key) = links.others.peer_key(index)
                {
                    reception.note_giver(key);
                }
                reception.handle_verified(token, verified);
            }
            // The server aborted the version, and its `Abort` will follow; or the lane has ended.
            Err(ReceiveError::Lane(error)) => match links.get(link).and_then(|it| it.control().ended()) {
                // The control stream has ended, and with it the connection: its error is reported, not this lane's.
                Some(ended) if error != LaneError::StreamAborted => return Err(ended.into()),
                _ => reception.machine.handle_lost(token),
            },
            Err(error) => {
                if let Some(error) = reception.handle_failed(token, error) {
                    let peer = links.get(link).map(|connection| connection.control().peer());
                    tracing::warn!(?peer, %error, "Another server sent an invalid chunk, so it is not used for this version.");
                }
            }
        }
        self.act(id, links)
    }
}
