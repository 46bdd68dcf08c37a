//! The command `tensor-relay`, which the package installs.

use pyo3::prelude::*;
use std::ffi::OsString;

/// Runs the command line `words`, which begins with the name of the program, and returns its exit code. `program` is
/// the command that starts the program again.
#[pyfunction]
pub(crate) fn run_command(py: Python<'_>, words: Vec<OsString>, program: Vec<OsString>) -> u8 {
    py.detach(|| tensor_relay_cli::run(&words, Some(&program)))
}
