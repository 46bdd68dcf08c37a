use std::{fmt, ops::Range, sync::Arc};

use crate::{
    parts::{PartsError, check_bounds},
    spread::{Rectangle, Spread, SpreadError},
};

/// The parts of a payload whose bytes lie spread over memories, which several of them may share: the pieces of one
/// tensor share its memory.
///
/// Unlike other parts, they may overlap each other and any other part: tensors that share their place in the payload may
/// be cut differently. A written byte goes to the memory of each part that has it.
///
/// Finding the parts of a range is a binary search, and a scan of the parts that begin within the longest part before
/// it.
pub struct SpreadParts<M> {
    memories: Vec<M>,
    by_start: Vec<SpreadPart>,
}

impl<M> SpreadParts<M> {
    /// The parts: the range of each in the payload, the index of its memory in `memories`, and how its bytes lie there.
    /// In any order; a range that ends before it begins has no byte. Fails if an index has no memory.
    pub fn new(
        memories: Vec<M>,
        parts: impl IntoIterator<Item = (Range<u64>, usize, Arc<dyn Spread>)>,
    ) -> Result<Self, PartsError> {
        let mut by_start: Vec<_> = parts.into_iter().map(SpreadPart::new).collect();
        by_start.sort_by_key(|part| part.range.start);
        let mut end = 0;
        for part in &mut by_start {
            part.check_memory(memories.len())?;
            end = end.max(part.range.end);
            part.last_end = end;
        }
        Ok(Self { memories, by_start })
    }

    /// Checks that all parts lie in a payload of `len_bytes`.
    pub(crate) fn check_bounds(&self, len_bytes: u64) -> Result<(), PartsError> {
        self.by_start.iter().try_for_each(|part| check_bounds(&part.range, len_bytes))
    }

    /// The same parts, with what `make` makes of each memory.
    pub(crate) fn map<N>(self, make: impl FnMut(M) -> N) -> SpreadParts<N> {
        SpreadParts { memories: self.memories.into_iter().map(make).collect(), by_start: self.by_start }
    }

    /// The same parts, with what `make` makes of each memory; it returns `None` for memory of another device.
    pub(crate) fn try_map<N>(self, make: impl FnMut(M) -> Option<N>) -> Result<SpreadParts<N>, PartsError> {
        let Self { memories, by_start } = self;
        match memories.into_iter().map(make).collect() {
            Some(memories) => Ok(SpreadParts { memories, by_start }),
            None => Err(PartsError::ForeignMemory),
        }
    }

    pub(crate) fn memories(&self) -> &[M] {
        &self.memories
    }

    /// The total length of the parts. Bytes that several parts have count for each.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.by_start
            .iter()
            .map(|part| part.range.end.saturating_sub(part.range.start))
            .sum()
    }

    /// The parts that share bytes with `range`, by their starts, with the memory of each.
    pub(crate) fn touching(&self, range: &Range<u64>) -> impl Iterator<Item = (&SpreadPart, &M)> {
        let Range { start, end } = *range;
        let first = self.by_start.partition_point(|part| part.last_end <= start);
        let before_end = self.by_start[first..].iter().take_while(move |part| part.range.start < end);
        let touching = before_end.filter(move |part| !part.common_with(&(start..end)).is_empty());
        touching.map(|part| (part, &self.memories[part.memory]))
    }

    /// The bytes of `range` from the first to the last that a part has; empty if no part has any.
    pub(crate) fn hull_in(&self, range: &Range<u64>) -> Range<u64> {
        let common = self.touching(range).map(|(part, _)| part.common_with(range));
        let hull = common.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
        hull.unwrap_or(range.start..range.start)
    }
}

impl<M> Default for SpreadParts<M> {
    /// No part and no memory.
    fn default() -> Self {
        Self { memories: Vec::new(), by_start: Vec::new() }
    }
}

impl<M> fmt::Debug for SpreadParts<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpreadParts")
            .field("memories", &self.memories.len())
            .field("parts", &self.by_start.len())
            .finish()
    }
}

/// One part of a [`SpreadParts`].
pub(crate) struct SpreadPart {
    range: Range<u64>,
    memory: usize,
    spread: Arc<dyn Spread>,
    /// The last end of this part and all before it.
    last_end: u64,
}

impl SpreadPart {
    fn new((range, memory, spread): (Range<u64>, usize, Arc<dyn Spread>)) -> Self {
        Self { range, memory, spread, last_end: 0 }
    }

    fn check_memory(&self, memories: usize) -> Result<(), PartsError> {
        let (Range { start, end }, memory) = (self.range.clone(), self.memory);
        let is_there = memory < memories;
        is_there
            .then_some(())
            .ok_or(PartsError::NoSuchMemory { start, end, memory, memories })
    }

    /// The bytes that `range` has in common with this part.
    fn common_with(&self, range: &Range<u64>) -> Range<u64> {
        self.range.start.max(range.start)..self.range.end.min(range.end)
    }

    /// Calls `each` for the rectangles of `range`, which touches this part, in memory of `memory_bytes`. They fit, and
    /// their `part` counts from the start of `range`. Ends at the first one that does not fit.
    pub(crate) fn rectangles(
        &self,
        range: &Range<u64>,
        memory_bytes: u64,
        mut each: impl FnMut(Rectangle),
    ) -> Result<(), SpreadError> {
        let common = self.common_with(range);
        let within = common.start - self.range.start..common.end - self.range.start;
        let Range { start, end } = within;
        let mut wrong = None;
        self.spread.rectangles(
            within.clone(),
            &mut |rectangle| match rectangle.fits(&within, memory_bytes) {
                _ if wrong.is_some() => {}
                true => each(Rectangle {
                    part: rectangle.part - start + (common.start - range.start),
                    ..rectangle
                }),
                false => wrong = Some(SpreadError { rectangle, start, end, memory_bytes }),
            },
        );
        wrong.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::cases::{Grid, Places};

    pub(crate) fn any_spread() -> impl Strategy<Value = Places> {
        let tensor = (any::<bool>(), 0u64..60, 0u64..7, [0u64..9, 0u64..20, 0u64..9]);
        vec(tensor, 0..4).prop_map(|tensors| {
            let mut places = Places::default();
            for (in_pieces, start, rows, widths) in tensors {
                match in_pieces {
                    true => places.add_pieces(start, rows, widths),
                    false => places.add_columns(start, rows, widths),
                }
            }
            places
        })
    }

    #[test]
    fn a_part_needs_a_memory() {
        let grid: Arc<dyn Spread> = Arc::new(Grid::default());
        let refused = SpreadParts::new(vec![(), ()], [(3..4, 1, Arc::clone(&grid)), (5..9, 2, grid)]);
        let expected = PartsError::NoSuchMemory { start: 5, end: 9, memory: 2, memories: 2 };
        assert_eq!(refused.unwrap_err(), expected);
    }

    #[test]
    #[expect(clippy::reversed_empty_ranges, reason = "a caller may give any two numbers")]
    fn a_part_that_ends_before_it_begins_has_no_byte() {
        let parts =
            SpreadParts::new(vec![()], [(9..4, 0, Arc::new(Grid::default()) as Arc<dyn Spread>)]).unwrap();
        assert_eq!((parts.len_bytes(), parts.touching(&(0..20)).count()), (0, 0));
    }

    proptest! {
        #[test]
        fn searching_finds_the_same_parts_as_a_scan(places in any_spread(), start in 0u64..200, len in 0u64..90) {
            let parts = places.over(|len| len);
            let range = start..start + len;
            let common = |part: &Range<u64>| part.start.max(range.start)..part.end.min(range.end);
            let all = places.parts.iter().map(|(part, ..)| common(part));
            let mut all: Vec<_> = all.filter(|common| !common.is_empty()).map(|common| (common.start, common.end)).collect();
            let found = parts.touching(&range).map(|(part, _)| part.common_with(&range));
            let mut found: Vec<_> = found.map(|common| (common.start, common.end)).collect();
            let hull = parts.hull_in(&range);
            prop_assert_eq!(hull.is_empty(), all.is_empty());
            if !hull.is_empty() {
                prop_assert_eq!(Some(hull.start), all.iter().map(|(start, _)| *start).min());
                prop_assert_eq!(Some(hull.end), all.iter().map(|(_, end)| *end).max());
            }
            all.sort_unstable();
            found.sort_unstable();
            prop_assert_eq!(found, all);
        }

        /// Whatever a range is, its rectangles name each byte that part and memory share once, and no other.
        #[test]
        fn rectangles_count_from_the_start_of_the_range(places in any_spread(), start in 0u64..200, len in 0u64..90) {
            let parts = places.over(|len| len);
            let range = start..start + len;
            let mut named = vec![];
            for (part, memory_bytes) in parts.touching(&range) {
                let add = |rectangle: Rectangle| {
                    let Rectangle { part: at, memory, run_bytes, runs, part_stride, memory_stride } = rectangle;
                    let bytes = (0..runs).flat_map(|run| (0..run_bytes).map(move |byte| (run, byte)));
                    let place = |(run, byte)| (range.start + at + run * part_stride + byte, part.memory, memory + run * memory_stride + byte);
                    named.extend(bytes.map(place));
                };
                part.rectangles(&range, *memory_bytes, add).unwrap();
            }
            let mut expected = vec![];
            places.bytes(|at, memory, byte| {
                if range.contains(&(at as u64)) {
                    expected.push((at as u64, memory, byte as u64));
                }
            });
            named.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(named, expected);
        }
    }
}
