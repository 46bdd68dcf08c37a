//! `tensor-relay subscribe`: the newest version of a topic, and each that follows.

use crate::{
    args::SubscribeArgs,
    bar,
    bar::Bar,
    exit::{Exit, UsageError},
    signals::Signals,
    ticket, units,
};
use anyhow::Context;
use serde_json::json;
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};
use tensor_relay_client::{
    Client, ClientError, Config, Connector, EndReason, Snapshot, Subscription, SubscriptionError, Ticket,
    Topic, Tuning,
};

/// After how long a topic that is not there is mentioned.
const MENTION_WAIT: Duration = Duration::from_secs(1);

/// How long saying good-bye may take.
const GOOD_BYE: Duration = Duration::from_secs(2);

pub(crate) async fn run(args: SubscribeArgs) -> anyhow::Result<ExitCode> {
    // Before signals are heard: whoever waits for a ticket on stdin can be interrupted as usual.
    let ticket = ticket::read(&args.ticket.ticket, args.topic.as_ref())?;
    let mut signals = Signals::hear()?;
    let topic = chosen_topic(&args, &ticket)?;
    if let Some(dir) = &args.out {
        std::fs::create_dir_all(dir)
            .with_context(|| format!("cannot use the output folder {}", dir.display()))?;
    }
    let config = Config { topic_timeout: args.wait, ..Config::default() };
    let client = tokio::select! {
        client = connect(&ticket, args.ticket.connect_timeout, config) => client?,
        exit = signals.next() => return Ok(exit.into()),
    };
    let done = tokio::select! {
        done = follow(&args, &client, &topic) => done.map(|()| ExitCode::SUCCESS),
        exit = signals.next() => Ok(exit.into()),
    };
    // However it ended, the server is told, or it would keep the session until its idle timeout.
    let _ = tokio::time::timeout(GOOD_BYE, client.close()).await;
    done
}

/// Connects within `timeout`.
pub(crate) async fn connect(
    ticket: &Ticket,
    timeout: Duration,
    config: Config,
) -> Result<Client, ClientError> {
    let connect_timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
    let connector = Connector::new(Tuning { connect_timeout_ms, ..Tuning::default() });
    Client::connect_with(&connector, ticket, config).await
}

fn chosen_topic(args: &SubscribeArgs, ticket: &Ticket) -> anyhow::Result<Topic> {
    let topic = args.topic.as_ref().or_else(|| ticket.topic()).cloned();
    topic.ok_or_else(|| UsageError("the ticket names no topic: say which with --topic NAME".into()).into())
}

async fn follow(args: &SubscribeArgs, client: &Client, topic: &Topic) -> anyhow::Result<()> {
    let mut subscription = client.subscribe(topic).await?;
    let mut bar = Bar::new(!args.quiet && !args.json);
    let mut received = false;
    loop {
        let snapshot = match next(&mut subscription, &mut bar).await {
            Err(SubscriptionError::Ended { reason: EndReason::TopicEnded, .. }) if received => return Ok(()),
            other => other?,
        };
        received = true;
        let saved = match &args.out {
            Some(dir) => Some(save(&snapshot, dir).await?),
            None => None,
        };
        report(args.json, &snapshot, saved.as_deref());
        if args.once {
            return Ok(());
        }
    }
}

async fn next(subscription: &mut Subscription, bar: &mut Bar) -> Result<Snapshot, SubscriptionError> {
    let progress = subscription.progress_reader();
    let topic = subscription.topic().clone();
    let mention = async {
        tokio::time::sleep(MENTION_WAIT).await;
        if progress().version == 0 {
            eprintln!("waiting for topic {topic} to appear");
        }
        std::future::pending().await
    };
    let snapshot = async {
        tokio::select! {
            snapshot = subscription.next() => snapshot,
            never = mention => never,
        }
    };
    bar::while_running(bar, &progress, snapshot).await
}

/// Writes the snapshot to `dir/topic.safetensors`, off the executor. A topic cannot lead out of `dir`: its segments are
/// plain names.
async fn save(snapshot: &Snapshot, dir: &Path) -> anyhow::Result<PathBuf> {
    let path = dir.join(format!("{}.safetensors", snapshot.id().topic));
    let (snapshot, target) = (snapshot.clone(), path.clone());
    tokio::task::spawn_blocking(move || snapshot.save_safetensors(&target)).await??;
    Ok(path)
}

/// One line per version on stdout.
fn report(as_json: bool, snapshot: &Snapshot, saved: Option<&Path>) {
    let (id, receipt) = (snapshot.id(), snapshot.receipt());
    let (tensors, payload_bytes) = (snapshot.manifest().tensors().len(), snapshot.payload_bytes());
    if as_json {
        let metadata: serde_json::Map<_, _> =
            snapshot.metadata().iter().map(|(k, v)| (k.clone(), v.clone().into())).collect();
        let line = json!({
            "event": "committed",
            "topic": id.topic.as_str(),
            "epoch": id.epoch.to_string(),
            "version": id.version.0,
            "tensors": tensors,
            "payload_bytes": payload_bytes,
            "wire_bytes": receipt.wire_bytes,
            "chunks": receipt.chunks,
            "duration_s": receipt.duration.as_secs_f64(),
            "skipped": snapshot.skipped(),
            "metadata": metadata,
            "path": saved,
        });
        return print_line(&line.to_string());
    }
    let skipped = match snapshot.skipped() {
        0 => String::new(),
        count => format!(", {count} skipped before it"),
    };
    let saved = saved.map_or_else(String::new, |path| format!(", saved to {}", path.display()));
    let (size, time) = (units::bytes(payload_bytes), units::time(receipt.duration));
    let rate = units::rate(payload_bytes, receipt.duration);
    print_line(&format!(
        "{} version {}: {tensors} tensors, {size} in {time} ({rate}), verified{skipped}{saved}",
        id.topic, id.version
    ));
}

/// Prints to stdout; a reader that went away ends the process quietly, as it ends other tools.
pub(crate) fn print_line(line: &str) {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
        std::process::exit(Exit::Failed as i32);
    }
}
