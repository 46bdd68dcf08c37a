use std::{
    any::Any,
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use crate::sink::SinkError;

/// The ranges of a device sink that are lent, or that a copy may still write to.
///
/// Why: a copy cannot be cancelled. A chunk that was abandoned while it was copied may be received again, and the old
/// copy must not overwrite the new bytes. So each range has an [`Entry`], which moves with the copy to the engine and
/// ends when the engine releases the copy's slot, whether or not a caller waits for the copy. If the engine never
/// releases the slot, since the end of the copy is unknown, the entry never ends.
#[derive(Default)]
pub(crate) struct Ledger {
    state: Mutex<State>,
    ended: Notify,
}

#[derive(Default)]
struct State {
    /// The entries, by number. Those lent or copied have slots, which bound their count; the others wait for a slot.
    entries: BTreeMap<u64, (Range<u64>, Phase)>,
    last_number: u64,
    is_committed: bool,
}

#[derive(PartialEq, Eq)]
enum Phase {
    /// The range waits for a slot.
    Waiting,
    /// The writer fills its slot.
    Lent,
    /// The engine copies its slot.
    Copying,
}

impl Ledger {
    /// Adds `range`, once no copy to it is in flight. Fails at once if any byte of it is lent, or waits for a slot.
    /// Cancel safe.
    pub(crate) async fn enter(self: &Arc<Self>, range: &Range<u64>) -> Result<Entry, SinkError> {
        loop {
            let ended = self.ended.notified();
            if let Some(number) = self.state().enter(range)? {
                return Ok(Entry { number, ledger: Arc::clone(self), kept: None });
            }
            ended.await;
        }
    }

    /// Ends the writing. Fails while there is an entry of a non-empty range.
    pub(crate) fn commit(&self, len_bytes: u64) -> Result<(), SinkError> {
        let mut state = self.state();
        let lent_bytes = state.entries.values().map(|(range, _)| range.end - range.start).sum();
        match lent_bytes {
            _ if state.is_committed => Err(SinkError::Committed),
            0 => {
                state.is_committed = true;
                Ok(())
            }
            lent_bytes => Err(SinkError::StillLent { lent_bytes, len_bytes }),
        }
    }

    /// Whether a range waits for a slot, or a copy has not ended.
    pub(crate) fn waits(&self) -> bool {
        self.state().entries.values().any(|(_, phase)| *phase != Phase::Lent)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Adds `range` and returns its number; `None` while a copy to any byte of it is in flight.
    fn enter(&mut self, range: &Range<u64>) -> Result<Option<u64>, SinkError> {
        if self.is_committed {
            return Err(SinkError::Committed);
        }
        let overlaps = |other: &Range<u64>| range.start.max(other.start) < range.end.min(other.end);
        let mut overlapping = self.entries.values().filter(|(other, _)| overlaps(other)).peekable();
        let is_copied = overlapping.peek().is_some();
        if overlapping.any(|(_, phase)| *phase != Phase::Copying) {
            return Err(SinkError::Busy { start: range.start, end: range.end });
        }
        if is_copied {
            return Ok(None);
        }
        self.last_number += 1;
        self.entries.insert(self.last_number, (range.clone(), Phase::Waiting));
        Ok(Some(self.last_number))
    }
}

/// A range's entry in a [`Ledger`], which is removed when this is dropped.
pub(crate) struct Entry {
    number: u64,
    ledger: Arc<Ledger>,
    kept: Option<Box<dyn Any + Send + Sync>>,
}

impl Entry {
    /// Marks the range as lent: it has a slot now.
    pub(crate) fn lend(&mut self) {
        self.set(Phase::Lent);
    }

    /// Marks the range as copied by the engine, and keeps `kept` alive until the entry ends.
    pub(crate) fn copy(mut self, kept: impl Any + Send + Sync) -> Arc<Self> {
        self.kept = Some(Box::new(kept));
        self.set(Phase::Copying);
        Arc::new(self)
    }

    fn set(&mut self, to: Phase) {
        if let Some((_, phase)) = self.ledger.state().entries.get_mut(&self.number) {
            *phase = to;
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.ledger.state().entries.remove(&self.number);
        self.ledger.ended.notify_waiters();
    }
}
