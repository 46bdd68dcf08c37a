//! The producer's handles: a publisher per topic, a publication per version.

use crate::{
    Publishable, TopicOptions, WhenFull,
    catalogue::Catalogue,
    retention::Seq,
    shared::Counters,
    topic::{PublishBlockers, Pushed, Retained, TopicState},
};
use std::{
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};
use tensor_relay_device::{CacheLease, Returned};
use tensor_relay_protocol::{
    EndReason, Epoch, MessageError, Metadata, Topic, Version, VersionId, check_metadata,
};
use tokio::{sync::watch, time::Instant};

/// How long transfers of a staged version may take to finish after it left retention, by default.
const STAGED_RELEASE: Duration = Duration::from_secs(600);

/// The same for a borrowed version, whose producer waits to write again.
const BORROWED_RELEASE: Duration = Duration::from_secs(10);

/// Publishes versions into one topic. There is one at a time per topic and server.
///
/// When it is dropped, what is retained stays on offer, and another publisher may follow, in a new epoch.
/// [`end`](Self::end) says that nothing will follow; [`withdraw`](Self::withdraw) takes everything back.
#[derive(Debug)]
pub struct Publisher {
    topic: Arc<TopicState>,
    catalogue: Arc<Catalogue>,
    counters: Arc<Counters>,
    options: TopicOptions,
    epoch: Epoch,
    next: Version,
    /// Whether it was logged why its versions are sent whole.
    told: bool,
    /// Keeps the memory of released versions cached for its next ones.
    demand: Option<CacheLease>,
}

/// The topic already has a publisher in this server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "topic {topic} already has a publisher in this server: publish through that one, or choose another name"
)]
pub struct TopicTaken {
    /// Which topic.
    pub topic: Topic,
}

/// Why a version cannot be published.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// More metadata than an announcement holds.
    #[error(
        "the metadata of a version has {bytes} bytes, and at most {max} fit its announcement: publish it as a tensor"
    )]
    TooMuchMetadata {
        /// How much there is.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The topic expired: nothing was published for longer than it allows.
    #[error(
        "topic {topic} expired, because nothing was published for {expire_after_ms} ms: open it again, or let it live longer"
    )]
    Expired {
        /// Which topic.
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
        options: TopicOptions,
        epoch: Epoch,
    ) -> Self {
        let options = options.within_reason();
        if let Some(after) = options.expire_after {
            let publisher = topic.publishers_ever();
            tokio::spawn(expire(Arc::downgrade(&topic), publisher, Arc::downgrade(&catalogue), after));
        }
        topic.set_codec(options.codec);
        let next = topic.number_after(epoch); // In an epoch that goes on, so do its numbers.
        Self { topic, catalogue, counters, options, epoch, next, told: false, demand: None }
    }

    /// Its versions are staged in memory that is kept for the next ones as long as this lives.
    pub(crate) fn staging_again_and_again(mut self, demand: CacheLease) -> Self {
        self.demand = Some(demand);
        self
    }

    /// The topic.
    pub fn topic(&self) -> &Topic {
        self.topic.name()
    }

    /// The epoch.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Whether its topic expired.
    pub(crate) fn has_ended(&self) -> bool {
        self.topic.ended().is_some()
    }

    /// The id of the next version.
    pub fn next_id(&self) -> VersionId {
        VersionId { topic: self.topic.name().clone(), epoch: self.epoch, version: self.next }
    }

    /// Sets the number of the next version, if it is higher than it would be: for content that was published under a
    /// number before a restart.
    pub fn continue_at(&mut self, version: Version) {
        self.next = self.next.max(version);
    }

    /// Makes `version` the newest, visible to every subscriber at once.
    ///
    /// Retention lets the oldest versions go for it ([`TopicOptions::keep`]). Subscribers in mode `latest` are never
    /// waited for. While a reader in mode `every` has not acknowledged what would have to go, this waits, for
    /// [`TopicOptions::publish_timeout`]; then that reader is evicted, or with [`WhenFull::Block`] waited for on. When
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
        let Publishable { payload, returned } = version.into();
        let id = self.next_id();
        let (committed, watch) = watch::channel(0);
        let default = if returned.is_some() { BORROWED_RELEASE } else { STAGED_RELEASE };
        let TopicOptions { bases, keep, .. } = &self.options;
        let bytes = payload.manifest().payload_bytes();
        let is_ours = returned.is_none() && payload.source().slots().is_none();
        let mut base = self.catalogue.bases().terms(bytes, *bases, *keep, is_ours);
        match base.may_be {
            true => base.may_be = self.topic.is_next_worth_it(),
            false => self.tell_why_whole(bytes, is_ours),
        }
        let retained = Retained {
            id: id.clone(),
            payload,
            metadata,
            committed,
            release_timeout: self.options.release_timeout.unwrap_or(default),
            cut_at: watch::Sender::new(None),
            base,
        };
        let Pushed { seq, is_first } = self.push(retained).await?;
        tracing::info!(version = %id, payload_bytes = bytes, "A version was published.");
        self.next = self.next.next();
        if is_first {
            self.catalogue.appeared(self.topic.name());
        }
        Ok(Publication { id, seq, topic: Arc::downgrade(&self.topic), committed: watch, returned })
    }

    /// Adds a version as soon as readers allow it, or evicts them.
    async fn push(&self, mut retained: Retained) -> Result<Pushed, PublishError> {
        let deadline = Instant::now() + self.options.publish_timeout;
        let mut room = self.topic.room();
        loop {
            room.mark_unchanged();
            self.check_alive()?;
            let PublishBlockers { retained: back, readers, look_at } =
                match self.topic.push(retained, self.options.keep) {
                    Ok(pushed) => return Ok(pushed),
                    Err(in_the_way) => *in_the_way,
                };
            retained = back;
            let over = Instant::now() >= deadline;
            if over && self.options.when_full == WhenFull::Evict {
                self.evict(&retained.id, &readers);
                continue;
            }
            let until = [look_at, (!over).then_some(deadline)].into_iter().flatten().min();
            let look = async {
                match until {
                    Some(until) => tokio::time::sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = room.changed() => {}
                () = look => {}
            }
        }
    }

    /// Logs once why versions are sent whole although bases should be kept.
    fn tell_why_whole(&mut self, bytes: u64, is_ours: bool) {
        if self.options.bases == 0 || bytes == 0 || std::mem::replace(&mut self.told, true) {
            return;
        }
        let cause = match is_ours {
            true => "one is larger than all memory for bases; allow more of that, or retain two versions",
            false => {
                "they are lent, or lie on a device, and one at most is retained; retain two, or stage them on the host"
            }
        };
        tracing::info!(topic = %self.topic(), payload_bytes = bytes, "The versions of a topic travel whole: {cause}.");
    }

    fn evict(&self, id: &VersionId, readers: &[crate::retention::ReaderId]) {
        let evicted = self.topic.evict(readers);
        self.counters.evicted.fetch_add(evicted, Ordering::Relaxed);
        tracing::warn!(
            version = %id, evicted, waited_ms = self.options.publish_timeout.as_millis(),
            "Readers did not keep up and were evicted, so that a version could be published."
        );
    }

    fn check_alive(&self) -> Result<(), PublishError> {
        match (self.topic.ended(), self.options.expire_after) {
            (Some(_), Some(after)) => Err(PublishError::Expired {
                topic: self.topic.name().clone(),
                expire_after_ms: after.as_millis(),
            }),
            _ => Ok(()),
        }
    }

    /// Says that nothing will follow: subscriptions end once they have what they asked for. What is retained stays on
    /// offer for who comes later.
    pub fn end(self) {
        self.topic.end(EndReason::TopicEnded);
    }

    /// Withdraws the topic: subscriptions end, retained versions are released, and the name is free.
    pub fn withdraw(self) {
        self.catalogue.remove(&self.topic, EndReason::Withdrawn);
    }

    /// Withdraws the topic like [`withdraw`](Self::withdraw), but keeps its name while this lives: later subscribers
    /// are told at once instead of waiting for the topic. Nothing is published after this.
    pub fn withdraw_for_good(&self) {
        self.topic.end(EndReason::Withdrawn);
    }

    /// Whether a version could no longer be read, because its files changed or its device failed, and none is left.
    pub fn is_lost(&self) -> bool {
        self.topic.is_lost()
    }

    /// Waits until [`is_lost`](Self::is_lost). Cancel safe.
    pub async fn lost(&self) {
        let mut changes = self.topic.changes();
        while !self.topic.is_lost() {
            let _ = changes.changed().await; // This holds the topic, and the topic the sender.
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.topic.close();
        self.catalogue.remove_unneeded(&self.topic);
    }
}

/// Ends a topic when nothing was published for `after`, unless another publisher came with its own options.
async fn expire(topic: Weak<TopicState>, publisher: u64, catalogue: Weak<Catalogue>, after: Duration) {
    let opened = Instant::now();
    loop {
        let now = topic.upgrade().filter(|topic| topic.publishers_ever() == publisher);
        let Some(last) = now.map(|topic| topic.published().unwrap_or(opened).max(opened)) else {
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

/// The state of a published version. Holds none of its memory.
#[derive(Debug, Clone)]
pub struct Publication {
    id: VersionId,
    seq: Seq,
    topic: Weak<TopicState>,
    committed: watch::Receiver<u64>,
    returned: Option<Returned>,
}

impl Publication {
    /// The version.
    pub fn id(&self) -> &VersionId {
        &self.id
    }

    /// How many subscribers have committed it so far.
    pub fn committed_count(&self) -> u64 {
        *self.committed.borrow()
    }

    /// A watch of that number. Ends when the version was released and can reach no more subscribers.
    pub(crate) fn commits(&self) -> watch::Receiver<u64> {
        self.committed.clone()
    }

    /// Waits until `count` subscribers committed it; returns false when `timeout` passed before, or when it was let go
    /// and can reach no more of them.
    pub async fn committed(&mut self, count: u64, timeout: Duration) -> bool {
        let reached = self.committed.wait_for(|committed| *committed >= count);
        matches!(tokio::time::timeout(timeout, reached).await, Ok(Ok(_)))
    }

    /// Withdraws the version. Transfers in progress may finish within [`TopicOptions::release_timeout`]; readers in
    /// mode `every` who did not begin it are told of a gap.
    pub fn withdraw(&self) {
        if let Some(topic) = self.topic.upgrade() {
            topic.withdraw(self.seq, (self.id.epoch, self.id.version));
        }
    }

    /// Whether the producer may write to the tensors again: at once for staged versions; for borrowed ones when the
    /// version left retention (replaced, or [withdrawn](Self::withdraw)) and the last byte of it was sent; for those on
    /// a device, when the last copy out of it has ended and no reader is at it, so never where a copy hangs.
    pub fn is_released(&self) -> bool {
        self.returned.as_ref().is_none_or(Returned::is_returned)
    }

    /// Waits until [`is_released`](Self::is_released); returns false when `timeout` passed before.
    pub async fn released(&self, timeout: Duration) -> bool {
        match &self.returned {
            Some(returned) => tokio::time::timeout(timeout, returned.wait()).await.is_ok(),
            None => true,
        }
    }
}
