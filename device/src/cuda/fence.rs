use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::watch;

use super::{
    error::CudaError,
    inbox::{Command, Inbox},
    stream::StreamHandle,
};

/// A position on a stream, which is passed when all work submitted before it has ended.
///
/// A safe wrapper of a CUDA event. Clones are the same position.
#[derive(Clone)]
pub struct Fence {
    shared: Arc<Shared>,
}

impl Fence {
    pub(super) fn new(id: u64, verdict: Verdict, inbox: Inbox) -> Self {
        Self { shared: Arc::new(Shared { id, verdict, inbox }) }
    }

    /// Resolves when the fence is passed; fails when the device fails, or the engine's thread ends before. This waits
    /// for as long as the stream's work takes: use a deadline. Cancel safe.
    pub async fn passed(&self) -> Result<(), CudaError> {
        let mut verdict = self.shared.verdict.clone();
        let final_verdict = verdict.wait_for(Option::is_some).await.ok().and_then(|verdict| verdict.clone());
        final_verdict.unwrap_or_else(|| Err(CudaError::Stopped { device: self.shared.inbox.device().into() }))
    }

    /// The outcome at the last poll, without a driver call: `Ok` if the fence is passed, the error if it has failed,
    /// `None` before that.
    pub fn verdict(&self) -> Option<Result<(), CudaError>> {
        self.shared.verdict.borrow().clone()
    }

    /// Makes later work on `stream` wait for this fence. The calling thread does not wait for the device. Fails after a
    /// device failure.
    pub fn wait_on(&self, stream: StreamHandle) -> Result<(), CudaError> {
        if let Some(verdict) = self.verdict() {
            return verdict;
        }
        let id = self.shared.id;
        self.shared.inbox.request(|reply| Command::WaitFence(id, stream, reply))??;
        // If the fence failed meanwhile, the thread could not make the stream wait.
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

/// A fence's state: `None` until it is passed or failed.
pub(super) type Verdict = watch::Receiver<Option<Result<(), CudaError>>>;

/// The state shared by a fence's clones. Dropping the last clone frees the event for reuse.
struct Shared {
    id: u64,
    verdict: Verdict,
    inbox: Inbox,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Fails if the thread has ended, with all its events.
        let _ = self.inbox.send(Command::DropFence(self.id));
    }
}

/// The polling schedule of an event without a completion signal: soon at first, since a stream's work is often short,
/// then at growing intervals. So polling costs little, and adds little delay.
#[derive(Debug, Clone, Copy)]
pub(super) struct PollSchedule {
    poll_at: Instant,
    pause: Duration,
}

impl PollSchedule {
    pub(super) fn new(now: Instant) -> Self {
        Self { poll_at: now + POLL_INTERVAL_MIN, pause: POLL_INTERVAL_MIN }
    }

    pub(super) fn poll_at(self) -> Instant {
        self.poll_at
    }

    pub(super) fn is_due(self, now: Instant) -> bool {
        self.poll_at <= now
    }

    pub(super) fn polled(&mut self, now: Instant) {
        self.pause = (self.pause * 5 / 4).min(POLL_INTERVAL_MAX);
        self.poll_at = now + self.pause;
    }
}

const POLL_INTERVAL_MIN: Duration = Duration::from_micros(50);
const POLL_INTERVAL_MAX: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_adds_little_delay() {
        let start = Instant::now();
        let mut schedule = PollSchedule::new(start);
        let mut polls = 0;
        while schedule.poll_at() - start < Duration::from_secs(1) {
            let now = schedule.poll_at();
            assert!(schedule.is_due(now));
            schedule.polled(now);
            let (waited, pause) = (now - start, schedule.poll_at() - now);
            assert!(pause <= waited * 5 / 4 && pause <= Duration::from_millis(5));
            polls += 1;
        }
        assert!(polls < 240, "{polls}");
    }
}
