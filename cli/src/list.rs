//! `tensor-relay list`: the topics of a server.

use crate::{
    args::ListArgs,
    exit::Exit,
    subscribe::{connect, print_line},
    ticket, units,
};
use serde_json::json;
use tensor_relay_client::{Client, Config, Connector, LaneKind, Ticket, TopicEntry, Transport, Tuning};

pub(crate) async fn run(args: ListArgs) -> anyhow::Result<Exit> {
    let ticket = ticket::read_any(&args.ticket.ticket)?;
    let identity = args.ticket.identity()?;
    let config = Config { transport: args.ticket.transport, identity, ..Config::default() };
    let client = connect(&ticket, args.ticket.connect_timeout, config).await?;
    let topics = client.list().await?;
    let (kind, reason) = client.transport();
    client.close().await;
    let missing = missing(&ticket, args.ticket.transport, kind).await;
    match args.json {
        true => {
            let topics: Vec<_> = topics.iter().map(as_json).collect();
            let (transport, transport_reason) = (kind.name(), reason.text());
            let unreachable_over = missing.map(LaneKind::name);
            let answer = json!({
                "topics": topics,
                "transport": transport,
                "transport_reason": transport_reason,
                "unreachable_over": unreachable_over,
            });
            print_line(&answer.to_string());
            return Ok(Exit::Done);
        }
        false if topics.is_empty() => crate::log::say!("the server offers no topic yet"),
        false => print_table(&topics),
    }
    crate::log::say!("connected over {kind}: {}", reason.text());
    if let Some(missing) = missing {
        let (protocol, costs) = match missing {
            LaneKind::Quic => ("UDP", "long or lossy ways are slower without it"),
            LaneKind::Tcp => ("TCP", "short ways are slower without it"),
        };
        let (flag, lower) = (addresses(&ticket), protocol.to_lowercase());
        crate::log::say!(
            "note: the server does not answer over {protocol} at {flag}, though it does over {kind}; {costs}. Publish its \
             {protocol} port as well (in Docker, -p PORT:PORT/{lower}), and let firewalls pass it; or name one transport with \
             --transport."
        );
    }
    Ok(Exit::Done)
}

/// How long the other transport may take to answer, when one has answered.
const ANSWER_MS: u32 = 1_000;

/// The kind of connection that is allowed and does not reach the server, beside `kind`, which does.
async fn missing(ticket: &Ticket, allowed: Transport, kind: LaneKind) -> Option<LaneKind> {
    if allowed != Transport::Auto {
        return None;
    }
    let (other, transport) = match kind {
        LaneKind::Quic => (LaneKind::Tcp, Transport::Tcp),
        LaneKind::Tcp => (LaneKind::Quic, Transport::Quic),
    };
    let tuning = Tuning { connect_timeout_ms: ANSWER_MS, ..Tuning::default() };
    let config = Config { transport, ..Config::default() };
    match Client::connect_with(&Connector::new(tuning), ticket, config).await {
        Ok(client) => {
            client.close().await;
            None
        }
        Err(_) => Some(other),
    }
}

fn addresses(ticket: &Ticket) -> String {
    ticket.addresses().join(", ")
}

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

fn print_table(topics: &[TopicEntry]) {
    let width = topics
        .iter()
        .map(|entry| entry.id.topic.as_str().len())
        .max()
        .unwrap_or(0)
        .max(5);
    print_line(&format!(
        "{:width$}  {:>7}  {:>7}  {:>10}  {:>11}",
        "TOPIC", "VERSION", "TENSORS", "SIZE", "SUBSCRIBERS"
    ));
    for TopicEntry { id, tensors, payload_bytes, subscribers, .. } in topics {
        let (topic, version, size) = (id.topic.as_str(), id.version.0, units::bytes(*payload_bytes));
        print_line(&format!("{topic:width$}  {version:>7}  {tensors:>7}  {size:>10}  {subscribers:>11}"));
    }
}
