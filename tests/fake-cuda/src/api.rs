//! The driver functions that programs call, as CUDA's header declares them.
//!
//! They are not `pub`, since programs find them by symbol name only.

use std::ptr;

use crate::status::{Answer, Status};

mod contexts;
mod copies;
mod devices;
mod errors;
mod events;
mod ipc;
mod memories;
mod streams;
mod virtual_memory;

/// Writes a result to the caller's pointer.
fn write<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: the pointer is not null; CUDA's documentation requires the caller to pass a valid one.
    unsafe { ptr::write(to, value) };
    Ok(())
}

/// Writes text with a terminating zero byte into a caller's buffer, truncated if necessary.
fn write_text(to: *mut u8, capacity: i32, text: &str) -> Answer {
    let Some(longest) = usize::try_from(capacity).ok().and_then(|capacity| capacity.checked_sub(1)) else {
        return Err(Status::INVALID_VALUE);
    };
    let bytes = &text.as_bytes()[..text.len().min(longest)];
    for (index, byte) in bytes.iter().chain(&[0]).enumerate() {
        write(to.wrapping_add(index), *byte)?;
    }
    Ok(())
}
