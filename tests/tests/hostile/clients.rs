//! Clients that violate the protocol. The server closes with the right code and continues to serve others.

mod excess;

use crate::raw::{Connection, Peer, hello, is_skipped_over_tcp, subscribe};
use std::{collections::BTreeSet, time::Duration};
use tensor_relay_client::SubscriptionError;
use tensor_relay_protocol::{
    AbortReason, ChunkHash, ClientMessage, CloseCode, Credit, EndReason, Epoch, FRAME_MAX_BYTES, Glob, Have,
    Limits, Manifest, Mode, Partial, RangeSet, ReaderName, ServerMessage, Start, Subscribe, SubscriptionId,
    Version, VersionDigest, WatchId,
};
use tensor_relay_server::{FailureCount, Server, TopicOptions, WhenFull};
use tensor_relay_tests::{
    pair::{CHUNK_BYTES, Sim, client_config, eventually, publish, retaining, server_config, simulate, topic},
    tensors,
};
use tokio::time::sleep;

const EPOCH: Epoch = Epoch(5);

/// Runs a hostile client against a server with one version of "t" and a good client, which must get the next version
/// undisturbed. The hostile client must be closed with `code` and a text that contains `expected`.
fn expect_closed(code: CloseCode, expected: &str, attack: impl AsyncFnOnce(&Sim) -> Peer) {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), Some(EPOCH), TopicOptions::default()).unwrap();
        publish(&server, &mut publisher, 1, 1 << 20).await;
        let client = sim.client(1, client_config()).await.unwrap();
        let mut good = client.subscribe(&topic("t")).await.unwrap();
        tensors::check(&good.next().await.unwrap());

        let peer = attack(&sim).await;
        let (received, text) = peer.wait_for_close().await;
        assert_eq!(received, Some(code), "{text}");
        assert!(text.contains(expected), "{text:?} lacks {expected:?}");

        publish(&server, &mut publisher, 2, 1 << 20).await;
        tensors::check(&good.next().await.unwrap());
        wait_for_only_good_session(&server).await;
    });
}

async fn wait_for_only_good_session(server: &Server) {
    eventually("only the good session remains", || server.stats().sessions == 1).await;
    eventually("no transfer remains", || server.stats().transfers == 0).await;
    // QUIC retains data that was written to a closed connection until the connection is drained.
    let newest_only = || server.stats().staged_bytes == 1 << 20;
    eventually("only the newest version occupies memory", newest_only).await;
}

/// Goal: a client that no longer receives messages is disconnected, and its version is released. Method: subscribe,
/// then stop the control stream in its receiving direction.
#[test]
fn a_client_that_stops_receiving_is_disconnected() {
    if is_skipped_over_tcp("it cannot stop one direction of the control stream") {
        return;
    }
    expect_closed(CloseCode::ProtocolViolation, "stopped", async |sim| {
        let mut peer = Peer::welcomed_client(sim, 2).await;
        peer.stop_receiving();
        sleep(Duration::from_millis(100)).await;
        peer.send_to_server(subscribe(1, 4)).await;
        peer
    });
}

/// Goal: bytes that are not a message are detected. Method: text, zeros, and frames with invalid contents.
#[test]
fn garbage_before_hello_is_malformed() {
    for bytes in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 64], b"\x04\0\0\0\xff\xff\xff\xff", b"\x02\0\0\0\x0a\x7f"]
    {
        let code = CloseCode::Malformed;
        expect_closed(code, "", async |sim| {
            let mut peer = Peer::client(sim, 2).await;
            peer.send_bytes(bytes).await;
            peer
        });
    }
}

/// Goal: a length above the limit is refused before any of the bytes arrive. Method: one byte too many, and four
/// gigabytes, as the first message and as a later one.
#[test]
fn frames_above_the_limit_are_refused() {
    for length in [FRAME_MAX_BYTES as u32 + 1, u32::MAX] {
        expect_closed(CloseCode::Malformed, "at most", async |sim| {
            let mut peer = Peer::client(sim, 2).await;
            peer.send_bytes(&length.to_le_bytes()).await;
            peer
        });
        expect_closed(CloseCode::Malformed, "at most", async |sim| {
            let mut peer = Peer::welcomed_client(sim, 2).await;
            peer.send_bytes(&length.to_le_bytes()).await;
            peer
        });
    }
}

/// Goal: messages out of order are refused. Method: a request before Hello, and a second Hello.
#[test]
fn messages_out_of_order_are_refused() {
    expect_closed(CloseCode::ProtocolViolation, "Hello", async |sim| {
        let mut peer = Peer::client(sim, 2).await;
        peer.send_to_server(ClientMessage::List).await;
        peer
    });
    expect_closed(CloseCode::ProtocolViolation, "Hello", async |sim| {
        let mut peer = Peer::welcomed_client(sim, 2).await;
        peer.send_to_server(ClientMessage::Hello(hello())).await;
        peer
    });
}

/// Goal: the close names the incompatible revisions. Method: revisions that this build does not support.
#[test]
fn an_unsupported_revision_is_incompatible() {
    expect_closed(CloseCode::Incompatible, "revisions 7 to 9", async |sim| {
        let mut peer = Peer::client(sim, 2).await;
        let hello = tensor_relay_protocol::Hello { revision_min: 7, revision_max: 9, ..hello() };
        peer.send_to_server(ClientMessage::Hello(hello)).await;
        peer
    });
}

/// Goal: excessive credit is refused, in one message or in total. Method: too much credit in Subscribe, and too much in
/// several Credit messages.
#[test]
fn excessive_credit_is_refused() {
    expect_closed(CloseCode::ProtocolViolation, "credit", async |sim| {
        let mut peer = Peer::welcomed_client(sim, 2).await;
        peer.send_to_server(subscribe(1, Credit::MAX + 1)).await;
        peer
    });
    expect_closed(CloseCode::ProtocolViolation, "credit", async |sim| {
        let mut peer = Peer::welcomed_client(sim, 2).await;
        peer.send_to_server(subscribe(1, Credit::MAX)).await;
        for chunks in [1_000, u32::MAX] {
            let subscription = SubscriptionId(1);
            peer.send_to_server(ClientMessage::Credit { subscription, chunks }).await;
        }
        peer
    });
}

/// Goal: a client cannot commit a version that it did not receive. Method: while version 1 waits for credit: Committed
/// for it, for a version never sent, and for another epoch.
#[test]
fn commits_of_unsent_versions_are_refused() {
    for (expected, epoch, version) in
        [("Complete", EPOCH, 1), ("version 7", EPOCH, 7), ("version 1", Epoch(6), 1)]
    {
        expect_closed(CloseCode::ProtocolViolation, expected, async |sim| {
            let mut peer = client_with_announcement(sim).await;
            peer.send_to_server(ClientMessage::Committed {
                kept: false,
                subscription: SubscriptionId(1),
                epoch,
                version: Version(version),
            })
            .await;
            peer
        });
    }
}

/// Goal: a client cannot abort a version that it was not sent. Method: Abort for a version never sent.
#[test]
fn aborts_of_unsent_versions_are_refused() {
    expect_closed(CloseCode::ProtocolViolation, "version 7", async |sim| {
        let mut peer = client_with_announcement(sim).await;
        peer.send_to_server(ClientMessage::Abort {
            subscription: SubscriptionId(1),
            epoch: EPOCH,
            version: Version(7),
            reason: AbortReason::Corrupt,
        })
        .await;
        peer
    });
}

/// A client without credit that has received the announcement of version 1.
async fn client_with_announcement(sim: &Sim) -> Peer {
    let mut peer = Peer::welcomed_client(sim, 2).await;
    peer.send_to_server(subscribe(1, 0)).await;
    assert!(matches!(peer.receive_from_server().await, ServerMessage::Announce(_)));
    peer
}

/// Goal: a subscription id is used once per session. Method: the same id twice, during the subscription and after its
/// end; then an id that was never used.
#[test]
fn subscription_ids_are_used_once() {
    expect_closed(CloseCode::ProtocolViolation, "id 1 twice", async |sim| {
        let mut peer = Peer::welcomed_client(sim, 2).await;
        peer.send_to_server(subscribe(1, 4)).await;
        peer.send_to_server(subscribe(1, 4)).await;
        peer
    });
    expect_closed(CloseCode::ProtocolViolation, "id 1 twice", async |sim| {
        let mut peer = Peer::welcomed_client(sim, 2).await;
        peer.send_to_server(subscribe(1, 4)).await;
        peer.send_to_server(ClientMessage::Unsubscribe {
            subscription: SubscriptionId(1),
            keep_place: false,
        })
        .await;
        sleep(Duration::from_secs(1)).await;
        peer.send_to_server(subscribe(1, 4)).await;
        peer
    });
    expect_closed(CloseCode::ProtocolViolation, "subscription 9", async |sim| {
        let mut peer = Peer::welcomed_client(sim, 2).await;
        peer.send_to_server(ClientMessage::Unsubscribe {
            subscription: SubscriptionId(9),
            keep_place: false,
        })
        .await;
        peer
    });
}

/// Goal: a name that could escape from a folder is refused. Method: a hand-written Subscribe, because the types here
/// cannot hold such a name.
#[test]
fn an_invalid_topic_is_malformed() {
    expect_closed(CloseCode::Malformed, "name", async |sim| {
        let mut peer = Peer::welcomed_client(sim, 2).await;
        // FromClient { subscribe (2): { subscription (1): 1, topic (2): "../x", mode (3): 1 } }
        peer.send_bytes(b"\x0c\0\0\0\x12\x0a\x08\x01\x12\x04../x\x18\x01").await;
        peer
    });
}

/// Goal: a client that connects and sends nothing is disconnected within the control timeout. Method: no control stream
/// at all; a control stream without a byte; half a frame.
#[test]
fn silent_clients_time_out() {
    for bytes in [None, Some(&b""[..]), Some(&b"\x10\0\0\0half"[..])] {
        simulate(2, async |sim| {
            let server = sim.server(server_config());
            let connection = Connection::open(&sim, 2).await;
            let mut control = None;
            if let Some(bytes) = bytes {
                control.insert(connection.open_control().await.unwrap()).write(bytes).await;
            }
            let (code, text) = connection.wait_for_close().await;
            assert_eq!((code, text.as_str()), (Some(CloseCode::TimedOut), ""));
            let timeout = sim.tuning.control_timeout();
            assert!(sim.elapsed() < timeout + Duration::from_secs(1), "{:?}", sim.elapsed());
            eventually("the session has ended", || server.stats().sessions == 0).await;
            drop(control);
        });
    }
}

/// Goal: a client cannot open streams beyond its control stream. Method: open a second control stream and a data
/// stream; QUIC itself must refuse both.
#[test]
fn clients_cannot_open_more_streams() {
    simulate(3, async |sim| {
        let _server = sim.server(server_config());
        let peer = Peer::welcomed_client(&sim, 2).await;
        let Connection::Quic { connection, .. } = &peer.connection else {
            return; // Over TCP there is one control stream; tests/transport/hostile.rs has the rest.
        };
        let wait = Duration::from_secs(1);
        assert!(tokio::time::timeout(wait, connection.open_bi()).await.is_err());
        assert!(tokio::time::timeout(wait, connection.open_uni()).await.is_err());
    });
}

/// Goal: a client cannot have more subscriptions than the server allows; its existing ones continue. Method: one
/// subscription above the limit; then end one and add one.
#[test]
fn excess_subscriptions_are_refused() {
    simulate(4, async |sim| {
        let server = sim.server(tensor_relay_server::Config { subscriptions_max: 2, ..server_config() });
        let mut peer = Peer::welcomed_client(&sim, 2).await;
        for id in 1..=3 {
            peer.send_to_server(subscribe(id, 4)).await;
        }
        let refused =
            ServerMessage::End { subscription: SubscriptionId(3), reason: EndReason::TooManySubscriptions };
        assert_eq!(peer.receive_from_server().await, refused);
        let failures = server.status_reader().read().unwrap().failures;
        let is_refusal = |failure: &FailureCount| failure.reason == "too_many_subscriptions";
        assert!(failures.iter().any(|failure| is_refusal(failure) && failure.count == 1), "{failures:?}");
        peer.send_to_server(ClientMessage::Unsubscribe {
            subscription: SubscriptionId(1),
            keep_place: false,
        })
        .await;
        sleep(Duration::from_secs(1)).await;
        peer.send_to_server(subscribe(4, 4)).await;
        publish(&server, &mut server.publisher(topic("t")).unwrap(), 1, 1_000).await;
        let mut served = BTreeSet::new();
        while served.len() < 2 {
            if let ServerMessage::Announce(announce) = peer.receive_from_server().await {
                served.insert(announce.subscription.0);
            }
        }
        assert!(served.into_iter().eq([2, 4]));
    });
}

/// Goal: many clients that read nothing cost the server bounded memory, and cost a good client only bandwidth. Method:
/// twenty clients that give maximum credit and read nothing, and one that reads.
#[test]
fn clients_that_read_nothing_cost_bounded_memory() {
    simulate(5, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let mut idle = Vec::new();
        for number in 10..30 {
            let mut peer = Peer::welcomed_client(&sim, number).await;
            peer.send_to_server(subscribe(1, Credit::MAX)).await;
            idle.push(peer);
        }
        let client = sim.client(1, client_config()).await.unwrap();
        let mut good = client.subscribe(&topic("t")).await.unwrap();
        for version in 1..=5 {
            publish(&server, &mut publisher, version, 1 << 20).await;
            tensors::check(&good.next().await.unwrap());
        }
        let staged = server.stats().staged_bytes;
        assert!(staged <= 3 << 20, "{staged} bytes: the unread version, the newest, and one between");
        assert!(sim.elapsed() < Duration::from_secs(5), "{:?}", sim.elapsed());
    });
}

/// A subscription request, which tests modify.
fn request(id: u32) -> Subscribe {
    Subscribe::latest(SubscriptionId(id), topic("t"), 16)
}

fn watch(id: u32, pattern: &str) -> ClientMessage {
    ClientMessage::Watch { watch: WatchId(id), glob: Glob::new(pattern).unwrap() }
}

/// Goal: the number of watches is bounded, and invalid ids of watches are refused. Method: one watch above the limit;
/// one id twice; the end of a watch that has ended, after more watches in succession than the limit.
#[test]
fn invalid_watches_are_refused() {
    expect_closed(CloseCode::ProtocolViolation, "more than 16 watches", async |sim| {
        let mut peer = Peer::welcomed_client(sim, 2).await;
        for id in 1..=17 {
            peer.send_to_server(watch(id, "**")).await;
        }
        peer
    });
    expect_closed(CloseCode::ProtocolViolation, "watch id 3 twice", async |sim| {
        let mut peer = Peer::welcomed_client(sim, 2).await;
        for _ in 0..2 {
            peer.send_to_server(watch(3, "a")).await;
        }
        peer
    });
    expect_closed(CloseCode::ProtocolViolation, "watch 3, which does not exist", async |sim| {
        let mut peer = Peer::welcomed_client(sim, 2).await;
        for id in 1..=100 {
            peer.send_to_server(watch(id, "*")).await;
            peer.send_to_server(ClientMessage::Unwatch(WatchId(id))).await;
        }
        peer.send_to_server(ClientMessage::Unwatch(WatchId(3))).await;
        peer
    });
}

/// Goal: a client is sent the chunks that it does not report as held, or all of them if its report is false. Method:
/// partial versions of many shapes: all chunks, more than exist, with the digest of other content, of other versions
/// and epochs; the server sends the remaining chunks and `Complete`, and sets `afresh` if it rejects the report.
#[test]
fn false_reports_of_held_chunks_are_rejected() {
    let all = RangeSet::from_range(0..16);
    let beyond = RangeSet::from_ranges([3..5, 10..u32::MAX]).unwrap();
    let holes = |count| (0..count).map(|n| 2 * n..2 * n + 1).collect::<RangeSet>();
    let wrong = VersionDigest([7; 32]);
    for (epoch, version, chunks, digest, (remaining, afresh)) in [
        (EPOCH, 1, all.clone(), digest_of(&all), (0, false)),
        (EPOCH, 1, all.clone(), wrong, (16, true)),
        (EPOCH, 1, beyond, wrong, (16, true)),
        (EPOCH, 1, holes(8), digest_of(&holes(8)), (8, false)),
        (EPOCH, 1, holes(8), digest_of(&all), (16, true)),
        (EPOCH, 1, holes(1_000), wrong, (16, true)),
        (EPOCH, 1, RangeSet::new(), digest_of(&RangeSet::new()), (16, false)),
        (EPOCH, 1, RangeSet::new(), wrong, (16, true)),
        (EPOCH, 7, all.clone(), wrong, (16, false)),
        (Epoch(9), 1, all, wrong, (16, false)),
    ] {
        simulate(6, async |sim| {
            let server = sim.server(server_config());
            let mut publisher =
                server.publisher_with(topic("t"), Some(EPOCH), TopicOptions::default()).unwrap();
            publish(&server, &mut publisher, 1, 1 << 20).await;
            let mut peer = Peer::welcomed_client(&sim, 2).await;
            let before = sim.server_sent();
            let partial = Some(Partial { epoch, version: Version(version), chunks, digest });
            peer.send_to_server(ClientMessage::Subscribe(Subscribe { partial, ..request(1) }))
                .await;
            loop {
                match peer.receive_from_server().await {
                    ServerMessage::Complete { version, .. } => break assert_eq!(version, Version(1)),
                    ServerMessage::Announce(announce) => assert_eq!(announce.afresh, afresh),
                    other => panic!("{other:?}"),
                }
            }
            sleep(Duration::from_secs(1)).await; // `Complete` overtakes chunks.
            let chunks = (sim.server_sent() - before) / (64 << 10);
            assert!(
                (remaining..=remaining + 1 + remaining / 10).contains(&chunks),
                "{chunks} of {remaining}"
            );
        });
    }
}

/// The digest over these chunks of version 1, which has a megabyte.
pub(crate) fn digest_of(chunks: &RangeSet) -> VersionDigest {
    let mut payload = vec![0; 1 << 20];
    tensors::write_content("noise", 1, &mut payload);
    let specs = vec![tensors::noise("noise", 1 << 20)];
    let manifest = Manifest::layout(specs, vec![], CHUNK_BYTES, &Limits::default()).unwrap();
    let bytes = payload.chunks(CHUNK_BYTES as usize).map(ChunkHash::of).collect::<Vec<_>>();
    VersionDigest::of(manifest.digest(), chunks.iter().map(|chunk| bytes[chunk as usize]))
}
