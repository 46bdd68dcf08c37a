//! Checks of the path to a server: the ticket, the transports that the server answers, and their rates.

use super::{
    finding::{Finding, Fix, State},
    rate,
};
use crate::{tickets::describe, units};
use nix::sys::socket::{getsockopt, sockopt};
use std::{
    net::{SocketAddr, UdpSocket},
    sync::Arc,
    time::{Duration, Instant},
};
use tensor_relay_client::{
    Client, ClientError, Config, Identity, LaneKind, LaneKindReason, RelayId, RelayPath, Ticket, TopicEntry,
    Transport,
};
use tensor_relay_server::seconds_now;

/// The deadline for connecting over one transport.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The number of requests that measure the round trip, of which the fastest counts.
const REQUESTS: usize = 5;

/// The number of lost connections after which a rate is not measured: there are three sizes of TCP segments.
const RECONNECTIONS_MAX: usize = 2;

/// The interval at which a lost connection is checked for.
const RECONNECT_POLL: Duration = Duration::from_millis(100);

/// A session over one transport.
struct Connected {
    client: Client,
    round_trip: Duration,
    topics: Vec<TopicEntry>,
}

/// Tries both transports concurrently and checks the ticket's topic; then measures the rates, one after the other.
pub(super) async fn check(ticket: &Ticket, identity: Option<Arc<Identity>>) -> Vec<Finding> {
    let config = |transport| Config { transport, identity: identity.clone(), ..Config::default() };
    if ticket.socket().is_some() {
        return check_socket(ticket, config(Transport::Auto)).await;
    }
    let (quic, tcp) =
        tokio::join!(connect(ticket, config(Transport::Quic)), connect(ticket, config(Transport::Tcp)));
    let otherwise = if quic.is_ok() || tcp.is_ok() { State::Warn } else { State::Fail };
    let mut findings = vec![
        rights(ticket, seconds_now()),
        judge("server over UDP", &quic, otherwise, UDP_FIX),
        judge("server over TCP", &tcp, otherwise, TCP_FIX),
    ];
    let connected = quic.as_ref().or(tcp.as_ref()).ok();
    findings.extend(connected.and_then(|connected| topic(ticket, &connected.topics)));
    for (name, connected) in [("rate over UDP", quic), ("rate over TCP", tcp)] {
        if let Ok(Connected { client, round_trip, .. }) = connected {
            findings.push(check_rate(name, &client, round_trip).await);
            findings.extend(packet_size(&client));
            findings.extend(segment_size(client.transport()));
            client.close().await;
        }
    }
    findings
}

/// Connects through the ticket's socket, and measures the rate of chunks over it.
async fn check_socket(ticket: &Ticket, config: Config) -> Vec<Finding> {
    let connected = connect(ticket, config).await;
    let mut findings = vec![judge("server over its socket", &connected, State::Fail, SOCKET_FIX)];
    findings.extend(ticket.token().map(|_| rights(ticket, seconds_now())));
    if let Ok(Connected { client, round_trip, topics }) = connected {
        findings.extend(topic(ticket, &topics));
        findings.push(check_rate("rate over the socket", &client, round_trip).await);
        client.close().await;
    }
    findings
}

async fn connect(ticket: &Ticket, config: Config) -> Result<Connected, ClientError> {
    let client = Client::connect_within(CONNECT_TIMEOUT, ticket, config).await?;
    let (mut round_trip, mut topics) = (Duration::MAX, vec![]);
    for _ in 0..REQUESTS {
        let began = Instant::now();
        topics = client.list().await?;
        round_trip = round_trip.min(began.elapsed());
    }
    Ok(Connected { client, round_trip, topics })
}

/// The finding about the rate of the path, or why it was not measured.
async fn check_rate(name: &'static str, client: &Client, round_trip: Duration) -> Finding {
    let mut rate = rate::measure(client, round_trip).await;
    for _ in 0..RECONNECTIONS_MAX {
        // After a loss, the client connects again, with smaller packets if large ones do not get through.
        if rate.is_ok() || !is_reconnected(client).await {
            break;
        }
        rate = rate::measure(client, round_trip).await;
    }
    let (state, why) = match rate {
        Ok(Some(rate)) => return rate::judge(name, &rate),
        Ok(None) => (
            State::Ok,
            "the server is too old, is answering several other probes, or this ticket allows no subscription"
                .into(),
        ),
        Err(error) => (State::Warn, error.to_string()),
    };
    let fix = Fix {
        host: "run the command again; if the error persists, read the server's log",
        docker: "the same",
        kubernetes: "the same",
    };
    Finding::new(name, state, format!("not measured: {why}"), "about two seconds of probes", fix)
}

/// Waits until a lost connection of `client` is replaced, at most for the time of one attempt and its wait.
async fn is_reconnected(client: &Client) -> bool {
    let replaced = async {
        while client.connection_lost().is_some() {
            tokio::time::sleep(RECONNECT_POLL).await;
        }
    };
    tokio::time::timeout(2 * CONNECT_TIMEOUT, replaced).await.is_ok()
}

/// Reports that only small TCP segments get through.
fn segment_size((kind, reason): (LaneKind, LaneKindReason)) -> Option<Finding> {
    (kind == LaneKind::Tcp && reason == LaneKindReason::OthersFailed).then(|| {
        let measured = "connections in full segments open and then carry nothing; smaller segments get through: larger \
                        packets are lost on the path without a notice";
        Finding::new("packet size over TCP", State::Warn, measured, "a path that carries what this host's route allows", MTU_FIX)
    })
}

/// Checks that packets are as large as the MTU of the local route allows. `None` over TCP, where the system determines
/// their size, and over IPv6, for which `IP_MTU` returns nothing.
fn packet_size(client: &Client) -> Option<Finding> {
    let used = client.lane_stats().udp_payload_bytes;
    let (Some(peer @ SocketAddr::V4(_)), 1..) = (client.peer().address(), used) else { return None };
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect(peer).ok()?;
    let route_mtu = u16::try_from(getsockopt(&socket, sockopt::IpMtu).ok()?).unwrap_or(u16::MAX);
    Some(judge_packet_size(used, route_mtu))
}

/// The headers of IPv4 and UDP.
const HEADERS_BYTES: u16 = 28;

/// The largest MTU of Ethernet, and the largest that is probed for. Loopback has a larger MTU.
const JUMBO_BYTES: u16 = 9_000;

fn judge_packet_size(used: u16, route_mtu: u16) -> Finding {
    let allowed = route_mtu - HEADERS_BYTES.min(route_mtu);
    let possible = allowed.min(JUMBO_BYTES - HEADERS_BYTES);
    let measured = format!("packets of {used} bytes; this host's route allows {allowed}");
    let wanted = "packets as large as the route allows: smaller ones cost processor time";
    // 5 % are tolerated: about the size of the headers of an encapsulation.
    let is_good = u32::from(used) * 20 >= u32::from(possible) * 19;
    Finding::new("packet size", State::Warn.unless(is_good), measured, wanted, MTU_FIX)
}

/// The remaining validity of a ticket below which the finding is a warning.
const EXPIRES_SOON_S: u64 = 24 * 3_600;

/// Checks the rights and the expiry that the ticket claims. Other findings show whether the server accepts the ticket.
fn rights(ticket: &Ticket, now_s: u64) -> Finding {
    let wanted = "a ticket that is valid for a day or more";
    let fix = Fix {
        host: "ask the server's operator for a new ticket: tensor-relay tickets create",
        docker: "the same in the server's container: docker exec SERVER tensor-relay tickets create",
        kubernetes: "the same in the server's pod; then put the ticket into the consumers' Secret",
    };
    let Some(token) = ticket.token() else {
        return Finding::ok(
            "ticket",
            "no token: for servers that run with --open, or that trust the key of --identity",
            wanted,
        );
    };
    match token.decode_unverified() {
        Err(error) => Finding::new("ticket", State::Fail, error.to_string(), wanted, fix),
        Ok(claims) => {
            let measured = format!("ticket {}: {}", claims.id, describe(&claims));
            let state = match claims.expires_s.map(|expires_s| expires_s.saturating_sub(now_s)) {
                Some(0) => State::Fail,
                Some(1..EXPIRES_SOON_S) => State::Warn,
                _ => State::Ok,
            };
            Finding::new("ticket", state, measured, wanted, fix)
        }
    }
}

const MTU_FIX: Fix = Fix {
    host: "set the MTU of this host's interface to what the path carries (ip link set DEV mtu N), or find the device on the \
           path that drops larger packets silently (it must send ICMP \"fragmentation needed\")",
    docker: "the MTU of the network: --opt com.docker.network.driver.mtu=N",
    kubernetes: "the MTU of the pods in the CNI's configuration: that of the nodes less the headers of its encapsulation",
};

const SOCKET_FIX: Fix = Fix {
    host: "start the server with --socket PATH; its permissions and the server's access list decide who may take: \
           docs/host.md",
    docker: "the same; share the volume of the socket's folder, and run as a user or group that may open it",
    kubernetes: "the same; mount the socket's folder (emptyDir or hostPath), and use one fsGroup",
};

const UDP_FIX: Fix = Fix {
    host: "allow the server's UDP port in firewalls, e.g. ufw allow 4747/udp; the path must carry QUIC's smallest packets, of \
           1,228 bytes (ping -M do -s 1200)",
    docker: "publish it for UDP too: -p 4747:4747/udp -p 4747:4747/tcp",
    kubernetes: "add a port with protocol: UDP to the one for TCP, in the Service and in every NetworkPolicy",
};

const TCP_FIX: Fix = Fix {
    host: "allow the server's TCP port in firewalls, e.g. ufw allow 4747/tcp, and check that it runs without --no-tcp",
    docker: "publish it for TCP too: -p 4747:4747/udp -p 4747:4747/tcp",
    kubernetes: "add a port with protocol: TCP to the one for UDP, in the Service and in every NetworkPolicy",
};

/// Judges one transport. A failure is only a warning if the other transport works, although that may be slower.
fn judge(
    name: &'static str,
    connected: &Result<Connected, ClientError>,
    otherwise: State,
    fix: Fix,
) -> Finding {
    let measured = match connected {
        Ok(connected) => format!("answers within {}", units::time(connected.round_trip)),
        Err(error) => error.to_string(),
    };
    let wanted = "an answer over UDP and over TCP: each is faster than the other on some paths";
    Finding::new(name, otherwise.unless(connected.is_ok()), measured, wanted, fix)
}

/// Checks that the topic of the ticket has a version; `None` for a ticket without a topic.
fn topic(ticket: &Ticket, topics: &[TopicEntry]) -> Option<Finding> {
    let name = ticket.topic()?;
    let fix = Fix {
        host: "start its publisher, or use a ticket for a topic that `tensor-relay list` shows",
        docker: "the same, at the server",
        kubernetes: "the same, at the server",
    };
    let wanted = "a version of the topic that the ticket names";
    Some(match topics.iter().find(|entry| entry.id.topic == *name) {
        Some(entry) => {
            let (version, size) = (entry.id.version, units::bytes(entry.payload_bytes));
            Finding::ok(
                "topic",
                format!("{name} has version {version}, {size}{}", way(&entry.relays)),
                wanted,
            )
        }
        None => Finding::new("topic", State::Warn, format!("{name} has no version"), wanted, fix),
    })
}

/// The relays that a version came through, as the end of a sentence.
fn way(relays: &RelayPath) -> String {
    let relays: Vec<_> = relays.relays().iter().map(RelayId::to_string).collect();
    if relays.is_empty() { String::new() } else { format!(", through relays: {}", relays.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_relays_of_a_version_are_named() {
        assert_eq!(way(RelayPath::none()), "");
        let path = RelayPath::default().through(RelayId([1; 16])).unwrap();
        let path = path.through(RelayId([2; 16])).unwrap();
        let expected = format!(", through relays: {}, {}", RelayId([1; 16]), RelayId([2; 16]));
        assert_eq!(way(&path), expected);
    }

    #[test]
    fn packets_smaller_than_the_route_allows_are_a_warning() {
        for (used, route, state) in [
            (1_472, 1_500, State::Ok),
            (1_422, 1_500, State::Ok),
            (1_200, 1_500, State::Warn),
            (1_472, 9_000, State::Warn),
            (8_972, 9_000, State::Ok),
            (65_000, u16::MAX, State::Ok),
            (9_000, 10, State::Ok),
        ] {
            assert_eq!(judge_packet_size(used, route).state, state, "{used} of {route}");
        }
    }
}
