//! The search for differing elements in two strings.

use super::super::simd::Path;

/// The number of elements that are compared at once; each has a bit in a mask.
pub(in crate::codec) const GROUP: usize = 32;

/// The bytes compared before the differing elements are collected: tiles of both strings fit the first-level cache.
pub(super) const TILE_BYTES: usize = 16 << 10;

/// The number of indexes of a group that are written together, without a branch between them.
const UNROLLED: usize = 4;

/// The memory of the search for the differing elements of a tile, which finds first the groups that contain any, then
/// the elements.
///
/// Candidate indexes are written unconditionally: a mispredicted branch would cost more. The size is 35 KiB, so keep
/// one per thread.
pub(in crate::codec) struct Differing {
    masks: [u32; TILE_BYTES / GROUP],
    groups: [u16; TILE_BYTES / GROUP],
    elements: [u16; TILE_BYTES],
}

impl Default for Differing {
    fn default() -> Self {
        Self { masks: [0; TILE_BYTES / GROUP], groups: [0; TILE_BYTES / GROUP], elements: [0; TILE_BYTES] }
    }
}

impl Differing {
    /// The indexes of the differing elements of `W` bytes, in order. Both strings have the same number of whole groups,
    /// at most a tile.
    pub(super) fn elements<const W: usize>(&mut self, path: Path, base: &[u8], raw: &[u8]) -> &[u16] {
        debug_assert_eq!(base.len(), raw.len());
        let count = path.find_differing(W, base, raw, self);
        &self.elements[..count]
    }

    /// Finds the elements that `mark` marks in the masks of `bytes` bytes, and returns their number. Inlined, so that each
    /// path compiles it with its own instructions: without them, counting the bits of a mask takes a dozen.
    #[inline(always)]
    pub(in crate::codec) fn find(
        &mut self,
        width: usize,
        bytes: usize,
        mark: impl FnOnce(&mut [u32]),
    ) -> usize {
        let Self { masks, groups, elements } = self;
        let masks = &mut masks[..bytes / (GROUP * width)];
        mark(masks);
        let mut count = 0;
        for group in differing_groups(masks, groups) {
            let mask = masks[usize::from(*group)];
            count += write_elements(mask, group * GROUP as u16, &mut elements[count..]);
        }
        count
    }
}

/// The indexes of the non-zero masks.
#[inline(always)]
fn differing_groups<'a>(masks: &[u32], groups: &'a mut [u16]) -> &'a [u16] {
    let mut count = 0;
    for (group, mask) in (0..).zip(masks) {
        groups[count] = group;
        count += usize::from(*mask != 0);
    }
    &groups[..count]
}

/// Writes the indexes of the differing elements of one group and returns their number. `first` is the index of the
/// group's first element.
#[inline(always)]
fn write_elements(mut mask: u32, first: u16, elements: &mut [u16]) -> usize {
    let count = mask.count_ones() as usize;
    for four in elements.chunks_exact_mut(UNROLLED).take(count.div_ceil(UNROLLED)) {
        for element in four {
            *element = first + mask.trailing_zeros() as u16;
            mask &= mask.wrapping_sub(1);
        }
    }
    count
}

/// Finds the differing elements of `width` bytes, in order, and returns their number.
pub(in crate::codec) fn find_differing(
    width: usize,
    base: &[u8],
    raw: &[u8],
    differing: &mut Differing,
) -> usize {
    differing.find(width, raw.len(), |masks| match width {
        8 => mark::<8, { 8 * GROUP }>(base, raw, masks),
        4 => mark::<4, { 4 * GROUP }>(base, raw, masks),
        2 => mark::<2, { 2 * GROUP }>(base, raw, masks),
        _ => mark::<1, GROUP>(base, raw, masks),
    })
}

/// Computes a mask for each group of elements of `W` bytes: bit `i` is set if element `i` of the group differs.
fn mark<const W: usize, const GROUP_BYTES: usize>(base: &[u8], raw: &[u8], masks: &mut [u32]) {
    for (base, raw, mask) in groups::<GROUP_BYTES>(base, raw, masks) {
        *mask = if differ(base, raw) { mask_of::<W>(base, raw) } else { 0 };
    }
}

/// The groups of both strings, each with its mask.
pub(in crate::codec) fn groups<'a, const GROUP_BYTES: usize>(
    base: &'a [u8],
    raw: &'a [u8],
    masks: &'a mut [u32],
) -> impl Iterator<Item = (&'a [u8; GROUP_BYTES], &'a [u8; GROUP_BYTES], &'a mut u32)> {
    let both = base.as_chunks().0.iter().zip(raw.as_chunks().0);
    both.zip(masks).map(|((base, raw), mask)| (base, raw, mask))
}

/// Whether two groups differ. Written as an OR of differences because compilers vectorise that.
fn differ<const BYTES: usize>(base: &[u8; BYTES], raw: &[u8; BYTES]) -> bool {
    let words = base.as_chunks().0.iter().zip(raw.as_chunks().0);
    words.fold(0, |any, (base, raw)| any | (u64::from_le_bytes(*base) ^ u64::from_le_bytes(*raw))) != 0
}

fn mask_of<const W: usize>(base: &[u8], raw: &[u8]) -> u32 {
    let elements = base.as_chunks::<W>().0.iter().zip(raw.as_chunks::<W>().0);
    elements
        .zip(0..)
        .fold(0, |mask, ((base, raw), bit)| mask | (u32::from(base != raw) << bit))
}
