//! Copies between a device and its slots, without a network.

use anyhow::{Context, Result};
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};
use tensor_relay_device::{Sink, Source};
use tokio::task::JoinSet;

/// The largest number of chunks that a server with `slots` slots may read, hash or send at one time, such that a quarter
/// of the slots, rounded down, stays free: none of fewer than four. A source lends a slot only if afterwards a quarter of
/// its slots, and at least one, are free; otherwise it copies on the host.
pub(super) fn chunks_in_flight(slots: usize) -> usize {
    (slots - slots / 4).max(2)
}

/// Reads all `ranges` of `source`, `in_flight` at a time, and drops their bytes.
pub(super) async fn read_all(
    source: &Arc<dyn Source>,
    ranges: &Arc<[Range<u64>]>,
    in_flight: usize,
) -> Result<()> {
    let next = Arc::new(AtomicU32::new(0));
    let mut readers = JoinSet::new();
    for _ in 0..in_flight {
        let (source, ranges, next) = (Arc::clone(source), Arc::clone(ranges), Arc::clone(&next));
        readers.spawn(async move {
            while let Some(range) = ranges.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                source.read(range.clone()).await?;
            }
            anyhow::Ok(())
        });
    }
    all_done(readers).await
}

/// Writes all `ranges` of `sink`, `in_flight` at a time, with arbitrary bytes.
pub(super) async fn write_all(
    sink: &Arc<dyn Sink>,
    ranges: &Arc<[Range<u64>]>,
    in_flight: usize,
) -> Result<()> {
    let next = Arc::new(AtomicU32::new(0));
    let mut writers = JoinSet::new();
    for _ in 0..in_flight {
        let (sink, ranges, next) = (Arc::clone(sink), Arc::clone(ranges), Arc::clone(&next));
        writers.spawn(async move {
            while let Some(range) = ranges.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                let target = sink.open(range.clone()).await?;
                sink.write(target).await?;
            }
            anyhow::Ok(())
        });
    }
    all_done(writers).await
}

async fn all_done(mut tasks: JoinSet<Result<()>>) -> Result<()> {
    while let Some(joined) = tasks.join_next().await {
        joined.context("a task panicked")??;
    }
    Ok(())
}

/// Divides `len_bytes` into ranges of `piece_bytes`.
pub(super) fn pieces(len_bytes: u64, piece_bytes: u64) -> Arc<[Range<u64>]> {
    let starts = (0..len_bytes).step_by(piece_bytes as usize);
    starts.map(|start| start..len_bytes.min(start + piece_bytes)).collect()
}
