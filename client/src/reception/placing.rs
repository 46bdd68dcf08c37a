//! Where the bytes of a version go: memory that the server lends, the user's buffers, or memory of the session.

use super::{Context, Reception};
use crate::{
    destination::{Allocators, Destination},
    error::TransferError,
    gpu_memory::GpuMemory,
    other_servers::Link,
    server_memory::{NotCopied, ServerMemory, ServerMemoryError, Sharing},
};
use std::sync::Arc;
use tensor_relay_device::{DeviceBuffer, Region, SharedRange, VolatileBytes};
use tensor_relay_protocol::{
    Announce, Epoch, Lending, NotLent, ProtocolViolation, Selection, Version, VersionId,
};
use tensor_relay_transport::AbortOnDrop;

/// The bytes of a version in memory that the server lends.
enum ServerBytes {
    /// They are the user's: a view, and what it is a view of.
    Mapped(Region, SharedRange),
    /// They are copied to their places.
    ToCopy(VolatileBytes),
    /// They are copied to their places on the same GPU.
    OnGpu(GpuMemory),
    /// They are the user's, on a GPU.
    MappedOnGpu(DeviceBuffer),
}

impl Reception {
    /// Prepares the destination of a selection: memory that the server lends, the user's buffers, or memory of the session.
    pub(super) fn place(
        &mut self,
        announce: &Announce,
        selection: &Arc<Selection>,
        resumes: bool,
        context: &mut Context<'_, '_>,
    ) -> Result<Result<(), TransferError>, ProtocolViolation> {
        let own = &context.allocators.memory;
        let (memory, mapped) = match self.open_server_memory(announce, selection, resumes, context.allocators)
        {
            Some(ServerBytes::Mapped(region, lent)) => {
                (None, Some(Ok(Destination::mapped((region, lent), selection, own))))
            }
            Some(ServerBytes::MappedOnGpu(buffer)) => {
                (None, Some(Destination::mapped_on_device(buffer, selection, own)))
            }
            memory => (memory, None),
        };
        match mapped {
            Some(Ok(destination)) => {
                self.counters.begin(announce.id.version.0, selection.payload_bytes());
                self.tally = Arc::default();
                self.destination = Some(destination);
                self.base.begin(announce, selection);
                if let Some(destination) = &self.destination {
                    self.forwarding.begin(announce, selection, destination);
                }
                self.machine.handle_lent();
                return Ok(Ok(()));
            }
            Some(Err(error)) => return Ok(Err(error)),
            None => {}
        }
        let base = if resumes && self.destination.is_some() {
            tracing::info!(version = %announce.id, "The transfer of a version resumes.");
            self.base.resume(announce)
        } else {
            self.counters.begin(announce.id.version.0, selection.payload_bytes());
            self.tally = Arc::default();
            let mut placed = Destination::new(selection, self.lent.take(), context.allocators);
            if placed.is_err() && self.forwarding.give_way() {
                placed = Destination::new(selection, None, context.allocators);
            }
            self.destination = match placed {
                Ok(destination) => Some(destination),
                Err(error) => return Ok(Err(error)),
            };
            self.base.begin(announce, selection)
        };
        if let Some(destination) = &self.destination {
            self.forwarding.begin(announce, selection, destination);
        }
        self.machine.handle_placed(base)?;
        if let Some(memory) = memory {
            self.copy_server_memory(memory, announce, selection, context);
        }
        Ok(Ok(()))
    }

    /// Starts to copy from memory of the server to the places of the version.
    fn copy_server_memory(
        &mut self,
        memory: ServerBytes,
        announce: &Announce,
        selection: &Arc<Selection>,
        context: &mut Context<'_, '_>,
    ) {
        let (Some(connection), Some(destination)) = (context.links.get(Link::Origin), &self.destination)
        else {
            return;
        };
        let of = (context.id, (announce.id.epoch, announce.id.version));
        let (selection, counters) = (Arc::clone(selection), Arc::clone(&self.counters));
        let task = match memory {
            ServerBytes::Mapped(..) | ServerBytes::MappedOnGpu(_) => return, // They are in place.
            ServerBytes::ToCopy(bytes) => {
                connection.copy_server_memory(of, bytes, selection, destination.sink(&announce.id), counters)
            }
            ServerBytes::OnGpu(memory) => match destination.device().filter(|device| memory.is_on(device)) {
                Some(device) => {
                    let (device, sink) = (device.clone(), destination.sink(&announce.id));
                    connection.copy_gpu_memory(of, (memory, device), selection, sink, counters)
                }
                None => return self.decline(&announce.id, &ServerMemoryError::Unwanted),
            },
        };
        self.tasks.push(AbortOnDrop(task));
    }

    /// Asks the server for chunks instead of its memory.
    fn decline(&mut self, version: &VersionId, error: &ServerMemoryError) {
        tracing::warn!(%version, %error, "The memory of a version cannot be mapped: it is received in chunks.");
        self.sharing = Sharing::Chunks(NotLent::Declined);
        self.machine.decline_memory();
    }

    /// Maps the memory that the server lends for a version, if it does: for the user, or to copy from it, where the bytes
    /// belong elsewhere. If this process cannot, the server is asked for chunks.
    fn open_server_memory(
        &mut self,
        announce: &Announce,
        selection: &Selection,
        resumes: bool,
        allocators: &Allocators,
    ) -> Option<ServerBytes> {
        let memory = self.memory.take();
        let not_on_gpu = match announce.lending.as_deref() {
            None => {
                self.sharing = Sharing::Network;
                return None;
            }
            Some(Lending::Chunks(reason)) => {
                self.sharing = Sharing::Chunks(*reason);
                return None;
            }
            Some(Lending::Memory(lent)) => lent.why_not_gpu,
            Some(Lending::Gpu(_)) => {
                let memory = memory.map(ServerMemory::into_gpu);
                let opened =
                    memory.map(|memory| self.open_gpu_memory(memory?, selection, resumes, allocators));
                return self.opened(announce, opened);
            }
        };
        let is_elsewhere = self.has_buffers(resumes) || allocators.device.is_some();
        let payload_bytes = selection.manifest().payload_bytes();
        let is_copied = is_elsewhere || selection.has_parts();
        self.sharing = match (is_copied, not_on_gpu) {
            (false, _) => Sharing::Mapped,
            (true, None) => Sharing::Copied,
            (true, Some(reason)) => Sharing::CopiedFromHost(reason),
        };
        let opened = memory.map(|memory| match is_copied {
            true => memory.into_read_only(payload_bytes).map(ServerBytes::ToCopy),
            false => {
                let mapped = memory.into_private(payload_bytes);
                mapped.map(|(region, lent)| ServerBytes::Mapped(region, lent))
            }
        });
        self.opened(announce, opened)
    }

    /// Opens GPU memory to use it where it is, if the server and the user allow that and all of it is selected.
    fn open_gpu_memory(
        &mut self,
        memory: GpuMemory,
        selection: &Selection,
        resumes: bool,
        allocators: &Allocators,
    ) -> Result<ServerBytes, ServerMemoryError> {
        let payload_bytes = selection.manifest().payload_bytes();
        let is_whole = selection.memory_bytes() == payload_bytes && !selection.has_parts();
        let may_map = allocators.share_gpu && memory.is_in_place() && is_whole && !self.has_buffers(resumes);
        match allocators.device.as_ref().filter(|device| may_map && memory.is_on(device)) {
            Some(device) => {
                self.sharing = Sharing::MappedOnGpu;
                memory.map(device, payload_bytes).map(ServerBytes::MappedOnGpu)
            }
            None if resumes && memory.may_be_freed() && self.machine.held_bytes() > 0 => {
                Err(ServerMemoryError::Resumed)
            }
            None => {
                self.sharing = Sharing::CopiedOnGpu;
                Ok(ServerBytes::OnGpu(memory))
            }
        }
    }

    /// Whether the version goes to the user's buffers.
    fn has_buffers(&self, resumes: bool) -> bool {
        self.lent.is_some() || (resumes && self.is_in_lent_buffers())
    }

    /// The memory that was opened; if there is none, the server is asked for chunks.
    fn opened(
        &mut self,
        announce: &Announce,
        opened: Option<Result<ServerBytes, ServerMemoryError>>,
    ) -> Option<ServerBytes> {
        let opened = opened.unwrap_or(Err(ServerMemoryError::Missing));
        opened.map_err(|error| self.decline(&announce.id, &error)).ok()
    }

    /// Handles the end of a copy from lent memory to the places of `version`.
    pub(crate) fn handle_copied(&mut self, version: (Epoch, Version), copied: Result<(), NotCopied>) {
        let is_current = self
            .machine
            .current_version()
            .is_some_and(|current| (current.epoch, current.version) == version);
        match copied {
            Ok(()) if is_current => {
                self.machine.handle_lent();
                self.counters.set_verified(self.counters.get().payload_bytes);
            }
            Err(NotCopied::Unusable(error)) if is_current => {
                if let Some(version) = self.machine.current_version().cloned() {
                    self.decline(&version, &error);
                }
            }
            Err(NotCopied::Sink(error)) if is_current => {
                let device = self.destination.as_ref().and_then(Destination::device);
                self.fail(&TransferError::chunk(error.into(), device));
            }
            _ => {}
        }
    }
}
