//! Versions that are received into device memory: they are complete and exact, whatever fails.

mod buffers;

use crate::{OUTAGE_DURATION, slow_path};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::{sync::Arc, time::Duration};
use tensor_relay_client::{
    Bounds, BufferError, Buffers, Client, Config, FillCause, Glob, Indices, Mirror, Request, SaveError,
    Slice, Snapshot, Stage, Subscription, SubscriptionError, TensorBox, Version,
};
use tensor_relay_device::{Device, DeviceBuffer};
use tensor_relay_protocol::{CodecId, Dtype, TensorName, TensorSpec};
use tensor_relay_server::{Publisher, Server};
use tensor_relay_tests::{
    engine::{Behaviour, TestEngine},
    pair::{
        CHUNK_BYTES, Sim, client_config, device, eventually, reconnecting, retaining, seeds, server_config,
        simulate, topic,
    },
    tensors::{self, noise, smooth, spec},
};
use tokio::time::sleep;

const BYTES: u64 = 2 << 20;

/// Slightly longer than a client's deadline for a copy.
const HANG_DURATION_MAX: Duration = Duration::from_secs(26);

fn receiving_on(device: &Device, config: Config) -> Config {
    Config { device: Some(device.clone()), ..config }
}

/// The number of chunks for which a client grants credit.
fn credit() -> usize {
    client_config().credit_chunks as usize
}

/// An engine, and its device with slots of the size of chunks.
fn controlled(budget_bytes: u64, slots: usize) -> (Arc<TestEngine>, Device) {
    let engine = TestEngine::new(budget_bytes);
    let device = engine.device(slots, CHUNK_BYTES as usize);
    (engine, device)
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

/// The content of a buffer, read through its device.
async fn bytes_in(buffer: &DeviceBuffer) -> Vec<u8> {
    buffer.source().read(0..buffer.len_bytes()).await.unwrap().to_vec()
}

/// A buffer for each tensor that is not an alias.
fn buffers_on(device: &Device, specs: &[TensorSpec]) -> Buffers<DeviceBuffer> {
    let own = specs.iter().filter(|spec| spec.alias_of.is_none());
    own.map(|spec| (spec.name.clone(), device.allocate(bytes_of(spec) as usize).unwrap()))
        .collect()
}

/// Whether all buffers have the content of `version`.
async fn have_content(buffers: &Buffers<DeviceBuffer>, version: u64) -> bool {
    for (name, buffer) in buffers.iter() {
        if bytes_in(buffer).await != content(name, version, buffer.len_bytes()) {
            return false;
        }
    }
    true
}

/// Large and small tensors of every dtype, with odd numbers of elements; an empty tensor and a tied one.
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

/// Goal: tensors of every dtype arrive exactly on the device, raw and encoded, in both modes. Such a snapshot has its
/// tensors on the device only, and its copy on the host has them there only.
/// Method: tensors of each dtype, an empty and a tied one; read each tensor back from the range that the snapshot
/// reports.
#[test]
fn every_dtype_arrives_exactly() {
    for (seed, codec) in [(1, CodecId::Raw), (2, CodecId::Zstd)] {
        simulate(seed, async |sim| {
            let specs = all_kinds();
            let server = sim.server(tensor_relay_server::Config { codec: codec.into(), ..server_config() });
            let mut publisher = server.publisher(topic("t")).unwrap();
            publish(&server, &mut publisher, 1, &specs).await;
            let target = device(u64::MAX);
            for request in [Request::latest(topic("t")), Request::every(topic("t"))] {
                let config = receiving_on(&target, client_config());
                let (_client, mut subscription) = subscribe(&sim, config, request).await;
                let snapshot = subscription.next().await.unwrap();
                assert!(snapshot.is_on_device() && snapshot.device().unwrap().is(&target));
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

/// Goal: a snapshot on a device is never written as empty files, nor copied as empty tensors.
/// Method: call each operation that needs a snapshot on the host with a snapshot on a device, then with its copy on the
/// host.
#[test]
fn host_operations_refuse_a_snapshot_on_a_device() {
    simulate(3, async |sim| {
        let specs = [noise("a", 1_000)];
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        publish(&server, &mut publisher, 1, &specs).await;
        let config = receiving_on(&device(u64::MAX), client_config());
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

/// Goal: device memory for three versions suffices for thirty, and is free at the end.
/// Method: random tensors, with and without a selection; the user holds one snapshot at a time.
#[test]
fn device_memory_is_reused() {
    for seed in seeds(6) {
        simulate(seed, async |sim| {
            let specs = tensors::random(&mut ChaCha8Rng::seed_from_u64(seed), BYTES);
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            let (engine, device) = controlled(3 * BYTES, 8);
            let select: &[&str] = if seed % 2 == 0 { &[] } else { &["*1", "*2"] };
            let request =
                Request::latest(topic("t")).select(select.iter().map(|glob| Glob::new(glob).unwrap()));
            let (client, mut subscription) =
                subscribe(&sim, receiving_on(&device, client_config()), request).await;
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

/// Goal: a version is resumed in the same memory after its connection was lost. Copied chunks are not sent again, and a
/// copy that was in flight at that time does not overwrite later bytes.
/// Method: cut the path during the transfer, with a few copies held until the transfer has been resumed.
#[test]
fn a_version_is_resumed() {
    for seed in seeds(5) {
        simulate(seed, async |sim| {
            let specs = [noise("a", BYTES), smooth("b", 100_000), noise("c", 1)];
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = server.publisher(topic("t")).unwrap();
            let (engine, device) = controlled(u64::MAX, 16);
            let config = receiving_on(&device, reconnecting());
            let (client, mut subscription) = subscribe(&sim, config, Request::latest(topic("t"))).await;
            let progress = subscription.progress_reader();
            let (snapshot, ()) = tokio::join!(subscription.next(), async {
                publish(&server, &mut publisher, 1, &specs).await;
                eventually("the transfer runs", || progress().verified_bytes > BYTES / 2).await;
                engine.behave(Behaviour::Held);
                eventually("a copy is in flight", || engine.held() > 0).await;
                sim.cut(1);
                sleep(OUTAGE_DURATION).await;
                assert_eq!(client.reconnects(), 0);
                sim.mend(1);
                sleep(OUTAGE_DURATION).await;
                let in_flight = engine.held();
                assert!(in_flight > 0 && engine.in_use_bytes() > 0);
                assert_eq!(client.reconnects(), 1);
                while engine.release_newest() {}
                engine.release_all();
            });
            let snapshot = snapshot.unwrap();
            tensors::check(&snapshot);
            assert_eq!(snapshot.receipt().resumed, 1);
            assert!(snapshot.receipt().wire_bytes < BYTES + BYTES / 4, "{:?}", snapshot.receipt());
        });
    }
}

/// Goal: a copy that was in flight when its version was given up keeps its memory, and never writes to another version.
/// Method: drop the subscription during copies, with and without a lost connection; receive the version again on the
/// same device, and only then let the old copies pass.
#[test]
fn copies_of_a_version_given_up_keep_their_memory() {
    for lost in [false, true] {
        simulate(5, async |sim| {
            let specs = [noise("a", BYTES)];
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            let (engine, device) = controlled(u64::MAX, 16);
            let config = receiving_on(&device, client_config());
            let (_client, mut subscription) =
                subscribe(&sim, config.clone(), Request::latest(topic("t"))).await;
            engine.behave(Behaviour::Held);
            publish(&server, &mut publisher, 1, &specs).await;
            eventually("copies are in flight", || engine.held() == credit()).await;
            if lost {
                sim.cut(1);
                let ended = subscription.next().await.unwrap_err();
                assert!(matches!(ended, SubscriptionError::Disconnected { .. }), "{ended}");
                sim.mend(1);
            }
            drop(subscription);
            sleep(OUTAGE_DURATION).await;
            assert_eq!((engine.held(), device.slots().available()), (credit(), 16 - credit()));
            let old_bytes = engine.in_use_bytes();
            assert!(old_bytes >= BYTES, "memory under a copy is not reused");

            let client = sim.client(2, config).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            let (snapshot, ()) = tokio::join!(subscription.next(), async {
                eventually("new copies are in flight", || engine.held() > credit()).await;
                // Newest first: the old copies end last.
                while engine.held() > credit() || copies_begin(&engine).await {
                    engine.release_newest();
                    sleep(Duration::from_millis(1)).await;
                }
                engine.release_all();
            });
            tensors::check(&snapshot.unwrap());
            eventually("memory is free", || engine.in_use_bytes() < old_bytes + BYTES).await;
        });
    }
}

/// Whether copies begin within half a second.
async fn copies_begin(engine: &TestEngine) -> bool {
    let before = engine.copies_in();
    sleep(Duration::from_millis(500)).await;
    engine.copies_in() > before
}

/// Goal: the number of versions that a user holds is bounded on a device, too: a held tensor counts like its snapshot.
/// Method: with a limit of one, hold a tensor; request the next version; drop the tensor; request it again.
#[test]
fn a_tensor_on_a_device_counts_as_held() {
    simulate(6, async |sim| {
        let specs = [noise("a", 1_000)];
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), None, retaining(4)).unwrap();
        let hold_timeout = Duration::from_secs(3);
        let config = Config { versions_held_max: 1, hold_timeout, ..client_config() };
        let config = receiving_on(&device(u64::MAX), config);
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

/// Goal: a user who takes no snapshot for a while gets the newest one, and the device memory of older ones is free.
/// Method: publish six versions while the user sleeps.
#[test]
fn an_idle_user_gets_the_newest_version() {
    simulate(7, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let (engine, device) = controlled(5 << 20, 8);
        let config = receiving_on(&device, client_config());
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

/// Goal: a version that does not fit on the device, or whose copy does not fit on the host, is an error with both
/// sizes.
/// Method: a version of twice the device's budget; then one that fits on the device, and has twice the host's budget.
#[test]
fn a_version_that_does_not_fit_is_an_error() {
    simulate(8, async |sim| {
        let server = sim.server(server_config());
        let (mut big, mut small) =
            (server.publisher(topic("big")).unwrap(), server.publisher(topic("small")).unwrap());
        publish(&server, &mut big, 1, &[noise("a", 2 << 20)]).await;
        publish(&server, &mut small, 1, &[noise("a", 1 << 19)]).await;
        let config = Config { memory_bytes: 1 << 18, ..client_config() };
        let (client, mut subscription) =
            subscribe(&sim, receiving_on(&device(1 << 20), config), Request::latest(topic("big"))).await;
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

/// Goal: a device that fails ends the subscription whose version it did not receive, with an error that names the
/// device. The server and the session's other subscriptions are not affected.
/// Method: one copy fails; another subscription of the same session receives versions.
#[test]
fn a_failed_copy_ends_only_its_subscription() {
    simulate(9, async |sim| {
        let server = sim.server(server_config());
        let (mut one, mut other) =
            (server.publisher(topic("one")).unwrap(), server.publisher(topic("other")).unwrap());
        let (engine, device) = controlled(u64::MAX, 16);
        let config = receiving_on(&device, client_config());
        let (client, mut failing) = subscribe(&sim, config, Request::latest(topic("one"))).await;
        let mut unaffected = client.subscribe(&topic("other")).await.unwrap();
        client.list().await.unwrap();
        engine.behave(Behaviour::FailingOnce);
        publish(&server, &mut one, 1, &[noise("a", BYTES)]).await;
        let error = failing.next().await.unwrap_err();
        let SubscriptionError::Device { id, device: device_name, detail, is_final: true } = &error else {
            panic!("{error}")
        };
        assert_eq!((id.topic.as_str(), &**device_name), ("one", "test"));
        assert!(error.is_final() && detail.contains("engine has stopped"), "{error}");
        for version in 1..=3 {
            publish(&server, &mut other, version, &[noise("a", BYTES)]).await;
            tensors::check(&unaffected.next().await.unwrap());
        }
        eventually("all three versions are committed", || server.stats().committed == 3).await;
        assert_eq!(server.stats().sessions, 1);
        eventually("memory is free", || engine.in_use_bytes() <= 2 * BYTES).await;
        eventually("slots are free", || device.slots().available() == 16).await;
    });
}

/// Goal: a device that hangs costs a version, not the subscription: the user gets an error, and later versions are
/// received. The old copies never write to a later version.
/// Method: hold the copies of the first version; let those of the second pass, and after them the old ones.
#[test]
fn hanging_copies_cost_only_a_version() {
    for every in [false, true] {
        simulate(10, async |sim| {
            let specs = [noise("a", BYTES)];
            let server = sim.server(server_config());
            let mut publisher = server.publisher_with(topic("t"), None, retaining(4)).unwrap();
            let (engine, device) = controlled(u64::MAX, 16);
            let request = if every { Request::every(topic("t")) } else { Request::latest(topic("t")) };
            let config = receiving_on(&device, client_config());
            let (_client, mut subscription) = subscribe(&sim, config, request).await;
            engine.behave(Behaviour::Held);
            let began = sim.elapsed();
            publish(&server, &mut publisher, 1, &specs).await;
            let error = subscription.next().await.unwrap_err();
            let SubscriptionError::Device { id, is_final: false, .. } = &error else { panic!("{error}") };
            assert!(
                id.version == Version(1) && !error.is_final() && sim.elapsed() - began < HANG_DURATION_MAX
            );
            assert!(error.to_string().contains("within 25s"), "{error}");
            let stuck = engine.held();
            assert!(stuck > 0 && engine.in_use_bytes() == BYTES, "{stuck} copies keep the version's memory");

            publish(&server, &mut publisher, 2, &specs).await;
            let (snapshot, ()) = tokio::join!(next_after_gaps(&mut subscription), async {
                while copies_begin(&engine).await || engine.held() > stuck {
                    engine.release_newest();
                }
            });
            assert_eq!(snapshot.id().version, Version(2));
            engine.release_all();
            tensors::check(&snapshot);
            sleep(OUTAGE_DURATION).await;
            assert_eq!(engine.in_use_bytes(), BYTES, "only the user's version has memory");
        });
    }
}

/// The next version, after any reported gaps.
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
/// Method: hold each copy until another chunk has been received; count the copies that overlap.
#[test]
fn copies_overlap_with_reception() {
    simulate(11, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = server.publisher(topic("t")).unwrap();
        let (engine, device) = controlled(u64::MAX, 16);
        let config = receiving_on(&device, client_config());
        let (client, mut subscription) = subscribe(&sim, config, Request::latest(topic("t"))).await;
        engine.behave(Behaviour::Held);
        let (snapshot, ()) = tokio::join!(subscription.next(), async {
            publish(&server, &mut publisher, 1, &[noise("a", BYTES)]).await;
            let chunks = BYTES / u64::from(CHUNK_BYTES);
            while engine.copies_in() < chunks {
                let begun = engine.copies_in();
                eventually("another chunk arrives during a copy", || engine.copies_in() > begun + 1).await;
                while engine.held() > 1 {
                    engine.release(1);
                }
            }
            engine.release_all();
        });
        tensors::check(&snapshot.unwrap());
        let chunks = BYTES / u64::from(CHUNK_BYTES);
        let stages = client.stages();
        assert_eq!(stages.begun(Stage::Write), chunks);
        // The write of a chunk begins when the chunk has been received: here while another chunk is being copied.
        assert!(stages.overlaps(Stage::Write, Stage::Write) > chunks / 2, "{stages:?}");
    });
}
