//! Sparse deltas: a chunk as its changed elements against a base version that the receiver holds.

mod changes;
pub(super) mod differing;
#[cfg(test)]
mod tests;

use self::{
    changes::{Changes, Pending},
    differing::{Differing, TILE_BYTES},
};
use super::{
    Codec, CodecId, Context, DecodeError,
    histogram::Histogram,
    segment::{HEAD_BYTES, Segment, SegmentWriter, with_scratch},
    width,
};
use crate::Dtype;
use std::cell::RefCell;

/// The changed elements of a chunk against the same chunk of a base version: the gaps between them, their differences,
/// and the new values of elements whose difference does not fit a byte (PROTOCOL.md §8.7).
///
/// Between two versions of bf16 weights under training 0.1 to 5 % of the elements change, most by one unit in the last
/// place: the delta is 20 to 800 times smaller than the weights. Of f32 weights nearly every element changes. A sample
/// of 32 KiB of the chunk detects this, and no delta is made.
///
/// Both ends keep memory for each worker thread: a decoder at most the size of the largest chunk; an encoder a few
/// hundredths of that size, or about twice that size if a search was misled by its sample.
#[derive(Debug, Clone, Copy)]
pub struct Sparse;

/// The number of slices that are sampled before a chunk is searched for changes.
const SLICES: usize = 16;

/// The bytes in a slice.
const SLICE_BYTES: usize = 2048;

thread_local! {
    static SEARCH: RefCell<Search> = RefCell::default();
}

/// The results of a search for changes.
#[derive(Default)]
struct Search {
    changes: Changes,
    differing: Box<Differing>,
}

impl Sparse {
    /// The encoding of `raw`, a chunk of `dtype` that is known to equal its base: three empty segments, and the bytes
    /// beyond the last whole element.
    pub fn unchanged(dtype: Dtype, raw: &[u8]) -> Vec<u8> {
        let tail = &raw[raw.len() / width(dtype) * width(dtype)..];
        let mut out = vec![0; 3 * HEAD_BYTES + tail.len()];
        let mut segments = SegmentWriter::new(&mut out);
        let written = [&[][..]; 3].iter().try_for_each(|empty| segments.push(empty));
        written
            .and_then(|()| segments.push_bytes(tail))
            .expect("there is room for three heads and the tail");
        out
    }

    /// Like [`encode`](Codec::encode), and calls `on_tile` with the bytes of the base and of the chunk, in order and in
    /// pieces of at most 16 KiB, for hashing them while they are in the cache. The search ends, and so do the calls,
    /// when too much changed: then the result is `None`, as it is for a base of another length, without a call.
    pub fn compare(
        context: Context<'_>,
        raw: &[u8],
        out: &mut [u8],
        on_tile: impl FnMut(&[u8], &[u8]),
    ) -> Option<usize> {
        let base = context.base.filter(|base| base.len() == raw.len())?;
        match width(context.dtype) {
            8 => encode::<8>(base, raw, out, on_tile),
            4 => encode::<4>(base, raw, out, on_tile),
            2 => encode::<2>(base, raw, out, on_tile),
            _ => encode::<1>(base, raw, out, on_tile),
        }
    }

    /// Decodes into `raw`, and turns `base`, of the same length, into the same version: for a receiver that keeps it as
    /// the base of the next one. Calls `on_tile` with the new bytes of the chunk, in order, in pieces of at most 16 KiB,
    /// for hashing them while they are in the cache.
    ///
    /// Takes one pass over both, and a few nanoseconds for each change. No input causes a panic.
    ///
    /// # Errors
    /// [`DecodeError`] when the lengths differ, or `encoded` is not a delta of this length. Then `base` may be partly
    /// changed and must be discarded.
    pub fn apply(
        dtype: Dtype,
        encoded: &[u8],
        base: &mut [u8],
        raw: &mut [u8],
        on_tile: impl FnMut(&[u8]),
    ) -> Result<(), DecodeError> {
        if base.len() != raw.len() {
            return Err(DecodeError::NoBase { expected: raw.len() });
        }
        match width(dtype) {
            8 => apply::<8>(encoded, base, raw, on_tile),
            4 => apply::<4>(encoded, base, raw, on_tile),
            2 => apply::<2>(encoded, base, raw, on_tile),
            _ => apply::<1>(encoded, base, raw, on_tile),
        }
    }
}

impl Codec for Sparse {
    fn id(&self) -> CodecId {
        CodecId::Sparse
    }

    /// `None` without a base of the same length, and when the delta does not fit `out` or would be longer than half of
    /// the chunk: such a chunk is better encoded without a base.
    fn encode(&self, context: Context<'_>, raw: &[u8], out: &mut [u8]) -> Option<usize> {
        Self::compare(context, raw, out, |_, _| ())
    }

    /// Takes a copy of the base, and a few nanoseconds for each change.
    fn decode(&self, context: Context<'_>, encoded: &[u8], raw: &mut [u8]) -> Result<(), DecodeError> {
        let base = context.base.filter(|base| base.len() == raw.len());
        let base = base.ok_or(DecodeError::NoBase { expected: raw.len() })?;
        match width(context.dtype) {
            8 => decode::<8>(base, encoded, raw),
            4 => decode::<4>(base, encoded, raw),
            2 => decode::<2>(base, encoded, raw),
            _ => decode::<1>(base, encoded, raw),
        }
    }
}

fn encode<const W: usize>(
    base: &[u8],
    raw: &[u8],
    out: &mut [u8],
    mut on_tile: impl FnMut(&[u8], &[u8]),
) -> Option<usize> {
    let (raw, tail) = raw.split_at(raw.len() / W * W);
    let (base, base_tail) = base.split_at(raw.len());
    SEARCH.with_borrow_mut(|search| {
        let bytes_max = out.len().min(raw.len() / 2);
        if raw.len() > SLICES * SLICE_BYTES && estimated_bytes::<W>(search, base, raw) > bytes_max {
            return None;
        }
        let Search { changes, differing } = search;
        changes.clear();
        changes.find::<W>(differing, base, raw, raw.len(), &mut on_tile)?;
        on_tile(base_tail, tail);
        let mut segments = SegmentWriter::new(&mut out[..bytes_max]);
        segments.push(&changes.gaps)?;
        segments.push(&changes.differences)?;
        segments.push(&changes.values)?;
        segments.push_bytes(tail)?;
        Some(segments.written())
    })
}

/// The length of the delta in bytes, estimated from a sample.
fn estimated_bytes<const W: usize>(search: &mut Search, base: &[u8], raw: &[u8]) -> usize {
    let Search { changes, differing } = search;
    changes.clear();
    let stride = raw.len() / SLICES / W * W;
    for (base, raw) in base.chunks_exact(stride).zip(raw.chunks_exact(stride)) {
        // No limit is needed: the slices are short.
        changes.find::<W>(differing, &base[..SLICE_BYTES], &raw[..SLICE_BYTES], usize::MAX, |_, _| ());
    }
    let entropy = |bytes: &[u8]| bytes.len() as f64 * Histogram::of(bytes).bits_per_byte() / 8.0;
    let sample = entropy(&changes.gaps) + entropy(&changes.differences) + changes.values.len() as f64;
    (sample * raw.len() as f64 / (SLICES * SLICE_BYTES) as f64) as usize
}

/// Decodes into `raw`, tile by tile: a tile is copied from `base` and its changes are applied while it is in the cache.
fn decode<const W: usize>(base: &[u8], encoded: &[u8], raw: &mut [u8]) -> Result<(), DecodeError> {
    with_changes::<W>(encoded, raw.len(), |mut pending, tail| {
        let (elements, rest) = raw.as_chunks_mut::<W>();
        let (base, _) = base.as_chunks::<W>();
        rest.copy_from_slice(tail);
        let tiles = elements.chunks_mut(tile_elements::<W>()).zip(base.chunks(tile_elements::<W>()));
        for (index, (tile, base)) in tiles.enumerate() {
            tile.copy_from_slice(base);
            pending.apply_to(index * tile_elements::<W>(), tile, |_, _| ())?;
        }
        pending.is_empty().then_some(())
    })
}

/// Decodes into `raw` and `base`, tile by tile, and passes each tile to `on_tile`, and then the bytes beyond the last whole
/// element. The base is first read in order, by the copy: changes at random places would wait for each line of memory.
fn apply<const W: usize>(
    encoded: &[u8],
    base: &mut [u8],
    raw: &mut [u8],
    mut on_tile: impl FnMut(&[u8]),
) -> Result<(), DecodeError> {
    with_changes::<W>(encoded, base.len(), |mut pending, tail| {
        let (elements, rest) = base.as_chunks_mut::<W>();
        let (copies, copied_rest) = raw.as_chunks_mut::<W>();
        let tiles = elements
            .chunks_mut(tile_elements::<W>())
            .zip(copies.chunks_mut(tile_elements::<W>()));
        for (index, (tile, copy)) in tiles.enumerate() {
            copy.copy_from_slice(tile);
            pending.apply_to(index * tile_elements::<W>(), tile, |at, element| copy[at] = element)?;
            on_tile(tile.as_flattened());
        }
        rest.copy_from_slice(tail);
        copied_rest.copy_from_slice(tail);
        on_tile(tail);
        pending.is_empty().then_some(())
    })
}

const fn tile_elements<const W: usize>() -> usize {
    TILE_BYTES / W
}

/// Unpacks the changes of a chunk of `raw_bytes` and passes them to `work`, with the bytes beyond the last whole
/// element. `work` returns `None` if the changes do not fit the chunk.
fn with_changes<const W: usize>(
    encoded: &[u8],
    raw_bytes: usize,
    work: impl FnOnce(Pending<'_, W>, &[u8]) -> Option<()>,
) -> Result<(), DecodeError> {
    let malformed = |detail| DecodeError::malformed(CodecId::Sparse, detail);
    let mut rest = encoded;
    let gaps = Segment::read(CodecId::Sparse, &mut rest)?;
    let differences = Segment::read(CodecId::Sparse, &mut rest)?;
    let values = Segment::read(CodecId::Sparse, &mut rest)?;
    let bytes = gaps.len().saturating_add(differences.len()).saturating_add(values.len());
    if bytes > raw_bytes {
        return Err(malformed("the changes have more bytes than the chunk"));
    }
    if rest.len() != raw_bytes % W {
        return Err(malformed("the bytes after the changes are not the remainder of the chunk"));
    }
    with_scratch(bytes, |scratch| {
        let (for_gaps, scratch) = scratch.split_at_mut(gaps.len());
        let (for_differences, for_values) = scratch.split_at_mut(differences.len());
        let gaps = gaps.unpack(for_gaps)?;
        let differences = differences.unpack(for_differences)?;
        let values = values.unpack(for_values)?;
        Pending::new(gaps, differences, values)
            .and_then(|pending| work(pending, rest))
            .ok_or_else(|| malformed("the changes do not fit the chunk or each other"))
    })
}
