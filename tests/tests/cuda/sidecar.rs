//! A sidecar that serves tensors on another process's GPU, by each kind of shared memory and each fallback.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

use std::{fs, sync::Arc, time::Duration};

use tensor_relay_device::{Capacity, Device, DeviceBuffer, cuda::CudaEngine};
use tensor_relay_protocol::{Dtype, Shape, TensorName, TensorSpec, Topic};
use tensor_relay_server::sidecar::{MemoryKind, Producer, Publication};
use tensor_relay_tests::processes::{Gpu, Home, Serving, Signal};

use crate::{
    endpoint::{LEN, pattern, short_timeouts},
    machine,
};

const TIMEOUT: Duration = Duration::from_secs(30);

/// Allocates a tensor of `pattern`.
async fn tensor(device: &Device) -> DeviceBuffer {
    let buffer = device.allocate(LEN).unwrap();
    let sink = buffer.sink();
    let mut target = sink.open(0..LEN as u64).await.unwrap();
    target.copy_from_slice(&pattern(LEN));
    sink.write(target).await.unwrap();
    buffer
}

fn serve(home: &Home, device: &str) -> Serving {
    home.serve(&[&format!("--publish-socket={}", home.argument("s")), device])
}

/// Publishes one tensor, checks what a subscriber receives, and returns the publication.
async fn publish(home: &Home, server: &Serving, device: &Device) -> (Producer, Publication) {
    let producer = Producer::connect(&home.path("s")).await.unwrap();
    let tensors = vec![(spec(), tensor(device).await)];
    let topic = Topic::new("policy").unwrap();
    let published = producer
        .publish_from_device(topic, true, device, tensors, vec![])
        .await
        .unwrap();
    check_received(home, server);
    (producer, published)
}

/// Subscribes once and compares the tensor byte for byte.
fn check_received(home: &Home, server: &Serving) {
    let ticket = server.report["ticket"].as_str().unwrap();
    home.run(&["subscribe", ticket, "--topic=policy", "--once", "--out=out", "--device=cpu"])
        .expect_code(0);
    let file = fs::read(home.path("out/policy.safetensors")).unwrap();
    assert!(file[file.len() - LEN..] == pattern(LEN), "the file ends with the published bytes");
}

fn spec() -> TensorSpec {
    let shape = Shape::new(&[LEN as u64]).unwrap();
    TensorSpec::new(TensorName::new("w").unwrap(), Dtype::U8, shape)
}

fn open_device() -> Device {
    let engine: Arc<CudaEngine> = CudaEngine::open(0, short_timeouts()).unwrap();
    Device::new(engine, Capacity { slots: 4, slot_bytes: 4 << 20 }).unwrap()
}

/// Goal: a version is shared by the first kind of memory that works, and its publication says why earlier kinds do not.
/// Method: a driver that shares allocations, a driver that shares buffers only, and a driver that shares nothing.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_kind_of_memory_that_works_is_used() {
    for (in_place, buffers, expected) in [
        (true, true, MemoryKind::CudaIpc),
        (false, true, MemoryKind::CudaFd),
        (false, false, MemoryKind::Memfd),
    ] {
        let fake = machine();
        fake.set_shareable(in_place, buffers);
        let home = Home::with_gpu(Gpu::fake().with("FAKE_CUDA_FIRST_DEVICE", "0"));
        let mut server = serve(&home, "--device=cuda:0");
        let device = open_device();
        let (producer, mut published) = publish(&home, &server, &device).await;
        assert_eq!(published.path(), expected, "{}", published.reason());
        let copied = if expected == MemoryKind::CudaIpc { 0 } else { LEN as u64 };
        assert_eq!(published.copied_bytes(), copied);
        let is_first = !published.reason().contains("because");
        assert_eq!(is_first, in_place, "{}", published.reason());
        server.process.wait_for_stdout(&format!(r#""path":"{expected}""#));
        assert!(!published.released(Duration::from_millis(1)).await.unwrap());
        published.withdraw();
        assert!(published.released(TIMEOUT).await.unwrap());
        drop((producer, device));
        server.process.signal_and_wait(Signal::TERM).expect_code(0);
        assert_eq!(fake.violations(), [""; 0]);
    }
}

/// Goal: a server without a GPU gets a copy in host memory, and the producer gets the reason. Method: publish from a
/// device to a server with `--device=cpu`.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_a_gpu_gets_a_copy_in_host_memory() {
    let fake = machine();
    let home = Home::with_gpu(Gpu::fake().with("FAKE_CUDA_FIRST_DEVICE", "0"));
    let server = serve(&home, "--device=cpu");
    let device = open_device();
    let (producer, published) = publish(&home, &server, &device).await;
    assert_eq!(published.path(), MemoryKind::Memfd);
    assert!(published.reason().contains("does not serve from a GPU"), "{}", published.reason());
    drop((producer, device));
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
    assert_eq!(fake.violations(), [""; 0]);
}

/// Goal: a version in a producer's memory is withdrawn when the producer ends, so that freed memory is never read.
/// Method: end the connection, and list the topics.
#[tokio::test(flavor = "multi_thread")]
async fn a_version_in_a_producers_memory_ends_with_the_producer() {
    let fake = machine();
    let home = Home::with_gpu(Gpu::fake().with("FAKE_CUDA_FIRST_DEVICE", "0"));
    let server = serve(&home, "--device=cuda:0");
    let device = open_device();
    let (producer, published) = publish(&home, &server, &device).await;
    assert_eq!(published.path(), MemoryKind::CudaIpc);
    drop(producer);
    let deadline = std::time::Instant::now() + TIMEOUT;
    while !home.list(&server).as_array().unwrap().is_empty() {
        assert!(std::time::Instant::now() < deadline, "the version is not withdrawn");
    }
    drop((published, device));
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
    assert_eq!(fake.violations(), [""; 0]);
}

/// Goal: a copy in a buffer that is shared as a file descriptor outlives its producer, with correct bytes.
/// Method: end the connection and free the buffer, then subscribe.
#[tokio::test(flavor = "multi_thread")]
async fn a_shared_buffer_outlives_its_producer() {
    let fake = machine();
    let home = Home::with_gpu(Gpu::fake().with("FAKE_CUDA_FIRST_DEVICE", "0"));
    let server = serve(&home, "--device=cuda:0");
    let device = open_device();
    let producer = Producer::connect(&home.path("s")).await.unwrap();
    let (topic, tensors) = (Topic::new("policy").unwrap(), vec![(spec(), tensor(&device).await)]);
    let published = producer
        .publish_from_device(topic, false, &device, tensors, vec![])
        .await
        .unwrap();
    assert_eq!((published.path(), published.copied_bytes()), (MemoryKind::CudaFd, LEN as u64));
    drop((producer, published, device));
    // The engine's thread releases the device asynchronously.
    let deadline = std::time::Instant::now() + TIMEOUT;
    while fake.live().contexts > 0 {
        assert!(std::time::Instant::now() < deadline, "the producer does not release the GPU");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    check_received(&home, &server);
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
    assert_eq!(fake.violations(), [""; 0]);
}
