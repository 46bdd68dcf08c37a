//! Versions that are staged by copies within the producer's device.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

use std::sync::Arc;

use tensor_relay_device::{
    Device, DeviceBuffer,
    cuda::{CudaEngine, CudaMemory, share::ShareError},
};
use tensor_relay_protocol::TensorSpec;
use tensor_relay_server::{DeviceError, Publishable, Staged, Staging};
use tensor_relay_tests::{
    fake_cuda::{Direction, Effect, Fault},
    tensors::noise,
};

use crate::{
    calls::{Block, Current, call, create_stream},
    endpoint::{CHUNK, LEN, pattern},
    machine,
    order::handle,
    relay::{Relay, clean_up, upload},
};

const REFUSED: u32 = 999;
const LAUNCH_FAILED: u32 = 719;

/// Tensors of these bytes, in allocations of their own.
async fn tensors(device: &Device, contents: &[Vec<u8>]) -> Vec<(TensorSpec, DeviceBuffer)> {
    let mut tensors = vec![];
    for (index, bytes) in contents.iter().enumerate() {
        let spec = noise(&format!("tensor {index}"), bytes.len() as u64);
        tensors.push((spec, upload(device, bytes).await.unwrap()));
    }
    tensors
}

/// A hundred small tensors of odd lengths, one that is longer than a chunk, and one of more than a mebibyte.
fn contents() -> Vec<Vec<u8>> {
    let lens = (0..100).map(|i| 1 + 7 * i).chain([LEN, (1 << 20) + 3]);
    lens.map(pattern).collect()
}

async fn stage(
    staging: &Staging,
    device: &Device,
    tensors: Vec<(TensorSpec, DeviceBuffer)>,
) -> Result<Publishable, DeviceError> {
    Publishable::from_device(staging, tensors, vec![], Some(device)).await
}

/// Goal: staging copies within the device, after the producer's stream, and neither to the host nor hashes. The version
/// has the digest of one that is staged on the host, and its tensors may be written again when staging returns.
/// Method: count calls and copies; the tensors are written by a stream that is blocked for a while, and overwritten
/// afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_is_staged_without_the_host() {
    let fake = machine();
    let mut engines = Vec::new();
    let mut relay = Relay::connect(&mut engines).await.unwrap();
    let (device, staging, engine) = (relay.producer.clone(), relay.server.staging(), engines[0].clone());
    let mut tensors = tensors(&device, &contents()).await;
    let (current, stream) = (Current::new(0), create_stream());
    let block = Block::in_stream(stream);
    let first = tensors[100].1.memory::<CudaMemory>().unwrap();
    call!(cuMemsetD8Async(first.address(), 0x22, LEN, stream)).unwrap();
    let written = engine.fence(handle(stream)).unwrap();
    // SAFETY: the owner is the memory itself, and the work that writes to it is before the fence.
    let lent = unsafe { engine.lend(first.address(), LEN, Arc::clone(&first), Some(written)) };
    tensors[100].1 = device.wrap::<CudaEngine>(lent).unwrap();

    let calls = |name: &str| fake.calls().get(name).copied().unwrap_or(0);
    let copies_out = fake.engine(0, Direction::DeviceToHost).ended;
    let (events, polls) = (calls("cuEventRecord"), calls("cuEventQuery"));
    let same = tensors.clone();
    let staging = tokio::spawn(async move { stage(&staging, &device, tensors).await });
    fake.wait_until("the staging waits for the stream", |fake| {
        fake.calls().get("cuEventQuery").is_some_and(|count| *count > polls + 9)
    });
    assert_eq!(
        calls("cuMemcpyBatchAsync_v2") + calls("cuMemcpyDtoDAsync_v2"),
        0,
        "the copies have not begun"
    );
    block.lift();
    let version = staging.await.unwrap().unwrap();
    assert_eq!(fake.engine(0, Direction::DeviceToHost).ended, copies_out, "no byte went to the host");
    assert_eq!(version.digest(), None, "nothing was hashed");
    // One call for all small tensors, one for the large one, one to zero the gaps, and one event after them.
    let memsets = 1 + 1; // And that of the producer.
    assert_eq!((calls("cuMemcpyBatchAsync_v2"), calls("cuMemcpyDtoDAsync_v2")), (1, 1));
    assert_eq!((calls("cuMemsetD8Async"), calls("cuEventRecord") - events), (memsets, 1));

    let on_host = Staged::from_device(&relay.server.staging(), same, vec![]).await.unwrap();
    call!(cuMemsetD8Async(first.address(), 0x33, LEN, stream)).unwrap();
    call!(cuStreamSynchronize(stream)).unwrap();
    call!(cuStreamDestroy_v2(stream)).unwrap();
    let publication = relay.publisher.publish(version, vec![]).await.unwrap();
    let snapshot = relay.next().await.unwrap();
    assert_eq!(snapshot.load_report().digest(), on_host.hash(), "the gaps between tensors are zeros");
    let received = snapshot.to_host().await.unwrap();
    for (index, bytes) in contents().into_iter().enumerate() {
        let expected = if index == 100 { vec![0x22; LEN] } else { bytes };
        assert!(received.tensor(&format!("tensor {index}")).unwrap()[..] == expected, "tensor {index}");
    }
    publication.withdraw();
    drop((first, current, received, snapshot, publication, engine));
    clean_up(&fake, relay, engines).await;
}

/// Goal: a copy that fails or is late is an error of the staging, and all memory comes back. Method: refuse the calls of
/// the copies, and hold the copies until they are late. A batch that is refused alone is copied one by one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_copy_within_the_device_fails_the_staging() {
    let fake = machine();
    let mut engines = Vec::new();
    let relay = Relay::connect(&mut engines).await.unwrap();
    let (device, staging) = (relay.producer.clone(), relay.server.staging());
    let before = engines[0].stats().device_bytes;
    let is_freed = || fake.wait_until("the memory is back", |_| engines[0].stats().device_bytes == before);

    fake.fault(&Fault::once("cuMemsetD8Async", 1, Effect::Fail(REFUSED)));
    fake.fault(&Fault::once("cuMemcpyDtoDAsync_v2", 1, Effect::Fail(REFUSED)));
    for _ in 0..2 {
        let refused = stage(&staging, &device, tensors(&device, &contents()).await).await.unwrap_err();
        assert!(matches!(refused, DeviceError::Within(ShareError::CopyRefused { .. })), "{refused:?}");
        is_freed();
    }
    fake.fault(&Fault::from("cuMemcpyBatchAsync_v2", 1, Effect::Fail(REFUSED)));
    drop(stage(&staging, &device, tensors(&device, &contents()).await).await.unwrap());
    is_freed();

    let gate = fake.hold(0, Direction::DeviceToDevice);
    let late = stage(&staging, &device, tensors(&device, &contents()).await).await.unwrap_err();
    assert!(matches!(late, DeviceError::Within(ShareError::CopyTimedOut { .. })), "{late:?}");
    assert!(engines[0].stats().device_bytes > before, "the copies may still run");
    drop(gate);
    is_freed();
    drop(device);
    clean_up(&fake, relay, engines).await;
}

/// A device that fails during the copy fails the staging, and keeps the memory that it may still access.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_device_fails_the_staging() {
    let fake = machine();
    let mut engines = Vec::new();
    let relay = Relay::connect(&mut engines).await.unwrap();
    let (device, staging) = (relay.producer.clone(), relay.server.staging());
    fake.fault(&Fault::once("@dtod", 3, Effect::Fail(LAUNCH_FAILED)));
    let tensors = tensors(&device, &[pattern(CHUNK), pattern(CHUNK), pattern(9)]).await;
    let failed = stage(&staging, &device, tensors).await.unwrap_err();
    assert!(matches!(failed, DeviceError::Within(ShareError::Engine(_))), "{failed:?}");
    assert!(engines[0].failure().is_some() && engines[0].stats().leaked_bytes > 0);
    relay.close().await;
    assert_eq!(fake.violations(), [""; 0]);
}
