use std::{
    mem::ManuallyDrop,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

use super::{
    driver::{IpcHandle, Piece},
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
use crate::engine::CopySegment;

/// The pending exports and copies within the device of an engine: they wait for callers' streams, or for copies. Each
/// caller waits for its answer, which bounds them.
pub(super) struct Shares {
    waiting: Vec<Waiting>,
    /// The copies in flight, in the order in which they were submitted to their one stream.
    copying: Vec<InFlight>,
    /// Whether the driver refused a call since the last poll. Then the next poll queries the device itself.
    is_suspect: bool,
    fence_timeout: Duration,
    copy_timeout: Duration,
}

/// The largest part that is copied within the device together with others in one call. A larger one takes longer than a
/// call anyway, and its own call is sure to use the whole rate of the device's memory.
const SMALL_BYTES: usize = 1 << 20;

/// A request to export memory, which waits for the streams that write the memory.
#[derive(Debug)]
pub(super) enum ExportRequest {
    /// Export memory in place.
    InPlace(Vec<Arc<CudaMemory>>, Reply<Result<Vec<Location>, ShareError>>),
    /// Fill memory with copies.
    Fill(Fill, Ended),
}

/// The sender of the end of copies, to a thread that blocks or to a task.
#[derive(Debug)]
pub(super) enum Ended {
    Thread(Reply<Result<(), ShareError>>),
    Task(oneshot::Sender<Result<(), ShareError>>),
}

impl Ended {
    /// Reports the end, if there still is a waiter.
    fn send(self, end: Result<(), ShareError>) {
        match self {
            Self::Thread(reply) => drop(reply.send(end)),
            Self::Task(reply) => drop(reply.send(end)),
        }
    }
}

/// The exported location of one memory: the handle of its allocation, and the offset in the allocation.
pub(super) type Location = Result<(IpcHandle, u64), CudaError>;

/// Copies of several memories into one.
#[derive(Debug)]
pub(super) struct Fill {
    pub(super) to: Arc<CudaMemory>,
    /// The memories and their places in `to`, not empty, and checked to be in bounds.
    pub(super) parts: Vec<CopySegment<CudaMemory>>,
    /// Whether bytes of `to` outside these places become zeros.
    pub(super) zeroes_gaps: bool,
}

struct Waiting {
    request: ExportRequest,
    deadline: Instant,
}

/// Copies that the device may be executing. Dropping this leaks their memory: only `release` releases it.
struct InFlight {
    fill: ManuallyDrop<Fill>,
    /// The waiter's reply; `None` once the copies were reported as late.
    reply: Option<Ended>,
    /// The event recorded after the copies. `None` if the driver refused to record it.
    event: Option<RecordedEvent>,
    /// The driver's error, if the copies were submitted only in part.
    error: Option<CudaError>,
    /// The bytes submitted so far.
    bytes: u64,
    /// Whether a part may have been submitted, even if `bytes` is zero.
    may_run: bool,
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
                    setting.counters.leaked_bytes.add(flight.bytes);
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
            ExportRequest::Fill(fill, reply) => {
                let begun = InFlight::begin(fill, reply, gpu, setting);
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
            Self::Fill(fill, _) => Box::new(fill.parts.iter().map(|part| &part.memory).chain([&fill.to])),
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
            Self::Fill(fill, reply) => {
                drop(fill);
                reply.send(Err(error));
            }
        }
    }
}

impl InFlight {
    /// Submits all copies to the stream, up to the first one that the driver refuses. `None` if none was submitted.
    fn begin(fill: Fill, reply: Ended, gpu: &mut Gpu, setting: &Setting) -> Option<Self> {
        let begun = Instant::now();
        let mut flight = Self {
            fill: ManuallyDrop::new(fill),
            reply: Some(reply),
            event: None,
            error: None,
            bytes: 0,
            may_run: false,
            begun,
            schedule: PollSchedule::new(begun),
        };
        if let Err(error) = flight.enqueue(gpu) {
            flight.error = Some(error);
        }
        if !flight.may_run {
            flight.release(gpu, setting);
            return None;
        }
        flight.event = gpu.record_d2d_event().ok();
        Some(flight)
    }

    fn enqueue(&mut self, gpu: &mut Gpu) -> Result<(), CudaError> {
        let Fill { to, parts, zeroes_gaps } = &*self.fill;
        let copied_bytes: u64 = parts.iter().map(|part| part.len as u64).sum();
        if *zeroes_gaps && copied_bytes < to.len_bytes() {
            // One pass at the rate of the device's memory is cheaper than a call for each gap.
            // SAFETY: `fill` keeps the memory, which only `release` releases, as below.
            unsafe { gpu.zero(to.address(), to.len_bytes() as usize) }?;
            self.may_run = true;
            self.bytes += to.len_bytes() - copied_bytes;
        }
        let piece = |part: &CopySegment<CudaMemory>| {
            let (to, from) = (to.address() + part.at as u64, part.memory.address() + part.offset);
            Piece { to, from, len: part.len }
        };
        let (small, mut rest): (Vec<Piece>, Vec<Piece>) =
            parts.iter().map(piece).partition(|piece| piece.len <= SMALL_BYTES);
        if gpu.batches(small.len()) {
            self.may_run = true; // After an error too.
            // SAFETY: as below; the places of the parts are disjoint, and outside of their memories.
            match unsafe { gpu.copy_batch_within(small.iter().copied()) } {
                Ok(()) => self.bytes += small.iter().map(|piece| piece.len as u64).sum::<u64>(),
                Err(_) => rest.extend(small),
            }
        } else {
            rest.extend(small);
        }
        for Piece { to, from, len } in rest {
            // SAFETY: the caller of `Shares` checked that the part is in bounds of both memories. `fill` keeps both.
            // Only `release` releases them, once the device has reported the end of the copies by an event recorded
            // after this, or by an idle stream, or if nothing was submitted.
            unsafe { gpu.copy_within(to, from, len) }?;
            self.may_run = true;
            self.bytes += len as u64;
        }
        Ok(())
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
        setting.counters.within_bytes.add(self.bytes);
        let end = match self.error.take() {
            None => Ok(()),
            Some(source) => Err(ShareError::CopyRefused { device: setting.device(), source }),
        };
        let reply = self.reply.take();
        drop(ManuallyDrop::into_inner(self.fill));
        if let Some(reply) = reply {
            reply.send(end);
        }
    }

    /// Reports the result to the waiter, unless that was done before.
    fn report(&mut self, result: Result<(), ShareError>) {
        if let Some(reply) = self.reply.take() {
            reply.send(result);
        }
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
