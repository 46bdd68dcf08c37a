//! `tensor-relay subscribe`: receives the versions of a topic, or of all topics that match a glob.

mod follower;
pub(crate) mod hook;
mod report;

use crate::{
    admin::{BoundPort, Consumer, page_url},
    args::{DeviceName, SubscribeArgs},
    device,
    engine_caches::UnpackedCaches,
    exit::{Exit, UsageError, message_of},
    orphans,
    output::{self, StdoutClosed},
    sharing::{HostOptions, Sharing, SharingOptions},
    signals::Signals,
    ticket,
};
use anyhow::{Context, bail};
use follower::Follower;
use std::{sync::Arc, time::Duration};
use tensor_relay_client::{
    Client, ClientError, Config, EndReason, Glob, Mode, Start, SubscriptionError, Ticket, Topic, VersionId,
};
use tokio::task::JoinSet;

/// The size of page-locked slots for chunks that are copied to a GPU: the default chunk size of servers. A larger chunk
/// is copied once more, and passes through one slot piece by piece.
pub(crate) const SLOT_BYTES: u32 = 4 << 20;

/// The deadline for closing the session, and for transfers to this host in progress.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) async fn run(args: SubscribeArgs) -> anyhow::Result<Exit> {
    output::queue_from_now_on(args.json)?;
    refuse_start(&args)?;
    // The ticket is read before signals are handled, so that Ctrl-C ends a process that waits for a ticket on stdin.
    let topic = args.topic.as_ref().and_then(|glob| Topic::new(glob.as_str()).ok());
    let ticket = match &args.topic {
        Some(_) if topic.is_none() => ticket::read_for_all(&args.ticket.ticket)?,
        _ => ticket::read(&args.ticket.ticket, topic.as_ref())?,
    };
    let caches = UnpackedCaches::new(&args.caches).await?; // A child process: before children are reaped.
    let mut signals = Signals::listen()?.with_hangup()?;
    orphans::reap_from_now_on()?;
    let target = SubscribeTarget::new(&args, &ticket)?;
    if let Some(dir) = &args.out {
        std::fs::create_dir_all(dir)
            .with_context(|| format!("cannot use the output folder {}", dir.display()))?;
    }
    let consumer = Consumer::new(args.ready.ready_within);
    let bound = BoundPort::new(&args.admin, false)?;
    let admin_port = bound.map(|bound| bound.serve(consumer.clone())).transpose()?;
    if let Some(admin_port) = &admin_port {
        crate::log::message!("status page: {}", page_url(admin_port.address()));
    }
    let sharing = Sharing::open(&sharing_options(&args)?)?; // Before connecting: those who take wait for versions.
    if let Some(path) = sharing.socket_path() {
        crate::log::message!("processes of this host take the versions from unix:{}", path.display());
    }
    let mut late = std::pin::pin!(late(args.once_within));
    let client = tokio::select! {
        client = open_client(&args, &ticket, &sharing, &consumer) => client?,
        error = &mut late => return Err(error.into()),
        exit = signals.next() => return Ok(exit),
    };
    let args = Arc::new(args);
    let result = tokio::select! {
        result = receive(&args, (&client, &consumer, &sharing, &caches), target) => result.map(|()| Exit::Done),
        error = &mut late => Err(error.into()),
        closed = output::failed() => Err(closed.into()),
        exit = signals.next() => Ok(exit),
    };
    // If the session were not closed, the server would keep it until the idle timeout.
    let closed = tokio::time::timeout(CLOSE_TIMEOUT, client.close());
    let _ = tokio::join!(closed, hook::terminate_all(), sharing.close(CLOSE_TIMEOUT));
    match result {
        Err(error) if error.downcast_ref().is_some_and(StdoutClosed::is_expected) => Ok(Exit::Failed),
        result => result,
    }
}

/// Waits until the time of `--once-within` is over; for ever without it. Cancel safe.
async fn late(within: Option<Duration>) -> NotWithin {
    match within {
        Some(within) => {
            tokio::time::sleep(within).await;
            NotWithin(within)
        }
        None => std::future::pending().await,
    }
}

/// Refuses a value of `--from` that the client would refuse after connecting.
fn refuse_start(args: &SubscribeArgs) -> anyhow::Result<()> {
    match (args.mode.into(), args.from) {
        (Mode::Latest, Some(Start::Oldest | Start::At(..))) => bail!(UsageError(
            "--mode latest begins with --from newest or next, and skips older versions: to begin with the oldest \
             version, or with one by its number, use --mode every"
                .into()
        )),
        _ => Ok(()),
    }
}

/// Opens the device, and connects.
async fn open_client(
    args: &SubscribeArgs,
    ticket: &Ticket,
    sharing: &Sharing,
    consumer: &Consumer,
) -> anyhow::Result<Client> {
    let sources = args
        .source
        .iter()
        .map(|source| ticket::read_any(source))
        .collect::<Result<_, _>>()?;
    let device = device::open(&args.device, SLOT_BYTES).await?;
    let config = Config {
        device: device.clone(),
        identity: args.ticket.connection.identity.load()?,
        sources,
        ..client_config(args)
    };
    let config = sharing.configure(config);
    let client = Client::connect_within(args.ticket.connection.connect_timeout, ticket, config).await?;
    consumer.connected(client.status_reader(), device.as_ref());
    Ok(client)
}

fn client_config(args: &SubscribeArgs) -> Config {
    Config {
        topic_timeout: args.wait,
        reconnect_timeout: args.reconnect,
        memory_bytes: args.mem.unwrap_or(u64::MAX),
        // A subscriber of a single version needs no base for later ones.
        base_bytes: if args.once { 0 } else { args.base_mem },
        credit_chunks: args.chunks_in_flight,
        lanes: args.lanes,
        transport: args.ticket.transport,
        lane_addresses: args.lane_address.clone(),
        ..Config::default()
    }
}

/// With whom the versions are shared.
fn sharing_options(args: &SubscribeArgs) -> anyhow::Result<SharingOptions> {
    let host = &args.share;
    if host.share_host.is_some() && args.device.device != DeviceName::Cpu {
        bail!(UsageError("--share-host shares host memory: it cannot be combined with --device cuda".into()));
    }
    Ok(SharingOptions {
        host: host.share_host.clone().map(|path| HostOptions {
            path,
            mode: host.share_mode,
            uids: host.share_uid.clone(),
        }),
        swarm: args.swarm.options(),
        memory_bytes: args.mem,
    })
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
                UsageError("the ticket names no topic: choose one with --topic NAME".into()).into()
            }),
        }
    }
}

/// The client, the state that the admin port shows, where versions are offered to others, and the caches to unpack.
type Connected<'a> = (&'a Client, &'a Consumer, &'a Sharing, &'a UnpackedCaches);

async fn receive(
    args: &Arc<SubscribeArgs>,
    client: Connected<'_>,
    target: SubscribeTarget,
) -> anyhow::Result<()> {
    match target {
        SubscribeTarget::One(topic) => Follower::begin(args, client, topic, true).await?.run().await,
        SubscribeTarget::All(glob) if args.once => receive_once(args, client, &glob).await,
        SubscribeTarget::All(glob) => receive_all(args, client, &glob).await,
    }
}

/// Receives the first version of each topic that matches and exists now.
async fn receive_once(args: &Arc<SubscribeArgs>, client: Connected<'_>, glob: &Glob) -> anyhow::Result<()> {
    let topics = client.0.list().await?.into_iter().map(|entry| entry.id.topic);
    let topics: Vec<Topic> = topics.filter(|topic| glob.matches(topic.as_str())).collect();
    if topics.is_empty() {
        let timeout_ms = 0;
        return match Topic::new(glob.as_str()) {
            Ok(topic) => Err(SubscriptionError::NotFound { topic, timeout_ms }.into()),
            Err(_) => Err(NoMatchingTopic(glob.clone()).into()),
        };
    }
    let mut followers = Followers::new(args, client);
    for topic in topics {
        followers.begin(topic).await?;
    }
    while let Some((topic, result)) = followers.next().await {
        if let Err(error) = result {
            followers.handle_failure(&topic, error)?;
        }
    }
    followers.end()
}

/// Receives every topic that matches, including topics that appear later, until the session ends, or until no topic is
/// left and one has failed. Topics that end normally are no longer followed.
async fn receive_all(args: &Arc<SubscribeArgs>, client: Connected<'_>, glob: &Glob) -> anyhow::Result<()> {
    let mut matching = client.0.watch(glob).await?;
    let mut followers = Followers::new(args, client);
    let mut is_watching = true;
    loop {
        tokio::select! {
            biased; // All existing topics are followed before a failure of one is handled.
            topic = matching.next(), if is_watching => match topic {
                Some(topic) => followers.begin(topic).await?,
                None => is_watching = false, // The session has ended.
            },
            Some((topic, result)) = followers.next() => if let Err(error) = result {
                let is_normal = error.downcast_ref::<SubscriptionError>().is_some_and(is_normal_end);
                match (is_normal, is_watching) {
                    (true, false) if followers.is_empty() => return followers.end().and(Err(error)),
                    (true, _) => {}
                    (false, _) => followers.handle_failure(&topic, error)?,
                }
            },
        }
        if followers.is_empty() {
            followers.end()?;
            if !is_watching {
                // No subscription reports the session's end, but the next request returns it.
                return client.0.list().await.map(drop).map_err(Into::into);
            }
        }
    }
}

/// The topics that are followed concurrently. A failure of one topic does not end the other topics.
struct Followers<'a> {
    args: &'a Arc<SubscribeArgs>,
    client: Connected<'a>,
    running: JoinSet<(Topic, anyhow::Result<()>)>,
    /// The error of the first topic that failed, with which the command ends.
    first_failure: Option<anyhow::Error>,
}

impl<'a> Followers<'a> {
    fn new(args: &'a Arc<SubscribeArgs>, client: Connected<'a>) -> Self {
        Self { args, client, running: JoinSet::new(), first_failure: None }
    }

    async fn begin(&mut self, topic: Topic) -> Result<(), ClientError> {
        let follower = Follower::begin(self.args, self.client, topic.clone(), false).await?;
        self.running.spawn(async move { (topic, follower.run().await) });
        Ok(())
    }

    fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// Waits for the next topic that ends, and returns its result. Cancel safe.
    async fn next(&mut self) -> Option<(Topic, anyhow::Result<()>)> {
        match self.running.join_next().await? {
            Ok(ended) => Some(ended),
            Err(error) => std::panic::resume_unwind(error.into_panic()), // Tasks are never aborted.
        }
    }

    /// Reports the failure of a topic. If the session has ended, so that all topics fail, returns the first failure.
    fn handle_failure(&mut self, topic: &Topic, error: anyhow::Error) -> anyhow::Result<()> {
        let is_disconnected = matches!(error.downcast_ref(), Some(SubscriptionError::Disconnected { .. }));
        if error.is::<StdoutClosed>() || is_disconnected && self.first_failure.is_none() {
            return Err(error);
        }
        report::failed(self.args.json, topic, &message_of(&error))?;
        self.first_failure.get_or_insert(error);
        if is_disconnected { self.end() } else { Ok(()) }
    }

    /// Returns the first failure as an error.
    fn end(&mut self) -> anyhow::Result<()> {
        self.first_failure.take().map_or(Ok(()), Err)
    }
}

/// Whether the error is the normal end of a topic.
fn is_normal_end(error: &SubscriptionError) -> bool {
    match error {
        SubscriptionError::Ended { reason, .. } => {
            matches!(reason, EndReason::TopicEnded | EndReason::Withdrawn | EndReason::Expired)
        }
        SubscriptionError::NotFound { .. } => true, // The topic ended before the subscription began.
        _ => false,
    }
}

/// The error that no topic matches a glob.
#[derive(Debug, thiserror::Error)]
#[error("the server has no topic that matches {0}: `tensor-relay list` lists its topics")]
pub(crate) struct NoMatchingTopic(Glob);

/// The expired deadline of `--once-within`.
#[derive(Debug, thiserror::Error)]
#[error(
    "the first version was not received within {0:?}: the server may not have one that matches --from (`tensor-relay \
     list` shows its versions), or the transfer takes longer; raise --once-within"
)]
pub(crate) struct NotWithin(Duration);

/// The error that `--select`, or the glob of a `--box`, matches no tensor of a version.
#[derive(Debug, thiserror::Error)]
#[error(
    "no tensor of {id} matches {globs} of --select or --box, so it is not saved: correct the patterns; names of its tensors are \
     e.g. {examples}"
)]
pub(crate) struct NothingSelected {
    pub(crate) id: VersionId,
    pub(crate) globs: String,
    pub(crate) examples: String,
}
