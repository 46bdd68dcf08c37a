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

/// A position on a stream: passed when all work submitted before it has ended.
///
/// A safe wrapper of an event. Clones are the same position.
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

    /// Whether the fence is known to be passed, without a driver call. `None` while it is not.
    pub fn verdict(&self) -> Option<Result<(), CudaError>> {
        self.shared.verdict.borrow().clone()
    }

    /// Makes later work on `stream` wait for this fence. The calling thread waits for no device. Fails after a device
    /// failure.
    pub fn wait_on(&self, stream: StreamHandle) -> Result<(), CudaError> {
        if let Some(verdict) = self.verdict() {
            return verdict;
        }
        let id = self.shared.id;
        self.shared.inbox.ask(|reply| Command::WaitFence(id, stream, reply))??;
        // If the fence failed meanwhile, the thread had nothing left for the stream to wait for.
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

/// The state shared by a fence's clones. The last one returns its event.
struct Shared {
    id: u64,
    verdict: Verdict,
    inbox: Inbox,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Without the thread, its events are gone too.
        let _ = self.inbox.tell(Command::DropFence(self.id));
    }
}

/// The polling schedule of a fence without a signal: soon at first, since much of a stream's work is short, then at
/// growing intervals. So polling costs little, and adds little delay.
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
