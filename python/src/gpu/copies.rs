//! Copies between a GPU and the host, for a Python thread that waits for them.

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
    2 * (fence_timeout + copy_timeout) + TIMEOUT_MARGIN
}

/// The margin beyond the engines' own copy deadlines.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(5);

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
        "A copy on {device} had not ended after {} s. The device hangs, or other copies use all of its slots: look for its \
         first error in the log, and restart this process if there is none.",
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

/// Copies `range` of `buffer` to `out`, which must have the same length.
pub(crate) async fn read(buffer: &DeviceBuffer, range: Range<u64>, out: &mut [u8]) -> Result<(), CopyFailed> {
    let source = buffer.source();
    let reads = pieces(range, buffer.device()).map(|piece| read_piece(&*source, piece, buffer.device()));
    let mut reads = stream::iter(reads).buffered(COPIES_AT_ONCE);
    let mut offset = 0;
    while let Some(read) = reads.next().await {
        let read = read?;
        out[offset..offset + read.len()].copy_from_slice(&read);
        offset += read.len();
    }
    Ok(())
}

/// A page-aligned copy of `range` on the host.
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

/// `range`, divided into pieces of a slot's size.
fn pieces(range: Range<u64>, device: &Device) -> impl Iterator<Item = Range<u64>> + use<> {
    let (Range { start, end }, step) = (range, device.slots().slot_bytes());
    (start..end).step_by(step).map(move |start| start..end.min(start + step as u64))
}
