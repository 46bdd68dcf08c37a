//! The peers of a shared version (PROTOCOL.md §3.15): other clients of the origin that serve its chunks, as it says.
//!
//! A peer is a source like others ([`sources`](super::sources)) that is not trusted: its encodings are compared with the
//! origin's hashes before they are used, and one that lies is not used any more. The origin goes on to push.

use super::{Action, Phase, StreamToken, Subscriber, arrivals::WaitingStream, key};
use crate::{
    ChunkHeader, ChunkIndex, ClientMessage, Consumer, EncodingEntry, Epoch, Held, LaneGrant,
    ProtocolViolation, RangeSet, Source, Start, Subscribe, SubscriptionId, Version,
};
use std::time::Instant;

/// The credit of a shared version while there are peers: two chunks on their way, and as many for the latency.
const SHARED_CREDIT: u32 = 4;

impl Subscriber {
    /// Sets the number from which this client's random choices follow: with another one, it orders other chunks first. Those
    /// who receive a version together must have different ones.
    pub fn set_seed(&mut self, seed: u64) {
        self.seed = seed;
    }

    /// Records the time of the events that follow. It matters for shared versions only: by it the machine measures how fast
    /// peers are. Call it before `handle_chunk`, `handle_verified` and [`poll`](Self::poll); costs nothing.
    pub fn set_time(&mut self, now: Instant) {
        if let Some(shared) = self.requests.shared_mut() {
            shared.set_time(now);
        }
    }

    /// Whether the current version is shared.
    pub fn is_shared(&self) -> bool {
        self.requests.shared().is_some()
    }

    /// Whether the current version comes from peers, too: how fast its origin sends is then the origin's choice, and says
    /// nothing of the path.
    pub fn has_peers(&self) -> bool {
        self.requests.shared().is_some_and(|shared| shared.has_peers())
    }

    /// Handles `Sources`: the peers to use for a version, in place of earlier ones, and whether the origin pushes nothing
    /// more by itself. Subscriptions to peers that are no longer named end.
    ///
    /// # Errors
    /// [`ProtocolViolation`] for a version that is not shared, or neither under way nor past.
    pub fn handle_sources(
        &mut self,
        version: (Epoch, Version),
        sources: Vec<Source>,
        is_seeded: bool,
    ) -> Result<(), ProtocolViolation> {
        if !self.is_shared_version(version, "Sources")? {
            return Ok(());
        }
        let shared = self.requests.shared_mut();
        let gone = shared.map(|shared| shared.handle_sources(sources, is_seeded));
        gone.into_iter().flatten().for_each(|peer| self.leave_source(peer));
        self.name_peers();
        Ok(())
    }

    /// Handles `Encodings` of a version, which may come before its manifest.
    ///
    /// # Errors
    /// [`ProtocolViolation`] for a version that is not shared, or neither under way nor past; for a chunk that the version
    /// does not have, or a second encoding of one.
    pub fn handle_encodings(
        &mut self,
        version: (Epoch, Version),
        entries: &[EncodingEntry],
    ) -> Result<(), ProtocolViolation> {
        if !self.is_shared_version(version, "Encodings")? {
            return Ok(());
        }
        let assembly = match &self.phase {
            Phase::Running(incoming) => Some(&incoming.assembly),
            _ => None,
        };
        match self.requests.shared_mut() {
            Some(shared) => shared.handle_encodings(entries, assembly),
            None => Ok(()),
        }
    }

    /// Whether a message about sharing is for the version under way; not if it crossed the version's end.
    fn is_shared_version(
        &self,
        version: (Epoch, Version),
        found: &'static str,
    ) -> Result<bool, ProtocolViolation> {
        let is_current = self.current_version().map(key) == Some(version);
        if !is_current {
            let (epoch, number) = version;
            let is_past = self.history.is_past(version);
            return if is_past {
                Ok(false)
            } else {
                Err(ProtocolViolation::WrongVersion { epoch, version: number })
            };
        }
        let is_announced = match &self.phase {
            Phase::Announced { announce, .. } => announce.shared,
            Phase::Placing(incoming) | Phase::Running(incoming) => incoming.announce.shared,
            Phase::Idle | Phase::Detached(_) => false,
        };
        match is_announced || self.is_shared() {
            true => Ok(true),
            false => Err(ProtocolViolation::OutOfTurn { found, expected: "a shared version" }),
        }
    }

    /// Whether one more peer may be asked for the current version.
    pub fn wants_peers(&self) -> bool {
        let is_running = matches!(self.phase, Phase::Running(_)) && !self.is_lent();
        is_running && self.requests.shared().is_some_and(|shared| shared.has_room())
    }

    /// Asks a peer with this key and grant for the current version, under the number `source`. Its answers are passed on as
    /// those of any source. No effect unless [`wants_peers`](Self::wants_peers).
    pub fn ask_peer(&mut self, source: SubscriptionId, key: [u8; 32], grant: LaneGrant) {
        if !self.wants_peers() {
            return;
        }
        if let Some(shared) = self.requests.shared_mut() {
            shared.add_peer(source, key);
        }
        self.ask(source, Some(grant));
    }

    /// Asks a server for the current version.
    pub(super) fn ask(&mut self, source: SubscriptionId, grant: Option<LaneGrant>) {
        let Phase::Running(incoming) = &self.phase else { return };
        let ((epoch, version), assembly) = (key(incoming.id()), &incoming.assembly);
        let base = self
            .history
            .have()
            .filter(|have| have.epoch == epoch && assembly.base() == Some(have.version));
        let manifest = Some(assembly.manifest().digest());
        self.sources.insert_asked(source);
        self.send(ClientMessage::Subscribe(Subscribe {
            selection: self.options.selection.clone(),
            boxes: self.options.boxes.clone(),
            within: self.options.within.clone(),
            codec: self.options.codec,
            start: Start::Exactly(Some(epoch), version),
            once: true,
            consumer: Consumer::Nobody,
            manifest,
            base,
            grant,
            ..Subscribe::latest(source, self.options.topic.clone(), 0)
        }));
    }

    /// Handles `Held` of a peer: what it can send of the version, and can send no longer.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when it is about another version, or one of a flood.
    pub fn handle_held(&mut self, source: SubscriptionId, held: &Held) -> Result<(), ProtocolViolation> {
        let version = (held.epoch, held.version);
        if self.current_version().map(key) != Some(version) {
            let (epoch, number) = version;
            let is_past = self.history.is_past(version);
            return if is_past {
                Ok(())
            } else {
                Err(ProtocolViolation::WrongVersion { epoch, version: number })
            };
        }
        if self.requests.has_source(source)
            && let Some(shared) = self.requests.shared_mut()
        {
            shared.handle_held(source, held)?;
            self.requests.forget_orders(source, &held.withdrawn);
        }
        Ok(())
    }

    /// Handles a chunk of a peer, whose header is not trusted either.
    ///
    /// # Errors
    /// [`ProtocolViolation::OutOfTurn`] when the peer was not asked for so many chunks.
    pub(super) fn handle_peer_chunk(
        &mut self,
        header: ChunkHeader,
        stream: StreamToken,
    ) -> Result<(), ProtocolViolation> {
        let (chunk, source) = (header.chunk, header.subscription);
        let shared = self.requests.shared_mut();
        if !shared.is_some_and(|shared| shared.handle_peer_header(source)) {
            let (found, expected) = ("a chunk", "only chunks that were requested");
            return Err(ProtocolViolation::OutOfTurn { found, expected });
        }
        self.requests.handle_header(source, chunk);
        let waiting = WaitingStream { stream, header };
        let Phase::Running(incoming) = &self.phase else {
            self.discard(waiting);
            return Ok(());
        };
        let is_other = self.requests.shared().is_some_and(|shared| shared.is_other_encoding(&header));
        let is_listed_otherwise = incoming.assembly.is_listed_otherwise(chunk, header.hash);
        let is_lie = is_other || is_listed_otherwise || !incoming.is((header.epoch, header.version));
        if is_lie || self.begin_chunk(waiting).is_err() {
            self.discard(waiting);
            self.handle_lie(source);
            self.put_back(chunk);
        }
        Ok(())
    }

    /// Handles a chunk of a peer whose header or encoding is not the one that the origin named; nothing was decoded. The
    /// chunk is received from others, the peer is not used any more, and true is returned. False for a stream that is not
    /// being received, or not from a peer.
    pub fn handle_wrong_encoding(&mut self, stream: StreamToken) -> bool {
        let receiving = self.arrivals.receiving_at(stream);
        let Some((chunk, source)) = receiving.filter(|(_, source)| *source != self.options.subscription)
        else {
            return false;
        };
        if self.requests.shared().is_none() {
            return false;
        }
        self.arrivals.end(stream, false);
        self.handle_lie(source);
        self.lose_chunk(chunk);
        true
    }

    /// Uses a peer no more, because it lied.
    pub(super) fn handle_lie(&mut self, source: SubscriptionId) {
        if self.requests.is_peer(source) {
            self.actions.push_back(Action::PeerLied(source));
            self.shun(source);
            self.handle_source_ended(source);
        }
    }

    /// Uses the owner of a peer's key no more in this version.
    pub(super) fn shun(&mut self, source: SubscriptionId) {
        if let Some(shared) = self.requests.shared_mut() {
            shared.shun(source);
        }
    }

    /// Puts a chunk back to those that are to be ordered, if it is missing.
    pub(super) fn put_back(&mut self, chunk: ChunkIndex) {
        if let Phase::Running(incoming) = &self.phase {
            self.requests.handle_lost(chunk, &incoming.assembly);
        }
    }

    /// Lets the driver connect to the peers that may be used, once the version can be received.
    pub(super) fn name_peers(&mut self) {
        if let (Phase::Running(_), Some(shared)) = (&self.phase, self.requests.shared()) {
            self.actions.push_back(Action::Peers(shared.usable()));
        }
    }

    /// Checks the peers, once a second.
    pub(super) fn check_peers(&mut self, now: Instant) {
        let Phase::Running(incoming) = &self.phase else { return };
        let Some(shared) = self.requests.shared_mut() else { return };
        shared.set_time(now);
        if shared.check(&self.arrivals, &incoming.assembly) {
            self.name_peers();
        }
    }

    /// Grants the credit of a stream again that was pushed, and has ended. The origin counts what it pushed and was not
    /// credited, so none is kept back: by itself it has few chunks outstanding at each of several members.
    pub(super) fn refund(&mut self, stream: StreamToken) {
        if self.arrivals.take_pushed(stream) && !self.is_origin_lost() {
            self.grant(1);
        }
    }

    /// Whether nothing can arrive of a shared version before its lost origin is connected again.
    pub(super) fn is_awaiting_origin(&self) -> bool {
        let is_outstanding = self.requests.ordered() > 0 || self.arrivals.receiving() > 0;
        self.is_shared() && self.is_origin_lost() && !is_outstanding
    }

    /// Lets the origin push again after it returned: it was subscribed to without credit.
    pub(super) fn grant_returned(&mut self) {
        let is_shared = matches!(&self.phase, Phase::Running(incoming) if incoming.announce.shared);
        if is_shared && self.is_shared() {
            self.grant(self.allowance.min(SHARED_CREDIT));
        }
    }

    /// How many chunks are outstanding at a source of the current version: ordered or arriving. The receive window of its
    /// connection must cover them.
    pub fn outstanding_of(&self, source: SubscriptionId) -> u32 {
        self.requests.ordered_of(source) + self.arrivals.receiving_of(source) as u32
    }

    /// The verified chunks of the current version if it is shared: what this client could pass on.
    pub fn held(&self) -> Option<RangeSet> {
        match &self.phase {
            Phase::Running(incoming) if self.is_shared() => Some(incoming.assembly.held()),
            _ => None,
        }
    }
}
