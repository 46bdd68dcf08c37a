//! Servers that grant lanes and violate the protocol on them: an error of a lane ends that lane, an error of the
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

/// Longer than the first delays between a client's attempts to join.
const A_WHILE: Duration = Duration::from_secs(60);

/// Runs `server`, which offers `lanes_max` lanes, against a client that wants `lanes`, and passes the client's result
/// to `check`. The client lives until the server has finished.
fn offering<T>(
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
            let got = subscription.next().await.map(|snapshot| tensors::check(&snapshot));
            (client, got)
        };
        let served = async {
            let mut script = begin(&sim, lanes_max).await;
            let said = server(&mut script).await;
            (script, said)
        };
        let ((client, got), (_script, said)) = tokio::join!(user, served);
        check(got, &client, said).await;
    });
}

async fn begin(sim: &Sim, lanes_max: u32) -> Script {
    let offer = LaneOffer { lanes_max, grant: LaneGrant::new(GRANT) };
    Script::with(Peer::server_of_lanes(sim, Some(offer)).await)
}

/// The next lane that the client opens, joined.
async fn joined(script: &Script) -> Peer {
    joined_with_number(script).await.0
}

async fn joined_with_number(script: &Script) -> (Peer, LaneId) {
    let (mut lane, word) = script.peer.further().await;
    let ClientMessage::Join { session: 1, lane: number, grant, instance } = word else { panic!("{word:?}") };
    assert_eq!((grant, instance), (LaneGrant::new(GRANT), INSTANCE));
    lane.say_to_client(ServerMessage::Joined).await;
    (lane, number)
}

/// Whether the client opens another lane within [`A_WHILE`].
async fn opens_another(script: &Script) -> bool {
    timeout(A_WHILE, script.peer.further()).await.is_ok()
}

async fn chunk_over(lane: &Peer, script: &Script, header: ChunkHeader) {
    let raw = script.raw(header.chunk.0);
    lane.stream(&[&StreamHeader::Chunk(header).encode(), raw]).await;
}

/// Goal: the script itself is valid, so that failures below are due to the attacks. Method: two further lanes, each
/// with a chunk; one is retired in the middle of a third chunk, which is fetched.
#[test]
fn a_good_server_of_lanes() {
    offering(
        3,
        3,
        async |script| {
            let ((one, number), two) = (joined_with_number(script).await, joined(script).await);
            script.good_beginning().await;
            chunk_over(&one, script, script.header(0)).await;
            chunk_over(&two, script, script.header(1)).await;
            let mut cut_off = one.connection.open_uni().await.unwrap();
            cut_off
                .write_all(&StreamHeader::Chunk(script.header(2)).encode())
                .await
                .unwrap();
            sleep(Duration::from_secs(1)).await;
            script.peer.say_to_client(ServerMessage::Retired(number)).await;
            assert_eq!(fetched(script).await.iter().collect::<Vec<_>>(), [2]);
            assert_eq!(one.closed_because().await.0, Some(CloseCode::Done), "its client closes the lane");
            chunk_over(&two, script, script.header(2)).await;
            script.complete(script.digest()).await;
            script.committed().await;
            (one, two)
        },
        async |got, client, _lanes| {
            got.unwrap();
            assert_eq!(client.lanes().len(), 2);
        },
    );
}

/// The chunks of the client's next `Fetch`.
async fn fetched(script: &mut Script) -> RangeSet {
    loop {
        if let ClientMessage::Fetch { version, chunks, .. } = script.peer.hear_client().await {
            assert_eq!(version, VERSION);
            return chunks;
        }
    }
}

/// Goal: a client ends the session when told to retire a lane that cannot be retired, and fetches nothing. Method: the
/// control stream's lane, a lane that never existed, and the same lane twice.
#[test]
fn retirements_of_invalid_lanes() {
    for numbers in [&[0][..], &[7], &[1, 1]] {
        offering(
            2,
            2,
            async |script| {
                let (_lane, number) = joined_with_number(script).await;
                assert_eq!(number, LaneId(1));
                for number in numbers {
                    script.peer.say_to_client(ServerMessage::Retired(LaneId(*number))).await;
                }
                assert_eq!(script.peer.closed_because().await.0, Some(CloseCode::Misbehaved), "{numbers:?}");
            },
            async |got, _, ()| assert!(got.is_err()),
        );
    }
}

/// Goal: a server cannot make a client open more lanes than the client wants, or than the fixed maximum. Method: an
/// offer of 2³² - 1; a client that wants two, and one that wants all.
#[test]
fn an_offer_without_bound() {
    for (wanted, further) in [(2, 1), (u32::MAX, 15)] {
        offering(
            u32::MAX,
            wanted,
            async |script| {
                let mut lanes = vec![];
                for _ in 0..further {
                    lanes.push(joined(script).await);
                }
                assert!(!opens_another(script).await, "{wanted} lanes were wanted");
                script.good_version().await;
                script.committed().await;
                lanes
            },
            async |got, _, _| got.unwrap(),
        );
    }
}

/// Goal: an invalid answer to `Join` costs the client that lane permanently, and nothing else. Method: another message
/// instead of `Joined`, or after it.
#[test]
fn lanes_that_get_another_answer() {
    for after in [false, true] {
        offering(
            2,
            2,
            async |script| {
                let (mut lane, _) = script.peer.further().await;
                if after {
                    lane.say_to_client(ServerMessage::Joined).await;
                }
                lane.say_to_client(ServerMessage::Topics { topics: vec![], more: false }).await;
                let (code, text) = lane.closed_because().await;
                assert_eq!(code, Some(CloseCode::Misbehaved), "{text}");
                assert!(!opens_another(script).await, "the lane is not retried");
                script.good_version().await;
                script.committed().await;
            },
            async |got, client, ()| {
                got.unwrap();
                eventually("the lane is gone", || client.lanes().len() == 1).await;
            },
        );
    }
}

/// Goal: a permanently refused lane is not retried; one whose server is busy is, with growing delays. Method: refuse
/// the lane with a permanent and with a temporary close code.
#[test]
fn lanes_that_are_turned_away() {
    for (code, again) in [(CloseCode::Unauthorised, false), (CloseCode::TooBusy, true)] {
        offering(
            2,
            2,
            async |script| {
                let (lane, _) = script.peer.further().await;
                lane.connection.close(code.code().into(), b"");
                assert_eq!(opens_another(script).await, again, "{code:?}");
                script.good_version().await;
                script.committed().await;
            },
            async |got, _, ()| got.unwrap(),
        );
    }
}

/// Goal: streams that only the first lane may carry, and duplicates, end the session. Method: a manifest on a further
/// lane; a chunk on two lanes.
#[test]
fn what_ends_the_session() {
    type Attack = fn(&mut Script, Peer) -> std::pin::Pin<Box<dyn Future<Output = Peer> + '_>>;
    let attacks: [(&str, Attack); 2] = [
        ("a manifest on another lane", |script, lane| {
            Box::pin(async move {
                script.announce(script.announcement()).await;
                let manifest = &script.manifest;
                script.manifest_over(&lane, manifest.digest(), manifest.encoded()).await;
                lane
            })
        }),
        ("chunk 1", |script, lane| {
            Box::pin(async move {
                script.good_beginning().await;
                script.good_chunk(1).await;
                chunk_over(&lane, script, script.header(1)).await;
                lane
            })
        }),
    ];
    for (word, attack) in attacks {
        offering(
            2,
            2,
            async |script| {
                let lane = joined(script).await;
                let lane = attack(script, lane).await;
                let (code, text) = script.peer.closed_because().await;
                assert_eq!(code, Some(CloseCode::Misbehaved), "{text}");
                let (code, _) = lane.closed_because().await;
                assert_eq!(code, Some(CloseCode::Misbehaved), "the lanes of a session end with it");
            },
            async |got, _, ()| {
                let SubscriptionError::Disconnected { source, .. } = got.unwrap_err() else {
                    panic!("the session has ended")
                };
                assert!(source.to_string().contains(word), "{source} says nothing of {word:?}");
            },
        );
    }
}

/// Goal: an invalid stream header ends the session, on every lane. Method: an unknown kind of stream on a further lane.
#[test]
fn an_unreadable_header_on_a_further_lane() {
    offering(
        2,
        2,
        async |script| {
            let lane = joined(script).await;
            script.good_beginning().await;
            lane.stream(&[&[9; 64]]).await;
            assert_eq!(script.peer.closed_because().await.0, Some(CloseCode::Malformed));
        },
        async |got, _, ()| assert!(got.is_err()),
    );
}

/// Goal: chunks that were lost with their lane and are not sent again cause a stall error, not an endless wait. Method:
/// a lane that dies with the only missing chunk.
#[test]
fn a_chunk_that_is_lost_with_its_lane() {
    offering(
        2,
        2,
        async |script| {
            let lane = joined(script).await;
            script.good_beginning().await;
            let mut cut_off = lane.connection.open_uni().await.unwrap();
            cut_off
                .write_all(&StreamHeader::Chunk(script.header(0)).encode())
                .await
                .unwrap();
            for chunk in 1..CHUNKS {
                script.good_chunk(chunk).await;
            }
            script.complete(script.digest()).await;
            sleep(Duration::from_secs(1)).await;
            lane.connection.close(0u32.into(), b"");
            loop {
                if let ClientMessage::Abort { epoch, version, .. } = script.peer.hear_client().await {
                    return assert_eq!((epoch, version), (EPOCH, VERSION));
                }
            }
        },
        async |got, _, ()| {
            let error = got.unwrap_err();
            assert!(matches!(error, SubscriptionError::Stalled { .. }), "{error}");
        },
    );
}
