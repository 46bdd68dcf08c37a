//! Received tensors on a GPU, and the streams that read them.

use super::stream::Stream;
use crate::gpu::{
    self,
    copies::{self, CopyFailed},
};
use pyo3::{exceptions::PyBufferError, prelude::*};
use std::{
    mem,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};
use tensor_relay_client as client;
use tensor_relay_device::{Device, DeviceBuffer, VolatileBytes, cuda::CudaMemory};

/// The GPU memory of a received version's tensors, and the streams that read it.
///
/// Every copy to the memory has ended, so any stream may read it at once, without waiting. When the last reference is
/// dropped, the memory is reused only after the work that is queued on these streams at that time.
#[derive(Debug)]
pub(crate) struct Reading {
    buffer: DeviceBuffer,
    /// Keeps the snapshot counted as held.
    snapshot: Option<client::Snapshot>,
    /// The streams, without duplicates. Programs have few.
    streams: Mutex<Vec<Stream>>,
    pid: u32,
}

impl Reading {
    /// The memory of `snapshot`; `None` if it is on the host, or empty.
    pub(crate) fn of(snapshot: client::Snapshot) -> Option<Arc<Self>> {
        // All tensors of a snapshot in the session's own memory lie in one buffer.
        let buffer = snapshot.device_tensors().next()?.1.buffer().clone();
        Some(Arc::new(Self::new(buffer, Some(snapshot))))
    }

    fn new(buffer: DeviceBuffer, snapshot: Option<client::Snapshot>) -> Self {
        Self { buffer, snapshot, streams: Mutex::default(), pid: std::process::id() }
    }

    pub(crate) fn device(&self) -> &Device {
        self.buffer.device()
    }

    /// Declares that `stream` reads the memory.
    pub(crate) fn read_on(&self, stream: Stream) {
        stream.add_to(&mut self.streams.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// As [`read_on`](Self::read_on), for a stream that a user passes, after a check that it is one of this GPU.
    ///
    /// # Errors
    /// `ValueError` for a stream of another GPU; `BufferError` if the driver cannot record an event on it, because it
    /// is not a stream of this GPU or is being captured into a graph.
    pub(crate) fn check_and_read_on(&self, py: Python<'_>, stream: Stream) -> PyResult<()> {
        let engine = gpu::engine(self.device());
        stream.check_device(py, engine.info().ordinal)?;
        if !stream.is_default() {
            let fence = py.detach(|| engine.fence(stream.handle()));
            fence.map_err(|error| {
                let message = format!("the stream cannot be waited for on {}: {error}", self.device().name());
                PyBufferError::new_err(message)
            })?;
        }
        self.read_on(stream);
        Ok(())
    }

    /// The process that opened the GPU, if this process is a fork of it, in which the GPU cannot be used.
    pub(crate) fn forked_from(&self) -> Option<u32> {
        (self.pid != std::process::id()).then_some(self.pid)
    }

    fn memory(&self) -> Option<Arc<CudaMemory>> {
        self.buffer.memory()
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let streams = mem::take(self.streams.get_mut().unwrap_or_else(PoisonError::into_inner));
        if self.forked_from().is_some() {
            mem::forget((self.buffer.clone(), self.snapshot.take(), streams));
            return;
        }
        let Some(memory) = self.memory().filter(|_| !streams.is_empty()) else { return };
        let (kept, unkept): (Vec<_>, Vec<_>) = streams.into_iter().partition(Stream::is_kept);
        for handle in unkept.iter().map(Stream::handle) {
            // The user may destroy the stream when this returns, so its queued work is recorded now. The engine's
            // thread needs microseconds for that, and no GIL; if it hangs, this waits for its `answer_timeout`.
            if let Err(error) = memory.record_use(handle) {
                tracing::warn!("{} bytes of a GPU are never reused: {error}", memory.len_bytes());
                mem::forget(Arc::clone(&memory));
            }
        }
        if !kept.is_empty() {
            memory.release_after(kept.iter().map(Stream::handle).collect());
        }
    }
}

/// A range of a [`Reading`]'s memory.
#[derive(Debug, Clone)]
pub(crate) struct Readable {
    pub(crate) reading: Arc<Reading>,
    range: Range<u64>,
}

impl Readable {
    pub(crate) fn new(reading: &Arc<Reading>, range: Range<u64>) -> Self {
        Self { reading: Arc::clone(reading), range }
    }

    /// The number of bytes.
    pub(crate) fn len(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }

    pub(crate) fn device(&self) -> &Device {
        self.reading.device()
    }

    /// The address of the first byte on the device.
    pub(super) fn address(&self) -> usize {
        let start = self.reading.memory().map_or(0, |memory| memory.address());
        (start + self.range.start) as usize
    }

    /// A copy of the bytes on the host.
    pub(crate) async fn to_host(&self) -> Result<VolatileBytes, CopyFailed> {
        Ok(copies::to_host(&self.reading.buffer, self.range.clone()).await?.into())
    }

    /// A copy of the bytes on the same device.
    pub(crate) async fn copy(&self) -> Result<Self, CopyFailed> {
        let buffer = copies::copy(&self.reading.buffer, self.range.clone()).await?;
        Ok(Self::new(&Arc::new(Reading::new(buffer, None)), 0..self.len() as u64))
    }
}
