//! Mutations of encoded bytes, as by a hostile sender.

use rand::{Rng, RngExt};

/// Applies one to four mutations to `bytes`. `donor` is another encoding, from which pieces may be copied.
pub(crate) fn mutate(rng: &mut impl Rng, bytes: &mut Vec<u8>, donor: &[u8]) {
    for _ in 0..rng.random_range(1..=4) {
        match rng.random_range(0..9) {
            0 | 1 => flip_bit(rng, bytes),
            2 => replace_byte(rng, bytes),
            3 | 4 => replace_length(rng, bytes),
            5 => bytes.truncate(rng.random_range(0..=bytes.len())),
            6 => bytes.extend((0..rng.random_range(1..20)).map(|_| rng.random::<u8>())),
            7 => splice(rng, bytes, donor),
            _ => remove(rng, bytes),
        }
    }
}

/// A random offset in `bytes`; in half of the calls near the start, where the headers are.
fn offset_in(rng: &mut impl Rng, bytes: &[u8]) -> usize {
    let front = if rng.random_bool(0.5) { bytes.len().min(32) } else { bytes.len() };
    rng.random_range(0..front.max(1))
}

fn flip_bit(rng: &mut impl Rng, bytes: &mut [u8]) {
    let at = offset_in(rng, bytes);
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << rng.random_range(0..8);
    }
}

fn replace_byte(rng: &mut impl Rng, bytes: &mut [u8]) {
    let at = offset_in(rng, bytes);
    if let Some(byte) = bytes.get_mut(at) {
        *byte = [0, 1, 2, 0x7f, 0x80, 0xfe, 0xff, rng.random()][rng.random_range(0..8)];
    }
}

/// Overwrites four bytes with a plausible length: an extreme one, or the old value changed a little.
fn replace_length(rng: &mut impl Rng, bytes: &mut [u8]) {
    let (at, len) = (offset_in(rng, bytes), bytes.len() as u32);
    let Some(length) = bytes.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) else { return };
    let near = u32::from_le_bytes(*length).wrapping_add_signed(rng.random_range(-2..=2));
    let candidates = [near, near, near, len, len.wrapping_sub(1), 0, u32::MAX, 1 << 31, rng.random()];
    *length = candidates[rng.random_range(0..candidates.len())].to_le_bytes();
}

/// Replaces a range with a piece of `donor`, or inserts one.
fn splice(rng: &mut impl Rng, bytes: &mut Vec<u8>, donor: &[u8]) {
    let from = rng.random_range(0..=donor.len());
    let to = rng.random_range(from..=donor.len());
    let at = rng.random_range(0..=bytes.len());
    let until = if rng.random_bool(0.5) { at } else { bytes.len().min(at + to - from) };
    bytes.splice(at..until, donor[from..to].iter().copied());
}

fn remove(rng: &mut impl Rng, bytes: &mut Vec<u8>) {
    let from = rng.random_range(0..=bytes.len());
    let to = rng.random_range(from..=bytes.len().min(from + 40));
    bytes.drain(from..to);
}
