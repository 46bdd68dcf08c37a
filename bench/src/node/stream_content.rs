//! The content of a stream's versions: cheap to generate, different in each version, and known to both ends.

use crate::noise;
use anyhow::{Result, ensure};

/// The header that a producer writes into the first bytes of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// The number of the version in the round, from 0.
    pub(crate) index: u64,
    /// The time before it was staged and published, by the producer's [monotonic clock](crate::clock::monotonic_ns).
    pub(crate) published_ns: u64,
}

/// Noise that both ends generate before the first round. The tensor of version `i` is a stamp, followed by a window of
/// the noise whose position depends on `i`. Generating a tensor is a copy and checking it a comparison, at memory
/// speed.
pub(crate) struct StreamContent {
    noise: Vec<u8>,
    bytes: usize,
}

/// The size of a stamp, and the minimum of a tensor.
pub(crate) const STAMP_BYTES: usize = 16;

/// The distance of the windows of successive versions, and the number of windows before they repeat.
const STEP_BYTES: usize = 64;
const STEPS: u64 = 4096;

impl StreamContent {
    /// Generates the noise for tensors of `bytes` bytes.
    ///
    /// # Errors
    /// When `bytes` is less than a stamp.
    pub(crate) fn new(bytes: u64) -> Result<Self> {
        let bytes = usize::try_from(bytes)?;
        ensure!(
            bytes >= STAMP_BYTES,
            "a version of {bytes} bytes has no room for its time stamp of {STAMP_BYTES}"
        );
        let mut noise = vec![0; bytes + STEP_BYTES * STEPS as usize];
        noise::fill(KEY, &mut noise);
        Ok(Self { noise, bytes })
    }

    /// Writes the tensor of the version with `stamp` to `out`, which has its size.
    pub(crate) fn write(&self, stamp: Stamp, out: &mut [u8]) {
        out.copy_from_slice(self.window(stamp.index));
        out[..8].copy_from_slice(&stamp.index.to_le_bytes());
        out[8..STAMP_BYTES].copy_from_slice(&stamp.published_ns.to_le_bytes());
    }

    /// Reads the stamp of a tensor, and compares every byte behind it.
    ///
    /// # Errors
    /// When the length or a byte is not the one of that version.
    pub(crate) fn read(&self, tensor: &[u8]) -> Result<Stamp> {
        ensure!(
            tensor.len() == self.bytes,
            "received a version of {} bytes instead of {}",
            tensor.len(),
            self.bytes
        );
        let word = |at: usize| {
            let bytes = tensor[at..].first_chunk().expect("a tensor is at least a stamp, see new()");
            u64::from_le_bytes(*bytes)
        };
        let stamp = Stamp { index: word(0), published_ns: word(8) };
        let expected = self.window(stamp.index);
        ensure!(
            tensor[STAMP_BYTES..] == expected[STAMP_BYTES..],
            "received version {} of the round with other bytes than were published",
            stamp.index
        );
        Ok(stamp)
    }

    fn window(&self, index: u64) -> &[u8] {
        let start = (index % STEPS) as usize * STEP_BYTES;
        &self.noise[start..start + self.bytes]
    }
}

/// Makes this noise differ from other uses of [`noise`].
const KEY: u64 = 0x7769_6e64_6f77;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn too_small_is_refused() {
        assert!(StreamContent::new(15).is_err());
        assert!(StreamContent::new(16).is_ok());
    }

    proptest! {
        /// Goal: every wrong byte is noticed. Method: flip any bit behind the stamp, or change the number of the
        /// version.
        #[test]
        fn every_bit_counts(index: u64, at in STAMP_BYTES..1000, bit in 0u8..8) {
            let content = StreamContent::new(1000).unwrap();
            let stamp = Stamp { index, published_ns: 7 };
            let mut tensor = vec![0; 1000];
            content.write(stamp, &mut tensor);
            prop_assert_eq!(content.read(&tensor).unwrap(), stamp);
            tensor[at] ^= 1 << bit;
            prop_assert!(content.read(&tensor).is_err());
            tensor[at] ^= 1 << bit;
            tensor[..8].copy_from_slice(&index.wrapping_add(1).to_le_bytes());
            prop_assert!(content.read(&tensor).is_err());
        }
    }
}
