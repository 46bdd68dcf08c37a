//! Random numbers that are looked up instead of drawn.

/// The number at `index` of the endless sequence that `key` names.
///
/// This is wyrand with the state computed from the index, so any number costs one multiplication wherever it lies. It
/// passes the usual statistical batteries and keeps no secret.
pub(crate) fn at(key: u64, index: u64) -> u64 {
    let state = key.wrapping_add(index.wrapping_add(1).wrapping_mul(STRIDE));
    let product = u128::from(state) * u128::from(state ^ SECRET);
    (product >> 64) as u64 ^ product as u64
}

// The constants of wyhash 4.2: odd, and with as many ones as zeros in every byte.
const STRIDE: u64 = 0x2d35_8dcc_aa6c_78a5;
const SECRET: u64 = 0x8bb8_4b93_962e_acc9;
