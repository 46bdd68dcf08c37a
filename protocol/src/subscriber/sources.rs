//! Several sources of one version (PROTOCOL.md §6.10): the origin, which announced it, and other servers with the same
//! content, of which chunks are requested.
//!
//! A source is named by the number of its subscription, which is unique among all servers of a client. That of the
//! origin is the user's; that of another server lasts for one version.

use super::{Action, Incoming, Manifests, Phase, Subscriber, VersionFault, key};
use crate::{
    AbortReason, Announce, ChunkHash, ChunkIndex, ClientMessage, Epoch, ProtocolViolation, RangeSet,
    StreamToken, SubscriptionId, Verified, Version, VersionId,
};
use std::collections::{BTreeMap, BTreeSet};

/// The most sources of one version, the origin not counted.
const SOURCES_AT_ONCE_MAX: usize = 15;

/// What a subscriber knows of sources, beside the [requests](super::Requests).
#[derive(Debug, Default)]
pub(super) struct Sources {
    /// Those that were asked for the current version and have not announced it.
    asked: BTreeSet<SubscriptionId>,
    /// The verified chunks of the current version that do not come from the origin, with their sources.
    received: BTreeMap<ChunkIndex, SubscriptionId>,
    /// The version that ended while the origin was lost, if the origin may still announce it: committed, and whether it
    /// is kept as a base, or given up.
    pub(super) ended_apart: Option<((Epoch, Version), Option<bool>)>,
}

impl Sources {
    /// Records that a source was asked for the current version.
    pub(super) fn insert_asked(&mut self, source: SubscriptionId) {
        self.asked.insert(source);
    }
}

impl Subscriber {
    /// Asks another server for the current version, under the number `source`. Its answer is passed to
    /// [`handle_announce`](Self::handle_announce) or [`handle_source_ended`](Self::handle_source_ended). No effect unless
    /// [`wants_sources`](Self::wants_sources).
    pub fn ask_source(&mut self, source: SubscriptionId) {
        if self.wants_sources() {
            self.ask(source, None);
        }
    }

    /// Whether another source is of use: so many chunks are missing that the origin cannot push them at once.
    pub fn wants_sources(&self) -> bool {
        let Phase::Running(incoming) = &self.phase else { return false };
        let others = self.sources.asked.len() + self.requests.others(self.options.subscription).len();
        !self.is_lent()
            && !self.is_shared()
            && incoming.assembly.unverified() > self.allowance
            && others < SOURCES_AT_ONCE_MAX
    }

    /// Whether this source was asked for chunks of the current version.
    pub fn has_source(&self, source: SubscriptionId) -> bool {
        self.sources.asked.contains(&source) || self.requests.has_source(source)
    }

    /// Whether a chunk of this source is being received.
    pub fn is_receiving_of(&self, source: SubscriptionId) -> bool {
        self.arrivals.receiving_of(source) > 0
    }

    /// Handles the end of a source's subscription: it does not have the version, or gave it up. Chunks of it may still
    /// arrive; each of its streams ends for itself.
    pub fn handle_source_ended(&mut self, source: SubscriptionId) {
        self.sources.asked.remove(&source);
        if let Phase::Running(incoming) = &self.phase {
            self.requests.remove_source(source, &incoming.assembly);
        }
        self.requests.remove_peer(source);
    }

    /// Handles `Waiting` from a source, which waits for its own source: it is not stalled.
    pub fn handle_source_waiting(&mut self, source: SubscriptionId) {
        // A peer offers only what it has.
        if self.arrivals.receiving_of(source) == 0 && !self.requests.is_peer(source) {
            self.requests.note_progress(source); // It has all of a chunk that it begins.
        }
    }

    /// Handles that a part of a chunk arrived from a source: a slow one that goes on is not stalled, unless another source would
    /// send the chunk.
    pub fn handle_part(&mut self, source: SubscriptionId) {
        self.requests.note_part(source);
    }

    /// Handles the loss of the connection to a source. The caller must have stopped the writers of its streams.
    pub fn handle_source_lost(&mut self, source: SubscriptionId) {
        self.end_streams(source);
        self.handle_source_ended(source);
    }

    /// Handles `Hashes` from a source: the list of all chunks' hashes continues.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the list was not asked for, or is not continued.
    pub fn handle_hashes(
        &mut self,
        source: SubscriptionId,
        version: (Epoch, Version),
        first: u32,
        hashes: &[ChunkHash],
    ) -> Result<(), ProtocolViolation> {
        let is_over = self.history.is_past(version);
        let is_asked = self.requests.lister() == Some(source);
        let incoming = match &mut self.phase {
            Phase::Running(incoming) if is_asked && incoming.is(version) => incoming,
            // The list of a version that has ended, or of a source that is not used any more.
            _ if is_over || source != self.options.subscription => return Ok(()),
            _ => {
                let expected = "no list that was not asked for";
                return Err(ProtocolViolation::OutOfTurn { found: "Hashes", expected });
            }
        };
        for chunk in incoming.assembly.handle_hashes(first, hashes)? {
            let origin = self.options.subscription;
            let from = self.sources.received.get(&chunk).copied().unwrap_or(origin);
            self.handle_other_hash(chunk, from, true);
        }
        self.finish_if_complete();
        Ok(())
    }

    /// Handles content of a chunk whose hash differs from that in the list, and which is the only content of it unless
    /// `is_wanted` is false: the chunk is requested again. A source that differs is not used any more; if the list is its
    /// own, the version fails.
    pub(super) fn handle_other_hash(&mut self, chunk: ChunkIndex, source: SubscriptionId, is_wanted: bool) {
        if self.requests.lister() == Some(source) {
            return self.actions.push_back(Action::Fail(VersionFault::OtherHash(chunk)));
        }
        if is_wanted {
            self.discard_content(chunk);
        }
        self.refuse_source(source);
    }

    /// Discards the content of a chunk, which is requested again without a base, because the client's base may have become
    /// that content.
    fn discard_content(&mut self, chunk: ChunkIndex) {
        let Phase::Running(incoming) = &mut self.phase else { return };
        incoming.assembly.discard(chunk);
        self.sources.received.remove(&chunk);
        self.requests.handle_discarded(chunk);
    }

    /// Handles a chunk that cannot be decoded or does not have the hash in its header. If it comes from another source than
    /// the origin, that source is not used any more, and true is returned; otherwise the version cannot be received.
    pub fn handle_corrupt(&mut self, stream: StreamToken) -> bool {
        let Some((_, source)) = self.arrivals.receiving_at(stream) else { return false };
        if source == self.options.subscription {
            return false;
        }
        let Some((chunk, _)) = self.arrivals.end(stream, false) else { return false };
        if let Phase::Running(incoming) = &mut self.phase {
            incoming.assembly.handle_lost(chunk);
        }
        if let Some(spare) = self.arrivals.take_spare(chunk) {
            self.discard(spare);
        }
        self.discard_content(chunk);
        if self.has_source(source) {
            self.shun(source);
            self.leave_source(source);
        }
        true
    }

    /// Records where a verified chunk comes from, and compares it with the list.
    pub(super) fn note_source(&mut self, verified: &Verified, source: SubscriptionId) {
        let Phase::Running(incoming) = &self.phase else { return };
        let chunk = verified.chunk();
        if source != self.options.subscription {
            self.sources.received.insert(chunk, source);
        }
        if incoming.assembly.is_listed_otherwise(chunk, verified.hash()) {
            self.handle_other_hash(chunk, source, true);
        }
    }

    /// Handles the announcement of a source that was asked for the current version. Its content must be the same.
    pub(super) fn handle_source_announce(&mut self, announce: &Announce) {
        let source = announce.subscription;
        let Phase::Running(incoming) = &self.phase else { return };
        if !self.sources.asked.contains(&source) {
            return; // It was given up.
        }
        let is_same = (&announce.id, announce.manifest) == (incoming.id(), incoming.announce.manifest);
        if !is_same || announce.afresh {
            return self.refuse_source(source);
        }
        self.sources.asked.remove(&source);
        if let Some(shared) = self.requests.shared_mut() {
            shared.handle_announced(source);
        }
        let missing = incoming.assembly.missing();
        self.requests
            .end_pushing(self.options.subscription, &missing, self.arrivals.credit());
        self.requests.add_source(source);
    }

    /// Gives up a source that has other content. The origin cannot be given up: its content is the version.
    fn refuse_source(&mut self, source: SubscriptionId) {
        if self.requests.is_peer(source) {
            self.handle_lie(source);
        } else if source != self.options.subscription && self.has_source(source) {
            self.actions.push_back(Action::SourceDiffers(source));
            self.leave_source(source);
        }
    }

    /// Ends the subscription to a source, which is not the origin. Chunks of it may still arrive.
    pub fn leave_source(&mut self, source: SubscriptionId) {
        self.send(ClientMessage::Unsubscribe { subscription: source, keep_place: false });
        self.handle_source_ended(source);
    }

    /// Ends the subscriptions to all sources but the origin.
    pub fn drop_sources(&mut self) {
        let sources = std::mem::take(&mut self.sources.asked);
        self.sources.received.clear();
        for source in sources.into_iter().chain(self.requests.others(self.options.subscription)) {
            self.send(ClientMessage::Unsubscribe { subscription: source, keep_place: false });
        }
    }

    /// Seeks further sources if they are of use.
    pub fn seek_sources(&mut self) {
        if self.wants_sources() {
            self.actions.push_back(Action::Seek);
        }
    }

    /// Tells each source that bytes arrive, from whichever source, so that none of them gives the version up.
    pub(super) fn report_progress(&mut self) {
        let origin = (!self.is_origin_lost()).then_some(self.options.subscription);
        let others = self.requests.others(self.options.subscription);
        for subscription in origin.into_iter().chain(others) {
            self.send(ClientMessage::Credit { subscription, chunks: 0 });
        }
    }

    /// Closes a source that owes chunks and has sent none for half of the timeout. It delays the commit, because what
    /// arrives is not requested of another source.
    pub(super) fn close_stalled_source(&mut self) {
        let checks_max = u32::try_from(self.stall.timeout().as_secs() / 2).unwrap_or(u32::MAX).max(1);
        let stalled = self
            .requests
            .check_sources(self.options.subscription, &self.arrivals, checks_max);
        if let Some(stalled) = stalled {
            self.shun(stalled);
            self.actions.push_back(Action::CloseSource(stalled));
        }
    }

    /// Whether the connection to the origin was lost, and other sources send the current version.
    pub(super) fn is_origin_lost(&self) -> bool {
        matches!(&self.phase, Phase::Running(incoming) if incoming.is_origin_lost)
    }

    /// Whether the origin was lost and no other source is left: nothing arrives before the origin is connected again.
    pub(super) fn is_without_source(&self) -> bool {
        self.is_origin_lost() && self.requests.sources() == 0
    }

    /// Whether the new origin announces an older version than the one that continues without it.
    pub(super) fn is_behind(&self, announced: &VersionId) -> bool {
        let Phase::Running(incoming) = &self.phase else { return false };
        let VersionId { epoch, version, .. } = incoming.id();
        incoming.is_origin_lost && announced.epoch == *epoch && announced.version < *version
    }

    /// Refuses a version that the origin announced: the client receives a newer one, or has given this one up. That voids
    /// the credit.
    pub(super) fn refuse_version(&mut self, epoch: Epoch, version: Version) {
        let (subscription, reason) = (self.options.subscription, AbortReason::Superseded);
        self.manifests.stale += 2; // Its manifest may arrive.
        self.send(ClientMessage::Abort { subscription, epoch, version, reason });
    }

    /// Whether the current version comes from another source than the origin, too, or chunks of one still arrive.
    pub fn has_other_sources(&self) -> bool {
        let origin = self.options.subscription;
        let is_other = |source: SubscriptionId| source != origin;
        matches!(self.phase, Phase::Running(_))
            && (!self.requests.others(origin).is_empty() || self.arrivals.sources().any(is_other))
    }

    /// Handles the loss of the origin's connection while the version continues from other sources.
    pub(super) fn handle_origin_lost(&mut self, allowance: u32) {
        let origin = self.options.subscription;
        self.drop_origin_messages();
        self.allowance = allowance;
        self.end_streams(origin);
        self.arrivals.take_credit();
        self.history.handle_detached();
        self.manifests = Manifests::default();
        let Phase::Running(incoming) = &mut self.phase else { return };
        self.requests.remove_source(origin, &incoming.assembly);
        incoming.assembly.forget_complete();
        incoming.resumed += u32::from(!incoming.is_origin_lost);
        incoming.is_origin_lost = true;
    }

    /// Handles the origin's announcement of the version that continued without it.
    pub(super) fn handle_origin_returned(
        &mut self,
        mut incoming: Box<Incoming>,
        announce: Announce,
    ) -> Result<(), ProtocolViolation> {
        if incoming.announce.manifest != announce.manifest {
            return Err(ProtocolViolation::WrongManifest);
        }
        (incoming.announce, incoming.is_origin_lost) = (announce, false);
        if let Some(shared) = self.requests.shared_mut() {
            shared.begin_session(incoming.announce.shared);
        }
        incoming.announce.lending = None; // Its rest is requested in chunks, also of an origin that lends it now.
        self.phase = Phase::Running(incoming);
        self.requests.add_source(self.options.subscription);
        if self.is_shared()
            && let Phase::Running(incoming) = &self.phase
        {
            let version = key(incoming.id());
            self.request_nothing(version); // The new session need not send `Complete`.
        }
        self.grant_returned();
        Ok(())
    }

    /// Answers the origin's announcement of the version that ended while the origin was lost. If its content differs, what
    /// was committed is kept.
    pub(super) fn answer_ended_apart(&mut self, afresh: bool) {
        let Some(((epoch, version), committed)) = self.sources.ended_apart.take() else { return };
        let subscription = self.options.subscription;
        let Some(kept) = committed.filter(|_| !afresh) else {
            self.refuse_version(epoch, version);
            return self.grant_allowance();
        };
        self.request_nothing((epoch, version));
        self.send(ClientMessage::Committed { subscription, epoch, version, kept });
        self.grant_allowance();
    }

    /// Sends the origin a request without chunks, after which a commit without `Complete` is permitted.
    fn request_nothing(&mut self, (epoch, version): (Epoch, Version)) {
        self.send(ClientMessage::Request {
            subscription: self.options.subscription,
            epoch,
            version,
            chunks: RangeSet::new(),
            hashes: false,
            again: false,
        });
    }

    /// Drops messages to the origin that were not sent: its next session does not know the subscription yet.
    pub(super) fn drop_origin_messages(&mut self) {
        let origin = Some(self.options.subscription);
        self.actions.retain(|action| match action {
            Action::Send(message) => message.subscription() != origin,
            _ => true,
        });
    }

    /// Ends all streams of a source whose connection was lost.
    fn end_streams(&mut self, source: SubscriptionId) {
        let (lost, waiting) = self.arrivals.end_source(source);
        self.actions.extend(waiting.into_iter().map(Action::Discard));
        lost.into_iter().for_each(|chunk| self.lose_chunk(chunk));
    }
}
