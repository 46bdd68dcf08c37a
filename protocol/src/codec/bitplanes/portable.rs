//! The portable path: eight symbols at a time in a `u64`, and loops that compilers vectorise.

use super::layout::{LowBits, Words};

/// Encodes one level: writes two masks for each group of 64 symbols and, end to end, the escapes, which are the symbols
/// that this level does not name. Returns the number of escapes.
///
/// `escapes` must be at least 128 bytes longer than `plain`.
pub(in crate::codec) fn encode_level(
    level_symbols: [u8; 3],
    plain: &[[u8; 64]],
    masks: &mut [[u8; 16]],
    escapes: &mut [u8],
) -> usize {
    let symbols = level_symbols.map(broadcast);
    let mut count = 0;
    for (group, mask) in plain.iter().zip(masks) {
        let (mut bit0, mut bit1) = (0, 0);
        for (i, eight) in group.as_chunks::<8>().0.iter().enumerate() {
            let eight = u64::from_le_bytes(*eight);
            let [not0, not1, not2] = symbols.map(|symbol| differs(eight, symbol));
            let escape = not0 & not1 & not2;
            bit0 |= gather(!not1 | escape) << (8 * i);
            bit1 |= gather(!not2 | escape) << (8 * i);
        }
        *mask = join_masks(bit0, bit1);
        let room = &mut escapes[count..count + 64];
        let mut escaped = bit0 & bit1;
        let mut written = 0;
        while escaped != 0 {
            room[written & 63] = group[escaped.trailing_zeros() as usize & 63];
            written += 1;
            escaped &= escaped - 1;
        }
        count += written;
    }
    count
}

/// The inverse of [`encode_level`]. Returns the number of escapes in the masks, which the caller compares with the
/// number that was sent. `escapes` must be at least 128 bytes longer than `plain`.
pub(in crate::codec) fn decode_level(
    level_symbols: [u8; 3],
    masks: &[[u8; 16]],
    escapes: &[u8],
    plain: &mut [[u8; 64]],
) -> usize {
    let [symbol0, symbol1, symbol2] = level_symbols.map(broadcast);
    let (change1, change2) = (symbol0 ^ symbol1, symbol0 ^ symbol2);
    let mut count = 0;
    for (group, mask) in plain.iter_mut().zip(masks) {
        let (bit0, bit1) = split_masks(mask);
        for (i, eight) in group.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let (is1, is2) = (spread(bit0 >> (8 * i)), spread(bit1 >> (8 * i)));
            *eight = (symbol0 ^ (is1 & change1) ^ (is2 & change2)).to_le_bytes();
        }
        let packed = &escapes[count..count + 64];
        let mut escaped = bit0 & bit1;
        let mut read = 0;
        while escaped != 0 {
            group[escaped.trailing_zeros() as usize & 63] = packed[read & 63];
            read += 1;
            escaped &= escaped - 1;
        }
        count += read;
    }
    count
}

/// Moves the low bits from the upper bytes to `low`, so that the symbols remain.
pub(in crate::codec) fn split_low_bits(bits: LowBits, upper: &mut [[u8; 64]], low: &mut [u8]) {
    match bits {
        LowBits::None => {}
        LowBits::Three => {
            for (group, low) in upper.iter_mut().zip(low.as_chunks_mut::<24>().0) {
                let mut planes = [0u64; 3];
                for (i, eight) in group.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                    let value = u64::from_le_bytes(*eight);
                    for (bit, plane) in planes.iter_mut().enumerate() {
                        *plane |= gather(value << (7 - bit)) << (8 * i);
                    }
                    *eight = ((value >> 3) & broadcast(0x1f)).to_le_bytes();
                }
                low.as_chunks_mut::<8>().0.copy_from_slice(&planes.map(u64::to_le_bytes));
            }
        }
        LowBits::Four => split_nibbles(upper, low),
    }
}

/// The inverse of [`split_low_bits`].
pub(in crate::codec) fn merge_low_bits(bits: LowBits, low: &[u8], upper: &mut [[u8; 64]]) {
    match bits {
        LowBits::None => {}
        LowBits::Three => {
            for (group, low) in upper.iter_mut().zip(low.as_chunks::<24>().0) {
                for (i, eight) in group.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                    let mut value = (u64::from_le_bytes(*eight) & broadcast(0x1f)) << 3;
                    for (bit, plane) in low.as_chunks::<8>().0.iter().enumerate() {
                        value |= spread(u64::from(plane[i])) & broadcast(1 << bit);
                    }
                    *eight = value.to_le_bytes();
                }
            }
        }
        LowBits::Four => merge_nibbles(low, upper),
    }
}

/// Moves four low bits of each word to `low`: for each group of 64 words 32 bytes, of which byte `j` holds the bits of
/// word `j` in its lower half and those of word `j + 32` in its upper half.
#[inline(always)]
pub(in crate::codec) fn split_nibbles(upper: &mut [[u8; 64]], low: &mut [u8]) {
    for (group, low) in upper.iter_mut().zip(low.as_chunks_mut::<32>().0) {
        for (j, low) in low.iter_mut().enumerate() {
            *low = (group[j] & 15) | group[j + 32] << 4;
        }
        for byte in group {
            *byte >>= 4;
        }
    }
}

/// The inverse of [`split_nibbles`].
#[inline(always)]
pub(in crate::codec) fn merge_nibbles(low: &[u8], upper: &mut [[u8; 64]]) {
    for (group, low) in upper.iter_mut().zip(low.as_chunks::<32>().0) {
        for (j, low) in low.iter().enumerate() {
            group[j] = group[j] << 4 | (low & 15);
            group[j + 32] = group[j + 32] << 4 | low >> 4;
        }
    }
}

/// Splits words: uppermost bytes to `upper`, the lower bytes to `rest`. `rest` is up to three planes, the more
/// significant bytes first: one, two and four bytes of each word. Inlined and compiled again for each vector path.
#[inline(always)]
pub(in crate::codec) fn split_words(words: Words, raw: &[u8], upper: &mut [u8], rest: &mut [u8]) {
    let count = upper.len();
    match words {
        Words::Unsigned8 => upper.copy_from_slice(raw),
        Words::Signed8 => {
            for (upper, word) in upper.iter_mut().zip(raw) {
                *upper = word.rotate_left(1);
            }
        }
        Words::Signed16 => {
            for ((word, upper), rest) in raw.as_chunks::<2>().0.iter().zip(upper).zip(rest) {
                let word = u16::from_le_bytes(*word).rotate_left(1);
                *upper = (word >> 8) as u8;
                *rest = word as u8;
            }
        }
        Words::Signed32 => {
            let (rest1, rest2) = rest.split_at_mut(count);
            let rest2 = rest2.as_chunks_mut::<2>().0;
            for (((word, upper), rest1), rest2) in
                raw.as_chunks::<4>().0.iter().zip(upper).zip(rest1).zip(rest2)
            {
                let word = u32::from_le_bytes(*word).rotate_left(1);
                *upper = (word >> 24) as u8;
                *rest1 = (word >> 16) as u8;
                *rest2 = (word as u16).to_le_bytes();
            }
        }
        Words::Signed64 => {
            let (rest1, rest) = rest.split_at_mut(count);
            let (rest2, rest4) = rest.split_at_mut(2 * count);
            let (rest2, rest4) = (rest2.as_chunks_mut::<2>().0, rest4.as_chunks_mut::<4>().0);
            for ((((word, upper), rest1), rest2), rest4) in
                raw.as_chunks::<8>().0.iter().zip(upper).zip(rest1).zip(rest2).zip(rest4)
            {
                let word = u64::from_le_bytes(*word).rotate_left(1);
                *upper = (word >> 56) as u8;
                *rest1 = (word >> 48) as u8;
                *rest2 = ((word >> 32) as u16).to_le_bytes();
                *rest4 = (word as u32).to_le_bytes();
            }
        }
    }
}

/// The inverse of [`split_words`].
#[inline(always)]
pub(in crate::codec) fn merge_words(words: Words, upper: &[u8], rest: &[u8], raw: &mut [u8]) {
    let count = upper.len();
    match words {
        Words::Unsigned8 => raw.copy_from_slice(upper),
        Words::Signed8 => {
            for (upper, word) in upper.iter().zip(raw) {
                *word = upper.rotate_right(1);
            }
        }
        Words::Signed16 => {
            for ((word, upper), rest) in raw.as_chunks_mut::<2>().0.iter_mut().zip(upper).zip(rest) {
                let rotated = u16::from(*upper) << 8 | u16::from(*rest);
                *word = rotated.rotate_right(1).to_le_bytes();
            }
        }
        Words::Signed32 => {
            let (rest1, rest2) = rest.split_at(count);
            let rest2 = rest2.as_chunks::<2>().0;
            for (((word, upper), rest1), rest2) in
                raw.as_chunks_mut::<4>().0.iter_mut().zip(upper).zip(rest1).zip(rest2)
            {
                let rotated =
                    u32::from(*upper) << 24 | u32::from(*rest1) << 16 | u32::from(u16::from_le_bytes(*rest2));
                *word = rotated.rotate_right(1).to_le_bytes();
            }
        }
        Words::Signed64 => {
            let (rest1, rest) = rest.split_at(count);
            let (rest2, rest4) = rest.split_at(2 * count);
            let (rest2, rest4) = (rest2.as_chunks::<2>().0, rest4.as_chunks::<4>().0);
            for ((((word, upper), rest1), rest2), rest4) in raw
                .as_chunks_mut::<8>()
                .0
                .iter_mut()
                .zip(upper)
                .zip(rest1)
                .zip(rest2)
                .zip(rest4)
            {
                let rotated = u64::from(*upper) << 56
                    | u64::from(*rest1) << 48
                    | u64::from(u16::from_le_bytes(*rest2)) << 32
                    | u64::from(u32::from_le_bytes(*rest4));
                *word = rotated.rotate_right(1).to_le_bytes();
            }
        }
    }
}

/// The two masks of a group in wire format.
pub(in crate::codec) fn join_masks(bit0: u64, bit1: u64) -> [u8; 16] {
    (u128::from(bit1) << 64 | u128::from(bit0)).to_le_bytes()
}

/// The inverse of [`join_masks`].
pub(in crate::codec) fn split_masks(mask: &[u8; 16]) -> (u64, u64) {
    let both = u128::from_le_bytes(*mask);
    (both as u64, (both >> 64) as u64)
}

/// Eight copies of `byte`.
fn broadcast(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

/// Compares eight bytes: the uppermost bit of each result byte is set if the bytes differ; other bits are undefined.
fn differs(a: u64, b: u64) -> u64 {
    let difference = a ^ b;
    // Adding 127 to the lower seven bits carries into the eighth bit unless all are 0, and never into the next byte.
    ((difference & broadcast(0x7f)) + broadcast(0x7f)) | difference
}

/// The uppermost bits of eight bytes as one byte; the first byte's bit is the lowest.
fn gather(bytes: u64) -> u64 {
    // The product moves bit 8i to bit 56 + i, without carries into these bits.
    ((bytes >> 7) & broadcast(1)).wrapping_mul(0x0102_0408_1020_4080) >> 56
}

/// The eight lowest bits as eight bytes of all ones or all zeros.
fn spread(bits: u64) -> u64 {
    SPREAD[(bits & 0xff) as usize]
}

static SPREAD: [u64; 256] = {
    let mut table = [0; 256];
    let mut bits = 0;
    while bits < 256 {
        let mut bit = 0;
        while bit < 8 {
            table[bits] |= (((bits as u64 >> bit) & 1) * 0xff) << (8 * bit);
            bit += 1;
        }
        bits += 1;
    }
    table
};
