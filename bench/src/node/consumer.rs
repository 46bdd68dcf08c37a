//! The worker that subscribes.

use super::{
    driver_link::{DriverLink, send_report},
    generator::STREAM_TENSOR,
    latency::Latencies,
    order::{Consumption, Order, Path, Received, Report, Round, Traffic, Work},
    proof::{self, Proof, ProofHasher},
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

/// The deadline for a topic to appear: that of preparing. The driver gives up earlier.
const TOPIC_TIMEOUT: Duration = Duration::from_secs(3_600);

/// A slow reader's time: nine parts in ten it does nothing at all, not even take what the network brings.
const ASLEEP: Duration = Duration::from_millis(90);
const AWAKE: Duration = Duration::from_millis(10);

/// Receives as `job` says, round by round.
///
/// # Errors
/// When the producer cannot be reached, or sends something else than it should.
pub(super) async fn run(job: Consumption, driver: &mut DriverLink) -> Result<()> {
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
    let mut waiting = None;
    send_report(&Report::Connected)?;
    loop {
        match driver.next_order().await? {
            Order::Prepare(round) => {
                waiting = Some(consumer.subscribe(round).await?);
                send_report(&Report::Waiting { round: round.number })?;
            }
            Order::Begin { round: number, .. } => {
                let waiting = waiting.take().filter(|waiting| waiting.round.number == number);
                let waiting = waiting.context("the driver began a round that it did not prepare")?;
                consumer.take_part(waiting, driver).await?;
            }
            Order::End => break,
            other => bail!("the driver said {other:?} to a consumer"),
        }
    }
    consumer.client.close().await;
    Ok(())
}

struct Consumer {
    client: Client,
    topic: Topic,
    /// The expected versions of a stream.
    stream_content: Option<StreamContent>,
    every: bool,
    slow: bool,
}

/// A round that may begin.
struct Waiting {
    round: Round,
    subscription: Subscription,
    usage: Usage,
    traffic: Traffic,
}

/// Received versions, before they are compared.
struct Got {
    versions: u64,
    missed: u64,
    bytes: u64,
    seconds: f64,
    chunks: u64,
    one_way: Latencies,
    /// The version, if it is not checked yet.
    snapshot: Option<Snapshot>,
}

impl Consumer {
    async fn subscribe(&self, round: Round) -> Result<Waiting> {
        let topic = self.topic.clone();
        let request = if self.every { Request::every(topic) } else { Request::latest(topic) };
        Ok(Waiting {
            round,
            subscription: self.client.subscribe_to(request).await?,
            usage: Usage::now(),
            traffic: traffic_of(&self.client.lanes()),
        })
    }

    /// Receives what the round brings, and reports it; or stops when it is told to.
    async fn take_part(&self, waiting: Waiting, driver: &mut DriverLink) -> Result<()> {
        let Waiting { round, mut subscription, usage, traffic } = waiting;
        let verified = subscription.progress_reader();
        let streamed = AtomicU64::new(0);
        let progress = || match self.stream_content {
            Some(_) => streamed.load(Ordering::Relaxed),
            None => verified().verified_bytes,
        };
        let receive = async {
            let received = self.receive(round, &mut subscription, &streamed);
            if self.slow { never_done(received).await } else { received.await }
        };
        let Some(got) = driver.until_stopped(receive, progress).await? else {
            return send_report(&Report::Stopped { round: round.number, bytes: progress() });
        };
        let (first, lanes) = (self.client.lane_stats(), self.client.lanes());
        let cpu_s = Usage::now().since(usage).total_s();
        let proof = match got.snapshot {
            // Off the executor: it takes seconds for gigabytes, in which the connection must not die.
            Some(snapshot) => Some(tokio::task::spawn_blocking(move || proof_of(&snapshot)).await?),
            None => None,
        };
        send_report(&Report::Received(Received {
            round: round.number,
            versions: got.versions,
            missed: got.missed,
            bytes: got.bytes,
            seconds: got.seconds,
            cpu_s,
            chunks: got.chunks,
            traffic: traffic_of(&lanes).since(traffic),
            path: Path::of(first, lanes.len()),
            proof,
            one_way: got.one_way.buckets(),
        }))
    }

    async fn receive(&self, round: Round, from: &mut Subscription, streamed: &AtomicU64) -> Result<Got> {
        match &self.stream_content {
            Some(stream_content) => receive_stream(stream_content, round, from, streamed).await,
            None => {
                let snapshot = from.next().await?;
                let receipt = snapshot.receipt();
                Ok(Got {
                    versions: 1,
                    missed: 0,
                    bytes: snapshot.payload_bytes(),
                    seconds: receipt.duration.as_secs_f64(),
                    chunks: receipt.chunks.into(),
                    one_way: Latencies::new(),
                    snapshot: Some(snapshot),
                })
            }
        }
    }
}

/// Receives versions up to the last of the round. Each is timed when it is there, and then checked.
async fn receive_stream(
    content: &StreamContent,
    round: Round,
    from: &mut Subscription,
    streamed: &AtomicU64,
) -> Result<Got> {
    let mut got = Got {
        versions: 0,
        missed: 0,
        bytes: 0,
        seconds: 0.0,
        chunks: 0,
        one_way: Latencies::new(),
        snapshot: None,
    };
    let mut first = None;
    loop {
        let snapshot = from.next().await?;
        let now_ns = clock::monotonic_ns();
        let begun = *first.get_or_insert_with(Instant::now);
        let tensor = snapshot
            .tensor(STREAM_TENSOR)
            .context("a version came without the stream's tensor")?;
        let stamp = content.read(&tensor)?;
        got.one_way.record(now_ns.saturating_sub(stamp.published_ns));
        got.versions += 1;
        got.bytes += tensor.len() as u64;
        got.chunks += u64::from(snapshot.receipt().chunks);
        streamed.store(got.bytes, Ordering::Relaxed);
        if stamp.index >= round.versions.saturating_sub(1) {
            // Those before the first one included, of which no snapshot tells.
            got.missed = round.versions.saturating_sub(got.versions);
            got.seconds = begun.elapsed().as_secs_f64();
            return Ok(got);
        }
    }
}

/// Does `work` slowly, and is not done when it is: a slow reader is only in the way until it is told to stop.
async fn never_done<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let idle = async {
        work.await?;
        std::future::pending().await
    };
    tokio::select! {
        failed = idle => failed,
        never = doze() => match never {},
    }
}

/// Takes this process's only thread away from everything else, most of the time.
async fn doze() -> Infallible {
    loop {
        std::thread::sleep(ASLEEP);
        tokio::time::sleep(AWAKE).await;
    }
}

/// The bytes of all `lanes` so far, without ended lanes.
fn traffic_of(lanes: &[LaneStats]) -> Traffic {
    lanes
        .iter()
        .map(|lane| Traffic::from(*lane))
        .fold(Traffic::default(), Traffic::and)
}

fn proof_of(snapshot: &Snapshot) -> Proof {
    let mut hasher = ProofHasher::new();
    for (tensor, bytes) in snapshot.tensors() {
        hasher.add(&tensor.name, tensor.dtype, &tensor.shape, &proof::hash_bytes(&bytes));
    }
    hasher.finish()
}
