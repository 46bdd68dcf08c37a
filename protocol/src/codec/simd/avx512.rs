//! The AVX-512 path: 64 symbols at a time; comparisons produce masks, and masks compress and expand bytes (VBMI2).
//!
//! Each function has the same behaviour as the function of that name in [`portable`] or `sparse/differing.rs`.

use super::{
    super::{
        bitplanes::{
            layout::{LowBits, Words},
            portable::{self, join_masks, split_masks},
        },
        sparse::differing::{Differing, groups},
    },
    avx2, vectors,
};
use std::arch::x86_64::*;

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
pub(super) fn encode_level(
    level_symbols: [u8; 3],
    plain: &[[u8; 64]],
    masks: &mut [[u8; 16]],
    escapes: &mut [u8],
) -> usize {
    let [symbol0, symbol1, symbol2] = level_symbols.map(|symbol| _mm512_set1_epi8(symbol as i8));
    let mut count = 0;
    for (group, mask) in plain.iter().zip(masks) {
        let group = load(group);
        let is0 = _mm512_cmpeq_epi8_mask(group, symbol0);
        let is1 = _mm512_cmpeq_epi8_mask(group, symbol1);
        let is2 = _mm512_cmpeq_epi8_mask(group, symbol2);
        let escaped = !(is0 | is1 | is2);
        *mask = join_masks(is1 | escaped, is2 | escaped);
        let room = escapes[count..].first_chunk_mut().expect(ESCAPES_HAVE_ROOM);
        store(room, _mm512_maskz_compress_epi8(escaped, group));
        count += escaped.count_ones() as usize;
    }
    count
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
pub(super) fn decode_level(
    level_symbols: [u8; 3],
    masks: &[[u8; 16]],
    escapes: &[u8],
    plain: &mut [[u8; 64]],
) -> usize {
    let [symbol0, symbol1, symbol2] = level_symbols.map(|symbol| _mm512_set1_epi8(symbol as i8));
    let mut count = 0;
    for (group, mask) in plain.iter_mut().zip(masks) {
        let (bit0, bit1) = split_masks(mask);
        let named = _mm512_mask_blend_epi8(bit1, _mm512_mask_blend_epi8(bit0, symbol0, symbol1), symbol2);
        let escaped = bit0 & bit1;
        let packed = load(escapes[count..].first_chunk().expect(ESCAPES_HAVE_ROOM));
        store(group, _mm512_mask_expand_epi8(named, escaped, packed));
        count += escaped.count_ones() as usize;
    }
    count
}

/// Why at least 64 bytes of `escapes`, those of a group, follow those of earlier groups.
const ESCAPES_HAVE_ROOM: &str = "no more escapes than symbols, and room for 128 more";

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
pub(super) fn split_low_bits(bits: LowBits, upper: &mut [[u8; 64]], low: &mut [u8]) {
    match bits {
        LowBits::None => {}
        LowBits::Three => {
            for (group, low) in upper.iter_mut().zip(low.as_chunks_mut::<24>().0) {
                let bytes = load(group);
                for (bit, plane) in low.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                    *plane = _mm512_test_epi8_mask(bytes, _mm512_set1_epi8(1 << bit)).to_le_bytes();
                }
                let symbols = _mm512_and_si512(_mm512_srli_epi16(bytes, 3), _mm512_set1_epi8(0x1f));
                store(group, symbols);
            }
        }
        LowBits::Four => portable::split_nibbles(upper, low),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
pub(super) fn merge_low_bits(bits: LowBits, low: &[u8], upper: &mut [[u8; 64]]) {
    match bits {
        LowBits::None => {}
        LowBits::Three => {
            for (group, low) in upper.iter_mut().zip(low.as_chunks::<24>().0) {
                let symbols = _mm512_and_si512(load(group), _mm512_set1_epi8(0x1f));
                let mut bytes = _mm512_slli_epi16(symbols, 3);
                for (bit, plane) in low.as_chunks::<8>().0.iter().enumerate() {
                    let set = _mm512_maskz_set1_epi8(u64::from_le_bytes(*plane), 1 << bit);
                    bytes = _mm512_or_si512(bytes, set);
                }
                store(group, bytes);
            }
        }
        LowBits::Four => portable::merge_nibbles(low, upper),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
pub(super) fn split_words(words: Words, raw: &[u8], upper: &mut [u8], rest: &mut [u8]) {
    portable::split_words(words, raw, upper, rest);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
pub(super) fn merge_words(words: Words, upper: &[u8], rest: &[u8], raw: &mut [u8]) {
    portable::merge_words(words, upper, rest, raw);
}

#[target_feature(enable = "avx2,avx512f,avx512bw,bmi1,bmi2,popcnt")]
pub(super) fn find_differing(width: usize, base: &[u8], raw: &[u8], differing: &mut Differing) -> usize {
    differing.find(width, raw.len(), |masks| mark_differing(width, base, raw, masks))
}

#[target_feature(enable = "avx2,avx512f,avx512bw")]
fn mark_differing(width: usize, base: &[u8], raw: &[u8], masks: &mut [u32]) {
    match width {
        8 => {
            for (base, raw, mask) in groups::<256>(base, raw, masks) {
                *mask = vectors(base, raw).rev().fold(0, |mask, (base, raw)| {
                    (mask << 8) | u32::from(_mm512_cmpneq_epi64_mask(load(base), load(raw)))
                });
            }
        }
        4 => {
            for (base, raw, mask) in groups::<128>(base, raw, masks) {
                *mask = vectors(base, raw).rev().fold(0, |mask, (base, raw)| {
                    (mask << 16) | u32::from(_mm512_cmpneq_epi32_mask(load(base), load(raw)))
                });
            }
        }
        2 => {
            for (base, raw, mask) in groups::<64>(base, raw, masks) {
                *mask = _mm512_cmpneq_epi16_mask(load(base), load(raw));
            }
        }
        _ => avx2::mark_differing(width, base, raw, masks),
    }
}

#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: the reference is to 64 bytes, as many as are read; no alignment is needed.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
fn store(bytes: &mut [u8; 64], vector: __m512i) {
    // SAFETY: the reference is to 64 bytes, as many as are written; no alignment is needed.
    unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), vector) }
}
