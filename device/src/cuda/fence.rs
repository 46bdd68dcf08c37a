use std::{
    any::Any,
    ffi::c_void,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::watch;

use super::{
    error::CudaError,
    inbox::{Command, Inbox},
};

/// A stream of the caller's, on which kernels use the tensors that are handed over, and what keeps it.
///
/// Every holder of a clone may use the stream: an engine's thread too, when it comes to a question that nobody waits
/// for any more ([`CudaError::NoAnswer`]). Nothing here ever waits for a caller's stream with a thread, nor lets it wait for
/// more than it is asked to.
#[derive(Clone)]
pub struct StreamHandle {
    raw: usize,
    /// Dropped by the engine's thread, as a rule: that must not wait for a lock that somebody holds who asks this engine for
    /// something. `None` for the default stream, which nobody destroys.
    _keeper: Option<Arc<dyn Any + Send + Sync>>,
}

impl StreamHandle {
    /// The legacy default stream of the device's primary context: where kernels run that name no stream, PyTorch's
    /// default among them.
    pub const LEGACY: Self = Self { raw: 1, _keeper: None };

    /// The stream with this handle: a `CUstream`, which is also what a `cudaStream_t` is, and what PyTorch calls
    /// `stream.cuda_stream`. Null is the legacy default stream.
    ///
    /// Refuses the per-thread default stream (2), which is another one on the engine's thread.
    ///
    /// # Safety
    ///
    /// The handle is a stream of the device's primary context, and it is not destroyed while `keeper` lives.
    pub unsafe fn from_raw(handle: *mut c_void, keeper: impl Any + Send + Sync) -> Result<Self, CudaError> {
        match handle.expose_provenance() {
            PER_THREAD => Err(CudaError::PerThreadStream),
            raw => Ok(Self { raw, _keeper: Some(Arc::new(keeper)) }),
        }
    }

    pub(super) fn raw<T>(&self) -> *mut T {
        std::ptr::with_exposed_provenance_mut(self.raw)
    }
}

impl PartialEq for StreamHandle {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl fmt::Debug for StreamHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamHandle({:#x})", self.raw)
    }
}

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

/// A place on a stream: passed when all that was on the stream when it was made has ended.
///
/// An event behind a safe face. Clones are the same place.
#[derive(Clone)]
pub struct Fence {
    shared: Arc<Shared>,
}

impl Fence {
    pub(super) fn new(id: u64, verdict: Verdict, inbox: Inbox) -> Self {
        Self { shared: Arc::new(Shared { id, verdict, inbox }) }
    }

    /// Resolves when the fence is passed; fails when the device does. It waits for as long as the stream's work takes:
    /// give it a deadline. Cancel safe.
    pub async fn passed(&self) -> Result<(), CudaError> {
        let mut verdict = self.shared.verdict.clone();
        let seen = verdict.wait_for(Option::is_some).await.ok().and_then(|seen| seen.clone());
        seen.unwrap_or_else(|| Err(CudaError::Stopped { device: self.shared.inbox.device().into() }))
    }

    /// Whether the fence is passed, as far as is known: no driver is asked. `None` while it is not.
    pub fn verdict(&self) -> Option<Result<(), CudaError>> {
        self.shared.verdict.borrow().clone()
    }

    /// Makes what is put on `stream` from now on wait for this fence. The calling thread waits for no device. Fails when
    /// the device did.
    pub fn wait_on(&self, stream: StreamHandle) -> Result<(), CudaError> {
        if let Some(verdict) = self.verdict() {
            return verdict;
        }
        let id = self.shared.id;
        self.shared.inbox.ask(|reply| Command::WaitFence(id, stream, reply))??;
        // Where the fence failed meanwhile, the thread had nothing any more that the stream could wait for.
        match self.verdict() {
            Some(Err(error)) => Err(error),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence")
            .field("device", &self.shared.inbox.device())
            .field("verdict", &self.verdict())
            .finish()
    }
}

/// How a fence learns whether it is passed: nothing yet, or how it ended.
pub(super) type Verdict = watch::Receiver<Option<Result<(), CudaError>>>;

/// The fence proper. The last clone gives its event back.
struct Shared {
    id: u64,
    verdict: Verdict,
    inbox: Inbox,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Where the thread is gone, so are its events.
        let _ = self.inbox.tell(Command::DropFence(self.id));
    }
}

/// When a fence that nobody rings for is asked after: soon at first, since much of a stream's work is short, then at
/// intervals that grow with the time it took so far. So asking costs little, and adds little to what is waited for.
#[derive(Debug, Clone, Copy)]
pub(super) struct PollSchedule {
    ask_at: Instant,
    pause: Duration,
}

impl PollSchedule {
    pub(super) fn new(now: Instant) -> Self {
        Self { ask_at: now + FIRST_PAUSE, pause: FIRST_PAUSE }
    }

    pub(super) fn ask_at(self) -> Instant {
        self.ask_at
    }

    pub(super) fn is_due(self, now: Instant) -> bool {
        self.ask_at <= now
    }

    pub(super) fn asked(&mut self, now: Instant) {
        self.pause = (self.pause * 5 / 4).min(LONGEST_PAUSE);
        self.ask_at = now + self.pause;
    }
}

const FIRST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_per_thread_stream_is_refused() {
        let from_raw = |address| {
            // SAFETY: nothing is done with the handle.
            unsafe { StreamHandle::from_raw(std::ptr::without_provenance_mut(address), ()) }
        };
        assert_eq!(from_raw(2), Err(CudaError::PerThreadStream));
        assert_eq!(from_raw(1), Ok(StreamHandle::LEGACY));
        assert!(from_raw(0).is_ok());
    }

    #[test]
    fn a_clone_keeps_what_keeps_the_stream() {
        let keeper = Arc::new(());
        // SAFETY: nothing is done with the handle.
        let stream =
            unsafe { StreamHandle::from_raw(std::ptr::without_provenance_mut(7), Arc::clone(&keeper)) };
        let clone = stream.clone().unwrap();
        drop(stream);
        assert_eq!(Arc::strong_count(&keeper), 2);
        drop(clone);
        assert_eq!(Arc::strong_count(&keeper), 1);
    }

    #[test]
    fn asking_never_adds_much_to_the_wait() {
        let start = Instant::now();
        let mut asking = PollSchedule::new(start);
        let mut questions = 0;
        while asking.ask_at() - start < Duration::from_secs(1) {
            let now = asking.ask_at();
            assert!(asking.is_due(now));
            asking.asked(now);
            let (waited, pause) = (now - start, asking.ask_at() - now);
            assert!(pause <= waited * 5 / 4 && pause <= Duration::from_millis(5));
            questions += 1;
        }
        assert!(questions < 240, "{questions}");
    }
}
