//! Memory that is kept free for what does not allocate here.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{
    cgroup::{self, Fit},
    host_memory::AllocError,
};

/// The bytes of all reservations of this process.
static RESERVED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Memory of the container's limit (cgroup) that this process may still need: what regions are allocated leaves it free.
/// Until this is dropped.
///
/// Why: the kernel kills a process that exceeds the limit, and what a connection needs at worst it needs long after it was
/// accepted. What has been used of a reservation counts twice, as used and as reserved; so less is handed out than there
/// is, never more. Without a limit it is a number and costs nothing.
#[derive(Debug)]
#[must_use = "it counts until this is dropped"]
pub struct Reservation(u64);

impl Reservation {
    /// Reserves `bytes`, whether there is room or not.
    pub fn new(bytes: u64) -> Self {
        RESERVED_BYTES.fetch_add(bytes, Ordering::Relaxed);
        Self(bytes)
    }

    /// Reserves `bytes` if the container's limit has room for them beside all other reservations. Reads a few files of the
    /// kernel: tens of microseconds.
    ///
    /// # Errors
    /// [`AllocError::OverCgroup`].
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

/// The memory limit of this process's container, in bytes: the smallest of its cgroup and all parents. `None` without one.
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
