//! [`Delivery`]: executes the decisions of one subscription's [`Sender`].

use super::{
    Coding, Host, Input, Offered, Route, Selector, SentChunks, comparison,
    held_report::HeldReport,
    source_watch::SourceWatch,
    stall::StallWatch,
    version_sends::{Content, Counters, Sent, VersionSends},
};
use crate::{LaneError, egress::Egress, in_use::Used};
use std::{convert::Infallible, pin::Pin, sync::Arc};
use tensor_relay_protocol::{
    AbortReason, Announce, Announcement, Claim, CodecChoice, CodecId, EndReason, Ended, Epoch, Held, Lending,
    NotLent, ProtocolViolation, Published, Sender, SenderAction, ServerMessage, Version,
};
use tokio::{sync::watch, time::Instant};
use tracing::{Instrument, Span, span::EnteredSpan};

/// The sending side of one subscription, for a [`Host`] that offers versions.
pub struct Delivery<H: Host> {
    /// Decides what is sent.
    pub machine: Sender<Arc<H::Version>>,
    /// Offers the versions.
    pub host: H,
    /// Where they are sent.
    pub route: Route,
    /// How their chunks are encoded.
    pub coding: Coding,
    /// What the client selects of them.
    pub selector: Selector,
    /// What it shares with other subscriptions.
    pub egress: Arc<Egress>,
    /// Where its chunks are counted.
    pub sent: Arc<SentChunks>,
}

/// The comparison of a claim: whether the content is the same.
type Comparing = Pin<Box<dyn Future<Output = bool> + Send>>;

/// What runs beside the machine, until it reports back.
struct Work<V> {
    /// The comparison of a claim.
    comparing: Option<Comparing>,
    /// The version under way.
    current: Option<Current<V>>,
}

/// The version under way.
struct Current<V> {
    version: Arc<V>,
    sends: VersionSends,
    stall: StallWatch,
    /// What the client is told of the chunks that are here, if the version is still being received.
    held: Option<HeldReport>,
    /// Tells whether the version's own source makes no progress, while it is being received.
    source: Option<SourceWatch>,
    /// When it is aborted, because it left retention; `None` once that was reported.
    abort_at: Option<watch::Receiver<Option<Instant>>>,
    span: Span,
    _counted: Used,
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
    /// The client is to be told which chunks are here.
    HeldDue,
    /// The version waits for its own source.
    SourceWaits,
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

impl<H: Host> Delivery<H> {
    /// Runs until the subscription ends. `unfinished` is held until a shutdown need not wait for it.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the client broke a rule.
    pub async fn run(mut self, unfinished: impl Send) -> Result<(), ProtocolViolation> {
        let mut unfinished = Some(unfinished); // Until the `End` is sent.
        let Err(stop) = self.drive(&mut unfinished).await;
        let (ended, result) = match stop {
            Stop::Lost => (None, Ok(())),
            Stop::Ended(ended) => (Some(ended), Ok(())),
            Stop::Violation(violation) => (Some(Ended::ByClient { keep_place: false }), Err(violation)),
        };
        self.host.handle_ended(ended);
        if let Some(Ended::ByServer(reason)) = ended {
            let subscription = self.route.subscription;
            let _ = self.route.lanes.send(ServerMessage::End { subscription, reason }).await;
        }
        result
    }

    async fn drive(&mut self, unfinished: &mut Option<impl Send>) -> Result<Infallible, Stop> {
        let mut work = Work { comparing: None, current: None };
        let mut lane_joined = self.route.lanes.joined();
        loop {
            self.execute_actions(&mut work).await?;
            if self.machine.is_settled(self.host.topic()) {
                drop(unfinished.take());
            }
            tokio::select! {
                // Sends that end at once cost no look at the rest. It follows when all sends wait for the lane or, at the
                // latest, for credit.
                biased;
                event = work.next() => match event {
                    Event::Sent(sent) => self.handle_sent(sent, &work),
                    Event::Compared(is_same) => self.machine.handle_compared(self.host.topic(), is_same),
                    Event::AbortDue => self.machine.give_up(AbortReason::Withdrawn),
                    Event::Stalled => self.machine.end(EndReason::Evicted),
                    Event::HeldDue => self.report_held(&mut work).await?,
                    Event::SourceWaits => self.report_waiting(&mut work).await?,
                },
                input = self.host.next_input() => self.handle_input(input, &mut work).await?,
                _ = lane_joined.changed() => {} // Chunks may wait for it.
            }
        }
    }

    /// Executes the actions that are possible now, with up to `chunks_in_flight` sends for each lane.
    async fn execute_actions(&mut self, work: &mut Work<H::Version>) -> Result<(), Stop> {
        let sends_max = self.egress.chunks_in_flight * self.route.lanes.len().max(1);
        loop {
            let has_room = work.current.as_ref().is_some_and(|current| current.sends.has_room(sends_max));
            let lane = has_room.then(|| self.route.lanes.least_loaded()).flatten();
            let Some(action) = self.machine.poll(self.host.topic(), lane) else { return Ok(()) };
            self.execute(action, work).await?;
        }
    }

    async fn execute(
        &mut self,
        action: SenderAction<Arc<H::Version>>,
        work: &mut Work<H::Version>,
    ) -> Result<(), Stop> {
        match action {
            SenderAction::Compare(claim, version) => {
                work.comparing = Some(self.compare(claim, version).await);
            }
            SenderAction::Acknowledge(epoch, version) => self.host.acknowledge(epoch, version),
            SenderAction::Announce(announcement) => work.current = Some(self.begin(announcement).await?),
            SenderAction::Waiting(version) => self.send_waiting(version.key()).await?,
            SenderAction::Send(send) => work.sends(|sends| sends.begin(send)),
            SenderAction::SendAgain(send, at) => work.sends(|sends| sends.begin_again(send, at.into())),
            SenderAction::Abort(version, reason) => {
                work.sends(VersionSends::give_up);
                let (subscription, (epoch, version)) = (self.route.subscription, version.key());
                let abort = ServerMessage::Abort { subscription, epoch, version, reason };
                self.route.lanes.send(abort).await?;
            }
            SenderAction::Committed { version, kept } => {
                let _span = work.end_current();
                tracing::debug!(version = %version.id(), "A subscriber committed a version.");
                self.host.handle_committed(&version, kept);
            }
            SenderAction::Aborted(version, reason) => {
                let _span = work.end_current();
                tracing::warn!(
                    subscription = %self.route.subscription, version = %version.id(),
                    "A transfer was aborted: {reason}."
                );
                self.host.handle_aborted(reason);
            }
            SenderAction::ReleaseBase => self.host.release_base(),
            SenderAction::End(ended) => return Err(Stop::Ended(ended)),
        }
        Ok(())
    }

    /// Starts to compare a claim of the client.
    async fn compare(&mut self, claim: Claim, offered: Arc<H::Version>) -> Comparing {
        let chunks = match claim.chunks {
            Some(chunks) => chunks,
            None => self.selector.selection(offered.payload().manifest()).await.chunks().clone(),
        };
        let (egress, subscription, version) =
            (Arc::clone(&self.egress), self.route.subscription, offered.id().clone());
        Box::pin(async move {
            let is_same = comparison::is_same(&egress.encoder, offered, chunks, claim.digest).await;
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
    async fn begin(
        &mut self,
        announcement: Announcement<Arc<H::Version>>,
    ) -> Result<Current<H::Version>, Stop> {
        let version = Arc::clone(&announcement.version);
        if announcement.is_ahead {
            tracing::warn!(
                subscription = %self.route.subscription, version = %version.id(),
                "A subscriber holds a newer version of this epoch than was ever published here, so its copy is other \
                 content and this version is sent in full. Was the state directory restored from an older copy?"
            );
        }
        let lending = self.lend(&version).await;
        self.announce(&announcement, lending).await?;
        if lending.is_some_and(|lending| lending.is_memory()) {
            self.machine.handle_lent();
        }
        let base = self.host.begin(&version, announcement.skipped, self.accepts_deltas());
        let selection = self.selector.selection(version.payload().manifest()).await;
        let base_version = base.as_ref().map(|base| base.version());
        let encodings = self
            .host
            .handle_selected(&version, &selection, base_version, announcement.shared);
        self.machine.handle_selected(Arc::clone(&selection));
        let stall = StallWatch::new(self.egress.stall_timeout);
        let counters = Counters {
            egress: Arc::clone(&self.egress),
            sent: Arc::clone(&self.sent),
            progress: stall.progress().clone(),
        };
        let coding = Coding { choice: self.codec_choice(), ..self.coding.clone() };
        let content =
            Content { version: Arc::clone(&version) as Arc<dyn Offered>, selection, base, encodings };
        let subscription = self.route.subscription;
        Ok(Current {
            sends: VersionSends::new(self.route.clone(), coding, content, counters),
            stall,
            held: version.received().map(HeldReport::new),
            source: version
                .arrival()
                .map(|arrival| SourceWatch::new(Arc::clone(arrival), self.egress.stall_timeout)),
            abort_at: Some(version.abort_at()),
            span: tracing::debug_span!("transfer", %subscription, version = %version.id()),
            _counted: self.egress.transfers.add(1),
            version,
        })
    }

    /// Tells the client which chunks of the version under way are here.
    async fn report_held(&self, work: &mut Work<H::Version>) -> Result<(), LaneError> {
        let Some(current) = &mut work.current else { return Ok(()) };
        let Some(held) = &mut current.held else { return Ok(()) };
        let (added, withdrawn) = held.take();
        current.stall.progress().note(1); // While chunks arrive here, the client waits with reason.
        let (subscription, (epoch, version)) = (self.route.subscription, current.version.key());
        let held = Held { subscription, epoch, version, added, withdrawn };
        self.route.lanes.send(ServerMessage::Held(held)).await
    }

    /// Tells the client that the version under way waits for its own source, so that it is not given up at either end.
    async fn report_waiting(&self, work: &mut Work<H::Version>) -> Result<(), LaneError> {
        let Some(current) = &work.current else { return Ok(()) };
        current.stall.progress().note(1);
        self.send_waiting(current.version.key()).await
    }

    async fn send_waiting(&self, (epoch, version): (Epoch, Version)) -> Result<(), LaneError> {
        let subscription = self.route.subscription;
        self.route
            .lanes
            .send(ServerMessage::Waiting { subscription, epoch, version })
            .await
    }

    /// Sends the client the descriptors of a version's memory, if it asked for memory; `None` if it did not.
    async fn lend(&mut self, version: &Arc<H::Version>) -> Option<Lending> {
        if !self.machine.wants_memory() {
            return None;
        }
        let selection = self.selector.selection(version.payload().manifest()).await;
        let control = self.route.lanes.control();
        let Some(descriptors) = control.descriptors() else {
            return Some(Lending::Chunks(NotLent::NoDescriptors));
        };
        if let Some(why_not) = descriptors.why_not() {
            tracing::debug!(%why_not, "A version is sent in chunks over a Unix socket."); // Nothing is lent in vain.
            return Some(Lending::Chunks(NotLent::NoDescriptors));
        }
        Some(match self.host.lend(version, &selection, self.machine.gpu()).await {
            // They are sent before the announcement that names them.
            Ok(loan) => match descriptors.send(loan.descriptors) {
                Ok(()) => {
                    loan.lending.digest().into_iter().for_each(|digest| version.note_digest(digest));
                    loan.lending
                }
                Err(why_not) => {
                    tracing::debug!(%why_not, "A version is sent in chunks over a Unix socket.");
                    Lending::Chunks(NotLent::NoDescriptors)
                }
            },
            Err(reason) => Lending::Chunks(reason),
        })
    }

    async fn announce(
        &self,
        announcement: &Announcement<Arc<H::Version>>,
        lending: Option<Lending>,
    ) -> Result<(), LaneError> {
        let Announcement { version, skipped, afresh, shared, lost_place, .. } = announcement;
        let is_lent = lending.is_some_and(|lending| lending.is_memory());
        let announce = Announce {
            subscription: self.route.subscription,
            id: version.id().clone(),
            manifest: version.manifest_digest(),
            skipped: *skipped,
            metadata: version.metadata().clone(),
            may_be_base: version.may_be_base() && self.accepts_deltas() && !is_lent,
            afresh: *afresh,
            shared: *shared || version.received().is_some(),
            lost_place: *lost_place,
            lending: lending.map(Box::new),
            relays: version.relays().clone(),
        };
        self.route.lanes.send(ServerMessage::Announce(announce)).await
    }

    /// Whether chunks may be sent as deltas: the client can decode them, and no other codec is requested.
    fn accepts_deltas(&self) -> bool {
        let is_wanted = match self.codec_choice() {
            CodecChoice::Auto => true,
            CodecChoice::Fixed(codec) => codec.needs_base(),
        };
        is_wanted && self.coding.offered.iter().any(CodecId::needs_base)
    }

    /// The codec choice: of the client, else of the host. Raw, if the client cannot decode it.
    fn codec_choice(&self) -> CodecChoice {
        let choice = match self.coding.choice {
            CodecChoice::Auto => self.host.codec(),
            by_client => by_client,
        };
        match choice {
            CodecChoice::Fixed(codec) if !self.coding.offered.contains(codec) => {
                CodecChoice::Fixed(CodecId::Raw)
            }
            choice => choice,
        }
    }

    async fn handle_input(&mut self, input: Input, work: &mut Work<H::Version>) -> Result<(), Stop> {
        match input {
            Input::Message(message) => {
                let lanes = &self.route.lanes;
                if self.machine.handle_message(message, |lane| lanes.is_live(lane))? {
                    work.note_progress();
                }
            }
            Input::Changed => self.machine.handle_changed(self.host.topic()),
            Input::Tell(message) => self.route.lanes.send(*message).await?,
            Input::Progress => work.note_progress(),
            Input::Draining => self.machine.handle_draining(),
            Input::End(reason) => self.machine.end(reason),
            Input::SessionEnded => return Err(Stop::Lost),
        }
        Ok(())
    }

    fn handle_sent(&mut self, sent: Sent, work: &Work<H::Version>) {
        let Some(current) = &work.current else { return };
        let unread = match sent {
            Ok(send) => return self.machine.handle_sent(send),
            Err(unread) => unread,
        };
        let error = unread.error;
        let (subscription, version) = (&self.route.subscription, current.version.id());
        if error.is_final() {
            self.host.handle_unreadable(&current.version, &error);
            return self.machine.give_up(match error.is_changed() {
                true => AbortReason::SourceChanged,
                false => AbortReason::SourceLost,
            });
        }
        work.note_progress();
        match self
            .machine
            .handle_unread(self.host.topic(), unread.action, Instant::now().into_std())
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
}

impl<V> Work<V> {
    /// Ends the transfer; returns its span, which was entered.
    fn end_current(&mut self) -> Option<EnteredSpan> {
        self.current.take().map(|current| current.span.entered())
    }

    fn sends(&mut self, change: impl FnOnce(&mut VersionSends)) {
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
            biased;
            event = transferred(&mut self.current) => event,
            is_same = compared(&mut self.comparing) => {
                self.comparing = None;
                Event::Compared(is_same)
            }
        }
    }
}

async fn compared(comparing: &mut Option<Comparing>) -> bool {
    match comparing {
        Some(comparing) => comparing.await,
        None => std::future::pending().await,
    }
}

async fn transferred<V>(current: &mut Option<Current<V>>) -> Event {
    let Some(current) = current else { return std::future::pending().await };
    tokio::select! {
        biased;
        Some(sent) = current.sends.next().instrument(current.span.clone()) => Event::Sent(sent),
        () = passed(&mut current.abort_at) => {
            current.abort_at = None;
            Event::AbortDue
        }
        () = current.stall.stalled() => Event::Stalled,
        () = held_due(&mut current.held) => Event::HeldDue,
        () = source_waits(&mut current.source) => Event::SourceWaits,
    }
}

async fn held_due(held: &mut Option<HeldReport>) {
    match held {
        Some(held) => held.due().await,
        None => std::future::pending().await,
    }
}

async fn source_waits(source: &mut Option<SourceWatch>) {
    match source {
        Some(source) => source.waits().await,
        None => std::future::pending().await,
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
