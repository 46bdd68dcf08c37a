//! tensor-relay as a contender.
//!
//! A round is a subscription: from the request to the verified commit of the whole payload, into memory that earlier
//! rounds have used. Encryption and hashes are on. Bytes are noise, unless something else is asked for. Each
//! round has a version of its own, so that choosing codecs and encoding cost in each what they cost in life.

mod data;
mod round_publisher;
mod small;
mod ticket_file;

use crate::{
    cells::Cells,
    contender::{Begun, Ready, ReceiveArgs, Received, Sent, ServeArgs, print},
};
use anyhow::{Result, ensure};
use clap::ValueEnum;
pub use data::Data;
use round_publisher::{PublishedRound, RoundPublisher};
use small::SmallPublisher;
use std::time::Duration;
use tensor_relay_client::{Client, Connector, Lanes, Ticket, Tuning};
use tensor_relay_server::{Access, CodecChoice, CodecId, Config, Identity, Listener, Server};
use ticket_file::TicketFile;

/// The deadline of a round, after which the server gives up its receiver.
const ROUND_MAX: Duration = Duration::from_secs(600);

/// The options of the server.
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
    /// The work of each round.
    #[arg(long, value_enum, default_value_t)]
    pub hold: Hold,
}

/// The work of a producer for each version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Hold {
    /// Nothing: the bytes were staged and hashed before the first.
    #[default]
    Stage,
    /// Lends its tensors, which are hashed as they are sent.
    Borrow,
}

/// Publishes what `payload` say, and sends it to whoever subscribes.
///
/// # Errors
/// When the address is taken or there is no memory.
pub async fn serve(args: ServeArgs, payload: PayloadArgs) -> Result<()> {
    let config = Config { codec: payload.codec, encoded_bytes: 64 << 20, ..Config::default() };
    let (server, ticket) = start(&args, config)?;
    let publisher = RoundPublisher::new(server.staging(), args.bytes, &payload)?;
    let first = publisher.publish(&server, 0).await?;
    let smalls = SmallPublisher::new(&server).await?;
    let _ticket = ready(&server, &ticket)?;
    tokio::select! {
        ended = rounds(&server, &publisher, first, args.bytes) => ended,
        ended = smalls.run() => ended,
    }
}

/// A server that `args` ask for, and its ticket.
pub(crate) fn start(args: &ServeArgs, config: Config) -> Result<(Server, Ticket)> {
    let identity = Identity::ephemeral()?;
    let listener = Listener::bind(args.listen, &identity, tuning(args.mtu))?;
    let server = Server::start(listener, Access::open(), config);
    let address = server.local_address().to_string();
    Ok((server, Ticket::new(vec![address], vec![identity.fingerprint().0], None)?))
}

/// Leaves the ticket for the receiving side, and says that `server` may be asked.
pub(crate) fn ready(server: &Server, ticket: &Ticket) -> Result<TicketFile> {
    let port = server.local_address().port();
    let left = TicketFile::leave(port, ticket)?;
    print(&Ready { ready: true, port })?;
    Ok(left)
}

/// Connects to the server that `args` name, with the ticket that it left.
pub(crate) async fn connect(args: &ReceiveArgs, config: tensor_relay_client::Config) -> Result<Client> {
    let ticket = ticket_file::take(args.connect.port())?;
    Ok(Client::connect_with(&Connector::new(tuning(args.mtu)), &ticket, config).await?)
}

/// Tells of each round, for ever. The version of the next one is there before anybody can ask for it.
async fn rounds(
    server: &Server,
    publisher: &RoundPublisher,
    first: PublishedRound,
    bytes: u64,
) -> Result<()> {
    let mut current = first;
    for round in 0.. {
        let next = publisher.publish(server, round + 1).await?;
        let (begun, looks) = (Begun::now(), server.stats().encoder.looks);
        let committed = current.publication.committed(1, ROUND_MAX).await;
        ensure!(committed, "no receiver finished round {round} within {} s", ROUND_MAX.as_secs());
        let more = Cells::of([("looks", (server.stats().encoder.looks - looks) as f64)]);
        print(&Sent { more, ..Sent::since(begun, bytes) })?;
        std::mem::replace(&mut current, next).withdraw();
    }
    Ok(())
}

/// Asks for `args.small` small tensors, then subscribes once per round, all in one session of so many `lanes`.
///
/// # Errors
/// When the server cannot be reached or sends anything else than what was asked for.
pub async fn receive(args: ReceiveArgs, lanes: u32) -> Result<()> {
    let config = tensor_relay_client::Config { lanes: Lanes::Fixed(lanes), ..Default::default() };
    let client = connect(&args, config).await?;
    if args.small > 0 {
        print(&small::receive(&client, args.connect, args.small).await?)?;
    }
    for round in 0..args.rounds {
        let begun = Begun::now();
        let mut subscription = client.subscribe(&round_publisher::topic(round)?).await?;
        let snapshot = subscription.next().await?;
        let received = Received::since(begun, round, args.bytes);
        // The payload has padding besides.
        let bytes: u64 = snapshot.tensors().map(|(_, bytes)| bytes.len() as u64).sum();
        ensure!(bytes == args.bytes, "{bytes} bytes came where {} were asked for", args.bytes);
        print(&received)?;
    }
    client.close().await;
    Ok(())
}

fn parse_codec(word: &str) -> Result<CodecChoice, String> {
    if word == "auto" {
        return Ok(CodecChoice::Auto);
    }
    let known = CodecId::ALL.iter().find(|codec| codec.name() == word);
    known.map(|codec| CodecChoice::Fixed(*codec)).ok_or_else(|| {
        let names: Vec<&str> = CodecId::ALL.iter().map(|codec| codec.name()).collect();
        format!("write auto or one of {}", names.join(", "))
    })
}

fn tuning(mtu: u16) -> Tuning {
    Tuning { udp_payload_max: Some(mtu), ..Tuning::default() }
}
