use std::{ops::Range, sync::Arc};

use super::{Exported, FdMemory, Imported, IpcMemory, ShareError, SharedBuffer};
use crate::{
    Device, DeviceBuffer,
    cuda::{CudaEngine, CudaMemory},
    loan::Returned,
};

/// Sharing memory with other processes on this machine, whatever the kind of device. All of this blocks for as long as
/// the device takes: call it off the executor.
impl Device {
    /// Whether its memory can be shared with other processes.
    pub fn is_shareable(&self) -> bool {
        self.engine::<CudaEngine>().is_some_and(|engine| engine.info().uuid.is_some())
    }

    /// Exports buffers in place for another process to read: all of them, or none. Waits for their writers. Keep the
    /// buffers until the other process has released them.
    pub fn name_to_others(&self, buffers: &[DeviceBuffer]) -> Result<Vec<IpcMemory>, ShareError> {
        let memories = buffers.iter().map(|buffer| self.own_memory(buffer));
        let memories = memories.collect::<Result<Vec<_>, _>>()?;
        self.sharing()?.name_memory(&memories)?.into_iter().collect()
    }

    /// Copies `parts` into a shareable buffer of `len` bytes, each to its range. Waits for their writers; they may be
    /// written again when this returns. Keep the buffer until the other process has its descriptor.
    pub fn copy_for_others(
        &self,
        len: u64,
        parts: &[(Range<u64>, DeviceBuffer)],
    ) -> Result<(FdMemory, SharedBuffer), ShareError> {
        let parts = parts.iter().map(|(range, buffer)| Ok((self.own_memory(buffer)?, range.start)));
        let parts = parts.collect::<Result<Vec<_>, ShareError>>()?;
        let buffer = self.sharing()?.shared_buffer(len)?;
        buffer.fill(parts)?;
        Ok((buffer.export()?, buffer))
    }

    /// Imports another process's memory: each of `places` in it as a buffer, and a handle that reports when all of it
    /// was returned.
    ///
    /// The peer's description is checked, but not that the peer keeps the memory and does not write it
    /// ([`CudaEngine::import`]): import only from peers that this process trusts fully on that device.
    pub fn import(
        &self,
        exported: Exported,
        places: &[Range<u64>],
    ) -> Result<(Vec<DeviceBuffer>, Returned), ShareError> {
        // SAFETY: the exporter guarantees it, which the caller trusts. No memory of the host is at stake: copies are
        // the driver's, from a mapping of this process's that lasts until the engine closes it. Where the exporter
        // breaks its word they have other bytes, or fail with the device's context, which the engine takes like any
        // failed device.
        let Imported { memory, returned } = unsafe { self.sharing()?.import(exported) }?;
        let buffer = |place: &Range<u64>| {
            let (offset, len, bytes) =
                (place.start, place.end.saturating_sub(place.start), memory.len_bytes());
            let part = memory.slice(place.clone());
            let part = part.ok_or(ShareError::OutOfBounds { offset, len, bytes })?;
            self.wrap::<CudaEngine>(part).ok_or_else(|| self.has_none())
        };
        let buffers = places.iter().map(buffer).collect::<Result<_, _>>()?;
        Ok((buffers, returned))
    }

    fn sharing(&self) -> Result<&Arc<CudaEngine>, ShareError> {
        self.engine::<CudaEngine>().ok_or_else(|| self.has_none())
    }

    fn own_memory(&self, buffer: &DeviceBuffer) -> Result<Arc<CudaMemory>, ShareError> {
        buffer.memory::<CudaMemory>().ok_or_else(|| self.has_none())
    }

    fn has_none(&self) -> ShareError {
        ShareError::NotShareable { device: self.name().into() }
    }
}
