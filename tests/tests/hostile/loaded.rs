//! The feature `loaded` (PROTOCOL.md §3.18), message by message.

use crate::{
    raw::{Peer, subscribe},
    script::{EPOCH, Script, VERSION},
};
use std::time::Duration;
use tensor_relay_protocol::{ClientMessage, ServerMessage, SubscriptionId, Version, VersionDigest};
use tensor_relay_tests::pair::{client_config, publish, retaining, server_config, simulate, topic};
use tokio::time::timeout;

/// Goal: reports that mean nothing are passed over, and count nothing. Method: reports of a subscription that does not
/// exist, of a version that was not published, and of one that was not sent to anybody; then `List`.
#[test]
fn meaningless_reports_are_passed_over() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), Some(EPOCH), retaining(1)).unwrap();
        let publication = publish(&server, &mut publisher, 1, 100_000).await;
        let mut peer = Peer::welcomed_client(&sim, 2).await;
        peer.send_to_server(subscribe(1, 0)).await;
        let digest = VersionDigest([1; 32]);
        for (subscription, version) in [(9, 1), (1, 2), (1, 1)] {
            let (subscription, version) = (SubscriptionId(subscription), Version(version));
            peer.send_to_server(ClientMessage::Loaded { subscription, epoch: EPOCH, version, digest })
                .await;
        }
        peer.send_to_server(ClientMessage::List).await;
        while !matches!(peer.receive_from_server().await, ServerMessage::Topics { .. }) {}
        assert_eq!(publication.loaded_count(), 0);
    });
}

/// Goal: a report is sent to servers that offer the feature, and to no others. Method: a server of each kind; after the
/// report, the client's next message is awaited.
#[test]
fn reports_are_sent_to_servers_that_know_them() {
    for offers in [true, false] {
        simulate(1, async |sim| {
            let user = async {
                let client = sim.client(1, client_config()).await.unwrap();
                let mut subscription = client.subscribe(&topic("t")).await.unwrap();
                let snapshot = subscription.next().await.unwrap();
                snapshot.loaded();
                let _ = timeout(Duration::from_secs(1), client.list()).await;
            };
            let server = async {
                let mut script = Script::new(match offers {
                    true => Peer::server(&sim).await,
                    false => Peer::server_without_features(&sim).await,
                });
                script.send_version().await;
                script.wait_for_committed().await;
                let (subscription, digest) = (script.subscription, script.digest());
                let loaded = ClientMessage::Loaded { subscription, epoch: EPOCH, version: VERSION, digest };
                for expected in offers.then_some(loaded).into_iter().chain([ClientMessage::List]) {
                    assert_eq!(script.peer.receive_from_client().await, expected);
                }
            };
            tokio::join!(user, server);
        });
    }
}
