//! The client's state machine of one subscription: the current version, the chunks received, and the next action
//! (PROTOCOL.md §6.5 to §6.8).

mod action;
mod arrivals;
mod assembly;
mod beginning;
mod chunks;
mod entries;
mod gap;
mod history;
mod incoming;
mod manifests;
mod peers;
mod requests;
mod shared;
mod sources;
mod stall;

#[cfg(test)]
pub(crate) mod fixtures;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod model;
#[cfg(test)]
mod swarm_model;
#[cfg(test)]
mod tests;

pub use action::{Action, Commit, Released, VersionFault};
pub use arrivals::StreamToken;
pub use assembly::{Assembly, Outcome};
pub use gap::Gap;

use crate::{
    AbortReason, BoxError, ClientMessage, CodecSet, Epoch, Manifest, PARTIAL_RANGES_MAX, Partial,
    ProtocolViolation, RangeSet, Selection, Start, Subscribe, SubscriptionId, Version, VersionDigest,
    VersionId, Wanted,
};
use arrivals::Arrivals;
use history::History;
use incoming::{Incoming, Phase, key};
use manifests::Manifests;
use requests::Requests;
use sources::Sources;
use stall::{Check, Stall};
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

/// The state machine of one subscription. It outlives connections.
///
/// Pure: it holds no payload, never waits and reads no clock. The caller passes events to `handle_*` and then calls
/// [`poll`](Self::poll), which returns the resulting [`Action`]s one at a time, until it returns `None`. Announcements,
/// manifests and chunks may overtake one another. The caller owns the chunk streams; here they are tokens.
#[derive(Debug)]
pub struct Subscriber {
    /// The user's options. [`subscribe`](Self::subscribe) fills in the fields that change with each connection.
    options: Subscribe,
    /// The codecs that this client offered.
    codecs: CodecSet,
    /// The credit of the subscription on this connection when no chunk is in flight.
    allowance: u32,
    /// How many further chunks may be outstanding while there are several sources.
    further_allowance: u32,
    /// The selection from the latest manifest; the server sends another manifest only when it changes.
    selection: Option<Arc<Selection>>,
    /// Whether versions fit although they lack tensors of which boxes are requested by name.
    may_lack_boxes: bool,
    /// Whether the server has no credit yet, because it is not known that the boxes fit.
    is_credit_withheld: bool,
    manifests: Manifests,
    phase: Phase,
    arrivals: Arrivals,
    requests: Requests,
    sources: Sources,
    history: History,
    stall: Stall,
    /// The number from which random choices follow.
    seed: u64,
    actions: VecDeque<Action>,
}

impl Subscriber {
    /// The state machine of the user's `request`, whose `credit` is that of the first connection. A version fails when
    /// no byte was received for `stall_timeout`.
    pub fn new(request: Subscribe, codecs: CodecSet, stall_timeout: Duration, now: Instant) -> Self {
        Self {
            codecs,
            allowance: request.credit,
            further_allowance: 0,
            selection: None,
            may_lack_boxes: false,
            is_credit_withheld: false,
            manifests: Manifests::default(),
            phase: Phase::Idle,
            arrivals: Arrivals::new(request.credit),
            requests: Requests::default(),
            sources: Sources::default(),
            history: History::new(&request),
            stall: Stall::new(stall_timeout, now),
            seed: 0,
            actions: VecDeque::new(),
            options: request,
        }
    }

    /// Uses `manifest` for versions that have it, so that the server need not send it.
    pub fn set_manifest(&mut self, manifest: Arc<Manifest>) {
        self.selection = Some(Arc::new(Wanted::from(&self.options).selection(manifest)));
    }

    /// Allows versions to lack tensors of which boxes are requested by name.
    pub fn allow_missing_boxes(&mut self) {
        self.may_lack_boxes = true;
    }

    /// Whether boxes are requested.
    pub fn wants_boxes(&self) -> bool {
        !self.options.boxes.is_empty()
    }

    /// Why the boxes do not fit the latest manifest.
    fn misfit(&self) -> Option<&BoxError> {
        let misfit = self.selection.as_ref().and_then(|selection| selection.misfit());
        misfit.filter(|misfit| !self.may_lack_boxes || !matches!(misfit, BoxError::NoSuchTensor(_)))
    }

    /// The number of the only version that the user wants, and its epoch if that matters (PROTOCOL.md §3.12 (8)).
    /// [`end_subscription`](Self::end_subscription) when the server announces another one.
    pub fn only_version(&self) -> Option<(Option<Epoch>, Version)> {
        match self.options.start {
            Start::At(epoch, version) | Start::Exactly(epoch, version) if self.options.once => {
                Some((epoch, version))
            }
            _ => None,
        }
    }

    /// Whether the subscription is over because its only version was committed.
    pub fn is_done(&self) -> bool {
        self.options.once && self.has_committed()
    }

    /// The next action; `None` if there is none before the next event.
    pub fn poll(&mut self) -> Option<Action> {
        if self.actions.is_empty() {
            self.request_missing();
        }
        self.actions.pop_front()
    }

    /// Subscribes on a new connection. `base` is the version that the client holds as a base for deltas, if any.
    pub fn subscribe(&mut self, base: Option<(Epoch, Version)>) {
        let partial = match &self.phase {
            // Of the sources of a version, only the origin can be subscribed to again.
            Phase::Detached(incoming) | Phase::Running(incoming) => {
                let (epoch, version) = key(incoming.id());
                let (chunks, digest) = incoming.assembly.claim(PARTIAL_RANGES_MAX);
                Some(Partial { epoch, version, chunks, digest })
            }
            _ => None,
        };
        let have = self.history.have();
        self.drop_origin_messages();
        self.is_credit_withheld = self.wants_boxes() && (self.selection.is_none() || self.misfit().is_some());
        if self.is_credit_withheld {
            self.arrivals.take_credit();
        }
        if self.sources.ended_apart.take().is_some() {
            self.history.handle_detached(); // It ended without this connection.
        }
        self.send(ClientMessage::Subscribe(Subscribe {
            have,
            // A base is the version that was committed last.
            base: have.filter(|have| base == Some(have.key())),
            partial,
            manifest: self.selection.as_ref().map(|selection| selection.manifest().digest()),
            credit: self.arrivals.credit(),
            ..self.options.clone()
        }));
        if let Some((epoch, version)) = self.history.acknowledged() {
            // Repeated on each connection, because the previous one may have lost it.
            self.send(ClientMessage::Acknowledge { subscription: self.options.subscription, epoch, version });
        }
    }

    /// Handles the loss of the connection: partly received chunks are missing again. Verified chunks stay, except those
    /// beyond the first [`PARTIAL_RANGES_MAX`] ranges. `allowance` is the subscription's credit on the next connection.
    /// The caller must have stopped all writers to the current version's memory.
    pub fn handle_detached(&mut self, allowance: u32) {
        if self.has_other_sources() {
            self.handle_origin_lost(allowance);
        } else {
            self.detach(allowance);
        }
    }

    /// Drops the state of the connection, and all sources.
    fn detach(&mut self, allowance: u32) {
        self.drop_sources();
        self.actions.retain(|action| matches!(action, Action::Send(_)));
        self.drop_origin_messages();
        self.allowance = allowance;
        self.reset_arrivals();
        self.requests = Requests::default();
        self.manifests = Manifests::default();
        self.history.handle_detached();
        self.phase = match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Placing(mut incoming) | Phase::Running(mut incoming) => {
                incoming.assembly.handle_detached();
                incoming.assembly.discard_beyond(PARTIAL_RANGES_MAX);
                incoming.resumed += u32::from(!incoming.is_origin_lost);
                incoming.is_origin_lost = false;
                Phase::Detached(incoming)
            }
            Phase::Detached(incoming) => Phase::Detached(incoming),
            Phase::Idle | Phase::Announced { .. } => Phase::Idle,
        };
    }

    /// Leaves the memory of the current version, and everything received there: [`subscribe`](Self::subscribe) requests
    /// the version again, as on a new connection, under the number `id`. The caller ends the subscription under its
    /// previous number. `allowance` is the new credit.
    pub fn leave_memory(&mut self, id: SubscriptionId, allowance: u32) {
        let was_connected = match &self.phase {
            Phase::Placing(incoming) | Phase::Running(incoming) => !incoming.is_origin_lost,
            _ => false,
        };
        self.detach(allowance);
        self.options.subscription = id;
        if let Phase::Detached(incoming) = &mut self.phase {
            incoming.assembly = Assembly::new(Arc::clone(incoming.assembly.selection()));
            incoming.resumed -= u32::from(was_connected); // No connection was lost.
        }
    }

    /// Raises the subscription's credit to `allowance`, chunks in flight included. A lower `allowance` has no effect.
    pub fn set_allowance(&mut self, allowance: u32) {
        let chunks = allowance.saturating_sub(self.allowance);
        if chunks > 0 {
            self.allowance = allowance;
            let is_pushed = self.requests.is_only_pushed() || self.is_shared() && !self.is_origin_lost();
            if is_pushed && !self.is_credit_withheld {
                self.grant(chunks);
            }
        }
    }

    /// Sets how many chunks beyond the credit may be outstanding while there are several sources.
    pub fn set_further_allowance(&mut self, chunks: u32) {
        self.further_allowance = chunks;
    }

    /// Handles `Complete`: every selected chunk that this end did not hold was sent, or was lost with its lane.
    ///
    /// # Errors
    /// [`ProtocolViolation`] for a version that is neither the current one nor the last one that ended.
    pub fn handle_complete(
        &mut self,
        version: (Epoch, Version),
        digest: VersionDigest,
    ) -> Result<(), ProtocolViolation> {
        match &mut self.phase {
            // `Complete` crossed this end's `Abort`, or its `Committed` of a version from several sources.
            _ if self.history.is_last(version) => return Ok(()),
            Phase::Placing(incoming) | Phase::Running(incoming) if incoming.is(version) => {
                incoming.assembly.handle_complete(digest);
            }
            Phase::Announced { announce, complete } if key(&announce.id) == version => {
                *complete = Some(digest);
            }
            _ => {
                let (epoch, version) = version;
                return Err(ProtocolViolation::WrongVersion { epoch, version });
            }
        }
        self.finish_if_complete();
        Ok(())
    }

    /// Requests the commit, or fails the version, once it is complete.
    fn finish_if_complete(&mut self) {
        let Phase::Running(incoming) = &self.phase else { return };
        let action = match incoming.assembly.poll() {
            None => return,
            Some(Outcome::Mismatch { expected, found }) => {
                Action::Fail(VersionFault::Mismatch { expected, found })
            }
            Some(Outcome::Commit(digest)) => Action::Commit(Commit {
                announce: incoming.announce.clone(),
                selection: Arc::clone(incoming.assembly.selection()),
                chunks: incoming.assembly.verified_chunks(),
                digest,
                reconnections: incoming.resumed,
                gap: self.history.gap_before(incoming.id()),
                new_epoch: self.history.is_new_epoch(incoming.id()),
            }),
        };
        self.actions.push_back(action);
    }

    /// Handles the commit of the current version. `kept` says whether the client keeps a copy as a base for deltas.
    pub fn handle_committed(&mut self, kept: bool) {
        let Phase::Running(incoming) = &self.phase else { return };
        let (id, digest) = (incoming.id().clone(), incoming.assembly.committed_digest());
        let ((epoch, version), is_origin_lost) = (key(&id), incoming.is_origin_lost);
        self.end_version(&id);
        self.history.handle_committed(id, digest);
        if is_origin_lost && self.options.once {
            self.send(ClientMessage::Unsubscribe {
                subscription: self.options.subscription,
                keep_place: false,
            });
        } else if is_origin_lost {
            self.sources.ended_apart = Some(((epoch, version), Some(kept)));
        } else {
            let subscription = self.options.subscription;
            self.send(ClientMessage::Committed { subscription, epoch, version, kept });
        }
        let requests = std::mem::take(&mut self.requests);
        if requests.is_pushing_ended() || requests.shared().is_some() {
            self.reset_arrivals();
            self.grant_allowance();
        }
    }

    /// Handles `Waiting`: the server waits for the source of a version, so this end's deadline starts again.
    /// `received_bytes` is the number of bytes received for the subscription so far.
    ///
    /// # Errors
    /// [`ProtocolViolation`] for a version that is neither the current one nor the last one that ended.
    pub fn handle_waiting(
        &mut self,
        version: (Epoch, Version),
        now: Instant,
        received_bytes: u64,
    ) -> Result<(), ProtocolViolation> {
        if self.is_current(version)? {
            self.stall.restart(now, received_bytes);
            if let Some(shared) = self.requests.shared_mut() {
                shared.note_arrival();
            }
            self.actions.push_back(Action::Waiting);
        }
        Ok(())
    }

    /// Whether a message is about the current version, and did not cross this end's last word on it.
    fn is_current(&self, version: (Epoch, Version)) -> Result<bool, ProtocolViolation> {
        let is_current = self.current_version().map(key) == Some(version);
        match is_current || self.history.is_last(version) {
            true => Ok(is_current),
            false => Err(ProtocolViolation::WrongVersion { epoch: version.0, version: version.1 }),
        }
    }

    /// Handles the server's `Abort` of a version.
    ///
    /// # Errors
    /// [`ProtocolViolation`] for a version that is neither the current one nor the last one that ended.
    pub fn handle_abort(
        &mut self,
        version: (Epoch, Version),
        reason: AbortReason,
    ) -> Result<(), ProtocolViolation> {
        if self.is_current(version)? {
            self.abort(reason, Released::ByServer(reason));
            self.grant_allowance();
        }
        Ok(())
    }

    /// Gives up the current version. The subscription continues with the next version.
    pub fn give_up(&mut self, reason: AbortReason) {
        self.abort(reason, Released::ByClient);
        self.grant_allowance();
    }

    /// Ends the subscription, and the current version with `reason`.
    pub fn end_subscription(&mut self, reason: AbortReason, keep_place: bool) {
        self.abort(reason, Released::ByClient);
        self.send(ClientMessage::Unsubscribe { subscription: self.options.subscription, keep_place });
    }

    /// Ends the current version, which either end gave up. Both ends reset the credit.
    fn abort(&mut self, reason: AbortReason, released: Released) {
        let is_origin_lost = self.is_origin_lost();
        let Some(id) = self.current_version().cloned() else { return };
        self.end_version(&id);
        self.requests = Requests::default();
        self.manifests.stale += 2; // A late header and a late end of this version's manifest are excused.
        self.reset_arrivals();
        let (subscription, (epoch, version)) = (self.options.subscription, key(&id));
        self.actions.push_back(Action::Release { id, reason: released });
        if is_origin_lost {
            self.sources.ended_apart = Some(((epoch, version), None));
        } else {
            self.send(ClientMessage::Abort { subscription, epoch, version, reason });
        }
    }

    /// Grants the whole credit again: giving up a version, or requesting its chunks, reset it.
    fn grant_allowance(&mut self) {
        if self.is_credit_withheld {
            self.arrivals.take_credit();
            return;
        }
        let (subscription, chunks) = (self.options.subscription, self.allowance);
        self.send(ClientMessage::Credit { subscription, chunks });
    }

    /// Lets the server send chunks, now that the boxes are known to fit.
    fn grant_withheld_credit(&mut self) {
        if std::mem::take(&mut self.is_credit_withheld) {
            self.grant(self.allowance);
        }
    }

    /// Acknowledges that the user has processed a version and all before it.
    pub fn acknowledge(&mut self, epoch: Epoch, version: Version) {
        if self.history.handle_acknowledged(epoch, version) {
            self.send(ClientMessage::Acknowledge { subscription: self.options.subscription, epoch, version });
        }
    }

    /// The time at which to call [`handle_timeout`](Self::handle_timeout); `None` without a current version.
    pub fn timeout_at(&self) -> Option<Instant> {
        let is_awaited = self.current_version().is_some() && !self.is_without_source();
        is_awaited.then(|| self.stall.check_at())
    }

    /// Checks the progress of the current version, if that is due: reports it to the server, which does not see what
    /// arrives of a chunk that takes long; or fails the version if no byte was received for the timeout.
    /// `received_bytes` is the number of bytes received for the subscription so far.
    pub fn handle_timeout(&mut self, now: Instant, received_bytes: u64) {
        if self.current_version().is_none() || self.is_without_source() {
            return;
        }
        if now >= self.stall.check_at() {
            self.seek_sources();
            self.close_stalled_source();
            self.check_peers(now);
            if self.is_awaiting_origin() {
                return self.stall.restart(now, received_bytes);
            }
        }
        match self.stall.handle_check(now, received_bytes) {
            Check::Progress => self.report_progress(),
            Check::Stalled => {
                let fault = VersionFault::Stalled(self.stall.timeout());
                self.actions.push_back(Action::Fail(fault));
            }
            Check::Waiting => {}
        }
    }

    /// The current version on this connection, if any: one that was announced and has not ended.
    pub fn current_version(&self) -> Option<&VersionId> {
        match &self.phase {
            Phase::Idle | Phase::Detached(_) => None,
            Phase::Announced { announce, .. } => Some(&announce.id),
            Phase::Placing(incoming) | Phase::Running(incoming) => Some(incoming.id()),
        }
    }

    /// Whether memory was requested for a version that has not ended or may be resumed. If so, a new
    /// destination that the user chooses is for later versions only.
    pub fn is_receiving(&self) -> bool {
        matches!(self.phase, Phase::Placing(_) | Phase::Running(_) | Phase::Detached(_))
    }

    /// Whether the chunk on `stream` is being received.
    pub fn is_receiving_chunk(&self, stream: StreamToken) -> bool {
        self.arrivals.is_receiving(stream)
    }

    /// The selection from the latest manifest.
    pub fn selection(&self) -> Option<&Arc<Selection>> {
        self.selection.as_ref()
    }

    /// The total size of the verified chunks of the current version, or of the one that may be resumed.
    pub fn held_bytes(&self) -> u64 {
        match &self.phase {
            Phase::Idle | Phase::Announced { .. } => 0,
            Phase::Placing(incoming) | Phase::Running(incoming) | Phase::Detached(incoming) => {
                incoming.assembly.held_bytes()
            }
        }
    }

    /// The verified chunks of the version that may be resumed on the next connection; `None` if there is no such
    /// version.
    pub fn resumable_chunks(&self) -> Option<RangeSet> {
        match &self.phase {
            Phase::Detached(incoming) | Phase::Running(incoming) => Some(incoming.assembly.held()),
            _ => None,
        }
    }

    /// Whether any version was committed.
    pub fn has_committed(&self) -> bool {
        self.history.has_committed()
    }

    fn end_version(&mut self, id: &VersionId) {
        self.drop_sources();
        self.history.handle_ended(id);
        self.arrivals.end_version();
        self.phase = Phase::Idle;
    }

    /// Discards the streams that arrived early, forgets those being received, and resets the credit.
    fn reset_arrivals(&mut self) {
        let early = self.arrivals.reset(self.allowance);
        self.actions.extend(early.into_iter().map(Action::Discard));
    }

    fn grant(&mut self, chunks: u32) {
        self.arrivals.grant(chunks);
        self.send(ClientMessage::Credit { subscription: self.options.subscription, chunks });
    }

    fn send(&mut self, message: ClientMessage) {
        self.actions.push_back(Action::Send(message));
    }
}
