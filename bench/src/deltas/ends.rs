//! The two processes: one that publishes, one that follows.

use super::steps::StepsArgs;
use crate::{contender::print, node::clock};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};
use tensor_relay_client::{Client, Connector, Request, Ticket, Topic, Tuning};
use tensor_relay_server::{Access, Identity, Listener, Server};

/// What the publishing end is told.
#[derive(Debug, Clone, clap::Args)]
pub struct PublishArgs {
    /// Where to listen; port 0 lets the system choose.
    #[arg(long)]
    pub listen: SocketAddr,
    /// The UDP payload of a full packet.
    #[arg(long)]
    pub mtu: u16,
    /// What the versions are.
    #[command(flatten)]
    pub steps: StepsArgs,
}

/// What the following end is told.
#[derive(Debug, Clone, clap::Args)]
pub struct FollowArgs {
    /// Who publishes. Its key is as old as its process, and worth nothing after it.
    #[arg(long)]
    pub ticket: Ticket,
    /// The UDP payload of a full packet.
    #[arg(long)]
    pub mtu: u16,
    /// How many versions there are.
    #[arg(long)]
    pub versions: u32,
    /// Keeps no copy, so that versions come whole.
    #[arg(long)]
    pub whole: bool,
}

/// The publishing end's first line.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Publishing {
    pub(super) ticket: String,
    pub(super) versions: u32,
}

/// The publishing end's line on each version, once that was committed.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Made {
    /// What it took to read, copy and hash it, before its publish.
    pub(super) staging_s: f64,
    /// What workers took since then, together: to compare it with what the subscriber has, or to encode it.
    pub(super) encoding_s: f64,
}

/// The following end's line on each version.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Came {
    pub(super) version: u64,
    pub(super) payload_bytes: u64,
    /// What came over the network for it, as encoded.
    pub(super) wire_bytes: u64,
    /// The payload bytes that came as deltas.
    pub(super) delta_bytes: u64,
    /// What workers took for it, together: to decode, hash and copy it.
    pub(super) decoding_s: f64,
    /// From its publish to its commit, by the clock that both processes share.
    pub(super) seconds: f64,
}

/// All that is known of one version.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Version {
    #[serde(flatten)]
    pub(super) came: Came,
    #[serde(flatten)]
    pub(super) made: Made,
}

const TOPIC: &str = "deltas";

/// When a version was published, in its metadata.
const PUBLISHED_NS: &str = "published_ns";

/// How long a version may take to be committed.
const VERSION_MAX: Duration = Duration::from_secs(600);

/// Publishes each version when the one before was committed.
///
/// # Errors
/// When versions cannot be had, or are not committed in time.
pub async fn publish(args: PublishArgs) -> Result<()> {
    let mut steps = args.steps.open()?;
    let versions = steps.left();
    let identity = Identity::ephemeral()?;
    let tuning = Tuning { udp_payload_max: Some(args.mtu), ..Tuning::default() };
    let listener = Listener::bind(args.listen, &identity, tuning)?;
    let config = tensor_relay_server::Config { base_bytes: u64::MAX, ..Default::default() };
    let server = Server::start(listener, Access::open(), config);
    let topic = Topic::new(TOPIC)?;
    let address = server.local_address().to_string();
    let ticket = Ticket::new(vec![address], vec![identity.fingerprint().0], Some(topic.clone()))?;
    let mut publisher = server.publisher(topic)?;
    print(&Publishing { ticket: ticket.to_string(), versions })?;
    loop {
        let began = Instant::now();
        let Some(staged) = steps.next(&server.staging())? else { break };
        let (staging_s, worked) = (began.elapsed().as_secs_f64(), server.stats().codecs.total().worked);
        let published = vec![(PUBLISHED_NS.to_owned(), clock::monotonic_ns().to_string())];
        let mut publication = publisher.publish(staged, published).await?;
        let committed = publication.committed(1, VERSION_MAX).await;
        ensure!(committed, "{} was not committed within {} s", publication.id(), VERSION_MAX.as_secs());
        let encoding = server.stats().codecs.total().worked.saturating_sub(worked);
        print(&Made { staging_s, encoding_s: encoding.as_secs_f64() })?;
    }
    // The subscriber's last lines are read before this process is ended.
    std::future::pending().await
}

/// Takes each version, and tells of it.
///
/// # Errors
/// When the publishing end cannot be reached, or a version is missing.
pub async fn follow(args: FollowArgs) -> Result<()> {
    let tuning = Tuning { udp_payload_max: Some(args.mtu), ..Tuning::default() };
    let base_bytes = if args.whole { 0 } else { u64::MAX };
    let config = tensor_relay_client::Config { base_bytes, ..Default::default() };
    let client = Client::connect_with(&Connector::new(tuning), &args.ticket, config).await?;
    let topic = args.ticket.topic().context("the ticket names no topic")?.clone();
    let mut subscription = client.subscribe_to(Request::every(topic)).await?;
    for _ in 0..args.versions {
        let snapshot = subscription.next().await?;
        let now_ns = clock::monotonic_ns();
        let published = snapshot.metadata().iter().find(|(key, _)| key == PUBLISHED_NS);
        let published: u64 = published.context("a version does not say when it was published")?.1.parse()?;
        let receipt = snapshot.receipt();
        print(&Came {
            version: snapshot.id().version.0,
            payload_bytes: snapshot.payload_bytes(),
            wire_bytes: receipt.wire_bytes,
            delta_bytes: receipt.codecs.deltas().raw_bytes,
            decoding_s: receipt.codecs.total().worked.as_secs_f64(),
            seconds: now_ns.saturating_sub(published) as f64 / 1e9,
        })?;
    }
    client.close().await;
    Ok(())
}
