//! A folder with a CUDA driver, fake or unusable, and the report of the processes that used it.

use std::{
    env,
    ffi::OsString,
    fmt::Write,
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use tempfile::TempDir;

use super::{Live, SYMBOLS, library};

/// The library that a program finds as `libcuda.so`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// The fake driver.
    Fake,
    /// A library like the stub that CUDA's toolkit ships for linkers: every call returns `CUDA_ERROR_STUB_LIBRARY`.
    Stub,
    /// A driver that is too old: it has `cuInit` and `cuDriverGetVersion` only.
    TooOld,
    /// A library without any symbol of CUDA.
    Empty,
    /// A file that is not a library.
    Garbage,
}

/// A folder with a `libcuda.so` for programs that a test starts.
#[derive(Debug)]
pub struct Installed {
    folder: TempDir,
}

impl Installed {
    /// Creates the folder with the library. `Stub`, `TooOld` and `Empty` are compiled here, with the C compiler that
    /// the project needs anyway.
    pub fn new(kind: Library) -> Self {
        let installed = Self { folder: tempfile::tempdir().expect("a folder can be made") };
        installed
            .install(kind)
            .unwrap_or_else(|error| panic!("cannot install {kind:?} as libcuda.so: {error}"));
        installed
    }

    /// The environment variables with which a program finds the library and may use it. Callers may add the variables
    /// of `tests/fake-cuda/src/options.rs`.
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        let mut path = self.folder.path().as_os_str().to_owned();
        if let Some(inherited) = env::var_os("LD_LIBRARY_PATH") {
            path.push(":");
            path.push(inherited);
        }
        vec![
            ("LD_LIBRARY_PATH", path),
            ("TENSOR_RELAY_FAKE_CUDA", "1".into()),
            ("FAKE_CUDA_REPORT", self.report_path().into()),
        ]
    }

    /// The report of the programs that have run with this environment so far.
    pub fn report(&self) -> Report {
        match fs::read_to_string(self.report_path()) {
            Ok(text) => Report::read(&text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Report::default(),
            Err(error) => panic!("the report cannot be read: {error}"),
        }
    }

    /// The folder, for `LD_LIBRARY_PATH`.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    fn report_path(&self) -> PathBuf {
        self.folder.path().join("report")
    }

    fn install(&self, kind: Library) -> io::Result<()> {
        let path = self.folder.path().join("libcuda.so");
        match kind {
            Library::Fake => symlink(library(), &path)?,
            Library::Stub => self.compile(&path, SYMBOLS, false)?,
            Library::TooOld => self.compile(&path, &["cuInit", "cuDriverGetVersion"], true)?,
            Library::Empty => self.compile(&path, &[], false)?,
            Library::Garbage => fs::write(&path, "This is no library.")?,
        }
        symlink("libcuda.so", self.folder.path().join("libcuda.so.1"))
    }

    /// Compiles a library whose functions all succeed, or all return `CUDA_ERROR_STUB_LIBRARY`.
    fn compile(&self, path: &Path, functions: &[&str], succeeds: bool) -> io::Result<()> {
        const CUDA_ERROR_STUB_LIBRARY: u32 = 34;
        let mut code = String::new();
        for function in functions {
            let body = match *function {
                "cuDriverGetVersion" if succeeds => "*version = 9010; return 0".to_owned(),
                _ if succeeds => "return 0".to_owned(),
                _ => format!("return {CUDA_ERROR_STUB_LIBRARY}"),
            };
            writeln!(code, "int {function}(int *version) {{ {body}; }}").expect("a string takes text");
        }
        let source = self.folder.path().join("cuda.c");
        fs::write(&source, code)?;
        let mut compiler = Command::new("cc");
        compiler
            .args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so", "-o"])
            .args([path, &source]);
        let status = compiler.status()?;
        if status.success() { Ok(()) } else { Err(io::Error::other(format!("cc failed: {status}"))) }
    }
}

/// The parsed contents of the file that `FAKE_CUDA_REPORT` names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The number of processes that initialised CUDA.
    pub processes: usize,
    /// The illegal uses of the driver.
    pub violations: Vec<String>,
    /// The objects that remained when each process exited. Killed processes are missing.
    pub at_exit: Vec<Live>,
}

impl Report {
    fn read(text: &str) -> Self {
        let mut report = Self::default();
        for line in text.lines() {
            let (_process, entry) = line.split_once(' ').expect("a line begins with a process id");
            match entry.split_once(' ').unwrap_or((entry, "")) {
                ("init", _) => report.processes += 1,
                ("violation", text) => report.violations.push(text.to_owned()),
                ("exit", live) => report.at_exit.push(Live::read(live)),
                _ => panic!("the fake driver reports {line:?}"),
            }
        }
        report
    }
}
