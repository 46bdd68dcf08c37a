//! Mutations of an encoding, as by a hostile sender.

use rand::{Rng, RngExt};

/// Applies one to four mutations to `bytes`. `donor` is another encoding, from which pieces may be copied.
pub(crate) fn mutate(dice: &mut impl Rng, bytes: &mut Vec<u8>, donor: &[u8]) {
    for _ in 0..dice.random_range(1..=4) {
        match dice.random_range(0..9) {
            0 | 1 => flip_bit(dice, bytes),
            2 => replace_byte(dice, bytes),
            3 | 4 => replace_length(dice, bytes),
            5 => bytes.truncate(dice.random_range(0..=bytes.len())),
            6 => bytes.extend((0..dice.random_range(1..20)).map(|_| dice.random::<u8>())),
            7 => splice(dice, bytes, donor),
            _ => remove(dice, bytes),
        }
    }
}

/// A random offset in `bytes`, near the start in half of the cases, where the headers are.
fn offset_in(dice: &mut impl Rng, bytes: &[u8]) -> usize {
    let front = if dice.random_bool(0.5) { bytes.len().min(32) } else { bytes.len() };
    dice.random_range(0..front.max(1))
}

fn flip_bit(dice: &mut impl Rng, bytes: &mut [u8]) {
    let at = offset_in(dice, bytes);
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << dice.random_range(0..8);
    }
}

fn replace_byte(dice: &mut impl Rng, bytes: &mut [u8]) {
    let at = offset_in(dice, bytes);
    if let Some(byte) = bytes.get_mut(at) {
        *byte = [0, 1, 2, 0x7f, 0x80, 0xfe, 0xff, dice.random()][dice.random_range(0..8)];
    }
}

/// Overwrites four bytes with a plausible length: an extreme one, or the old value changed a little.
fn replace_length(dice: &mut impl Rng, bytes: &mut [u8]) {
    let (at, len) = (offset_in(dice, bytes), bytes.len() as u32);
    let Some(length) = bytes.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) else { return };
    let near = u32::from_le_bytes(*length).wrapping_add_signed(dice.random_range(-2..=2));
    let candidates = [near, near, near, len, len.wrapping_sub(1), 0, u32::MAX, 1 << 31, dice.random()];
    *length = candidates[dice.random_range(0..candidates.len())].to_le_bytes();
}

/// Replaces a range with a piece of `donor`, or inserts one.
fn splice(dice: &mut impl Rng, bytes: &mut Vec<u8>, donor: &[u8]) {
    let from = dice.random_range(0..=donor.len());
    let to = dice.random_range(from..=donor.len());
    let at = dice.random_range(0..=bytes.len());
    let until = if dice.random_bool(0.5) { at } else { bytes.len().min(at + to - from) };
    bytes.splice(at..until, donor[from..to].iter().copied());
}

fn remove(dice: &mut impl Rng, bytes: &mut Vec<u8>) {
    let from = dice.random_range(0..=bytes.len());
    let to = dice.random_range(from..=bytes.len().min(from + 40));
    bytes.drain(from..to);
}
