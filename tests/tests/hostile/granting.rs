//! Servers that grant lanes and then break rules on them: what is wrong with a lane ends that lane, and what is wrong with
//! the session ends the session.

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

/// Longer than the first waits of a client between its attempts to join.
const A_WHILE: Duration = Duration::from_secs(60);

/// Runs `server`, which offers `lanes_max` lanes, against a client that wants `lanes`, and gives what its user got to
/// `check`. The client lives until the server is done.
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

/// Whether the client opens another lane within a while.
async fn opens_another(script: &Script) -> bool {
    timeout(A_WHILE, script.peer.further()).await.is_ok()
}

async fn chunk_over(lane: &Peer, script: &Script, header: ChunkHeader) {
    let raw = script.raw(header.chunk.0);
    lane.stream(&[&StreamHeader::Chunk(header).encode(), raw]).await;
}

/// Goal: the script itself is good, or the attacks on it prove nothing.
/// Method: two lanes more, of which each brings a chunk; one is retired in the middle of a third, which is fetched.
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
            assert_eq!(one.closed_because().await.0, Some(CloseCode::Done), "its client gives the lane up");
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

/// The chunks that the client asks for next.
async fn fetched(script: &mut Script) -> RangeSet {
    loop {
        if let ClientMessage::Fetch { version, chunks, .. } = script.peer.hear_client().await {
            assert_eq!(version, VERSION);
            return chunks;
        }
    }
}

/// Goal: a client that is told of lanes that cannot be retired ends the session, and asks for nothing.
/// Method: the control stream's own lane, one that never was, and one twice.
#[test]
fn retirements_of_what_is_no_lane() {
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

/// Goal: a server cannot make a client open more lanes than the client wants, nor more than make sense.
/// Method: an offer of four thousand million; a client that wants two, and one that wants as many.
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

/// Goal: a server that answers a `Join` with nonsense costs its client that lane, for good, and nothing else.
/// Method: a greeting instead of `Joined`; a word after it.
#[test]
fn lanes_that_hear_another_word() {
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
                assert!(!opens_another(script).await, "a server that does so once does it again");
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

/// Goal: a lane that is refused for good is not asked for again; one whose server is busy is, with growing waits.
/// Method: turn the lane away, once with a code that says "never" and once with one that says "later".
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

/// Goal: what only the first lane may carry, and what no lane may carry twice, ends the session.
/// Method: a manifest on a lane that joined; a chunk on two lanes.
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

/// Goal: a header that cannot be read ends the session on whatever lane it comes.
/// Method: a kind of stream that nobody knows, on a further lane.
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

/// Goal: chunks that a lane took with it and that never come again end as a stall, and not as a wait for ever.
/// Method: a lane that dies with the only chunk that is missing.
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
