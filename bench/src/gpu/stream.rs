//! Moves a payload from source to sink without a network: each stage as in the service, connected through memory.

use anyhow::{Context, Result};
use std::{
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};
use tensor_relay_device::{BoxFuture, Sink, SlotPool, Source, SourceError};
use tensor_relay_protocol::{ChunkHasher, ChunkIndex, CodecId, Manifest};
use tensor_relay_transport::{
    Workers,
    egress::{Encoder, Payload},
};
use tokio::{sync::Semaphore, task::JoinSet};

/// The maximum numbers of chunks in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Depth {
    /// The number of chunks that are read, hashed or sent at one time: a server's chunks in flight.
    pub(super) sending: usize,
    /// The number of chunks between the first and the last stage at one time, at both ends.
    pub(super) moving: usize,
}

impl Depth {
    /// The largest depth for pools of `slots` at either end that leaves a quarter of the source's slots free, rounded
    /// down: none of fewer than four. A source lends a slot only if afterwards a quarter of its slots, and at least
    /// one, are free; otherwise it copies on the host.
    pub(super) fn of_slots(slots: usize) -> Self {
        let sending = (slots - slots / 4).max(1);
        Self { sending, moving: sending + slots }
    }
}

/// The last stage of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LastStage {
    /// The chunk is written to the sink.
    Written,
    /// The chunk is verified and dropped, which measures the cost of all stages without the copy.
    Dropped,
}

/// Moves the payload of `source` to `sink`: reads, hashes, copies and verifies each chunk, and writes it if
/// `last_stage` is [`LastStage::Written`].
pub(super) async fn transfer(
    manifest: &Arc<Manifest>,
    source: &Arc<dyn Source>,
    sink: &Arc<dyn Sink>,
    depth: Depth,
    last_stage: LastStage,
) -> Result<()> {
    let stream = Arc::new(Stream {
        payload: Payload::new(Arc::clone(manifest), Arc::clone(source)),
        encoder: Encoder::new(0, None, Workers::Threads),
        sink: Arc::clone(sink),
        sending: Semaphore::new(depth.sending),
        next: AtomicU32::new(0),
        last_stage,
    });
    let mut movers = JoinSet::new();
    for _ in 0..depth.moving {
        movers.spawn(move_chunks(Arc::clone(&stream)));
    }
    all_done(movers).await
}

struct Stream {
    payload: Payload,
    encoder: Encoder,
    sink: Arc<dyn Sink>,
    sending: Semaphore,
    next: AtomicU32,
    last_stage: LastStage,
}

async fn move_chunks(stream: Arc<Stream>) -> Result<()> {
    let manifest = Arc::clone(stream.payload.manifest());
    loop {
        let chunk = stream.next.fetch_add(1, Ordering::Relaxed);
        if chunk >= manifest.chunking().count() {
            return Ok(());
        }
        let chunk = ChunkIndex(chunk);
        let (range, _) = manifest.chunk(chunk);
        let sending = stream.sending.acquire().await?;
        let encoded = stream.encoder.encode(&stream.payload, chunk, CodecId::Raw).await?;
        let mut target = stream.sink.open(range).await?;
        let mut hasher = ChunkHasher::new();
        for (target_piece, piece) in target.chunks_mut(PIECE_BYTES).zip(encoded.bytes.chunks(PIECE_BYTES)) {
            target_piece.copy_from_slice(piece);
            hasher.update(target_piece);
        }
        let hash = encoded.hash;
        drop((encoded, sending));
        // No assembly tracks chunks here: the movers end when all chunks are moved.
        let _verified = hasher.verify(chunk, hash)?;
        if stream.last_stage == LastStage::Written {
            stream.sink.write(target).await?;
        }
    }
}

/// The size of a piece that is copied and then hashed while it is in the cache: about one read from a receiver's
/// socket.
const PIECE_BYTES: usize = 64 << 10;

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

/// A source that copies nothing: a read acquires a slot, and returns its arbitrary content.
pub(super) struct SlotSource {
    slots: SlotPool,
    len_bytes: u64,
}

impl SlotSource {
    /// A source of `len_bytes`. The slots must be at least as long as the ranges to be read.
    pub(super) fn new(slots: SlotPool, len_bytes: u64) -> Self {
        Self { slots, len_bytes }
    }
}

impl Source for SlotSource {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<bytes::Bytes, SourceError>> {
        Box::pin(async move {
            let slot = self.slots.acquire().await;
            Ok(slot.freeze((range.end - range.start) as usize))
        })
    }
}

impl fmt::Debug for SlotSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotSource")
            .field("len_bytes", &self.len_bytes)
            .finish_non_exhaustive()
    }
}
