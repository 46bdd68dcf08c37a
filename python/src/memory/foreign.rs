//! Host memory lent by a tensor of another library.
#![allow(
    unsafe_code,
    reason = "reads and writes the memory of other libraries' tensors, at the addresses that they report"
)]

use super::{import::Capsule, layout::Layout};
use crate::interpreter;
use pyo3::{buffer::PyUntypedBuffer, prelude::*};
use std::{io, ops::Deref, ptr::NonNull};
use tensor_relay_device::{ForeignBytes, VolatileBytes};
use tensor_relay_server::sidecar::TensorWriter;

/// A tensor of another library: its memory, and the object that keeps the memory alive until this is dropped.
///
/// Its constructors check what can be checked; the tensor's own library guarantees that the memory exists. Python code
/// may write to the memory while it is read, so its bytes are only copied: such a copy may mix old and new bytes.
/// References to them are made by [`Exclusive`] alone.
#[derive(Debug)]
pub(crate) struct Foreign {
    pub(super) layout: Layout,
    /// `None` only during `drop`.
    pub(super) keep: Option<Keep>,
}

/// The size of the buffer for writes. Measured with 512 MiB written to shared memory (AMD EPYC, 1 MiB of L2): 104 ms
/// through a buffer of this size, 95 ms without a buffer.
const WRITE_BYTES: usize = 256 << 10;

/// Keeps the memory alive. Dropped with the GIL held.
#[derive(Debug)]
pub(super) enum Keep {
    #[expect(dead_code, reason = "needed only for its `Drop`")]
    Capsule(Capsule),
    #[expect(dead_code, reason = "needed only for its `Drop`")]
    Buffer(PyUntypedBuffer),
}

// SAFETY: the memory is plain bytes, which any thread may access; `keep` is only dropped, with the GIL held.
unsafe impl Send for Foreign {}
// SAFETY: through a shared reference the memory is only read.
unsafe impl Sync for Foreign {}

impl Deref for Foreign {
    type Target = Layout;

    fn deref(&self) -> &Layout {
        &self.layout
    }
}

impl Foreign {
    /// Copies as many bytes as `out` has, of all elements in order, from the byte `start` on. Needs no GIL.
    ///
    /// # Panics
    /// If the tensor ends before that.
    pub(crate) fn copy_to(&self, start: usize, mut out: &mut [u8]) {
        assert!(out.len() <= self.len - start, "within the tensor");
        if out.is_empty() {
            return;
        }
        let run_bytes = self.runs.bytes;
        let mut skipped = start % run_bytes;
        for offset in self.runs.offsets(start / run_bytes) {
            let (piece, rest) = out.split_at_mut(out.len().min(run_bytes - skipped));
            // SAFETY: a run begins at `offset`, and has `skipped` bytes and those of `piece`.
            unsafe { self.copy_piece(offset + skipped as isize, piece) };
            (out, skipped) = (rest, 0);
            if out.is_empty() {
                return;
            }
        }
    }

    /// Copies `bytes` over all elements, in order. Needs no GIL.
    ///
    /// # Panics
    /// If `bytes` has another length, or the tensor is read-only.
    pub(crate) fn copy_from(&mut self, bytes: &VolatileBytes) {
        assert_eq!(bytes.len(), self.len, "as long as the tensor");
        assert!(self.is_writable, "the caller has checked this");
        if self.len == 0 {
            return;
        }
        for (index, offset) in self.runs.offsets(0).enumerate() {
            // SAFETY: the tensor has as many bytes as its runs together, and `bytes` as many as the tensor.
            let from = unsafe { bytes.as_ptr().add(index * self.runs.bytes) };
            // SAFETY: the tensor's library vouches that a run begins at this offset.
            let to = unsafe { self.start.offset(offset) };
            // SAFETY: `bytes` has this many from `from` on, as above. The tensor's library vouches that a run of this
            // length begins at `to`, and may be written. They may overlap, which `copy_from` of a pointer allows.
            unsafe { to.copy_from(from, self.runs.bytes) };
        }
    }

    /// Lends the tensor's bytes, which are copied whenever they are read.
    ///
    /// # Panics
    /// If the tensor is not contiguous.
    pub(crate) fn into_foreign_bytes(self) -> ForeignBytes {
        assert!(self.is_dense(), "the caller has checked this");
        ForeignBytes::new(self.address(), self.len, self)
    }

    /// Writes the tensor's bytes to `out`, by way of a buffer that stays in the processor's cache. Needs no GIL.
    ///
    /// # Panics
    /// If the tensor is not contiguous.
    pub(crate) fn write_to(&self, out: &mut TensorWriter<'_>) -> io::Result<()> {
        assert!(self.is_dense(), "the caller has checked this");
        let mut buffer = vec![0; self.len.min(WRITE_BYTES)];
        for start in (0..self.len).step_by(WRITE_BYTES) {
            let piece = &mut buffer[..self.len.min(start + WRITE_BYTES) - start];
            // SAFETY: the piece lies within the tensor's only run.
            unsafe { self.copy_piece(start as isize, piece) };
            out.write(piece)?;
        }
        Ok(())
    }

    /// Copies a part of a run of elements to `out`.
    ///
    /// # Safety
    /// `out.len()` bytes of one run begin `offset` bytes after the tensor's start.
    unsafe fn copy_piece(&self, offset: isize, out: &mut [u8]) {
        // SAFETY: the tensor's library vouches that its elements lie where shape and strides say, and the caller that
        // an element lies at `offset`.
        let from = unsafe { self.start.offset(offset) };
        // SAFETY: both vouch likewise for `out.len()` bytes. `out` is exclusive, so they do not overlap.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut *out).cast(), out.len()) };
    }

    /// Returns the memory to its library at once, with the GIL held.
    pub(crate) fn give_back(mut self, _py: Python<'_>) {
        drop(self.keep.take());
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // The last reader may be the runtime's thread, and returning memory needs the GIL.
        if let Some(keep) = self.keep.take() {
            interpreter::enqueue(move |_| drop(keep));
        }
    }
}

/// A tensor that is received into directly.
///
/// Only this type makes references to a user's memory: chunks are written, decoded and verified in their final place,
/// without a copy. A user of `atomic=False` promises that no other code uses the tensor until the call returns.
#[derive(Debug)]
pub(crate) struct Exclusive(Foreign);

impl Exclusive {
    /// `tensor`, unless it is read-only or not contiguous.
    pub(crate) fn new(tensor: Foreign) -> Option<Self> {
        (tensor.is_writable && tensor.is_dense()).then_some(Self(tensor))
    }

    /// Returns the memory to its library at once, with the GIL held.
    pub(crate) fn give_back(self, py: Python<'_>) {
        self.0.give_back(py);
    }
}

impl AsMut<[u8]> for Exclusive {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: `new` has checked that the bytes are writable and contiguous; the tensor's library vouches that they
        // are initialised, and stay valid while the tensor is kept. No other code uses them meanwhile: a user of
        // `atomic=False` promises that.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.as_ptr(), self.0.len) }
    }
}
