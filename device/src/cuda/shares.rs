use std::{
    any::Any,
    fmt,
    mem::ManuallyDrop,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    driver::IpcHandle,
    error::CudaError,
    fence::PollSchedule,
    flight::Direction,
    gpu::{Gpu, RecordedEvent, Submitted},
    inbox::Reply,
    memory::CudaMemory,
    options::{CudaOptions, HANG_FACTOR},
    route::Route,
    setting::Setting,
    share::ShareError,
};
use crate::engine::CopySegment;

/// The pending exports of an engine: they wait for callers' streams, or for copies within the device. Each caller waits
/// for its answer, which bounds them.
pub(super) struct Shares {
    waiting: Vec<Waiting>,
    /// The copies in flight, in the order in which they were submitted to their one stream.
    copying: Vec<InFlight>,
    /// Whether the driver refused a call since the last poll. Then the next poll queries the device itself.
    is_suspect: bool,
    fence_timeout: Duration,
    copy_timeout: Duration,
}

/// A request to export memory, which waits for the streams that write the memory.
#[derive(Debug)]
pub(super) enum ExportRequest {
    /// Export memory in place.
    InPlace(Vec<Arc<CudaMemory>>, Reply<Result<Vec<Location>, ShareError>>),
    /// Copy within the device.
    Copy(Within, Ended),
}

/// Is called with the end of a copy within the device.
pub(super) struct Ended(pub(super) Box<dyn FnOnce(Result<(), ShareError>) + Send>);

impl fmt::Debug for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ended")
    }
}

/// The exported location of one memory: the handle of its allocation, and the offset in the allocation.
pub(super) type Location = Result<(IpcHandle, u64), CudaError>;

/// Copies between one memory and several others of the same device.
#[derive(Debug)]
pub(super) struct Within {
    /// The one, which has a place for each byte, like a slot.
    pub(super) flat: Arc<CudaMemory>,
    /// The others, each with its place in `flat`, checked to be in bounds.
    pub(super) segments: Vec<CopySegment<CudaMemory>>,
    /// Out of the others into `flat`, or in to them.
    pub(super) direction: Direction,
    /// Whether the bytes of `flat` without a segment become zeros first.
    pub(super) zeroes_gaps: bool,
    /// What is kept until the copies have ended; for ever, if their end is unknown.
    pub(super) _kept: Option<Arc<dyn Any + Send + Sync>>,
}

struct Waiting {
    request: ExportRequest,
    deadline: Instant,
}

/// Copies that the device may be executing. Dropping this leaks their memory: only `release` releases it.
struct InFlight {
    within: ManuallyDrop<Within>,
    /// The waiter; `None` once the copies were reported as late.
    ended: Option<Ended>,
    /// The event recorded after the copies. `None` if the driver refused to record it.
    event: Option<RecordedEvent>,
    submitted: Submitted,
    begun: Instant,
    schedule: PollSchedule,
}

impl Shares {
    pub(super) fn new(options: &CudaOptions) -> Self {
        let CudaOptions { fence_timeout, copy_timeout, .. } = *options;
        Self { waiting: Vec::new(), copying: Vec::new(), is_suspect: false, fence_timeout, copy_timeout }
    }

    /// Starts a request, now or once the fences of its memory are passed. Refuses it if a fence has failed.
    pub(super) fn start(&mut self, request: ExportRequest, gpu: &mut Gpu, setting: &Setting) {
        match request.readiness() {
            Some(Ok(())) => self.begin(request, gpu, setting),
            Some(Err(error)) => request.refuse(error.into()),
            None => self
                .waiting
                .push(Waiting { request, deadline: Instant::now() + self.fence_timeout }),
        }
    }

    /// Starts requests that are ready, refuses those with a failed fence and those that have waited too long, and
    /// completes ended copies. Fails if the device hangs, or the driver cannot report whether copies have ended.
    pub(super) fn poll(&mut self, now: Instant, gpu: &mut Gpu, setting: &Setting) -> Result<(), CudaError> {
        for waiting in std::mem::take(&mut self.waiting) {
            match waiting.request.readiness() {
                Some(Ok(())) => self.begin(waiting.request, gpu, setting),
                Some(Err(error)) => waiting.request.refuse(error.into()),
                None if waiting.deadline > now => self.waiting.push(waiting),
                None => {
                    let (device, waited) = (setting.device(), self.fence_timeout);
                    waiting.request.refuse(ShareError::FenceTimedOut { device, waited });
                }
            }
        }
        if std::mem::take(&mut self.is_suspect) {
            // A repeated error is final.
            gpu.is_idle(Direction::Out).or_else(|_| gpu.is_idle(Direction::Out))?;
        }
        self.end_copies(now, gpu, setting)?;
        self.report_late(now, setting);
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

    /// Ends all requests after a device failure. Waiting ones are refused, copies that the driver still reports as
    /// ended are completed, and the memory of all other copies is leaked.
    pub(super) fn fail(&mut self, error: &CudaError, gpu: &mut Gpu, setting: &Setting) {
        for waiting in std::mem::take(&mut self.waiting) {
            waiting.request.refuse(error.clone().into());
        }
        for mut flight in std::mem::take(&mut self.copying) {
            match flight.event.as_ref().is_some_and(|event| gpu.has_passed(event) == Ok(true)) {
                true => flight.release(gpu, setting),
                false => {
                    setting.counters.leaked_bytes.add(flight.submitted.bytes);
                    flight.report(Err(error.clone().into()));
                }
            }
        }
    }

    pub(super) fn are_done(&self) -> bool {
        self.waiting.is_empty() && self.copying.is_empty()
    }

    /// The next deadline or poll. Fences have a schedule of their own (`Fences`).
    pub(super) fn wake_at(&self) -> Option<Instant> {
        let waiting = self.waiting.iter().map(|waiting| waiting.deadline).min();
        let copying = self.copying.first().map(|flight| flight.schedule.poll_at());
        [waiting, copying].into_iter().flatten().min()
    }

    fn begin(&mut self, request: ExportRequest, gpu: &mut Gpu, setting: &Setting) {
        match request {
            ExportRequest::InPlace(memories, reply) => {
                let locations = export_all(&memories, gpu);
                self.is_suspect |= locations.iter().any(Result::is_err);
                let _ = reply.send(Ok(locations)); // Fails if the caller has stopped waiting.
            }
            ExportRequest::Copy(within, ended) => {
                let begun = InFlight::begin(within, ended, gpu, setting);
                self.is_suspect |= begun.is_none();
                self.copying.extend(begun);
            }
        }
    }

    /// Completes the ended copies, oldest first: copies of one stream end in order.
    fn end_copies(&mut self, now: Instant, gpu: &mut Gpu, setting: &Setting) -> Result<(), CudaError> {
        while let Some(oldest) = self.copying.first_mut().filter(|oldest| oldest.schedule.is_due(now)) {
            oldest.schedule.polled(now);
            // Queried twice if the driver refuses: a repeated error is final.
            if !oldest.has_ended(gpu).or_else(|_| oldest.has_ended(gpu))? {
                return Ok(());
            }
            self.copying.remove(0).release(gpu, setting);
        }
        Ok(())
    }

    /// Reports late copies to their waiters. Their memory stays held.
    fn report_late(&mut self, now: Instant, setting: &Setting) {
        let waited = self.copy_timeout;
        for flight in self.copying.iter_mut().filter(|flight| flight.begun + waited <= now) {
            flight.report(Err(ShareError::CopyTimedOut { device: setting.device(), waited }));
        }
    }
}

impl ExportRequest {
    /// Whether all fences of the memory are passed: `None` while any is not, an error if one failed.
    fn readiness(&self) -> Option<Result<(), CudaError>> {
        let memories: Box<dyn Iterator<Item = &Arc<CudaMemory>>> = match self {
            Self::InPlace(memories, _) => Box::new(memories.iter()),
            Self::Copy(within, _) => {
                Box::new(within.segments.iter().map(|segment| &segment.memory).chain([&within.flat]))
            }
        };
        let unready = memories.map(|memory| memory.poll_fences()).find(|free| *free != Some(Ok(())));
        unready.unwrap_or(Some(Ok(())))
    }

    /// Reports an error to the waiter, if there still is one.
    pub(super) fn refuse(self, error: ShareError) {
        match self {
            Self::InPlace(memories, reply) => {
                drop(memories);
                let _ = reply.send(Err(error));
            }
            Self::Copy(within, ended) => {
                drop(within);
                ended.0(Err(error));
            }
        }
    }
}

impl InFlight {
    /// Submits all copies to the stream, up to the first one that the driver refuses. `None` if none was submitted.
    fn begin(within: Within, ended: Ended, gpu: &mut Gpu, setting: &Setting) -> Option<Self> {
        let begun = Instant::now();
        let mut flight = Self {
            within: ManuallyDrop::new(within),
            ended: Some(ended),
            event: None,
            submitted: Submitted::default(),
            begun,
            schedule: PollSchedule::new(begun),
        };
        flight.submit(gpu);
        if !flight.submitted.may_run {
            flight.release(gpu, setting);
            return None;
        }
        flight.event = gpu.record_d2d_event().ok();
        Some(flight)
    }

    fn submit(&mut self, gpu: &mut Gpu) {
        let Within { flat, segments, direction, zeroes_gaps, .. } = &*self.within;
        if let Some(first) = self.within.first_gap().filter(|_| *zeroes_gaps) {
            // One pass at the rate of the device's memory is cheaper than a call for each gap.
            let len = (flat.len_bytes() - first) as usize;
            // SAFETY: `within` keeps `flat`, of which these are the last `len` bytes. Only `release` releases it, once the
            // device has reported the end of the copies, which the same stream executes after this.
            if let Err(error) = unsafe { gpu.zero(flat.address() + first, len) } {
                self.submitted.error = Some(error.into());
                return;
            }
            self.submitted.may_run = true;
        }
        let placed = segments.iter().map(|segment| (segment.memory.address(), segment.rectangle));
        let route = Route::within(*direction, flat.address(), placed);
        // SAFETY: `share::check` checked that the segments are in bounds of their memories and of `flat`. `within`
        // keeps all memory. Only `release` releases it, once the device has reported the end of the copies by an event
        // recorded after this, or by an idle stream, or if nothing was submitted.
        let copied = unsafe { gpu.submit(None, route) };
        self.submitted = Submitted { may_run: self.submitted.may_run || copied.may_run, ..copied };
    }

    /// Whether the copies have ended. Without an event, their stream must be idle.
    fn has_ended(&self, gpu: &Gpu) -> Result<bool, CudaError> {
        Ok(match &self.event {
            Some(event) => gpu.has_passed(event)?,
            None => gpu.is_d2d_idle()?,
        })
    }

    /// Releases the memory, which the device no longer uses, then reports the end.
    fn release(mut self, gpu: &mut Gpu, setting: &Setting) {
        if let Some(event) = self.event.take() {
            gpu.recycle(event);
        }
        let end = match self.submitted.error.take() {
            None => {
                setting.counters.within_bytes.add(self.within.copied_bytes());
                Ok(())
            }
            Some(source) => Err(ShareError::CopyRefused { device: setting.device(), source }),
        };
        let ended = self.ended.take();
        drop(ManuallyDrop::into_inner(self.within));
        if let Some(Ended(ended)) = ended {
            ended(end);
        }
    }

    /// Reports the result to the waiter, unless that was done before.
    fn report(&mut self, result: Result<(), ShareError>) {
        if let Some(Ended(ended)) = self.ended.take() {
            ended(result);
        }
    }
}

impl Within {
    fn copied_bytes(&self) -> u64 {
        let bytes = |segment: &CopySegment<CudaMemory>| segment.rectangle.run_bytes * segment.rectangle.runs;
        self.segments.iter().map(bytes).sum()
    }

    /// The first byte of `flat` from which on some may have no segment: behind the last segment, if there is no gap before
    /// it. `None` if each has one.
    fn first_gap(&self) -> Option<u64> {
        let end = |CopySegment { rectangle, .. }: &CopySegment<CudaMemory>| {
            rectangle.part + (rectangle.runs - 1) * rectangle.part_stride + rectangle.run_bytes
        };
        let end = self.segments.iter().map(end).max().unwrap_or(0);
        let first = if self.copied_bytes() == end { end } else { 0 };
        Some(first).filter(|first| *first < self.flat.len_bytes())
    }
}

/// Exports memories in place. Successive memories of one allocation share its handle, which is queried once.
fn export_all(memories: &[Arc<CudaMemory>], gpu: &Gpu) -> Vec<Location> {
    let mut last: Option<(u64, u64, Result<IpcHandle, CudaError>)> = None;
    let locate = |memory: &Arc<CudaMemory>| -> Location {
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
    memories.iter().map(locate).collect()
}
