//! Allocation errors.

use crate::cuda::CudaError;
use std::io;

/// Why memory could not be allocated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// The operator's budget has no room, even with an empty cache.
    #[error(
        "{asked_bytes} bytes of host memory were asked for while {in_use_bytes} bytes of the budget of \
         {budget_bytes} bytes are in use. Raise the memory budget, or release versions that are still held"
    )]
    OverBudget {
        /// The requested bytes.
        asked_bytes: u64,
        /// The bytes in use.
        in_use_bytes: u64,
        /// The limit.
        budget_bytes: u64,
    },
    /// The container's memory limit has no room: the system would kill this process when the memory is used.
    #[error(
        "{asked_bytes} bytes of host memory were asked for, but only {free_bytes} bytes remain within the container's \
         (cgroup) memory limit of {limit_bytes} bytes after what is in use and what this process reserves for \
         connections. Raise that limit, or release versions that are still held"
    )]
    OverCgroup {
        /// The requested bytes.
        asked_bytes: u64,
        /// The free bytes within the limit.
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
        /// The bytes to be mapped.
        len: usize,
        /// The system's error.
        source: io::Error,
    },
    /// The operator's device memory budget has no room, even with an empty cache.
    #[error(
        "{asked_bytes} bytes of {device}'s memory were asked for while {in_use_bytes} bytes of the budget of \
         {budget_bytes} bytes are in use. Raise the device memory budget, or release versions that are still held"
    )]
    OverDeviceBudget {
        /// The device.
        device: String,
        /// The requested bytes.
        asked_bytes: u64,
        /// The bytes in use.
        in_use_bytes: u64,
        /// The limit.
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
        /// The requested bytes.
        asked_bytes: u64,
        /// The free bytes.
        free_bytes: u64,
        /// The total bytes.
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
        /// The bytes to be locked.
        asked_bytes: u64,
        /// The driver's error.
        source: CudaError,
    },
    /// The device failed, its driver refused the allocation, or its engine does not answer.
    #[error("{device} could not allocate memory: {source}")]
    Device {
        /// The device.
        device: String,
        /// The device's error.
        source: CudaError,
    },
    /// A pool without capacity was requested: waiting for its slots would never end.
    #[error(
        "A pool of {slots} slots of {slot_bytes} bytes has no capacity. Configure at least one slot of at least one byte"
    )]
    EmptyPool {
        /// The requested number of slots.
        slots: usize,
        /// The requested length of each.
        slot_bytes: usize,
    },
}

impl AllocError {
    /// Whether a retry may succeed without anything of this process being released in between: a device that did not
    /// answer may have been blocked.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Device { source: CudaError::NoAnswer { .. }, .. })
    }
}
