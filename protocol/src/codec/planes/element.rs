//! Elements split into byte planes: plane `n` holds byte `n` of every rotated element.

use std::array;

/// An element as an unsigned number of its size.
pub(super) trait Element {
    /// The size of one element in bytes, which is the number of planes.
    const BYTES: usize;

    /// Rotates each element of `raw` by `ROTATION` bits to the left and splits it into planes, the lowest byte first.
    /// `planes` is as long as `raw`.
    fn split<const ROTATION: u32>(raw: &[u8], planes: &mut [u8]);

    /// The inverse of [`split`](Self::split). Each of the [`BYTES`](Self::BYTES) `planes` has a byte per element.
    fn merge<const ROTATION: u32>(planes: &[&[u8]], raw: &mut [u8]);
}

/// One implementation for every width. The lengths of all planes are fixed before a loop begins, so that compilers
/// remove bounds checks and vectorise.
macro_rules! element {
    ($number:ty, $bytes:literal) => {
        impl Element for $number {
            const BYTES: usize = $bytes;

            fn split<const ROTATION: u32>(raw: &[u8], planes: &mut [u8]) {
                let elements = raw.as_chunks::<$bytes>().0;
                let mut rest = planes;
                let mut planes: [&mut [u8]; $bytes] =
                    array::from_fn(|_| rest.split_off_mut(..elements.len()).unwrap_or_default());
                for (at, element) in elements.iter().enumerate() {
                    let bytes = Self::from_le_bytes(*element).rotate_left(ROTATION).to_le_bytes();
                    for (plane, byte) in planes.iter_mut().zip(bytes) {
                        plane[at] = byte;
                    }
                }
            }

            fn merge<const ROTATION: u32>(planes: &[&[u8]], raw: &mut [u8]) {
                let elements = raw.as_chunks_mut::<$bytes>().0;
                let planes: [&[u8]; $bytes] = array::from_fn(|byte| &planes[byte][..elements.len()]);
                for (at, element) in elements.iter_mut().enumerate() {
                    let bytes = planes.map(|plane| plane[at]);
                    *element = Self::from_le_bytes(bytes).rotate_right(ROTATION).to_le_bytes();
                }
            }
        }
    };
}

element!(u8, 1);
element!(u16, 2);
element!(u32, 4);
element!(u64, 8);
