//! The GPU environment of a test's processes: the fake driver, or a broken one.

use crate::fake_cuda::{Installed, Library, Live};
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

/// The memory of each fake GPU: some versions of the largest model of these tests.
const MEMORY_BYTES: u64 = 4 << 30;

/// The default page-locked memory of each process: little, since many run at once.
const PINNED: &str = "64MiB";

/// The default device of these tests: `cpu`, or `cuda:0` if `TENSOR_RELAY_TEST_CUDA` is `fake`. Then all tests run on
/// the fake driver.
///
/// # Panics
/// If the variable has another value.
pub fn device() -> &'static str {
    match std::env::var("TENSOR_RELAY_TEST_CUDA").as_deref() {
        Err(_) | Ok("") => "cpu",
        Ok("fake") => "cuda:0",
        Ok(other) => panic!("TENSOR_RELAY_TEST_CUDA can be `fake`, and not {other:?}"),
    }
}

/// The CUDA installation that a test's processes find. Dropping it checks how they used the driver.
#[derive(Debug)]
pub struct Gpu {
    /// `None`: the machine's own installation, if any.
    installed: Option<Installed>,
    variables: Vec<(&'static str, OsString)>,
    may_leak: bool,
}

impl Gpu {
    /// A machine with one fake GPU.
    pub fn fake() -> Self {
        Self::finding(Library::Fake).with("FAKE_CUDA_MEM", &MEMORY_BYTES.to_string())
    }

    /// A machine with `library` in place of the driver.
    pub fn finding(library: Library) -> Self {
        let installed = Installed::new(library);
        let variables = installed.environment();
        let gpu = Self { installed: Some(installed), variables, may_leak: false };
        gpu.with("TENSOR_RELAY_PINNED_MEM", PINNED)
    }

    /// The machine's own installation, if any.
    pub fn none() -> Self {
        Self { installed: None, variables: vec![], may_leak: false }
    }

    /// Tolerates objects that remain at exit, as they do when a device fails.
    pub fn that_may_leak(mut self) -> Self {
        self.may_leak = true;
        self
    }

    /// The GPU of tests that do not choose one, if any: see [`device`].
    pub(super) fn of_all_tests() -> Option<Self> {
        (device() != "cpu").then(|| Self::fake().with("TENSOR_RELAY_DEVICE", device()))
    }

    /// Sets a variable for all processes.
    pub fn with(mut self, name: &'static str, value: &str) -> Self {
        self.variables.retain(|(other, _)| *other != name);
        self.variables.push((name, value.into()));
        self
    }

    /// Installs `library` as NVML.
    pub fn with_nvml(self, library: &Path) -> Self {
        let installed = self.installed.as_ref().expect("there is a folder for it");
        std::os::unix::fs::symlink(library, installed.path().join("libnvidia-ml.so.1")).unwrap();
        self
    }

    /// Sets the environment of `command` so that it finds this GPU.
    pub(super) fn show_to(&self, command: &mut Command) {
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
    }

    /// Checks that no process misused the driver, and that those that exited normally left no objects.
    fn check(&self) {
        let Some(installed) = &self.installed else { return };
        let report = installed.report();
        assert!(report.violations.is_empty(), "{report:#?}");
        let leaked = report.at_exit.iter().find(|live| **live != Live::default());
        assert!(self.may_leak || leaked.is_none(), "a process exited and left objects: {report:#?}");
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.check();
        }
    }
}

/// The path of the fake NVML library, for [`Gpu::with_nvml`]. It reports the values of the variable `FAKE_NVML`.
///
/// # Panics
/// If the library is not built.
pub fn fake_nvml() -> PathBuf {
    let executable = std::env::current_exe().unwrap();
    let mut candidates = executable
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join("libfake_nvml.so"));
    candidates
        .find(|path| path.is_file())
        .expect("there is no libfake_nvml.so: run tests/run, or cargo build first")
}
