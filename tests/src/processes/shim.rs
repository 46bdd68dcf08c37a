//! A library that stands between the program and the system, for systems that a test cannot have.

use std::{fs, io, path::Path, process::Command};

/// Replaces one function of the C library in the processes that `command` starts, by C code.
///
/// # Errors
/// Why that is not possible here: there is no C compiler.
pub fn replace_function(command: &mut Command, folder: &Path, code: &str) -> io::Result<()> {
    let (source, library) = (folder.join("shim.c"), folder.join("shim.so"));
    fs::write(&source, code)?;
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).args([&library, &source]).arg("-ldl");
    let status = compiler.status()?;
    command.env("LD_PRELOAD", library);
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("cc failed: {status}"))) }
}
