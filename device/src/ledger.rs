use crate::Lock;
use std::{any::Any, collections::BTreeMap, ops::Range, sync::Arc};

use tokio::sync::Notify;

use crate::sink::SinkError;

/// The ranges of a device sink that wait for a slot, are lent, or may still be written by a copy.
///
/// Why: a copy cannot be cancelled. A chunk that was abandoned while it was copied may be received again, and the old
/// copy must not overwrite the new bytes. So each range has an [`Entry`], which moves with the copy to the engine and
/// ends when the engine releases the copy's slot, whether or not a caller waits for the copy. If the engine never
/// releases the slot, since the end of the copy is unknown, the entry never ends.
#[derive(Default)]
pub(crate) struct Ledger {
    state: Lock<State>,
    ended: Notify,
}

#[derive(Default)]
struct State {
    /// The entries, by id. A target, a copy or a waiting call of `open` holds each, which bounds them.
    entries: BTreeMap<u64, (Range<u64>, Phase)>,
    last_id: u64,
    is_committed: bool,
}

#[derive(PartialEq, Eq)]
enum Phase {
    /// The range waits for a slot.
    Waiting,
    /// The writer fills its slot, or its staging memory if it is longer than a slot.
    Lent,
    /// The engine copies its bytes, or the next piece of them waits for a slot.
    Copying,
}

impl Ledger {
    /// Adds `range`, once no copy to it is in flight. Fails at once if any byte of it is lent, or waits for a slot, and
    /// after the commit. Cancel safe.
    pub(crate) async fn enter(self: &Arc<Self>, range: &Range<u64>) -> Result<Entry, SinkError> {
        loop {
            let ended = self.ended.notified();
            if let Some(id) = self.state.lock().enter(range)? {
                return Ok(Entry { id, ledger: Arc::clone(self), kept: None });
            }
            ended.await;
        }
    }

    /// Ends the writing. Fails while there is an entry of a non-empty range, and after the commit.
    pub(crate) fn commit(&self, len_bytes: u64) -> Result<(), SinkError> {
        let mut state = self.state.lock();
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
        self.state.lock().entries.values().any(|(_, phase)| *phase != Phase::Lent)
    }
}

impl State {
    /// Adds `range` and returns the id of its entry; `None` while a copy to any byte of it is in flight.
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
        self.last_id += 1;
        self.entries.insert(self.last_id, (range.clone(), Phase::Waiting));
        Ok(Some(self.last_id))
    }
}

/// A range's entry in a [`Ledger`], which is removed when this is dropped.
pub(crate) struct Entry {
    id: u64,
    ledger: Arc<Ledger>,
    kept: Option<Box<dyn Any + Send + Sync>>,
}

impl Entry {
    /// Marks the range as lent: it has its slot or staging memory now.
    pub(crate) fn lend(&mut self) {
        self.set(Phase::Lent);
    }

    /// Marks the range as being copied by the engine, and keeps `kept` alive until the entry ends.
    pub(crate) fn begin_copy(mut self, kept: impl Any + Send + Sync) -> Arc<Self> {
        self.kept = Some(Box::new(kept));
        self.set(Phase::Copying);
        Arc::new(self)
    }

    fn set(&mut self, to: Phase) {
        if let Some((_, phase)) = self.ledger.state.lock().entries.get_mut(&self.id) {
            *phase = to;
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.ledger.state.lock().entries.remove(&self.id);
        self.ledger.ended.notify_waiters();
    }
}
