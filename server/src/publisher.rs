//! The producer's handles: a publisher per topic, a publication per version.

use crate::{
    Staged,
    catalogue::{Offer, Retained},
};
use std::{sync::Arc, time::Duration};
use tensor_relay_protocol::{Epoch, MessageError, Metadata, Topic, Version, VersionId, check_metadata};
use tokio::sync::watch;

/// Puts versions into one topic. There is one per topic and server.
///
/// When it is dropped, the newest version stays on offer; [`end`](Self::end) says that nothing will follow.
#[derive(Debug)]
pub struct Publisher {
    topic: Topic,
    epoch: Epoch,
    next: Version,
    offer: watch::Sender<Offer>,
}

/// The topic has a publisher in this server, or had one: what it published last is still on offer.
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
        /// How much may be.
        max: usize,
    },
}

impl Publisher {
    pub(crate) fn new(topic: Topic, epoch: Epoch, offer: watch::Sender<Offer>) -> Self {
        Self { topic, epoch, next: Version::FIRST, offer }
    }

    /// Which topic.
    pub fn topic(&self) -> &Topic {
        &self.topic
    }

    /// Makes `staged` the newest version, visible to every subscriber at once; the one before it is let go as soon as
    /// no transfer needs it. Never waits for subscribers.
    ///
    /// # Errors
    /// [`PublishError`] when there is too much metadata.
    pub fn publish(&mut self, staged: Staged, metadata: Metadata) -> Result<Publication, PublishError> {
        check_metadata(&metadata).map_err(|error| match error {
            MessageError::TooLarge { bytes, max, .. } => PublishError::TooMuchMetadata { bytes, max },
            other => unreachable!("metadata can only be too large: {other}"),
        })?;
        let id = VersionId { topic: self.topic.clone(), epoch: self.epoch, version: self.next };
        let (committed, watch) = watch::channel(0);
        let retained =
            Arc::new(Retained { id: id.clone(), payload: staged.into_payload(), metadata, committed });
        self.next = self.next.next();
        self.offer.send_modify(|offer| offer.newest = Some(retained));
        Ok(Publication { id, committed: watch })
    }

    /// Says that nothing will follow: subscriptions end once they have the newest version.
    pub fn end(self) {
        self.offer.send_modify(|offer| offer.ended = true);
    }
}

/// What becomes of one published version.
#[derive(Debug, Clone)]
pub struct Publication {
    id: VersionId,
    committed: watch::Receiver<u64>,
}

impl Publication {
    /// Which version.
    pub fn id(&self) -> &VersionId {
        &self.id
    }

    /// How many subscribers have committed it so far.
    pub fn committed_count(&self) -> u64 {
        *self.committed.borrow()
    }

    /// Waits until `count` subscribers committed it; returns false when `timeout` passed before, or when it was replaced
    /// and can reach no more of them.
    pub async fn committed(&mut self, count: u64, timeout: Duration) -> bool {
        let reached = self.committed.wait_for(|committed| *committed >= count);
        matches!(tokio::time::timeout(timeout, reached).await, Ok(Ok(_)))
    }
}
