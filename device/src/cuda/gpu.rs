//! The third circle: a device's context, streams and events, owned by the one thread that uses them.

use std::{ffi::c_void, marker::PhantomData, ptr, sync::Arc, thread, time::Duration};

use cudarc::driver::sys::{CUdevice, CUevent, CUstream};

use super::{
    driver::Driver,
    error::{CudaError, DriverError},
    fence::StreamHandle,
    flight::Direction,
    inbox::{Command, Inbox},
    locality,
    memory::CudaMemory,
};
use crate::engine::CopySegment;

/// The device as an engine's thread has it: its primary context, bound to this thread, and what was made in it.
///
/// Dropping it calls no driver, and frees nothing: that is `close`, at a moment that is known to be safe.
pub(super) struct Gpu {
    driver: Driver,
    device: CUdevice,
    lanes: [Lane; 2],
    /// Where copies within the device run, once there was one.
    within: Option<CUstream>,
    /// Where those who hand tensors over let us wait for their work; made when it is first asked for.
    intake: Option<CUstream>,
    /// Events that are in no use.
    events: Vec<CUevent>,
    /// The context is current on the thread that opened it, and on no other.
    _here: PhantomData<*const ()>,
}

/// The streams of one direction.
struct Lane {
    /// Where copies run. None of the caller's work is on it, and it waits for none.
    copies: CUstream,
    /// Where rings run, each behind the event of its copy: a host function on the stream of the copies would keep the
    /// next copy waiting, for longer than a tenth of a chunk's time.
    bells: CUstream,
    bell: Arc<CompletionCallback>,
}

/// What a ring tells, and whom.
struct CompletionCallback {
    direction: Direction,
    inbox: Inbox,
}

/// An event that was recorded. It goes back by `recycle`; a dropped one is lost, and harmless.
#[derive(Debug)]
#[must_use = "an event that is not recycled is lost"]
pub(super) struct RecordedEvent(CUevent);

impl Gpu {
    /// Binds the calling thread to the device: near it, in its primary context.
    pub(super) fn open(driver: Driver, ordinal: usize, inbox: &Inbox) -> Result<Self, CudaError> {
        let device = driver.device(ordinal)?;
        if let Ok(pci_bus_id) = driver.pci_bus_id(device) {
            locality::stay_near(&pci_bus_id);
        }
        bind(&driver, device)?;
        let mut streams = Vec::new();
        while streams.len() < 4 {
            match driver.new_stream() {
                Ok(stream) => streams.push(stream),
                Err(error) => {
                    unbind(&driver, device, &streams, &[]);
                    return Err(error.into());
                }
            }
        }
        let lane = |direction| Lane {
            copies: streams[2 * direction as usize],
            bells: streams[2 * direction as usize + 1],
            bell: Arc::new(CompletionCallback { direction, inbox: inbox.clone() }),
        };
        let lanes = Direction::BOTH.map(lane);
        Ok(Self { driver, device, lanes, within: None, intake: None, events: Vec::new(), _here: PhantomData })
    }

    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    pub(super) fn device(&self) -> CUdevice {
        self.device
    }

    /// Puts one stretch of a copy on its stream.
    ///
    /// # Safety
    ///
    /// `slot` is the start of a slot of this engine, so its pages are locked. The stretch was found to be in bounds of it
    /// and of its own memory. Until a mark that is made after this was passed, the caller keeps the slot, and lets nobody
    /// touch it; and keeps the stretch's memory.
    pub(super) unsafe fn enqueue(
        &self,
        direction: Direction,
        slot: *mut u8,
        stretch: &CopySegment<CudaMemory>,
    ) -> Result<(), DriverError> {
        let stream = self.lanes[direction as usize].copies;
        // In bounds, as the caller says, so neither wraps.
        let host = slot.wrapping_add(stretch.at);
        let device = stretch.memory.address().wrapping_add(stretch.offset);
        match direction {
            Direction::Out => {
                // SAFETY: the caller's promise; the stream lives until `close`.
                unsafe { self.driver.copy_out(host, device, stretch.len, stream) }
            }
            Direction::In => {
                // SAFETY: the caller's promise; the stream lives until `close`.
                unsafe { self.driver.copy_in(device, host, stretch.len, stream) }
            }
        }
    }

    /// Marks the end of all that is on the stream of this direction now.
    pub(super) fn mark(&mut self, direction: Direction) -> Result<RecordedEvent, DriverError> {
        let stream = self.lanes[direction as usize].copies;
        // SAFETY: the stream lives until `close`.
        unsafe { self.record(stream) }
    }

    /// Puts a copy within the device on the stream for those.
    ///
    /// # Safety
    ///
    /// Until a mark that is made after this was passed, the caller keeps both memories, which are so long.
    pub(super) unsafe fn copy_within(&mut self, to: u64, from: u64, len: usize) -> Result<(), CudaError> {
        let stream = match self.within {
            Some(stream) => stream,
            None => *self.within.insert(self.driver.new_stream()?),
        };
        // SAFETY: the caller's promise; the stream lives until `close`.
        unsafe { self.driver.copy_within(to, from, len, stream) }
    }

    /// Marks the end of all copies within the device that were asked for so far.
    pub(super) fn mark_within(&mut self) -> Result<RecordedEvent, DriverError> {
        let stream = self.within.unwrap_or(self.lanes[0].copies);
        // SAFETY: the stream lives until `close`.
        unsafe { self.record(stream) }
    }

    /// Whether no copy within the device runs.
    pub(super) fn is_idle_within(&self) -> Result<bool, DriverError> {
        match self.within {
            // SAFETY: the stream lives until `close`.
            Some(stream) => unsafe { self.driver.stream_is_idle(stream) },
            None => Ok(true),
        }
    }

    /// Marks the place where a caller's stream is now.
    pub(super) fn mark_stream(&mut self, stream: &StreamHandle) -> Result<RecordedEvent, CudaError> {
        self.refuse_capturing(stream)?;
        // SAFETY: a living stream: it lives while the handle does, promised who made that (`StreamHandle::from_raw`).
        Ok(unsafe { self.record(stream.raw()) }?)
    }

    /// The stream that those who hand tensors over make wait for their work. It lives until `close`.
    pub(super) fn intake(&mut self) -> Result<CUstream, DriverError> {
        match self.intake {
            Some(stream) => Ok(stream),
            None => Ok(*self.intake.insert(self.driver.new_stream()?)),
        }
    }

    /// Marks the place where that stream is now.
    pub(super) fn mark_intake(&mut self) -> Result<RecordedEvent, CudaError> {
        let stream = self.intake()?;
        // SAFETY: the stream lives until `close`. Who made it wait for a stream that is captured has captured it, too.
        if unsafe { self.driver.is_capturing(stream) }? {
            return Err(CudaError::Capturing);
        }
        // SAFETY: the stream lives until `close`.
        Ok(unsafe { self.record(stream) }?)
    }

    /// Makes a caller's stream wait for a mark.
    pub(super) fn order(&self, stream: &StreamHandle, mark: &RecordedEvent) -> Result<(), CudaError> {
        self.refuse_capturing(stream)?;
        // SAFETY: a living stream, as above, and a mark's event lives.
        Ok(unsafe { self.driver.wait_for(stream.raw(), mark.0) }?)
    }

    /// Has the inbox told when the mark is passed. That may fail, and a ring may be lost: who waits must ask as well.
    pub(super) fn ring(&self, direction: Direction, mark: &RecordedEvent) -> Result<(), DriverError> {
        let lane = &self.lanes[direction as usize];
        // SAFETY: the stream lives until `close`, and a mark's event lives.
        unsafe { self.driver.wait_for(lane.bells, mark.0) }?;
        let bell = Arc::into_raw(Arc::clone(&lane.bell));
        // SAFETY: `ring` takes the bell that is passed to it, once. It calls nothing of CUDA and does not unwind.
        let launched = unsafe { self.driver.launch(lane.bells, ring, bell.cast_mut().cast()) };
        if launched.is_err() {
            // SAFETY: made by `into_raw` just above, and the driver, which refused it, does not have it.
            drop(unsafe { Arc::from_raw(bell) });
        }
        launched
    }

    /// Whether all that was there when the mark was made has ended.
    pub(super) fn has_passed(&self, mark: &RecordedEvent) -> Result<bool, DriverError> {
        // SAFETY: a mark's event lives.
        unsafe { self.driver.has_passed(mark.0) }
    }

    /// Whether no copy of this direction runs.
    pub(super) fn is_idle(&self, direction: Direction) -> Result<bool, DriverError> {
        // SAFETY: the stream lives until `close`.
        unsafe { self.driver.stream_is_idle(self.lanes[direction as usize].copies) }
    }

    /// Takes an event back. Streams that wait for the mark still do.
    pub(super) fn recycle(&mut self, mark: RecordedEvent) {
        self.events.push(mark.0);
    }

    /// Lets go of the device, streams and events first, the context last. To be called when no copy runs and nothing
    /// that was made in the context is held by anybody. Where the device cannot say that rings are over, it keeps all.
    pub(super) fn close(self) {
        let [out, into] = &self.lanes;
        if [out, into].into_iter().all(|lane| self.becomes_idle(lane.bells)) {
            let own = [out.copies, out.bells, into.copies, into.bells];
            let streams: Vec<CUstream> = own.into_iter().chain(self.within).chain(self.intake).collect();
            unbind(&self.driver, self.device, &streams, &self.events);
        }
    }

    /// Waits a moment for the last rings, which come right after their copies.
    fn becomes_idle(&self, stream: CUstream) -> bool {
        (0..LAST_RINGS_MS).any(|_| {
            // SAFETY: the stream lives: it is about to be destroyed.
            let idle = unsafe { self.driver.stream_is_idle(stream) } == Ok(true);
            if !idle {
                thread::sleep(Duration::from_millis(1));
            }
            idle
        })
    }

    /// # Safety
    ///
    /// The stream lives, or names a default one.
    unsafe fn record(&mut self, stream: CUstream) -> Result<RecordedEvent, DriverError> {
        let event = match self.events.pop() {
            Some(event) => event,
            None => self.driver.new_event()?,
        };
        // SAFETY: the event lives, and so does the stream, as the caller says.
        let recorded = unsafe { self.driver.record(event, stream) };
        if recorded.is_err() {
            self.events.push(event);
        }
        recorded.map(|()| RecordedEvent(event))
    }

    fn refuse_capturing(&self, stream: &StreamHandle) -> Result<(), CudaError> {
        // SAFETY: a living stream: it lives while the handle does, promised who made that (`StreamHandle::from_raw`).
        match unsafe { self.driver.is_capturing(stream.raw()) }? {
            true => Err(CudaError::Capturing),
            false => Ok(()),
        }
    }
}

/// How long the end of an engine waits for the last rings, at most.
const LAST_RINGS_MS: u32 = 1000;

/// Holds the device's primary context, and makes it this thread's.
pub(super) fn bind(driver: &Driver, device: CUdevice) -> Result<(), DriverError> {
    let context = driver.retain(device)?;
    driver.relax_capture();
    // SAFETY: retained just above, and let go when this thread is done with it.
    let bound = unsafe { driver.set_current(context) };
    if bound.is_err() {
        // SAFETY: nothing was made in it.
        let _ = unsafe { driver.release(device) };
    }
    bound
}

/// Undoes `bind`, and destroys what was made in between. A driver that refuses to destroy something keeps it.
pub(super) fn unbind(driver: &Driver, device: CUdevice, streams: &[CUstream], events: &[CUevent]) {
    for &event in events {
        // SAFETY: one of `new_event`, and these are all that is left of it.
        let _ = unsafe { driver.destroy_event(event) };
    }
    for &stream in streams {
        // SAFETY: one of `new_stream`, and these are all that is left of it.
        let _ = unsafe { driver.destroy_stream(stream) };
    }
    // SAFETY: no context is always one that may be used.
    let _ = unsafe { driver.set_current(ptr::null_mut()) };
    // SAFETY: what this thread made in the context is destroyed, and nobody holds memory of it: `close` asks for that,
    // and before it was open nobody could.
    let _ = unsafe { driver.release(device) };
}

/// Called by a thread of the driver's when a copy has ended.
///
/// # Safety
///
/// `bell` comes from `Arc::into_raw` and is passed once.
unsafe extern "C" fn ring(bell: *mut c_void) {
    let bell: *const CompletionCallback = bell.cast_const().cast();
    // SAFETY: the caller's promise.
    let bell = unsafe { Arc::from_raw(bell) };
    // Where the thread is gone, nobody waits for a ring. This takes no lock for longer than it takes to put a message
    // into a queue, and cannot panic.
    let _ = bell.inbox.tell(Command::Rang(bell.direction));
}

/// Free and total bytes of a device, by a context that is held for as long as it takes to ask. Costs a few hundred
/// milliseconds, and as many megabytes of the device meanwhile, where nobody else in this process has one.
pub(super) fn measure(driver: &Driver, ordinal: usize) -> Result<(u64, u64), CudaError> {
    let device = driver.device(ordinal)?;
    bind(driver, device)?;
    let memory = driver.memory();
    unbind(driver, device, &[], &[]);
    Ok(memory?)
}
