use std::{ffi::c_uint, sync::Arc};

use super::write;
use crate::{
    call::{in_context, on_object},
    device::resolve_stream,
    event::Event,
    state::State,
    status::{Answer, Status},
    stream::{self, Work},
};

#[unsafe(no_mangle)]
extern "C" fn cuEventCreate(event: *mut u64, flags: c_uint) -> u32 {
    in_context("cuEventCreate", |mut state, device| {
        const DISABLE_TIMING: c_uint = 2;
        let new = state.handle();
        write(event, new)?;
        state.devices[device]
            .events
            .insert(new, Event::new(flags & DISABLE_TIMING == 0));
        Ok(())
    })
}

/// Does not wait. Streams that wait for the event continue to do so.
#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: u64) -> u32 {
    in_context("cuEventDestroy_v2", |mut state, device| {
        if state.devices[device].events.remove(&event).is_none() {
            state
                .report
                .violation(format!("{event:#x} is destroyed, but is not an event of device {device}"));
            return Err(Status::INVALID_HANDLE);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: u64, stream: u64) -> u32 {
    in_context("cuEventRecord", |mut state, device| {
        let stream = resolve_stream(&mut state, device, stream)?;
        let event = state.devices[device].events.get_mut(&event).ok_or(Status::INVALID_HANDLE)?;
        event.recorded += 1;
        let record = Work::Record(event.progress.clone(), event.recorded);
        state.devices[device].push(stream, record);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: u64) -> u32 {
    on_object("cuEventQuery", |state| {
        let (device, event) = find(&state, event)?;
        state.devices[device].check()?;
        if event.is_complete() { Ok(()) } else { Err(Status::NOT_READY) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: u64) -> u32 {
    on_object("cuEventSynchronize", |state| {
        let (device, event) = find(&state, event)?;
        state.devices[device].check()?;
        let (progress, recorded) = (Arc::clone(&event.progress), event.recorded);
        stream::wait_for_record(state, device, &progress, recorded).map(drop)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, begin: u64, end: u64) -> u32 {
    on_object("cuEventElapsedTime", |state| {
        let (begin, end) = (find(&state, begin)?.1, find(&state, end)?.1);
        if ![begin, end].iter().all(|event| event.timed && event.recorded > 0) {
            return Err(Status::INVALID_HANDLE);
        }
        let (Some(begun), Some(ended)) = (begin.progress.at(), end.progress.at()) else {
            return Err(Status::NOT_READY);
        };
        if !begin.is_complete() || !end.is_complete() {
            return Err(Status::NOT_READY);
        }
        write(milliseconds, ended.saturating_duration_since(begun).as_secs_f32() * 1000.0)
    })
}

/// Finds an event on any device.
fn find(state: &State, event: u64) -> Answer<(usize, &Event)> {
    let mut devices = state.devices.iter().enumerate();
    let found = devices.find_map(|(index, device)| Some((index, device.events.get(&event)?)));
    found.ok_or(Status::INVALID_HANDLE)
}
