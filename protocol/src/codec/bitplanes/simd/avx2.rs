//! 32 symbols at a time; escapes by eights, moved by a shuffle that a table gives for each mask of eight.
//!
//! The functions do what those of [`portable`] say.

use super::super::{
    layout::{LowBits, Words},
    portable::{self, join_masks, split_masks},
};
use std::arch::x86_64::*;

#[target_feature(enable = "avx2,bmi2,popcnt")]
pub(super) fn encode_level(
    symbols: [u8; 3],
    plain: &[[u8; 64]],
    masks: &mut [[u8; 16]],
    escapes: &mut [u8],
) -> usize {
    let symbols = symbols.map(|symbol| _mm256_set1_epi8(symbol as i8));
    let mut count = 0;
    for (group, mask) in plain.iter().zip(masks) {
        let halves = group.as_chunks::<32>().0;
        let (lower, upper) = (load(&halves[0]), load(&halves[1]));
        let [is0, is1, is2] =
            symbols.map(|symbol| join(_mm256_cmpeq_epi8(lower, symbol), _mm256_cmpeq_epi8(upper, symbol)));
        let escaped = !(is0 | is1 | is2);
        *mask = join_masks(is1 | escaped, is2 | escaped);
        let room: &mut [u8; 64] = escapes[count..].first_chunk_mut().expect(ROOM);
        let mut written = 0;
        for (eight, which) in group.as_chunks::<8>().0.iter().zip(escaped.to_le_bytes()) {
            // At most 8 times 7 were written before the last eight.
            let room = room[written..].first_chunk_mut().expect("eight symbols, eight places");
            store8(room, _mm_shuffle_epi8(load8(eight), load8(&TOGETHER[usize::from(which)])));
            written += which.count_ones() as usize;
        }
        count += written;
    }
    count
}

#[target_feature(enable = "avx2,bmi2,popcnt")]
pub(super) fn decode_level(
    symbols: [u8; 3],
    masks: &[[u8; 16]],
    escapes: &[u8],
    plain: &mut [[u8; 64]],
) -> usize {
    let [symbol0, symbol1, symbol2] = symbols.map(|symbol| _mm256_set1_epi8(symbol as i8));
    let mut count = 0;
    for (group, mask) in plain.iter_mut().zip(masks) {
        let (bit0, bit1) = split_masks(mask);
        let escaped = (bit0 & bit1).to_le_bytes();
        let given: &[u8; 64] = escapes[count..].first_chunk().expect(ROOM);
        let mut read = 0;
        let halves = group.as_chunks_mut::<32>().0.iter_mut();
        for (half, escaped) in halves
            .zip(escaped.as_chunks::<4>().0)
            .enumerate()
            .map(|(i, (h, e))| ((i, h), e))
        {
            let (i, half) = half;
            let (is1, is2) = (spread((bit0 >> (32 * i)) as u32), spread((bit1 >> (32 * i)) as u32));
            let named = _mm256_blendv_epi8(_mm256_blendv_epi8(symbol0, symbol1, is1), symbol2, is2);
            let named = _mm256_andnot_si256(_mm256_and_si256(is1, is2), named);
            let [a, b, c, d] = escaped.map(|which| {
                let from = given[read..].first_chunk().expect("no more escapes than symbols");
                read += which.count_ones() as usize;
                _mm_shuffle_epi8(load8(from), load8(&APART[usize::from(which)]))
            });
            let moved = _mm256_set_m128i(_mm_unpacklo_epi64(c, d), _mm_unpacklo_epi64(a, b));
            store(half, _mm256_or_si256(named, moved));
        }
        count += read;
    }
    count
}

/// Why there always is a whole group of room: there are 64 more escapes than symbols.
const ROOM: &str = "no more escapes than symbols, and room for 64 more";

#[target_feature(enable = "avx2,bmi2,popcnt")]
pub(super) fn split_low_bits(bits: LowBits, upper: &mut [[u8; 64]], low: &mut [u8]) {
    match bits {
        LowBits::None => {}
        LowBits::Three => {
            for (group, low) in upper.iter_mut().zip(low.as_chunks_mut::<24>().0) {
                let halves = group.as_chunks_mut::<32>().0;
                let bytes = [load(&halves[0]), load(&halves[1])];
                let planes = low.as_chunks_mut::<8>().0;
                // Each bit in turn becomes the uppermost of its byte.
                planes[0] = join_of(bytes, |bytes| _mm256_slli_epi16(bytes, 7));
                planes[1] = join_of(bytes, |bytes| _mm256_slli_epi16(bytes, 6));
                planes[2] = join_of(bytes, |bytes| _mm256_slli_epi16(bytes, 5));
                for (half, bytes) in halves.iter_mut().zip(bytes) {
                    store(half, _mm256_and_si256(_mm256_srli_epi16(bytes, 3), _mm256_set1_epi8(0x1f)));
                }
            }
        }
        LowBits::Four => portable::split_nibbles(upper, low),
    }
}

#[target_feature(enable = "avx2,bmi2,popcnt")]
pub(super) fn merge_low_bits(bits: LowBits, low: &[u8], upper: &mut [[u8; 64]]) {
    match bits {
        LowBits::None => {}
        LowBits::Three => {
            for (group, low) in upper.iter_mut().zip(low.as_chunks::<24>().0) {
                for (i, half) in group.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                    let symbols = _mm256_and_si256(load(half), _mm256_set1_epi8(0x1f));
                    let mut bytes = _mm256_slli_epi16(symbols, 3);
                    for (bit, plane) in low.as_chunks::<8>().0.iter().enumerate() {
                        let set = spread((u64::from_le_bytes(*plane) >> (32 * i)) as u32);
                        bytes = _mm256_or_si256(bytes, _mm256_and_si256(set, _mm256_set1_epi8(1 << bit)));
                    }
                    store(half, bytes);
                }
            }
        }
        LowBits::Four => portable::merge_nibbles(low, upper),
    }
}

#[target_feature(enable = "avx2,bmi2,popcnt")]
pub(super) fn split_words(words: Words, raw: &[u8], upper: &mut [u8], rest: &mut [u8]) {
    portable::split_words(words, raw, upper, rest);
}

#[target_feature(enable = "avx2,bmi2,popcnt")]
pub(super) fn merge_words(words: Words, upper: &[u8], rest: &[u8], raw: &mut [u8]) {
    portable::merge_words(words, upper, rest, raw);
}

/// The uppermost bits of 64 bytes.
#[target_feature(enable = "avx2")]
fn join(lower: __m256i, upper: __m256i) -> u64 {
    let half = |bytes| u64::from(_mm256_movemask_epi8(bytes) as u32);
    half(lower) | half(upper) << 32
}

/// The uppermost bits of 64 bytes after something was done to them.
#[target_feature(enable = "avx2")]
fn join_of(halves: [__m256i; 2], change: impl Fn(__m256i) -> __m256i) -> [u8; 8] {
    let [lower, upper] = halves.map(change);
    join(lower, upper).to_le_bytes()
}

/// 32 bits as 32 bytes of all ones or all zeros.
#[target_feature(enable = "avx2")]
fn spread(bits: u32) -> __m256i {
    let eights = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
    let bit_of_byte = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), eights);
    _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of_byte), bit_of_byte)
}

#[target_feature(enable = "avx2")]
fn load(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: the reference is to 32 bytes, as many as are read; no alignment is needed.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx2")]
fn store(bytes: &mut [u8; 32], vector: __m256i) {
    // SAFETY: the reference is to 32 bytes, as many as are written; no alignment is needed.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), vector) }
}

#[target_feature(enable = "avx2")]
fn load8(bytes: &[u8; 8]) -> __m128i {
    // SAFETY: the reference is to eight bytes, as many as are read; no alignment is needed.
    unsafe { _mm_loadl_epi64(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx2")]
fn store8(bytes: &mut [u8; 8], vector: __m128i) {
    // SAFETY: the reference is to eight bytes, as many as are written; no alignment is needed.
    unsafe { _mm_storel_epi64(bytes.as_mut_ptr().cast(), vector) }
}

/// A place that a shuffle fills with 0.
const NOTHING: u8 = 0x80;

/// For each mask of eight: the shuffle that moves what the mask names together, to the front.
static TOGETHER: [[u8; 8]; 256] = shuffles(true);

/// For each mask of eight: the shuffle that moves what is together, at the front, to where the mask says.
static APART: [[u8; 8]; 256] = shuffles(false);

const fn shuffles(together: bool) -> [[u8; 8]; 256] {
    let mut table = [[NOTHING; 8]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut front, mut place) = (0, 0);
        while place < 8 {
            if mask >> place & 1 == 1 {
                let (to, from) = if together { (front, place) } else { (place, front) };
                table[mask][to] = from as u8;
                front += 1;
            }
            place += 1;
        }
        mask += 1;
    }
    table
}
