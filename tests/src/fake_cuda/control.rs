//! The control function of the fake CUDA driver.

#![expect(unsafe_code, reason = "calls a function of a separately built library")]

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::path::Path;

/// The fake driver's function `fake_cuda_control`, which executes a text command and returns a text answer.
#[derive(Debug)]
pub(super) struct Control {
    function: unsafe extern "C" fn(*const u8, usize, *mut u8, usize) -> usize,
    /// Never dropped, since code under test may use the library.
    _library: Library,
}

impl Control {
    pub(super) fn load(path: &Path) -> Self {
        // SAFETY: the library is this project's; loading it runs only the initialisers of Rust libraries.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.unwrap_or_else(|error| panic!("{} cannot be loaded: {error}", path.display()));
        // SAFETY: `tests/fake-cuda/src/control.rs` declares the function with this type.
        let function = unsafe { library.get(b"fake_cuda_control") };
        let function = *function.expect("the fake driver has its control function");
        Self { function, _library: library }
    }

    /// Executes `command`.
    ///
    /// # Panics
    ///
    /// If the driver does not know the command.
    pub(super) fn send(&self, command: &str) -> String {
        self.try_send(command).unwrap_or_else(|error| panic!("{error}"))
    }

    pub(super) fn try_send(&self, command: &str) -> Result<String, String> {
        let mut answer = vec![0; 1 << 10];
        let mut length = self.call(command, &mut answer);
        if length > answer.len() {
            // Only queries have long answers, and a query can be repeated. Its answer may have grown meanwhile.
            answer.resize(2 * length, 0);
            length = self.call(command, &mut answer).min(answer.len());
        }
        let answer = String::from_utf8_lossy(&answer[..length]);
        match answer.split_at(1) {
            ("+", text) => Ok(text.to_owned()),
            (_, error) => Err(error.to_owned()),
        }
    }

    fn call(&self, command: &str, answer: &mut [u8]) -> usize {
        // SAFETY: both pointers are those of slices of the lengths passed with them.
        unsafe { (self.function)(command.as_ptr(), command.len(), answer.as_mut_ptr(), answer.len()) }
    }
}
