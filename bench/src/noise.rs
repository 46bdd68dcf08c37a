//! Pseudorandom numbers, computed from their index instead of drawn in sequence.

use bytes::Bytes;

/// `count` pseudorandom bytes, which no layer below can compress or deduplicate.
pub(crate) fn bytes(count: u64) -> Bytes {
    let words = (0..count.div_ceil(8)).map(|index| at(0, index).to_le_bytes());
    let mut memory = Vec::with_capacity(count as usize + 8);
    words.for_each(|word| memory.extend_from_slice(&word));
    Bytes::from(memory).slice(..count as usize)
}

/// The number at `index` of the endless sequence that `key` names.
///
/// This is wyrand with the state computed from the index, so any number costs two multiplications, whatever its index.
/// It passes the usual statistical test suites and is not cryptographic.
pub(crate) fn at(key: u64, index: u64) -> u64 {
    let state = key.wrapping_add(index.wrapping_add(1).wrapping_mul(STRIDE));
    let product = u128::from(state) * u128::from(state ^ SECRET);
    (product >> 64) as u64 ^ product as u64
}

/// Fills `out` with the numbers of the sequence that `key` names, from its beginning.
pub(crate) fn fill(key: u64, out: &mut [u8]) {
    for (index, word) in (0..).zip(out.chunks_mut(8)) {
        word.copy_from_slice(&at(key, index).to_le_bytes()[..word.len()]);
    }
}

// The constants of wyhash 4.2: odd, and with as many ones as zeros in every byte.
const STRIDE: u64 = 0x2d35_8dcc_aa6c_78a5;
const SECRET: u64 = 0x8bb8_4b93_962e_acc9;
