//! The consumer: a worker that subscribes to the producer's topic.

use super::{
    driver_link::{DriverLink, send_report},
    generator::STREAM_TENSOR,
    latency::LatencyHistogram,
    order::{ConsumerJob, Order, PathStats, Received, Report, Round, Traffic, Work},
    snapshot_hash::{self, SnapshotHash, SnapshotHasher},
    stream_content::StreamContent,
};
use crate::{clock, cpu::Usage};
use anyhow::{Context, Result, bail};
use std::{
    convert::Infallible,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};
use tensor_relay_client::{
    Client, Config, Connector, LaneStats, Lanes, Request, Snapshot, Subscription, Ticket, Topic, Tuning,
};

/// The deadline for the producer's topic to appear: longer than the driver usually waits, because the driver's error
/// says more.
const TOPIC_TIMEOUT: Duration = Duration::from_secs(3_600);

/// A slow reader blocks its only thread nine tenths of the time, so that it does not even read from the network.
const BLOCKED_PERIOD: Duration = Duration::from_millis(90);
const RUNNING_PERIOD: Duration = Duration::from_millis(10);

/// Runs the consumer described by `job`, round by round.
///
/// # Errors
/// When the producer cannot be reached, or its versions are not the expected ones; when the driver disconnects or
/// violates the protocol.
pub(super) async fn run(job: ConsumerJob, driver: &mut DriverLink) -> Result<()> {
    let ticket: Ticket = job.ticket.parse()?;
    let topic = ticket.topic().context("the driver's ticket names no topic")?.clone();
    let tuning = Tuning { udp_payload_max: job.udp_payload_max, ..Tuning::default() };
    let lanes = Lanes::Fixed(job.lanes);
    let config = Config { topic_timeout: TOPIC_TIMEOUT, lanes, ..Config::default() };
    let client = Client::connect_with(&Connector::new(tuning), &ticket, config).await?;
    let stream_content = match &job.work {
        Work::Stream { bytes, .. } => Some(StreamContent::new(*bytes)?),
        Work::Version(_) => None,
    };
    let consumer = Consumer { client, topic, stream_content, every: job.every, slow: job.slow };
    let mut prepared: Option<PreparedRound> = None;
    send_report(&Report::Connected)?;
    loop {
        match driver.next_order().await? {
            Order::Prepare(round) => {
                prepared = Some(consumer.subscribe(round).await?);
                send_report(&Report::Subscribed { round: round.number })?;
            }
            Order::Begin { round: number, .. } => {
                let prepared = prepared.take().filter(|prepared| prepared.round.number == number);
                let prepared = prepared.context("the driver began a round that it did not prepare")?;
                consumer.run_round(prepared, driver).await?;
            }
            Order::End => break,
            other => bail!("the driver sent {other:?} to a consumer"),
        }
    }
    consumer.client.close().await;
    Ok(())
}

struct Consumer {
    client: Client,
    topic: Topic,
    /// The expected content, if rounds are streams.
    stream_content: Option<StreamContent>,
    every: bool,
    slow: bool,
}

/// A prepared round. `usage` and `traffic` are the CPU time and the traffic before it.
struct PreparedRound {
    round: Round,
    subscription: Subscription,
    usage: Usage,
    traffic: Traffic,
}

/// The measurements of a round.
struct Measured {
    versions: u64,
    missed: u64,
    bytes: u64,
    seconds: f64,
    chunks: u64,
    one_way: LatencyHistogram,
    /// The received version, yet to be compared; `None` for a stream, whose versions were compared on arrival.
    snapshot: Option<Snapshot>,
}

impl Consumer {
    async fn subscribe(&self, round: Round) -> Result<PreparedRound> {
        let topic = self.topic.clone();
        let request = if self.every { Request::every(topic) } else { Request::latest(topic) };
        Ok(PreparedRound {
            round,
            subscription: self.client.subscribe_to(request).await?,
            usage: Usage::now(),
            traffic: traffic_of(&self.client.lanes()),
        })
    }

    /// Receives the versions of the round and reports the measurements, or stops on the driver's order.
    async fn run_round(&self, prepared: PreparedRound, driver: &mut DriverLink) -> Result<()> {
        let PreparedRound { round, mut subscription, usage, traffic } = prepared;
        let read_progress = subscription.progress_reader();
        let stream_bytes = AtomicU64::new(0);
        let progress = || match self.stream_content {
            Some(_) => stream_bytes.load(Ordering::Relaxed),
            None => read_progress().verified_bytes,
        };
        let receive = async {
            let received = self.receive(round, &mut subscription, &stream_bytes);
            if self.slow { receive_slowly(received).await } else { received.await }
        };
        let Some(measured) = driver.until_stopped(receive, progress).await? else {
            return send_report(&Report::Stopped { round: round.number, bytes: progress() });
        };
        let (first_lane, lanes) = (self.client.lane_stats(), self.client.lanes());
        let cpu_s = Usage::now().since(usage).total_s();
        let snapshot_hash = match measured.snapshot {
            // Off the executor: hashing gigabytes takes seconds, and the connection's keep-alive must continue.
            Some(snapshot) => Some(tokio::task::spawn_blocking(move || snapshot_hash_of(&snapshot)).await?),
            None => None,
        };
        send_report(&Report::Received(Received {
            round: round.number,
            versions: measured.versions,
            missed: measured.missed,
            bytes: measured.bytes,
            seconds: measured.seconds,
            cpu_s,
            chunks: measured.chunks,
            traffic: traffic_of(&lanes).since(traffic),
            path: PathStats::of(first_lane, lanes.len()),
            snapshot_hash,
            one_way: measured.one_way.buckets(),
        }))
    }

    async fn receive(
        &self,
        round: Round,
        subscription: &mut Subscription,
        stream_bytes: &AtomicU64,
    ) -> Result<Measured> {
        match &self.stream_content {
            Some(content) => receive_stream(content, round, subscription, stream_bytes).await,
            None => {
                let snapshot = subscription.next().await?;
                let receipt = snapshot.receipt();
                Ok(Measured {
                    versions: 1,
                    missed: 0,
                    bytes: snapshot.payload_bytes(),
                    seconds: receipt.duration.as_secs_f64(),
                    chunks: receipt.chunks.into(),
                    one_way: LatencyHistogram::new(),
                    snapshot: Some(snapshot),
                })
            }
        }
    }
}

/// Receives versions up to the last one of the round. Each is timed on arrival, and then compared.
async fn receive_stream(
    content: &StreamContent,
    round: Round,
    subscription: &mut Subscription,
    stream_bytes: &AtomicU64,
) -> Result<Measured> {
    let mut measured = Measured {
        versions: 0,
        missed: 0,
        bytes: 0,
        seconds: 0.0,
        chunks: 0,
        one_way: LatencyHistogram::new(),
        snapshot: None,
    };
    let mut first = None;
    loop {
        let snapshot = subscription.next().await?;
        let now_ns = clock::monotonic_ns();
        let begun = *first.get_or_insert_with(Instant::now);
        let tensor = snapshot
            .tensor(STREAM_TENSOR)
            .context("a version came without the stream's tensor")?;
        let stamp = content.verify(&tensor)?;
        measured.one_way.record(now_ns.saturating_sub(stamp.published_ns));
        measured.versions += 1;
        measured.bytes += tensor.len() as u64;
        measured.chunks += u64::from(snapshot.receipt().chunks);
        stream_bytes.store(measured.bytes, Ordering::Relaxed);
        if stamp.index >= round.versions.saturating_sub(1) {
            // Counted by the difference, because no snapshot counts the versions missed before the first one.
            measured.missed = round.versions.saturating_sub(measured.versions);
            measured.seconds = begun.elapsed().as_secs_f64();
            return Ok(measured);
        }
    }
}

/// Runs `work` slowly, and does not return when it succeeds: a slow reader stays until the driver stops it. Only errors
/// are returned.
async fn receive_slowly<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let work_then_wait = async {
        work.await?;
        std::future::pending().await
    };
    tokio::select! {
        failed = work_then_wait => failed,
        never = block_thread() => match never {},
    }
}

/// Blocks this process's only thread nine tenths of the time.
async fn block_thread() -> Infallible {
    loop {
        std::thread::sleep(BLOCKED_PERIOD);
        tokio::time::sleep(RUNNING_PERIOD).await;
    }
}

/// The packets and bytes of all open `lanes` so far.
fn traffic_of(lanes: &[LaneStats]) -> Traffic {
    lanes
        .iter()
        .map(|lane| Traffic::from(*lane))
        .fold(Traffic::default(), Traffic::and)
}

fn snapshot_hash_of(snapshot: &Snapshot) -> SnapshotHash {
    let mut hasher = SnapshotHasher::new();
    for (tensor, bytes) in snapshot.tensors() {
        hasher.add(&tensor.name, tensor.dtype, &tensor.shape, &snapshot_hash::hash_bytes(&bytes));
    }
    hasher.finish()
}
