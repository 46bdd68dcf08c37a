//! Concurrent copies: counts the copies in flight while a gate holds others.

use std::time::Duration;

use tensor_relay_device::{CopyEngine, CopySegment, EngineSource, Sink, Source};
use tensor_relay_tests::fake_cuda::Direction;
use tokio::time::timeout;

use crate::endpoint::{CHUNK, Endpoint, LEN, move_a_tensor, pattern, short_timeouts, wait_for_no_objects};
use crate::machine;

#[tokio::test]
async fn both_directions_copy_at_once() {
    let fake = machine();
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    let gate = fake.hold(0, Direction::HostToDevice);
    let segment = |offset| vec![CopySegment::new(&endpoint.memory, offset, 100)];
    let copying = endpoint.engine.copy_in(endpoint.slots.acquire().await, segment(0));
    gate.until_waiting(1);
    // While that copy is held, copies from the device complete.
    for _ in 0..3 {
        endpoint
            .engine
            .copy_out(segment(CHUNK as u64), endpoint.slots.acquire().await)
            .await
            .unwrap();
    }
    assert_eq!(fake.engine(0, Direction::HostToDevice).in_flight, 1);
    assert_eq!(fake.engine(0, Direction::DeviceToHost).ended, 3);
    drop(gate);
    copying.await.unwrap();
}

#[tokio::test]
async fn the_next_reads_are_in_flight_while_a_chunk_is_written() {
    let fake = machine();
    let (from, to) =
        (Endpoint::open(0, short_timeouts()).unwrap(), Endpoint::open(1, short_timeouts()).unwrap());
    from.fill(&pattern(LEN)).await.unwrap();
    let (source, sink) = (from.source(), to.sink());
    let gate = fake.hold(1, Direction::HostToDevice);
    let chunk = |number: u64| {
        let range = number * CHUNK as u64..(number + 1) * CHUNK as u64;
        let (source, sink) = (&source, &sink);
        async move {
            let bytes = source.read(range.clone()).await.expect("the device reads");
            let mut target = sink.open(range).await.expect("there is a slot");
            target.copy_from_slice(&bytes);
            sink.write(target).await.expect("the device writes");
        }
    };
    let check = async {
        while fake.engine(1, Direction::HostToDevice).in_flight < 3 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // All three chunks have been read, and none has been written.
        assert_eq!(fake.engine(0, Direction::DeviceToHost).ended, 3);
        assert_eq!(fake.engine(1, Direction::HostToDevice).ended, 0);
        drop(gate);
    };
    let all = async { tokio::join!(chunk(0), chunk(1), chunk(2), check) };
    timeout(Duration::from_secs(10), all).await.expect("nothing hangs");
}

#[tokio::test]
async fn devices_copy_independently() {
    let fake = machine();
    let (first, second) =
        (Endpoint::open(0, short_timeouts()).unwrap(), Endpoint::open(1, short_timeouts()).unwrap());
    let gate = fake.hold(0, Direction::DeviceToHost);
    let copying = first
        .engine
        .copy_out(vec![CopySegment::new(&first.memory, 0, 10)], first.slots.acquire().await);
    gate.until_waiting(1);
    second.fill(&pattern(LEN)).await.unwrap();
    assert!(second.read().await.unwrap() == pattern(LEN));
    drop(gate);
    copying.await.unwrap();
    assert_eq!((first.engine.name(), second.engine.name()), ("cuda:0", "cuda:1"));
}

/// Memory belongs to one device, even if its address is valid on another.
#[tokio::test]
async fn memory_of_another_device_is_refused() {
    let _fake = machine();
    let (first, second) =
        (Endpoint::open(0, short_timeouts()).unwrap(), Endpoint::open(1, short_timeouts()).unwrap());
    let source = EngineSource::new(first.engine.clone(), second.memory.clone(), first.slots.clone());
    source.read(0..10).await.unwrap_err();
    assert_eq!(first.slots.available(), 4);
}

/// Apart from the calls that open a device, only an engine's thread calls the driver, since contexts are bound to
/// threads and some calls block. No call synchronises with a device, a stream or an event.
#[tokio::test]
async fn each_engine_calls_the_driver_on_one_thread_and_nothing_synchronises() {
    let fake = machine();
    let mut engines = Vec::new();
    move_a_tensor(&mut engines).await.unwrap();
    drop(engines);
    wait_for_no_objects(&fake, 0).await;
    let calls = fake.calls();
    let waits: Vec<_> = calls.keys().filter(|call| call.contains("Synchronize")).collect();
    assert!(waits.is_empty(), "{waits:?}");
    let copies = calls["cuMemcpyDtoHAsync_v2"] + calls["cuMemcpyHtoDAsync_v2"];
    let threads = fake.threads();
    let by_engines = threads["relay-cuda:0"] + threads["relay-cuda:1"];
    assert!(by_engines > copies && copies > 20, "{threads:?}");
    let other_threads = threads.iter().filter(|(name, _)| !name.starts_with("relay-cuda:"));
    let by_others: u64 = other_threads.map(|(_, count)| count).sum();
    assert!(by_others <= 40, "opening a device only queries its attributes: {threads:?}");
}
