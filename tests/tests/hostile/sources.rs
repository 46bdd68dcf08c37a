//! A second server that violates the protocol, or has other content, beside an honest origin (PROTOCOL.md §6.10). It
//! costs the user nothing but its help: every version arrives complete, and the session to the origin stays.

use crate::raw::{DataOut, Peer};
use std::{cell::Cell, future::pending, time::Duration};
use tensor_relay_client::{Config, Version};
use tensor_relay_protocol::{
    AbortReason, Announce, ChunkHash, ChunkHeader, ChunkIndex, ClientMessage, CloseCode, CodecId, EndReason,
    Epoch, ManifestDigest, ManifestHeader, RelayPath, ServerMessage, StreamHeader, Subscribe, SubscriptionId,
    VersionDigest, VersionId,
};
use tensor_relay_tests::{
    pair::{CHUNK_BYTES, Sim, eventually, publish, reconnecting, retaining, server_config, simulate, topic},
    simnet::Path,
    tensors,
};
use tokio::time::{sleep, timeout};

const EPOCH: Epoch = Epoch(3);
const VERSION: Version = Version(1);

/// Sixteen times what is requested at once, so that a transfer takes a few simulated seconds.
const CHUNKS: u32 = 128;
const BYTES: u64 = CHUNKS as u64 * CHUNK_BYTES as u64;

/// The user's subscription at the origin.
const USERS: SubscriptionId = SubscriptionId(1);

/// The scripted second server, which was asked for version 1.
struct Second {
    peer: Peer,
    asked: Subscribe,
    payload: Vec<u8>,
    /// The streams that are not finished.
    begun: Vec<DataOut>,
}

/// What follows an attack.
#[derive(Clone, Copy)]
enum Expected {
    /// The client closes the connection to the second server.
    Closed(CloseCode),
    /// The client unsubscribes, and asks again only for the next version.
    Left,
    /// Nothing.
    Ignored,
}

const REFUSED: Expected = Expected::Closed(CloseCode::ProtocolViolation);

impl Second {
    async fn start(sim: &Sim) -> Self {
        let (peer, asked) = Peer::other_server(sim).await;
        let mut payload = vec![0; BYTES as usize];
        tensors::write_content("noise", VERSION.0, &mut payload);
        Self { peer, asked, payload, begun: vec![] }
    }

    fn source(&self) -> SubscriptionId {
        self.asked.subscription
    }

    fn digest(&self) -> ManifestDigest {
        self.asked.manifest.expect("it names the manifest")
    }

    fn announcement(&self) -> Announce {
        Announce {
            subscription: self.source(),
            id: VersionId { topic: topic("t"), epoch: EPOCH, version: VERSION },
            manifest: self.digest(),
            skipped: 0,
            metadata: tensors::metadata(VERSION.0),
            may_be_base: false,
            afresh: false,
            shared: false,
            lost_place: None,
            lending: None,
            relays: RelayPath::default(),
        }
    }

    async fn send(&mut self, message: ServerMessage) {
        self.peer.send_to_client(message).await;
    }

    /// Announces the version, and returns the first chunk that is requested then.
    async fn announce(&mut self) -> u32 {
        self.send(ServerMessage::Announce(self.announcement())).await;
        loop {
            if let ClientMessage::Request { chunks, .. } = self.peer.receive_from_client().await
                && let Some(first) = chunks.iter().next()
            {
                return first;
            }
        }
    }

    fn raw(&self, chunk: u32) -> &[u8] {
        let start = (chunk % CHUNKS * CHUNK_BYTES) as usize;
        &self.payload[start..start + CHUNK_BYTES as usize]
    }

    fn header(&self, chunk: u32) -> ChunkHeader {
        ChunkHeader {
            subscription: self.source(),
            epoch: EPOCH,
            version: VERSION,
            chunk: ChunkIndex(chunk),
            codec: CodecId::Raw,
            raw_bytes: CHUNK_BYTES,
            encoded_bytes: CHUNK_BYTES,
            hash: ChunkHash::of(self.raw(chunk)),
            base: None,
        }
    }

    async fn send_chunk(&self, header: ChunkHeader, encoded: &[u8]) {
        self.peer.send_stream(&[&StreamHeader::Chunk(header).encode(), encoded]).await;
    }

    /// Begins a chunk and never ends it, unless the connection ends.
    async fn begin_chunk(&mut self, chunk: u32) {
        let mut stream = self.peer.connection.open_data().await.unwrap();
        stream.write(&StreamHeader::Chunk(self.header(chunk)).encode()).await;
        stream.write(&self.raw(chunk)[..100]).await;
        self.begun.push(stream);
    }

    /// Waits until the client unsubscribes, then until it asks again.
    async fn wait_until_left(&mut self) {
        let mut is_left = false;
        loop {
            match self.peer.receive_from_client().await {
                ClientMessage::Unsubscribe { subscription, .. } => is_left |= subscription == self.source(),
                ClientMessage::Subscribe(subscribe) => {
                    let again = subscribe.start;
                    let next = tensor_relay_protocol::Start::Exactly(Some(EPOCH), Version(2));
                    return assert_eq!((is_left, again), (true, next), "it is not asked again for version 1");
                }
                _ => {}
            }
        }
    }
}

/// Runs `attack` of the second server while version 1 is in transfer, and checks that versions 1 and 2 arrive from the
/// origin, over its first connection.
fn run_attack(expected: Expected, attack: impl AsyncFnOnce(&mut Second)) {
    simulate(1, async |sim| {
        let delay = Duration::from_millis(100);
        sim.net.set_path(Path { delay: delay..=delay, ..Path::default() });
        let is_over = Cell::new(false);
        let user = async {
            let server = sim.server(server_config());
            let mut publisher = server.publisher_with(topic("t"), Some(EPOCH), retaining(2)).unwrap();
            let config = Config { sources: vec![sim.other_ticket()], ..reconnecting() };
            let client = sim.client(1, config).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            eventually("both servers are connected", || client.lanes().len() == 2).await;
            for version in 1..=2 {
                publish(&server, &mut publisher, version, BYTES).await;
                let next = timeout(Duration::from_secs(100), subscription.next()).await;
                let snapshot = next.expect("the version arrives").unwrap();
                assert_eq!(snapshot.id().version, Version(version));
                tensors::check(&snapshot);
            }
            assert_eq!(client.reconnects(), 0, "the session to the origin stays");
            assert!(is_over.get(), "the attack is over");
        };
        let second = async {
            let mut second = Second::start(&sim).await;
            attack(&mut second).await;
            match expected {
                Expected::Closed(code) => {
                    let (found, text) = second.peer.wait_for_close().await;
                    assert_eq!(found, Some(code), "{text}");
                }
                Expected::Left => second.wait_until_left().await,
                Expected::Ignored => {}
            }
            is_over.set(true);
            pending::<()>().await; // It keeps the connection.
        };
        tokio::select! {
            () = user => {}
            () = second => {}
        }
    });
}

/// Goal: a second server that helps is used, so that failures of the tests below are due to their attacks.
#[test]
fn the_unmodified_script_is_accepted() {
    run_attack(Expected::Ignored, async |second| {
        let chunk = second.announce().await;
        second.send_chunk(second.header(chunk), second.raw(chunk)).await;
        let next = loop {
            match second.peer.receive_from_client().await {
                ClientMessage::Request { chunks, .. } if !chunks.is_empty() => break chunks,
                ClientMessage::Unsubscribe { .. } => panic!("the chunk is accepted"),
                _ => {}
            }
        };
        assert!(!next.contains(chunk));
    });
}

/// Goal: a second server with another version or manifest is left. Method: announcements that differ in one field.
#[test]
fn other_versions_and_manifests_are_left() {
    let changes: [fn(&mut Announce); 4] = [
        |announce| announce.id.version = Version(2),
        |announce| announce.id.epoch = Epoch(4),
        |announce| announce.id.topic = topic("u"),
        |announce| announce.manifest = ManifestDigest([7; 32]),
    ];
    for change in changes {
        run_attack(Expected::Left, async |second| {
            let mut announce = second.announcement();
            change(&mut announce);
            second.send(ServerMessage::Announce(announce)).await;
        });
    }
}

/// Goal: chunks that are corrupt, or have other content, are received from the origin. Method: bytes that do not have
/// the hash of their header, a stream that ends early, one that is too long, an invalid encoding, and other bytes with
/// their own hash, which only the origin's list of hashes tells apart.
#[test]
fn corrupt_and_other_chunks_come_from_the_origin() {
    let other = vec![7; CHUNK_BYTES as usize];
    for bytes in [other.clone(), vec![], vec![7; 100], vec![7; 2 * CHUNK_BYTES as usize]] {
        run_attack(Expected::Left, async |second| {
            let chunk = second.announce().await;
            second.send_chunk(second.header(chunk), &bytes).await;
        });
    }
    run_attack(Expected::Left, async |second| {
        let chunk = second.announce().await;
        let header = ChunkHeader { codec: CodecId::Zstd, encoded_bytes: 500, ..second.header(chunk) };
        second.send_chunk(header, &other[..500]).await;
    });
    run_attack(Expected::Left, async |second| {
        let chunk = second.announce().await;
        second
            .send_chunk(ChunkHeader { hash: ChunkHash::of(&other), ..second.header(chunk) }, &other)
            .await;
    });
}

/// Goal: a server that sends more than was requested of it does no harm. Method: all chunks at once.
#[test]
fn chunks_that_were_not_requested_are_survived() {
    run_attack(Expected::Ignored, async |second| {
        second.announce().await;
        for chunk in 0..CHUNKS {
            second.send_chunk(second.header(chunk), second.raw(chunk)).await;
        }
    });
}

/// Goal: chunks that break a rule cost only the connection to their server. Method: before the announcement, which would
/// use the origin's credit; of a wrong size; that do not exist; of another version.
#[test]
fn invalid_chunks_close_the_second_server_alone() {
    run_attack(REFUSED, async |second| {
        for chunk in 0..4 {
            second.send_chunk(second.header(chunk), second.raw(chunk)).await;
        }
    });
    let changes: [fn(&mut ChunkHeader); 4] = [
        |header| header.raw_bytes -= 1,
        |header| header.chunk = ChunkIndex(CHUNKS),
        |header| header.chunk = ChunkIndex(u32::MAX),
        |header| header.version = Version(2),
    ];
    for change in changes {
        run_attack(REFUSED, async |second| {
            let chunk = second.announce().await;
            let mut header = second.header(chunk);
            change(&mut header);
            second.send_chunk(header, second.raw(chunk)).await;
        });
    }
}

/// Goal: no server speaks for another one. Method: chunks, a manifest, a list of hashes and every message about the
/// user's subscription, which is the origin's.
#[test]
fn a_second_server_cannot_speak_for_the_origin() {
    run_attack(REFUSED, async |second| {
        let chunk = second.announce().await;
        second
            .send_chunk(ChunkHeader { subscription: USERS, ..second.header(chunk) }, second.raw(chunk))
            .await;
    });
    run_attack(REFUSED, async |second| {
        let header = ManifestHeader { subscription: USERS, bytes: 100, digest: second.digest() };
        second
            .peer
            .send_stream(&[&StreamHeader::Manifest(header).encode(), &[0; 100]])
            .await;
    });
    let (subscription, epoch, version) = (USERS, EPOCH, VERSION);
    let hashes = vec![ChunkHash([7; 16]); 4];
    let digest = VersionDigest::of(ManifestDigest([7; 32]), []);
    let (reason, ended) = (AbortReason::Withdrawn, EndReason::Withdrawn);
    for message in [
        ServerMessage::Hashes { subscription, epoch, version, first: 0, hashes },
        ServerMessage::Complete { subscription, epoch, version, digest },
        ServerMessage::Waiting { subscription, epoch, version },
        ServerMessage::Abort { subscription, epoch, version, reason },
        ServerMessage::End { subscription, reason: ended },
        ServerMessage::Topics { topics: vec![], more: false },
    ] {
        run_attack(REFUSED, async |second| {
            second.announce().await;
            second.send(message).await;
        });
    }
    run_attack(Expected::Closed(CloseCode::Malformed), async |second| {
        second.peer.send_bytes(&[0xff; 4]).await;
    });
}

/// Goal: the list of hashes is the origin's. Method: lists that were not asked for, a wrong one and one that is too long,
/// and a `Complete` of another digest.
#[test]
fn lists_that_were_not_asked_for_are_ignored() {
    run_attack(Expected::Ignored, async |second| {
        second.announce().await;
        let (subscription, epoch, version) = (second.source(), EPOCH, VERSION);
        for hashes in [4, 2 * CHUNKS].map(|count| vec![ChunkHash([7; 16]); count as usize]) {
            second
                .send(ServerMessage::Hashes { subscription, epoch, version, first: 0, hashes })
                .await;
        }
        let digest = VersionDigest::of(ManifestDigest([7; 32]), []);
        second
            .send(ServerMessage::Complete { subscription, epoch, version, digest })
            .await;
    });
}

/// Goal: a second server that gives up in the middle costs only what was under way. Method: `Abort`; and `End` with a
/// chunk that it has begun and never ends, for which it is closed.
#[test]
fn a_second_server_may_give_up_in_the_middle() {
    run_attack(Expected::Left, async |second| {
        second.announce().await;
        let (subscription, reason) = (second.source(), AbortReason::SourceLost);
        second
            .send(ServerMessage::Abort { subscription, epoch: EPOCH, version: VERSION, reason })
            .await;
    });
    run_attack(Expected::Closed(CloseCode::TimedOut), async |second| {
        let chunk = second.announce().await;
        second.begin_chunk(chunk).await;
        sleep(Duration::from_millis(500)).await; // `End` does not overtake it.
        let (subscription, reason) = (second.source(), EndReason::Done);
        second.send(ServerMessage::End { subscription, reason }).await;
    });
}

/// Goal: a second server that does nothing delays nothing for ever. Method: no answer; an announcement and no chunk; a
/// chunk that is begun and never ended, for which it is closed after half of the timeout.
#[test]
fn a_silent_second_server_fails_no_version() {
    run_attack(Expected::Ignored, async |_| {});
    run_attack(Expected::Ignored, async |second| {
        second.announce().await;
    });
    run_attack(Expected::Closed(CloseCode::TimedOut), async |second| {
        let chunk = second.announce().await;
        second.begin_chunk(chunk).await;
    });
}

/// Goal: the end of its connection, whatever it says, is no error for the user. Method: every close code, while a chunk is
/// under way.
#[test]
fn a_second_server_may_close_with_every_code() {
    for code in CloseCode::ALL {
        run_attack(Expected::Ignored, async |second| {
            let chunk = second.announce().await;
            second.begin_chunk(chunk).await;
            second.peer.connection.close(code.code());
        });
    }
}
