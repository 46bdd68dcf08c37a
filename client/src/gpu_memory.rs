//! [`GpuMemory`]: memory of a GPU with a version, which a server of this host lends.

use crate::server_memory::{NotCopied, ServerMemoryError};
use std::{ops::Range, os::fd::OwnedFd, sync::Arc};
use tensor_relay_device::{
    Device, DeviceBuffer, Sink,
    cuda::share::{DeviceUuid, Exported, FdMemory, IpcMemory, ShareError},
    is_lifeline, lender_is_alive,
};
use tensor_relay_protocol::{ChunkIndex, LentOnGpu, Selection};
use tokio::{runtime::Handle, sync::oneshot};

/// Memory of a GPU with the whole payload of a version, not opened yet.
#[derive(Debug)]
pub(crate) struct GpuMemory {
    gpu: DeviceUuid,
    exported: Exported,
    /// When it is closed, the server frees the memory.
    lifeline: OwnedFd,
    is_in_place: bool,
}

impl GpuMemory {
    /// The memory that `lent` describes, with its descriptors.
    pub(crate) fn new(lent: LentOnGpu, descriptors: Vec<OwnedFd>) -> Result<Self, ServerMemoryError> {
        let (gpu, len) = (DeviceUuid::new(lent.gpu.0), lent.buffer_bytes);
        let mut descriptors = descriptors.into_iter();
        let lifeline = descriptors.next().filter(is_lifeline).ok_or(ServerMemoryError::Missing)?;
        let exported = match (lent.handle, descriptors.next()) {
            (Some(handle), None) => {
                Exported::Ipc(IpcMemory { device: gpu, handle: handle.0, offset: 0, len })
            }
            (None, Some(fd)) => Exported::Fd(FdMemory { device: gpu, fd, len }),
            _ => return Err(ServerMemoryError::Missing),
        };
        Ok(Self { gpu, exported, lifeline, is_in_place: lent.in_place })
    }

    /// Whether it is memory of this device.
    pub(crate) fn is_on(&self, device: &Device) -> bool {
        device.uuid() == Some(self.gpu)
    }

    /// Copies what is selected to its places in `sink`, which is on the same device, within the device. The server's
    /// memory is released when the copy has ended, even if the future is dropped before.
    pub(crate) async fn copy(
        self,
        device: Device,
        selection: &Selection,
        sink: &dyn Sink,
    ) -> Result<(), NotCopied> {
        let may_be_freed = self.may_be_freed();
        let payload_bytes = selection.manifest().payload_bytes();
        let (memory, lifeline) = self.open(device, payload_bytes).await.map_err(NotCopied::Unusable)?;
        sink.copy_within(&memory, &places(selection)).await.map_err(NotCopied::Sink)?;
        match may_be_freed && !lender_is_alive(&*lifeline) {
            true => Err(NotCopied::Unusable(ServerMemoryError::LenderGone)),
            false => Ok(()),
        }
    }

    /// Whether the memory ends with the server, so that a copy out of it counts only if the server was there to its end.
    pub(crate) fn may_be_freed(&self) -> bool {
        matches!(self.exported, Exported::Ipc(_))
    }

    /// Whether the memory may be used where it is.
    pub(crate) fn is_in_place(&self) -> bool {
        self.is_in_place
    }

    /// The payload where it is. Blocks for a message to the engine's thread and back, and for the driver.
    pub(crate) fn map(self, device: &Device, payload_bytes: u64) -> Result<DeviceBuffer, ServerMemoryError> {
        let (buffer, _) = self.import(device, payload_bytes, &Handle::current())?;
        Ok(buffer)
    }

    /// Opens the memory on a thread that may wait for the device.
    async fn open(
        self,
        device: Device,
        payload_bytes: u64,
    ) -> Result<(DeviceBuffer, Arc<OwnedFd>), ServerMemoryError> {
        let stopped = ShareError::NotShareable { device: device.name().into() };
        let (opened, opening) = oneshot::channel();
        let runtime = Handle::current();
        tokio::task::spawn_blocking(move || drop(opened.send(self.import(&device, payload_bytes, &runtime))));
        Ok(opening.await.unwrap_or(Err(stopped))?)
    }

    /// Opens the memory, and closes its lifeline once it has gone back, if nobody else has it then.
    fn import(
        self,
        device: &Device,
        payload_bytes: u64,
        runtime: &Handle,
    ) -> Result<(DeviceBuffer, Arc<OwnedFd>), ShareError> {
        let (mut buffers, returned) =
            device.import(self.exported, std::slice::from_ref(&(0..payload_bytes)))?;
        let lifeline = Arc::new(self.lifeline);
        let kept = Arc::clone(&lifeline);
        // Without a deadline: memory that the device may still read must not be freed.
        runtime.spawn(async move {
            returned.wait().await;
            drop(kept);
        });
        Ok((buffers.pop().expect("one range was imported"), lifeline))
    }
}

/// Where the selected bytes go: the start in the payload of each run of chunks, and its place.
fn places(selection: &Selection) -> Vec<(u64, Range<u64>)> {
    let mut places: Vec<(u64, Range<u64>)> = vec![];
    for chunk in selection.chunks().iter().map(ChunkIndex) {
        let (range, _) = selection.manifest().chunk(chunk);
        let place = selection.place(chunk).expect("it is selected");
        match places.last_mut() {
            // With boxes, a place is at most one chunk long.
            Some((start, last))
                if last.end == place.start
                    && *start + (last.end - last.start) == range.start
                    && !selection.has_parts() =>
            {
                last.end = place.end;
            }
            _ => places.push((range.start, place)),
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs::File, io::pipe};
    use tensor_relay_protocol::{
        VersionDigest,
        sidecar::{CudaDevice, IpcHandle},
    };

    /// Goal: a server that sends other descriptors than it announces gets its memory declined, and nothing is opened.
    #[test]
    fn memory_with_other_descriptors_is_refused() {
        let lent = |handle| LentOnGpu {
            inode: 1,
            gpu: CudaDevice([5; 16]),
            buffer_bytes: 1 << 20,
            handle,
            digest: VersionDigest([4; 32]),
            in_place: false,
        };
        let handle = Some(IpcHandle([6; 64]));
        let ends = |count| (0..count).map(|_| pipe().unwrap().0.into()).collect::<Vec<OwnedFd>>();
        for (handle, count, is_complete) in [
            (None, 0, false),
            (None, 1, false),
            (None, 2, true),
            (handle, 0, false),
            (handle, 1, true),
            (handle, 2, false),
        ] {
            let memory = GpuMemory::new(lent(handle), ends(count));
            assert_eq!(memory.is_ok(), is_complete, "{handle:?} with {count} descriptors");
        }
        let file = File::open("/dev/null").unwrap();
        assert!(GpuMemory::new(lent(handle), vec![file.into()]).is_err(), "it is no lifeline");
    }
}
