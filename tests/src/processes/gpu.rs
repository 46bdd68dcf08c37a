//! The CUDA environment of a test's processes: the fake driver, an unusable one, or the machine's own.

use crate::fake_cuda::{Installed, Library, Live, built_library};
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

/// The memory of each fake GPU: enough for several versions of the largest model of these tests.
const MEMORY_BYTES: u64 = 4 << 30;

/// The default page-locked memory of each process: little, since many run at once.
const PINNED: &str = "64MiB";

/// The default device of these tests: `cpu`, or `cuda:0` if `TENSOR_RELAY_TEST_CUDA` is `fake`. Then the tests that
/// choose no device run on the fake driver.
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
    /// The fake driver with one GPU.
    pub fn fake() -> Self {
        Self::from_library(Library::Fake).with("FAKE_CUDA_MEM", &MEMORY_BYTES.to_string())
    }

    /// `library` in place of the driver.
    pub fn from_library(library: Library) -> Self {
        let installed = Installed::new(library);
        let variables = installed.environment();
        let gpu = Self { installed: Some(installed), variables, may_leak: false };
        gpu.with("TENSOR_RELAY_PINNED_MEM", PINNED)
    }

    /// The machine's own installation, if any.
    pub fn of_this_machine() -> Self {
        Self { installed: None, variables: vec![], may_leak: false }
    }

    /// Allows driver objects to remain at the exit of a process, as they do after a device has failed.
    pub fn allow_leaks(mut self) -> Self {
        self.may_leak = true;
        self
    }

    /// The GPU of tests that do not choose one, as `TENSOR_RELAY_TEST_CUDA` selects it: see [`device`].
    pub(super) fn from_environment() -> Option<Self> {
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
        let installed = self.installed.as_ref().expect("NVML needs the folder of an installed library");
        std::os::unix::fs::symlink(library, installed.path().join("libnvidia-ml.so.1")).unwrap();
        self
    }

    /// Sets the environment of `command` so that it finds this installation.
    pub(super) fn set_environment(&self, command: &mut Command) {
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
    }

    /// Checks that no process misused the driver, and that those that exited normally left no objects.
    fn check(&self) {
        let Some(installed) = &self.installed else { return };
        let report = installed.report();
        assert!(report.violations.is_empty(), "{report:#?}");
        let leaked = report.at_exit.iter().find(|live| **live != Live::default());
        assert!(self.may_leak || leaked.is_none(), "a process left driver objects at its exit: {report:#?}");
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
    built_library("libfake_nvml.so")
}
