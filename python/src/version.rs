//! The tensors of a version that is about to be published: copied, or lent to the server, from the host or GPUs.

use crate::{
    errors::Kind,
    gpu::copies::{self, CopyFailed},
    guards::{Guard, guard},
    memory::{Foreign, Returning, no_bytes},
    runtime,
    tensors_in::Memory,
    wait::wait,
};
use bytes::Bytes;
use pyo3::prelude::*;
use std::{error::Error, io, mem};
use tensor_relay_device::{Device, DeviceBuffer, LentBytes};
use tensor_relay_server::{
    Borrowed, DeviceError, LendError, Publishable, StageError, Staged, Staging, TensorSpec,
    sidecar::{SealError, SealedVersion, TensorWriter, Terms},
};
use tokio::runtime::Handle;

/// Tensors to be published, whose memory can be read.
pub(crate) struct ReadableTensors {
    pub(crate) specs: Vec<TensorSpec>,
    /// The memory of each spec; `None` for an alias.
    pub(crate) memory: Vec<Option<Memory>>,
    /// The guards of the tensors whose memory is borrowed.
    pub(crate) guards: Vec<Option<Guard>>,
    /// The number of bytes of GPU tensors copied so far, by their own libraries.
    pub(crate) copied_bytes: u64,
    /// Receives lent GPU tensors back.
    pub(crate) returning: Returning,
}

/// A version to be published, with its size and the number of bytes copied for it.
pub(crate) struct Version {
    pub(crate) publishable: Publishable,
    pub(crate) payload_bytes: u64,
    pub(crate) copied_bytes: u64,
}

/// Tensors that all lie on one GPU.
pub(crate) struct OnOneGpu {
    pub(crate) device: Device,
    pub(crate) tensors: Vec<(TensorSpec, DeviceBuffer)>,
    /// The number of bytes copied so far, by the tensors' own libraries.
    pub(crate) copied_bytes: u64,
    /// Receives the tensors back.
    pub(crate) returning: Returning,
}

/// Where the tensors of a version lie.
enum Place {
    Host,
    Gpu(Device),
    /// On several devices: `name` is a tensor that lies on `place`, while the version's first tensor lies on `first`.
    Several {
        name: String,
        place: String,
        first: String,
    },
}

impl ReadableTensors {
    /// Copies all tensors to the relay's own memory, on `device` or on the host; those of `device` within it.
    ///
    /// # Errors
    /// `NoRoomError`, `PublishError`, and the errors of GPUs.
    pub(crate) fn stage(
        self,
        py: Python<'_>,
        staging: &Staging,
        device: Option<&Device>,
    ) -> PyResult<Version> {
        let copied_bytes = self.copied_bytes;
        let publishable: Publishable = match self.place() {
            Place::Gpu(on) => {
                let (tensors, returning) = self.into_buffers(&on);
                let copied = Publishable::from_device(staging, tensors, vec![], device);
                let copied = wait(py, copied)?.map_err(|error| of_device(py, &error))?;
                returning.give_back(py);
                copied
            }
            Place::Host | Place::Several { .. } => {
                let runtime = runtime::handle(py)?;
                let staged = py.detach(|| self.copy_each(staging, runtime));
                let returning = self.give_back(py);
                let staged = staged.map_err(|error| match error {
                    StageError::Fill(failed) => failed.raise(py),
                    error => of_stage(py, &error),
                })?;
                returning.give_back(py);
                match device {
                    None => staged.into(),
                    Some(device) => wait(py, staged.onto(device))?.map_err(|error| of_device(py, &error))?,
                }
            }
        };
        let payload_bytes = publishable.manifest().payload_bytes();
        Ok(Version { publishable, payload_bytes, copied_bytes: copied_bytes + payload_bytes })
    }

    /// Lends all tensors to the server, which reads each chunk whenever it is sent. Tensors on the host that are not
    /// contiguous are copied now.
    ///
    /// # Errors
    /// `NoRoomError` when there is no memory for these copies; `UnsupportedTensorError` when the tensors lie on several
    /// devices; `PublishError`.
    pub(crate) fn lend(mut self, py: Python<'_>, staging: &Staging) -> PyResult<Version> {
        let (mut copied_bytes, guards) = (self.copied_bytes, mem::take(&mut self.guards));
        let lent = match self.place() {
            Place::Host => py.detach(|| self.lend_host(staging)).map(|(borrowed, copied)| {
                copied_bytes += copied;
                borrowed
            }),
            Place::Gpu(on) => {
                let (tensors, _) = self.into_buffers(&on);
                py.detach(|| Borrowed::from_device(staging, tensors, vec![])).map_err(Some)
            }
            Place::Several { name, place, first } => {
                let message = format!(
                    "tensor {name} lies on {place}, and others of its version on {first}: with hold=\"borrow\" all \
                     tensors must lie in one place; use hold=\"stage\", or publish the tensors of each place as a topic \
                     of their own"
                );
                drop(self.give_back(py));
                return Err(Kind::UnsupportedTensor.raise(py, message));
            }
        };
        let borrowed = guard(py, lent.map_err(|error| of_lend(py, error.as_ref()))?, guards);
        let payload_bytes = borrowed.manifest().payload_bytes();
        Ok(Version { publishable: borrowed.into(), payload_bytes, copied_bytes })
    }

    /// The tensors, if all of them lie on one GPU.
    ///
    /// # Errors
    /// The unchanged tensors, if they do not.
    pub(crate) fn on_one_gpu(self) -> Result<OnOneGpu, Self> {
        let Place::Gpu(device) = self.place() else { return Err(self) };
        let copied_bytes = self.copied_bytes;
        let (tensors, returning) = self.into_buffers(&device);
        Ok(OnOneGpu { device, tensors, copied_bytes, returning })
    }

    /// Copies all tensors to sealed shared memory, which a sidecar reads; those of GPUs by way of the host. Also
    /// returns the number of bytes copied to make tensors contiguous before.
    ///
    /// # Errors
    /// `NoRoomError`, `PublishError`, and the errors of GPUs.
    pub(crate) fn seal(self, py: Python<'_>, terms: &Terms) -> PyResult<(SealedVersion, u64)> {
        let runtime = runtime::handle(py)?;
        let copied_bytes = self.copied_bytes + self.strided_bytes();
        let sealed = py.detach(|| self.copy_and_seal(terms, runtime));
        let returning = self.give_back(py);
        let sealed = sealed.map_err(|error| of_seal(py, &error))?;
        returning.give_back(py);
        Ok((sealed, copied_bytes))
    }

    fn copy_and_seal(&self, terms: &Terms, runtime: &Handle) -> Result<SealedVersion, SealError<WriteError>> {
        SealedVersion::new(terms, self.specs.clone(), vec![], |index, out| match &self.memory[index] {
            None => Ok(()),
            Some(Memory::Host(memory)) if memory.is_dense() => Ok(memory.write_to(out)?),
            Some(Memory::Host(memory)) => {
                Ok(out.write(&gathered(memory).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?)?)
            }
            Some(Memory::Gpu(buffer)) => runtime.block_on(write_from_gpu(buffer, out)),
        })
    }

    /// The size of the tensors on the host that are not contiguous.
    fn strided_bytes(&self) -> u64 {
        let lengths = self.memory.iter().flatten().map(|memory| match memory {
            Memory::Host(memory) if !memory.is_dense() => memory.len() as u64,
            _ => 0,
        });
        lengths.sum()
    }

    fn place(&self) -> Place {
        let tensors = self.specs.iter().zip(&self.memory);
        let mut tensors = tensors.filter_map(|(spec, memory)| Some((spec, memory.as_ref()?)));
        let Some((_, first)) = tensors.next() else { return Place::Host };
        if let Some((spec, memory)) = tensors.find(|(_, memory)| !is_same_place(memory, first)) {
            let (place, first) = (place_of(memory).to_owned(), place_of(first).to_owned());
            return Place::Several { name: spec.name.as_str().to_owned(), place, first };
        }
        match first {
            Memory::Host(_) => Place::Host,
            Memory::Gpu(buffer) => Place::Gpu(buffer.device().clone()),
        }
    }

    /// Copies the tensors in pieces, on several threads.
    fn copy_each(&self, staging: &Staging, runtime: &Handle) -> Result<Staged, StageError<CopyFailed>> {
        Staged::copied(staging, self.specs.clone(), vec![], |index, start, out| {
            match &self.memory[index] {
                Some(Memory::Host(memory)) => memory.copy_to(start, out),
                Some(Memory::Gpu(buffer)) => {
                    let range = start as u64..(start + out.len()) as u64;
                    runtime.block_on(copies::read(buffer, range, out))?;
                }
                None => {}
            }
            Ok(())
        })
    }

    /// Lends tensors on the host. Also returns the number of bytes copied to make tensors contiguous.
    ///
    /// # Errors
    /// `None` when there is no memory for these copies.
    fn lend_host(self, staging: &Staging) -> Result<(Borrowed, u64), Option<LendError>> {
        let mut copied_bytes = 0;
        let mut tensors = Vec::with_capacity(self.specs.len());
        for (spec, memory) in self.specs.into_iter().zip(self.memory) {
            let bytes = match memory {
                Some(Memory::Host(memory)) if memory.is_dense() => memory.into_foreign_bytes().into(),
                Some(Memory::Host(memory)) => {
                    copied_bytes += memory.len() as u64;
                    gathered(&memory).ok_or(None)?.into()
                }
                _ => LentBytes::from(Bytes::new()),
            };
            tensors.push((spec, bytes));
        }
        Ok((Borrowed::from_tensors(staging, tensors, vec![])?, copied_bytes))
    }

    /// The tensors, all of which lie on `device`, and their receiver.
    fn into_buffers(self, device: &Device) -> (Vec<(TensorSpec, DeviceBuffer)>, Returning) {
        let buffer = |memory| match memory {
            Some(Memory::Gpu(buffer)) => buffer,
            _ => no_bytes(device),
        };
        (self.specs.into_iter().zip(self.memory.into_iter().map(buffer)).collect(), self.returning)
    }

    /// Returns the lent memory to its owners: that of the host at once, that of GPUs when the last copy has ended.
    fn give_back(self, py: Python<'_>) -> Returning {
        for memory in self.memory.into_iter().flatten() {
            match memory {
                Memory::Host(memory) => memory.give_back(py),
                Memory::Gpu(buffer) => drop(buffer),
            }
        }
        self.returning
    }
}

/// Why a tensor could not be copied to memory that will be sealed.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error(transparent)]
    Write(#[from] io::Error),
    #[error(transparent)]
    Copy(#[from] CopyFailed),
}

/// The size of the pieces in which a GPU tensor is copied to the host, on its way to memory that will be sealed.
const PIECE_BYTES: u64 = 64 << 20;

async fn write_from_gpu(buffer: &DeviceBuffer, out: &mut TensorWriter<'_>) -> Result<(), WriteError> {
    let end = buffer.len_bytes();
    let mut start = 0;
    while start < end {
        let next = end.min(start + PIECE_BYTES);
        out.write(&copies::to_host(buffer, start..next).await?)?;
        start = next;
    }
    Ok(())
}

fn is_same_place(memory: &Memory, other: &Memory) -> bool {
    match (memory, other) {
        (Memory::Host(_), Memory::Host(_)) => true,
        (Memory::Gpu(buffer), Memory::Gpu(other)) => buffer.device().is(other.device()),
        _ => false,
    }
}

fn place_of(memory: &Memory) -> &str {
    match memory {
        Memory::Host(_) => "the host",
        Memory::Gpu(buffer) => buffer.device().name(),
    }
}

/// A contiguous copy; `None` when there is no memory for it.
fn gathered(memory: &Foreign) -> Option<Bytes> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(memory.len()).ok()?;
    bytes.resize(memory.len(), 0);
    memory.copy_to(0, &mut bytes);
    Some(bytes.into())
}

fn of_stage<E: Error>(py: Python<'_>, error: &StageError<E>) -> PyErr {
    match error {
        StageError::Memory(_) => Kind::NoRoom.raise(py, error),
        _ => Kind::Publish.raise(py, error),
    }
}

fn of_seal(py: Python<'_>, error: &SealError<WriteError>) -> PyErr {
    match error {
        SealError::Memory { .. } => Kind::NoRoom.raise(py, error),
        SealError::Fill(WriteError::Write(cause))
            if matches!(cause.kind(), io::ErrorKind::OutOfMemory | io::ErrorKind::StorageFull) =>
        {
            Kind::NoRoom.raise(py, error)
        }
        SealError::Fill(WriteError::Copy(error)) => error.raise(py),
        _ => Kind::Publish.raise(py, error),
    }
}

fn of_device(py: Python<'_>, error: &DeviceError) -> PyErr {
    match error {
        DeviceError::Memory(_) => Kind::NoRoom.raise(py, error),
        DeviceError::Tensors(error) => of_lend(py, Some(error)),
        _ => Kind::Publish.raise(py, error),
    }
}

fn of_lend(py: Python<'_>, error: Option<&LendError>) -> PyErr {
    match error {
        Some(LendError::Stage(error)) => of_stage(py, error),
        Some(error) => Kind::Publish.raise(py, error),
        None => Kind::NoRoom.raise(
            py,
            "there is no memory for a contiguous copy of a tensor whose elements do not lie side by side",
        ),
    }
}
