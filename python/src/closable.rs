//! A value for one user at a time, which can be closed without waiting for that user.

use std::sync::Arc;
use tensor_relay_device::Lock;
use tokio::sync::{Mutex, OwnedMutexGuard, watch};

/// A value that callers use in turns, until it is closed. Closing never waits, because a signal handler may close a
/// value that the interrupted thread is using: the turn under way then drops the value, or passes it to the last
/// action, when it ends.
pub(crate) struct Closable<T> {
    /// `None` once it is closed and the last turn has ended.
    value: Arc<Mutex<Option<T>>>,
    state: watch::Sender<State>,
    /// The last action: receives the value after the last turn.
    last: Lock<Option<Last<T>>>,
}

type Last<T> = Box<dyn FnOnce(T) + Send>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Open,
    /// The turn under way is the last.
    Ending,
    /// The turn under way is to stop.
    Closed,
}

/// The value in exclusive use.
pub(crate) struct ExclusiveUse<T> {
    /// `None` while waiting for the turn, and during `drop`.
    guard: Option<OwnedMutexGuard<Option<T>>>,
    closable: Arc<Closable<T>>,
}

impl<T> Closable<T> {
    pub(crate) fn new(value: T) -> Self {
        let value = Arc::new(Mutex::new(Some(value)));
        Self { value, state: watch::Sender::new(State::Open), last: Lock::default() }
    }

    /// Waits until no other caller uses the value. `None` once it is closed or ending.
    pub(crate) async fn turn(self: Arc<Self>) -> Option<ExclusiveUse<T>> {
        // Made first, so that a wait that is cancelled after the lock was granted ends as a turn does.
        let mut turn = ExclusiveUse { guard: None, closable: self };
        let guard = Arc::clone(&turn.closable.value).lock_owned().await;
        turn.guard = Some(guard);
        (turn.closable.state() == State::Open).then_some(turn)
    }

    /// The value, unless it is closed, ending or in use.
    pub(crate) fn try_turn(self: &Arc<Self>) -> Option<ExclusiveUse<T>> {
        let guard = Arc::clone(&self.value).try_lock_owned().ok()?;
        let turn = ExclusiveUse { guard: Some(guard), closable: Arc::clone(self) };
        (self.state() == State::Open).then_some(turn)
    }

    /// The result of `work`; `None` if the value is closed first, which drops `work`.
    pub(crate) async fn unless_closed<F: Future>(&self, work: F) -> Option<F::Output> {
        tokio::select! {
            biased;
            () = self.closed() => None,
            output = work => Some(output),
        }
    }

    /// Waits until the value is closed.
    pub(crate) async fn closed(&self) {
        let mut state = self.state.subscribe();
        let _ = state.wait_for(|state| *state == State::Closed).await; // This holds the sender.
    }

    /// Cancels the turn under way. When it has ended, the value is dropped, or passed to the last action if there is
    /// one. Closing again does nothing.
    pub(crate) fn close(&self) {
        self.set(State::Closed);
    }

    /// As [`close`](Self::close), and passes the value to `last`, unless an earlier call set a last action.
    pub(crate) fn close_with(&self, last: impl FnOnce(T) + Send + 'static) {
        self.last.lock().get_or_insert_with(|| Box::new(last));
        self.set(State::Closed);
    }

    /// As [`close_with`](Self::close_with), but lets the turn under way finish.
    pub(crate) fn end_with(&self, last: impl FnOnce(T) + Send + 'static) {
        self.last.lock().get_or_insert_with(|| Box::new(last));
        self.set(State::Ending);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state() == State::Closed
    }

    fn state(&self) -> State {
        *self.state.borrow()
    }

    fn set(&self, new: State) {
        self.state.send_modify(|state| *state = new.max(*state));
        self.finish_if_unused();
    }

    /// Runs the last action if the value is closed or ending, and unused. Called after each change of state and after
    /// each turn, so the later of the two finds the value unused.
    fn finish_if_unused(&self) {
        if self.state() == State::Open {
            return;
        }
        let value = self.value.try_lock().ok().and_then(|mut value| value.take());
        if let Some(value) = value {
            let last = self.last.lock().take(); // Without the lock, since it may do anything.
            match last {
                Some(last) => last(value),
                None => drop(value),
            }
        }
    }
}

impl<T> ExclusiveUse<T> {
    /// The value; `None` while waiting for the turn, and after the last turn.
    pub(crate) fn value(&mut self) -> Option<&mut T> {
        self.guard.as_mut()?.as_mut()
    }
}

impl<T> Drop for ExclusiveUse<T> {
    fn drop(&mut self) {
        self.guard = None;
        self.closable.finish_if_unused();
    }
}
