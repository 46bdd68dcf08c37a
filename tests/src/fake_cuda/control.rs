#![expect(unsafe_code, reason = "a library that was built apart is called")]

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
        // SAFETY: the library is ours; loading it runs nothing but what Rust's own libraries run.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.unwrap_or_else(|error| panic!("{} cannot be loaded: {error}", path.display()));
        // SAFETY: this is how `tests/fake-cuda/src/control.rs` declares the function.
        let function = unsafe { library.get(b"fake_cuda_control") };
        let function = *function.expect("the fake driver has its control function");
        Self { function, _library: library }
    }

    /// Executes `command`.
    ///
    /// # Panics
    ///
    /// If the driver does not know the command.
    pub(super) fn tell(&self, command: &str) -> String {
        self.try_tell(command).unwrap_or_else(|why| panic!("{why}"))
    }

    pub(super) fn try_tell(&self, command: &str) -> Result<String, String> {
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
        // SAFETY: both are slices of the lengths that are given with them.
        unsafe { (self.function)(command.as_ptr(), command.len(), answer.as_mut_ptr(), answer.len()) }
    }
}
