//! The command line, which the package brings as a command.

use pyo3::prelude::*;
use std::ffi::OsString;

/// Does what a command line says, as the program `tensor-relay` does, and gives the exit code. `program` are the words that
/// start it again.
#[pyfunction]
pub(crate) fn run_command(py: Python<'_>, words: Vec<OsString>, program: Vec<OsString>) -> u8 {
    py.detach(|| tensor_relay_cli::run(&words, Some(&program)))
}
