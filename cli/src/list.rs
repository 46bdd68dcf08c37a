//! `tensor-relay list`: the topics of a server.

use crate::{args::ListArgs, exit::Exit, output::print_json, table, ticket, units};
use serde_json::json;
use std::time::Duration;
use tensor_relay_client::{Client, Config, LaneKind, Ticket, TopicEntry, Transport};

pub(crate) async fn run(args: ListArgs) -> anyhow::Result<Exit> {
    let ticket = ticket::read_for_all(&args.ticket.ticket)?;
    let config = Config {
        transport: args.ticket.transport,
        identity: args.ticket.connection.identity.load()?,
        ..Config::default()
    };
    let client =
        Client::connect_within(args.ticket.connection.connect_timeout, &ticket, config.clone()).await?;
    let topics = client.list().await?;
    let (kind, reason) = client.transport();
    client.close().await;
    let unreachable = unreachable_transport(&ticket, config, kind).await;
    match args.json {
        true => {
            let topics: Vec<_> = topics.iter().map(as_json).collect();
            let (transport, transport_reason) = (kind.name(), reason.text());
            let unreachable_over = unreachable.map(LaneKind::name);
            print_json(&json!({
                "topics": topics,
                "transport": transport,
                "transport_reason": transport_reason,
                "unreachable_over": unreachable_over,
            }));
            return Ok(Exit::Done);
        }
        false if topics.is_empty() => crate::log::message!("the server offers no topic yet"),
        false => table::print(TITLES, &topics.iter().map(row).collect::<Vec<_>>()),
    }
    crate::log::message!("connected over {kind}: {}", reason.text());
    if let Some(unreachable) = unreachable {
        let (protocol, cost) = match unreachable {
            LaneKind::Quic => ("UDP", "long or lossy paths are slower without it"),
            LaneKind::Tcp | LaneKind::Unix => ("TCP", "short paths are slower without it"),
        };
        let (addresses, lower) = (ticket.addresses().join(", "), protocol.to_lowercase());
        crate::log::message!(
            "note: the server does not answer over {protocol} at {addresses}, though it does over {kind}; {cost}. \
             Publish its {protocol} port as well (in Docker, -p PORT:PORT/{lower}), and allow it in firewalls; or \
             choose one transport with --transport."
        );
    }
    Ok(Exit::Done)
}

/// The deadline for connecting over the other transport, after a session over the first one.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The transport other than `connected`, if `config` allows it and the server does not answer over it. `connected` is
/// the transport of the session that listed the topics.
async fn unreachable_transport(ticket: &Ticket, config: Config, connected: LaneKind) -> Option<LaneKind> {
    if config.transport != Transport::Auto {
        return None;
    }
    let (other, transport) = match connected {
        LaneKind::Quic => (LaneKind::Tcp, Transport::Tcp),
        LaneKind::Tcp => (LaneKind::Quic, Transport::Quic),
        LaneKind::Unix => return None,
    };
    match Client::connect_within(CONNECT_TIMEOUT, ticket, Config { transport, ..config }).await {
        Ok(client) => {
            client.close().await;
            None
        }
        Err(_) => Some(other),
    }
}

const TITLES: [&str; 5] = ["TOPIC", "VERSION", "TENSORS", "SIZE", "SUBSCRIBERS"];

fn as_json(entry: &TopicEntry) -> serde_json::Value {
    json!({
        "topic": entry.id.topic.as_str(),
        "epoch": entry.id.epoch.to_string(),
        "version": entry.id.version.0,
        "tensors": entry.tensors,
        "payload_bytes": entry.payload_bytes,
        "subscribers": entry.subscribers,
    })
}

fn row(TopicEntry { id, tensors, payload_bytes, subscribers, .. }: &TopicEntry) -> [String; 5] {
    let (version, size) = (id.version.to_string(), units::bytes(*payload_bytes));
    [id.topic.to_string(), version, tensors.to_string(), size, subscribers.to_string()]
}
