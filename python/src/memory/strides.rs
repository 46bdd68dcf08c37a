//! The offsets of a strided tensor's elements. Pure: no memory is accessed.

/// The contiguous pieces of a strided tensor, in the order of its elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ContiguousRuns {
    /// The length of each piece.
    pub(crate) bytes: usize,
    /// The length of each outer dimension, and its stride in bytes.
    outer: Vec<(u64, isize)>,
}

/// The strides of a contiguous tensor, in elements.
pub(crate) fn dense(shape: &[u64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for dimension in (1..shape.len()).rev() {
        let len = i64::try_from(shape[dimension].max(1)).unwrap_or(i64::MAX);
        strides[dimension - 1] = strides[dimension] * len;
    }
    strides
}

impl ContiguousRuns {
    /// The runs of a tensor with this shape, strides in bytes and element size. An empty tensor has one empty run.
    pub(crate) fn of(shape: &[u64], strides: &[isize], item_bytes: usize) -> Self {
        if shape.contains(&0) {
            return Self { bytes: 0, outer: vec![] };
        }
        let mut bytes = item_bytes;
        let mut outer: Vec<_> = shape
            .iter()
            .copied()
            .zip(strides.iter().copied())
            .filter(|(len, _)| *len > 1)
            .collect();
        while let Some((len, stride)) = outer.last()
            && usize::try_from(*stride) == Ok(bytes)
        {
            bytes *= *len as usize;
            outer.pop();
        }
        Self { bytes, outer }
    }

    /// Whether the whole tensor is one run.
    pub(crate) fn is_one(&self) -> bool {
        self.outer.is_empty()
    }

    /// The length of each outer dimension, and its stride in bytes.
    pub(crate) fn outer(&self) -> &[(u64, isize)] {
        &self.outer
    }

    /// The offset of each run from the first element in bytes, in order, beginning with the run `first`.
    pub(crate) fn offsets(&self, first: usize) -> impl Iterator<Item = isize> {
        let count: u64 = self.outer.iter().map(|(len, _)| len).product();
        (first as u64..count).map(|mut index| {
            self.outer.iter().rev().fold(0, |offset, (len, stride)| {
                let step = index % len;
                index /= len;
                offset + step as isize * stride
            })
        })
    }
}
