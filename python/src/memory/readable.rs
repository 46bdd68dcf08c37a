//! Our tensors on a GPU: who may still read them, and on which streams.
#![allow(unsafe_code, reason = "tells the engine of a GPU on which streams of others its memory is read")]

use super::stream::Stream;
use crate::gpu::copies::{self, CopyFailed};
use bytes::Bytes;
use std::{
    mem,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};
use tensor_relay_client as client;
use tensor_relay_device::{Device, DeviceBuffer, cuda::CudaMemory};

/// Memory of a GPU that tensors of ours lie in, for as long as anything refers to it.
///
/// Every copy to it has ended, so it may be read at once on any stream: nobody waits for anything. When the last reference
/// goes, the memory is used again only after the streams on which it was read are past what is on them by then.
#[derive(Debug)]
pub(crate) struct Reading {
    buffer: DeviceBuffer,
    /// What counts as held while it lives.
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
        if let Some(memory) = self.memory()
            && !streams.is_empty()
        {
            let streams = streams.into_iter().map(Stream::into_parts).collect();
            // SAFETY: each stream lives while its keeper does, or for as long as anybody has a tensor that is read on it,
            // which was so until now, as its user promised (`Stream`).
            unsafe { memory.give_up(streams) };
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

    /// How many.
    pub(crate) fn len(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }

    pub(crate) fn device(&self) -> &Device {
        self.reading.device()
    }

    /// Where they begin, on the device.
    pub(super) fn address(&self) -> usize {
        let start = self.reading.memory().map_or(0, |memory| memory.address());
        (start + self.range.start) as usize
    }

    /// A copy of them on the host.
    pub(crate) async fn to_host(&self) -> Result<Bytes, CopyFailed> {
        copies::to_host(&self.reading.buffer, self.range.clone()).await
    }

    /// A copy of them on the same device.
    pub(crate) async fn copy(&self) -> Result<Self, CopyFailed> {
        let buffer = copies::copy(&self.reading.buffer, self.range.clone()).await?;
        Ok(Self::new(&Arc::new(Reading::new(buffer, None)), 0..self.len() as u64))
    }
}
