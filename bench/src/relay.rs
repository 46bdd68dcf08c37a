//! tensor-relay as a contender.
//!
//! - [`serve`] and [`receive`] move the same bytes in each round, as all contenders do. A round is a subscription,
//!   measured from the request to the verified commit of the complete payload, in memory that earlier rounds have used.
//!   Each round has a version of its own, so that the costs of choosing codecs and of encoding recur in each, as in
//!   production.
//! - With a [`Job`] they carry out a use of tensor-relay by any number of receivers: each round is
//!   published when all of them have subscribed, and has other bytes, which are compared.

mod follow;
mod job;
mod load;
mod publish;
mod round_publisher;
mod small;
mod snapshot_hash;
mod steps;
mod stream_content;
mod versions;

pub use job::{Hold, Job};
pub(crate) use job::{Pace, Work};
pub use load::Content;
pub(crate) use load::{Form, Load, name_of};
pub use steps::StepsArgs;

use crate::{
    cells::Cells,
    contender::{Begun, Ready, ReceiveArgs, Received, Sent, ServeArgs, from_json, print},
    server,
};
use anyhow::{Result, ensure};
use round_publisher::RoundPublisher;
use small::SmallPublisher;
use std::time::Duration;
use tensor_relay_client::{Client, Connector, Lanes, Ticket, Tuning};
use tensor_relay_server::{CodecChoice, CodecId, Config, Publication, Publisher, Server};

/// The deadline of a round, after which the server fails.
const ROUND_TIMEOUT: Duration = Duration::from_secs(600);

/// The options of a server: the payload, or a job.
#[derive(Debug, Clone, clap::Args)]
pub struct PayloadArgs {
    /// The options of every server.
    #[command(flatten)]
    pub serve: ServeArgs,
    /// The number of tensors.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub tensors: u32,
    /// The content.
    #[arg(long, value_enum, default_value_t)]
    pub data: Content,
    /// The codec of chunks.
    #[arg(long, default_value = "auto", value_parser = parse_codec)]
    pub codec: CodecChoice,
    /// Where the tensors lie. Staged tensors are hashed once, before the first round; borrowed ones are hashed in each
    /// round, as they are sent.
    #[arg(long, value_enum, default_value_t)]
    pub hold: Hold,
    /// Publishes the versions of this job instead.
    #[arg(long, value_parser = from_json::<Job>)]
    pub job: Option<Job>,
}

/// The options of a receiver.
#[derive(Debug, Clone, clap::Args)]
pub struct SubscribeArgs {
    /// The ticket that the server printed.
    #[arg(long)]
    pub ticket: Ticket,
    /// The options of every receiver.
    #[command(flatten)]
    pub receive: ReceiveArgs,
    /// The number of lanes; 0 for automatic.
    #[arg(long, default_value_t = 1)]
    pub lanes: u32,
    /// The job, the same as the server's, if it has one.
    #[arg(long, value_parser = from_json::<Job>)]
    pub job: Option<Job>,
    /// With a job: blocks nine tenths of the time, until it is ended.
    #[arg(long)]
    pub slow: bool,
    /// With a job: keeps no base, so that versions are sent whole.
    #[arg(long)]
    pub whole: bool,
    /// With a job: the clock of the server. Without it, or if it is not this side's, latencies are not measured.
    #[arg(long)]
    pub clock: Option<String>,
}

/// Publishes the payload described by `args` for each round, and small tensors one after the other; or the versions of a
/// job.
///
/// # Errors
/// When the address is taken, memory is exhausted, or a receiver does not finish a round in time.
pub async fn serve(args: PayloadArgs) -> Result<()> {
    if let Some(job) = args.job {
        return publish::publish(args.serve, job).await;
    }
    let config = Config { codec: args.codec, encoded_bytes: 64 << 20, ..Config::default() };
    let (server, ticket) = server::start(args.serve.listen, Some(args.serve.mtu), config, None)?;
    let publisher = RoundPublisher::new(server.staging(), &args)?;
    let first = publisher.publish(&server, 0).await?;
    let small_publisher = SmallPublisher::new(&server)?;
    print(&ready(&server, &ticket))?;
    tokio::select! {
        ended = publish_rounds(&server, &publisher, first, args.serve.bytes) => ended,
        ended = small_publisher.run() => ended,
    }
}

/// The line of `server`, with its ticket.
fn ready(server: &Server, ticket: &Ticket) -> Ready {
    Ready { ticket: Some(ticket.to_string()), ..Ready::at(server.local_address().port()) }
}

/// Publishes a version and prints a line for each round, without end. The version of the next round is published before
/// the receiver can request it.
async fn publish_rounds(
    server: &Server,
    rounds: &RoundPublisher,
    first: (Publisher, Publication),
    bytes: u64,
) -> Result<()> {
    let (mut publisher, mut publication) = first;
    for round in 0.. {
        let next = rounds.publish(server, round + 1).await?;
        let (begun, estimates) = (Begun::now(), server.stats().encoder.estimates);
        let committed = publication.committed(1, ROUND_TIMEOUT).await;
        ensure!(committed, "no receiver finished round {round} within {} s", ROUND_TIMEOUT.as_secs());
        let more = Cells::of([("looks", (server.stats().encoder.estimates - estimates) as f64)]);
        print(&Sent { more, ..Sent::since(begun, bytes) })?;
        publisher.withdraw();
        (publisher, publication) = next;
    }
    Ok(())
}

/// Receives small tensors, if `args` say so, then subscribes once a round, all in one session; or receives the versions
/// of a job.
///
/// # Errors
/// When the server cannot be reached, or sends another number of bytes than expected.
pub async fn receive(args: SubscribeArgs) -> Result<()> {
    if let Some(job) = args.job.clone() {
        return follow::follow(args, job).await;
    }
    let client = connect(&args, tensor_relay_client::Config::default()).await?;
    let args = args.receive;
    if args.small > 0 {
        print(&small::receive(&client, args.small).await?)?;
    }
    for round in 0..args.rounds {
        let begun = Begun::now();
        let mut subscription = client.subscribe(&round_publisher::topic(round)?).await?;
        let snapshot = subscription.next().await?;
        let received = Received::since(begun, round, args.bytes);
        // The sum of tensors, because the payload also has padding.
        let bytes: u64 = snapshot.tensors().map(|(_, bytes)| bytes.len() as u64).sum();
        ensure!(bytes == args.bytes, "received {bytes} bytes instead of {}", args.bytes);
        print(&received)?;
    }
    client.close().await;
    Ok(())
}

async fn connect(args: &SubscribeArgs, config: tensor_relay_client::Config) -> Result<Client> {
    let lanes = if args.lanes == 0 { Lanes::Auto } else { Lanes::Fixed(args.lanes) };
    let config = tensor_relay_client::Config { lanes, ..config };
    let tuning = Tuning { udp_payload_max: Some(args.receive.mtu), ..Tuning::default() };
    Ok(Client::connect_with(&Connector::new(tuning), &args.ticket, config).await?)
}

fn parse_codec(text: &str) -> Result<CodecChoice, String> {
    if text == "auto" {
        return Ok(CodecChoice::Auto);
    }
    let codec = CodecId::ALL.iter().find(|codec| codec.name() == text);
    codec.map(|codec| CodecChoice::Fixed(*codec)).ok_or_else(|| {
        let names: Vec<&str> = CodecId::ALL.iter().map(|codec| codec.name()).collect();
        format!("write auto or one of {}", names.join(", "))
    })
}
