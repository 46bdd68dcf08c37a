//! [`SealedVersion`]: tensors copied once into sealed memory that the server reads in place.

use std::io;
use tensor_relay_device::{Memfd, SealedFd};
use tensor_relay_protocol::{
    LayoutError, Limits, Manifest, Metadata, Spread, Tensor, TensorSpec, sidecar::MemoryKind,
};

/// A server's terms for versions, sent when a producer connects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terms {
    pub(super) chunk_bytes: u32,
    pub(super) memories: Vec<MemoryKind>,
}

/// A version in sealed memory, ready for the local server.
#[derive(Debug)]
pub struct SealedVersion {
    pub(super) manifest: Manifest,
    /// `None` for an empty payload.
    pub(super) memory: Option<SealedFd>,
    copied_bytes: u64,
}

/// Why tensors cannot be copied into sealed memory. `E` is the error of the callback that fills them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SealError<E: std::error::Error + 'static> {
    /// The tensors cannot be laid out together.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The system has no shared memory for the tensors.
    #[error(
        "cannot allocate {bytes} bytes of shared memory: {source}. It counts as memory of this container, whose limit \
         may be too low"
    )]
    Memory {
        /// The requested bytes.
        bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// Their bytes could not be read.
    #[error(transparent)]
    Fill(E),
    /// A tensor has fewer bytes than its dtype and shape require.
    #[error(
        "tensor {name} takes {expected_bytes} bytes by its dtype and shape, but {given_bytes} were written"
    )]
    WrongSize {
        /// The tensor.
        name: Box<str>,
        /// Its size by dtype and shape.
        expected_bytes: u64,
        /// The number of bytes written.
        given_bytes: u64,
    },
}

impl SealedVersion {
    /// Lays `specs` out and calls `fill` to write the bytes of each tensor, given its index in `specs`, except for
    /// aliases. Blocks while copying; do not call it on an executor's thread.
    ///
    /// # Errors
    /// [`SealError`]; then the memory is released.
    pub fn new<E: std::error::Error>(
        terms: &Terms,
        specs: Vec<TensorSpec>,
        metadata: Metadata,
        mut fill: impl FnMut(usize, &mut TensorWriter<'_>) -> Result<(), E>,
    ) -> Result<Self, SealError<E>> {
        let stored: Vec<bool> = specs.iter().map(|spec| spec.alias_of.is_none()).collect();
        let manifest = Manifest::layout(specs, metadata, terms.chunk_bytes, &Limits::default())?;
        let bytes = manifest.payload_bytes();
        if bytes == 0 {
            return Ok(Self { manifest, memory: None, copied_bytes: 0 });
        }
        let failed = |source| SealError::Memory { bytes, source };
        let mut memfd = Memfd::new(bytes).map_err(failed)?;
        for (index, tensor) in manifest.tensors().iter().enumerate().filter(|(index, _)| stored[*index]) {
            let mut writer = TensorWriter { memfd: &mut memfd, tensor, written_bytes: 0 };
            fill(index, &mut writer).map_err(SealError::Fill)?;
            let (expected_bytes, given_bytes) = (tensor.byte_len(), writer.written_bytes);
            if given_bytes < expected_bytes {
                let name = tensor.name.as_str().into();
                return Err(SealError::WrongSize { name, expected_bytes, given_bytes });
            }
        }
        let copied_bytes = memfd.written_bytes();
        // Padding stays zero. It ends at a multiple of 256, so on the last page of its tensor: each page was written,
        // which the server requires (`Sealed::map`).
        Ok(Self { manifest, memory: Some(memfd.seal().map_err(failed)?), copied_bytes })
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The number of bytes copied for it.
    pub fn copied_bytes(&self) -> u64 {
        self.copied_bytes
    }
}

/// Writes the bytes of one tensor, in order.
#[derive(Debug)]
pub struct TensorWriter<'a> {
    memfd: &'a mut Memfd,
    tensor: &'a Tensor,
    written_bytes: u64,
}

impl TensorWriter<'_> {
    /// Appends bytes of the tensor.
    ///
    /// # Errors
    /// If `bytes` exceed what remains of the tensor, or the system has no memory.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let written = self.written_bytes..self.written_bytes + bytes.len() as u64;
        if written.end > self.tensor.byte_len() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "more bytes were written than the tensor has",
            ));
        }
        for (number, piece) in (0..).zip(self.tensor.ranges()) {
            let Some(spread) = Spread::into_piece(self.tensor, number) else {
                self.memfd.write_at(bytes, piece.start + written.start)?;
                continue;
            };
            spread.try_each_run(written.clone(), |range, at| {
                let run = (range.start - written.start) as usize..(range.end - written.start) as usize;
                self.memfd.write_at(&bytes[run], piece.start + at)
            })?;
        }
        self.written_bytes = written.end;
        Ok(())
    }
}
