//! [`Sender`]: the server's state machine of one subscription, the twin of [`Subscriber`](crate::Subscriber)
//! (PROTOCOL.md §3.8, §6.3 to §6.8).

mod action;
mod claimed;
mod course;
mod message;
mod plan;
mod read_retry;
mod versions;

#[cfg(test)]
mod tests;

pub use action::{Announcement, Ended, SenderAction};
pub use claimed::{Claim, Named};
pub use message::{ChunkRequest, SubscriptionMessage};
pub use plan::SendAction;
pub use read_retry::{Attempt, ReadRetry};
pub use versions::{Here, Pick, Published, Seq, Versions};

use crate::{
    AbortReason, Credit, EndReason, FeatureSet, LaneId, ManifestDigest, NotLent, Partial, Place,
    ProtocolViolation, RangeSet, Selection, Start, Subscribe, WantedGpu,
};
use claimed::Claimed;
use course::{Course, Next, Step};
use plan::SendPlan;
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

/// In mode `every`: the time for which a version that cannot be read delays the next one. In mode `latest`, it delays
/// none.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(10);

/// One client's subscription, as its server sees it: what the client holds, what it may be sent, and what is being
/// sent.
///
/// Pure: it holds no payload, lane or lock, never waits and reads no clock. The caller passes events to `handle_*` and
/// then calls [`poll`](Self::poll), which returns the resulting [`SenderAction`]s one at a time, until it returns
/// `None`. The topic's state is asked for through [`Versions`].
#[derive(Debug)]
pub struct Sender<V> {
    course: Course<V>,
    /// The features that the client offered.
    offered: FeatureSet,
    /// The claims of the client. They are used until the first version begins.
    claimed: Claimed,
    /// The claim that is being compared.
    comparing: Option<Named>,
    /// The manifest that the client holds.
    manifest: Option<ManifestDigest>,
    /// The part of a version that the client holds; the first version invalidates it.
    partial: Option<Partial>,
    credit: Credit,
    /// Whether a version under way is given up for a newer one.
    preempt: bool,
    /// Whether versions may be lent in memory.
    memory: bool,
    /// The GPU that the client wants versions on or, once it has declined one, why they are not lent there any more.
    gpu: Option<Result<WantedGpu, NotLent>>,
    /// Whether the subscription ends with its first commit.
    once: bool,
    /// Whether it also ends with the first version that is aborted, since the client wants no other.
    ends_with_abort: bool,
    /// The place that the reader had before it was given up, until its client is told.
    lost_place: Option<Place>,
    /// The next version, while claims are compared.
    next: Option<Next<V>>,
    current: Option<Current<V>>,
    is_draining: bool,
    has_ended: bool,
    actions: VecDeque<SenderAction<V>>,
}

/// The version under way.
#[derive(Debug)]
struct Current<V> {
    version: V,
    /// The chunks of it that the client held when it began.
    held: RangeSet,
    /// What the client selects of it, once that is known.
    selection: Option<Arc<Selection>>,
    plan: SendPlan,
    retry: ReadRetry,
}

impl<V: Published + Clone> Sender<V> {
    /// The state machine of a client's `subscribe`, who `offered` these features. In mode `every`, it begins at
    /// `begin`, the place of its reader, or the position that was given to it; `lost_place` is the place that the
    /// reader had before it was given up.
    ///
    /// # Errors
    /// [`ProtocolViolation::CreditOverflow`] when the credit is too large.
    pub fn new(
        topic: &impl Versions<Version = V>,
        subscribe: &Subscribe,
        offered: FeatureSet,
        begin: Seq,
        lost_place: Option<Place>,
    ) -> Result<Self, ProtocolViolation> {
        let course = Course::new(topic, subscribe, begin);
        // With `have`, `start` has no effect.
        let is_exact = matches!(subscribe.start, Start::Exactly(..)) && subscribe.have.is_none();
        Ok(Self {
            offered,
            claimed: Claimed::new(subscribe),
            comparing: None,
            manifest: subscribe.manifest,
            partial: subscribe.partial.clone(),
            credit: Credit::new(subscribe.credit)?,
            preempt: subscribe.preempt && !course.is_every() && !is_exact,
            memory: subscribe.memory && !subscribe.describe,
            gpu: subscribe.gpu.as_deref().copied().map(Ok),
            once: subscribe.once,
            ends_with_abort: subscribe.once && is_exact,
            lost_place,
            course,
            next: None,
            current: None,
            is_draining: false,
            has_ended: false,
            actions: VecDeque::new(),
        })
    }

    /// The next action; `None` if there is none before the next event. `lane` is the lane for the next chunk; without
    /// one, no chunk is begun.
    pub fn poll(
        &mut self,
        topic: &impl Versions<Version = V>,
        lane: Option<LaneId>,
    ) -> Option<SenderAction<V>> {
        if let Some(action) = self.actions.pop_front() {
            return Some(action);
        }
        if self.has_ended {
            return None;
        }
        match &mut self.current {
            Some(Current { version, plan, .. }) => {
                let (here, pick) = (topic.here(version), |wanted: &RangeSet| topic.pick(version, wanted));
                plan.poll(&mut self.credit, lane, &here, pick).map(SenderAction::Send)
            }
            None => self.poll_idle(topic),
        }
    }

    /// The next action without a version under way.
    fn poll_idle(&mut self, topic: &impl Versions<Version = V>) -> Option<SenderAction<V>> {
        if self.comparing.is_some() || !self.may_begin(topic) {
            return None;
        }
        loop {
            if let Some((claim, version)) = self.claimed.due(topic) {
                self.comparing = Some(claim.named);
                return Some(SenderAction::Compare(claim, version));
            }
            if let Some(next) = self.next.take() {
                let is_shared = topic.is_shared(&next.version);
                self.begin(next, is_shared);
                self.supersede(topic); // A newer one may have been published during a comparison.
                return self.actions.pop_front();
            }
            match self.course.next(topic) {
                Step::Send(next) => self.next = Some(next), // A claimed version may just have been published.
                Step::Acknowledge(epoch, version) => return Some(SenderAction::Acknowledge(epoch, version)),
                Step::End(reason) => {
                    self.end(reason);
                    return self.actions.pop_front();
                }
                Step::Wait => return None,
            }
        }
    }

    /// Whether versions may begin. While the server drains, only those of ended topics and of mode `every` do: they are
    /// bounded, and would be lost with the server.
    fn may_begin(&self, topic: &impl Versions<Version = V>) -> bool {
        !self.is_draining || self.course.is_every() || topic.ended().is_some()
    }

    /// Whether a shutdown need not wait for this subscription: the server drains, and the client has all that it will
    /// be sent.
    pub fn is_settled(&self, topic: &impl Versions<Version = V>) -> bool {
        let is_idle = self.current.is_none() && self.next.is_none() && self.comparing.is_none();
        let is_last = self.is_draining && topic.ended().is_none();
        is_idle && is_last && !self.course.waits_for_client(topic)
    }

    fn begin(&mut self, Next { version, skipped }: Next<V>, is_shared: bool) {
        if version.feature().is_some_and(|feature| !self.offered.contains(feature)) {
            return self.end(EndReason::NotSupported);
        }
        let key = version.key();
        let is_part = |partial: &Partial| (partial.epoch, partial.version) == key;
        let partial = self.partial.take();
        if partial.as_ref().is_some_and(|partial| !is_part(partial)) {
            self.actions.push_back(SenderAction::ReleaseBase); // It was the base of the partial version.
        }
        let held = partial.filter(is_part).map_or_else(RangeSet::new, |partial| partial.chunks);
        let claimed = std::mem::take(&mut self.claimed);
        self.actions.push_back(SenderAction::Announce(Announcement {
            version: version.clone(),
            skipped,
            afresh: claimed.is_afresh(key),
            shared: is_shared,
            is_ahead: claimed.is_ahead_of(key),
            lost_place: self.lost_place.take(),
        }));
        let plan = SendPlan::new(self.manifest != Some(version.manifest_digest()), is_shared);
        self.current = Some(Current { version, held, selection: None, plan, retry: ReadRetry::default() });
    }

    /// Whether the client asked for versions in memory.
    pub fn wants_memory(&self) -> bool {
        self.memory
    }

    /// The GPU on which the client asked for versions in memory or, once it has declined one, why they are not lent
    /// there.
    pub fn gpu(&self) -> Option<Result<WantedGpu, NotLent>> {
        self.gpu
    }

    /// Handles that the version under way was announced in memory: its chunks are sent only if the client declines it.
    pub fn handle_lent(&mut self) {
        if let Some(current) = &mut self.current {
            current.plan.handle_lent();
        }
    }

    /// Handles what the client selects of the version under way.
    pub fn handle_selected(&mut self, selection: Arc<Selection>) {
        if let Some(current) = &mut self.current {
            current.plan.handle_selected(selection.chunks().difference(&current.held));
            current.selection = Some(selection);
        }
    }

    /// Handles the comparison of a claim. If the content differs, what the client holds is not used.
    pub fn handle_compared(&mut self, topic: &impl Versions<Version = V>, is_same: bool) {
        let Some(named) = self.comparing.take() else { return };
        self.claimed.handle_compared(named, is_same);
        if named == Named::Have {
            self.course.handle_compared(topic, is_same);
        }
        if is_same {
            return;
        }
        self.actions.push_back(SenderAction::ReleaseBase);
        if named == Named::Partial {
            self.course.forget_partial();
            self.partial = None;
        }
    }

    /// Handles a change of the topic: the version under way may have been superseded, or the reader's place lost.
    pub fn handle_changed(&mut self, topic: &impl Versions<Version = V>) {
        if self.current.is_none() {
            return;
        }
        if let Some(reason) = self.course.lost_place(topic) {
            return self.end(reason);
        }
        self.supersede(topic);
    }

    /// Gives up the version under way for a newer one, if the client asked for that.
    fn supersede(&mut self, topic: &impl Versions<Version = V>) {
        let Some(current) = self.current.as_ref().filter(|_| self.preempt) else { return };
        let (epoch, version) = current.version.key();
        // An earlier one may be the newest while this one waits for its own source.
        let is_newer = |newest: V| newest.key().0 != epoch || newest.key().1 > version;
        if topic.newest().is_some_and(|(_, newest)| is_newer(newest)) {
            self.give_up(AbortReason::Superseded);
        }
    }

    /// Handles the beginning of the server's shutdown.
    pub fn handle_draining(&mut self) {
        self.is_draining = true;
    }

    /// Handles the end of a send: its bytes were passed to the transport, or were lost with its lane.
    pub fn handle_sent(&mut self, sent: SendAction) {
        let Some(current) = &mut self.current else { return };
        current.plan.handle_sent(sent);
        if matches!(sent, SendAction::Chunk(..) | SendAction::Again(..) | SendAction::Hashes { .. }) {
            current.retry.handle_read();
        }
    }

    /// Handles a send that failed at `now`, because the version could not be read; that may succeed later. The version
    /// stays under way, and the client is told to wait, until it is read or another version waits. Returns the attempt;
    /// `None` if there is none.
    pub fn handle_unread(
        &mut self,
        topic: &impl Versions<Version = V>,
        send: SendAction,
        now: Instant,
    ) -> Option<Attempt> {
        let current = self.current.as_mut()?;
        let attempt = current.retry.handle_failed(now);
        let is_late = !self.course.is_every() || attempt.failing >= UNREAD_TIMEOUT;
        if is_late && self.course.has_later(topic, &current.version) {
            self.give_up(AbortReason::SourceLost);
            return None;
        }
        if attempt.begins_wait {
            self.actions.push_back(SenderAction::Waiting(current.version.clone()));
        }
        self.actions.push_back(SenderAction::SendAgain(send, attempt.at));
        Some(attempt)
    }

    /// Gives up the version under way. It ends with the client's answer.
    pub fn give_up(&mut self, reason: AbortReason) {
        if let Some(current) = self.current.as_mut().filter(|current| !current.plan.is_given_up()) {
            current.plan.give_up();
            self.actions.push_back(SenderAction::Abort(current.version.clone(), reason));
        }
    }

    /// Ends the subscription.
    pub fn end(&mut self, reason: EndReason) {
        self.finish(Ended::ByServer(reason));
    }

    fn finish(&mut self, ended: Ended) {
        if !std::mem::replace(&mut self.has_ended, true) {
            self.actions.push_back(SenderAction::End(ended));
        }
    }

    /// Handles a message of the client; `is_live` tells which lanes were not retired. Returns whether the version under
    /// way makes progress.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the message breaks a rule.
    pub fn handle_message(
        &mut self,
        message: SubscriptionMessage,
        is_live: impl Fn(LaneId) -> bool,
    ) -> Result<bool, ProtocolViolation> {
        use SubscriptionMessage as Message;
        let is_current =
            |epoch, version| self.current.as_ref().is_some_and(|it| it.version.key() == (epoch, version));
        match message {
            Message::Credit(chunks) => {
                self.credit.grant(chunks)?;
                // Without chunks it says that bytes of the version arrived.
                return Ok(self.current.as_ref().is_some_and(|current| !current.plan.is_given_up()));
            }
            Message::Acknowledge(epoch, version) => {
                self.course.handle_acknowledged((epoch, version));
                self.actions.push_back(SenderAction::Acknowledge(epoch, version));
            }
            Message::Unsubscribe { keep_place } => self.finish(Ended::ByClient { keep_place }),
            // About the previous version, which client and server aborted at the same time.
            Message::Committed(..) | Message::Abort(..) | Message::Decline(..) if self.current.is_none() => {}
            Message::Committed(epoch, version, kept) if is_current(epoch, version) => {
                self.handle_committed(kept)?;
            }
            Message::Abort(epoch, version, reason) if is_current(epoch, version) => {
                self.handle_aborted(reason);
            }
            Message::Decline(epoch, version) if is_current(epoch, version) => {
                self.gpu = self.gpu.and(Some(Err(NotLent::Declined)));
                return self
                    .current
                    .as_mut()
                    .map_or(Ok(false), |current| current.plan.handle_declined());
            }
            Message::Request(epoch, version, request) if is_current(epoch, version) => {
                return self.handle_request(&request, is_live);
            }
            Message::Committed(epoch, version, _)
            | Message::Abort(epoch, version, _)
            | Message::Decline(epoch, version)
            | Message::Request(epoch, version, _) => {
                return Err(ProtocolViolation::WrongVersion { epoch, version });
            }
        }
        Ok(false)
    }

    fn handle_committed(&mut self, kept: bool) -> Result<(), ProtocolViolation> {
        let Some(Current { version, plan, .. }) = self.current.take() else { return Ok(()) };
        if !plan.may_be_committed() {
            let expected = "Complete or memory to be sent first, or a Request before it";
            return Err(ProtocolViolation::OutOfTurn { found: "Committed", expected });
        }
        if plan.is_shared() {
            // A request may have crossed a push of the same chunk, so both ends reset the credit, as after an abort.
            self.credit = Credit::default();
        }
        self.course.handle_committed(version.key());
        self.manifest = Some(version.manifest_digest());
        self.actions.push_back(SenderAction::Committed { version, kept });
        if self.once {
            self.end(EndReason::Done);
        }
        Ok(())
    }

    fn handle_aborted(&mut self, reason: AbortReason) {
        let Some(Current { version, .. }) = self.current.take() else { return };
        // Some chunks may have been aborted before their headers were sent, so client and server cannot agree on the
        // credit: both reset it, and the client grants it again.
        self.credit = Credit::default();
        self.course.handle_given_up(version.key());
        self.manifest = None; // The manifest may not have arrived either.
        self.actions.push_back(SenderAction::Aborted(version, reason));
        self.actions.push_back(SenderAction::ReleaseBase);
        if self.ends_with_abort {
            self.end(EndReason::Done);
        }
    }

    /// Handles a request. The first one of a version that is not shared voids the credit, which counted what may be
    /// pushed; the client grants it again when the version has ended.
    fn handle_request(
        &mut self,
        request: &ChunkRequest,
        is_live: impl Fn(LaneId) -> bool,
    ) -> Result<bool, ProtocolViolation> {
        let Some(Current { selection: Some(selection), plan, .. }) = &mut self.current else {
            return Ok(false); // The client knows no chunks of the version yet.
        };
        if plan.end_pushing() {
            self.credit = Credit::default();
        }
        if request.hashes {
            plan.handle_hashes_requested(selection.chunks().len());
        }
        plan.handle_request(request, selection.chunks(), is_live)
    }
}
