//! [`Subscription`]: sends versions in the order of its cursor, until it ends.

use crate::{
    bases::ClientBase,
    catalogue::Follower,
    claims::{self, Claims, Named},
    client_state::ClientState,
    consumers::ConsumerId,
    cursor::{Cursor, Step},
    effort::EffortMeter,
    inboxes::Inbox,
    lanes::Lanes,
    read_retry::{Attempt, ReadRetry},
    sender::{Outgoing, Sent, SentKind, Unread, VersionSender},
    shared::{Counted, Shared},
    stall::{Progress, StallWatch},
    subscribers::SubscriberEntry,
    topic::Retained,
    transfer::{self, Effect, SubscriptionMessage, Transfer},
};
use std::{
    convert::Infallible,
    pin::pin,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{
    AbortReason, Announce, CodecChoice, CodecId, CodecSet, Credit, EndReason, Place, ProtocolViolation,
    Selection, SendPlan, ServerMessage, SubscriptionId,
};
use tensor_relay_transport::{LaneError, control};
use tokio::time::Instant;
use tracing::Instrument;

/// In mode `every`: the time for which a version that cannot be read delays the next one. In mode `latest`, it delays
/// none.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(10);

/// The server's side of one subscription.
#[derive(Debug)]
pub(crate) struct Subscription {
    pub(crate) id: SubscriptionId,
    pub(crate) codecs: CodecSet,
    /// The codec that the client requested, if any.
    pub(crate) codec: Option<CodecId>,
    pub(crate) effort: EffortMeter,
    pub(crate) credit: Credit,
    pub(crate) follower: Follower,
    pub(crate) lanes: Arc<Lanes>,
    pub(crate) sender: control::Sender<ServerMessage>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) inbox: Inbox,
    pub(crate) cursor: Cursor,
    pub(crate) client: ClientState,
    /// For whom commits are counted.
    pub(crate) consumer: ConsumerId,
    /// The versions that the client claims to hold, until the first version starts.
    pub(crate) claims: Claims,
    /// The client's base.
    pub(crate) base: ClientBase,
    /// Whether a transfer in progress is aborted for a newer version.
    pub(crate) preempt: bool,
    /// Its entry in the server's status.
    pub(crate) entry: SubscriberEntry,
    /// Counts it among the unfinished subscriptions of the server and of its session; `None` once a shutdown need not
    /// wait for it.
    pub(crate) unfinished: Option<[Counted; 2]>,
}

/// Why a subscription ended.
#[derive(Debug)]
enum Ended {
    /// The client was lost, or unsubscribed but keeps its place. It may return and take the place again.
    ClientLost,
    /// The client ended it.
    ByClient,
    /// The server ended it, and sends the reason.
    ByServer(EndReason),
    /// The client broke a rule; the session ends with it.
    ProtocolViolation(ProtocolViolation),
}

impl From<LaneError> for Ended {
    fn from(_: LaneError) -> Self {
        Self::ClientLost
    }
}

impl From<ProtocolViolation> for Ended {
    fn from(error: ProtocolViolation) -> Self {
        Self::ProtocolViolation(error)
    }
}

/// The next step of a transfer after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Continue,
    /// Client and server have finished the version.
    Finished,
    /// The server aborts the version.
    GiveUp(AbortReason),
}

impl Subscription {
    /// Runs until the subscription ends; an error means that the client broke a rule.
    pub(crate) async fn run(mut self) -> Result<(), ProtocolViolation> {
        let Err(ended) = self.send_versions().await;
        if !matches!(ended, Ended::ClientLost) {
            self.cursor.release_place();
            self.base.release();
        }
        match ended {
            Ended::ClientLost | Ended::ByClient => Ok(()),
            Ended::ProtocolViolation(error) => Err(error),
            Ended::ByServer(reason) => {
                self.note_end(reason);
                let _ = self.sender.send(ServerMessage::End { subscription: self.id, reason }).await;
                Ok(())
            }
        }
    }

    fn note_end(&self, reason: EndReason) {
        self.shared.failures.note_end(reason);
        if reason == EndReason::Evicted {
            self.shared.counters.evicted.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                subscription = %self.id,
                "A subscriber accepted no byte within the deadline and was evicted."
            );
        }
    }

    async fn send_versions(&mut self) -> Result<Infallible, Ended> {
        loop {
            let (retained, skipped) = self.next_version().await?;
            let _counted = self.shared.transfers.count();
            let span = tracing::debug_span!("transfer", subscription = %self.id, version = %retained.id);
            self.send_version(&retained, skipped).instrument(span).await?;
        }
    }

    /// Waits for the next version to send. While the server drains, only ended topics and mode `every` yield one: their
    /// remaining versions are bounded, and are lost with the server.
    async fn next_version(&mut self) -> Result<(Arc<Retained>, u64), Ended> {
        let mut draining = self.shared.draining.subscribe();
        loop {
            let is_draining = *draining.borrow_and_update() && self.follower.topic().ended().is_none();
            if !is_draining || self.cursor.is_every() {
                self.compare_claims().await?;
                match self.cursor.next(self.follower.observe()) {
                    Step::Send { retained, skipped } => {
                        self.compare_claims().await?; // A claimed version may just have been published.
                        return Ok((retained, skipped));
                    }
                    Step::End(reason) => return Err(Ended::ByServer(reason)),
                    Step::Wait => {}
                }
            }
            if is_draining && !self.cursor.waits_for_client(self.follower.topic()) {
                self.unfinished = None;
            }
            tokio::select! {
                () = self.follower.changed() => {}
                _ = draining.changed() => {} // `Shared` holds the sender.
                message = self.inbox.next() => {
                    let effect = self.handle_message(message, None)?;
                    self.execute(effect)?;
                }
            }
        }
    }

    /// Compares the client's claims with this server's content, and drops those that differ.
    async fn compare_claims(&mut self) -> Result<(), Ended> {
        let (topic, shared) = (Arc::clone(self.follower.topic()), Arc::clone(&self.shared));
        while let Some((claim, retained)) = self.claims.next(&topic, || self.base.retained()) {
            let chunks = match claim.chunks {
                Some(chunks) => chunks,
                None => self.client.selection(&retained, shared.config.workers).await.chunks().clone(),
            };
            let version = retained.id.clone();
            let mut comparing = pin!(claims::is_same(&shared.encoder, retained, chunks, claim.digest));
            let is_same = loop {
                tokio::select! {
                    is_same = &mut comparing => break is_same,
                    message = self.inbox.next() => {
                        let effect = self.handle_message(message, None)?;
                        self.execute(effect)?;
                    }
                }
            };
            self.claims.handle_compared(claim.named, is_same);
            if claim.named == Named::Have {
                self.cursor.handle_compared(&topic, is_same);
            }
            if !is_same {
                tracing::warn!(
                    subscription = %self.id, %version,
                    "A subscriber holds other content than this server under the same epoch and version, so its copy is not \
                     used. Different bytes were published under one epoch: give each publisher its own epoch."
                );
                self.base.release();
            }
            if !is_same && claim.named == Named::Partial {
                self.cursor.forget_partial();
                self.client.forget_partial();
            }
        }
        Ok(())
    }

    /// Sends one version and waits for the client's final message about it: `Committed` or `Abort`.
    async fn send_version(&mut self, retained: &Arc<Retained>, skipped: u64) -> Result<(), Ended> {
        let mut watch = StallWatch::new(self.shared.config.stall_timeout);
        let progress = watch.progress().clone();
        let (mut transfer, mut version_sender) = self.begin_version(retained, skipped, &progress).await?;
        let (mut abort_at, mut lane_joined) = (retained.abort_at.subscribe(), self.lanes.joined());
        let mut retry = ReadRetry::default();
        loop {
            self.begin_sends(&mut transfer, &mut version_sender);
            let next = tokio::select! {
                message = self.inbox.next() => {
                    let effect = self.handle_message(message, Some(&mut transfer))?;
                    progress.note(u64::from(effect == Effect::Progress));
                    self.finish_or_execute(effect, retained)?
                }
                Some(sent) = version_sender.next() => match handle_sent(sent, &mut transfer, &mut retry) {
                    Ok(()) => Next::Continue,
                    Err(Unread { action, error }) if !error.is_final() => {
                        progress.note(1);
                        let attempt = retry.handle_failed(Instant::now());
                        let next = self.handle_unread(retained, skipped, &attempt, &error).await?;
                        version_sender.begin_again(action, attempt.at);
                        next
                    }
                    Err(Unread { error, .. }) => {
                        tracing::error!(
                            version = %retained.id, error = retained.handle_unreadable(&error),
                            "A version cannot be read any more. It is withdrawn, and its subscribers are informed."
                        );
                        self.follower.topic().withdraw_unreadable(&retained.id);
                        Next::GiveUp(match error.is_changed() {
                            true => AbortReason::SourceChanged,
                            false => AbortReason::SourceLost,
                        })
                    }
                },
                () = self.follower.changed() => self.handle_change(retained)?,
                () = deadline_passed(&mut abort_at), if !transfer.plan.is_given_up() => {
                    Next::GiveUp(AbortReason::Withdrawn)
                }
                _ = lane_joined.changed() => Next::Continue, // Chunks may wait for it.
                () = watch.stalled() => return Err(Ended::ByServer(EndReason::Evicted)),
            };
            match next {
                Next::Finished => return Ok(()),
                Next::GiveUp(reason) if !transfer.plan.is_given_up() => {
                    transfer.plan.give_up();
                    version_sender.give_up();
                    self.abort(retained, reason).await?;
                }
                Next::GiveUp(_) | Next::Continue => {}
            }
        }
    }

    /// Announces a version, and plans its transfer.
    async fn begin_version(
        &mut self,
        retained: &Arc<Retained>,
        skipped: u64,
        progress: &Progress,
    ) -> Result<(Transfer, VersionSender), Ended> {
        if self.client.has_part_of_other_version(retained) {
            self.base.release(); // It was the base of the partial version.
        }
        let claims = std::mem::take(&mut self.claims);
        let afresh = claims.is_afresh((retained.id.epoch, retained.id.version));
        if claims.is_ahead_of((retained.id.epoch, retained.id.version)) {
            tracing::warn!(
                subscription = %self.id, version = %retained.id,
                "A subscriber holds a newer version of this epoch than was ever published here, so its copy is other \
                 content and this version is sent in full. Was the state directory restored from an older copy?"
            );
        }
        let lost_place = self.cursor.take_lost_place();
        self.announce(retained, skipped, afresh, lost_place).await?;
        self.entry.begin(retained, skipped);
        let selection = self.client.selection(retained, self.shared.config.workers).await;
        let chunks = selection.chunks().difference(&self.client.take_held(retained));
        let plan = SendPlan::new(chunks, self.client.needs_manifest(retained));
        let version_sender = VersionSender::new(self.outgoing(retained, selection, progress.clone()));
        Ok((Transfer::new(&retained.id, plan), version_sender))
    }

    /// Starts the possible sends, up to `chunks_in_flight` for each lane.
    fn begin_sends(&mut self, transfer: &mut Transfer, version_sender: &mut VersionSender) {
        let sends_max = self.shared.config.chunks_in_flight * self.lanes.len().max(1);
        while version_sender.has_room(sends_max)
            && let Some(action) = transfer.plan.poll(&mut self.credit, self.lanes.least_loaded())
        {
            version_sender.begin(action);
        }
    }

    /// Handles a failed read that may succeed later. The version stays under way, and is announced again so that the
    /// client continues to wait, until it is read or another version waits.
    async fn handle_unread(
        &self,
        retained: &Retained,
        skipped: u64,
        attempt: &Attempt,
        error: &SourceError,
    ) -> Result<Next, Ended> {
        let (subscription, version) = (&self.id, &retained.id);
        let is_late = !self.cursor.is_every() || attempt.failing >= UNREAD_TIMEOUT;
        if is_late && self.cursor.has_later(self.follower.topic(), retained) {
            tracing::error!(
                %subscription, %version, %error,
                "A version could not be read. Its subscriber is informed, and receives the next one."
            );
            return Ok(Next::GiveUp(AbortReason::SourceLost));
        }
        if attempt.begins_wait {
            if attempt.failing.is_zero() {
                tracing::error!(
                    %subscription, %version, %error,
                    "A version could not be read. It is tried again until that succeeds or a newer version is published."
                );
            }
            self.announce(retained, skipped, false, None).await?;
        }
        Ok(Next::Continue)
    }

    /// Handles a change of the topic during a transfer.
    fn handle_change(&mut self, retained: &Retained) -> Result<Next, Ended> {
        let newest = self.follower.observe().newest();
        if let Some(reason) = self.cursor.lost_place() {
            return Err(Ended::ByServer(reason));
        }
        let is_newer = newest.is_some_and(|(_, newest)| newest.id != retained.id);
        Ok(if self.preempt && is_newer { Next::GiveUp(AbortReason::Superseded) } else { Next::Continue })
    }

    fn handle_message(
        &mut self,
        message: SubscriptionMessage,
        transfer: Option<&mut Transfer>,
    ) -> Result<Effect, ProtocolViolation> {
        transfer::handle_message(message, transfer, &mut self.credit, |lane| self.lanes.is_retired(lane))
    }

    /// Applies the effect of a message; returns whether it finishes `retained`.
    fn finish_or_execute(&mut self, effect: Effect, retained: &Retained) -> Result<Next, Ended> {
        match effect {
            Effect::Committed { kept } => {
                tracing::debug!(version = %retained.id, "A subscriber committed a version.");
                self.shared.counters.committed.fetch_add(1, Ordering::Relaxed);
                retained.consumers.count(&self.consumer);
                self.cursor.handle_committed(retained);
                self.entry.handle_committed(retained);
                self.client.handle_committed(retained);
                self.base.handle_committed(kept);
                Ok(Next::Finished)
            }
            Effect::Aborted(reason) => {
                tracing::warn!(subscription = %self.id, version = %retained.id, "A transfer was aborted: {reason}.");
                // Some chunks may have been aborted before their headers were sent, so client and server cannot agree
                // on the credit: both reset it, and the client grants it again.
                self.credit = Credit::default();
                self.cursor.handle_given_up(retained);
                self.entry.handle_given_up();
                self.shared.failures.note_abort(reason);
                self.client.handle_given_up();
                self.base.release();
                Ok(Next::Finished)
            }
            other => self.execute(other).map(|()| Next::Continue),
        }
    }

    /// Applies the effect of a message that does not finish a version.
    fn execute(&mut self, effect: Effect) -> Result<(), Ended> {
        match effect {
            Effect::Acknowledged(epoch, version) => self.cursor.handle_acknowledged(epoch, version),
            Effect::Unsubscribed { keep_place: true } => return Err(Ended::ClientLost),
            Effect::Unsubscribed { keep_place: false } => return Err(Ended::ByClient),
            Effect::Ended(reason) => return Err(Ended::ByServer(reason)),
            Effect::None | Effect::Progress | Effect::Committed { .. } | Effect::Aborted(_) => {}
        }
        Ok(())
    }

    /// Whether chunks may be sent as deltas: the client can decode them, and no other codec is requested.
    fn accepts_deltas(&self) -> bool {
        let is_wanted = match self.codec() {
            CodecChoice::Auto => true,
            CodecChoice::Fixed(codec) => codec.needs_base(),
        };
        is_wanted && self.codecs.iter().any(CodecId::needs_base)
    }

    fn outgoing(
        &mut self,
        retained: &Arc<Retained>,
        selection: Arc<Selection>,
        progress: Progress,
    ) -> Outgoing {
        let base = match self.accepts_deltas() {
            true => self.base.begin(self.follower.topic(), retained),
            false => None,
        };
        let source = retained.payload.source();
        let is_in_place = source.slots().is_some() || source.is_in_place(&(0..source.len_bytes()));
        Outgoing {
            is_copied: !is_in_place,
            base,
            subscription: self.id,
            retained: Arc::clone(retained),
            selection,
            codec: self.codec(),
            codecs: self.codecs,
            effort: self.effort.clone(),
            tally: Arc::clone(self.follower.topic().tally()),
            lanes: Arc::clone(&self.lanes),
            sender: self.sender.clone(),
            shared: Arc::clone(&self.shared),
            counters: self.entry.progress(),
            progress,
        }
    }

    /// The codec choice: of the client, else of the topic, else of the server. Raw, if the client cannot decode it.
    fn codec(&self) -> CodecChoice {
        let by_client = self.codec.map(CodecChoice::Fixed);
        let choice = by_client.or_else(|| self.follower.topic().codec());
        match choice.unwrap_or(self.shared.config.codec) {
            CodecChoice::Fixed(codec) if !self.codecs.contains(codec) => CodecChoice::Fixed(CodecId::Raw),
            choice => choice,
        }
    }

    async fn announce(
        &self,
        retained: &Retained,
        skipped: u64,
        afresh: bool,
        lost_place: Option<Place>,
    ) -> Result<(), LaneError> {
        let announce = Announce {
            subscription: self.id,
            id: retained.id.clone(),
            manifest: retained.payload.manifest().digest(),
            skipped,
            metadata: retained.metadata.clone(),
            may_be_base: retained.base.may_be && self.accepts_deltas(),
            afresh,
            part: None,
            lost_place,
        };
        self.sender.send(ServerMessage::Announce(announce)).await
    }

    /// Informs the client that a transfer is aborted. The client answers with its own `Abort`, which is final.
    async fn abort(&self, retained: &Retained, reason: AbortReason) -> Result<(), LaneError> {
        let (epoch, version) = (retained.id.epoch, retained.id.version);
        self.sender
            .send(ServerMessage::Abort { subscription: self.id, epoch, version, reason })
            .await
    }
}

fn handle_sent(sent: Sent, transfer: &mut Transfer, retry: &mut ReadRetry) -> Result<(), Unread> {
    match sent? {
        SentKind::Chunk => {
            transfer.plan.handle_ended();
            retry.handle_read();
        }
        SentKind::Manifest | SentKind::Complete => {}
    }
    Ok(())
}

/// Waits until the deadline, once it is set. Cancel safe.
async fn deadline_passed(deadline: &mut tokio::sync::watch::Receiver<Option<Instant>>) {
    let deadline = deadline.wait_for(Option::is_some).await.ok().and_then(|at| *at);
    match deadline {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
