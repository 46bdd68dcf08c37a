//! Host memory lent by a tensor of another library.
#![allow(
    unsafe_code,
    reason = "reads and writes the memory of other libraries' tensors, where they say it is"
)]

use super::{footprint::Footprint, import::Capsule, strides::ContiguousRuns};
use crate::interpreter;
use pyo3::{buffer::PyUntypedBuffer, prelude::*};
use std::{fmt, io, ptr::NonNull};
use tensor_relay_client::Dtype;
use tensor_relay_device::VolatileBytes;
use tensor_relay_server::sidecar::TensorWriter;

/// A tensor of another library: its memory, and what keeps that alive until this is dropped.
///
/// Whoever made it has checked what can be checked; that the memory is there is the word of the tensor's own library. Its
/// users may write there while it is read, so it is only ever copied from: a copy may then be of both, and that is all.
pub(crate) struct Foreign {
    pub(super) start: NonNull<u8>,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) len: usize,
    pub(super) runs: ContiguousRuns,
    pub(super) is_writable: bool,
    /// `None` only while it is dropped.
    pub(super) keep: Option<Keep>,
}

/// The size of one copy on the way to a writer. Measured with 512 MiB written to shared memory (AMD EPYC, 1 MiB of L2):
/// 104 ms through a buffer of this size, 95 ms without one.
const WRITE_BYTES: usize = 256 << 10;

/// Keeps the memory alive. Dropped with the GIL held.
pub(super) enum Keep {
    #[expect(dead_code, reason = "is dropped in time")]
    Capsule(Capsule),
    #[expect(dead_code, reason = "is dropped in time")]
    Buffer(PyUntypedBuffer),
}

/// The identity of memory that tied weights share.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    address: usize,
    dtype: Dtype,
    shape: Vec<u64>,
    offsets: Vec<(u64, isize)>,
}

// SAFETY: the memory is plain bytes, which have no thread; what keeps it is only touched again with the GIL held.
unsafe impl Send for Foreign {}
// SAFETY: through a shared reference it is only read.
unsafe impl Sync for Foreign {}

impl Foreign {
    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub(crate) fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The size of its elements in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Their address, on the host or on a device.
    pub(super) fn address(&self) -> usize {
        self.start.as_ptr().addr()
    }

    /// Whether they lie side by side, in order.
    pub(crate) fn is_dense(&self) -> bool {
        self.runs.is_one()
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// The addresses that it occupies, on this GPU or on the host; `None` without memory.
    pub(super) fn footprint(&self, gpu: Option<usize>) -> Option<Footprint> {
        (self.len > 0).then(|| Footprint::new(gpu, self.address(), &self.runs))
    }

    /// Takes its elements for some of another dtype of the same size, where its own library has no word for that.
    pub(crate) fn taken_for(mut self, dtype: Dtype) -> Self {
        self.dtype = dtype;
        self
    }

    /// The identity that other names of the same memory share; `None` without memory.
    pub(crate) fn identity(&self) -> Option<Identity> {
        (self.len > 0).then(|| Identity {
            address: self.start.as_ptr().addr(),
            dtype: self.dtype,
            shape: self.shape.clone(),
            offsets: self.runs.outer().to_vec(),
        })
    }

    /// Copies all elements to `out`, in order. Needs no GIL.
    ///
    /// # Panics
    /// When `out` has another length.
    pub(crate) fn copy_to(&self, out: &mut [u8]) {
        assert_eq!(out.len(), self.len, "as long as the tensor");
        if self.len == 0 {
            return;
        }
        for (offset, piece) in self.runs.offsets().zip(out.chunks_exact_mut(self.runs.bytes)) {
            // SAFETY: a whole run begins there.
            unsafe { self.copy_piece(offset, piece) };
        }
    }

    /// Copies `bytes` over all elements, in order. Needs no GIL.
    ///
    /// # Panics
    /// When it has another length, or nobody may write to the tensor.
    pub(crate) fn copy_from(&mut self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len, "as long as the tensor");
        assert!(self.is_writable, "asked before");
        if self.len == 0 {
            return;
        }
        for (offset, piece) in self.runs.offsets().zip(bytes.chunks_exact(self.runs.bytes)) {
            // SAFETY: as in `copy_to`.
            let to = unsafe { self.start.offset(offset) };
            // SAFETY: a run of elements begins at `to`, and may be written, says the tensor's library. `copy_from` of a
            // pointer minds an overlap, so `bytes` may be anybody's.
            unsafe { to.copy_from(NonNull::from(piece).cast(), piece.len()) };
        }
    }

    /// Lends its bytes, which are copied whenever they are read.
    ///
    /// # Panics
    /// When they do not lie side by side.
    pub(crate) fn into_volatile(self) -> VolatileBytes {
        assert!(self.is_dense(), "asked before");
        let (start, len) = (self.start, self.len);
        // SAFETY: the tensor's library vouches that so many bytes lie there, and stay while `self` keeps the tensor. Only
        // `Exclusive` makes references to such bytes, and not of this tensor, which is given up here.
        unsafe { VolatileBytes::new(start, len, self) }
    }

    /// Writes its bytes to `out`, by way of a buffer that stays in the processor's cache. Needs no GIL.
    ///
    /// # Panics
    /// When they do not lie side by side.
    pub(crate) fn write_to(&self, out: &mut TensorWriter<'_>) -> io::Result<()> {
        assert!(self.is_dense(), "asked before");
        let mut buffer = vec![0; self.len.min(WRITE_BYTES)];
        for start in (0..self.len).step_by(WRITE_BYTES) {
            let piece = &mut buffer[..self.len.min(start + WRITE_BYTES) - start];
            // SAFETY: it ends within the one run that the tensor has.
            unsafe { self.copy_piece(start as isize, piece) };
            out.write(piece)?;
        }
        Ok(())
    }

    /// Copies a part of a run of elements to `out`.
    ///
    /// # Safety
    /// So many bytes of a run lie at `offset` from where the tensor begins.
    unsafe fn copy_piece(&self, offset: isize, out: &mut [u8]) {
        // SAFETY: the tensor's library vouches that its elements lie where shape and strides say; one is there, says the
        // caller.
        let from = unsafe { self.start.offset(offset) };
        // SAFETY: so many bytes of the run follow, likewise. `out` is exclusive, so they do not overlap.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut *out).cast(), out.len()) };
    }

    /// Gives the memory back now, where the interpreter is at hand.
    pub(crate) fn give_back(mut self, _py: Python<'_>) {
        drop(self.keep.take());
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // The last reader may be the runtime's thread, and giving memory back needs the GIL.
        if let Some(keep) = self.keep.take() {
            interpreter::later(move |_| drop(keep));
        }
    }
}

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Foreign")
            .field("dtype", &self.dtype)
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

/// A tensor that is received into right where it lies.
///
/// The one place where references to a user's memory are made: a chunk is written, decoded and verified where it belongs,
/// and a copy of every byte would cost what receiving in place saves. Who says `atomic=False` promises that nobody else
/// touches the tensor until the call returns.
#[derive(Debug)]
pub(crate) struct Exclusive(Foreign);

impl Exclusive {
    /// `tensor`, unless nobody may write to it or its bytes do not lie side by side.
    pub(crate) fn new(tensor: Foreign) -> Option<Self> {
        (tensor.is_writable && tensor.is_dense()).then_some(Self(tensor))
    }

    /// Gives the memory back now, where the interpreter is at hand.
    pub(crate) fn give_back(self, py: Python<'_>) {
        self.0.give_back(py);
    }
}

impl AsMut<[u8]> for Exclusive {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: so many initialised bytes lie side by side there, may be written, and stay while the tensor is kept
        // (`new`). Nobody else reaches them meanwhile: that is what a user promises who says `atomic=False`.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.as_ptr(), self.0.len) }
    }
}
