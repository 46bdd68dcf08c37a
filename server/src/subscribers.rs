//! [`Subscribers`]: the status of a server's subscriptions: topic, progress and bottleneck of each.

use crate::{
    retained::Retained,
    status::{Limit, SubscriberStatus, TransferStatus},
    topic::TopicState,
};
use std::{
    collections::BTreeMap,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{Epoch, Mode, Version, VersionId};
use tensor_relay_transport::{LaneKind, Peer, sending::SentChunks};
use tokio::time::Instant;

/// All open subscriptions, bounded by the limits of sessions.
#[derive(Debug, Default)]
pub(crate) struct Subscribers {
    open: Lock<BTreeMap<u64, Arc<SubscriberProgress>>>,
    ever: AtomicU64,
}

/// The entry of one subscription, until this is dropped.
#[derive(Debug)]
pub(crate) struct SubscriberEntry {
    subscribers: Arc<Subscribers>,
    number: u64,
    progress: Arc<SubscriberProgress>,
}

/// The client and topic of a subscription.
#[derive(Debug)]
pub(crate) struct SubscriberInfo {
    pub(crate) topic: Arc<TopicState>,
    pub(crate) peer: Peer,
    pub(crate) kind: LaneKind,
    pub(crate) mode: Mode,
    /// The version that the client had when it subscribed.
    pub(crate) have: Option<(Epoch, Version)>,
}

/// The status of one subscription. Sends change the counters of chunks; the other fields change only when a version
/// begins or ends.
#[derive(Debug)]
pub(crate) struct SubscriberProgress {
    info: SubscriberInfo,
    began: Instant,
    state: Lock<TransferState>,
    committed: AtomicU64,
    skipped: AtomicU64,
    sent: Arc<SentChunks>,
}

#[derive(Debug, Default)]
struct TransferState {
    /// The newest version that the client has.
    held: Option<(Epoch, Version)>,
    transfer: Option<StartedTransfer>,
}

#[derive(Debug)]
struct StartedTransfer {
    version: VersionId,
    payload_bytes: u64,
    started: Instant,
    /// The payload bytes sent to the subscription before this transfer.
    sent_before_bytes: u64,
}

impl Subscribers {
    /// Adds a subscription.
    pub(crate) fn insert(self: &Arc<Self>, info: SubscriberInfo) -> SubscriberEntry {
        let number = self.ever.fetch_add(1, Ordering::Relaxed);
        let progress = Arc::new(SubscriberProgress::new(info));
        self.open.lock().insert(number, Arc::clone(&progress));
        SubscriberEntry { subscribers: Arc::clone(self), number, progress }
    }

    /// The number of subscriptions, and the status of the `max` oldest ones.
    pub(crate) fn status(&self, max: usize) -> (usize, Vec<SubscriberStatus>) {
        let (count, first): (usize, Vec<Arc<SubscriberProgress>>) = {
            let open = self.open.lock();
            (open.len(), open.values().take(max).cloned().collect())
        };
        (count, first.iter().map(|progress| progress.status()).collect())
    }
}

impl Deref for SubscriberEntry {
    type Target = SubscriberProgress;

    fn deref(&self) -> &SubscriberProgress {
        &self.progress
    }
}

impl Drop for SubscriberEntry {
    fn drop(&mut self) {
        let removed = self.subscribers.open.lock().remove(&self.number);
        drop(removed); // Outside the lock: it may be the last reference to its topic.
    }
}

impl SubscriberProgress {
    fn new(info: SubscriberInfo) -> Self {
        Self {
            state: Lock::new(TransferState { held: info.have, transfer: None }),
            sent: Arc::new(SentChunks { topic: Arc::clone(info.topic.tally()), ..Default::default() }),
            info,
            began: Instant::now(),
            committed: AtomicU64::new(0),
            skipped: AtomicU64::new(0),
        }
    }

    /// The counters of its chunks.
    pub(crate) fn sent(&self) -> &Arc<SentChunks> {
        &self.sent
    }

    /// Records the start of a version.
    pub(crate) fn begin(&self, retained: &Retained, skipped: u64) {
        self.skipped.fetch_add(skipped, Ordering::Relaxed);
        self.state.lock().transfer = Some(StartedTransfer {
            version: retained.id.clone(),
            payload_bytes: retained.payload.manifest().payload_bytes(),
            started: Instant::now(),
            sent_before_bytes: self.sent.payload_bytes.load(Ordering::Relaxed),
        });
    }

    /// Records the commit of the version.
    pub(crate) fn handle_committed(&self, retained: &Retained) {
        self.committed.fetch_add(1, Ordering::Relaxed);
        *self.state.lock() =
            TransferState { held: Some((retained.id.epoch, retained.id.version)), transfer: None };
    }

    /// Records that the transfer was aborted.
    pub(crate) fn handle_given_up(&self) {
        self.state.lock().transfer = None;
    }

    fn status(&self) -> SubscriberStatus {
        let sent_payload_bytes = self.sent.payload_bytes.load(Ordering::Relaxed);
        let (held, transfer) = {
            let state = self.state.lock();
            let transfer = state.transfer.as_ref().map(|started| TransferStatus {
                version: started.version.clone(),
                payload_bytes: started.payload_bytes,
                sent_bytes: sent_payload_bytes.saturating_sub(started.sent_before_bytes),
                since: started.started.elapsed(),
                limit: self.limit(),
            });
            (state.held, transfer)
        };
        let lag = match (held, &transfer) {
            (None, None) => Default::default(), // It waits for a later version.
            _ => self.info.topic.lag(held),
        };
        // For versions published before the subscription, the lag is at most the age of the subscription.
        let since = lag.since.map(|since| since.elapsed().min(self.began.elapsed()));
        SubscriberStatus {
            topic: self.info.topic.name().clone(),
            peer: self.info.peer,
            transport: self.info.kind,
            is_every: self.info.mode == Mode::Every,
            since: self.began.elapsed(),
            held: held.map(|(_, version)| version),
            lag_versions: lag.versions,
            lag: since.unwrap_or_default(),
            transfer,
            committed: self.committed.load(Ordering::Relaxed),
            skipped: self.skipped.load(Ordering::Relaxed),
            sent_payload_bytes,
            sent_wire_bytes: self.sent.wire_bytes.load(Ordering::Relaxed),
        }
    }

    /// The current bottleneck: where most of its chunks are.
    fn limit(&self) -> Limit {
        match (self.sent.encoding.get(), self.sent.writing.get()) {
            (0, 0) => Limit::Receiver,
            (encoding, writing) if writing >= encoding => Limit::Network,
            _ => Limit::Encoding,
        }
    }
}
