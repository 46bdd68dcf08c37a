//! [`Arrival`]: the progress of a version that is sent on while it is being received.

use std::{sync::Arc, time::Duration};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{Here, RangeSet};
use tokio::{sync::watch, time::Instant};

/// The time without a chunk after which a version counts as waiting for its origin.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Which chunks of a version are here. It ends when the version is whole, or given up.
#[derive(Debug, Default)]
pub struct Arrival {
    state: Lock<State>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Clone)]
struct State {
    here: Arc<RangeSet>,
    /// When the last chunk came, or the version began.
    moved_at: Instant,
    end: Option<End>,
}

impl Default for State {
    fn default() -> Self {
        Self { here: Arc::default(), moved_at: Instant::now(), end: None }
    }
}

/// How an arrival ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Whole,
    GivenUp,
}

/// The version was given up: what is missing will not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GivenUp;

impl Arrival {
    /// The chunks that can be sent now.
    pub fn here(&self) -> Here {
        let state = self.state.lock();
        match state.end {
            Some(End::Whole) => Here::All,
            _ => Here::SoFar(Arc::clone(&state.here)),
        }
    }

    /// Whether the version is whole: received, verified and committed.
    pub fn is_whole(&self) -> bool {
        self.state.lock().end == Some(End::Whole)
    }

    /// Whether a new receiver does well to wait for it, and not to take an earlier one: it is whole, or chunks are coming.
    pub fn is_moving(&self) -> bool {
        let state = self.state.lock();
        match state.end {
            Some(end) => end == End::Whole,
            None => state.moved_at.elapsed() < PAUSE_MAX,
        }
    }

    /// Whether it was given up.
    pub fn is_given_up(&self) -> bool {
        self.state.lock().end == Some(End::GivenUp)
    }

    /// The number of chunks that are here, to see whether more come; `None` once it has ended.
    pub fn progress(&self) -> Option<u32> {
        let state = self.state.lock();
        state.end.is_none().then(|| state.here.len())
    }

    /// Handles a verified chunk.
    pub fn handle_verified(&self, chunk: u32) {
        let mut state = self.state.lock();
        Arc::make_mut(&mut state.here).insert(chunk);
        state.moved_at = Instant::now();
        drop(state);
        self.changed.send_replace(());
    }

    /// Handles the commit.
    pub fn handle_committed(&self) {
        self.end(End::Whole);
    }

    /// Gives the version up, unless it is whole. Returns whether it is not.
    pub fn give_up(&self) -> bool {
        self.end(End::GivenUp);
        self.is_given_up()
    }

    fn end(&self, end: End) {
        self.state.lock().end.get_or_insert(end);
        self.changed.send_replace(());
    }

    /// Waits until these chunks are here. Cancel safe.
    ///
    /// # Errors
    /// [`GivenUp`], if they will not come.
    pub async fn wait_for(&self, chunks: &RangeSet) -> Result<(), GivenUp> {
        let mut changes = self.changed.subscribe();
        loop {
            let State { here, end, .. } = self.state.lock().clone();
            match end {
                Some(End::Whole) => return Ok(()),
                Some(End::GivenUp) => return Err(GivenUp),
                None if chunks.difference(&here).is_empty() => return Ok(()),
                None => {}
            }
            let _ = changes.changed().await; // `self` has the sender.
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_reader_waits_for_its_chunks_until_the_end() {
        let first = RangeSet::from_range(0..1);
        for whole in [true, false] {
            let arrival = Arrival::default();
            let all = RangeSet::from_range(0..2);
            let mut waiting = Box::pin(arrival.wait_for(&all));
            arrival.handle_verified(0);
            assert_eq!((arrival.here(), arrival.progress()), (Here::SoFar(Arc::new(first.clone())), Some(1)));
            assert_eq!(arrival.wait_for(&first).now_or_never(), Some(Ok(())));
            assert_eq!(waiting.as_mut().now_or_never(), None);
            if whole {
                arrival.handle_committed();
            }
            assert_eq!(arrival.give_up(), !whole);
            assert_eq!(waiting.now_or_never(), Some(if whole { Ok(()) } else { Err(GivenUp) }));
            assert_eq!((arrival.is_whole(), arrival.is_given_up()), (whole, !whole));
            assert_eq!((arrival.here() == Here::All, arrival.progress()), (whole, None));
        }
    }
}
