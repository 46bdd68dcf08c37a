//! The sink for device memory, with a deadline for copies.

use super::{LentBuffer, OnDevice};
use std::{ops::Range, sync::Arc, time::Duration};
use tensor_relay_device::{
    BoxFuture, CopyError, DeviceBuffer, EngineSink, PartsError, Sink, SinkError, Target,
};
use tensor_relay_protocol::Selection;
use tokio::time::timeout;

/// The deadline for copying a chunk, after which its version is given up. Shorter than the stall timeout of both ends,
/// 30 s, so that the error names the device and not this client. Longer than a GPU's engine lets a copy wait for a
/// caller's stream, 20 s by default: so the engine's error, which names the late stream, comes first, although that
/// wait begins later.
const COPY_TIMEOUT: Duration = Duration::from_secs(25);

/// A sink in device memory whose copies have a deadline and hold references to their target buffers, so that lent
/// memory is not returned to its user during a copy.
#[derive(Debug)]
pub(crate) struct DeviceSink {
    inner: EngineSink,
    payload: Arc<OnDevice>,
    /// With boxes: the ranges of the stream and the memory that their bytes go to, by their start.
    placed: Option<Placed>,
}

/// Ranges that may overlap, by their start, with memory.
#[derive(Debug)]
struct Placed {
    by_start: Vec<(Range<u64>, Arc<LentBuffer>)>,
    longest_bytes: u64,
}

impl Placed {
    fn new(mut ranges: Vec<(Range<u64>, Arc<LentBuffer>)>) -> Self {
        ranges.sort_by_key(|(range, _)| range.start);
        let longest_bytes = ranges.iter().map(|(range, _)| range.end - range.start).max().unwrap_or(0);
        Self { by_start: ranges, longest_bytes }
    }

    /// The memory of the ranges that overlap `range`.
    fn overlapping(&self, range: &Range<u64>) -> Vec<Arc<LentBuffer>> {
        let end = self.by_start.partition_point(|(placed, _)| placed.start < range.end);
        let may_reach = |placed: &Range<u64>| placed.start.saturating_add(self.longest_bytes) > range.start;
        let before = self.by_start[..end].iter().rev().take_while(|(placed, _)| may_reach(placed));
        before
            .filter(|(placed, _)| placed.end > range.start)
            .map(|(_, memory)| Arc::clone(memory))
            .collect()
    }
}

impl DeviceSink {
    /// A sink for the stream of `selection`, whose places are in `payload`.
    pub(super) fn new(payload: Arc<OnDevice>, selection: &Selection) -> Result<Self, PartsError> {
        let placed = selection.has_parts().then(|| Placed::new(payload.placed(selection)));
        Ok(Self { inner: payload.sink(selection)?, payload, placed })
    }

    /// A sink for the bytes of `payload` in their places, which are within `len_bytes`.
    pub(super) fn of_memory(payload: Arc<OnDevice>, len_bytes: u64) -> Result<Self, PartsError> {
        Ok(Self { inner: payload.memory_sink(len_bytes)?, payload, placed: None })
    }

    /// Whether a chunk waits for a slot of the device or for an unfinished copy.
    pub(super) fn waits_for_device(&self) -> bool {
        self.inner.waits_for_device()
    }

    /// Ends writing. Fails while a chunk is being written, or if it is unknown whether a copy has ended.
    pub(super) fn commit(&self) -> Result<(), SinkError> {
        self.inner.commit()
    }

    /// The memory that the bytes of `range` go to.
    fn written(&self, range: &Range<u64>) -> Vec<Arc<LentBuffer>> {
        match &self.placed {
            Some(placed) => placed.overlapping(range),
            None => self.payload.overlapping(range),
        }
    }

    async fn copy(&self, target: Target) -> Result<(), SinkError> {
        let written = self.written(&target.range());
        self.ended(self.inner.write_keeping(target, written.clone()), &written).await
    }

    async fn copy_all(&self, from: &DeviceBuffer, places: &[(u64, Range<u64>)]) -> Result<(), SinkError> {
        let written = self.payload.all();
        self.ended(self.inner.copy_within_keeping(from, places, written.clone()), &written)
            .await
    }

    /// Waits for the end of a copy to `written`, which is withheld from its user if the copy may go on.
    async fn ended(
        &self,
        copying: impl Future<Output = Result<(), SinkError>>,
        written: &[Arc<LentBuffer>],
    ) -> Result<(), SinkError> {
        let Ok(end) = timeout(COPY_TIMEOUT, copying).await else {
            let device = self.payload.device().name().into();
            return Err(CopyError::TimedOut { device, waited: COPY_TIMEOUT }.into());
        };
        let may_go_on = match &end {
            Err(SinkError::Copy(error)) => error.may_still_write(),
            Err(SinkError::Within(error)) => error.may_still_copy(),
            _ => false,
        };
        if may_go_on {
            written.iter().for_each(|memory| memory.withhold());
        }
        end
    }
}

impl Sink for DeviceSink {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn open(&self, range: Range<u64>) -> BoxFuture<'_, Result<Target, SinkError>> {
        self.inner.open(range)
    }

    fn write(&self, target: Target) -> BoxFuture<'_, Result<(), SinkError>> {
        Box::pin(self.copy(target))
    }

    fn copy_within<'a>(
        &'a self,
        from: &'a DeviceBuffer,
        places: &'a [(u64, Range<u64>)],
    ) -> BoxFuture<'a, Result<(), SinkError>> {
        Box::pin(self.copy_all(from, places))
    }
}
