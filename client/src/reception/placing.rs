//! Where the bytes of a version go: memory that the server lends, the user's buffers, or memory of the session.

use super::{Context, Reception};
use crate::{
    destination::{Allocators, Destination},
    error::TransferError,
    other_servers::Link,
    server_memory::{ServerMemoryError, Sharing},
};
use std::sync::Arc;
use tensor_relay_device::{Region, SharedRange, SinkError, VolatileBytes};
use tensor_relay_protocol::{Announce, Epoch, Lending, NotLent, ProtocolViolation, Selection, Version};
use tensor_relay_transport::AbortOnDrop;

/// The bytes of a version in memory that the server lends.
enum ServerBytes {
    /// They are the user's: a view, and what it is a view of.
    Mapped(Region, SharedRange),
    /// They are copied to their places.
    ToCopy(VolatileBytes),
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
        let memory = self.open_server_memory(announce, selection, resumes, context.allocators);
        if let Some(ServerBytes::Mapped(region, lent)) = memory {
            self.counters.begin(announce.id.version.0, selection.payload_bytes());
            self.tally = Arc::default();
            self.destination =
                Some(Destination::mapped((region, lent), selection, &context.allocators.memory));
            self.base.begin(announce, selection);
            if let Some(destination) = &self.destination {
                self.forwarding.begin(announce, selection, destination);
            }
            self.machine.handle_lent();
            return Ok(Ok(()));
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
        if let Some(ServerBytes::ToCopy(bytes)) = memory
            && let (Some(connection), Some(destination)) =
                (context.links.get(Link::Origin), &self.destination)
        {
            let (selection, sink) = (Arc::clone(selection), destination.sink(&announce.id));
            let version = (announce.id.epoch, announce.id.version);
            let counters = Arc::clone(&self.counters);
            let task = connection.copy_server_memory((context.id, version), bytes, selection, sink, counters);
            self.tasks.push(AbortOnDrop(task));
        }
        Ok(Ok(()))
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
        self.sharing = match announce.lending.as_deref() {
            None => Sharing::Network,
            Some(Lending::Chunks(reason)) => Sharing::Chunks(*reason),
            Some(Lending::Memory(_)) => Sharing::Chunks(NotLent::Declined),
        };
        let Some(Lending::Memory(_)) = announce.lending.as_deref() else { return None };
        let continues_in_buffers = resumes && self.is_in_lent_buffers();
        let is_elsewhere = self.lent.is_some() || continues_in_buffers || allocators.device.is_some();
        let payload_bytes = selection.manifest().payload_bytes();
        let opened = match memory {
            None => Err(ServerMemoryError::Missing),
            Some(memory) if is_elsewhere || selection.has_parts() => {
                memory.into_read_only(payload_bytes).map(ServerBytes::ToCopy)
            }
            Some(memory) => {
                let mapped = memory.into_private(payload_bytes);
                mapped.map(|(region, lent)| ServerBytes::Mapped(region, lent))
            }
        };
        match &opened {
            Ok(ServerBytes::Mapped(..)) => self.sharing = Sharing::Mapped,
            Ok(ServerBytes::ToCopy(_)) => self.sharing = Sharing::Copied,
            Err(error) => {
                let version = &announce.id;
                tracing::warn!(%version, %error, "The memory of a version cannot be mapped: it is received in chunks.");
                self.machine.decline_memory();
            }
        }
        opened.ok()
    }

    /// Handles the end of a copy from lent memory to the places of `version`.
    pub(crate) fn handle_copied(&mut self, version: (Epoch, Version), copied: Result<(), SinkError>) {
        let is_current = self
            .machine
            .current_version()
            .is_some_and(|current| (current.epoch, current.version) == version);
        match copied {
            Ok(()) if is_current => {
                self.machine.handle_lent();
                self.counters.set_verified(self.counters.get().payload_bytes);
            }
            Err(error) if is_current => {
                let device = self.destination.as_ref().and_then(Destination::device);
                self.fail(&TransferError::chunk(error.into(), device));
            }
            _ => {}
        }
    }
}
