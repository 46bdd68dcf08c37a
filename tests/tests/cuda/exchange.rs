//! Exports and imports a tensor by both kinds of shared GPU memory: a transfer for the sweep.

use std::{error::Error, fmt, sync::Arc, time::Duration};

use tensor_relay_device::cuda::{
    CudaEngine,
    share::{self, Exported, Imported, IpcMemory},
};
use tokio::time::timeout;

use crate::{
    endpoint::{Endpoint, Failure, LEN, pattern, short_timeouts},
    neighbour::import,
};

/// Exports a tensor in place and as a copy. Imports the copy, and the memory that a neighbour exported with the same
/// bytes. Returns the bytes read. The engine is added to `engines`, so that it survives a failure.
pub(crate) async fn exchange_a_tensor(
    engines: &mut Vec<Arc<CudaEngine>>,
    neighbours_memory: IpcMemory,
) -> Result<Vec<u8>, Failure> {
    let engine = CudaEngine::open(0, short_timeouts())?;
    engines.push(engine.clone());
    let endpoint = Endpoint::of(engine)?;
    endpoint.fill(&pattern(LEN)).await?;
    drop(share::export(&endpoint.engine, std::slice::from_ref(&endpoint.memory))?);

    let buffer = endpoint.engine.shared_buffer(LEN as u64)?;
    buffer.fill(vec![(endpoint.memory.clone(), 0)])?;
    let copy = import(&endpoint.engine, Exported::Fd(buffer.export()?))?;
    drop(buffer);
    let in_place = import(&endpoint.engine, Exported::Ipc(neighbours_memory))?;
    let [copy, in_place] = [read(&endpoint, copy).await?, read(&endpoint, in_place).await?];
    assert!(copy == in_place, "the copy and the neighbour's memory have the same bytes");
    Ok(copy)
}

async fn read(endpoint: &Endpoint, imported: Imported) -> Result<Vec<u8>, Failure> {
    let Imported { memory, returned } = imported;
    let bytes = endpoint.with(memory).read().await;
    // An engine whose device has failed does not return imported memory.
    let is_returned = timeout(Duration::from_secs(2), returned.wait()).await.is_ok();
    match is_returned || endpoint.engine.failure().is_some() {
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
