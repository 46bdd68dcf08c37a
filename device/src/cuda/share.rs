//! Sharing device memory with another process on the same host, without a copy through the host.
//!
//! A training process *exports* its tensors; a server on the same host *imports* and serves them
//! ([`Device::import`](crate::Device::import), then `Borrowed::from_device` of the crate `server`). No tensor bytes
//! travel between them, only a description: a handle of 64 bytes or a file descriptor, with offset and length.
//! [`export`] tries these methods in order, and reports its choice with the reason:
//!
//! 1. **In place**: the memory itself, by a CUDA IPC handle ([`CudaEngine::export_in_place`]). It costs a few driver
//!    calls for each allocation, whatever its size. CUDA supports plain allocations only (`cudaMalloc`), not memory
//!    pools (`cudaMallocAsync`) or virtual memory (PyTorch's expandable segments). Namespaces of the importer's own (PID,
//!    IPC, mount, user, network) did not prevent it on driver 580; where they do, the next method is tried.
//! 2. **Copied**: a buffer of the engine that can be shared as a file descriptor ([`SharedBuffer`]), filled by a copy
//!    within the device, at the rate of its memory. It needs the same amount of device memory again, and works between
//!    containers that share only a Unix socket, since the descriptor carries the permission.
//! 3. Neither: both errors give the reason, and the caller sends the bytes through host memory.
//!
//! An import can fail although the export succeeded. The importer should then report to the exporter, which tries the
//! next method.
//!
//! ```no_run
//! # fn send(_: tensor_relay_device::cuda::share::IpcMemory) {}
//! use std::sync::Arc;
//! use tensor_relay_device::{Device, DeviceBuffer, cuda::{CudaEngine, CudaMemory, share::{self, Exported, Place}}};
//!
//! /// In the training process. The tensors were lent to the engine with a fence of their stream.
//! fn offer(engine: &CudaEngine, tensors: &[Arc<CudaMemory>]) -> Result<(), share::ShareError> {
//!     let export = share::export(engine, tensors)?;
//!     for place in &export.places {
//!         match place {
//!             Place::InPlace(memory) => send(*memory),
//!             Place::Copied { offset, why, .. } => eprintln!("At {offset} of the buffer. {why}"),
//!             Place::Empty => {}
//!             Place::NotShareable { copy, .. } => eprintln!("Through the host. {copy}"),
//!         }
//!     }
//!     // Keep `export` and the tensors until the server reports that it has released them.
//!     Ok(())
//! }
//!
//! /// In the server.
//! fn take(device: &Device, exported: Exported, len: u64) -> Result<Vec<DeviceBuffer>, share::ShareError> {
//!     let (tensors, returned) = device.import(exported, &[0..len])?;
//!     // When `returned` completes, report the release to the training process.
//!     Ok(tensors)
//! }
//! ```
//!
//! # Order
//!
//! Streams of two processes are not ordered. Therefore an export returns only when all writers of the memory have
//! finished: the fences of the memory are passed, and the copies into a buffer have ended. The importer may read at
//! once. The calling thread blocks until then, up to the timeouts in [`CudaOptions`]; a caller that must not wait for
//! streams awaits [`Fence::passed`] first. An event handle (`cuIpcGetEventHandle`) would let the importer's stream wait
//! instead.
//!
//! # Ownership
//!
//! Memory that is shared in place belongs to the exporter, which keeps the [`CudaMemory`] until the importer reports
//! that [`Imported::returned`] has completed. That is after the importer has dropped and closed the memory. Reads after
//! the exporter has freed the memory or died are undefined in CUDA: an importer must stop using the memory when the
//! exporter has ended. The memory of a buffer lives as long as any process has a mapping or a descriptor of it.
//! Imported memory is released on the engine's thread, when it is no longer held and no copy uses it.
//!
//! Small plain allocations share blocks of 2 MiB with others of their process, and CUDA maps the whole block, so the
//! importer must be trusted with it. The importer reads only the described ranges, and no byte beyond the allocation.

use std::{any::Any, os::fd::OwnedFd, sync::Arc, time::Duration};

use tokio::sync::oneshot;

use super::{
    CudaEngine, CudaMemory,
    error::CudaError,
    flight::Direction,
    inbox::Command,
    shares::{Ended, ExportRequest, Within},
};
#[cfg(doc)]
use super::{CudaOptions, Fence};
use crate::{engine::CopySegment, loan::Returned, source::BoxFuture};

mod buffer;
mod device;
mod error;

pub use super::device_uuid::DeviceUuid;
pub use buffer::SharedBuffer;
pub use error::ShareError;

/// Device memory to be imported by another process ([`CudaEngine::import`]).
#[derive(Debug)]
pub enum Exported {
    /// A part of an allocation of the other process.
    Ipc(IpcMemory),
    /// A buffer that was allocated for sharing.
    Fd(FdMemory),
}

/// A part of an allocation of another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcMemory {
    /// The device of the memory.
    pub device: DeviceUuid,
    /// CUDA's handle of the allocation (`CUipcMemHandle`), valid in other processes only.
    pub handle: [u8; 64],
    /// The offset of the part.
    pub offset: u64,
    /// The length of the part.
    pub len: u64,
}

/// A buffer that another process allocated for sharing.
#[derive(Debug)]
pub struct FdMemory {
    /// The device of the memory.
    pub device: DeviceUuid,
    /// The buffer's descriptor. It is sent over a Unix socket (`SCM_RIGHTS`), and may be closed after the import.
    pub fd: OwnedFd,
    /// The requested length of the buffer, which the driver rounds up.
    pub len: u64,
}

/// Imported memory of another process, as memory of an engine.
#[derive(Debug)]
pub struct Imported {
    /// The memory, for [`Device::wrap`](crate::Device::wrap) and all operations of an engine, writing included. It goes
    /// back to the other process when it is dropped, no copy uses it any more, and all work recorded by
    /// [`CudaMemory::record_use`] has ended.
    pub memory: Arc<CudaMemory>,
    /// Reports when the memory has gone back, and its owner may free or write it. Never reports if the memory is
    /// leaked: when the device fails, when the end of a stream's work is unknown, or when the driver refuses to close
    /// the memory.
    pub returned: Returned,
}

/// A copy of a payload on a device, made for one other process: [`Device::export_copy`](crate::Device::export_copy).
#[derive(Debug)]
pub struct ExportedCopy {
    /// What the other process imports.
    pub exported: Exported,
    /// The memory. Keep it until the other process has imported and released it, or is gone: then it is freed, and its
    /// bytes are never reused for something else while anybody can see them.
    pub memory: Arc<CudaMemory>,
    /// Why it is no descriptor, if it is none.
    pub why_no_descriptor: Option<ShareError>,
}

/// The result of [`export`]. Keep it, and the memories, until the importer has released them.
#[derive(Debug)]
pub struct Export {
    /// The location of each memory, in the order of the memories.
    pub places: Vec<Place>,
    /// The buffer with the copies, if there are any.
    pub buffer: Option<SharedBuffer>,
}

/// The location of one memory for another process.
#[derive(Debug)]
pub enum Place {
    /// The memory itself.
    InPlace(IpcMemory),
    /// A copy in the shared buffer.
    Copied {
        /// The offset in the buffer: a multiple of 256.
        offset: u64,
        /// The length.
        len: u64,
        /// Why not in place.
        why: ShareError,
    },
    /// An empty memory.
    Empty,
    /// Not shareable: its bytes have to go through host memory.
    NotShareable {
        /// Why not in place.
        in_place: ShareError,
        /// Why not in a buffer.
        copy: ShareError,
    },
}

/// Exports memories of an engine to another process: in place if CUDA allows it, all others as copies in one buffer, if
/// the device has room for it.
///
/// Waits for the streams that write the memories, then for the copies, each with its deadline. Fails as a whole if a
/// stream takes too long, a memory is another engine's, the driver does not report the device's UUID, or the device or
/// its engine does not answer.
pub fn export(engine: &CudaEngine, memories: &[Arc<CudaMemory>]) -> Result<Export, ShareError> {
    let in_place = engine.export_in_place(memories)?;
    let mut len = 0;
    let mut parts = Vec::new();
    let mut places: Vec<Place> = Vec::new();
    for (memory, exported) in memories.iter().zip(in_place) {
        places.push(match exported {
            Ok(part) => Place::InPlace(part),
            Err(ShareError::Empty) => Place::Empty,
            Err(why) => {
                let offset = len;
                parts.push((Arc::clone(memory), offset));
                len = (offset + memory.len_bytes()).next_multiple_of(COPIES_ALIGN);
                Place::Copied { offset, len: memory.len_bytes(), why }
            }
        });
    }
    if parts.is_empty() {
        return Ok(Export { places, buffer: None });
    }
    let copied = engine.shared_buffer(len).and_then(|buffer| buffer.fill(parts).map(|()| buffer));
    match copied {
        Ok(buffer) => Ok(Export { places, buffer: Some(buffer) }),
        Err(error @ (ShareError::Engine(_) | ShareError::FenceTimedOut { .. })) => Err(error),
        Err(copy) => {
            let places = places.into_iter().map(|place| place.without_copy(&copy)).collect();
            Ok(Export { places, buffer: None })
        }
    }
}

/// The alignment of copies in a buffer, the same as that of tensors in a payload.
const COPIES_ALIGN: u64 = 256;

impl Place {
    fn without_copy(self, error: &ShareError) -> Self {
        match self {
            Self::Copied { why, .. } => Self::NotShareable { in_place: why, copy: error.clone() },
            other => other,
        }
    }
}

impl CudaEngine {
    /// Exports memories in place. Each has a result of its own, since memories of one program may come from several
    /// allocators. Keep the exported memories until the importer has released them.
    ///
    /// Waits up to [`CudaOptions::fence_timeout`] for the streams that write them ([`CudaEngine::lend`],
    /// [`CudaMemory::record_use`]), and fails as a whole if one takes longer, or the engine does not answer. The
    /// caller must await its own copies to the memories first.
    pub fn export_in_place(
        &self,
        memories: &[Arc<CudaMemory>],
    ) -> Result<Vec<Result<IpcMemory, ShareError>>, ShareError> {
        let device = self.uuid()?;
        memories.iter().try_for_each(|memory| self.check_own(memory))?;
        // The driver knows no allocation for an empty memory.
        let non_empty = memories.iter().filter(|memory| memory.len_bytes() > 0).cloned().collect();
        let timeout = self.options().answer_timeout + self.options().fence_timeout;
        let locations = self
            .inbox()
            .request_within(timeout, |reply| Command::Share(ExportRequest::InPlace(non_empty, reply)))??;
        let mut locations = locations.into_iter();
        let describe = |memory: &Arc<CudaMemory>| match memory.len_bytes() {
            0 => Err(ShareError::Empty),
            len => match locations.next() {
                Some(Ok((handle, offset))) => Ok(IpcMemory { device, handle, offset, len }),
                Some(Err(source)) => Err(ShareError::NotExportable { device: self.device_name(), source }),
                None => Err(CudaError::Stopped { device: self.device_name() }.into()),
            },
        };
        Ok(memories.iter().map(describe).collect())
    }

    /// Allocates a shareable buffer of unspecified content. It counts against [`CudaOptions::memory_limit_bytes`],
    /// usually in whole pages of 2 MiB. The allocation takes some milliseconds for each GiB: reuse the buffer for the
    /// next version.
    pub fn shared_buffer(&self, len: u64) -> Result<SharedBuffer, ShareError> {
        let device = self.uuid()?;
        if len == 0 {
            return Err(ShareError::Empty);
        }
        let bytes = usize::try_from(len).unwrap_or(usize::MAX);
        let (memory, fd) = self.inbox().request(|reply| Command::Buffer(bytes, reply))??;
        let (engine, inbox, timeout) = (self.id(), self.inbox().clone(), self.fill_timeout());
        Ok(SharedBuffer { device, memory, fd, engine, inbox, timeout })
    }

    /// Like [`shared_buffer`](Self::shared_buffer), in plain memory that other processes open by a handle. For drivers
    /// that share no memory as descriptors.
    ///
    /// # Errors
    /// [`ShareError`].
    pub(super) fn openable_buffer(&self, len: u64) -> Result<(Arc<CudaMemory>, IpcMemory), ShareError> {
        let device = self.uuid()?;
        if len == 0 {
            return Err(ShareError::Empty);
        }
        let bytes = usize::try_from(len).unwrap_or(usize::MAX);
        let (memory, handle) = self.inbox().request(|reply| Command::OpenableBuffer(bytes, reply))??;
        Ok((memory, IpcMemory { device, handle, offset: 0, len }))
    }

    fn fill_timeout(&self) -> Duration {
        let options = self.options();
        options.answer_timeout + options.fence_timeout + options.copy_timeout
    }

    /// Imports memory that another process exported, as memory of this engine.
    ///
    /// The peer's description is checked as far as possible: memory on another device, an invalid handle and a length
    /// beyond the memory are refused. [`Device::import`](crate::Device::import) does the same without `unsafe`, for
    /// peers that are trusted to keep the contract below.
    ///
    /// # Safety
    ///
    /// The other process keeps memory that it exported by a handle until [`Imported::returned`] completes here: CUDA
    /// leaves the effects of an earlier free undefined. (The memory of a descriptor is kept by the driver.) Nobody
    /// writes the memory while a copy from it runs, nor touches it while a copy to it runs.
    pub unsafe fn import(&self, exported: Exported) -> Result<Imported, ShareError> {
        let (theirs, len) = match &exported {
            Exported::Ipc(IpcMemory { device, len, .. }) | Exported::Fd(FdMemory { device, len, .. }) => {
                (*device, *len)
            }
        };
        let ours = self.uuid()?;
        if ours != theirs {
            return Err(ShareError::OtherDevice { device: self.device_name(), ours, theirs });
        }
        if len == 0 {
            return Err(ShareError::Empty);
        }
        self.inbox().request(|reply| Command::Import(exported, reply))?
    }

    /// Starts copies from `from` to each segment, within the device.
    pub(super) fn copy_from(
        &self,
        from: Arc<CudaMemory>,
        segments: Vec<CopySegment<CudaMemory>>,
        kept: Arc<dyn Any + Send + Sync>,
    ) -> BoxFuture<'static, Result<(), ShareError>> {
        let direction = Direction::In;
        let within = Within { flat: from, segments, direction, zeroes_gaps: false, _kept: Some(kept) };
        let (ended, end) = oneshot::channel();
        let stopped = CudaError::Stopped { device: self.device_name() };
        let sent = buffer::check(self.id(), within).map(|within| {
            let ended = Ended(Box::new(|end| drop(ended.send(end)))); // Fails if nobody waits any more.
            // If the thread is gone, the command is dropped here, and with it the sender.
            drop(self.inbox().send(Command::Share(ExportRequest::Copy(within, ended))));
        });
        Box::pin(async move {
            sent?;
            end.await.unwrap_or_else(|_| Err(stopped.into()))
        })
    }

    fn uuid(&self) -> Result<DeviceUuid, ShareError> {
        self.info()
            .uuid
            .ok_or_else(|| ShareError::UnknownDevice { device: self.device_name() })
    }

    fn check_own(&self, memory: &CudaMemory) -> Result<(), ShareError> {
        if memory.engine() == self.id() { Ok(()) } else { Err(ShareError::ForeignMemory) }
    }

    fn device_name(&self) -> String {
        self.inbox().device().into()
    }
}
