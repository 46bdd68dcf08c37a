//! Lanes that are not granted or violate the protocol end alone, and the session that they name continues. Also:
//! retired lanes and fetched chunks.

use crate::raw::{Peer, hello, subscribe};
use std::{collections::BTreeSet, time::Duration};
use tensor_relay_protocol::{
    Announce, ClientMessage, CloseCode, EndReason, Epoch, HEADER_BYTES, InstanceId, LaneGrant, LaneId,
    LaneOffer, Mode, RangeSet, ServerMessage, StreamHeader, Subscribe, SubscriptionId, Version, Welcome,
};
use tensor_relay_server::Server;
use tensor_relay_tests::{
    pair::{CHUNK_BYTES, Sim, client_config, eventually, publish, server_config, simulate, topic},
    tensors,
};
use tokio::time::sleep;

/// The number of chunks of the versions published here.
const CHUNKS: u32 = (1 << 20) / CHUNK_BYTES;

/// A client whose session may have further lanes, and its grant.
struct Holder {
    peer: Peer,
    session: u64,
    offer: LaneOffer,
    instance: InstanceId,
}

impl Holder {
    async fn new(sim: &Sim, number: u8) -> Self {
        let mut peer = Peer::client(sim, number).await;
        peer.say_to_server(ClientMessage::Hello(hello())).await;
        let ServerMessage::Welcome(Welcome { session, lanes, instance, .. }) = peer.hear_server().await
        else {
            panic!("the server says welcome");
        };
        Self { peer, session, offer: lanes.unwrap(), instance }
    }

    fn join(&self, lane: u32) -> ClientMessage {
        self.join_with(lane, self.session, self.offer.grant)
    }

    fn join_with(&self, lane: u32, session: u64, grant: LaneGrant) -> ClientMessage {
        ClientMessage::Join { session, lane: LaneId(lane), grant, instance: self.instance }
    }

    async fn say(&mut self, message: ClientMessage) {
        self.peer.say_to_server(message).await;
    }

    async fn hear(&mut self) -> ServerMessage {
        self.peer.hear_server().await
    }

    /// Retires a lane, and checks that the next message is the answer.
    async fn retire(&mut self, lane: u32) {
        self.say(ClientMessage::Retire(LaneId(lane))).await;
        assert_eq!(self.hear().await, ServerMessage::Retired(LaneId(lane)));
    }

    /// Requests the topics, and checks that no other message arrives before them.
    async fn hears_nothing_more(&mut self) {
        self.say(ClientMessage::List).await;
        let next = self.hear().await;
        assert!(matches!(next, ServerMessage::Topics { .. }), "{next:?}");
    }

    /// Waits for the announcement of a version.
    async fn announced(&mut self) -> Announce {
        match self.hear().await {
            ServerMessage::Announce(announce) => announce,
            other => panic!("{other:?}"),
        }
    }

    async fn fetch(&mut self, announce: &Announce, chunks: std::ops::Range<u32>) {
        let (epoch, version) = (announce.id.epoch, announce.id.version);
        let (subscription, chunks) = (announce.subscription, RangeSet::from_range(chunks));
        self.say(ClientMessage::Fetch { subscription, epoch, version, chunks }).await;
    }
}

/// Reads the next whole chunk from `lane`.
async fn next_chunk(lane: &Peer) -> (Version, u32) {
    let mut stream = lane.connection.accept_uni().await.unwrap();
    let bytes = stream.read_to_end(HEADER_BYTES + CHUNK_BYTES as usize).await.unwrap();
    match StreamHeader::decode(bytes.first_chunk().unwrap()) {
        Ok(StreamHeader::Chunk(header)) => (header.version, header.chunk.0),
        other => panic!("{other:?}"),
    }
}

/// Reads the next chunks from `lane`, which must be all chunks of `version`, each once.
async fn whole_version(lane: &Peer, version: Version) {
    let mut came = BTreeSet::new();
    for _ in 0..CHUNKS {
        let (of, chunk) = next_chunk(lane).await;
        assert!(of == version && came.insert(chunk), "version {of}, chunk {chunk}");
    }
}

/// A lane that sends `first`, from the client with this number.
async fn lane(sim: &Sim, number: u8, first: ClientMessage) -> Peer {
    let mut peer = Peer::client(sim, number).await;
    peer.say_to_server(first).await;
    peer
}

async fn joined(sim: &Sim, number: u8, holder: &Holder, id: u32) -> Peer {
    let mut peer = lane(sim, number, holder.join(id)).await;
    assert_eq!(peer.hear_server().await, ServerMessage::Joined);
    peer
}

/// Runs `attack` with a good client connected; a session that it returns must have survived.
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
            holder.say(subscribe(1, 4)).await;
            while !matches!(holder.hear().await, ServerMessage::Announce(_)) {}
        }
        publish(&server, &mut publisher, 2, 1 << 20).await;
        tensors::check(&good.next().await.unwrap());
        eventually("only the good session is left", || server.stats().sessions == 1).await;
    });
}

/// Goal: a client without a session's grant cannot join the session, nor learn whether it exists. Method: a wrong
/// grant, a session that does not exist, another session's grant, and a session that has ended.
#[test]
fn lanes_without_a_grant() {
    beside_a_good_client(server_config(), async |sim, server| {
        let (holder, other) = (Holder::new(sim, 2).await, Holder::new(sim, 3).await);
        let over = Holder::new(sim, 4).await;
        over.peer.connection.close(0u32.into(), b"");
        eventually("that session is over", || server.stats().sessions == 3).await;
        let session = holder.session;
        let forged = [
            holder.join_with(1, session, LaneGrant::new([0; 32])),
            holder.join_with(1, session ^ 1, holder.offer.grant),
            holder.join_with(1, session, other.offer.grant),
            over.join(1),
        ];
        for join in forged {
            let (code, text) = lane(sim, 5, join).await.closed_because().await;
            assert_eq!((code, text.as_str()), (Some(CloseCode::Unauthorised), ""));
        }
        Some(holder)
    });
}

/// Goal: a lane that a load balancer sent to another process of the server is told so, and nothing else. Method: a
/// `Join` with a valid grant and the instance of another process.
#[test]
fn lanes_of_another_process() {
    beside_a_good_client(server_config(), async |sim, _| {
        let holder = Holder::new(sim, 2).await;
        let elsewhere = Holder { instance: InstanceId([9; 16]), ..holder };
        let (code, text) = lane(sim, 3, elsewhere.join(1)).await.closed_because().await;
        assert_eq!((code, text.as_str()), (Some(CloseCode::WrongInstance), ""));
        Some(elsewhere)
    });
}

/// Goal: malformed grants are distinguished from wrong ones before any lookup. Method: a `Join` with a grant of 31
/// bytes, and one with none.
#[test]
fn malformed_grants() {
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

/// Goal: a lane that joined may send no further message, and no session is greeted twice. Method: requests on a further
/// lane, which ends alone; a `Join` on a first lane, which ends the session.
#[test]
fn lanes_that_speak_out_of_turn() {
    beside_a_good_client(server_config(), async |sim, _| {
        let holder = Holder::new(sim, 2).await;
        let messages = [ClientMessage::List, ClientMessage::Hello(hello()), holder.join(9), subscribe(1, 4)];
        for (id, message) in (1..).zip(messages) {
            let mut further = joined(sim, 3, &holder, id).await;
            further.say_to_server(message).await;
            let (code, text) = further.closed_because().await;
            assert_eq!(code, Some(CloseCode::Misbehaved));
            assert!(text.contains("after it had joined"), "{text}");
        }
        Some(holder)
    });
    beside_a_good_client(server_config(), async |sim, _| {
        let mut holder = Holder::new(sim, 2).await;
        let further = joined(sim, 3, &holder, 1).await;
        holder.say(holder.join(2)).await;
        assert_eq!(holder.peer.closed_because().await.0, Some(CloseCode::Misbehaved));
        assert_eq!(further.closed_because().await.0, Some(CloseCode::Done), "it ends with its session");
        None
    });
}

/// Goal: a session has at most the allowed lanes, and lanes do not count as sessions. Method: join twice where one
/// further lane is allowed; fill a server with sessions, one of which has a further lane.
#[test]
fn too_many_lanes() {
    let config = tensor_relay_server::Config { lanes_max: 2, sessions_max: 3, ..server_config() };
    beside_a_good_client(config, async |sim, server| {
        let holder = Holder::new(sim, 2).await;
        assert_eq!(holder.offer.lanes_max, 2);
        let further = joined(sim, 3, &holder, 1).await;
        let (code, _) = lane(sim, 4, holder.join(2)).await.closed_because().await;
        assert_eq!(code, Some(CloseCode::TooBusy));
        further.connection.close(0u32.into(), b"");
        sleep(Duration::from_millis(100)).await;
        let _again = joined(sim, 4, &holder, 2).await;
        assert_eq!(server.stats().sessions, 2, "lanes are no sessions");
        Some(Holder::new(sim, 5).await)
    });
}

/// Goal: a server with the maximum of sessions still accepts their lanes, and no other session. Method: with two
/// sessions of two, join one; send Hello as a third. A third further lane is refused.
#[test]
fn lanes_of_a_full_server() {
    let config = tensor_relay_server::Config { sessions_max: 2, ..server_config() };
    beside_a_good_client(config, async |sim, server| {
        let holder = Holder::new(sim, 2).await;
        assert_eq!(server.stats().sessions, 2);
        let _further = joined(sim, 3, &holder, 1).await;
        let (code, text) = lane(sim, 4, ClientMessage::Hello(hello())).await.closed_because().await;
        assert_eq!((code, text.as_str()), (Some(CloseCode::TooBusy), ""));
        let _another = joined(sim, 4, &holder, 2).await;
        assert_eq!(server.stats().sessions, 2);
        let (code, _) = lane(sim, 5, holder.join(3)).await.closed_because().await;
        assert_eq!(
            code,
            Some(CloseCode::TooBusy),
            "all sessions have as many further lanes as there may be sessions"
        );
        Some(holder)
    });
}

/// Goal: a lane that its client closes ends at once, and makes room for another. Method: finish the control stream of
/// the one further lane, or send `Retire`, and join again.
#[test]
fn a_lane_that_leaves() {
    let config = tensor_relay_server::Config { lanes_max: 2, ..server_config() };
    beside_a_good_client(config, async |sim, _| {
        let mut holder = Holder::new(sim, 2).await;
        for id in [1, 2, 3, 4] {
            let mut further = joined(sim, 3, &holder, id).await;
            match id % 2 {
                0 => holder.retire(id).await,
                _ => {
                    further.finish();
                    assert_eq!(holder.hear().await, ServerMessage::Retired(LaneId(id)));
                }
            }
            let (code, text) = further.closed_because().await;
            assert_eq!((code, text.as_str()), (Some(CloseCode::Done), ""));
        }
        Some(holder)
    });
}

/// Goal: a lane's number is used once per session, and its retirement is sent once, in any order of messages. Method: a
/// number in use; one that was retired before or after it joined; retirements that are repeated or cross the server's
/// own.
#[test]
fn numbers_of_lanes() {
    beside_a_good_client(server_config(), async |sim, _| {
        let mut holder = Holder::new(sim, 2).await;
        let further = joined(sim, 3, &holder, 1).await;
        for id in [0, 1, u32::MAX] {
            let (code, text) = lane(sim, 4, holder.join(id)).await.closed_because().await;
            assert_eq!(code, Some(CloseCode::Misbehaved));
            assert!(text.contains("number"), "{text}");
        }
        holder.retire(2).await;
        further.connection.close(0u32.into(), b"");
        holder.say(ClientMessage::Retire(LaneId(2))).await;
        assert_eq!(holder.hear().await, ServerMessage::Retired(LaneId(1)), "unprompted");
        holder.say(ClientMessage::Retire(LaneId(1))).await;
        for id in [1, 2] {
            let (code, text) = lane(sim, 4, holder.join(id)).await.closed_because().await;
            assert_eq!((code, text.as_str()), (Some(CloseCode::Done), ""), "it came late");
        }
        holder.hears_nothing_more().await;
        Some(holder)
    });
}

/// Goal: a client cannot make a server store unboundedly many numbers. Method: retire a number beyond those that a
/// session may use.
#[test]
fn a_lane_number_that_is_too_large() {
    beside_a_good_client(server_config(), async |sim, _| {
        let mut holder = Holder::new(sim, 2).await;
        holder.say(ClientMessage::Retire(LaneId(1 << 20))).await;
        assert_eq!(holder.peer.closed_because().await.0, Some(CloseCode::Misbehaved));
        None
    });
}

/// Goal: fetched chunks of a lost lane are sent over another lane, each once and without credit, also in a session
/// whose control connection carries none; while there is no lane, they wait. Method: retire lane 0, receive half a
/// version over lane 1, close that, fetch, and join as lane 2.
#[test]
fn chunks_of_a_lost_lane_are_fetched() {
    beside_a_good_client(server_config(), async |sim, _| {
        let mut holder = Holder::new(sim, 2).await;
        let lost = joined(sim, 3, &holder, 1).await;
        holder.retire(0).await;
        holder.say(subscribe(1, CHUNKS)).await;
        let announce = holder.announced().await;
        for _ in 0..CHUNKS / 2 {
            next_chunk(&lost).await;
        }
        lost.connection.close(0u32.into(), b"");
        let mut completes = 0;
        loop {
            match holder.hear().await {
                ServerMessage::Retired(LaneId(1)) => break,
                ServerMessage::Complete { .. } => completes += 1,
                other => panic!("{other:?}"),
            }
        }
        holder.fetch(&announce, 0..CHUNKS).await;
        holder.fetch(&announce, 0..u32::MAX).await;
        let found = joined(sim, 4, &holder, 2).await;
        whole_version(&found, announce.id.version).await;
        if completes == 0 {
            assert!(matches!(holder.hear().await, ServerMessage::Complete { .. }));
        }
        // Repeated fetches, and fetches of chunks from a live lane, bring nothing.
        holder.fetch(&announce, 0..CHUNKS).await;
        holder.fetch(&announce, CHUNKS..u32::MAX).await;
        holder.hears_nothing_more().await;
        let (epoch, version) = (announce.id.epoch, announce.id.version);
        let committed =
            ClientMessage::Committed { subscription: SubscriptionId(1), epoch, version, kept: false };
        holder.say(committed).await;
        holder.say(subscribe(2, CHUNKS)).await;
        let again = holder.announced().await;
        assert_eq!(again.subscription, SubscriptionId(2));
        whole_version(&found, version).await;
        assert!(matches!(
            holder.hear().await,
            ServerMessage::Complete { subscription: SubscriptionId(2), .. }
        ));
        holder
            .say(ClientMessage::Unsubscribe { subscription: SubscriptionId(2), keep_place: false })
            .await;
        holder.peer.connection.close(0u32.into(), b"");
        assert_eq!(found.closed_because().await.0, Some(CloseCode::Done), "it ends with its session");
        None
    });
}

/// Goal: chunks do not wait for a lane forever. Method: retire the only lane, subscribe, and join none.
#[test]
fn a_session_without_lanes() {
    beside_a_good_client(server_config(), async |sim, server| {
        let mut holder = Holder::new(sim, 2).await;
        holder.retire(0).await;
        holder.say(subscribe(1, CHUNKS)).await;
        holder.announced().await;
        let end = ServerMessage::End { subscription: SubscriptionId(1), reason: EndReason::Evicted };
        assert_eq!(holder.hear().await, end);
        assert_eq!(server.stats().evicted, 1);
        None
    });
}

/// Goal: a fetch of chunks that are not being sent is an error, and nothing is sent. Method: a subscription that never
/// existed, and a version that is not being sent; for an ended subscription, fetches are ignored.
#[test]
fn fetches_of_what_is_not_there() {
    let fetch = |id| ClientMessage::Fetch {
        subscription: SubscriptionId(id),
        epoch: Epoch(1),
        version: Version(77),
        chunks: RangeSet::from_range(0..u32::MAX),
    };
    for (id, expected) in [(2, "subscription 2"), (1, "not being sent")] {
        beside_a_good_client(server_config(), async |sim, _| {
            let mut holder = Holder::new(sim, 2).await;
            holder.say(subscribe(1, CHUNKS)).await;
            holder.announced().await;
            holder.say(fetch(id)).await;
            let (code, text) = holder.peer.closed_because().await;
            assert_eq!(code, Some(CloseCode::Misbehaved));
            assert!(text.contains(expected), "{text}");
            None
        });
    }
    beside_a_good_client(server_config(), async |sim, _| {
        let mut holder = Holder::new(sim, 2).await;
        holder.say(subscribe(2, 0)).await;
        holder.announced().await;
        holder
            .say(ClientMessage::Unsubscribe { subscription: SubscriptionId(2), keep_place: false })
            .await;
        holder.say(fetch(2)).await;
        holder.hears_nothing_more().await;
        Some(holder)
    });
}

/// Goal: no more of an aborted version is sent, although its lane is retired and its chunks are fetched. Method: with
/// `preempt` and chunks that wait for credit, publish the next version; retire, fetch and give credit before the
/// answer.
#[test]
fn a_version_given_up_is_not_fetched() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        publish(&server, &mut publisher, 1, 1 << 20).await;
        let mut holder = Holder::new(&sim, 2).await;
        let lost = joined(&sim, 3, &holder, 1).await;
        holder.retire(0).await;
        let request = Subscribe::latest(SubscriptionId(1), topic("t"), 2);
        holder
            .say(ClientMessage::Subscribe(Subscribe { preempt: true, mode: Mode::Latest, ..request }))
            .await;
        let first = holder.announced().await;
        next_chunk(&lost).await;
        publish(&server, &mut publisher, 2, 1 << 20).await;
        let ServerMessage::Abort { epoch, version, reason, .. } = holder.hear().await else {
            panic!("the server aborts version 1")
        };
        let found = joined(&sim, 4, &holder, 2).await;
        holder.retire(1).await;
        holder.fetch(&first, 0..CHUNKS).await;
        let subscription = SubscriptionId(1);
        holder.say(ClientMessage::Credit { subscription, chunks: CHUNKS }).await;
        holder.say(ClientMessage::Abort { subscription, epoch, version, reason }).await;
        holder.say(ClientMessage::Credit { subscription, chunks: CHUNKS }).await;
        let second = holder.announced().await;
        assert_eq!(second.id.version, Version(2));
        whole_version(&found, Version(2)).await;
    });
}
