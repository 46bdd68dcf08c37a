//! The AVX2 path: 32 symbols at a time; escapes are moved eight at a time, by a shuffle from a table.
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
    vectors,
};
use std::arch::x86_64::*;

#[target_feature(enable = "avx2,bmi2,popcnt")]
pub(super) fn encode_level(
    level_symbols: [u8; 3],
    plain: &[[u8; 64]],
    masks: &mut [[u8; 16]],
    escapes: &mut [u8],
) -> usize {
    let symbols = level_symbols.map(|symbol| _mm256_set1_epi8(symbol as i8));
    let mut count = 0;
    for (group, mask) in plain.iter().zip(masks) {
        let halves = group.as_chunks::<32>().0;
        let (lower, upper) = (load(&halves[0]), load(&halves[1]));
        let [is0, is1, is2] =
            symbols.map(|symbol| join(_mm256_cmpeq_epi8(lower, symbol), _mm256_cmpeq_epi8(upper, symbol)));
        let escaped = !(is0 | is1 | is2);
        *mask = join_masks(is1 | escaped, is2 | escaped);
        let room: &mut [u8; 72] = escapes[count..].first_chunk_mut().expect(ESCAPES_HAVE_ROOM);
        let eights = group.as_chunks::<8>().0.iter().zip(escaped.to_le_bytes());
        for ((eight, mask), at) in eights.zip(escapes_before(escaped)) {
            let room = room[usize::from(at & 63)..].first_chunk_mut().expect("63 and 8 are below 72");
            store8(room, _mm_shuffle_epi8(load8(eight), load8(&GATHER[usize::from(mask)])));
        }
        count += escaped.count_ones() as usize;
    }
    count
}

#[target_feature(enable = "avx2,bmi2,popcnt")]
pub(super) fn decode_level(
    level_symbols: [u8; 3],
    masks: &[[u8; 16]],
    escapes: &[u8],
    plain: &mut [[u8; 64]],
) -> usize {
    let [symbol0, symbol1, symbol2] = level_symbols.map(|symbol| _mm256_set1_epi8(symbol as i8));
    let mut count = 0;
    for (group, mask) in plain.iter_mut().zip(masks) {
        let (bit0, bit1) = split_masks(mask);
        let escaped = bit0 & bit1;
        let packed: &[u8; 72] = escapes[count..].first_chunk().expect(ESCAPES_HAVE_ROOM);
        let masks = escaped.to_le_bytes().into_iter();
        let mut scattered = masks.zip(escapes_before(escaped)).map(|(mask, at)| {
            let from = packed[usize::from(at & 63)..].first_chunk().expect("63 and 8 are below 72");
            _mm_shuffle_epi8(load8(from), load8(&SCATTER[usize::from(mask)]))
        });
        let mut next_eight = || scattered.next().expect("eight eights");
        for (i, half) in group.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (is1, is2) = (spread((bit0 >> (32 * i)) as u32), spread((bit1 >> (32 * i)) as u32));
            let named = _mm256_blendv_epi8(_mm256_blendv_epi8(symbol0, symbol1, is1), symbol2, is2);
            let named = _mm256_andnot_si256(_mm256_and_si256(is1, is2), named);
            let [a, b, c, d] = [next_eight(), next_eight(), next_eight(), next_eight()];
            let scattered = _mm256_set_m128i(_mm_unpacklo_epi64(c, d), _mm_unpacklo_epi64(a, b));
            store(half, _mm256_or_si256(named, scattered));
        }
        count += escaped.count_ones() as usize;
    }
    count
}

/// Why at least 72 bytes of `escapes` follow those of earlier groups: 64 for a group, and 8 so that eight bytes can be
/// accessed at any place of the group.
const ESCAPES_HAVE_ROOM: &str = "no more escapes than symbols, and room for 128 more";

/// For each eight of a group, the number of escapes before it. All eight numbers are computed together, without a
/// dependency from one to the next.
fn escapes_before(escaped: u64) -> [u8; 8] {
    let twos = escaped - ((escaped >> 1) & 0x5555_5555_5555_5555);
    let fours = (twos & 0x3333_3333_3333_3333) + ((twos >> 2) & 0x3333_3333_3333_3333);
    let eights = (fours + (fours >> 4)) & 0x0f0f_0f0f_0f0f_0f0f;
    // The product adds all lower bytes to each byte; the last sum is at most 56.
    (eights << 8).wrapping_mul(0x0101_0101_0101_0101).to_le_bytes()
}

#[target_feature(enable = "avx2,bmi2,popcnt")]
pub(super) fn split_low_bits(bits: LowBits, upper: &mut [[u8; 64]], low: &mut [u8]) {
    match bits {
        LowBits::None => {}
        LowBits::Three => {
            for (group, low) in upper.iter_mut().zip(low.as_chunks_mut::<24>().0) {
                let halves = group.as_chunks_mut::<32>().0;
                let bytes = [load(&halves[0]), load(&halves[1])];
                let planes = low.as_chunks_mut::<8>().0;
                // Each shift makes one low bit the uppermost bit of its byte.
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

#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub(super) fn find_differing(width: usize, base: &[u8], raw: &[u8], differing: &mut Differing) -> usize {
    differing.find(width, raw.len(), |masks| mark_differing(width, base, raw, masks))
}

/// Computes a mask for each group of elements: bit `i` is set if element `i` of the group differs.
#[target_feature(enable = "avx2")]
pub(super) fn mark_differing(width: usize, base: &[u8], raw: &[u8], masks: &mut [u32]) {
    match width {
        8 => {
            for (base, raw, mask) in groups::<256>(base, raw, masks) {
                let same = vectors(base, raw).rev().fold(0, |mask, (base, raw)| {
                    let same = _mm256_cmpeq_epi64(load(base), load(raw));
                    (mask << 4) | _mm256_movemask_pd(_mm256_castsi256_pd(same)) as u32
                });
                *mask = !same;
            }
        }
        4 => {
            for (base, raw, mask) in groups::<128>(base, raw, masks) {
                let same = vectors(base, raw).rev().fold(0, |mask, (base, raw)| {
                    let same = _mm256_cmpeq_epi32(load(base), load(raw));
                    (mask << 8) | _mm256_movemask_ps(_mm256_castsi256_ps(same)) as u32
                });
                *mask = !same;
            }
        }
        2 => {
            for (base, raw, mask) in groups::<64>(base, raw, masks) {
                let (base, raw) = (base.as_chunks::<32>().0, raw.as_chunks::<32>().0);
                let lower = _mm256_cmpeq_epi16(load(&base[0]), load(&raw[0]));
                let upper = _mm256_cmpeq_epi16(load(&base[1]), load(&raw[1]));
                // Packing interleaves the 128-bit halves; the permutation restores their order.
                let same = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(lower, upper));
                *mask = !(_mm256_movemask_epi8(same) as u32);
            }
        }
        _ => {
            for (base, raw, mask) in groups::<32>(base, raw, masks) {
                *mask = !(_mm256_movemask_epi8(_mm256_cmpeq_epi8(load(base), load(raw))) as u32);
            }
        }
    }
}

/// The uppermost bits of 64 bytes.
#[target_feature(enable = "avx2")]
fn join(lower: __m256i, upper: __m256i) -> u64 {
    let half = |bytes| u64::from(_mm256_movemask_epi8(bytes) as u32);
    half(lower) | half(upper) << 32
}

/// The uppermost bits of 64 bytes, after `change` on each half.
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

/// The shuffle index that yields 0.
const ZERO: u8 = 0x80;

/// For each mask of eight bits: the shuffle that gathers the masked bytes at the front.
static GATHER: [[u8; 8]; 256] = shuffles(true);

/// For each mask of eight bits: the shuffle that scatters bytes from the front to the masked places.
static SCATTER: [[u8; 8]; 256] = shuffles(false);

const fn shuffles(gather: bool) -> [[u8; 8]; 256] {
    let mut table = [[ZERO; 8]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut front, mut place) = (0, 0);
        while place < 8 {
            if mask >> place & 1 == 1 {
                let (to, from) = if gather { (front, place) } else { (place, front) };
                table[mask][to] = from as u8;
                front += 1;
            }
            place += 1;
        }
        mask += 1;
    }
    table
}
