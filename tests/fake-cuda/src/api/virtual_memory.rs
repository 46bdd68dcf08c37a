use std::{
    ffi::{c_int, c_uint, c_ulonglong, c_void},
    os::fd::{BorrowedFd, IntoRawFd},
};

use super::{devices::device_index, write};
use crate::{
    call::{initialized, on_object},
    memory::Freed,
    state::State,
    status::{Answer, Status},
    virtual_memory::GRANULARITY,
};

/// CUDA's `CUmemAllocationProp`, with opaque fields where these functions ignore them.
#[repr(C)]
struct AllocationProp {
    kind: c_int,
    handle_types: c_uint,
    location: Location,
    metadata: *mut c_void,
    flags: [u8; 8],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: c_int,
    id: c_int,
}

#[repr(C)]
struct AccessDesc {
    location: Location,
    flags: c_uint,
}

const PINNED: c_int = 1;
const DEVICE: c_int = 1;
const POSIX_FILE_DESCRIPTOR: c_uint = 1;

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    prop: *const AllocationProp,
    _option: c_uint,
) -> u32 {
    initialized("cuMemGetAllocationGranularity", |state| {
        device_of(&state, prop)?;
        write(granularity, GRANULARITY)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemCreate(
    handle: *mut u64,
    bytes: usize,
    prop: *const AllocationProp,
    flags: c_ulonglong,
) -> u32 {
    initialized("cuMemCreate", |mut state| {
        let (device, shareable) = device_of(&state, prop)?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let new = state.handle();
        let number = state.options.first_device + device;
        let State { virtual_memory, devices, .. } = &mut *state;
        virtual_memory.create(new, devices, (device, number), bytes, shareable)?;
        write(handle, new)
    })
}

/// The index of the device that the properties name, and whether they request shareable handles.
fn device_of(state: &State, prop: *const AllocationProp) -> Answer<(usize, bool)> {
    if prop.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: the pointer is not null; CUDA's documentation requires the caller to pass a valid one.
    let AllocationProp { kind, handle_types, location, .. } = unsafe { prop.read() };
    let shareable = handle_types == POSIX_FILE_DESCRIPTOR;
    if kind != PINNED || location.kind != DEVICE || !(shareable || handle_types == 0) {
        return Err(Status::INVALID_VALUE);
    }
    if shareable && state.options.shareable_fds == 0 {
        return Err(Status::NOT_SUPPORTED);
    }
    Ok((device_index(state, location.id)?, shareable))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: u64) -> u32 {
    on_object("cuMemRelease", |mut state| {
        let State { virtual_memory, devices, .. } = &mut *state;
        let released = virtual_memory.release(handle, devices);
        if released.is_err() {
            state
                .report
                .violation(format!("an invalid handle {handle:#x} of physical memory is released"));
        }
        released
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemExportToShareableHandle(
    shareable: *mut c_int,
    handle: u64,
    kind: c_uint,
    flags: c_ulonglong,
) -> u32 {
    initialized("cuMemExportToShareableHandle", |state| {
        if kind != POSIX_FILE_DESCRIPTOR || flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let file = state.virtual_memory.export(handle)?;
        write(shareable, file.into_raw_fd())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemImportFromShareableHandle(handle: *mut u64, shareable: *mut c_void, kind: c_uint) -> u32 {
    initialized("cuMemImportFromShareableHandle", |mut state| {
        let file = c_int::try_from(shareable.addr()).map_err(|_| Status::INVALID_VALUE)?;
        if kind != POSIX_FILE_DESCRIPTOR || file < 0 {
            return Err(Status::INVALID_VALUE);
        }
        if state.options.shareable_fds == 0 {
            return Err(Status::NOT_SUPPORTED);
        }
        // SAFETY: the descriptor is not -1. The caller guarantees that it is open; otherwise the system refuses it.
        let file = unsafe { BorrowedFd::borrow_raw(file) };
        let new = state.handle();
        let (first, devices) = (state.options.first_device, state.devices.len());
        let device_of = |number: usize| number.checked_sub(first).filter(|device| *device < devices);
        state.virtual_memory.import(new, file, device_of)?;
        write(handle, new)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressReserve(
    address: *mut u64,
    bytes: usize,
    alignment: usize,
    hint: u64,
    flags: c_ulonglong,
) -> u32 {
    initialized("cuMemAddressReserve", |mut state| {
        if !(alignment == 0 || alignment.is_power_of_two())
            || alignment > GRANULARITY
            || hint != 0
            || flags != 0
        {
            return Err(Status::INVALID_VALUE);
        }
        let new = state.virtual_memory.reserve(bytes)?;
        write(address, new)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: u64, bytes: usize) -> u32 {
    on_object("cuMemAddressFree", |mut state| {
        let freed = state.virtual_memory.free(address, bytes);
        if freed.is_err() {
            state.report.violation(format!(
                "{bytes} addresses at {address:#x} are freed that are mapped, or not reserved"
            ));
        }
        freed
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) -> u32 {
    initialized("cuMemMap", |mut state| {
        if offset != 0 || flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let State { virtual_memory, devices, .. } = &mut *state;
        virtual_memory.map(devices, address, bytes, handle)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemSetAccess(address: u64, bytes: usize, desc: *const AccessDesc, count: usize) -> u32 {
    const READ_WRITE: c_uint = 3;
    initialized("cuMemSetAccess", |mut state| {
        if desc.is_null() || count != 1 {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the pointer is not null; CUDA's documentation requires the caller to pass a valid one.
        let AccessDesc { location, flags } = unsafe { desc.read() };
        let accessing = device_index(&state, location.id)?;
        let device = state.virtual_memory.device_at(address, bytes)?;
        if location.kind != DEVICE || accessing != device {
            return Err(Status::INVALID_VALUE);
        }
        state.devices[device].memory.set_access(address, bytes, flags == READ_WRITE)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(address: u64, bytes: usize) -> u32 {
    on_object("cuMemUnmap", |mut state| {
        let State { virtual_memory, devices, .. } = &mut *state;
        let violation = match virtual_memory.unmap(devices, address, bytes) {
            Ok(Freed::InUse) => format!("device memory at {address:#x} is unmapped under a copy"),
            Ok(_) => return Ok(()),
            Err(_) => format!("{bytes} bytes at {address:#x} are unmapped, but were not mapped as one range"),
        };
        state.report.violation(violation);
        Err(Status::INVALID_VALUE)
    })
}
