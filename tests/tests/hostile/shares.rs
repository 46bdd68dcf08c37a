//! What clients hold of a server is shared: no principal can take the places of the others, however many sessions it
//! opens.

use crate::raw::{Peer, hello, is_skipped_over_tcp};
use std::{ops::Range, sync::Arc, time::Duration};
use tensor_relay_protocol::{
    ClientMessage, CloseCode, CodecChoice, CodecId, Dtype, EndReason, Grant, Hello, LaneId, Manifest,
    ProbeBytes, ServerMessage, Shape, StreamHeader, Subscribe, SubscriptionId, TensorName, TensorSpec, Token,
    Verbs, Welcome,
};
use tensor_relay_server::{Borrowed, BoxFuture, Config, Source, SourceError};
use tensor_relay_tests::pair::{Sim, server_config, simulate, token_with, topic};

/// The ticket of the greedy principal, and that of the other.
const GREEDY: u8 = 1;
const OTHER: u8 = 2;

fn token(id: u8) -> Token {
    token_with(id, vec![Grant::everywhere(Verbs::CONSUME)])
}

/// A login from the host with this number.
async fn log_in(sim: &Sim, host: u8, token: Token) -> Peer {
    let mut peer = Peer::client(sim, host).await;
    peer.send_to_server(ClientMessage::Hello(Hello { token: Some(token), ..hello() }))
        .await;
    peer
}

async fn welcomed(sim: &Sim, host: u8, ticket: u8) -> (Peer, Welcome) {
    let mut peer = log_in(sim, host, token(ticket)).await;
    let ServerMessage::Welcome(welcome) = peer.receive_from_server().await else { panic!() };
    (peer, welcome)
}

async fn is_served(peer: &mut Peer) -> bool {
    peer.send_to_server(ClientMessage::List).await;
    matches!(peer.receive_from_server().await, ServerMessage::Topics { .. })
}

const TOO_BUSY: (Option<CloseCode>, String) = (Some(CloseCode::TooBusy), String::new());

/// Goal: one ticket, even without grants, that takes all sessions gets no more, and gives half of them to another, its
/// newest; then nobody loses any. Method: fill the sessions, log in with the other ticket, and again with both.
#[test]
fn one_ticket_cannot_keep_all_sessions() {
    simulate(1, async |sim| {
        let _server = sim.server(Config { sessions_max: 8, ..server_config() });
        let mut greedy = vec![];
        for host in 1..=8 {
            let mut peer = log_in(&sim, host, token_with(GREEDY, vec![])).await;
            assert!(matches!(peer.receive_from_server().await, ServerMessage::Welcome(_)));
            greedy.push(peer);
        }
        let ninth = log_in(&sim, 9, token_with(GREEDY, vec![])).await;
        assert_eq!(ninth.wait_for_close().await, TOO_BUSY);
        let mut others = vec![];
        for host in 10..14 {
            others.push(welcomed(&sim, host, OTHER).await.0);
            assert_eq!(greedy.pop().unwrap().wait_for_close().await, TOO_BUSY);
        }
        for (host, ticket) in [(14, OTHER), (15, GREEDY)] {
            assert_eq!(log_in(&sim, host, token(ticket)).await.wait_for_close().await, TOO_BUSY);
        }
        for peer in greedy.iter_mut().chain(&mut others) {
            assert!(is_served(peer).await);
        }
    });
}

/// Goal: the same of subscriptions: the newest of the greedy ticket ends, with the reason. Method: four sessions with
/// all subscriptions that the server has, of topics that do not exist.
#[test]
fn one_ticket_cannot_keep_all_subscriptions() {
    simulate(2, async |sim| {
        let _server = sim.server(Config { sessions_max: 8, subscriptions_max: 64, ..server_config() });
        let subscribe =
            |id| ClientMessage::Subscribe(Subscribe::latest(SubscriptionId(id), topic("none"), 8));
        let mut greedy = vec![];
        for host in 1..=4 {
            let (mut peer, _) = welcomed(&sim, host, GREEDY).await;
            for id in 1..=64 {
                peer.send_to_server(subscribe(id)).await;
            }
            assert!(is_served(&mut peer).await);
            greedy.push(peer);
        }
        let ended = |id| ServerMessage::End {
            subscription: SubscriptionId(id),
            reason: EndReason::TooManySubscriptions,
        };
        let (mut fifth, _) = welcomed(&sim, 5, GREEDY).await;
        fifth.send_to_server(subscribe(1)).await;
        assert_eq!(fifth.receive_from_server().await, ended(1));
        let (mut other, _) = welcomed(&sim, 6, OTHER).await;
        other.send_to_server(subscribe(1)).await;
        assert!(is_served(&mut other).await, "it was not refused");
        assert_eq!(greedy[3].receive_from_server().await, ended(64));
        assert!(is_served(&mut greedy[3]).await);
    });
}

/// Goal: the same of further lanes and of probes: a lane is retired, and a probe is cut off, for those of another
/// ticket. Method: fill both from the greedy ticket, whose clients read nothing.
#[test]
fn one_ticket_cannot_keep_all_lanes_and_probes() {
    simulate(3, async |sim| {
        let _server = sim.server(Config { sessions_max: 5, lanes_max: 8, ..server_config() });
        let mut greedy = vec![];
        for host in 1..=4 {
            let (mut peer, welcome) = welcomed(&sim, host, GREEDY).await;
            let bytes = ProbeBytes::new(ProbeBytes::MAX).unwrap();
            peer.send_to_server(ClientMessage::Probe { probe: 1, lane: LaneId(0), bytes })
                .await;
            greedy.push((peer, welcome));
        }
        let join = |welcome: &Welcome, lane| {
            let grant = welcome.lanes.as_ref().unwrap().grant;
            ClientMessage::Join {
                session: welcome.session,
                lane: LaneId(lane),
                grant,
                instance: welcome.instance,
            }
        };
        let mut lanes = vec![];
        for number in 1..=5_u8 {
            let mut lane = Peer::client(&sim, 10 + number).await;
            lane.send_to_server(join(&greedy[0].1, number.into())).await;
            assert_eq!(lane.receive_from_server().await, ServerMessage::Joined);
            lanes.push(lane);
        }
        let (mut other, welcome) = welcomed(&sim, 20, OTHER).await;
        let mut lane = Peer::client(&sim, 21).await;
        lane.send_to_server(join(&welcome, 1)).await;
        assert_eq!(lane.receive_from_server().await, ServerMessage::Joined);
        assert_eq!(lanes[4].wait_for_close().await, TOO_BUSY);
        assert_eq!(greedy[0].0.receive_from_server().await, ServerMessage::Retired(LaneId(5)));
        tokio::time::sleep(Duration::from_secs(1)).await; // The greedy probes have begun.
        let bytes = ProbeBytes::new(1000).unwrap();
        other
            .send_to_server(ClientMessage::Probe { probe: 1, lane: LaneId(0), bytes })
            .await;
        let answer = other.connection.accept_data().await.unwrap().read_to_end().await;
        let expected =
            StreamHeader::Probe(tensor_relay_protocol::ProbeHeader { probe: 1, bytes: 1000 }).encode();
        assert!(answer.starts_with(&expected) && answer.len() > 1000, "{} bytes", answer.len());
    });
}

/// A source whose reads are copies.
#[derive(Debug)]
struct Copying(u64);

impl Source for Copying {
    fn len_bytes(&self) -> u64 {
        self.0
    }

    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<bytes::Bytes, SourceError>> {
        Box::pin(async move { Ok(vec![7; (range.end - range.start) as usize].into()) })
    }
}

/// Goal: copies of chunks that subscribers do not accept take bounded memory, and each subscriber still gets chunks.
/// Method: a borrowed version of many chunks, and eight clients that grant credit for all of them and read none.
#[test]
fn unread_copies_are_bounded() {
    const CHUNK: u64 = 2 << 20; // More than the window of a stream that is not read.
    const CLIENTS: u8 = 8;
    if is_skipped_over_tcp("raw clients read whatever arrives") {
        return;
    }
    simulate(4, async |sim| {
        let config = Config { chunk_bytes: CHUNK as u32, encoded_bytes: 4 * CHUNK, ..server_config() };
        let server = sim.server(Config { codec: CodecChoice::Fixed(CodecId::Raw), ..config });
        let shape = Shape::new(&[64 * CHUNK]).unwrap();
        let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, shape);
        let lend = |manifest: &Manifest| Arc::new(Copying(manifest.payload_bytes())) as Arc<dyn Source>;
        let borrowed = Borrowed::from_source(&server.staging(), vec![spec], vec![], lend).unwrap();
        let mut publisher = server.publisher(topic("t")).unwrap();
        publisher.publish(borrowed, vec![]).await.unwrap();
        let mut clients = vec![];
        for host in 1..=CLIENTS {
            let (mut peer, _) = welcomed(&sim, host, OTHER).await;
            peer.send_to_server(ClientMessage::Subscribe(Subscribe::latest(
                SubscriptionId(1),
                topic("t"),
                64,
            )))
            .await;
            clients.push(peer);
        }
        tokio::time::sleep(Duration::from_secs(5)).await;
        let begun = server.stats().encoder.host_copied_bytes / CHUNK;
        // The first client's take the budget, and each other client has one.
        assert_eq!(begun, 4 + u64::from(CLIENTS - 1));
    });
}
