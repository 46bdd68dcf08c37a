//! Thin wrappers of CUDA's driver functions, for tests.

use std::{
    ffi::c_void,
    ptr,
    sync::mpsc::{self, Receiver, Sender},
};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUevent, CUresult, CUstream};

/// The result of a call.
pub(crate) type Answer<T = ()> = Result<T, CUresult>;

/// Calls the driver, and converts its code to an [`Answer`].
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the test passes valid arguments, or invalid ones that the driver must refuse.
        let code = unsafe { cudarc::driver::sys::$function($($argument),*) };
        match code {
            cudarc::driver::sys::CUresult::CUDA_SUCCESS => Ok(()),
            error => Err(error),
        }
    }};
}
pub(crate) use call;

/// Finds a driver function by its name; `None` if the driver lacks it. `F` is the function's type in CUDA's header.
pub(crate) fn function<F: Copy>(name: &str) -> Option<F> {
    // SAFETY: this loads the driver under test.
    let library = unsafe { sys::culib() };
    // SAFETY: the caller guarantees that `F` is the function's type.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.ok().map(|function| *function)
}

/// Copies `height` rows of `width` bytes within the device.
pub(crate) fn copy_rows(
    [to, to_pitch]: [u64; 2],
    [from, from_pitch]: [u64; 2],
    [width, height]: [usize; 2],
    stream: CUstream,
) -> Answer {
    let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: device,
        srcHost: ptr::null(),
        srcDevice: from,
        srcArray: ptr::null_mut(),
        srcPitch: from_pitch as usize,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: device,
        dstHost: ptr::null_mut(),
        dstDevice: to,
        dstArray: ptr::null_mut(),
        dstPitch: to_pitch as usize,
        WidthInBytes: width,
        Height: height,
    };
    call!(cuMemcpy2DAsync_v2(&raw const copy, stream))
}

/// A device whose primary context is current in this thread, until it is dropped.
pub(crate) struct Current {
    pub(crate) device: CUdevice,
    pub(crate) context: CUcontext,
}

impl Current {
    pub(crate) fn new(ordinal: i32) -> Self {
        call!(cuInit(0)).expect("the driver starts");
        let (mut device, mut context) = (0, ptr::null_mut());
        call!(cuDeviceGet(&raw mut device, ordinal)).expect("there is this device");
        call!(cuDevicePrimaryCtxRetain(&raw mut context, device)).expect("a context can be retained");
        call!(cuCtxSetCurrent(context)).expect("a context can be made current");
        Self { device, context }
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        // These calls fail if the test has corrupted or destroyed the context.
        let _: Answer = call!(cuDevicePrimaryCtxRelease_v2(self.device));
        let _: Answer = call!(cuCtxSetCurrent(ptr::null_mut()));
    }
}

/// Creates a non-blocking stream.
pub(crate) fn create_stream() -> CUstream {
    let mut stream = ptr::null_mut();
    call!(cuStreamCreate(&raw mut stream, 1)).expect("a stream can be made");
    stream
}

/// Creates a blocking stream: it and the legacy default stream wait for each other.
pub(crate) fn create_blocking_stream() -> CUstream {
    let mut stream = ptr::null_mut();
    call!(cuStreamCreate(&raw mut stream, 0)).expect("a stream can be made");
    stream
}

/// Creates an event without timing.
pub(crate) fn create_event() -> CUevent {
    let mut event = ptr::null_mut();
    call!(cuEventCreate(&raw mut event, 2)).expect("an event can be made");
    event
}

/// Creates an event and records it after a stream's queued work.
pub(crate) fn recorded(stream: CUstream) -> CUevent {
    let event = create_event();
    call!(cuEventRecord(event, stream)).expect("an event can be recorded");
    event
}

/// Allocates device memory.
pub(crate) fn device_memory(bytes: usize) -> u64 {
    let mut address = 0;
    call!(cuMemAlloc_v2(&raw mut address, bytes)).expect("the device has memory");
    address
}

/// Allocates device memory, filled with one value.
pub(crate) fn device_memory_of(value: u8, bytes: usize) -> u64 {
    let address = device_memory(bytes);
    call!(cuMemsetD8_v2(address, value, bytes)).expect("device memory can be filled");
    call!(cuCtxSynchronize()).expect("the device completes its work");
    address
}

/// Page-locked memory.
pub(crate) struct PageLocked {
    pub(crate) start: *mut u8,
    bytes: usize,
}

impl PageLocked {
    /// Allocates memory, filled with one value.
    pub(crate) fn new(value: u8, bytes: usize) -> Self {
        let mut start = ptr::null_mut();
        call!(cuMemHostAlloc(&raw mut start, bytes, 0)).expect("memory can be page-locked");
        let start = start.cast::<u8>();
        // SAFETY: the memory is new and has `bytes` bytes.
        unsafe { start.write_bytes(value, bytes) };
        Self { start, bytes }
    }

    pub(crate) fn address(&self) -> *mut c_void {
        self.start.cast()
    }

    /// The current content. A copy may write to the memory meanwhile, which some tests observe.
    pub(crate) fn read(&self) -> Vec<u8> {
        // SAFETY: the memory has `bytes` bytes, and only the driver's threads may write them.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }.to_vec()
    }

    pub(crate) fn free(self) -> Answer {
        call!(cuMemFreeHost(self.address()))
    }
}

/// Blocks a stream by a host function until the test lifts or drops the block. This works on real drivers too.
pub(crate) struct Block(Sender<()>);

impl Block {
    pub(crate) fn in_stream(stream: CUstream) -> Self {
        let (sender, receiver) = mpsc::channel::<()>();
        launch(stream, move || wait_until_dropped(&receiver));
        Self(sender)
    }

    /// Unblocks the stream.
    pub(crate) fn lift(self) {
        drop(self.0);
    }
}

fn wait_until_dropped(receiver: &Receiver<()>) {
    assert!(receiver.recv().is_err(), "a block is lifted by dropping its sender");
}

/// Queues a function in a stream.
pub(crate) fn launch(stream: CUstream, run: impl FnOnce() + Send + 'static) {
    try_launch(stream, run).expect("a host function can be launched");
}

pub(crate) fn try_launch(stream: CUstream, run: impl FnOnce() + Send + 'static) -> Answer {
    let boxed: Box<Box<dyn FnOnce() + Send>> = Box::new(Box::new(run));
    call!(cuLaunchHostFunc(stream, Some(run_boxed), Box::into_raw(boxed).cast()))
}

unsafe extern "C" fn run_boxed(argument: *mut c_void) {
    // SAFETY: `try_launch` passed a box of this type, and a host function is called once.
    let run = unsafe { Box::from_raw(argument.cast::<Box<dyn FnOnce() + Send>>()) };
    run();
}
