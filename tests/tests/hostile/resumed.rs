//! Servers that violate the protocol with resumed versions, and with messages after a commit.

use crate::script::{CHUNK_BYTES, CHUNKS, EPOCH, Script, VERSION, expect_closed};
use std::time::Duration;
use tensor_relay_client::{SubscriptionError, Version};
use tensor_relay_protocol::{
    AbortReason, Announce, CloseCode, Have, Limits, Manifest, RangeSet, ServerMessage, Subscribe, WatchId,
};
use tensor_relay_tests::{
    pair::{client_config, reconnecting, simulate, topic},
    tensors,
};

/// Runs `script` against a good client that reconnects; returns the number of resumes of its first version.
fn over_two_connections(script: impl AsyncFnOnce(Script)) -> Result<u32, SubscriptionError> {
    simulate(1, async |sim| {
        let user = async {
            let client = sim.client(1, reconnecting()).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            let snapshot = subscription.next().await;
            tokio::time::sleep(Duration::from_secs(1)).await; // Lets the last messages arrive.
            let snapshot = snapshot?;
            tensors::check(&snapshot);
            assert_eq!(snapshot.receipt().chunks, CHUNKS);
            Ok(snapshot.receipt().resumed)
        };
        let server = async { script(Script::start(&sim).await).await };
        tokio::join!(user, server).0
    })
}

/// The chunks that the client reports as held.
fn held(subscribe: &Subscribe) -> RangeSet {
    let partial = subscribe.partial.as_ref().expect("the client holds a part");
    assert_eq!((partial.epoch, partial.version), (EPOCH, VERSION));
    partial.chunks.clone()
}

/// Goal: after a lost connection, a client requests exactly the missing chunks, and no manifest. Method: for each
/// number of chunks, a valid server closes the connection after that many, with and without a `Complete` before, and
/// sends the missing chunks over another connection.
#[test]
fn a_resume_requests_only_missing_chunks() {
    for received in 0..=CHUNKS {
        for complete_first in [false, true] {
            let resumed = over_two_connections(async |mut script| {
                script.begin_version().await;
                for chunk in 0..received {
                    script.send_valid_chunk(chunk).await;
                }
                if complete_first && received < CHUNKS {
                    script.send_complete(script.digest()).await;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
                let (mut script, subscribe) = script.reconnect().await;
                assert_eq!(held(&subscribe), RangeSet::from_range(0..received));
                assert_eq!(subscribe.partial.unwrap().digest, script.digest_of(0..received));
                assert_eq!((subscribe.manifest, subscribe.have), (Some(script.manifest.digest()), None));
                script.announce(script.announcement()).await;
                for chunk in received..CHUNKS {
                    script.send_valid_chunk(chunk).await;
                }
                script.send_complete(script.digest()).await;
                script.wait_for_committed().await;
            });
            assert_eq!(resumed.unwrap(), 1);
        }
    }
}

/// Goal: an abrupt end of the server is treated as a lost connection, even if the server's close is lost. Method: stop
/// the control stream in its receiving direction, as a server's shutdown does, and close the connection never, soon, or
/// late.
#[test]
fn an_abrupt_end_is_a_lost_connection() {
    for close_ms in [u64::MAX, 300, 5_000] {
        let resumed = over_two_connections(async |mut script| {
            script.peer.stop_receiving();
            script.begin_version().await;
            script.send_valid_chunk(0).await;
            let connection = script.peer.connection.clone();
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(close_ms.min(60_000))).await;
                connection.close(CloseCode::ShuttingDown.code());
            });
            tokio::time::sleep(Duration::from_secs(4)).await;
            let (mut script, subscribe) = script.reconnect().await;
            assert_eq!(held(&subscribe), RangeSet::from_range(0..1));
            script.announce(script.announcement()).await;
            for chunk in 1..CHUNKS {
                script.send_valid_chunk(chunk).await;
            }
            script.send_complete(script.digest()).await;
            script.wait_for_committed().await;
        });
        assert_eq!(resumed.unwrap(), 1);
    }
}

/// Goal: after a loss before the manifest or the announcement, the transfer starts over; a manifest that arrived is not
/// sent again. Method: either the announcement or the manifest over the first connection.
#[test]
fn a_loss_before_the_manifest_starts_over() {
    for manifest_first in [false, true] {
        let resumed = over_two_connections(async |mut script| {
            match manifest_first {
                true => script.send_manifest(script.manifest.digest(), script.manifest.encoded()).await,
                false => script.announce(script.announcement()).await,
            }
            script.send_valid_chunk(0).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            let (mut script, subscribe) = script.reconnect().await;
            assert_eq!((subscribe.partial, subscribe.have), (None, None));
            assert_eq!(subscribe.manifest.is_some(), manifest_first);
            match manifest_first {
                true => script.announce(script.announcement()).await,
                false => script.begin_version().await,
            }
            for chunk in 0..CHUNKS {
                script.send_valid_chunk(chunk).await;
            }
            script.send_complete(script.digest()).await;
            script.wait_for_committed().await;
        });
        assert_eq!(resumed.unwrap(), 0);
    }
}

/// Goal: a version has one manifest: a partial version is never continued with another. Method: announce the version
/// again with the digest of another manifest.
#[test]
fn another_manifest_for_the_same_version_is_refused() {
    let ended = over_two_connections(async |mut script| {
        script.begin_version().await;
        script.send_valid_chunk(0).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (mut script, _) = script.reconnect().await;
        let other = Manifest::layout(vec![], vec![], CHUNK_BYTES, &Limits::default()).unwrap();
        let announce = Announce { manifest: other.digest(), ..script.announcement() };
        script.announce(announce).await;
        let (code, text) = script.peer.wait_for_close().await;
        assert_eq!(code, Some(CloseCode::ProtocolViolation), "{text}");
    });
    let error = ended.unwrap_err();
    let SubscriptionError::Disconnected { source, .. } = &error else { panic!("{error}") };
    assert!(source.to_string().contains("not the one it announced"), "{source}");
}

/// Goal: chunks that a client holds are not accepted twice, and different content in later chunks is detected at the
/// end.
/// Method: over the second connection, send a chunk that arrived over the first; then other content with valid hashes.
#[test]
fn a_partial_version_is_not_continued_wrongly() {
    let ended = over_two_connections(async |mut script| {
        script.begin_version().await;
        script.send_valid_chunk(0).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (mut script, _) = script.reconnect().await;
        script.announce(script.announcement()).await;
        script.send_valid_chunk(0).await;
        let (code, text) = script.peer.wait_for_close().await;
        assert_eq!(code, Some(CloseCode::ProtocolViolation), "{text}");
        assert!(text.contains("chunk 0 twice"), "{text}");
    });
    assert!(matches!(ended.unwrap_err(), SubscriptionError::Disconnected { .. }));

    let ended = over_two_connections(async |mut script| {
        script.begin_version().await;
        script.send_valid_chunk(0).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (mut script, _) = script.reconnect().await;
        script.announce(script.announcement()).await;
        // The server sends other content under the same id.
        script.payload.reverse();
        for chunk in 1..CHUNKS {
            script.send_valid_chunk(chunk).await;
        }
        script.send_complete(script.digest()).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    });
    assert!(matches!(ended.unwrap_err(), SubscriptionError::Corrupt { .. }));
}

/// Goal: a client does not accept a committed version, or an earlier one, again. Method: after a commit and a lost
/// connection, announce the same version again, and one before it.
#[test]
fn a_committed_version_is_not_accepted_again() {
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
                let mut script = Script::start(&sim).await;
                script.send_version().await;
                script.wait_for_committed().await;
                let (mut script, subscribe) = script.reconnect().await;
                let digest = script.digest();
                assert_eq!(subscribe.have, Some(Have { epoch: EPOCH, version: VERSION, digest }));
                let mut announce = script.announcement();
                announce.id.version = version;
                script.announce(announce).await;
                let (code, text) = script.peer.wait_for_close().await;
                assert_eq!(code, Some(CloseCode::ProtocolViolation), "{text}");
            };
            tokio::join!(user, server);
        });
    }
}

/// Goal: all chunks of a version announced afresh are received, even if some overtake the announcement: none is
/// mistaken for a chunk that the client holds. Method: after a partial and after the complete version; chunks arrive
/// before and after the announcement.
#[test]
fn a_version_announced_afresh_is_received_completely() {
    for received in [1, CHUNKS] {
        for early in [0, 2] {
            simulate(1, async |sim| {
                let user = async {
                    let client = sim.client(1, reconnecting()).await.unwrap();
                    let mut subscription = client.subscribe(&topic("t")).await.unwrap();
                    for _ in 0..if received == CHUNKS { 2 } else { 1 } {
                        let snapshot = subscription.next().await.unwrap();
                        tensors::check(&snapshot);
                        assert_eq!((snapshot.receipt().resumed, snapshot.receipt().chunks), (0, CHUNKS));
                    }
                    client
                };
                let server = async {
                    let mut script = Script::start(&sim).await;
                    if received == CHUNKS {
                        script.send_version().await;
                        script.wait_for_committed().await;
                    } else {
                        script.begin_version().await;
                        script.send_valid_chunk(0).await;
                        tokio::time::sleep(Duration::from_secs(1)).await;
                    }
                    let (mut script, subscribe) = script.reconnect().await;
                    assert_eq!(
                        (subscribe.have.is_some(), subscribe.partial.is_some()),
                        (received > 1, received == 1)
                    );
                    for chunk in 0..early {
                        script.send_valid_chunk(chunk).await;
                    }
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    script.announce(Announce { afresh: true, ..script.announcement() }).await;
                    for chunk in early..CHUNKS {
                        script.send_valid_chunk(chunk).await;
                    }
                    script.send_complete(script.digest()).await;
                    script.wait_for_committed().await;
                    script
                };
                tokio::join!(user, server);
            });
        }
    }
}

/// Goal: only a version that the client reported may be sent afresh, and only once: otherwise a server could send it
/// forever. Method: mark as afresh the first version, one newer than the committed one, and one that was just sent
/// afresh.
#[test]
fn an_afresh_version_that_was_not_requested_is_refused() {
    expect_closed(CloseCode::ProtocolViolation, "afresh", async |script| {
        script.announce(Announce { afresh: true, ..script.announcement() }).await;
    });
    for (version, received) in [(VERSION.next(), 1), (VERSION, 2)] {
        simulate(1, async |sim| {
            let user = async {
                let client = sim.client(1, reconnecting()).await.unwrap();
                let mut subscription = client.subscribe(&topic("t")).await.unwrap();
                for _ in 0..received {
                    tensors::check(&subscription.next().await.unwrap());
                }
                let error = subscription.next().await.unwrap_err();
                let SubscriptionError::Disconnected { source, .. } = &error else { panic!("{error}") };
                assert!(source.to_string().contains("afresh"), "{source}");
            };
            let server = async {
                let mut script = Script::start(&sim).await;
                script.send_version().await;
                script.wait_for_committed().await;
                let (mut script, _) = script.reconnect().await;
                let mut announce = Announce { afresh: true, ..script.announcement() };
                announce.id.version = version;
                if received == 2 {
                    script.announce(announce.clone()).await;
                    for chunk in 0..CHUNKS {
                        script.send_valid_chunk(chunk).await;
                    }
                    script.send_complete(script.digest()).await;
                    script.wait_for_committed().await;
                }
                script.announce(announce).await;
                let (code, text) = script.peer.wait_for_close().await;
                assert_eq!(code, Some(CloseCode::ProtocolViolation), "{text}");
            };
            tokio::join!(user, server);
        });
    }
}

/// Goal: an `Abort` of the version just committed is accepted, because it may have crossed the commit; others are not.
/// Method: abort the version committed last, then one that never existed.
#[test]
fn an_abort_of_the_last_commit_is_accepted() {
    simulate(1, async |sim| {
        let user = async {
            let client = sim.client(1, client_config()).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            tensors::check(&subscription.next().await.unwrap());
            let error = subscription.next().await.unwrap_err();
            assert!(matches!(error, SubscriptionError::Disconnected { .. }), "{error}");
        };
        let server = async {
            let mut script = Script::start(&sim).await;
            script.send_version().await;
            script.wait_for_committed().await;
            let (subscription, reason) = (script.subscription, AbortReason::Superseded);
            for version in [VERSION, Version(9)] {
                assert!(script.peer.connection.is_open());
                let abort = ServerMessage::Abort { subscription, epoch: EPOCH, version, reason };
                script.peer.send_to_client(abort).await;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            let (code, text) = script.peer.wait_for_close().await;
            assert_eq!(code, Some(CloseCode::ProtocolViolation), "{text}");
            assert!(text.contains("version 9"), "{text}");
        };
        tokio::join!(user, server);
    });
}

/// Goal: a client refuses names for a watch that does not exist.
#[test]
fn names_for_an_unknown_watch_are_refused() {
    expect_closed(CloseCode::ProtocolViolation, "watch 7", async |script| {
        let found = ServerMessage::Found { watch: WatchId(7), topics: vec![topic("x")] };
        script.peer.send_to_client(found).await;
    });
}
