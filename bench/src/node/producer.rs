//! The producer: a worker that publishes versions.

use super::{
    driver_link::{DriverLink, send_report},
    generator::{Generated, Generator},
    latency::LatencyHistogram,
    order::{Hold, Order, Pace, Prepared, ProducerJob, Report, Round, Sent, Traffic},
    stream_content::{Stamp, StreamContent},
};
use crate::{clock, cpu::Usage, server};
use anyhow::{Context, Result, bail, ensure};
use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};
use tensor_relay_server::{
    Config, Keep, Publication, Publishable, Publisher, Server, Stage, Staged, Staging, TensorSpec, Topic,
    TopicOptions, WhenFull,
};

/// The topic of all rounds.
const TOPIC: &str = "bench";

/// The number of retained versions of a stream, for readers in mode `every`.
const KEEP_VERSIONS: u32 = 64;

/// The deadline for the release of the memory of the last round's version, which was withdrawn.
const FREE_TIMEOUT: Duration = Duration::from_secs(10);

/// The interval at which the producer checks whether that memory is free.
const FREE_CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// The deadline for the server's shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs the producer described by `job` on the address `listen`, round by round.
///
/// # Errors
/// When it cannot listen, the tensors cannot be generated or read, or consumers do not commit in time; when the driver
/// disconnects or violates the protocol.
pub(super) async fn run(job: ProducerJob, listen: SocketAddr, driver: &mut DriverLink) -> Result<()> {
    let topic = Topic::new(TOPIC)?;
    let (server, ticket) =
        server::start(listen, job.udp_payload_max, Config::default(), Some(topic.clone()))?;
    let generator = Arc::new(Generator::open(&job.work)?);
    let mut producer =
        Producer { server, topic, generator, hold: job.hold, every: job.every, prepared: None };
    send_report(&Report::Serving { ticket: ticket.to_string() })?;
    loop {
        match driver.next_order().await? {
            Order::Prepare(round) => send_report(&Report::Prepared(producer.prepare(round).await?))?,
            Order::Begin { round, commit_timeout_s } => {
                let commit_timeout = Duration::from_secs(commit_timeout_s);
                let sent = driver.until_stopped(producer.publish(round, commit_timeout), || 0).await?;
                send_report(&Report::Sent(sent.context("the driver stopped the producer")?))?;
            }
            Order::End => break,
            other => bail!("the driver sent {other:?} to a producer"),
        }
    }
    drop(producer.prepared);
    producer.server.shutdown(SHUTDOWN_TIMEOUT).await;
    Ok(())
}

struct Producer {
    server: Server,
    topic: Topic,
    generator: Arc<Generator>,
    hold: Hold,
    every: bool,
    prepared: Option<PreparedRound>,
}

/// A prepared round. It is kept after the round, because its publisher keeps the last version available.
struct PreparedRound {
    round: Round,
    publisher: Publisher,
    /// The version, unless rounds are streams; `None` once it is published.
    version: Option<Publishable>,
}

impl Producer {
    /// Withdraws the versions of the last round, and generates the version of `round`. Those of a stream are generated
    /// when they are published.
    async fn prepare(&mut self, round: Round) -> Result<Prepared> {
        if let Some(last) = self.prepared.take() {
            last.publisher.withdraw();
            self.wait_until_free().await;
        }
        let publisher = self.server.publisher_with(self.topic.clone(), None, self.options())?;
        let (generator, staging, hold) = (Arc::clone(&self.generator), self.server.staging(), self.hold);
        // Off the executor: generating gigabytes takes seconds, and the keep-alive of connections must continue.
        let generated = tokio::task::spawn_blocking(move || generator.generate(&staging, hold, round.number));
        let Generated { version, prepared } = generated.await??;
        self.prepared = Some(PreparedRound { round, publisher, version });
        Ok(prepared)
    }

    fn options(&self) -> TopicOptions {
        match self.every {
            true => TopicOptions {
                keep: Keep { versions: KEEP_VERSIONS, ..Keep::default() },
                when_full: WhenFull::Block,
                ..TopicOptions::default()
            },
            false => TopicOptions::default(),
        }
    }

    /// Waits until the memory of the last round is free, so that the next round reuses it. If readers still hold it at
    /// the deadline, the next round allocates more.
    async fn wait_until_free(&self) {
        let free = async {
            while self.server.stats().staged_bytes > 0 {
                tokio::time::sleep(FREE_CHECK_INTERVAL).await;
            }
        };
        let _ = tokio::time::timeout(FREE_TIMEOUT, free).await;
    }

    /// Publishes the prepared round, and waits until all readers have committed its last version.
    async fn publish(&mut self, round_number: u32, commit_timeout: Duration) -> Result<Sent> {
        let prepared = self.prepared.as_mut().filter(|prepared| prepared.round.number == round_number);
        let PreparedRound { round, publisher, version } =
            prepared.context("the driver began a round that it did not prepare")?;
        let before = Counters::of(&self.server);
        let mut round_trips = LatencyHistogram::new();
        let begun = Instant::now();
        match &*self.generator {
            Generator::Version(_) => {
                let version = version.take().context("the driver began a round twice")?;
                let publication = publisher.publish(version, vec![]).await?;
                wait_for_commits(publication, round.readers, commit_timeout).await?;
            }
            Generator::Stream { content, spec, pace } => {
                let mut stream = Stream { content, spec, staging: self.server.staging(), publisher };
                stream.publish_all(*round, *pace, commit_timeout, &mut round_trips).await?;
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        let after = Counters::of(&self.server);
        Ok(Sent {
            round: round_number,
            versions: round.versions,
            seconds,
            cpu_s: after.usage.since(before.usage).total_s(),
            traffic: after.traffic.since(before.traffic),
            chunks_hashed: after.hashed - before.hashed,
            round_trips: round_trips.buckets(),
        })
    }
}

/// The counters that a round increases.
struct Counters {
    usage: Usage,
    traffic: Traffic,
    hashed: u64,
}

impl Counters {
    fn of(server: &Server) -> Self {
        let stats = server.stats();
        Self { usage: Usage::now(), traffic: stats.traffic.into(), hashed: stats.stages.begun(Stage::Encode) }
    }
}

/// Generates and publishes the versions of a stream.
struct Stream<'a> {
    content: &'a StreamContent,
    spec: &'a TensorSpec,
    staging: Staging,
    publisher: &'a mut Publisher,
}

impl Stream<'_> {
    async fn publish_all(
        &mut self,
        round: Round,
        pace: Pace,
        commit_timeout: Duration,
        round_trips: &mut LatencyHistogram,
    ) -> Result<()> {
        let begun = tokio::time::Instant::now();
        let mut last = None;
        for index in 0..round.versions {
            if let Pace::PerSecond(rate) = pace {
                // A fixed timetable: a producer that is late publishes without a pause until it is on time again.
                let due = begun + Duration::from_secs_f64(index as f64 / f64::from(rate.max(1)));
                tokio::time::sleep_until(due).await;
            }
            let published_ns = clock::monotonic_ns();
            let publication = self.publish_one(Stamp { index, published_ns }).await?;
            if pace == Pace::AfterCommit {
                wait_for_commits(publication, round.readers, commit_timeout).await?;
                round_trips.record(clock::monotonic_ns() - published_ns);
            } else {
                last = Some(publication);
            }
        }
        match last {
            Some(publication) => wait_for_commits(publication, round.readers, commit_timeout).await,
            None => Ok(()),
        }
    }

    async fn publish_one(&mut self, stamp: Stamp) -> Result<Publication> {
        let staged = Staged::new::<Infallible>(&self.staging, vec![self.spec.clone()], vec![], |_, out| {
            self.content.write(stamp, out);
            Ok(())
        })?;
        Ok(self.publisher.publish(staged, vec![]).await?)
    }
}

async fn wait_for_commits(
    mut publication: Publication,
    readers: u32,
    commit_timeout: Duration,
) -> Result<()> {
    let committed = publication.committed(readers.into(), commit_timeout).await;
    ensure!(
        committed,
        "{} of {readers} consumers committed {} within {} s",
        publication.committed_count(),
        publication.id(),
        commit_timeout.as_secs()
    );
    Ok(())
}
