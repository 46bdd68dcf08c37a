//! [`Seat`]: one subscription as a member of a shared version.

use super::{
    held::{Pace, Reports},
    shared_version::SharedVersion,
    signals::Signals,
};
use std::{sync::Arc, time::Duration};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{
    ENCODINGS_MAX, Epoch, Pick, RangeSet, ServerMessage, Source, SubscriptionId, SubscriptionMessage,
    Version, swarm::MemberId,
};
use tensor_relay_transport::{egress::EncodingLog, sending::Input};
use tokio::time::Instant;

/// The shortest time between two messages with encodings, in which several are collected.
const ENCODINGS_INTERVAL: Duration = Duration::from_millis(20);

/// The shortest time between the first two messages with sources. It doubles with each one, since members come together.
const SOURCES_INTERVAL_MIN: Duration = Duration::from_millis(50);

/// The shortest time between two messages with sources later on.
const SOURCES_INTERVAL_MAX: Duration = Duration::from_secs(1);

/// A subscription's place among the members of a version, from its announcement to that of the next one. Dropping it
/// leaves: what it alone had is pushed again.
#[derive(Debug)]
pub(crate) struct Seat {
    version: Arc<SharedVersion>,
    member: MemberId,
    subscription: SubscriptionId,
    signals: Arc<Signals>,
    /// What the client said that it holds.
    reports: Lock<Reports>,
    /// How much of that is handled for its session.
    pace: Arc<Lock<Pace>>,
    told: Lock<Told>,
}

/// What the client was told.
#[derive(Debug)]
struct Told {
    /// The number of encodings.
    encodings: usize,
    encodings_at: Instant,
    sources: Vec<Source>,
    is_seeded: bool,
    sources_at: Instant,
    sources_interval: Duration,
    /// Whether it needs no more chunks. It needs the encodings on: without them it cannot offer what it has.
    has_committed: bool,
}

impl Told {
    fn nothing(now: Instant) -> Self {
        Self {
            encodings: 0,
            encodings_at: now,
            sources: vec![],
            is_seeded: false,
            sources_at: now,
            sources_interval: SOURCES_INTERVAL_MIN,
            has_committed: false,
        }
    }
}

impl Seat {
    pub(super) fn new(
        version: Arc<SharedVersion>,
        member: MemberId,
        subscription: SubscriptionId,
        signals: Arc<Signals>,
        pace: Arc<Lock<Pace>>,
    ) -> Self {
        let (reports, told) = (Lock::default(), Lock::new(Told::nothing(Instant::now())));
        Self { version, member, subscription, signals, reports, pace, told }
    }

    /// What to push of `wanted`.
    pub(crate) fn pick(&self, wanted: &RangeSet) -> Pick {
        self.version.pick(self.member, wanted)
    }

    /// Whether it is in this version.
    pub(crate) fn is_in(&self, version: (Epoch, Version)) -> bool {
        self.version.key() == version
    }

    /// Handles a message of the client to its subscription: credit says that pushed chunks arrived, and what it requests
    /// it has from this server.
    pub(crate) fn handle_message(&self, message: &SubscriptionMessage) {
        match message {
            SubscriptionMessage::Credit(chunks) if *chunks > 0 => {
                self.version.handle_arrived(self.member, *chunks);
            }
            SubscriptionMessage::Request(epoch, version, request) if self.is_in((*epoch, *version)) => {
                self.version.handle_requested(self.member, &request.chunks);
            }
            _ => {}
        }
    }

    /// The encodings that the members pass on to each other.
    pub(crate) fn encodings(&self) -> Arc<EncodingLog> {
        Arc::clone(self.version.encodings())
    }

    /// Records what the client can, or can no longer, send to its peers. The subscription's task handles it, because that costs
    /// as much as there are chunks, under the lock of the version. What exceeds the session's pace of messages is discarded.
    pub(super) fn report_held(&self, added: &RangeSet, withdrawn: &RangeSet) {
        if !self.pace.lock().admits_message(Instant::now()) {
            return;
        }
        let all = RangeSet::from_range(0..self.version.chunks());
        self.reports
            .lock()
            .add(&added.intersection(&all), &withdrawn.intersection(&all));
        self.signals.raise(|_| {});
    }

    /// Handles a part of what the client said that it holds.
    ///
    /// # Errors
    /// When the next part may be handled, if any is left.
    fn handle_reported(&self, now: Instant) -> Result<(), Option<Instant>> {
        let part = self.reports.lock().take_part(&mut self.pace.lock(), now);
        part.map(|(added, withdrawn)| self.version.handle_held(self.member, &added, &withdrawn))
    }

    /// Handles that the client was sent another encoding than this server named, as it says, by the peer with this key.
    pub(super) fn handle_bad_peer(&self, key: [u8; 32]) {
        self.version.handle_bad_peer(self.member, key);
    }

    /// Handles that peers may, or may no longer, be told of the client's port.
    pub(super) fn handle_addresses_changed(&self) {
        self.version.handle_addresses_changed(self.member);
    }

    /// Handles the client's commit: from now on, it only serves.
    pub(crate) fn handle_committed(&self) {
        self.told.lock().has_committed = true;
        self.version.handle_committed(self.member);
    }

    /// Waits for the next input of the subscription. Cancel safe.
    pub(crate) async fn next(&self) -> Input {
        let mut count = self.version.encodings().count();
        loop {
            let (encodings, now) = (*count.borrow_and_update(), Instant::now());
            let reported = self.handle_reported(now);
            let due_at = match self.due(encodings, now) {
                Ok(input) => return input,
                Err(due_at) => due_at,
            };
            let Err(reported_at) = reported else {
                tokio::task::yield_now().await;
                continue;
            };
            let is_due = async {
                match due_at.into_iter().chain(reported_at).min() {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.signals.raised() => {}
                () = is_due => {}
                Ok(()) = count.changed() => {}
            }
        }
    }

    /// The input that is due, of `encodings` that were made; or when there will be one, if that is known.
    fn due(&self, encodings: usize, now: Instant) -> Result<Input, Option<Instant>> {
        let taken = self.signals.with(|raised| {
            if std::mem::take(&mut raised.is_woken) {
                return Some(Input::Changed);
            }
            std::mem::take(&mut raised.has_progress).then_some(Input::Progress)
        });
        if let Some(input) = taken.or_else(|| self.signals.take_revocation(self.subscription)) {
            return Ok(input);
        }
        let mut told = self.told.lock();
        let has_encodings = encodings > told.encodings;
        if has_encodings && told.encodings_at <= now {
            let entries = self.version.encodings().entries(told.encodings, ENCODINGS_MAX);
            told.encodings += entries.len();
            told.encodings_at = now + ENCODINGS_INTERVAL;
            return Ok(self.tell(|subscription, (epoch, version)| ServerMessage::Encodings {
                subscription,
                epoch,
                version,
                entries,
            }));
        }
        if let Some(input) = self.sources_due(&mut told, now) {
            return Ok(input);
        }
        let encodings_at = has_encodings.then_some(told.encodings_at);
        // After the commit nothing is said of sources: their time is past, and waiting for it would never end.
        let have_sources = !told.has_committed && self.signals.with(|raised| raised.are_sources_changed);
        let sources_at = have_sources.then_some(told.sources_at);
        Err(encodings_at.into_iter().chain(sources_at).min())
    }

    /// The client's sources, if they changed and it is time for them. That nothing more will be pushed is said at once.
    fn sources_due(&self, told: &mut Told, now: Instant) -> Option<Input> {
        let is_changed = !told.has_committed && self.signals.with(|raised| raised.are_sources_changed);
        let is_due = told.sources_at <= now;
        if !is_changed || !is_due && (told.is_seeded || !self.version.is_seeded(self.member)) {
            return None;
        }
        self.signals.with(|raised| raised.are_sources_changed = false);
        let (sources, is_seeded) = self.version.sources(self.member);
        if is_seeded == told.is_seeded && has_same_peers(&sources, &told.sources) {
            told.sources_at = now + told.sources_interval; // To look is expensive, too.
            return None;
        }
        (told.sources, told.is_seeded) = (sources.clone(), is_seeded);
        told.sources_at = now + told.sources_interval;
        told.sources_interval = (told.sources_interval * 2).min(SOURCES_INTERVAL_MAX);
        Some(self.tell(|subscription, (epoch, version)| ServerMessage::Sources {
            subscription,
            epoch,
            version,
            sources,
            is_seeded,
        }))
    }

    fn tell(&self, message: impl FnOnce(SubscriptionId, (Epoch, Version)) -> ServerMessage) -> Input {
        Input::Tell(Box::new(message(self.subscription, self.version.key())))
    }
}

/// Whether two lists name the same peers at the same addresses with the same grants. What these hold, they say themselves.
fn has_same_peers(one: &[Source], other: &[Source]) -> bool {
    let is_same = |(one, other): (&Source, &Source)| {
        (one.key, &one.addresses, &one.grant) == (other.key, &other.addresses, &other.grant)
    };
    one.len() == other.len() && one.iter().zip(other).all(is_same)
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.version.leave(self.member);
    }
}
