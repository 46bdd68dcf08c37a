//! Why there is no memory.

use crate::cuda::CudaError;
use std::io;

/// Why there is no memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// The budget that the operator set has no room. Evicting the cache would not have helped.
    #[error(
        "{asked_bytes} bytes of host memory were asked for while {in_use_bytes} bytes of the budget of \
         {budget_bytes} bytes are in use. Raise the memory budget, or release versions that are still held"
    )]
    OverBudget {
        /// What was asked for, in bytes.
        asked_bytes: u64,
        /// What living regions hold.
        in_use_bytes: u64,
        /// The most that may be held.
        budget_bytes: u64,
    },
    /// The memory limit of the container has no room: the system would kill this process when the memory is used.
    #[error(
        "{asked_bytes} bytes of host memory were asked for, and the memory limit of the container (cgroup) of {limit_bytes} \
         bytes leaves {free_bytes}. Raise that limit, or release versions that are still held"
    )]
    OverCgroup {
        /// What was asked for, in bytes.
        asked_bytes: u64,
        /// What the limit leaves.
        free_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The operating system has no room.
    #[error(
        "The operating system refused to map {len} bytes ({source}). Check the free memory of this host, and the limits on \
         address space (ulimit -v) and on the number of mappings (vm.max_map_count)"
    )]
    Os {
        /// The bytes that were to be mapped.
        len: usize,
        /// What the system said.
        source: io::Error,
    },
    /// The device memory budget that the operator set has no room. Giving up what is kept for reuse would not have helped.
    #[error(
        "{asked_bytes} bytes of {device}'s memory were asked for while {in_use_bytes} bytes of the budget of \
         {budget_bytes} bytes are in use. Raise the device memory budget, or release versions that are still held"
    )]
    OverDeviceBudget {
        /// The device.
        device: String,
        /// What was asked for, in bytes.
        asked_bytes: u64,
        /// What is held.
        in_use_bytes: u64,
        /// The most that may be held.
        budget_bytes: u64,
    },
    /// The device has no room.
    #[error(
        "{device} has no room for {asked_bytes} bytes: {free_bytes} of its {total_bytes} bytes are free. Release memory of \
         this or another process (see nvidia-smi), or take another device"
    )]
    DeviceFull {
        /// The device.
        device: String,
        /// What was asked of the device, in bytes.
        asked_bytes: u64,
        /// What nobody has.
        free_bytes: u64,
        /// What the device has.
        total_bytes: u64,
    },
    /// The driver refused to lock pages for slots.
    #[error(
        "The driver refused to lock {asked_bytes} bytes of host memory for {device}. Make fewer or smaller slots, and check \
         the free memory of this host and the limit on locked memory (ulimit -l)"
    )]
    PageLocking {
        /// The device.
        device: String,
        /// The bytes that were to be locked.
        asked_bytes: u64,
        /// What the driver said.
        source: CudaError,
    },
    /// The device failed, or its engine does not answer.
    #[error("{device} gives no memory: {source}")]
    Device {
        /// The device.
        device: String,
        /// What it said.
        source: CudaError,
    },
    /// A pool without room for a byte was asked for: waiting for its slots would never end.
    #[error(
        "A pool of {slots} slots of {slot_bytes} bytes can carry nothing. Configure at least one slot of at least \
         one byte"
    )]
    EmptyPool {
        /// The slots asked for.
        slots: usize,
        /// The bytes asked for in each.
        slot_bytes: usize,
    },
}

impl AllocError {
    /// Whether the same might be given a little later: a device that did not answer may have been held up.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Device { source: CudaError::NoAnswer { .. }, .. })
    }
}
