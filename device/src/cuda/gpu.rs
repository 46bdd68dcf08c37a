//! The third layer: a device's context, streams and events, owned by the one thread that uses them.

use std::{ffi::c_void, marker::PhantomData, ptr, sync::Arc, thread, time::Duration};

use cudarc::driver::sys::{CUdevice, CUevent, CUstream};

use super::{
    driver::{Driver, INVALID_VALUE, Piece, Runs},
    error::{CudaError, DriverError},
    flight::Direction,
    inbox::{Command, Inbox},
    locality,
    route::Route,
    stream::StreamHandle,
};

/// A device on its engine's thread: the primary context, bound to this thread, and the streams and events made in it.
///
/// Dropping it makes no driver call and frees nothing. `close` releases the device, when that is known to be safe.
pub(super) struct Gpu {
    driver: Driver,
    device: CUdevice,
    streams: [Streams; 2],
    /// The stream of copies within the device, made on first use.
    d2d_stream: Option<CUstream>,
    /// The stream passed to DLPack producers, which make it wait for their work. Made on first use.
    intake: Option<CUstream>,
    /// Whether the driver takes several copies in one call, as far as is known.
    batches: bool,
    /// Unused events.
    events: Vec<CUevent>,
    /// Neither `Send` nor `Sync`: the context is current only on the thread that opened it.
    _not_send: PhantomData<*const ()>,
}

/// The streams of one direction.
struct Streams {
    /// The stream of copies. Callers submit nothing to it, and it waits for no stream of theirs.
    copies: CUstream,
    /// The stream of callbacks, each of which waits for the event of its copy: a host function on the stream of copies
    /// would delay the next copy by more than a tenth of the time that a chunk takes.
    signals: CUstream,
    callback: Arc<CompletionCallback>,
}

/// The argument of the completion callback.
struct CompletionCallback {
    direction: Direction,
    inbox: Inbox,
}

/// The part of a copy that the driver accepted.
#[derive(Debug, Default)]
pub(super) struct Submitted {
    /// The bytes of its pieces. Runs within the device count in the piece that brings or takes them.
    pub(super) bytes: u64,
    /// Whether a part may have been submitted, even if `bytes` is zero.
    pub(super) may_run: bool,
    /// The error with which the driver refused the rest.
    pub(super) error: Option<CudaError>,
}

impl Submitted {
    /// Adds a piece that the driver accepted.
    fn add(&mut self, piece: Piece) {
        self.may_run = true;
        self.bytes += piece.len as u64;
    }
}

/// The largest piece that is submitted together with others. A larger one takes longer than a call anyway, and its own
/// call is sure to use the whole rate of the memory.
const SMALL_BYTES: usize = 1 << 20;

/// The most runs that are listed at a time, since a chunk may have millions.
const RUNS_AT_ONCE: usize = 1024;

/// A recorded event. Give it back with `recycle`: a dropped event is leaked, which is harmless.
#[derive(Debug)]
#[must_use = "an event that is not recycled is lost"]
pub(super) struct RecordedEvent(CUevent);

impl Gpu {
    /// Binds the calling thread to the processors near the device, makes the device's primary context current, and
    /// creates the streams.
    pub(super) fn open(driver: Driver, ordinal: usize, inbox: &Inbox) -> Result<Self, CudaError> {
        let device = driver.device(ordinal)?;
        if let Ok(pci_bus_id) = driver.pci_bus_id(device) {
            locality::stay_near(&pci_bus_id);
        }
        bind(&driver, device)?;
        let mut created = Vec::new();
        while created.len() < 4 {
            match driver.new_stream() {
                Ok(stream) => created.push(stream),
                Err(error) => {
                    unbind(&driver, device, &created, &[]);
                    return Err(error.into());
                }
            }
        }
        let of_direction = |direction| Streams {
            copies: created[2 * direction as usize],
            signals: created[2 * direction as usize + 1],
            callback: Arc::new(CompletionCallback { direction, inbox: inbox.clone() }),
        };
        let streams = Direction::BOTH.map(of_direction);
        Ok(Self {
            driver,
            device,
            streams,
            d2d_stream: None,
            intake: None,
            batches: true,
            events: Vec::new(),
            _not_send: PhantomData,
        })
    }

    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    pub(super) fn device(&self) -> CUdevice {
        self.device
    }

    /// Submits a copy to the stream of its direction, or to that of copies within the device, step by step as its route
    /// says, up to the first that the driver refuses.
    ///
    /// # Safety
    ///
    /// The caller has checked that each piece and each run is in bounds of its memory, at both ends; that of the host is a
    /// slot of this engine, so its pages are locked. Unless nothing may run, the caller keeps all of that until an event
    /// recorded after this call has passed, and lets nobody touch the slot, nor the scratch but for copies of the same
    /// direction. Where the pieces overlap, the bytes are unspecified.
    pub(super) unsafe fn submit(&mut self, direction: Option<Direction>, route: Route) -> Submitted {
        let mut submitted = Submitted::default();
        let stream = match direction {
            Some(direction) => Ok(self.streams[direction as usize].copies),
            None => self.d2d_stream(),
        };
        let Ok(stream) = stream.map_err(|error| submitted.error = Some(error.into())) else {
            return submitted;
        };
        let Route { upload, runs, download, pieces } = route;
        // SAFETY: the caller of `submit` checked the bounds and keeps the memory; the stream is this value's, which destroys
        // it in `close` alone.
        let refused =
            unsafe { self.submit_through_scratch(upload, &runs, download, stream, &mut submitted) }.err();
        match refused {
            Some(error) => submitted.error = Some(error),
            // SAFETY: the caller of `submit` checked the bounds of the pieces, too, and keeps their memory; it is the same
            // stream.
            None => unsafe { self.submit_pieces(direction, pieces, stream, &mut submitted) },
        }
        submitted
    }

    /// Submits the steps of a route that touch the scratch. The stream executes them in this order, and those of the next
    /// copy after them.
    ///
    /// # Safety
    ///
    /// As for `submit`. The stream lives.
    unsafe fn submit_through_scratch(
        &mut self,
        upload: Option<Piece>,
        runs: &[Runs],
        download: Option<Piece>,
        stream: CUstream,
        submitted: &mut Submitted,
    ) -> Result<(), CudaError> {
        if let Some(piece) = upload {
            // SAFETY: the caller checked that the piece is in bounds of the slot and the scratch, keeps both, and lets the
            // stream live.
            unsafe { self.copy(Some(Direction::In), piece, stream) }?;
            submitted.add(piece);
        }
        for runs in runs {
            // SAFETY: the caller checked that each run is in bounds of its memory and the scratch, and keeps both; the stream
            // lives, by its promise.
            unsafe { self.submit_runs(runs, stream, submitted) }?;
        }
        if let Some(piece) = download {
            // SAFETY: the caller checked that the piece is in bounds of the scratch and the slot, keeps both, and lets the
            // stream live.
            unsafe { self.copy(Some(Direction::Out), piece, stream) }?;
            submitted.add(piece);
        }
        Ok(())
    }

    /// Submits runs within the device: in one call, or as pieces of their own where the device does not copy their stride.
    ///
    /// # Safety
    ///
    /// As for `submit`. The stream lives.
    unsafe fn submit_runs(
        &mut self,
        runs: &Runs,
        stream: CUstream,
        submitted: &mut Submitted,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller checked that all runs are in bounds at both ends, keeps the memory, and lets the stream live.
        match unsafe { self.driver.copy_runs(*runs, stream) } {
            Err(error) if error.code == INVALID_VALUE => {}
            Err(error) => return Err(error.into()),
            Ok(()) => {
                submitted.may_run = true;
                return Ok(());
            }
        }
        for first in (0..runs.count).step_by(RUNS_AT_ONCE) {
            let pieces = (first..runs.count.min(first + RUNS_AT_ONCE)).map(|run| runs.piece(run));
            let mut within = Submitted::default(); // Their bytes count where they cross the bus.
            // SAFETY: each piece is one of the runs, whose bounds the caller checked and whose memory it keeps; it lets the
            // stream live.
            unsafe { self.submit_pieces(None, pieces.collect(), stream, &mut within) };
            submitted.may_run |= within.may_run;
            within.error.map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// Submits the small pieces in one call, if the driver takes them, and all others one by one. A call costs
    /// microseconds, which counts for a chunk of a thousand tensors in allocations of their own.
    ///
    /// # Safety
    ///
    /// As for `submit`. The stream lives.
    unsafe fn submit_pieces(
        &mut self,
        direction: Option<Direction>,
        pieces: Vec<Piece>,
        stream: CUstream,
        submitted: &mut Submitted,
    ) {
        let (mut small, mut single): (Vec<Piece>, Vec<Piece>) =
            pieces.into_iter().partition(|piece| piece.len <= SMALL_BYTES);
        if self.batches && small.len() > 1 {
            submitted.may_run = true; // After an error too: then all are submitted again.
            // SAFETY: the caller checked that each piece is in bounds at both ends, keeps the memory, and lets the stream live.
            match unsafe { self.driver.copy_batch(&small, stream) } {
                Ok(()) => small.drain(..).for_each(|piece| submitted.add(piece)),
                Err(error) => {
                    self.batches = false;
                    tracing::info!(
                        "Tensors are copied one by one, because the driver refused a batch of copies: {error}."
                    );
                }
            }
        }
        single.append(&mut small);
        for piece in single {
            // SAFETY: the caller checked that the piece is in bounds at both ends, keeps the memory, and lets the stream live.
            if let Err(error) = unsafe { self.copy(direction, piece, stream) } {
                submitted.error = Some(error);
                return;
            }
            submitted.add(piece);
        }
    }

    /// # Safety
    ///
    /// As for `submit`. The stream lives.
    unsafe fn copy(
        &self,
        direction: Option<Direction>,
        Piece { to, from, len }: Piece,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        match direction {
            Some(Direction::Out) => {
                let to = ptr::with_exposed_provenance_mut(to as usize);
                // SAFETY: the caller's promise.
                Ok(unsafe { self.driver.copy_out(to, from, len, stream) }?)
            }
            Some(Direction::In) => {
                let from = ptr::with_exposed_provenance(from as usize);
                // SAFETY: the caller's promise.
                Ok(unsafe { self.driver.copy_in(to, from, len, stream) }?)
            }
            // SAFETY: the caller's promise.
            None => unsafe { self.driver.copy_within(to, from, len, stream) },
        }
    }

    /// Records an event after all copies of this direction submitted so far.
    pub(super) fn record_event(&mut self, direction: Direction) -> Result<RecordedEvent, DriverError> {
        let stream = self.streams[direction as usize].copies;
        // SAFETY: the stream lives until `close`.
        unsafe { self.record(stream) }
    }

    /// Submits the zeroing of memory to the stream of copies within the device.
    ///
    /// # Safety
    ///
    /// The memory has `len` bytes, and the caller keeps it until an event recorded after this call has passed.
    pub(super) unsafe fn zero(&mut self, address: u64, len: usize) -> Result<(), DriverError> {
        let stream = self.d2d_stream()?;
        // SAFETY: the caller's promise; the stream lives until `close`.
        unsafe { self.driver.zero(address, len, stream) }
    }

    fn d2d_stream(&mut self) -> Result<CUstream, DriverError> {
        match self.d2d_stream {
            Some(stream) => Ok(stream),
            None => Ok(*self.d2d_stream.insert(self.driver.new_stream()?)),
        }
    }

    /// Records an event after all copies within the device submitted so far.
    pub(super) fn record_d2d_event(&mut self) -> Result<RecordedEvent, DriverError> {
        // Without a stream there was no copy, so an event on any stream will do.
        let stream = self.d2d_stream.unwrap_or(self.streams[0].copies);
        // SAFETY: the stream lives until `close`.
        unsafe { self.record(stream) }
    }

    /// Whether all copies within the device have ended.
    pub(super) fn is_d2d_idle(&self) -> Result<bool, DriverError> {
        match self.d2d_stream {
            // SAFETY: the stream lives until `close`.
            Some(stream) => unsafe { self.driver.stream_is_idle(stream) },
            None => Ok(true),
        }
    }

    /// Records an event on a caller's stream. Fails if the stream is being captured into a graph.
    pub(super) fn record_event_on(&mut self, stream: &StreamHandle) -> Result<RecordedEvent, CudaError> {
        self.refuse_capturing(stream)?;
        // SAFETY: the stream lives while its handle does, as the handle's creator promised (`StreamHandle::from_raw`).
        Ok(unsafe { self.record(stream.raw()) }?)
    }

    /// The intake stream: passed to DLPack producers, which make it wait for their work. It lives until `close`.
    pub(super) fn intake(&mut self) -> Result<CUstream, DriverError> {
        match self.intake {
            Some(stream) => Ok(stream),
            None => Ok(*self.intake.insert(self.driver.new_stream()?)),
        }
    }

    /// Records an event on the intake stream.
    pub(super) fn record_event_on_intake(&mut self) -> Result<RecordedEvent, CudaError> {
        let stream = self.intake()?;
        // A producer that makes the intake wait for a captured stream captures the intake too.
        // SAFETY: the stream lives until `close`.
        if unsafe { self.driver.is_capturing(stream) }? {
            return Err(CudaError::Capturing);
        }
        // SAFETY: the stream lives until `close`.
        Ok(unsafe { self.record(stream) }?)
    }

    /// Makes a caller's stream wait for an event. Fails if the stream is being captured into a graph.
    pub(super) fn make_wait(&self, stream: &StreamHandle, event: &RecordedEvent) -> Result<(), CudaError> {
        self.refuse_capturing(stream)?;
        // SAFETY: the stream lives while its handle does (`StreamHandle::from_raw`), and a recorded event lives.
        Ok(unsafe { self.driver.wait_for(stream.raw(), event.0) }?)
    }

    /// Requests a signal to the inbox when the event has passed. The request may fail, and a signal may be lost: poll
    /// as well.
    pub(super) fn request_signal(
        &self,
        direction: Direction,
        event: &RecordedEvent,
    ) -> Result<(), DriverError> {
        let streams = &self.streams[direction as usize];
        // SAFETY: the stream lives until `close`, and a recorded event lives.
        unsafe { self.driver.wait_for(streams.signals, event.0) }?;
        let callback = Arc::into_raw(Arc::clone(&streams.callback));
        // SAFETY: `on_completion` takes ownership of the callback, which is passed to it once. It does not call CUDA
        // and does not unwind.
        let launched =
            unsafe { self.driver.launch(streams.signals, on_completion, callback.cast_mut().cast()) };
        if launched.is_err() {
            // SAFETY: made by `into_raw` just above, and the driver refused the call, so it does not keep the pointer.
            drop(unsafe { Arc::from_raw(callback) });
        }
        launched
    }

    /// Whether all work before the event has ended.
    pub(super) fn has_passed(&self, event: &RecordedEvent) -> Result<bool, DriverError> {
        // SAFETY: a recorded event lives.
        unsafe { self.driver.has_passed(event.0) }
    }

    /// Whether no copy of this direction runs.
    pub(super) fn is_idle(&self, direction: Direction) -> Result<bool, DriverError> {
        // SAFETY: the stream lives until `close`.
        unsafe { self.driver.stream_is_idle(self.streams[direction as usize].copies) }
    }

    /// Keeps an event for reuse. Streams that wait for it still do.
    pub(super) fn recycle(&mut self, event: RecordedEvent) {
        self.events.push(event.0);
    }

    /// Releases the device: streams and events first, the context last. Call this when no copy runs and nothing created
    /// in the context is in use. If the driver does not confirm that all callbacks have ended, everything is leaked.
    pub(super) fn close(self) {
        let [out, into] = &self.streams;
        if [out, into].into_iter().all(|streams| self.becomes_idle(streams.signals)) {
            let own = [out.copies, out.signals, into.copies, into.signals];
            let streams: Vec<CUstream> = own.into_iter().chain(self.d2d_stream).chain(self.intake).collect();
            unbind(&self.driver, self.device, &streams, &self.events);
        }
    }

    /// Waits up to `CALLBACKS_TIMEOUT_MS` for the last callbacks of this stream; returns whether it became idle.
    fn becomes_idle(&self, stream: CUstream) -> bool {
        (0..CALLBACKS_TIMEOUT_MS).any(|_| {
            // SAFETY: the stream lives: `close` destroys it after this.
            let idle = unsafe { self.driver.stream_is_idle(stream) } == Ok(true);
            if !idle {
                thread::sleep(Duration::from_millis(1));
            }
            idle
        })
    }

    /// # Safety
    ///
    /// The stream lives, or is a default stream.
    unsafe fn record(&mut self, stream: CUstream) -> Result<RecordedEvent, DriverError> {
        let event = match self.events.pop() {
            Some(event) => event,
            None => self.driver.new_event()?,
        };
        // SAFETY: the event lives, and so does the stream, as the caller promises.
        let recorded = unsafe { self.driver.record(event, stream) };
        if recorded.is_err() {
            self.events.push(event);
        }
        recorded.map(|()| RecordedEvent(event))
    }

    fn refuse_capturing(&self, stream: &StreamHandle) -> Result<(), CudaError> {
        // SAFETY: the stream lives while its handle does, as the handle's creator promised (`StreamHandle::from_raw`).
        match unsafe { self.driver.is_capturing(stream.raw()) }? {
            true => Err(CudaError::Capturing),
            false => Ok(()),
        }
    }
}

/// The longest time that the shutdown of an engine waits for each of its two streams of callbacks.
const CALLBACKS_TIMEOUT_MS: u32 = 1000;

/// Retains the device's primary context and makes it current on this thread.
pub(super) fn bind(driver: &Driver, device: CUdevice) -> Result<(), DriverError> {
    let context = driver.retain(device)?;
    driver.relax_capture();
    // SAFETY: retained just above, and released when this thread no longer uses it (`unbind`).
    let bound = unsafe { driver.set_current(context) };
    if bound.is_err() {
        // SAFETY: nothing was created in the context.
        let _ = unsafe { driver.release(device) };
    }
    bound
}

/// Undoes `bind`, after destroying the streams and events. What the driver refuses to destroy is leaked.
pub(super) fn unbind(driver: &Driver, device: CUdevice, streams: &[CUstream], events: &[CUevent]) {
    for &event in events {
        // SAFETY: created by `new_event`, and the caller, which passes its last copy of the handle, does not use it
        // again.
        let _ = unsafe { driver.destroy_event(event) };
    }
    for &stream in streams {
        // SAFETY: created by `new_stream`, and the caller, which passes its last copy of the handle, does not use it
        // again.
        let _ = unsafe { driver.destroy_stream(stream) };
    }
    // SAFETY: null, for no context, is always valid.
    let _ = unsafe { driver.set_current(ptr::null_mut()) };
    // SAFETY: all that this thread created in the context is destroyed, and nobody holds memory of it: `close` requires
    // that, and all other callers have given out no memory.
    let _ = unsafe { driver.release(device) };
}

/// The callback that a driver thread calls when a copy has ended.
///
/// # Safety
///
/// `callback` comes from `Arc::into_raw` of a [`CompletionCallback`] and is passed once.
unsafe extern "C" fn on_completion(callback: *mut c_void) {
    let callback: *const CompletionCallback = callback.cast_const().cast();
    // SAFETY: the caller's promise.
    let callback = unsafe { Arc::from_raw(callback) };
    // Fails if the engine's thread has ended. Sending only pushes a message into a queue: it waits for no driver
    // call, and cannot panic.
    let _ = callback.inbox.send(Command::Signal(callback.direction));
}

/// The free and total bytes of a device, queried in a temporarily retained context. Costs a few hundred milliseconds,
/// and temporarily a few hundred megabytes of device memory, unless this process already has a context.
pub(super) fn query_memory(driver: &Driver, ordinal: usize) -> Result<(u64, u64), CudaError> {
    let device = driver.device(ordinal)?;
    bind(driver, device)?;
    let memory = driver.memory();
    unbind(driver, device, &[], &[]);
    Ok(memory?)
}
