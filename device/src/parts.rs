use std::ops::Range;

/// The ranges of a payload that have memory of their own, sorted and disjoint. The bytes between them are padding or
/// unselected tensors.
///
/// Finding the parts of a range is a binary search, so that ten thousand tensors cost hardly more per chunk than ten.
#[derive(Debug)]
pub(crate) struct Parts<T> {
    len_bytes: u64,
    by_start: Vec<(Range<u64>, T)>,
}

impl<T: AsRef<[u8]>> Parts<T> {
    /// Checks the parts of a payload of `len_bytes`. Each must be as long as its memory.
    pub(crate) fn new(
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, T)>,
    ) -> Result<Self, PartsError> {
        Self::measured(len_bytes, parts, |memory| memory.as_ref().len() as u64)
    }
}

impl<T> Parts<T> {
    /// Like `new`, for memory whose length `len_of` returns.
    pub(crate) fn measured(
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, T)>,
        len_of: impl Fn(&T) -> u64,
    ) -> Result<Self, PartsError> {
        let by_start: Vec<_> = parts.into_iter().collect();
        let mut previous = 0..0;
        for (range, memory) in &by_start {
            check_length(range, len_of(memory))?;
            check_bounds(range, len_bytes)?;
            check_order(&previous, range)?;
            previous = range.clone();
        }
        Ok(Self { len_bytes, by_start })
    }

    /// One part that is the whole payload.
    pub(crate) fn whole(len_bytes: u64, memory: T) -> Self {
        Self { len_bytes, by_start: vec![(0..len_bytes, memory)] }
    }

    /// The bytes of the payload, padding included.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The total length of the parts.
    pub(crate) fn placed_bytes(&self) -> u64 {
        self.ranges().map(|range| range.end - range.start).sum()
    }

    /// The ranges of the parts, in order.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = &Range<u64>> {
        self.by_start.iter().map(|(range, _)| range)
    }

    /// The non-empty intersections of `range` with the parts, in order, with each part's range and memory.
    pub(crate) fn common_with(
        &self,
        range: &Range<u64>,
    ) -> impl Iterator<Item = (Range<u64>, &Range<u64>, &T)> {
        let Range { start, end } = *range;
        let first = self.by_start.partition_point(|(part, _)| part.end <= start);
        let touched = self.by_start[first..].iter().take_while(move |(part, _)| part.start < end);
        let common =
            touched.map(move |(part, memory)| (part.start.max(start)..part.end.min(end), part, memory));
        common.filter(|(common, ..)| !common.is_empty())
    }

    /// Separates the memory from the ranges.
    pub(crate) fn split(self) -> (Parts<()>, Vec<T>) {
        let (ranges, memory): (Vec<_>, Vec<_>) = self.by_start.into_iter().unzip();
        let by_start = ranges.into_iter().map(|range| (range, ())).collect();
        (Parts { len_bytes: self.len_bytes, by_start }, memory)
    }
}

/// Why parts do not fit a payload. The caller is to blame.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PartsError {
    /// A range and its memory differ in length.
    #[error(
        "The part {start}..{end} of the payload was given memory of {memory_bytes} bytes. Give each part exactly the \
         memory of its tensor."
    )]
    WrongLength {
        /// The first byte of the part.
        start: u64,
        /// One past its last byte.
        end: u64,
        /// The length of its memory.
        memory_bytes: u64,
    },
    /// A part ends after the payload.
    #[error(
        "The part {start}..{end} ends after the payload of {len_bytes} bytes. Take the parts from the payload's own \
         manifest."
    )]
    OutOfBounds {
        /// The first byte of the part.
        start: u64,
        /// One past its last byte.
        end: u64,
        /// The bytes of the payload.
        len_bytes: u64,
    },
    /// Two parts share bytes.
    #[error(
        "The part {start}..{end} overlaps with the part before it, {previous_start}..{previous_end}. Give tensors that \
         share their place (aliases) once."
    )]
    Overlap {
        /// The first byte of the part.
        start: u64,
        /// One past its last byte.
        end: u64,
        /// The first byte of the part before it.
        previous_start: u64,
        /// One past the last byte of the part before it.
        previous_end: u64,
    },
    /// A part lies in memory of another device.
    #[error(
        "The part {start}..{end} of the payload lies in the memory of another device. Make a payload of the memory of \
         one device."
    )]
    ForeignDevice {
        /// The first byte of the part.
        start: u64,
        /// One past its last byte.
        end: u64,
    },
    /// Memory of spread parts is another device's.
    #[error(
        "Parts of the payload are spread over the memory of another device. Make a payload of the memory of one device."
    )]
    ForeignMemory,
    /// A spread part names memory that was not given.
    #[error(
        "The part {start}..{end} of the payload is spread over memory {memory} of {memories}. Number the memories from 0, \
         in the order in which they are given."
    )]
    NoSuchMemory {
        /// The first byte of the part.
        start: u64,
        /// One past its last byte.
        end: u64,
        /// The index of its memory.
        memory: usize,
        /// The number of memories.
        memories: usize,
    },
    /// A part lies before its predecessor.
    #[error(
        "The part {start}..{end} came after a part that starts at {previous_start}. Give the parts in the order of \
         their places."
    )]
    OutOfOrder {
        /// The first byte of the part.
        start: u64,
        /// One past its last byte.
        end: u64,
        /// The first byte of the part before it.
        previous_start: u64,
    },
}

fn check_length(range: &Range<u64>, memory_bytes: u64) -> Result<(), PartsError> {
    let Range { start, end } = *range;
    let same = end.checked_sub(start) == Some(memory_bytes);
    same.then_some(()).ok_or(PartsError::WrongLength { start, end, memory_bytes })
}

pub(crate) fn check_bounds(range: &Range<u64>, len_bytes: u64) -> Result<(), PartsError> {
    let Range { start, end } = *range;
    let inside = end <= len_bytes;
    inside.then_some(()).ok_or(PartsError::OutOfBounds { start, end, len_bytes })
}

fn check_order(previous: &Range<u64>, range: &Range<u64>) -> Result<(), PartsError> {
    let Range { start, end } = *range;
    let Range { start: previous_start, end: previous_end } = *previous;
    if start >= previous_end {
        Ok(())
    } else if end <= previous_start {
        Err(PartsError::OutOfOrder { start, end, previous_start })
    } else {
        Err(PartsError::Overlap { start, end, previous_start, previous_end })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// A payload's length, which may include padding at the end, and the ranges of its parts: some touch, some have
    /// gaps between them, some are empty.
    pub(crate) fn any_places() -> impl Strategy<Value = (u64, Vec<Range<u64>>)> {
        let gap_and_len = (prop_oneof![Just(0), 0u64..9], prop_oneof![1 => Just(0), 4 => 0u64..20]);
        (vec(gap_and_len, 0..8), 0u64..5).prop_map(|(parts, padding)| {
            let mut end = 0;
            let place = |(gap, len)| {
                let start = end + gap;
                end = start + len;
                start..end
            };
            let places = parts.into_iter().map(place).collect();
            (end + padding, places)
        })
    }

    fn new_parts(len_bytes: u64, places: &[(Range<u64>, usize)]) -> Result<Parts<Vec<u8>>, PartsError> {
        let places = places.iter().cloned();
        Parts::new(len_bytes, places.map(|(range, len)| (range, vec![0; len])))
    }

    #[test]
    #[expect(clippy::reversed_empty_ranges, reason = "a caller may give any two numbers")]
    fn a_part_is_as_long_as_its_memory() {
        for (range, len) in [(0..4, 3), (0..4, 5), (4..0, 4), (4..0, 0), (0..u64::MAX, 1)] {
            assert!(matches!(new_parts(9, &[(range, len)]), Err(PartsError::WrongLength { .. })));
        }
    }

    #[test]
    fn a_part_lies_in_the_payload() {
        for (range, len) in [(0..5, 5), (4..5, 1), (5..5, 0), (u64::MAX..u64::MAX, 0)] {
            assert!(matches!(
                new_parts(4, &[(range, len)]),
                Err(PartsError::OutOfBounds { len_bytes: 4, .. })
            ));
        }
        assert!(new_parts(4, &[(4..4, 0)]).is_ok());
    }

    #[test]
    fn parts_that_share_a_byte_are_refused() {
        let wrong = new_parts(9, &[(0..4, 4), (3..6, 3)]).unwrap_err();
        assert_eq!(wrong, PartsError::Overlap { start: 3, end: 6, previous_start: 0, previous_end: 4 });
        let wrong = new_parts(9, &[(2..4, 2), (0..6, 6)]).unwrap_err();
        assert!(matches!(wrong, PartsError::Overlap { .. }));
    }

    #[test]
    fn parts_out_of_order_are_refused() {
        let wrong = new_parts(9, &[(4..6, 2), (0..4, 4)]).unwrap_err();
        assert_eq!(wrong, PartsError::OutOfOrder { start: 0, end: 4, previous_start: 4 });
    }

    proptest! {
        #[test]
        fn binary_search_finds_the_same_parts_as_a_scan(
            (len_bytes, places) in any_places(),
            start in 0u64..90,
            len in 0u64..50,
        ) {
            let memory = places.iter().map(|range| (range.clone(), vec![0; (range.end - range.start) as usize]));
            let parts = Parts::new(len_bytes, memory).unwrap();
            let range = start..start + len;
            let found: Vec<_> = parts.common_with(&range).map(|(common, part, _)| (common, part.clone())).collect();
            let common = |part: &Range<u64>| part.start.max(range.start)..part.end.min(range.end);
            let each = places.iter().map(|part| (common(part), part.clone()));
            let all: Vec<_> = each.filter(|(common, _)| !common.is_empty()).collect();
            prop_assert_eq!(found, all);
        }
    }
}
