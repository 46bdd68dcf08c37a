//! Elements cut into their bytes, all first bytes together, all second ones together, and so on.

use std::array;

/// An element as an unsigned number of its size.
pub(super) trait Element {
    /// The bytes of one, as many as there are planes.
    const BYTES: usize;

    /// Cuts whole elements into planes, the lowest byte first, each rotated by `ROTATION` bits to the left before.
    /// `planes` is as long as `raw`.
    fn split<const ROTATION: u32>(raw: &[u8], planes: &mut [u8]);

    /// The opposite: `planes` are [`BYTES`](Self::BYTES) strings of a byte for each element of `raw`.
    fn merge<const ROTATION: u32>(planes: &[&[u8]], raw: &mut [u8]);
}

/// The same for every width. All planes are as long as there are elements and so known to be when a loop begins: then
/// compilers drop the checks of bounds and make vector instructions of it.
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
