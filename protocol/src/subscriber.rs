//! One subscription as its client sees it: which version is under way, which of its chunks are here, and what to do next
//! (PROTOCOL.md §6.5 to §6.8).

mod action;
mod arrivals;
mod assembly;
mod gap;
mod history;
mod incoming;
mod manifests;
mod stall;

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod model;

pub use action::{Action, Commit, Released, VersionFault};
pub use arrivals::StreamToken;
pub use assembly::{Assembly, Outcome};
pub use gap::Gap;

use crate::{
    AbortReason, Announce, ChunkHeader, ClientMessage, CodecSet, Epoch, LaneId, Manifest, Misbehaved,
    PARTIAL_RANGES_MAX, Partial, RangeSet, Selection, Subscribe, Verified, Version, VersionDigest, VersionId,
};
use arrivals::{Arrivals, EarlyStream};
use history::History;
use incoming::{Incoming, Phase, key};
use manifests::Manifests;
use stall::Stall;
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

/// The state machine of one subscription. It outlives connections.
///
/// Pure: it holds no payload, waits for nothing and reads no clock. `handle_*` takes what happened; [`poll`](Self::poll)
/// gives what to do about it, one [`Action`] at a time, and is to be called until it gives `None`. Announcements,
/// manifests and chunks may overtake one another; streams of chunks are tokens that the caller holds, so where chunks come
/// from is the caller's affair.
#[derive(Debug)]
pub struct Subscriber {
    /// What the user wants. What changes with each connection is filled in when it is sent.
    request: Subscribe,
    /// The codecs that were offered to the server.
    codecs: CodecSet,
    /// The credit of a subscription on this connection when no chunk is under way.
    allowance: u32,
    /// What is wanted of the manifest that came last; the server sends it again only when another is needed.
    selection: Option<Arc<Selection>>,
    manifests: Manifests,
    phase: Phase,
    /// The version that this end gave up last on this connection, and stayed subscribed.
    given_up: Option<(Epoch, Version)>,
    arrivals: Arrivals,
    history: History,
    stall: Stall,
    actions: VecDeque<Action>,
}

impl Subscriber {
    /// Begins with what the user wants, `request`, whose `credit` is that of one connection. A version on which nothing moves
    /// for `stall_timeout` fails.
    pub fn new(request: Subscribe, codecs: CodecSet, stall_timeout: Duration, now: Instant) -> Self {
        Self {
            codecs,
            allowance: request.credit,
            selection: None,
            manifests: Manifests::default(),
            phase: Phase::Idle,
            given_up: None,
            arrivals: Arrivals::new(request.credit),
            history: History::new(&request),
            stall: Stall::new(stall_timeout, now),
            actions: VecDeque::new(),
            request,
        }
    }

    /// The next thing to do; `None` until something happens.
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Asks for the subscription on a new connection. `base` is the version that the client holds a copy of, if any, for
    /// deltas.
    pub fn subscribe(&mut self, base: Option<(Epoch, Version)>) {
        let partial = match &self.phase {
            Phase::Detached(incoming) => {
                let (epoch, version) = key(incoming.id());
                let assembly = &incoming.assembly;
                Some(Partial { epoch, version, chunks: assembly.held(), digest: assembly.held_digest() })
            }
            _ => None,
        };
        let have = self.history.have();
        // What was to be said before is void: the new session knows nothing of this subscription.
        self.actions.retain(|action| !matches!(action, Action::Send(_)));
        self.send(ClientMessage::Subscribe(Subscribe {
            have,
            base: have.filter(|have| base == Some(have.of())), // It is the version that was committed last.
            partial,
            manifest: self.selection.as_ref().map(|selection| selection.manifest().digest()),
            credit: self.arrivals.credit(),
            ..self.request.clone()
        }));
        if let Some((epoch, version)) = self.history.acknowledged() {
            // Told again on each connection, for it may have been lost with the one before.
            self.send(ClientMessage::Acknowledge { subscription: self.request.subscription, epoch, version });
        }
    }

    /// Takes the loss of the connection: what was arriving is missing again, what is verified stays. On the next connection
    /// the subscription has `allowance` of credit. The memory of the version under way must not be written to any more.
    pub fn handle_detached(&mut self, allowance: u32) {
        self.actions.clear();
        self.allowance = allowance;
        self.discard_all();
        self.manifests = Manifests::default();
        self.given_up = None;
        self.history.handle_detached();
        self.phase = match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Placing(mut incoming) | Phase::Running(mut incoming) | Phase::Detached(mut incoming) => {
                incoming.assembly.handle_detached();
                incoming.assembly.forget_beyond(PARTIAL_RANGES_MAX);
                Phase::Detached(incoming)
            }
            Phase::Idle | Phase::Announced { .. } => Phase::Idle,
        };
    }

    /// Grants the server credit until it has `allowance` in all, for chunks under way and those to come. It is never taken
    /// back on a connection.
    pub fn set_allowance(&mut self, allowance: u32) {
        let chunks = allowance.saturating_sub(self.allowance);
        if chunks > 0 {
            self.allowance = allowance;
            self.grant(chunks);
        }
    }

    /// Takes the beginning of a version. `moved_bytes` is how much came for the subscription so far, of whatever.
    ///
    /// # Errors
    /// [`Misbehaved`] when the version before has not ended, or it is not one that may come now.
    pub fn handle_announce(
        &mut self,
        announce: Announce,
        now: Instant,
        moved_bytes: u64,
    ) -> Result<(), Misbehaved> {
        if !matches!(self.phase, Phase::Idle | Phase::Detached(_)) {
            return Err(Misbehaved::OutOfTurn {
                found: "Announce",
                expected: "the end of the version before",
            });
        }
        if announce.id.topic != self.request.topic {
            return Err(Misbehaved::OutOfTurn { found: "another topic", expected: "the one subscribed to" });
        }
        let part = match &self.phase {
            Phase::Detached(incoming) => Some(incoming.id()),
            _ => None,
        };
        self.history.check_announced(&announce.id, part, announce.afresh)?;
        self.stall.begin(now, moved_bytes);
        match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Detached(incoming) if *incoming.id() == announce.id && !announce.afresh => {
                self.resume(*incoming, announce)
            }
            Phase::Detached(incoming) => {
                let id = incoming.id().clone();
                self.actions.push_back(Action::Release { id, reason: Released::Replaced });
                self.await_manifest(announce);
                Ok(())
            }
            _ => {
                self.await_manifest(announce);
                Ok(())
            }
        }
    }

    /// Goes on with a version of which a part came over another connection.
    fn resume(&mut self, incoming: Incoming, announce: Announce) -> Result<(), Misbehaved> {
        if incoming.announce.manifest != announce.manifest {
            return Err(Misbehaved::WrongManifest);
        }
        self.place(Incoming { announce, resumed: incoming.resumed + 1, ..incoming });
        Ok(())
    }

    fn await_manifest(&mut self, announce: Announce) {
        self.phase = Phase::Announced { announce, complete: None };
        self.begin_if_possible();
    }

    /// Asks for memory once both the announcement and its manifest are here.
    fn begin_if_possible(&mut self) {
        let Phase::Announced { announce, complete } = &self.phase else { return };
        let known = self.selection.as_ref();
        let Some(selection) = known.filter(|known| known.manifest().digest() == announce.manifest) else {
            return;
        };
        let mut assembly = Assembly::new(Arc::clone(selection));
        if let Some(digest) = complete {
            assembly.handle_complete(*digest);
        }
        let announce = announce.clone();
        self.place(Incoming { announce, assembly, resumed: 0 });
    }

    fn place(&mut self, incoming: Incoming) {
        self.actions.push_back(Action::Place {
            announce: incoming.announce.clone(),
            selection: Arc::clone(incoming.assembly.selection()),
            resumes: incoming.resumed > 0,
        });
        self.phase = Phase::Placing(Box::new(incoming));
    }

    /// Takes the news that there is memory for the version under way; its chunks may be coded against `base`. Receives what
    /// came before its time.
    ///
    /// # Errors
    /// [`Misbehaved`] when one of the chunks that came early breaks a rule.
    pub fn handle_placed(&mut self, base: Option<Version>) -> Result<(), Misbehaved> {
        self.phase = match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Placing(mut incoming) => {
                incoming.assembly.set_base(base);
                Phase::Running(incoming)
            }
            other => other,
        };
        for early in self.arrivals.take_early() {
            self.begin_chunk(early)?;
        }
        self.fetch_if_due();
        self.settle();
        Ok(())
    }

    /// Takes the news that a manifest begins to arrive.
    ///
    /// # Errors
    /// [`Misbehaved`] when another one is still arriving.
    pub fn handle_manifest_header(&mut self) -> Result<(), Misbehaved> {
        let second = std::mem::replace(&mut self.manifests.arriving, true);
        match second && !self.manifests.pass_stale() {
            true => Err(Misbehaved::TwoManifests(self.request.subscription)),
            false => Ok(()),
        }
    }

    /// Takes the news that a manifest was cut off with the version that it belonged to.
    pub fn handle_manifest_lost(&mut self) {
        self.manifests.arriving = false;
    }

    /// Takes a manifest, which may come before its announcement. One that is known already is passed over.
    ///
    /// # Errors
    /// [`Misbehaved`] when it is not the one that was announced, or comes among the chunks of a version.
    pub fn handle_manifest(&mut self, manifest: Manifest) -> Result<(), Misbehaved> {
        self.manifests.arriving = false;
        let expected = match &self.phase {
            Phase::Placing(incoming) | Phase::Running(incoming)
                if **incoming.assembly.manifest() == manifest =>
            {
                return Ok(());
            }
            Phase::Placing(_) | Phase::Running(_) => {
                Err(Misbehaved::OutOfTurn { found: "a manifest", expected: "chunks" })
            }
            Phase::Announced { announce, .. } if announce.manifest != manifest.digest() => {
                Err(Misbehaved::WrongManifest)
            }
            Phase::Idle | Phase::Detached(_) | Phase::Announced { .. } => Ok(()),
        };
        match expected {
            Err(_) if self.manifests.pass_stale() => return Ok(()),
            expected => expected?,
        }
        self.selection = Some(Arc::new(Selection::new(Arc::new(manifest), &self.request.selection)));
        self.begin_if_possible();
        Ok(())
    }

    /// Takes the header of a chunk that came on `stream` of `lane`. The chunk is received at once, or waits for what it
    /// overtook, or is one of a version that ended.
    ///
    /// # Errors
    /// [`Misbehaved`] when it breaks a rule of PROTOCOL.md §6.5 or exceeds the credit.
    pub fn handle_chunk(
        &mut self,
        header: ChunkHeader,
        stream: StreamToken,
        lane: LaneId,
    ) -> Result<(), Misbehaved> {
        if !self.codecs.contains(header.codec) {
            return Err(Misbehaved::CodecNotOffered(header.codec.name()));
        }
        if self.history.is_past((header.epoch, header.version)) {
            self.actions.push_back(Action::Discard(stream));
            return Ok(());
        }
        self.arrivals.spend()?;
        let early = EarlyStream { stream, lane, header };
        match &self.phase {
            Phase::Running(_) => self.begin_chunk(early),
            _ => {
                self.arrivals.hold(early);
                Ok(())
            }
        }
    }

    /// Receives a chunk of the version under way.
    fn begin_chunk(&mut self, EarlyStream { stream, lane, header }: EarlyStream) -> Result<(), Misbehaved> {
        let Phase::Running(incoming) = &mut self.phase else { return Ok(()) };
        if !incoming.is((header.epoch, header.version)) {
            return Err(Misbehaved::WrongVersion { epoch: header.epoch, version: header.version });
        }
        let range = incoming.assembly.handle_header(&header)?;
        let (_, dtype) = incoming.assembly.manifest().chunk(header.chunk);
        self.arrivals.begin(stream, header.chunk, lane);
        self.actions.push_back(Action::Receive { stream, header, range, dtype });
        Ok(())
    }

    /// Takes a chunk that is verified and in its place. Its credit is given back.
    pub fn handle_verified(&mut self, stream: StreamToken, verified: Verified) {
        let Some(chunk) = self.arrivals.end(stream) else { return };
        let Phase::Running(incoming) = &mut self.phase else { return };
        debug_assert_eq!(chunk, verified.chunk(), "a stream carries the chunk that its header names");
        incoming.assembly.handle_verified(verified);
        self.send(ClientMessage::Credit { subscription: self.request.subscription, chunks: 1 });
        self.fetch_if_due();
        self.settle();
    }

    /// Takes the news that a stream ended early, whether its chunk was being received or not: with its lane, or because the
    /// server gave the version up. Nothing is written to the chunk's place any more.
    pub fn handle_lost(&mut self, stream: StreamToken) {
        let Some(chunk) = self.arrivals.end(stream) else { return };
        if let Phase::Running(incoming) = &mut self.phase {
            incoming.assembly.handle_lost(chunk);
        }
        self.fetch_if_due();
    }

    /// Takes the server's word that it begins nothing more on `lane`. What the lane took with it is asked for as soon as
    /// nothing that came over it is still being received.
    pub fn handle_retired(&mut self, lane: LaneId) {
        let lost = self.arrivals.retire(lane);
        self.actions.extend(lost.into_iter().map(Action::Discard));
        match &self.phase {
            Phase::Running(_) => self.fetch_if_due(),
            Phase::Announced { .. } | Phase::Placing(_) => {}
            // What is announced later was begun on other lanes.
            Phase::Idle | Phase::Detached(_) => self.arrivals.forget_retired(),
        }
    }

    fn fetch_if_due(&mut self) {
        let Phase::Running(incoming) = &self.phase else { return };
        if !self.arrivals.is_fetch_due() {
            return;
        }
        let (epoch, version) = key(incoming.id());
        let missing = incoming.assembly.missing();
        self.arrivals.forget_retired();
        for ranges in missing.ranges().chunks(PARTIAL_RANGES_MAX) {
            self.send(ClientMessage::Fetch {
                subscription: self.request.subscription,
                epoch,
                version,
                chunks: ranges.iter().cloned().collect(),
            });
        }
    }

    /// Takes the server's word that every chunk of a version is on its way.
    ///
    /// # Errors
    /// [`Misbehaved`] for a version that is not under way and was not given up here.
    pub fn handle_complete(
        &mut self,
        version: (Epoch, Version),
        digest: VersionDigest,
    ) -> Result<(), Misbehaved> {
        match &mut self.phase {
            _ if self.given_up == Some(version) => return Ok(()), // The two messages crossed.
            Phase::Placing(incoming) | Phase::Running(incoming) if incoming.is(version) => {
                incoming.assembly.handle_complete(digest);
            }
            Phase::Announced { announce, complete } if key(&announce.id) == version => {
                *complete = Some(digest);
            }
            _ => {
                let (epoch, version) = version;
                return Err(Misbehaved::WrongVersion { epoch, version });
            }
        }
        self.settle();
        Ok(())
    }

    /// Asks for the commit once the version is whole.
    fn settle(&mut self) {
        let Phase::Running(incoming) = &self.phase else { return };
        let action = match incoming.assembly.poll() {
            None => return,
            Some(Outcome::Mismatch { expected, found }) => {
                Action::Fail(VersionFault::Mismatch { expected, found })
            }
            Some(Outcome::Commit) => Action::Commit(Commit {
                announce: incoming.announce.clone(),
                selection: Arc::clone(incoming.assembly.selection()),
                chunks: incoming.assembly.verified_chunks(),
                resumed: incoming.resumed,
                gap: self.history.gap_before(incoming.id()),
                new_epoch: self.history.is_new_epoch(incoming.id()),
            }),
        };
        self.actions.push_back(action);
    }

    /// Takes the news that the version under way is visible; `kept` says whether the client keeps a copy of it for deltas.
    pub fn handle_committed(&mut self, kept: bool) {
        let Phase::Running(incoming) = &self.phase else { return };
        let digest = incoming.assembly.held_digest();
        let Some(id) = self.end_version() else { return };
        let (epoch, version) = key(&id);
        self.history.handle_committed(id, digest);
        let subscription = self.request.subscription;
        self.send(ClientMessage::Committed { subscription, epoch, version, kept });
    }

    /// Takes the news that the server gives a version up.
    ///
    /// # Errors
    /// [`Misbehaved`] for one that is neither under way nor the last one that ended.
    pub fn handle_abort(&mut self, version: (Epoch, Version), reason: AbortReason) -> Result<(), Misbehaved> {
        if self.history.is_last(version) {
            return Ok(()); // This end's last word on it was on the way.
        }
        if self.under_way().map(key) != Some(version) {
            let (epoch, version) = version;
            return Err(Misbehaved::WrongVersion { epoch, version });
        }
        self.abort(reason, Released::ByServer(reason));
        self.grant_anew();
        Ok(())
    }

    /// Gives up the version under way because this end cannot take it. The subscription goes on with the next one.
    pub fn give_up(&mut self, reason: AbortReason) {
        self.given_up = self.under_way().map(key);
        self.abort(reason, Released::Here);
        self.grant_anew();
    }

    /// Ends the subscription with the version under way, which this end cannot take.
    pub fn end(&mut self, reason: AbortReason, keep_place: bool) {
        self.abort(reason, Released::Here);
        self.send(ClientMessage::Unsubscribe { subscription: self.request.subscription, keep_place });
    }

    /// Ends the version under way, which one end gave up. Both ends forget what credit was left.
    fn abort(&mut self, reason: AbortReason, released: Released) {
        let Some(id) = self.end_version() else { return };
        self.manifests.stale += 2; // The header of a late manifest may come, and its end.
        self.discard_all();
        let (subscription, (epoch, version)) = (self.request.subscription, key(&id));
        self.actions.push_back(Action::Release { id, reason: released });
        self.send(ClientMessage::Abort { subscription, epoch, version, reason });
    }

    fn grant_anew(&mut self) {
        let (subscription, chunks) = (self.request.subscription, self.allowance);
        self.send(ClientMessage::Credit { subscription, chunks });
    }

    /// Takes the user's word that it is done with a version and all before it.
    pub fn acknowledge(&mut self, epoch: Epoch, version: Version) {
        self.history.handle_acknowledged(epoch, version);
        self.send(ClientMessage::Acknowledge { subscription: self.request.subscription, epoch, version });
    }

    /// When to call [`handle_timeout`](Self::handle_timeout).
    pub fn timeout_at(&self) -> Option<Instant> {
        self.under_way().map(|_| self.stall.look_at())
    }

    /// Looks whether anything moved since the last look, `moved_bytes` in all; fails the version when nothing did.
    pub fn handle_timeout(&mut self, now: Instant, moved_bytes: u64) {
        if self.under_way().is_some() && self.stall.handle_look(now, moved_bytes) {
            self.actions
                .push_back(Action::Fail(VersionFault::Stalled(self.stall.timeout())));
        }
    }

    /// The version under way on this connection.
    pub fn under_way(&self) -> Option<&VersionId> {
        match &self.phase {
            Phase::Idle | Phase::Detached(_) => None,
            Phase::Announced { announce, .. } => Some(&announce.id),
            Phase::Placing(incoming) | Phase::Running(incoming) => Some(incoming.id()),
        }
    }

    /// Whether memory was found for the version under way, so that the next version alone can take other memory.
    pub fn is_receiving(&self) -> bool {
        matches!(self.phase, Phase::Placing(_) | Phase::Running(_) | Phase::Detached(_))
    }

    /// Whether what `stream` carries is still wanted.
    pub fn is_wanted(&self, stream: StreamToken) -> bool {
        self.arrivals.is_receiving(stream)
    }

    /// What is wanted of the manifest that came last.
    pub fn selection(&self) -> Option<&Arc<Selection>> {
        self.selection.as_ref()
    }

    /// The size of what is verified of the version under way.
    pub fn held_bytes(&self) -> u64 {
        match &self.phase {
            Phase::Idle | Phase::Announced { .. } => 0,
            Phase::Placing(incoming) | Phase::Running(incoming) | Phase::Detached(incoming) => {
                incoming.assembly.held_bytes()
            }
        }
    }

    /// The chunks that are verified of a version that waits to be continued on another connection.
    pub fn held(&self) -> Option<RangeSet> {
        match &self.phase {
            Phase::Detached(incoming) => Some(incoming.assembly.held()),
            _ => None,
        }
    }

    /// Whether any version was committed.
    pub fn has_committed(&self) -> bool {
        self.history.has_committed()
    }

    fn end_version(&mut self) -> Option<VersionId> {
        let id = self.under_way()?.clone();
        self.history.handle_ended(&id);
        self.arrivals.end_version();
        self.phase = Phase::Idle;
        Some(id)
    }

    fn discard_all(&mut self) {
        let early = self.arrivals.reset(self.allowance);
        self.actions.extend(early.into_iter().map(Action::Discard));
    }

    fn grant(&mut self, chunks: u32) {
        self.arrivals.grant(chunks);
        self.send(ClientMessage::Credit { subscription: self.request.subscription, chunks });
    }

    fn send(&mut self, message: ClientMessage) {
        self.actions.push_back(Action::Send(message));
    }
}
