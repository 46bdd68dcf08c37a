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
    /// Creates the folder. All but the fake driver need a C compiler, as the project does.
    pub fn new(which: Library) -> Self {
        let installed = Self { folder: tempfile::tempdir().expect("a folder can be made") };
        installed
            .put(which)
            .unwrap_or_else(|error| panic!("{which:?} as libcuda.so: {error}"));
        installed
    }

    /// The variables with which a program finds and may use this library. `FAKE_CUDA_DEVICES`, `_MEM` (in bytes),
    /// `_H2D_GBPS`, `_D2H_GBPS`, `_VERSION` and `_FAULTS` may be added (`tests/fake-cuda/src/options.rs`).
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        let mut path = self.folder.path().as_os_str().to_owned();
        if let Some(others) = env::var_os("LD_LIBRARY_PATH") {
            path.push(":");
            path.push(others);
        }
        vec![
            ("LD_LIBRARY_PATH", path),
            ("TENSOR_RELAY_FAKE_CUDA", "1".into()),
            ("FAKE_CUDA_REPORT", self.report_path().into()),
        ]
    }

    /// The reports so far of the programs that ran with this environment.
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

    fn put(&self, which: Library) -> io::Result<()> {
        let place = self.folder.path().join("libcuda.so");
        match which {
            Library::Fake => symlink(library(), &place)?,
            Library::Stub => self.compile(&place, SYMBOLS, false)?,
            Library::TooOld => self.compile(&place, &["cuInit", "cuDriverGetVersion"], true)?,
            Library::Empty => self.compile(&place, &[], false)?,
            Library::Garbage => fs::write(&place, "This is no library.")?,
        }
        symlink("libcuda.so", self.folder.path().join("libcuda.so.1"))
    }

    /// Compiles a library whose functions all succeed, or all fail.
    fn compile(&self, place: &Path, functions: &[&str], works: bool) -> io::Result<()> {
        const STUB_LIBRARY: u32 = 34;
        let mut code = String::new();
        for function in functions {
            let body = match *function {
                "cuDriverGetVersion" if works => "*version = 9010; return 0".to_owned(),
                _ if works => "return 0".to_owned(),
                _ => format!("return {STUB_LIBRARY}"),
            };
            writeln!(code, "int {function}(int *version) {{ {body}; }}").expect("a string takes text");
        }
        let source = self.folder.path().join("cuda.c");
        fs::write(&source, code)?;
        let mut compiler = Command::new("cc");
        compiler
            .args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so", "-o"])
            .args([place, &source]);
        let status = compiler.status()?;
        if status.success() { Ok(()) } else { Err(io::Error::other(format!("cc failed: {status}"))) }
    }
}

/// The parsed contents of the file that `FAKE_CUDA_REPORT` names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The number of processes that initialised CUDA.
    pub processes: usize,
    /// The processes' illegal uses of the driver.
    pub violations: Vec<String>,
    /// The objects that remained when each process exited. Killed processes are missing.
    pub at_exit: Vec<Live>,
}

impl Report {
    fn read(text: &str) -> Self {
        let mut report = Self::default();
        for line in text.lines() {
            let (_process, event) = line.split_once(' ').expect("a line begins with a process");
            match event.split_once(' ').unwrap_or((event, "")) {
                ("init", _) => report.processes += 1,
                ("violation", text) => report.violations.push(text.to_owned()),
                ("exit", live) => report.at_exit.push(Live::read(live)),
                _ => panic!("the fake driver reports {line:?}"),
            }
        }
        report
    }
}
