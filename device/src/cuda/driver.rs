//! The second layer: each driver call as a function that returns a `Result`.

mod batch;
mod runs;
mod sharing;

pub(super) use batch::Piece;
pub(super) use runs::{Runs, STRIDE_MAX_BYTES};
pub(super) use sharing::{IpcHandle, Physical};

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    fmt, ptr,
};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUevent, CUevent_flags, CUstream, CUstream_flags,
    CUstreamCaptureMode, CUstreamCaptureStatus,
};

use super::{
    error::{CudaError, DriverError},
    symbols::{Code, Symbols},
    version::Version,
};

/// The CUDA driver of this process, probed: it is loaded, new enough, and has a device.
#[derive(Clone, Copy)]
pub struct Driver {
    symbols: &'static Symbols,
    version: Version,
    device_count: usize,
}

impl Driver {
    /// The newest version of CUDA that the driver supports.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The number of devices visible to this process.
    pub fn device_count(&self) -> usize {
        self.device_count
    }

    /// A driver with these functions, not yet initialised or queried.
    pub(super) fn new(symbols: &'static Symbols) -> Self {
        Self { symbols, version: Version::UNKNOWN, device_count: 0 }
    }

    /// Queries and stores the version.
    pub(super) fn query_version(&mut self) -> Result<Version, DriverError> {
        let mut version: c_int = 0;
        // SAFETY: the driver writes one number to a local.
        let code = unsafe { (self.symbols.cuDriverGetVersion)(&raw mut version) };
        self.check("cuDriverGetVersion", code)?;
        self.version = Version::decode(version.unsigned_abs());
        Ok(self.version)
    }

    pub(super) fn init(&self) -> Result<(), DriverError> {
        // SAFETY: `cuInit` may be called at any time, on any thread.
        let code = unsafe { (self.symbols.cuInit)(0) };
        self.check("cuInit", code)
    }

    /// Queries and stores the number of devices. The driver must be initialised.
    pub(super) fn query_device_count(&mut self) -> Result<usize, DriverError> {
        let mut count: c_int = 0;
        // SAFETY: the driver writes one number to a local.
        let code = unsafe { (self.symbols.cuDeviceGetCount)(&raw mut count) };
        self.check("cuDeviceGetCount", code)?;
        self.device_count = usize::try_from(count).unwrap_or(0);
        Ok(self.device_count)
    }

    /// The device with this ordinal.
    pub(super) fn device(&self, ordinal: usize) -> Result<CUdevice, CudaError> {
        let devices = self.device_count;
        let valid = c_int::try_from(ordinal).ok().filter(|_| ordinal < devices);
        let ordinal = valid.ok_or(CudaError::NoSuchDevice { ordinal, devices })?;
        let mut device: CUdevice = 0;
        // SAFETY: the driver writes one handle to a local.
        let code = unsafe { (self.symbols.cuDeviceGet)(&raw mut device, ordinal) };
        self.check("cuDeviceGet", code)?;
        Ok(device)
    }

    pub(super) fn device_name(&self, device: CUdevice) -> Result<String, DriverError> {
        let mut name = [0; 256];
        // SAFETY: the driver writes a zero-terminated string into the array, whose length is passed.
        let code = unsafe { (self.symbols.cuDeviceGetName)(name.as_mut_ptr(), 256, device) };
        self.check("cuDeviceGetName", code)?;
        Ok(text_of(&name))
    }

    /// The PCI bus address of the device, as sysfs writes it: `0000:17:00.0`.
    pub(super) fn pci_bus_id(&self, device: CUdevice) -> Result<String, DriverError> {
        let mut id = [0; 32];
        // SAFETY: the driver writes a zero-terminated string into the array, whose length is passed.
        let code = unsafe { (self.symbols.cuDeviceGetPCIBusId)(id.as_mut_ptr(), 32, device) };
        self.check("cuDeviceGetPCIBusId", code)?;
        Ok(text_of(&id).to_ascii_lowercase())
    }

    pub(super) fn attribute(
        &self,
        device: CUdevice,
        attribute: CUdevice_attribute,
    ) -> Result<c_int, DriverError> {
        let mut value: c_int = 0;
        // SAFETY: the driver writes one number to a local.
        let code = unsafe { (self.symbols.cuDeviceGetAttribute)(&raw mut value, attribute, device) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(value)
    }

    pub(super) fn total_bytes(&self, device: CUdevice) -> Result<u64, DriverError> {
        let mut bytes: usize = 0;
        // SAFETY: the driver writes one number to a local.
        let code = unsafe { (self.symbols.cuDeviceTotalMem_v2)(&raw mut bytes, device) };
        self.check("cuDeviceTotalMem_v2", code)?;
        Ok(bytes as u64)
    }

    /// Retains the device's primary context, which is shared by all code in the process that does not create a context
    /// of its own.
    pub(super) fn retain(&self, device: CUdevice) -> Result<CUcontext, DriverError> {
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: the driver writes one handle to a local.
        let code = unsafe { (self.symbols.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
        self.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(context)
    }

    /// Undoes one `retain`.
    ///
    /// # Safety
    ///
    /// Nothing that the caller created in the context is used any more: the last release destroys the context.
    pub(super) unsafe fn release(&self, device: CUdevice) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.symbols.cuDevicePrimaryCtxRelease_v2)(device) };
        self.check("cuDevicePrimaryCtxRelease_v2", code)
    }

    /// Makes the context current on the calling thread.
    ///
    /// # Safety
    ///
    /// The context is retained for as long as this thread calls the driver.
    pub(super) unsafe fn set_current(&self, context: CUcontext) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.symbols.cuCtxSetCurrent)(context) };
        self.check("cuCtxSetCurrent", code)
    }

    /// Relaxes the calling thread's capture mode, if the driver can: this thread may then allocate and query while
    /// another thread captures a graph. Otherwise the driver would refuse such calls and invalidate the capture. No
    /// thread of this crate begins a capture itself.
    pub(super) fn relax_capture(&self) {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        if let Some(exchange) = self.symbols.cuThreadExchangeStreamCaptureMode {
            // If the driver refuses, the mode stays as it was.
            // SAFETY: the driver reads the new mode from a local and writes the previous mode there, which is not used.
            let _ = unsafe { exchange(&raw mut mode) };
        }
    }

    /// The free and total bytes of the device of the calling thread's context.
    pub(super) fn memory(&self) -> Result<(u64, u64), DriverError> {
        let (mut free, mut total): (usize, usize) = (0, 0);
        // SAFETY: the driver writes two numbers to locals.
        let code = unsafe { (self.symbols.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        self.check("cuMemGetInfo_v2", code)?;
        Ok((free as u64, total as u64))
    }

    /// Allocates device memory of unspecified content, aligned to at least 256 bytes.
    pub(super) fn allocate(&self, len: usize) -> Result<u64, DriverError> {
        let mut address: u64 = 0;
        // SAFETY: the driver writes one address to a local.
        let code = unsafe { (self.symbols.cuMemAlloc_v2)(&raw mut address, len) };
        self.check("cuMemAlloc_v2", code)?;
        Ok(address)
    }

    /// Frees memory of `allocate`. May wait for all work on the device.
    ///
    /// # Safety
    ///
    /// No copy and no kernel uses the memory any more, and nobody has its address.
    pub(super) unsafe fn free(&self, address: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.symbols.cuMemFree_v2)(address) };
        self.check("cuMemFree_v2", code)
    }

    /// Locks the pages of host memory, so that the device can access them directly.
    ///
    /// # Safety
    ///
    /// The range stays mapped until `unlock`.
    pub(super) unsafe fn lock(&self, start: *mut u8, len: usize) -> Result<(), DriverError> {
        // SAFETY: the caller's promise. Without flags the memory stays cached by the processor, not write-combined.
        let code = unsafe { (self.symbols.cuMemHostRegister_v2)(start.cast(), len, 0) };
        self.check("cuMemHostRegister_v2", code)
    }

    /// Undoes `lock`.
    ///
    /// # Safety
    ///
    /// No copy uses the range any more.
    pub(super) unsafe fn unlock(&self, start: *mut u8) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.symbols.cuMemHostUnregister)(start.cast()) };
        self.check("cuMemHostUnregister", code)
    }

    /// Creates a stream that does not synchronise with the legacy default stream.
    pub(super) fn new_stream(&self) -> Result<CUstream, DriverError> {
        let mut stream: CUstream = ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the driver writes one handle to a local.
        let code = unsafe { (self.symbols.cuStreamCreate)(&raw mut stream, flags) };
        self.check("cuStreamCreate", code)?;
        Ok(stream)
    }

    /// # Safety
    ///
    /// `stream` was created by `new_stream` and is not used after this. Its submitted work still runs to its end.
    pub(super) unsafe fn destroy_stream(&self, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.symbols.cuStreamDestroy_v2)(stream) };
        self.check("cuStreamDestroy_v2", code)
    }

    /// Whether all work on the stream has ended.
    ///
    /// # Safety
    ///
    /// `stream` is a living stream.
    pub(super) unsafe fn stream_is_idle(&self, stream: CUstream) -> Result<bool, DriverError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.symbols.cuStreamQuery)(stream) };
        self.check_ready("cuStreamQuery", code)
    }

    /// Whether the stream is being captured into a graph; false if the driver is too old to report it.
    ///
    /// # Safety
    ///
    /// `stream` is a living stream, or a default stream.
    pub(super) unsafe fn is_capturing(&self, stream: CUstream) -> Result<bool, DriverError> {
        let Some(query) = self.symbols.cuStreamIsCapturing else { return Ok(false) };
        // A number, since a value missing from cudarc's enum would be undefined behaviour as that enum.
        let mut status: u32 = 0;
        // SAFETY: the caller's promise; the driver writes one number to a local.
        let code = unsafe { query(stream, (&raw mut status).cast()) };
        self.check("cuStreamIsCapturing", code)?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32)
    }

    /// Creates an event without timing, which makes it cheap.
    pub(super) fn new_event(&self) -> Result<CUevent, DriverError> {
        let mut event: CUevent = ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the driver writes one handle to a local.
        let code = unsafe { (self.symbols.cuEventCreate)(&raw mut event, flags) };
        self.check("cuEventCreate", code)?;
        Ok(event)
    }

    /// # Safety
    ///
    /// `event` was created by `new_event` and is not used after this. Streams that wait for it still do.
    pub(super) unsafe fn destroy_event(&self, event: CUevent) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.symbols.cuEventDestroy_v2)(event) };
        self.check("cuEventDestroy_v2", code)
    }

    /// Records the event on the stream, after all work submitted to it so far.
    ///
    /// # Safety
    ///
    /// `event` and `stream` live; `stream` may be a default stream.
    pub(super) unsafe fn record(&self, event: CUevent, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.symbols.cuEventRecord)(event, stream) };
        self.check("cuEventRecord", code)
    }

    /// Whether all work before the event's last record has ended.
    ///
    /// # Safety
    ///
    /// `event` lives.
    pub(super) unsafe fn has_passed(&self, event: CUevent) -> Result<bool, DriverError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.symbols.cuEventQuery)(event) };
        self.check_ready("cuEventQuery", code)
    }

    /// Makes later work on the stream wait for the event's last record.
    ///
    /// # Safety
    ///
    /// `event` and `stream` live; `stream` may be a default stream.
    pub(super) unsafe fn wait_for(&self, stream: CUstream, event: CUevent) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.symbols.cuStreamWaitEvent)(stream, event, 0) };
        self.check("cuStreamWaitEvent", code)
    }

    /// Submits a copy from the device to host memory, on the stream.
    ///
    /// # Safety
    ///
    /// Until the copy has ended, the `len` bytes at `from` lie in device memory that nobody frees, and the `len` bytes
    /// at `to` in host memory whose pages are locked and that nobody else touches. `stream` lives.
    pub(super) unsafe fn copy_out(
        &self,
        to: *mut u8,
        from: u64,
        len: usize,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.symbols.cuMemcpyDtoHAsync_v2)(to.cast(), from, len, stream) };
        self.check("cuMemcpyDtoHAsync_v2", code)
    }

    /// Submits a copy from host memory to the device, on the stream.
    ///
    /// # Safety
    ///
    /// As for `copy_out`, with `from` and `to` exchanged; the host memory may be read meanwhile.
    pub(super) unsafe fn copy_in(
        &self,
        to: u64,
        from: *const u8,
        len: usize,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.symbols.cuMemcpyHtoDAsync_v2)(to, from.cast(), len, stream) };
        self.check("cuMemcpyHtoDAsync_v2", code)
    }

    /// Submits the zeroing of device memory, on the stream.
    ///
    /// # Safety
    ///
    /// Until it has ended, nobody frees the `len` bytes at `address`, or uses them but for later work of the stream. `stream` lives.
    pub(super) unsafe fn zero(&self, address: u64, len: usize, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.symbols.cuMemsetD8Async)(address, 0, len, stream) };
        self.check("cuMemsetD8Async", code)
    }

    /// Requests that a driver thread call `function` when all work submitted to the stream so far has ended. If the
    /// context fails before that, `function` is never called.
    ///
    /// # Safety
    ///
    /// `data` stays a valid argument of `function` until `function` was called, or the stream is known to be idle.
    /// `function` does not unwind, and does not call CUDA. `stream` lives.
    pub(super) unsafe fn launch(
        &self,
        stream: CUstream,
        function: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.symbols.cuLaunchHostFunc)(stream, Some(function), data) };
        self.check("cuLaunchHostFunc", code)
    }

    pub(super) fn check(&self, call: &'static str, code: Code) -> Result<(), DriverError> {
        match code {
            SUCCESS => Ok(()),
            _ => Err(self.error(call, code)),
        }
    }

    fn check_ready(&self, call: &'static str, code: Code) -> Result<bool, DriverError> {
        match code {
            NOT_READY => Ok(false),
            _ => self.check(call, code).map(|()| true),
        }
    }

    #[cold]
    fn error(&self, call: &'static str, code: Code) -> DriverError {
        let name = self.describe(self.symbols.cuGetErrorName, code);
        let text = self.describe(self.symbols.cuGetErrorString, code);
        DriverError {
            call,
            code,
            name: name.unwrap_or_else(|| "an unknown error".into()),
            text: text.unwrap_or_else(|| "the driver has no description".into()),
        }
    }

    /// The driver's text for a code.
    fn describe(
        &self,
        query: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
        code: Code,
    ) -> Option<String> {
        let mut text: *const c_char = ptr::null();
        // SAFETY: the driver refuses an unknown code, and writes one pointer to a local.
        let answer = unsafe { query(code, &raw mut text) };
        if answer != SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: the pointer is to a constant zero-terminated string of the driver's.
        let text = unsafe { CStr::from_ptr(text) };
        Some(text.to_string_lossy().into_owned())
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("version", &self.version)
            .field("device_count", &self.device_count)
            .finish()
    }
}

/// The result codes of the driver that this crate handles.
const SUCCESS: Code = 0;
pub(super) const INVALID_VALUE: Code = 1;
pub(super) const OUT_OF_MEMORY: Code = 2;
pub(super) const STUB_LIBRARY: Code = 34;
pub(super) const NO_DEVICE: Code = 100;
const NOT_READY: Code = 600;
pub(super) const NOT_REGISTERED: Code = 713;

/// Converts a string that the driver wrote.
fn text_of(written: &[c_char]) -> String {
    let bytes: Vec<u8> = written
        .iter()
        .flat_map(|c| c.to_ne_bytes()) // A `c_char` is signed on x86-64, and unsigned on arm64.
        .take_while(|&byte| byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
