//! The demo's consumer: receives every version and verifies each byte.

use super::{
    events::{self, ConsumerEvent, SmallVersions, Verified},
    producer::{PUBLISHED_NS, SEED, SMALL, SMALL_BYTES},
};
use crate::{
    args::DemoConsumerArgs,
    device,
    exit::Exit,
    subscribe::{self, SLOT_BYTES},
};
use anyhow::{Context, ensure};
use std::time::{Duration, SystemTime};
use tensor_relay_bench::{cpu::Usage, workload::StateDict};
use tensor_relay_client::{Client, Config, Snapshot, Subscription, Ticket, Topic};

/// The interval of progress events.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

/// The deadline for the producer's topics to appear. The parent process times out earlier.
const TOPIC_TIMEOUT: Duration = Duration::from_secs(3_600);

pub(crate) async fn run(args: DemoConsumerArgs) -> anyhow::Result<Exit> {
    let ticket: Ticket = args.ticket.parse()?;
    let topic = ticket.topic().context("the demo's ticket names a topic")?.clone();
    let device = device::open(&args.device, SLOT_BYTES).await?;
    // No bases are retained: every byte changes in every version, so deltas are useless.
    let config = Config { topic_timeout: TOPIC_TIMEOUT, base_bytes: 0, device, ..Config::default() };
    let client = subscribe::connect(&ticket, Duration::from_secs(10), config).await?;
    let mut weights = client.subscribe(&topic).await?;
    let mut small = client.subscribe(&Topic::new(SMALL)?).await?;
    events::write(&ConsumerEvent::Connected)?;
    for _ in 0..args.versions {
        let before = Usage::now();
        let snapshot = next_with_progress(&mut weights).await?;
        let cpu_s = Usage::now().since(before).total_s();
        let verified = Verified { cpu_s, ..verify(&client, snapshot, args.size).await? };
        events::write(&ConsumerEvent::Verified(verified))?;
    }
    let small_versions = receive_small_versions(&mut small, args.small).await?;
    events::write(&ConsumerEvent::SmallVersions(small_versions))?;
    client.close().await;
    Ok(Exit::Done)
}

async fn next_with_progress(subscription: &mut Subscription) -> anyhow::Result<Snapshot> {
    let progress = subscription.progress_reader();
    let mut tick = tokio::time::interval(PROGRESS_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    let next = subscription.next();
    tokio::pin!(next);
    loop {
        tokio::select! {
            snapshot = &mut next => return Ok(snapshot?),
            _ = tick.tick() => events::write(&ConsumerEvent::Progress(progress().into()))?,
        }
    }
}

/// Generates the version's tensors again, on a blocking thread, and compares every byte. Tensors on a device are copied
/// to host memory first.
async fn verify(client: &Client, snapshot: Snapshot, size_bytes: u64) -> anyhow::Result<Verified> {
    let udp_payload_bytes = client.lane_stats().udp_payload_bytes;
    let snapshot = snapshot.to_host().await?;
    let verifying = tokio::task::spawn_blocking(move || {
        let dict = StateDict::new(size_bytes, metadata(&snapshot, SEED)?);
        let mut checked_bytes = 0;
        for (index, spec) in dict.tensors().iter().enumerate() {
            let bytes = snapshot
                .tensor(spec.name.as_str())
                .with_context(|| format!("{} is missing", spec.name))?;
            let expected = dict.byte_len(index);
            ensure!(
                bytes.len() as u64 == expected,
                "{} has {} bytes instead of {expected}",
                spec.name,
                bytes.len()
            );
            dict.check(index, 0, &bytes)?;
            checked_bytes += bytes.len() as u64;
        }
        let (tensors, expected) = (snapshot.manifest().tensors().len(), dict.tensors().len());
        ensure!(tensors == expected, "received {tensors} tensors instead of {expected}");
        let receipt = snapshot.receipt();
        Ok(Verified {
            version: snapshot.id().version.0,
            tensors,
            payload_bytes: snapshot.payload_bytes(),
            wire_bytes: receipt.wire_bytes,
            chunks: receipt.chunks,
            duration_s: receipt.duration.as_secs_f64(),
            cpu_s: 0.0,
            checked_bytes,
            udp_payload_bytes,
        })
    });
    verifying.await?.context("the received model differs from the published one")
}

/// Receives the small versions, and measures the time from publish to receipt of each.
async fn receive_small_versions(
    subscription: &mut Subscription,
    count: u64,
) -> anyhow::Result<SmallVersions> {
    let mut latencies_us = Vec::new();
    let mut skipped = 0;
    loop {
        let snapshot = subscription.next().await?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_nanos() as u64;
        let published: u64 = metadata(&snapshot, PUBLISHED_NS)?;
        latencies_us.push(now.saturating_sub(published) as f64 / 1e3);
        skipped += snapshot.skipped();
        let snapshot = snapshot.to_host().await?;
        let seed: u64 = metadata(&snapshot, SEED)?;
        let bytes = snapshot.tensor(SMALL).context("the small tensor is missing")?;
        ensure!(
            bytes.len() as u64 == SMALL_BYTES && bytes.iter().all(|byte| *byte == seed as u8),
            "a small tensor differs from the published one"
        );
        if snapshot.id().version.0 >= count {
            break;
        }
    }
    latencies_us.sort_by(f64::total_cmp);
    let quantile = |q: f64| latencies_us[((latencies_us.len() - 1) as f64 * q).round() as usize];
    let received = latencies_us.len() as u64;
    Ok(SmallVersions {
        bytes_each: SMALL_BYTES,
        received,
        skipped,
        p50_us: quantile(0.5),
        p99_us: quantile(0.99),
        max_us: quantile(1.0),
    })
}

fn metadata(snapshot: &Snapshot, key: &str) -> anyhow::Result<u64> {
    let value = snapshot.metadata().iter().find(|(name, _)| name == key);
    let (_, value) = value.with_context(|| format!("the version has no metadata {key:?}"))?;
    Ok(value.parse()?)
}
