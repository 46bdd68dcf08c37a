//! `tensor-relay demo`: a complete transfer on one machine, without preparation.
//!
//! This process starts two more of itself, a [`producer`] that serves a generated model and a [`consumer`] that
//! subscribes to it and verifies every byte, and reports their progress. They share nothing but the loopback network,
//! as two containers would.

mod child;
pub(crate) mod consumer;
mod events;
pub(crate) mod producer;
mod report;

use crate::{args::DemoArgs, exit::Exit, signals::Signals};
use child::Child;
use events::{ConsumerEvent, ProducerEvent, SmallVersions, Verified};
use report::DemoReport;
use std::time::Duration;
use tensor_relay_bench::program::Program;

/// The smallest allowed model: below, the small tensors would not fit.
const SIZE_MIN: u64 = 1 << 20;

pub(crate) async fn run(args: DemoArgs, program: &Program) -> anyhow::Result<Exit> {
    if args.size < SIZE_MIN {
        anyhow::bail!(crate::exit::UsageError("the demo's model is at least 1MiB large".into()));
    }
    let mut signals = Signals::hear()?;
    tokio::select! {
        done = play(&args, program) => done.map(|()| Exit::Done),
        exit = signals.next() => Ok(exit),
    }
}

async fn play(args: &DemoArgs, program: &Program) -> anyhow::Result<()> {
    let state_dir = tempfile::tempdir()?;
    let patience = patience(args.size);
    let mut story = DemoReport::begin(args);
    let mut producer = Child::start("producer", program, producer_words(args, state_dir.path()), patience)?;
    let ProducerEvent::Serving(serving) = producer.next().await?;
    story.serving(&serving, producer.id());
    let mut consumer = Child::start("consumer", program, consumer_words(args, &serving.ticket), patience)?;
    expect_connected(&mut consumer).await?;
    story.connected(consumer.id());
    for version in 1..=args.versions {
        story.publishing(version);
        producer.say("weights").await?;
        let verified = next_verified(&mut consumer, &mut story).await?;
        story.verified(verified);
    }
    producer.say(&format!("small {}", args.small)).await?;
    story.smalls(next_smalls(&mut consumer).await?);
    consumer.end().await?;
    producer.end().await?;
    story.end()
}

fn producer_words(args: &DemoArgs, state_dir: &std::path::Path) -> Vec<String> {
    let state_dir = state_dir.to_string_lossy().into_owned();
    let words = [
        "demo-producer",
        "--size",
        &args.size.to_string(),
        "--state-dir",
        &state_dir,
        "--codec",
        args.codec.word(),
    ];
    words.map(Into::into).into_iter().chain(args.device.words()).collect()
}

fn consumer_words(args: &DemoArgs, ticket: &str) -> Vec<String> {
    let (size, versions, small) = (args.size.to_string(), args.versions.to_string(), args.small.to_string());
    let words = ["demo-consumer", ticket, "--size", &size, "--versions", &versions, "--small", &small];
    words.map(Into::into).into_iter().chain(args.device.words()).collect()
}

/// The deadline of one step: a minute, and what a slow machine needs for the size.
fn patience(size_bytes: u64) -> Duration {
    Duration::from_secs(60 + size_bytes / 20_000_000)
}

async fn expect_connected(consumer: &mut Child) -> anyhow::Result<()> {
    match consumer.next().await? {
        ConsumerEvent::Connected => Ok(()),
        other => anyhow::bail!("the consumer said {other:?} before it connected"),
    }
}

async fn next_verified(consumer: &mut Child, story: &mut DemoReport) -> anyhow::Result<Verified> {
    loop {
        match consumer.next().await? {
            ConsumerEvent::Progress(progress) => story.progress(progress),
            ConsumerEvent::Verified(verified) => return Ok(verified),
            other => anyhow::bail!("the consumer said {other:?} while a version was on its way"),
        }
    }
}

async fn next_smalls(consumer: &mut Child) -> anyhow::Result<SmallVersions> {
    match consumer.next().await? {
        ConsumerEvent::SmallVersions(smalls) => Ok(smalls),
        other => anyhow::bail!("the consumer said {other:?} while small versions were on their way"),
    }
}
