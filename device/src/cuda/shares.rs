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
    share::ShareError,
    thread::Setting,
};

/// What other processes are to have of an engine's memory: it waits for the caller's streams, and for copies within the
/// device. Whoever asked waits for the answer, which bounds all of this.
pub(super) struct Shares {
    waiting: Vec<Waiting>,
    /// In the order in which they were put on the one stream of such copies.
    copying: Vec<InFlight>,
    /// Whether the driver refused something since the last look, so that the device itself is to be asked.
    suspected: bool,
    fence_timeout: Duration,
    copy_timeout: Duration,
}

/// What is to be shared, once the streams that write it are past that.
#[derive(Debug)]
pub(super) enum ExportRequest {
    /// To name memory to other processes as it is.
    Name(Vec<Arc<CudaMemory>>, Reply<Result<Vec<Name>, ShareError>>),
    /// To fill a shared buffer with copies.
    Fill(Fill, Reply<Result<(), ShareError>>),
}

/// Where one memory is for another process: the handle of its allocation, and its place in that.
pub(super) type Name = Result<(IpcHandle, u64), CudaError>;

/// Copies to one memory.
#[derive(Debug)]
pub(super) struct Fill {
    pub(super) to: Arc<CudaMemory>,
    /// What is copied, and to which offset: judged to be in bounds.
    pub(super) parts: Vec<(Arc<CudaMemory>, u64)>,
}

struct Waiting {
    wish: ExportRequest,
    until: Instant,
}

/// Copies that the device may be at work on. Dropping them keeps their memory for good: only `ended` lets go of it.
struct InFlight {
    fill: ManuallyDrop<Fill>,
    /// Who waits; nobody any more once they were told that the copies are late.
    reply: Option<Reply<Result<(), ShareError>>>,
    /// Passed when the copies have ended. `None` where the driver refused to make one.
    mark: Option<RecordedEvent>,
    /// What went wrong when they were given to the device in part.
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

    /// Takes a wish, and fulfils it now or when the streams that use its memory are past their work.
    pub(super) fn start(&mut self, wish: ExportRequest, gpu: &mut Gpu, setting: &Setting) {
        match wish.readiness() {
            Some(Ok(())) => self.begin(wish, gpu, setting),
            Some(Err(error)) => wish.refuse(error.into()),
            None => self.waiting.push(Waiting { wish, until: Instant::now() + self.fence_timeout }),
        }
    }

    /// Begins what has become possible, refuses what has waited too long, and ends copies that have ended. Fails where
    /// the device cannot tell of them, or hangs.
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
            // What the driver says twice holds.
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

    /// Gives up everything: the device failed. Copies of which it still says that they ended have ended; the memory of the
    /// others is kept for good.
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

    /// When something is to be done, whatever comes. The fences that are waited for are asked after by themselves.
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

    /// Ends the oldest copies for as long as they have ended: those of one stream end in order.
    fn end_copies(&mut self, now: Instant, gpu: &mut Gpu, setting: &Setting) -> Result<(), CudaError> {
        while let Some(oldest) = self.copying.first_mut().filter(|oldest| oldest.asking.is_due(now)) {
            oldest.asking.asked(now);
            // Asked twice where the driver refuses: what it says twice holds.
            if !oldest.has_ended(gpu).or_else(|_| oldest.has_ended(gpu))? {
                return Ok(());
            }
            self.copying.remove(0).ended(gpu, setting);
        }
        Ok(())
    }

    /// Tells those who wait for copies that they take too long. Their memory stays held.
    fn tell_late(&mut self, now: Instant, setting: &Setting) {
        let waited = self.copy_timeout;
        for flight in self.copying.iter_mut().filter(|flight| flight.begun + waited <= now) {
            flight.tell(Err(ShareError::CopyTimedOut { device: setting.device(), waited }));
        }
    }
}

impl ExportRequest {
    /// Whether all streams that use the memory are past their work: `None` while one is not.
    fn readiness(&self) -> Option<Result<(), CudaError>> {
        let memories: Box<dyn Iterator<Item = &Arc<CudaMemory>>> = match self {
            Self::Name(memories, _) => Box::new(memories.iter()),
            Self::Fill(fill, _) => Box::new(fill.parts.iter().map(|(memory, _)| memory).chain([&fill.to])),
        };
        let unready = memories.map(|memory| memory.is_free()).find(|free| *free != Some(Ok(())));
        unready.unwrap_or(Some(Ok(())))
    }

    /// Says that nothing comes of it. Whoever does not wait any more is told nothing.
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
    /// Puts all copies on the stream, up to the first that the driver refuses. `None` where the device has nothing of them.
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
            // SAFETY: `SharedBuffer::fill` judged the part to be in bounds of the buffer. Both memories are kept by `fill`,
            // which only `ended` lets go, and that is for copies whose mark, made after this, was passed.
            unsafe { gpu.copy_within(to, from.address(), from.len_bytes() as usize) }?;
            self.bytes += from.len_bytes();
        }
        Ok(())
    }

    /// Without a mark of its own, the end of the stream tells.
    fn has_ended(&self, gpu: &Gpu) -> Result<bool, CudaError> {
        Ok(match &self.mark {
            Some(mark) => gpu.has_passed(mark)?,
            None => gpu.is_idle_within()?,
        })
    }

    /// Lets go of the memory: to be called when the device has nothing of the copies any more.
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

    /// Tells whoever waits, once.
    fn tell(&mut self, end: Result<(), ShareError>) {
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(end); // Nobody waits any more.
        }
    }
}

/// Names memories to other processes, each allocation once: asking for a handle costs a call.
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
