//! Reservations of memory that is allocated outside of this crate.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{
    cgroup::{self, Fit},
    host_memory::AllocError,
};

/// The bytes of all reservations of this process.
static RESERVED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Part of the container's memory limit (cgroup) that large regions leave free for other allocations of this process,
/// until this is dropped: [`HostMemory::allocate`](crate::HostMemory::allocate) fails rather than use it.
///
/// Why: the kernel kills a process that exceeds the limit, and a connection may need its memory long after it was
/// accepted. Memory that was allocated out of a reservation counts twice, as used and as reserved; so regions get less
/// than the limit has, never more. Without a limit a reservation is only a number and costs nothing.
#[derive(Debug)]
#[must_use = "it counts until this is dropped"]
pub struct Reservation(u64);

impl Reservation {
    /// Reserves `bytes`, whether or not the limit has room for them.
    pub fn new(bytes: u64) -> Self {
        RESERVED_BYTES.fetch_add(bytes, Ordering::Relaxed);
        Self(bytes)
    }

    /// Reserves `bytes` if the container's limit has room for them and all other reservations. Reads a few files of the
    /// kernel, which takes tens of microseconds.
    ///
    /// # Errors
    /// [`AllocError::OverCgroup`] if the limit does not have that room.
    pub fn fitting(bytes: u64) -> Result<Self, AllocError> {
        let reservation = Self::new(bytes);
        match cgroup::fits(reserved_bytes()) {
            Fit::Well | Fit::Closely { .. } => Ok(reservation),
            Fit::Not { free, limit } => {
                let others = reserved_bytes().saturating_sub(bytes);
                let free_bytes = free.saturating_sub(others);
                Err(AllocError::OverCgroup { asked_bytes: bytes, free_bytes, limit_bytes: limit })
            }
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        RESERVED_BYTES.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// The bytes of all reservations of this process.
pub(crate) fn reserved_bytes() -> u64 {
    RESERVED_BYTES.load(Ordering::Relaxed)
}

/// The memory limit of this process's container, in bytes: the smallest limit of its cgroup and all parents. `None` if
/// there is no limit, or it cannot be read.
pub fn container_memory_bytes() -> Option<u64> {
    cgroup::limit_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_counts_until_it_is_dropped() {
        let before = reserved_bytes();
        let one = Reservation::new(3 << 20);
        let other = Reservation::fitting(1 << 20).expect("a megabyte is free");
        assert_eq!(reserved_bytes() - before, 4 << 20);
        drop((one, other));
        assert_eq!(reserved_bytes(), before);
    }
}
