use std::{collections::BTreeMap, time::Instant};

use tokio::sync::watch;

use super::{
    error::CudaError,
    fence::{Fence, PollSchedule},
    gpu::{Gpu, RecordedEvent},
    setting::Setting,
    stream::StreamHandle,
};

/// The open fences: held and not yet passed. They are polled at growing intervals, since a callback would have to be
/// put on the caller's stream.
#[derive(Default)]
pub(super) struct Fences {
    next_id: u64,
    /// One for each live fence, which bounds it.
    open: BTreeMap<u64, Watched>,
}

struct Watched {
    mark: RecordedEvent,
    verdict: watch::Sender<Option<Result<(), CudaError>>>,
    asking: PollSchedule,
}

impl Fences {
    /// Records a fence on the stream.
    pub(super) fn record(
        &mut self,
        stream: &StreamHandle,
        gpu: &mut Gpu,
        setting: &Setting,
    ) -> Result<Fence, CudaError> {
        Ok(self.keep(gpu.mark_stream(stream)?, setting))
    }

    /// Records a fence on the intake stream.
    pub(super) fn record_intake(&mut self, gpu: &mut Gpu, setting: &Setting) -> Result<Fence, CudaError> {
        Ok(self.keep(gpu.mark_intake()?, setting))
    }

    /// A fence that never passes, for a stream on which none could be recorded.
    pub(super) fn lost(&mut self, error: CudaError, setting: &Setting) -> Fence {
        let (_, seen) = watch::channel(Some(Err(error)));
        Fence::new(self.new_id(), seen, setting.inbox.clone())
    }

    fn keep(&mut self, mark: RecordedEvent, setting: &Setting) -> Fence {
        let id = self.new_id();
        let (verdict, seen) = watch::channel(None);
        self.open
            .insert(id, Watched { mark, verdict, asking: PollSchedule::new(Instant::now()) });
        Fence::new(id, seen, setting.inbox.clone())
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Makes a stream wait for a fence. One that is no longer open has passed or failed, as its owner knows.
    pub(super) fn order(&self, id: u64, stream: &StreamHandle, gpu: &Gpu) -> Result<(), CudaError> {
        match self.open.get(&id) {
            Some(watched) => gpu.order(stream, &watched.mark),
            None => Ok(()),
        }
    }

    pub(super) fn drop_fence(&mut self, id: u64, gpu: &mut Gpu) {
        if let Some(watched) = self.open.remove(&id) {
            gpu.recycle(watched.mark);
        }
    }

    /// Polls the fences that are due, and notifies their holders. Returns whether the driver refused to answer for one.
    pub(super) fn look(&mut self, now: Instant, gpu: &mut Gpu) -> bool {
        let mut refused = false;
        let due = self.open.extract_if(.., |_, watched| {
            if !watched.asking.is_due(now) {
                return false;
            }
            watched.asking.asked(now);
            // Queried twice if the driver refuses: a repeated error is final.
            match gpu.has_passed(&watched.mark).or_else(|_| gpu.has_passed(&watched.mark)) {
                Ok(false) => false,
                Ok(true) => watched.tell(Ok(())),
                Err(error) => {
                    refused = true;
                    watched.tell(Err(error.into()))
                }
            }
        });
        let over: Vec<RecordedEvent> = due.map(|(_, watched)| watched.mark).collect();
        over.into_iter().for_each(|mark| gpu.recycle(mark));
        refused
    }

    /// Fails all fences after a device failure.
    pub(super) fn fail(&mut self, error: &CudaError) {
        for watched in std::mem::take(&mut self.open).into_values() {
            watched.tell(Err(error.clone()));
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.open.values().map(|watched| watched.asking.ask_at()).min()
    }
}

impl Watched {
    /// Reports how the fence ended.
    fn tell(&self, verdict: Result<(), CudaError>) -> bool {
        self.verdict.send_replace(Some(verdict));
        true
    }
}
