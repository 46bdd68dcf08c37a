//! The producer's handles: a publisher per topic, a publication per version.

use crate::{
    Publishable, TopicOptions, WhenFull,
    catalogue::Catalogue,
    consumers::Consumers,
    counters::Counters,
    hashing::{self, Unhashed},
    loads::Loads,
    retained::Retained,
    takers,
    topic::{PublishBlockers, Pushed, TopicState},
};
use std::{
    sync::{Arc, OnceLock, Weak, atomic::Ordering},
    time::Duration,
};
use tensor_relay_device::{CacheLease, Returned};
use tensor_relay_protocol::{
    ChunkIndex, EndReason, Epoch, MessageError, Metadata, Seq, Topic, Version, VersionId, check_metadata,
};
use tensor_relay_transport::{IN_PLACE_BYTES, Workers};
use tokio::{sync::watch, time::Instant};

/// The default time for transfers of a version to finish after it left retention.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(600);

/// The default time for a version in lent memory, whose producer waits to write again.
const LENT_RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// Publishes versions into one topic. A topic has one publisher at a time in a server.
///
/// When it is dropped, retained versions stay on offer, and another publisher may follow. [`end`](Self::end) ends the
/// topic; [`withdraw`](Self::withdraw) also releases its versions.
#[derive(Debug)]
pub struct Publisher {
    topic: Arc<TopicState>,
    catalogue: Arc<Catalogue>,
    counters: Arc<Counters>,
    workers: Workers,
    options: TopicOptions,
    epoch: Epoch,
    next: Version,
    /// Whether the reason for sending its versions without deltas was logged.
    is_cause_logged: bool,
    /// Keeps the memory of released versions cached for its next ones.
    cache_lease: Option<CacheLease>,
}

/// The topic already has a publisher in this server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "topic {topic} already has a publisher in this server: publish through that one, or choose another name"
)]
pub struct TopicTaken {
    /// The topic.
    pub topic: Topic,
}

/// Why a version cannot be published.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The metadata is larger than an announcement can hold.
    #[error(
        "the metadata of a version has {bytes} bytes, and at most {max} fit its announcement: publish it as a tensor"
    )]
    TooMuchMetadata {
        /// The size of the metadata.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The topic expired: nothing was published for longer than it allows.
    #[error(
        "topic {topic} expired, because nothing was published for {expire_after_ms} ms: open it again, or raise its time \
         to live"
    )]
    Expired {
        /// The topic.
        topic: Topic,
        /// The time to live without a publish.
        expire_after_ms: u128,
    },
}

impl Publisher {
    pub(crate) fn new(
        topic: Arc<TopicState>,
        catalogue: Arc<Catalogue>,
        counters: Arc<Counters>,
        workers: Workers,
        options: TopicOptions,
        epoch: Epoch,
    ) -> Self {
        let options = options.clamped();
        if let Some(after) = options.expire_after {
            let publisher = topic.publishers_ever();
            tokio::spawn(expire(Arc::downgrade(&topic), publisher, Arc::downgrade(&catalogue), after));
        }
        topic.set_codec(options.codec);
        let next = topic.number_after(epoch); // A continued epoch continues its numbers.
        let (is_cause_logged, cache_lease) = (false, None);
        Self { topic, catalogue, counters, workers, options, epoch, next, is_cause_logged, cache_lease }
    }

    /// Keeps the staging memory of released versions cached for the next ones while the publisher lives.
    pub(crate) fn with_staging_cache(mut self, cache_lease: CacheLease) -> Self {
        self.cache_lease = Some(cache_lease);
        self
    }

    /// The topic.
    pub fn topic(&self) -> &Topic {
        self.topic.name()
    }

    /// The topic in the catalogue.
    pub(crate) fn state(&self) -> &Arc<TopicState> {
        &self.topic
    }

    /// The epoch.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Whether its topic has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.topic.ended().is_some()
    }

    /// The id of the next version.
    pub fn next_id(&self) -> VersionId {
        VersionId { topic: self.topic.name().clone(), epoch: self.epoch, version: self.next }
    }

    /// Raises the number of the next version to `version`, by a record of the newest one before a restart. If the record
    /// is older than what a client holds, as after a restored backup, the client receives what is published here as other
    /// content. Without this call, clients wait until the versions that they hold are published again.
    pub fn continue_at(&mut self, version: Version) {
        self.set_next(self.next.max(version));
    }

    /// Sets the number of the next version, which comes from another server. A lower one than before is of a version
    /// that nobody has, because it was given up.
    pub(crate) fn set_next(&mut self, version: Version) {
        self.topic.continue_epoch(self.epoch);
        self.next = version;
    }

    /// Whether an `earlier` version of this publisher will stay on offer beside the next one, of `payload_bytes`. Its
    /// memory must not be lent for the next one then: it is either unchanged, or was overwritten too early.
    pub fn will_retain(&self, earlier: &Publication, payload_bytes: u64) -> bool {
        self.topic.will_stay(earlier.seq, self.options.keep, payload_bytes)
    }

    /// Publishes `version` as the newest, visible to all subscribers at the same time.
    ///
    /// The oldest versions leave retention for it ([`TopicOptions::keep`]). Subscribers in mode `latest` never block
    /// it. While a reader in mode `every` has not acknowledged a version that has to leave, this waits for
    /// [`TopicOptions::publish_timeout`]; then it evicts that reader, or with [`WhenFull::Block`] keeps waiting. If
    /// this is cancelled, nothing is published.
    ///
    /// # Errors
    /// [`PublishError`] when there is too much metadata or the topic expired.
    pub async fn publish(
        &mut self,
        version: impl Into<Publishable>,
        metadata: Metadata,
    ) -> Result<Publication, PublishError> {
        check_metadata(&metadata).map_err(|error| match error {
            MessageError::TooLarge { bytes, max, .. } => PublishError::TooMuchMetadata { bytes, max },
            other => unreachable!("metadata can only be too large: {other}"),
        })?;
        let Publishable { payload, returned, charge, relayed } = version.into();
        let id = self.next_id();
        let consumers = Consumers::default();
        let loads = Arc::<Loads>::default();
        let (committed, loaded) = (consumers.watch(), loads.watch());
        let default = if returned.is_some() { LENT_RELEASE_TIMEOUT } else { RELEASE_TIMEOUT };
        let TopicOptions { bases, keep, .. } = &self.options;
        let bytes = payload.manifest().payload_bytes();
        let may_outlive_retention = returned.is_none() && payload.source().slots().is_none();
        let mut base = self.catalogue.bases().terms(bytes, *bases, *keep, may_outlive_retention);
        match base.may_be {
            true => base.may_be = self.topic.decide_next_base(),
            false => self.log_no_deltas(bytes, may_outlive_retention),
        }
        let retained = Retained {
            id: id.clone(),
            payload,
            _charge: charge,
            metadata,
            consumers,
            loads,
            release_timeout: self.options.release_timeout.unwrap_or(default),
            abort_at: watch::Sender::new(None),
            failure: Arc::default(),
            stand_in: OnceLock::new(),
            copies: takers::Copies::default(),
            base,
            shared: OnceLock::new(),
            relayed,
        };
        let failure = Arc::clone(&retained.failure);
        let is_hashed_later = bytes > IN_PLACE_BYTES as u64
            && returned.is_none()
            && retained.payload.is_unhashed_in_place(ChunkIndex(0));
        let has_small_pages = retained.payload.source().shared().is_ok_and(|shared| shared.has_small_pages());
        let Pushed { seq, is_first, version, has_followers } = self.push(retained).await?;
        tracing::info!(version = %id, payload_bytes = bytes, "A version was published.");
        self.next = self.next.next();
        if is_first {
            self.catalogue.announce(self.topic.name());
        }
        if has_small_pages {
            takers::begin_enlarging(version.clone());
        }
        let topic = Arc::downgrade(&self.topic);
        if is_hashed_later && !has_followers {
            hashing::begin(Unhashed { version, topic: topic.clone() }, self.workers);
        }
        Ok(Publication { id, seq, topic, committed, loaded, returned, failure })
    }

    /// Sets the time for which the next versions wait for readers.
    pub(crate) fn set_publish_timeout(&mut self, timeout: Duration) {
        self.options.publish_timeout = timeout;
    }

    /// Adds a version once no reader blocks it, evicting readers if necessary.
    async fn push(&self, mut retained: Retained) -> Result<Pushed, PublishError> {
        let deadline = Instant::now() + self.options.publish_timeout;
        let mut room = self.topic.room();
        let mut waiting = Waiting { topic: &self.topic, version: None, is_reported: false };
        let pushed = loop {
            room.mark_unchanged();
            if let Err(expired) = self.check_not_expired() {
                break Err(expired);
            }
            let PublishBlockers { retained: blocked, readers, recheck_at } =
                match self.topic.push(retained, self.options.keep) {
                    Ok(pushed) => break Ok(pushed),
                    Err(blockers) => *blockers,
                };
            retained = blocked;
            waiting.version.get_or_insert_with(|| retained.id.clone());
            let is_late = Instant::now() >= deadline;
            if is_late && self.options.when_full == WhenFull::Evict {
                self.evict(&retained.id, &readers);
                continue;
            }
            if is_late && !std::mem::replace(&mut waiting.is_reported, true) {
                self.report_waiting(&retained.id, readers.len());
            }
            let until = [recheck_at, (!is_late).then_some(deadline)].into_iter().flatten().min();
            let recheck = async {
                match until {
                    Some(until) => tokio::time::sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = room.changed() => {}
                () = recheck => {}
            }
        };
        waiting.version = None;
        pushed
    }

    /// Logs once why versions are sent without deltas although the topic's options permit bases.
    fn log_no_deltas(&mut self, bytes: u64, may_outlive_retention: bool) {
        if self.options.bases == 0 || bytes == 0 || std::mem::replace(&mut self.is_cause_logged, true) {
            return;
        }
        let cause = match may_outlive_retention {
            true => "one is larger than the memory for bases; raise that limit, or retain two versions",
            false => {
                "they are borrowed or on a device, and only one is retained; retain two, each in memory of its own, or \
                 stage them on the host"
            }
        };
        tracing::info!(
            topic = %self.topic(), payload_bytes = bytes,
            "The versions of a topic are sent without deltas: {cause}."
        );
    }

    fn evict(&self, id: &VersionId, readers: &[crate::retention::ReaderId]) {
        let evicted = self.topic.evict(readers);
        self.counters.evicted.fetch_add(evicted, Ordering::Relaxed);
        tracing::warn!(
            version = %id, evicted, waited_ms = self.options.publish_timeout.as_millis(),
            "Readers did not keep up and were evicted, so that a version could be published."
        );
    }

    /// Reports a publish that waits without limit. A slow reader in mode `every` then holds up those in mode `latest` too.
    fn report_waiting(&self, id: &VersionId, readers: usize) {
        let problem = format!(
            "{id} waits for {readers} readers in mode `every`, which have not received the oldest retained version"
        );
        tracing::warn!("{problem}. Until then nobody receives it (--when-full block).");
        self.topic.set_problem(Some(problem));
    }

    fn check_not_expired(&self) -> Result<(), PublishError> {
        match (self.topic.ended(), self.options.expire_after) {
            (Some(_), Some(after)) => Err(PublishError::Expired {
                topic: self.topic.name().clone(),
                expire_after_ms: after.as_millis(),
            }),
            _ => Ok(()),
        }
    }

    /// Ends the topic: no version will follow, and subscriptions end once they have the requested versions. Retained
    /// versions stay on offer for later subscribers.
    pub fn end(self) {
        self.topic.end(EndReason::TopicEnded);
    }

    /// Withdraws the topic: subscriptions end, retained versions are released, and the name is free.
    pub fn withdraw(self) {
        self.catalogue.remove(&self.topic, EndReason::Withdrawn);
    }

    /// Ends the topic for this reason. Unless its publisher ended it, the name is free.
    pub(crate) fn end_with(self, reason: EndReason) {
        match reason {
            EndReason::TopicEnded => self.end(),
            reason => self.catalogue.remove(&self.topic, reason),
        }
    }

    /// Withdraws the topic like [`withdraw`](Self::withdraw), but keeps its name while the publisher lives: later
    /// subscribers receive the end immediately instead of waiting for the topic. Do not publish after this.
    pub fn withdraw_keeping_name(&self) {
        self.topic.end(EndReason::Withdrawn);
    }

    /// Records why the publisher cannot publish its newest content, for the server's status, or that it can again. A
    /// publish ends the problem.
    pub fn set_problem(&self, problem: Option<String>) {
        self.topic.set_problem(problem);
    }

    /// Whether a version became unreadable, because its files changed or its device failed, and no other is retained.
    pub fn is_lost(&self) -> bool {
        self.topic.is_lost()
    }

    /// Waits until [`is_lost`](Self::is_lost). Cancel safe.
    pub async fn lost(&self) {
        let mut changes = self.topic.changes();
        while !self.topic.is_lost() {
            let _ = changes.changed().await; // The topic holds the sender.
        }
    }
}

/// A publish that may have to wait for readers. If it is cancelled meanwhile, it says that the version is dropped.
struct Waiting<'a> {
    topic: &'a TopicState,
    /// The version, while it waits.
    version: Option<VersionId>,
    /// Whether the topic's problem is that the version waits.
    is_reported: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let Some(version) = &self.version else { return };
        tracing::warn!(
            "{version} is not published: its publish was cancelled, or the server ended, while it waited for readers in \
             mode `every`."
        );
        if self.is_reported {
            self.topic.set_problem(None);
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.topic.close();
        self.catalogue.remove_unneeded(&self.topic);
    }
}

/// Ends a topic when nothing was published for `after`, unless another publisher has opened it since.
async fn expire(topic: Weak<TopicState>, publisher: u64, catalogue: Weak<Catalogue>, after: Duration) {
    let opened = Instant::now();
    loop {
        let now = topic.upgrade().filter(|topic| topic.publishers_ever() == publisher);
        let Some(last) = now.map(|topic| topic.published_at().unwrap_or(opened).max(opened)) else {
            return;
        };
        if last.elapsed() < after {
            tokio::time::sleep_until(last + after).await;
            continue;
        }
        if let (Some(topic), Some(catalogue)) = (topic.upgrade(), catalogue.upgrade()) {
            catalogue.remove(&topic, EndReason::Expired);
        }
        return;
    }
}

/// A handle to a published version. Holds none of its memory.
#[derive(Debug, Clone)]
pub struct Publication {
    id: VersionId,
    seq: Seq,
    topic: Weak<TopicState>,
    committed: watch::Receiver<u64>,
    loaded: watch::Receiver<u64>,
    returned: Option<Returned>,
    failure: Arc<OnceLock<Box<str>>>,
}

impl Publication {
    /// The version.
    pub fn id(&self) -> &VersionId {
        &self.id
    }

    /// Why it was withdrawn before its end, if it became unreadable: its producer wrote to or freed its memory, or
    /// changed its files, or its device failed.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(|reason| &**reason)
    }

    /// The number of consumers that have committed it so far: received and verified all that they select of it. Each
    /// counts once, however often it receives the version ([`Consumer`](tensor_relay_protocol::Consumer)).
    pub fn committed_count(&self) -> u64 {
        *self.committed.borrow()
    }

    /// Watches the number of commits. Closes once the version is released and can reach no more subscribers.
    pub(crate) fn commits(&self) -> watch::Receiver<u64> {
        self.committed.clone()
    }

    /// Waits until `count` consumers committed it. Returns false when `timeout` passes first, or when the version was
    /// released and can reach no more subscribers.
    pub async fn committed(&mut self, count: u64, timeout: Duration) -> bool {
        let reached = self.committed.wait_for(|committed| *committed >= count);
        matches!(tokio::time::timeout(timeout, reached).await, Ok(Ok(_)))
    }

    /// The number of consumers that reported that they have loaded it, with the digest of what was sent to them. Each
    /// counts once.
    pub fn loaded_count(&self) -> u64 {
        *self.loaded.borrow()
    }

    /// Watches the number of loads. Closes once they are counted no longer.
    pub(crate) fn loads(&self) -> watch::Receiver<u64> {
        self.loaded.clone()
    }

    /// Waits until `count` consumers loaded it, by their own report: `snapshot.loaded()` of a client. Returns false when
    /// `timeout` passes first, or when the server counts no longer: 16 later versions of the topic were published, or
    /// the topic is gone. Unlike commits, loads are counted after the version's release.
    pub async fn loaded(&mut self, count: u64, timeout: Duration) -> bool {
        let reached = self.loaded.wait_for(|loaded| *loaded >= count);
        matches!(tokio::time::timeout(timeout, reached).await, Ok(Ok(_)))
    }

    /// Withdraws the version. Transfers in progress may finish within [`TopicOptions::release_timeout`]; readers in
    /// mode `every` that have not started it receive a gap.
    pub fn withdraw(&self) {
        if let Some(topic) = self.topic.upgrade() {
            topic.withdraw(self.seq, (self.id.epoch, self.id.version));
        }
    }

    /// Whether the producer may write to the tensors again. Staged: immediately. Borrowed: when the version left
    /// retention (replaced, or [withdrawn](Self::withdraw)) and nothing holds a byte of its memory, not even an
    /// unacknowledged packet. On a device: when the version left retention and the last copy out of it has ended, so
    /// never if a copy hangs. For a version from [`Borrowed::from_source`](crate::Borrowed::from_source), or of files,
    /// this is always true, because the end of their use is not tracked.
    pub fn is_released(&self) -> bool {
        self.returned.as_ref().is_none_or(Returned::is_returned)
    }

    /// Waits until [`is_released`](Self::is_released); returns false when `timeout` passes first.
    pub async fn released(&self, timeout: Duration) -> bool {
        match &self.returned {
            Some(returned) => tokio::time::timeout(timeout, returned.wait()).await.is_ok(),
            None => true,
        }
    }
}
