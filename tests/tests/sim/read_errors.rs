//! Read errors that pass: the version is sent once it can be read again, and both ends say what they wait for.

use std::time::Duration;
use tensor_relay_client::{Client, Config, Request, Subscription, SubscriptionError};
use tensor_relay_protocol::{Epoch, Mode, Version};
use tensor_relay_server::{Publisher, Server};
use tensor_relay_tests::{
    pair::{Sim, client_config, eventually, reconnecting, retaining, server_config, simulate, topic},
    read_switch::ReadSwitch,
    tensors,
};
use tokio::time::{sleep, timeout};

/// Several chunks.
const BYTES: u64 = 300_000;

/// Longer than either end waits for progress of a version.
const LONG: Duration = Duration::from_secs(200);

async fn publish(server: &Server, publisher: &mut Publisher, switch: &ReadSwitch, content: u64) {
    let borrowed = switch.borrow(server, vec![tensors::noise("noise", BYTES)], content);
    publisher.publish(borrowed, tensors::metadata(content)).await.unwrap();
}

fn open(server: &Server) -> Publisher {
    server.publisher_with(topic("t"), Some(Epoch(5)), retaining(4)).unwrap()
}

async fn follow(sim: &Sim, number: u8, mode: Mode, config: Config) -> (Client, Subscription) {
    let client = sim.client(number, config).await.unwrap();
    let request = if mode == Mode::Every { Request::every(topic("t")) } else { Request::latest(topic("t")) };
    let subscription = client.subscribe_to(request).await.unwrap();
    client.list().await.unwrap();
    (client, subscription)
}

/// Receives the next version, which must have this number, count of skipped versions, and content.
async fn next(subscription: &mut Subscription, version: u64, skipped: u64) {
    let snapshot = subscription.next().await.unwrap();
    assert_eq!((snapshot.id().version, snapshot.skipped()), (Version(version), skipped));
    tensors::check(&snapshot);
}

/// Goal: a follower receives the newest version once it can be read again, on the same connection, whatever the
/// duration of the failure, and is not evicted.
/// Method: both modes; reads fail from the beginning of the version, and for a short time or a long one.
#[test]
fn a_version_is_sent_when_it_can_be_read_again() {
    for mode in [Mode::Latest, Mode::Every] {
        for duration in [Duration::from_millis(50), LONG] {
            simulate(1, async |sim| {
                let (server, switch) = (sim.server(server_config()), ReadSwitch::default());
                let mut publisher = open(&server);
                let (client, mut subscription) = follow(&sim, 1, mode, reconnecting()).await;
                publish(&server, &mut publisher, &switch, 1).await;
                next(&mut subscription, 1, 0).await;
                switch.set_failing(true);
                publish(&server, &mut publisher, &switch, 2).await;
                assert!(timeout(duration, subscription.next()).await.is_err());
                switch.set_failing(false);
                timeout(Duration::from_secs(6), next(&mut subscription, 2, 0)).await.unwrap();
                assert_eq!((client.reconnects(), server.stats().evicted), (0, 0));
            });
        }
    }
}

/// Goal: a version that cannot be read delays the next one not at all in mode `latest`, and for seconds in mode
/// `every`, which reports it missing.
/// Method: reads of version 2 fail for ever; version 3 can be read.
#[test]
fn an_unreadable_version_does_not_hold_up_the_next() {
    for mode in [Mode::Latest, Mode::Every] {
        simulate(2, async |sim| {
            let (server, switch, failing) =
                (sim.server(server_config()), ReadSwitch::default(), ReadSwitch::default());
            let mut publisher = open(&server);
            let (_client, mut subscription) = follow(&sim, 1, mode, reconnecting()).await;
            publish(&server, &mut publisher, &switch, 1).await;
            next(&mut subscription, 1, 0).await;
            failing.set_failing(true);
            publish(&server, &mut publisher, &failing, 2).await;
            sleep(Duration::from_secs(1)).await;
            publish(&server, &mut publisher, &switch, 3).await;
            if mode == Mode::Every {
                let gap = timeout(Duration::from_secs(20), subscription.next())
                    .await
                    .unwrap()
                    .unwrap_err();
                assert!(gap.to_string().contains("1 version is missing"), "{gap}");
                next(&mut subscription, 3, 0).await;
            } else {
                timeout(Duration::from_secs(6), next(&mut subscription, 3, 1)).await.unwrap();
            }
        });
    }
}

/// Goal: a client without any version fails after its timeout with the cause, as if the topic did not exist.
/// Method: reads fail for ever.
#[test]
fn a_first_version_that_cannot_be_read_is_an_error() {
    simulate(3, async |sim| {
        let (server, switch) = (sim.server(server_config()), ReadSwitch::default());
        let mut publisher = open(&server);
        switch.set_failing(true);
        publish(&server, &mut publisher, &switch, 1).await;
        let config = Config { topic_timeout: Duration::from_secs(10), ..client_config() };
        let (_client, mut subscription) = follow(&sim, 1, Mode::Latest, config).await;
        let error = timeout(Duration::from_secs(30), subscription.next())
            .await
            .unwrap()
            .unwrap_err();
        assert!(matches!(error, SubscriptionError::Aborted { .. }), "{error}");
        assert!(error.to_string().contains("its source could not be read"), "{error}");
    });
}

/// Goal: a version is compared with the one that a client holds under its number once it can be read: other content is
/// sent. Method: both modes; a second server publishes other content while reads fail.
#[test]
fn a_comparison_waits_until_the_version_can_be_read() {
    for mode in [Mode::Latest, Mode::Every] {
        simulate(4, async |sim| {
            let (server, switch) = (sim.server(server_config()), ReadSwitch::default());
            let mut publisher = open(&server);
            let (client, mut subscription) = follow(&sim, 1, mode, reconnecting()).await;
            publish(&server, &mut publisher, &switch, 1).await;
            next(&mut subscription, 1, 0).await;
            drop((publisher, server));
            let server = sim.server_again(server_config()).await;
            let mut publisher = open(&server);
            switch.set_failing(true);
            publish(&server, &mut publisher, &switch, 1001).await;
            eventually("the client has reconnected", || client.reconnects() == 1).await;
            assert!(timeout(LONG, subscription.next()).await.is_err());
            switch.set_failing(false);
            let snapshot = timeout(Duration::from_secs(6), subscription.next()).await.unwrap().unwrap();
            tensors::check_content(&snapshot, 1001);
        });
    }
}
