//! [`Publication`]: a version published through a server on the same machine.

use super::producer::MessageBatch;
use std::{sync::Arc, time::Duration};
use tensor_relay_protocol::{
    VersionId,
    sidecar::{MemoryKind, ProducerMessage, Progress, PublicationId, encode_producer},
};
use tokio::sync::{mpsc, watch};

/// The connection ended, so the state of a version is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the state of {id} is unknown: {why}")]
pub struct ConnectionLost {
    /// The version.
    pub id: Box<VersionId>,
    /// Why the connection ended.
    pub why: Arc<str>,
}

/// A handle to a published version, like [`crate::Publication`] within the server's process. Holds none of its memory.
#[derive(Debug, Clone)]
pub struct Publication {
    pub(super) id: VersionId,
    pub(super) publication_id: PublicationId,
    pub(super) progress: watch::Receiver<Progress>,
    /// Why the connection ended, once it has.
    pub(super) lost: watch::Receiver<Option<Arc<str>>>,
    pub(super) outgoing: mpsc::UnboundedSender<MessageBatch>,
    pub(super) path: MemoryKind,
    pub(super) reason: Arc<str>,
    pub(super) payload_bytes: u64,
    pub(super) copied_bytes: u64,
}

impl Publication {
    /// The version.
    pub fn id(&self) -> &VersionId {
        &self.id
    }

    /// The kind of memory of its tensors.
    pub fn path(&self) -> MemoryKind {
        self.path
    }

    /// The reason for this kind of memory, as text.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// The size of its tensors, with the padding between them.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// The number of bytes copied to publish it. Copied tensors may be written again.
    pub fn copied_bytes(&self) -> u64 {
        self.copied_bytes
    }

    /// The number of consumers that committed it, as last reported.
    pub fn committed_count(&self) -> u64 {
        self.progress.borrow().committed
    }

    /// Whether the server has released its memory, as last reported.
    pub fn is_released(&self) -> bool {
        self.progress.borrow().is_released
    }

    /// Waits until `count` consumers committed it. Returns false when `timeout` passes first, or when the version was
    /// released and can reach no more subscribers.
    ///
    /// # Errors
    /// [`ConnectionLost`] if the connection ends first.
    pub async fn committed(&mut self, count: u64, timeout: Duration) -> Result<bool, ConnectionLost> {
        let is_known = self
            .wait(timeout, |progress| progress.committed >= count || progress.left_retention)
            .await?;
        Ok(is_known && self.committed_count() >= count)
    }

    /// The number of consumers that loaded it, as last reported.
    pub fn loaded_count(&self) -> u64 {
        self.progress.borrow().loaded
    }

    /// Waits until `count` consumers loaded it, by their own report. Returns false when `timeout` passes first, or when
    /// the version was released: then the server reports no more loads.
    ///
    /// # Errors
    /// [`ConnectionLost`] if the connection ends first.
    pub async fn loaded(&mut self, count: u64, timeout: Duration) -> Result<bool, ConnectionLost> {
        let is_known = self
            .wait(timeout, |progress| progress.loaded >= count || progress.is_released)
            .await?;
        Ok(is_known && self.loaded_count() >= count)
    }

    /// Whether it left retention and no transfers remain: no more subscribers can commit it.
    pub fn has_ended(&self) -> bool {
        self.progress.borrow().left_retention
    }

    /// Waits until [`is_released`](Self::is_released); returns false when `timeout` passes first. Tensors shared in
    /// place (`cuda_ipc`) must not be written before; copied ones need not wait.
    ///
    /// # Errors
    /// [`ConnectionLost`] if the connection ends first.
    pub async fn released(&mut self, timeout: Duration) -> Result<bool, ConnectionLost> {
        self.wait(timeout, |progress| progress.is_released).await
    }

    /// Withdraws the version. Transfers in progress may finish. Has no effect once the connection has ended.
    pub fn withdraw(&self) {
        let message = encode_producer(ProducerMessage::Withdraw(self.publication_id));
        let _ = self.outgoing.send(vec![(message, None)]); // Fails once the connection has ended.
    }

    /// Waits until `reached`; returns false when `timeout` passes first.
    async fn wait(
        &mut self,
        timeout: Duration,
        reached: impl Fn(&Progress) -> bool,
    ) -> Result<bool, ConnectionLost> {
        let (progress, lost) = (&mut self.progress, &mut self.lost);
        let waited = tokio::time::timeout(timeout, async {
            tokio::select! {
                biased; // Progress received before the end is reported first.
                waited = progress.wait_for(&reached) => waited.is_ok(),
                _ = lost.wait_for(Option::is_some) => false,
            }
        });
        match waited.await {
            Ok(true) => Ok(true),
            Err(_) => Ok(false),
            Ok(false) => {
                let why = lost.borrow().clone().unwrap_or_else(|| "the connection ended".into());
                Err(ConnectionLost { id: Box::new(self.id.clone()), why })
            }
        }
    }
}
