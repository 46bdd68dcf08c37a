use std::{
    mem::ManuallyDrop,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    driver::IpcHandle,
    error::CudaError,
    fence::PollSchedule,
    flight::Direction,
    gpu::{Gpu, RecordedEvent},
    inbox::Reply,
    memory::CudaMemory,
    options::{CudaOptions, HANG_FACTOR},
    setting::Setting,
    share::ShareError,
};

/// The pending exports of an engine: they wait for the callers' streams, and for copies within the device. Each caller
/// waits for its answer, which bounds all of this.
pub(super) struct Shares {
    waiting: Vec<Waiting>,
    /// In the order in which they were put on the one stream of such copies.
    copying: Vec<InFlight>,
    /// Whether the driver refused a call since the last poll, so that the device itself is to be queried.
    suspected: bool,
    fence_timeout: Duration,
    copy_timeout: Duration,
}

/// A pending export, waiting for the streams that write the memory.
#[derive(Debug)]
pub(super) enum ExportRequest {
    /// Export memory in place.
    Name(Vec<Arc<CudaMemory>>, Reply<Result<Vec<Name>, ShareError>>),
    /// To fill a shared buffer with copies.
    Fill(Fill, Reply<Result<(), ShareError>>),
}

/// One memory's exported location: the handle of its allocation, and the offset in it.
pub(super) type Name = Result<(IpcHandle, u64), CudaError>;

/// Copies into one memory.
#[derive(Debug)]
pub(super) struct Fill {
    pub(super) to: Arc<CudaMemory>,
    /// The memories and their offsets, checked to be in bounds.
    pub(super) parts: Vec<(Arc<CudaMemory>, u64)>,
}

struct Waiting {
    wish: ExportRequest,
    until: Instant,
}

/// Copies that the device may be executing. Dropping them leaks their memory: only `ended` releases it.
struct InFlight {
    fill: ManuallyDrop<Fill>,
    /// The waiter; `None` once it was told that the copies are late.
    reply: Option<Reply<Result<(), ShareError>>>,
    /// The event recorded behind the copies. `None` if the driver refused to record one.
    mark: Option<RecordedEvent>,
    /// The error, if they were submitted only in part.
    error: Option<CudaError>,
    bytes: u64,
    begun: Instant,
    asking: PollSchedule,
}

impl Shares {
    pub(super) fn new(options: &CudaOptions) -> Self {
        let CudaOptions { fence_timeout, copy_timeout, .. } = *options;
        Self { waiting: Vec::new(), copying: Vec::new(), suspected: false, fence_timeout, copy_timeout }
    }

    /// Accepts a request, and handles it now or when the streams that use its memory have passed their work.
    pub(super) fn start(&mut self, wish: ExportRequest, gpu: &mut Gpu, setting: &Setting) {
        match wish.readiness() {
            Some(Ok(())) => self.begin(wish, gpu, setting),
            Some(Err(error)) => wish.refuse(error.into()),
            None => self.waiting.push(Waiting { wish, until: Instant::now() + self.fence_timeout }),
        }
    }

    /// Starts requests that are ready, refuses those that have waited too long, and completes ended copies. Fails if
    /// the device cannot tell whether copies ended, or hangs.
    pub(super) fn look(&mut self, now: Instant, gpu: &mut Gpu, setting: &Setting) -> Result<(), CudaError> {
        for waiting in std::mem::take(&mut self.waiting) {
            match waiting.wish.readiness() {
                Some(Ok(())) => self.begin(waiting.wish, gpu, setting),
                Some(Err(error)) => waiting.wish.refuse(error.into()),
                None if waiting.until > now => self.waiting.push(waiting),
                None => {
                    let (device, waited) = (setting.device(), self.fence_timeout);
                    waiting.wish.refuse(ShareError::FenceTimedOut { device, waited });
                }
            }
        }
        if std::mem::take(&mut self.suspected) {
            // A repeated error is final.
            gpu.is_idle(Direction::Out).or_else(|_| gpu.is_idle(Direction::Out))?;
        }
        self.end_copies(now, gpu, setting)?;
        self.tell_late(now, setting);
        match self
            .copying
            .iter()
            .any(|flight| flight.begun + self.copy_timeout * HANG_FACTOR <= now)
        {
            true => {
                let waited = self.copy_timeout * HANG_FACTOR;
                Err(CudaError::Hangs { device: setting.device(), waited })
            }
            false => Ok(()),
        }
    }

    /// Fails everything after a device failure. Copies that the device still reports as ended are completed; the memory
    /// of the others is leaked.
    pub(super) fn fail(&mut self, error: &CudaError, gpu: &mut Gpu, setting: &Setting) {
        for waiting in std::mem::take(&mut self.waiting) {
            waiting.wish.refuse(error.clone().into());
        }
        for mut flight in std::mem::take(&mut self.copying) {
            match flight.mark.as_ref().is_some_and(|mark| gpu.has_passed(mark) == Ok(true)) {
                true => flight.ended(gpu, setting),
                false => {
                    setting.counters.kept_bytes.add(flight.bytes);
                    flight.tell(Err(error.clone().into()));
                }
            }
        }
    }

    pub(super) fn are_over(&self) -> bool {
        self.waiting.is_empty() && self.copying.is_empty()
    }

    /// The next time to act in any case. Pending fences are polled elsewhere.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        let waiting = self.waiting.iter().map(|waiting| waiting.until).min();
        let copying = self.copying.first().map(|flight| flight.asking.ask_at());
        [waiting, copying].into_iter().flatten().min()
    }

    fn begin(&mut self, wish: ExportRequest, gpu: &mut Gpu, setting: &Setting) {
        match wish {
            ExportRequest::Name(memories, reply) => {
                let names = name_all(&memories, gpu);
                self.suspected |= names.iter().any(Result::is_err);
                let _ = reply.send(Ok(names)); // Nobody waits any more: nothing was begun.
            }
            ExportRequest::Fill(fill, reply) => {
                let begun = InFlight::begin(fill, reply, gpu, setting);
                self.suspected |= begun.is_none();
                self.copying.extend(begun);
            }
        }
    }

    /// Completes the ended copies, oldest first: those of one stream end in order.
    fn end_copies(&mut self, now: Instant, gpu: &mut Gpu, setting: &Setting) -> Result<(), CudaError> {
        while let Some(oldest) = self.copying.first_mut().filter(|oldest| oldest.asking.is_due(now)) {
            oldest.asking.asked(now);
            // Queried twice if the driver refuses: a repeated error is final.
            if !oldest.has_ended(gpu).or_else(|_| oldest.has_ended(gpu))? {
                return Ok(());
            }
            self.copying.remove(0).ended(gpu, setting);
        }
        Ok(())
    }

    /// Reports late copies to their waiters. Their memory stays held.
    fn tell_late(&mut self, now: Instant, setting: &Setting) {
        let waited = self.copy_timeout;
        for flight in self.copying.iter_mut().filter(|flight| flight.begun + waited <= now) {
            flight.tell(Err(ShareError::CopyTimedOut { device: setting.device(), waited }));
        }
    }
}

impl ExportRequest {
    /// Whether all fences of the memory are passed: `None` while one is not.
    fn readiness(&self) -> Option<Result<(), CudaError>> {
        let memories: Box<dyn Iterator<Item = &Arc<CudaMemory>>> = match self {
            Self::Name(memories, _) => Box::new(memories.iter()),
            Self::Fill(fill, _) => Box::new(fill.parts.iter().map(|(memory, _)| memory).chain([&fill.to])),
        };
        let unready = memories.map(|memory| memory.is_free()).find(|free| *free != Some(Ok(())));
        unready.unwrap_or(Some(Ok(())))
    }

    /// Reports an error to the waiter, if there still is one.
    pub(super) fn refuse(self, error: ShareError) {
        match self {
            Self::Name(memories, reply) => {
                drop(memories);
                let _ = reply.send(Err(error));
            }
            Self::Fill(fill, reply) => {
                drop(fill);
                let _ = reply.send(Err(error));
            }
        }
    }
}

impl InFlight {
    /// Submits all copies to the stream, up to the first one that the driver refuses. `None` if none was submitted.
    fn begin(
        fill: Fill,
        reply: Reply<Result<(), ShareError>>,
        gpu: &mut Gpu,
        setting: &Setting,
    ) -> Option<Self> {
        let begun = Instant::now();
        let mut flight = Self {
            fill: ManuallyDrop::new(fill),
            reply: Some(reply),
            mark: None,
            error: None,
            bytes: 0,
            begun,
            asking: PollSchedule::new(begun),
        };
        if let Err(error) = flight.enqueue(gpu) {
            flight.error = Some(error);
        }
        if flight.bytes == 0 {
            flight.ended(gpu, setting);
            return None;
        }
        flight.mark = gpu.mark_within().ok();
        Some(flight)
    }

    fn enqueue(&mut self, gpu: &mut Gpu) -> Result<(), CudaError> {
        for (from, offset) in &self.fill.parts {
            let to = self.fill.to.address() + offset;
            // SAFETY: `SharedBuffer::fill` judged the part to be in bounds of the buffer. Both memories are kept by
            // `fill`, which only `ended` lets go, and that is for copies whose mark, made after this, was passed.
            unsafe { gpu.copy_within(to, from.address(), from.len_bytes() as usize) }?;
            self.bytes += from.len_bytes();
        }
        Ok(())
    }

    /// Without an event, the end of the stream decides.
    fn has_ended(&self, gpu: &Gpu) -> Result<bool, CudaError> {
        Ok(match &self.mark {
            Some(mark) => gpu.has_passed(mark)?,
            None => gpu.is_idle_within()?,
        })
    }

    /// Releases the memory, once the device no longer uses it.
    fn ended(mut self, gpu: &mut Gpu, setting: &Setting) {
        if let Some(mark) = self.mark.take() {
            gpu.recycle(mark);
        }
        setting.counters.shared_bytes.add(self.bytes);
        let end = match self.error.take() {
            None => Ok(()),
            Some(source) => Err(ShareError::CopyRefused { device: setting.device(), source }),
        };
        let reply = self.reply.take();
        drop(ManuallyDrop::into_inner(self.fill));
        if let Some(reply) = reply {
            let _ = reply.send(end); // Nobody waits any more.
        }
    }

    /// Reports to the waiter, once.
    fn tell(&mut self, end: Result<(), ShareError>) {
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(end); // Nobody waits any more.
        }
    }
}

/// Exports memories in place, each allocation once: a handle costs a driver call.
fn name_all(memories: &[Arc<CudaMemory>], gpu: &Gpu) -> Vec<Name> {
    let mut last: Option<(u64, u64, Result<IpcHandle, CudaError>)> = None;
    let name = |memory: &Arc<CudaMemory>| -> Name {
        let address = memory.address();
        if last
            .as_ref()
            .is_none_or(|(start, len, _)| address < *start || address - start >= *len)
        {
            let (start, len) = gpu.driver().allocation_of(address)?;
            last = Some((start, len, gpu.driver().ipc_handle(start)));
        }
        match &last {
            Some((start, _, handle)) => handle.clone().map(|handle| (handle, address - start)),
            None => unreachable!("it was set just above"),
        }
    };
    memories.iter().map(name).collect()
}
