//! Cases for bytes that lie in many runs.

use std::{ops::Range, sync::Arc};

use super::{Places, fill, landed, new_pool, pattern, read, wait_for_all};
use crate::{
    CopyEngine, CopyError, CopySegment, EngineSink, EngineSource, Rectangle, Sink, SinkError, SlotPool,
    Source, SpreadParts, Target,
};

/// One copy places runs of a slot in two memories, another gathers them, and neither changes the bytes in between. The
/// runs alternate with those of other segments, are long and short, and lie beside segments of one run.
pub async fn runs_are_placed_and_gathered<E: CopyEngine>(engine: Arc<E>) {
    const LEN: usize = 300_000;
    let slots = new_pool(&*engine, 1, LEN);
    let memories = [0, 1].map(|_| engine.allocate(LEN).expect("the engine has memory"));
    let runs = |part, memory, run_bytes, runs, part_stride, memory_stride| Rectangle {
        part,
        memory,
        run_bytes,
        runs,
        part_stride,
        memory_stride,
    };
    let segments = [
        (0, runs(3, 10, 16, 100, 64, 16)),
        (1, runs(19, 7, 5, 100, 64, 90)),
        (0, runs(6403, 5000, 2, 300, 2, 33)),
        (1, runs(7003, 20_000, 70_000, 2, 70_001, 100_000)),
        (0, Rectangle::run(24, 100_000, 11)),
        (1, runs(0, 0, 0, 5, 0, 0)),
        (0, runs(0, 0, 3, 0, 3, 3)),
    ];
    let all = || {
        segments.map(|(memory, rectangle)| CopySegment { memory: Arc::clone(&memories[memory]), rectangle })
    };
    for (seed, memory) in memories.iter().enumerate() {
        fill(&*engine, memory, &slots, 0, &pattern(LEN, seed as u8)).await;
    }
    let (mut expected, mut bytes) = ([0, 1].map(|seed| pattern(LEN, seed)), pattern(LEN, 2));
    let mut slot = slots.acquire().await;
    slot.copy_from_slice(&bytes);
    let mut slot = landed(engine.copy_in(slot, all().into())).await;
    for (memory, rectangle) in segments {
        places(&rectangle).for_each(|(part, at)| expected[memory][at] = bytes[part]);
    }
    slot.fill(0xDD);
    drop(slot);
    for (memory, expected) in memories.iter().zip(&expected) {
        assert!(read(&*engine, memory, &slots, 0, LEN).await == *expected);
    }
    let mut slot = slots.acquire().await;
    slot.fill(0xDD);
    let slot = landed(engine.copy_out(all().into(), slot)).await;
    bytes.fill(0xDD);
    for (memory, rectangle) in segments {
        places(&rectangle).for_each(|(part, at)| bytes[part] = expected[memory][at]);
    }
    assert!(slot[..] == bytes);
}

/// The places in the slot and in the memory of each byte of a rectangle.
fn places(rectangle: &Rectangle) -> impl Iterator<Item = (usize, usize)> + use<> {
    let Rectangle { part, memory, run_bytes, runs, part_stride, memory_stride } = *rectangle;
    let bytes = (0..runs).flat_map(move |run| (0..run_bytes).map(move |byte| (run, byte)));
    let place = move |(run, byte)| (part + run * part_stride + byte, memory + run * memory_stride + byte);
    bytes.map(place).map(|(part, memory)| (part as usize, memory as usize))
}

/// Runs that leave the memory or the slot, or overlap, refuse the whole copy.
pub async fn runs_out_of_bounds_refuse_the_copy<E: CopyEngine>(engine: Arc<E>) {
    let slots = new_pool(&*engine, 1, 64);
    let memory = engine.allocate(100).expect("the engine has memory");
    fill(&*engine, &memory, &slots, 0, &[1; 64]).await;
    let good = Rectangle { runs: 4, part_stride: 16, memory_stride: 25, ..Rectangle::run(0, 0, 16) };
    let bad = [
        Rectangle { part: 1, ..good },
        Rectangle { memory: 10, ..good },
        Rectangle { runs: 5, ..good },
        Rectangle { part_stride: 15, ..good },
        Rectangle { memory_stride: 15, ..good },
        Rectangle { runs: u64::MAX, ..good },
        Rectangle { run_bytes: u64::MAX, ..good },
    ];
    for rectangle in bad {
        let segment = |rectangle| CopySegment { memory: Arc::clone(&memory), rectangle };
        let mut slot = slots.acquire().await;
        slot.fill(2);
        let refused = engine.copy_in(slot, vec![segment(good), segment(rectangle)]).await;
        let expected = CopyError::OutOfBounds { rectangle, memory_bytes: 100, slot_bytes: 64 };
        assert_eq!(refused.expect_err("these runs are out of bounds"), expected);
        let refused = engine.copy_out(vec![segment(rectangle)], slots.acquire().await).await;
        assert_eq!(refused.expect_err("these runs are out of bounds"), expected);
    }
    assert_eq!(read(&*engine, &memory, &slots, 0, 64).await, [1; 64]);
}

/// Hundreds of copies of runs, started as slots become free and never awaited, each write a column of one memory.
pub async fn copies_of_runs_share_few_slots<E: CopyEngine>(engine: Arc<E>) {
    const RUN: usize = 12;
    const ROWS: usize = 50;
    const COPIES: usize = 100;
    let slots = new_pool(&*engine, 4, RUN * ROWS);
    let whole = new_pool(&*engine, 1, RUN * ROWS * COPIES);
    let memory = engine.allocate(RUN * ROWS * COPIES).expect("the engine has memory");
    for i in 0..COPIES {
        let mut slot = slots.acquire().await;
        slot.copy_from_slice(&pattern(RUN * ROWS, i as u8));
        let column = Rectangle {
            runs: ROWS as u64,
            memory_stride: (RUN * COPIES) as u64,
            ..Rectangle::run(0, (i * RUN) as u64, RUN as u64)
        };
        // Not awaited: the returning slots pace this loop.
        drop(engine.copy_in(slot, vec![CopySegment { memory: Arc::clone(&memory), rectangle: column }]));
    }
    wait_for_all(&slots, 4).await;
    let bytes = read(&*engine, &memory, &whole, 0, RUN * ROWS * COPIES).await;
    for (i, run) in bytes.chunks(RUN).enumerate() {
        let (row, column) = (i / COPIES, i % COPIES);
        assert_eq!(
            run,
            &pattern(RUN * ROWS, column as u8)[row * RUN..(row + 1) * RUN],
            "row {row} of {column}"
        );
    }
}

/// A payload whose parts lie spread over memories, and overlap, is copied through slots shorter than the chunks. Bytes
/// that no memory holds are read as zeros.
pub async fn a_spread_payload_is_copied<E: CopyEngine>(engine: Arc<E>) {
    for seed in 0..SEEDS {
        let mut random = Random(seed);
        let (places, len_bytes) = random.places();
        let slots = new_pool(&*engine, 2, 100);
        let (sink, spread) = new_sink(&engine, &places, len_bytes, &slots);
        let payload = pattern(len_bytes as usize, seed as u8);
        for range in random.chunks(len_bytes) {
            let target = sink.open(range.clone()).await.expect("the range is inside");
            write(&sink, target, &payload).await;
        }
        sink.commit().expect("all targets are written");
        let source = EngineSource::spread(Arc::clone(&engine), len_bytes, [], spread, slots.clone());
        let source = source.expect("these fit");
        let mut held = vec![0; payload.len()];
        places.bytes(|at, _, _| held[at] = payload[at]);
        for range in random.chunks(len_bytes) {
            let bytes = source.read(range.clone()).await.expect("the range is inside");
            assert_eq!(bytes[..], held[range.start as usize..range.end as usize], "seed {seed}, {range:?}");
        }
        assert_eq!(slots.available(), 2);
    }
}

/// Whatever the order of chunks is, and whichever targets are dropped, the memories have what was written last; a range
/// that is lent is busy.
pub async fn spread_parts_are_what_their_writers_left<E: CopyEngine>(engine: Arc<E>) {
    for seed in 0..SEEDS {
        let mut random = Random(seed);
        let (places, len_bytes) = random.places();
        let slots = new_pool(&*engine, 3, 100);
        let (sink, spread) = new_sink(&engine, &places, len_bytes, &slots);
        let mut last = vec![0; len_bytes as usize];
        for round in 0..3 {
            let payload = pattern(last.len(), round);
            for range in random.chunks(len_bytes) {
                let (start, end) = (range.start, range.end);
                let target = sink.open(range.clone()).await.expect("the range is inside");
                let busy = sink.open(start..end).await;
                assert!(matches!(busy, Err(SinkError::Busy { start: s, end: e }) if (s, e) == (start, end)));
                // The first round has no holes, since the content of a dropped target is unspecified.
                if round > 0 && random.below(3) == 0 {
                    drop(target);
                } else {
                    write(&sink, target, &payload).await;
                    last[start as usize..end as usize]
                        .copy_from_slice(&payload[start as usize..end as usize]);
                }
            }
        }
        let mut expected: Vec<_> = places.memories.iter().map(|len| vec![0; *len as usize]).collect();
        places.bytes(|at, memory, byte| expected[memory][byte] = last[at]);
        for (memory, expected) in spread.memories().iter().zip(expected) {
            let source = EngineSource::new(Arc::clone(&engine), Arc::clone(memory), slots.clone());
            let bytes = source.read(0..expected.len() as u64).await.expect("the range is inside");
            assert_eq!(bytes[..], expected, "seed {seed}");
        }
    }
}

/// How often the random cases run.
const SEEDS: u64 = 20;

/// A sink of spread parts in new memory, and these parts once more.
fn new_sink<E: CopyEngine>(
    engine: &Arc<E>,
    places: &Places,
    len_bytes: u64,
    slots: &SlotPool,
) -> (EngineSink, SpreadParts<Arc<E::Memory>>) {
    let spread = places.over(|len| engine.allocate(len as usize).expect("the engine has memory"));
    let mut memories = spread.memories().iter().cloned();
    let same = places.over(|_| memories.next().expect("there are as many"));
    let sink = EngineSink::spread(Arc::clone(engine), len_bytes, [], same, slots.clone());
    (sink.expect("these fit"), spread)
}

/// Fills a target with its bytes of `payload` and writes it.
async fn write(sink: &EngineSink, mut target: Target, payload: &[u8]) {
    let Range { start, end } = target.range();
    target.copy_from_slice(&payload[start as usize..end as usize]);
    sink.write(target).await.expect("the target is the sink's own");
}

/// Numbers without a pattern (a linear congruential generator with Knuth's constants).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    /// Some tensors that are cut by columns or lie in pieces, and the length of a payload that has them.
    fn places(&mut self) -> (Places, u64) {
        let mut places = Places::default();
        for _ in 0..=self.below(3) {
            let (start, rows) = (self.below(60), self.below(9));
            let widths = [self.below(9), self.below(20), self.below(9)];
            match self.below(2) {
                0 => places.add_columns(start, rows, widths),
                _ => places.add_pieces(start, rows, widths),
            }
        }
        let end = places.parts.iter().map(|(range, ..)| range.end).max().unwrap_or(0);
        (places, end + self.below(5) + 1)
    }

    /// The ranges of a payload's chunks, in any order.
    fn chunks(&mut self, len_bytes: u64) -> Vec<Range<u64>> {
        let mut ends = vec![0, len_bytes];
        ends.extend((0..3).map(|_| self.below(len_bytes)));
        ends.sort_unstable();
        ends.dedup();
        let mut chunks: Vec<_> = ends.windows(2).map(|pair| pair[0]..pair[1]).collect();
        for i in (1..chunks.len()).rev() {
            chunks.swap(i, self.below(i as u64 + 1) as usize);
        }
        chunks
    }
}
