use std::{
    cell::Cell,
    ffi::{c_int, c_uint},
};

use super::{devices::device_index, write};
use crate::{
    call::{self, in_context, initialized, on_object},
    device::{self, Context},
    state::Guard,
    status::{Answer, Status},
    stream,
};

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) -> u32 {
    initialized("cuDevicePrimaryCtxRetain", |mut state| {
        let device = device_index(&state, device)?;
        let new = state.handle();
        let primary =
            state.devices[device]
                .context
                .get_or_insert(Context { handle: new, retains: 0, failed: None });
        write(context, primary.handle)?;
        primary.retains += 1;
        call::set_generation(state.generation);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> u32 {
    on_object("cuDevicePrimaryCtxRelease_v2", |mut state| {
        let device = device_index(&state, device)?;
        let Some(context) = &mut state.devices[device].context else {
            state
                .report
                .violation(format!("the context of device {device} is released, but not retained"));
            return Err(Status::INVALID_CONTEXT);
        };
        context.retains = context.retains.saturating_sub(1);
        if context.retains > 0 {
            return Ok(());
        }
        let in_flight = state.devices[device].copies_in_flight();
        if in_flight > 0 {
            state
                .report
                .violation(format!("the context of device {device} is destroyed under {in_flight} copies"));
        }
        device::end_context(&mut state, device);
        Ok(())
    })
}

/// Destroys the context even if it is retained.
#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxReset_v2(device: c_int) -> u32 {
    initialized("cuDevicePrimaryCtxReset_v2", |mut state| {
        let device = device_index(&state, device)?;
        device::end_context(&mut state, device);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) -> u32 {
    initialized("cuDevicePrimaryCtxGetState", |state| {
        let device = device_index(&state, device)?;
        write(flags, 0)?;
        write(active, c_int::from(state.devices[device].context.is_some()))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetCurrent(context: *mut u64) -> u32 {
    initialized("cuCtxGetCurrent", |_| write(context, call::current_context()))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: u64) -> u32 {
    initialized("cuCtxSetCurrent", |state| {
        check_handle(&state, context)?;
        if context != 0 {
            call::set_generation(state.generation);
        }
        call::set_current_context(context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: u64) -> u32 {
    initialized("cuCtxPushCurrent_v2", |state| {
        check_handle(&state, context)?;
        call::set_generation(state.generation);
        call::push_context(context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPopCurrent_v2(context: *mut u64) -> u32 {
    initialized("cuCtxPopCurrent_v2", |_| {
        let popped = call::pop_context().ok_or(Status::INVALID_CONTEXT)?;
        // The pointer may be null.
        if context.is_null() { Ok(()) } else { write(context, popped) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetDevice(device: *mut c_int) -> u32 {
    in_context("cuCtxGetDevice", |_, number| write(device, number as c_int))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> u32 {
    in_context("cuCtxSynchronize", |state, device| stream::synchronize_all(state, device).map(drop))
}

thread_local! {
    /// The capture mode of this thread; 0, global, at first.
    static CAPTURE_MODE: Cell<c_uint> = const { Cell::new(0) };
}

/// Stores the mode, which has no effect: this driver cannot capture streams.
#[unsafe(no_mangle)]
extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> u32 {
    initialized("cuThreadExchangeStreamCaptureMode", |_| {
        if mode.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the pointer is not null; CUDA's documentation requires the caller to pass a valid one.
        let new = unsafe { mode.read() };
        if new > 2 {
            return Err(Status::INVALID_VALUE);
        }
        write(mode, CAPTURE_MODE.replace(new))
    })
}

/// Checks that a handle is null or names an existing context.
fn check_handle(state: &Guard, context: u64) -> Answer {
    if context == 0 || call::device_of(state, context).is_some() {
        Ok(())
    } else {
        Err(Status::INVALID_CONTEXT)
    }
}
