//! Compares what a client claims to hold with a version here.

use super::Offered;
use crate::egress::Encoder;
use std::sync::Arc;
use tensor_relay_protocol::{RangeSet, ReadRetry, VersionDigest};
use tokio::time::Instant;

/// Whether these chunks of `version` have this digest. If they cannot be compared, they count as the same: a version
/// that can never be read cannot be sent, and a version that leaves retention is not kept for the comparison.
///
/// Reads those chunks that were never hashed, again and again if that may succeed later.
pub(crate) async fn is_same(
    encoder: &Encoder,
    version: Arc<dyn Offered>,
    chunks: RangeSet,
    digest: VersionDigest,
) -> bool {
    if version.is_stood_for_by(digest) {
        return true;
    }
    let count = version.payload().manifest().chunking().count();
    if chunks.ranges().last().is_some_and(|last| last.end > count) {
        return false;
    }
    let mut retry = ReadRetry::default();
    let compare = async {
        loop {
            match encoder.digest(version.payload(), &chunks).await {
                Ok(found) => return found == digest,
                Err(error) if error.is_final() => return true,
                Err(_) => {
                    let attempt = retry.handle_failed(Instant::now().into_std());
                    tokio::time::sleep_until(attempt.at.into()).await;
                }
            }
        }
    };
    tokio::select! {
        is_same = compare => is_same,
        () = left_retention(&*version) => true,
    }
}

/// Waits until a version leaves retention; never returns if it has left already. Cancel safe.
async fn left_retention(version: &dyn Offered) {
    let mut abort_at = version.abort_at();
    if abort_at.borrow_and_update().is_some() || abort_at.changed().await.is_err() {
        std::future::pending().await
    }
}
