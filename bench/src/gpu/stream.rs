//! A payload's way from source to sink without a network: each stage as in service, handed over in memory.

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

/// The depth of the stages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Depth {
    /// Chunks that are read, hashed or handed over at one time: a server's chunks in flight.
    pub(super) sending: usize,
    /// Chunks that are on their way to a server's or a client's end at one time.
    pub(super) moving: usize,
}

impl Depth {
    /// As deep as pools of `slots` at either end allow without ever using up a source's last quarter, below which it
    /// copies on the host instead of lending its slots.
    pub(super) fn of_slots(slots: usize) -> Self {
        let sending = (slots - slots / 4).max(1);
        Self { sending, moving: sending + slots }
    }
}

/// The last stage of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It is written to the sink.
    Written,
    /// It is verified and dropped, and only its slot was needed: what everything but the copies costs.
    Dropped,
}

/// Moves all of `source` to `sink`: read, hash, hand over and verify on the way, write.
pub(super) async fn transfer(
    manifest: &Arc<Manifest>,
    source: &Arc<dyn Source>,
    sink: &Arc<dyn Sink>,
    depth: Depth,
    end: End,
) -> Result<()> {
    let stream = Arc::new(Stream {
        payload: Payload::new(Arc::clone(manifest), Arc::clone(source)),
        encoder: Encoder::new(0, None, Workers::Threads),
        sink: Arc::clone(sink),
        sending: Semaphore::new(depth.sending),
        next: AtomicU32::new(0),
        end,
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
    end: End,
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
        for (place, piece) in target.chunks_mut(PIECE_BYTES).zip(encoded.bytes.chunks(PIECE_BYTES)) {
            place.copy_from_slice(piece);
            hasher.update(place);
        }
        let hash = encoded.hash;
        drop((encoded, sending));
        // No assembly tracks chunks here: the movers end when all have arrived.
        let _verified = hasher.verify(chunk, hash)?;
        if stream.end == End::Written {
            stream.sink.write(target).await?;
        }
    }
}

/// About what a receiver takes from its socket at once: it is hashed while it is in the cache.
const PIECE_BYTES: usize = 64 << 10;

/// Reads all `ranges` of `source`, `in_flight` at a time, and drops them.
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

/// Writes all `ranges` of `sink`, `in_flight` at a time, with whatever the slots hold.
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
    while let Some(done) = tasks.join_next().await {
        done.context("a task panicked")??;
    }
    Ok(())
}

/// `len_bytes` cut into pieces of `piece_bytes`.
pub(super) fn pieces(len_bytes: u64, piece_bytes: u64) -> Arc<[Range<u64>]> {
    let starts = (0..len_bytes).step_by(piece_bytes as usize);
    starts.map(|start| start..len_bytes.min(start + piece_bytes)).collect()
}

/// A source that costs nothing but a slot: whatever the slot holds is the payload.
pub(super) struct SlotSource {
    slots: SlotPool,
    len_bytes: u64,
}

impl SlotSource {
    /// A payload of `len_bytes` out of `slots`, which are as long as any range that is read.
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
