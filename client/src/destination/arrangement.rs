//! Where the bytes of the stream of selected chunks go, if boxes of tensors are selected.

use std::{ops::Range, sync::Arc};
use tensor_relay_device::{Rectangle, Spread};
use tensor_relay_protocol::{PartPlace, Selection};
use tensor_relay_transport::Runs;

/// A part whose bytes lie in runs: its range in the stream, and the start of its place.
pub(super) type SpreadPart = (Range<u64>, u64, Arc<dyn Spread>);

/// The parts of a selection's stream, for a sink. Memory is named by the start of its place in the selection's memory.
#[derive(Default)]
pub(super) struct Arrangement {
    /// The parts that are all of a place, in order and disjoint.
    pub(super) whole: Vec<(Range<u64>, u64)>,
    /// The parts that are not.
    pub(super) spread: Vec<SpreadPart>,
}

impl Arrangement {
    pub(super) fn of(selection: &Selection) -> Self {
        let Self { mut whole, mut spread } = Self::default();
        for part in selection.parts() {
            let start = selection.tensor_range(part.tensor).map_or(0, |place| place.start);
            match part.place {
                PartPlace::Whole => whole.push((part.range, start)),
                PartPlace::Spread(runs) => spread.push((part.range, start, Arc::new(Runs(runs)))),
            }
        }
        whole.sort_by_key(|(range, _)| range.start);
        // Of tied tensors that are cut differently, one is taken whole, and the others get copies.
        let mut end = 0;
        whole.retain(|(range, start)| {
            let is_apart = range.start >= end;
            match is_apart {
                true => end = range.end,
                false => spread.push((range.clone(), *start, Arc::new(Run))),
            }
            is_apart
        });
        Self { whole, spread }
    }

    /// All parts, as runs.
    pub(super) fn into_parts(self) -> impl Iterator<Item = SpreadPart> {
        let whole = self.whole.into_iter();
        whole
            .map(|(range, start)| (range, start, Arc::new(Run) as Arc<dyn Spread>))
            .chain(self.spread)
    }
}

/// A part that is its memory.
#[derive(Debug)]
struct Run;

impl Spread for Run {
    fn rectangles(&self, range: Range<u64>, each: &mut dyn FnMut(Rectangle)) {
        each(Rectangle::run(range.start, range.start, range.end - range.start));
    }
}
