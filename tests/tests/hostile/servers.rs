//! Servers that violate the protocol. The client delivers nothing, reports the error, and does not panic.

use crate::{
    raw::is_skipped_over_tcp,
    script::{CHUNK_BYTES, CHUNKS, EPOCH, Script, VERSION, expect_closed, expect_corrupt, run_attack},
};
use std::time::Duration;
use tensor_relay_client::{SubscriptionError, Version};
use tensor_relay_protocol::{
    AbortReason, Announce, ChunkHeader, ChunkIndex, ClientMessage, CloseCode, CodecId, Epoch, Limits,
    Manifest, ManifestDigest, ManifestHeader, ServerMessage, StreamHeader, SubscriptionId, VersionDigest,
};
use tensor_relay_tests::{
    pair::{client_config, eventually, simulate, topic},
    tensors,
};

/// Goal: a server that no longer receives messages ends the session instead of stalling it. Method: stop the control
/// stream in its receiving direction, then make the client send.
#[test]
fn a_server_that_stops_receiving_ends_the_session() {
    if is_skipped_over_tcp("it cannot stop one direction of the control stream") {
        return;
    }
    run_attack(
        async |script| {
            script.peer.stop_receiving();
            script.begin_version().await;
            script.send_valid_chunk(0).await;
        },
        async |outcome| {
            assert!(matches!(outcome.error, SubscriptionError::Disconnected { .. }), "{}", outcome.error);
        },
    );
}

/// Goal: the script itself is valid, so that failures of the tests below are due to their attacks. Method: run it
/// unchanged, and in the worst order: chunks before the announcement, and the manifest last.
#[test]
fn the_unmodified_script_is_accepted() {
    for reversed in [false, true] {
        simulate(1, async |sim| {
            let user = async {
                let client = sim.client(1, client_config()).await.unwrap();
                let mut subscription = client.subscribe(&topic("t")).await.unwrap();
                tensors::check(&subscription.next().await.unwrap());
                client
            };
            let server = async {
                let mut script = Script::start(&sim).await;
                if reversed {
                    for chunk in (0..CHUNKS).rev() {
                        script.send_valid_chunk(chunk).await;
                    }
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    script.announce(script.announcement()).await;
                    script.send_complete(script.digest()).await;
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    script.send_manifest(script.manifest.digest(), script.manifest.encoded()).await;
                } else {
                    script.send_version().await;
                }
                script.wait_for_committed().await;
            };
            tokio::join!(user, server);
        });
    }
}

/// Goal: a version is in progress from its announcement on, so that no program says that it waits for the topic.
/// Method: an announcement whose manifest follows a second later.
#[test]
fn an_announced_version_is_in_progress_before_its_manifest() {
    simulate(1, async |sim| {
        let user = async {
            let client = sim.client(1, client_config()).await.unwrap();
            let subscription = client.subscribe(&topic("t")).await.unwrap();
            eventually("a version is in progress", || subscription.progress().version > 0).await;
            let progress = subscription.progress();
            assert_eq!((progress.version, progress.payload_bytes), (VERSION.0, 0), "before the manifest");
            eventually("the manifest is there", || subscription.progress().payload_bytes > 0).await;
        };
        let server = async {
            let mut script = Script::start(&sim).await;
            script.announce(script.announcement()).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            script.send_manifest(script.manifest.digest(), script.manifest.encoded()).await;
            script
        };
        tokio::join!(user, server);
    });
}

/// Goal: bytes that do not match their hash are never delivered. Method: one bit of the hash, one bit of the bytes.
#[test]
fn a_wrong_hash_is_corrupt() {
    expect_corrupt("chunk 1 arrived corrupt", async |script| {
        script.begin_version().await;
        let mut header = script.header(1);
        header.hash.0[7] ^= 1;
        script.send_chunk(header, script.raw(1)).await;
    });
    expect_corrupt("chunk 2 arrived corrupt", async |script| {
        script.begin_version().await;
        let mut raw = script.raw(2).to_vec();
        raw[4095] ^= 128;
        script.send_chunk(script.header(2), &raw).await;
    });
}

/// Goal: a chunk must have exactly the length in its header. Method: streams of one byte less, one more, none, and far
/// more; and a raw chunk that claims to be encoded shorter.
#[test]
fn chunks_of_a_wrong_length_are_corrupt() {
    for bytes in [CHUNK_BYTES - 1, CHUNK_BYTES + 1, 0, 1 << 20] {
        expect_corrupt("where its header promised 4096", async |script| {
            script.begin_version().await;
            let raw = script.raw(0).repeat(300);
            script.send_chunk(script.header(0), &raw[..bytes as usize]).await;
        });
    }
    expect_corrupt("", async |script| {
        script.begin_version().await;
        let header = ChunkHeader { encoded_bytes: 100, ..script.header(0) };
        script.send_chunk(header, &script.raw(0)[..100]).await;
    });
}

/// Goal: headers that contradict the manifest or the announcement end the session.
/// Method: one of each kind.
#[test]
fn invalid_chunk_headers_end_the_session() {
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
    for (expected, change) in changes {
        expect_closed(CloseCode::ProtocolViolation, expected, async |script| {
            script.begin_version().await;
            let mut header = script.header(0);
            change(&mut header);
            script.send_chunk(header, script.raw(0)).await;
        });
    }
}

/// Goal: a chunk is accepted once. Method: the same chunk twice in succession, and again after it was verified.
#[test]
fn a_repeated_chunk_ends_the_session() {
    for pause in [0, 1_000] {
        expect_closed(CloseCode::ProtocolViolation, "chunk 1 twice", async |script| {
            script.begin_version().await;
            script.send_valid_chunk(1).await;
            tokio::time::sleep(Duration::from_millis(pause)).await;
            script.send_valid_chunk(1).await;
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
fn chunks_beyond_the_credit_end_the_session() {
    expect_closed(CloseCode::ProtocolViolation, "credit", async |script| {
        for chunk in 0..=credit() {
            script.send_valid_chunk(chunk).await;
        }
    });
}

/// Goal: a manifest that differs from its announcement or header ends the session. Method: another manifest, another
/// hash in the header, and another length.
#[test]
fn a_manifest_that_was_not_announced_ends_the_session() {
    expect_closed(CloseCode::ProtocolViolation, "not the one it announced", async |script| {
        let other = Manifest::layout(vec![], vec![], CHUNK_BYTES, &Limits::default()).unwrap();
        script.announce(script.announcement()).await;
        script.send_manifest(other.digest(), other.encoded()).await;
    });
    expect_closed(CloseCode::Malformed, "its header says", async |script| {
        script.announce(script.announcement()).await;
        script.send_manifest(ManifestDigest([7; 32]), script.manifest.encoded()).await;
    });
    for bytes in [u32::MAX, 32 << 20, 10] {
        expect_closed(CloseCode::Malformed, "bytes", async |script| {
            script.announce(script.announcement()).await;
            let header =
                ManifestHeader { subscription: script.subscription, bytes, digest: script.manifest.digest() };
            let encoded = script.manifest.encoded();
            script
                .peer
                .send_stream(&[&StreamHeader::Manifest(header).encode(), encoded])
                .await;
        });
    }
}

/// Goal: malformed manifests end the session, although their hash is the announced one. Method: noise, a truncated
/// manifest, and one with a byte changed.
#[test]
fn malformed_manifests_end_the_session() {
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
            script.send_manifest(digest, &encoded).await;
        });
    }
}

/// Goal: chunks that are each valid but do not match the version's digest are not delivered. Method: Complete with
/// another digest.
#[test]
fn a_wrong_version_digest_is_corrupt() {
    expect_corrupt("its digest is", async |script| {
        script.begin_version().await;
        for chunk in 0..CHUNKS {
            script.send_valid_chunk(chunk).await;
        }
        script.send_complete(VersionDigest([1; 32])).await;
    });
}

/// Goal: a `Complete` does not commit a version with missing chunks. Method: `Complete` while one chunk is missing; the
/// client's own deadline ends the version.
#[test]
fn a_missing_chunk_prevents_commit() {
    expect_stalled(async |script| {
        script.begin_version().await;
        script.send_valid_chunk(0).await;
        script.send_valid_chunk(2).await;
        script.send_complete(script.digest()).await;
    });
}

/// Goal: a version without progress ends within two stall timeouts, whatever it waits for. Method: no Complete, no
/// manifest, no chunk.
#[test]
fn stalled_versions_time_out() {
    expect_stalled(async |script| {
        script.begin_version().await;
        for chunk in 0..CHUNKS {
            script.send_valid_chunk(chunk).await;
        }
    });
    expect_stalled(async |script| script.announce(script.announcement()).await);
    expect_stalled(async |script| script.begin_version().await);
}

/// Goal: a version whose stream is open but idle ends as well. Method: send half a chunk, and leave the stream open.
#[test]
fn a_stalled_chunk_times_out() {
    let mut open = None;
    expect_stalled(async |script| {
        script.begin_version().await;
        let mut stream = script.peer.connection.open_data().await.unwrap();
        stream.write(&StreamHeader::Chunk(script.header(0)).encode()).await;
        stream.write(&script.raw(0)[..2_000]).await;
        open = Some(stream);
    });
}

/// Goal: slow is not stalled: a chunk may take longer than the deadlines of both ends. The client reports what arrives
/// within each chunk, and waits for a stream that was opened earlier and is sent later. Method: open a stream, then send
/// another chunk in pieces over a minute, then the chunk of the first stream.
#[test]
fn a_slow_chunk_is_not_stalled() {
    simulate(1, async |sim| {
        let user = async {
            let client = sim.client(1, client_config()).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            tensors::check(&subscription.next().await.unwrap());
            client
        };
        let server = async {
            let mut script = Script::start(&sim).await;
            script.begin_version().await;
            let mut early = script.peer.connection.open_data().await.unwrap();
            let mut slow = script.peer.connection.open_data().await.unwrap();
            slow.write(&StreamHeader::Chunk(script.header(0)).encode()).await;
            for piece in script.raw(0).to_vec().chunks(CHUNK_BYTES as usize / 4) {
                slow.write(piece).await;
                loop {
                    let message = script.peer.receive_from_client().await;
                    if matches!(message, ClientMessage::Credit { chunks: 0, .. }) {
                        break;
                    }
                }
                tokio::time::sleep(Duration::from_secs(15)).await;
            }
            slow.finish();
            early.write(&StreamHeader::Chunk(script.header(1)).encode()).await;
            early.write(script.raw(1)).await;
            early.finish();
            for chunk in 2..CHUNKS {
                script.send_valid_chunk(chunk).await;
            }
            script.send_complete(script.digest()).await;
            script.wait_for_committed().await;
        };
        tokio::join!(user, server);
    });
}

fn expect_stalled(script: impl AsyncFnOnce(&mut Script)) {
    let began = std::cell::Cell::new(None);
    let script = async |running: &mut Script| {
        script(running).await;
        began.set(Some(tokio::time::Instant::now()));
    };
    run_attack(script, async |mut outcome| {
        let SubscriptionError::Stalled { id, timeout_ms } = &outcome.error else {
            panic!("{}", outcome.error)
        };
        assert_eq!((id.version, *timeout_ms), (VERSION, 30_000));
        let waited = began.get().unwrap().elapsed();
        assert!(waited < Duration::from_secs(61), "{waited:?}");
        let reason = loop {
            if let ClientMessage::Abort { reason, .. } = outcome.script.peer.receive_from_client().await {
                break reason;
            }
        };
        assert_eq!(reason, AbortReason::Stalled);
    });
}

/// Goal: invalid announcements end the session. Method: another topic, a second one before the first has ended, an
/// unknown subscription.
#[test]
fn invalid_announcements_end_the_session() {
    expect_closed(CloseCode::ProtocolViolation, "another topic", async |script| {
        let mut announce = script.announcement();
        announce.id.topic = topic("other");
        script.announce(announce).await;
    });
    expect_closed(CloseCode::ProtocolViolation, "the end of the previous version", async |script| {
        script.announce(script.announcement()).await;
        let mut announce = script.announcement();
        announce.id.version = Version(4);
        script.announce(announce).await;
    });
    expect_closed(CloseCode::ProtocolViolation, "subscription 9", async |script| {
        let mut announce = script.announcement();
        announce.subscription = SubscriptionId(9);
        script.announce(announce).await;
    });
}

/// Goal: a client that has version 3 never receives version 3 again, nor version 2. Method: a valid version 3, then
/// announcements of an older version and of the same.
#[test]
fn versions_that_do_not_rise_end_the_session() {
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
                let mut script = Script::start(&sim).await;
                script.send_version().await;
                script.wait_for_committed().await;
                let mut announce = script.announcement();
                announce.id.version = Version(next);
                script.announce(announce).await;
                assert_eq!(script.peer.wait_for_close().await.0, Some(CloseCode::ProtocolViolation));
            };
            tokio::join!(user, server);
        });
    }
}

/// Goal: malformed encodings are errors. Method: hand-written zstd chunks: repeated bytes, the header of a
/// decompression bomb, a frame that decodes to fewer bytes, and no bytes.
#[test]
fn malformed_encodings_are_corrupt() {
    let one_tebibyte = [&b"\x28\xb5\x2f\xfd\xc0\x00"[..], &(1u64 << 40).to_le_bytes(), &[1, 0, 0]].concat();
    // A frame of three bytes with a raw block (RFC 8878 §3.1).
    let three_bytes = b"\x28\xb5\x2f\xfd\x20\x03\x19\0\0abc".to_vec();
    for encoded in [vec![0xaa; 500], one_tebibyte, three_bytes, vec![]] {
        expect_corrupt("", async |script| {
            script.begin_version().await;
            let header =
                ChunkHeader { codec: CodecId::Zstd, encoded_bytes: encoded.len() as u32, ..script.header(0) };
            script.send_chunk(header, &encoded).await;
        });
    }
}

/// Goal: malformed data streams end the session. Method: an unknown kind, an unknown codec, reserved bytes.
#[test]
fn malformed_stream_headers_end_the_session() {
    for (expected, at, value) in
        [("kind 9", 0, 9), ("codec 77", 1, 77), ("reserved", 3, 1), ("reserved", 46, 1)]
    {
        expect_closed(CloseCode::Malformed, expected, async |script| {
            script.begin_version().await;
            let mut header = StreamHeader::Chunk(script.header(0)).encode();
            header[at] = value;
            script.peer.send_stream(&[&header, script.raw(0)]).await;
        });
    }
}

/// Goal: malformed or unexpected control messages end the session. Method: noise, an excessive length, an unrequested
/// answer, a Complete and a Waiting without a version, an Announce of the version under way.
#[test]
fn invalid_control_messages_end_the_session() {
    expect_closed(CloseCode::Malformed, "malformed", async |script| {
        script.peer.send_bytes(b"\x04\0\0\0\xff\xff\xff\xff").await;
    });
    expect_closed(CloseCode::Malformed, "at most", async |script| script.peer.send_bytes(&[0xff; 4]).await);
    expect_closed(CloseCode::ProtocolViolation, "Topics", async |script| {
        let unrequested = ServerMessage::Topics { topics: vec![], more: false };
        script.peer.send_to_client(unrequested).await;
    });
    expect_closed(CloseCode::ProtocolViolation, "version 3", async |script| {
        script.send_complete(script.digest()).await
    });
    expect_closed(CloseCode::ProtocolViolation, "version 3", async |script| {
        let (subscription, epoch, version) = (script.subscription, EPOCH, VERSION);
        let waiting = ServerMessage::Waiting { subscription, epoch, version };
        script.peer.send_to_client(waiting).await;
    });
    expect_closed(CloseCode::ProtocolViolation, "Announce", async |script| {
        for _ in 0..2 {
            script.announce(script.announcement()).await;
        }
    });
}

/// Goal: a version that the server aborts midway leaves no trace, and the next one arrives. Method: two of three
/// chunks, Abort, then the complete next version, with the credit that the client returns.
#[test]
fn an_aborted_version_leaves_no_trace() {
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
            let mut script = Script::start(&sim).await;
            let (valid, aborted) = (script.announcement(), Version(2));
            let mut announce = valid.clone();
            announce.id.version = aborted;
            script.announce(announce).await;
            script.send_manifest(script.manifest.digest(), script.manifest.encoded()).await;
            for chunk in 0..2 {
                let header = ChunkHeader { version: aborted, ..script.header(chunk) };
                script.send_chunk(header, script.raw(chunk)).await;
            }
            let (subscription, reason) = (script.subscription, AbortReason::SourceLost);
            let abort = ServerMessage::Abort { subscription, epoch: EPOCH, version: aborted, reason };
            script.peer.send_to_client(abort).await;
            let answer = loop {
                match script.peer.receive_from_client().await {
                    ClientMessage::Credit { .. } => {}
                    other => break other,
                }
            };
            let expected = ClientMessage::Abort { subscription, epoch: EPOCH, version: aborted, reason };
            assert_eq!(answer, expected);
            let credit = ClientMessage::Credit { subscription, chunks: credit() };
            assert_eq!(script.peer.receive_from_client().await, credit);
            script.announce(valid).await;
            for chunk in 0..CHUNKS {
                script.send_valid_chunk(chunk).await;
            }
            script.send_complete(script.digest()).await;
            script
        };
        tokio::join!(user, server);
    });
}
