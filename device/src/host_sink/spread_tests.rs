//! Spread parts of a host sink.

use std::{ops::Range, sync::Arc};

use proptest::{collection::vec, prelude::*};

use super::HostSink;
use crate::{
    HostMemory, PartsError, Rectangle, Region, Sink, SinkError, Spread, SpreadParts, Target,
    cases::{Grid, Places},
    parts::tests::any_places,
    spread_parts::tests::any_spread,
};

fn new_region(len: u64) -> Region {
    Region::from_owner(vec![0; len as usize])
}

/// Two rows of eight bytes at 4..20 of a payload of 24 bytes, of which the memory holds columns 2 to 5; and a direct part
/// at 0..6, which overlaps.
fn new_sink() -> HostSink {
    let columns = Grid { rows: 2, run_bytes: 3, part: 2, part_stride: 8, memory: 0, memory_stride: 3 };
    let spread = SpreadParts::new(vec![new_region(6)], [(4..20, 0, Arc::new(columns) as Arc<dyn Spread>)]);
    HostSink::spread(24, [(0..6, new_region(6))], spread.unwrap(), HostMemory::new(u64::MAX)).unwrap()
}

async fn write(sink: &HostSink, range: Range<u64>) -> Result<(), SinkError> {
    let start = range.start;
    let mut target = sink.open(range).await?;
    (start..).zip(target.iter_mut()).for_each(|(at, byte)| *byte = at as u8);
    sink.write(target).await
}

#[tokio::test]
async fn a_chunk_goes_to_every_part_that_has_its_bytes() {
    let sink = new_sink();
    write(&sink, 0..12).await.unwrap();
    write(&sink, 12..16).await.unwrap();
    let regions = sink.commit().unwrap();
    assert_eq!(regions[0][..], [0, 1, 2, 3, 4, 5]);
    assert_eq!(regions[1][..], [6, 7, 8, 14, 15, 0]);
}

#[tokio::test]
async fn a_byte_of_a_spread_part_is_lent_once_at_a_time() {
    let sink = new_sink();
    let held = sink.open(10..14).await.unwrap();
    for range in [13..24, 0..11, 11..12] {
        assert!(matches!(sink.open(range).await, Err(SinkError::Busy { .. })));
    }
    assert!(matches!(sink.commit(), Err(SinkError::StillLent { lent_bytes: 4, len_bytes: 22 })));
    assert!(sink.open(14..24).await.is_ok() && sink.open(0..10).await.is_ok());
    drop(held);
    write(&sink, 13..24).await.unwrap();
    sink.commit().unwrap();
    assert!(matches!(sink.open(10..14).await, Err(SinkError::Committed)));
}

#[tokio::test]
async fn a_busy_direct_part_leaves_no_claim() {
    let sink = new_sink();
    let held = sink.open(0..4).await.unwrap();
    assert!(matches!(sink.open(3..9).await, Err(SinkError::Busy { .. })));
    assert!(sink.open(4..9).await.is_ok());
    drop(held);
    sink.commit().unwrap();
}

/// Names the same rectangle for every range.
#[derive(Debug)]
struct Wrong(Rectangle);

impl Spread for Wrong {
    fn rectangles(&self, _: Range<u64>, each: &mut dyn FnMut(Rectangle)) {
        each(self.0);
        each(self.0);
    }
}

#[tokio::test]
async fn a_wrong_spread_is_an_error_and_writes_nothing() {
    let inside = Rectangle { runs: 2, part_stride: 4, memory_stride: 2, ..Rectangle::run(0, 0, 2) };
    let wrong = [
        Rectangle { part: 3, ..inside },
        Rectangle { memory: 1, ..inside },
        Rectangle { runs: u64::MAX, ..inside },
        Rectangle { memory_stride: 1, ..inside },
        Rectangle { run_bytes: u64::MAX, ..inside },
    ];
    for (rectangle, fits) in wrong.map(|rectangle| (rectangle, false)).into_iter().chain([(inside, true)]) {
        let spread = SpreadParts::new(
            vec![new_region(4)],
            [(2..10, 0, Arc::new(Wrong(rectangle)) as Arc<dyn Spread>)],
        );
        let sink = HostSink::spread(12, [], spread.unwrap(), HostMemory::new(u64::MAX)).unwrap();
        let written = write(&sink, 2..10).await;
        assert_eq!(written.is_ok(), fits, "{rectangle:?}");
        assert!(fits || matches!(written, Err(SinkError::Spread(error)) if error.rectangle == rectangle));
        let expected = if fits { [2, 3, 6, 7] } else { [0; 4] };
        assert_eq!(sink.commit().unwrap()[0][..], expected);
    }
}

#[test]
fn a_spread_part_lies_in_the_payload() {
    let spread =
        SpreadParts::new(vec![new_region(0)], [(3..9, 0, Arc::new(Grid::default()) as Arc<dyn Spread>)]);
    let refused = HostSink::spread(8, [], spread.unwrap(), HostMemory::new(u64::MAX)).unwrap_err();
    assert_eq!(refused, PartsError::OutOfBounds { start: 3, end: 9, len_bytes: 8 });
}

#[derive(Debug, Clone)]
enum Op {
    Open(u64, u64),
    Write(usize, u8),
    Drop(usize),
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0u64..200, 0u64..90).prop_map(|(start, len)| Op::Open(start, start + len)),
        2 => (any::<usize>(), any::<u8>()).prop_map(|(i, seed)| Op::Write(i, seed)),
        1 => any::<usize>().prop_map(Op::Drop),
    ]
}

/// A sink of direct and spread parts, and the expected bytes of both. Targets that are dropped were not filled.
struct Model {
    sink: HostSink,
    places: Vec<Range<u64>>,
    spread: Places,
    bytes: Vec<u8>,
    memories: Vec<Vec<u8>>,
    lent: Vec<Target>,
}

impl Model {
    fn new((len_bytes, places): (u64, Vec<Range<u64>>), spread: Places) -> Self {
        let ends = spread.parts.iter().map(|(range, ..)| range.end);
        let len_bytes = ends.fold(len_bytes, u64::max);
        let parts = places.iter().map(|place| (place.clone(), new_region(place.end - place.start)));
        let staging = HostMemory::new(u64::MAX);
        let sink = HostSink::spread(len_bytes, parts, spread.over(new_region), staging).unwrap();
        let memories = spread.memories.iter().map(|len| vec![0; *len as usize]).collect();
        Self { sink, places, spread, bytes: vec![0; len_bytes as usize], memories, lent: vec![] }
    }

    fn apply(&mut self, op: Op) {
        let count = self.lent.len();
        match op {
            Op::Open(start, end) => self.open(start..end.min(self.bytes.len() as u64)),
            Op::Write(i, seed) if count > 0 => self.write(i % count, seed),
            Op::Drop(i) if count > 0 => drop(self.lent.swap_remove(i % count)),
            _ => {}
        }
    }

    fn open(&mut self, range: Range<u64>) {
        match self.sink.lend(range.clone()) {
            Ok(target) => {
                assert!(!self.is_lent(&range));
                self.lent.push(target);
            }
            Err(SinkError::OutOfBounds { .. }) => assert!(range.start > range.end),
            // Two ranges may be refused for the padding between the spread parts of both.
            Err(SinkError::Busy { .. }) => {
                assert!(self.lent.iter().any(|lent| is_common(&lent.range, &range)))
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Whether a byte of a part is in `range` and in a lent one.
    fn is_lent(&self, range: &Range<u64>) -> bool {
        let parts = self.spread.parts.iter().map(|(part, ..)| part).chain(&self.places);
        let mut common = parts.map(|part| part.start.max(range.start)..part.end.min(range.end));
        common.any(|common| self.lent.iter().any(|lent| is_common(&lent.range, &common)))
    }

    /// Fills a target, writes it, and copies its bytes to the model.
    fn write(&mut self, i: usize, seed: u8) {
        let mut target = self.lent.swap_remove(i);
        let range = target.range();
        for (at, byte) in range.clone().zip(target.iter_mut()) {
            *byte = seed ^ at as u8;
            self.bytes[at as usize] = *byte;
        }
        let Self { spread, memories, bytes, .. } = self;
        spread.bytes(|at, memory, byte| {
            if range.contains(&(at as u64)) {
                memories[memory][byte] = bytes[at];
            }
        });
        self.sink.put(target).unwrap();
    }
}

fn is_common(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

proptest! {
    #[test]
    fn a_sink_of_spread_parts_is_what_its_writers_left(
        places in any_places(),
        spread in any_spread(),
        ops in vec(any_op(), 0..40),
    ) {
        let mut model = Model::new(places, spread);
        for op in ops {
            model.apply(op);
            if model.is_lent(&(0..u64::MAX)) {
                let refused = model.sink.commit().unwrap_err();
                prop_assert!(matches!(refused, SinkError::StillLent { .. }), "{refused}");
            }
        }
        model.lent.clear();
        let regions = model.sink.commit().unwrap();
        let (direct, spread) = regions.split_at(model.places.len());
        for (region, place) in direct.iter().zip(&model.places) {
            prop_assert_eq!(&region[..], &model.bytes[place.start as usize..place.end as usize]);
        }
        prop_assert!(spread.iter().map(|region| &region[..]).eq(model.memories.iter().map(|bytes| &bytes[..])));
        prop_assert!(matches!(model.sink.commit(), Err(SinkError::Committed)));
    }
}
