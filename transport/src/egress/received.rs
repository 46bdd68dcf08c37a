//! [`ReceivedChunks`]: the chunks of a version that was or is being received, to be sent on exactly as they came
//! (PROTOCOL.md §3.15).

use super::Pace;
use crate::{Workers, forwarding::ReceivedMemory};
use bytes::Bytes;
use std::{collections::BTreeMap, sync::Arc};
use tensor_relay_device::{Charge, HostMemory, Lock};
use tensor_relay_protocol::{
    ChunkHash, ChunkHeader, ChunkIndex, CodecId, EncodingEntry, Manifest, RangeSet, Version,
};
use tokio::sync::watch;

/// The minimum length of encodings that are mapped directly from the system, because allocators would retain their memory.
const MAPPED_BYTES_MIN: usize = 256 << 10;

/// The chunks of one version that can be sent on.
///
/// Encodings are kept within a budget. Raw chunks are copied out of the version's memory each time that they are sent, and
/// compared with their hash, so that a slow taker holds a copy and never that memory, and that nothing is sent which its
/// user has overwritten. A copy of a MiB costs about 0.2 ms, the comparison 0.05 ms.
///
/// A chunk is offered once it is here and the origin has named the same codec and base for it: codecs are deterministic, so
/// its bytes are the ones that takers expect. One that came in another encoding is not, unless the shared one is raw.
#[derive(Debug)]
pub struct ReceivedChunks {
    manifest: Arc<Manifest>,
    kept: HostMemory,
    /// The rate at which chunks of all versions of the member are sent, if that is limited.
    pace: Option<Arc<Pace>>,
    workers: Workers,
    state: Lock<State>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    /// The version's memory, if raw chunks can be read from it.
    memory: Option<Arc<dyn ReceivedMemory>>,
    chunks: BTreeMap<u32, Chunk>,
    /// The codec and base of shared encodings.
    entries: BTreeMap<u32, (CodecId, Option<Version>)>,
    offered: Arc<RangeSet>,
    is_closed: bool,
}

/// A verified chunk.
#[derive(Debug)]
struct Chunk {
    header: ChunkHeader,
    /// Its encoding; `None` if it is raw and in the version's memory.
    encoding: Option<Bytes>,
}

/// An encoding in the allocator's memory, counted until it is dropped.
struct Counted {
    bytes: Vec<u8>,
    _charge: Charge,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl State {
    /// Offers a chunk if it is here in its shared encoding, or can be read in it: raw. Returns whether it was not offered
    /// before. A chunk that is kept in another encoding is of no use and dropped.
    fn offer(&mut self, chunk: u32) -> bool {
        let (Some(here), Some(shared)) = (self.chunks.get_mut(&chunk), self.entries.get(&chunk)) else {
            return false;
        };
        if *shared == (CodecId::Raw, None) && self.memory.is_some() {
            let (codec, base, encoded_bytes) = (CodecId::Raw, None, here.header.raw_bytes);
            here.header = ChunkHeader { codec, base, encoded_bytes, ..here.header };
            here.encoding = None;
        } else if (here.header.codec, here.header.base) != *shared || here.encoding.is_none() {
            self.chunks.remove(&chunk);
            return false;
        }
        Arc::make_mut(&mut self.offered).insert(chunk)
    }
}

impl ReceivedChunks {
    /// No chunk yet of the version of `manifest`, whose raw chunks can be read from `memory`, if that is given. Encodings
    /// are kept within `budget_bytes`.
    pub fn new(
        manifest: Arc<Manifest>,
        memory: Option<Arc<dyn ReceivedMemory>>,
        budget_bytes: u64,
        workers: Workers,
    ) -> Self {
        let state = State { memory, ..State::default() };
        let (kept, changed) = (HostMemory::in_proportion(budget_bytes), watch::Sender::default());
        Self { manifest, kept, pace: None, workers, state: Lock::new(state), changed }
    }

    /// Sends chunks at this pace.
    #[must_use]
    pub fn with_pace(self, pace: Option<Arc<Pace>>) -> Self {
        Self { pace, ..self }
    }

    /// Copies the encoding of a chunk; `None` if it can be read from the version's memory, or exceeds the budget. Every
    /// copy counts, in whole pages.
    pub fn keep(&self, header: &ChunkHeader, encoded: &[u8]) -> Option<Bytes> {
        if header.codec == CodecId::Raw && self.state.lock().memory.is_some() {
            return None;
        }
        if encoded.len() >= MAPPED_BYTES_MIN {
            let mut region = self.kept.allocate(encoded.len()).ok()?;
            region.copy_from_slice(encoded);
            return Some(region.freeze());
        }
        let charge = self.kept.charge(encoded.len()).ok()?;
        Some(Bytes::from_owner(Counted { bytes: encoded.to_vec(), _charge: charge }))
    }

    /// Adds a verified chunk, with what was kept of it. Returns whether it can be sent on.
    pub fn handle_verified(&self, header: &ChunkHeader, encoding: Option<Bytes>) -> bool {
        let mut state = self.state.lock();
        // Its shared encoding may be raw, whatever it came in.
        if state.is_closed || encoding.is_none() && state.memory.is_none() {
            return false;
        }
        state.chunks.insert(header.chunk.0, Chunk { header: *header, encoding });
        let is_new = state.offer(header.chunk.0);
        let is_here = state.chunks.contains_key(&header.chunk.0);
        drop(state);
        if is_new {
            self.changed.send_replace(());
        }
        is_here
    }

    /// Handles entries of shared encodings. A later one that differs, of an origin that has restarted, replaces the first, as
    /// for those who begin to take now: the chunk is offered in that encoding or not at all.
    pub fn handle_encodings(&self, entries: &[EncodingEntry]) {
        let count = self.manifest.chunking().count();
        let mut state = self.state.lock();
        let mut is_changed = false;
        for entry in entries.iter().filter(|entry| entry.chunk.0 < count) {
            let shared = (entry.codec, entry.base);
            if state
                .entries
                .insert(entry.chunk.0, shared)
                .is_some_and(|before| before != shared)
            {
                is_changed |= Arc::make_mut(&mut state.offered).remove(entry.chunk.0);
            }
            is_changed |= state.offer(entry.chunk.0);
        }
        drop(state);
        if is_changed {
            self.changed.send_replace(());
        }
    }

    /// The chunks on offer.
    pub fn offered(&self) -> Arc<RangeSet> {
        Arc::clone(&self.state.lock().offered)
    }

    /// Watches the chunks on offer.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// The header and the encoded bytes of a chunk on offer. `None` if it is not, or cannot be read any more: then it is
    /// withdrawn. Waits for its turn, if the rate is limited. Cancel safe.
    pub async fn read(&self, chunk: ChunkIndex) -> Option<(ChunkHeader, Bytes)> {
        if let Some(pace) = &self.pace {
            pace.turn(self.sent_bytes(chunk)).await;
        }
        let (header, memory) = {
            let state = self.state.lock();
            let here = state.chunks.get(&chunk.0).filter(|_| state.offered.contains(chunk.0))?;
            if let Some(encoding) = &here.encoding {
                return Some((here.header, encoding.clone()));
            }
            (here.header, Arc::clone(state.memory.as_ref()?))
        };
        let (range, _) = self.manifest.chunk(chunk);
        let copied = self.workers.run_over(header.raw_bytes as usize, move || {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            let is_same = memory.copy(range, &mut bytes) && ChunkHash::of(&bytes) == header.hash;
            is_same.then(|| Bytes::from(bytes))
        });
        match copied.await {
            Some(bytes) => Some((header, bytes)),
            None => {
                self.withdraw(chunk);
                None
            }
        }
    }

    /// The bytes that a chunk on offer is sent in.
    fn sent_bytes(&self, chunk: ChunkIndex) -> u64 {
        let state = self.state.lock();
        let chunk = state.chunks.get(&chunk.0);
        chunk.map_or(0, |chunk| match &chunk.encoding {
            Some(encoding) => encoding.len() as u64,
            None => u64::from(chunk.header.raw_bytes),
        })
    }

    fn withdraw(&self, chunk: ChunkIndex) {
        let mut state = self.state.lock();
        state.chunks.remove(&chunk.0);
        let is_changed = Arc::make_mut(&mut state.offered).remove(chunk.0);
        drop(state);
        if is_changed {
            self.changed.send_replace(());
        }
    }

    /// Withdraws everything. The version's memory and what is kept are free at once, but for copies that are being made or
    /// sent.
    pub fn close(&self) {
        let mut state = self.state.lock();
        let gone = std::mem::replace(&mut *state, State { is_closed: true, ..State::default() });
        drop(state);
        drop(gone); // Outside of the lock: it may be gigabytes.
        self.changed.send_replace(());
    }
}
