use super::{
    driver::{Piece, Runs, STRIDE_MAX_BYTES},
    flight::Direction,
};
use crate::spread::Rectangle;

/// How the bytes of one copy travel between a slot and the device. Pure: no driver call.
///
/// Over the bus, short runs would take as long as runs of hundreds of bytes. So they pass through scratch memory of the
/// device, which has a place for each byte of the slot: over the bus goes all that lies between the first and the last of
/// them, in one piece, and the device copies the runs within itself.
#[derive(Debug, Default)]
pub(super) struct Route {
    /// First: from the slot to the scratch.
    pub(super) upload: Option<Piece>,
    /// Then: between the scratch and the memory.
    pub(super) runs: Vec<Runs>,
    /// Then: from the scratch to the slot.
    pub(super) download: Option<Piece>,
    /// At last: between the slot and the memory.
    pub(super) pieces: Vec<Piece>,
}

impl Route {
    /// The route of rectangles that fit, each with the address of its memory.
    ///
    /// On the way out, bytes of the slot between the runs must not change. If there may be such bytes, they travel to the
    /// scratch and back, which costs the other direction of the bus.
    pub(super) fn new(
        direction: Direction,
        slot: u64,
        scratch: u64,
        rectangles: impl Iterator<Item = (u64, Rectangle)>,
    ) -> Self {
        let (short, long): (Vec<_>, Vec<_>) = rectangles
            .map(|(memory, rectangle)| (memory, rectangle.joined()))
            .partition(|(_, rectangle)| needs_scratch(rectangle));
        let pieces = long
            .iter()
            .flat_map(|(memory, rectangle)| pieces(direction, slot, *memory, rectangle))
            .collect();
        let hull = short
            .iter()
            .map(|(_, rectangle)| rectangle.hull())
            .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
        let Some(hull) = hull else { return Self { pieces, ..Self::default() } };
        let in_slot = |at| slot + at;
        let len = (hull.end - hull.start) as usize;
        let upload = Piece { to: scratch + hull.start, from: in_slot(hull.start), len };
        let download = Piece { to: in_slot(hull.start), from: scratch + hull.start, len };
        let is_out = direction == Direction::Out;
        Self {
            upload: (!is_out || !are_dense(&short)).then_some(upload),
            runs: short
                .iter()
                .map(|(memory, rectangle)| runs(direction, scratch, *memory, rectangle))
                .collect(),
            download: is_out.then_some(download),
            pieces,
        }
    }
}

impl Route {
    /// The route between `flat`, device memory, and rectangles that fit it and their memories, whose addresses are
    /// given.
    pub(super) fn within(
        direction: Direction,
        flat: u64,
        rectangles: impl Iterator<Item = (u64, Rectangle)>,
    ) -> Self {
        let mut route = Self::default();
        for (memory, rectangle) in rectangles.map(|(memory, rectangle)| (memory, rectangle.joined())) {
            match needs_scratch(&rectangle) {
                true => route.runs.push(runs(direction, flat, memory, &rectangle)),
                false => route.pieces.extend(pieces(direction, flat, memory, &rectangle)),
            }
        }
        route
    }
}

/// Whether the runs of a rectangle are copied within the device, over the bus through scratch memory.
pub(super) fn needs_scratch(rectangle: &Rectangle) -> bool {
    let Rectangle { run_bytes, runs, part_stride, memory_stride, .. } = rectangle.joined();
    runs > 1 && (1..LONG_RUN_BYTES).contains(&run_bytes) && part_stride.max(memory_stride) <= STRIDE_MAX_BYTES
}

/// A run that takes as long on the bus as a driver call for it, some microseconds.
const LONG_RUN_BYTES: u64 = 64 << 10;

/// Whether there is no byte between the runs of all rectangles.
fn are_dense(short: &[(u64, Rectangle)]) -> bool {
    let follows = |end: u64, (_, rectangle): &(u64, Rectangle)| {
        let is_dense = rectangle.part == end && rectangle.part_stride == rectangle.run_bytes;
        is_dense.then(|| rectangle.hull().end)
    };
    let start = short.first().map_or(0, |(_, rectangle)| rectangle.part);
    short.iter().try_fold(start, follows).is_some()
}

/// The runs of a rectangle, each as a piece of its own.
fn pieces(
    direction: Direction,
    slot: u64,
    memory: u64,
    rectangle: &Rectangle,
) -> impl Iterator<Item = Piece> + use<> {
    let Rectangle { part, memory: offset, run_bytes, runs, part_stride, memory_stride } = *rectangle;
    let runs = if run_bytes == 0 { 0 } else { runs };
    (0..runs).map(move |run| {
        let (host, device) = (slot + part + run * part_stride, memory + offset + run * memory_stride);
        let (to, from) = if direction == Direction::Out { (host, device) } else { (device, host) };
        Piece { to, from, len: run_bytes as usize }
    })
}

fn runs(direction: Direction, scratch: u64, memory: u64, rectangle: &Rectangle) -> Runs {
    let Rectangle { part, memory: offset, run_bytes, runs, part_stride, memory_stride } = *rectangle;
    let (scratch, part_stride) = (scratch + part, part_stride as usize);
    let (memory, memory_stride) = (memory + offset, memory_stride as usize);
    let (run_bytes, count) = (run_bytes as usize, runs as usize);
    match direction {
        Direction::Out => Runs {
            to: scratch,
            from: memory,
            run_bytes,
            count,
            to_stride: part_stride,
            from_stride: memory_stride,
        },
        Direction::In => Runs {
            to: memory,
            from: scratch,
            run_bytes,
            count,
            to_stride: memory_stride,
            from_stride: part_stride,
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// Slot, scratch and two memories of this many bytes each, one after the other.
    const LEN: u64 = 2 * LONG_RUN_BYTES + 300;

    /// Executes a route as a device would.
    fn travel(route: &Route, bytes: &mut [u8]) {
        let mut copy = |to: u64, from: u64, len: usize| {
            bytes.copy_within(from as usize..from as usize + len, to as usize)
        };
        route.upload.iter().for_each(|piece| copy(piece.to, piece.from, piece.len));
        for runs in &route.runs {
            for run in 0..runs.count {
                let (to, from) =
                    (runs.to + (run * runs.to_stride) as u64, runs.from + (run * runs.from_stride) as u64);
                copy(to, from, runs.run_bytes);
            }
        }
        route
            .download
            .iter()
            .chain(&route.pieces)
            .for_each(|piece| copy(piece.to, piece.from, piece.len));
    }

    fn any_rectangle() -> impl Strategy<Value = Rectangle> {
        let run_bytes = prop_oneof![4 => 0u64..20, 1 => LONG_RUN_BYTES - 1..LONG_RUN_BYTES + 2];
        (0u64..100, 0u64..100, run_bytes, 0u64..9, [0u64..9, 0u64..9]).prop_map(
            |(part, memory, run_bytes, runs, [part_gap, memory_gap])| Rectangle {
                part,
                memory,
                run_bytes,
                runs: runs.min(LEN / 2 / run_bytes.max(1)),
                part_stride: run_bytes + part_gap,
                memory_stride: run_bytes + memory_gap,
            },
        )
    }

    proptest! {
        #[test]
        fn every_route_leads_to_the_place(
            rectangles in vec((any::<bool>(), any_rectangle()), 0..4),
            is_out in any::<bool>(),
            seed in any::<u8>(),
        ) {
            // In the slot, or in both memories, places that are written twice hold bytes of either.
            prop_assume!(rectangles.iter().all(|(_, rectangle)| rectangle.fits(&(0..LEN), LEN)));
            let direction = if is_out { Direction::Out } else { Direction::In };
            let mut bytes: Vec<u8> = (0..4 * LEN).map(|at| (at / 251) as u8 ^ at as u8 ^ seed).collect();
            let (mut within, mut expected) = (bytes.clone(), bytes.clone());
            let address = |second: bool| if second { 3 * LEN } else { 2 * LEN };
            let mut used = [vec![false; LEN as usize], vec![false; 2 * LEN as usize]];
            for (second, rectangle) in &rectangles {
                for run in 0..rectangle.runs {
                    for byte in 0..rectangle.run_bytes {
                        let at = rectangle.part + run * rectangle.part_stride + byte;
                        let memory = rectangle.memory + run * rectangle.memory_stride + byte;
                        let in_memory = address(*second) + memory;
                        let place = if is_out { (0, at) } else { (1, in_memory - 2 * LEN) };
                        prop_assume!(!std::mem::replace(&mut used[place.0][place.1 as usize], true));
                        let (to, from) = if is_out { (at, in_memory) } else { (in_memory, at) };
                        expected[to as usize] = bytes[from as usize];
                    }
                }
            }
            let placed = rectangles.iter().map(|(second, rectangle)| (address(*second), *rectangle));
            travel(&Route::new(direction, 0, LEN, placed.clone()), &mut bytes);
            travel(&Route::within(direction, 0, placed), &mut within);
            let outside = |all: &[u8]| [&all[..LEN as usize], &all[2 * LEN as usize..]].concat();
            prop_assert!(outside(&bytes) == outside(&expected));
            prop_assert!(within == expected, "within the device");
        }
    }

    #[test]
    fn dense_runs_do_not_travel_to_the_scratch_and_back() {
        let dense = Rectangle { runs: 4, memory_stride: 100, ..Rectangle::run(8, 0, 16) };
        let next = Rectangle { part: 72, ..dense };
        let apart = Rectangle { part: 73, ..dense };
        let route = |rectangles: [Rectangle; 2]| {
            Route::new(Direction::Out, 1000, 5000, rectangles.map(|rectangle| (9000, rectangle)).into_iter())
        };
        assert!(route([dense, next]).upload.is_none());
        let download = route([dense, apart]).download.unwrap();
        assert_eq!((download.to, download.from, download.len), (1008, 5008, 129));
        assert!(route([dense, apart]).upload.is_some() && route([next, dense]).upload.is_some());
    }

    #[test]
    fn strides_that_a_device_does_not_copy_need_no_scratch() {
        let wide = Rectangle { runs: 2, memory_stride: STRIDE_MAX_BYTES + 1, ..Rectangle::run(0, 0, 16) };
        let route = Route::new(Direction::In, 0, 5000, [(0, wide)].into_iter());
        assert!(route.runs.is_empty() && route.upload.is_none());
        assert_eq!(route.pieces[1].to, STRIDE_MAX_BYTES + 1);
    }
}
