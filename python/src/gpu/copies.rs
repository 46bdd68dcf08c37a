//! Copies between a GPU and the host on behalf of a waiting Python thread.

use crate::errors::Kind;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use pyo3::prelude::*;
use std::{ops::Range, time::Duration};
use tensor_relay_device::{
    AllocError, Device, DeviceBuffer, HostMemory, Region, SinkError, Source, SourceError, cuda::CudaOptions,
};
use tokio::time::timeout;

/// The maximum number of concurrent copies: one in flight, one being completed, one in reserve.
const COPIES_AT_ONCE: usize = 3;

/// The deadline of one copy. It exceeds the engine's own deadlines, whose errors give the reason, and includes the wait
/// for the slot of another copy.
fn copy_timeout() -> Duration {
    let CudaOptions { fence_timeout, copy_timeout, .. } = CudaOptions::default();
    2 * (fence_timeout + copy_timeout) + MARGIN
}

/// The margin beyond the engines' own copy deadlines.
const MARGIN: Duration = Duration::from_secs(5);

/// Why bytes cannot be copied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyFailed {
    #[error(transparent)]
    Memory(#[from] AllocError),
    #[error(transparent)]
    Read(#[from] SourceError),
    #[error(transparent)]
    Write(#[from] SinkError),
    #[error(
        "A copy on {device} had not ended after {} s. The device hangs, or other copies keep all of its slots: look for its \
         first error, and start this process again if there is no other.",
        copy_timeout().as_secs()
    )]
    TimedOut { device: Box<str> },
}

impl CopyFailed {
    pub(crate) fn raise(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Memory(_) => Kind::NoRoom.raise(py, self),
            _ => Kind::Other.raise(py, self),
        }
    }
}

/// Copies `range` of `buffer` to `out`, which is as long.
pub(crate) async fn read(buffer: &DeviceBuffer, range: Range<u64>, out: &mut [u8]) -> Result<(), CopyFailed> {
    let source = buffer.source();
    let reads = pieces(range, buffer.device()).map(|piece| read_piece(&*source, piece, buffer.device()));
    let mut reads = stream::iter(reads).buffered(COPIES_AT_ONCE);
    let mut at = 0;
    while let Some(read) = reads.next().await {
        let read = read?;
        out[at..at + read.len()].copy_from_slice(&read);
        at += read.len();
    }
    Ok(())
}

/// A copy of `range` on the host, which begins on a page.
pub(crate) async fn to_host(buffer: &DeviceBuffer, range: Range<u64>) -> Result<Region, CopyFailed> {
    let mut region = HostMemory::new(u64::MAX).allocate((range.end - range.start) as usize)?;
    read(buffer, range, &mut region).await?;
    Ok(region)
}

/// A copy of `range` on the same device, by way of the host.
pub(crate) async fn copy(buffer: &DeviceBuffer, range: Range<u64>) -> Result<DeviceBuffer, CopyFailed> {
    let (device, start) = (buffer.device(), range.start);
    let copy = device.allocate((range.end - range.start) as usize)?;
    let (source, sink) = (buffer.source(), copy.sink());
    for piece in pieces(range, device) {
        let to = piece.start - start..piece.end - start;
        let bytes = read_piece(&*source, piece, device).await?;
        let written = async {
            let mut target = sink.open(to).await?;
            target.copy_from_slice(&bytes);
            sink.write(target).await
        };
        timeout(copy_timeout(), written).await.map_err(|_| late(device))??;
    }
    Ok(copy)
}

async fn read_piece(source: &dyn Source, piece: Range<u64>, device: &Device) -> Result<Bytes, CopyFailed> {
    let read = timeout(copy_timeout(), source.read(piece)).await;
    Ok(read.map_err(|_| late(device))??)
}

fn late(device: &Device) -> CopyFailed {
    CopyFailed::TimedOut { device: device.name().into() }
}

/// `range` in pieces of as much as a slot holds.
fn pieces(range: Range<u64>, device: &Device) -> impl Iterator<Item = Range<u64>> + use<> {
    let (Range { start, end }, step) = (range, device.slots().slot_bytes());
    (start..end).step_by(step).map(move |start| start..end.min(start + step as u64))
}
