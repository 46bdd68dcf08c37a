//! [`ServerMemory`]: memory of a version that a server of this host lends.

use crate::{gpu_memory::GpuMemory, progress::Counters};
use futures_util::{StreamExt, TryStreamExt, stream};
use std::{fmt, os::fd::OwnedFd, sync::Arc};
use tensor_relay_device::{
    Region, SharedError, SharedRange, SharedView, Sink, SinkError, VolatileBytes, cuda::share::ShareError,
    is_lifeline,
};
use tensor_relay_protocol::{Announce, ChunkIndex, Lending, NotLent, Selection, ServerMessage};
use tensor_relay_transport::{Lane, Workers, unix::LostDescriptors};

/// How the bytes of a version came to this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sharing {
    /// In chunks, over a network.
    Network,
    /// In memory of the server, which this process maps.
    Mapped,
    /// In memory of the server, from which they were copied to their places: buffers of the user, a GPU, or boxes.
    Copied,
    /// The same, of a version that lies on a GPU: in host memory, because it was not lent on the GPU, for this reason.
    CopiedFromHost(NotLent),
    /// In memory of the server on a GPU, from which they were copied to their places on the same GPU.
    CopiedOnGpu,
    /// In memory of the server on a GPU, which this process uses there.
    MappedOnGpu,
    /// In chunks over a Unix socket, for this reason.
    Chunks(NotLent),
}

impl Sharing {
    /// Whether they came in memory of the server.
    pub fn is_memory(&self) -> bool {
        match self {
            Self::Mapped | Self::Copied | Self::CopiedFromHost(_) | Self::CopiedOnGpu | Self::MappedOnGpu => {
                true
            }
            Self::Network | Self::Chunks(_) => false,
        }
    }
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network => f.write_str("chunks"),
            Self::Mapped => f.write_str("memory"),
            Self::Copied => f.write_str("memory, copied"),
            Self::CopiedFromHost(reason) => write!(f, "memory, copied, not on the GPU: {reason}"),
            Self::CopiedOnGpu => f.write_str("GPU memory, copied"),
            Self::MappedOnGpu => f.write_str("GPU memory"),
            Self::Chunks(reason) => write!(f, "chunks: {reason}"),
        }
    }
}

/// The memory of a version that was announced: its descriptors, if they came.
#[derive(Debug)]
pub(crate) struct ServerMemory {
    lending: Lending,
    /// The memory, and the lifeline. When that is closed, the server knows that nothing is mapped here any more.
    descriptors: Result<Vec<OwnedFd>, LostDescriptors>,
}

/// Why the memory of a server cannot be used. The version then comes in chunks.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServerMemoryError {
    /// The descriptors did not arrive.
    #[error(transparent)]
    Lost(#[from] LostDescriptors),
    /// The server sent other descriptors than it announced.
    #[error("the server did not send a descriptor of memory and one of a pipe")]
    Missing,
    /// The memory cannot be mapped.
    #[error(transparent)]
    Map(#[from] SharedError),
    /// It is memory of a GPU, and the version is not wanted there.
    #[error("the server lent memory of a GPU that this process did not ask for")]
    Unwanted,
    /// A copy from memory that ends with the server could overwrite what is verified.
    #[error("a part of the version is here already, and the server's GPU memory may end while it is copied")]
    Resumed,
    /// GPU memory cannot be opened.
    #[error(transparent)]
    Import(#[from] ShareError),
    /// The server has ended while its GPU memory was copied, which ends with it.
    #[error("the server ended while its GPU memory was copied")]
    LenderGone,
}

/// Why bytes were not copied from memory of a server.
#[derive(Debug)]
pub(crate) enum NotCopied {
    /// The memory cannot be used.
    Unusable(ServerMemoryError),
    /// The bytes cannot be written.
    Sink(SinkError),
}

impl ServerMemory {
    /// The memory that `message`, which came over `lane`, announces; `None` if it announces none.
    pub(crate) fn receive(lane: &Lane, message: &ServerMessage) -> Option<Self> {
        let ServerMessage::Announce(Announce { lending: Some(lending), .. }) = message else { return None };
        let inode = match &**lending {
            Lending::Memory(lent) => lent.inode,
            Lending::Gpu(lent) => lent.inode,
            Lending::Chunks(_) => return None,
        };
        Some(Self { lending: **lending, descriptors: lane.descriptors()?.take(inode) })
    }

    /// The memory, which is that of a GPU.
    pub(crate) fn into_gpu(self) -> Result<GpuMemory, ServerMemoryError> {
        let Lending::Gpu(lent) = self.lending else { return Err(ServerMemoryError::Missing) };
        GpuMemory::new(lent, self.descriptors?)
    }

    /// Maps `payload_bytes` of it for the user: what the user writes is a copy of his own. Returns the server's memory
    /// itself too.
    pub(crate) fn into_private(self, payload_bytes: u64) -> Result<(Region, SharedRange), ServerMemoryError> {
        let (view, lifeline) = self.open(payload_bytes)?;
        let lifeline = Arc::new(lifeline); // Closed when both are gone.
        Ok((view.private(Arc::clone(&lifeline))?, view.into_range(lifeline)?))
    }

    /// Maps `payload_bytes` of it read-only, to be copied from.
    pub(crate) fn into_read_only(self, payload_bytes: u64) -> Result<VolatileBytes, ServerMemoryError> {
        let (view, lifeline) = self.open(payload_bytes)?;
        Ok(view.read_only(lifeline)?)
    }

    fn open(self, payload_bytes: u64) -> Result<(SharedView, OwnedFd), ServerMemoryError> {
        let Lending::Memory(lent) = self.lending else { return Err(ServerMemoryError::Unwanted) };
        let descriptors = <[OwnedFd; 2]>::try_from(self.descriptors?);
        let [memory, lifeline] = descriptors.map_err(|_| ServerMemoryError::Missing)?;
        if !is_lifeline(&lifeline) {
            return Err(ServerMemoryError::Missing);
        }
        Ok((SharedView::new(memory, lent.offset_bytes, payload_bytes)?, lifeline))
    }
}

/// Copies the selected chunks of `payload`, lent memory, to their places in `sink`, with up to a copy for each processor at once.
pub(crate) async fn copy(
    payload: VolatileBytes,
    selection: &Selection,
    sink: &dyn Sink,
    workers: Workers,
    counters: &Counters,
) -> Result<(), SinkError> {
    let copies = selection.chunks().iter().map(|chunk| {
        let (range, _) = selection.manifest().chunk(ChunkIndex(chunk));
        let bytes = payload.slice(range.start as usize..range.end as usize).expect("it was mapped");
        async move {
            let place = selection.place(ChunkIndex(chunk)).expect("it is selected");
            let len = bytes.len() as u64;
            let mut target = sink.open(place).await?;
            let target = workers
                .run(move || {
                    bytes.copy_to(&mut target);
                    target
                })
                .await;
            sink.write(target).await?;
            counters.add_received(len);
            Ok(())
        }
    });
    let at_once = std::thread::available_parallelism().map_or(1, usize::from);
    stream::iter(copies).buffer_unordered(at_once).try_collect().await
}
