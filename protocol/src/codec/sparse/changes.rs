//! Changes between two strings of elements: where, and by how much.

use super::{
    super::simd::Path,
    differing::{Differing, GROUP, TILE_BYTES},
};
use std::slice;

/// The changed elements of a string against its base, as the three strings that travel (PROTOCOL.md §8.7).
#[derive(Default)]
pub(super) struct Changes {
    /// For each change, the unchanged elements before it. 255 means "255, and more follow".
    pub(super) gaps: Vec<u8>,
    /// For each change its zigzag difference, 1 to 255, or [`REPLACED`].
    pub(super) differences: Vec<u8>,
    /// The new elements of those that are replaced.
    pub(super) values: Vec<u8>,
    /// The element behind the last change.
    next: usize,
}

/// The first gap that does not fit one byte.
const GAP_MAX: usize = 255;

/// Stands for a difference that does not fit a byte. No change has a difference of 0.
const REPLACED: u8 = 0;

impl Changes {
    /// Removes all changes, and keeps the memory.
    pub(super) fn clear(&mut self) {
        self.gaps.clear();
        self.differences.clear();
        self.values.clear();
        self.next = 0;
    }

    /// The total length of the three strings.
    pub(super) fn len(&self) -> usize {
        self.gaps.len() + self.differences.len() + self.values.len()
    }

    /// Appends the changes from `base` to `raw`, two strings of whole elements of `W` bytes and of equal length. `None`
    /// once there are more than `room` bytes of them; the result is then incomplete.
    pub(super) fn find<const W: usize>(
        &mut self,
        differing: &mut Differing,
        base: &[u8],
        raw: &[u8],
        room: usize,
    ) -> Option<()> {
        let begin = self.next;
        let whole = raw.len() / (GROUP * W) * (GROUP * W);
        let tiles = base[..whole].chunks(TILE_BYTES).zip(raw[..whole].chunks(TILE_BYTES));
        for (tile, (base, raw)) in tiles.enumerate() {
            self.find_in_tile::<W>(begin + tile * (TILE_BYTES / W), differing, base, raw);
            (self.len() <= room).then_some(())?;
        }
        let (base, raw) = (padded(&base[whole..]), padded(&raw[whole..]));
        self.find_in_tile::<W>(begin + whole / W, differing, &base, &raw);
        (self.len() <= room).then_some(())
    }

    /// Appends the changes of one tile of whole groups that begins with the element `first`.
    fn find_in_tile<const W: usize>(
        &mut self,
        first: usize,
        differing: &mut Differing,
        base: &[u8],
        raw: &[u8],
    ) {
        let (base_elements, raw_elements) = (base.as_chunks::<W>().0, raw.as_chunks::<W>().0);
        for element in differing.elements::<W>(Path::fastest(), base, raw) {
            let at = usize::from(*element);
            self.note::<W>(first + at, &base_elements[at], &raw_elements[at]);
        }
    }

    /// Appends the change of `element`.
    fn note<const W: usize>(&mut self, element: usize, base: &[u8; W], raw: &[u8; W]) {
        let mut gap = element - self.next;
        self.next = element + 1;
        while gap >= GAP_MAX {
            self.gaps.push(GAP_MAX as u8);
            gap -= GAP_MAX;
        }
        self.gaps.push(gap as u8);
        match u8::try_from(zigzag::<W>(wide(raw).wrapping_sub(wide(base)))) {
            Ok(difference) => self.differences.push(difference),
            Err(_) => {
                self.differences.push(REPLACED);
                self.values.extend_from_slice(raw);
            }
        }
    }
}

/// The end of a string, padded with zeros to a group.
fn padded(rest: &[u8]) -> [u8; 8 * GROUP] {
    let mut group = [0; 8 * GROUP];
    group[..rest.len()].copy_from_slice(rest);
    group
}

/// An element as a number, with zeros above it.
fn wide<const W: usize>(element: &[u8; W]) -> u64 {
    let mut wide = [0; 8];
    wide[..W].copy_from_slice(element);
    u64::from_le_bytes(wide)
}

/// Small differences of either sign as small numbers: 1, -1, 2, -2 become 2, 1, 4, 3. The difference is a two's
/// complement number in the low `W` bytes.
fn zigzag<const W: usize>(difference: u64) -> u64 {
    let unused = 64 - 8 * W as u32;
    let difference = ((difference << unused) as i64) >> unused;
    ((difference << 1) ^ (difference >> 63)) as u64
}

fn unzigzag(zigzag: u8) -> u64 {
    let zigzag = u64::from(zigzag);
    (zigzag >> 1) ^ (zigzag & 1).wrapping_neg()
}

/// A decoder of changes, which are applied to the elements in order.
///
/// They are applied tile by tile, so that the caller can process each tile while it is in the first-level cache.
pub(super) struct Pending<'a, const W: usize> {
    gaps: slice::Iter<'a, u8>,
    differences: slice::Iter<'a, u8>,
    values: slice::Iter<'a, [u8; W]>,
    /// The element that changes next, and its difference.
    next: Option<(usize, u8)>,
}

impl<'a, const W: usize> Pending<'a, W> {
    /// Reads the changes in these three strings. `None` when they contradict each other, as far as that is known yet.
    pub(super) fn new(gaps: &'a [u8], differences: &'a [u8], values: &'a [u8]) -> Option<Self> {
        let (values, cut) = values.as_chunks();
        let (gaps, differences) = (gaps.iter(), differences.iter());
        let mut pending = Self { gaps, differences, values: values.iter(), next: None };
        pending.advance(0)?;
        cut.is_empty().then_some(pending)
    }

    /// Applies the changes within `tile`, whose first element is number `first`. Tiles come in order and without gaps.
    /// `None`, with the tile partly changed, when the strings contradict each other.
    pub(super) fn apply_to(&mut self, first: usize, tile: &mut [[u8; W]]) -> Option<()> {
        while let Some((at, difference)) = self.next
            && let Some(element) = tile.get_mut(at - first)
        {
            match difference {
                REPLACED => *element = *self.values.next()?,
                difference => add(element, unzigzag(difference)),
            }
            self.advance(at + 1)?;
        }
        Some(())
    }

    /// Whether everything was applied: no change behind the last tile, and no byte left over.
    pub(super) fn is_empty(&self) -> bool {
        self.next.is_none() && self.gaps.len() == 0 && self.values.len() == 0
    }

    /// Reads the next change; `from` is the element behind the previous one.
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
