use std::time::Duration;

/// The options of a [`CudaEngine`](super::CudaEngine).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaOptions {
    /// The most device memory that the engine may allocate, its cache included. Default: no limit but the device's
    /// memory. Set it on a device shared with other programs.
    pub memory_limit_bytes: Option<u64>,
    /// The time after which an unfinished copy is reported as failed. Default 10 s: a slot's copy takes milliseconds,
    /// even on a busy and slow bus, so a copy this late is stuck.
    ///
    /// The copy's slot and memory are not reused until the device reports that the copy has ended after all. If a copy
    /// takes longer than [`HANG_FACTOR`] times this timeout, the device counts as hung, and the engine refuses all
    /// further work.
    pub copy_timeout: Duration,
    /// The time that a copy or an export may wait for callers' streams before it begins. Default 20 s: a training step
    /// takes seconds.
    pub fence_timeout: Duration,
    /// The time that a call waits for the engine's thread: to open the device, to allocate, to record an event.
    /// Default 60 s: locking pages takes about a third of a second for each GiB, opening the device less than a second,
    /// all else milliseconds at most, unless the device is busy or the driver hangs.
    pub answer_timeout: Duration,
}

impl CudaOptions {
    /// The time that returned memory may wait for a caller's stream after the engine is dropped, before it is leaked:
    /// as long as a copy may wait for a stream.
    pub(super) fn last_wait(&self) -> Duration {
        self.fence_timeout
    }
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            memory_limit_bytes: None,
            copy_timeout: Duration::from_secs(10),
            fence_timeout: Duration::from_secs(20),
            answer_timeout: Duration::from_secs(60),
        }
    }
}

/// The multiple of [`CudaOptions::copy_timeout`] after which an unfinished copy means that the device hangs.
pub const HANG_FACTOR: u32 = 6;
