//! Servers that violate the protocol. The client delivers nothing, reports the error, and does not panic.

use crate::script::{CHUNK_BYTES, CHUNKS, EPOCH, Script, VERSION, attack, expect_closed, expect_corrupt};
use std::time::Duration;
use tensor_relay_client::{SubscriptionError, Version};
use tensor_relay_protocol::{
    AbortReason, Announce, ChunkHeader, ChunkIndex, ClientMessage, CloseCode, CodecId, Epoch, Limits,
    Manifest, ManifestDigest, ManifestHeader, ServerMessage, StreamHeader, SubscriptionId, VersionDigest,
};
use tensor_relay_tests::{
    pair::{client_config, simulate, topic},
    tensors,
};

/// Goal: a server that no longer receives messages ends the session instead of stalling it. Method: stop the control
/// stream in its receiving direction, then make the client send.
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

/// Goal: the script itself is valid, so that failures below are due to the attacks. Method: run it unchanged, and once
/// more in the worst order.
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

/// Goal: bytes that do not match their hash are never delivered. Method: one bit of the hash, one bit of the bytes.
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

/// Goal: a chunk must have exactly the length in its header. Method: streams of one byte less, one more, none, and far
/// more; and a raw chunk that claims to be encoded shorter.
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

/// Goal: a chunk is accepted once. Method: the same chunk twice at once, and again after it was verified.
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

/// The client's initial credit.
fn credit() -> u32 {
    client_config().credit_chunks
}

/// Goal: a server cannot make a client hold more chunks than it gave credit for.
/// Method: five chunks before anything was announced, where four are allowed.
#[test]
fn more_chunks_than_credit() {
    expect_closed(CloseCode::Misbehaved, "credit", async |script| {
        for chunk in 0..=credit() {
            script.good_chunk(chunk).await;
        }
    });
}

/// Goal: a manifest that differs from its announcement or header ends the session. Method: another manifest, one with
/// another hash, and one of another length.
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

/// Goal: malformed manifests end the session, although their hash is the announced one. Method: noise, a truncated
/// manifest, and one with a byte changed.
#[test]
fn malformed_manifests() {
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

/// Goal: chunks that are each valid but do not match the version's digest are not delivered. Method: Complete with
/// another digest.
#[test]
fn a_complete_with_a_wrong_digest() {
    expect_corrupt("its digest is", async |script| {
        script.good_beginning().await;
        for chunk in 0..CHUNKS {
            script.good_chunk(chunk).await;
        }
        script.complete(VersionDigest([1; 32])).await;
    });
}

/// Goal: Complete does not complete a version with missing chunks. Method: Complete with a chunk missing; the client's
/// own deadline ends it.
#[test]
fn a_complete_with_a_chunk_missing() {
    expect_stalled(async |script| {
        script.good_beginning().await;
        script.good_chunk(0).await;
        script.good_chunk(2).await;
        script.complete(script.digest()).await;
    });
}

/// Goal: a version without progress ends within two stall timeouts, whatever it waits for. Method: no Complete, no
/// manifest, no chunk, half a chunk.
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

/// Goal: as above, for a stream that is open and idle. Method: half a chunk, and then nothing, with the stream held
/// open.
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

/// Goal: invalid announcements end the session. Method: another topic, a second one before the first has ended, a
/// subscription that was never made.
#[test]
fn announcements_that_break_rules() {
    expect_closed(CloseCode::Misbehaved, "another topic", async |script| {
        let mut announce = script.announcement();
        announce.id.topic = topic("other");
        script.announce(announce).await;
    });
    expect_closed(CloseCode::Misbehaved, "the end of the previous version", async |script| {
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

/// Goal: versions rise: a client that has version 3 never gets version 2 or 3 again. Method: a good version 3, then an
/// announcement of an older one and of the same.
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

/// Goal: malformed encodings are errors: noise, the header of a decompression bomb, and one that decodes to less.
/// Method: hand-written zstd chunks.
#[test]
fn malformed_encodings() {
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

/// Goal: malformed data streams end the session. Method: an unknown kind, an unknown codec, reserved bytes.
#[test]
fn malformed_streams() {
    for (word, at, value) in [("kind 9", 0, 9), ("codec 77", 1, 77), ("reserved", 3, 1), ("reserved", 46, 1)]
    {
        expect_closed(CloseCode::Malformed, word, async |script| {
            script.good_beginning().await;
            let mut header = StreamHeader::Chunk(script.header(0)).encode();
            header[at] = value;
            script.peer.stream(&[&header, script.raw(0)]).await;
        });
    }
}

/// Goal: malformed or unexpected control messages end the session. Method: noise, an excessive length, an unrequested
/// answer, a Complete without a version.
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

/// Goal: a version that the server aborts halfway leaves no trace, and the next one arrives. Method: two of three
/// chunks, Abort, then the next version whole, with the credit that the client gives anew.
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
            let credit = ClientMessage::Credit { subscription, chunks: credit() };
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
