//! The bytes that a tensor occupies, in any element order. Pure: nothing is read.

use super::strides::ContiguousRuns;
use std::ops::Range;

/// The bytes of a tensor: pieces of one length, evenly spaced along each dimension.
#[derive(Debug)]
pub(crate) struct Footprint {
    /// The GPU that the address is one of; none for the host.
    gpu: Option<usize>,
    start: usize,
    piece_bytes: usize,
    /// The number of pieces along each dimension, and how many bytes apart, the closest last.
    outer: Vec<(u64, usize)>,
}

impl Footprint {
    /// That of a tensor whose first element is at `address`.
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

    /// Whether several of its elements share memory, as in an expanded tensor or in overlapping windows.
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

    /// Whether they share a byte. Neither overlaps itself.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        if self.gpu != other.gpu || !meet(&self.extent(), &other.extent()) {
            return false;
        }
        let (mut ours, mut theirs) = (self.pieces().peekable(), other.pieces().peekable());
        while let (Some(our), Some(their)) = (ours.peek(), theirs.peek()) {
            if meet(our, their) {
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

    fn extent(&self) -> Range<usize> {
        let outer: usize = self.outer.iter().map(|(len, stride)| (*len as usize - 1) * stride).sum();
        self.start..self.start + outer + self.piece_bytes
    }

    /// The pieces by address, which is the order of their dimensions where none overlap.
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

/// The first two that share memory, by their places in `footprints`.
pub(crate) fn overlapping(footprints: &[Footprint]) -> Option<(usize, usize)> {
    let mut order: Vec<usize> = (0..footprints.len()).collect();
    order.sort_by_key(|index| (footprints[*index].gpu, footprints[*index].start));
    // Those that reach beyond where the next one begins.
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

fn meet(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}
