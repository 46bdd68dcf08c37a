//! A version's bytes in device memory.

use super::{SnapshotMemory, arrangement::Arrangement};
use crate::{buffers::Writing, holding::HeldVersion};
use std::{collections::BTreeMap, ops::Range, sync::Arc};
use tensor_relay_device::{
    AllocError, Device, DeviceBuffer, EngineSink, Lock, PartsError, Rectangle, Source, Spread, SpreadParts,
};
use tensor_relay_protocol::Selection;
use tokio::sync::oneshot;

/// A payload on one device: in one piece of memory, or with tensors in the user's buffers.
#[derive(Debug)]
pub(crate) struct OnDevice {
    device: Device,
    /// The pieces, by their start in the payload.
    pieces: BTreeMap<u64, Arc<LentBuffer>>,
    /// Records writes to the user's buffers; `None` for memory of the session.
    writing: Option<Arc<Writing>>,
    /// The memory for host copies.
    memory: SnapshotMemory,
}

impl OnDevice {
    /// Allocates one piece of `len_bytes`.
    pub(crate) fn allocate(
        device: &Device,
        len_bytes: u64,
        memory: &SnapshotMemory,
    ) -> Result<Self, AllocError> {
        // Lengths beyond the address space are refused by the device.
        let buffer = device.allocate(usize::try_from(len_bytes).unwrap_or(usize::MAX))?;
        Ok(Self::of(buffer, memory))
    }

    /// One piece, which is the whole payload.
    pub(crate) fn of(buffer: DeviceBuffer, memory: &SnapshotMemory) -> Self {
        let device = buffer.device().clone();
        let pieces = BTreeMap::from([(0, Arc::new(LentBuffer::new(buffer, None)))]);
        Self { device, pieces, writing: None, memory: memory.clone() }
    }

    /// The user's lent buffers, by their start in the selection's memory. `None` if there are no buffers, or they are on
    /// several devices.
    pub(crate) fn from_lent(
        pieces: BTreeMap<u64, Arc<LentBuffer>>,
        writing: Arc<Writing>,
        memory: &SnapshotMemory,
    ) -> Option<Self> {
        let device = pieces.values().next()?.buffer().device().clone();
        let is_on_device = |lent: &Arc<LentBuffer>| lent.buffer().device().is(&device);
        pieces.values().all(is_on_device).then_some(())?;
        Some(Self { device, pieces, writing: Some(writing), memory: memory.clone() })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn writing(&self) -> Option<&Arc<Writing>> {
        self.writing.as_ref()
    }

    pub(crate) fn memory(&self) -> &SnapshotMemory {
        &self.memory
    }

    /// The buffer that holds `range` of the payload, and the range within the buffer. An empty range is found in
    /// the first buffer.
    pub(crate) fn find(&self, range: Range<u64>) -> Option<(&DeviceBuffer, Range<u64>)> {
        if range.is_empty() {
            return self.pieces.values().next().map(|piece| (&piece.buffer, 0..0));
        }
        let (start, piece) = self.pieces.range(..=range.start).next_back()?;
        let within = range.start - start..range.end - start;
        (within.end <= piece.buffer.len_bytes()).then_some((&piece.buffer, within))
    }

    /// The pieces that overlap `range` of the payload.
    pub(super) fn overlapping(&self, range: &Range<u64>) -> Vec<Arc<LentBuffer>> {
        let before = self.pieces.range(..range.end).rev();
        let overlapping = before.take_while(|(start, piece)| *start + piece.buffer.len_bytes() > range.start);
        overlapping.map(|(_, piece)| Arc::clone(piece)).collect()
    }

    /// All pieces.
    pub(super) fn all(&self) -> Vec<Arc<LentBuffer>> {
        self.pieces.values().cloned().collect()
    }

    /// A sink for the stream of `selection`.
    pub(super) fn sink(&self, selection: &Selection) -> Result<EngineSink, PartsError> {
        let len_bytes = selection.payload_bytes();
        if !selection.has_parts() {
            return self.memory_sink(len_bytes);
        }
        let starts: Vec<u64> = self.pieces.keys().copied().collect();
        let parts = Arrangement::of(selection).into_parts().filter_map(|(range, start, runs)| {
            let (piece_start, _) = self.piece_at(start)?;
            let runs = Behind { runs, offset: start - piece_start };
            Some((range, starts.binary_search(&piece_start).ok()?, Arc::new(runs) as Arc<dyn Spread>))
        });
        let memories = self.pieces.values().map(|piece| piece.buffer.clone()).collect();
        self.device.spread_sink(len_bytes, [], SpreadParts::new(memories, parts)?)
    }

    /// The ranges of the stream of a selection with boxes, and the piece that the bytes of each go to.
    pub(super) fn placed(&self, selection: &Selection) -> Vec<(Range<u64>, Arc<LentBuffer>)> {
        let parts = Arrangement::of(selection).into_parts();
        parts
            .filter_map(|(range, start, _)| Some((range, Arc::clone(self.piece_at(start)?.1))))
            .collect()
    }

    /// The piece with this offset of the payload, and its start.
    fn piece_at(&self, offset: u64) -> Option<(u64, &Arc<LentBuffer>)> {
        let (start, piece) = self.pieces.range(..=offset).next_back()?;
        (offset - start < piece.buffer.len_bytes()).then_some((*start, piece))
    }

    /// A sink for the places of the pieces, which are within `len_bytes`.
    pub(super) fn memory_sink(&self, len_bytes: u64) -> Result<EngineSink, PartsError> {
        self.device.sink(len_bytes, self.parts())
    }

    /// A source of the payload, `len_bytes` long. Tensors received without a buffer read as zeros.
    pub(crate) fn source(&self, len_bytes: u64) -> Result<Arc<dyn Source>, PartsError> {
        self.device.source(len_bytes, self.parts())
    }

    fn parts(&self) -> impl Iterator<Item = (Range<u64>, DeviceBuffer)> {
        let part = |(start, piece): (&u64, &Arc<LentBuffer>)| {
            (*start..*start + piece.buffer.len_bytes(), piece.buffer.clone())
        };
        self.pieces.iter().map(part)
    }
}

/// Runs in memory that begins at an offset of a larger one.
#[derive(Debug)]
struct Behind {
    runs: Arc<dyn Spread>,
    offset: u64,
}

impl Spread for Behind {
    fn rectangles(&self, range: Range<u64>, each: &mut dyn FnMut(Rectangle)) {
        self.runs.rectangles(range, &mut |found| {
            each(Rectangle { memory: found.memory.saturating_add(self.offset), ..found });
        });
    }
}

/// Device memory for received bytes. A lent buffer is returned to its user when the last reference to it is dropped;
/// each copy to it holds one.
#[derive(Debug)]
pub(crate) struct LentBuffer {
    buffer: DeviceBuffer,
    owner: Lock<Option<oneshot::Sender<DeviceBuffer>>>,
}

impl LentBuffer {
    fn new(buffer: DeviceBuffer, owner: Option<oneshot::Sender<DeviceBuffer>>) -> Self {
        Self { buffer, owner: Lock::new(owner) }
    }

    /// Wraps the user's memory, which comes back through the channel.
    pub(crate) fn lend(buffer: DeviceBuffer) -> (Arc<Self>, oneshot::Receiver<DeviceBuffer>) {
        let (owner, returned) = oneshot::channel();
        (Arc::new(Self::new(buffer, Some(owner))), returned)
    }

    pub(crate) fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    /// Withholds the buffer, because a copy to it may still be running; its user's channel closes immediately. The
    /// engine keeps the memory for as long as that copy may write.
    pub(super) fn withhold(&self) {
        drop(self.take_owner());
    }

    fn take_owner(&self) -> Option<oneshot::Sender<DeviceBuffer>> {
        self.owner.lock().take()
    }
}

impl Drop for LentBuffer {
    fn drop(&mut self) {
        if let Some(owner) = self.take_owner() {
            let _ = owner.send(self.buffer.clone()); // Without a receiver, the last clone frees it.
        }
    }
}

/// A payload on a device, shared by snapshots and tensors: the version counts as held until the last of them is
/// dropped.
#[derive(Debug, Clone)]
pub(crate) struct SharedPayload {
    payload: Arc<OnDevice>,
    held: Option<Arc<HeldVersion>>,
}

impl SharedPayload {
    pub(crate) fn new(payload: Arc<OnDevice>) -> Self {
        Self { payload, held: None }
    }

    pub(crate) fn payload(&self) -> &OnDevice {
        &self.payload
    }

    /// Keeps `held` until this and all its clones are dropped.
    pub(crate) fn keep(&mut self, held: HeldVersion) {
        self.held = Some(Arc::new(held));
    }
}
