//! Elements cut into their bytes, all first bytes together, all second ones together, and so on.

/// An element as an unsigned number of its size.
pub(super) trait Element: Copy + Default {
    /// The bytes of one, as many as there are planes.
    const BYTES: usize;

    /// Cuts whole elements into planes, the lowest byte first, each rotated by `ROTATION` bits to the left before.
    /// `planes` is as long as `raw`.
    fn split<const ROTATION: u32>(raw: &[u8], planes: &mut [u8]);

    /// The opposite: `planes` are [`BYTES`](Self::BYTES) strings of a byte for each element of `raw`.
    fn merge<const ROTATION: u32>(planes: &[&[u8]], raw: &mut [u8]);
}

/// How many elements are worked on at once. They and their bytes stay in the first cache, over all planes.
const BATCH: usize = 1024;

/// The same for every width. Each loop does one thing to many elements, so that compilers make vector instructions of it.
macro_rules! element {
    ($number:ty, $bytes:literal) => {
        impl Element for $number {
            const BYTES: usize = $bytes;

            fn split<const ROTATION: u32>(raw: &[u8], planes: &mut [u8]) {
                let elements = raw.as_chunks::<$bytes>().0;
                for (batch, elements) in elements.chunks(BATCH).enumerate() {
                    for (byte, plane) in planes.chunks_exact_mut(raw.len() / $bytes).enumerate() {
                        let plane = &mut plane[batch * BATCH..][..elements.len()];
                        for (out, element) in plane.iter_mut().zip(elements) {
                            *out = (Self::from_le_bytes(*element).rotate_left(ROTATION) >> (8 * byte)) as u8;
                        }
                    }
                }
            }

            fn merge<const ROTATION: u32>(planes: &[&[u8]], raw: &mut [u8]) {
                let elements = raw.as_chunks_mut::<$bytes>().0;
                for (batch, elements) in elements.chunks_mut(BATCH).enumerate() {
                    let mut numbers = [0; BATCH];
                    for (byte, plane) in planes.iter().enumerate() {
                        let plane = &plane[batch * BATCH..][..elements.len()];
                        for (number, part) in numbers.iter_mut().zip(plane) {
                            *number |= Self::from(*part) << (8 * byte);
                        }
                    }
                    for (element, number) in elements.iter_mut().zip(numbers) {
                        *element = number.rotate_right(ROTATION).to_le_bytes();
                    }
                }
            }
        }
    };
}

element!(u8, 1);
element!(u16, 2);
element!(u32, 4);
element!(u64, 8);
