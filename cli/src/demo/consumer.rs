//! The demo's consumer: receives every version and verifies each byte.

use super::{PUBLISHED_NS, SEED, SMALL, SMALL_BYTES};
use crate::{
    args::DemoArgs,
    bar::{self, Bar},
    device,
    subscribe::SLOT_BYTES,
};
use anyhow::{Context, ensure};
use serde::Serialize;
use std::time::{Duration, SystemTime};
use tensor_relay_bench::workload::StateDict;
use tensor_relay_client::{Client, Config, Snapshot, Subscription, Ticket, Topic};

/// The deadline for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The deadline for the producer's topics to appear. The steps of the demo time out earlier.
const TOPIC_TIMEOUT: Duration = Duration::from_secs(3_600);

/// A version was received and verified.
#[derive(Debug, Serialize)]
pub(super) struct Verified {
    pub(super) version: u64,
    pub(super) tensors: usize,
    pub(super) payload_bytes: u64,
    pub(super) wire_bytes: u64,
    pub(super) chunks: u32,
    pub(super) duration_s: f64,
    /// The CPU time of the transfer, at both ends.
    pub(super) cpu_s: f64,
    pub(super) checked_bytes: u64,
    pub(super) udp_payload_bytes: u16,
}

/// The small versions were received.
#[derive(Debug, Serialize)]
pub(super) struct SmallVersions {
    pub(super) bytes_each: u64,
    pub(super) received: u64,
    pub(super) skipped: u64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) max_us: f64,
}

pub(super) struct Consumer {
    client: Client,
    weights: Subscription,
    small: Subscription,
}

impl Consumer {
    pub(super) async fn connect(args: &DemoArgs, ticket: &Ticket) -> anyhow::Result<Self> {
        let topic = ticket.topic().context("the demo's ticket names a topic")?;
        let device = device::open(&args.device, SLOT_BYTES).await?;
        // No bases are retained: every byte changes in every version, so deltas are useless.
        let config = Config { topic_timeout: TOPIC_TIMEOUT, base_bytes: 0, device, ..Config::default() };
        let client = Client::connect_within(CONNECT_TIMEOUT, ticket, config).await?;
        let weights = client.subscribe(topic).await?;
        let small = client.subscribe(&Topic::new(SMALL)?).await?;
        Ok(Self { client, weights, small })
    }

    /// Receives the next version of the model, with its progress on `bar`.
    pub(super) async fn receive(&mut self, bar: &mut Bar) -> anyhow::Result<Snapshot> {
        let progress = self.weights.progress_reader();
        Ok(bar::while_running(bar, &progress, self.weights.next()).await?)
    }

    /// Generates the version's tensors again, on a blocking thread, and compares every byte. Tensors on a device are
    /// copied to host memory first.
    pub(super) async fn verify(
        &self,
        snapshot: Snapshot,
        size_bytes: u64,
        cpu_s: f64,
    ) -> anyhow::Result<Verified> {
        let udp_payload_bytes = self.client.lane_stats().udp_payload_bytes;
        let snapshot = snapshot.to_host().await?;
        let verifying = tokio::task::spawn_blocking(move || {
            let dict = StateDict::new(size_bytes, metadata(&snapshot, SEED)?);
            let mut checked_bytes = 0;
            for (index, spec) in dict.tensors().iter().enumerate() {
                let (name, expected) = (&spec.name, dict.byte_len(index));
                let bytes = snapshot.tensor(name.as_str()).with_context(|| format!("{name} is missing"))?;
                let len = bytes.len() as u64;
                ensure!(len == expected, "{name} has {len} bytes instead of {expected}");
                dict.check(index, &bytes)?;
                checked_bytes += len;
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
                cpu_s,
                checked_bytes,
                udp_payload_bytes,
            })
        });
        verifying.await?.context("the received model differs from the published one")
    }

    /// Receives the small versions, and measures the time from publish to receipt of each.
    pub(super) async fn receive_small(&mut self, count: u64) -> anyhow::Result<SmallVersions> {
        let (mut latencies_us, mut skipped) = (Vec::new(), 0);
        loop {
            let snapshot = self.small.next().await?;
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_nanos() as u64;
            latencies_us.push(now.saturating_sub(metadata(&snapshot, PUBLISHED_NS)?) as f64 / 1e3);
            skipped += snapshot.skipped();
            let snapshot = snapshot.to_host().await?;
            let seed = metadata(&snapshot, SEED)? as u8;
            let bytes = snapshot.tensor(SMALL).context("the small tensor is missing")?;
            let is_equal = bytes.len() as u64 == SMALL_BYTES && bytes.iter().all(|byte| *byte == seed);
            ensure!(is_equal, "a small tensor differs from the published one");
            if snapshot.id().version.0 >= count {
                break;
            }
        }
        latencies_us.sort_by(f64::total_cmp);
        let quantile = |q: f64| latencies_us[((latencies_us.len() - 1) as f64 * q).round() as usize];
        Ok(SmallVersions {
            bytes_each: SMALL_BYTES,
            received: latencies_us.len() as u64,
            skipped,
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            max_us: quantile(1.0),
        })
    }

    pub(super) async fn close(self) {
        self.client.close().await;
    }
}

fn metadata(snapshot: &Snapshot, key: &str) -> anyhow::Result<u64> {
    let value = snapshot.metadata().iter().find(|(name, _)| name == key);
    let (_, value) = value.with_context(|| format!("the version has no metadata {key:?}"))?;
    Ok(value.parse()?)
}
