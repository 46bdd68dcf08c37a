use std::{any::Any, fmt, ops::Range, os::fd::OwnedFd, sync::Arc};

use crate::{
    Device, DeviceBuffer,
    cuda::{
        CudaEngine, CudaMemory,
        share::{DeviceUuid, Exported, FdMemory, IpcMemory},
    },
    loan::Returned,
};

/// Memory of a device that another process finds: what one tells the other of it.
#[derive(Debug)]
pub struct SharedMemory {
    /// The device's name in every process.
    pub device: [u8; 16],
    /// By what the memory is found.
    pub by: SharedBy,
    /// Where in that it begins.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
}

/// By what another process finds memory of a device.
#[derive(Debug)]
pub enum SharedBy {
    /// The handle of an allocation, which stays its owner's.
    Handle([u8; 64]),
    /// The descriptor of a buffer, which whoever has it keeps alive.
    Descriptor {
        /// The descriptor.
        fd: OwnedFd,
        /// The bytes of the whole buffer.
        buffer_bytes: u64,
    },
}

/// Why memory is not shared, or not taken. As a rule another way is taken then.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotShared(String);

/// What keeps memory for as long as another process may read it.
pub struct KeptShared {
    _kept: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for KeptShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptShared").finish_non_exhaustive()
    }
}

/// What other processes on this machine share with this one, whatever the kind of the device. All of this blocks for as long
/// as the device takes: call it off the executor.
impl Device {
    /// Whether it has memory that processes can share.
    pub fn is_shareable(&self) -> bool {
        self.engine::<CudaEngine>().is_some_and(|engine| engine.info().uuid.is_some())
    }

    /// Names memory where it is, for another process to read: all of it, or none. What writes to it is waited for. Keep the
    /// buffers until the other process said that it has let go.
    pub fn name_to_others(&self, buffers: &[DeviceBuffer]) -> Result<Vec<SharedMemory>, NotShared> {
        let memories = buffers
            .iter()
            .map(|buffer| self.own_memory(buffer))
            .collect::<Result<Vec<_>, _>>()?;
        let named = self.sharing()?.name_memory(&memories).map_err(NotShared::because)?;
        let shared = |memory: IpcMemory| SharedMemory {
            device: memory.device.bytes(),
            by: SharedBy::Handle(memory.handle),
            offset: memory.offset,
            len: memory.len,
        };
        named
            .into_iter()
            .map(|named| named.map(shared).map_err(NotShared::because))
            .collect()
    }

    /// Copies `parts` into a buffer of `len` bytes that another process can have, each to where its range says. What writes
    /// to them is waited for, and they may be written again when this returns.
    pub fn copy_for_others(
        &self,
        len: u64,
        parts: &[(Range<u64>, DeviceBuffer)],
    ) -> Result<(SharedMemory, KeptShared), NotShared> {
        let place =
            |(range, buffer): &(Range<u64>, DeviceBuffer)| Ok((self.own_memory(buffer)?, range.start));
        let parts = parts.iter().map(place).collect::<Result<Vec<_>, NotShared>>()?;
        let buffer = self.sharing()?.shared_buffer(len).map_err(NotShared::because)?;
        buffer.fill(parts).map_err(NotShared::because)?;
        let FdMemory { device, fd, len: buffer_bytes } = buffer.export().map_err(NotShared::because)?;
        let by = SharedBy::Descriptor { fd, buffer_bytes };
        let shared = SharedMemory { device: device.bytes(), by, offset: 0, len };
        Ok((shared, KeptShared { _kept: Box::new(buffer) }))
    }

    /// Takes memory that another process shares: each of `places` in it as a buffer, and what tells when all of it has gone
    /// back. What the other says of it is checked, but not that it leaves it alone.
    pub fn import(
        &self,
        shared: SharedMemory,
        places: &[Range<u64>],
    ) -> Result<(Vec<DeviceBuffer>, Returned), NotShared> {
        let SharedMemory { device, by, offset, len } = shared;
        let device = DeviceUuid::new(device);
        let (exported, start) = match by {
            SharedBy::Handle(handle) => (Exported::Ipc(IpcMemory { device, handle, offset, len }), 0),
            SharedBy::Descriptor { fd, buffer_bytes } => {
                (Exported::Fd(FdMemory { device, fd, len: buffer_bytes }), offset)
            }
        };
        let imported = self.sharing()?.import(exported).map_err(NotShared::because)?;
        let buffer = |place: &Range<u64>| {
            let range = start.checked_add(place.start)?..start.checked_add(place.end)?;
            let part = imported.memory.slice(range).filter(|_| place.end <= len)?;
            self.wrap::<CudaEngine>(part)
        };
        let outside =
            || NotShared(format!("{len} bytes at {offset} do not lie in the memory that was shared."));
        let buffers = places
            .iter()
            .map(|place| buffer(place).ok_or_else(outside))
            .collect::<Result<_, _>>()?;
        Ok((buffers, imported.returned))
    }

    fn sharing(&self) -> Result<&Arc<CudaEngine>, NotShared> {
        self.engine::<CudaEngine>().ok_or_else(|| NotShared(self.has_none()))
    }

    fn own_memory(&self, buffer: &DeviceBuffer) -> Result<Arc<CudaMemory>, NotShared> {
        buffer.memory::<CudaMemory>().ok_or_else(|| NotShared(self.has_none()))
    }

    fn has_none(&self) -> String {
        format!("{} has no memory that processes share.", self.name())
    }
}

impl NotShared {
    fn because(error: impl fmt::Display) -> Self {
        Self(error.to_string())
    }
}
