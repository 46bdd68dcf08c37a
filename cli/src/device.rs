//! Opens, watches and closes the device that `--device` selects.

use crate::{
    args::{DeviceArgs, DeviceName},
    exit::UsageError,
    units,
};
use anyhow::Context;
use std::time::Duration;
use tensor_relay_device::{
    Capacity, CopyEngine, Device,
    cuda::{self, CudaEngine, CudaOptions},
};

/// The granularity of slots: each begins on a page.
const PAGE_BYTES: u64 = 4096;

/// The minimum number of slots, so that one is copied while the other is sent or received.
const SLOTS_MIN: u64 = 2;

/// The interval of checks whether a GPU still works.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The deadline for copies to complete at the end of the program. A copy takes milliseconds.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Opens the device in `args`, with slots for chunks of `chunk_bytes`. Returns `None` for host memory, without loading
/// a CUDA driver.
pub(crate) async fn open(args: &DeviceArgs, chunk_bytes: u32) -> anyhow::Result<Option<Device>> {
    let DeviceName::Cuda(ordinal) = args.device else { return Ok(None) };
    let capacity = slot_capacity(args.pinned_mem, chunk_bytes)?;
    let options = CudaOptions { memory_limit_bytes: args.gpu_mem_limit, ..CudaOptions::default() };
    // Creating a context and page-locking memory takes up to a second.
    let open = move || open_cuda(ordinal, options, capacity);
    let device = tokio::task::spawn_blocking(open).await??;
    let Capacity { slots, slot_bytes } = device.slots().capacity();
    let model = device.engine::<CudaEngine>().map_or("", |engine| &engine.info().name);
    tracing::info!(
        "Opened {} ({model}), with {slots} page-locked slots of {slot_bytes} bytes.",
        device.name()
    );
    Ok(Some(device))
}

/// Waits until `device` has failed permanently, and returns the error. Never returns for host memory.
pub(crate) async fn failure(device: Option<&Device>) -> anyhow::Error {
    let engine = device.and_then(|device| device.engine::<CudaEngine>());
    let Some(engine) = engine else { return std::future::pending().await };
    loop {
        if let Some(error) = engine.failure() {
            return anyhow::Error::new(error.clone()).context(format!("{} has failed", engine.name()));
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

/// Waits at the end of the program until all opened GPUs are released, with their memory and contexts. After
/// [`CLOSE_TIMEOUT`], e.g. with a hanging copy, it returns, and the driver releases the remaining GPUs.
pub(crate) fn close_all() {
    if !cuda::all_closed(CLOSE_TIMEOUT) {
        tracing::info!("A GPU was still in use when the program ended.");
    }
}

fn open_cuda(ordinal: usize, options: CudaOptions, capacity: Capacity) -> anyhow::Result<Device> {
    let engine = CudaEngine::open(ordinal, options).with_context(|| {
        format!("--device cuda:{ordinal} cannot be used; --device cpu works without a GPU")
    })?;
    let pinned_bytes = (capacity.slots * capacity.slot_bytes) as u64;
    let device = Device::new(engine, capacity).with_context(|| {
        format!("cannot page-lock {}; choose a smaller --pinned-mem", units::bytes(pinned_bytes))
    })?;
    Ok(device)
}

/// The number and size of slots for chunks of `chunk_bytes` that fit into `pinned_bytes`.
fn slot_capacity(pinned_bytes: u64, chunk_bytes: u32) -> Result<Capacity, UsageError> {
    let stride_bytes = u64::from(chunk_bytes).next_multiple_of(PAGE_BYTES);
    match pinned_bytes / stride_bytes {
        slots @ SLOTS_MIN.. => Ok(Capacity { slots: slots as usize, slot_bytes: chunk_bytes as usize }),
        _ => Err(UsageError(format!(
            "--pinned-mem is {pinned_bytes} bytes, but must hold two chunks of {chunk_bytes} bytes, so that one is \
             copied while the other is sent or received: set it to {} or more",
            units::bytes(SLOTS_MIN * stride_bytes),
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_memory_is_divided_into_slots() {
        let slots = |pinned_bytes, chunk_bytes| {
            slot_capacity(pinned_bytes, chunk_bytes).map(|capacity| capacity.slots)
        };
        assert_eq!(slots(256 << 20, 4 << 20).ok(), Some(64));
        assert_eq!(slots(8 << 20, 4 << 20).ok(), Some(2));
        assert_eq!(slots(1 << 20, 256).ok(), Some(256), "a slot begins on a page");
        let refused = slot_capacity((8 << 20) - 1, 4 << 20).unwrap_err();
        for number in ["8388607 bytes", "4194304 bytes", "8.00 MiB"] {
            assert!(refused.0.contains(number), "{refused}");
        }
    }

    #[tokio::test]
    async fn host_memory_needs_no_device() {
        let args = DeviceArgs { device: DeviceName::Cpu, gpu_mem_limit: Some(1), pinned_mem: 1 };
        assert!(open(&args, 4 << 20).await.unwrap().is_none());
    }
}
