//! Versions that land in the memory of a device: whole and exact, whatever the device and the network do.

mod buffers;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::{sync::Arc, time::Duration};
use tensor_relay_client::{
    BufferError, Buffers, Client, Config, FillCause, Glob, Mirror, Request, SaveError, Snapshot, Stage,
    Subscription, SubscriptionError, Version,
};
use tensor_relay_device::{Capacity, Device, DeviceBuffer};
use tensor_relay_protocol::{CodecId, Dtype, TensorName, TensorSpec};
use tensor_relay_server::{Publisher, Server};
use tensor_relay_tests::{
    gated::GatedEngine,
    pair::{
        CHUNK_BYTES, Sim, client_config, device, eventually, keeping, reconnecting, seeds, server_config,
        simulate, topic,
    },
    simnet::Path,
    tensors::{self, noise, smooth, spec},
};
use tokio::time::sleep;

const BYTES: u64 = 2 << 20;

/// Longer than the idle timeout of both ends.
const LONG: Duration = Duration::from_secs(15);

/// Longer than a client waits for a copy.
const HANGING: Duration = Duration::from_secs(26);

fn landing_on(device: &Device, config: Config) -> Config {
    Config { device: Some(device.clone()), ..config }
}

/// How many chunks come at once.
fn credit() -> usize {
    client_config().credit_chunks as usize
}

/// A gated device with slots as long as the chunks.
fn gated(budget_bytes: u64, slots: usize) -> (Arc<GatedEngine>, Device) {
    GatedEngine::device(budget_bytes, Capacity { slots, slot_bytes: CHUNK_BYTES as usize })
}

/// A slow path, so that a transfer can be caught in the middle.
fn slow_path(sim: &Sim) {
    let delay = Duration::from_millis(20);
    sim.net.set_path(Path { delay: delay..=delay, ..Path::default() });
}

async fn subscribe(sim: &Sim, config: Config, request: Request) -> (Client, Subscription) {
    let client = sim.client(1, config).await.unwrap();
    let subscription = client.subscribe_to(request).await.unwrap();
    client.list().await.unwrap();
    (client, subscription)
}

async fn publish(server: &Server, publisher: &mut Publisher, version: u64, specs: &[TensorSpec]) {
    let staged = tensors::stage(server, specs.to_vec(), version);
    publisher.publish(staged, tensors::metadata(version)).await.unwrap();
}

fn bytes_of(spec: &TensorSpec) -> u64 {
    spec.shape.byte_len(spec.dtype).unwrap()
}

fn content(name: &TensorName, version: u64, bytes: u64) -> Vec<u8> {
    let mut out = vec![0; bytes as usize];
    tensors::write_content(name.as_str(), version, &mut out);
    out
}

/// What is in a buffer of a device that copies out in place.
async fn bytes_in(buffer: &DeviceBuffer) -> Vec<u8> {
    buffer.source().read(0..buffer.len_bytes()).await.unwrap().to_vec()
}

/// A buffer for each tensor that has bytes of its own.
fn buffers_on(device: &Device, specs: &[TensorSpec]) -> Buffers<DeviceBuffer> {
    let own = specs.iter().filter(|spec| spec.alias_of.is_none());
    own.map(|spec| (spec.name.clone(), device.allocate(bytes_of(spec) as usize).unwrap()))
        .collect()
}

async fn hold(buffers: &Buffers<DeviceBuffer>, version: u64) -> bool {
    for (name, buffer) in buffers.iter() {
        if bytes_in(buffer).await != content(name, version, buffer.len_bytes()) {
            return false;
        }
    }
    true
}

/// Every dtype in an odd number of elements, large and small, beside empty ones and tied weights.
fn all_kinds() -> Vec<TensorSpec> {
    let mut specs = Vec::new();
    for dtype in Dtype::ALL {
        let elements = |bytes: u64| bytes * 8 / u64::from(dtype.bits());
        specs.push(spec(&format!("small.{dtype}"), *dtype, elements(100) + 1));
        specs.push(spec(&format!("large.{dtype}"), *dtype, elements(70_000) + 1));
    }
    specs.push(spec("empty", Dtype::F64, 0));
    let tied = TensorSpec { name: TensorName::new("tied").unwrap(), alias_of: Some(1), ..specs[1].clone() };
    specs.push(tied);
    specs
}

/// Goal: tensors of every dtype arrive exactly on the device, raw and encoded, in both modes; what a user may ask of such
/// a snapshot is as the pages say.
/// Method: one of each, empty ones and tied ones; each is read back from the place that it is said to be at.
#[test]
fn every_dtype_lands_exactly() {
    for (seed, codec) in [(1, CodecId::Raw), (2, CodecId::Zstd)] {
        simulate(seed, async |sim| {
            let specs = all_kinds();
            let server = sim.server(tensor_relay_server::Config { codec: codec.into(), ..server_config() });
            let mut publisher = server.publisher(topic("t")).unwrap();
            publish(&server, &mut publisher, 1, &specs).await;
            let device = device(u64::MAX);
            for request in [Request::latest(topic("t")), Request::every(topic("t"))] {
                let config = landing_on(&device, client_config());
                let (_client, mut subscription) = subscribe(&sim, config, request).await;
                let snapshot = subscription.next().await.unwrap();
                assert!(snapshot.is_on_device() && snapshot.device().unwrap().is(&device));
                assert_eq!((snapshot.tensor("empty"), snapshot.tensors().count()), (None, 0));
                assert_eq!(snapshot.device_tensors().count(), specs.len());
                for (tensor, found) in snapshot.device_tensors() {
                    let read = found.buffer().source().read(found.range()).await.unwrap();
                    let owner = if tensor.name.as_str() == "tied" { &specs[1].name } else { &tensor.name };
                    assert_eq!(read, content(owner, 1, tensor.byte_len()), "{}", tensor.name);
                    assert!(found.range().start % 256 == 0 && found.len_bytes() == tensor.byte_len());
                }
                let place = |name| snapshot.device_tensor(name).unwrap().range();
                assert_eq!(place("tied"), place(specs[1].name.as_str()));
                assert!(snapshot.device_tensor("missing").is_none());
                let on_host = snapshot.to_host().await.unwrap();
                assert!(!on_host.is_on_device() && on_host.device_tensors().count() == 0);
                assert_eq!(on_host.tensors().count(), specs.len());
                tensors::check(&snapshot);
                tensors::check(&on_host.to_host().await.unwrap());
            }
        });
    }
}

/// Goal: a snapshot on a device is never written as empty files, or copied as nothing.
/// Method: whatever takes the bytes of a snapshot on the host, with one on a device, and then with its copy.
#[test]
fn what_needs_the_host_says_so() {
    simulate(3, async |sim| {
        let specs = [noise("a", 1_000)];
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        publish(&server, &mut publisher, 1, &specs).await;
        let config = landing_on(&device(u64::MAX), client_config());
        let (_client, mut subscription) = subscribe(&sim, config, Request::latest(topic("t"))).await;
        let snapshot = subscription.next().await.unwrap();
        let home = tempfile::tempdir().unwrap();
        let (path, mirror) = (home.path().join("a.safetensors"), Mirror::new(home.path(), None));
        for refused in [snapshot.save_safetensors(&path).unwrap_err(), mirror.save(&snapshot).unwrap_err()] {
            assert!(
                matches!(&refused, SaveError::OnDevice { device, .. } if **device == *"host"),
                "{refused}"
            );
        }
        let mut a = vec![0; 1_000];
        let refused = snapshot.copy_into(&mut [("a", &mut a)]).unwrap_err();
        assert_eq!(refused, BufferError::OnDevice { device: "host".into() });
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
        let copy = snapshot.to_host().await.unwrap();
        copy.copy_into(&mut [("a", &mut a)]).unwrap();
        copy.save_safetensors(&path).unwrap();
        assert_eq!(a, content(&specs[0].name, 1, 1_000));
    });
}

/// Goal: thirty versions of anything land in the memory of two, which is all free at the end.
/// Method: random tensors, of which some are selected, and one snapshot held at a time.
#[test]
fn memory_is_used_again() {
    for seed in seeds(6) {
        simulate(seed, async |sim| {
            let specs = tensors::random(&mut ChaCha8Rng::seed_from_u64(seed), BYTES);
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            let (engine, device) = gated(3 * BYTES, 8);
            let select: &[&str] = if seed % 2 == 0 { &[] } else { &["*1", "*2"] };
            let request =
                Request::latest(topic("t")).select(select.iter().map(|glob| Glob::new(glob).unwrap()));
            let (client, mut subscription) =
                subscribe(&sim, landing_on(&device, client_config()), request).await;
            let mut held: Option<Snapshot> = None;
            for version in 1..=30 {
                publish(&server, &mut publisher, version, &specs).await;
                let snapshot = subscription.next().await.unwrap();
                assert_eq!(snapshot.id().version, Version(version));
                tensors::check(&snapshot);
                held = Some(snapshot);
            }
            drop(held);
            client.close().await;
            drop(subscription);
            assert_eq!((engine.in_use_bytes(), device.slots().available()), (0, 8));
        });
    }
}

/// Goal: a version goes on in the same memory after its connection was lost; what was copied is not sent again, and a copy
/// that was in flight then does not land over what comes later.
/// Method: cut the way in mid-transfer, with a few copies held until the version is on its way again.
#[test]
fn a_version_goes_on_where_it_was() {
    for seed in seeds(5) {
        simulate(seed, async |sim| {
            let specs = [noise("a", BYTES), smooth("b", 100_000), noise("c", 1)];
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = server.publisher(topic("t")).unwrap();
            let (engine, device) = gated(u64::MAX, 16);
            let config = landing_on(&device, reconnecting());
            let (client, mut subscription) = subscribe(&sim, config, Request::latest(topic("t"))).await;
            let progress = subscription.progress_reader();
            let (snapshot, ()) = tokio::join!(subscription.next(), async {
                publish(&server, &mut publisher, 1, &specs).await;
                eventually("the transfer runs", || progress().verified_bytes > BYTES / 2).await;
                engine.close();
                eventually("a copy is in flight", || engine.in_flight() > 0).await;
                sim.cut(1);
                sleep(LONG).await;
                assert_eq!(client.reconnects(), 0);
                sim.mend(1);
                sleep(LONG).await;
                let in_flight = engine.in_flight();
                assert!(in_flight > 0 && engine.in_use_bytes() > 0);
                assert_eq!(client.reconnects(), 1);
                while engine.let_last_pass() {}
                engine.open();
            });
            let snapshot = snapshot.unwrap();
            tensors::check(&snapshot);
            assert_eq!(snapshot.receipt().resumed, 1);
            assert!(snapshot.receipt().wire_bytes < BYTES + BYTES / 4, "{:?}", snapshot.receipt());
        });
    }
}

/// Goal: a copy that was in flight when its version was given up keeps its memory, and never lands in another version.
/// Method: drop the subscription, and lose the connection for good, in the middle of copies; then receive another version
/// on the same device, and only then let the old copies pass.
#[test]
fn what_is_given_up_in_the_middle_of_a_copy() {
    for lost in [false, true] {
        simulate(5, async |sim| {
            let specs = [noise("a", BYTES)];
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            let (engine, device) = gated(u64::MAX, 16);
            let config = landing_on(&device, client_config());
            let (_client, mut subscription) =
                subscribe(&sim, config.clone(), Request::latest(topic("t"))).await;
            engine.close();
            publish(&server, &mut publisher, 1, &specs).await;
            eventually("copies are in flight", || engine.in_flight() == credit()).await;
            if lost {
                sim.cut(1);
                let ended = subscription.next().await.unwrap_err();
                assert!(matches!(ended, SubscriptionError::Disconnected { .. }), "{ended}");
                sim.mend(1);
            }
            drop(subscription);
            sleep(LONG).await;
            assert_eq!((engine.in_flight(), device.slots().available()), (credit(), 16 - credit()));
            let old_bytes = engine.in_use_bytes();
            assert!(old_bytes >= BYTES, "memory under a copy is nobody else's");

            let client = sim.client(2, config).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            let (snapshot, ()) = tokio::join!(subscription.next(), async {
                eventually("the other one is copied", || engine.in_flight() > credit()).await;
                // Newest first: what was begun for the version given up lands last.
                while engine.in_flight() > credit() || subscription_is_busy(&engine).await {
                    engine.let_last_pass();
                    sleep(Duration::from_millis(1)).await;
                }
                engine.open();
            });
            tensors::check(&snapshot.unwrap());
            eventually("memory is free", || engine.in_use_bytes() < old_bytes + BYTES).await;
        });
    }
}

/// Whether copies come in within a while.
async fn subscription_is_busy(engine: &GatedEngine) -> bool {
    let before = engine.begun();
    sleep(Duration::from_millis(500)).await;
    engine.begun() > before
}

/// Goal: what the user holds on a device is bounded as on the host: a tensor counts like its snapshot.
/// Method: hold one of at most one as a tensor; ask; drop; ask again.
#[test]
fn a_tensor_on_a_device_counts_as_held() {
    simulate(6, async |sim| {
        let specs = [noise("a", 1_000)];
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), None, keeping(4)).unwrap();
        let hold_timeout = Duration::from_secs(3);
        let config = Config { versions_held_max: 1, hold_timeout, ..client_config() };
        let config = landing_on(&device(u64::MAX), config);
        let (_client, mut subscription) = subscribe(&sim, config, Request::every(topic("t"))).await;
        for version in 1..=2 {
            publish(&server, &mut publisher, version, &specs).await;
        }
        let tensor = subscription.next().await.unwrap().device_tensor("a").unwrap();
        let error = subscription.next().await.unwrap_err();
        assert!(matches!(error, SubscriptionError::HoldingTooMany { max: 1, .. }), "{error}");
        assert_eq!(bytes_in(tensor.buffer()).await[..1_000], content(&specs[0].name, 1, 1_000));
        drop(tensor);
        assert_eq!(subscription.next().await.unwrap().id().version, Version(2));
    });
}

/// Goal: a user who takes no snapshot gets the newest, and their memory on the device is free again.
/// Method: publish six versions while the user sleeps.
#[test]
fn a_user_who_sleeps() {
    simulate(7, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let (engine, device) = gated(5 << 20, 8);
        let config = landing_on(&device, client_config());
        let (_client, mut subscription) = subscribe(&sim, config, Request::latest(topic("t"))).await;
        for version in 1..=6 {
            publish(&server, &mut publisher, version, &[noise("a", BYTES)]).await;
            sleep(Duration::from_secs(60)).await;
        }
        let snapshot = subscription.next().await.unwrap();
        tensors::check(&snapshot);
        assert_eq!((snapshot.id().version, snapshot.skipped()), (Version(6), 5));
        assert_eq!(engine.in_use_bytes(), BYTES);
    });
}

/// Goal: a version that does not fit on the device, or whose copy does not fit on the host, is an error with numbers.
/// Method: two MiB into a budget of one, on either; the same session then receives something smaller.
#[test]
fn a_version_that_does_not_fit() {
    simulate(8, async |sim| {
        let server = sim.server(server_config());
        let (mut big, mut small) =
            (server.publisher(topic("big")).unwrap(), server.publisher(topic("small")).unwrap());
        publish(&server, &mut big, 1, &[noise("a", 2 << 20)]).await;
        publish(&server, &mut small, 1, &[noise("a", 1 << 19)]).await;
        let config = Config { memory_bytes: 1 << 18, ..client_config() };
        let (client, mut subscription) =
            subscribe(&sim, landing_on(&device(1 << 20), config), Request::latest(topic("big"))).await;
        let error = subscription.next().await.unwrap_err();
        let SubscriptionError::NoRoomOnDevice { id, detail, .. } = &error else { panic!("{error}") };
        assert!(error.is_final() && id.topic == topic("big"));
        assert!(["host", "2097152", "1048576"].iter().all(|part| detail.contains(part)), "{detail}");
        let snapshot = client.subscribe(&topic("small")).await.unwrap().next().await.unwrap();
        let refused = snapshot.to_host().await.unwrap_err().to_string();
        assert!(["524288", "262144"].iter().all(|part| refused.contains(part)), "{refused}");
        assert!(snapshot.is_on_device() && snapshot.device_tensor("a").is_some());
    });
}

/// Goal: a device that fails ends the subscription whose version it did not take, with words that blame it, and nothing
/// else: the server goes on, and so do other subscriptions of the session.
/// Method: one copy fails; another subscription of the same session is in the middle of its versions.
#[test]
fn a_copy_that_fails() {
    simulate(9, async |sim| {
        let server = sim.server(server_config());
        let (mut one, mut other) =
            (server.publisher(topic("one")).unwrap(), server.publisher(topic("other")).unwrap());
        let (engine, device) = gated(u64::MAX, 16);
        let config = landing_on(&device, client_config());
        let (client, mut failing) = subscribe(&sim, config, Request::latest(topic("one"))).await;
        let mut going_on = client.subscribe(&topic("other")).await.unwrap();
        client.list().await.unwrap();
        engine.fail(1);
        publish(&server, &mut one, 1, &[noise("a", BYTES)]).await;
        let error = failing.next().await.unwrap_err();
        let SubscriptionError::Device { id, device: named, detail, is_final: true } = &error else {
            panic!("{error}")
        };
        assert_eq!((id.topic.as_str(), &**named), ("one", "gated"));
        assert!(error.is_final() && detail.contains("engine has stopped"), "{error}");
        for version in 1..=3 {
            publish(&server, &mut other, version, &[noise("a", BYTES)]).await;
            tensors::check(&going_on.next().await.unwrap());
        }
        eventually("all are committed", || server.stats().committed == 3).await;
        assert_eq!(server.stats().sessions, 1);
        eventually("memory is free", || engine.in_use_bytes() <= 2 * BYTES).await;
        eventually("slots are free", || device.slots().available() == 16).await;
    });
}

/// Goal: a device that hangs costs a version, not the subscription: the user is told, and later versions are tried. What
/// the old copies do later harms nobody.
/// Method: copies of the first version never end; the gate is opened for the second; the old ones land when it is there.
#[test]
fn copies_that_never_end() {
    for every in [false, true] {
        simulate(10, async |sim| {
            let specs = [noise("a", BYTES)];
            let server = sim.server(server_config());
            let mut publisher = server.publisher_with(topic("t"), None, keeping(4)).unwrap();
            let (engine, device) = gated(u64::MAX, 16);
            let request = if every { Request::every(topic("t")) } else { Request::latest(topic("t")) };
            let config = landing_on(&device, client_config());
            let (_client, mut subscription) = subscribe(&sim, config, request).await;
            engine.close();
            let began = sim.elapsed();
            publish(&server, &mut publisher, 1, &specs).await;
            let error = subscription.next().await.unwrap_err();
            let SubscriptionError::Device { id, is_final: false, .. } = &error else { panic!("{error}") };
            assert!(id.version == Version(1) && !error.is_final() && sim.elapsed() - began < HANGING);
            assert!(error.to_string().contains("within 25s"), "{error}");
            let stuck = engine.in_flight();
            assert!(stuck > 0 && engine.in_use_bytes() == BYTES, "{stuck} copies have their memory");

            publish(&server, &mut publisher, 2, &specs).await;
            let (snapshot, ()) = tokio::join!(next_after_gaps(&mut subscription), async {
                while subscription_is_busy(&engine).await || engine.in_flight() > stuck {
                    engine.let_last_pass();
                }
            });
            assert_eq!(snapshot.id().version, Version(2));
            engine.open();
            tensors::check(&snapshot);
            sleep(LONG).await;
            assert_eq!(engine.in_use_bytes(), BYTES, "that of the version that is held");
        });
    }
}

/// The next version, past the word that others are missing.
async fn next_after_gaps(subscription: &mut Subscription) -> Snapshot {
    loop {
        match subscription.next().await {
            Ok(snapshot) => return snapshot,
            Err(SubscriptionError::Gap(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Goal: while one chunk is copied, others are received: the stages overlap.
/// Method: hold each copy until another chunk has come; count.
#[test]
fn copies_overlap_the_network() {
    simulate(11, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = server.publisher(topic("t")).unwrap();
        let (engine, device) = gated(u64::MAX, 16);
        let config = landing_on(&device, client_config());
        let (client, mut subscription) = subscribe(&sim, config, Request::latest(topic("t"))).await;
        engine.close();
        let (snapshot, ()) = tokio::join!(subscription.next(), async {
            publish(&server, &mut publisher, 1, &[noise("a", BYTES)]).await;
            let chunks = BYTES / u64::from(CHUNK_BYTES);
            while engine.begun() < chunks {
                let begun = engine.begun();
                eventually("another chunk comes while one is copied", || engine.begun() > begun + 1).await;
                while engine.in_flight() > 1 {
                    engine.let_one_pass();
                }
            }
            engine.open();
        });
        tensors::check(&snapshot.unwrap());
        let chunks = BYTES / u64::from(CHUNK_BYTES);
        let stages = client.stages();
        assert_eq!(stages.begun(Stage::Write), chunks);
        // A chunk begins to be written when it was received: here while another one was still being copied.
        assert!(stages.begun_beside(Stage::Write, Stage::Write) > chunks / 2, "{stages:?}");
    });
}
