//! Sparse deltas: a chunk as the elements that changed since a version that the receiver holds.

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

/// The changed elements of a chunk against the same chunk of a base version: gaps between them, differences, and the
/// values of those that changed by more than a byte can say (PROTOCOL.md §8.7).
///
/// Between two versions of bf16 weights under training 0.1 to 5 % of the elements change, most by one unit in the last
/// place: the delta is 20 to 800 times smaller than the weights. Of f32 weights nearly every element changes, which a
/// sample of a hundredth of the chunk shows: then there is no delta, and it cost only the sample.
///
/// Both ends keep memory for each worker thread: a decoder no more than the largest chunk has bytes, an encoder a few
/// times that if everything changed, and a few hundredths of it otherwise.
#[derive(Debug, Clone, Copy)]
pub struct Sparse;

/// The places of a chunk that are sampled before it is searched.
const SLICES: usize = 16;

/// The bytes sampled at each place.
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
    /// The encoding of a chunk of `dtype` that equals its base: three empty segments, and the bytes beyond the last
    /// whole element. Compares nothing.
    pub fn unchanged(dtype: Dtype, raw: &[u8]) -> Vec<u8> {
        let tail = &raw[raw.len() / width(dtype) * width(dtype)..];
        let mut out = vec![0; 3 * HEAD_BYTES + tail.len()];
        let mut segments = SegmentWriter::new(&mut out);
        let written = [&[][..]; 3].iter().try_for_each(|none| segments.push(none));
        written
            .and_then(|()| segments.bytes(tail))
            .expect("there is room for three heads and the tail");
        out
    }

    /// Applies the delta `encoded` to `base` in place: for a receiver whose base becomes the new version. `done` is
    /// called with every byte of the chunk once, in order and in pieces of at most 16 KiB, each while it is in the
    /// cache: hashing and copying are cheapest there.
    ///
    /// Costs one pass over the base, and a few nanoseconds for each change.
    ///
    /// # Errors
    /// [`DecodeError`] when `encoded` is not a delta of this length. Then `base` is partly changed and must be thrown
    /// away. Any input is survived.
    pub fn apply(
        dtype: Dtype,
        encoded: &[u8],
        base: &mut [u8],
        done: impl FnMut(&[u8]),
    ) -> Result<(), DecodeError> {
        match width(dtype) {
            8 => apply::<8>(encoded, base, done),
            4 => apply::<4>(encoded, base, done),
            2 => apply::<2>(encoded, base, done),
            _ => apply::<1>(encoded, base, done),
        }
    }
}

impl Codec for Sparse {
    fn id(&self) -> CodecId {
        CodecId::Sparse
    }

    /// `None` also without a base of the same length, and when the delta would be longer than half of the chunk: such a
    /// chunk is better encoded by itself.
    fn encode(&self, context: Context<'_>, raw: &[u8], out: &mut [u8]) -> Option<usize> {
        let base = context.base.filter(|base| base.len() == raw.len())?;
        match width(context.dtype) {
            8 => encode::<8>(base, raw, out),
            4 => encode::<4>(base, raw, out),
            2 => encode::<2>(base, raw, out),
            _ => encode::<1>(base, raw, out),
        }
    }

    /// Costs a copy of the base, and a few nanoseconds for each change.
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

fn encode<const W: usize>(base: &[u8], raw: &[u8], out: &mut [u8]) -> Option<usize> {
    let (raw, tail) = raw.split_at(raw.len() / W * W);
    let base = &base[..raw.len()];
    SEARCH.with_borrow_mut(|search| {
        let worth = out.len().min(raw.len() / 2);
        if raw.len() > SLICES * SLICE_BYTES && outlook::<W>(search, base, raw) > worth {
            return None;
        }
        let Search { changes, differing } = search;
        changes.clear();
        changes.find::<W>(differing, base, raw, raw.len())?;
        let mut segments = SegmentWriter::new(&mut out[..worth]);
        segments.push(&changes.gaps)?;
        segments.push(&changes.differences)?;
        segments.push(&changes.values)?;
        segments.bytes(tail)?;
        Some(segments.written())
    })
}

/// Estimates the length of the delta from a sample.
fn outlook<const W: usize>(search: &mut Search, base: &[u8], raw: &[u8]) -> usize {
    let Search { changes, differing } = search;
    changes.clear();
    let stride = raw.len() / SLICES / W * W;
    for (base, raw) in base.chunks_exact(stride).zip(raw.chunks_exact(stride)) {
        // Without a bound: a change takes at most 2 bytes and its value.
        changes.find::<W>(differing, &base[..SLICE_BYTES], &raw[..SLICE_BYTES], usize::MAX);
    }
    let entropy = |bytes: &[u8]| bytes.len() as f64 * Histogram::of(bytes).bits_per_byte() / 8.0;
    let sample = entropy(&changes.gaps) + entropy(&changes.differences) + changes.values.len() as f64;
    (sample * raw.len() as f64 / (SLICES * SLICE_BYTES) as f64) as usize
}

/// Decodes into `raw`, tile by tile: each is copied from `base` just before its changes are applied, while it is in the
/// cache.
fn decode<const W: usize>(base: &[u8], encoded: &[u8], raw: &mut [u8]) -> Result<(), DecodeError> {
    with_changes::<W>(encoded, raw.len(), |mut pending, tail| {
        let (elements, rest) = raw.as_chunks_mut::<W>();
        let (base, _) = base.as_chunks::<W>();
        rest.copy_from_slice(tail);
        let tiles = elements.chunks_mut(tile_elements::<W>()).zip(base.chunks(tile_elements::<W>()));
        for (number, (tile, base)) in tiles.enumerate() {
            tile.copy_from_slice(base);
            pending.apply_to(number * tile_elements::<W>(), tile)?;
        }
        pending.is_empty().then_some(())
    })
}

/// Applies the changes in place, and passes each tile to `done`.
fn apply<const W: usize>(
    encoded: &[u8],
    base: &mut [u8],
    mut done: impl FnMut(&[u8]),
) -> Result<(), DecodeError> {
    with_changes::<W>(encoded, base.len(), |mut pending, tail| {
        let (elements, rest) = base.as_chunks_mut::<W>();
        for (number, tile) in elements.chunks_mut(tile_elements::<W>()).enumerate() {
            pending.apply_to(number * tile_elements::<W>(), tile)?;
            done(tile.as_flattened());
        }
        rest.copy_from_slice(tail);
        done(rest);
        pending.is_empty().then_some(())
    })
}

const fn tile_elements<const W: usize>() -> usize {
    TILE_BYTES / W
}

/// Unpacks the changes of a chunk of `raw_bytes` and passes them to `work`, with the bytes beyond the last whole
/// element. `work` returns `None` where they do not fit the chunk.
fn with_changes<const W: usize>(
    encoded: &[u8],
    raw_bytes: usize,
    work: impl FnOnce(Pending<'_, W>, &[u8]) -> Option<()>,
) -> Result<(), DecodeError> {
    let broken = |detail| DecodeError::malformed(CodecId::Sparse, detail);
    let mut rest = encoded;
    let gaps = Segment::read(CodecId::Sparse, &mut rest)?;
    let differences = Segment::read(CodecId::Sparse, &mut rest)?;
    let values = Segment::read(CodecId::Sparse, &mut rest)?;
    let bytes = gaps.len().saturating_add(differences.len()).saturating_add(values.len());
    if bytes > raw_bytes {
        return Err(broken("the changes take more bytes than the chunk"));
    }
    if rest.len() != raw_bytes % W {
        return Err(broken("what follows the changes is not the rest of the chunk"));
    }
    with_scratch(bytes, |scratch| {
        let (for_gaps, scratch) = scratch.split_at_mut(gaps.len());
        let (for_differences, for_values) = scratch.split_at_mut(differences.len());
        let gaps = gaps.unpack(for_gaps)?;
        let differences = differences.unpack(for_differences)?;
        let values = values.unpack(for_values)?;
        Pending::new(gaps, differences, values)
            .and_then(|pending| work(pending, rest))
            .ok_or_else(|| broken("the changes do not fit the chunk or each other"))
    })
}
