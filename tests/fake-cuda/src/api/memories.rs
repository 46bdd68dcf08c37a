use std::ffi::{c_int, c_uint, c_void};

use super::write;
use crate::{
    call::{in_context, initialized},
    device::resolve_stream,
    host_memory::{HostRange, Locked},
    memory::{Freed, Missing, Origin},
    state::Guard,
    status::{Answer, Status},
    stream::{self, Work},
};

#[unsafe(no_mangle)]
extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32 {
    in_context("cuMemGetInfo_v2", |state, device| {
        let memory = &state.devices[device].memory;
        write(free, memory.limit_bytes - memory.used_bytes)?;
        write(total, memory.limit_bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32 {
    in_context("cuMemAlloc_v2", |mut state, device| {
        let new = state.devices[device].memory.allocate(bytes, Origin::Allocated)?;
        write(address, new)
    })
}

/// Waits for all work of the device before it frees the memory, as the real driver does.
#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    in_context("cuMemFree_v2", |mut state, device| {
        if address == 0 {
            return Ok(());
        }
        let memory = &state.devices[device].memory;
        if !memory.is_freeable_block(address) || memory.is_in_use(address) {
            // A wrong address or a copy in flight is reported without waiting, independent of timing.
            return stream::free(&mut state, device, address);
        }
        let mut state = stream::synchronize_all(state, device)?;
        stream::free(&mut state, device, address)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: u64) -> u32 {
    in_context("cuMemAllocAsync", |mut state, device| {
        resolve_stream(&mut state, device, stream)?;
        let new = state.devices[device].memory.allocate(bytes, Origin::Pooled)?;
        write(address, new)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: u64, stream: u64) -> u32 {
    in_context("cuMemFreeAsync", |mut state, device| {
        let stream = resolve_stream(&mut state, device, stream)?;
        if !state.devices[device].memory.is_freeable_block(address) {
            return stream::free(&mut state, device, address);
        }
        state.devices[device].push(stream, Work::Free(address));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostAlloc(start: *mut *mut c_void, bytes: usize, _flags: c_uint) -> u32 {
    in_context("cuMemHostAlloc", |mut state, device| {
        let new = state.host.allocate(bytes, device)?;
        write(start, std::ptr::with_exposed_provenance_mut(new))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(start: *mut c_void) -> u32 {
    in_context("cuMemFreeHost", |state, _| {
        remove_host(state, start.addr(), Locked::Allocated, Status::INVALID_VALUE)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(start: *mut c_void, bytes: usize, _flags: c_uint) -> u32 {
    in_context("cuMemHostRegister_v2", |mut state, device| state.host.register(start.addr(), bytes, device))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(start: *mut c_void) -> u32 {
    in_context("cuMemHostUnregister", |state, _| {
        remove_host(state, start.addr(), Locked::Registered, Status::HOST_MEMORY_NOT_REGISTERED)
    })
}

fn remove_host(mut state: Guard, start: usize, origin: Locked, unknown: Status) -> Answer {
    let (violation, status) = match state.host.remove(start, origin) {
        Ok(Freed::Unused | Freed::OpenElsewhere) => return Ok(()),
        Ok(Freed::InUse) => (format!("page-locked memory at {start:#x} is given back under a copy"), unknown),
        Err(Missing::Freed) => (format!("page-locked memory at {start:#x} is freed twice"), unknown),
        Err(Missing::Unknown) => (format!("{start:#x} is given back, but was not page-locked"), unknown),
    };
    state.report.violation(violation);
    Err(status)
}

/// Writes an attribute, which is selected by its number in CUDA's header.
#[unsafe(no_mangle)]
extern "C" fn cuPointerGetAttribute(value: *mut c_void, attribute: c_uint, address: u64) -> u32 {
    const CONTEXT: c_uint = 1;
    const MEMORY_TYPE: c_uint = 2;
    const DEVICE_POINTER: c_uint = 3;
    const DEVICE_ORDINAL: c_uint = 9;
    const RANGE_START: c_uint = 11;
    const RANGE_BYTES: c_uint = 12;
    const HOST: c_uint = 1;
    const DEVICE: c_uint = 2;
    initialized("cuPointerGetAttribute", |state| {
        let found = state.devices.iter().enumerate().find_map(|(index, device)| {
            let extent = device.memory.extent(address)?;
            Some((index, device.context.as_ref().map_or(0, |context| context.handle), extent))
        });
        let Some((device, context, (start, bytes))) = found else {
            let HostRange::PageLocked(_) = state.host.range(address as usize, 1) else {
                return Err(Status::INVALID_VALUE);
            };
            return match attribute {
                MEMORY_TYPE => write(value.cast(), HOST),
                DEVICE_POINTER => write(value.cast(), address),
                _ => Err(Status::INVALID_VALUE),
            };
        };
        match attribute {
            CONTEXT => write(value.cast(), context),
            MEMORY_TYPE => write(value.cast(), DEVICE),
            DEVICE_POINTER => write(value.cast(), address),
            DEVICE_ORDINAL => write(value.cast(), device as c_int),
            RANGE_START => write(value.cast(), start),
            RANGE_BYTES => write(value.cast(), bytes),
            _ => Err(Status::INVALID_VALUE),
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAddressRange_v2(start: *mut u64, bytes: *mut usize, address: u64) -> u32 {
    in_context("cuMemGetAddressRange_v2", |state, device| {
        let extent = state.devices[device].memory.extent(address).ok_or(Status::INVALID_VALUE)?;
        write(start, extent.0)?;
        write(bytes, extent.1)
    })
}
