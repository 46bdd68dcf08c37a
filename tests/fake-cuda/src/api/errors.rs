use std::ffi::{CStr, c_char};

use super::write;
use crate::status::{Answer, Status};

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(error: u32, name: *mut *const c_char) -> u32 {
    Status::of(write_message(error, name, |(name, _)| name))
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(error: u32, text: *mut *const c_char) -> u32 {
    Status::of(write_message(error, text, |(_, text)| text))
}

type Message = (&'static CStr, &'static CStr);

/// Writes a pointer to a status's name or text; a null pointer for unknown codes, as documented.
fn write_message(error: u32, to: *mut *const c_char, choose: fn(Message) -> &'static CStr) -> Answer {
    match Status(error).name_and_text() {
        Some(message) => write(to, choose(message).as_ptr()),
        None => write(to, std::ptr::null()).and(Err(Status::INVALID_VALUE)),
    }
}
