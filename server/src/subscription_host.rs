//! [`SubscriptionHost`]: a topic of this server, for one subscription.

use crate::{
    catalogue::Follower,
    consumers::ConsumerId,
    counters::Counters,
    failures::Failures,
    inboxes::Inbox,
    offer::Offer,
    retained::Retained,
    subscribers::SubscriberEntry,
    swarm::Sharing,
    takers::{Taker, Takers},
};
use std::sync::{Arc, atomic::Ordering};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{
    AbortReason, CodecChoice, EndReason, Ended, Epoch, NotLent, Selection, SubscriptionId, Version, WantedGpu,
};
use tensor_relay_transport::{
    egress::EncodingLog,
    sending::{DeltaBase, Host, Input, Loan},
};
use tokio::sync::watch;

/// What one subscription needs of this server, and what the server learns from it.
#[derive(Debug)]
pub(crate) struct SubscriptionHost {
    pub(crate) subscription: SubscriptionId,
    pub(crate) offer: Offer,
    pub(crate) follower: Follower,
    pub(crate) inbox: Inbox,
    /// Whether the server drains: only ended topics and mode `every` start transfers.
    pub(crate) draining: watch::Receiver<bool>,
    /// The codec of topics that choose none.
    pub(crate) codec: CodecChoice,
    /// For whom commits are counted.
    pub(crate) consumer: ConsumerId,
    /// Its entry in the server's status.
    pub(crate) entry: SubscriberEntry,
    pub(crate) counters: Arc<Counters>,
    pub(crate) failures: Arc<Failures>,
    pub(crate) takers: Arc<Takers>,
    pub(crate) taker: Taker,
}

impl Host for SubscriptionHost {
    type Version = Retained;
    type Topic = Offer;

    fn topic(&self) -> &Offer {
        &self.offer
    }

    fn codec(&self) -> CodecChoice {
        self.offer.topic.codec().unwrap_or(self.codec)
    }

    async fn next_input(&mut self) -> Input {
        let sharing = self.offer.sharing.as_ref();
        let told = async {
            match sharing {
                Some(sharing) => sharing.next().await,
                None => std::future::pending().await,
            }
        };
        let input = tokio::select! {
            input = self.inbox.next() => input,
            () = self.follower.changed() => Input::Changed,
            Ok(()) = self.draining.changed() => Input::Draining,
            input = told => input,
        };
        if let (Some(seat), Input::Message(message)) = (sharing.and_then(Sharing::seat), &input) {
            seat.handle_message(message);
        }
        input
    }

    fn acknowledge(&mut self, epoch: Epoch, version: Version) {
        self.offer.acknowledge(epoch, version);
    }

    fn begin(
        &mut self,
        version: &Arc<Retained>,
        skipped: u64,
        accepts_deltas: bool,
    ) -> Option<Box<dyn DeltaBase>> {
        self.entry.begin(version, skipped);
        match accepts_deltas {
            true => self.offer.base.begin(&self.offer.topic, version),
            false => None,
        }
    }

    fn handle_selected(
        &mut self,
        version: &Arc<Retained>,
        selection: &Selection,
        base: Option<Version>,
        shared: bool,
    ) -> Option<Arc<EncodingLog>> {
        let Offer { sharing, topic, .. } = &mut self.offer;
        let sharing = sharing.as_mut()?;
        sharing.give_up();
        // Not what the client says by now: it was told whether the version is shared.
        shared.then(|| sharing.begin((topic, version), selection.chunks(), base).encodings())
    }

    async fn lend(
        &mut self,
        version: &Arc<Retained>,
        selection: &Selection,
        gpu: Option<Result<WantedGpu, NotLent>>,
    ) -> Result<Loan, NotLent> {
        let digest = version.name_for_taker(selection);
        self.takers.lend(version, digest, gpu, &self.taker).await
    }

    fn release_base(&mut self) {
        self.offer.base.release();
    }

    fn handle_committed(&mut self, version: &Retained, kept: bool) {
        self.counters.committed.fetch_add(1, Ordering::Relaxed);
        version.consumers.count(&self.consumer);
        self.entry.handle_committed(version);
        self.offer.base.handle_committed(kept);
        if let Some(seat) = self.offer.sharing.as_ref().and_then(Sharing::seat) {
            seat.handle_committed();
        }
    }

    fn handle_aborted(&mut self, reason: AbortReason) {
        self.entry.handle_given_up();
        if let Some(sharing) = &mut self.offer.sharing {
            sharing.give_up();
        }
        self.failures.note_abort(reason);
    }

    fn handle_unreadable(&mut self, version: &Retained, error: &SourceError) {
        self.offer.topic.handle_unreadable(version, error);
    }

    fn handle_ended(&mut self, ended: Option<Ended>) {
        let is_kept = matches!(ended, None | Some(Ended::ByClient { keep_place: true }));
        if !is_kept {
            self.offer.release();
        }
        let Some(Ended::ByServer(reason)) = ended else { return };
        self.failures.note_end(reason);
        if reason == EndReason::Evicted {
            self.counters.evicted.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                subscription = %self.subscription,
                "A subscriber accepted no byte within the deadline and was evicted."
            );
        }
    }
}
