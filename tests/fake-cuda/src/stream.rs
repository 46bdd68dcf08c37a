use std::{collections::VecDeque, ffi::c_void, mem, sync::Arc, thread};

use crate::{
    call,
    copying::{self, Copy, Direction, Pace},
    event::Progress,
    faults::Effect,
    memory::{DeviceRange, Freed, Missing},
    state::{self, Guard, State},
    status::{Answer, Status},
};

/// A stream: a queue of work, executed in order by a separate thread.
#[derive(Debug)]
pub(crate) struct Stream {
    queue: VecDeque<Queued>,
    running: bool,
    /// Whether this stream and the legacy default stream wait for each other.
    pub(crate) blocking: bool,
    /// Whether a program created the stream, and has to destroy it.
    pub(crate) created: bool,
    /// Whether the stream was destroyed. It is removed once its queue is empty.
    pub(crate) closing: bool,
}

/// One item of a stream's work.
#[derive(Debug)]
pub(crate) enum Work {
    Copy(Copy),
    Fill { range: DeviceRange, value: u8, bytes: usize },
    Host { function: HostFunction, argument: *mut c_void },
    Free(u64),
    Record(Arc<Progress>, u64),
    Await(Arc<Progress>, u64),
}

/// A function of the program, called by a stream.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

// SAFETY: nothing in it is bound to a thread. For copies and ranges, see `copying::Place`. For the argument of a host
// function, the program guarantees it, as CUDA's documentation requires.
unsafe impl Send for Work {}

#[derive(Debug)]
struct Queued {
    work: Work,
    /// Whether faults have counted this work. They count it when it reaches the front of the queue.
    is_counted: bool,
    effect: Option<Effect>,
}

/// The next action of a stream's thread.
enum Next {
    /// Run this work. A status is the error of an injected fault.
    Run(Work, Option<Status>),
    Wait,
    End,
}

impl Work {
    /// The name of this work in faults; `None` if no fault can affect it.
    fn fault_name(&self) -> Option<&'static str> {
        match self {
            Self::Copy(copy) => Some(copy.direction.name()),
            Self::Fill { .. } => Some("@memset"),
            Self::Host { .. } => Some("@host"),
            Self::Free(_) => Some("@free"),
            Self::Record(..) | Self::Await(..) => None,
        }
    }
}

impl Stream {
    /// A stream that a program creates.
    pub(crate) fn created(blocking: bool) -> Self {
        Self { queue: VecDeque::new(), running: false, blocking, created: true, closing: false }
    }

    /// A default stream.
    pub(crate) fn default_stream() -> Self {
        Self { created: false, ..Self::created(true) }
    }

    /// Adds a stream to a device and starts its thread.
    pub(crate) fn open(state: &mut State, device: usize, stream: Self) -> u64 {
        let handle = state.handle();
        state.devices[device].streams.insert(handle, stream);
        let generation = state.generation;
        let name = format!("fake-stream-{:x}", handle & 0xFFFF_FFFF);
        let thread = thread::Builder::new()
            .name(name)
            .spawn(move || run_stream(generation, device, handle));
        drop(thread.expect("a test may start threads"));
        handle
    }

    pub(crate) fn enqueue(&mut self, work: Work) {
        self.queue.push_back(Queued { work, is_counted: false, effect: None });
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty() && !self.running
    }

    /// Drops the work that has not started.
    pub(crate) fn abandon(&mut self) {
        self.queue.clear();
    }

    /// The number of copies of one direction that have not started.
    pub(crate) fn waiting(&self, direction: Direction) -> usize {
        let of_direction =
            |queued: &&Queued| matches!(&queued.work, Work::Copy(copy) if copy.direction == direction);
        self.queue.iter().filter(of_direction).count()
    }
}

/// Executes a stream's work, on the stream's thread. Ends when the stream is destroyed and its queue is empty, its
/// context is destroyed, or the machine is reset.
fn run_stream(generation: u64, device: usize, stream: u64) {
    let mut state = state::lock();
    loop {
        if state.generation != generation {
            return;
        }
        state = match next(&mut state, device, stream) {
            Next::Run(work, failure) => run(state, device, stream, work, failure),
            Next::Wait => state::wait(state),
            Next::End => return,
        };
    }
}

/// Takes the work at the front of a stream's queue, if it can start.
fn next(state: &mut State, device: usize, stream: u64) -> Next {
    let device = &mut state.devices[device];
    let Some(found) = device.streams.get_mut(&stream) else { return Next::End };
    let Some(front) = found.queue.front_mut() else {
        if found.closing {
            device.streams.remove(&stream);
            return Next::End;
        }
        return Next::Wait;
    };
    if !mem::replace(&mut front.is_counted, true) {
        front.effect = front.work.fault_name().and_then(|name| state.faults.count(name));
    }
    if front.effect == Some(Effect::Hang) && !state.faults.released() {
        return Next::Wait;
    }
    match &front.work {
        Work::Await(progress, record) if !progress.has_reached(*record) => return Next::Wait,
        Work::Copy(copy) => {
            let engine = &mut device.engines[copy.direction as usize];
            if engine.busy || !engine.gate.is_open() {
                return Next::Wait;
            }
            engine.busy = true;
            engine.gate.enter();
        }
        _ => {}
    }
    found.running = true;
    let taken = found.queue.pop_front().expect("there is work at the front");
    let failure = match taken.effect {
        Some(Effect::Fail(status)) => Some(status),
        Some(Effect::Hang) | None => None,
    };
    Next::Run(taken.work, failure)
}

/// Executes one item of work, and wakes waiting threads. Releases the lock during long work.
fn run(mut state: Guard, device: usize, stream: u64, work: Work, failure: Option<Status>) -> Guard {
    let generation = state.generation;
    match work {
        Work::Copy(mut copy) => {
            let pace = Pace::of(&state, &copy, failure.is_some());
            state = without_lock(state, || copy.run(pace));
            if state.generation == generation {
                state.devices[device].copy_ended(&copy, failure.is_some());
            }
        }
        Work::Fill { range, value, bytes } => {
            state = without_lock(state, || copying::fill(range.start, value, bytes));
        }
        Work::Host { function, argument } => {
            if failure.is_none() {
                drop(state);
                // SAFETY: the program passed the function to `cuLaunchHostFunc`, and thereby guarantees that it may be
                // called once, on any thread.
                call::as_host_function(|| unsafe { function(argument) });
                state = state::lock();
            }
        }
        Work::Free(address) => {
            // The call that queued this has returned, so an error is only reported as a violation.
            let _: Answer = free(&mut state, device, address);
        }
        Work::Record(progress, record) => progress.reach(record),
        Work::Await(..) => {}
    }
    if state.generation == generation {
        if let Some(stream) = state.devices[device].streams.get_mut(&stream) {
            stream.running = false;
        }
        if let Some(status) = failure {
            state.devices[device].fail(status);
        }
    }
    state::changed();
    state
}

fn without_lock(mut state: Guard, run: impl FnOnce()) -> Guard {
    state.copying += 1;
    drop(state);
    run();
    let mut state = state::lock();
    state.copying -= 1;
    state
}

/// Frees device memory, and reports a violation if that is illegal.
pub(crate) fn free(state: &mut State, device: usize, address: u64) -> Answer {
    let violation = match state.devices[device].memory.free(address) {
        Ok(Freed::Unused) => return Ok(()),
        Ok(Freed::InUse) => format!("device memory at {address:#x} is freed under a copy"),
        Ok(Freed::OpenElsewhere) => {
            format!("device memory at {address:#x} is freed while another process has it open")
        }
        Err(Missing::Freed) => format!("device memory at {address:#x} is freed twice"),
        Err(Missing::Unknown) => format!("{address:#x} is freed, which is not the address of device memory"),
    };
    state.report.violation(violation);
    Err(Status::INVALID_VALUE)
}

/// Waits until a stream has finished its queued work. Fails if the context fails or is destroyed meanwhile.
pub(crate) fn synchronize(mut state: Guard, device: usize, stream: u64) -> Answer<Guard> {
    let record = Arc::new(Progress::default());
    state.devices[device].push(stream, Work::Record(record.clone(), 1));
    wait_for_records(state, device, &[record])
}

/// Waits until all streams of a device have finished their queued work. Fails if the context fails or is destroyed
/// meanwhile.
pub(crate) fn synchronize_all(mut state: Guard, device: usize) -> Answer<Guard> {
    let streams: Vec<u64> = state.devices[device].streams.keys().copied().collect();
    let records: Vec<Arc<Progress>> = streams
        .into_iter()
        .map(|stream| {
            let record = Arc::new(Progress::default());
            state.devices[device].push(stream, Work::Record(record.clone(), 1));
            record
        })
        .collect();
    wait_for_records(state, device, &records)
}

/// Waits until the record of an event of this device was executed. Fails if the context fails or is destroyed
/// meanwhile.
pub(crate) fn wait_for_record(
    mut state: Guard,
    device: usize,
    progress: &Progress,
    record: u64,
) -> Answer<Guard> {
    let context = state.devices[device].context.as_ref().map(|context| context.handle);
    let generation = state.generation;
    loop {
        // Checked first: during the wait, a reset may have created a machine with fewer devices.
        if state.generation != generation
            || state.devices[device].context.as_ref().map(|context| context.handle) != context
        {
            return Err(Status::CONTEXT_IS_DESTROYED);
        }
        state.devices[device].check()?;
        if progress.has_reached(record) {
            return Ok(state);
        }
        state = state::wait(state);
    }
}

fn wait_for_records(state: Guard, device: usize, records: &[Arc<Progress>]) -> Answer<Guard> {
    records
        .iter()
        .try_fold(state, |state, record| wait_for_record(state, device, record, 1))
}
