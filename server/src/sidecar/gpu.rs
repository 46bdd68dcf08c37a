//! Publishes GPU tensors through a server on the same machine, by the cheapest possible route.

use super::{
    producer::{KeepAlive, MemoryRoute, Producer, PublishError},
    publication::Publication,
    version::SealError,
};
use crate::{LendError, lend::TensorParts};
use std::{io, ops::Range, os::fd::OwnedFd, sync::Arc};
use tensor_relay_device::{
    Device, DeviceBuffer, Memfd, Source, SourceError,
    cuda::share::{FdMemory, IpcMemory},
};
use tensor_relay_protocol::{
    LayoutError, Limits, Manifest, Metadata, TensorSpec, Topic,
    sidecar::{CudaDevice, IpcHandle, Lend, Memory, MemoryKind, Refusal},
};
use tensor_relay_transport::{Workers, egress};

/// Why tensors on a device were not published.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishDeviceError {
    /// They cannot form a version.
    #[error(transparent)]
    Tensors(#[from] LendError),
    /// They cannot be laid out together.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// They could not be copied to the host.
    #[error(transparent)]
    Read(#[from] SourceError),
    /// There is no shared memory for them.
    #[error(transparent)]
    Memory(#[from] SealError<io::Error>),
    /// The server did not publish them.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

/// The `Lend` messages of a version, with their descriptors.
type Lends = Vec<(Lend, Option<OwnedFd>)>;

/// The tensors of a version, with their ranges in its payload.
type Parts = Arc<Vec<(Range<u64>, DeviceBuffer)>>;

impl Producer {
    /// Publishes tensors on `device` into `topic`, by the cheapest possible route: in place, without a copy; from a
    /// copy on the device; or through host memory. The publication has the route and the reason for it. Aliases have
    /// empty buffers.
    ///
    /// In place (`cuda_ipc`), if it `may_borrow` them, tensors must not be written before the publication is released,
    /// and the version is withdrawn when the connection ends. With the other routes, they may be written when this
    /// returns, and the version outlives this process.
    ///
    /// # Errors
    /// [`PublishDeviceError`].
    pub async fn publish_from_device(
        &self,
        topic: Topic,
        may_borrow: bool,
        device: &Device,
        tensors: Vec<(TensorSpec, DeviceBuffer)>,
        metadata: Metadata,
    ) -> Result<Publication, PublishDeviceError> {
        let aliases: Vec<bool> = tensors.iter().map(|(spec, _)| spec.alias_of.is_some()).collect();
        let (specs, buffers): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
        let manifest = Manifest::layout(specs, vec![], self.terms().chunk_bytes, &Limits::default())?;
        let copied_bytes = buffers.iter().map(DeviceBuffer::len_bytes).sum();
        let parts = TensorParts::new(&manifest, &aliases, buffers, DeviceBuffer::len_bytes)?;
        let TensorParts { whole, spread } = parts;
        let source = device
            .spread_source(manifest.payload_bytes(), whole.iter().cloned(), spread)
            .map_err(LendError::from)?;
        let parts: Parts = Arc::new(whole);
        let mut failures = vec![];
        let kinds = [MemoryKind::CudaIpc, MemoryKind::CudaFd];
        for kind in kinds.into_iter().skip(usize::from(!may_borrow)) {
            let route = match self.share(kind, device, &manifest, &parts).await {
                Ok(route) => route,
                Err(failure) => {
                    failures.push(failure);
                    continue;
                }
            };
            let route = MemoryRoute { reason: reason_for(kind, &failures), ..route };
            match self.send(topic.clone(), &manifest, metadata.clone(), route).await {
                Ok(publication) => return Ok(publication),
                Err(PublishError::Refused {
                    reason: Refusal::UnfitMemory | Refusal::UnsupportedMemory,
                    text,
                }) => failures.push(text),
                Err(error) => return Err(error.into()),
            }
        }
        let lends = copy_through_host(device, &*source).await?;
        let reason = reason_for(MemoryKind::Memfd, &failures);
        let route = MemoryRoute { path: MemoryKind::Memfd, reason, copied_bytes, lends, kept: None };
        Ok(self.send(topic, &manifest, metadata, route).await?)
    }

    /// Tries to share tensors as one kind of memory.
    async fn share(
        &self,
        kind: MemoryKind,
        device: &Device,
        manifest: &Manifest,
        parts: &Parts,
    ) -> Result<MemoryRoute, String> {
        if !self.terms().memories.contains(&kind) {
            return Err(format!(
                "the server accepts no memory of the kind {kind}, because it does not serve from a GPU that processes \
                 can share"
            ));
        }
        if manifest.feature().is_some() {
            return Err("tensors in pieces are not shared".into());
        }
        if parts.is_empty() {
            return Err("the tensors have no bytes".into());
        }
        let (device, parts, bytes) = (device.clone(), Arc::clone(parts), manifest.payload_bytes());
        let share = move || -> Result<(Lends, u64, KeepAlive), String> {
            match kind {
                MemoryKind::CudaIpc => {
                    let buffers: Vec<_> = parts.iter().map(|(_, buffer)| buffer.clone()).collect();
                    let exported = device.export_in_place(&buffers).map_err(|error| error.to_string())?;
                    let lends = parts.iter().zip(exported);
                    let lends = lends.map(|((range, _), memory)| lend_in_place(range.clone(), memory));
                    let lends = lends.map(|lend| (lend, None)).collect();
                    Ok((lends, 0, Box::new(parts)))
                }
                _ => {
                    let (memory, kept) =
                        device.export_copies(bytes, &parts).map_err(|error| error.to_string())?;
                    Ok((vec![lend_copy(0..bytes, memory)], tensor_bytes(&parts), Box::new(kept)))
                }
            }
        };
        let (lends, copied_bytes, kept) = Workers::Threads.run(share).await?;
        Ok(MemoryRoute { path: kind, reason: "".into(), copied_bytes, lends, kept: Some(kept) })
    }
}

/// The bytes of all tensors, without the padding between them.
fn tensor_bytes(parts: &Parts) -> u64 {
    parts.iter().map(|(range, _)| range.end - range.start).sum()
}

/// The reason for this kind of memory, with the errors of cheaper ones.
fn reason_for(kind: MemoryKind, failures: &[String]) -> Arc<str> {
    let explanation = match kind {
        MemoryKind::CudaIpc => "the tensors' allocations can be shared in place",
        MemoryKind::CudaFd if failures.is_empty() => {
            "the tensors were copied on their GPU, so that they may be written again"
        }
        MemoryKind::CudaFd => "the tensors were copied on their GPU, because they cannot be shared in place",
        _ => "the tensors were copied through host memory, because their GPU's memory cannot be shared",
    };
    match failures {
        [] => explanation.into(),
        failures => {
            let failures: Vec<_> = failures.iter().map(|failure| failure.trim_end_matches('.')).collect();
            format!("{explanation}: {}", failures.join("; ")).into()
        }
    }
}

/// The `Lend` message of a tensor shared in place.
fn lend_in_place(range: Range<u64>, IpcMemory { device, handle, offset, .. }: IpcMemory) -> Lend {
    let (device, handle) = (CudaDevice(device.bytes()), Box::new(IpcHandle(handle)));
    Lend { range, memory: Memory::CudaIpc { device, handle, offset } }
}

/// The `Lend` message of a shared buffer.
fn lend_copy(range: Range<u64>, FdMemory { device, fd, len }: FdMemory) -> (Lend, Option<OwnedFd>) {
    let device = CudaDevice(device.bytes());
    (Lend { range, memory: Memory::CudaFd { device, buffer_bytes: len, offset: 0 } }, Some(fd))
}

/// Copies a payload off its device into shared memory, one slot of the device at a time.
async fn copy_through_host(device: &Device, source: &dyn Source) -> Result<Lends, PublishDeviceError> {
    let bytes = source.len_bytes();
    if bytes == 0 {
        return Ok(vec![]);
    }
    let failed = |source| SealError::Memory { bytes, source };
    let mut memfd = Memfd::new(bytes).map_err(failed)?;
    let step = device.slots().slot_bytes();
    for start in (0..bytes).step_by(step) {
        let range = start..bytes.min(start + step as u64);
        let chunk = egress::read(source, range.clone()).await?;
        let written = move || memfd.write_at(&chunk, range.start).map(|()| memfd);
        memfd = Workers::Threads.run(written).await.map_err(failed)?;
    }
    let sealed = memfd.seal().map_err(failed)?;
    let lend = Lend { range: 0..bytes, memory: Memory::Memfd { offset: 0 } };
    Ok(vec![(lend, Some(sealed.into()))])
}
