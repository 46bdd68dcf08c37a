use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering},
};

use super::error::CudaError;

/// The counters of a [`CudaEngine`](super::CudaEngine).
///
/// The counters are read one after the other, so the sums may differ by the copies that begin or end in between.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CudaStats {
    /// Copies submitted to the device, at least in part: the sum of `copies_ended`, `copies_in_flight` and
    /// `copies_leaked`.
    pub copies_begun: u64,
    /// Copies that the device reported as ended, successful or not.
    pub copies_ended: u64,
    /// Copies in flight.
    pub copies_in_flight: u64,
    /// Copies in flight that have exceeded the timeout. Their slots and memory are in quarantine: they are released
    /// when the device reports the end of the copy.
    pub copies_quarantined: u64,
    /// Copies whose end is unknown because the device failed. Their slots and memory are leaked.
    pub copies_leaked: u64,
    /// Bytes that were copied off the device, by copies that ended.
    pub out_bytes: u64,
    /// Bytes that were copied to the device, by copies that ended.
    pub in_bytes: u64,
    /// Bytes that were copied within the device: staged versions, and memory shared with other processes.
    pub within_bytes: u64,
    /// Bytes of copies in quarantine.
    pub quarantined_bytes: u64,
    /// Leaked bytes: the device may still access them, or the driver refused to release them.
    pub leaked_bytes: u64,
    /// Page-locked bytes of slots.
    pub pinned_bytes: u64,
    /// Bytes of the engine's own device memory in use. The sum with `cached_bytes` never exceeds the limit.
    pub device_bytes: u64,
    /// Bytes of device memory kept for reuse.
    pub cached_bytes: u64,
    /// Completion signals from the device, of which one may be for several copies.
    pub signals: u64,
    /// Copies whose end was found by polling, without a signal: few, unless signals are lost.
    pub ends_found_by_polling: u64,
}

/// The counters, shared by the engine and its thread. Only the thread changes them.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) copies_begun: Counter,
    pub(super) copies_ended: Counter,
    pub(super) copies_quarantined: Counter,
    pub(super) copies_leaked: Counter,
    pub(super) out_bytes: Counter,
    pub(super) in_bytes: Counter,
    pub(super) within_bytes: Counter,
    pub(super) quarantined_bytes: Counter,
    pub(super) leaked_bytes: Counter,
    pub(super) pinned_bytes: Counter,
    pub(super) device_bytes: Counter,
    pub(super) cached_bytes: Counter,
    pub(super) signals: Counter,
    pub(super) ends_found_by_polling: Counter,
    /// The error with which the device failed, if it did.
    pub(super) failure: OnceLock<CudaError>,
}

impl Counters {
    pub(super) fn read(&self) -> CudaStats {
        let (ended, leaked) = (self.copies_ended.get(), self.copies_leaked.get());
        let begun = self.copies_begun.get();
        CudaStats {
            copies_begun: begun,
            copies_ended: ended,
            copies_in_flight: begun.saturating_sub(ended + leaked),
            copies_quarantined: self.copies_quarantined.get(),
            copies_leaked: leaked,
            out_bytes: self.out_bytes.get(),
            in_bytes: self.in_bytes.get(),
            within_bytes: self.within_bytes.get(),
            quarantined_bytes: self.quarantined_bytes.get(),
            leaked_bytes: self.leaked_bytes.get(),
            pinned_bytes: self.pinned_bytes.get(),
            device_bytes: self.device_bytes.get(),
            cached_bytes: self.cached_bytes.get(),
            signals: self.signals.get(),
            ends_found_by_polling: self.ends_found_by_polling.get(),
        }
    }
}

/// A counter that one thread changes and any thread may read.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn sub(&self, n: u64) {
        self.0.fetch_sub(n, Ordering::Relaxed);
    }

    pub(super) fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
