//! The two processes of a run: one publishes versions, the other receives them.

use super::steps::StepsArgs;
use crate::{
    cells::Cells,
    clock,
    contender::{Begun, ReceiveArgs, Received, Sent, ServeArgs, print},
    relay,
};
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};
use tensor_relay_client::{Request, Topic};

const TOPIC: &str = "deltas";

/// The metadata key of the time at which a version was published.
const PUBLISHED_NS: &str = "published_ns";

/// The deadline for the commit of a version.
pub(super) const VERSION_TIMEOUT: Duration = Duration::from_secs(600);

/// Publishes each version when the version before was committed.
///
/// # Errors
/// When versions cannot be generated or read, or are not committed in time.
pub async fn publish(args: ServeArgs, steps: StepsArgs) -> Result<()> {
    let mut steps = steps.open()?;
    let config = tensor_relay_server::Config { base_bytes: u64::MAX, ..Default::default() };
    let (server, ticket) = relay::start(&args, config)?;
    let mut publisher = server.publisher(Topic::new(TOPIC)?)?;
    let _ticket = relay::announce_ready(&server, &ticket)?;
    loop {
        let staging_begun = Instant::now();
        let Some(staged) = steps.next(&server.staging())? else { break };
        let (staging, worker_time_before) =
            (staging_begun.elapsed(), server.stats().codecs.total().worker_time);
        let (begun, bytes) = (Begun::now(), staged.manifest().payload_bytes());
        let metadata = vec![(PUBLISHED_NS.to_owned(), clock::monotonic_ns().to_string())];
        let mut publication = publisher.publish(staged, metadata).await?;
        let committed = publication.committed(1, VERSION_TIMEOUT).await;
        ensure!(committed, "{} was not committed within {} s", publication.id(), VERSION_TIMEOUT.as_secs());
        let encoding = server.stats().codecs.total().worker_time.saturating_sub(worker_time_before);
        let more = Cells::of([("staging_ms", ms(staging)), ("encoding_ms", ms(encoding))]);
        print(&Sent { more, ..Sent::since(begun, bytes) })?;
    }
    // Waits until the harness has read the subscriber's last lines and ends this process.
    std::future::pending().await
}

/// Receives each version, and prints a line for it. With `whole` it keeps no base, so that versions are sent whole.
///
/// # Errors
/// When the publishing end cannot be reached, or a version is missing.
pub async fn follow(args: ReceiveArgs, whole: bool) -> Result<()> {
    let base_bytes = if whole { 0 } else { u64::MAX };
    let config = tensor_relay_client::Config { base_bytes, ..Default::default() };
    let client = relay::connect(&args, config).await?;
    let mut subscription = client.subscribe_to(Request::every(Topic::new(TOPIC)?)).await?;
    for round in 0..args.rounds {
        let begun = Begun::now();
        let snapshot = subscription.next().await?;
        let now_ns = clock::monotonic_ns();
        let published = snapshot.metadata().iter().find(|(key, _)| key == PUBLISHED_NS);
        let published_ns: u64 =
            published.context("a version has no publish time in its metadata")?.1.parse()?;
        let (receipt, bytes) = (snapshot.receipt(), snapshot.payload_bytes());
        let seconds = now_ns.saturating_sub(published_ns) as f64 / 1e9;
        let more = Cells::of([
            ("payload_bytes", bytes as f64),
            ("wire_bytes", receipt.wire_bytes as f64),
            ("delta_bytes", receipt.codecs.deltas().raw_bytes as f64),
            ("times_smaller", bytes as f64 / receipt.wire_bytes.max(1) as f64),
            ("publish_to_commit_ms", seconds * 1e3),
            ("decoding_ms", ms(receipt.codecs.total().worker_time)),
        ]);
        let gb_per_s = bytes as f64 / seconds / 1e9;
        print(&Received { seconds, gb_per_s, more, ..Received::since(begun, round, bytes) })?;
    }
    client.close().await;
    Ok(())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
