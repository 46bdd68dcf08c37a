//! Checks of the path to a server: the transports that it answers, and their speed.

use super::{
    finding::{Finding, Fix, State},
    rate,
};
use crate::{
    tickets::{described, seconds_now},
    units,
};
use nix::sys::socket::{getsockopt, sockopt};
use std::{
    net::{SocketAddr, UdpSocket},
    time::{Duration, Instant},
};
use tensor_relay_client::{Client, ClientError, Config, Connector, Ticket, TopicEntry, Transport, Tuning};

/// How long a server may take to answer.
const ANSWER_MS: u32 = 5_000;

/// How many questions are asked for one round trip: the fastest counts.
const QUESTIONS: usize = 5;

/// The result for one transport.
enum TransportCheck {
    Open { client: Client, round_trip: Duration, topics: Vec<TopicEntry> },
    Shut(ClientError),
}

/// Tries both transports at once, and looks for the ticket's topic; then measures what each carries, one after the other.
pub(super) async fn check(ticket: &Ticket) -> Vec<Finding> {
    let (quic, tcp) = tokio::join!(try_way(ticket, Transport::Quic), try_way(ticket, Transport::Tcp));
    let is_any_open =
        matches!(quic, TransportCheck::Open { .. }) || matches!(tcp, TransportCheck::Open { .. });
    let mut findings = vec![
        rights(ticket, seconds_now()),
        judge("server over UDP", &quic, is_any_open, UDP),
        judge("server over TCP", &tcp, is_any_open, TCP),
    ];
    let topics = [&quic, &tcp].into_iter().find_map(|way| match way {
        TransportCheck::Open { topics, .. } => Some(topics),
        TransportCheck::Shut(_) => None,
    });
    findings.extend(topics.and_then(|topics| topic(ticket, topics)));
    for (name, way) in [("rate over UDP", quic), ("rate over TCP", tcp)] {
        if let TransportCheck::Open { client, round_trip, .. } = way {
            findings.extend(rate(name, &client, round_trip).await);
            findings.extend(packet_size(&client));
            client.close().await;
        }
    }
    findings
}

async fn try_way(ticket: &Ticket, transport: Transport) -> TransportCheck {
    let connector = Connector::new(Tuning { connect_timeout_ms: ANSWER_MS, ..Tuning::default() });
    let config = Config { transport, ..Config::default() };
    let client = match Client::connect_with(&connector, ticket, config).await {
        Ok(client) => client,
        Err(error) => return TransportCheck::Shut(error),
    };
    let (mut round_trip, mut topics) = (Duration::MAX, vec![]);
    for _ in 0..QUESTIONS {
        let asked = Instant::now();
        match client.list().await {
            Ok(list) => topics = list,
            Err(error) => return TransportCheck::Shut(error),
        }
        round_trip = round_trip.min(asked.elapsed());
    }
    TransportCheck::Open { client, round_trip, topics }
}

/// What the path carries; nothing where the server does not let it be measured.
async fn rate(name: &'static str, client: &Client, round_trip: Duration) -> Option<Finding> {
    let wanted = "two seconds of bytes without meaning";
    match rate::measure(client, round_trip).await {
        Ok(Some(rate)) => Some(rate::judge(name, &rate)),
        Ok(None) => Some(Finding::ok(
            name,
            "not measured: the server is older, answers several others, or lets this ticket subscribe to nothing",
            wanted,
        )),
        Err(error) => {
            let fix = Fix {
                host: "run it again; if it happens again, look at the server's log",
                docker: "the same",
                kubernetes: "the same",
            };
            Some(Finding::warn(name, format!("not measured: {error}"), wanted, fix))
        }
    }
}

/// Whether packets are as large as the route from here says that they may be; nothing over TCP and IPv6, where the system knows.
fn packet_size(client: &Client) -> Option<Finding> {
    let found = client.lane_stats().udp_payload_bytes;
    let (SocketAddr::V4(_), 1..) = (client.peer(), found) else { return None };
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect(client.peer()).ok()?;
    let route = u16::try_from(getsockopt(&socket, sockopt::IpMtu).ok()?).unwrap_or(u16::MAX);
    Some(judge_packet_size(found, route))
}

/// The headers of IPv4 and UDP.
const HEADERS_BYTES: u16 = 28;

/// The largest packets of Ethernet: those of loopback are larger than what is looked for.
const JUMBO_BYTES: u16 = 9_000;

fn judge_packet_size(found: u16, route: u16) -> Finding {
    let allowed = route - HEADERS_BYTES.min(route);
    let possible = allowed.min(JUMBO_BYTES - HEADERS_BYTES);
    let fix = Fix {
        host: "set the MTU of this host's interface to what the path carries (ip link set DEV mtu N), or find the device between that \
               drops larger packets without saying so (it must send ICMP \"fragmentation needed\")",
        docker: "the MTU of the network: --opt com.docker.network.driver.mtu=N",
        kubernetes: "the MTU of the pods in the CNI's configuration: that of the nodes less what its encapsulation takes",
    };
    let measured = format!("packets of {found} bytes; this host's route allows {allowed}");
    let wanted = "packets as large as the route allows: smaller ones cost processor time";
    // What an encapsulation takes is not worth a word.
    let is_good = u32::from(found) * 20 >= u32::from(possible) * 19;
    Finding::judge("packet size", (is_good, State::Warn), measured, wanted, fix)
}

/// A ticket that expires sooner is warned of.
const EXPIRES_SOON_S: u64 = 24 * 3_600;

/// What the ticket allows, by its own word: whether the server agrees, the other findings say.
fn rights(ticket: &Ticket, now_s: u64) -> Finding {
    let wanted = "a ticket that is valid for a day or more";
    let fix = Fix {
        host: "have the server's operator make another: tensor-relay tickets create",
        docker: "the same in the server's container: docker exec SERVER tensor-relay tickets create",
        kubernetes: "the same in the server's pod, and put it into the consumers' Secret",
    };
    let Some(token) = ticket.token() else {
        return Finding::ok("ticket", "no token: it gives access to a server with --open", wanted);
    };
    match token.read_unproven() {
        Err(error) => Finding::fail("ticket", error.to_string(), wanted, fix),
        Ok(claims) => {
            let measured = format!("ticket {}: {}", claims.id, described(&claims));
            match claims.expires_s.map(|expires_s| expires_s.saturating_sub(now_s)) {
                Some(0) => Finding::fail("ticket", measured, wanted, fix),
                Some(1..EXPIRES_SOON_S) => Finding::warn("ticket", measured, wanted, fix),
                _ => Finding::ok("ticket", measured, wanted),
            }
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_that_are_smaller_than_the_route_allows_are_told() {
        for (found, route, state) in [
            (1_472, 1_500, State::Ok),
            (1_422, 1_500, State::Ok),
            (1_200, 1_500, State::Warn),
            (1_472, 9_000, State::Warn),
            (8_972, 9_000, State::Ok),
            (65_000, u16::MAX, State::Ok),
            (9_000, 10, State::Ok),
        ] {
            assert_eq!(judge_packet_size(found, route).state, state, "{found} of {route}");
        }
    }
}
