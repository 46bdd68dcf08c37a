//! Servers that violate the protocol for resumed versions and for messages after an end.

use crate::script::{CHUNK_BYTES, CHUNKS, EPOCH, Script, VERSION, expect_closed};
use std::time::Duration;
use tensor_relay_client::{SubscriptionError, Version};
use tensor_relay_protocol::{
    AbortReason, Announce, Blame, CloseCode, Have, Limits, Manifest, RangeSet, ServerMessage, Subscribe,
    WatchId,
};
use tensor_relay_tests::{
    pair::{client_config, reconnecting, simulate, topic},
    tensors,
};

/// Runs a good client that reconnects against `script`; returns the result of its first call.
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
        let server = async { script(Script::begin(&sim).await).await };
        tokio::join!(user, server).0
    })
}

fn held(subscribe: &Subscribe) -> RangeSet {
    let partial = subscribe.partial.as_ref().expect("the client holds a part");
    assert_eq!((partial.epoch, partial.version), (EPOCH, VERSION));
    partial.chunks.clone()
}

/// Goal: whatever a client holds when its connection is lost, it requests the rest: after no chunk, after all chunks,
/// and anything between. The manifest is sent once. Method: a good server that loses the connection after some chunks,
/// and sends the missing ones over another.
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
                assert_eq!(subscribe.partial.unwrap().digest, script.digest_of(0..came));
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

/// Goal: a server that ends abruptly is treated as a lost connection, even if its close is lost. Method: stop the
/// control stream in its receiving direction, as shutting down does, and close never, soon, or late.
#[test]
fn a_server_that_ends_without_good_bye() {
    for good_bye_ms in [u64::MAX, 300, 5_000] {
        let resumed = over_two_connections(async |mut script| {
            script.peer.stop_hearing();
            script.good_beginning().await;
            script.good_chunk(0).await;
            let connection = script.peer.connection.clone();
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(good_bye_ms.min(60_000))).await;
                connection.close(CloseCode::ShuttingDown.code().into(), b"");
            });
            tokio::time::sleep(Duration::from_secs(4)).await;
            let (mut script, subscribe) = script.again().await;
            assert_eq!(held(&subscribe), RangeSet::from_range(0..1));
            script.announce(script.announcement()).await;
            for chunk in 1..CHUNKS {
                script.good_chunk(chunk).await;
            }
            script.complete(script.digest()).await;
            script.committed().await;
        });
        assert_eq!(resumed.unwrap(), 1);
    }
}

/// Goal: after a loss before the manifest, the transfer starts over; after a manifest without announcement, the
/// manifest is not sent again. Method: either the announcement or the manifest over the first connection.
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

/// Goal: a version has one manifest: a partial version is never continued with another. Method: announce the version
/// again with the digest of another manifest.
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

/// Goal: chunks that a client holds are not accepted twice, and different content of the rest is detected at the end.
/// Method: over the second connection, a chunk that came over the first; then other content with valid chunk hashes.
#[test]
fn a_partial_version_that_is_continued_wrongly() {
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
        // The server sends other content under the same id.
        script.payload.reverse();
        for chunk in 1..CHUNKS {
            script.good_chunk(chunk).await;
        }
        script.complete(script.digest()).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    });
    assert!(matches!(ended.unwrap_err(), SubscriptionError::Corrupt { .. }));
}

/// Goal: a server cannot make a client go back to a version that it committed. Method: after a commit and a lost
/// connection, announce the same version again, and one before it.
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
                let digest = script.digest();
                assert_eq!(subscribe.have, Some(Have { epoch: EPOCH, version: VERSION, digest }));
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

/// Goal: a version announced afresh is received whole, even if chunks overtake the announcement: none is mistaken for a
/// chunk that the client has. Method: after a partial and after the whole version; chunks arrive before and after the
/// announcement.
#[test]
fn a_version_that_comes_afresh() {
    for came in [1, CHUNKS] {
        for early in [0, 2] {
            simulate(1, async |sim| {
                let user = async {
                    let client = sim.client(1, reconnecting()).await.unwrap();
                    let mut subscription = client.subscribe(&topic("t")).await.unwrap();
                    for _ in 0..if came == CHUNKS { 2 } else { 1 } {
                        let snapshot = subscription.next().await.unwrap();
                        tensors::check(&snapshot);
                        assert_eq!((snapshot.receipt().resumed, snapshot.receipt().chunks), (0, CHUNKS));
                    }
                    client
                };
                let server = async {
                    let mut script = Script::begin(&sim).await;
                    if came == CHUNKS {
                        script.good_version().await;
                        script.committed().await;
                    } else {
                        script.good_beginning().await;
                        script.good_chunk(0).await;
                        tokio::time::sleep(Duration::from_secs(1)).await;
                    }
                    let (mut script, subscribe) = script.again().await;
                    assert_eq!(
                        (subscribe.have.is_some(), subscribe.partial.is_some()),
                        (came > 1, came == 1)
                    );
                    for chunk in 0..early {
                        script.good_chunk(chunk).await;
                    }
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    script.announce(Announce { afresh: true, ..script.announcement() }).await;
                    for chunk in early..CHUNKS {
                        script.good_chunk(chunk).await;
                    }
                    script.complete(script.digest()).await;
                    script.committed().await;
                    script
                };
                tokio::join!(user, server);
            });
        }
    }
}

/// Goal: only a version that the client named may come afresh, and only once: otherwise a server could send it forever.
/// Method: mark as afresh a first version, one newer than the committed one, and one that just came afresh.
#[test]
fn a_version_that_comes_afresh_without_reason() {
    expect_closed(CloseCode::Misbehaved, "afresh", async |script| {
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
                let mut script = Script::begin(&sim).await;
                script.good_version().await;
                script.committed().await;
                let (mut script, _) = script.again().await;
                let mut announce = Announce { afresh: true, ..script.announcement() };
                announce.id.version = version;
                if received == 2 {
                    script.announce(announce.clone()).await;
                    for chunk in 0..CHUNKS {
                        script.good_chunk(chunk).await;
                    }
                    script.complete(script.digest()).await;
                    script.committed().await;
                }
                script.announce(announce).await;
                let (told, text) = script.peer.closed_because().await;
                assert_eq!(told, Some(CloseCode::Misbehaved), "{text}");
            };
            tokio::join!(user, server);
        });
    }
}

/// Goal: an `Abort` of the version just committed is accepted, because it may have crossed the commit; others are not.
/// Method: abort the version committed last, then one that never existed.
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

/// Goal: a client refuses names for a watch that it did not create. Method: names for a watch that does not exist.
#[test]
fn names_for_no_watch() {
    expect_closed(CloseCode::Misbehaved, "watch 7", async |script| {
        let found = ServerMessage::Found { watch: WatchId(7), topics: vec![topic("x")] };
        script.peer.say_to_client(found).await;
    });
}
