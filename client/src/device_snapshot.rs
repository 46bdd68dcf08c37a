//! Snapshots in device memory: their tensors, and copies to the host.

use crate::{
    Snapshot,
    buffers::{COPY_BYTES, copy_yielding},
    destination::{OnDevice, SharedPayload},
};
use futures_util::{StreamExt, stream};
use std::{ops::Range, sync::Arc};
use tensor_relay_device::{
    AllocError, Device, DeviceBuffer, PartsError, Region, SinkError, Source, SourceError,
};
use tensor_relay_protocol::{Tensor, VersionId};

/// The number of concurrent copies of one snapshot to or from a device: enough to overlap transfer and placement. More
/// would only take slots from arriving versions.
pub(crate) const COPIES_AT_ONCE: usize = 3;

impl Snapshot {
    /// Whether its tensors are in device memory: [`device_tensor`](Self::device_tensor) returns them, and
    /// [`to_host`](Self::to_host) a copy in host memory.
    pub fn is_on_device(&self) -> bool {
        self.payload.on_device().is_some()
    }

    /// The device that its tensors are on; `None` for host memory.
    pub fn device(&self) -> Option<&Device> {
        self.payload.on_device().map(|shared| shared.payload().device())
    }

    /// The tensor called `name` in the memory of a device; `None` when there is none, it was not selected, or the
    /// snapshot is on the host.
    pub fn device_tensor(&self, name: &str) -> Option<DeviceTensor> {
        self.device_tensor_at(self.manifest().tensor_index(name)?)
    }

    /// Every selected tensor with its location in device memory, in the order in which they were published. Empty
    /// if the snapshot is on the host.
    pub fn device_tensors(&self) -> impl Iterator<Item = (&Tensor, DeviceTensor)> {
        self.selection.tensors().iter().filter_map(move |index| {
            let index = index as usize;
            Some((self.selection.tensor(index), self.device_tensor_at(index)?))
        })
    }

    /// The same snapshot in host memory, within the session's [budget](crate::Config::memory_bytes). A snapshot on the
    /// host is shared, not copied.
    ///
    /// The bytes pass through the device's slots, up to three pieces at a time. Waits for slots that versions being
    /// received occupy, and for the device: put a timeout around it if needed. Cancel safe.
    ///
    /// # Errors
    /// [`DeviceError`]; the snapshot stays unchanged.
    pub async fn to_host(&self) -> Result<Self, DeviceError> {
        let Some(shared) = self.payload.on_device() else {
            return Ok(self.clone());
        };
        let region = self.copy_out(shared.payload()).await?;
        Ok(Self { payload: shared.payload().memory().payload(region), ..self.clone() })
    }

    fn device_tensor_at(&self, index: usize) -> Option<DeviceTensor> {
        let shared = self.payload.on_device()?;
        let (buffer, range) = shared.payload().find(self.selection.tensor_range(index)?)?;
        Some(DeviceTensor { buffer: buffer.clone(), range, _shared: shared.clone() })
    }

    async fn copy_out(&self, payload: &OnDevice) -> Result<Region, DeviceError> {
        let len_bytes = self.selection.memory_bytes();
        let region = payload
            .memory()
            .memory
            .allocate(usize::try_from(len_bytes).unwrap_or(usize::MAX));
        let mut region =
            region.map_err(|source| DeviceError::no_memory(&self.id, payload.device(), source))?;
        if let Some(source) = self.device_source()? {
            self.read_all(&*source, 0..len_bytes, &mut region).await?;
        }
        Ok(region)
    }

    /// A source of the selected bytes, if they are on a device.
    pub(crate) fn device_source(&self) -> Result<Option<Arc<dyn Source>>, DeviceError> {
        let Some(shared) = self.payload.on_device() else { return Ok(None) };
        let (payload, len_bytes) = (shared.payload(), self.selection.memory_bytes());
        let source = payload.source(len_bytes);
        source
            .map(Some)
            .map_err(|source| DeviceError::parts(&self.id, payload.device(), source))
    }

    /// Reads `range` of this snapshot's `source` into `out`, which has the same length.
    pub(crate) async fn read_all(
        &self,
        source: &dyn Source,
        range: Range<u64>,
        out: &mut [u8],
    ) -> Result<(), DeviceError> {
        let slot_bytes = self.device().map_or(COPY_BYTES, |device| device.slots().slot_bytes());
        let reads = stream::iter(pieces(range, slot_bytes)).map(|piece| source.read(piece));
        let mut reads = reads.buffered(COPIES_AT_ONCE);
        let mut written = 0;
        while let Some(read) = reads.next().await {
            let read = read.map_err(|source| self.copy_out_error(source))?;
            let end = written + read.len();
            copy_yielding(&read.into(), &mut out[written..end]).await;
            written = end;
        }
        Ok(())
    }

    /// The error for bytes that could not be read from the device.
    pub(crate) fn copy_out_error(&self, source: SourceError) -> DeviceError {
        let device = self.device().map_or("the host", Device::name);
        DeviceError::CopyOut { id: self.id.clone(), device: device.into(), source: source.into() }
    }
}

/// Splits `range` into pieces of at most `piece_bytes`.
pub(crate) fn pieces(range: Range<u64>, piece_bytes: usize) -> impl Iterator<Item = Range<u64>> {
    let Range { start, end } = range;
    let starts = (start..end).step_by(piece_bytes);
    starts.map(move |start| start..end.min(start + piece_bytes as u64))
}

/// A tensor in device memory.
///
/// It is complete and verified, and every copy to it has ended: any stream of the device may read it immediately. While
/// it exists, its version counts as held and its memory is not reused. A clone of the [`buffer`](Self::buffer) alone
/// also keeps the memory, but the version does not count as held.
///
/// When the last reference is dropped, a later version may use the memory. A program that reads the tensor on a GPU
/// stream must keep it until that work has ended, or register a fence with the engine's memory
/// ([`DeviceBuffer::memory`](tensor_relay_device::DeviceBuffer::memory)).
#[derive(Debug, Clone)]
pub struct DeviceTensor {
    buffer: DeviceBuffer,
    range: Range<u64>,
    _shared: SharedPayload,
}

impl DeviceTensor {
    /// The memory that contains it, usually with other tensors.
    pub fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    /// Its range in the memory of [`buffer`](Self::buffer).
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Its length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.buffer.device()
    }
}

/// Why tensors could not be copied to a device, or from it. Clones are cheap.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is not enough memory on the host. The fault is this machine's budget.
    #[error("{id} cannot be copied from {device} to the host: {source}")]
    NoMemory {
        /// The version.
        id: VersionId,
        /// The device of its tensors.
        device: Box<str>,
        /// The error of the allocator.
        source: Arc<AllocError>,
    },
    /// The device could not be read. The fault is on this machine.
    #[error("{id} cannot be copied from {device}: {}", chain(source))]
    CopyOut {
        /// The version.
        id: VersionId,
        /// The device of its tensors.
        device: Box<str>,
        /// The cause.
        source: Arc<SourceError>,
    },
    /// The device could not be written. The fault is on this machine.
    #[error("{id} cannot be copied to {device}: {}", chain(source))]
    CopyIn {
        /// The version.
        id: VersionId,
        /// The target device.
        device: Box<str>,
        /// The cause.
        source: Arc<SinkError>,
    },
    /// The tensors' ranges do not match their memory. A bug of this library.
    #[error("{id} on {device} does not have the layout of its manifest: {source}")]
    Parts {
        /// The version.
        id: VersionId,
        /// The device of its tensors.
        device: Box<str>,
        /// The mismatch.
        source: Arc<PartsError>,
    },
}

impl DeviceError {
    fn no_memory(id: &VersionId, device: &Device, source: AllocError) -> Self {
        Self::NoMemory { id: id.clone(), device: device.name().into(), source: source.into() }
    }

    pub(crate) fn copy_in(id: &VersionId, device: &Device, source: SinkError) -> Self {
        Self::CopyIn { id: id.clone(), device: device.name().into(), source: source.into() }
    }

    fn parts(id: &VersionId, device: &Device, source: PartsError) -> Self {
        Self::Parts { id: id.clone(), device: device.name().into(), source: source.into() }
    }
}

/// An error's text with its causes. A cause that the text already includes is not repeated.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| match cause.to_string() {
        cause if text.contains(&cause) => text,
        cause => format!("{text} {cause}"),
    })
}
