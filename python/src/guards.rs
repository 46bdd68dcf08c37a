//! Guards of borrowed memory: a library keeps a lent tensor alive, but not always the memory behind it.

use crate::{interpreter, tensors_in::frameworks};
use bytes::Bytes;
use pyo3::prelude::*;
use std::{future::pending, mem, ops::Range, panic::resume_unwind, sync::Arc, time::Duration};
use tensor_relay_device::{BoxFuture, SlotPool, Source, SourceError};
use tensor_relay_server::{Borrowed, READ_TIMEOUT};
use tokio::{runtime::Handle, sync::oneshot, task, time::timeout};

/// What keeps the memory of one tensor in place, and tells whether it still is.
#[derive(Debug)]
pub(crate) struct Guard {
    /// While this lives, the memory stays where it is.
    lock: Py<PyAny>,
    /// A function that returns whether the memory is in place, for memory that no lock keeps there.
    check: Option<Py<PyAny>>,
}

/// The guards of a version's tensors.
#[derive(Debug)]
struct Guards {
    locks: Vec<Py<PyAny>>,
    /// The functions that check tensors, with the ranges of these in the payload, in order.
    checks: Vec<(Range<u64>, Py<PyAny>)>,
}

/// The longest range that is copied on the runtime's thread: waking another one takes longer.
const IN_PLACE_BYTES: u64 = 64 << 10;

/// The deadline for the interpreter's answer: half of that of a GPU's read, whose error would blame the GPU.
const ANSWER_TIMEOUT: Duration = READ_TIMEOUT.checked_div(2).expect("two is not zero");

impl Guard {
    /// The guard of the tensor that `exporter` lends.
    pub(crate) fn of(exporter: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (lock, check) = frameworks(exporter.py())?.call_method1("guard", (exporter,))?.extract()?;
        Ok(Self { lock, check })
    }
}

/// Guards the tensors of `borrowed` that have a guard.
pub(crate) fn guard(py: Python<'_>, borrowed: Borrowed, guards: Vec<Option<Guard>>) -> Borrowed {
    let (mut locks, mut checks) = (vec![], vec![]);
    for (tensor, guard) in borrowed.manifest().tensors().iter().zip(guards) {
        let Some(Guard { lock, check }) = guard else { continue };
        locks.push(lock);
        let Some(check) = check else { continue };
        let pieces = tensor.ranges().filter(|range| !range.is_empty());
        checks.extend(pieces.map(|range| (range, check.clone_ref(py))));
    }
    checks.sort_by_key(|(range, _)| range.start);
    let guards = Arc::new(Guards { locks, checks });
    borrowed.through(|source| Arc::new(GuardedSource { source, guards }))
}

impl Guards {
    fn checks_in(&self, range: &Range<u64>) -> &[(Range<u64>, Py<PyAny>)] {
        let first = self.checks.partition_point(|(tensor, _)| tensor.end <= range.start);
        let end = self.checks.partition_point(|(tensor, _)| tensor.start < range.end);
        self.checks.get(first..end).unwrap_or_default()
    }

    /// The first part of `range` whose memory is not in place.
    fn find_gone(&self, py: Python<'_>, range: &Range<u64>) -> Option<Range<u64>> {
        let is_in_place = |check: &Py<PyAny>| check.call0(py)?.extract::<bool>(py);
        let gone = self
            .checks_in(range)
            .iter()
            .find(|(_, check)| !is_in_place(check).unwrap_or(false));
        gone.map(|(tensor, _)| tensor.start.max(range.start)..tensor.end.min(range.end))
    }
}

impl Drop for Guards {
    fn drop(&mut self) {
        let (locks, checks) = (mem::take(&mut self.locks), mem::take(&mut self.checks));
        interpreter::enqueue(move |_| drop((locks, checks)));
    }
}

/// A source whose memory is checked right before and after each read, so that freed memory is not sent.
///
/// On the host only afterwards: the read itself reports memory that is gone. A GPU's context would be lost with it.
#[derive(Debug)]
struct GuardedSource {
    source: Arc<dyn Source>,
    guards: Arc<Guards>,
}

impl GuardedSource {
    /// Checks on the interpreter thread, since the runtime's threads must not wait for the GIL.
    async fn check(&self, range: &Range<u64>) -> Result<(), SourceError> {
        if self.guards.checks_in(range).is_empty() {
            return Ok(());
        }
        let (guards, asked) = (Arc::clone(&self.guards), range.clone());
        let (answer, answered) = oneshot::channel();
        interpreter::enqueue(move |py| drop(answer.send(guards.find_gone(py, &asked))));
        match timeout(ANSWER_TIMEOUT, answered).await {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some(Range { start, end }))) => Err(SourceError::Gone { start, end }),
            _ => Err(SourceError::Unconfirmed { waited_ms: ANSWER_TIMEOUT.as_millis() as u64 }),
        }
    }
}

impl GuardedSource {
    /// Reads memory of the host, a long range on another thread: the kernel takes half a millisecond for a chunk of
    /// 4 MiB, and the runtime's only thread passes no packet meanwhile.
    async fn copy(&self, range: Range<u64>) -> Result<Bytes, SourceError> {
        if range.end - range.start <= IN_PLACE_BYTES {
            return self.source.read(range).await;
        }
        let (source, runtime) = (Arc::clone(&self.source), Handle::current());
        let copying = task::spawn_blocking(move || runtime.block_on(source.read(range)));
        match copying.await {
            Ok(copied) => copied,
            Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
            Err(_) => pending().await, // The runtime ends, and this task with it.
        }
    }
}

impl Source for GuardedSource {
    fn len_bytes(&self) -> u64 {
        self.source.len_bytes()
    }

    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        Box::pin(async move {
            let bytes = match self.slots() {
                Some(_) => {
                    self.check(&range).await?;
                    self.source.read(range.clone()).await?
                }
                None => self.copy(range.clone()).await?,
            };
            self.check(&range).await?;
            Ok(bytes)
        })
    }

    fn may_change(&self) -> bool {
        self.source.may_change()
    }

    fn is_in_place(&self, range: &Range<u64>) -> bool {
        self.source.is_in_place(range)
    }

    fn slots(&self) -> Option<&SlotPool> {
        self.source.slots()
    }

    fn is_costly(&self) -> bool {
        self.source.is_costly()
    }
}
