use std::ffi::{CStr, c_char};

use super::give;
use crate::status::{Answer, Status};

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(error: u32, name: *mut *const c_char) -> u32 {
    Status::of(give_words(error, name, |(name, _)| name))
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(error: u32, text: *mut *const c_char) -> u32 {
    Status::of(give_words(error, text, |(_, text)| text))
}

type Words = (&'static CStr, &'static CStr);

/// Gives a null pointer for unknown codes, as documented.
fn give_words(error: u32, to: *mut *const c_char, choose: fn(Words) -> &'static CStr) -> Answer {
    match Status(error).words() {
        Some(words) => give(to, choose(words).as_ptr()),
        None => give(to, std::ptr::null()).and(Err(Status::INVALID_VALUE)),
    }
}
