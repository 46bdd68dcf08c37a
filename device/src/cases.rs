//! Conformance tests for copy engines. This crate runs them on the host engine, the crate `tests` on the host engine
//! and the CUDA engine.
//!
//! [`engine_cases!`](crate::engine_cases) makes one test of each case. A case gets an engine of its own, and panics if
//! the engine breaks its contract. No case has a deadline: an engine that hangs hangs its test.

use std::{ops::Range, sync::Arc};

use crate::{
    Capacity, CopyEngine, CopyError, CopySegment, Copying, EngineSink, EngineSource, Rectangle, Sink,
    SinkError, Slot, SlotPool, Source, SourceError,
};

mod grid;
mod places;
mod spread;

pub use grid::Grid;
pub(crate) use places::Places;
pub use spread::{
    a_spread_payload_is_copied, copies_of_runs_share_few_slots, runs_are_placed_and_gathered,
    runs_out_of_bounds_refuse_the_copy, spread_parts_are_what_their_writers_left,
};

/// Makes a module `$name` with one `#[tokio::test]` per case. `$make_engine` is the name of a function in the
/// surrounding module that returns an `Arc` of a new engine with at least 16 MiB of memory. The crate that calls this
/// macro needs tokio with `macros` and `rt`.
#[macro_export]
macro_rules! engine_cases {
    ($name:ident, $make_engine:ident) => {
        $crate::for_each_engine_case!($crate::engine_cases, $name, $make_engine,);
    };
    ($name:ident, $make_engine:ident, $($case:ident)*) => {
        mod $name {
            $(
                #[tokio::test]
                async fn $case() {
                    $crate::cases::$case(super::$make_engine()).await;
                }
            )*
        }
    };
}

/// Calls the macro `$with` with its other arguments and the names of all cases.
#[macro_export]
macro_rules! for_each_engine_case {
    ($with:path, $($before:tt)*) => {
        $with! {
            $($before)*
            round_trips_are_exact
            bytes_outside_of_the_copy_stay
            segments_are_gathered_and_scattered
            copies_out_of_bounds_are_refused
            one_bad_segment_refuses_the_copy
            foreign_slots_are_refused
            many_copies_share_few_slots
            a_dropped_copy_still_runs_to_its_end
            a_dropped_engine_loses_no_slot
            source_and_sink_move_a_payload
            a_payload_in_many_places_is_copied
            chunks_longer_than_a_slot_pass_through_it
            slow_readers_leave_slots_for_others
            ranges_are_checked_before_waiting
            targets_go_only_to_their_sink
            runs_are_placed_and_gathered
            runs_out_of_bounds_refuse_the_copy
            copies_of_runs_share_few_slots
            a_spread_payload_is_copied
            spread_parts_are_what_their_writers_left
        }
    };
}

/// Bytes survive a round trip, at lengths and offsets with and without alignment to pages and vector registers.
pub async fn round_trips_are_exact<E: CopyEngine>(engine: Arc<E>) {
    for len in [0, 1, 4095, (1 << 20) + 17] {
        let slots = new_pool(&*engine, 1, len.max(1));
        for offset in [0, 1, 4097] {
            let memory = engine.allocate(offset + len).expect("the engine has memory");
            fill(&*engine, &memory, &slots, offset, &pattern(len, offset as u8)).await;
            assert_eq!(read(&*engine, &memory, &slots, offset, len).await, pattern(len, offset as u8));
        }
    }
}

/// A copy changes exactly the requested bytes, in the memory and in the slot.
pub async fn bytes_outside_of_the_copy_stay<E: CopyEngine>(engine: Arc<E>) {
    let slots = new_pool(&*engine, 1, 300);
    let memory = engine.allocate(300).expect("the engine has memory");
    fill(&*engine, &memory, &slots, 0, &[1; 300]).await;
    fill(&*engine, &memory, &slots, 101, &[2; 33]).await;
    let expected = [vec![1; 101], vec![2; 33], vec![1; 166]].concat();
    assert_eq!(read(&*engine, &memory, &slots, 0, 300).await, expected);

    let mut slot = slots.acquire().await;
    slot.fill(3);
    let slot = landed(engine.copy_out(vec![CopySegment::new(&memory, 101, 33)], slot)).await;
    assert_eq!(slot[..], [vec![2; 33], vec![3; 267]].concat());
}

/// One copy gathers segments of several memories in a slot, another scatters parts of the slot to them, and neither
/// changes the bytes in between.
pub async fn segments_are_gathered_and_scattered<E: CopyEngine>(engine: Arc<E>) {
    let slots = new_pool(&*engine, 1, 300);
    let memories = [0, 1].map(|_| engine.allocate(300).expect("the engine has memory"));
    for (seed, memory) in memories.iter().enumerate() {
        fill(&*engine, memory, &slots, 0, &pattern(300, seed as u8)).await;
    }
    let segment = |(memory, offset, len, at): (usize, u64, usize, usize)| {
        CopySegment::new(&memories[memory], offset, len).at(at)
    };
    let places = [(0, 10, 50, 200), (1, 299, 1, 0), (0, 0, 0, 300), (1, 33, 77, 5)];
    let mut slot = slots.acquire().await;
    slot.fill(0xDD);
    let slot = landed(engine.copy_out(places.map(segment).into(), slot)).await;
    let mut expected = [0xDD; 300];
    expected[200..250].copy_from_slice(&pattern(300, 0)[10..60]);
    expected[0] = pattern(300, 1)[299];
    expected[5..82].copy_from_slice(&pattern(300, 1)[33..110]);
    assert_eq!(slot[..], expected);
    landed(engine.copy_in(slot, vec![segment((1, 100, 60, 195)), segment((0, 7, 3, 4))])).await;
    let mut changed = pattern(300, 1);
    changed[100..160].copy_from_slice(&expected[195..255]);
    assert_eq!(read(&*engine, &memories[1], &slots, 0, 300).await, changed);
    assert_eq!(read(&*engine, &memories[0], &slots, 7, 3).await, expected[4..7]);
    landed(engine.copy_out(vec![], slots.acquire().await)).await;
}

/// Copies out of bounds of memory or slot are refused in both directions. The error has the numbers, and the slot
/// returns to its pool.
pub async fn copies_out_of_bounds_are_refused<E: CopyEngine>(engine: Arc<E>) {
    let slots = new_pool(&*engine, 1, 64);
    let memory = engine.allocate(100).expect("the engine has memory");
    for (offset, len) in [(37, 64), (101, 0), (0, 65), (u64::MAX, 1), (1, usize::MAX)] {
        let rectangle = Rectangle::run(0, offset, len as u64);
        let expected = CopyError::OutOfBounds { rectangle, memory_bytes: 100, slot_bytes: 64 };
        let segment = || vec![CopySegment::new(&memory, offset, len)];
        let out = engine.copy_out(segment(), slots.acquire().await);
        assert_eq!(out.await.expect_err("this copy is out of bounds"), expected);
        let into = engine.copy_in(slots.acquire().await, segment());
        assert_eq!(into.await.expect_err("this copy is out of bounds"), expected);
    }
    assert_eq!(slots.available(), 1);
}

/// One segment out of bounds refuses the whole copy.
pub async fn one_bad_segment_refuses_the_copy<E: CopyEngine>(engine: Arc<E>) {
    let slots = new_pool(&*engine, 1, 64);
    let memory = engine.allocate(100).expect("the engine has memory");
    fill(&*engine, &memory, &slots, 0, &[1; 64]).await;
    for (offset, len, at) in [(90, 11, 0), (0, 1, 64), (0, 1, usize::MAX)] {
        let bad = CopySegment::new(&memory, offset, len).at(at);
        let mut slot = slots.acquire().await;
        slot.fill(2);
        let refused = engine.copy_in(slot, vec![CopySegment::new(&memory, 0, 10), bad]).await;
        assert!(matches!(refused, Err(CopyError::OutOfBounds { slot_bytes: 64, .. })), "{refused:?}");
    }
    assert_eq!(read(&*engine, &memory, &slots, 0, 64).await, [1; 64]);
}

/// A slot of another engine is refused in both directions, and returns to its pool.
pub async fn foreign_slots_are_refused<E: CopyEngine>(engine: Arc<E>) {
    let foreign = SlotPool::new(Capacity { slots: 1, slot_bytes: 64 }).expect("there is memory for a slot");
    let memory = engine.allocate(64).expect("the engine has memory");
    let segment = || vec![CopySegment::new(&memory, 0, 64)];
    let into = engine.copy_in(foreign.acquire().await, segment());
    assert_eq!(into.await.expect_err("this slot is foreign"), CopyError::ForeignSlot);
    let out = engine.copy_out(segment(), foreign.acquire().await);
    assert_eq!(out.await.expect_err("this slot is foreign"), CopyError::ForeignSlot);
    assert_eq!(foreign.available(), 1);
}

/// Hundreds of copies, started as slots become free and never awaited, all write to their own place.
pub async fn many_copies_share_few_slots<E: CopyEngine>(engine: Arc<E>) {
    const LEN: usize = 3000;
    const COPIES: usize = 300;
    let slots = new_pool(&*engine, 4, LEN);
    let memory = engine.allocate(LEN * COPIES).expect("the engine has memory");
    for i in 0..COPIES {
        let mut slot = slots.acquire().await;
        slot.copy_from_slice(&pattern(LEN, i as u8));
        // Not awaited: the returning slots pace this loop.
        drop(engine.copy_in(slot, vec![CopySegment::new(&memory, (i * LEN) as u64, LEN)]));
    }
    wait_for_all(&slots, 4).await;
    for i in (0..COPIES).rev() {
        assert_eq!(read(&*engine, &memory, &slots, i * LEN, LEN).await, pattern(LEN, i as u8), "copy {i}");
    }
}

/// A copy whose future is dropped runs to its end, and its slot returns only then.
pub async fn a_dropped_copy_still_runs_to_its_end<E: CopyEngine>(engine: Arc<E>) {
    const LEN: usize = 4 << 20;
    let slots = new_pool(&*engine, 1, LEN);
    let memory = engine.allocate(LEN).expect("the engine has memory");
    for round in 0..3 {
        let expected = pattern(LEN, round);
        let mut slot = slots.acquire().await;
        slot.copy_from_slice(&expected);
        drop(engine.copy_in(slot, vec![CopySegment::new(&memory, 0, LEN)]));
        // The same slot, overwritten as soon as it is back: a copy that still runs would copy these bytes.
        slots.acquire().await.fill(0xEE);
        assert_eq!(read(&*engine, &memory, &slots, 0, LEN).await, expected);
    }
}

/// Copies queued when the engine is dropped succeed or fail with `EngineStopped`, and every slot returns.
pub async fn a_dropped_engine_loses_no_slot<E: CopyEngine>(engine: Arc<E>) {
    const LEN: usize = 1 << 20;
    let slots = new_pool(&*engine, 8, LEN);
    let memory = engine.allocate(LEN).expect("the engine has memory");
    let mut copies = Vec::new();
    for _ in 0..8 {
        copies.push(engine.copy_in(slots.acquire().await, vec![CopySegment::new(&memory, 0, LEN)]));
    }
    drop(engine);
    for copy in copies {
        let end = copy.await.map(drop);
        assert!(matches!(end, Ok(()) | Err(CopyError::EngineStopped)), "{end:?}");
    }
    assert_eq!(slots.available(), 8);
}

/// A payload crosses from device to device through slots much smaller than it.
pub async fn source_and_sink_move_a_payload<E: CopyEngine>(engine: Arc<E>) {
    const LEN: usize = (3 << 20) + 5;
    const CHUNK: usize = 64 << 10;
    let whole = new_pool(&*engine, 1, LEN);
    let from = engine.allocate(LEN).expect("the engine has memory");
    let to = engine.allocate(LEN).expect("the engine has memory");
    fill(&*engine, &from, &whole, 0, &pattern(LEN, 1)).await;

    let staging = new_pool(&*engine, 4, CHUNK);
    let source = EngineSource::new(Arc::clone(&engine), from, staging.clone());
    let sink = EngineSink::new(Arc::clone(&engine), Arc::clone(&to), staging.clone());
    assert_eq!((source.len_bytes(), sink.len_bytes()), (LEN as u64, LEN as u64));
    for start in (0..LEN).step_by(CHUNK) {
        let range = start as u64..(start + CHUNK).min(LEN) as u64;
        let mut target = sink.open(range.clone()).await.expect("the range is inside");
        assert_eq!(target.range(), range);
        target.copy_from_slice(&source.read(range).await.expect("the range is inside"));
        sink.write(target).await.expect("the target is the sink's own");
    }
    assert_eq!(staging.available(), 4);
    assert_eq!(read(&*engine, &to, &whole, 0, LEN).await, pattern(LEN, 1));
}

/// A payload with padding, whose tensors each have memory of their own, is copied to a sink with other parts.
pub async fn a_payload_in_many_places_is_copied<E: CopyEngine>(engine: Arc<E>) {
    const LEN: usize = 1000;
    let slots = new_pool(&*engine, 2, 128);
    let places = |starts: [u64; 3], ends: [u64; 3]| {
        let memory = |len: u64| engine.allocate(len as usize).expect("the engine has memory");
        let place = |(start, end): (u64, u64)| (start..end, memory(end - start));
        starts.into_iter().zip(ends).map(place).collect::<Vec<_>>()
    };
    let from = places([0, 256, 300], [200, 260, 990]);
    let to = places([0, 100, 700], [100, 699, 1000]);
    let mut payload = vec![0; LEN];
    for (i, (range, memory)) in from.iter().enumerate() {
        let bytes = pattern((range.end - range.start) as usize, i as u8);
        payload[range.start as usize..range.end as usize].copy_from_slice(&bytes);
        let whole = EngineSink::new(Arc::clone(&engine), Arc::clone(memory), slots.clone());
        let mut target = whole.open(0..range.end - range.start).await.expect("the range is inside");
        target.copy_from_slice(&bytes);
        whole.write(target).await.expect("the target is the sink's own");
    }
    let (len_bytes, to_parts) = (LEN as u64, to.iter().cloned());
    let source =
        EngineSource::gather(Arc::clone(&engine), len_bytes, from, slots.clone()).expect("these fit");
    let sink =
        EngineSink::scatter(Arc::clone(&engine), len_bytes, to_parts, slots.clone()).expect("these fit");
    for start in (0..len_bytes).step_by(90) {
        let range = start..(start + 90).min(len_bytes);
        let bytes = source.read(range.clone()).await.expect("the range is inside");
        assert_eq!(bytes[..], payload[range.start as usize..range.end as usize], "{range:?}");
        let mut target = sink.open(range).await.expect("the range is inside");
        target.copy_from_slice(&bytes);
        drop(bytes); // There are only two slots.
        sink.write(target).await.expect("the target is the sink's own");
    }
    for (range, memory) in &to {
        let part = EngineSource::new(Arc::clone(&engine), Arc::clone(memory), slots.clone());
        let bytes = part.read(0..range.end - range.start).await.expect("the range is inside");
        assert_eq!(bytes[..], payload[range.start as usize..range.end as usize], "{range:?}");
    }
    assert_eq!(slots.available(), 2);
}

/// A chunk longer than a slot is copied through one slot piece by piece, in both directions.
pub async fn chunks_longer_than_a_slot_pass_through_it<E: CopyEngine>(engine: Arc<E>) {
    const LEN: usize = 10_000;
    let slots = new_pool(&*engine, 1, 999);
    let memory = engine.allocate(LEN).expect("the engine has memory");
    let sink = EngineSink::new(Arc::clone(&engine), Arc::clone(&memory), slots.clone());
    let mut target = sink.open(0..LEN as u64).await.expect("the range is inside");
    target.copy_from_slice(&pattern(LEN, 9));
    sink.write(target).await.expect("the target is the sink's own");
    let source = EngineSource::new(Arc::clone(&engine), memory, slots.clone());
    let bytes = source.read(1..LEN as u64).await.expect("the range is inside");
    assert_eq!(bytes[..], pattern(LEN, 9)[1..]);
    assert_eq!(slots.available(), 1, "bytes longer than a slot hold none");
}

/// Readers that keep their bytes cannot use up the slots.
pub async fn slow_readers_leave_slots_for_others<E: CopyEngine>(engine: Arc<E>) {
    let slots = new_pool(&*engine, 4, 64);
    let memory = engine.allocate(64 * 20).expect("the engine has memory");
    let source = EngineSource::new(Arc::clone(&engine), memory, slots.clone());
    let mut kept = Vec::new();
    for i in 0..20 {
        kept.push(source.read(i * 64..(i + 1) * 64).await.expect("the range is inside"));
    }
    assert_eq!(slots.available(), 1);
    drop(kept);
    assert_eq!(slots.available(), 4);
}

/// Ranges out of bounds are refused at once, even while no slot is free.
pub async fn ranges_are_checked_before_waiting<E: CopyEngine>(engine: Arc<E>) {
    let slots = new_pool(&*engine, 1, 64);
    let memory = engine.allocate(100).expect("the engine has memory");
    let source = EngineSource::new(Arc::clone(&engine), Arc::clone(&memory), slots.clone());
    let sink = EngineSink::new(Arc::clone(&engine), memory, slots.clone());
    let _held = slots.acquire().await;
    for range in [90..101, Range { start: 2, end: 1 }, u64::MAX..u64::MAX] {
        let (read, open) = (source.read(range.clone()).await, sink.open(range).await);
        assert!(matches!(read, Err(SourceError::OutOfBounds { len_bytes: 100, .. })), "{read:?}");
        assert!(matches!(open, Err(SinkError::OutOfBounds { len_bytes: 100, .. })), "{open:?}");
    }
}

/// Two sinks that share their slots refuse each other's targets.
pub async fn targets_go_only_to_their_sink<E: CopyEngine>(engine: Arc<E>) {
    let slots = new_pool(&*engine, 1, 64);
    let sink = || {
        let memory = engine.allocate(64).expect("the engine has memory");
        EngineSink::new(Arc::clone(&engine), memory, slots.clone())
    };
    let (mine, other) = (sink(), sink());
    let target = mine.open(0..64).await.expect("the range is inside");
    assert!(matches!(other.write(target).await, Err(SinkError::ForeignTarget)));
    assert_eq!(slots.available(), 1);
}

fn new_pool(engine: &impl CopyEngine, slots: usize, slot_bytes: usize) -> SlotPool {
    engine
        .slots(Capacity { slots, slot_bytes })
        .expect("the engine has memory for slots")
}

/// A test pattern that reveals shifts, swaps and stale copies: no short period, and different for each seed.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| ((i * 31) ^ (i >> 8) ^ (i >> 16)) as u8 ^ seed.wrapping_mul(151))
        .collect()
}

async fn landed(copying: Copying) -> Slot {
    copying.await.expect("the copy is in bounds and the engine lives")
}

async fn fill<E: CopyEngine>(
    engine: &E,
    memory: &Arc<E::Memory>,
    slots: &SlotPool,
    offset: usize,
    bytes: &[u8],
) {
    let mut slot = slots.acquire().await;
    slot[..bytes.len()].copy_from_slice(bytes);
    let segment = CopySegment::new(memory, offset as u64, bytes.len());
    landed(engine.copy_in(slot, vec![segment])).await;
}

async fn read<E: CopyEngine>(
    engine: &E,
    memory: &Arc<E::Memory>,
    slots: &SlotPool,
    offset: usize,
    len: usize,
) -> Vec<u8> {
    let mut slot = slots.acquire().await;
    slot.fill(0xDD);
    let slot = landed(engine.copy_out(vec![CopySegment::new(memory, offset as u64, len)], slot)).await;
    slot[..len].to_vec()
}

/// Waits until the pool's `count` slots are all free.
async fn wait_for_all(slots: &SlotPool, count: usize) {
    let mut acquired = Vec::new();
    for _ in 0..count {
        acquired.push(slots.acquire().await);
    }
}
