use std::{collections::BTreeMap, time::Instant};

use tokio::sync::watch;

use super::{
    error::CudaError,
    fence::{Fence, PollSchedule},
    gpu::{Gpu, RecordedEvent},
    setting::Setting,
    stream::StreamHandle,
};

/// The open fences: held by callers and not yet passed. They are polled at growing intervals: callbacks on one stream
/// of the engine's would all wait for the slowest of the callers' streams.
#[derive(Default)]
pub(super) struct Fences {
    next_id: u64,
    /// The open fences by id. Callers hold their fences, which bounds them.
    open: BTreeMap<u64, Watched>,
}

struct Watched {
    event: RecordedEvent,
    verdict: watch::Sender<Option<Result<(), CudaError>>>,
    schedule: PollSchedule,
}

impl Fences {
    /// Records a fence on the stream.
    pub(super) fn record(
        &mut self,
        stream: &StreamHandle,
        gpu: &mut Gpu,
        setting: &Setting,
    ) -> Result<Fence, CudaError> {
        Ok(self.open(gpu.record_event_on(stream)?, setting))
    }

    /// Records a fence on the intake stream.
    pub(super) fn record_intake(&mut self, gpu: &mut Gpu, setting: &Setting) -> Result<Fence, CudaError> {
        Ok(self.open(gpu.record_event_on_intake()?, setting))
    }

    /// A failed fence, for a stream on which no fence could be recorded.
    pub(super) fn failed(&mut self, error: CudaError, setting: &Setting) -> Fence {
        let (_, receiver) = watch::channel(Some(Err(error)));
        Fence::new(self.new_id(), receiver, setting.inbox.clone())
    }

    fn open(&mut self, event: RecordedEvent, setting: &Setting) -> Fence {
        let id = self.new_id();
        let (verdict, receiver) = watch::channel(None);
        self.open
            .insert(id, Watched { event, verdict, schedule: PollSchedule::new(Instant::now()) });
        Fence::new(id, receiver, setting.inbox.clone())
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Makes a stream wait for a fence. If the fence is no longer open, it has passed or failed, and its holder was
    /// notified.
    pub(super) fn make_wait(&self, id: u64, stream: &StreamHandle, gpu: &Gpu) -> Result<(), CudaError> {
        match self.open.get(&id) {
            Some(watched) => gpu.make_wait(stream, &watched.event),
            None => Ok(()),
        }
    }

    pub(super) fn drop_fence(&mut self, id: u64, gpu: &mut Gpu) {
        if let Some(watched) = self.open.remove(&id) {
            gpu.recycle(watched.event);
        }
    }

    /// Polls the fences that are due, and notifies their holders. Returns whether the driver refused a query.
    pub(super) fn poll(&mut self, now: Instant, gpu: &mut Gpu) -> bool {
        let mut refused = false;
        let due = self.open.extract_if(.., |_, watched| {
            if !watched.schedule.is_due(now) {
                return false;
            }
            watched.schedule.polled(now);
            // Queried twice if the driver refuses: a repeated error is final.
            match gpu.has_passed(&watched.event).or_else(|_| gpu.has_passed(&watched.event)) {
                Ok(false) => false,
                Ok(true) => watched.report(Ok(())),
                Err(error) => {
                    refused = true;
                    watched.report(Err(error.into()))
                }
            }
        });
        let ended: Vec<RecordedEvent> = due.map(|(_, watched)| watched.event).collect();
        ended.into_iter().for_each(|event| gpu.recycle(event));
        refused
    }

    /// Fails all fences after a device failure.
    pub(super) fn fail(&mut self, error: &CudaError) {
        for watched in std::mem::take(&mut self.open).into_values() {
            watched.report(Err(error.clone()));
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.open.values().map(|watched| watched.schedule.poll_at()).min()
    }
}

impl Watched {
    /// Reports whether the fence was passed or failed. Returns true, for `extract_if`.
    fn report(&self, verdict: Result<(), CudaError>) -> bool {
        self.verdict.send_replace(Some(verdict));
        true
    }
}
