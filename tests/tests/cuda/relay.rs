//! The whole way, on the network of this machine: a tensor on a producer's device, lent to a server; a connection; a
//! client that receives onto a device of its own. What the sweep does, and what is counted and failed below.

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
    calls::{Block, Current, call, stream},
    journey::{CHUNK, Failure, LEN, come_home, impatient, nothing_is_left, pattern},
    machine,
};

/// How a tensor is called.
const NAME: &str = "tensor";

/// After this long, a version has come, as a rule. If it comes later, that is as good.
const SOON: Duration = Duration::from_millis(250);
const PATIENCE: Duration = Duration::from_secs(5);

/// Neither of two versions came, and nobody was told why.
#[derive(Debug)]
pub(crate) struct NothingCame;

impl std::error::Error for NothingCame {}

impl std::fmt::Display for NothingCame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("neither of two versions came.")
    }
}

/// A server and a client with a device each.
struct Relay {
    producer: Device,
    server: Server,
    publisher: Publisher,
    subscription: Subscription,
    client: Client,
}

/// A device of the machine, with slots of a chunk each.
fn device(ordinal: usize, slots: usize, engines: &mut Vec<Arc<CudaEngine>>) -> Result<Device, Failure> {
    let engine = CudaEngine::open(ordinal, impatient())?;
    engines.push(engine.clone());
    Ok(Device::new(engine, Capacity { slots, slot_bytes: CHUNK })?)
}

impl Relay {
    /// Connects devices 0 and 1. Chunks are as long as slots.
    async fn connect(engines: &mut Vec<Arc<CudaEngine>>) -> Result<Self, Failure> {
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

    /// Publishes a tensor from where it is.
    async fn publish(&mut self, buffer: DeviceBuffer) -> Result<Publication, Failure> {
        let tensors = vec![(noise(NAME, buffer.len_bytes()), buffer)];
        let borrowed = Borrowed::from_device(&self.server.staging(), tensors, Vec::new())?;
        Ok(self.publisher.publish(borrowed, Vec::new()).await?)
    }

    /// Ends both sides.
    async fn close(self) {
        let Self { server, publisher, subscription, client, .. } = self;
        drop((publisher, subscription));
        client.close().await;
        server.shutdown(Duration::from_millis(500)).await;
    }
}

/// Memory of a device with these bytes.
async fn upload(device: &Device, bytes: &[u8]) -> Result<DeviceBuffer, Failure> {
    let buffer = device.allocate(bytes.len())?;
    let sink = buffer.sink();
    for (number, chunk) in bytes.chunks(CHUNK).enumerate() {
        let start = (number * CHUNK) as u64;
        let mut target = sink.open(start..start + chunk.len() as u64).await?;
        target.copy_from_slice(chunk);
        sink.write(target).await?;
    }
    Ok(buffer)
}

/// The bytes of a snapshot's tensor, off its device.
async fn bytes_of(snapshot: &Snapshot) -> Result<Vec<u8>, Failure> {
    assert!(snapshot.is_on_device());
    let host = snapshot.to_host().await?;
    Ok(host.tensor(NAME).expect("the tensor was published").to_vec())
}

/// One tensor, all the way. Gives what came out, and puts the engines into `engines`, for when something fails.
pub(crate) async fn relay_a_tensor(engines: &mut Vec<Arc<CudaEngine>>) -> Result<Vec<u8>, Failure> {
    let mut relay = Relay::connect(engines).await?;
    let received = relay.one_version().await;
    relay.close().await;
    received
}

impl Relay {
    /// A version that its server cannot read is given up, and its subscriber gets the next one: so a second is tried.
    async fn one_version(&mut self) -> Result<Vec<u8>, Failure> {
        for wait in [SOON, PATIENCE] {
            let buffer = upload(&self.producer, &pattern(LEN)).await?;
            let publication = self.publish(buffer).await?;
            let Ok(snapshot) = timeout(wait, self.subscription.next()).await else { continue };
            let bytes = bytes_of(&snapshot?).await?;
            publication.withdraw();
            assert!(publication.released(PATIENCE).await, "the producer gets its memory back");
            return Ok(bytes);
        }
        Err(NothingCame.into())
    }

    /// Waits for the next version, as any caller would: not for ever.
    async fn next(&mut self) -> Result<Snapshot, Failure> {
        Ok(timeout(PATIENCE, self.subscription.next()).await.expect("something comes")?)
    }
}

/// Ends both sides, and sees that nothing is left of them.
async fn clean_up(fake: &FakeCuda, relay: Relay, engines: Vec<Arc<CudaEngine>>) {
    relay.close().await;
    for engine in &engines {
        come_home(fake, engine).await;
    }
    drop(engines);
    nothing_is_left(fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

/// Goal: chunk k+1 is copied off its device while chunk k is sent, received, and copied to the other device.
/// Method: let one chunk off the device, and hold the next there until the first has landed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_chunk_leaves_its_device_while_one_is_under_way() {
    let fake = machine();
    let mut engines = Vec::new();
    let mut relay = Relay::connect(&mut engines).await.unwrap();
    let buffer = upload(&relay.producer, &pattern(LEN)).await.unwrap();
    let gate = fake.hold(0, Direction::DeviceToHost);
    let publication = relay.publish(buffer).await.unwrap();
    for landed in 1..4 {
        gate.until_waiting(1);
        gate.pass(1);
        fake.until("a chunk has landed", |fake| fake.engine(1, Direction::HostToDevice).ended == landed);
        fake.until("the next is in flight", |fake| fake.engine(0, Direction::DeviceToHost).in_flight >= 1);
        assert_eq!(fake.engine(0, Direction::DeviceToHost).ended, landed, "no more were let off");
    }
    drop(gate);
    let snapshot = relay.next().await.unwrap();
    assert!(bytes_of(&snapshot).await.unwrap() == pattern(LEN));
    drop((publication, snapshot));
    clean_up(&fake, relay, engines).await;
}

/// Goal: a chunk's copy to its device keeps nobody from receiving the next ones.
/// Method: hold all copies to the device, and count what leaves the other one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_are_received_while_others_land() {
    let fake = machine();
    let mut engines = Vec::new();
    let mut relay = Relay::connect(&mut engines).await.unwrap();
    let buffer = upload(&relay.producer, &pattern(LEN)).await.unwrap();
    let gate = fake.hold(1, Direction::HostToDevice);
    let publication = relay.publish(buffer).await.unwrap();
    // Four of six, for all of which the receiver gave credit.
    gate.until_waiting(4);
    assert_eq!(fake.engine(1, Direction::HostToDevice).ended, 0);
    let stages = relay.client.stages();
    assert!(stages.begun_beside(Stage::Write, Stage::Write) >= 3, "{stages:?}");
    drop(gate);
    let snapshot = relay.next().await.unwrap();
    assert!(bytes_of(&snapshot).await.unwrap() == pattern(LEN));
    drop((publication, snapshot));
    clean_up(&fake, relay, engines).await;
}

/// Goal: what a producer's stream writes before it publishes is what arrives, though nobody waits for the stream.
/// Method: block the stream in front of a write, publish behind it, and see that nothing is read until it goes on.
#[tokio::test]
async fn a_version_is_read_when_its_producers_stream_has_written_it() {
    let fake = machine();
    let mut engines = Vec::new();
    let mut relay = Relay::connect(&mut engines).await.unwrap();
    let old = upload(&relay.producer, &pattern(CHUNK)).await.unwrap();
    let memory = old.memory::<CudaMemory>().expect("the device is one of CUDA");
    let current = Current::new(0);
    let stream = stream();
    let block = Block::in_stream(stream);
    call!(cuMemsetD8Async(memory.address(), 0x77, CHUNK, stream)).unwrap();
    // SAFETY: the stream lives until the end of this test.
    let handle = unsafe { StreamHandle::from_raw(stream.cast(), ()) }.unwrap();
    let fence = engines[0].fence(handle).unwrap();
    // SAFETY: the owner is the memory itself, and what writes to it is behind the fence.
    let lent = unsafe { engines[0].lend(memory.address(), CHUNK, memory.clone(), Some(fence)) };
    let buffer = relay.producer.wrap::<CudaEngine>(lent).expect("the engine is this device's");
    drop((old, memory));

    let publication = relay.publish(buffer).await.unwrap();
    let early = timeout(Duration::from_millis(100), relay.subscription.next()).await;
    assert!(early.is_err(), "nothing is there to be read");
    assert_eq!(fake.engine(0, Direction::DeviceToHost).in_flight, 0);
    block.lift();
    let snapshot = relay.next().await.unwrap();
    assert!(bytes_of(&snapshot).await.unwrap().iter().all(|byte| *byte == 0x77));

    call!(cuStreamDestroy_v2(stream)).unwrap();
    drop((current, publication, snapshot));
    clean_up(&fake, relay, engines).await;
}

/// Goal: a consumer whose device fails in the middle of a version hears of it, and the producer's side goes on.
/// Method: hold a copy to the device, spoil its context, and let somebody else receive the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_fails_while_a_version_lands_is_an_error_for_its_user() {
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
    assert!(publication.released(PATIENCE).await);
    drop(publication);
    relay.close().await;
    come_home(&fake, &engines[0]).await;
    assert_eq!(fake.violations(), [""; 0]);
}

/// Goal: a producer whose device fails hears of it, and no subscriber gets what is torn: it waits for the next version.
/// Method: let one chunk off the device, and spoil its context under the next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_fails_while_a_version_is_read_tears_nothing() {
    let fake = machine();
    let mut engines = Vec::new();
    let mut relay = Relay::connect(&mut engines).await.unwrap();
    let buffer = upload(&relay.producer, &pattern(LEN)).await.unwrap();
    let gate = fake.hold(0, Direction::DeviceToHost);
    let publication = relay.publish(buffer).await.unwrap();
    gate.until_waiting(1);
    gate.pass(1);
    fake.until("a chunk has landed", |fake| fake.engine(1, Direction::HostToDevice).ended == 1);
    fake.destroy_context(0);
    drop(gate);
    let nothing = timeout(Duration::from_millis(300), relay.subscription.next()).await;
    assert!(nothing.is_err(), "{nothing:?}");
    let failure = upload(&relay.producer, &pattern(LEN)).await.unwrap_err();
    assert!(failure.to_string().contains("cuda:0"), "{failure}");
    drop(publication);
    relay.close().await;
    come_home(&fake, &engines[1]).await;
    assert_eq!(fake.violations(), [""; 0]);
}
