//! Exponent bit planes: a codec for floats at memory speed.

mod block;
mod decoder;
mod encoder;
pub(super) mod layout;
pub(super) mod portable;
mod table;
#[cfg(test)]
mod tests;

use self::{block::Scratch, decoder::Decoder, encoder::Encoder, layout::Layout};
use super::{Codec, CodecId, Context, DecodeError, simd::Path};
use crate::Dtype;
use std::cell::RefCell;

/// The exponents of floats in two bits or more each, as bit masks; signs and mantissas are stored unchanged
/// (PROTOCOL.md §8.4).
///
/// Trained weights, gradients, activations and caches use about a dozen exponents, and the three most frequent cover
/// three quarters of the elements. Two bits name one of the three, or escape to the next level; the last level's
/// escapes are stored whole. Vector instructions compare, gather and scatter 32 or 64 symbols at a time by masks, so
/// this codec is much faster than entropy coders.
///
/// bf16 weights become 1.44 to 1.49 times smaller. Each thread that has used the codec keeps about 48 KiB.
#[derive(Debug, Clone, Copy)]
pub struct BitPlanes;

/// [`BitPlanes`] on a given path instead of the fastest, for tests that compare the paths and for benchmarks.
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
pub struct BitPlanesOn(pub Path);

impl BitPlanes {
    /// Whether elements of `dtype` have an exponent; the codec encodes no others.
    pub(super) fn suits(dtype: Dtype) -> bool {
        Layout::of(dtype).is_some()
    }
}

thread_local! {
    static SCRATCH: RefCell<Option<Box<Scratch>>> = const { RefCell::new(None) };
}

/// The size of the length field in front of the blocks, which holds the raw length.
const LENGTH_BYTES: usize = 4;

impl Codec for BitPlanes {
    fn id(&self) -> CodecId {
        CodecId::BitPlanes
    }

    /// `None` when the encoding does not fit `out`, and for dtypes without an exponent.
    fn encode(&self, context: Context<'_>, raw: &[u8], out: &mut [u8]) -> Option<usize> {
        BitPlanesOn(Path::fastest()).encode(context, raw, out)
    }

    fn decode(&self, context: Context<'_>, encoded: &[u8], raw: &mut [u8]) -> Result<(), DecodeError> {
        BitPlanesOn(Path::fastest()).decode(context, encoded, raw)
    }
}

impl Codec for BitPlanesOn {
    fn id(&self) -> CodecId {
        CodecId::BitPlanes
    }

    fn encode(&self, context: Context<'_>, raw: &[u8], out: &mut [u8]) -> Option<usize> {
        let layout = Layout::of(context.dtype)?;
        let (words, tail) = raw.split_at(whole_words(layout, raw.len()));
        let room_bytes = out.len();
        let mut room = out;
        let length = u32::try_from(raw.len()).ok()?;
        room.split_off_mut(..LENGTH_BYTES)?.copy_from_slice(&length.to_le_bytes());
        with_scratch(|scratch| Encoder::new(layout, self.0, scratch).encode(words, &mut room))?;
        room.split_off_mut(..tail.len())?.copy_from_slice(tail);
        Some(room_bytes - room.len())
    }

    fn decode(&self, context: Context<'_>, encoded: &[u8], raw: &mut [u8]) -> Result<(), DecodeError> {
        let layout = Layout::of(context.dtype).ok_or_else(|| malformed("the dtype has no exponent"))?;
        let (length, mut blocks) = encoded
            .split_first_chunk::<LENGTH_BYTES>()
            .ok_or_else(|| malformed(decoder::SHORT))?;
        let found = u32::from_le_bytes(*length) as usize;
        if found != raw.len() {
            return Err(DecodeError::WrongLength { expected: raw.len(), found });
        }
        let (words, tail) = raw.split_at_mut(whole_words(layout, raw.len()));
        with_scratch(|scratch| Decoder::new(layout, self.0, scratch).decode(&mut blocks, words))
            .map_err(malformed)?;
        if blocks.len() != tail.len() {
            return Err(malformed("the bytes after the blocks are not the remainder of the chunk"));
        }
        tail.copy_from_slice(blocks);
        Ok(())
    }
}

/// The length of the whole words (elements, or parts of complex ones) in `bytes` bytes. Chunks never split an element,
/// so only hostile lengths leave a remainder.
fn whole_words(layout: Layout, bytes: usize) -> usize {
    bytes - bytes % layout.word_bytes()
}

fn with_scratch<T>(work: impl FnOnce(&mut Scratch) -> T) -> T {
    SCRATCH.with_borrow_mut(|slot| work(slot.get_or_insert_with(Scratch::new)))
}

fn malformed(detail: &str) -> DecodeError {
    DecodeError::Malformed { codec: CodecId::BitPlanes.name(), detail: detail.to_owned() }
}
