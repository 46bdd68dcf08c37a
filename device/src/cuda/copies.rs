use std::{mem::ManuallyDrop, time::Instant};

use super::{
    error::{CudaError, DriverError},
    flight::{Direction, Flights, Timing},
    gpu::{Gpu, RecordedEvent},
    inbox::{Job, Reply},
    memory::CudaMemory,
    options::{CudaOptions, HANG_FACTOR},
    setting::Setting,
    stream::StreamHandle,
    waiters::Ticket,
};
use crate::{
    engine::{CopyError, CopySegment},
    id::Id,
    slot::Slot,
};

/// The copies of an engine: those waiting for a caller's stream, and those in flight.
pub(super) struct Copies {
    /// In the order in which they came. Each owns a slot, which bounds them.
    waiting: Vec<Waiting>,
    flights: Flights<InFlight>,
    /// The directions that have signalled since the last poll.
    rung: [bool; 2],
    /// Callers' streams that are to wait for copies. Their threads block until that is arranged, which bounds them.
    orders: Vec<Order>,
    /// Whether the driver refused a call since the last poll, so that the device itself is to be queried.
    suspected: bool,
}

struct Waiting {
    job: Job,
    until: Instant,
}

struct Order {
    memory: Id,
    stream: StreamHandle,
    reply: Reply<Result<(), CudaError>>,
}

/// A copy that the device may be executing. Dropping it leaks its slot and memory: only `ended` releases them.
struct InFlight {
    held: ManuallyDrop<CopyResources>,
    /// The waiter's handle; `None` once it was told that the copy is late.
    done: Option<Ticket>,
    /// The event recorded behind the copy. `None` if the driver refused to record one.
    mark: Option<RecordedEvent>,
    /// The error, if the copy was submitted only in part.
    error: Option<CudaError>,
    bytes: u64,
}

/// The slot and memory that a copy holds until it has ended.
struct CopyResources {
    slot: Slot,
    segments: Vec<CopySegment<CudaMemory>>,
}

impl Copies {
    pub(super) fn new(options: &CudaOptions) -> Self {
        let late_after = options.copy_timeout;
        let timing = Timing { late_after, hung_after: late_after * HANG_FACTOR };
        Self {
            waiting: Vec::new(),
            flights: Flights::new(timing),
            rung: [false; 2],
            orders: Vec::new(),
            suspected: false,
        }
    }

    /// Starts a copy, now or once the streams that use its memory have passed their fences.
    pub(super) fn start(&mut self, job: Job, gpu: &mut Gpu, setting: &Setting) {
        match readiness(&job) {
            Some(Ok(())) => self.begin(job, gpu, setting),
            Some(Err(error)) => self.refuse(job, &error, setting),
            None => self
                .waiting
                .push(Waiting { job, until: Instant::now() + setting.options.fence_timeout }),
        }
    }

    /// Reports that a copy cannot start, after returning its slot.
    pub(super) fn refuse(&self, job: Job, error: &CudaError, setting: &Setting) {
        refuse(job, CopyError::DeviceFailed { device: setting.device(), source: error.clone() });
    }

    /// Records the device's signal for a copy of this direction.
    pub(super) fn rang(&mut self, direction: Direction) {
        self.rung[direction as usize] = true;
    }

    /// Records that the driver refused a call: without a copy in flight to reveal a failed device, the next poll
    /// queries it.
    pub(super) fn suspect(&mut self) {
        self.suspected = true;
    }

    /// Starts the copies whose fences are passed by now, and refuses those that have waited too long.
    pub(super) fn start_waiting(&mut self, now: Instant, gpu: &mut Gpu, setting: &Setting) {
        if self.waiting.is_empty() {
            return;
        }
        for waiting in std::mem::take(&mut self.waiting) {
            match readiness(&waiting.job) {
                Some(Ok(())) => self.begin(waiting.job, gpu, setting),
                Some(Err(error)) => self.refuse(waiting.job, &error, setting),
                None if waiting.until > now => self.waiting.push(waiting),
                None => {
                    let waited = setting.options.fence_timeout;
                    refuse(waiting.job, CopyError::FenceTimedOut { device: setting.device(), waited });
                }
            }
        }
    }

    /// Completes the copies that have ended, and reports late ones to their waiters. Fails if the device cannot tell
    /// whether a copy has ended, or hangs.
    pub(super) fn look(&mut self, now: Instant, gpu: &mut Gpu, setting: &Setting) -> Result<(), CudaError> {
        if std::mem::take(&mut self.suspected) {
            // Either direction will do: an error spoils the whole context. An error that the driver repeats is final.
            gpu.is_idle(Direction::Out).or_else(|_| gpu.is_idle(Direction::Out))?;
        }
        for direction in Direction::BOTH {
            let rung = std::mem::take(&mut self.rung[direction as usize]);
            let due = self.flights.is_due(direction, now);
            if rung || due {
                let ended = self.end_all(direction, gpu, setting)?;
                if !rung {
                    setting.counters.ends_found_by_asking.add(ended);
                }
                self.flights.still_running(direction, now);
            }
        }
        self.tell_late(now, setting);
        match self.flights.hangs(now) {
            true => Err(CudaError::Hangs {
                device: setting.device(),
                waited: setting.options.copy_timeout * HANG_FACTOR,
            }),
            false => Ok(()),
        }
    }

    /// Fails all copies after a device failure. Those that the device still reports as ended are completed; the slots
    /// and memory of the others are leaked. No stream can be made to wait for them any more.
    pub(super) fn fail(&mut self, error: &CudaError, gpu: &mut Gpu, setting: &Setting) {
        for waiting in std::mem::take(&mut self.waiting) {
            self.refuse(waiting.job, error, setting);
        }
        for order in std::mem::take(&mut self.orders) {
            let _ = order.reply.send(Err(error.clone())); // Nobody waits any more: then nobody is told.
        }
        for direction in Direction::BOTH {
            while let Some((flight, late)) = self.flights.land(direction) {
                let ended = flight.mark.as_ref().is_some_and(|mark| gpu.has_passed(mark) == Ok(true));
                match ended {
                    true => self.end(direction, flight, late, gpu, setting),
                    false => keep(flight, late, error, setting),
                }
            }
        }
    }

    /// Records that a stream is to wait for all copies of a memory requested so far.
    pub(super) fn order_later(
        &mut self,
        memory: Id,
        stream: StreamHandle,
        reply: Reply<Result<(), CudaError>>,
    ) {
        self.orders.push(Order { memory, stream, reply });
    }

    /// Makes the recorded streams wait, except for copies that have not started: those are left for later.
    pub(super) fn order_streams(&mut self, gpu: &mut Gpu) {
        for order in std::mem::take(&mut self.orders) {
            let touches = |segments: &[CopySegment<CudaMemory>]| {
                segments.iter().any(|segment| segment.memory.id() == order.memory)
            };
            if self.waiting.iter().any(|waiting| touches(&waiting.job.segments)) {
                self.orders.push(order);
                continue;
            }
            let used = |direction: &Direction| {
                self.flights.lane(*direction).any(|flight| touches(&flight.held.segments))
            };
            let mut directions = Direction::BOTH.into_iter().filter(used);
            let ordered = directions.try_for_each(|direction| {
                let mark = gpu.mark(direction)?;
                let ordered = gpu.order(&order.stream, &mark);
                gpu.recycle(mark);
                ordered
            });
            let _ = order.reply.send(ordered); // Nobody waits any more: the stream waits all the same.
        }
    }

    pub(super) fn are_over(&self) -> bool {
        self.waiting.is_empty() && self.flights.is_empty()
    }

    pub(super) fn wake_at(&self) -> Option<Instant> {
        let waiting = self.waiting.iter().map(|waiting| waiting.until).min();
        [waiting, self.flights.wake_at()].into_iter().flatten().min()
    }

    /// Submits a copy to the device.
    fn begin(&mut self, job: Job, gpu: &mut Gpu, setting: &Setting) {
        let Job { direction, slot, segments, done } = job;
        let held = ManuallyDrop::new(CopyResources { slot, segments });
        let mut flight = InFlight { held, done: Some(done), mark: None, error: None, bytes: 0 };
        if let Err(error) = flight.enqueue(direction, gpu) {
            flight.error = Some(error.into());
        }
        if flight.bytes == 0 {
            // Nothing was submitted. A refusal may be the first sign of a failed device.
            if flight.error.is_some() {
                self.suspect();
            }
            return flight.ended(setting);
        }
        setting.counters.copies_begun.add(1);
        flight.mark = gpu.mark(direction).ok();
        if let Some(mark) = &flight.mark {
            // Without a signal, the copy is polled.
            let _ = gpu.ring(direction, mark);
        }
        self.flights.begin(direction, flight, Instant::now());
    }

    /// Completes the ended copies of one direction and returns their number.
    fn end_all(&mut self, direction: Direction, gpu: &mut Gpu, setting: &Setting) -> Result<u64, CudaError> {
        let mut ended = 0;
        // Queried twice if the driver refuses: a repeated error is final.
        while self.has_ended(direction, gpu).or_else(|_| self.has_ended(direction, gpu))? {
            if let Some((flight, late)) = self.flights.land(direction) {
                self.end(direction, flight, late, gpu, setting);
                ended += 1;
            }
        }
        Ok(ended)
    }

    /// Whether the oldest copy of one direction has ended. Copies of a stream end in order: one without an event has
    /// ended when a later one has, or when the stream is idle.
    fn has_ended(&self, direction: Direction, gpu: &Gpu) -> Result<bool, DriverError> {
        let mut flights = self.flights.lane(direction).peekable();
        if flights.peek().is_none() {
            return Ok(false);
        }
        match flights.find_map(|flight| flight.mark.as_ref()) {
            Some(mark) => gpu.has_passed(mark),
            None => gpu.is_idle(direction),
        }
    }

    /// Completes an ended copy.
    fn end(&self, direction: Direction, mut flight: InFlight, late: bool, gpu: &mut Gpu, setting: &Setting) {
        if let Some(mark) = flight.mark.take() {
            gpu.recycle(mark);
        }
        let counters = &setting.counters;
        counters.copies_ended.add(1);
        match direction {
            Direction::Out => counters.out_bytes.add(flight.bytes),
            Direction::In => counters.in_bytes.add(flight.bytes),
        }
        if late {
            counters.copies_quarantined.sub(1);
            counters.quarantined_bytes.sub(flight.bytes);
        }
        flight.ended(setting);
    }

    /// Reports late copies to their waiters. Slots and memory stay held.
    fn tell_late(&mut self, now: Instant, setting: &Setting) {
        for flight in self.flights.newly_late(now) {
            setting.counters.copies_quarantined.add(1);
            setting.counters.quarantined_bytes.add(flight.bytes);
            if let Some(done) = flight.done.take() {
                let waited = setting.options.copy_timeout;
                done.finish(Err(CopyError::TimedOut { device: setting.device(), waited }));
            }
        }
    }
}

impl InFlight {
    /// Submits the segments to the stream, up to the first one that the driver refuses.
    fn enqueue(&mut self, direction: Direction, gpu: &Gpu) -> Result<(), DriverError> {
        let CopyResources { slot, segments } = &mut *self.held;
        // The last time that this thread makes a reference to the slot's bytes before the copy has ended.
        let slot = slot.as_mut_ptr();
        for segment in segments.iter().filter(|segment| segment.len > 0) {
            // SAFETY: `CudaEngine::start` judged the segment to be in bounds and the slot to be the engine's. Both are
            // kept by `held`, which only `ended` lets go, and that is for copies whose mark, made after this, was
            // passed.
            unsafe { gpu.enqueue(direction, slot, segment) }?;
            self.bytes += segment.len as u64;
        }
        Ok(())
    }

    /// Releases slot and memory, once the device no longer uses them. Memory is released first, so that a caller that
    /// sees the copy ended knows that it holds nothing.
    fn ended(self, setting: &Setting) {
        let CopyResources { slot, segments } = ManuallyDrop::into_inner(self.held);
        drop(segments);
        let end = match self.error {
            None => Ok(slot),
            Some(source) => {
                drop(slot);
                Err(CopyError::Refused { device: setting.device(), source })
            }
        };
        match self.done {
            Some(done) => done.finish(end),
            None => drop(end),
        }
    }
}

/// Leaks the slot and memory of a copy, whose end is unknown. The slot's place in the pool is refilled with ordinary
/// memory, so that waiters for a slot get one and learn of the failure.
fn keep(mut flight: InFlight, late: bool, error: &CudaError, setting: &Setting) {
    let counters = &setting.counters;
    counters.copies_kept.add(1);
    if late {
        counters.copies_quarantined.sub(1);
        counters.quarantined_bytes.sub(flight.bytes);
    }
    let CopyResources { slot, segments } = ManuallyDrop::into_inner(flight.held);
    std::mem::forget(segments);
    counters.kept_bytes.add(slot.forfeit() as u64 + flight.bytes);
    if let Some(done) = flight.done.take() {
        done.finish(Err(CopyError::DeviceFailed { device: setting.device(), source: error.clone() }));
    }
}

/// Returns the slot of a copy that did not start, then reports the error.
fn refuse(job: Job, error: CopyError) {
    let Job { slot, segments, done, .. } = job;
    drop((slot, segments));
    done.finish(Err(error));
}

/// Whether all fences of a copy's memory are passed: `None` while one is not.
fn readiness(job: &Job) -> Option<Result<(), CudaError>> {
    job.segments
        .iter()
        .try_for_each(|segment| match segment.memory.is_free() {
            Some(Ok(())) => std::ops::ControlFlow::Continue(()),
            other => std::ops::ControlFlow::Break(other),
        })
        .break_value()
        .unwrap_or(Some(Ok(())))
}
