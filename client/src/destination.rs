//! The destination of a version's bytes: the session's own memory, a device, or buffers lent by the user.

mod device_sink;
mod on_device;

pub(crate) use on_device::{LentBuffer, OnDevice, SharedPayload};

use crate::{
    buffers::{Fit, Lent, LentMemory, Writing},
    error::TransferError,
};
use bytes::Bytes;
use device_sink::DeviceSink;
use std::{collections::BTreeMap, ops::Range, sync::Arc};
use tensor_relay_device::{
    Device, HostBytes, HostMemory, HostSink, PartsError, Region, Sink, SinkError, VolatileBytes,
};
use tensor_relay_protocol::{Selection, TensorName, VersionId};

/// The memory for versions without lent buffers.
#[derive(Debug)]
pub(crate) struct Allocators {
    /// Host memory, within the session's budget.
    pub(crate) memory: SnapshotMemory,
    /// The device for versions, if any.
    pub(crate) device: Option<Device>,
}

/// The host memory of snapshots, and who may write to it.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotMemory {
    pub(crate) memory: HostMemory,
    /// Whether users may write to snapshots ([`Config::volatile_snapshots`](crate::Config::volatile_snapshots)).
    pub(crate) is_volatile: bool,
}

impl SnapshotMemory {
    /// A complete payload in `region`.
    pub(crate) fn payload(&self, region: Region) -> Payload {
        Payload::Region(match self.is_volatile {
            true => VolatileBytes::from(region).into(),
            false => region.freeze().into(),
        })
    }
}

/// Receives the bytes of one version, and returns them once they are complete.
#[derive(Debug)]
pub(crate) enum Destination {
    /// One region for the entire selection.
    Memory { sink: Arc<HostSink>, memory: SnapshotMemory },
    /// The user's buffers. Selected tensors without a buffer are discarded.
    Buffers {
        sink: Arc<HostSink>,
        /// The starts of the sink's parts.
        starts: Vec<u64>,
        writing: Arc<Writing>,
    },
    /// Device memory: one piece, or the user's buffers.
    Device { sink: Arc<DeviceSink>, payload: Arc<OnDevice> },
}

impl Destination {
    /// Uses the lent buffers, if there are any and they fit; otherwise memory of `allocators`. Buffers that do not fit
    /// are reported once the version is received.
    pub(crate) fn new(
        selection: &Selection,
        lent: Option<Lent>,
        allocators: &Allocators,
    ) -> Result<Self, TransferError> {
        if let Some(destination) = lent.and_then(|lent| Self::in_buffers(selection, lent, &allocators.memory))
        {
            return Ok(destination);
        }
        let len_bytes = selection.payload_bytes();
        match &allocators.device {
            Some(device) => {
                // This blocks the session's executor, and so all its subscriptions. On a GPU it costs a message to the
                // engine's thread and back if memory is reused, and milliseconds if it is new. It takes longer if
                // other memory must be freed first, which may wait for all work of the GPU, or while another driver
                // call occupies the engine's thread: locking pages takes a third of a second for each GiB. If the
                // driver hangs, the allocation fails after the engine's `answer_timeout`, 60 s by default.
                let payload = OnDevice::allocate(device, len_bytes, &allocators.memory);
                let payload = payload.map_err(|source| TransferError::device_memory(device, source))?;
                Ok(Self::on_device(payload, len_bytes)?)
            }
            None => {
                let memory = allocators.memory.clone();
                let region = memory.memory.allocate(len_bytes as usize)?;
                Ok(Self::Memory { sink: Arc::new(HostSink::new(region)), memory })
            }
        }
    }

    /// Uses the lent buffers, if they fit. Ranges that span several host buffers are staged in `memory`.
    pub(crate) fn in_buffers(selection: &Selection, mut lent: Lent, memory: &SnapshotMemory) -> Option<Self> {
        lent.retain_wanted(selection);
        let fits = lent.expected.fit(selection, lent.sizes().into_iter()).ok()?;
        match lent.memory {
            LentMemory::Host(tensors) => {
                let parts = order_by_range(fits, tensors, |region| !region.is_empty());
                let starts = parts.iter().map(|(range, _)| range.start).collect();
                let sink = HostSink::scatter(selection.payload_bytes(), parts, memory.memory.clone()).ok()?;
                Some(Self::Buffers { sink: Arc::new(sink), starts, writing: lent.writing })
            }
            LentMemory::Device(tensors) => {
                let parts = order_by_range(fits, tensors, |buffer| buffer.buffer().len_bytes() > 0);
                let payload = OnDevice::from_lent(parts, lent.writing, memory)?;
                Self::on_device(payload, selection.payload_bytes()).ok()
            }
        }
    }

    fn on_device(payload: OnDevice, len_bytes: u64) -> Result<Self, PartsError> {
        let payload = Arc::new(payload);
        let sink = DeviceSink::new(Arc::clone(&payload), len_bytes)?;
        Ok(Self::Device { sink: Arc::new(sink), payload })
    }

    /// The sink for chunks of `id`, which may be written from now on.
    pub(crate) fn sink(&self, id: &VersionId) -> Arc<dyn Sink> {
        if let Some(writing) = self.writing() {
            writing.begin(id);
        }
        match self {
            Self::Memory { sink, .. } | Self::Buffers { sink, .. } => Arc::clone(sink) as Arc<dyn Sink>,
            Self::Device { sink, .. } => Arc::clone(sink) as Arc<dyn Sink>,
        }
    }

    /// Returns the bytes. The caller guarantees that they are complete and verified.
    pub(crate) fn commit(&self) -> Result<Payload, SinkError> {
        match self {
            Self::Memory { sink, memory } => Ok(memory.payload(sink.commit()?.pop().unwrap_or_default())),
            Self::Buffers { sink, starts, writing } => {
                let bytes = sink.commit()?.into_iter().map(Region::freeze);
                let by_start = starts.iter().copied().zip(bytes).collect();
                Ok(Payload::Scattered(Arc::new(Scattered { by_start, writing: Arc::clone(writing) })))
            }
            Self::Device { sink, payload } => {
                sink.commit()?;
                Ok(Payload::Device(SharedPayload::new(Arc::clone(payload))))
            }
        }
    }

    /// The device whose free slot or unfinished copy this destination waits for, if any.
    pub(crate) fn awaited_device(&self) -> Option<&Device> {
        match self {
            Self::Device { sink, payload } => sink.waits_for_device().then(|| payload.device()),
            Self::Memory { .. } | Self::Buffers { .. } => None,
        }
    }

    /// Its device, if it is on one.
    pub(crate) fn device(&self) -> Option<&Device> {
        match self {
            Self::Device { payload, .. } => Some(payload.device()),
            Self::Memory { .. } | Self::Buffers { .. } => None,
        }
    }

    /// Whether it is memory that the user lent.
    pub(crate) fn is_lent(&self) -> bool {
        self.writing().is_some()
    }

    fn writing(&self) -> Option<&Arc<Writing>> {
        match self {
            Self::Memory { .. } => None,
            Self::Buffers { writing, .. } => Some(writing),
            Self::Device { payload, .. } => payload.writing(),
        }
    }
}

/// The memory for which `is_used` holds, ordered by the place of its tensor in the selection.
fn order_by_range<M>(
    fits: Vec<Fit>,
    tensors: Vec<(TensorName, M)>,
    is_used: impl Fn(&M) -> bool,
) -> Vec<(Range<u64>, M)> {
    let memory = tensors.into_iter().map(|(_, memory)| memory);
    let parts = fits.into_iter().map(|fit| fit.range).zip(memory);
    let mut parts: Vec<_> = parts.filter(|(_, memory)| is_used(memory)).collect();
    parts.sort_by_key(|(range, _)| range.start);
    parts
}

/// The bytes of a version that was received.
#[derive(Debug, Clone)]
pub(crate) enum Payload {
    /// The entire selection in one region, which users may write to if it is volatile.
    Region(HostBytes),
    /// Tensors in the user's buffers.
    Scattered(Arc<Scattered>),
    /// Device memory: all in one piece, or in the user's buffers.
    Device(SharedPayload),
}

/// Tensors in the user's buffers, by their place in the selection, so that tied weights are found under each name. The
/// buffers are returned when the last clone is dropped.
#[derive(Debug)]
pub(crate) struct Scattered {
    by_start: BTreeMap<u64, Bytes>,
    writing: Arc<Writing>,
}

impl Payload {
    /// The empty payload.
    pub(crate) const EMPTY: Self = Self::Region(HostBytes::Stable(Bytes::new()));

    /// The tensors of `selection` that it contains.
    pub(crate) fn narrow_selection(&self, selection: &Arc<Selection>) -> Arc<Selection> {
        match self {
            Self::Region(..) => Arc::clone(selection),
            Self::Scattered(_) | Self::Device(_) => Arc::new(
                selection.retain(|index| selection.tensor_range(index).is_some_and(|range| self.has(range))),
            ),
        }
    }

    /// The bytes of the tensor at `range` of the selection; `None` if it had no buffer, or is on a device.
    pub(crate) fn tensor(&self, range: Range<u64>) -> Option<HostBytes> {
        match self {
            Self::Device(_) => None,
            Self::Region(bytes) if range.is_empty() => Some(bytes.slice(0..0)),
            Self::Region(bytes) => Some(bytes.slice(range.start as usize..range.end as usize)),
            Self::Scattered(_) if range.is_empty() => Some(Bytes::new().into()),
            Self::Scattered(scattered) => scattered.by_start.get(&range.start).cloned().map(HostBytes::from),
        }
    }

    /// Its device memory, if it is on a device.
    pub(crate) fn on_device(&self) -> Option<&SharedPayload> {
        match self {
            Self::Region(..) | Self::Scattered(_) => None,
            Self::Device(shared) => Some(shared),
        }
    }

    /// Whether it is in the buffers that `writing` tracks.
    pub(crate) fn is_in(&self, writing: &Arc<Writing>) -> bool {
        let tracked = match self {
            Self::Region(..) => None,
            Self::Scattered(scattered) => Some(&scattered.writing),
            Self::Device(shared) => shared.payload().writing(),
        };
        tracked.is_some_and(|tracked| Arc::ptr_eq(tracked, writing))
    }

    fn has(&self, range: Range<u64>) -> bool {
        match self {
            Self::Device(shared) => shared.payload().find(range).is_some(),
            Self::Region(..) | Self::Scattered(_) => self.tensor(range).is_some(),
        }
    }
}

#[cfg(test)]
impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Region(Bytes::from(bytes).into())
    }
}
