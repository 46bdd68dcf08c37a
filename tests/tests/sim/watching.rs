//! Watches, which find topics, and selections, which receive only some tensors of a topic.

use crate::{OUTAGE_DURATION, slow_path};
use std::{collections::BTreeSet, time::Duration};
use tensor_relay_client::{EndReason, Glob, Request, Snapshot, SubscriptionError, TopicWatch};
use tensor_relay_protocol::{CodecId, Epoch, TensorSpec};
use tensor_relay_server::{Publisher, Server, TopicOptions};
use tensor_relay_tests::{
    pair::{
        CHUNK_BYTES, client_config, eventually, publish, reconnecting, retaining, server_config, simulate,
        topic,
    },
    simnet::Path,
    tensors,
};
use tokio::time::sleep;

fn glob(pattern: &str) -> Glob {
    Glob::new(pattern).unwrap()
}

async fn open(server: &Server, name: &str) -> Publisher {
    let mut publisher = server.publisher(topic(name)).unwrap();
    publish(server, &mut publisher, 1, 100).await;
    publisher
}

/// The topics that a watch names until it names none for a second.
async fn found(watch: &mut TopicWatch) -> Vec<String> {
    let mut topics = vec![];
    while let Ok(Some(topic)) = tokio::time::timeout(Duration::from_secs(1), watch.next()).await {
        topics.push(topic.as_str().to_owned());
    }
    topics
}

/// Goal: a watch names each matching topic once, as soon as the topic has a version, whether it exists already or
/// appears later.
/// Method: several globs at once; topics before and after the watch, and without a version; the end of one watch.
#[test]
fn a_watch_names_existing_and_later_topics() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let _before = [open(&server, "kv/b").await, open(&server, "kv/a").await, open(&server, "x").await];
        let client = sim.client(1, client_config()).await.unwrap();
        let mut flat = client.watch(&glob("kv/*")).await.unwrap();
        let mut deep = client.watch(&glob("kv/**")).await.unwrap();
        let mut literal = client.watch(&glob("later")).await.unwrap();
        let mut ended = client.watch(&glob("**")).await.unwrap();
        assert_eq!(found(&mut flat).await, ["kv/a", "kv/b"]);
        assert_eq!(found(&mut deep).await, ["kv/a", "kv/b"]);
        assert!(found(&mut literal).await.is_empty());
        assert_eq!(found(&mut ended).await, ["kv/a", "kv/b", "x"]);
        drop(ended);
        let mut empty = server.publisher(topic("kv/c")).unwrap();
        assert!(found(&mut flat).await.is_empty(), "`kv/c` has no version");
        let _after = [open(&server, "kv/d/e").await, open(&server, "later").await];
        publish(&server, &mut empty, 1, 100).await;
        publish(&server, &mut empty, 2, 100).await;
        assert_eq!(found(&mut flat).await, ["kv/c"]);
        assert_eq!(found(&mut deep).await, ["kv/d/e", "kv/c"]);
        assert_eq!(found(&mut literal).await, ["later"]);
        let mut again = client.watch(&glob("kv/?")).await.unwrap();
        assert_eq!(found(&mut again).await, ["kv/a", "kv/b", "kv/c"]);
    });
}

/// Goal: a watch survives a lost connection and a restart of the server: topics that appeared meanwhile are named, and
/// none is named twice.
/// Method: lose the connection, then restart the server with an earlier topic and a new one.
#[test]
fn watches_survive_lost_connections() {
    simulate(2, async |sim| {
        let server = sim.server(server_config());
        let one = open(&server, "kv/1").await;
        let client = sim.client(1, reconnecting()).await.unwrap();
        let mut watch = client.watch(&glob("kv/*")).await.unwrap();
        assert_eq!(found(&mut watch).await, ["kv/1"]);
        sim.cut(1);
        sleep(OUTAGE_DURATION).await;
        let two = open(&server, "kv/2").await;
        sim.mend(1);
        eventually("the client is connected again", || client.reconnects() == 1).await;
        assert_eq!(found(&mut watch).await, ["kv/2"]);
        let three = open(&server, "kv/3").await;
        assert_eq!(found(&mut watch).await, ["kv/3"]);

        drop((one, two, three, server));
        let server = sim.server_again(server_config()).await;
        let _two = open(&server, "kv/2").await;
        let _four = open(&server, "kv/4").await;
        eventually("the client is connected again", || client.reconnects() == 2).await;
        assert_eq!(found(&mut watch).await, ["kv/4"]);
        drop(client);
        assert_eq!(watch.next().await, None);
    });
}

/// Goal: a topic that was withdrawn or has expired, and is published again, is named again.
/// Method: subscribe to each topic that a watch names, as a consumer of requests does.
#[test]
fn a_topic_published_again_is_named_again() {
    simulate(3, async |sim| {
        let server = sim.server(server_config());
        let client = sim.client(1, client_config()).await.unwrap();
        let mut watch = client.watch(&glob("kv/*")).await.unwrap();
        for _ in 0..3 {
            let publisher = open(&server, "kv/1").await;
            assert_eq!(found(&mut watch).await, ["kv/1"]);
            let mut subscription = client.subscribe(&topic("kv/1")).await.unwrap();
            tensors::check(&subscription.next().await.unwrap());
            publisher.withdraw();
            let error = subscription.next().await.unwrap_err();
            assert!(
                matches!(error, SubscriptionError::Ended { reason: EndReason::Withdrawn, .. }),
                "{error}"
            );
        }
        // The same for a topic that expires.
        let expire_after = Some(Duration::from_secs(5));
        let options = TopicOptions { expire_after, ..retaining(1) };
        let mut publisher = server.publisher_with(topic("kv/1"), None, options).unwrap();
        publish(&server, &mut publisher, 1, 100).await;
        assert_eq!(found(&mut watch).await, ["kv/1"]);
        let mut subscription = client.subscribe(&topic("kv/1")).await.unwrap();
        tensors::check(&subscription.next().await.unwrap());
        let error = subscription.next().await.unwrap_err();
        assert!(matches!(error, SubscriptionError::Ended { reason: EndReason::Expired, .. }), "{error}");
        let _publisher = open(&server, "kv/1").await;
        assert_eq!(found(&mut watch).await, ["kv/1"]);
    });
}

/// Goal: any number of topics is found, each once, also when they appear faster than a watch can be notified.
/// Method: ten thousand topics, half of them before the watch, half after it without a pause; a bad network, and a
/// connection that is lost meanwhile.
#[test]
fn a_watch_finds_ten_thousand_topics() {
    simulate(4, async |sim| {
        let server = sim.server(server_config());
        let name = |number: u64| format!("kv/{number}");
        let mut publishers = vec![];
        for number in 0..5_000 {
            publishers.push(open(&server, &name(number)).await);
        }
        sim.net.set_path(Path { loss: 0.02, ..Path::default() });
        let client = sim.client(1, reconnecting()).await.unwrap();
        let mut watch = client.watch(&glob("kv/*")).await.unwrap();
        let mut narrow = client.watch(&glob("kv/?7?7")).await.unwrap();
        let mut named = BTreeSet::new();
        for _ in 0..2_500 {
            assert!(named.insert(watch.next().await.unwrap()), "a name came twice");
        }
        for number in 5_000..10_000 {
            publishers.push(open(&server, &name(number)).await);
            if number == 7_500 {
                sim.cut(1);
                sleep(OUTAGE_DURATION).await;
                sim.mend(1);
            }
        }
        while named.len() < 10_000 {
            assert!(named.insert(watch.next().await.unwrap()), "a name came twice");
        }
        assert!(found(&mut watch).await.is_empty());
        assert_eq!(found(&mut narrow).await.len(), 90, "1707 to 9797");
        assert_eq!(client.reconnects(), 1);
    });
}

const LAYER_BYTES: u64 = 300_000;

/// Ten layers of two tensors each, and an embedding table under two names.
fn model() -> Vec<TensorSpec> {
    let mut specs = vec![];
    for layer in 0..10 {
        specs.push(tensors::noise(&format!("layers.{layer}.weight"), LAYER_BYTES));
        specs.push(tensors::noise(&format!("layers.{layer}.bias"), 100));
    }
    let table = specs.len();
    specs.push(tensors::noise("embed", LAYER_BYTES));
    specs.push(TensorSpec { alias_of: Some(table), ..tensors::noise("head", LAYER_BYTES) });
    specs
}

fn names(snapshot: &Snapshot) -> Vec<String> {
    tensors::on_host(snapshot)
        .tensors()
        .map(|(tensor, _)| tensor.name.to_string())
        .collect()
}

/// Goal: a subscriber receives exactly the selected tensors, and few other bytes are sent.
/// Method: one layer, a table by each of its names, and no tensor; raw and encoded; in both modes.
#[test]
fn only_selected_tensors_are_sent() {
    for (seed, codec) in [(5, CodecId::Raw), (6, CodecId::Zstd)] {
        simulate(seed, async |sim| {
            let server = sim.server(tensor_relay_server::Config { codec: codec.into(), ..server_config() });
            let mut publisher = server.publisher(topic("t")).unwrap();
            let mut version = 0;
            let client = sim.client(1, client_config()).await.unwrap();
            let chunk = u64::from(CHUNK_BYTES);
            for (globs, expected, max_bytes) in [
                (vec!["layers.3.*"], vec!["layers.3.weight", "layers.3.bias"], LAYER_BYTES + 2 * chunk),
                (vec!["embed"], vec!["embed"], LAYER_BYTES + 2 * chunk),
                (vec!["head"], vec!["head"], LAYER_BYTES + 2 * chunk),
                (
                    vec!["head", "layers.9.weight"],
                    vec!["layers.9.weight", "head"],
                    2 * LAYER_BYTES + 3 * chunk,
                ),
                (vec!["none"], vec![], 0),
            ] {
                for request in [Request::latest(topic("t")), Request::every(topic("t"))] {
                    version += 1;
                    let staged = tensors::stage(&server, model(), version);
                    publisher.publish(staged, tensors::metadata(version)).await.unwrap();
                    let request = request.select(globs.iter().map(|pattern| glob(pattern)));
                    let mut subscription = client.subscribe_to(request).await.unwrap();
                    let before = sim.server_sent();
                    let snapshot = subscription.next().await.unwrap();
                    tensors::check(&snapshot);
                    assert_eq!(snapshot.id().version.0, version);
                    assert_eq!(names(&snapshot), expected);
                    assert!(snapshot.tensor("layers.5.weight").is_none());
                    assert_eq!(snapshot.manifest().tensors().len(), 22, "the manifest has all tensors");
                    assert!(
                        snapshot.receipt().wire_bytes <= max_bytes,
                        "{globs:?}: {:?}",
                        snapshot.receipt()
                    );
                    assert!(snapshot.payload_bytes() <= max_bytes);
                    let sent = sim.server_sent() - before;
                    assert!(sent < max_bytes * 11 / 10 + 20_000, "{globs:?}: {sent} for {max_bytes}");
                    drop(subscription);
                    // Until the server knows that the subscription was dropped, it would send the next version to it.
                    sleep(Duration::from_millis(10)).await;
                }
            }
        });
    }
}

/// Goal: the transfer of a selection is resumed after a lost connection, and the selection applies to changed
/// manifests.
/// Method: cut the path during transfers of a selection; change the manifest, so that the selection
/// matches other tensors.
#[test]
fn a_selection_is_resumed_after_lost_connections() {
    simulate(7, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = server
            .publisher_with(topic("t"), Some(Epoch(1)), TopicOptions::default())
            .unwrap();
        let client = sim.client(1, reconnecting()).await.unwrap();
        let request = Request::latest(topic("t")).select([glob("layers.[0]*"), glob("layers.?.weight")]);
        let mut subscription = client.subscribe_to(request).await.unwrap();
        client.list().await.unwrap();
        for (version, specs) in [(1, model()), (2, model()), (3, model().split_off(7)), (4, model())] {
            // Without the first tensors, the alias would refer to another tensor.
            let specs = match version {
                3 => specs.into_iter().filter(|spec| spec.alias_of.is_none()).collect(),
                _ => specs,
            };
            let weights = specs.iter().filter(|spec| spec.name.as_str().ends_with(".weight")).count();
            let expected = weights as u64 * LAYER_BYTES;
            let staged = tensors::stage(&server, specs, version);
            publisher.publish(staged, tensors::metadata(version)).await.unwrap();
            let half = || {
                let progress = subscription.progress();
                progress.version == version && progress.verified_bytes > expected / 2
            };
            eventually("half of the selection is verified", half).await;
            sim.cut(1);
            sleep(OUTAGE_DURATION).await;
            sim.mend(1);
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            assert!(names(&snapshot).iter().all(|name| name.ends_with(".weight")));
            assert_eq!(names(&snapshot).len(), weights);
            let receipt = snapshot.receipt();
            assert_eq!(receipt.resumed, 1);
            let most = expected + (weights as u64 + 5) * u64::from(CHUNK_BYTES);
            assert!(
                receipt.wire_bytes >= expected && receipt.wire_bytes <= most,
                "{receipt:?} of {expected}"
            );
        }
    });
}
