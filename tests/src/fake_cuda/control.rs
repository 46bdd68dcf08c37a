#![expect(unsafe_code, reason = "calls a library that is loaded at run time")]

use std::path::Path;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// The fake driver's function `fake_cuda_control`: takes a command and returns an answer, both text.
#[derive(Debug)]
pub(super) struct Control {
    function: unsafe extern "C" fn(*const u8, usize, *mut u8, usize) -> usize,
    /// Never unloaded: code under test may have it open by now.
    _library: Library,
}

impl Control {
    pub(super) fn load(path: &Path) -> Self {
        // SAFETY: the library is this project's own; its initialisers are those of Rust's standard library alone.
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
    pub(super) fn execute(&self, command: &str) -> String {
        self.try_execute(command).unwrap_or_else(|why| panic!("{why}"))
    }

    pub(super) fn try_execute(&self, command: &str) -> Result<String, String> {
        let mut answer = vec![0; 1 << 10];
        let mut length = self.call(command, &mut answer);
        if length > answer.len() {
            // Only queries have long answers, and they can be repeated. Lists may have grown meanwhile.
            answer.resize(2 * length, 0);
            length = self.call(command, &mut answer).min(answer.len());
        }
        let answer = String::from_utf8_lossy(&answer[..length]);
        match answer.split_at(1) {
            ("+", text) => Ok(text.to_owned()),
            (_, why) => Err(why.to_owned()),
        }
    }

    fn call(&self, command: &str, answer: &mut [u8]) -> usize {
        // SAFETY: each pointer and length are those of one slice.
        unsafe { (self.function)(command.as_ptr(), command.len(), answer.as_mut_ptr(), answer.len()) }
    }
}
