//! [`TopicPublisher`]: a topic's publisher, which knows the memory that its versions borrow.

use crate::memory::Places;
use tensor_relay_server::{Metadata, Publication, PublishError, Publishable, Publisher, VersionId};

/// A topic's publisher, and the memory of its borrowed versions.
pub(crate) struct TopicPublisher {
    publisher: Publisher,
    /// The versions that are not released, with their memory.
    borrowed: Vec<(Publication, Places)>,
}

/// Why a version was not published.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotPublished {
    #[error(transparent)]
    Server(#[from] PublishError),
    /// Either the tensor is the same in both versions, or it was written too early.
    #[error(
        "tensor {tensor} lies in memory that {earlier} borrows, and that version stays on offer beside the new one \
         (keep_versions): writing to the memory before the release changes both. Publish from other memory, copy with \
         hold=\"stage\", or withdraw that version first (`publication.withdraw()`)"
    )]
    StillBorrowed { tensor: Box<str>, earlier: VersionId },
}

impl TopicPublisher {
    pub(crate) fn new(publisher: Publisher) -> Self {
        Self { publisher, borrowed: vec![] }
    }

    /// Publishes a version that borrows the memory at `places`.
    pub(crate) async fn publish(
        &mut self,
        version: Publishable,
        metadata: Metadata,
        places: Places,
    ) -> Result<Publication, NotPublished> {
        self.borrowed.retain(|(earlier, _)| !earlier.is_released());
        let payload_bytes = version.manifest().payload_bytes();
        let staying = self
            .borrowed
            .iter()
            .filter(|(earlier, _)| self.publisher.will_retain(earlier, payload_bytes));
        for (earlier, borrowed) in staying {
            if let Some(tensor) = places.shared_with(borrowed) {
                return Err(NotPublished::StillBorrowed {
                    tensor: tensor.into(),
                    earlier: earlier.id().clone(),
                });
            }
        }
        let publication = self.publisher.publish(version, metadata).await?;
        if !places.is_empty() {
            self.borrowed.push((publication.clone(), places));
        }
        Ok(publication)
    }

    pub(crate) fn end(self) {
        self.publisher.end();
    }

    pub(crate) fn withdraw(self) {
        self.publisher.withdraw();
    }
}
