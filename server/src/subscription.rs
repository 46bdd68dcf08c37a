//! [`Subscription`]: executes the decisions of one subscription's [`Sender`].

use crate::{
    catalogue::Follower,
    comparison,
    consumers::ConsumerId,
    gauge::Counted,
    inboxes::{Inbox, Input},
    offer::Offer,
    retained::Retained,
    selector::Selector,
    sending::Sending,
    sends::{Coding, Route, SendCounters, Sends, Sent, SentVersion},
    stall::StallWatch,
    subscribers::SubscriberEntry,
};
use std::{
    convert::Infallible,
    pin::Pin,
    sync::{Arc, atomic::Ordering},
};
use tensor_relay_protocol::{
    AbortReason, Announce, Announcement, Claim, CodecChoice, CodecId, EndReason, Ended, ProtocolViolation,
    Sender, SenderAction, ServerMessage,
};
use tensor_relay_transport::LaneError;
use tokio::{sync::watch, time::Instant};
use tracing::{Instrument, Span, span::EnteredSpan};

/// The server's side of one subscription.
pub(crate) struct Subscription {
    pub(crate) machine: Sender<Arc<Retained>>,
    pub(crate) offer: Offer,
    pub(crate) follower: Follower,
    pub(crate) inbox: Inbox,
    pub(crate) route: Route,
    pub(crate) coding: Coding,
    pub(crate) selector: Selector,
    /// For whom commits are counted.
    pub(crate) consumer: ConsumerId,
    /// Its entry in the server's status.
    pub(crate) entry: SubscriberEntry,
    pub(crate) sending: Arc<Sending>,
}

/// The comparison of a claim: whether the content is the same.
type Comparing = Pin<Box<dyn Future<Output = bool> + Send>>;

/// What runs beside the machine, until it reports back.
#[derive(Default)]
struct Work {
    /// The comparison of a claim.
    comparing: Option<Comparing>,
    /// The version under way.
    current: Option<Current>,
}

/// The transfer of the version under way.
struct Current {
    retained: Arc<Retained>,
    sends: Sends,
    stall: StallWatch,
    /// When it is aborted, because it left retention; `None` once that was reported.
    abort_at: Option<watch::Receiver<Option<Instant>>>,
    span: Span,
    _counted: Counted,
}

/// What the work reports.
enum Event {
    /// A send ended.
    Sent(Sent),
    /// A claim was compared.
    Compared(bool),
    /// The version under way has no more time to finish.
    AbortDue,
    /// The transfer made no progress for the deadline.
    Stalled,
}

/// Why a subscription ended.
enum Stop {
    Ended(Ended),
    /// The connection was lost.
    Lost,
    /// The client broke a rule; the session ends with it.
    Violation(ProtocolViolation),
}

impl From<LaneError> for Stop {
    fn from(_: LaneError) -> Self {
        Self::Lost
    }
}

impl From<ProtocolViolation> for Stop {
    fn from(violation: ProtocolViolation) -> Self {
        Self::Violation(violation)
    }
}

impl Subscription {
    /// Runs until the subscription ends. `unfinished` is held until a shutdown need not wait for it.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the client broke a rule.
    pub(crate) async fn run(mut self, unfinished: [Counted; 2]) -> Result<(), ProtocolViolation> {
        let mut unfinished = Some(unfinished); // Until the `End` is sent.
        let Err(stop) = self.drive(&mut unfinished).await;
        let is_kept = matches!(stop, Stop::Lost | Stop::Ended(Ended::ByClient { keep_place: true }));
        if !is_kept {
            self.offer.release();
        }
        match stop {
            Stop::Lost | Stop::Ended(Ended::ByClient { .. }) => Ok(()),
            Stop::Violation(violation) => Err(violation),
            Stop::Ended(Ended::ByServer(reason)) => {
                self.note_end(reason);
                let subscription = self.route.subscription;
                let _ = self.route.send(ServerMessage::End { subscription, reason }).await;
                Ok(())
            }
        }
    }

    fn note_end(&self, reason: EndReason) {
        self.sending.failures.note_end(reason);
        if reason == EndReason::Evicted {
            self.sending.counters.evicted.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                subscription = %self.route.subscription,
                "A subscriber accepted no byte within the deadline and was evicted."
            );
        }
    }

    async fn drive(&mut self, unfinished: &mut Option<[Counted; 2]>) -> Result<Infallible, Stop> {
        let mut work = Work::default();
        let (mut draining, mut lane_joined) = (self.sending.draining.clone(), self.route.lanes.joined());
        let mut is_draining = *draining.borrow_and_update();
        if is_draining {
            self.machine.handle_draining();
        }
        loop {
            self.execute_actions(&mut work).await?;
            if self.machine.is_settled(&self.offer) {
                drop(unfinished.take());
            }
            tokio::select! {
                input = self.inbox.next() => self.handle_input(input, &work)?,
                event = work.next() => match event {
                    Event::Sent(sent) => self.handle_sent(sent, &work),
                    Event::Compared(is_same) => self.machine.handle_compared(&self.offer, is_same),
                    Event::AbortDue => self.machine.give_up(AbortReason::Withdrawn),
                    Event::Stalled => self.machine.end(EndReason::Evicted),
                },
                () = self.follower.changed() => self.machine.handle_changed(&self.offer),
                _ = lane_joined.changed() => {} // Chunks may wait for it.
                _ = draining.changed(), if !is_draining => { // The server holds the sender.
                    is_draining = true;
                    self.machine.handle_draining();
                }
            }
        }
    }

    /// Executes the actions that are possible now, with up to `chunks_in_flight` sends for each lane.
    async fn execute_actions(&mut self, work: &mut Work) -> Result<(), Stop> {
        let sends_max = self.sending.chunks_in_flight * self.route.lanes.len().max(1);
        loop {
            let has_room = work.current.as_ref().is_some_and(|current| current.sends.has_room(sends_max));
            let lane = has_room.then(|| self.route.lanes.least_loaded()).flatten();
            let Some(action) = self.machine.poll(&self.offer, lane) else { return Ok(()) };
            self.execute(action, work).await?;
        }
    }

    async fn execute(&mut self, action: SenderAction<Arc<Retained>>, work: &mut Work) -> Result<(), Stop> {
        match action {
            SenderAction::Compare(claim, retained) => {
                work.comparing = Some(self.compare(claim, retained).await);
            }
            SenderAction::Acknowledge(epoch, version) => self.offer.acknowledge(epoch, version),
            SenderAction::Announce(announcement) => work.current = Some(self.begin(announcement).await?),
            SenderAction::Waiting(retained) => {
                let (subscription, epoch, version) =
                    (self.route.subscription, retained.id.epoch, retained.id.version);
                self.route.send(ServerMessage::Waiting { subscription, epoch, version }).await?;
            }
            SenderAction::Send(send) => work.sends(|sends| sends.begin(send)),
            SenderAction::SendAgain(send, at) => work.sends(|sends| sends.begin_again(send, at.into())),
            SenderAction::Abort(retained, reason) => {
                work.sends(Sends::give_up);
                let (subscription, epoch, version) =
                    (self.route.subscription, retained.id.epoch, retained.id.version);
                let abort = ServerMessage::Abort { subscription, epoch, version, reason };
                self.route.send(abort).await?;
            }
            SenderAction::Committed { version, kept } => {
                let _span = work.end_current();
                self.handle_committed(&version, kept);
            }
            SenderAction::Aborted(retained, reason) => {
                let _span = work.end_current();
                tracing::warn!(
                    subscription = %self.route.subscription, version = %retained.id,
                    "A transfer was aborted: {reason}."
                );
                self.entry.handle_given_up();
                self.sending.failures.note_abort(reason);
            }
            SenderAction::ReleaseBase => self.offer.base.release(),
            SenderAction::End(ended) => return Err(Stop::Ended(ended)),
        }
        Ok(())
    }

    /// Starts to compare a claim of the client.
    async fn compare(&mut self, claim: Claim, retained: Arc<Retained>) -> Comparing {
        let chunks = match claim.chunks {
            Some(chunks) => chunks,
            None => self.selector.selection(&retained).await.chunks().clone(),
        };
        let (sending, subscription, version) =
            (Arc::clone(&self.sending), self.route.subscription, retained.id.clone());
        Box::pin(async move {
            let is_same = comparison::is_same(&sending.encoder, retained, chunks, claim.digest).await;
            if !is_same {
                tracing::warn!(
                    %subscription, %version,
                    "A subscriber holds other content than this server under the same epoch and version, so its copy is not \
                     used. Different bytes were published under one epoch: give each publisher its own epoch."
                );
            }
            is_same
        })
    }

    /// Announces a version, and prepares its sends.
    async fn begin(&mut self, announcement: Announcement<Arc<Retained>>) -> Result<Current, Stop> {
        let retained = Arc::clone(&announcement.version);
        if announcement.is_ahead {
            tracing::warn!(
                subscription = %self.route.subscription, version = %retained.id,
                "A subscriber holds a newer version of this epoch than was ever published here, so its copy is other \
                 content and this version is sent in full. Was the state directory restored from an older copy?"
            );
        }
        self.announce(&announcement).await?;
        self.entry.begin(&retained, announcement.skipped);
        let selection = self.selector.selection(&retained).await;
        self.machine.handle_selected(Arc::clone(&selection));
        let base = match self.accepts_deltas() {
            true => self.offer.base.begin(&self.offer.topic, &retained),
            false => None,
        };
        let stall = StallWatch::new(self.sending.stall_timeout);
        let counters = SendCounters {
            sending: Arc::clone(&self.sending),
            subscriber: self.entry.progress(),
            progress: stall.progress().clone(),
        };
        let coding = Coding { choice: self.codec_choice(), ..self.coding.clone() };
        let version = SentVersion { retained: Arc::clone(&retained), selection, base };
        let subscription = self.route.subscription;
        Ok(Current {
            sends: Sends::new(self.route.clone(), coding, version, counters),
            stall,
            abort_at: Some(retained.abort_at.subscribe()),
            span: tracing::debug_span!("transfer", %subscription, version = %retained.id),
            _counted: self.sending.transfers.count(),
            retained,
        })
    }

    async fn announce(&self, announcement: &Announcement<Arc<Retained>>) -> Result<(), LaneError> {
        let Announcement { version: retained, skipped, afresh, lost_place, .. } = announcement;
        let announce = Announce {
            subscription: self.route.subscription,
            id: retained.id.clone(),
            manifest: retained.payload.manifest().digest(),
            skipped: *skipped,
            metadata: retained.metadata.clone(),
            may_be_base: retained.base.may_be && self.accepts_deltas(),
            afresh: *afresh,
            shared: false,
            lost_place: *lost_place,
        };
        self.route.send(ServerMessage::Announce(announce)).await
    }

    /// Whether chunks may be sent as deltas: the client can decode them, and no other codec is requested.
    fn accepts_deltas(&self) -> bool {
        let is_wanted = match self.codec_choice() {
            CodecChoice::Auto => true,
            CodecChoice::Fixed(codec) => codec.needs_base(),
        };
        is_wanted && self.coding.offered.iter().any(CodecId::needs_base)
    }

    /// The codec choice: of the client, else of the topic, else of the server. Raw, if the client cannot decode it.
    fn codec_choice(&self) -> CodecChoice {
        let choice = match self.coding.choice {
            CodecChoice::Auto => self.offer.topic.codec().unwrap_or(self.sending.codec),
            by_client => by_client,
        };
        match choice {
            CodecChoice::Fixed(codec) if !self.coding.offered.contains(codec) => {
                CodecChoice::Fixed(CodecId::Raw)
            }
            choice => choice,
        }
    }

    fn handle_input(&mut self, input: Input, work: &Work) -> Result<(), Stop> {
        match input {
            Input::Message(message) => {
                let lanes = &self.route.lanes;
                if self.machine.handle_message(message, |lane| lanes.is_live(lane))? {
                    work.note_progress();
                }
            }
            Input::End(reason) => self.machine.end(reason),
            Input::SessionEnded => return Err(Stop::Lost),
        }
        Ok(())
    }

    fn handle_sent(&mut self, sent: Sent, work: &Work) {
        let Some(current) = &work.current else { return };
        let unread = match sent {
            Ok(send) => return self.machine.handle_sent(send),
            Err(unread) => unread,
        };
        let (retained, error) = (&current.retained, unread.error);
        let (subscription, version) = (&self.route.subscription, &retained.id);
        if error.is_final() {
            tracing::error!(
                %version, error = retained.handle_unreadable(&error),
                "A version cannot be read any more. It is withdrawn, and its subscribers are informed."
            );
            self.offer.topic.withdraw_unreadable(version);
            return self.machine.give_up(match error.is_changed() {
                true => AbortReason::SourceChanged,
                false => AbortReason::SourceLost,
            });
        }
        work.note_progress();
        match self
            .machine
            .handle_unread(&self.offer, unread.action, Instant::now().into_std())
        {
            None => tracing::error!(
                %subscription, %version, %error,
                "A version could not be read. Its subscriber is informed, and receives the next one."
            ),
            Some(attempt) if attempt.begins_wait && attempt.failing.is_zero() => tracing::error!(
                %subscription, %version, %error,
                "A version could not be read. It is tried again until that succeeds or a newer version is published."
            ),
            Some(_) => {}
        }
    }

    fn handle_committed(&mut self, retained: &Retained, kept: bool) {
        tracing::debug!(version = %retained.id, "A subscriber committed a version.");
        self.sending.counters.committed.fetch_add(1, Ordering::Relaxed);
        retained.consumers.count(&self.consumer);
        self.entry.handle_committed(retained);
        self.offer.base.handle_committed(kept);
    }
}

impl Work {
    /// Ends the transfer; returns its span, which was entered.
    fn end_current(&mut self) -> Option<EnteredSpan> {
        self.current.take().map(|current| current.span.entered())
    }

    fn sends(&mut self, change: impl FnOnce(&mut Sends)) {
        if let Some(current) = &mut self.current {
            change(&mut current.sends);
        }
    }

    fn note_progress(&self) {
        if let Some(current) = &self.current {
            current.stall.progress().note(1);
        }
    }

    /// Runs the work until something is to be reported. Cancel safe.
    async fn next(&mut self) -> Event {
        tokio::select! {
            is_same = compared(&mut self.comparing) => {
                self.comparing = None;
                Event::Compared(is_same)
            }
            event = transferred(&mut self.current) => event,
        }
    }
}

async fn compared(comparing: &mut Option<Comparing>) -> bool {
    match comparing {
        Some(comparing) => comparing.await,
        None => std::future::pending().await,
    }
}

async fn transferred(current: &mut Option<Current>) -> Event {
    let Some(current) = current else { return std::future::pending().await };
    tokio::select! {
        Some(sent) = current.sends.next().instrument(current.span.clone()) => Event::Sent(sent),
        () = passed(&mut current.abort_at) => {
            current.abort_at = None;
            Event::AbortDue
        }
        () = current.stall.stalled() => Event::Stalled,
    }
}

/// Waits until the deadline, once it is set. Cancel safe.
async fn passed(deadline: &mut Option<watch::Receiver<Option<Instant>>>) {
    let Some(deadline) = deadline else { return std::future::pending().await };
    let deadline = deadline.wait_for(Option::is_some).await.ok().and_then(|at| *at);
    match deadline {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
