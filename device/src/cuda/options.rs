use std::time::Duration;

/// The options of a [`CudaEngine`](super::CudaEngine).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaOptions {
    /// The most device memory that the engine may hold, together with what it keeps for reuse. Default: no bound but
    /// the device's own. Set it on a device shared with others.
    pub memory_limit_bytes: Option<u64>,
    /// The deadline of a copy, after which it has failed. Default 10 s: a slot's copy takes
    /// milliseconds, even on a busy and slow bus, so a copy this late is stuck.
    ///
    /// The copy's slot and memory stay untouched until the device says that it has ended after all. If it has not after
    /// [`HANG_FACTOR`] times as long, the device hangs, and the engine refuses all further work.
    pub copy_timeout: Duration,
    /// The time that a copy may wait for the caller's stream before it begins. Default 20 s: a training step takes
    /// seconds.
    pub fence_timeout: Duration,
    /// The time that a call waits for the engine's thread: to allocate, to lock pages, to record an event. Default
    /// 60 s: locking pages takes about a third of a second for a GiB, the rest microseconds, unless the driver hangs.
    pub answer_timeout: Duration,
}

impl CudaOptions {
    /// The time that returned memory may wait for a caller's stream after the engine is dropped, before it is leaked:
    /// as long as a copy.
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

/// The multiple of [`CudaOptions::copy_timeout`] after which a copy means that the device hangs.
pub const HANG_FACTOR: u32 = 6;
