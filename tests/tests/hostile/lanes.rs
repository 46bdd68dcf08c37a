//! Further lanes that have no right to be, or break rules: they end alone, and the session that they name goes on.

use crate::{
    raw::{Peer, hello, subscribe},
    script,
};
use std::time::Duration;
use tensor_relay_protocol::{
    ChunkHeader, ClientMessage, CloseCode, LaneGrant, LaneOffer, ServerMessage, Welcome,
};
use tensor_relay_server::Server;
use tensor_relay_tests::{
    pair::{Sim, client_config, eventually, publish, server_config, simulate, topic},
    tensors,
};
use tokio::time::sleep;

/// A client whose session may have further lanes, and what it was granted.
struct Holder {
    peer: Peer,
    session: u64,
    offer: LaneOffer,
}

impl Holder {
    async fn new(sim: &Sim, number: u8) -> Self {
        let mut peer = Peer::client(sim, number).await;
        peer.say_to_server(ClientMessage::Hello(hello())).await;
        let ServerMessage::Welcome(Welcome { session, lanes, .. }) = peer.hear_server().await else {
            panic!("the server says welcome");
        };
        Self { peer, session, offer: lanes.unwrap() }
    }

    fn join(&self) -> ClientMessage {
        ClientMessage::Join { session: self.session, grant: self.offer.grant }
    }
}

/// A lane that says `first`, from the client with this number.
async fn lane(sim: &Sim, number: u8, first: ClientMessage) -> Peer {
    let mut peer = Peer::client(sim, number).await;
    peer.say_to_server(first).await;
    peer
}

async fn joined(sim: &Sim, number: u8, holder: &Holder) -> Peer {
    let mut peer = lane(sim, number, holder.join()).await;
    assert_eq!(peer.hear_server().await, ServerMessage::Joined);
    peer
}

/// Runs `attack` beside a good client; a session that it returns must have lived through it.
fn beside_a_good_client(
    config: tensor_relay_server::Config,
    attack: impl AsyncFnOnce(&Sim, &Server) -> Option<Holder>,
) {
    simulate(1, async |sim| {
        let server = sim.server(config);
        let mut publisher = server.publisher(topic("t")).unwrap();
        publish(&server, &mut publisher, 1, 1 << 20).await;
        let client = sim.client(1, client_config()).await.unwrap();
        let mut good = client.subscribe(&topic("t")).await.unwrap();
        tensors::check(&good.next().await.unwrap());

        let holder = attack(&sim, &server).await;
        if let Some(mut holder) = holder {
            holder.peer.say_to_server(subscribe(1, 4)).await;
            assert!(matches!(holder.peer.hear_server().await, ServerMessage::Announce(_)));
        }
        publish(&server, &mut publisher, 2, 1 << 20).await;
        tensors::check(&good.next().await.unwrap());
        eventually("only the good session is left", || server.stats().sessions == 1).await;
    });
}

/// Goal: who does not hold a session's grant does not join it, and does not learn whether there is one.
/// Method: a grant that is wrong by a bit, a session that does not exist, another session's grant, and a session that is
/// over.
#[test]
fn lanes_without_a_grant() {
    beside_a_good_client(server_config(), async |sim, server| {
        let (holder, other) = (Holder::new(sim, 2).await, Holder::new(sim, 3).await);
        let over = Holder::new(sim, 4).await;
        over.peer.connection.close(0u32.into(), b"");
        eventually("that session is over", || server.stats().sessions == 3).await;
        let session = holder.session;
        let forged = [
            ClientMessage::Join { session, grant: LaneGrant::new([0; 32]) },
            ClientMessage::Join { session: session ^ 1, grant: holder.offer.grant },
            ClientMessage::Join { session, grant: other.offer.grant },
            over.join(),
        ];
        for join in forged {
            let (code, text) = lane(sim, 5, join).await.closed_because().await;
            assert_eq!((code, text.as_str()), (Some(CloseCode::Unauthorised), ""));
        }
        Some(holder)
    });
}

/// Goal: bytes that are no grant are told from one that is wrong, before anything is looked up.
/// Method: a `Join` with a grant of 31 bytes, and one with none.
#[test]
fn grants_that_are_none() {
    let short = [&b"\x2c\0\0\0\x42\x2a\x09\x07\0\0\0\0\0\0\0\x12\x1f"[..], &[3; 31]].concat();
    let none = b"\x0b\0\0\0\x42\x09\x09\x07\0\0\0\0\0\0\0".to_vec();
    for bytes in [short, none] {
        beside_a_good_client(server_config(), async |sim, _| {
            let mut peer = Peer::client(sim, 2).await;
            peer.say(&bytes).await;
            assert_eq!(peer.closed_because().await.0, Some(CloseCode::Malformed));
            None
        });
    }
}

/// Goal: a lane that joined says nothing more, and no session is greeted twice.
/// Method: requests on a further lane, which ends alone; a `Join` on a first lane, which ends the session.
#[test]
fn lanes_that_speak_out_of_turn() {
    beside_a_good_client(server_config(), async |sim, _| {
        let holder = Holder::new(sim, 2).await;
        for word in [ClientMessage::List, ClientMessage::Hello(hello()), holder.join(), subscribe(1, 4)] {
            let mut further = joined(sim, 3, &holder).await;
            further.say_to_server(word).await;
            let (code, text) = further.closed_because().await;
            assert_eq!(code, Some(CloseCode::Misbehaved));
            assert!(text.contains("first lane"), "{text}");
        }
        Some(holder)
    });
    beside_a_good_client(server_config(), async |sim, _| {
        let mut holder = Holder::new(sim, 2).await;
        let further = joined(sim, 3, &holder).await;
        holder.peer.say_to_server(holder.join()).await;
        assert_eq!(holder.peer.closed_because().await.0, Some(CloseCode::Misbehaved));
        assert_eq!(further.closed_because().await.0, Some(CloseCode::Done), "it ends with its session");
        None
    });
}

/// Goal: a session has as many lanes as it may, and lanes are no way around the number of sessions.
/// Method: join twice where one further lane is allowed; fill a server of two sessions, one of which has a further lane.
#[test]
fn too_many_lanes() {
    let config = tensor_relay_server::Config { lanes_max: 2, sessions_max: 3, ..server_config() };
    beside_a_good_client(config, async |sim, server| {
        let holder = Holder::new(sim, 2).await;
        assert_eq!(holder.offer.lanes_max, 2);
        let further = joined(sim, 3, &holder).await;
        let (code, _) = lane(sim, 4, holder.join()).await.closed_because().await;
        assert_eq!(code, Some(CloseCode::TooBusy));
        further.connection.close(0u32.into(), b"");
        sleep(Duration::from_millis(100)).await;
        let _again = joined(sim, 4, &holder).await;
        assert_eq!(server.stats().sessions, 2, "lanes are no sessions");
        Some(Holder::new(sim, 5).await)
    });
}

/// Goal: a server with all its sessions still takes the lanes of these, and no other session.
/// Method: with two sessions of two, join one; say hello as a third.
#[test]
fn lanes_of_a_full_server() {
    let config = tensor_relay_server::Config { sessions_max: 2, ..server_config() };
    beside_a_good_client(config, async |sim, server| {
        let holder = Holder::new(sim, 2).await;
        assert_eq!(server.stats().sessions, 2);
        let _further = joined(sim, 3, &holder).await;
        let (code, text) = lane(sim, 4, ClientMessage::Hello(hello())).await.closed_because().await;
        assert_eq!((code, text.as_str()), (Some(CloseCode::TooBusy), ""));
        let _another = joined(sim, 4, &holder).await;
        assert_eq!(server.stats().sessions, 2);
        Some(holder)
    });
}

/// Goal: a lane that its client is done with ends in order, and makes room for another one.
/// Method: finish the control stream of the one further lane that is allowed, and join again.
#[test]
fn a_lane_that_leaves() {
    let config = tensor_relay_server::Config { lanes_max: 2, ..server_config() };
    beside_a_good_client(config, async |sim, _| {
        let holder = Holder::new(sim, 2).await;
        for number in [3, 4, 5] {
            let mut further = joined(sim, number, &holder).await;
            further.finish();
            let (code, text) = further.closed_because().await;
            assert_eq!((code, text.as_str()), (Some(CloseCode::Done), ""));
        }
        Some(holder)
    });
}

/// Goal: a server cannot make a client receive a chunk again where it has one lane.
/// Method: a good version, but for one header that says it is the second attempt.
#[test]
fn another_attempt_on_the_only_lane() {
    script::expect_closed(CloseCode::Misbehaved, "another time", async |script| {
        script.good_beginning().await;
        let again = ChunkHeader { attempt: 1, ..script.header(0) };
        script.chunk(again, script.raw(0)).await;
    });
}
