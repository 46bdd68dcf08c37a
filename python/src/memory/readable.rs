//! Our tensors on a GPU, and the streams that read them.

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

/// Memory of a GPU that tensors of ours lie in, for as long as anything refers to it.
///
/// Every copy to it has ended, so it may be read at once on any stream, without waiting. When the last reference
/// goes, the memory is used again only after the streams on which it was read are past what is on them by then.
#[derive(Debug)]
pub(crate) struct Reading {
    buffer: DeviceBuffer,
    /// Keeps the snapshot counted as held.
    snapshot: Option<client::Snapshot>,
    /// Each once. Programs have few streams.
    streams: Mutex<Vec<Stream>>,
    pid: u32,
}

impl Reading {
    /// The memory of `snapshot`; `None` where it is on the host, or has no byte.
    pub(crate) fn of(snapshot: client::Snapshot) -> Option<Arc<Self>> {
        // A snapshot that landed in memory of the session's own has one piece of it.
        let buffer = snapshot.device_tensors().next()?.1.buffer().clone();
        Some(Arc::new(Self::new(buffer, Some(snapshot))))
    }

    fn new(buffer: DeviceBuffer, snapshot: Option<client::Snapshot>) -> Self {
        Self { buffer, snapshot, streams: Mutex::default(), pid: std::process::id() }
    }

    pub(crate) fn device(&self) -> &Device {
        self.buffer.device()
    }

    /// Keeps the memory until `stream` is past what reads it.
    pub(crate) fn read_on(&self, stream: Stream) {
        stream.join(&mut self.streams.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The same for a stream that its user names: it is asked first whether it is one of this GPU.
    ///
    /// # Errors
    /// `ValueError` for one of another GPU, `BufferError` for one that the GPU knows no place of: it is none of its streams,
    /// or is captured into a graph.
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

    /// The process that opened the GPU, where this is another one: its fork, which has none.
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
            // Its user keeps it no longer than until this returns, so its place is recorded now. The engine's thread needs
            // no GIL for that, and microseconds; should it hang, it is waited for as long as its `answer_timeout`.
            if let Err(error) = memory.in_use_until(handle) {
                tracing::warn!("{} bytes of a GPU are never used again: {error}", memory.len_bytes());
                mem::forget(Arc::clone(&memory));
            }
        }
        if !kept.is_empty() {
            memory.give_up(kept.iter().map(Stream::handle).collect());
        }
    }
}

/// Some bytes of a memory that is read.
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

    /// A copy of them on the host.
    pub(crate) async fn to_host(&self) -> Result<VolatileBytes, CopyFailed> {
        Ok(copies::to_host(&self.reading.buffer, self.range.clone()).await?.into())
    }

    /// A copy of them on the same device.
    pub(crate) async fn copy(&self) -> Result<Self, CopyFailed> {
        let buffer = copies::copy(&self.reading.buffer, self.range.clone()).await?;
        Ok(Self::new(&Arc::new(Reading::new(buffer, None)), 0..self.len() as u64))
    }
}
