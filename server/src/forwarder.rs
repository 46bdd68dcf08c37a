//! [`Forwarder`]: offers what this process received from another server to further clients, under its own ids.

use crate::{
    Publication, PublishError, Publishable, Publisher, TopicOptions, TopicTaken, server::open_publisher,
    shared::Shared,
};
use std::{sync::Arc, time::Duration};
use tensor_relay_device::HostSource;
use tensor_relay_protocol::{EndReason, Epoch, Manifest, Metadata, Topic, Version};
use tensor_relay_transport::egress::Payload;
use tokio::time::Instant;

/// The time for which a version waits for a slow reader in mode `every`, which is evicted then: meanwhile this process
/// acknowledges nothing to its origin, which waits 10 s by default.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(2);

/// The time for which transfers of a replaced version continue.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// Offers the versions of one topic of another server. The newest stays on offer until the next one, or until the topic
/// [ends](Self::end); a dropped forwarder leaves it there.
#[derive(Debug)]
pub struct Forwarder {
    shared: Arc<Shared>,
    topic: Topic,
    publisher: Option<Publisher>,
    /// The version that was offered last, and when that began.
    begun: Option<((Epoch, Version), Instant)>,
}

/// Why a version cannot be offered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// Another publisher has the topic.
    #[error(transparent)]
    Taken(#[from] TopicTaken),
    /// It cannot be published.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl Forwarder {
    pub(crate) fn new(shared: &Arc<Shared>, topic: Topic) -> Self {
        Self { shared: Arc::clone(shared), topic, publisher: None, begun: None }
    }

    /// Offers a version of the topic, whose payload is in `source`, with the epoch and number that it has at its origin. A
    /// number that was passed already, as after the restored backup of an origin, withdraws the topic first: its clients
    /// subscribe anew.
    ///
    /// # Errors
    /// [`ForwardError`]; then the earlier version stays on offer.
    pub async fn offer(
        &mut self,
        (epoch, version): (Epoch, Version),
        manifest: Arc<Manifest>,
        source: HostSource,
        metadata: Metadata,
    ) -> Result<Publication, ForwardError> {
        let publisher = match self.publisher.take() {
            Some(publisher) if publisher.epoch() == epoch && publisher.next_id().version <= version => {
                publisher
            }
            Some(publisher) if publisher.epoch() == epoch => {
                publisher.withdraw();
                self.open(epoch)?
            }
            earlier => {
                drop(earlier); // A topic has one publisher at a time.
                self.open(epoch)?
            }
        };
        let since = match self.begun {
            Some((id, since)) if id == (epoch, version) => since, // The caller gave up an earlier call.
            _ => Instant::now(),
        };
        self.begun = Some(((epoch, version), since));
        let publisher = self.publisher.insert(publisher);
        publisher.continue_at(version);
        publisher.set_publish_timeout(PUBLISH_TIMEOUT.saturating_sub(since.elapsed()));
        let payload = Payload::new(manifest, Arc::new(source));
        Ok(publisher
            .publish(
                Publishable { payload: payload.into(), returned: None, charge: None, relayed: None },
                metadata,
            )
            .await?)
    }

    /// Ends the topic as it ended at its origin.
    pub fn end(self, reason: EndReason) {
        match self.publisher {
            Some(publisher) if reason == EndReason::TopicEnded => publisher.end(),
            Some(publisher) => publisher.withdraw(),
            None => {}
        }
    }

    fn open(&self, epoch: Epoch) -> Result<Publisher, TopicTaken> {
        // Without bases, and with little time for slow transfers: a receiver needs the memory for its next version.
        let release_timeout = Some(RELEASE_TIMEOUT);
        let options = TopicOptions {
            bases: 0,
            publish_timeout: PUBLISH_TIMEOUT,
            release_timeout,
            ..TopicOptions::default()
        };
        open_publisher(&self.shared, self.topic.clone(), Some(epoch), options)
    }
}
