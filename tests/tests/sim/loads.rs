//! Reports of clients that they have loaded a version, and publishers that wait for them.

use crate::OUTAGE_DURATION;
use std::time::Duration;
use tensor_relay_client::{Client, Request, Snapshot};
use tensor_relay_protocol::VersionDigest;
use tensor_relay_server::{Publication, Publisher, Server};
use tensor_relay_tests::pair::{
    client_config, eventually, publish, reconnecting, retaining, server_config, simulate, topic,
};
use tokio::time::sleep;

const TIMEOUT: Duration = Duration::from_secs(5);

async fn next_version(server: &Server, publisher: &mut Publisher, version: u64) -> Publication {
    publish(server, publisher, version, 100_000).await
}

/// Receives the newest version on a subscription that ends with it.
async fn get(client: &Client) -> Snapshot {
    client.get(Request::newest(topic("t"))).await.unwrap()
}

/// Goal: a publisher waits for what was loaded, and a commit is not enough; each consumer counts once.
/// Method: two clients report repeatedly, one of them on a subscription that has ended, and one after the version was
/// replaced and released.
#[test]
fn loads_are_counted_once_for_each_consumer() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), None, retaining(1)).unwrap();
        let mut first = next_version(&server, &mut publisher, 1).await;
        let (one, two) =
            (sim.client(1, client_config()).await.unwrap(), sim.client(2, client_config()).await.unwrap());
        let got = get(&one).await;
        let mut subscription = two.subscribe(&topic("t")).await.unwrap();
        let received = subscription.next().await.unwrap();
        assert!(first.committed(2, TIMEOUT).await);
        assert!(!first.loaded(1, TIMEOUT).await, "a commit is no load");
        for _ in 0..3 {
            got.loaded();
        }
        assert!(first.loaded(1, TIMEOUT).await);
        let second = next_version(&server, &mut publisher, 2).await;
        assert_eq!(subscription.next().await.unwrap().id().version.0, 2);
        assert!(first.released(TIMEOUT).await);
        drop(subscription);
        received.loaded();
        assert!(first.loaded(2, TIMEOUT).await);
        got.loaded();
        one.list().await.unwrap(); // The server has handled what came before.
        assert_eq!((first.loaded_count(), second.loaded_count()), (2, 0));
    });
}

/// Goal: other content than what was sent is not counted. Method: report another digest, and then the right one.
#[test]
fn a_load_of_other_content_is_not_counted() {
    simulate(2, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), None, retaining(1)).unwrap();
        let mut publication = next_version(&server, &mut publisher, 1).await;
        let client = sim.client(1, client_config()).await.unwrap();
        let snapshot = get(&client).await;
        snapshot.load_report().send_digest(VersionDigest([7; 32]));
        assert!(!publication.loaded(1, TIMEOUT).await);
        snapshot.load_report().send_digest(snapshot.load_report().digest());
        assert!(publication.loaded(1, TIMEOUT).await);
    });
}

/// Goal: a report reaches the server over another connection. Method: report while the connection is lost.
#[test]
fn a_report_is_sent_on_the_next_connection() {
    simulate(3, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), None, retaining(1)).unwrap();
        let mut publication = next_version(&server, &mut publisher, 1).await;
        let client = sim.client(1, reconnecting()).await.unwrap();
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        let snapshot = subscription.next().await.unwrap();
        sim.cut(1);
        sleep(OUTAGE_DURATION).await;
        snapshot.loaded();
        sim.mend(1);
        eventually("the client is connected again", || client.reconnects() == 1).await;
        assert!(publication.loaded(1, TIMEOUT).await);
    });
}

/// Goal: a wait ends when loads are no longer counted. Method: publish so many versions that the first is forgotten.
#[test]
fn a_forgotten_version_is_waited_for_no_longer() {
    simulate(4, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), None, retaining(1)).unwrap();
        let mut first = next_version(&server, &mut publisher, 1).await;
        for version in 2..=16 {
            next_version(&server, &mut publisher, version).await;
        }
        let began = sim.elapsed();
        assert!(!first.loaded(1, TIMEOUT).await);
        assert_eq!(sim.elapsed() - began, TIMEOUT);
        next_version(&server, &mut publisher, 17).await;
        let began = sim.elapsed();
        assert!(!first.loaded(1, TIMEOUT).await);
        assert!(sim.elapsed() - began < TIMEOUT);
    });
}
