//! Topics that exist, that appear later or never, and a thousand topics.

use std::time::Duration;
use tensor_relay_client::{SubscriptionError, Version};
use tensor_relay_tests::{
    pair::{client_config, eventually, publish, server_config, simulate, topic},
    tensors,
};
use tokio::time::sleep;

/// Goal: a late subscriber receives the newest version, and none of the older ones.
/// Method: publish five versions, then subscribe; count the bytes that the server sent.
#[test]
fn a_late_subscriber_gets_only_the_newest_version() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        for version in 1..=5 {
            publish(&server, &mut publisher, version, 1 << 20).await;
        }
        let client = sim.client(1, client_config()).await.unwrap();
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        let snapshot = subscription.next().await.unwrap();
        tensors::check(&snapshot);
        assert_eq!((snapshot.id().version, snapshot.skipped()), (Version(5), 0));
        let sent = sim.net.sent_by(&sim.server_host()).bytes;
        assert!(sent < (1 << 20) * 11 / 10, "{sent} bytes were sent for one version of a MiB");
        assert_eq!(server.stats().staged_bytes, 1 << 20, "older versions are released");
    });
}

/// Goal: a topic that does not exist is reported after `topic_timeout`, and not before.
/// Method: subscribe with a timeout of three seconds to a topic that is never published.
#[test]
fn a_topic_that_does_not_appear_is_reported() {
    simulate(2, async |sim| {
        let server = sim.server(server_config());
        let wait = Duration::from_secs(3);
        let config = tensor_relay_client::Config { topic_timeout: wait, ..client_config() };
        let client = sim.client(1, config).await.unwrap();
        let mut subscription = client.subscribe(&topic("none")).await.unwrap();
        let subscribed = sim.elapsed();
        for _ in 0..2 {
            let error = subscription.next().await.unwrap_err();
            let SubscriptionError::NotFound { topic, timeout_ms } = &error else { panic!("{error}") };
            assert_eq!((topic.as_str(), *timeout_ms), ("none", 3_000));
            let waited = sim.elapsed() - subscribed;
            assert!(waited >= wait && waited < wait + Duration::from_millis(10), "{waited:?}");
        }
        drop(subscription);
        assert_eq!(client.list().await.unwrap(), []);
        assert_eq!(server.stats().sessions, 1, "the session is not affected");
    });
}

/// Goal: a topic may appear while a subscription waits for it; the wait for a next version of an existing topic has no
/// limit.
/// Method: publish two seconds after subscribing, and again five minutes later.
#[test]
fn a_topic_may_appear_after_its_subscription() {
    simulate(3, async |sim| {
        let server = sim.server(server_config());
        let client = sim.client(1, client_config()).await.unwrap();
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        let publishing = async {
            sleep(Duration::from_secs(2)).await;
            let mut publisher = server.publisher(topic("t")).unwrap();
            publish(&server, &mut publisher, 1, 100_000).await;
            sleep(Duration::from_secs(300)).await;
            publish(&server, &mut publisher, 2, 100_000).await;
        };
        let following = async {
            for version in [1, 2] {
                let snapshot = subscription.next().await.unwrap();
                tensors::check(&snapshot);
                assert_eq!(snapshot.id().version, Version(version));
            }
        };
        tokio::join!(publishing, following);
    });
}

/// Goal: the subscriptions of a session do not affect each other, and end separately.
/// Method: eight topics at once; drop half of the subscriptions, publish to all again.
#[test]
fn subscriptions_of_a_session_are_independent() {
    simulate(4, async |sim| {
        let server = sim.server(server_config());
        let client = sim.client(1, client_config()).await.unwrap();
        let mut publishers = Vec::new();
        let mut subscriptions = Vec::new();
        for number in 0..8 {
            let name = topic(&format!("topic/{number}"));
            publishers.push(server.publisher(name.clone()).unwrap());
            subscriptions.push(client.subscribe(&name).await.unwrap());
        }
        for version in [1, 2] {
            for publisher in &mut publishers {
                publish(&server, publisher, version, 500_000).await;
            }
            for subscription in &mut subscriptions {
                let snapshot = subscription.next().await.unwrap();
                assert_eq!(&snapshot.id().topic, subscription.topic());
                assert_eq!(snapshot.id().version, Version(version));
                tensors::check(&snapshot);
            }
            subscriptions.truncate(4);
        }
        eventually("all versions are committed", || server.stats().committed == 12).await;
        let listed = client.list().await.unwrap();
        assert!(listed.iter().map(|topic| topic.subscribers).eq([1, 1, 1, 1, 0, 0, 0, 0]));
    });
}

/// Goal: a list of any length arrives complete and in order.
/// Method: a thousand topics, some with names of the maximum length, on a bad network.
#[test]
fn a_list_of_a_thousand_topics_is_complete() {
    simulate(5, async |sim| {
        let server = sim.server(server_config());
        let mut names: Vec<String> = (0..1_000)
            .map(|number| format!("{number:0>width$}", width = 4 + number % 252))
            .collect();
        let mut publishers = Vec::new();
        for name in &names {
            let mut publisher = server.publisher(topic(name)).unwrap();
            publish(&server, &mut publisher, 1, 256).await;
            publishers.push(publisher);
        }
        names.sort();
        let client = sim.client(1, client_config()).await.unwrap();
        sim.net.set_path(tensor_relay_tests::simnet::Path {
            loss: 0.03,
            corruption: 0.01,
            ..Default::default()
        });
        let listed = client.list().await.unwrap();
        let found: Vec<&str> = listed.iter().map(|entry| entry.id.topic.as_str()).collect();
        assert_eq!(found, names);
        for entry in &listed {
            assert_eq!((entry.id.version, entry.tensors, entry.payload_bytes), (Version(1), 1, 256));
        }
    });
}

/// Goal: an end is final: after the error that its topic was not found, a subscription receives no version.
/// Method: let the wait time out, then publish, and count the topic's subscribers.
#[test]
fn an_ended_subscription_stays_ended_when_its_topic_appears() {
    simulate(21, async |sim| {
        let server = sim.server(server_config());
        let client = sim.client(1, client_config()).await.unwrap();
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        let error = subscription.next().await.unwrap_err();
        let mut publisher = server.publisher(topic("t")).unwrap();
        publish(&server, &mut publisher, 1, 1 << 20).await;
        sleep(Duration::from_secs(1)).await;
        assert_eq!(client.list().await.unwrap()[0].subscribers, 0, "the subscription has ended");
        assert_eq!(subscription.next().await.unwrap_err().to_string(), error.to_string());
    });
}

/// Goal: a subscription whose `subscribe` was cancelled does not remain on the server.
/// Method: cancel `subscribe` after its first poll, when its message is being sent, and count the topic's subscribers.
#[test]
fn a_cancelled_subscribe_leaves_no_subscription() {
    simulate(22, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        publish(&server, &mut publisher, 1, 1 << 20).await;
        let client = sim.client(1, client_config()).await.unwrap();
        let name = topic("t");
        {
            let mut subscribing = std::pin::pin!(client.subscribe(&name));
            let once =
                std::future::poll_fn(|cx| std::task::Poll::Ready(subscribing.as_mut().poll(cx).is_pending()));
            assert!(once.await, "the message is in flight and not answered");
        }
        sleep(Duration::from_secs(1)).await;
        assert_eq!(client.list().await.unwrap()[0].subscribers, 0);
        assert_eq!(server.stats().transfers, 0);
    });
}
