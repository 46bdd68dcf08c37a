//! Changes between two strings of elements: their positions and differences.

use super::{
    super::simd::Path,
    differing::{Differing, GROUP, TILE_BYTES},
};
use std::slice;

/// The changed elements of a string against its base, as the three strings that are sent (PROTOCOL.md §8.7).
#[derive(Default)]
pub(super) struct Changes {
    /// For each change, the number of unchanged elements since the previous one. A byte of 255 means that the gap
    /// continues in the next byte.
    pub(super) gaps: Vec<u8>,
    /// For each change its zigzag difference, 1 to 255, or [`REPLACED`].
    pub(super) differences: Vec<u8>,
    /// The new values of replaced elements.
    pub(super) values: Vec<u8>,
    /// The index of the element behind the last change.
    next: usize,
}

/// The gap byte that means "255, and the gap continues".
const GAP_MAX: usize = 255;

/// Marks an element that is replaced because its difference does not fit a byte. No change has a difference of 0.
const REPLACED: u8 = 0;

impl Changes {
    /// Removes all changes but keeps the memory.
    pub(super) fn clear(&mut self) {
        self.gaps.clear();
        self.differences.clear();
        self.values.clear();
        self.next = 0;
    }

    /// The total length of the three strings in bytes.
    pub(super) fn len(&self) -> usize {
        self.gaps.len() + self.differences.len() + self.values.len()
    }

    /// Appends the changes from `base` to `raw`, strings of equal length and of whole elements of `W` bytes. `None`,
    /// with an incomplete result, once the changes exceed `bytes_max`. Calls `on_tile` with both strings, tile by tile.
    pub(super) fn find<const W: usize>(
        &mut self,
        differing: &mut Differing,
        base: &[u8],
        raw: &[u8],
        bytes_max: usize,
        mut on_tile: impl FnMut(&[u8], &[u8]),
    ) -> Option<()> {
        let begin = self.next;
        let grouped = raw.len() / (GROUP * W) * (GROUP * W);
        let tiles = base[..grouped].chunks(TILE_BYTES).zip(raw[..grouped].chunks(TILE_BYTES));
        for (tile, (base, raw)) in tiles.enumerate() {
            self.find_in_tile::<W>(begin + tile * (TILE_BYTES / W), differing, base, raw);
            on_tile(base, raw);
            (self.len() <= bytes_max).then_some(())?;
        }
        let (base, raw) = (&base[grouped..], &raw[grouped..]);
        self.find_in_tile::<W>(begin + grouped / W, differing, &padded(base), &padded(raw));
        on_tile(base, raw);
        (self.len() <= bytes_max).then_some(())
    }

    /// Appends the changes of one tile of whole groups. `first` is the index of the tile's first element.
    fn find_in_tile<const W: usize>(
        &mut self,
        first: usize,
        differing: &mut Differing,
        base: &[u8],
        raw: &[u8],
    ) {
        let elements = differing.elements::<W>(Path::fastest(), base, raw);
        self.push_gaps(first, elements);
        self.push_differences(elements, base.as_chunks::<W>().0, raw.as_chunks::<W>().0);
    }

    /// Appends the gaps before `elements`, whose indexes count from `first`. Without a branch for long gaps, which
    /// would often be mispredicted: the new memory is filled with the bytes that continue a gap.
    fn push_gaps(&mut self, first: usize, elements: &[u16]) {
        let Some(last) = elements.last() else { return };
        let mut at = self.gaps.len();
        let continued = (first + usize::from(*last) - self.next) / GAP_MAX;
        self.gaps.resize(at + continued + elements.len(), GAP_MAX as u8);
        for element in elements {
            let element = first + usize::from(*element);
            let gap = element - self.next;
            self.next = element + 1;
            at += gap / GAP_MAX;
            self.gaps[at] = (gap % GAP_MAX) as u8;
            at += 1;
        }
        self.gaps.truncate(at);
    }

    /// Appends the differences of `elements`, and the values of those that are replaced.
    fn push_differences<const W: usize>(&mut self, elements: &[u16], base: &[[u8; W]], raw: &[[u8; W]]) {
        let begin = self.differences.len();
        self.differences.extend(elements.iter().map(|element| {
            let at = usize::from(*element);
            let code = zigzag::<W>(wide(&raw[at]).wrapping_sub(wide(&base[at])));
            u8::try_from(code).unwrap_or(REPLACED)
        }));
        for (element, difference) in elements.iter().zip(&self.differences[begin..]) {
            if *difference == REPLACED {
                self.values.extend_from_slice(&raw[usize::from(*element)]);
            }
        }
    }
}

/// The elements behind the last whole group of a string, padded with zeros to whole groups of any width.
fn padded(tail: &[u8]) -> [u8; 8 * GROUP] {
    let mut whole = [0; 8 * GROUP];
    whole[..tail.len()].copy_from_slice(tail);
    whole
}

/// An element as a number, zero-extended.
fn wide<const W: usize>(element: &[u8; W]) -> u64 {
    let mut wide = [0; 8];
    wide[..W].copy_from_slice(element);
    u64::from_le_bytes(wide)
}

/// The zigzag code of a two's complement number in the low `W` bytes: 1, -1, 2, -2 become 2, 1, 4, 3.
fn zigzag<const W: usize>(difference: u64) -> u64 {
    let unused = 64 - 8 * W as u32;
    let difference = ((difference << unused) as i64) >> unused;
    ((difference << 1) ^ (difference >> 63)) as u64
}

fn unzigzag(zigzag: u8) -> u64 {
    let zigzag = u64::from(zigzag);
    (zigzag >> 1) ^ (zigzag & 1).wrapping_neg()
}

/// The changes that a decoder has not applied yet. It applies them in order, tile by tile, so the caller can process
/// each tile while it is in the first-level cache.
pub(super) struct Pending<'a, const W: usize> {
    gaps: slice::Iter<'a, u8>,
    differences: slice::Iter<'a, u8>,
    values: slice::Iter<'a, [u8; W]>,
    /// The index of the next changed element, and its difference.
    next: Option<(usize, u8)>,
}

impl<'a, const W: usize> Pending<'a, W> {
    /// Reads the changes in these three strings. `None` if the first change has no gap, or a value is incomplete; later
    /// contradictions are found by [`apply_to`](Self::apply_to) and [`is_empty`](Self::is_empty).
    pub(super) fn new(gaps: &'a [u8], differences: &'a [u8], values: &'a [u8]) -> Option<Self> {
        let (values, incomplete) = values.as_chunks();
        let (gaps, differences) = (gaps.iter(), differences.iter());
        let mut pending = Self { gaps, differences, values: values.iter(), next: None };
        pending.advance(0)?;
        incomplete.is_empty().then_some(pending)
    }

    /// Applies the changes within `tile`, whose first element has the index `first`. The caller passes adjacent tiles
    /// in order. Calls `on_change` with the place of each changed element in the tile, and its new value. `None`, with
    /// the tile partly changed, when the strings contradict each other.
    pub(super) fn apply_to(
        &mut self,
        first: usize,
        tile: &mut [[u8; W]],
        mut on_change: impl FnMut(usize, [u8; W]),
    ) -> Option<()> {
        while let Some((at, difference)) = self.next
            && let Some(element) = tile.get_mut(at - first)
        {
            match difference {
                REPLACED => *element = *self.values.next()?,
                difference => add(element, unzigzag(difference)),
            }
            on_change(at - first, *element);
            self.advance(at + 1)?;
        }
        Some(())
    }

    /// Whether all changes were applied: none lies behind the last tile, and no byte remains in the strings.
    pub(super) fn is_empty(&self) -> bool {
        self.next.is_none() && self.gaps.len() == 0 && self.values.len() == 0
    }

    /// Reads the next change; `from` is the index of the element behind the previous change.
    fn advance(&mut self, from: usize) -> Option<()> {
        self.next = match self.differences.next() {
            Some(difference) => Some((from + take_gap(&mut self.gaps)?, *difference)),
            None => None,
        };
        Some(())
    }
}

fn take_gap(gaps: &mut slice::Iter<'_, u8>) -> Option<usize> {
    let mut gap = 0;
    loop {
        let byte = usize::from(*gaps.next()?);
        gap += byte;
        if byte < GAP_MAX {
            return Some(gap);
        }
    }
}

fn add<const W: usize>(element: &mut [u8; W], difference: u64) {
    let sum = wide(element).wrapping_add(difference);
    element.copy_from_slice(&sum.to_le_bytes()[..W]);
}
