use std::ffi::c_uint;

use super::write;
use crate::{
    call::in_context,
    ipc::{HANDLE_BYTES, Handle},
    memory::{Freed, Missing},
    state::{self, State},
    status::{Answer, Status},
};

/// CUDA's `CUipcMemHandle`, which is passed by value.
#[repr(C)]
struct IpcMemHandle([u8; HANDLE_BYTES]);

#[unsafe(no_mangle)]
extern "C" fn cuIpcGetMemHandle(handle: *mut IpcMemHandle, address: u64) -> u32 {
    in_context("cuIpcGetMemHandle", |mut state, device| {
        if state.options.exportable == 0 {
            return Err(Status::INVALID_VALUE);
        }
        // The export may move the block's bytes into a file. What a copy wrote meanwhile would be lost.
        while state.copying > 0 {
            state = state::wait(state);
        }
        let number = state.options.first_device + device;
        let device = state.devices.get_mut(device).ok_or(Status::CONTEXT_IS_DESTROYED)?;
        let new = device.memory.export(address, number)?;
        write(handle, IpcMemHandle(new.encode()))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: IpcMemHandle, flags: c_uint) -> u32 {
    const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
    in_context("cuIpcOpenMemHandle_v2", |mut state, device| {
        if flags != LAZY_ENABLE_PEER_ACCESS {
            return Err(Status::INVALID_VALUE);
        }
        let handle = Handle::decode(&handle.0).ok_or(Status::INVALID_VALUE)?;
        check_device(&state, handle.device_number(), device)?;
        let new = state.devices[device].memory.open(handle)?;
        write(address, new)
    })
}

/// Checks that memory of the device `device_number` can be opened on `device`: fake devices have no peer access.
fn check_device(state: &State, device_number: usize, device: usize) -> Answer {
    match device_number.checked_sub(state.options.first_device) {
        Some(found) if found == device => Ok(()),
        Some(found) if found < state.devices.len() => Err(Status::PEER_ACCESS_UNSUPPORTED),
        _ => Err(Status::INVALID_DEVICE),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcCloseMemHandle(address: u64) -> u32 {
    in_context("cuIpcCloseMemHandle", |mut state, device| {
        let violation = match state.devices[device].memory.close(address) {
            Ok(Freed::InUse) => format!("device memory at {address:#x} is closed under a copy"),
            Ok(_) => return Ok(()),
            Err(Missing::Freed) => format!("device memory at {address:#x} is closed twice"),
            Err(Missing::Unknown) => format!("{address:#x} is closed, but was not opened"),
        };
        state.report.violation(violation);
        Err(Status::INVALID_VALUE)
    })
}
