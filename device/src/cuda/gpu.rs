//! The third layer: a device's context, streams and events, owned by the one thread that uses them.

use std::{ffi::c_void, marker::PhantomData, ptr, sync::Arc, thread, time::Duration};

use cudarc::driver::sys::{CUdevice, CUevent, CUstream};

use super::{
    driver::Driver,
    error::{CudaError, DriverError},
    flight::Direction,
    inbox::{Command, Inbox},
    locality,
    memory::CudaMemory,
    stream::StreamHandle,
};
use crate::engine::CopySegment;

/// A device on its engine's thread: the primary context, bound to this thread, and the streams and events made in it.
///
/// Dropping it makes no driver call and frees nothing: `close` does, when that is known to be safe.
pub(super) struct Gpu {
    driver: Driver,
    device: CUdevice,
    lanes: [Lane; 2],
    /// The stream of copies within the device, made on first use.
    within: Option<CUstream>,
    /// The intake stream, made on first use.
    intake: Option<CUstream>,
    /// Unused events.
    events: Vec<CUevent>,
    /// The context is current on the thread that opened it, and on no other.
    _here: PhantomData<*const ()>,
}

/// The streams of one direction.
struct Lane {
    /// The stream of copies. It is not shared with the caller's work, and waits for none.
    copies: CUstream,
    /// The stream of callbacks, each behind the event of its copy: a host function on the stream of the copies would
    /// delay the next copy by more than a tenth of a chunk's time.
    bells: CUstream,
    bell: Arc<CompletionCallback>,
}

/// The argument of a callback: the signal and its receiver.
struct CompletionCallback {
    direction: Direction,
    inbox: Inbox,
}

/// A recorded event. `recycle` returns it; a dropped one is leaked, which is harmless.
#[derive(Debug)]
#[must_use = "an event that is not recycled is lost"]
pub(super) struct RecordedEvent(CUevent);

impl Gpu {
    /// Binds the calling thread to the device: to near processors, and to its primary context.
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

    /// Submits one segment of a copy to its stream.
    ///
    /// # Safety
    ///
    /// `slot` is the start of a slot of this engine, so its pages are locked. The segment was found to be in bounds of
    /// it and of its own memory. Until a mark that is made after this was passed, the caller keeps the slot, and lets
    /// nobody touch it; and keeps the segment's memory.
    pub(super) unsafe fn enqueue(
        &self,
        direction: Direction,
        slot: *mut u8,
        segment: &CopySegment<CudaMemory>,
    ) -> Result<(), DriverError> {
        let stream = self.lanes[direction as usize].copies;
        // In bounds, as the caller says, so neither wraps.
        let host = slot.wrapping_add(segment.at);
        let device = segment.memory.address().wrapping_add(segment.offset);
        match direction {
            Direction::Out => {
                // SAFETY: the caller's promise; the stream lives until `close`.
                unsafe { self.driver.copy_out(host, device, segment.len, stream) }
            }
            Direction::In => {
                // SAFETY: the caller's promise; the stream lives until `close`.
                unsafe { self.driver.copy_in(device, host, segment.len, stream) }
            }
        }
    }

    /// Records an event behind all work on this direction's stream.
    pub(super) fn mark(&mut self, direction: Direction) -> Result<RecordedEvent, DriverError> {
        let stream = self.lanes[direction as usize].copies;
        // SAFETY: the stream lives until `close`.
        unsafe { self.record(stream) }
    }

    /// Submits a copy within the device.
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

    /// Records an event behind all copies within the device.
    pub(super) fn mark_within(&mut self) -> Result<RecordedEvent, DriverError> {
        let stream = self.within.unwrap_or(self.lanes[0].copies);
        // SAFETY: the stream lives until `close`.
        unsafe { self.record(stream) }
    }

    /// Whether all copies within the device have ended.
    pub(super) fn is_idle_within(&self) -> Result<bool, DriverError> {
        match self.within {
            // SAFETY: the stream lives until `close`.
            Some(stream) => unsafe { self.driver.stream_is_idle(stream) },
            None => Ok(true),
        }
    }

    /// Records an event on a caller's stream.
    pub(super) fn mark_stream(&mut self, stream: &StreamHandle) -> Result<RecordedEvent, CudaError> {
        self.refuse_capturing(stream)?;
        // SAFETY: a living stream: it lives while the handle does, promised who made that (`StreamHandle::from_raw`).
        Ok(unsafe { self.record(stream.raw()) }?)
    }

    /// The intake stream. It lives until `close`.
    pub(super) fn intake(&mut self) -> Result<CUstream, DriverError> {
        match self.intake {
            Some(stream) => Ok(stream),
            None => Ok(*self.intake.insert(self.driver.new_stream()?)),
        }
    }

    /// Records an event on the intake stream.
    pub(super) fn mark_intake(&mut self) -> Result<RecordedEvent, CudaError> {
        let stream = self.intake()?;
        // SAFETY: the stream lives until `close`. Who made it wait for a stream that is captured has captured it, too.
        if unsafe { self.driver.is_capturing(stream) }? {
            return Err(CudaError::Capturing);
        }
        // SAFETY: the stream lives until `close`.
        Ok(unsafe { self.record(stream) }?)
    }

    /// Makes a caller's stream wait for an event.
    pub(super) fn order(&self, stream: &StreamHandle, mark: &RecordedEvent) -> Result<(), CudaError> {
        self.refuse_capturing(stream)?;
        // SAFETY: a living stream, as above, and a mark's event lives.
        Ok(unsafe { self.driver.wait_for(stream.raw(), mark.0) }?)
    }

    /// Requests a signal to the inbox when the event is passed. That may fail, and a signal may be lost: poll as well.
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

    /// Whether all work before the event has ended.
    pub(super) fn has_passed(&self, mark: &RecordedEvent) -> Result<bool, DriverError> {
        // SAFETY: a mark's event lives.
        unsafe { self.driver.has_passed(mark.0) }
    }

    /// Whether no copy of this direction runs.
    pub(super) fn is_idle(&self, direction: Direction) -> Result<bool, DriverError> {
        // SAFETY: the stream lives until `close`.
        unsafe { self.driver.stream_is_idle(self.lanes[direction as usize].copies) }
    }

    /// Returns an event for reuse. Streams that wait for it still do.
    pub(super) fn recycle(&mut self, mark: RecordedEvent) {
        self.events.push(mark.0);
    }

    /// Releases the device: streams and events first, the context last. Call it when no copy runs and nothing made in
    /// the context is in use. If the device cannot confirm that all callbacks have ended, everything is leaked.
    pub(super) fn close(self) {
        let [out, into] = &self.lanes;
        if [out, into].into_iter().all(|lane| self.becomes_idle(lane.bells)) {
            let own = [out.copies, out.bells, into.copies, into.bells];
            let streams: Vec<CUstream> = own.into_iter().chain(self.within).chain(self.intake).collect();
            unbind(&self.driver, self.device, &streams, &self.events);
        }
    }

    /// Waits briefly for the last callbacks, which come right after their copies.
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

/// The time that the shutdown of an engine waits for the last callbacks.
const LAST_RINGS_MS: u32 = 1000;

/// Retains the device's primary context and makes it current on this thread.
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

/// Undoes `bind`, after destroying the streams and events. What the driver refuses to destroy is leaked.
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

/// The callback that a driver thread calls when a copy has ended.
///
/// # Safety
///
/// `bell` comes from `Arc::into_raw` and is passed once.
unsafe extern "C" fn ring(bell: *mut c_void) {
    let bell: *const CompletionCallback = bell.cast_const().cast();
    // SAFETY: the caller's promise.
    let bell = unsafe { Arc::from_raw(bell) };
    // Without the engine's thread, nobody waits for the signal. This locks only to push a message into a queue, and
    // cannot panic.
    let _ = bell.inbox.tell(Command::Rang(bell.direction));
}

/// Free and total bytes of a device, queried in a temporarily retained context. Costs a few hundred milliseconds, and
/// as many megabytes of the device meanwhile, unless this process already has a context.
pub(super) fn measure(driver: &Driver, ordinal: usize) -> Result<(u64, u64), CudaError> {
    let device = driver.device(ordinal)?;
    bind(driver, device)?;
    let memory = driver.memory();
    unbind(driver, device, &[], &[]);
    Ok(memory?)
}
