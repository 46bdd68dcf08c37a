//! The way into device memory: copies that end whether or not anybody waits for them.

use super::{Lodged, OnDevice};
use std::{
    ops::Range,
    panic::resume_unwind,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tensor_relay_device::{BoxFuture, CopyError, PartsError, Sink, SinkError, Target};
use tokio::{runtime::Handle, sync::Notify, time::timeout};

/// How long a chunk may take to be copied before its version is given up. Less than both ends wait for a byte to move,
/// 30 s, so that the device is blamed and not this client. More than a GPU's engine lets a copy wait for a caller's stream,
/// 20 s by default, which begins later than this: then the engine says first that the stream was late.
const COPY_TIMEOUT: Duration = Duration::from_secs(25);

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
    /// Where copies are waited for: where the session runs. A lane's thread ends with its lane, and they must not.
    runtime: Handle,
    /// The chunks that have come so far that they need a slot, and have none.
    waiting: AtomicUsize,
}

impl DeviceSink {
    /// A sink for `payload`, which is `len_bytes` long with all that goes nowhere.
    pub(super) fn new(payload: Arc<OnDevice>, len_bytes: u64) -> Result<Self, PartsError> {
        let inner = payload.sink(len_bytes)?;
        let runtime = Handle::current();
        Ok(Self { inner, payload, copies: Arc::default(), runtime, waiting: AtomicUsize::new(0) })
    }

    /// Whether a copy is in flight, or a chunk waits for a slot. A chunk that has its slot waits for the network.
    pub(super) fn is_waited_for(&self) -> bool {
        self.is_copying() || self.waiting.load(Ordering::Relaxed) > 0
    }

    fn is_copying(&self) -> bool {
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
        let _waiting = Waiting::begin(&self.waiting);
        self.copies.clear_of(&range).await?;
        self.inner.open(range).await
    }

    async fn copy(&self, target: Target) -> Result<(), SinkError> {
        let range = target.range();
        let copy = Copy::begin(&self.copies, range.clone(), self.payload.touched(&range))?;
        let inner = Arc::clone(&self.inner);
        let copying = self.runtime.spawn(async move {
            let end = inner.write(target).await;
            match &end {
                Err(SinkError::Copy(error)) if error.may_land_later() => drop(copy),
                _ => copy.end(),
            }
            end
        });
        match timeout(COPY_TIMEOUT, copying).await {
            Ok(Ok(end)) => end,
            Ok(Err(cut_off)) => match cut_off.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                Err(_) => Err(CopyError::EngineStopped.into()), // The runtime ends, and nobody waits any more.
            },
            Err(_) => {
                let device = self.payload.device().name().into();
                Err(CopyError::TimedOut { device, waited: COPY_TIMEOUT }.into())
            }
        }
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

/// A chunk that waits. It does so no more when this is dropped.
#[derive(Debug)]
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn begin(waiting: &'a AtomicUsize) -> Self {
        waiting.fetch_add(1, Ordering::Relaxed);
        Self(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::Writing;
    use tensor_relay_device::{Capacity, Device, HostEngine, HostMemory};
    use tokio::sync::{Semaphore, oneshot};

    /// A sink whose writes wait until they are let pass, and fail when nobody can let them pass any more.
    #[derive(Debug)]
    struct Gated {
        sink: Arc<dyn Sink>,
        gate: Arc<Semaphore>,
    }

    impl Sink for Gated {
        fn len_bytes(&self) -> u64 {
            self.sink.len_bytes()
        }

        fn open(&self, range: Range<u64>) -> BoxFuture<'_, Result<Target, SinkError>> {
            self.sink.open(range)
        }

        fn write(&self, target: Target) -> BoxFuture<'_, Result<(), SinkError>> {
            Box::pin(async move {
                let pass = self.gate.acquire().await.map_err(|_| CopyError::EngineStopped)?;
                pass.forget();
                self.sink.write(target).await
            })
        }
    }

    struct Stage {
        sink: DeviceSink,
        gate: Arc<Semaphore>,
        home: Vec<oneshot::Receiver<tensor_relay_device::DeviceBuffer>>,
    }

    /// Buffers of the user's at 0..10 and 10..30 of a payload, behind a gate.
    fn stage() -> Stage {
        let engine = Arc::new(HostEngine::inline(HostMemory::new(1 << 20)));
        let device = Device::new(engine, Capacity { slots: 4, slot_bytes: 64 }).unwrap();
        let lend = |range: Range<u64>| {
            let len = (range.end - range.start) as usize;
            let (lodged, back) = Lodged::lent(device.allocate(len).unwrap());
            ((range, lodged), back)
        };
        let (parts, home) = [0..10, 10..30].map(lend).into_iter().unzip();
        let writing = Arc::new(Writing::default());
        let payload = OnDevice::lent(parts, writing, &HostMemory::new(0)).unwrap();
        let (payload, gate) = (Arc::new(payload), Arc::new(Semaphore::new(0)));
        let inner = Gated { sink: payload.sink(30).unwrap(), gate: Arc::clone(&gate) };
        let copies = Arc::default();
        let (inner, runtime) = (Arc::new(inner), Handle::current());
        let sink = DeviceSink { inner, payload, copies, runtime, waiting: AtomicUsize::new(0) };
        Stage { sink, gate, home }
    }

    /// Begins to write `range`, and gives that up while it is copied.
    async fn abandon(sink: &DeviceSink, range: Range<u64>) {
        let target = sink.open(range).await.unwrap();
        assert!(timeout(Duration::from_millis(10), sink.write(target)).await.is_err());
        assert!(sink.is_copying());
    }

    #[tokio::test(start_paused = true)]
    async fn a_range_is_opened_again_when_the_copy_to_it_has_ended() {
        let Stage { sink, gate, .. } = stage();
        abandon(&sink, 5..15).await;
        assert!(sink.open(15..30).await.is_ok());
        for range in [0..6, 14..30, 7..8] {
            assert!(timeout(Duration::from_secs(1), sink.open(range)).await.is_err());
        }
        assert!(matches!(sink.commit(), Err(SinkError::StillLent { lent_bytes: 10, len_bytes: 30 })));
        let (opened, ()) = tokio::join!(sink.open(0..6), async {
            assert!(sink.is_waited_for());
            gate.add_permits(1);
        });
        drop(opened.unwrap());
        assert!(!sink.is_waited_for());
        sink.commit().unwrap();
        assert!(matches!(sink.open(0..1).await, Err(SinkError::Committed)));
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_written_after_the_commit() {
        let Stage { sink, gate, .. } = stage();
        gate.add_permits(1);
        let late = sink.open(0..10).await.unwrap();
        sink.commit().unwrap();
        assert!(matches!(sink.write(late).await, Err(SinkError::Committed)));
    }

    #[tokio::test(start_paused = true)]
    async fn buffers_go_home_when_no_copy_is_in_flight() {
        let Stage { sink, gate, mut home } = stage();
        abandon(&sink, 0..4).await;
        drop(sink);
        assert!(timeout(Duration::from_secs(1), &mut home[0]).await.is_err());
        gate.add_permits(1);
        assert_eq!((&mut home[0]).await.unwrap().len_bytes(), 10);
        assert_eq!((&mut home[1]).await.unwrap().len_bytes(), 20);
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_lost_copy_may_write_to_is_nobodys() {
        let Stage { sink, gate, mut home } = stage();
        abandon(&sink, 12..14).await;
        gate.close();
        while sink.is_copying() {
            tokio::task::yield_now().await;
        }
        assert!(matches!(sink.open(13..30).await, Err(SinkError::Busy { start: 13, end: 30 })));
        assert!(sink.open(0..12).await.is_ok() && sink.commit().is_err());
        drop(sink);
        assert!((&mut home[0]).await.is_ok());
        assert!((&mut home[1]).await.is_err(), "it is withheld");
    }
}
