//! The cases that every copy engine must pass, run here on the host engine and wherever else an engine is.
//!
//! [`engine_cases!`](crate::engine_cases) makes one test of each. A case is given an engine of its own, and
//! panics where the engine breaks its contract. None has a deadline: an engine that hangs hangs its test, and
//! the runner of the tests says which.

use std::{ops::Range, sync::Arc};

use crate::{
    Capacity, CopyEngine, CopyError, Copying, EngineSink, EngineSource, Sink, SinkError, Slot, SlotPool,
    Source, SourceError,
};

/// Makes a module `$name` with one `#[tokio::test]` per case. `$make_engine` is the name of a function in the
/// surrounding module that gives an `Arc` of a fresh engine with at least 16 MiB of memory. The crate that
/// uses it needs tokio with `macros` and `rt`.
#[macro_export]
macro_rules! engine_cases {
    ($name:ident, $make_engine:ident) => {
        $crate::engine_cases!(@each $name, $make_engine:
            round_trips_are_exact
            the_rest_of_memory_and_slot_stays
            copies_out_of_bounds_are_refused
            foreign_slots_are_refused
            many_copies_share_few_slots
            a_dropped_copy_still_lands
            a_dropped_engine_loses_no_slot
            source_and_sink_move_a_payload
            ranges_are_checked_before_waiting
            targets_go_only_to_their_sink);
    };
    (@each $name:ident, $make_engine:ident: $($case:ident)*) => {
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

/// Bytes that went in come out, for lengths and offsets that suit no page and no vector register.
pub async fn round_trips_are_exact<E: CopyEngine>(engine: Arc<E>) {
    for len in [0, 1, 4095, (1 << 20) + 17] {
        let slots = slots(&*engine, 1, len.max(1));
        for offset in [0, 1, 4097] {
            let memory = engine.allocate(offset + len).expect("the engine has memory");
            fill(&*engine, &memory, &slots, offset, &pattern(len, offset as u8)).await;
            assert_eq!(read(&*engine, &memory, &slots, offset, len).await, pattern(len, offset as u8));
        }
    }
}

/// A copy touches exactly the bytes that it was asked for, at either end.
pub async fn the_rest_of_memory_and_slot_stays<E: CopyEngine>(engine: Arc<E>) {
    let slots = slots(&*engine, 1, 300);
    let memory = engine.allocate(300).expect("the engine has memory");
    fill(&*engine, &memory, &slots, 0, &[1; 300]).await;
    fill(&*engine, &memory, &slots, 101, &[2; 33]).await;
    let expected = [vec![1; 101], vec![2; 33], vec![1; 166]].concat();
    assert_eq!(read(&*engine, &memory, &slots, 0, 300).await, expected);

    let mut slot = slots.acquire().await;
    slot.fill(3);
    let slot = landed(engine.copy_out(&memory, 101, 33, slot)).await;
    assert_eq!(slot[..], [vec![2; 33], vec![3; 267]].concat());
}

/// What memory or slot does not have is refused both ways, with the numbers, and the slot comes back.
pub async fn copies_out_of_bounds_are_refused<E: CopyEngine>(engine: Arc<E>) {
    let slots = slots(&*engine, 1, 64);
    let memory = engine.allocate(100).expect("the engine has memory");
    for (offset, len) in [(37, 64), (101, 0), (0, 65), (u64::MAX, 1), (1, usize::MAX)] {
        let expected = CopyError::OutOfBounds { offset, len, memory_bytes: 100, slot_bytes: 64 };
        let out = engine.copy_out(&memory, offset, len, slots.acquire().await);
        assert_eq!(out.await.expect_err("this copy is out of bounds"), expected);
        let into = engine.copy_in(slots.acquire().await, len, &memory, offset);
        assert_eq!(into.await.expect_err("this copy is out of bounds"), expected);
    }
    assert_eq!(slots.available(), 1);
}

/// A slot that the engine did not make is refused both ways, and goes home.
pub async fn foreign_slots_are_refused<E: CopyEngine>(engine: Arc<E>) {
    let strange = SlotPool::new(Capacity { slots: 1, slot_bytes: 64 }).expect("there is memory for a slot");
    let memory = engine.allocate(64).expect("the engine has memory");
    let into = engine.copy_in(strange.acquire().await, 64, &memory, 0);
    assert_eq!(into.await.expect_err("this slot is foreign"), CopyError::ForeignSlot);
    let out = engine.copy_out(&memory, 0, 64, strange.acquire().await);
    assert_eq!(out.await.expect_err("this slot is foreign"), CopyError::ForeignSlot);
    assert_eq!(strange.available(), 1);
}

/// Hundreds of copies, started as slots come free and awaited in no order, all land where they belong.
pub async fn many_copies_share_few_slots<E: CopyEngine>(engine: Arc<E>) {
    const LEN: usize = 3000;
    const COPIES: usize = 300;
    let slots = slots(&*engine, 4, LEN);
    let memory = engine.allocate(LEN * COPIES).expect("the engine has memory");
    for i in 0..COPIES {
        let mut slot = slots.acquire().await;
        slot.copy_from_slice(&pattern(LEN, i as u8));
        // Nobody waits for these: the slots that come back are what paces this loop.
        drop(engine.copy_in(slot, LEN, &memory, (i * LEN) as u64));
    }
    all_home(&slots, 4).await;
    for i in (0..COPIES).rev() {
        assert_eq!(read(&*engine, &memory, &slots, i * LEN, LEN).await, pattern(LEN, i as u8), "copy {i}");
    }
}

/// A copy that nobody waits for runs to its end, and its slot comes back only then.
pub async fn a_dropped_copy_still_lands<E: CopyEngine>(engine: Arc<E>) {
    const LEN: usize = 4 << 20;
    let slots = slots(&*engine, 1, LEN);
    let memory = engine.allocate(LEN).expect("the engine has memory");
    for round in 0..3 {
        let expected = pattern(LEN, round);
        let mut slot = slots.acquire().await;
        slot.copy_from_slice(&expected);
        drop(engine.copy_in(slot, LEN, &memory, 0));
        // The same slot, overwritten as soon as it is back: a copy still running would carry these bytes.
        slots.acquire().await.fill(0xEE);
        assert_eq!(read(&*engine, &memory, &slots, 0, LEN).await, expected);
    }
}

/// Copies that are queued when the engine is dropped end, one way or the other, and every slot comes back.
pub async fn a_dropped_engine_loses_no_slot<E: CopyEngine>(engine: Arc<E>) {
    const LEN: usize = 1 << 20;
    let slots = slots(&*engine, 8, LEN);
    let memory = engine.allocate(LEN).expect("the engine has memory");
    let mut copies = Vec::new();
    for _ in 0..8 {
        copies.push(engine.copy_in(slots.acquire().await, LEN, &memory, 0));
    }
    drop(engine);
    for copy in copies {
        let end = copy.await.map(drop);
        assert!(matches!(end, Ok(()) | Err(CopyError::EngineStopped)), "{end:?}");
    }
    assert_eq!(slots.available(), 8);
}

/// A payload crosses from device to device through slots much smaller than it, byte for byte.
pub async fn source_and_sink_move_a_payload<E: CopyEngine>(engine: Arc<E>) {
    const LEN: usize = (3 << 20) + 5;
    const CHUNK: usize = 64 << 10;
    let whole = slots(&*engine, 1, LEN);
    let from = engine.allocate(LEN).expect("the engine has memory");
    let to = engine.allocate(LEN).expect("the engine has memory");
    fill(&*engine, &from, &whole, 0, &pattern(LEN, 1)).await;

    let staging = slots(&*engine, 4, CHUNK);
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

/// Ranges that can never be staged are refused at once, though no slot is free.
pub async fn ranges_are_checked_before_waiting<E: CopyEngine>(engine: Arc<E>) {
    let slots = slots(&*engine, 1, 64);
    let memory = engine.allocate(100).expect("the engine has memory");
    let source = EngineSource::new(Arc::clone(&engine), Arc::clone(&memory), slots.clone());
    let sink = EngineSink::new(Arc::clone(&engine), memory, slots.clone());
    let _held = slots.acquire().await;
    for range in [90..101, Range { start: 2, end: 1 }, u64::MAX..u64::MAX] {
        let (read, open) = (source.read(range.clone()).await, sink.open(range).await);
        assert!(matches!(read, Err(SourceError::OutOfBounds { len_bytes: 100, .. })), "{read:?}");
        assert!(matches!(open, Err(SinkError::OutOfBounds { len_bytes: 100, .. })), "{open:?}");
    }
    let (read, open) = (source.read(1..66).await, sink.open(1..66).await);
    assert!(matches!(read, Err(SourceError::LongerThanSlot { asked_bytes: 65, slot_bytes: 64 })), "{read:?}");
    assert!(matches!(open, Err(SinkError::LongerThanSlot { asked_bytes: 65, slot_bytes: 64 })), "{open:?}");
}

/// Two sinks that share their slots cannot be given each other's chunks.
pub async fn targets_go_only_to_their_sink<E: CopyEngine>(engine: Arc<E>) {
    let slots = slots(&*engine, 1, 64);
    let sink = || {
        let memory = engine.allocate(64).expect("the engine has memory");
        EngineSink::new(Arc::clone(&engine), memory, slots.clone())
    };
    let (mine, other) = (sink(), sink());
    let target = mine.open(0..64).await.expect("the range is inside");
    assert!(matches!(other.write(target).await, Err(SinkError::ForeignTarget)));
    assert_eq!(slots.available(), 1);
}

fn slots(engine: &impl CopyEngine, slots: usize, slot_bytes: usize) -> SlotPool {
    engine
        .slots(Capacity { slots, slot_bytes })
        .expect("the engine has memory for slots")
}

/// Bytes that show a shift, a swap and a stale copy: no short period, and different for each seed.
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
    landed(engine.copy_in(slot, bytes.len(), memory, offset as u64)).await;
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
    let slot = landed(engine.copy_out(memory, offset as u64, len, slot)).await;
    slot[..len].to_vec()
}

/// Waits until the pool's `count` slots are all free.
async fn all_home(slots: &SlotPool, count: usize) {
    let mut home = Vec::new();
    for _ in 0..count {
        home.push(slots.acquire().await);
    }
}
