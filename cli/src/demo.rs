//! `tensor-relay demo`: a complete transfer on this machine, without preparation.
//!
//! A [`producer`] serves a generated model, and a [`consumer`] subscribes to it and verifies every byte. Each has a
//! runtime with one thread for the network, as `serve` and `subscribe` have, and they share only the loopback network.

mod consumer;
mod producer;
mod report;

use crate::{args::DemoArgs, bar::Bar, exit::Exit, exit::UsageError, output, signals::Signals};
use anyhow::{Context, bail};
use consumer::Consumer;
use producer::Producer;
use report::Report;
use std::time::Duration;
use tensor_relay_bench::contender::Begun;

/// The minimum size of the model, so that its small tensors fit.
const SIZE_MIN_BYTES: u64 = 1 << 20;

/// The topic of the model.
const WEIGHTS: &str = "weights";

/// The topic of the small tensor whose latency is measured.
const SMALL: &str = "small";

/// The size of the small tensor.
const SMALL_BYTES: u64 = 4 << 10;

/// The metadata key of the time of publishing, in nanoseconds since 1970.
const PUBLISHED_NS: &str = "published_unix_ns";

/// The metadata key of the seed of a version's bytes.
const SEED: &str = "seed";

pub(crate) async fn run(args: DemoArgs) -> anyhow::Result<Exit> {
    if args.size < SIZE_MIN_BYTES {
        bail!(UsageError("--size must be at least 1MiB".into()));
    }
    let mut signals = Signals::listen()?;
    output::queue_from_now_on(args.json)?;
    tokio::select! {
        result = run_demo(&args) => result.map(|()| Exit::Done),
        exit = signals.next() => Ok(exit),
    }
}

async fn run_demo(args: &DemoArgs) -> anyhow::Result<()> {
    let mut report = Report::begin(args);
    let mut bar = Bar::new(!args.json);
    let (mut producer, ticket) = Producer::start(args).await?;
    report.serving(args.size, &ticket);
    let mut consumer = Consumer::connect(args, &ticket).await?;
    report.connected();
    for seed in 1..=args.versions {
        let version = within(args, producer.generate(seed)).await?;
        let begun = Begun::now();
        let transfer =
            async { tokio::try_join!(consumer.receive(&mut bar), producer.publish(version, seed)) };
        let (snapshot, ()) = within(args, transfer).await?;
        let cpu_s = begun.cpu_s();
        report.verified(within(args, consumer.verify(snapshot, args.size, cpu_s)).await?);
    }
    let small =
        async { tokio::try_join!(consumer.receive_small(args.small), producer.publish_small(args.small)) };
    let (small, ()) = within(args, small).await?;
    report.small_versions(&small);
    consumer.close().await;
    producer.close().await;
    report.end(&small)
}

/// The result of one step. Its deadline is a minute, and time in proportion to the size for slow machines.
async fn within<T>(args: &DemoArgs, step: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let timeout = Duration::from_secs(60 + args.size / 20_000_000);
    let result = tokio::time::timeout(timeout, step).await;
    result.with_context(|| format!("nothing happened for {} s", timeout.as_secs()))?
}
