//! Checks of the path to a server: the transports that it answers, and their speed.

use super::finding::{Finding, Fix};
use crate::units;
use std::time::{Duration, Instant};
use tensor_relay_client::{Client, ClientError, Config, Connector, Ticket, TopicEntry, Transport, Tuning};

/// How long a server may take to answer.
const ANSWER_MS: u32 = 5_000;

/// How many questions are asked for one round trip: the fastest counts.
const QUESTIONS: usize = 5;

/// The result for one transport.
enum TransportCheck {
    Open { round_trip: Duration, topics: Vec<TopicEntry> },
    Shut(ClientError),
}

/// Tries both transports at once, and looks for the ticket's topic.
pub(super) async fn check(ticket: &Ticket) -> Vec<Finding> {
    let (quic, tcp) = tokio::join!(try_way(ticket, Transport::Quic), try_way(ticket, Transport::Tcp));
    let is_any_open =
        matches!(quic, TransportCheck::Open { .. }) || matches!(tcp, TransportCheck::Open { .. });
    let mut findings = vec![
        judge("server over UDP", &quic, is_any_open, UDP),
        judge("server over TCP", &tcp, is_any_open, TCP),
    ];
    let topics = [&quic, &tcp].into_iter().find_map(|way| match way {
        TransportCheck::Open { topics, .. } => Some(topics),
        TransportCheck::Shut(_) => None,
    });
    findings.extend(topics.and_then(|topics| topic(ticket, topics)));
    findings
}

async fn try_way(ticket: &Ticket, transport: Transport) -> TransportCheck {
    let connector = Connector::new(Tuning { connect_timeout_ms: ANSWER_MS, ..Tuning::default() });
    let config = Config { transport, ..Config::default() };
    let client = match Client::connect_with(&connector, ticket, config).await {
        Ok(client) => client,
        Err(error) => return TransportCheck::Shut(error),
    };
    let way = ask(&client).await;
    client.close().await;
    way
}

async fn ask(client: &Client) -> TransportCheck {
    let (mut round_trip, mut topics) = (Duration::MAX, vec![]);
    for _ in 0..QUESTIONS {
        let asked = Instant::now();
        match client.list().await {
            Ok(list) => topics = list,
            Err(error) => return TransportCheck::Shut(error),
        }
        round_trip = round_trip.min(asked.elapsed());
    }
    TransportCheck::Open { round_trip, topics }
}

const UDP: Fix = Fix {
    host: "let firewalls pass the server's UDP port, e.g. ufw allow 4747/udp",
    docker: "publish it for UDP too: -p 4747:4747/udp -p 4747:4747/tcp",
    kubernetes: "a port with protocol: UDP beside the one for TCP, in the Service and in every NetworkPolicy",
};

const TCP: Fix = Fix {
    host: "let firewalls pass the server's TCP port, e.g. ufw allow 4747/tcp, and see that it runs without --no-tcp",
    docker: "publish it for TCP too: -p 4747:4747/udp -p 4747:4747/tcp",
    kubernetes: "a port with protocol: TCP beside the one for UDP, in the Service and in every NetworkPolicy",
};

/// One way that is shut costs speed where the other is open, and everything where it is not.
fn judge(name: &'static str, way: &TransportCheck, is_any_open: bool, fix: Fix) -> Finding {
    let wanted = "an answer over UDP and over TCP: each is faster than the other on some ways";
    match way {
        TransportCheck::Open { round_trip, .. } => {
            Finding::ok(name, format!("it answers within {}", units::time(*round_trip)), wanted)
        }
        TransportCheck::Shut(error) if is_any_open => Finding::warn(name, error.to_string(), wanted, fix),
        TransportCheck::Shut(error) => Finding::fail(name, error.to_string(), wanted, fix),
    }
}

/// Whether the topic that the ticket names is on offer.
fn topic(ticket: &Ticket, topics: &[TopicEntry]) -> Option<Finding> {
    let name = ticket.topic()?;
    let fix = Fix {
        host: "start its publisher, or take a ticket of a topic that `tensor-relay list` shows",
        docker: "the same: the topic is the server's affair",
        kubernetes: "the same: the topic is the server's affair",
    };
    let wanted = "a version of the topic that the ticket names";
    Some(match topics.iter().find(|entry| entry.id.topic == *name) {
        Some(entry) => {
            let size = units::bytes(entry.payload_bytes);
            Finding::ok("topic", format!("{name} has version {}, {size}", entry.id.version), wanted)
        }
        None => Finding::warn("topic", format!("{name} has no version"), wanted, fix),
    })
}
