//! Tools for benchmarks (feature `measure`): the speed of plain copies, and faults that break a context.
//!
//! Not for use in production. Each function calls the driver on a separate thread and waits for it without a deadline.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    ptr, thread,
    time::Instant,
};

use cudarc::driver::sys::{self, CUdevice, CUdeviceptr, CUfunction, CUmodule, CUresult, CUstream};

use super::{
    driver::Driver,
    error::CudaError,
    gpu::{bind, unbind},
    locality,
    probe::probe,
    symbols::Code,
};
use crate::{
    AllocError,
    mapping::{Mapping, PageSize},
};

/// The kind of pages of a copy's host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// Locked pages, which the device accesses directly.
    Locked,
    /// Ordinary pages, which the driver copies through page-locked memory of its own.
    Pageable,
}

/// The shortest times of plain copies in seconds, after a warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlainCopies {
    /// From the device to the host.
    pub to_host_s: f64,
    /// From the host to the device.
    pub to_device_s: f64,
}

/// Why plain copies could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeasureError {
    /// The driver's error.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// No host memory.
    #[error(transparent)]
    Memory(#[from] AllocError),
}

/// Measures synchronous copies of `len` bytes, as `cudaMemcpy` does them: the limit of the bus, or of pageable memory.
pub fn plain_copies(ordinal: usize, len: usize, pages: Pages) -> Result<PlainCopies, MeasureError> {
    on_a_thread(ordinal, After::Release, move |driver, _| {
        let host = Mapping::new(len, PageSize::Huge).map_err(|source| AllocError::Os { len, source })?;
        host.prefault();
        if pages == Pages::Locked {
            // SAFETY: the mapping lives until its pages are unlocked below; if that fails, it is leaked.
            unsafe { driver.lock(host.start().as_ptr(), host.len()) }.map_err(CudaError::Driver)?;
        }
        let copied = copy_both_ways(driver, &host, len);
        if pages == Pages::Locked {
            // SAFETY: the copies were synchronous, and have ended.
            let unlocked = unsafe { driver.unlock(host.start().as_ptr()) };
            if let Err(error) = unlocked {
                std::mem::forget(host);
                return Err(CudaError::Driver(error).into());
            }
        }
        Ok(copied?)
    })
}

fn copy_both_ways(driver: &Driver, host: &Mapping, len: usize) -> Result<PlainCopies, CudaError> {
    // SAFETY: the function has this type: it is compared with cudarc's binding below.
    let to_host: CopyToHost = unsafe { find("cuMemcpyDtoH_v2") }?;
    // SAFETY: likewise.
    let to_device: CopyToDevice = unsafe { find("cuMemcpyHtoD_v2") }?;
    let address = driver.allocate(len)?;
    let start: *mut c_void = host.start().as_ptr().cast();
    let copied = fastest(|| {
        // SAFETY: mapping and allocation have `len` bytes and outlive this call, which returns when the copy has ended.
        let code = unsafe { to_device(address, start, len) };
        driver.check("cuMemcpyHtoD_v2", code)
    })
    .and_then(|to_device_s| {
        let to_host_s = fastest(|| {
            // SAFETY: likewise.
            let code = unsafe { to_host(start, address, len) };
            driver.check("cuMemcpyDtoH_v2", code)
        })?;
        Ok(PlainCopies { to_host_s, to_device_s })
    });
    // SAFETY: the copies have ended, and nobody else knows the address.
    let freed = unsafe { driver.free(address) };
    let copied = copied?;
    freed?;
    Ok(copied)
}

/// The shortest time of several tries, after a warm-up, in seconds.
fn fastest<E>(mut copy: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    copy()?;
    let mut shortest = f64::INFINITY;
    for _ in 0..ATTEMPTS {
        let begun = Instant::now();
        copy()?;
        shortest = shortest.min(begun.elapsed().as_secs_f64());
    }
    Ok(shortest)
}

const ATTEMPTS: usize = 5;

/// The fault that breaks a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Break {
    /// A reset of the device, as by a library that assumes it is alone in the process.
    Reset,
    /// A trap in a kernel, as by a bug.
    Trap,
}

/// Breaks the primary context of a device for the whole process, permanently.
pub fn break_context(ordinal: usize, how: Break) -> Result<(), CudaError> {
    let broken = on_a_thread(ordinal, After::Keep, move |driver, device| match how {
        Break::Reset => reset(driver, device).map_err(MeasureError::Cuda),
        Break::Trap => trap(driver).map_err(MeasureError::Cuda),
    });
    broken.map_err(|error| match error {
        MeasureError::Cuda(error) => error,
        MeasureError::Memory(error) => unreachable!("breaking a context takes no memory: {error}"),
    })
}

fn reset(driver: &Driver, device: CUdevice) -> Result<(), CudaError> {
    // SAFETY: the function has this type: it is compared with cudarc's binding below.
    let reset_context: Reset = unsafe { find("cuDevicePrimaryCtxReset_v2") }?;
    // SAFETY: the driver allows a reset at any time; others that use their handles afterwards get an error.
    let code = unsafe { reset_context(device) };
    Ok(driver.check("cuDevicePrimaryCtxReset_v2", code)?)
}

/// Starts a kernel that traps, which makes the context of the calling thread unusable.
fn trap(driver: &Driver) -> Result<(), CudaError> {
    // SAFETY: the function has this type: it is compared with cudarc's binding below.
    let load: LoadModule = unsafe { find("cuModuleLoadData") }?;
    // SAFETY: likewise.
    let get: GetFunction = unsafe { find("cuModuleGetFunction") }?;
    // SAFETY: likewise.
    let launch: Launch = unsafe { find("cuLaunchKernel") }?;
    let mut module: CUmodule = ptr::null_mut();
    // SAFETY: the text is zero-terminated; the driver reads it and writes one handle to a local.
    let code = unsafe { load(&raw mut module, TRAP.as_ptr().cast()) };
    driver.check("cuModuleLoadData", code)?;
    let mut kernel: CUfunction = ptr::null_mut();
    // SAFETY: the name is zero-terminated; the driver writes one handle to a local.
    let code = unsafe { get(&raw mut kernel, module, c"relay_trap".as_ptr()) };
    driver.check("cuModuleGetFunction", code)?;
    let stream: CUstream = ptr::null_mut();
    // SAFETY: a kernel without parameters, on the default stream of this thread's context.
    let code = unsafe { launch(kernel, 1, 1, 1, 1, 1, 1, 0, stream, ptr::null_mut(), ptr::null_mut()) };
    Ok(driver.check("cuLaunchKernel", code)?)
}

/// A kernel that only traps, in PTX of a version that every recent driver compiles.
const TRAP: &std::ffi::CStr = c".version 7.0
.target sm_70
.address_size 64
.visible .entry relay_trap() { trap; ret; }
";

/// Whether the context is released after the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Release,
    /// The work broke the context, so that it cannot be released.
    Keep,
}

/// Runs `work` on a separate thread with the device's primary context current. Waits for it without a deadline.
fn on_a_thread<T: Send + 'static>(
    ordinal: usize,
    after: After,
    work: impl FnOnce(&Driver, CUdevice) -> Result<T, MeasureError> + Send + 'static,
) -> Result<T, MeasureError> {
    let run = move || {
        let driver = probe()?;
        let device = driver.device(ordinal)?;
        if let Ok(pci_bus_id) = driver.pci_bus_id(device) {
            locality::stay_near(&pci_bus_id);
        }
        bind(&driver, device).map_err(CudaError::Driver)?;
        let result = work(&driver, device);
        if after == After::Release {
            unbind(&driver, device, &[], &[]);
        }
        result
    };
    let device = format!("cuda:{ordinal}");
    let spawned = thread::Builder::new().name("relay-measure".into()).spawn(run);
    let stopped = CudaError::Stopped { device: device.clone() };
    let thread = spawned.map_err(|error| CudaError::NoThread { device, reason: error.to_string() })?;
    thread.join().unwrap_or(Err(stopped.into()))
}

type CopyToHost = unsafe extern "C" fn(*mut c_void, CUdeviceptr, usize) -> Code;
const _: unsafe fn(*mut c_void, CUdeviceptr, usize) -> CUresult = sys::cuMemcpyDtoH_v2;

type CopyToDevice = unsafe extern "C" fn(CUdeviceptr, *const c_void, usize) -> Code;
const _: unsafe fn(CUdeviceptr, *const c_void, usize) -> CUresult = sys::cuMemcpyHtoD_v2;

type Reset = unsafe extern "C" fn(CUdevice) -> Code;
const _: unsafe fn(CUdevice) -> CUresult = sys::cuDevicePrimaryCtxReset_v2;

type LoadModule = unsafe extern "C" fn(*mut CUmodule, *const c_void) -> Code;
const _: unsafe fn(*mut CUmodule, *const c_void) -> CUresult = sys::cuModuleLoadData;

type GetFunction = unsafe extern "C" fn(*mut CUfunction, CUmodule, *const c_char) -> Code;
const _: unsafe fn(*mut CUfunction, CUmodule, *const c_char) -> CUresult = sys::cuModuleGetFunction;

type Launch = unsafe extern "C" fn(
    CUfunction,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    CUstream,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Code;
type Launching = unsafe fn(
    CUfunction,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    CUstream,
    *mut *mut c_void,
    *mut *mut c_void,
) -> CUresult;
const _: Launching = sys::cuLaunchKernel;

const _: () = assert!(size_of::<CUdevice>() == size_of::<c_int>());

/// Finds a function of the driver.
///
/// # Safety
///
/// `F` is the type of that function. The driver was probed, so its library is loaded.
unsafe fn find<F: Copy>(symbol: &'static str) -> Result<F, CudaError> {
    // SAFETY: the caller guarantees that the library is loaded.
    let library = unsafe { sys::culib() };
    // SAFETY: the caller guarantees the type.
    let found = unsafe { library.get::<F>(symbol.as_bytes()) };
    found.map(|function| *function).map_err(|_| CudaError::NoSymbol { symbol })
}
