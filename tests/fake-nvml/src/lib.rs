//! NVIDIA's management library (NVML) without a GPU: the few functions that `tensor-relay devices` calls.
//!
//! It reports the GPUs that the environment variable `FAKE_NVML` describes, separated by `;`. A GPU is described by its
//! PCI address, its total and free bytes, and its processes with their bytes, separated by `,`:
//! `0000:01:00.0,1073741824,536870912,1234=268435456,99=?`. Without the variable, it reports that no driver is loaded,
//! so that it is never mistaken for NVML. The structures are those of NVIDIA's `nvml.h`.

use std::{
    env,
    ffi::{CStr, c_char, c_uint, c_ulonglong},
};

const SUCCESS: c_uint = 0;
const INVALID_ARGUMENT: c_uint = 2;
const NOT_SUPPORTED: c_uint = 3;
const INSUFFICIENT_SIZE: c_uint = 7;
const DRIVER_NOT_LOADED: c_uint = 9;

/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: c_ulonglong = c_ulonglong::MAX;

/// One GPU, as `FAKE_NVML` describes it.
struct Gpu {
    pci: String,
    total_bytes: u64,
    free_bytes: u64,
    /// The ids of the GPU's processes, and the bytes that each of them uses.
    processes: Vec<(u32, u64)>,
}

/// A GPU's handle: its index plus one, because null is invalid.
type Handle = usize;

/// `nvmlPciInfo_t`.
#[repr(C)]
pub struct PciInfo {
    legacy_bus_id: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub struct Memory {
    version: c_uint,
    total: c_ulonglong,
    reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
pub struct Process {
    pid: c_uint,
    used_bytes: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlInit_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_uint {
    if env::var_os("FAKE_NVML").is_some() { SUCCESS } else { DRIVER_NOT_LOADED }
}

/// `nvmlShutdown`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_uint {
    SUCCESS
}

/// `nvmlSystemGetDriverVersion`.
///
/// # Safety
/// `version` has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, len: c_uint) -> c_uint {
    // SAFETY: the caller's promise.
    unsafe { write_text(c"550.0.0-fake", version, len) }
}

/// `nvmlDeviceGetCount_v2`.
///
/// # Safety
/// `count` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> c_uint {
    // SAFETY: the caller's promise.
    unsafe { count.write(gpus().len() as c_uint) };
    SUCCESS
}

/// `nvmlDeviceGetHandleByIndex_v2`.
///
/// # Safety
/// `handle` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, handle: *mut Handle) -> c_uint {
    if index as usize >= gpus().len() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: the caller's promise.
    unsafe { handle.write(index as usize + 1) };
    SUCCESS
}

/// `nvmlDeviceGetName`.
///
/// # Safety
/// `name` has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(_device: Handle, name: *mut c_char, len: c_uint) -> c_uint {
    // SAFETY: the caller's promise.
    unsafe { write_text(c"Fake GPU of NVML", name, len) }
}

/// `nvmlDeviceGetPciInfo_v3`.
///
/// # Safety
/// `info` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: Handle, info: *mut PciInfo) -> c_uint {
    let Some(gpu) = gpu(device) else { return INVALID_ARGUMENT };
    let numbers: Vec<u32> = gpu
        .pci
        .split([':', '.'])
        .map(|digits| u32::from_str_radix(digits, 16).unwrap_or(0))
        .collect();
    let [domain, bus, number, _function] = numbers[..] else { return INVALID_ARGUMENT };
    let described = PciInfo {
        legacy_bus_id: [0; 16],
        domain,
        bus,
        device: number,
        device_id: 0,
        subsystem_id: 0,
        bus_id: [0; 32],
    };
    // SAFETY: the caller's promise.
    unsafe { info.write(described) };
    SUCCESS
}

/// `nvmlDeviceGetMemoryInfo_v2`.
///
/// # Safety
/// `memory` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: *mut Memory) -> c_uint {
    let Some(Gpu { total_bytes: total, free_bytes: free, .. }) = gpu(device) else { return INVALID_ARGUMENT };
    let used = total.saturating_sub(free);
    // SAFETY: the caller's promise.
    unsafe { memory.write(Memory { version: 2 << 24, total, reserved: 0, free, used }) };
    SUCCESS
}

/// `nvmlDeviceGetMigMode`: these GPUs do not support MIG.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigMode(
    _device: Handle,
    _current: *mut c_uint,
    _pending: *mut c_uint,
) -> c_uint {
    NOT_SUPPORTED
}

/// `nvmlDeviceGetComputeRunningProcesses_v3`.
///
/// # Safety
/// `count` may be read and written, and `list` has room for as many processes as `count` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: Handle,
    count: *mut c_uint,
    list: *mut Process,
) -> c_uint {
    let Some(gpu) = gpu(device) else { return INVALID_ARGUMENT };
    // SAFETY: the caller's promise.
    let room = unsafe { count.read() } as usize;
    // SAFETY: the caller's promise.
    unsafe { count.write(gpu.processes.len() as c_uint) };
    if gpu.processes.len() > room {
        return INSUFFICIENT_SIZE;
    }
    for (index, (pid, used_bytes)) in gpu.processes.into_iter().enumerate() {
        let process = Process { pid, used_bytes, gpu_instance: c_uint::MAX, compute_instance: c_uint::MAX };
        // SAFETY: the list has room for all processes, as the caller promises and the count above confirms.
        let entry = unsafe { list.add(index) };
        // SAFETY: as above.
        unsafe { entry.write(process) };
    }
    SUCCESS
}

fn gpus() -> Vec<Gpu> {
    let described = env::var("FAKE_NVML").unwrap_or_default();
    described.split(';').filter(|gpu| !gpu.is_empty()).filter_map(parse).collect()
}

fn gpu(handle: Handle) -> Option<Gpu> {
    gpus().into_iter().nth(handle.checked_sub(1)?)
}

/// Parses `PCI,TOTAL,FREE` and any number of `PID=BYTES`.
fn parse(text: &str) -> Option<Gpu> {
    let mut parts = text.split(',');
    let pci = parts.next()?.to_owned();
    let (total_bytes, free_bytes) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let process = |text: &str| {
        let (pid, bytes) = text.split_once('=')?;
        Some((pid.parse().ok()?, bytes.parse().unwrap_or(NOT_AVAILABLE)))
    };
    let processes = parts.filter_map(process).collect();
    Some(Gpu { pci, total_bytes, free_bytes, processes })
}

/// Writes `text` with its terminating zero.
///
/// # Safety
/// `to` has room for `len` bytes.
unsafe fn write_text(text: &CStr, to: *mut c_char, len: c_uint) -> c_uint {
    let bytes = text.to_bytes_with_nul();
    if bytes.len() > len as usize {
        return INSUFFICIENT_SIZE;
    }
    // SAFETY: the caller promises room for `len` bytes, and `bytes` is not longer.
    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len()) };
    SUCCESS
}
