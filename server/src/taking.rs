//! A take: a subscription of a peer to one version that a member of this process receives (PROTOCOL.md §3.15).

use crate::{
    forwarding::{ForwardedVersion, Forwarding, Found, GrantedTake, Validity},
    inboxes::Inbox,
};
use std::{sync::Arc, time::Duration};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{
    AbortReason, CodecChoice, EndReason, Ended, Epoch, FeatureSet, Here, NotLent, ProtocolViolation,
    Published, Selection, Sender, Seq, ServerMessage, Start, Subscribe, SubscriptionMessage, Version,
    Versions, WantedGpu,
};
use tensor_relay_transport::{
    control,
    egress::{Egress, EncodingLog},
    sending::{Coding, Delivery, DeltaBase, Host, Input, Loan, Route, Selector, SentChunks},
};
use tokio::{sync::watch, time::Instant};

/// The time for a version to begin here that the origin has named to a taker already.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(30);

/// A take that was granted.
#[derive(Debug)]
pub(crate) struct Taking {
    pub(crate) subscribe: Subscribe,
    /// The features that the taker offered.
    pub(crate) features: FeatureSet,
    pub(crate) route: Route,
    /// The control stream, for the end of a take that does not begin.
    pub(crate) sender: control::Sender<ServerMessage>,
    pub(crate) coding: Coding,
    pub(crate) selector: Selector,
    pub(crate) egress: Arc<Egress>,
    pub(crate) host: TakingHost,
}

/// Where a take finds its version, and what ends it.
#[derive(Debug)]
pub(crate) struct TakingHost {
    granted: GrantedTake,
    forwarding: Arc<Forwarding>,
    inbox: Inbox,
    changes: watch::Receiver<()>,
    topic: OneVersion,
}

impl TakingHost {
    /// A take that is granted by one of `forwarding`'s origins.
    pub(crate) fn new(granted: GrantedTake, forwarding: &Arc<Forwarding>, inbox: Inbox) -> Self {
        let changes = forwarding.changes();
        Self { granted, forwarding: Arc::clone(forwarding), inbox, changes, topic: OneVersion(None) }
    }

    /// Waits until the version begins here.
    ///
    /// # Errors
    /// The reason why it does not; `None` if the taker does not wait.
    async fn begin(&mut self) -> Result<(), Option<EndReason>> {
        let deadline = Instant::now() + BEGIN_TIMEOUT;
        loop {
            self.check()?;
            match self.forwarding.find(&self.granted) {
                Found::Version(version) => {
                    self.topic.0 = Some(version);
                    return Ok(());
                }
                Found::Passed => return Err(Some(EndReason::NotFound)),
                Found::NotYet => {}
            }
            tokio::select! {
                _ = self.changes.changed() => {}
                () = tokio::time::sleep_until(deadline) => return Err(Some(EndReason::NotFound)),
                input = self.inbox.next() => match input {
                    Input::Message(SubscriptionMessage::Unsubscribe { .. }) | Input::SessionEnded => return Err(None),
                    Input::End(reason) => return Err(Some(reason)),
                    _ => {}
                },
            }
        }
    }

    /// Checks that the take is still permitted; returns until when, if that is known.
    fn check(&self) -> Result<Option<Instant>, Option<EndReason>> {
        let now = Instant::now();
        match self.forwarding.validity(&self.granted) {
            Validity::Valid => Ok(None),
            Validity::Until(end) if now < end => Ok(Some(end)),
            Validity::Until(_) | Validity::Ended => Err(Some(EndReason::Forbidden)),
        }
    }
}

impl Taking {
    /// Runs the take until it ends.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the taker broke a rule.
    pub(crate) async fn run(mut self) -> Result<(), ProtocolViolation> {
        if let Err(reason) = self.host.begin().await {
            let subscription = self.route.subscription;
            if let Some(reason) = reason {
                let end = ServerMessage::End { subscription, reason };
                let _ = self.sender.send(end).await; // Fails only if the session ends.
            }
            return Ok(());
        }
        let machine = Sender::new(&self.host.topic, &self.subscribe, self.features, Seq::FIRST, None)?;
        let delivery = Delivery {
            machine,
            host: self.host,
            route: self.route,
            coding: self.coding,
            selector: self.selector,
            egress: self.egress,
            sent: Arc::<SentChunks>::default(),
        };
        delivery.run(()).await // A shutdown does not wait for it: takers have other sources.
    }
}

impl Host for TakingHost {
    type Version = ForwardedVersion;
    type Topic = OneVersion;

    fn topic(&self) -> &OneVersion {
        &self.topic
    }

    fn codec(&self) -> CodecChoice {
        CodecChoice::Auto
    }

    async fn next_input(&mut self) -> Input {
        loop {
            let until = match self.check() {
                Ok(until) => until,
                Err(reason) => return Input::End(reason.unwrap_or(EndReason::Forbidden)),
            };
            if let Some(reason) = self.topic.0.as_ref().and_then(|version| version.ended()) {
                return Input::End(reason);
            }
            tokio::select! {
                input = self.inbox.next() => return match input {
                    // Hashes come from the origin: here they could be those of chunks that are not here.
                    Input::Message(SubscriptionMessage::Request(_, _, request)) if request.hashes => {
                        Input::End(EndReason::NotSupported)
                    }
                    input => input,
                },
                _ = self.changes.changed() => {}
                () = passed(until) => {}
            }
        }
    }

    fn acknowledge(&mut self, _: Epoch, _: Version) {}

    fn begin(&mut self, _: &Arc<ForwardedVersion>, _: u64, _: bool) -> Option<Box<dyn DeltaBase>> {
        None // Chunks are sent as they came, deltas too.
    }

    fn handle_selected(
        &mut self,
        _: &Arc<ForwardedVersion>,
        _: &Selection,
        _: Option<Version>,
        _: bool,
    ) -> Option<Arc<EncodingLog>> {
        None // The origin names encodings.
    }

    async fn lend(
        &mut self,
        _: &Arc<ForwardedVersion>,
        _: &Selection,
        _: Option<Result<WantedGpu, NotLent>>,
    ) -> Result<Loan, NotLent> {
        Err(NotLent::NotShareable)
    }

    fn release_base(&mut self) {}

    fn handle_committed(&mut self, version: &ForwardedVersion, _: bool) {
        tracing::debug!(version = %version.id(), "A peer has committed a version.");
    }

    fn handle_aborted(&mut self, _: AbortReason) {}

    fn handle_unreadable(&mut self, version: &ForwardedVersion, error: &SourceError) {
        tracing::error!(version = %version.id(), %error, "A version cannot be sent to a peer.");
    }

    fn handle_ended(&mut self, _: Option<Ended>) {}
}

async fn passed(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// The one version of a take, once it began.
#[derive(Debug)]
pub(crate) struct OneVersion(Option<Arc<ForwardedVersion>>);

impl Versions for OneVersion {
    type Version = Arc<ForwardedVersion>;

    fn newest(&self) -> Option<(Seq, Arc<ForwardedVersion>)> {
        self.0.clone().map(|version| (Seq::FIRST, version))
    }

    fn first_from(&self, seq: Seq) -> Option<(Seq, Arc<ForwardedVersion>)> {
        self.newest().filter(|(at, _)| *at >= seq)
    }

    fn find(&self, key: (Epoch, Version)) -> Option<(Seq, Arc<ForwardedVersion>)> {
        self.newest().filter(|(_, version)| version.key() == key)
    }

    fn base(&self) -> Option<Arc<ForwardedVersion>> {
        None
    }

    fn start(&self, _: Start) -> Seq {
        Seq::FIRST
    }

    fn is_behind(&self, _: (Epoch, Version)) -> bool {
        false
    }

    fn ended(&self) -> Option<EndReason> {
        None
    }

    fn unacknowledged(&self, _: Seq, _: &mut Vec<Seq>) -> usize {
        0
    }

    fn lost_place(&self) -> Option<EndReason> {
        None
    }

    fn here(&self, version: &Arc<ForwardedVersion>) -> Here {
        Here::Only(version.offered())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        forwarding::{ForwardOptions, Take},
        inboxes::Inboxes,
    };
    use tensor_relay_protocol::{LaneGrant, PeerSecret, SubscriptionId, Topic};
    use tensor_relay_transport::{Fingerprint, Workers, forwarding::Origin};

    /// Goal: a grant of an origin that was lost ends after ten minutes, also during a take. A version that does not begin
    /// is not waited for as long.
    #[tokio::test(start_paused = true)]
    async fn a_take_ends_ten_minutes_after_the_origin_was_lost() {
        let forwarding = Arc::<Forwarding>::default();
        let options = ForwardOptions { key: Fingerprint([5; 32]), kept_bytes: None, rate: None };
        let forward = forwarding.join(options, Workers::Inline);
        let (topic, version, taker) = (Topic::new("m").unwrap(), (Epoch(1), Version(2)), [7; 32]);
        let lanes = LaneGrant::new([1; 32]);
        forward.set_origin(Origin::Session(1, lanes));
        let grant = PeerSecret::of(&lanes).grant(&topic, version, &taker);
        let take = Take { topic: topic.clone(), version, taker };
        let mut inboxes = Inboxes::default();
        let mut host = |id| {
            let inbox = inboxes.open(SubscriptionId(id), &topic, 9).unwrap().unwrap();
            TakingHost::new(forwarding.check(&take, &grant).unwrap(), &forwarding, inbox)
        };
        let (mut waiting, mut taking) = (host(1), host(2));
        let began = Instant::now();
        assert_eq!(waiting.begin().await, Err(Some(EndReason::NotFound)));
        assert_eq!(began.elapsed().as_secs(), BEGIN_TIMEOUT.as_secs());
        forward.set_origin(Origin::Lost);
        let lost = Instant::now();
        assert_eq!(taking.next_input().await, Input::End(EndReason::Forbidden));
        assert_eq!(lost.elapsed().as_secs(), 600);
        assert_eq!(taking.begin().await, Err(Some(EndReason::Forbidden)));
    }
}
