//! The two processes: one that publishes, one that follows.

use super::steps::StepsArgs;
use crate::{contender::print, node::clock};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::{net::SocketAddr, time::Duration};
use tensor_relay_client::{Client, Connector, Request, Ticket, Topic, Tuning};
use tensor_relay_server::{Identity, Listener, Server};

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

/// The following end's line on each version.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Update {
    pub(super) version: u64,
    pub(super) payload_bytes: u64,
    /// What came over the network for it, as encoded.
    pub(super) wire_bytes: u64,
    /// The payload bytes that came as changes.
    pub(super) delta_bytes: u64,
    /// From its publish to its commit, by the clock that both processes share.
    pub(super) seconds: f64,
}

const TOPIC: &str = "updates";

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
    let server = Server::start(listener, config);
    let topic = Topic::new(TOPIC)?;
    let address = server.local_address()?.to_string();
    let ticket = Ticket::new(vec![address], vec![identity.fingerprint().0], Some(topic.clone()))?;
    let mut publisher = server.publisher(topic)?;
    print(&Publishing { ticket: ticket.to_string(), versions })?;
    while let Some(staged) = steps.next(&server.staging())? {
        let published = vec![(PUBLISHED_NS.to_owned(), clock::monotonic_ns().to_string())];
        let mut publication = publisher.publish(staged, published).await?;
        let committed = publication.committed(1, VERSION_MAX).await;
        ensure!(committed, "{} was not committed within {} s", publication.id(), VERSION_MAX.as_secs());
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
        print(&Update {
            version: snapshot.id().version.0,
            payload_bytes: snapshot.payload_bytes(),
            wire_bytes: receipt.wire_bytes,
            delta_bytes: receipt.codecs.changes().raw_bytes,
            seconds: now_ns.saturating_sub(published) as f64 / 1e9,
        })?;
    }
    client.close().await;
    Ok(())
}
