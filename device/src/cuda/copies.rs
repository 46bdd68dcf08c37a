use std::{
    mem::ManuallyDrop,
    sync::{Arc, Weak},
    time::Instant,
};

use super::{
    error::{CudaError, DriverError},
    flight::{Direction, Flights, Timing},
    gpu::{Gpu, RecordedEvent, Submitted},
    holdings::Holdings,
    inbox::{Job, Reply},
    memory::CudaMemory,
    options::{CudaOptions, HANG_FACTOR},
    route::{Route, needs_scratch},
    setting::Setting,
    stream::StreamHandle,
    waiters::WaiterHandle,
};
use crate::{
    engine::{CopyError, CopySegment},
    host_memory::AllocError,
    id::Id,
    slot::Slot,
};

/// The copies of an engine: those waiting for a caller's stream, and those in flight.
pub(super) struct Copies {
    /// The copies that wait for a caller's stream, in the order of their requests. Each owns a slot, which bounds them.
    waiting: Vec<Waiting>,
    flights: Flights<InFlight>,
    /// For each direction, the scratch memory of its copies in flight. One is enough: they share a stream, so each uses it
    /// when the one before has ended. When none is in flight, it is returned, and the engine's cache keeps it.
    scratch: [Weak<CudaMemory>; 2],
    /// For each direction, how many signals were requested and have not arrived. One at a time: the driver takes longer for
    /// each than a copy of 1 MiB takes, and the copies that end meanwhile are found with it.
    signals_due: [u32; 2],
    /// For each direction, whether a copy has signalled its end since the last poll.
    signalled: [bool; 2],
    /// Requests that a caller's stream wait for copies. Each caller blocks until its request is handled, which bounds
    /// them.
    stream_waits: Vec<StreamWait>,
    /// Whether the driver refused a call since the last poll. Then the next poll queries the device itself.
    is_suspect: bool,
}

/// The most signals to come in one direction: a second one where polling found an end before the first, which is late, or
/// was lost.
const SIGNALS_MAX: u32 = 2;

struct Waiting {
    job: Job,
    deadline: Instant,
}

struct StreamWait {
    memory: Id,
    stream: StreamHandle,
    reply: Reply<Result<(), CudaError>>,
}

/// A copy that the device may be executing. Dropping it leaks its slot and memory: only `release` releases them.
struct InFlight {
    resources: ManuallyDrop<CopyResources>,
    /// The handle of the waiter; `None` once the copy was reported as late.
    waiter: Option<WaiterHandle>,
    /// The event recorded after the copy. `None` if the driver refused to record it.
    event: Option<RecordedEvent>,
    submitted: Submitted,
}

/// The slot and memory that a copy holds until it has ended.
struct CopyResources {
    slot: Slot,
    segments: Vec<CopySegment<CudaMemory>>,
    /// As long as the slot; `None` if no runs pass through it.
    scratch: Option<Arc<CudaMemory>>,
}

impl Copies {
    pub(super) fn new(options: &CudaOptions) -> Self {
        let late_after = options.copy_timeout;
        let timing = Timing { late_after, hung_after: late_after * HANG_FACTOR };
        Self {
            waiting: Vec::new(),
            flights: Flights::new(timing),
            scratch: [Weak::new(), Weak::new()],
            signals_due: [0; 2],
            signalled: [false; 2],
            stream_waits: Vec::new(),
            is_suspect: false,
        }
    }

    /// Starts a copy, now or once the fences of its memory are passed. Refuses it if a fence has failed.
    pub(super) fn start(&mut self, job: Job, gpu: &mut Gpu, holdings: &mut Holdings, setting: &Setting) {
        match readiness(&job) {
            Some(Ok(())) => self.begin(job, gpu, holdings, setting),
            Some(Err(error)) => self.refuse(job, &error, setting),
            None => self
                .waiting
                .push(Waiting { job, deadline: Instant::now() + setting.options.fence_timeout }),
        }
    }

    /// Reports that a copy cannot start, after returning its slot.
    pub(super) fn refuse(&self, job: Job, error: &CudaError, setting: &Setting) {
        refuse(job, CopyError::DeviceFailed { device: setting.device(), source: error.clone() });
    }

    /// Records the device's signal that a copy of this direction has ended.
    pub(super) fn signal(&mut self, direction: Direction) {
        self.signalled[direction as usize] = true;
        let due = &mut self.signals_due[direction as usize];
        *due = due.saturating_sub(1);
    }

    /// Records that the driver refused a call: without a copy in flight to reveal a failed device, the next poll
    /// queries it.
    pub(super) fn suspect(&mut self) {
        self.is_suspect = true;
    }

    /// Starts the copies whose fences are passed, and refuses those with a failed fence and those that have waited too
    /// long.
    pub(super) fn start_waiting(
        &mut self,
        now: Instant,
        gpu: &mut Gpu,
        holdings: &mut Holdings,
        setting: &Setting,
    ) {
        if self.waiting.is_empty() {
            return;
        }
        for waiting in std::mem::take(&mut self.waiting) {
            match readiness(&waiting.job) {
                Some(Ok(())) => self.begin(waiting.job, gpu, holdings, setting),
                Some(Err(error)) => self.refuse(waiting.job, &error, setting),
                None if waiting.deadline > now => self.waiting.push(waiting),
                None => {
                    let waited = setting.options.fence_timeout;
                    refuse(waiting.job, CopyError::FenceTimedOut { device: setting.device(), waited });
                }
            }
        }
    }

    /// Completes the copies that have ended, and reports late ones to their waiters. Fails if the device hangs, or the
    /// driver cannot report whether a copy has ended.
    pub(super) fn poll(&mut self, now: Instant, gpu: &mut Gpu, setting: &Setting) -> Result<(), CudaError> {
        if std::mem::take(&mut self.is_suspect) {
            // Either direction will do: an error makes the whole context unusable. A repeated error is final.
            gpu.is_idle(Direction::Out).or_else(|_| gpu.is_idle(Direction::Out))?;
        }
        for direction in Direction::BOTH {
            let signalled = std::mem::take(&mut self.signalled[direction as usize]);
            let due = self.flights.is_due(direction, now);
            let mut signals_max = 1;
            if signalled || due {
                let ended_count = self.complete_ended(direction, gpu, setting)?;
                if !signalled && ended_count > 0 {
                    setting.counters.ends_found_by_polling.add(ended_count);
                    signals_max = SIGNALS_MAX;
                }
                self.flights.still_running(direction, now);
            }
            self.request_signal(direction, signals_max, gpu);
        }
        self.report_late(now, setting);
        match self.flights.hangs(now) {
            true => Err(CudaError::Hangs {
                device: setting.device(),
                waited: setting.options.copy_timeout * HANG_FACTOR,
            }),
            false => Ok(()),
        }
    }

    /// Ends all copies after a device failure. Copies that have not started are refused, and return their slots.
    /// Started copies that the driver still reports as ended are completed; the slots and memory of all others are
    /// leaked. Requests to make a stream wait fail.
    pub(super) fn fail(&mut self, error: &CudaError, gpu: &mut Gpu, setting: &Setting) {
        for waiting in std::mem::take(&mut self.waiting) {
            self.refuse(waiting.job, error, setting);
        }
        for wait in std::mem::take(&mut self.stream_waits) {
            let _ = wait.reply.send(Err(error.clone())); // Fails if the caller has stopped waiting.
        }
        for direction in Direction::BOTH {
            let _ = self.complete_ended(direction, gpu, setting); // The device may refuse to tell.
            while let Some((flight, late)) = self.flights.remove_oldest(direction) {
                leak(flight, late, error, setting);
            }
        }
    }

    /// Accepts a request that a stream wait for all copies of a memory requested so far.
    pub(super) fn add_stream_wait(
        &mut self,
        memory: Id,
        stream: StreamHandle,
        reply: Reply<Result<(), CudaError>>,
    ) {
        self.stream_waits.push(StreamWait { memory, stream, reply });
    }

    /// Makes streams wait for copies, as requested. A request waits while a copy of its memory has not started.
    pub(super) fn make_streams_wait(&mut self, gpu: &mut Gpu) {
        for wait in std::mem::take(&mut self.stream_waits) {
            let touches = |segments: &[CopySegment<CudaMemory>]| {
                segments.iter().any(|segment| segment.memory.id() == wait.memory)
            };
            if self.waiting.iter().any(|waiting| touches(&waiting.job.segments)) {
                self.stream_waits.push(wait);
                continue;
            }
            let used = |direction: &Direction| {
                self.flights
                    .copies(*direction)
                    .any(|flight| touches(&flight.resources.segments))
            };
            let mut directions = Direction::BOTH.into_iter().filter(used);
            let result = directions.try_for_each(|direction| {
                let event = gpu.record_event(direction)?;
                let result = gpu.make_wait(&wait.stream, &event);
                gpu.recycle(event);
                result
            });
            let _ = wait.reply.send(result); // Fails if the caller has stopped waiting; the stream waits anyway.
        }
    }

    pub(super) fn are_done(&self) -> bool {
        self.waiting.is_empty() && self.flights.is_empty()
    }

    pub(super) fn wake_at(&self) -> Option<Instant> {
        let waiting = self.waiting.iter().map(|waiting| waiting.deadline).min();
        [waiting, self.flights.wake_at()].into_iter().flatten().min()
    }

    /// Submits a copy to the device.
    fn begin(&mut self, job: Job, gpu: &mut Gpu, holdings: &mut Holdings, setting: &Setting) {
        let scratch = match self.scratch_for(&job, gpu, holdings, setting) {
            Ok(scratch) => scratch,
            Err(error) => {
                self.suspect();
                let (device, reason) = (setting.device(), error.to_string());
                return refuse(job, CopyError::NoScratch { device, reason });
            }
        };
        let Job { direction, slot, segments, waiter } = job;
        let resources = ManuallyDrop::new(CopyResources { slot, segments, scratch });
        let mut flight =
            InFlight { resources, waiter: Some(waiter), event: None, submitted: Submitted::default() };
        flight.submit(direction, gpu);
        if !flight.submitted.may_run {
            // Nothing was submitted. The refusal may be the first sign of a failed device.
            if flight.submitted.error.is_some() {
                self.suspect();
            }
            return flight.release(setting);
        }
        setting.counters.copies_begun.add(1);
        // An event for each: if two copies shared one, beginning eight would take 14 calls, not 18, but a chunk would wait
        // for the next one's copy, 0.16 ms for 4 MiB at 25 GB/s where a call takes some microseconds, or as long as it hangs.
        flight.event = gpu.record_event(direction).ok();
        let bytes = flight.submitted.bytes;
        self.flights.begin(direction, flight, bytes, Instant::now());
    }

    /// The scratch memory for a copy, if it needs any. It is allocated once for each direction, and again when slots become
    /// longer: then the copies in flight keep the one before.
    fn scratch_for(
        &mut self,
        job: &Job,
        gpu: &Gpu,
        holdings: &mut Holdings,
        setting: &Setting,
    ) -> Result<Option<Arc<CudaMemory>>, AllocError> {
        if !job.segments.iter().any(|segment| needs_scratch(&segment.rectangle)) {
            return Ok(None);
        }
        let last = &mut self.scratch[job.direction as usize];
        let len = job.slot.len();
        if let Some(scratch) = last.upgrade().filter(|scratch| scratch.len_bytes() >= len as u64) {
            return Ok(Some(scratch));
        }
        let scratch = holdings.allocate(len, gpu, setting, None)?;
        *last = Arc::downgrade(&scratch);
        Ok(Some(scratch))
    }

    /// Requests a signal for the oldest event in flight, unless `signals_max` are still to come. Without a signal, polling
    /// finds the end of the copies.
    fn request_signal(&mut self, direction: Direction, signals_max: u32, gpu: &Gpu) {
        let mut events = self.flights.copies(direction).filter_map(|flight| flight.event.as_ref());
        let due = &mut self.signals_due[direction as usize];
        match events.next() {
            Some(event) if *due < signals_max => {
                *due += u32::from(gpu.request_signal(direction, event).is_ok())
            }
            Some(_) => {}
            None => *due = 0, // What is still to come signals nothing new.
        }
    }

    /// Completes the ended copies of one direction and returns their number.
    fn complete_ended(
        &mut self,
        direction: Direction,
        gpu: &mut Gpu,
        setting: &Setting,
    ) -> Result<u64, CudaError> {
        let mut ended_count = 0;
        // Queried twice if the driver refuses: a repeated error is final.
        while self.has_ended(direction, gpu).or_else(|_| self.has_ended(direction, gpu))? {
            if let Some((flight, late)) = self.flights.remove_oldest(direction) {
                self.complete(direction, flight, late, gpu, setting);
                ended_count += 1;
            }
        }
        Ok(ended_count)
    }

    /// Whether the oldest copy of one direction has ended. Copies of a stream end in order: a copy without an event has
    /// ended when a later copy has, or when the stream is idle.
    fn has_ended(&self, direction: Direction, gpu: &Gpu) -> Result<bool, DriverError> {
        let mut flights = self.flights.copies(direction).peekable();
        if flights.peek().is_none() {
            return Ok(false);
        }
        match flights.find_map(|flight| flight.event.as_ref()) {
            Some(event) => gpu.has_passed(event),
            None => gpu.is_idle(direction),
        }
    }

    /// Completes an ended copy.
    fn complete(
        &self,
        direction: Direction,
        mut flight: InFlight,
        late: bool,
        gpu: &mut Gpu,
        setting: &Setting,
    ) {
        if let Some(event) = flight.event.take() {
            gpu.recycle(event);
        }
        let counters = &setting.counters;
        counters.copies_ended.add(1);
        match direction {
            Direction::Out => counters.out_bytes.add(flight.submitted.bytes),
            Direction::In => counters.in_bytes.add(flight.submitted.bytes),
        }
        if late {
            counters.copies_quarantined.sub(1);
            counters.quarantined_bytes.sub(flight.submitted.bytes);
        }
        flight.release(setting);
    }

    /// Reports late copies to their waiters. Slots and memory stay held.
    fn report_late(&mut self, now: Instant, setting: &Setting) {
        for flight in self.flights.newly_late(now) {
            setting.counters.copies_quarantined.add(1);
            setting.counters.quarantined_bytes.add(flight.submitted.bytes);
            if let Some(waiter) = flight.waiter.take() {
                let waited = setting.options.copy_timeout;
                waiter.finish(Err(CopyError::TimedOut { device: setting.device(), waited }));
            }
        }
    }
}

impl InFlight {
    fn submit(&mut self, direction: Direction, gpu: &mut Gpu) {
        let CopyResources { slot, segments, scratch } = &mut *self.resources;
        // This thread makes no further reference to the slot's bytes before the copy has ended.
        let slot = slot.as_mut_ptr().expose_provenance() as u64;
        let scratch = scratch.as_ref().map_or(0, |scratch| scratch.address());
        let placed = segments.iter().map(|segment| (segment.memory.address(), segment.rectangle));
        let route = Route::new(direction, slot, scratch, placed);
        // SAFETY: `CudaEngine::start` checked that the segments are in bounds and the slot the engine's. There is a scratch
        // as long as the slot if a segment needs one (`scratch_for`), and only copies of this direction use it. `resources`
        // keeps all of it. Only `release` releases it, once the device has reported the end of the copy by an event recorded
        // after this, or by an idle stream, or if nothing was submitted.
        self.submitted = unsafe { gpu.submit(Some(direction), route) };
    }

    /// Releases slot and memory, once the device no longer uses them. The memory is released before the end is
    /// reported, so that the caller then finds it released.
    fn release(self, setting: &Setting) {
        let CopyResources { slot, segments, scratch } = ManuallyDrop::into_inner(self.resources);
        drop((segments, scratch));
        let end = match self.submitted.error {
            None => Ok(slot),
            Some(source) => {
                drop(slot);
                Err(CopyError::Refused { device: setting.device(), source })
            }
        };
        match self.waiter {
            Some(waiter) => waiter.finish(end),
            None => drop(end),
        }
    }
}

/// Leaks the slot and memory of a copy whose end is unknown. The slot is replaced in its pool by ordinary memory, so
/// that waiters for a slot get one, and then the engine's error.
fn leak(mut flight: InFlight, late: bool, error: &CudaError, setting: &Setting) {
    let counters = &setting.counters;
    counters.copies_leaked.add(1);
    if late {
        counters.copies_quarantined.sub(1);
        counters.quarantined_bytes.sub(flight.submitted.bytes);
    }
    let CopyResources { slot, segments, scratch } = ManuallyDrop::into_inner(flight.resources);
    std::mem::forget((segments, scratch));
    counters.leaked_bytes.add(slot.forfeit() as u64 + flight.submitted.bytes);
    if let Some(waiter) = flight.waiter.take() {
        waiter.finish(Err(CopyError::DeviceFailed { device: setting.device(), source: error.clone() }));
    }
}

/// Returns the slot of a copy that did not start, then reports the error.
fn refuse(job: Job, error: CopyError) {
    let Job { slot, segments, waiter, .. } = job;
    drop((slot, segments));
    waiter.finish(Err(error));
}

/// Whether all fences of a copy's memory are passed: `None` while any is not, an error if one failed.
fn readiness(job: &Job) -> Option<Result<(), CudaError>> {
    job.segments
        .iter()
        .try_for_each(|segment| match segment.memory.poll_fences() {
            Some(Ok(())) => std::ops::ControlFlow::Continue(()),
            other => std::ops::ControlFlow::Break(other),
        })
        .break_value()
        .unwrap_or(Some(Ok(())))
}
