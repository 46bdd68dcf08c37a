//! `tensor-relay subscribe`: receives the versions of a topic, or of all that match.

mod follow;
pub(crate) mod hook;
mod report;

use crate::{
    admin::{Bound, Consumer, page_url},
    args::SubscribeArgs,
    device,
    exit::{Exit, UsageError, message_of},
    signals::Signals,
    ticket,
};
use anyhow::{Context, bail};
use follow::Follow;
use std::{sync::Arc, time::Duration};
use tensor_relay_client::{
    Client, ClientError, Config, Connector, EndReason, Glob, Mode, Start, SubscriptionError, Ticket, Topic,
    Tuning, VersionId,
};
use tokio::task::JoinSet;

/// The size of slots for chunks on their way to a GPU: the default chunk size of servers. A larger chunk passes through
/// several.
pub(crate) const SLOT_BYTES: u32 = 4 << 20;

/// How long saying good-bye may take.
const GOOD_BYE: Duration = Duration::from_secs(2);

pub(crate) async fn run(args: SubscribeArgs) -> anyhow::Result<Exit> {
    refuse_start(&args)?;
    // Before signals are heard: whoever waits for a ticket on stdin can be interrupted as usual.
    let named = args.topic.as_ref().and_then(|glob| Topic::new(glob.as_str()).ok());
    let ticket = match &args.topic {
        Some(_) if named.is_none() => ticket::read_any(&args.ticket.ticket)?,
        _ => ticket::read(&args.ticket.ticket, named.as_ref())?,
    };
    let mut signals = Signals::hear()?.with_hangup()?;
    let wanted = SubscribeTarget::new(&args, &ticket)?;
    if let Some(dir) = &args.out {
        std::fs::create_dir_all(dir)
            .with_context(|| format!("cannot use the output folder {}", dir.display()))?;
    }
    let consumer = Consumer::new(args.ready.ready_within);
    let bound = Bound::new(&args.admin, false)?;
    let admin_port = bound.map(|bound| bound.serve(consumer.clone())).transpose()?;
    if let Some(admin_port) = &admin_port {
        crate::log::say!("to see how it does, open {}", page_url(admin_port.address()));
    }
    let client = tokio::select! {
        client = begin(&args, &ticket, &consumer) => client?,
        exit = signals.next() => return Ok(exit),
    };
    let args = Arc::new(args);
    let done = tokio::select! {
        done = receive(&args, (&client, &consumer), wanted) => done.map(|()| Exit::Done),
        exit = signals.next() => Ok(exit),
    };
    // However it ended, the server is told, or it would keep the session until its idle timeout.
    let _ = tokio::join!(tokio::time::timeout(GOOD_BYE, client.close()), hook::terminate_all());
    match done {
        Err(error) if error.downcast_ref().is_some_and(StdoutClosed::is_expected) => Ok(Exit::Failed),
        done => done,
    }
}

/// Refuses early what the client would refuse.
fn refuse_start(args: &SubscribeArgs) -> anyhow::Result<()> {
    match (args.mode.into(), args.from) {
        (Mode::Latest, Some(Start::Oldest | Start::At(..))) => bail!(UsageError(
            "--mode latest begins with --from newest or next, and skips what is older: to begin with the oldest version, or \
             with one by its number, take --mode every"
                .into()
        )),
        _ => Ok(()),
    }
}

/// Opens the device, and connects.
async fn begin(args: &SubscribeArgs, ticket: &Ticket, consumer: &Consumer) -> anyhow::Result<Client> {
    let device = device::open(&args.device, SLOT_BYTES).await?;
    let config = Config { device: device.clone(), identity: args.ticket.identity()?, ..config(args) };
    let client = connect(ticket, args.ticket.connect_timeout, config).await?;
    consumer.connected(client.status_reader(), device.as_ref());
    Ok(client)
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

fn config(args: &SubscribeArgs) -> Config {
    Config {
        topic_timeout: args.wait,
        reconnect_timeout: args.reconnect,
        memory_bytes: args.mem.unwrap_or(u64::MAX),
        // Who takes one version has no use for a copy of it.
        base_bytes: if args.once { 0 } else { args.base_mem },
        credit_chunks: args.chunks_in_flight,
        lanes: args.lanes,
        transport: args.ticket.transport,
        lane_addresses: args.lane_address.clone(),
        ..Config::default()
    }
}

/// The topic or topics to receive.
enum SubscribeTarget {
    One(Topic),
    All(Glob),
}

impl SubscribeTarget {
    fn new(args: &SubscribeArgs, ticket: &Ticket) -> anyhow::Result<Self> {
        match &args.topic {
            Some(glob) if glob.is_literal() => {
                let topic = Topic::new(glob.as_str());
                Ok(Self::One(topic.map_err(|error| UsageError(format!("--topic: {error}")))?))
            }
            Some(glob) => Ok(Self::All(glob.clone())),
            None => ticket.topic().cloned().map(Self::One).ok_or_else(|| {
                UsageError("the ticket names no topic: say which with --topic NAME".into()).into()
            }),
        }
    }
}

/// The client, and the status of its consumer.
type Receiving<'a> = (&'a Client, &'a Consumer);

async fn receive(
    args: &Arc<SubscribeArgs>,
    by: Receiving<'_>,
    wanted: SubscribeTarget,
) -> anyhow::Result<()> {
    match wanted {
        SubscribeTarget::One(topic) => Follow::begin(args, by, topic, true).await?.run().await,
        SubscribeTarget::All(glob) if args.once => receive_once(args, by, &glob).await,
        SubscribeTarget::All(glob) => receive_all(args, by, &glob).await,
    }
}

/// The first version of each topic that is there and matches.
async fn receive_once(args: &Arc<SubscribeArgs>, by: Receiving<'_>, glob: &Glob) -> anyhow::Result<()> {
    let topics = by.0.list().await?.into_iter().map(|entry| entry.id.topic);
    let topics: Vec<Topic> = topics.filter(|topic| glob.matches(topic.as_str())).collect();
    if topics.is_empty() {
        let timeout_ms = 0;
        return match Topic::new(glob.as_str()) {
            Ok(topic) => Err(SubscriptionError::NotFound { topic, timeout_ms }.into()),
            Err(_) => Err(NoneMatches(glob.clone()).into()),
        };
    }
    let mut following = Following::new(args, by);
    for topic in topics {
        following.begin(topic).await?;
    }
    while let Some((topic, ended)) = following.next().await {
        if let Err(error) = ended {
            following.note(&topic, error)?;
        }
    }
    following.end()
}

/// Every topic that matches, now and later, until the session is over, or none is left and one has failed. One that ends is
/// let go.
async fn receive_all(args: &Arc<SubscribeArgs>, by: Receiving<'_>, glob: &Glob) -> anyhow::Result<()> {
    let mut found = by.0.watch(glob).await?;
    let mut following = Following::new(args, by);
    let mut watching = true;
    loop {
        tokio::select! {
            biased; // All that are there are followed before one of them can fail.
            topic = found.next(), if watching => match topic {
                Some(topic) => following.begin(topic).await?,
                // The session is over; those that follow know why.
                None if following.is_empty() => {
                    following.end()?;
                    return by.0.list().await.map(drop).map_err(Into::into);
                }
                None => watching = false,
            },
            Some((topic, ended)) = following.next() => if let Err(error) = ended {
                let over = error.downcast_ref::<SubscriptionError>().is_some_and(is_over);
                match (over, watching) {
                    (true, true) => {}
                    (true, false) if following.is_empty() => return following.end().and(Err(error)),
                    (true, false) => {}
                    (false, _) => following.note(&topic, error)?,
                }
            },
        }
        if following.is_empty() {
            following.end()?;
        }
    }
}

/// Topics that are followed side by side. One that fails ends alone.
struct Following<'a> {
    args: &'a Arc<SubscribeArgs>,
    by: Receiving<'a>,
    running: JoinSet<(Topic, anyhow::Result<()>)>,
    /// The first that failed, which says how all of it ended.
    failed: Option<anyhow::Error>,
}

impl<'a> Following<'a> {
    fn new(args: &'a Arc<SubscribeArgs>, by: Receiving<'a>) -> Self {
        Self { args, by, running: JoinSet::new(), failed: None }
    }

    async fn begin(&mut self, topic: Topic) -> Result<(), ClientError> {
        let follow = Follow::begin(self.args, self.by, topic.clone(), false).await?;
        self.running.spawn(async move { (topic, follow.run().await) });
        Ok(())
    }

    fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// The next that ended, and how. Cancel safe.
    async fn next(&mut self) -> Option<(Topic, anyhow::Result<()>)> {
        match self.running.join_next().await? {
            Ok(ended) => Some(ended),
            Err(error) => std::panic::resume_unwind(error.into_panic()), // Nobody aborts them.
        }
    }

    /// Tells that a topic failed. With a session that is over, all of them have: that is the error, or what failed before.
    fn note(&mut self, topic: &Topic, error: anyhow::Error) -> anyhow::Result<()> {
        let is_all = matches!(error.downcast_ref(), Some(SubscriptionError::Disconnected { .. }));
        if error.is::<StdoutClosed>() || is_all && self.failed.is_none() {
            return Err(error);
        }
        report::failed(self.args.json, topic, &message_of(&error))?;
        self.failed.get_or_insert(error);
        if is_all { self.end() } else { Ok(()) }
    }

    /// The first failure, if there was one.
    fn end(&mut self) -> anyhow::Result<()> {
        self.failed.take().map_or(Ok(()), Err)
    }
}

/// Whether a topic ended as topics do.
fn is_over(error: &SubscriptionError) -> bool {
    match error {
        SubscriptionError::Ended { reason, .. } => {
            matches!(reason, EndReason::TopicEnded | EndReason::Withdrawn | EndReason::Expired)
        }
        SubscriptionError::NotFound { .. } => true, // It went away before it was asked for.
        _ => false,
    }
}

/// No topic matches a glob.
#[derive(Debug, thiserror::Error)]
#[error("the server has no topic that matches {0}: see what it has with `tensor-relay list`")]
pub(crate) struct NoneMatches(Glob);

/// No tensor of a version is selected.
#[derive(Debug, thiserror::Error)]
#[error(
    "no tensor of {id} matches --select {globs}, so it is not saved: correct the patterns; its tensors are called e.g. {examples}"
)]
pub(crate) struct NothingSelected {
    pub(crate) id: VersionId,
    pub(crate) globs: String,
    pub(crate) examples: String,
}

/// Nothing can be written to stdout any more.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to stdout: {0}")]
pub(crate) struct StdoutClosed(std::io::Error);

impl StdoutClosed {
    /// Whether the reader of a pipe went away: that ends the process quietly, as it ends other tools.
    fn is_expected(&self) -> bool {
        self.0.kind() == std::io::ErrorKind::BrokenPipe
    }
}

/// Prints to stdout, or ends the process.
pub(crate) fn print_line(line: &str) {
    if let Err(closed) = try_print_line(line) {
        if !closed.is_expected() {
            crate::log::say!("error: {closed}");
        }
        std::process::exit(Exit::Failed as i32);
    }
}

fn try_print_line(line: &str) -> Result<(), StdoutClosed> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(StdoutClosed)
}
