use std::ffi::{c_uint, c_void};

use crate::{
    call::in_context,
    copying::{self, Prepared, Rows},
    device::resolve_stream,
    state::Guard,
    status::{Answer, Status},
    stream::{self, Work},
};

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> u32 {
    in_context("cuMemcpyHtoD_v2", |state, device| {
        submit(state, device, 0, Wait::Always, |state| {
            copying::from_host(state, device, to, from.cast(), bytes)
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: u64) -> u32 {
    in_context("cuMemcpyHtoDAsync_v2", |state, device| {
        submit(state, device, stream, Wait::Never, |state| {
            copying::from_host(state, device, to, from.cast(), bytes)
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> u32 {
    in_context("cuMemcpyDtoH_v2", |state, device| {
        submit(state, device, 0, Wait::Always, |state| {
            copying::to_host(state, device, to.cast(), from, bytes)
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: u64) -> u32 {
    in_context("cuMemcpyDtoHAsync_v2", |state, device| {
        submit(state, device, stream, Wait::IfPageable, |state| {
            copying::to_host(state, device, to.cast(), from, bytes)
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) -> u32 {
    in_context("cuMemcpyDtoDAsync_v2", |mut state, device| {
        let stream = resolve_stream(&mut state, device, stream)?;
        let copy = copying::within(&mut state, device, to, from, bytes)?;
        state.devices[device].push(stream, Work::Copy(copy));
        Ok(())
    })
}

/// Copies rows within a device; other two-dimensional copies are refused, since the project makes none.
///
/// # Safety
///
/// `copy` points to a value.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: *const RowsCopy, stream: u64) -> u32 {
    in_context("cuMemcpy2DAsync_v2", |mut state, device| {
        const DEVICE: c_uint = 2;
        if copy.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the caller guarantees a value, and any bits are valid.
        let RowsCopy { from, to, width, height } = unsafe { copy.read() };
        let is_plain = |end: &RowsEnd| end.memory_type == DEVICE && end.x == 0 && end.y == 0;
        if !is_plain(&from) || !is_plain(&to) {
            return Err(Status::INVALID_VALUE);
        }
        let stream = resolve_stream(&mut state, device, stream)?;
        let rows = Rows { width, height, from_pitch: from.pitch, to_pitch: to.pitch };
        let copy = copying::rows_within(&mut state, device, to.device, from.device, rows)?;
        if copy.bytes() > 0 {
            state.devices[device].push(stream, Work::Copy(copy));
        }
        Ok(())
    })
}

/// `CUDA_MEMCPY2D`
#[repr(C)]
struct RowsCopy {
    from: RowsEnd,
    to: RowsEnd,
    width: usize,
    height: usize,
}

/// One end of a `CUDA_MEMCPY2D`.
#[repr(C)]
struct RowsEnd {
    x: usize,
    y: usize,
    memory_type: c_uint,
    host: *const c_void,
    device: u64,
    array: *const c_void,
    pitch: usize,
}

/// Queues the copies in reverse, since their order is not promised.
///
/// # Safety
///
/// The three arrays have `count` elements, and the other two `attribute_count`.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyBatchAsync_v2(
    to: *const u64,
    from: *const u64,
    bytes: *const usize,
    count: usize,
    attributes: *const CopyAttributes,
    first_of_attributes: *const usize,
    attribute_count: usize,
    stream: u64,
) -> u32 {
    in_context("cuMemcpyBatchAsync_v2", |mut state, device| {
        const LEGACY: u64 = 1;
        const IN_STREAM_ORDER: c_uint = 1;
        if count == 0 || attribute_count != 1 || stream <= LEGACY {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the caller guarantees one element, and any bits are a valid value.
        let attributes = unsafe { attributes.read() };
        // SAFETY: as above.
        let first = unsafe { first_of_attributes.read() };
        if attributes.source_order != IN_STREAM_ORDER || attributes.flags > 1 || first != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let stream = resolve_stream(&mut state, device, stream)?;
        // SAFETY: the caller guarantees `count` elements, which nobody writes during the call.
        let to = unsafe { std::slice::from_raw_parts(to, count) };
        // SAFETY: as above.
        let from = unsafe { std::slice::from_raw_parts(from, count) };
        // SAFETY: as above.
        let lengths = unsafe { std::slice::from_raw_parts(bytes, count) };
        for ((&to, &from), &bytes) in to.iter().zip(from).zip(lengths).rev() {
            if bytes == 0 {
                return Err(Status::INVALID_VALUE);
            }
            let copy = copying::between(&mut state, device, to, from, bytes)?;
            state.devices[device].push(stream, Work::Copy(copy));
        }
        Ok(())
    })
}

/// `CUmemcpyAttributes`, with the location hints as numbers.
#[repr(C)]
struct CopyAttributes {
    source_order: c_uint,
    hints: [c_uint; 4],
    flags: c_uint,
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8_v2(to: u64, value: u8, bytes: usize) -> u32 {
    in_context("cuMemsetD8_v2", |mut state, device| {
        let stream = resolve_stream(&mut state, device, 0)?;
        let range = copying::device_range(&mut state, device, to, bytes)?;
        state.devices[device].push(stream, Work::Fill { range, value, bytes });
        stream::synchronize(state, device, stream).map(drop)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: u64) -> u32 {
    in_context("cuMemsetD8Async", |mut state, device| {
        let stream = resolve_stream(&mut state, device, stream)?;
        let range = copying::device_range(&mut state, device, to, bytes)?;
        state.devices[device].push(stream, Work::Fill { range, value, bytes });
        Ok(())
    })
}

/// Whether a call waits until its copy has ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    Always,
    IfPageable,
    Never,
}

/// Queues a copy in a stream. A copy from or to pageable memory first waits for the stream's earlier work, which
/// the documentation permits.
fn submit(
    state: Guard,
    device: usize,
    stream: u64,
    wait: Wait,
    prepare: impl FnOnce(&mut Guard) -> Answer<Prepared>,
) -> Answer {
    let mut state = state;
    let stream = resolve_stream(&mut state, device, stream)?;
    let Prepared { copy, pageable } = prepare(&mut state)?;
    if copy.bytes() == 0 {
        return Ok(());
    }
    if pageable {
        state = stream::synchronize(state, device, stream)?;
    }
    state.devices[device].push(stream, Work::Copy(copy));
    if wait == Wait::Always || (wait == Wait::IfPageable && pageable) {
        state = stream::synchronize(state, device, stream)?;
    }
    drop(state);
    Ok(())
}
