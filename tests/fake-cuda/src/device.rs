use std::{
    collections::HashMap,
    sync::Arc,
    thread::{self, ThreadId},
};

use crate::{
    copying::Direction,
    event::{Event, Progress},
    gates::Gate,
    memory::DeviceMemory,
    options::Options,
    state::{self, State},
    status::{Answer, Status},
    stream::{Stream, Work},
};

/// One device, with its primary context and the objects in it.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) memory: DeviceMemory,
    pub(crate) context: Option<Context>,
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) engines: [Engine; Direction::ALL.len()],
    /// The number of objects that the program had not freed when their context was destroyed.
    pub(crate) reclaimed: usize,
    /// The legacy default stream, created at its first use.
    legacy: Option<u64>,
    /// The per-thread default streams, created at their first use.
    per_thread: HashMap<ThreadId, u64>,
}

/// A primary context.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) handle: u64,
    pub(crate) retains: u32,
    /// The asynchronous error that corrupted the context, until it is destroyed.
    pub(crate) failed: Option<Status>,
}

/// A copy engine, which runs one copy at a time.
#[derive(Debug, Default)]
pub(crate) struct Engine {
    pub(crate) busy: bool,
    pub(crate) gate: Gate,
    /// The number of successful copies.
    pub(crate) ended: u64,
    /// The bytes of successful copies.
    pub(crate) ended_bytes: u64,
}

impl Device {
    /// Creates all devices of the simulated machine.
    pub(crate) fn all(options: &Options) -> Vec<Self> {
        (0..options.devices).map(|_| Self::new(options.memory_bytes)).collect()
    }

    fn new(memory_bytes: usize) -> Self {
        Self {
            memory: DeviceMemory::new(memory_bytes),
            context: None,
            streams: HashMap::new(),
            events: HashMap::new(),
            engines: Default::default(),
            reclaimed: 0,
            legacy: None,
            per_thread: HashMap::new(),
        }
    }

    /// Returns an error if the context has failed or does not exist.
    pub(crate) fn check(&self) -> Answer {
        match &self.context {
            None => Err(Status::CONTEXT_IS_DESTROYED),
            Some(context) => context.failed.map_or(Ok(()), Err),
        }
    }

    /// Corrupts the context: drops queued work, and makes every later call in the context return its first error.
    pub(crate) fn fail(&mut self, status: Status) {
        if let Some(context) = &mut self.context {
            context.failed.get_or_insert(status);
        }
        self.streams.values_mut().for_each(Stream::abandon);
        state::changed();
    }

    /// Removes all streams and drops their queued work.
    pub(crate) fn abandon_streams(&mut self) {
        self.streams.clear();
        self.legacy = None;
        self.per_thread.clear();
    }

    /// The number of copies that are queued or running.
    pub(crate) fn copies_in_flight(&self) -> usize {
        Direction::ALL.iter().map(|direction| self.in_flight(*direction)).sum()
    }

    /// The number of copies of one direction that are queued or running.
    pub(crate) fn in_flight(&self, direction: Direction) -> usize {
        self.waiting(direction) + usize::from(self.engines[direction as usize].busy)
    }

    /// The number of copies of one direction that have not begun: they wait for a gate, an engine, earlier work, or
    /// the release of an injected hang.
    pub(crate) fn waiting(&self, direction: Direction) -> usize {
        self.streams.values().map(|stream| stream.waiting(direction)).sum()
    }

    pub(crate) fn created_streams(&self) -> usize {
        self.streams.values().filter(|stream| stream.created && !stream.closing).count()
    }

    /// Queues work in a stream. The legacy default stream first waits for all blocking streams, and a blocking stream
    /// for the legacy default stream.
    pub(crate) fn push(&mut self, stream: u64, work: Work) {
        for earlier in self.implicitly_before(stream) {
            let barrier = Arc::new(Progress::default());
            self.enqueue(earlier, Work::Record(barrier.clone(), 1));
            self.enqueue(stream, Work::Await(barrier, 1));
        }
        self.enqueue(stream, work);
        state::changed();
    }

    fn enqueue(&mut self, stream: u64, work: Work) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.enqueue(work);
        }
    }

    /// The streams whose queued work must end before new work of `stream` may begin.
    fn implicitly_before(&self, stream: u64) -> Vec<u64> {
        let blocks =
            |id: u64| self.streams.get(&id).is_some_and(|stream| stream.blocking && !stream.is_idle());
        if self.legacy == Some(stream) {
            self.streams
                .keys()
                .copied()
                .filter(|other| *other != stream && blocks(*other))
                .collect()
        } else if self.streams.get(&stream).is_some_and(|stream| stream.blocking) {
            self.legacy.into_iter().filter(|legacy| blocks(*legacy)).collect()
        } else {
            Vec::new()
        }
    }
}

/// Resolves a handle, or one of CUDA's constants for default streams, to a stream.
pub(crate) fn resolve_stream(state: &mut State, device: usize, handle: u64) -> Answer<u64> {
    const LEGACY: [u64; 2] = [0, 1];
    const PER_THREAD: u64 = 2;
    let found = &state.devices[device];
    let default = match handle {
        PER_THREAD => found.per_thread.get(&thread::current().id()).copied(),
        _ if LEGACY.contains(&handle) => found.legacy,
        _ => {
            let open = found.streams.get(&handle).is_some_and(|stream| !stream.closing);
            return if open { Ok(handle) } else { Err(Status::INVALID_HANDLE) };
        }
    };
    if let Some(stream) = default {
        return Ok(stream);
    }
    let stream = Stream::open(state, device, Stream::default_stream());
    let device = &mut state.devices[device];
    if handle == PER_THREAD {
        device.per_thread.insert(thread::current().id(), stream);
    } else {
        device.legacy = Some(stream);
    }
    Ok(stream)
}

/// Destroys a device's context with all of its objects: after the context's last release, when the context is reset, or
/// by a test's command.
pub(crate) fn end_context(state: &mut State, index: usize) {
    let device = &mut state.devices[index];
    device.reclaimed += device.created_streams() + device.events.len();
    device.abandon_streams();
    device.events.clear();
    device.reclaimed += device.memory.free_all() + state.host.remove_all(index);
    device.context = None;
    state::changed();
}
