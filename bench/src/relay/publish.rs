//! The publishing side of a job.

use super::{
    job::{Job, Pace},
    ready,
    stream_content::Stamp,
    versions::{Prepared, Stream, Versions},
};
use crate::{
    cells::Cells,
    clock,
    contender::{Begun, Ready, Sent, ServeArgs, SideFacts, print},
    latency::Latencies,
    machine,
    origin::Origin,
    server,
};
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};
use tensor_relay_server::{
    Config, Keep, Publication, Publisher, Server, ServerStats, Stage, Topic, TopicOptions, TrafficStats,
    WhenFull,
};
use tokio::{task::spawn_blocking, time::timeout};

/// The metadata key of the time at which one of successive versions was published.
pub(super) const PUBLISHED_NS: &str = "published_ns";

/// The number of retained versions of a stream, for receivers in mode `every`.
const KEEP_VERSIONS: u32 = 64;

/// The deadline for the release of the memory of the last round's version, which was withdrawn. If receivers still hold
/// it then, the next round allocates more.
const FREE_TIMEOUT: Duration = Duration::from_secs(10);

/// The interval at which the publisher checks for released memory, and for receivers.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// The deadline of a commit: the harness has an earlier one, whose error says more.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(86_400);

/// Publishes the versions of `job`, round by round, each when its receivers have subscribed.
///
/// # Errors
/// When it cannot listen, or versions cannot be generated, read, or committed in time.
pub(super) async fn publish(args: ServeArgs, job: Job) -> Result<()> {
    let bases = if job.has_one_topic() { u64::MAX } else { Config::default().base_bytes };
    let config = Config { base_bytes: bases, ..Config::default() };
    let (server, ticket) = server::start(args.listen, Some(args.mtu), config, None)?;
    let mut versions = Versions::open(&job.work)?;
    print(&Ready { clock: clock::identifier(), ..ready(&server, &ticket) })?;
    let mut publisher: Option<Publisher> = None;
    for round in 0.. {
        let topic = Topic::new(&job.topic(round))?;
        if let Some(last) = publisher.take_if(|_| !job.has_one_topic()) {
            last.withdraw();
        }
        let publisher = match &mut publisher {
            Some(publisher) => publisher,
            none => none.insert(server.publisher_with(topic.clone(), None, options(&job))?),
        };
        if !job.has_one_topic() {
            wait_until_free(&server).await;
        }
        let (staging, hold) = (server.staging(), job.hold);
        // Off the executor: generating gigabytes takes seconds, and the keep-alive of connections must continue.
        let prepare = move || {
            if let Versions::Steps(steps) = &mut versions
                && round > 0
            {
                steps.advance();
            }
            let begun = Instant::now();
            let prepared = versions.prepare(&staging, hold, round);
            prepared.map(|prepared| (versions, prepared, begun.elapsed()))
        };
        let (given_back, prepared, staging) = spawn_blocking(prepare).await??;
        versions = given_back;
        let Some(prepared) = prepared else { break };
        let staging_ms = staging.as_secs_f64() * 1e3;
        wait_for_receivers(&server, &topic, job.receivers + u32::from(job.has_slow)).await?;
        let mut sent = RoundPublisher { server: &server, publisher, job: &job }
            .publish(&versions, prepared, round)
            .await?;
        if job.has_one_topic() {
            sent.more = sent.more.and("staging_ms", Some(staging_ms));
        }
        print(&sent)?;
    }
    // The receivers end the run.
    std::future::pending().await
}

fn options(job: &Job) -> TopicOptions {
    match job.every && !job.has_one_topic() {
        true => TopicOptions {
            keep: Keep { versions: KEEP_VERSIONS, ..Keep::default() },
            when_full: WhenFull::Block,
            ..TopicOptions::default()
        },
        false => TopicOptions::default(),
    }
}

/// Waits until the memory of the last round is free, so that the next round reuses it.
async fn wait_until_free(server: &Server) {
    let free = async {
        while server.stats().staged_bytes > 0 {
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    };
    let _ = timeout(FREE_TIMEOUT, free).await;
}

/// Waits until `topic` has this number of subscriptions. The harness has a deadline for it.
async fn wait_for_receivers(server: &Server, topic: &Topic, count: u32) -> Result<()> {
    let status = server.status_reader();
    loop {
        let status = status.read().context("the server has ended")?;
        let subscribed = status.subscribers.iter().filter(|subscriber| subscriber.topic == *topic);
        if subscribed.count() >= count as usize {
            return Ok(());
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

/// Publishes the versions of one round.
struct RoundPublisher<'a> {
    server: &'a Server,
    publisher: &'a mut Publisher,
    job: &'a Job,
}

impl RoundPublisher<'_> {
    /// Publishes what was `prepared`, and waits until all receivers have committed the last version.
    async fn publish(&mut self, source: &Versions, prepared: Prepared, round: u32) -> Result<Sent> {
        let Prepared { version, tensors, bytes, hash } = prepared;
        let (before, begun, versions) = (self.server.stats(), Begun::now(), self.job.versions(round));
        let mut round_trips = Latencies::new(0);
        match (source, version) {
            (Versions::Stream(stream), _) => self.publish_stream(stream, versions, &mut round_trips).await?,
            (_, Some(version)) => {
                let metadata = vec![(PUBLISHED_NS.to_owned(), clock::monotonic_ns().to_string())];
                let publication = self.publisher.publish(version, metadata).await?;
                self.wait_for_commits(publication).await?;
            }
            (_, None) => {}
        }
        let seconds = begun.seconds();
        let mut sent = Sent::since(begun, bytes * versions);
        let after = self.server.stats();
        sent.more = match source {
            Versions::Steps(_) => {
                let worker_time = |stats: &ServerStats| stats.codecs.total().worker_time;
                let encoding = worker_time(&after).saturating_sub(worker_time(&before));
                return Ok(Sent { more: Cells::of([("encoding_ms", encoding.as_secs_f64() * 1e3)]), ..sent });
            }
            Versions::Version(_) => {
                Cells::of([("tensors", tensors as f64), ("version_mib", machine::mib(bytes))])
            }
            Versions::Stream(_) => Cells::of([("versions_per_s", versions as f64 / seconds)])
                .and("committed_p50_us", round_trips.percentile_us(50.0))
                .and("committed_p99_us", round_trips.percentile_us(99.0)),
        };
        let since = |counter: fn(&TrafficStats) -> u64| {
            counter(&after.traffic).saturating_sub(counter(&before.traffic))
        };
        let chunks = after.stages.begun(Stage::Encode) - before.stages.begun(Stage::Encode);
        let process = Cells::of([
            ("sent_packets", since(|traffic| traffic.sent_packets) as f64),
            ("lost_packets", since(|traffic| traffic.lost_packets) as f64),
            ("sent_mib", machine::mib(since(|traffic| traffic.sent_bytes))),
            ("chunks_hashed", chunks as f64),
        ]);
        let process = Some(machine::with_peak_memory(process, bytes));
        let side = SideFacts { hash, process, machine: Some(Origin::here()) };
        Ok(Sent { seconds: Some(seconds), side, ..sent })
    }

    async fn publish_stream(
        &mut self,
        stream: &Stream,
        versions: u64,
        round_trips: &mut Latencies,
    ) -> Result<()> {
        let (begun, staging) = (tokio::time::Instant::now(), self.server.staging());
        for index in 0..versions {
            if let Pace::PerSecond(rate) = stream.pace {
                // A fixed timetable: a producer that is late publishes without a pause until it is on time again.
                let due = begun + Duration::from_secs_f64(index as f64 / f64::from(rate.max(1)));
                tokio::time::sleep_until(due).await;
            }
            let published_ns = clock::monotonic_ns();
            let staged = stream.stage(&staging, Stamp { index, published_ns })?;
            let publication = self.publisher.publish(staged, vec![]).await?;
            if stream.pace == Pace::AfterCommit {
                self.wait_for_commits(publication).await?;
                round_trips.record(clock::monotonic_ns() - published_ns);
            } else if index + 1 == versions {
                self.wait_for_commits(publication).await?;
            }
        }
        Ok(())
    }

    async fn wait_for_commits(&self, mut publication: Publication) -> Result<()> {
        let receivers = self.job.receivers;
        ensure!(
            publication.committed(receivers.into(), COMMIT_TIMEOUT).await,
            "{} of {receivers} receivers committed {} within {} s",
            publication.committed_count(),
            publication.id(),
            COMMIT_TIMEOUT.as_secs()
        );
        Ok(())
    }
}
