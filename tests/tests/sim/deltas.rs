//! Versions sent as deltas against the previous one: they arrive unchanged, in few bytes, also after losses.

use crate::slow_path;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Duration;
use tensor_relay_client::{
    Client, ClientError, Config, Connector, EndReason, Lanes, Receipt, Request, Subscription,
    SubscriptionError, Ticket,
};
use tensor_relay_protocol::{CodecId, Epoch, TensorSpec};
use tensor_relay_server::{BaseStats, CodecChoice, Publication, Publisher, Server, TopicOptions};
use tensor_relay_tests::{
    pair::{
        CHUNK_BYTES, Sim, client_config, eventually, reconnecting, retaining, seeds, server_config, simulate,
        topic,
    },
    simnet::Path,
    tensors,
};
use tokio::{task::JoinSet, time::sleep};

const EPOCH: Epoch = Epoch(5);

/// Sixteen chunks.
pub(crate) const BYTES: u64 = 1 << 20;

const CHUNKS: u64 = BYTES / CHUNK_BYTES as u64;

pub(crate) fn open(server: &Server, options: TopicOptions) -> Publisher {
    server.publisher_with(topic("t"), Some(EPOCH), options).unwrap()
}

pub(crate) async fn publish(server: &Server, publisher: &mut Publisher, version: u64) -> Publication {
    publish_of(server, publisher, version, vec![tensors::steady("weights", BYTES)]).await
}

pub(crate) async fn publish_of(
    server: &Server,
    publisher: &mut Publisher,
    version: u64,
    specs: Vec<TensorSpec>,
) -> Publication {
    let staged = tensors::stage(server, specs, version);
    let publication = publisher.publish(staged, tensors::metadata(version)).await.unwrap();
    assert_eq!(publication.id().version.0, version);
    publication
}

pub(crate) async fn follow(sim: &Sim, number: u8, config: Config) -> (Client, Subscription) {
    let client = sim.client(number, config).await.unwrap();
    let subscription = client.subscribe(&topic("t")).await.unwrap();
    client.list().await.unwrap();
    (client, subscription)
}

/// Receives the next version, and checks every byte.
pub(crate) async fn next(subscription: &mut Subscription, version: u64) -> Receipt {
    let snapshot = subscription.next().await.unwrap();
    tensors::check(&snapshot);
    assert_eq!(snapshot.id().version.0, version);
    snapshot.receipt()
}

/// Publishes versions 1 and 2, which are sent without deltas. The subscriber keeps a copy of the second as its base.
pub(crate) async fn establish_base(
    server: &Server,
    publisher: &mut Publisher,
    subscription: &mut Subscription,
) {
    for version in 1..=2 {
        publish(server, publisher, version).await;
        assert_no_deltas(next(subscription, version).await);
    }
}

pub(crate) fn assert_no_deltas(receipt: Receipt) {
    assert_eq!((receipt.codecs.deltas().chunks, receipt.wire_bytes), (0, BYTES), "{receipt:?}");
}

pub(crate) fn assert_deltas(receipt: Receipt) {
    let deltas = receipt.codecs.deltas();
    assert_eq!((deltas.chunks, deltas.raw_bytes), (CHUNKS, BYTES), "{receipt:?}");
    assert_eq!(receipt.wire_bytes, deltas.wire_bytes);
    assert!(receipt.wire_bytes < BYTES / 20, "{receipt:?}");
}

/// Goal: a subscriber receives deltas from its third version on, also a late subscriber; the first version costs no
/// memory for a copy. Subscribers with the same base share one comparison.
/// Method: in both modes, two subscribers, and a third one later; count bytes and chunks at both ends.
#[test]
fn followers_get_deltas() {
    for request in [Request::latest, Request::every] {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server, retaining(2));
            let mut followers = Vec::new();
            for number in 1..=2 {
                let client = sim.client(number, client_config()).await.unwrap();
                let subscription = client.subscribe_to(request(topic("t"))).await.unwrap();
                followers.push((client, subscription));
            }
            for version in 1..=6 {
                publish(&server, &mut publisher, version).await;
                for (client, subscription) in &mut followers {
                    let receipt = next(subscription, version).await;
                    if version <= 2 {
                        assert_no_deltas(receipt)
                    } else {
                        assert_deltas(receipt)
                    }
                    assert_eq!(client.base_bytes(), if version == 1 { 0 } else { BYTES });
                }
            }
            let stats = server.stats().encoder;
            assert_eq!((stats.deltas, stats.compared), (4 * CHUNKS, 4 * CHUNKS), "{stats:?}");
            // The server passes over a version once, to hash it or to hash and compare it, and over its base; a client
            // once to place it, and over its second version to copy it.
            let passed = server.stats().stages.passed_bytes();
            assert!(passed <= (2 + 4 * 2) * BYTES, "{passed}");
            for (client, _) in &followers {
                assert_eq!(client.stages().passed_bytes(), (1 + 4) * BYTES);
            }
            let sent = server.stats().codecs.deltas();
            assert_eq!(
                (sent.chunks, sent.raw_bytes),
                (2 * 4 * CHUNKS, 2 * 4 * BYTES),
                "all deltas were sent to both subscribers"
            );
            let (_client, mut late) = follow(&sim, 3, client_config()).await;
            assert_no_deltas(next(&mut late, 6).await);
            publish(&server, &mut publisher, 7).await;
            assert_no_deltas(next(&mut late, 7).await);
            publish(&server, &mut publisher, 8).await;
            assert_deltas(next(&mut late, 8).await);
        });
    }
}

/// Goal: bases are optional: a client with no or too little memory for them, and a server that retains none, work
/// without deltas.
/// Method: four versions with each of these settings.
#[test]
fn without_bases_versions_are_sent_whole() {
    let too_little = Config { base_bytes: BYTES / 2, ..client_config() };
    let none = Config { base_bytes: 0, ..client_config() };
    let no_bases = TopicOptions { bases: 0, ..TopicOptions::default() };
    for (config, options) in
        [(too_little, TopicOptions::default()), (none, TopicOptions::default()), (client_config(), no_bases)]
    {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server, options.clone());
            let (client, mut subscription) = follow(&sim, 1, config.clone()).await;
            for version in 1..=4 {
                publish(&server, &mut publisher, version).await;
                assert_no_deltas(next(&mut subscription, version).await);
                assert_eq!(client.base_bytes(), 0, "no useless copy is kept");
            }
            assert_eq!(server.stats().encoder.compared, 0);
            assert_eq!(server.stats().bases, BaseStats::default());
        });
    }
}

/// Goal: a version that has left retention is kept as a base while a subscriber holds it, within the bounds, and no
/// longer. A subscriber whose base was dropped gets no deltas.
/// Method: cut a subscriber off, and publish more versions, with memory for one base, and for none.
#[test]
fn bases_are_retained_while_subscribers_hold_them() {
    for (base_bytes, is_kept) in [(BYTES, true), (BYTES - 1, false)] {
        simulate(2, async |sim| {
            let server = sim.server(tensor_relay_server::Config { base_bytes, ..server_config() });
            let mut publisher = open(&server, TopicOptions { bases: 1, ..retaining(2) });
            let (_client, mut subscription) = follow(&sim, 1, reconnecting()).await;
            establish_base(&server, &mut publisher, &mut subscription).await;
            eventually("the server has the commit", || server.stats().committed == 2).await;
            sim.cut(1);
            for version in 3..=5 {
                publish(&server, &mut publisher, version).await;
            }
            let kept = if is_kept { BaseStats { versions: 1, bytes: BYTES } } else { BaseStats::default() };
            assert_eq!(server.stats().bases, kept);
            sleep(Duration::from_secs(15)).await;
            sim.mend(1);
            // Version 3 was announced before the path was cut, and has left retention, too.
            let receipt = next(&mut subscription, 5).await;
            if is_kept {
                assert_deltas(receipt);
            } else {
                assert_no_deltas(receipt);
            }
            eventually("no base is kept", || server.stats().bases.versions == 0).await;
            eventually("memory is released", || server.stats().staged_bytes == 2 * BYTES).await;
        });
    }
}

/// Goal: a base is dropped when no subscriber needs it: not while a lost subscriber may reconnect, but soon after.
/// Method: drop the only subscriber, or cut it off; withdraw the topic.
#[test]
fn unneeded_bases_are_dropped() {
    simulate(3, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, TopicOptions::default());
        slow_path(&sim);
        let (client, mut subscription) = follow(&sim, 1, client_config()).await;
        establish_base(&server, &mut publisher, &mut subscription).await;
        publish(&server, &mut publisher, 3).await;
        eventually("version 3 is under way", || subscription.progress().version == 3).await;
        assert_eq!(server.stats().bases.versions, 1, "version 2 is kept as a base");
        drop(subscription);
        eventually("the server has dropped the base", || server.stats().bases.versions == 0).await;
        eventually("the client has dropped its copy", || client.base_bytes() == 0).await;

        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        next(&mut subscription, 3).await;
        publish(&server, &mut publisher, 4).await;
        next(&mut subscription, 4).await;
        client.list().await.unwrap();
        sim.cut(1);
        publish(&server, &mut publisher, 5).await;
        eventually("version 4 has left retention", || server.stats().bases.versions == 1).await;
        eventually("the subscriber is lost", || server.stats().sessions == 0).await;
        assert_eq!(server.stats().bases.versions, 1, "the subscriber may reconnect");
        sleep(Duration::from_secs(31)).await;
        assert_eq!(server.stats().bases.versions, 0, "the base is dropped without a further publish");
        publish(&server, &mut publisher, 6).await;
        assert_eq!(server.stats().bases.versions, 0);

        let (another, mut subscription) = follow(&sim, 2, client_config()).await;
        next(&mut subscription, 6).await;
        publish(&server, &mut publisher, 7).await;
        next(&mut subscription, 7).await;
        another.list().await.unwrap();
        sim.cut(2);
        publish(&server, &mut publisher, 8).await;
        eventually("version 7 has left retention", || server.stats().bases.versions == 1).await;
        eventually("that subscriber is lost, too", || server.stats().sessions == 0).await;
        sleep(Duration::from_secs(31)).await;
        assert_eq!(
            server.stats().bases.versions,
            0,
            "the base of a subscriber that is lost later is kept no longer"
        );

        let (_client, mut subscription) = follow(&sim, 3, client_config()).await;
        next(&mut subscription, 8).await;
        publish(&server, &mut publisher, 9).await;
        next(&mut subscription, 9).await;
        publish(&server, &mut publisher, 10).await;
        eventually("version 10 is under way", || subscription.progress().version == 10).await;
        assert_eq!(server.stats().bases.versions, 1);
        publisher.withdraw();
        assert_eq!(server.stats().bases.versions, 0);
    });
}

/// Goal: bases never prevent a publish: they are dropped when the bound of staged memory is reached.
/// Method: memory for three versions: one is the base of a lost subscriber, two are retained; publish one more.
#[test]
fn bases_are_dropped_when_staged_memory_is_full() {
    simulate(8, async |sim| {
        let config = tensor_relay_server::Config { staged_bytes: 3 * BYTES, ..server_config() };
        let server = sim.server(config);
        let mut publisher = open(&server, retaining(2));
        let (_client, mut subscription) = follow(&sim, 1, client_config()).await;
        establish_base(&server, &mut publisher, &mut subscription).await;
        eventually("the server has the commit", || server.stats().committed == 2).await;
        sim.cut(1);
        for version in 3..=6 {
            publish(&server, &mut publisher, version).await;
            assert_eq!(server.stats().bases.versions, u64::from(version == 4), "after version {version}");
            if version == 4 {
                sleep(Duration::from_secs(15)).await; // Until the transfer of version 3 has ended.
            }
        }
    });
}

/// Goal: a version that is withdrawn or preempted ends the base: the next version is sent without deltas, and the
/// version after it with deltas.
/// Method: withdraw a version during its transfer, and preempt one; both while deltas are being sent.
#[test]
fn a_withdrawn_or_preempted_version_ends_the_base() {
    for preempt in [false, true] {
        simulate(4, async |sim| {
            let server = sim.server(server_config());
            let options = TopicOptions { release_timeout: Some(Duration::ZERO), ..TopicOptions::default() };
            let mut publisher = open(&server, options);
            slow_path(&sim);
            let client = sim.client(1, client_config()).await.unwrap();
            let request = Request::latest(topic("t")).preempt(preempt);
            let mut subscription = client.subscribe_to(request).await.unwrap();
            establish_base(&server, &mut publisher, &mut subscription).await;
            let third = publish(&server, &mut publisher, 3).await;
            let is_under_way = || {
                let progress = subscription.progress();
                progress.version == 3 && progress.verified_bytes > 0
            };
            eventually("deltas are under way", is_under_way).await;
            if !preempt {
                third.withdraw();
            }
            publish(&server, &mut publisher, 4).await;
            assert_no_deltas(next(&mut subscription, 4).await);
            publish(&server, &mut publisher, 5).await;
            assert_deltas(next(&mut subscription, 5).await);
        });
    }
}

/// Goal: a version that is resumed over another connection continues as deltas, and so does the next one.
/// Method: cut the path during a transfer of deltas, at random moments, for longer than the idle timeout.
#[test]
fn a_resumed_version_keeps_its_base() {
    let mut resumed = 0;
    for seed in seeds(10) {
        resumed += simulate(seed, async |sim| {
            let mut rng = ChaCha8Rng::seed_from_u64(sim.seed);
            let server = sim.server(server_config());
            let mut publisher = open(&server, TopicOptions::default());
            slow_path(&sim);
            let (_client, mut subscription) = follow(&sim, 1, reconnecting()).await;
            establish_base(&server, &mut publisher, &mut subscription).await;
            publish(&server, &mut publisher, 3).await;
            let part = rng.random_range(1..CHUNKS - 2);
            let is_verified = || {
                let progress = subscription.progress();
                progress.version == 3 && progress.verified_bytes >= part * CHUNK_BYTES as u64
            };
            eventually("a part is verified", is_verified).await;
            sim.cut(1);
            sleep(Duration::from_secs(15)).await;
            sim.mend(1);
            let receipt = next(&mut subscription, 3).await;
            assert_deltas(receipt);
            publish(&server, &mut publisher, 4).await;
            assert_deltas(next(&mut subscription, 4).await);
            u64::from(receipt.resumed)
        });
    }
    assert!(resumed > 0);
}

/// Goal: after a restart of the server, the next version is sent as deltas if the server has the client's base, and
/// otherwise whole; it arrives unchanged.
/// Method: continue the same epoch, with the version that the client holds, and without it.
#[test]
fn deltas_continue_after_a_restart_if_the_server_has_the_base() {
    for has_base in [true, false] {
        simulate(6, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server, retaining(2));
            let (_client, mut subscription) = follow(&sim, 1, reconnecting()).await;
            establish_base(&server, &mut publisher, &mut subscription).await;
            drop((server, publisher));
            let server = sim.server_again(server_config()).await;
            let mut publisher = open(&server, retaining(2));
            publisher.continue_at(tensor_relay_client::Version(if has_base { 2 } else { 3 }));
            if has_base {
                publish(&server, &mut publisher, 2).await;
            }
            publish(&server, &mut publisher, 3).await;
            let receipt = next(&mut subscription, 3).await;
            if has_base { assert_deltas(receipt) } else { assert_no_deltas(receipt) }
        });
    }
}

/// Goal: a version with another manifest, or of another epoch, is not coded against the previous one.
/// Method: change the size of a tensor and back, then the epoch.
#[test]
fn a_version_with_a_changed_manifest_is_sent_whole() {
    simulate(7, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, retaining(3));
        let (client, mut subscription) = follow(&sim, 1, client_config()).await;
        for (version, bytes) in [(1, BYTES), (2, BYTES), (3, BYTES), (4, BYTES / 2), (5, BYTES)] {
            let specs = vec![tensors::steady("weights", bytes)];
            publish_of(&server, &mut publisher, version, specs).await;
            let deltas = next(&mut subscription, version).await.codecs.deltas();
            assert_eq!(deltas.chunks > 0, version == 3, "version {version}: {deltas:?}");
        }
        assert_eq!(client.base_bytes(), 0, "a useless copy is dropped");
        publish(&server, &mut publisher, 6).await;
        next(&mut subscription, 6).await;
        drop(publisher);
        let mut publisher = server
            .publisher_with(topic("t"), Some(Epoch(6)), TopicOptions::default())
            .unwrap();
        publisher.continue_at(tensor_relay_client::Version(7));
        publish(&server, &mut publisher, 7).await;
        assert_no_deltas(next(&mut subscription, 7).await);
    });
}

/// Goal: under random faults, every byte is received as published, and deltas are used.
/// Method: random publishers and followers, in both modes, with one or two lanes and more or less memory, on bad
/// networks, with partitions, restarts of clients and servers, withdrawn versions and changed manifests.
#[test]
fn random_versions_arrive_unchanged() {
    let mut deltas = 0;
    for seed in seeds(40) {
        deltas += simulate(seed, publish_and_follow);
    }
    assert!(deltas > 500, "{deltas}");
}

/// Runs a random scenario, and returns the number of chunks received as deltas.
async fn publish_and_follow(sim: Sim) -> u64 {
    let mut rng = ChaCha8Rng::seed_from_u64(!sim.seed);
    let config = tensor_relay_server::Config {
        chunk_bytes: [16 << 10, 64 << 10][rng.random_range(0..2)],
        codec: [CodecChoice::Auto, CodecChoice::Fixed(CodecId::Sparse)][rng.random_range(0..2)],
        base_bytes: [u64::MAX, 600 << 10][rng.random_range(0..2)],
        ..server_config()
    };
    let options = TopicOptions { bases: rng.random_range(0..4), ..retaining(rng.random_range(1..4)) };
    let mut server = sim.server(config.clone());
    let mut publisher = open(&server, options.clone());
    let fastest = Duration::from_millis(rng.random_range(1..20));
    let path = Path {
        delay: fastest..=fastest + Duration::from_millis(rng.random_range(0..5)),
        loss: [0.0, 0.01, 0.02][rng.random_range(0..3)],
        ..Path::default()
    };
    sim.net.set_path(path);
    let versions = 50;
    let mut followers = JoinSet::new();
    for number in 1..=3 {
        let follower = Follower {
            config: Config {
                base_bytes: [u64::MAX, u64::MAX, 300 << 10, 0][rng.random_range(0..4)],
                lanes: Lanes::Fixed(rng.random_range(1..3)),
                credit_chunks: rng.random_range(1..6),
                ..reconnecting()
            },
            every: rng.random_bool(0.5),
            restart_probability: [0.0, 0.1][rng.random_range(0..2)],
            connector: sim.connector(number),
            ticket: sim.ticket(),
            last_version: versions,
            rng: ChaCha8Rng::from_rng(&mut rng),
        };
        let joins_after = Duration::from_millis(rng.random_range(0..5_000));
        followers.spawn(async move {
            sleep(joins_after).await;
            follower.run().await
        });
    }
    let mut weight_bytes = 300 << 10;
    for version in 1..=versions {
        if rng.random_bool(0.05) {
            weight_bytes = rng.random_range(100 << 10..400 << 10);
        }
        let specs = vec![tensors::steady("weights", weight_bytes), tensors::smooth("bias", 5_000)];
        let publication = publish_of(&server, &mut publisher, version, specs).await;
        match rng.random_range(0..30) {
            0 if version < versions => publication.withdraw(),
            1 => {
                let number = rng.random_range(1..4);
                sim.cut(number);
                sleep(Duration::from_millis(rng.random_range(0..20_000))).await;
                sim.mend(number);
            }
            2 if version < versions => {
                drop((server, publisher));
                server = sim.server_again(config.clone()).await;
                publisher = open(&server, options.clone());
                publisher.continue_at(tensor_relay_client::Version(version + 1));
            }
            _ => {}
        }
        let BaseStats { versions, bytes } = server.stats().bases;
        assert!(versions <= options.bases.into() && bytes <= config.base_bytes);
        sleep(Duration::from_millis(rng.random_range(0..400))).await;
    }
    let mut deltas = 0;
    while let Some(received) = followers.join_next().await {
        deltas += received.unwrap();
    }
    deltas
}

/// A subscriber that checks every byte of its snapshots, and sometimes closes its connection and connects again.
struct Follower {
    config: Config,
    every: bool,
    restart_probability: f64,
    connector: Connector,
    ticket: Ticket,
    last_version: u64,
    rng: ChaCha8Rng,
}

impl Follower {
    /// Receives versions until the last one, and returns the number of chunks received as deltas.
    async fn run(mut self) -> u64 {
        let mut deltas = 0;
        loop {
            let client = self.connect().await;
            let request = if self.every { Request::every(topic("t")) } else { Request::latest(topic("t")) };
            let mut subscription = client.subscribe_to(request).await.unwrap();
            loop {
                let snapshot = match subscription.next().await {
                    Ok(snapshot) => snapshot,
                    Err(SubscriptionError::Gap(_)) => continue,
                    Err(SubscriptionError::Ended { reason: EndReason::TooSlow, .. }) => break,
                    Err(error) => panic!("{error}"),
                };
                tensors::check(&snapshot);
                let received = snapshot.receipt().codecs.deltas();
                assert!(received.chunks == 0 || self.config.base_bytes > 0);
                deltas += received.chunks;
                if snapshot.id().version.0 == self.last_version {
                    return deltas;
                }
                sleep(Duration::from_millis(self.rng.random_range(0..300))).await;
                if self.rng.random_bool(self.restart_probability) {
                    break;
                }
            }
            drop(subscription);
            client.close().await;
        }
    }

    async fn connect(&self) -> Client {
        let mut last = None;
        for _ in 0..200 {
            match Client::connect_with(&self.connector, &self.ticket, self.config.clone()).await {
                Ok(client) => return client,
                // The server is down, or the path to it is bad.
                Err(
                    error @ (ClientError::Connect(_)
                    | ClientError::Lane(_)
                    | ClientError::Refused(_)
                    | ClientError::NoWelcome { .. }),
                ) => last = Some(error),
                Err(error) => panic!("{error}"),
            }
            sleep(Duration::from_millis(100)).await;
        }
        panic!("two hundred attempts failed: {last:?}");
    }
}
