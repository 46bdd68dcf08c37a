//! [`SourceWatch`]: sees whether a version that is sent on while it is being received still arrives.

use crate::egress::Arrival;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// The part of the timeout for stalled transfers after which receivers are told that they wait for another server.
const PARTS: u32 = 3;

/// Watches the arrival of one version, for one transfer.
#[derive(Debug)]
pub(super) struct SourceWatch {
    arrival: Arc<Arrival>,
    seen: Option<u32>,
    interval: Duration,
    check_at: Instant,
}

impl SourceWatch {
    /// Watches a transfer that stalls after `stall_timeout`.
    pub(super) fn new(arrival: Arc<Arrival>, stall_timeout: Duration) -> Self {
        let interval = stall_timeout / PARTS;
        Self { seen: arrival.progress(), arrival, interval, check_at: Instant::now() + interval }
    }

    /// Waits until no chunk has arrived for a while, as long as the version is not whole. Cancel safe.
    pub(super) async fn waits(&mut self) {
        while let Some(before) = self.seen {
            tokio::time::sleep_until(self.check_at).await;
            self.check_at = Instant::now() + self.interval;
            self.seen = self.arrival.progress();
            if self.seen == Some(before) {
                return;
            }
        }
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_is_reported_while_nothing_arrives_and_not_afterwards() {
        let (arrival, began) = (Arc::<Arrival>::default(), Instant::now());
        let mut watch = SourceWatch::new(Arc::clone(&arrival), Duration::from_secs(30));
        for seconds in [10, 20] {
            watch.waits().await;
            assert_eq!(began.elapsed(), Duration::from_secs(seconds));
        }
        arrival.handle_verified(0);
        watch.waits().await;
        assert_eq!(began.elapsed(), Duration::from_secs(40), "a chunk came in between");
        arrival.handle_committed();
        let rest = tokio::time::timeout(Duration::from_secs(99), watch.waits()).await;
        assert!(rest.is_err());
    }
}
