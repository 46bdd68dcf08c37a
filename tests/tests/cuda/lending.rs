//! Versions on a GPU that a server lends to processes of its host (PROTOCOL.md §3.19).

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tempfile::TempDir;
use tensor_relay_client::{
    Buffers, Client, Glob, Indices, NotLent, Request, Sharing, Slice, Snapshot, Subscription, TensorBox,
    TensorName, Ticket,
};
use tensor_relay_device::{
    Capacity, Device,
    cuda::{CudaEngine, CudaOptions},
};
use tensor_relay_protocol::{Dtype, Shape, TensorSpec, Topic};
use tensor_relay_server::{Access, Borrowed, Publication, Publishable, Publisher, Server};
use tensor_relay_tests::{
    fake_cuda::{Direction, Effect, Fault, Turn},
    skip,
};
use tensor_relay_transport::{Listener, Tuning, unix::SocketListener};
use tokio::time::timeout;

use crate::{
    endpoint::{CHUNK, LEN, pattern, short_timeouts, wait_for_no_objects, wait_until_freed},
    machine,
    neighbour::Neighbour,
    relay::{TIMEOUT, upload},
};

/// The names of the tensors: a matrix of rows of [`ROW`] bytes, and a vector.
const MATRIX: &str = "matrix";
const VECTOR: &str = "vector";
const ROW: usize = 512;
const ROWS: usize = 2 * LEN / ROW;

/// A device of this process.
fn device(ordinal: usize, options: CudaOptions, engines: &mut Vec<Arc<CudaEngine>>) -> Device {
    let engine = CudaEngine::open(ordinal, options).unwrap();
    engines.push(Arc::clone(&engine));
    Device::new(engine, Capacity { slots: 8, slot_bytes: CHUNK }).unwrap()
}

/// The bytes of both tensors of a version.
fn content(version: u64) -> [Vec<u8>; 2] {
    let bytes = |len: usize| pattern(len + version as usize)[version as usize..].to_vec();
    [bytes(ROWS * ROW), bytes(LEN)]
}

fn specs() -> [TensorSpec; 2] {
    let spec = |name: &str, shape: &[u64]| {
        TensorSpec::new(TensorName::new(name).unwrap(), Dtype::U8, Shape::new(shape).unwrap())
    };
    [spec(MATRIX, &[ROWS as u64, ROW as u64]), spec(VECTOR, &[LEN as u64])]
}

pub(crate) fn topic() -> Topic {
    Topic::new("t").unwrap()
}

/// A server on a Unix socket, whose versions lie on a device.
pub(crate) struct Host {
    device: Device,
    server: Server,
    publisher: Publisher,
}

impl Host {
    pub(crate) fn new(socket: &Path, device: Device) -> Self {
        Self::sharing(socket, device, false)
    }

    /// A server that lends memory which takers have in common, if `share_gpu`.
    fn sharing(socket: &Path, device: Device, share_gpu: bool) -> Self {
        let socket = SocketListener::bind(socket, SocketListener::PRIVATE).unwrap();
        let listener = Listener::on_socket(socket, Tuning::default());
        let config =
            tensor_relay_server::Config { chunk_bytes: CHUNK as u32, share_gpu, ..Default::default() };
        let server = Server::start(listener, Access::open(), config);
        let publisher = server.publisher(topic()).unwrap();
        Self { device, server, publisher }
    }

    /// Publishes a version that is staged on the device.
    pub(crate) async fn publish(&mut self, version: u64) -> Publication {
        let tensors = self.tensors(version).await;
        let staging = self.server.staging();
        let staged = Publishable::from_device(&staging, tensors, vec![], Some(&self.device))
            .await
            .unwrap();
        self.publisher.publish(staged, vec![]).await.unwrap()
    }

    async fn tensors(&self, version: u64) -> Vec<(TensorSpec, tensor_relay_device::DeviceBuffer)> {
        let mut tensors = vec![];
        for (spec, bytes) in specs().into_iter().zip(content(version)) {
            tensors.push((spec, upload(&self.device, &bytes).await.unwrap()));
        }
        tensors
    }

    fn lent_bytes(&self) -> u64 {
        self.server.stats().lent_bytes
    }

    async fn wait_until_released(&self) {
        eventually(|| self.lent_bytes() == 0).await;
    }
}

async fn eventually(mut condition: impl FnMut() -> bool) {
    for _ in 0..500 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not within five seconds");
}

/// A client on the socket, which wants versions on `device`.
pub(crate) async fn connect(socket: &Path, device: Option<Device>) -> Client {
    connect_sharing(socket, device, false).await
}

async fn connect_sharing(socket: &Path, device: Option<Device>, share_gpu: bool) -> Client {
    let ticket: Ticket = format!("unix:{}", socket.display()).parse().unwrap();
    let config = tensor_relay_client::Config {
        device,
        share_gpu,
        stall_timeout: Duration::from_secs(2),
        reconnect_timeout: Duration::ZERO,
        ..Default::default()
    };
    Client::connect(&ticket, config).await.unwrap()
}

async fn next(subscription: &mut Subscription) -> Snapshot {
    timeout(TIMEOUT, subscription.next()).await.expect("a result arrives").unwrap()
}

/// Checks that a snapshot has the tensors of its version.
pub(crate) async fn check(snapshot: &Snapshot) {
    let host = snapshot.to_host().await.unwrap();
    for (name, expected) in [MATRIX, VECTOR].into_iter().zip(content(snapshot.id().version.0)) {
        assert!(host.tensor(name).unwrap().to_vec() == expected, "{name}");
    }
}

/// A folder for sockets, the fake driver, and the engines of this process.
struct Machine {
    fake: Turn,
    folder: TempDir,
    engines: Vec<Arc<CudaEngine>>,
}

impl Machine {
    fn new() -> Self {
        Self { fake: machine(), folder: TempDir::new().unwrap(), engines: vec![] }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("host.sock")
    }

    fn device(&mut self, ordinal: usize) -> Device {
        device(ordinal, short_timeouts(), &mut self.engines)
    }

    /// Starts a server on device 0.
    fn host(&mut self) -> Host {
        let device = self.device(0);
        Host::new(&self.socket(), device)
    }

    /// Checks that nothing is left: no memory, and no use of it against the rules.
    async fn end(self, host: Option<Host>) {
        if let Some(Host { device, server, publisher }) = host {
            drop((device, publisher));
            server.shutdown(Duration::from_millis(500)).await;
        }
        for engine in &self.engines {
            wait_until_freed(&self.fake, engine).await;
            assert_eq!(engine.stats().leaked_bytes, 0);
        }
        drop(self.engines);
        wait_for_no_objects(&self.fake, 0).await;
        assert_eq!(self.fake.violations(), [""; 0]);
    }
}

/// Goal: a taker on the server's GPU gets a version by copies within the GPU, whole or in part: no byte goes over the
/// bus or the socket, and the server's copy is freed. Method: takers of all, of one tensor, and of columns; count
/// copies and bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_is_copied_within_the_gpu() {
    let mut machine = Machine::new();
    let (mut host, own) = (machine.host(), machine.device(0));
    let client = connect(&machine.socket(), Some(own.clone())).await;
    let half = |dimension| Slice { dimension, indices: Indices::Part { part: 1, parts: 2 } };
    let columns = TensorBox { tensors: Glob::new(MATRIX).unwrap(), slices: vec![half(1)] };
    let all = Request::latest(topic());
    let vector = Request::latest(topic()).select([Glob::new(VECTOR).unwrap()]);
    let boxed = Request::latest(topic()).select([Glob::new(MATRIX).unwrap()]).boxes([columns]);
    let mut subscriptions = vec![];
    for request in [all, vector, boxed] {
        subscriptions.push(client.subscribe_to(request).await.unwrap());
    }
    for version in 1..=3 {
        let publication = host.publish(version).await;
        let out = machine.fake.engine(0, Direction::DeviceToHost).ended;
        let mut snapshots = vec![];
        for subscription in &mut subscriptions {
            let snapshot = next(subscription).await;
            let receipt = snapshot.receipt();
            assert_eq!(
                (receipt.sharing, receipt.wire_bytes, receipt.received_bytes),
                (Sharing::CopiedOnGpu, 0, 0)
            );
            assert!(snapshot.is_on_device());
            snapshots.push(snapshot);
        }
        assert_eq!(machine.fake.engine(0, Direction::DeviceToHost).ended, out, "nothing goes to the host");
        let [whole, vector, boxed] = <[Snapshot; 3]>::try_from(snapshots).unwrap();
        check(&whole).await;
        let [matrix_bytes, vector_bytes] = content(version);
        assert!(vector.to_host().await.unwrap().tensor(VECTOR).unwrap().to_vec() == vector_bytes);
        let columns: Vec<u8> = matrix_bytes.chunks(ROW).flat_map(|row| &row[ROW / 2..]).copied().collect();
        assert!(boxed.to_host().await.unwrap().tensor(MATRIX).unwrap().to_vec() == columns);
        host.wait_until_released().await;
        drop(publication);
    }
    drop((subscriptions, own));
    client.close().await;
    machine.end(Some(host)).await;
}

/// Goal: the bytes go to the user's own tensors on the GPU, of versions that the server staged, and of those that are
/// the publisher's memory, which is returned. Method: `next_into_device`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_is_copied_into_the_users_tensors() {
    let mut machine = Machine::new();
    let (mut host, own) = (machine.host(), machine.device(0));
    let client = connect(&machine.socket(), Some(own.clone())).await;
    let mut subscription = client.subscribe(&topic()).await.unwrap();
    for version in 1..=2 {
        let mut buffers = Buffers::new();
        for (name, bytes) in [MATRIX, VECTOR].into_iter().zip(content(version)) {
            buffers.insert(TensorName::new(name).unwrap(), own.allocate(bytes.len()).unwrap());
        }
        let tensors = host.tensors(version).await;
        let publish = async {
            client.list().await.unwrap(); // Answered after the session has the buffers.
            let borrowed = Borrowed::from_device(&host.server.staging(), tensors, vec![]).unwrap();
            host.publisher.publish(borrowed, vec![]).await.unwrap()
        };
        let receive = timeout(TIMEOUT, subscription.next_into_device(buffers));
        let (filled, publication) = tokio::join!(receive, publish);
        let filled = filled.expect("a result arrives").unwrap();
        assert_eq!(filled.version().receipt().sharing, Sharing::CopiedOnGpu);
        let mut received = vec![];
        for (name, buffer) in filled.into_buffers() {
            let source = buffer.source();
            let mut bytes = vec![];
            for start in (0..buffer.len_bytes()).step_by(CHUNK) {
                let end = buffer.len_bytes().min(start + CHUNK as u64);
                bytes.extend_from_slice(&source.read(start..end).await.unwrap());
            }
            received.push((name.as_str().to_owned(), bytes));
        }
        received.sort();
        assert!(received.into_iter().map(|(_, bytes)| bytes).eq(content(version)));
        publication.withdraw();
        assert!(publication.released(TIMEOUT).await, "the publisher gets its memory back");
    }
    host.wait_until_released().await;
    drop((subscription, own));
    client.close().await;
    machine.end(Some(host)).await;
}

/// Goal: with `share_gpu` at both ends, takers of the server's user have one copy of a version in common, without one
/// of their own; it is not the memory that others are served from, lives as long as a taker has it, and nothing is
/// copied twice. Where an end does not share, or a part is wanted, a taker copies. Method: two takers that share and
/// one that does not, of whole versions; one of a tensor; write into the common memory, and look at what later takers
/// receive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takers_of_one_user_share_gpu_memory() {
    let mut machine = Machine::new();
    let (device, own) = (machine.device(0), machine.device(0));
    let mut host = Host::sharing(&machine.socket(), device, true);
    let sharing = connect_sharing(&machine.socket(), Some(own.clone()), true).await;
    let copying = connect(&machine.socket(), Some(own.clone())).await;
    let mut publication = host.publish(1).await;
    let of_device = |machine: &Machine| machine.engines[1].stats().device_bytes;
    let before = of_device(&machine);
    let mut snapshots = vec![];
    for _ in 0..2 {
        let mut subscription = sharing.subscribe(&topic()).await.unwrap();
        let snapshot = next(&mut subscription).await;
        assert_eq!((snapshot.receipt().sharing, snapshot.receipt().wire_bytes), (Sharing::MappedOnGpu, 0));
        check(&snapshot).await;
        snapshots.push((snapshot, subscription));
    }
    assert_eq!(of_device(&machine), before, "takers have no memory of their own");
    let payload_bytes = (ROWS * ROW + LEN).next_multiple_of(256);
    assert_eq!(host.lent_bytes(), payload_bytes as u64, "one copy for both");

    // A taker that writes although it must not.
    let tensor = snapshots[0].0.device_tensor(VECTOR).unwrap();
    let sink = tensor.buffer().sink();
    let mut target = sink.open(tensor.range().start..tensor.range().start + 9).await.unwrap();
    target.fill(0xee);
    sink.write(target).await.unwrap();
    let vector = Request::latest(topic()).select([Glob::new(VECTOR).unwrap()]);
    let mut whole = copying.subscribe(&topic()).await.unwrap();
    let snapshot = next(&mut whole).await;
    assert_eq!(snapshot.receipt().sharing, Sharing::CopiedOnGpu);
    check(&snapshot).await;
    let mut part = sharing.subscribe_to(vector).await.unwrap();
    assert_eq!(next(&mut part).await.receipt().sharing, Sharing::CopiedOnGpu);

    drop((whole, part, snapshot));
    for version in 2..=4 {
        publication = host.publish(version).await;
        let snapshot = next(&mut snapshots[1].1).await;
        assert_eq!(snapshot.receipt().sharing, Sharing::MappedOnGpu);
        check(&snapshot).await;
    }
    assert!(host.lent_bytes() > 0, "the first version is still there");
    let kept = snapshots[0].0.to_host().await.unwrap().tensor(MATRIX).unwrap().to_vec();
    assert!(kept == content(1)[0]);
    drop((publication, tensor, sink, snapshots, own));
    sharing.close().await;
    copying.close().await;
    machine.end(Some(host)).await;
}

/// Goal: takers on other GPUs, and on none, get the memory of one copy in host memory, with the reason. Method: two
/// takers on device 1, and one without; count what is copied out of device 0.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_takers_share_one_copy_in_host_memory() {
    let mut machine = Machine::new();
    let (mut host, other) = (machine.host(), machine.device(1));
    let wanted = [Some(other.clone()), Some(other), None];
    let mut subscriptions = vec![];
    for device in wanted {
        let client = connect(&machine.socket(), device).await;
        subscriptions.push((client.subscribe(&topic()).await.unwrap(), client));
    }
    let publication = host.publish(1).await;
    let before = machine.fake.engine(0, Direction::DeviceToHost).ended_bytes;
    let mut snapshots = vec![];
    for (subscription, _) in &mut subscriptions {
        snapshots.push(next(subscription).await);
    }
    let copied = machine.fake.engine(0, Direction::DeviceToHost).ended_bytes - before;
    assert!((copied as usize) < ROWS * ROW + LEN + 4096, "{copied} bytes were copied out");
    let sharing: Vec<_> = snapshots.iter().map(|snapshot| snapshot.receipt().sharing).collect();
    let from_host = Sharing::CopiedFromHost(NotLent::OtherGpu);
    assert_eq!(sharing, [from_host, from_host, Sharing::Mapped]);
    for snapshot in &snapshots {
        check(snapshot).await;
    }
    drop((publication, snapshots));
    for (subscription, client) in subscriptions {
        drop(subscription);
        client.close().await;
    }
    host.wait_until_released().await;
    machine.end(Some(host)).await;
}

/// Goal: where the GPU cannot share, a version comes from host memory, and the receipt says why: the driver has neither
/// method, the copy fails, or the GPU is full. Method: a driver without them, a fault, and a small limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_gpu_cannot_share_comes_from_host_memory() {
    let mut machine = Machine::new();
    let limit = CudaOptions { memory_limit_bytes: Some(4 << 20), ..short_timeouts() };
    let (small, own) = (device(0, limit, &mut machine.engines), machine.device(0));
    let mut host = Host::new(&machine.socket(), small);
    let client = connect(&machine.socket(), Some(own.clone())).await;
    let mut subscription = client.subscribe(&topic()).await.unwrap();
    let no_memory = Sharing::CopiedFromHost(NotLent::NoGpuMemory);
    let full = Sharing::CopiedFromHost(NotLent::GpuFull);
    for (version, expected) in (1..).zip([no_memory, full, Sharing::CopiedOnGpu]) {
        machine.fake.set_shareable(version > 1, version > 1);
        let held = (version == 2).then(|| host.device.allocate(2 << 20).unwrap());
        let publication = host.publish(version).await;
        let snapshot = next(&mut subscription).await;
        assert_eq!(snapshot.receipt().sharing, expected, "{version}");
        check(&snapshot).await;
        drop((publication, snapshot, held));
    }
    drop((subscription, own));
    client.close().await;
    machine.end(Some(host)).await;
}

/// Goal: a server's copy that does not end in time holds nobody up: the version comes from host memory; its memory is
/// freed when the copy ends. Method: hold copies within the device until the engine reports them as late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_copy_is_not_waited_for() {
    let mut machine = Machine::new();
    let (mut host, own) = (machine.host(), machine.device(0));
    let client = connect(&machine.socket(), Some(own.clone())).await;
    let publication = host.publish(1).await;
    let gate = machine.fake.hold(0, Direction::DeviceToDevice);
    let mut subscription = client.subscribe(&topic()).await.unwrap();
    let snapshot = next(&mut subscription).await;
    assert_eq!(snapshot.receipt().sharing, Sharing::CopiedFromHost(NotLent::NoGpuMemory));
    check(&snapshot).await;
    drop(gate);
    drop((publication, snapshot, subscription, own));
    client.close().await;
    host.wait_until_released().await;
    machine.end(Some(host)).await;
}

/// Goal: a taker whose copy fails reports its device, and both ends release the memory. Method: a fault in the taker's
/// copy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_takers_failed_copy_is_an_error_of_its_device() {
    let mut machine = Machine::new();
    let (mut host, own) = (machine.host(), machine.device(0));
    let client = connect(&machine.socket(), Some(own.clone())).await;
    let publication = host.publish(1).await;
    // Refused with the server's copy of the version, and without: the taker's is the second, in one call.
    for call in ["cuMemcpyBatchAsync_v2", "cuMemcpyDtoDAsync_v2"] {
        machine.fake.fault(&Fault::from(call, 2, Effect::Fail(999)));
    }
    let mut subscription = client.subscribe(&topic()).await.unwrap();
    let failed = timeout(TIMEOUT, subscription.next())
        .await
        .expect("a result arrives")
        .unwrap_err();
    assert!(failed.to_string().contains("cuda:0"), "{failed}");
    machine.fake.clear_faults();
    drop((publication, subscription, own));
    client.close().await;
    host.wait_until_released().await;
    machine.end(Some(host)).await;
}

/// Goal: another process takes versions, by a descriptor and, where the driver has none, by a handle. In a namespace of
/// processes of its own it opens descriptors; a handle that it cannot open is declined, and from the next version on it
/// gets host memory. Method: this test's binary as the taker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_processes_take_versions_in_any_namespace() {
    for (in_namespace, as_descriptors, expected) in [
        (false, true, ["GPU memory, copied"; 2]),
        (false, false, ["GPU memory, copied"; 2]),
        (true, true, ["GPU memory, copied"; 2]),
        (
            true,
            false,
            ["chunks: the memory could not be mapped", "memory, copied, not on the GPU: the memory"],
        ),
    ] {
        let mut machine = Machine::new();
        machine.fake.set_shareable(true, as_descriptors);
        let mut host = machine.host();
        let taker = match in_namespace {
            false => Some(Neighbour::start(0, None)),
            true => Neighbour::start_in_namespace(),
        };
        let Some(mut taker) = taker else {
            skip("this process may not create a namespace of processes");
            return machine.end(Some(host)).await;
        };
        taker.take(&machine.socket());
        for (version, expected) in (1..).zip(expected) {
            let publication = host.publish(version).await;
            let sharing = taker.next().unwrap();
            assert!(sharing.starts_with(expected), "{in_namespace} {as_descriptors} {version}: {sharing}");
            drop(publication);
        }
        taker.end_taking();
        host.wait_until_released().await;
        let report = taker.end();
        assert_eq!(report.violations, [""; 0]);
        machine.end(Some(host)).await;
    }
}

/// Goal: a taker that is killed while it copies leaves nothing in the server, which goes on. Method: a process whose
/// copies within the device hang.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_taker_leaves_nothing() {
    let mut machine = Machine::new();
    let (mut host, own) = (machine.host(), machine.device(0));
    let mut taker = Neighbour::start_with_faults("@dtod:1:hang:on");
    taker.take(&machine.socket());
    let publication = host.publish(1).await;
    eventually(|| host.lent_bytes() > 0).await;
    taker.kill();
    host.wait_until_released().await;
    let client = connect(&machine.socket(), Some(own.clone())).await;
    let mut subscription = client.subscribe(&topic()).await.unwrap();
    check(&next(&mut subscription).await).await;
    drop((publication, subscription, own));
    client.close().await;
    host.wait_until_released().await;
    machine.end(Some(host)).await;
}

/// Goal: a taker whose server is killed while it copies gets an error and no wrong byte, and releases everything.
/// Method: a server in another process; hold the taker's copy, kill the server, and let the copy end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_harms_no_taker() {
    for as_descriptors in [true, false] {
        let mut machine = Machine::new();
        let mut server = Neighbour::start_shareable(as_descriptors);
        server.serve(&machine.socket());
        let own = machine.device(0);
        let client = connect(&machine.socket(), Some(own.clone())).await;
        let mut subscription = client.subscribe(&topic()).await.unwrap();
        let first = next(&mut subscription).await;
        assert_eq!(first.receipt().sharing, Sharing::CopiedOnGpu);
        let gate = machine.fake.hold(0, Direction::DeviceToDevice);
        server.send("publish 2").unwrap();
        gate.until_waiting(1);
        server.kill();
        drop(gate);
        let failed = timeout(TIMEOUT, subscription.next())
            .await
            .expect("a result arrives")
            .unwrap_err();
        assert!(failed.to_string().contains("connection"), "{failed}");
        check(&first).await;
        drop((first, subscription, own));
        client.close().await;
        machine.end(None).await;
    }
}
