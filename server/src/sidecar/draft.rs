//! [`Draft`]: collects and validates the parts of a producer's version.

use crate::{Publishable, Staging};
use bytes::Bytes;
use std::{ops::Range, os::fd::OwnedFd, sync::Arc};
use tensor_relay_device::{
    AllocError, Charge, Device, HostSource, Loan, Returned, Sealed,
    cuda::share::{DeviceUuid, Exported, FdMemory, IpcMemory},
};
use tensor_relay_protocol::{
    Limits, Manifest, Tensor,
    sidecar::{CudaDevice, Lend, Memory, MemoryKind, Refusal},
};
use tensor_relay_transport::egress::Payload;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The kinds of memory that a server accepts; `device` is the one that it serves from.
pub(super) fn accepted_kinds(device: Option<&Device>) -> &'static [MemoryKind] {
    match device {
        Some(device) if device.is_shareable() => MemoryKind::ALL,
        _ => &[MemoryKind::Memfd],
    }
}

/// A refusal: its code, and its explanation.
pub(super) type Refused = (Refusal, String);

/// The draft of the next version. Holds at most one descriptor, and a manifest within the server's limits, whatever the
/// producer sends.
#[derive(Debug, Default)]
pub(super) struct Draft {
    manifest: Vec<u8>,
    /// The permits for the manifest's bytes, from the quota of pending manifests.
    permits: Option<OwnedSemaphorePermit>,
    memory: Option<Lent>,
    /// Ranges of the payload in GPU allocations.
    in_place: Vec<(Range<u64>, IpcMemory)>,
    /// The first error. Further parts are ignored until `Publish`, which is refused.
    refused: Option<Refused>,
}

/// Lent memory, and the range of the payload that it holds.
#[derive(Debug)]
struct Lent {
    range: Range<u64>,
    offset: u64,
    descriptor: OwnedFd,
    /// The device and size of a GPU buffer; `None` for host memory.
    cuda_buffer: Option<(CudaDevice, u64)>,
}

/// A version that is ready to be published.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) held: Publishable,
    /// Resolve when its memory is no longer used; await all of them.
    pub(super) returned: Vec<Returned>,
    /// The kind of memory.
    pub(super) path: MemoryKind,
}

/// The memory of one version, with its share of the server's budget.
struct ChargedMemory {
    sealed: Sealed,
    _charge: Charge,
}

impl AsRef<[u8]> for ChargedMemory {
    fn as_ref(&self) -> &[u8] {
        self.sealed.as_ref()
    }
}

impl Draft {
    /// Handles a part of the manifest.
    pub(super) fn handle_manifest(&mut self, part: &Bytes, limits: &Limits, quota: &Arc<Semaphore>) {
        if self.refused.is_some() {
            return;
        }
        let bytes = u32::try_from(part.len()).unwrap_or(u32::MAX); // Messages are smaller.
        let Ok(permit) = Arc::clone(quota).try_acquire_many_owned(bytes) else {
            let text = "too many manifests are waiting to be read: publish again after other versions";
            return self.refuse(Refusal::NoRoom, text.into());
        };
        match &mut self.permits {
            Some(permits) => permits.merge(permit),
            None => self.permits = Some(permit),
        }
        let max = limits.manifest_bytes as usize;
        match self.manifest.len() + part.len() > max {
            true => self.refuse(Refusal::BadManifest, format!("its manifest has more than {max} bytes")),
            false => self.manifest.extend_from_slice(part),
        }
    }

    /// Handles lent memory and its descriptor: its kind must be in `accepted_kinds`, and there are at most `parts_max`
    /// parts.
    pub(super) fn handle_lend(
        &mut self,
        lend: Lend,
        descriptor: Option<OwnedFd>,
        accepted_kinds: &[MemoryKind],
        parts_max: usize,
    ) {
        if self.refused.is_some() {
            return;
        }
        let Lend { range, memory } = lend;
        match (memory, descriptor) {
            (other, _) if !accepted_kinds.contains(&other.kind()) => self.refuse(
                Refusal::UnsupportedMemory,
                format!(
                    "this server accepts no memory of the kind {}, because it does not serve from a GPU that \
                     processes can share",
                    other.kind()
                ),
            ),
            (Memory::CudaIpc { .. }, _) if self.in_place.len() >= parts_max => {
                self.refuse(Refusal::UnfitMemory, format!("its payload is in more than {parts_max} parts"));
            }
            (Memory::CudaIpc { device, handle, offset }, _) => {
                let (device, len) = (DeviceUuid::new(device.0), range.end - range.start);
                let memory = IpcMemory { device, handle: handle.0, offset, len };
                self.in_place.push((range, memory));
            }
            (other, None) => {
                let text = format!("the lent {} has no descriptor", other.kind());
                self.refuse(Refusal::UnfitMemory, text);
            }
            (_, Some(_)) if self.memory.is_some() => {
                let text = "the payload must be in one memory with a descriptor, but two were lent";
                self.refuse(Refusal::UnfitMemory, text.into());
            }
            (Memory::Memfd { offset }, Some(descriptor)) => {
                self.memory = Some(Lent { range, offset, descriptor, cuda_buffer: None });
            }
            (Memory::CudaFd { device, buffer_bytes, offset }, Some(descriptor)) => {
                let cuda_buffer = Some((device, buffer_bytes));
                self.memory = Some(Lent { range, offset, descriptor, cuda_buffer });
            }
            (other, Some(_)) => {
                let text = format!("this build does not support memory of the kind {}", other.kind());
                self.refuse(Refusal::UnsupportedMemory, text);
            }
        }
    }

    /// Validates the draft, and maps its memory, which counts within the server's budget, or imports it into `device`.
    /// Blocks.
    ///
    /// # Errors
    /// The refusal; then the draft's memory is released.
    pub(super) fn ready(self, staging: &Staging, device: Option<&Device>) -> Result<Ready, Refused> {
        if let Some(refused) = self.refused {
            return Err(refused);
        }
        let charge = charge_budget(staging, self.manifest.len());
        let charge = charge.map_err(|error| (Refusal::NoRoom, error.to_string()))?;
        let manifest = Manifest::decode(self.manifest.into(), &staging.limits)
            .map_err(|error| (Refusal::BadManifest, error.to_string()))?;
        check_chunks(&manifest, staging)?;
        let manifest = Arc::new(manifest);
        let mut ready = match (self.memory, device) {
            (
                Some(Lent { range, offset, descriptor: fd, cuda_buffer: Some((cuda, buffer_bytes)) }),
                Some(device),
            ) => {
                let memory = FdMemory { device: DeviceUuid::new(cuda.0), fd, len: buffer_bytes };
                import_from_device(
                    manifest,
                    vec![(range, Exported::Fd(memory), offset)],
                    device,
                    MemoryKind::CudaFd,
                )
            }
            (None, Some(device)) if !self.in_place.is_empty() => {
                let in_place = self.in_place.into_iter();
                let lent = in_place.map(|(range, memory)| (range, Exported::Ipc(memory), 0)).collect();
                import_from_device(manifest, lent, device, MemoryKind::CudaIpc)
            }
            (memory, _) => map_from_host(manifest, memory, staging),
        }?;
        ready.held.charge = Some(charge);
        Ok(ready)
    }

    fn refuse(&mut self, reason: Refusal, text: String) {
        *self = Self { refused: self.refused.take().or(Some((reason, text))), ..Self::default() };
    }
}

/// Maps a version in shared host memory. It is sealed, so it may be served for as long as a staged one.
fn map_from_host(manifest: Arc<Manifest>, memory: Option<Lent>, staging: &Staging) -> Result<Ready, Refused> {
    let (loan, returned) = Loan::new();
    let source = match (memory, manifest.payload_bytes()) {
        (None, 0) => HostSource::new(loan.lend(Bytes::new())), // On loan, so that its release is reported.
        (Some(lent), payload_bytes) if lent.range == (0..payload_bytes) => {
            let bytes = loan.lend(map(&lent, staging)?);
            HostSource::of_sealed(bytes, lent.descriptor)
                .map_err(|error| (Refusal::UnfitMemory, error.to_string()))?
        }
        (lent, payload_bytes) => return Err(incomplete_error(lent.as_ref(), payload_bytes)),
    };
    let payload = Payload::new(manifest, Arc::new(source));
    Ok(Ready {
        held: Publishable { payload: payload.into(), returned: None, charge: None, relayed: None },
        returned: vec![returned],
        path: MemoryKind::Memfd,
    })
}

/// Imports a version in GPU memory shared with its producer. `lent` are the ranges of its payload, with the memory and
/// offset of each.
fn import_from_device(
    manifest: Arc<Manifest>,
    mut lent: Vec<(Range<u64>, Exported, u64)>,
    device: &Device,
    path: MemoryKind,
) -> Result<Ready, Refused> {
    lent.sort_by_key(|(range, ..)| range.start);
    // Only the tensors: the padding between them may have any content in this memory, and must read as zeros.
    let mut tensors: Vec<_> = manifest
        .tensors()
        .iter()
        .flat_map(Tensor::ranges)
        .filter(|range| !range.is_empty())
        .collect();
    tensors.sort_by_key(|range| (range.start, range.end));
    tensors.dedup(); // Aliases.
    let mut tensors = tensors.into_iter().peekable();
    let unfit = |error: String| (Refusal::UnfitMemory, error);
    let (mut parts, mut all_returned) = (Vec::with_capacity(tensors.len()), Vec::with_capacity(lent.len()));
    for (range, memory, offset) in lent {
        let mut contained = vec![];
        while let Some(tensor) =
            tensors.next_if(|tensor| range.start <= tensor.start && tensor.end <= range.end)
        {
            contained.push(tensor);
        }
        // The import refuses excessive offsets.
        let offset_of = |start: u64| offset.saturating_add(start - range.start);
        let ranges: Vec<_> = contained
            .iter()
            .map(|tensor| offset_of(tensor.start)..offset_of(tensor.end))
            .collect();
        let (buffers, returned) = device.import(memory, &ranges).map_err(|error| unfit(error.to_string()))?;
        parts.extend(contained.into_iter().zip(buffers));
        all_returned.push(returned);
    }
    if let Some(range) = tensors.next() {
        let text =
            format!("bytes {} to {} of its payload are not within one lent part", range.start, range.end);
        return Err(unfit(text));
    }
    let source = device
        .source(manifest.payload_bytes(), parts)
        .map_err(|error| unfit(error.to_string()))?;
    let (source, returned) = crate::device::lend_source(source);
    let payload = Payload::new(manifest, source);
    let held = Publishable { payload: payload.into(), returned: Some(returned), charge: None, relayed: None };
    Ok(Ready { held, returned: all_returned, path })
}

fn check_chunks(manifest: &Manifest, staging: &Staging) -> Result<(), Refused> {
    let (found, wanted) = (manifest.chunk_bytes(), staging.chunk_bytes);
    match found == wanted {
        true => Ok(()),
        false => {
            let text = format!("its manifest has chunks of {found} bytes, but this server uses {wanted}");
            Err((Refusal::BadManifest, text))
        }
    }
}

fn incomplete_error(lent: Option<&Lent>, payload_bytes: u64) -> Refused {
    let lent = match lent {
        Some(Lent { range, .. }) => format!("bytes {} to {}", range.start, range.end),
        None => "none".into(),
    };
    (
        Refusal::UnfitMemory,
        format!("its payload has {payload_bytes} bytes, of which {lent} were lent: lend all of them"),
    )
}

fn map(lent: &Lent, staging: &Staging) -> Result<Bytes, Refused> {
    let len = lent.range.end - lent.range.start;
    if lent.offset != 0 {
        let text = format!(
            "the payload begins at byte {} of its memfd: lend a memfd that begins with the payload",
            lent.offset
        );
        return Err((Refusal::UnfitMemory, text));
    }
    let sealed =
        Sealed::map(&lent.descriptor, len).map_err(|error| (Refusal::UnfitMemory, error.to_string()))?;
    let charge =
        charge_budget(staging, len as usize).map_err(|error| (Refusal::NoRoom, error.to_string()))?;
    Ok(Bytes::from_owner(ChargedMemory { sealed, _charge: charge }))
}

/// Counts memory within the budget for staged versions; releases bases if it does not fit.
fn charge_budget(staging: &Staging, len: usize) -> Result<Charge, AllocError> {
    match staging.memory.charge(len) {
        Err(AllocError::OverBudget { .. }) if staging.bases.release_all() => staging.memory.charge(len),
        given => given,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the pending manifests of all producers of a user together are bounded, and a refused draft holds nothing.
    #[test]
    fn pending_manifests_are_bounded() {
        let (quota, part, limits) =
            (Arc::new(Semaphore::new(100)), Bytes::from(vec![0; 40]), Limits::default());
        let (mut one, mut two) = (Draft::default(), Draft::default());
        one.handle_manifest(&part, &limits, &quota);
        two.handle_manifest(&part, &limits, &quota);
        one.handle_manifest(&part, &limits, &quota);
        assert!(matches!(one.refused, Some((Refusal::NoRoom, _))) && two.refused.is_none());
        assert_eq!((quota.available_permits(), one.manifest.len()), (60, 0));
        one.handle_manifest(&part, &limits, &quota);
        assert_eq!(one.manifest.len(), 0, "a refused draft stores no further parts");
        drop(two);
        assert_eq!(quota.available_permits(), 100);
    }
}
