//! `Client::get`: one version, the newest or by its number, or its description.

use crate::{OUTAGE_DURATION, slow_path};
use std::time::Duration;
use tensor_relay_client::{
    Client, EndReason, GetError, Request, Snapshot, Start, SubscriptionError, Version,
};
use tensor_relay_protocol::Epoch;
use tensor_relay_server::{Publisher, Server, TopicOptions};
use tensor_relay_tests::{
    pair::{
        CHUNK_BYTES, Sim, client_config, eventually, publish, reconnecting, retaining, server_config,
        simulate, topic,
    },
    tensors,
};
use tokio::time::{sleep, timeout};

const EPOCH: Epoch = Epoch(3);
const BYTES: u64 = 4 << 20;

/// The maximum number of wire bytes that a lost connection costs: those of the chunks in flight.
const LOST_BYTES: u64 = 4 * CHUNK_BYTES as u64;

fn open(server: &Server, options: TopicOptions) -> Publisher {
    server.publisher_with(topic("t"), Some(EPOCH), options).unwrap()
}

fn newest() -> Request {
    Request::newest(topic("t"))
}

fn exactly(version: u64) -> Request {
    Request::exactly(topic("t"), Some(EPOCH), Version(version))
}

/// Receives one version, whose content is checked; returns its number.
async fn get(client: &Client, request: Request) -> u64 {
    let snapshot = client.get(request).await.unwrap();
    tensors::check(&snapshot);
    snapshot.id().version.0
}

fn is_missing(got: Result<Snapshot, GetError>, number: u64) -> bool {
    let expected = Version(number);
    matches!(got, Err(GetError::Subscription(SubscriptionError::VersionNotFound { version, .. })) if version == expected)
}

/// Goal: each retained version can be requested by its number, in both modes; others are refused or awaited; and no
/// request leaves a subscription or a reader behind. Method: a topic that retains three of five versions, and then one
/// that has ended.
#[test]
fn every_retained_version_can_be_requested() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, retaining(3));
        let client = sim.client(1, client_config()).await.unwrap();
        let mut first = Box::pin(get(&client, newest()));
        assert!(timeout(Duration::from_secs(1), &mut first).await.is_err(), "there is no version");
        publish(&server, &mut publisher, 1, 1000).await;
        assert_eq!(first.await, 1);
        for version in 2..=5 {
            publish(&server, &mut publisher, version, 1000).await;
        }
        for version in 3..=5 {
            assert_eq!(get(&client, exactly(version)).await, version);
            assert_eq!(get(&client, exactly(version).awaited()).await, version);
            let latest = Request::latest(topic("t")).from(Start::Exactly(None, Version(version)));
            assert_eq!(get(&client, latest).await, version);
        }
        for version in [2, 6] {
            assert!(is_missing(client.get(exactly(version)).await, version));
        }
        assert!(is_missing(client.get(exactly(2).awaited()).await, 2), "it has left retention");
        let mut awaited = Box::pin(get(&client, exactly(7).awaited()));
        assert!(timeout(Duration::from_secs(30), &mut awaited).await.is_err());
        for version in 6..=9 {
            publish(&server, &mut publisher, version, 1000).await;
        }
        assert_eq!(awaited.await, 7, "it stays retained until it is received");
        publisher.end();
        assert_eq!((get(&client, newest()).await, get(&client, exactly(9)).await), (9, 9));
        assert!(is_missing(client.get(exactly(10)).await, 10));
        let ended = client.get(exactly(10).awaited()).await.unwrap_err();
        let GetError::Subscription(SubscriptionError::Ended { reason: EndReason::TopicEnded, .. }) = ended
        else {
            panic!("{ended}")
        };
        eventually("no subscription is left", || server.stats().transfers == 0).await;
        assert_eq!(client.list().await.unwrap()[0].subscribers, 0);
    });
}

/// Goal: a version by its number is received over several connections, without sending again what was verified, although
/// a newer version is published meanwhile, and the subscription ends then. Method: cut the path in the middle, and publish
/// while it is cut; by its number, and as the newest.
#[test]
fn a_requested_version_is_resumed() {
    for request in [exactly(1), exactly(1).awaited(), newest()] {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = open(&server, retaining(2));
            publish(&server, &mut publisher, 1, BYTES).await;
            let client = sim.client(1, reconnecting()).await.unwrap();
            let mut getting = client.subscribe_to(request.clone()).await.unwrap();
            let is_half = || getting.progress().verified_bytes >= BYTES / 2;
            eventually("half of it is there", is_half).await;
            sim.cut(1);
            publish(&server, &mut publisher, 2, 1000).await;
            sleep(OUTAGE_DURATION).await;
            sim.mend(1);
            let snapshot = getting.next().await.unwrap();
            tensors::check(&snapshot);
            let receipt = snapshot.receipt();
            assert_eq!((snapshot.id().version, receipt.resumed), (Version(1), 1));
            assert!(receipt.wire_bytes <= BYTES + LOST_BYTES, "{receipt:?}");
            let end = getting.next().await.unwrap_err();
            assert!(matches!(end, SubscriptionError::Ended { reason: EndReason::Done, .. }), "{end}");
        });
    }
}

/// Goal: after a version that the server aborts, the newest one is received instead; but a version by its number has no
/// substitute. Method: withdraw the version under way on a slow path, until its time has passed, and publish another.
#[test]
fn only_the_newest_has_a_substitute() {
    for (request, is_newest) in [(newest(), true), (exactly(1), false), (exactly(1).awaited(), false)] {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            slow_path(&sim);
            let options = TopicOptions { release_timeout: Some(Duration::from_millis(100)), ..retaining(2) };
            let mut publisher = open(&server, options);
            let publication = publish(&server, &mut publisher, 1, BYTES).await;
            let client = sim.client(1, client_config()).await.unwrap();
            let mut getting = client.subscribe_to(request.clone()).await.unwrap();
            eventually("it is under way", || getting.progress().verified_bytes > 0).await;
            publication.withdraw();
            publish(&server, &mut publisher, 2, 1000).await;
            let got = getting.next().await;
            match is_newest {
                true => assert_eq!(got.unwrap().id().version, Version(2)),
                false => {
                    let error = got.unwrap_err();
                    assert!(
                        matches!(error, SubscriptionError::VersionNotFound { version: Version(1), .. }),
                        "{error}"
                    );
                }
            }
        });
    }
}

/// Goal: a description has all of a version but its tensors, costs next to nothing, and counts for no publisher.
/// Method: describe the newest version and an older one, of several megabytes each.
#[test]
fn a_description_costs_no_payload() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, retaining(2));
        let mut publications = vec![];
        for version in 1..=2 {
            publications.push(publish(&server, &mut publisher, version, BYTES).await);
        }
        let client = sim.client(1, client_config()).await.unwrap();
        for (request, version) in [(newest(), 2), (exactly(1), 1), (exactly(2).awaited(), 2)] {
            let before = sim.server_sent();
            let described = client.get(request.describe()).await.unwrap();
            let sent = sim.server_sent() - before;
            assert!(sent < 4_000, "{sent} bytes for a description");
            assert_eq!((described.id().version, described.id().epoch), (Version(version), EPOCH));
            assert_eq!(described.manifest().payload_bytes(), BYTES);
            assert_eq!(described.metadata(), tensors::metadata(version));
            assert_eq!((described.payload_bytes(), described.tensors().count()), (0, 0));
        }
        assert!(is_missing(client.get(exactly(3).describe()).await, 3));
        let counted: u64 = publications.iter().map(|publication| publication.committed_count()).sum();
        assert_eq!(counted, 0);
    });
}

/// Goal: a commit of one version counts for its publisher, as any other. Method: the publisher waits for it.
#[test]
fn a_requested_version_counts_as_committed() {
    simulate(1, async |sim: Sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, retaining(1));
        let mut publication = publish(&server, &mut publisher, 1, 1000).await;
        let client = sim.client(1, client_config()).await.unwrap();
        get(&client, exactly(1)).await;
        assert!(publication.committed(1, Duration::from_secs(5)).await);
        client.close().await;
    });
}
