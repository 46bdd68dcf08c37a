//! The addresses that a strided tensor occupies. Pure: no memory is accessed.

use super::strides::ContiguousRuns;
use std::ops::Range;

/// The addresses of a tensor: pieces of the same length, evenly spaced along each dimension.
#[derive(Debug)]
pub(crate) struct Footprint {
    /// The GPU of the address; `None` for the host.
    gpu: Option<usize>,
    start: usize,
    piece_bytes: usize,
    /// For each dimension the number of pieces and their distance in bytes, the shortest distance last.
    outer: Vec<(u64, usize)>,
}

impl Footprint {
    /// The footprint of a tensor whose first element is at `address`.
    pub(super) fn new(gpu: Option<usize>, address: usize, runs: &ContiguousRuns) -> Self {
        let (mut start, mut piece_bytes) = (address, runs.bytes);
        let mut outer = vec![];
        for (len, stride) in runs.outer() {
            if *stride < 0 {
                start = start.wrapping_add_signed((*len as isize - 1).wrapping_mul(*stride));
            }
            outer.push((*len, stride.unsigned_abs()));
        }
        outer.sort_by_key(|(_, stride)| std::cmp::Reverse(*stride));
        while let Some((len, stride)) = outer.last()
            && *stride == piece_bytes
        {
            piece_bytes *= *len as usize;
            outer.pop();
        }
        Self { gpu, start, piece_bytes, outer }
    }

    /// Whether several elements share memory, as in an expanded tensor or in overlapping windows. Also true for some
    /// tensors whose dimensions interleave without an overlap.
    pub(crate) fn overlaps_itself(&self) -> bool {
        let mut inner_bytes = self.piece_bytes;
        for (len, stride) in self.outer.iter().rev() {
            if *stride < inner_bytes {
                return true;
            }
            inner_bytes += (*len as usize - 1) * stride;
        }
        false
    }

    /// Whether two footprints share a byte. Neither may overlap itself.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        if self.gpu != other.gpu || !intersect(&self.extent(), &other.extent()) {
            return false;
        }
        let (mut ours, mut theirs) = (self.pieces().peekable(), other.pieces().peekable());
        while let (Some(our), Some(their)) = (ours.peek(), theirs.peek()) {
            if intersect(our, their) {
                return true;
            }
            if our.start < their.start {
                ours.next()
            } else {
                theirs.next()
            };
        }
        false
    }

    /// The GPU of the addresses; `None` for the host.
    pub(super) fn gpu(&self) -> Option<usize> {
        self.gpu
    }

    /// The addresses from the first to the last element.
    pub(super) fn extent(&self) -> Range<usize> {
        let outer: usize = self.outer.iter().map(|(len, stride)| (*len as usize - 1) * stride).sum();
        self.start..self.start + outer + self.piece_bytes
    }

    /// The pieces in the order of their addresses, if none overlap.
    fn pieces(&self) -> impl Iterator<Item = Range<usize>> {
        let count: u64 = self.outer.iter().map(|(len, _)| len).product();
        (0..count).map(|mut index| {
            let offset = self.outer.iter().rev().fold(0, |offset, (len, stride)| {
                let step = index % len;
                index /= len;
                offset + step as usize * stride
            });
            let start = self.start + offset;
            start..start + self.piece_bytes
        })
    }
}

/// The indices of two footprints that share memory; `None` if there are none.
pub(crate) fn overlapping(footprints: &[Footprint]) -> Option<(usize, usize)> {
    let mut order: Vec<usize> = (0..footprints.len()).collect();
    order.sort_by_key(|index| (footprints[*index].gpu, footprints[*index].start));
    // The footprints that reach beyond the start of the next one.
    let mut open: Vec<usize> = vec![];
    for index in order {
        let next = &footprints[index];
        open.retain(|index| {
            footprints[*index].gpu == next.gpu && footprints[*index].extent().end > next.start
        });
        if let Some(other) = open.iter().find(|other| footprints[**other].overlaps(next)) {
            return Some((*other, index));
        }
        open.push(index);
    }
    None
}

fn intersect(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}
