//! Copies between a device and its slots, without a network.

use anyhow::Result;
use futures_util::{TryFutureExt, TryStreamExt, stream};
use std::{ops::Range, sync::Arc};
use tensor_relay_device::{Sink, Source};

/// The largest number of chunks that a server with `slots` slots may read, hash or send at one time, such that a quarter
/// of the slots, rounded down, stays free: none of fewer than four. A source lends a slot only if afterwards a quarter of
/// its slots, and at least one, are free; otherwise it copies on the host.
pub(super) fn chunks_in_flight(slots: usize) -> usize {
    (slots - slots / 4).max(2)
}

/// Reads all `ranges` of `source`, `in_flight` at a time, and drops their bytes.
pub(super) async fn read_all(
    source: &Arc<dyn Source>,
    ranges: &[Range<u64>],
    in_flight: usize,
) -> Result<()> {
    let ranges = stream::iter(ranges.iter().cloned().map(Ok));
    let read = |range| source.read(range).map_ok(drop).err_into();
    ranges.try_for_each_concurrent(in_flight, read).await
}

/// Writes all `ranges` of `sink`, `in_flight` at a time, with arbitrary bytes.
pub(super) async fn write_all(sink: &Arc<dyn Sink>, ranges: &[Range<u64>], in_flight: usize) -> Result<()> {
    let ranges = stream::iter(ranges.iter().cloned().map(Ok));
    let write = |range| async {
        let target = sink.open(range).await?;
        Ok(sink.write(target).await?)
    };
    ranges.try_for_each_concurrent(in_flight, write).await
}

/// Divides `len_bytes` into ranges of `piece_bytes`.
pub(super) fn pieces(len_bytes: u64, piece_bytes: u64) -> Vec<Range<u64>> {
    let starts = (0..len_bytes).step_by(piece_bytes as usize);
    starts.map(|start| start..len_bytes.min(start + piece_bytes)).collect()
}
