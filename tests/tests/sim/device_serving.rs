//! Versions that are published from a device: each is read once for all subscribers, lent memory is released when
//! promised, and a device that fails costs only its versions.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{
    ops::{Deref, DerefMut},
    time::Duration,
};
use tensor_relay_client::{Client, Snapshot, Subscription};
use tensor_relay_device::Device;
use tensor_relay_protocol::{CodecChoice, CodecId, Dtype, TensorSpec};
use tensor_relay_server::{
    Borrowed, Config, Publication, Publishable, Publisher, Server, Stage, Staged, TopicOptions,
};
use tensor_relay_tests::{
    engine::{Behaviour, TestEngine},
    pair::{
        CHUNK_BYTES, Sim, client_config, eventually, publish, retaining, seeds, server_config, simulate,
        topic, transport,
    },
    simnet::Path,
    tensors::{self, noise, smooth, spec},
};
use tensor_relay_transport::Transport;
use tokio::time::sleep;

const CHUNK: usize = CHUNK_BYTES as usize;

/// A tensor of `count` chunks.
fn chunks(count: u64) -> Vec<TensorSpec> {
    vec![noise("noise", count * u64::from(CHUNK_BYTES))]
}

/// The tensors of `version` on `device`, lent to the server.
async fn lent(server: &Server, device: &Device, specs: Vec<TensorSpec>, version: u64) -> Borrowed {
    let tensors = tensors::on_device(device, specs, version).await;
    Borrowed::from_device(&server.staging(), tensors, vec![]).unwrap()
}

async fn publish_version(
    publisher: &mut Publisher,
    content: impl Into<Publishable>,
    version: u64,
) -> Publication {
    publisher.publish(content, tensors::metadata(version)).await.unwrap()
}

/// A subscription with its client, which must live as long.
struct Reader {
    subscription: Subscription,
    _client: Client,
}

impl Deref for Reader {
    type Target = Subscription;

    fn deref(&self) -> &Subscription {
        &self.subscription
    }
}

impl DerefMut for Reader {
    fn deref_mut(&mut self) -> &mut Subscription {
        &mut self.subscription
    }
}

async fn subscribe(sim: &Sim, number: u8) -> Reader {
    let client = sim.client(number, client_config()).await.unwrap();
    let subscription = client.subscribe(&topic("t")).await.unwrap();
    Reader { subscription, _client: client }
}

async fn next(subscription: &mut Subscription) -> Snapshot {
    let snapshot = subscription.next().await.unwrap();
    tensors::check(&snapshot);
    snapshot
}

/// Goal: a version is read once from its device for all subscribers: raw and encoded, lent and owned by the relay.
/// Method: four subscribers at about the same time; count the copies.
#[test]
fn a_device_is_read_once_for_all() {
    for (codec, owned) in [(CodecId::Raw, false), (CodecId::Raw, true), (CodecId::Zstd, false)] {
        simulate(1, async |sim| {
            let engine = TestEngine::new(64 << 20);
            let device = engine.device(16, CHUNK);
            let server = sim.server(Config { codec: codec.into(), ..server_config() });
            let specs = vec![noise("a", 30 * CHUNK as u64), smooth("b", 10 * CHUNK as u64)];
            let publishable: Publishable = match owned {
                true => tensors::stage(&server, specs, 1).onto(&device).await.unwrap(),
                false => lent(&server, &device, specs, 1).await.into(),
            };
            let staged_bytes = server.stats().staged_bytes;
            assert_eq!(staged_bytes, 0, "the version has no host memory");
            let mut publisher = server.publisher(topic("t")).unwrap();
            publish_version(&mut publisher, publishable, 1).await;
            let receive = async |number| next(&mut *subscribe(&sim, number).await).await;
            tokio::join!(receive(1), receive(2), receive(3), receive(4));
            let encoder = server.stats().encoder;
            assert_eq!((encoder.source_reads, encoder.source_rereads), (40, 0), "{codec:?}");
            assert_eq!(engine.copies_out(), 40);
            assert!(encoder.source_requests >= 40);
            assert!(encoder.source_cached_bytes <= 8 * CHUNK as u64);
            publisher.withdraw();
            eventually("all slots are back", || device.slots().available() == 16).await;
            assert_eq!(server.stats().encoder.source_cached_bytes, 0);
        });
    }
}

/// Goal: a late subscriber is served, too. The chunks that are read again for it are counted; with a large enough cache
/// there are none.
/// Method: a second subscriber after the first has finished, with the default cache, a large cache and none.
#[test]
fn reads_for_a_late_subscriber_are_counted() {
    for (device_cache_bytes, rereads) in [(None, 40), (Some(u64::MAX), 0), (Some(0), 40)] {
        simulate(2, async |sim| {
            let engine = TestEngine::new(64 << 20);
            let device = engine.device(16, CHUNK);
            let server = sim.server(Config { device_cache_bytes, ..server_config() });
            let mut publisher = server.publisher(topic("t")).unwrap();
            let borrowed = lent(&server, &device, chunks(40), 1).await;
            publish_version(&mut publisher, borrowed, 1).await;
            for number in 1..3 {
                next(&mut *subscribe(&sim, number).await).await;
            }
            let encoder = server.stats().encoder;
            assert_eq!((encoder.source_reads, encoder.source_rereads), (40 + rereads, rereads));
            assert_eq!(encoder.source_requests, 80);
            assert_eq!(engine.copies_out(), 40 + rereads);
        });
    }
}

/// Goal: a slow subscriber does not delay a fast one, although the device has few slots, and receives its version
/// later.
/// Method: cut the slow subscriber off during the transfer, for less than the idle timeout; with one to six slots, with
/// the default cache and a large one.
#[test]
fn a_slow_subscriber_does_not_delay_a_fast_one() {
    for slots in 1..7 {
        for device_cache_bytes in [None, Some(u64::MAX)] {
            simulate(3, async |sim| {
                let device = TestEngine::new(64 << 20).device(slots, CHUNK);
                let server = sim.server(Config { device_cache_bytes, ..server_config() });
                let mut publisher = server.publisher(topic("t")).unwrap();
                let (mut slow, mut fast) = (subscribe(&sim, 1).await, subscribe(&sim, 2).await);
                let borrowed = lent(&server, &device, chunks(60), 1).await;
                publish_version(&mut publisher, borrowed, 1).await;
                sleep(Duration::from_millis(8)).await;
                sim.cut(1);
                let began = sim.elapsed();
                next(&mut fast).await;
                let took = sim.elapsed() - began;
                assert!(took < Duration::from_millis(500), "{took:?} with {slots} slots");
                let verified = slow.progress().verified_bytes;
                assert!(verified > 0 && verified < 60 * CHUNK as u64, "{verified} bytes: not midway");
                sim.mend(1);
                next(&mut slow).await;
                assert_eq!(server.stats().evicted, 0);
            });
        }
    }
}

/// Goal: tensors of every dtype, of odd sizes, aliases and empty ones arrive unchanged, whether staged, lent or copied
/// to the device, also with slots shorter or longer than a chunk.
/// Method: all of them in one version, published by three methods.
#[test]
fn every_dtype_is_served_unchanged() {
    simulate(4, async |sim| {
        let server = sim.server(server_config());
        let mut specs: Vec<TensorSpec> = Dtype::ALL
            .iter()
            .enumerate()
            .map(|(index, dtype)| {
                spec(&format!("{dtype}"), *dtype, 16 * (1 + 37 * index as u64 * index as u64))
            })
            .collect();
        specs.push(noise("large", 3 * CHUNK as u64 + 5));
        specs.push(noise("empty", 0));
        specs.push(TensorSpec { alias_of: Some(specs.len() - 2), ..noise("tied", 3 * CHUNK as u64 + 5) });
        let mut publisher = server.publisher(topic("t")).unwrap();
        let mut subscription = subscribe(&sim, 1).await;
        let mut version = 0;
        for slot_bytes in [CHUNK, CHUNK / 4, 2 * CHUNK] {
            let device = TestEngine::new(64 << 20).device(3, slot_bytes);
            for method in 0..3 {
                version += 1;
                let tensors = tensors::on_device(&device, specs.clone(), version).await;
                let publishable: Publishable = match method {
                    0 => Staged::from_device(&server.staging(), tensors, vec![]).await.unwrap().into(),
                    1 => Borrowed::from_device(&server.staging(), tensors, vec![]).unwrap().into(),
                    _ => {
                        let staged = Staged::from_device(&server.staging(), tensors, vec![]).await.unwrap();
                        staged.onto(&device).await.unwrap()
                    }
                };
                publish_version(&mut publisher, publishable, version).await;
                assert_eq!(next(&mut subscription).await.id().version.0, version);
            }
        }
    });
}

/// Goal: the producer may overwrite a staged version's tensors once staging returns, and several copies run at once.
/// Method: count the copies under way while they are held; overwrite the tensors when staging has returned.
#[test]
fn a_staged_version_is_a_copy() {
    simulate(5, async |sim| {
        let engine = TestEngine::new(64 << 20);
        let device = engine.device(8, CHUNK);
        let server = sim.server(server_config());
        let tensors = tensors::on_device(&device, chunks(20), 1).await;
        let buffer = tensors[0].1.clone();
        engine.behave(Behaviour::Held);
        let staging = server.staging();
        let staged = tokio::spawn(async move { Staged::from_device(&staging, tensors, vec![]).await });
        eventually("several copies are under way", || engine.held() == 4).await;
        engine.behave(Behaviour::AtOnce);
        engine.release(4);
        let staged = staged.await.unwrap().unwrap();
        assert_eq!((engine.copies_out(), device.slots().available()), (20, 8));
        let sink = buffer.sink();
        let target = sink.open(0..buffer.len_bytes()).await.unwrap();
        sink.write(target).await.unwrap(); // Overwrites the tensor with the slot's old content.
        let mut publisher = server.publisher(topic("t")).unwrap();
        let publication = publish_version(&mut publisher, staged, 1).await;
        assert!(publication.is_released());
        next(&mut *subscribe(&sim, 1).await).await;
    });
}

/// Goal: lent device memory returns to its producer when the version has left retention and no copy out of it is under
/// way, and not before.
/// Method: hold a copy, drop its reader, withdraw the version, and only then let the copy end.
#[test]
fn lent_memory_is_released_after_the_last_copy() {
    simulate(6, async |sim| {
        let engine = TestEngine::new(64 << 20);
        let device = engine.device(8, CHUNK);
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let borrowed = lent(&server, &device, chunks(20), 1).await;
        let publication = publish_version(&mut publisher, borrowed, 1).await;
        next(&mut *subscribe(&sim, 1).await).await;
        assert!(!publication.is_released(), "the version is retained");
        assert!(server.stats().encoder.source_cached_bytes > 0);

        engine.behave(Behaviour::Held);
        let client = sim.client(2, client_config()).await.unwrap();
        let reader = client.subscribe(&topic("t")).await.unwrap();
        eventually("copies are under way", || engine.held() > 0).await;
        drop(reader);
        client.close().await;
        publication.withdraw();
        assert!(!publication.released(Duration::from_secs(5)).await, "copies are under way");
        assert!(!publication.is_released());
        engine.release(usize::MAX);
        assert!(publication.released(Duration::from_secs(1)).await);
        eventually("all slots are back", || device.slots().available() == 8).await;
    });
}

/// Goal: a producer gets its memory back in time although a reader is too slow; that reader skips the version.
/// Method: replace the version during its transfer to a reader on a slow path.
#[test]
fn a_replaced_version_is_released_during_a_slow_transfer() {
    simulate(7, async |sim| {
        let engine = TestEngine::new(64 << 20);
        let device = engine.device(8, CHUNK);
        let delay = Duration::from_millis(400);
        sim.net.set_path(Path { delay: delay..=delay, ..Path::default() });
        let server = sim.server(server_config());
        let options = TopicOptions { release_timeout: Some(Duration::from_secs(1)), ..retaining(1) };
        let mut publisher = server.publisher_with(topic("t"), None, options).unwrap();
        let mut subscription = subscribe(&sim, 1).await;
        let borrowed = lent(&server, &device, chunks(200), 1).await;
        let publication = publish_version(&mut publisher, borrowed, 1).await;
        eventually("the transfer is under way", || server.stats().encoder.source_reads > 8).await;
        let borrowed = lent(&server, &device, chunks(3), 2).await;
        let second = publish_version(&mut publisher, borrowed, 2).await;
        assert!(publication.released(Duration::from_secs(5)).await);
        assert!(!second.is_released());
        let snapshot = next(&mut subscription).await;
        assert_eq!((snapshot.id().version.0, snapshot.skipped()), (2, 1));
        assert!(engine.copies_out() < 200);
    });
}

/// Goal: stages overlap: while one chunk is sent, others are read, and vice versa.
/// Method: copies that take a while, one after the other; count the stages that begin during another. With one chunk in
/// flight there are none. Over TCP, the overlap is not checked.
#[test]
fn reads_and_sends_overlap() {
    for in_flight in [4, 1] {
        simulate(8, async |mut sim| {
            sim.tuning.window_bytes = 2 * CHUNK_BYTES;
            sim.tuning.window_max_bytes = sim.tuning.window_bytes;
            let engine = TestEngine::new(64 << 20);
            let device = engine.device(16, CHUNK);
            let delay = Duration::from_millis(3);
            sim.net.set_path(Path { delay: delay..=delay, ..Path::default() });
            let server = sim.server(Config { chunks_in_flight: in_flight, ..server_config() });
            let mut publisher = server.publisher(topic("t")).unwrap();
            let borrowed = lent(&server, &device, chunks(100), 1).await;
            engine.behave(Behaviour::Taking(Duration::from_millis(2)));
            publish_version(&mut publisher, borrowed, 1).await;
            next(&mut *subscribe(&sim, 1).await).await;
            let stages = server.stats().stages;
            assert_eq!((stages.begun(Stage::Read), stages.begun(Stage::Send)), (100, 100));
            assert_eq!((stages.active(Stage::Read), stages.active(Stage::Send)), (0, 0));
            let beside = |stage, other| stages.overlaps(stage, other);
            let reads_beside_sends = beside(Stage::Read, Stage::Send);
            let sends_beside_reads = beside(Stage::Send, Stage::Read);
            match in_flight {
                1 => assert_eq!((reads_beside_sends, sends_beside_reads), (0, 0)),
                // A simulated byte stream accepts all bytes at once, so sends take hardly any time.
                _ if transport() == Transport::Tcp => {}
                // The network is the bottleneck: apart from the first ones, a send rarely begins during a read.
                _ => assert!(reads_beside_sends > 50 && sends_beside_reads > 0, "{stages:?}"),
            }
        });
    }
}

/// Goal: a device that fails costs only the versions on it: their transfers end at once and are not retried, other
/// topics are not affected, and the topic continues with its next version.
/// Method: an engine that stops during a transfer, with several subscribers, raw and encoded.
#[test]
fn a_failed_device_costs_only_its_versions() {
    for codec in [CodecId::Raw, CodecId::Zstd] {
        simulate(9, async |sim| {
            let engine = TestEngine::new(64 << 20);
            let device = engine.device(16, CHUNK);
            let server = sim.server(Config { codec: codec.into(), ..server_config() });
            let mut publisher = server.publisher(topic("t")).unwrap();
            let mut subscriptions = Vec::new();
            for number in 1..4 {
                subscriptions.push(subscribe(&sim, number).await);
            }
            let borrowed = lent(&server, &device, chunks(100), 1).await;
            engine.behave(Behaviour::Taking(Duration::from_millis(2)));
            let publication = publish_version(&mut publisher, borrowed, 1).await;
            eventually("the transfer is under way", || server.stats().encoder.source_reads > 20).await;
            engine.behave(Behaviour::Failing);
            // A version that cannot be read is retained no longer.
            assert!(publication.released(Duration::from_secs(1)).await);
            let copies = engine.copies_out();
            sleep(Duration::from_secs(60)).await;
            assert_eq!(engine.copies_out(), copies, "copies are not retried");
            assert_eq!((server.stats().evicted, server.stats().transfers), (0, 0));
            let mut other = server.publisher(topic("other")).unwrap();
            publish(&server, &mut other, 1, 100_000).await;
            let client = sim.client(9, client_config()).await.unwrap();
            let mut unaffected = client.subscribe(&topic("other")).await.unwrap();
            next(&mut unaffected).await;
            publish(&server, &mut publisher, 2, 100_000).await;
            for subscription in &mut subscriptions {
                let snapshot = next(subscription).await;
                assert_eq!((snapshot.id().version.0, snapshot.skipped()), (2, 1));
            }
            eventually("all slots are back", || device.slots().available() == 16).await;
        });
    }
}

/// Goal: the transfers of a version on a device that hangs are tried again until another version is published, and its
/// subscribers are not evicted as too slow. Another topic is not affected. Lent memory is never reported as released, because a copy may still read it.
/// Method: copies that never end, with fewer slots than the copies need, and with more.
#[test]
fn a_hanging_device_costs_only_its_versions() {
    for slots in [2, 16] {
        simulate(10, async |sim| {
            let engine = TestEngine::new(64 << 20);
            let device = engine.device(slots, CHUNK);
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            let mut other = server.publisher(topic("other")).unwrap();
            let (mut first, mut second) = (subscribe(&sim, 1).await, subscribe(&sim, 2).await);
            let client = sim.client(3, client_config()).await.unwrap();
            let mut unaffected = client.subscribe(&topic("other")).await.unwrap();
            let borrowed = lent(&server, &device, chunks(40), 1).await;
            engine.behave(Behaviour::Hanging);
            let began = sim.elapsed();
            let publication = publish_version(&mut publisher, borrowed, 1).await;
            for version in 1..10 {
                publish(&server, &mut other, version, 100_000).await;
                assert_eq!(next(&mut unaffected).await.id().version.0, version);
            }
            assert!(sim.elapsed() - began < Duration::from_secs(1), "the other topic is not delayed");
            sleep(Duration::from_secs(200)).await;
            assert_eq!(server.stats().evicted, 0, "the subscribers were not to blame");
            let empty = Staged::from_device(&server.staging(), vec![], vec![]).await;
            assert!(empty.is_ok(), "an empty version needs no copy");
            publish(&server, &mut publisher, 2, 100_000).await;
            for subscription in [&mut first, &mut second] {
                let snapshot = next(subscription).await;
                assert_eq!((snapshot.id().version.0, snapshot.skipped()), (2, 1));
            }
            // The device might have recovered, so the version was retained until it was replaced. It is unknown when
            // the copies end, so the version is never released.
            assert!(!publication.released(Duration::from_secs(30)).await);
            engine.forget_hanging();
            eventually("all slots are back", || device.slots().available() == slots).await;
            assert!(!publication.is_released());
        });
    }
}

/// Goal: staging from a device that hangs, and onto one, fails with an error that names the deadline.
/// Method: copies that never end.
#[test]
fn staging_with_a_hanging_device_fails() {
    simulate(11, async |sim| {
        let engine = TestEngine::new(64 << 20);
        let device = engine.device(8, CHUNK);
        let server = sim.server(server_config());
        let tensors = tensors::on_device(&device, chunks(20), 1).await;
        engine.behave(Behaviour::Hanging);
        let error = Staged::from_device(&server.staging(), tensors, vec![]).await.unwrap_err();
        assert!(error.to_string().contains("25000 ms"), "{error}");
        let staged = tensors::stage(&server, chunks(20), 1);
        let error = staged.onto(&device).await.unwrap_err();
        assert!(error.to_string().contains("25000 ms") && error.to_string().contains("test"), "{error}");
        assert_eq!(sim.elapsed().as_secs(), 50);
        assert_eq!(server.stats().staged_bytes, 0, "nothing is kept");
    });
}

/// Goal: versions published from a device by any method arrive complete, and all memory and slots are returned.
/// Method: random versions, slots, caches, subscribers and speeds, from a seed.
#[test]
fn random_versions_from_devices_arrive() {
    for seed in seeds(30) {
        simulate(seed, async |sim| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let engine = TestEngine::new(256 << 20);
            let slots = rng.random_range(1..12);
            let device = engine.device(slots, [CHUNK, CHUNK / 2, 2 * CHUNK][rng.random_range(0..3)]);
            let config = Config {
                device_cache_bytes: [None, Some(0), Some(1 << 20)][rng.random_range(0..3)],
                codec: [CodecChoice::Auto, CodecId::Raw.into(), CodecId::Zstd.into()][rng.random_range(0..3)],
                chunks_in_flight: rng.random_range(1..6),
                ..server_config()
            };
            let server = sim.server(config);
            let mut publisher = server
                .publisher_with(topic("t"), None, retaining(rng.random_range(1..4)))
                .unwrap();
            let last = rng.random_range(2..8);
            let readers = (1..=rng.random_range(1..5)).map(|number| {
                let pause = Duration::from_millis(rng.random_range(0..300));
                let sim = &sim;
                async move {
                    sleep(pause).await;
                    let mut subscription = subscribe(sim, number).await;
                    while next(&mut subscription).await.id().version.0 < last {
                        sleep(pause).await;
                    }
                }
            });
            let readers = futures_util::future::join_all(readers.collect::<Vec<_>>());
            let publishing = async {
                let mut publications = Vec::new();
                for version in 1..=last {
                    engine.behave(Behaviour::AtOnce);
                    let bytes = rng.random_range(0..2_000_000);
                    let specs = tensors::random(&mut rng, bytes);
                    let publishable: Publishable = match rng.random_range(0..3) {
                        0 => lent(&server, &device, specs, version).await.into(),
                        1 => {
                            let tensors = tensors::on_device(&device, specs, version).await;
                            Staged::from_device(&server.staging(), tensors, vec![]).await.unwrap().into()
                        }
                        _ => {
                            let staged = tensors::stage(&server, specs, version);
                            staged.onto(&device).await.unwrap()
                        }
                    };
                    engine.behave(Behaviour::Taking(Duration::from_micros(rng.random_range(0..3_000))));
                    publications.push(publish_version(&mut publisher, publishable, version).await);
                    sleep(Duration::from_millis(rng.random_range(0..100))).await;
                }
                publications
            };
            let (_, publications) = tokio::join!(readers, publishing);
            publisher.withdraw();
            for publication in publications {
                assert!(publication.released(Duration::from_secs(20)).await);
            }
            eventually("all slots are back", || device.slots().available() == slots).await;
            eventually("all staged memory is back", || server.stats().staged_bytes == 0).await;
            let stats = server.stats();
            assert_eq!((stats.encoder.source_cached_bytes, stats.evicted), (0, 0));
            assert_eq!(stats.stages.active(Stage::Read), 0);
        });
    }
}
