//! The content of a tensor.

use super::normal::WEIGHTS;
use crate::noise;
use tensor_relay_protocol::Dtype;

/// The bytes of one tensor: words of eight bytes, each computed from its own index.
pub(super) struct Content {
    dtype: Dtype,
    key: u64,
}

impl Content {
    /// The content of a tensor of `dtype`, different for each `key`.
    pub(super) fn new(dtype: Dtype, key: u64) -> Self {
        Self { dtype, key }
    }

    /// Writes the bytes.
    pub(super) fn fill(&self, out: &mut [u8]) {
        self.fill_from(0, out);
    }

    /// The first difference of `bytes`: its offset, the expected byte and the byte found.
    pub(super) fn first_difference(&self, bytes: &[u8]) -> Option<(u64, u8, u8)> {
        let mut expected = [0; BLOCK_BYTES];
        for (number, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
            let expected = &mut expected[..block.len()];
            self.fill_from((number * BLOCK_BYTES / WORD_BYTES) as u64, expected);
            if expected != block {
                let place = std::iter::zip(&*expected, block).position(|(e, f)| e != f)?;
                return Some(((number * BLOCK_BYTES + place) as u64, expected[place], block[place]));
            }
        }
        None
    }

    /// Writes the bytes from the word at `index` on.
    fn fill_from(&self, index: u64, out: &mut [u8]) {
        match self.dtype {
            Dtype::Bf16 => self.fill_words(index, out, four_bf16),
            Dtype::F32 => self.fill_words(index, out, two_f32),
            // The plan's i64 counters, and all other dtypes.
            _ => self.fill_words(index, out, one_counter),
        }
    }

    /// Writes words, of which the last may be partial. `word` converts noise to the dtype's values.
    fn fill_words(&self, mut index: u64, out: &mut [u8], word: impl Fn(u64) -> u64) {
        let bytes_of = |index| word(noise::at(self.key, index)).to_le_bytes();
        let (words, tail) = out.as_chunks_mut::<WORD_BYTES>();
        for out_word in words {
            *out_word = bytes_of(index);
            index += 1;
        }
        tail.copy_from_slice(&bytes_of(index)[..tail.len()]);
    }
}

/// Four normally distributed weights, each drawn by 16 bits of noise.
fn four_bf16(noise: u64) -> u64 {
    let weight = |lane: u32| u64::from(WEIGHTS[usize::from((noise >> lane) as u16)]) << lane;
    weight(0) | weight(16) | weight(32) | weight(48)
}

/// Two normally distributed weights, with noise in the mantissa bits that bf16 does not have.
fn two_f32(noise: u64) -> u64 {
    const MANTISSAS: u64 = 0x0000_ffff_0000_ffff;
    four_bf16(noise) & !MANTISSAS | noise & MANTISSAS
}

/// A counter of up to about a million steps.
fn one_counter(noise: u64) -> u64 {
    noise >> 44
}

const WORD_BYTES: usize = 8;

/// The bytes generated at a time for comparison: they stay in the first-level cache.
const BLOCK_BYTES: usize = 4096;
