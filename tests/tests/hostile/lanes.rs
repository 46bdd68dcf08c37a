//! Lanes of hostile clients: a lane without a valid grant or with a protocol violation ends, and its session continues.
//! Also retired lanes and requested chunks.

use crate::raw::{Peer, hello, subscribe};
use std::{collections::BTreeSet, time::Duration};
use tensor_relay_protocol::{
    Announce, ClientMessage, CloseCode, EndReason, Epoch, InstanceId, LaneGrant, LaneId, LaneOffer, Mode,
    RangeSet, ServerMessage, StreamHeader, Subscribe, SubscriptionId, Version, Welcome,
};
use tensor_relay_server::Server;
use tensor_relay_tests::{
    pair::{CHUNK_BYTES, Sim, client_config, eventually, publish, server_config, simulate, topic},
    tensors,
};
use tokio::time::sleep;

/// The number of chunks of the versions published here.
const CHUNKS: u32 = (1 << 20) / CHUNK_BYTES;

/// A client with the grant that lets further lanes join its session.
struct GrantHolder {
    peer: Peer,
    session: u64,
    offer: LaneOffer,
    instance: InstanceId,
}

impl GrantHolder {
    async fn new(sim: &Sim, number: u8) -> Self {
        let mut peer = Peer::client(sim, number).await;
        peer.send_to_server(ClientMessage::Hello(hello())).await;
        let ServerMessage::Welcome(Welcome { session, lanes, instance, .. }) =
            peer.receive_from_server().await
        else {
            panic!("the server sends Welcome");
        };
        Self { peer, session, offer: lanes.unwrap(), instance }
    }

    fn join(&self, lane: u32) -> ClientMessage {
        self.join_with(lane, self.session, self.offer.grant)
    }

    fn join_with(&self, lane: u32, session: u64, grant: LaneGrant) -> ClientMessage {
        ClientMessage::Join { session, lane: LaneId(lane), grant, instance: self.instance }
    }

    async fn send(&mut self, message: ClientMessage) {
        self.peer.send_to_server(message).await;
    }

    async fn receive(&mut self) -> ServerMessage {
        self.peer.receive_from_server().await
    }

    /// Retires a lane, and checks that the next message is the answer.
    async fn retire(&mut self, lane: u32) {
        self.send(ClientMessage::Retire(LaneId(lane))).await;
        assert_eq!(self.receive().await, ServerMessage::Retired(LaneId(lane)));
    }

    /// Requests the topics, and checks that no other message arrives before the answer.
    async fn assert_no_more_messages(&mut self) {
        self.send(ClientMessage::List).await;
        let next = self.receive().await;
        assert!(matches!(next, ServerMessage::Topics { .. }), "{next:?}");
    }

    /// Waits for the announcement of a version.
    async fn next_announcement(&mut self) -> Announce {
        match self.receive().await {
            ServerMessage::Announce(announce) => announce,
            other => panic!("{other:?}"),
        }
    }

    async fn request(&mut self, announce: &Announce, chunks: std::ops::Range<u32>) {
        let (epoch, version) = (announce.id.epoch, announce.id.version);
        let (subscription, chunks) = (announce.subscription, RangeSet::from_range(chunks));
        self.send(ClientMessage::Request {
            subscription,
            epoch,
            version,
            chunks,
            hashes: false,
            again: false,
        })
        .await;
    }
}

/// Reads the next complete chunk from `lane`.
async fn next_chunk(lane: &Peer) -> (Version, u32) {
    let mut stream = lane.connection.accept_data().await.unwrap();
    let bytes = stream.read_to_end().await;
    match StreamHeader::decode(bytes.first_chunk().unwrap()) {
        Ok(StreamHeader::Chunk(header)) => (header.version, header.chunk.0),
        other => panic!("{other:?}"),
    }
}

/// Reads the next chunks from `lane`, which must be all chunks of `version`, each once.
async fn receive_version(lane: &Peer, version: Version) {
    let mut received = BTreeSet::new();
    for _ in 0..CHUNKS {
        let (found, chunk) = next_chunk(lane).await;
        assert!(found == version && received.insert(chunk), "version {found}, chunk {chunk}");
    }
}

/// Opens a lane from the client host with this number, and sends `first`.
async fn open_lane(sim: &Sim, number: u8, first: ClientMessage) -> Peer {
    let mut peer = Peer::client(sim, number).await;
    peer.send_to_server(first).await;
    peer
}

async fn join_lane(sim: &Sim, number: u8, holder: &GrantHolder, id: u32) -> Peer {
    let mut peer = open_lane(sim, number, holder.join(id)).await;
    assert_eq!(peer.receive_from_server().await, ServerMessage::Joined);
    peer
}

/// Runs `attack` while a good client is connected. If `attack` returns a session, that session must have survived.
fn with_good_client(
    config: tensor_relay_server::Config,
    attack: impl AsyncFnOnce(&Sim, &Server) -> Option<GrantHolder>,
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
            holder.send(subscribe(1, 4)).await;
            while !matches!(holder.receive().await, ServerMessage::Announce(_)) {}
        }
        publish(&server, &mut publisher, 2, 1 << 20).await;
        tensors::check(&good.next().await.unwrap());
        eventually("only the good session remains", || server.stats().sessions == 1).await;
    });
}

/// Goal: a client without a session's grant cannot join the session, nor learn whether it exists. Method: a wrong
/// grant, a session that does not exist, another session's grant, and a session that has ended.
#[test]
fn lanes_without_a_grant_are_refused() {
    with_good_client(server_config(), async |sim, server| {
        let (holder, other) = (GrantHolder::new(sim, 2).await, GrantHolder::new(sim, 3).await);
        let ended = GrantHolder::new(sim, 4).await;
        ended.peer.connection.close(0);
        eventually("that session has ended", || server.stats().sessions == 3).await;
        let session = holder.session;
        let forged = [
            holder.join_with(1, session, LaneGrant::new([0; 32])),
            holder.join_with(1, session ^ 1, holder.offer.grant),
            holder.join_with(1, session, other.offer.grant),
            ended.join(1),
        ];
        for join in forged {
            let (code, text) = open_lane(sim, 5, join).await.wait_for_close().await;
            assert_eq!((code, text.as_str()), (Some(CloseCode::Unauthorised), ""));
        }
        let failures = server.status_reader().read().unwrap().failures;
        assert!(
            failures
                .iter()
                .any(|failure| (failure.reason, failure.count) == ("join_refused", 4)),
            "{failures:?}"
        );
        Some(holder)
    });
}

/// Goal: a lane that a load balancer sent to another instance of the server is closed with `WrongInstance`, and nothing
/// else. Method: a `Join` with a valid grant and another instance.
#[test]
fn lanes_of_another_instance_are_refused() {
    with_good_client(server_config(), async |sim, _| {
        let holder = GrantHolder::new(sim, 2).await;
        let other_instance = GrantHolder { instance: InstanceId([9; 16]), ..holder };
        let (code, text) = open_lane(sim, 3, other_instance.join(1)).await.wait_for_close().await;
        assert_eq!((code, text.as_str()), (Some(CloseCode::WrongInstance), ""));
        Some(other_instance)
    });
}

/// Goal: a malformed grant is a malformed message, not a wrong grant. Method: a `Join` with a grant of 31 bytes, and
/// one without a grant.
#[test]
fn malformed_grants_are_malformed_messages() {
    let short = [&b"\x2c\0\0\0\x42\x2a\x09\x07\0\0\0\0\0\0\0\x12\x1f"[..], &[3; 31]].concat();
    let none = b"\x0b\0\0\0\x42\x09\x09\x07\0\0\0\0\0\0\0".to_vec();
    for bytes in [short, none] {
        with_good_client(server_config(), async |sim, _| {
            let mut peer = Peer::client(sim, 2).await;
            peer.send_bytes(&bytes).await;
            assert_eq!(peer.wait_for_close().await.0, Some(CloseCode::Malformed));
            None
        });
    }
}

/// Goal: a joined lane may send no message, and a session's control stream no `Join`. Method: requests on a further
/// lane, which end that lane; a `Join` on the first lane, which ends the session.
#[test]
fn messages_after_join_end_the_lane() {
    with_good_client(server_config(), async |sim, _| {
        let holder = GrantHolder::new(sim, 2).await;
        let messages = [ClientMessage::List, ClientMessage::Hello(hello()), holder.join(9), subscribe(1, 4)];
        for (id, message) in (1..).zip(messages) {
            let mut further = join_lane(sim, 3, &holder, id).await;
            further.send_to_server(message).await;
            let (code, text) = further.wait_for_close().await;
            assert_eq!(code, Some(CloseCode::ProtocolViolation));
            assert!(text.contains("after it had joined"), "{text}");
        }
        Some(holder)
    });
    with_good_client(server_config(), async |sim, _| {
        let mut holder = GrantHolder::new(sim, 2).await;
        let further = join_lane(sim, 3, &holder, 1).await;
        holder.send(holder.join(2)).await;
        assert_eq!(holder.peer.wait_for_close().await.0, Some(CloseCode::ProtocolViolation));
        assert_eq!(further.wait_for_close().await.0, Some(CloseCode::Done), "a lane ends with its session");
        None
    });
}

/// Goal: a session has at most the allowed lanes, and lanes do not count as sessions. Method: join twice where one
/// further lane is allowed; fill a server with sessions, one of which has a further lane.
#[test]
fn excess_lanes_are_refused() {
    let config = tensor_relay_server::Config { lanes_max: 2, sessions_max: 3, ..server_config() };
    with_good_client(config, async |sim, server| {
        let holder = GrantHolder::new(sim, 2).await;
        assert_eq!(holder.offer.lanes_max, 2);
        let further = join_lane(sim, 3, &holder, 1).await;
        let (code, _) = open_lane(sim, 4, holder.join(2)).await.wait_for_close().await;
        assert_eq!(code, Some(CloseCode::TooBusy));
        further.connection.close(0);
        sleep(Duration::from_millis(100)).await;
        let _second = join_lane(sim, 4, &holder, 2).await;
        assert_eq!(server.stats().sessions, 2, "lanes do not count as sessions");
        Some(GrantHolder::new(sim, 5).await)
    });
}

/// Goal: a server with the maximum of sessions still accepts their lanes, and no other session. Method: with two
/// sessions of two, join one; send Hello as a third. A third further lane is refused.
#[test]
fn a_full_server_accepts_lanes_but_no_sessions() {
    let config = tensor_relay_server::Config { sessions_max: 2, ..server_config() };
    with_good_client(config, async |sim, server| {
        let holder = GrantHolder::new(sim, 2).await;
        assert_eq!(server.stats().sessions, 2);
        let _further = join_lane(sim, 3, &holder, 1).await;
        let (code, text) = open_lane(sim, 4, ClientMessage::Hello(hello())).await.wait_for_close().await;
        assert_eq!((code, text.as_str()), (Some(CloseCode::TooBusy), ""));
        let _another = join_lane(sim, 4, &holder, 2).await;
        assert_eq!(server.stats().sessions, 2);
        let (code, _) = open_lane(sim, 5, holder.join(3)).await.wait_for_close().await;
        assert_eq!(
            code,
            Some(CloseCode::TooBusy),
            "all sessions have as many further lanes as there may be sessions"
        );
        Some(holder)
    });
}

/// Goal: a lane that its client closes ends immediately, and another may join. Method: finish the control stream of the
/// one further lane, or send `Retire`, and join again.
#[test]
fn a_closed_lane_makes_room_for_another() {
    let config = tensor_relay_server::Config { lanes_max: 2, ..server_config() };
    with_good_client(config, async |sim, _| {
        let mut holder = GrantHolder::new(sim, 2).await;
        for id in [1, 2, 3, 4] {
            let mut further = join_lane(sim, 3, &holder, id).await;
            match id % 2 {
                0 => holder.retire(id).await,
                _ => {
                    further.finish_control();
                    assert_eq!(holder.receive().await, ServerMessage::Retired(LaneId(id)));
                }
            }
            let (code, text) = further.wait_for_close().await;
            assert_eq!((code, text.as_str()), (Some(CloseCode::Done), ""));
        }
        Some(holder)
    });
}

/// Goal: a lane's number is used once per session, and its retirement is sent once, in any order of messages. Method: a
/// number in use; one that was retired before or after it joined; retirements that are repeated or cross the server's
/// own.
#[test]
fn lane_numbers_are_used_once() {
    with_good_client(server_config(), async |sim, _| {
        let mut holder = GrantHolder::new(sim, 2).await;
        let further = join_lane(sim, 3, &holder, 1).await;
        for id in [0, 1, u32::MAX] {
            let mut refused = open_lane(sim, 4, holder.join(id)).await;
            assert!(refused.receives_nothing().await, "it is not told before that it joined");
            let (code, text) = refused.wait_for_close().await;
            assert_eq!(code, Some(CloseCode::ProtocolViolation));
            assert!(text.contains("number"), "{text}");
        }
        holder.retire(2).await;
        further.connection.close(0);
        holder.send(ClientMessage::Retire(LaneId(2))).await;
        assert_eq!(holder.receive().await, ServerMessage::Retired(LaneId(1)), "unprompted");
        holder.send(ClientMessage::Retire(LaneId(1))).await;
        for id in [1, 2] {
            let (code, text) = open_lane(sim, 4, holder.join(id)).await.wait_for_close().await;
            assert_eq!((code, text.as_str()), (Some(CloseCode::Done), ""), "the number was retired before");
        }
        holder.assert_no_more_messages().await;
        Some(holder)
    });
}

/// Goal: a client cannot make a server store unboundedly many numbers. Method: retire a number beyond the limit.
#[test]
fn lane_numbers_beyond_the_limit_end_the_session() {
    with_good_client(server_config(), async |sim, _| {
        let mut holder = GrantHolder::new(sim, 2).await;
        holder.send(ClientMessage::Retire(LaneId(1 << 20))).await;
        assert_eq!(holder.peer.wait_for_close().await.0, Some(CloseCode::ProtocolViolation));
        None
    });
}

/// Goal: requested chunks of a lost lane are sent over another lane, each once and without credit, also in a session
/// whose control connection carries no chunks; without a lane, they wait. Method: retire lane 0, receive half a version
/// over lane 1, close that, request, and join as lane 2.
#[test]
fn chunks_of_a_lost_lane_are_requested() {
    with_good_client(server_config(), async |sim, _| {
        let mut holder = GrantHolder::new(sim, 2).await;
        let lost = join_lane(sim, 3, &holder, 1).await;
        holder.retire(0).await;
        holder.send(subscribe(1, CHUNKS)).await;
        let announce = holder.next_announcement().await;
        for _ in 0..CHUNKS / 2 {
            next_chunk(&lost).await;
        }
        lost.connection.close(0);
        let mut completes = 0;
        loop {
            match holder.receive().await {
                ServerMessage::Retired(LaneId(1)) => break,
                ServerMessage::Complete { .. } => completes += 1,
                other => panic!("{other:?}"),
            }
        }
        holder.request(&announce, 0..CHUNKS).await;
        holder.request(&announce, 0..u32::MAX).await;
        let live = join_lane(sim, 4, &holder, 2).await;
        receive_version(&live, announce.id.version).await;
        if completes == 0 {
            assert!(matches!(holder.receive().await, ServerMessage::Complete { .. }));
        }
        // Repeated requests, and requests for chunks from a live lane, have no effect.
        holder.request(&announce, 0..CHUNKS).await;
        holder.request(&announce, CHUNKS..u32::MAX).await;
        holder.assert_no_more_messages().await;
        let (epoch, version) = (announce.id.epoch, announce.id.version);
        let committed =
            ClientMessage::Committed { subscription: SubscriptionId(1), epoch, version, kept: false };
        holder.send(committed).await;
        holder.send(subscribe(2, CHUNKS)).await;
        let again = holder.next_announcement().await;
        assert_eq!(again.subscription, SubscriptionId(2));
        receive_version(&live, version).await;
        assert!(matches!(
            holder.receive().await,
            ServerMessage::Complete { subscription: SubscriptionId(2), .. }
        ));
        holder
            .send(ClientMessage::Unsubscribe { subscription: SubscriptionId(2), keep_place: false })
            .await;
        holder.peer.connection.close(0);
        assert_eq!(live.wait_for_close().await.0, Some(CloseCode::Done), "a lane ends with its session");
        None
    });
}

/// Goal: chunks do not wait for a lane forever. Method: retire the only lane, subscribe, and join none.
#[test]
fn a_subscription_without_a_lane_is_evicted() {
    with_good_client(server_config(), async |sim, server| {
        let mut holder = GrantHolder::new(sim, 2).await;
        holder.retire(0).await;
        holder.send(subscribe(1, CHUNKS)).await;
        holder.next_announcement().await;
        let end = ServerMessage::End { subscription: SubscriptionId(1), reason: EndReason::Evicted };
        assert_eq!(holder.receive().await, end);
        assert_eq!(server.stats().evicted, 1);
        None
    });
}

/// Goal: a request for chunks that are not being sent is an error, and nothing is sent. Method: a subscription that never
/// existed, and a version that is not being sent; for an ended subscription, requests are ignored.
#[test]
fn requests_for_unsent_chunks_are_refused() {
    let request = |id| ClientMessage::Request {
        subscription: SubscriptionId(id),
        epoch: Epoch(1),
        version: Version(77),
        chunks: RangeSet::from_range(0..u32::MAX),
        hashes: false,
        again: false,
    };
    for (id, expected) in [(2, "subscription 2"), (1, "not being sent")] {
        with_good_client(server_config(), async |sim, _| {
            let mut holder = GrantHolder::new(sim, 2).await;
            holder.send(subscribe(1, CHUNKS)).await;
            holder.next_announcement().await;
            holder.send(request(id)).await;
            let (code, text) = holder.peer.wait_for_close().await;
            assert_eq!(code, Some(CloseCode::ProtocolViolation));
            assert!(text.contains(expected), "{text}");
            None
        });
    }
    with_good_client(server_config(), async |sim, _| {
        let mut holder = GrantHolder::new(sim, 2).await;
        holder.send(subscribe(2, 0)).await;
        holder.next_announcement().await;
        holder
            .send(ClientMessage::Unsubscribe { subscription: SubscriptionId(2), keep_place: false })
            .await;
        holder.send(request(2)).await;
        holder.assert_no_more_messages().await;
        Some(holder)
    });
}

/// Goal: no more chunks of an aborted version are sent, although its lane is retired and its chunks are requested.
/// Method: with `preempt` and chunks that wait for credit, publish the next version; retire, request and give credit
/// before the answer.
#[test]
fn an_aborted_version_is_not_sent_on_request() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        publish(&server, &mut publisher, 1, 1 << 20).await;
        let mut holder = GrantHolder::new(&sim, 2).await;
        let lost = join_lane(&sim, 3, &holder, 1).await;
        holder.retire(0).await;
        let request = Subscribe::latest(SubscriptionId(1), topic("t"), 2);
        holder
            .send(ClientMessage::Subscribe(Subscribe { preempt: true, mode: Mode::Latest, ..request }))
            .await;
        let first = holder.next_announcement().await;
        next_chunk(&lost).await;
        publish(&server, &mut publisher, 2, 1 << 20).await;
        let ServerMessage::Abort { epoch, version, reason, .. } = holder.receive().await else {
            panic!("the server aborts version 1")
        };
        let live = join_lane(&sim, 4, &holder, 2).await;
        holder.retire(1).await;
        holder.request(&first, 0..CHUNKS).await;
        let subscription = SubscriptionId(1);
        holder.send(ClientMessage::Credit { subscription, chunks: CHUNKS }).await;
        holder.send(ClientMessage::Abort { subscription, epoch, version, reason }).await;
        holder.send(ClientMessage::Credit { subscription, chunks: CHUNKS }).await;
        let second = holder.next_announcement().await;
        assert_eq!(second.id.version, Version(2));
        receive_version(&live, Version(2)).await;
    });
}

/// Goal: a lane that has joined is no longer evicted for clients that have not logged in. Method: a session with a lane,
/// then more silent connections from their host than may wait.
#[test]
fn joined_lanes_are_not_evicted_for_strangers() {
    simulate(7, async |sim| {
        let server = sim.server(tensor_relay_server::Config { logins_max: 4, ..server_config() });
        let mut holder = GrantHolder::new(&sim, 1).await;
        let mut lane = Peer::client(&sim, 1).await;
        lane.send_to_server(holder.join(1)).await;
        assert_eq!(lane.receive_from_server().await, ServerMessage::Joined);
        let mut silent = vec![];
        for _ in 0..8 {
            silent.push(Peer::client(&sim, 1).await);
        }
        sleep(Duration::from_secs(1)).await;
        assert!(lane.connection.is_open() && holder.peer.connection.is_open());
        holder.assert_no_more_messages().await;
        let failures = server.status_reader().read().unwrap().failures;
        let evicted = failures.iter().find(|failure| failure.reason == "evicted");
        assert_eq!(evicted.map(|failure| failure.count), Some(4), "of eight strangers, four stay");
    });
}
