//! Servers that break the rules. The client delivers nothing, says what was wrong, and does not panic.

use crate::raw::Peer;
use std::time::Duration;
use tensor_relay_client::{SubscriptionError, Version};
use tensor_relay_protocol::{
    AbortReason, Announce, Blame, ChunkHash, ChunkHeader, ChunkIndex, ClientMessage, CloseCode, CodecId,
    Epoch, Limits, Manifest, ManifestDigest, ManifestHeader, RangeSet, ServerMessage, StreamHeader,
    Subscribe, SubscriptionId, VersionDigest, VersionId, WatchId,
};
use tensor_relay_tests::{
    pair::{Sim, client_config, reconnecting, simulate, topic},
    tensors,
};

const CHUNK_BYTES: u32 = 4096;
const CHUNKS: u32 = 3;
const EPOCH: Epoch = Epoch(5);
const VERSION: Version = Version(3);

/// What a good server would send: a version of three chunks. Attacks change parts of it.
struct Script {
    peer: Peer,
    subscription: SubscriptionId,
    manifest: Manifest,
    payload: Vec<u8>,
}

impl Script {
    /// Waits for the client to subscribe.
    async fn begin(sim: &Sim) -> Self {
        let (peer, subscribe) = Peer::server(sim).await;
        let bytes = u64::from(CHUNKS * CHUNK_BYTES);
        let specs = vec![tensors::noise("noise", bytes)];
        let mut payload = vec![0; bytes as usize];
        tensors::write_content("noise", VERSION.0, &mut payload);
        Self {
            peer,
            subscription: subscribe.subscription,
            manifest: Manifest::layout(specs, vec![], CHUNK_BYTES, &Limits::default()).unwrap(),
            payload,
        }
    }

    /// Loses the connection, and waits for the client to come back and subscribe; says what it asks for.
    async fn again(self) -> (Self, Subscribe) {
        let (peer, subscribe) = self.peer.again().await;
        assert_eq!(subscribe.subscription, self.subscription);
        (Self { peer, ..self }, subscribe)
    }

    fn announcement(&self) -> Announce {
        Announce {
            subscription: self.subscription,
            id: VersionId { topic: topic("t"), epoch: EPOCH, version: VERSION },
            manifest: self.manifest.digest(),
            skipped: 0,
            metadata: tensors::metadata(VERSION.0),
        }
    }

    fn raw(&self, chunk: u32) -> &[u8] {
        let start = (chunk % CHUNKS * CHUNK_BYTES) as usize;
        &self.payload[start..start + CHUNK_BYTES as usize]
    }

    fn header(&self, chunk: u32) -> ChunkHeader {
        ChunkHeader {
            subscription: self.subscription,
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

    fn digest(&self) -> VersionDigest {
        let hashes = (0..CHUNKS).map(|chunk| ChunkHash::of(self.raw(chunk)));
        VersionDigest::of(self.manifest.digest(), hashes)
    }

    async fn announce(&mut self, announce: Announce) {
        self.peer.say_to_client(ServerMessage::Announce(announce)).await;
    }

    async fn manifest(&self, digest: ManifestDigest, encoded: &[u8]) {
        let header = ManifestHeader { subscription: self.subscription, bytes: encoded.len() as u32, digest };
        self.peer.stream(&[&StreamHeader::Manifest(header).encode(), encoded]).await;
    }

    async fn chunk(&self, header: ChunkHeader, encoded: &[u8]) {
        self.peer.stream(&[&StreamHeader::Chunk(header).encode(), encoded]).await;
    }

    async fn good_chunk(&self, chunk: u32) {
        self.chunk(self.header(chunk), self.raw(chunk)).await;
    }

    async fn good_beginning(&mut self) {
        self.announce(self.announcement()).await;
        self.manifest(self.manifest.digest(), self.manifest.encoded()).await;
    }

    async fn complete(&mut self, digest: VersionDigest) {
        self.peer
            .say_to_client(ServerMessage::Complete {
                subscription: self.subscription,
                epoch: EPOCH,
                version: VERSION,
                digest,
            })
            .await;
    }

    /// Waits until the client says that it has the version.
    async fn committed(&mut self) {
        loop {
            if let ClientMessage::Committed { version, .. } = self.peer.hear_client().await {
                return assert_eq!(version, VERSION);
            }
        }
    }

    /// Sends the version as a good server does.
    async fn good_version(&mut self) {
        self.good_beginning().await;
        for chunk in 0..CHUNKS {
            self.good_chunk(chunk).await;
        }
        self.complete(self.digest()).await;
    }
}

/// What a client makes of an attack: its user's error, and the server's end of the connection.
struct Found {
    error: SubscriptionError,
    script: Script,
}

/// Runs `attack` on a client that wants "t" and must deliver nothing.
fn attack(attack: impl AsyncFnOnce(&mut Script), check: impl AsyncFnOnce(Found)) {
    simulate(1, async |sim| {
        let user = async {
            let client = sim.client(1, client_config()).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            let error = subscription.next().await.map(|snapshot| snapshot.id().clone()).unwrap_err();
            let again = subscription.next().await.unwrap_err();
            assert_eq!(again.to_string(), error.to_string(), "an end is for ever");
            (client, error)
        };
        let server = async {
            let mut script = Script::begin(&sim).await;
            attack(&mut script).await;
            script
        };
        let ((_client, error), script) = tokio::join!(user, server);
        check(Found { error, script }).await;
    });
}

/// The version must be given up, and the server told that it arrived corrupt; the session lives on.
fn expect_corrupt(word: &str, script: impl AsyncFnOnce(&mut Script)) {
    attack(script, async |mut found| {
        let SubscriptionError::Corrupt { id, detail } = &found.error else { panic!("{}", found.error) };
        assert_eq!(id.version, VERSION);
        assert!(detail.contains(word), "{detail:?} says nothing of {word:?}");
        let reason = loop {
            match found.script.peer.hear_client().await {
                ClientMessage::Credit { .. } => {}
                ClientMessage::Abort { reason, .. } => break reason,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(reason, AbortReason::Corrupt);
        let good_bye =
            ClientMessage::Unsubscribe { subscription: found.script.subscription, keep_place: false };
        assert_eq!(found.script.peer.hear_client().await, good_bye);
        assert_eq!(found.script.peer.connection.close_reason(), None);
    });
}

/// The session must end with `code`, the server being to blame.
fn expect_closed(code: CloseCode, word: &str, script: impl AsyncFnOnce(&mut Script)) {
    attack(script, async |found| {
        let SubscriptionError::Disconnected { source, .. } = &found.error else { panic!("{}", found.error) };
        assert_eq!(source.blame(), Blame::Peer);
        assert!(source.to_string().contains(word), "{source} says nothing of {word:?}");
        let (told, text) = found.script.peer.closed_because().await;
        assert_eq!(told, Some(code), "{text}");
    });
}

/// Goal: a server that cannot be spoken to any more ends the session instead of keeping it waiting.
/// Method: stop the control stream in its receiving direction, then make the client speak.
#[test]
fn a_server_that_stops_hearing() {
    attack(
        async |script| {
            script.peer.stop_hearing();
            script.good_beginning().await;
            script.good_chunk(0).await;
        },
        async |found| {
            assert!(matches!(found.error, SubscriptionError::Disconnected { .. }), "{}", found.error);
        },
    );
}

/// Goal: the script itself is good, or the attacks on it prove nothing.
/// Method: play it unchanged, and once more with everything in the worst order.
#[test]
fn the_good_version() {
    for reversed in [false, true] {
        simulate(1, async |sim| {
            let user = async {
                let client = sim.client(1, client_config()).await.unwrap();
                let mut subscription = client.subscribe(&topic("t")).await.unwrap();
                tensors::check(&subscription.next().await.unwrap());
                client
            };
            let server = async {
                let mut script = Script::begin(&sim).await;
                if reversed {
                    for chunk in (0..CHUNKS).rev() {
                        script.good_chunk(chunk).await;
                    }
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    script.announce(script.announcement()).await;
                    script.complete(script.digest()).await;
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    script.manifest(script.manifest.digest(), script.manifest.encoded()).await;
                } else {
                    script.good_version().await;
                }
                script.committed().await;
            };
            tokio::join!(user, server);
        });
    }
}

/// Goal: bytes that are not those that were hashed are never shown.
/// Method: one bit of the hash, one bit of the bytes.
#[test]
fn a_wrong_hash() {
    expect_corrupt("chunk 1 arrived corrupt", async |script| {
        script.good_beginning().await;
        let mut header = script.header(1);
        header.hash.0[7] ^= 1;
        script.chunk(header, script.raw(1)).await;
    });
    expect_corrupt("chunk 2 arrived corrupt", async |script| {
        script.good_beginning().await;
        let mut raw = script.raw(2).to_vec();
        raw[4095] ^= 128;
        script.chunk(script.header(2), &raw).await;
    });
}

/// Goal: a chunk is as long as its header says, not a byte more or less.
/// Method: streams of one byte less, one more, none, and far more; and a raw chunk that claims to be encoded shorter.
#[test]
fn streams_of_a_wrong_length() {
    for bytes in [CHUNK_BYTES - 1, CHUNK_BYTES + 1, 0, 1 << 20] {
        expect_corrupt("where its header promised 4096", async |script| {
            script.good_beginning().await;
            let raw = script.raw(0).repeat(300);
            script.chunk(script.header(0), &raw[..bytes as usize]).await;
        });
    }
    expect_corrupt("", async |script| {
        script.good_beginning().await;
        let header = ChunkHeader { encoded_bytes: 100, ..script.header(0) };
        script.chunk(header, &script.raw(0)[..100]).await;
    });
}

/// Goal: headers that contradict the manifest or the announcement end the session.
/// Method: one of each kind.
#[test]
fn headers_that_break_rules() {
    type Change = fn(&mut ChunkHeader);
    let changes: [(&str, Change); 8] = [
        ("chunk 3 of a version that has 3", |header| header.chunk = ChunkIndex(3)),
        ("chunk 4294967295 of", |header| header.chunk = ChunkIndex(u32::MAX)),
        ("4095 raw bytes", |header| header.raw_bytes -= 1),
        ("more than its 4096 raw ones", |header| header.encoded_bytes += 1),
        ("version 4 of", |header| header.version = Version(4)),
        ("version 3 of epoch", |header| header.epoch = Epoch(6)),
        ("against version 2", |header| header.base = Some(Version(2))),
        ("subscription 9", |header| header.subscription = SubscriptionId(9)),
    ];
    for (word, change) in changes {
        expect_closed(CloseCode::Misbehaved, word, async |script| {
            script.good_beginning().await;
            let mut header = script.header(0);
            change(&mut header);
            script.chunk(header, script.raw(0)).await;
        });
    }
}

/// Goal: a chunk comes once.
/// Method: the same chunk twice, and once more when it is verified.
#[test]
fn a_chunk_twice() {
    for pause in [0, 1_000] {
        expect_closed(CloseCode::Misbehaved, "chunk 1 twice", async |script| {
            script.good_beginning().await;
            script.good_chunk(1).await;
            tokio::time::sleep(Duration::from_millis(pause)).await;
            script.good_chunk(1).await;
        });
    }
}

/// Goal: a server cannot make a client hold more chunks than it gave credit for.
/// Method: five chunks before anything was announced, where four are allowed.
#[test]
fn more_chunks_than_credit() {
    expect_closed(CloseCode::Misbehaved, "credit", async |script| {
        for chunk in 0..5 {
            script.good_chunk(chunk).await;
        }
    });
}

/// Goal: a manifest is the one that was announced and that its header names, or the session ends.
/// Method: another one, one that hashes to something else, and one of another length.
#[test]
fn manifests_that_are_not_as_announced() {
    expect_closed(CloseCode::Misbehaved, "not the one it announced", async |script| {
        let other = Manifest::layout(vec![], vec![], CHUNK_BYTES, &Limits::default()).unwrap();
        script.announce(script.announcement()).await;
        script.manifest(other.digest(), other.encoded()).await;
    });
    expect_closed(CloseCode::Malformed, "its header says", async |script| {
        script.announce(script.announcement()).await;
        script.manifest(ManifestDigest([7; 32]), script.manifest.encoded()).await;
    });
    for bytes in [u32::MAX, 32 << 20, 10] {
        expect_closed(CloseCode::Malformed, "bytes", async |script| {
            script.announce(script.announcement()).await;
            let header =
                ManifestHeader { subscription: script.subscription, bytes, digest: script.manifest.digest() };
            let encoded = script.manifest.encoded();
            script.peer.stream(&[&StreamHeader::Manifest(header).encode(), encoded]).await;
        });
    }
}

/// Goal: bytes that are no manifest end the session, though they hash to what was announced.
/// Method: noise, a cut manifest, and one with a byte changed.
#[test]
fn manifests_that_are_none() {
    let damage: [fn(Vec<u8>) -> Vec<u8>; 3] = [
        |_| vec![0xff; 1_000],
        |mut good| {
            good.pop();
            good
        },
        |mut good| {
            good[1] ^= 0x40;
            good
        },
    ];
    for damage in damage {
        expect_closed(CloseCode::Malformed, "manifest", async |script| {
            let encoded = damage(script.manifest.encoded().to_vec());
            let digest = ManifestDigest::of(&encoded);
            let announce = Announce { manifest: digest, ..script.announcement() };
            script.announce(announce).await;
            script.manifest(digest, &encoded).await;
        });
    }
}

/// Goal: chunks that are each right but together are not what the server says are not shown.
/// Method: Complete with another digest.
#[test]
fn a_complete_with_a_wrong_digest() {
    expect_corrupt("together hash to", async |script| {
        script.good_beginning().await;
        for chunk in 0..CHUNKS {
            script.good_chunk(chunk).await;
        }
        script.complete(VersionDigest([1; 32])).await;
    });
}

/// Goal: Complete makes nothing whole that is not.
/// Method: Complete with a chunk missing; the client's own deadline ends it.
#[test]
fn a_complete_with_a_chunk_missing() {
    expect_stalled(async |script| {
        script.good_beginning().await;
        script.good_chunk(0).await;
        script.good_chunk(2).await;
        script.complete(script.digest()).await;
    });
}

/// Goal: a version that does not go on ends within two stall timeouts, whatever it waits for.
/// Method: no Complete, no manifest, no chunk, half a chunk.
#[test]
fn versions_that_stall() {
    expect_stalled(async |script| {
        script.good_beginning().await;
        for chunk in 0..CHUNKS {
            script.good_chunk(chunk).await;
        }
    });
    expect_stalled(async |script| script.announce(script.announcement()).await);
    expect_stalled(async |script| script.good_beginning().await);
}

/// Goal: as above, for a stream that is open and quiet.
/// Method: half a chunk, and then nothing, with the stream held open.
#[test]
fn half_a_chunk() {
    let mut held = None;
    expect_stalled(async |script| {
        script.good_beginning().await;
        let mut stream = script.peer.connection.open_uni().await.unwrap();
        stream.write_all(&StreamHeader::Chunk(script.header(0)).encode()).await.unwrap();
        stream.write_all(&script.raw(0)[..2_000]).await.unwrap();
        held = Some(stream);
    });
}

fn expect_stalled(script: impl AsyncFnOnce(&mut Script)) {
    let began = std::cell::Cell::new(None);
    let script = async |it: &mut Script| {
        script(it).await;
        began.set(Some(tokio::time::Instant::now()));
    };
    attack(script, async |mut found| {
        let SubscriptionError::Stalled { id, timeout_ms } = &found.error else { panic!("{}", found.error) };
        assert_eq!((id.version, *timeout_ms), (VERSION, 30_000));
        let waited = began.get().unwrap().elapsed();
        assert!(waited < Duration::from_secs(61), "{waited:?}");
        let reason = loop {
            if let ClientMessage::Abort { reason, .. } = found.script.peer.hear_client().await {
                break reason;
            }
        };
        assert_eq!(reason, AbortReason::Stalled);
    });
}

/// Goal: announcements have rules too.
/// Method: another topic, a second one before the first has ended, a subscription that was never made.
#[test]
fn announcements_that_break_rules() {
    expect_closed(CloseCode::Misbehaved, "another topic", async |script| {
        let mut announce = script.announcement();
        announce.id.topic = topic("other");
        script.announce(announce).await;
    });
    expect_closed(CloseCode::Misbehaved, "the end of the version before", async |script| {
        script.announce(script.announcement()).await;
        let mut announce = script.announcement();
        announce.id.version = Version(4);
        script.announce(announce).await;
    });
    expect_closed(CloseCode::Misbehaved, "subscription 9", async |script| {
        let mut announce = script.announcement();
        announce.subscription = SubscriptionId(9);
        script.announce(announce).await;
    });
}

/// Goal: versions rise. A user who has version 3 never gets version 2 or 3 again.
/// Method: a good version 3, taken by the user, then an announcement of an older one and of the same.
#[test]
fn versions_that_do_not_rise() {
    for next in [2, 3] {
        simulate(1, async |sim| {
            let user = async {
                let client = sim.client(1, client_config()).await.unwrap();
                let mut subscription = client.subscribe(&topic("t")).await.unwrap();
                tensors::check(&subscription.next().await.unwrap());
                let error = subscription.next().await.unwrap_err();
                assert!(error.to_string().contains(&format!("version {next} after version 3")), "{error}");
                client
            };
            let server = async {
                let mut script = Script::begin(&sim).await;
                script.good_version().await;
                script.committed().await;
                let mut announce = script.announcement();
                announce.id.version = Version(next);
                script.announce(announce).await;
                assert_eq!(script.peer.closed_because().await.0, Some(CloseCode::Misbehaved));
            };
            tokio::join!(user, server);
        });
    }
}

/// Goal: encodings that are none are survived: noise, a bomb's header, and one of something shorter.
/// Method: zstd chunks written by hand.
#[test]
fn encodings_that_are_none() {
    let one_tebibyte = [&b"\x28\xb5\x2f\xfd\xc0\x00"[..], &(1u64 << 40).to_le_bytes(), &[1, 0, 0]].concat();
    // A raw block of three bytes in a frame that says so (RFC 8878 §3.1).
    let three_bytes = b"\x28\xb5\x2f\xfd\x20\x03\x19\0\0abc".to_vec();
    for encoded in [vec![0xaa; 500], one_tebibyte, three_bytes, vec![]] {
        expect_corrupt("", async |script| {
            script.good_beginning().await;
            let header =
                ChunkHeader { codec: CodecId::Zstd, encoded_bytes: encoded.len() as u32, ..script.header(0) };
            script.chunk(header, &encoded).await;
        });
    }
}

/// Goal: data streams that are none end the session.
/// Method: an unknown kind, an unknown codec, reserved bytes.
#[test]
fn streams_that_are_none() {
    for (word, at, value) in [("kind 9", 0, 9), ("codec 77", 1, 77), ("reserved", 2, 1), ("reserved", 46, 1)]
    {
        expect_closed(CloseCode::Malformed, word, async |script| {
            script.good_beginning().await;
            let mut header = StreamHeader::Chunk(script.header(0)).encode();
            header[at] = value;
            script.peer.stream(&[&header, script.raw(0)]).await;
        });
    }
}

/// Goal: control messages that are none, or have no place, end the session.
/// Method: noise, a length beyond all bounds, a second Welcome, an answer to no question, a Complete for nothing.
#[test]
fn control_messages_that_break_rules() {
    expect_closed(CloseCode::Malformed, "malformed", async |script| {
        script.peer.say(b"\x04\0\0\0\xff\xff\xff\xff").await;
    });
    expect_closed(CloseCode::Malformed, "at most", async |script| script.peer.say(&[0xff; 4]).await);
    expect_closed(CloseCode::Misbehaved, "Topics", async |script| {
        let unasked = ServerMessage::Topics { topics: vec![], more: false };
        script.peer.say_to_client(unasked).await;
    });
    expect_closed(CloseCode::Misbehaved, "version 3", async |script| script.complete(script.digest()).await);
}

/// Goal: a server that gives a version up in the middle leaves no trace of it, and the next one arrives.
/// Method: two of three chunks, Abort, then the next version whole, with the credit that the client grants anew.
#[test]
fn a_version_that_is_given_up() {
    simulate(1, async |sim| {
        let user = async {
            let client = sim.client(1, client_config()).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            assert_eq!(snapshot.id().version, VERSION);
            client
        };
        let server = async {
            let mut script = Script::begin(&sim).await;
            let (good, before) = (script.announcement(), Version(2));
            let mut announce = good.clone();
            announce.id.version = before;
            script.announce(announce).await;
            script.manifest(script.manifest.digest(), script.manifest.encoded()).await;
            for chunk in 0..2 {
                let header = ChunkHeader { version: before, ..script.header(chunk) };
                script.chunk(header, script.raw(chunk)).await;
            }
            let (subscription, reason) = (script.subscription, AbortReason::SourceLost);
            let abort = ServerMessage::Abort { subscription, epoch: EPOCH, version: before, reason };
            script.peer.say_to_client(abort).await;
            let answer = loop {
                match script.peer.hear_client().await {
                    ClientMessage::Credit { .. } => {}
                    other => break other,
                }
            };
            let expected = ClientMessage::Abort { subscription, epoch: EPOCH, version: before, reason };
            assert_eq!(answer, expected);
            let credit = ClientMessage::Credit { subscription, chunks: 4 };
            assert_eq!(script.peer.hear_client().await, credit);
            script.announce(good).await;
            for chunk in 0..CHUNKS {
                script.good_chunk(chunk).await;
            }
            script.complete(script.digest()).await;
            script
        };
        tokio::join!(user, server);
    });
}

/// Runs a good user who makes lost connections again, against `script`; returns what its first call comes to.
fn over_two_connections(script: impl AsyncFnOnce(Script)) -> Result<u32, SubscriptionError> {
    simulate(1, async |sim| {
        let user = async {
            let client = sim.client(1, reconnecting()).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            let snapshot = subscription.next().await;
            tokio::time::sleep(Duration::from_secs(1)).await; // The last words are heard.
            let snapshot = snapshot?;
            tensors::check(&snapshot);
            assert_eq!(snapshot.receipt().chunks, CHUNKS);
            Ok(snapshot.receipt().resumed)
        };
        let server = async { script(Script::begin(&sim).await).await };
        tokio::join!(user, server).0
    })
}

fn held(subscribe: &Subscribe) -> RangeSet {
    let partial = subscribe.partial.as_ref().expect("the client holds a part");
    assert_eq!((partial.epoch, partial.version), (EPOCH, VERSION));
    partial.chunks.clone()
}

/// Goal: whatever a client holds when its connection is lost, it asks for the rest: nothing yet, all but the last word,
/// and anything between. The manifest comes once.
/// Method: a good server that loses the connection after so many chunks, and sends what is missing over another one.
#[test]
fn a_good_server_that_is_started_again() {
    for came in 0..=CHUNKS {
        for said_complete in [false, true] {
            let resumed = over_two_connections(async |mut script| {
                script.good_beginning().await;
                for chunk in 0..came {
                    script.good_chunk(chunk).await;
                }
                if said_complete && came < CHUNKS {
                    script.complete(script.digest()).await;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
                let (mut script, subscribe) = script.again().await;
                assert_eq!(held(&subscribe), RangeSet::from_range(0..came));
                assert_eq!((subscribe.manifest, subscribe.have), (Some(script.manifest.digest()), None));
                script.announce(script.announcement()).await;
                for chunk in came..CHUNKS {
                    script.good_chunk(chunk).await;
                }
                script.complete(script.digest()).await;
                script.committed().await;
            });
            assert_eq!(resumed.unwrap(), 1);
        }
    }
}

/// Goal: a connection that is lost before there is a manifest begins at the beginning; one that brought the manifest and
/// no announcement need not bring it again.
/// Method: each half of a beginning over one connection.
#[test]
fn half_a_beginning() {
    for manifest_first in [false, true] {
        let resumed = over_two_connections(async |mut script| {
            match manifest_first {
                true => script.manifest(script.manifest.digest(), script.manifest.encoded()).await,
                false => script.announce(script.announcement()).await,
            }
            script.good_chunk(0).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            let (mut script, subscribe) = script.again().await;
            assert_eq!((subscribe.partial, subscribe.have), (None, None));
            assert_eq!(subscribe.manifest.is_some(), manifest_first);
            match manifest_first {
                true => script.announce(script.announcement()).await,
                false => script.good_beginning().await,
            }
            for chunk in 0..CHUNKS {
                script.good_chunk(chunk).await;
            }
            script.complete(script.digest()).await;
            script.committed().await;
        });
        assert_eq!(resumed.unwrap(), 0);
    }
}

/// Goal: one version has one manifest: a part of one is never continued as another.
/// Method: announce the version again with the digest of another manifest.
#[test]
fn another_manifest_for_the_same_version() {
    let ended = over_two_connections(async |mut script| {
        script.good_beginning().await;
        script.good_chunk(0).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (mut script, _) = script.again().await;
        let other = Manifest::layout(vec![], vec![], CHUNK_BYTES, &Limits::default()).unwrap();
        let announce = Announce { manifest: other.digest(), ..script.announcement() };
        script.announce(announce).await;
        let (told, text) = script.peer.closed_because().await;
        assert_eq!(told, Some(CloseCode::Misbehaved), "{text}");
    });
    let error = ended.unwrap_err();
    let SubscriptionError::Disconnected { source, .. } = &error else { panic!("{error}") };
    assert!(source.to_string().contains("not the one it announced"), "{source}");
    assert_eq!(source.blame(), Blame::Peer);
}

/// Goal: what a client holds is not taken a second time, and another content for the rest is noticed at the end.
/// Method: over the second connection, a chunk that came over the first; other bytes with a good hash of their own; a
/// whole that is another one.
#[test]
fn a_part_that_is_continued_wrongly() {
    let ended = over_two_connections(async |mut script| {
        script.good_beginning().await;
        script.good_chunk(0).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (mut script, _) = script.again().await;
        script.announce(script.announcement()).await;
        script.good_chunk(0).await;
        let (told, text) = script.peer.closed_because().await;
        assert_eq!(told, Some(CloseCode::Misbehaved), "{text}");
        assert!(text.contains("chunk 0 twice"), "{text}");
    });
    assert!(matches!(ended.unwrap_err(), SubscriptionError::Disconnected { .. }));

    let ended = over_two_connections(async |mut script| {
        script.good_beginning().await;
        script.good_chunk(0).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (mut script, _) = script.again().await;
        script.announce(script.announcement()).await;
        // The server says that another content has the same id.
        script.payload.reverse();
        for chunk in 1..CHUNKS {
            script.good_chunk(chunk).await;
        }
        script.complete(script.digest()).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    });
    assert!(matches!(ended.unwrap_err(), SubscriptionError::Corrupt { .. }));
}

/// Goal: a server cannot take a client back to what it has committed.
/// Method: after a commit and a lost connection, announce the same version again, and one before it.
#[test]
fn a_version_that_was_committed_before() {
    for version in [VERSION, Version(1)] {
        simulate(1, async |sim| {
            let user = async {
                let client = sim.client(1, reconnecting()).await.unwrap();
                let mut subscription = client.subscribe(&topic("t")).await.unwrap();
                tensors::check(&subscription.next().await.unwrap());
                let error = subscription.next().await.unwrap_err();
                let SubscriptionError::Disconnected { source, .. } = &error else { panic!("{error}") };
                assert!(source.to_string().contains("version"), "{source}");
            };
            let server = async {
                let mut script = Script::begin(&sim).await;
                script.good_version().await;
                script.committed().await;
                let (mut script, subscribe) = script.again().await;
                assert_eq!(subscribe.have, Some((EPOCH, VERSION)));
                let mut announce = script.announcement();
                announce.id.version = version;
                script.announce(announce).await;
                let (told, text) = script.peer.closed_because().await;
                assert_eq!(told, Some(CloseCode::Misbehaved), "{text}");
            };
            tokio::join!(user, server);
        });
    }
}

/// Goal: an abort of what was committed is a word that crossed the commit, and nothing else is excused by that.
/// Method: give up the version that was committed last, then one that never was.
#[test]
fn an_abort_after_the_commit() {
    simulate(1, async |sim| {
        let user = async {
            let client = sim.client(1, client_config()).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            tensors::check(&subscription.next().await.unwrap());
            let error = subscription.next().await.unwrap_err();
            assert!(matches!(error, SubscriptionError::Disconnected { .. }), "{error}");
        };
        let server = async {
            let mut script = Script::begin(&sim).await;
            script.good_version().await;
            script.committed().await;
            let (subscription, reason) = (script.subscription, AbortReason::Superseded);
            for version in [VERSION, Version(9)] {
                assert_eq!(script.peer.connection.close_reason(), None);
                let abort = ServerMessage::Abort { subscription, epoch: EPOCH, version, reason };
                script.peer.say_to_client(abort).await;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            let (told, text) = script.peer.closed_because().await;
            assert_eq!(told, Some(CloseCode::Misbehaved), "{text}");
            assert!(text.contains("version 9"), "{text}");
        };
        tokio::join!(user, server);
    });
}

/// Goal: a server cannot make a client believe in watches that it did not ask for.
/// Method: names for a watch that does not exist.
#[test]
fn names_for_no_watch() {
    expect_closed(CloseCode::Misbehaved, "watch 7", async |script| {
        let found = ServerMessage::Found { watch: WatchId(7), topics: vec![topic("x")] };
        script.peer.say_to_client(found).await;
    });
}
