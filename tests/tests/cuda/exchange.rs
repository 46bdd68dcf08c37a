//! Exchanges a tensor between processes by every kind of shared memory: a transfer for the sweep.

use std::{error::Error, fmt, sync::Arc, time::Duration};

use tensor_relay_device::cuda::{
    CudaEngine,
    share::{self, Exported, Imported, IpcMemory},
};
use tokio::time::timeout;

use crate::{
    journey::{End, Failure, LEN, pattern, short_timeouts},
    neighbour::take,
};

/// Exports a tensor in place and as a copy, imports the copy, and imports the memory that a neighbour exported, which
/// has the same bytes. Returns these bytes. The engine is added to `engines`, so that it survives a failure.
pub(crate) async fn exchange_a_tensor(
    engines: &mut Vec<Arc<CudaEngine>>,
    neighbours_memory: IpcMemory,
) -> Result<Vec<u8>, Failure> {
    let engine = CudaEngine::open(0, short_timeouts())?;
    engines.push(engine.clone());
    let end = End::of(engine)?;
    end.fill(&pattern(LEN)).await?;
    drop(share::export(&end.engine, std::slice::from_ref(&end.memory))?);

    let buffer = end.engine.shared_buffer(LEN as u64)?;
    buffer.fill(vec![(end.memory.clone(), 0)])?;
    let copy = take(&end.engine, Exported::Fd(buffer.export()?))?;
    drop(buffer);
    let in_place = take(&end.engine, Exported::Ipc(neighbours_memory))?;
    let read = [read(&end, copy).await?, read(&end, in_place).await?];
    let [copy, in_place] = read;
    assert!(copy == in_place, "both have the same bytes");
    Ok(copy)
}

async fn read(end: &End, imported: Imported) -> Result<Vec<u8>, Failure> {
    let Imported { memory, returned } = imported;
    let bytes = end.with(memory).read().await;
    // An engine whose device failed does not return it.
    let is_returned = timeout(Duration::from_secs(2), returned.wait()).await.is_ok();
    match is_returned || end.engine.failure().is_some() {
        true => bytes,
        false => Err(NotReturned.into()),
    }
}

/// Imported memory was not returned to its owner although it was dropped.
#[derive(Debug)]
pub(crate) struct NotReturned;

impl fmt::Display for NotReturned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Imported memory was not returned to its owner.")
    }
}

impl Error for NotReturned {}
