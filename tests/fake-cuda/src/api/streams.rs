use std::ffi::{c_uint, c_void};

use super::write;
use crate::{
    call::in_context,
    device::resolve_stream,
    status::Status,
    stream::{self, HostFunction, Stream, Work},
};

#[unsafe(no_mangle)]
extern "C" fn cuStreamCreate(stream: *mut u64, flags: c_uint) -> u32 {
    in_context("cuStreamCreate", |mut state, device| {
        const NON_BLOCKING: c_uint = 1;
        if flags > NON_BLOCKING || stream.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let new = Stream::open(&mut state, device, Stream::created(flags != NON_BLOCKING));
        write(stream, new)
    })
}

/// Does not wait. The stream's queued work still runs.
#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: u64) -> u32 {
    in_context("cuStreamDestroy_v2", |mut state, device| {
        let found = state.devices[device].streams.get_mut(&stream);
        let Some(found) = found.filter(|found| found.created && !found.closing) else {
            state
                .report
                .violation(format!("{stream:#x} is destroyed, but is not a stream of device {device}"));
            return Err(Status::INVALID_HANDLE);
        };
        found.closing = true;
        crate::state::changed();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: u64) -> u32 {
    in_context("cuStreamSynchronize", |mut state, device| {
        let stream = resolve_stream(&mut state, device, stream)?;
        stream::synchronize(state, device, stream).map(drop)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(stream: u64) -> u32 {
    in_context("cuStreamQuery", |mut state, device| {
        let stream = resolve_stream(&mut state, device, stream)?;
        let idle = state.devices[device].streams.get(&stream).is_none_or(Stream::is_idle);
        if idle { Ok(()) } else { Err(Status::NOT_READY) }
    })
}

/// The event may be of another device.
#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, flags: c_uint) -> u32 {
    in_context("cuStreamWaitEvent", |mut state, device| {
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let stream = resolve_stream(&mut state, device, stream)?;
        let event = state.devices.iter().find_map(|device| device.events.get(&event));
        let event = event.ok_or(Status::INVALID_HANDLE)?;
        let wait = Work::Await(event.progress.clone(), event.recorded);
        state.devices[device].push(stream, wait);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetCtx(stream: u64, context: *mut u64) -> u32 {
    in_context("cuStreamGetCtx", |mut state, device| {
        resolve_stream(&mut state, device, stream)?;
        write(context, crate::call::current_context())
    })
}

/// Always returns "not capturing".
#[unsafe(no_mangle)]
extern "C" fn cuStreamIsCapturing(stream: u64, status: *mut c_uint) -> u32 {
    in_context("cuStreamIsCapturing", |mut state, device| {
        resolve_stream(&mut state, device, stream)?;
        write(status, 0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchHostFunc(stream: u64, function: Option<HostFunction>, argument: *mut c_void) -> u32 {
    in_context("cuLaunchHostFunc", |mut state, device| {
        let stream = resolve_stream(&mut state, device, stream)?;
        let function = function.ok_or(Status::INVALID_VALUE)?;
        state.devices[device].push(stream, Work::Host { function, argument });
        Ok(())
    })
}
