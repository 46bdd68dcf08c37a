//! The way into device memory: copies that end whether or not anybody waits for them.

use super::{Lodged, OnDevice};
use std::{
    ops::Range,
    panic::resume_unwind,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tensor_relay_device::{BoxFuture, CopyError, PartsError, Sink, SinkError, Target};
use tokio::sync::Notify;

/// A sink in device memory that knows every copy in flight, also one whose chunk was given up in the middle.
///
/// Why: a copy cannot be called back. A chunk whose connection is lost while it is copied comes again, and the old copy
/// must not land over the new bytes; and memory that a user lent must not go back there under a copy. So each copy has a
/// task of its own, which nobody cancels and which holds the memory; and a range is opened again only when no copy to it
/// is in flight.
#[derive(Debug)]
pub(crate) struct DeviceSink {
    inner: Arc<dyn Sink>,
    payload: Arc<OnDevice>,
    copies: Arc<Copies>,
}

impl DeviceSink {
    /// A sink for `payload`, which is `len_bytes` long with all that goes nowhere.
    pub(super) fn new(payload: Arc<OnDevice>, len_bytes: u64) -> Result<Self, PartsError> {
        let inner = payload.sink(len_bytes)?;
        Ok(Self { inner, payload, copies: Arc::default() })
    }

    /// Whether a copy is in flight.
    pub(super) fn is_copying(&self) -> bool {
        !self.copies.state().in_flight.is_empty()
    }

    /// Ends the writing. Fails while a copy is in flight, or when one was lost sight of.
    pub(super) fn commit(&self) -> Result<(), SinkError> {
        let mut state = self.copies.state();
        let lent = state.in_flight.iter().map(|(_, range)| range).chain(&state.lost);
        let lent_bytes: u64 = lent.map(|range| range.end - range.start).sum();
        if lent_bytes > 0 {
            return Err(SinkError::StillLent { lent_bytes, len_bytes: self.inner.len_bytes() });
        }
        state.is_committed = true;
        Ok(())
    }

    async fn lend(&self, range: Range<u64>) -> Result<Target, SinkError> {
        self.copies.clear_of(&range).await?;
        self.inner.open(range).await
    }

    async fn copy(&self, target: Target) -> Result<(), SinkError> {
        let range = target.range();
        let copy = Copy::begin(&self.copies, range.clone(), self.payload.touched(&range))?;
        let inner = Arc::clone(&self.inner);
        let copying = tokio::spawn(async move {
            let end = inner.write(target).await;
            match &end {
                Err(SinkError::Copy(error)) if error.may_land_later() => drop(copy),
                _ => copy.end(),
            }
            end
        });
        copying.await.unwrap_or_else(|cut_off| match cut_off.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            Err(_) => Err(SinkError::Copy(CopyError::EngineStopped)), // The runtime ends, and nobody waits any more.
        })
    }
}

impl Sink for DeviceSink {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn open(&self, range: Range<u64>) -> BoxFuture<'_, Result<Target, SinkError>> {
        Box::pin(self.lend(range))
    }

    fn write(&self, target: Target) -> BoxFuture<'_, Result<(), SinkError>> {
        Box::pin(self.copy(target))
    }
}

/// The copies to one sink.
#[derive(Debug, Default)]
struct Copies {
    state: Mutex<State>,
    ended: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// By number. The slots bound them.
    in_flight: Vec<(u64, Range<u64>)>,
    ever: u64,
    /// Where a copy may land that nobody knows the end of.
    lost: Vec<Range<u64>>,
    is_committed: bool,
}

impl Copies {
    /// Waits until no copy to `range` is in flight. The engine ends each, or its caller's patience does. Cancel safe.
    async fn clear_of(&self, range: &Range<u64>) -> Result<(), SinkError> {
        loop {
            let ended = self.ended.notified();
            if self.state().is_clear_of(range)? {
                return Ok(());
            }
            ended.await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_clear_of(&self, range: &Range<u64>) -> Result<bool, SinkError> {
        let overlaps = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        if self.is_committed {
            return Err(SinkError::Committed);
        }
        if self.lost.iter().any(overlaps) {
            return Err(SinkError::Busy { start: range.start, end: range.end });
        }
        Ok(!self.in_flight.iter().any(|(_, copied)| overlaps(copied)))
    }
}

/// A copy in flight. Dropping it before it has ended says that nobody knows whether it has.
#[derive(Debug)]
struct Copy {
    number: u64,
    copies: Arc<Copies>,
    has_ended: bool,
    touched: Vec<Arc<Lodged>>,
}

impl Copy {
    fn begin(copies: &Arc<Copies>, range: Range<u64>, touched: Vec<Arc<Lodged>>) -> Result<Self, SinkError> {
        let mut state = copies.state();
        if state.is_committed {
            return Err(SinkError::Committed);
        }
        let number = state.ever;
        state.ever += 1;
        state.in_flight.push((number, range));
        drop(state);
        Ok(Self { number, copies: Arc::clone(copies), has_ended: false, touched })
    }

    fn end(mut self) {
        self.has_ended = true;
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let mut state = self.copies.state();
        let at = state.in_flight.iter().position(|(number, _)| *number == self.number);
        let ended = at.map(|at| state.in_flight.swap_remove(at).1);
        if !self.has_ended {
            self.touched.iter().for_each(|memory| memory.withhold());
            state.lost.extend(ended);
        }
        drop(state);
        self.copies.ended.notify_waiters();
    }
}
