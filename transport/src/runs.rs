//! [`Runs`]: how the bytes of a part lie in memory, computed by `protocol`, for the sources and sinks of `device`.

use std::ops::Range;
use tensor_relay_device::{Rectangle, Spread};
use tensor_relay_protocol as protocol;

/// The runs of a part of a tensor or box.
#[derive(Debug)]
pub struct Runs(pub protocol::Spread);

impl Spread for Runs {
    fn rectangles(&self, range: Range<u64>, each: &mut dyn FnMut(Rectangle)) {
        self.0.rectangles(range, |found| {
            let protocol::Rectangle { from, to, run_bytes, runs, from_stride, to_stride } = found;
            let (part_stride, memory_stride) = (from_stride, to_stride);
            each(Rectangle { part: from, memory: to, run_bytes, runs, part_stride, memory_stride });
        });
    }
}
