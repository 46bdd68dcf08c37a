use std::ffi::c_int;

use super::{write, write_text};
use crate::{
    call::{before_init, initialized},
    state::State,
    status::{Answer, Status},
};

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: u32) -> u32 {
    before_init("cuInit", |mut state| {
        if !state.allowed || state.devices.is_empty() {
            return Err(Status::NO_DEVICE);
        }
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        if !state.initialized {
            state.report.append_line("init");
        }
        state.initialized = true;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDriverGetVersion(version: *mut c_int) -> u32 {
    before_init("cuDriverGetVersion", |state| write(version, state.options.version))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(count: *mut c_int) -> u32 {
    initialized("cuDeviceGetCount", |state| write(count, state.devices.len() as c_int))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> u32 {
    initialized("cuDeviceGet", |state| {
        device_index(&state, ordinal)?;
        write(device, ordinal)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetName(name: *mut u8, capacity: c_int, device: c_int) -> u32 {
    initialized("cuDeviceGetName", |state| {
        device_index(&state, device)?;
        write_text(name, capacity, "Fake CUDA device, for tests only")
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetPCIBusId(id: *mut u8, capacity: c_int, device: c_int) -> u32 {
    initialized("cuDeviceGetPCIBusId", |state| {
        device_index(&state, device)?;
        let text = format!("{PCI_DOMAIN:04X}:{:02X}:00.0", machine_wide_number(&state, device) + 1);
        if (capacity as usize) <= text.len() {
            return Err(Status::INVALID_VALUE);
        }
        write_text(id, capacity, &text)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> u32 {
    initialized("cuDeviceTotalMem_v2", |state| {
        let device = device_index(&state, device)?;
        write(bytes, state.devices[device].memory.limit_bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: u32, device: c_int) -> u32 {
    initialized("cuDeviceGetAttribute", |state| {
        let device = device_index(&state, device)?;
        write(value, attribute_of(machine_wide_number(&state, device as c_int), &state, attribute))
    })
}

/// A PCI domain that no machine has, so that no real device has the address of a fake one.
const PCI_DOMAIN: c_int = 0xFA4E;

/// The value of a device attribute, which is selected by its number in CUDA's header. Unknown attributes are 0: not
/// supported.
fn attribute_of(device_number: c_int, state: &State, attribute: u32) -> c_int {
    const MULTIPROCESSORS: u32 = 16;
    const PCI_BUS_ID: u32 = 33;
    const ASYNC_ENGINES: u32 = 40;
    const UNIFIED_ADDRESSING: u32 = 41;
    const PCI_DOMAIN_ID: u32 = 50;
    const COMPUTE_CAPABILITY_MAJOR: u32 = 75;
    const VIRTUAL_MEMORY: u32 = 102;
    const POSIX_FILE_DESCRIPTORS: u32 = 103;
    const MEMORY_POOLS: u32 = 115;
    match attribute {
        MULTIPROCESSORS | UNIFIED_ADDRESSING | MEMORY_POOLS | VIRTUAL_MEMORY => 1,
        ASYNC_ENGINES => 2,
        PCI_BUS_ID => device_number + 1,
        POSIX_FILE_DESCRIPTORS => c_int::from(state.options.shareable_fds != 0),
        PCI_DOMAIN_ID => PCI_DOMAIN,
        COMPUTE_CAPABILITY_MAJOR => 9,
        _ => 0,
    }
}

/// Makes a UUID from the machine-wide number, so that the device has the same UUID in every process.
#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> u32 {
    initialized("cuDeviceGetUuid_v2", |state| {
        device_index(&state, device)?;
        let mut bytes = *b"FAKE-CUDA-GPU-  ";
        bytes[14..].copy_from_slice(&(machine_wide_number(&state, device) as u16).to_be_bytes());
        write(uuid, bytes)
    })
}

/// A device's machine-wide number.
fn machine_wide_number(state: &State, device: c_int) -> c_int {
    state.options.first_device as c_int + device
}

/// The index of a device, if it exists.
pub(super) fn device_index(state: &State, device: c_int) -> Answer<usize> {
    let device = usize::try_from(device).map_err(|_| Status::INVALID_DEVICE)?;
    if device < state.devices.len() { Ok(device) } else { Err(Status::INVALID_DEVICE) }
}
