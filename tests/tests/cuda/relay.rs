//! The whole path over the loopback network: a server serves a tensor on a producer's device, and a client receives it
//! onto its own device. [`relay_a_tensor`] is a transfer for the sweep; the tests of this module count copies and
//! inject failures.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tensor_relay_client::{Client, Snapshot, Stage, Subscription};
use tensor_relay_device::{
    Capacity, Device, DeviceBuffer,
    cuda::{CudaEngine, CudaMemory, StreamHandle},
};
use tensor_relay_protocol::{Ticket, Topic};
use tensor_relay_server::{Access, Borrowed, Identity, Listener, Publication, Publisher, Server, Tuning};
use tensor_relay_tests::{
    fake_cuda::{Direction, FakeCuda},
    tensors::noise,
};
use tokio::time::timeout;

use crate::{
    calls::{Block, Current, call, create_stream},
    endpoint::{CHUNK, Failure, LEN, pattern, short_timeouts, wait_for_no_objects, wait_until_freed},
    machine,
};

/// The name of the tensor.
pub(crate) const NAME: &str = "tensor";

/// The time within which a version usually arrives.
const USUAL_DURATION: Duration = Duration::from_millis(250);
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// Neither of two versions arrived, and no error was reported.
#[derive(Debug)]
pub(crate) struct NothingReceived;

impl std::error::Error for NothingReceived {}

impl std::fmt::Display for NothingReceived {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("neither of two versions arrived")
    }
}

/// A server and a client in this process, each with a device.
pub(crate) struct Relay {
    pub(crate) producer: Device,
    pub(crate) server: Server,
    pub(crate) publisher: Publisher,
    subscription: Subscription,
    client: Client,
}

/// Opens a device of the machine, with slots of one chunk.
fn device(ordinal: usize, slots: usize, engines: &mut Vec<Arc<CudaEngine>>) -> Result<Device, Failure> {
    let engine = CudaEngine::open(ordinal, short_timeouts())?;
    engines.push(engine.clone());
    Ok(Device::new(engine, Capacity { slots, slot_bytes: CHUNK })?)
}

impl Relay {
    /// Connects devices 0 and 1. Chunks are as long as slots.
    pub(crate) async fn connect(engines: &mut Vec<Arc<CudaEngine>>) -> Result<Self, Failure> {
        let (producer, consumer) = (device(0, 8, engines)?, device(1, 8, engines)?);
        let identity = Identity::ephemeral()?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let listener = Listener::bind(address, &identity, Tuning::default())?;
        let config = tensor_relay_server::Config { chunk_bytes: CHUNK as u32, ..Default::default() };
        let server = Server::start(listener, Access::open(), config);
        let topic = Topic::new("tensors")?;
        let publisher = server.publisher(topic.clone())?;
        let addresses = vec![server.local_address().to_string()];
        let ticket = Ticket::new(addresses, vec![identity.fingerprint().0], None)?;
        let config = tensor_relay_client::Config {
            device: Some(consumer),
            stall_timeout: Duration::from_secs(2),
            reconnect_timeout: Duration::ZERO,
            ..Default::default()
        };
        let client = Client::connect(&ticket, config).await?;
        let subscription = client.subscribe(&topic).await?;
        Ok(Self { producer, server, publisher, subscription, client })
    }

    /// Publishes a tensor without copying it.
    async fn publish(&mut self, buffer: DeviceBuffer) -> Result<Publication, Failure> {
        let tensors = vec![(noise(NAME, buffer.len_bytes()), buffer)];
        let borrowed = Borrowed::from_device(&self.server.staging(), tensors, Vec::new())?;
        Ok(self.publisher.publish(borrowed, Vec::new()).await?)
    }

    /// Closes the client and the server.
    pub(crate) async fn close(self) {
        let Self { server, publisher, subscription, client, .. } = self;
        drop((publisher, subscription));
        client.close().await;
        server.shutdown(Duration::from_millis(500)).await;
    }
}

/// Allocates memory of a device and fills it with bytes.
pub(crate) async fn upload(device: &Device, bytes: &[u8]) -> Result<DeviceBuffer, Failure> {
    let buffer = device.allocate(bytes.len())?;
    let sink = buffer.sink();
    for (index, chunk) in bytes.chunks(CHUNK).enumerate() {
        let start = (index * CHUNK) as u64;
        let mut target = sink.open(start..start + chunk.len() as u64).await?;
        target.copy_from_slice(chunk);
        sink.write(target).await?;
    }
    Ok(buffer)
}

/// The bytes of a snapshot's tensor, copied from its device.
async fn bytes_of(snapshot: &Snapshot) -> Result<Vec<u8>, Failure> {
    assert!(snapshot.is_on_device());
    let host = snapshot.to_host().await?;
    Ok(host.tensor(NAME).expect("the tensor was published").to_vec())
}

/// Relays one tensor and returns the bytes received. The engines are added to `engines`, so that they survive a
/// failure.
pub(crate) async fn relay_a_tensor(engines: &mut Vec<Arc<CudaEngine>>) -> Result<Vec<u8>, Failure> {
    let mut relay = Relay::connect(engines).await?;
    let received = relay.publish_and_receive().await;
    relay.close().await;
    received
}

impl Relay {
    /// Publishes a version and returns its bytes as received. Publishes a second version if the first does not arrive,
    /// since a server abandons a version that it cannot read.
    async fn publish_and_receive(&mut self) -> Result<Vec<u8>, Failure> {
        for wait in [USUAL_DURATION, TIMEOUT] {
            let buffer = upload(&self.producer, &pattern(LEN)).await?;
            let publication = self.publish(buffer).await?;
            let Ok(snapshot) = timeout(wait, self.subscription.next()).await else { continue };
            let bytes = bytes_of(&snapshot?).await?;
            publication.withdraw();
            assert!(publication.released(TIMEOUT).await, "the memory is returned to the producer");
            return Ok(bytes);
        }
        Err(NothingReceived.into())
    }

    /// Waits for the next version, with a deadline.
    pub(crate) async fn next(&mut self) -> Result<Snapshot, Failure> {
        Ok(timeout(TIMEOUT, self.subscription.next()).await.expect("a result arrives")?)
    }
}

/// Closes the client and the server, and checks that no driver objects remain.
pub(crate) async fn clean_up(fake: &FakeCuda, relay: Relay, engines: Vec<Arc<CudaEngine>>) {
    relay.close().await;
    for engine in &engines {
        wait_until_freed(fake, engine).await;
    }
    drop(engines);
    wait_for_no_objects(fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

/// Goal: a chunk reaches the other device although the copy of the next one from the producer's device has not ended.
/// Method: let one chunk's copy from the device pass, and hold the next one until the first chunk is on the other
/// device.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_arrives_while_the_next_ones_copy_is_held() {
    let fake = machine();
    let mut engines = Vec::new();
    let mut relay = Relay::connect(&mut engines).await.unwrap();
    let buffer = upload(&relay.producer, &pattern(LEN)).await.unwrap();
    let gate = fake.hold(0, Direction::DeviceToHost);
    let publication = relay.publish(buffer).await.unwrap();
    for count in 1..4 {
        gate.until_waiting(1);
        gate.pass(1);
        fake.wait_until("a chunk is on the other device", |fake| {
            fake.engine(1, Direction::HostToDevice).ended == count
        });
        fake.wait_until("the next chunk's copy is in flight", |fake| {
            fake.engine(0, Direction::DeviceToHost).in_flight >= 1
        });
        assert_eq!(fake.engine(0, Direction::DeviceToHost).ended, count, "the gate holds the next copy");
    }
    drop(gate);
    let snapshot = relay.next().await.unwrap();
    assert!(bytes_of(&snapshot).await.unwrap() == pattern(LEN));
    drop((publication, snapshot));
    clean_up(&fake, relay, engines).await;
}

/// Goal: a chunk's copy to the consumer's device does not block the reception of later chunks. Method: hold all copies
/// to that device, and count the waiting ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_are_received_while_others_are_copied_to_the_device() {
    let fake = machine();
    let mut engines = Vec::new();
    let mut relay = Relay::connect(&mut engines).await.unwrap();
    let buffer = upload(&relay.producer, &pattern(LEN)).await.unwrap();
    let gate = fake.hold(1, Direction::HostToDevice);
    let publication = relay.publish(buffer).await.unwrap();
    // The receiver has granted credit for all six chunks.
    gate.until_waiting(4);
    assert_eq!(fake.engine(1, Direction::HostToDevice).ended, 0);
    let stages = relay.client.stages();
    assert!(stages.overlaps(Stage::Write, Stage::Write) >= 3, "{stages:?}");
    drop(gate);
    let snapshot = relay.next().await.unwrap();
    assert!(bytes_of(&snapshot).await.unwrap() == pattern(LEN));
    drop((publication, snapshot));
    clean_up(&fake, relay, engines).await;
}

/// Goal: a version contains the bytes that the producer's stream writes, although publishing does not wait for the
/// stream. Method: block the stream before a write, publish after it, and check that nothing is read until the
/// stream continues.
#[tokio::test]
async fn reading_waits_for_the_producers_stream() {
    let fake = machine();
    let mut engines = Vec::new();
    let mut relay = Relay::connect(&mut engines).await.unwrap();
    let uploaded = upload(&relay.producer, &pattern(CHUNK)).await.unwrap();
    let memory = uploaded.memory::<CudaMemory>().expect("the device is a CUDA device");
    let current = Current::new(0);
    let stream = create_stream();
    let block = Block::in_stream(stream);
    call!(cuMemsetD8Async(memory.address(), 0x77, CHUNK, stream)).unwrap();
    // SAFETY: the stream lives until the end of this test.
    let handle = unsafe { StreamHandle::from_raw(stream.cast(), ()) }.unwrap();
    let fence = engines[0].fence(handle).unwrap();
    // SAFETY: the owner is the memory itself, and the work that writes to it is before the fence.
    let lent = unsafe { engines[0].lend(memory.address(), CHUNK, memory.clone(), Some(fence)) };
    let buffer = relay.producer.wrap::<CudaEngine>(lent).expect("the engine is this device's");
    drop((uploaded, memory));

    let publication = relay.publish(buffer).await.unwrap();
    let early = timeout(Duration::from_millis(100), relay.subscription.next()).await;
    assert!(early.is_err(), "the version does not arrive before the stream has written it");
    assert_eq!(fake.engine(0, Direction::DeviceToHost).in_flight, 0);
    block.lift();
    let snapshot = relay.next().await.unwrap();
    assert!(bytes_of(&snapshot).await.unwrap().iter().all(|byte| *byte == 0x77));

    call!(cuStreamDestroy_v2(stream)).unwrap();
    drop((current, publication, snapshot));
    clean_up(&fake, relay, engines).await;
}

/// Goal: a consumer whose device fails during a version gets an error that names the device; no chunk is read again,
/// and the producer gets its memory back. Method: hold copies to the device, corrupt the device's context, and withdraw
/// the version.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumers_device_failure_is_reported() {
    let fake = machine();
    let mut engines = Vec::new();
    let mut relay = Relay::connect(&mut engines).await.unwrap();
    let buffer = upload(&relay.producer, &pattern(LEN)).await.unwrap();
    let gate = fake.hold(1, Direction::HostToDevice);
    let publication = relay.publish(buffer).await.unwrap();
    gate.until_waiting(2);
    fake.fail_device(1, 700);
    drop(gate);
    let failure = relay.next().await.unwrap_err();
    assert!(failure.to_string().contains("cuda:1"), "{failure}");
    assert_eq!(relay.server.stats().encoder.source_rereads, 0);
    publication.withdraw();
    assert!(publication.released(TIMEOUT).await);
    drop(publication);
    relay.close().await;
    wait_until_freed(&fake, &engines[0]).await;
    assert_eq!(fake.violations(), [""; 0]);
}

/// Goal: a producer whose device fails gets an error from its next copy, and a subscriber gets neither torn data nor an
/// error, but waits for the next version.
/// Method: let one chunk's copy from the device pass, and destroy the device's context during the next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_producers_device_failure_delivers_nothing_torn() {
    let fake = machine();
    let mut engines = Vec::new();
    let mut relay = Relay::connect(&mut engines).await.unwrap();
    let buffer = upload(&relay.producer, &pattern(LEN)).await.unwrap();
    let gate = fake.hold(0, Direction::DeviceToHost);
    let publication = relay.publish(buffer).await.unwrap();
    gate.until_waiting(1);
    gate.pass(1);
    fake.wait_until("a chunk is on the other device", |fake| {
        fake.engine(1, Direction::HostToDevice).ended == 1
    });
    fake.destroy_context(0);
    drop(gate);
    let nothing = timeout(Duration::from_millis(300), relay.subscription.next()).await;
    assert!(nothing.is_err(), "{nothing:?}");
    let failure = upload(&relay.producer, &pattern(LEN)).await.unwrap_err();
    assert!(failure.to_string().contains("cuda:0"), "{failure}");
    drop(publication);
    relay.close().await;
    wait_until_freed(&fake, &engines[1]).await;
    assert_eq!(fake.violations(), [""; 0]);
}
