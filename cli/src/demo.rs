//! `tensor-relay demo`: a complete transfer on one machine, without preparation.
//!
//! This process starts two child processes of the same program and reports their progress: a [`producer`] that serves a
//! generated model, and a [`consumer`] that subscribes to it and verifies every byte. The children share only the
//! loopback network.

mod child;
pub(crate) mod consumer;
mod events;
pub(crate) mod producer;
mod report;

use crate::{args::DemoArgs, exit::Exit, output, signals::Signals};
use child::Child;
use events::{ConsumerEvent, ProducerEvent, SmallVersions, Verified};
use report::DemoReport;
use std::time::Duration;
use tensor_relay_bench::program::Program;

/// The minimum size of the model, so that its small tensors fit.
const SIZE_MIN_BYTES: u64 = 1 << 20;

pub(crate) async fn run(args: DemoArgs, program: &Program) -> anyhow::Result<Exit> {
    if args.size < SIZE_MIN_BYTES {
        anyhow::bail!(crate::exit::UsageError("--size must be at least 1MiB".into()));
    }
    let mut signals = Signals::listen()?;
    output::queue_from_now_on(args.json)?;
    tokio::select! {
        result = run_demo(&args, program) => result.map(|()| Exit::Done),
        exit = signals.next() => Ok(exit),
    }
}

async fn run_demo(args: &DemoArgs, program: &Program) -> anyhow::Result<()> {
    let state_dir = tempfile::tempdir()?;
    let timeout = step_timeout(args.size);
    let mut report = DemoReport::begin(args);
    let mut producer = Child::start("producer", program, producer_args(args, state_dir.path()), timeout)?;
    let ProducerEvent::Serving(serving) = producer.next().await? else {
        anyhow::bail!("the producer sent a version before it served one");
    };
    report.serving(&serving, producer.id());
    let mut consumer = Child::start("consumer", program, consumer_args(args, &serving.ticket), timeout)?;
    expect_connected(&mut consumer).await?;
    report.connected(consumer.id());
    for version in 1..=args.versions {
        report.publishing(version);
        producer.send("weights").await?;
        let mut verified = next_verified(&mut consumer, &mut report).await?;
        let ProducerEvent::Sent(sent) = producer.next().await? else {
            anyhow::bail!("the producer served twice");
        };
        verified.cpu_s += sent.cpu_s;
        report.verified(verified);
    }
    producer.send(&format!("small {}", args.small)).await?;
    report.small_versions(next_small_versions(&mut consumer).await?);
    consumer.end().await?;
    producer.end().await?;
    report.end()
}

fn producer_args(args: &DemoArgs, state_dir: &std::path::Path) -> Vec<String> {
    let state_dir = state_dir.to_string_lossy().into_owned();
    let arguments = [
        "demo-producer",
        "--size",
        &args.size.to_string(),
        "--state-dir",
        &state_dir,
        "--codec",
        args.codec.name(),
    ];
    arguments.map(Into::into).into_iter().chain(args.device.arguments()).collect()
}

fn consumer_args(args: &DemoArgs, ticket: &str) -> Vec<String> {
    let (size, versions, small) = (args.size.to_string(), args.versions.to_string(), args.small.to_string());
    let arguments = ["demo-consumer", ticket, "--size", &size, "--versions", &versions, "--small", &small];
    arguments.map(Into::into).into_iter().chain(args.device.arguments()).collect()
}

/// The deadline of one step: a minute, and time in proportion to the size for slow machines.
fn step_timeout(size_bytes: u64) -> Duration {
    Duration::from_secs(60 + size_bytes / 20_000_000)
}

async fn expect_connected(consumer: &mut Child) -> anyhow::Result<()> {
    match consumer.next().await? {
        ConsumerEvent::Connected => Ok(()),
        other => anyhow::bail!("the consumer sent {other:?} before it connected"),
    }
}

async fn next_verified(consumer: &mut Child, report: &mut DemoReport) -> anyhow::Result<Verified> {
    loop {
        match consumer.next().await? {
            ConsumerEvent::Progress(progress) => report.progress(progress),
            ConsumerEvent::Verified(verified) => return Ok(verified),
            other => anyhow::bail!("the consumer sent {other:?} during the transfer of a version"),
        }
    }
}

async fn next_small_versions(consumer: &mut Child) -> anyhow::Result<SmallVersions> {
    match consumer.next().await? {
        ConsumerEvent::SmallVersions(small) => Ok(small),
        other => anyhow::bail!("the consumer sent {other:?} during the transfer of small versions"),
    }
}
