use std::{any::Any, ops::Range, sync::Arc};

use super::{
    DeviceUuid, Exported, ExportedCopy, FdMemory, Imported, IpcMemory, ShareError, SharedBuffer, buffer::fill,
};
use crate::{
    Device, DeviceBuffer,
    cuda::{CudaEngine, CudaMemory},
    loan::Returned,
};

/// What the driver maps at once: a process that opens a shorter buffer sees so much of the memory.
const MAPPED_AT_ONCE_BYTES: u64 = 2 << 20;

/// Sharing memory with other processes on this machine, and copies within a device. Only CUDA devices can: on others these functions fail with
/// [`ShareError::NotShareable`]. All but `is_shareable` block for as long as the device takes: do not call them on an
/// async executor's thread.
impl Device {
    /// Whether the device's memory can be shared with other processes.
    pub fn is_shareable(&self) -> bool {
        self.uuid().is_some()
    }

    /// The UUID by which other processes find the device, if its memory can be shared.
    pub fn uuid(&self) -> Option<DeviceUuid> {
        self.engine::<CudaEngine>()?.info().uuid
    }

    /// Exports buffers in place, for another process to read: all of them, or none. Waits for the streams that write
    /// them. Keep the buffers until the other process has released them.
    pub fn export_in_place(&self, buffers: &[DeviceBuffer]) -> Result<Vec<IpcMemory>, ShareError> {
        let memories = buffers.iter().map(|buffer| self.own_memory(buffer));
        let memories = memories.collect::<Result<Vec<_>, _>>()?;
        self.sharing()?.export_in_place(&memories)?.into_iter().collect()
    }

    /// Copies `parts` into a shareable buffer of `len` bytes, each to the start of its range. Waits for the streams
    /// that write the parts, which may be written again when this returns. Keep the buffer or its descriptor until the
    /// other process has imported it.
    pub fn export_copies(
        &self,
        len: u64,
        parts: &[(Range<u64>, DeviceBuffer)],
    ) -> Result<(FdMemory, SharedBuffer), ShareError> {
        let parts = self.own_parts(parts)?;
        let buffer = self.sharing()?.shared_buffer(len)?;
        buffer.fill(parts)?;
        Ok((buffer.export()?, buffer))
    }

    /// Copies `parts` into memory of `len` bytes that is made for one other process, each to the start of its range,
    /// and zeroes all other bytes that the process can see. Waits for the streams that write the parts. Two methods, in this
    /// order:
    ///
    /// 1. A descriptor of virtual memory. Only a process that has it can map the memory, in any namespaces, and nothing else
    ///    lies in it. The memory lives as long as anybody has it: neither process can take it from under the other's
    ///    copy.
    /// 2. If the driver has none of that (vGPU, older drivers), and it `may_use_handle`: a handle of CUDA IPC, for
    ///    processes that are trusted. Whoever knows the handle can open it, and CUDA leaves undefined what a process
    ///    sees that keeps it open after it was freed. Some systems open no handle of another PID namespace.
    ///
    /// `kept` is dropped when the copies have ended, which may be long after this fails because they are late.
    pub fn export_copy(
        &self,
        len: u64,
        parts: &[(Range<u64>, DeviceBuffer)],
        may_use_handle: bool,
        kept: Arc<dyn Any + Send + Sync>,
    ) -> Result<ExportedCopy, ShareError> {
        let (engine, parts) = (self.sharing()?, self.own_parts(parts)?);
        if len == 0 {
            return Err(ShareError::Empty);
        }
        let whole_len = len.checked_next_multiple_of(MAPPED_AT_ONCE_BYTES).unwrap_or(u64::MAX);
        let (whole, exported, why_no_descriptor) = match engine.shared_buffer(whole_len) {
            Ok(buffer) => {
                let exported = Exported::Fd(FdMemory { len, ..buffer.export()? });
                (Arc::clone(buffer.memory()), exported, None)
            }
            Err(why @ ShareError::NoBuffer { .. }) if may_use_handle && !why.is_full() => {
                let (whole, handle) = engine.openable_buffer(whole_len)?;
                (whole, Exported::Ipc(IpcMemory { len, ..handle }), Some(why))
            }
            Err(error) => return Err(error),
        };
        fill(&whole, parts, (true, Some(kept)), (engine.id(), engine.inbox(), engine.fill_timeout()))?;
        let memory = whole.slice(0..len).expect("it was rounded up");
        Ok(ExportedCopy { exported, memory, why_no_descriptor })
    }

    /// Copies `parts` to the start of their ranges in `to`, within the device, and zeroes the bytes between them. Waits for
    /// the streams that write the parts, which may be written again when this returns. The memory of a copy that is late
    /// is kept until it ends.
    pub fn copy_within(
        &self,
        to: &DeviceBuffer,
        parts: &[(Range<u64>, DeviceBuffer)],
    ) -> Result<(), ShareError> {
        let (engine, to, parts) = (self.sharing()?, self.own_memory(to)?, self.own_parts(parts)?);
        fill(&to, parts, (true, None), (engine.id(), engine.inbox(), engine.fill_timeout()))
    }

    fn own_parts(
        &self,
        parts: &[(Range<u64>, DeviceBuffer)],
    ) -> Result<Vec<(Arc<CudaMemory>, u64)>, ShareError> {
        parts
            .iter()
            .map(|(range, buffer)| Ok((self.own_memory(buffer)?, range.start)))
            .collect()
    }

    /// Imports another process's memory. The results are a buffer for each of `ranges` of that memory, and a handle
    /// that reports when all buffers are dropped and the memory has gone back.
    ///
    /// The peer's description is checked. That the peer keeps the memory and does not write it cannot be checked
    /// ([`CudaEngine::import`]): import only from peers that this process trusts fully on that device.
    pub fn import(
        &self,
        exported: Exported,
        ranges: &[Range<u64>],
    ) -> Result<(Vec<DeviceBuffer>, Returned), ShareError> {
        // SAFETY: the exporter, which the caller trusts, guarantees that the memory is kept and not written meanwhile.
        // If it does not, no host memory is at risk: the driver copies from a mapping of this process's that lasts
        // until the engine closes it. The copies then have wrong bytes, or break the device's context, which the engine
        // handles like any failed device.
        let Imported { memory, returned } = unsafe { self.sharing()?.import(exported) }?;
        let buffer = |range: &Range<u64>| {
            let (offset, len, bytes) =
                (range.start, range.end.saturating_sub(range.start), memory.len_bytes());
            let part = memory.slice(range.clone());
            let part = part.ok_or(ShareError::OutOfBounds { offset, len, bytes })?;
            self.wrap::<CudaEngine>(part).ok_or_else(|| self.not_shareable())
        };
        let buffers = ranges.iter().map(buffer).collect::<Result<_, _>>()?;
        Ok((buffers, returned))
    }

    fn sharing(&self) -> Result<&Arc<CudaEngine>, ShareError> {
        self.engine::<CudaEngine>().ok_or_else(|| self.not_shareable())
    }

    fn own_memory(&self, buffer: &DeviceBuffer) -> Result<Arc<CudaMemory>, ShareError> {
        buffer.memory::<CudaMemory>().ok_or_else(|| self.not_shareable())
    }

    fn not_shareable(&self) -> ShareError {
        ShareError::NotShareable { device: self.name().into() }
    }
}
