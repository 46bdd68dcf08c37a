//! [`Target`]: the memory of a piece of a tensor in a staged version.

use std::ops::Range;
use tensor_relay_protocol::{Manifest, Spread};

/// The memory of a piece of a tensor, or of a part of it, to be written.
#[derive(Debug)]
pub(super) struct Target<'a> {
    /// The tensor's index.
    pub(super) tensor: usize,
    /// Its bytes.
    pub(super) out: &'a mut [u8],
    /// The offset of its first byte in the piece.
    offset: usize,
    /// How the piece is spread in its tensor; `None` if it is the whole tensor.
    spread: Option<Spread>,
}

/// The targets of the pieces of `stored` tensors, in the order of the payload. Zeroes the padding between them.
pub(super) fn of<'a>(manifest: &Manifest, stored: &[bool], payload: &'a mut [u8]) -> Vec<Target<'a>> {
    let tensors = manifest.tensors().iter().zip(stored).enumerate();
    let stored = tensors.filter(|(_, (_, is_stored))| **is_stored);
    let pieces = stored.flat_map(|(index, (tensor, _))| {
        let numbered = (0..).zip(tensor.ranges());
        numbered.map(move |(number, range)| (index, number, range))
    });
    let mut pieces: Vec<(usize, u64, Range<u64>)> = pieces.collect();
    pieces.sort_by_key(|(_, _, range)| (range.start, range.end));
    let (mut rest, mut start) = (payload, 0);
    let target = |(tensor, number, range): (usize, u64, Range<u64>)| {
        let (padding, after) = std::mem::take(&mut rest).split_at_mut((range.start - start) as usize);
        padding.fill(0);
        let (out, after) = after.split_at_mut((range.end - range.start) as usize);
        (rest, start) = (after, range.end);
        Target { tensor, out, offset: 0, spread: Spread::of_piece(&manifest.tensors()[tensor], number) }
    };
    let targets = pieces.into_iter().map(target).collect();
    rest.fill(0);
    targets
}

impl<'a> Target<'a> {
    /// The tensor's index and its bytes, if it is the whole tensor.
    pub(super) fn into_tensor(self) -> Result<(usize, &'a mut [u8]), Self> {
        match self.spread {
            None => Ok((self.tensor, self.out)),
            Some(_) => Err(self),
        }
    }

    /// Divides it into parts of this size.
    pub(super) fn split(self, bytes: usize) -> impl Iterator<Item = Self> {
        let Self { tensor, out, offset, spread } = self;
        out.chunks_mut(bytes).enumerate().map(move |(number, out)| {
            let spread = spread.clone();
            Self { tensor, out, offset: offset + number * bytes, spread }
        })
    }

    /// Calls `write` for each run of its bytes that lie together in the tensor, with the tensor's index and the offset in
    /// it.
    ///
    /// # Errors
    /// The first error of `write`, which is not called again.
    pub(super) fn try_each_run<E>(
        self,
        write: impl Fn(usize, usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Self { tensor, out, offset, spread } = self;
        let Some(spread) = spread else { return write(tensor, offset, out) };
        spread.try_each_run(offset as u64..(offset + out.len()) as u64, |range, start| {
            let run = range.start as usize - offset..range.end as usize - offset;
            write(tensor, start as usize, &mut out[run])
        })
    }

    /// Copies its bytes from the whole tensor.
    pub(super) fn copy_from(self, tensor: &[u8]) {
        let copied = self.try_each_run(|_, offset, out| {
            out.copy_from_slice(&tensor[offset..offset + out.len()]);
            Ok::<_, std::convert::Infallible>(())
        });
        copied.unwrap_or_else(|never| match never {});
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tensor_relay_protocol::{Cuts, Dtype, Limits, Shape, TensorName, TensorSpec};

    /// The bytes of a box of a dense array of bytes, one by one.
    fn boxed(array: &[u8], shape: &[u64], ranges: &[Range<u64>]) -> Vec<u8> {
        let mut indexes = vec![0];
        for (range, length) in ranges.iter().zip(shape) {
            indexes = indexes
                .iter()
                .flat_map(|outer| range.clone().map(move |at| outer * length + at))
                .collect();
        }
        indexes.iter().map(|index| array[*index as usize]).collect()
    }

    proptest! {
        /// For any shape, cuts and size of parts: the targets take each piece's elements, and the padding is zero.
        #[test]
        fn targets_are_the_pieces(
            shape in prop::collection::vec(1u64..20, 3),
            parts in prop::collection::vec(1u32..5, 3),
            part_bytes in 1usize..600,
        ) {
            let name = TensorName::new("t").unwrap();
            let cuts = (0..).zip(&shape).zip(&parts).filter(|((_, length), parts)| **length >= u64::from(**parts));
            let cuts = cuts.filter(|(_, parts)| **parts > 1).map(|((dimension, length), parts)| {
                let each = length.div_ceil(u64::from(*parts));
                (dimension, (1..u64::from(*parts)).map(|part| part * each).filter(|at| at < length).collect())
            });
            let spec = TensorSpec::new(name, Dtype::U8, Shape::new(&shape).unwrap());
            let spec = TensorSpec { cuts: Cuts::new(cuts), ..spec };
            let manifest = Manifest::layout(vec![spec], vec![], 512, &Limits::default()).unwrap();
            let tensor = &manifest.tensors()[0];
            let content: Vec<u8> = (0..tensor.byte_len()).map(|at| (at % 251) as u8 + 1).collect();
            let mut payload = vec![0xff; manifest.payload_bytes() as usize];
            for target in of(&manifest, &[true], &mut payload) {
                target.split(part_bytes).for_each(|part| part.copy_from(&content));
            }
            let mut end = 0;
            let mut pieces: Vec<_> = tensor.pieces().collect();
            pieces.sort_by_key(|piece| piece.range.start);
            for piece in pieces {
                prop_assert!(payload[end..piece.range.start as usize].iter().all(|byte| *byte == 0));
                end = piece.range.end as usize;
                let expected = boxed(&content, &shape, piece.bounds.ranges());
                prop_assert_eq!(&payload[piece.range.start as usize..end], &expected[..]);
            }
            prop_assert!(payload[end..].iter().all(|byte| *byte == 0));
        }
    }
}
