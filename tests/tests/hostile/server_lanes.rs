//! Servers that offer lanes and violate the protocol on them: an error of a lane ends that lane, an error of the
//! session ends the session.

use crate::{
    raw::{INSTANCE, Peer},
    script::{CHUNKS, EPOCH, Script, VERSION},
};
use std::time::Duration;
use tensor_relay_client::{Client, Config, Lanes, SubscriptionError};
use tensor_relay_protocol::{
    ChunkHeader, ClientMessage, CloseCode, LaneGrant, LaneId, LaneOffer, RangeSet, ServerMessage,
    StreamHeader,
};
use tensor_relay_tests::{
    pair::{Sim, client_config, eventually, simulate, topic},
    tensors,
};
use tokio::time::{sleep, timeout};

const GRANT: [u8; LaneGrant::BYTES] = [7; LaneGrant::BYTES];

/// The wait for another lane: longer than the client's first delays between attempts to join.
const REJOIN_WAIT: Duration = Duration::from_secs(60);

/// Runs `server`, which offers `lanes_max` lanes, against a client that wants `lanes`, and passes the client's result
/// to `check`. The client lives until the server has finished.
fn with_lane_offer<T>(
    lanes_max: u32,
    lanes: u32,
    server: impl AsyncFnOnce(&mut Script) -> T,
    check: impl AsyncFnOnce(Result<(), SubscriptionError>, &Client, T),
) {
    simulate(1, async |sim| {
        let user = async {
            let config = Config { lanes: Lanes::Fixed(lanes), ..client_config() };
            let client = sim.client(1, config).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            let received = subscription.next().await.map(|snapshot| tensors::check(&snapshot));
            (client, received)
        };
        let served = async {
            let mut script = start(&sim, lanes_max).await;
            let result = server(&mut script).await;
            (script, result)
        };
        let ((client, received), (_script, result)) = tokio::join!(user, served);
        check(received, &client, result).await;
    });
}

async fn start(sim: &Sim, lanes_max: u32) -> Script {
    let offer = LaneOffer { lanes_max, grant: LaneGrant::new(GRANT) };
    Script::new(Peer::server_offering(sim, Some(offer)).await)
}

/// Accepts the next lane that the client opens, and sends `Joined`.
async fn accept_lane(script: &Script) -> Peer {
    accept_numbered_lane(script).await.0
}

async fn accept_numbered_lane(script: &Script) -> (Peer, LaneId) {
    let (mut lane, message) = script.peer.accept_further_lane().await;
    let ClientMessage::Join { session: 1, lane: number, grant, instance } = message else {
        panic!("{message:?}")
    };
    assert_eq!((grant, instance), (LaneGrant::new(GRANT), INSTANCE));
    lane.send_to_client(ServerMessage::Joined).await;
    (lane, number)
}

/// Returns true if the client opens another lane within [`REJOIN_WAIT`].
async fn opens_another_lane(script: &Script) -> bool {
    timeout(REJOIN_WAIT, script.peer.accept_further_lane()).await.is_ok()
}

async fn send_chunk_over(lane: &Peer, script: &Script, header: ChunkHeader) {
    let raw = script.raw(header.chunk.0);
    lane.send_stream(&[&StreamHeader::Chunk(header).encode(), raw]).await;
}

/// Goal: the script itself is valid, so that failures of the tests below are due to their attacks. Method: two further
/// lanes, each with a chunk; one is retired in the middle of a third chunk, which the client requests.
#[test]
fn chunks_of_a_retired_lane_are_requested() {
    with_lane_offer(
        3,
        3,
        async |script| {
            let ((one, number), two) = (accept_numbered_lane(script).await, accept_lane(script).await);
            script.begin_version().await;
            send_chunk_over(&one, script, script.header(0)).await;
            send_chunk_over(&two, script, script.header(1)).await;
            let mut cut_off = one.connection.open_data().await.unwrap();
            cut_off.write(&StreamHeader::Chunk(script.header(2)).encode()).await;
            sleep(Duration::from_secs(1)).await;
            script.peer.send_to_client(ServerMessage::Retired(number)).await;
            assert_eq!(next_request(script).await.iter().collect::<Vec<_>>(), [2]);
            assert_eq!(
                one.wait_for_close().await.0,
                Some(CloseCode::Done),
                "the client closes the retired lane"
            );
            send_chunk_over(&two, script, script.header(2)).await;
            script.send_complete(script.digest()).await;
            script.wait_for_committed().await;
            (one, two)
        },
        async |received, client, _lanes| {
            received.unwrap();
            assert_eq!(client.lanes().len(), 2);
        },
    );
}

/// Waits for the client's next `Request`; returns its chunks.
async fn next_request(script: &mut Script) -> RangeSet {
    loop {
        if let ClientMessage::Request { version, chunks, .. } = script.peer.receive_from_client().await {
            assert_eq!(version, VERSION);
            return chunks;
        }
    }
}

/// Goal: a client ends the session if the server retires a lane that cannot be retired. Method: the control stream's
/// lane, a lane that never existed, and the same lane twice.
#[test]
fn retiring_an_invalid_lane_ends_the_session() {
    for numbers in [&[0][..], &[7], &[1, 1]] {
        with_lane_offer(
            2,
            2,
            async |script| {
                let (_lane, number) = accept_numbered_lane(script).await;
                assert_eq!(number, LaneId(1));
                for number in numbers {
                    script.peer.send_to_client(ServerMessage::Retired(LaneId(*number))).await;
                }
                assert_eq!(
                    script.peer.wait_for_close().await.0,
                    Some(CloseCode::ProtocolViolation),
                    "{numbers:?}"
                );
            },
            async |received, _, ()| assert!(received.is_err()),
        );
    }
}

/// Goal: a lane that the client gave up is retired, once, and another one joins. Method: the server closes a lane and
/// answers the client's `Retire`; after a version, it answers again.
#[test]
fn a_lane_that_was_given_up_is_retired_once() {
    with_lane_offer(
        2,
        2,
        async |script| {
            let (lane, number) = accept_numbered_lane(script).await;
            lane.connection.close(0);
            let (_next, next) = accept_numbered_lane(script).await;
            assert_eq!((number, next), (LaneId(1), LaneId(2)));
            while script.peer.receive_from_client().await != ClientMessage::Retire(number) {}
            script.peer.send_to_client(ServerMessage::Retired(number)).await;
            script.send_version().await;
            script.wait_for_committed().await;
            script.peer.send_to_client(ServerMessage::Retired(number)).await;
            assert_eq!(script.peer.wait_for_close().await.0, Some(CloseCode::ProtocolViolation));
        },
        async |received, _, ()| received.unwrap(),
    );
}

/// Goal: a server cannot make a client open more lanes than the client wants, or than the fixed maximum. Method: an
/// offer of 2³² - 1; a client that wants two, and one that wants all.
#[test]
fn an_unbounded_offer_opens_bounded_lanes() {
    for (wanted, further) in [(2, 1), (u32::MAX, 15)] {
        with_lane_offer(
            u32::MAX,
            wanted,
            async |script| {
                let mut lanes = vec![];
                for _ in 0..further {
                    lanes.push(accept_lane(script).await);
                }
                assert!(
                    !opens_another_lane(script).await,
                    "the client opened more than {further} further lanes"
                );
                script.send_version().await;
                script.wait_for_committed().await;
                lanes
            },
            async |received, _, _| received.unwrap(),
        );
    }
}

/// Goal: an invalid answer to `Join` ends that lane permanently, and nothing else. Method: another message instead of
/// `Joined`, or after it.
#[test]
fn an_invalid_answer_to_join_ends_the_lane() {
    for after in [false, true] {
        with_lane_offer(
            2,
            2,
            async |script| {
                let (mut lane, _) = script.peer.accept_further_lane().await;
                if after {
                    lane.send_to_client(ServerMessage::Joined).await;
                }
                lane.send_to_client(ServerMessage::Topics { topics: vec![], more: false }).await;
                let (code, text) = lane.wait_for_close().await;
                assert_eq!(code, Some(CloseCode::ProtocolViolation), "{text}");
                assert!(!opens_another_lane(script).await, "the client opened the refused lane again");
                script.send_version().await;
                script.wait_for_committed().await;
            },
            async |received, client, ()| {
                received.unwrap();
                eventually("the lane has ended", || client.lanes().len() == 1).await;
            },
        );
    }
}

/// Goal: a permanently refused lane is not retried; one refused by a busy server is. Method: refuse the lane with a
/// permanent and with a temporary close code.
#[test]
fn only_temporarily_refused_lanes_are_retried() {
    for (code, is_retried) in [(CloseCode::Unauthorised, false), (CloseCode::TooBusy, true)] {
        with_lane_offer(
            2,
            2,
            async |script| {
                let (lane, _) = script.peer.accept_further_lane().await;
                lane.connection.close(code.code());
                assert_eq!(opens_another_lane(script).await, is_retried, "{code:?}");
                script.send_version().await;
                script.wait_for_committed().await;
            },
            async |received, _, ()| received.unwrap(),
        );
    }
}

/// Goal: streams that only the first lane may carry, and duplicates, end the session. Method: a manifest on a further
/// lane; a chunk on two lanes.
#[test]
fn manifests_and_duplicates_on_further_lanes_end_the_session() {
    type Attack = fn(&mut Script, Peer) -> std::pin::Pin<Box<dyn Future<Output = Peer> + '_>>;
    let attacks: [(&str, Attack); 2] = [
        ("a manifest on another lane", |script, lane| {
            Box::pin(async move {
                script.announce(script.announcement()).await;
                let manifest = &script.manifest;
                script.send_manifest_over(&lane, manifest.digest(), manifest.encoded()).await;
                lane
            })
        }),
        ("chunk 1", |script, lane| {
            Box::pin(async move {
                script.begin_version().await;
                script.send_valid_chunk(1).await;
                send_chunk_over(&lane, script, script.header(1)).await;
                lane
            })
        }),
    ];
    for (expected, attack) in attacks {
        with_lane_offer(
            2,
            2,
            async |script| {
                let lane = accept_lane(script).await;
                let lane = attack(script, lane).await;
                let (code, text) = script.peer.wait_for_close().await;
                assert_eq!(code, Some(CloseCode::ProtocolViolation), "{text}");
                let (code, _) = lane.wait_for_close().await;
                assert_eq!(code, Some(CloseCode::ProtocolViolation), "the lanes of a session end with it");
            },
            async |received, _, ()| {
                let SubscriptionError::Disconnected { source, .. } = received.unwrap_err() else {
                    panic!("the session has ended")
                };
                assert!(source.to_string().contains(expected), "{source} lacks {expected:?}");
            },
        );
    }
}

/// Goal: an invalid stream header ends the session, on a further lane too. Method: an unknown kind of stream on a
/// further lane.
#[test]
fn a_malformed_header_on_a_further_lane_ends_the_session() {
    with_lane_offer(
        2,
        2,
        async |script| {
            let lane = accept_lane(script).await;
            script.begin_version().await;
            lane.send_stream(&[&[9; 64]]).await;
            assert_eq!(script.peer.wait_for_close().await.0, Some(CloseCode::Malformed));
        },
        async |received, _, ()| assert!(received.is_err()),
    );
}

/// Goal: chunks that were lost with their lane and are not sent again cause a stall error, not an endless wait. Method:
/// a lane that is lost with the only missing chunk.
#[test]
fn a_chunk_lost_with_its_lane_stalls_the_version() {
    with_lane_offer(
        2,
        2,
        async |script| {
            let lane = accept_lane(script).await;
            script.begin_version().await;
            let mut cut_off = lane.connection.open_data().await.unwrap();
            cut_off.write(&StreamHeader::Chunk(script.header(0)).encode()).await;
            for chunk in 1..CHUNKS {
                script.send_valid_chunk(chunk).await;
            }
            script.send_complete(script.digest()).await;
            sleep(Duration::from_secs(1)).await;
            lane.connection.close(0);
            loop {
                if let ClientMessage::Abort { epoch, version, .. } = script.peer.receive_from_client().await {
                    return assert_eq!((epoch, version), (EPOCH, VERSION));
                }
            }
        },
        async |received, _, ()| {
            let error = received.unwrap_err();
            assert!(matches!(error, SubscriptionError::Stalled { .. }), "{error}");
        },
    );
}
