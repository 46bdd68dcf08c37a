//! tensor-relay as a contender.
//!
//! A round is a subscription, measured from the request to the verified commit of the complete payload, in memory that
//! earlier rounds have used. Encryption and hashes are on. Each round has a version of its own, so that the costs of
//! choosing codecs and of encoding recur in each, as in production.

mod data;
mod round_publisher;
mod small;
mod ticket_file;

use crate::{
    cells::Cells,
    contender::{Begun, Ready, ReceiveArgs, Received, Sent, ServeArgs, print},
    node::Hold,
    server,
};
use anyhow::{Result, ensure};
pub use data::Data;
use round_publisher::{PublishedRound, RoundPublisher};
use small::SmallPublisher;
use std::time::Duration;
use tensor_relay_client::{Client, Connector, Lanes, Ticket, Tuning};
use tensor_relay_server::{CodecChoice, CodecId, Config, Server};
use ticket_file::TicketFile;

/// The deadline of a round, after which the server fails.
const ROUND_TIMEOUT: Duration = Duration::from_secs(600);

/// The options of the server's payload.
#[derive(Debug, Clone, clap::Args)]
pub struct PayloadArgs {
    /// The number of tensors.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub tensors: u32,
    /// The content.
    #[arg(long, value_enum, default_value_t)]
    pub data: Data,
    /// The codec of chunks.
    #[arg(long, default_value = "auto", value_parser = parse_codec)]
    pub codec: CodecChoice,
    /// Where the tensors lie. Staged tensors are hashed once, before the first round; borrowed ones are hashed in each
    /// round, as they are sent.
    #[arg(long, value_enum, default_value_t)]
    pub hold: Hold,
}

/// Publishes the payload described by `payload` for each round, and small tensors on request.
///
/// # Errors
/// When the address is taken, memory is exhausted, or a receiver does not finish a round in time.
pub async fn serve(args: ServeArgs, payload: PayloadArgs) -> Result<()> {
    let config = Config { codec: payload.codec, encoded_bytes: 64 << 20, ..Config::default() };
    let (server, ticket) = start(&args, config)?;
    let publisher = RoundPublisher::new(server.staging(), args.bytes, &payload)?;
    let first = publisher.publish(&server, 0).await?;
    let small_publisher = SmallPublisher::new(&server)?;
    let _ticket = announce_ready(&server, &ticket)?;
    tokio::select! {
        ended = publish_rounds(&server, &publisher, first, args.bytes) => ended,
        ended = small_publisher.run() => ended,
    }
}

/// Starts the server that `args` describe, and returns it with its ticket.
pub(crate) fn start(args: &ServeArgs, config: Config) -> Result<(Server, Ticket)> {
    server::start(args.listen, Some(args.mtu), config, None)
}

/// Writes the ticket file for the receiving side, and prints that `server` is ready.
pub(crate) fn announce_ready(server: &Server, ticket: &Ticket) -> Result<TicketFile> {
    let port = server.local_address().port();
    let file = TicketFile::create(port, ticket)?;
    print(&Ready { ready: true, port })?;
    Ok(file)
}

/// Connects to the server that `args` name, with the ticket from its file.
pub(crate) async fn connect(args: &ReceiveArgs, config: tensor_relay_client::Config) -> Result<Client> {
    let ticket = ticket_file::take(args.connect.port())?;
    let tuning = Tuning { udp_payload_max: Some(args.mtu), ..Tuning::default() };
    Ok(Client::connect_with(&Connector::new(tuning), &ticket, config).await?)
}

/// Publishes a version and prints a line for each round, without end. The version of the next round is published before
/// the receiver can request it.
async fn publish_rounds(
    server: &Server,
    publisher: &RoundPublisher,
    first: PublishedRound,
    bytes: u64,
) -> Result<()> {
    let mut current = first;
    for round in 0.. {
        let next = publisher.publish(server, round + 1).await?;
        let (begun, estimates) = (Begun::now(), server.stats().encoder.estimates);
        let committed = current.publication.committed(1, ROUND_TIMEOUT).await;
        ensure!(committed, "no receiver finished round {round} within {} s", ROUND_TIMEOUT.as_secs());
        let more = Cells::of([("looks", (server.stats().encoder.estimates - estimates) as f64)]);
        print(&Sent { more, ..Sent::since(begun, bytes) })?;
        std::mem::replace(&mut current, next).withdraw();
    }
    Ok(())
}

/// Requests `args.small` small tensors, then subscribes once a round, all in one session with this number of `lanes`, or
/// an automatic one for 0.
///
/// # Errors
/// When the server cannot be reached, or sends another number of bytes than expected.
pub async fn receive(args: ReceiveArgs, lanes: u32) -> Result<()> {
    let lanes = if lanes == 0 { Lanes::Auto } else { Lanes::Fixed(lanes) };
    let config = tensor_relay_client::Config { lanes, ..Default::default() };
    let client = connect(&args, config).await?;
    let requests = small::connect(args.connect.port()).await?; // Also removes the socket's path.
    if args.small > 0 {
        print(&small::receive(&client, requests, args.small).await?)?;
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
