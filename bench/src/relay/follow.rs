//! The receiving side of a job.

use super::{
    SubscribeArgs, connect,
    job::{Job, Work},
    publish::PUBLISHED_NS,
    snapshot_hash::SnapshotHasher,
    stream_content::StreamContent,
    versions::STREAM_TENSOR,
};
use crate::{
    cells::Cells,
    clock,
    contender::{Begun, Received, SideFacts, print},
    latency::Latencies,
    machine,
    origin::Origin,
};
use anyhow::{Context, Result};
use std::{convert::Infallible, time::Duration};
use tensor_relay_client::{Client, Config, LaneStats, Request, Snapshot, Subscription, Topic};
use tokio::task::spawn_blocking;

/// The deadline for the topic of a round to appear: the harness has an earlier one, whose error says more.
const TOPIC_TIMEOUT: Duration = Duration::from_secs(86_400);

/// A slow reader blocks its only thread nine tenths of the time, so that it does not even read from the network.
const BLOCKED_PERIOD: Duration = Duration::from_millis(90);
const RUNNING_PERIOD: Duration = Duration::from_millis(10);

/// Receives the versions of `job`, round by round, compares them, and prints a line for each round.
///
/// # Errors
/// When the publishing side cannot be reached, or its versions are not the expected ones.
pub(super) async fn follow(args: SubscribeArgs, job: Job) -> Result<()> {
    let base_bytes = match (args.whole, job.has_one_topic()) {
        (true, _) => 0,
        (false, true) => u64::MAX,
        (false, false) => Config::default().base_bytes,
    };
    let config = Config { topic_timeout: TOPIC_TIMEOUT, base_bytes, ..Config::default() };
    let client = connect(&args, config).await?;
    let stream_content = match &job.work {
        Work::Stream { bytes, .. } => Some(StreamContent::new(*bytes)?),
        Work::Version(_) | Work::Steps(_) => None,
    };
    let has_clock = args.clock.is_some() && args.clock == clock::identifier();
    let follower = Follower { client, job, stream_content, has_clock };
    if args.slow {
        return follower.follow_slowly(args.receive.rounds).await;
    }
    let mut subscription = None;
    for round in 0..args.receive.rounds {
        let subscription = match &mut subscription {
            Some(subscription) if follower.job.has_one_topic() => subscription,
            place => place.insert(follower.subscribe(round).await?),
        };
        print(&follower.receive(round, subscription).await?)?;
    }
    follower.client.close().await;
    Ok(())
}

struct Follower {
    client: Client,
    job: Job,
    /// The expected content, if rounds are streams.
    stream_content: Option<StreamContent>,
    /// Whether the clock is that of the publishing side.
    has_clock: bool,
}

impl Follower {
    async fn subscribe(&self, round: u32) -> Result<Subscription> {
        let topic = Topic::new(&self.job.topic(round))?;
        let request = if self.job.every { Request::every(topic) } else { Request::latest(topic) };
        Ok(self.client.subscribe_to(request).await?)
    }

    /// Receives the versions of a round, and measures them.
    async fn receive(&self, round: u32, subscription: &mut Subscription) -> Result<Received> {
        let (begun, before) = (Begun::now(), self.client.lanes());
        if let Some(content) = &self.stream_content {
            let received = self.receive_stream(content, round, subscription).await?;
            let received = Received { cpu_s: Received::since(begun, round, 0).cpu_s, ..received };
            return Ok(self.with_facts(received, &before, None, content.bytes()));
        }
        let snapshot = subscription.next().await?;
        let now_ns = clock::monotonic_ns();
        let (bytes, receipt) = (snapshot.payload_bytes(), snapshot.receipt());
        let received = Received::since(begun, round, bytes);
        if self.job.has_one_topic() {
            return step(received, &snapshot, now_ns);
        }
        let received = received.within(receipt.duration.as_secs_f64());
        let chunks = f64::from(receipt.chunks);
        // Off the executor: hashing gigabytes takes seconds, and the connection's keep-alive must continue.
        let hash = spawn_blocking(move || hash_of(&snapshot)).await?;
        let mut received = self.with_facts(received, &before, Some(hash), bytes);
        received.side.process = received.side.process.map(|process| process.and("chunks", Some(chunks)));
        Ok(received)
    }

    /// Receives versions up to the last one of the round. Each is timed on arrival, and then compared.
    async fn receive_stream(
        &self,
        content: &StreamContent,
        round: u32,
        subscription: &mut Subscription,
    ) -> Result<Received> {
        let (published, mut versions) = (self.job.versions(round), 0);
        let mut latencies = Latencies::new(0);
        let mut first = None;
        loop {
            let snapshot = subscription.next().await?;
            let now_ns = clock::monotonic_ns();
            let begun = *first.get_or_insert_with(Begun::now);
            let tensor = snapshot
                .tensor(STREAM_TENSOR)
                .context("a version came without the stream's tensor")?;
            let stamp = content.verify(&tensor)?;
            latencies.record(now_ns.saturating_sub(stamp.published_ns));
            versions += 1;
            if stamp.index + 1 >= published {
                // Counted by the difference, because no snapshot counts the versions missed before the first one.
                let missed = published.saturating_sub(versions);
                let mut one_way = |percent| latencies.percentile_us(percent).filter(|_| self.has_clock);
                let more = Cells::of([("versions", versions as f64), ("missed", missed as f64)])
                    .and("p50_us", one_way(50.0))
                    .and("p90_us", one_way(90.0))
                    .and("p99_us", one_way(99.0))
                    .and("p999_us", one_way(99.9))
                    .and("max_us", one_way(100.0));
                let received = Received::since(begun, round, versions * content.bytes());
                return Ok(Received { missed_bytes: missed * content.bytes(), more, ..received });
            }
        }
    }

    fn with_facts(
        &self,
        received: Received,
        before: &[LaneStats],
        hash: Option<String>,
        version_bytes: u64,
    ) -> Received {
        let (lanes, first) = (self.client.lanes(), self.client.lane_stats());
        let since = |counter: fn(&LaneStats) -> u64| {
            let sum = |lanes: &[LaneStats]| lanes.iter().map(counter).sum::<u64>();
            // Counters of a new connection start at zero.
            sum(&lanes).saturating_sub(sum(before)) as f64
        };
        let process = Cells::of([
            ("udp_payload_bytes", first.udp_payload_bytes.into()),
            ("round_trip_us", first.rtt.as_secs_f64() * 1e6),
            ("lanes", lanes.len() as f64),
            ("sent_packets", since(|lane| lane.sent_packets)),
            ("lost_packets", since(|lane| lane.lost_packets)),
        ]);
        let process = Some(machine::with_peak_memory(process, version_bytes));
        Received { side: SideFacts { hash, process, machine: Some(Origin::here()) }, ..received }
    }

    /// Takes part in each round as a slow reader. It leaves a round early when its topic is withdrawn.
    async fn follow_slowly(&self, rounds: u32) -> Result<()> {
        let rounds = async {
            for round in 0..rounds {
                let mut subscription = self.subscribe(round).await?;
                // A withdrawn topic is an error here.
                let _ = subscription.next().await;
            }
            std::future::pending().await
        };
        tokio::select! {
            failed = rounds => failed,
            never = block_thread() => match never {},
        }
    }
}

/// The measurements of one of successive versions, which arrived at `now_ns`.
fn step(received: Received, snapshot: &Snapshot, now_ns: u64) -> Result<Received> {
    let published = snapshot.metadata().iter().find(|(key, _)| key == PUBLISHED_NS);
    let published_ns: u64 = published.context("a version has no publish time in its metadata")?.1.parse()?;
    let (receipt, bytes) = (snapshot.receipt(), snapshot.payload_bytes());
    let seconds = now_ns.saturating_sub(published_ns) as f64 / 1e9;
    let more = Cells::of([
        ("payload_bytes", bytes as f64),
        ("wire_bytes", receipt.wire_bytes as f64),
        ("delta_bytes", receipt.codecs.deltas().raw_bytes as f64),
        ("times_smaller", bytes as f64 / receipt.wire_bytes.max(1) as f64),
        ("publish_to_commit_ms", seconds * 1e3),
        ("decoding_ms", receipt.codecs.total().worker_time.as_secs_f64() * 1e3),
    ]);
    Ok(Received { more, ..received }.within(seconds))
}

fn hash_of(snapshot: &Snapshot) -> String {
    let mut hasher = SnapshotHasher::default();
    for (tensor, bytes) in snapshot.tensors() {
        hasher.add(&tensor.name, tensor.dtype, &tensor.shape, &bytes);
    }
    hasher.finish()
}

/// Blocks this process's only thread nine tenths of the time.
async fn block_thread() -> Infallible {
    loop {
        std::thread::sleep(BLOCKED_PERIOD);
        tokio::time::sleep(RUNNING_PERIOD).await;
    }
}
