//! The contents of received snapshots: equal to the published ones, with every encoding.

use std::time::Duration;
use tensor_relay_client::{Dtype, Epoch, Shape, Snapshot};
use tensor_relay_protocol::{CodecId, Shard, TensorSpec};
use tensor_relay_server::{Server, Staged};
use tensor_relay_tests::{
    pair::{Sim, client_config, eventually, server_config, simulate, topic},
    tensors::{self, noise, smooth, spec},
};

/// Goal: a version is encoded once for all subscribers, arrives unchanged, and needs fewer bytes on the wire.
/// Method: three subscribers of a version that compresses well, except for one tensor.
#[test]
fn one_encoding_serves_all_subscribers() {
    simulate(1, async |sim| {
        let server =
            sim.server(tensor_relay_server::Config { codec: CodecId::Zstd.into(), ..server_config() });
        let staged = tensors::stage(&server, vec![smooth("a", 2_000_001), noise("b", 100_003)], 1);
        let (chunks, payload) = (staged.manifest().chunking().count(), staged.manifest().payload_bytes());
        server
            .publisher(topic("t"))
            .unwrap()
            .publish(staged, tensors::metadata(1))
            .await
            .unwrap();

        let receive = async |number| {
            let client = sim.client(number, client_config()).await.unwrap();
            client.subscribe(&topic("t")).await.unwrap().next().await.unwrap()
        };
        for snapshot in <[Snapshot; 3]>::from(tokio::join!(receive(1), receive(2), receive(3))) {
            tensors::check(&snapshot);
            let wire_bytes = snapshot.receipt().wire_bytes;
            assert!(wire_bytes > 100_003 && wire_bytes < payload / 4, "{wire_bytes} of {payload}");
        }
        let encoder = server.stats().encoder;
        assert_eq!((encoder.requested, encoder.encoded), (3 * u64::from(chunks), chunks.into()));
        assert_eq!(encoder.incompressible, 2, "the two chunks of noise were sent raw");
        let sent = sim.net.sent_by(&sim.server_host()).bytes;
        assert!(sent < payload, "{sent} bytes were sent to three subscribers, and the payload has {payload}");
    });
}

/// Goal: a server that encodes sends raw chunks to a client without codecs.
/// Method: offer only the raw codec in `Hello`.
#[test]
fn a_client_without_codecs_gets_raw_chunks() {
    simulate(2, async |sim| {
        let server =
            sim.server(tensor_relay_server::Config { codec: CodecId::Zstd.into(), ..server_config() });
        let staged = tensors::stage(&server, vec![smooth("a", 1_000_000)], 1);
        server
            .publisher(topic("t"))
            .unwrap()
            .publish(staged, tensors::metadata(1))
            .await
            .unwrap();
        let config = tensor_relay_client::Config {
            codecs: tensor_relay_protocol::CodecSet::only_raw(),
            ..client_config()
        };
        let client = sim.client(1, config).await.unwrap();
        let snapshot = client.subscribe(&topic("t")).await.unwrap().next().await.unwrap();
        tensors::check(&snapshot);
        assert_eq!(server.stats().encoder.requested, 0);
        assert!(snapshot.receipt().wire_bytes >= 1_000_000);
    });
}

/// Goal: a version without tensors, or with an empty tensor, is delivered like any other.
/// Method: publish no tensor, then one, then none again, then an empty one.
#[test]
fn empty_versions_are_delivered() {
    simulate(3, async |sim| {
        let versions = [vec![], vec![noise("a", 3)], vec![], vec![noise("none", 0)]];
        for (snapshot, specs) in publish_and_receive(&sim, &versions).await.iter().zip(&versions) {
            tensors::check(snapshot);
            let snapshot = tensors::on_host(snapshot);
            assert_eq!(snapshot.tensors().count(), specs.len());
            assert_eq!(snapshot.receipt().chunks, u32::from(snapshot.tensor("a").is_some()));
        }
    });
}

/// Goal: tensors arrive as they were described: names, dtypes, shapes, shards, order and aliases; also empty tensors.
/// Method: a tensor of each kind; tied weights must share their memory, and be sent once.
#[test]
fn tensors_arrive_as_described() {
    simulate(4, async |sim| {
        let shape = |dimensions: &[u64]| Shape::new(dimensions).unwrap();
        let mut specs = vec![
            spec("ünïcode / name", Dtype::Bf16, 1_001),
            noise("tied", 100_000),
            spec("empty", Dtype::F64, 0),
            spec("half bytes", Dtype::F4E2M1, 33),
            noise("alias", 100_000),
            noise("shard", 64),
            noise("scalar", 1),
            noise("empty too", 0),
        ];
        specs[4].alias_of = Some(1);
        specs[4].shape = shape(&[1_000, 100]);
        specs[5].shape = shape(&[8, 8]);
        specs[5].shard = Some(Shard::new(&shape(&[8, 8]), shape(&[16, 8]), &[8, 0]).unwrap());
        specs[6].shape = shape(&[]);
        specs[7].shape = shape(&[5, 0, 3]);
        let snapshots = publish_and_receive(&sim, std::slice::from_ref(&specs)).await;
        let snapshot = &tensors::on_host(&snapshots[0]);
        tensors::check(snapshot);
        let expected = specs.iter().map(|s| (&s.name, s.dtype, &s.shape, &s.shard));
        let found = snapshot
            .manifest()
            .tensors()
            .iter()
            .map(|t| (&t.name, t.dtype, &t.shape, &t.shard));
        assert!(found.eq(expected), "{:?}", snapshot.manifest().tensors());
        let address = |name| snapshot.tensor(name).unwrap().as_ptr();
        assert_eq!(address("tied"), address("alias"));
        assert!(snapshot.receipt().wire_bytes < 110_000, "tied weights were sent once");
        assert_eq!(snapshot.tensor("missing"), None);
    });
}

/// Goal: the metadata of a version and of its manifest arrive unchanged.
/// Method: metadata of a version at the size limit, and of its manifest with text outside ASCII.
#[test]
fn metadata_arrives_unchanged() {
    simulate(5, async |sim| {
        let server = sim.server(server_config());
        let manifest_metadata =
            vec![("format".to_owned(), "pt".to_owned()), ("ключ".into(), "值".repeat(30_000))];
        let version_metadata = vec![("step".to_owned(), "x".repeat((32 << 10) - 4 - 16))];
        let fill = |_, _: &mut [u8]| Ok::<(), std::convert::Infallible>(());
        let staged = Staged::new(&server.staging(), vec![], manifest_metadata.clone(), fill).unwrap();
        let mut publisher = server
            .publisher_with(topic("t"), Some(Epoch(7)), tensor_relay_server::TopicOptions::default())
            .unwrap();
        let publication = publisher.publish(staged, version_metadata.clone()).await.unwrap();
        let client = sim.client(1, client_config()).await.unwrap();
        let snapshot = client.subscribe(&topic("t")).await.unwrap().next().await.unwrap();
        assert_eq!(snapshot.metadata(), version_metadata);
        assert_eq!(snapshot.manifest().metadata(), manifest_metadata);
        assert_eq!(snapshot.id(), publication.id());
    });
}

/// Goal: an unchanged manifest is sent once.
/// Method: many empty tensors, so that nearly all sent bytes are the manifest's.
#[test]
fn a_known_manifest_is_not_sent_again() {
    simulate(6, async |sim| {
        let name = |number| format!("{number}.{}", "n".repeat(200));
        let specs: Vec<TensorSpec> = (0..1_000).map(|number| noise(&name(number), 0)).collect();
        publish_and_receive(&sim, &[specs.clone(), specs.clone()]).await;
        let with_two = sim.net.sent_by(&sim.server_host()).bytes;
        publish_and_receive(&sim, &[specs]).await;
        let with_one = sim.net.sent_by(&sim.server_host()).bytes - with_two;
        assert!(
            with_one > 200_000 && with_two < with_one + 10_000,
            "{with_one} bytes for one version, {with_two} for two"
        );
    });
}

/// Publishes each list of tensors once the previous one was committed, and returns the snapshots of one subscriber.
async fn publish_and_receive(sim: &Sim, versions: &[Vec<TensorSpec>]) -> Vec<Snapshot> {
    let server: Server = sim.server(server_config());
    let mut publisher = server.publisher(topic("t")).unwrap();
    let client = sim.client(1, client_config()).await.unwrap();
    let mut subscription = client.subscribe(&topic("t")).await.unwrap();
    let mut snapshots = Vec::new();
    for (version, specs) in (1..).zip(versions) {
        let staged = tensors::stage(&server, specs.clone(), version);
        publisher.publish(staged, tensors::metadata(version)).await.unwrap();
        snapshots.push(subscription.next().await.unwrap());
        eventually("the version is committed", || server.stats().committed == version).await;
    }
    client.close().await;
    drop(server);
    // The port is free again once the server's endpoint is closed.
    tokio::time::sleep(Duration::from_secs(1)).await;
    snapshots
}
