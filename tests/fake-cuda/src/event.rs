use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// An event, which can be recorded repeatedly.
#[derive(Debug)]
pub(crate) struct Event {
    /// How often the event was recorded, including records that streams have not executed yet.
    pub(crate) recorded: u64,
    /// The executed records. Shared with streams, because an event may be destroyed while streams wait for it.
    pub(crate) progress: Arc<Progress>,
    pub(crate) timed: bool,
}

/// The number of an event's executed records, and the time of the latest one.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    executed: AtomicU64,
    at: Mutex<Option<Instant>>,
}

impl Event {
    pub(crate) fn new(timed: bool) -> Self {
        Self { recorded: 0, progress: Arc::default(), timed }
    }

    /// Whether the last record was executed. True if the event was never recorded.
    pub(crate) fn is_complete(&self) -> bool {
        self.progress.has_reached(self.recorded)
    }
}

impl Progress {
    pub(crate) fn has_reached(&self, record: u64) -> bool {
        self.executed.load(Ordering::Acquire) >= record
    }

    pub(crate) fn reach(&self, record: u64) {
        self.executed.fetch_max(record, Ordering::AcqRel);
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// The time when the latest record was executed.
    pub(crate) fn at(&self) -> Option<Instant> {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
