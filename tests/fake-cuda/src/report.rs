use std::{
    env, fs,
    io::Write,
    path::{Path, PathBuf},
    process,
};

use crate::state::{self, State};

/// The report of violations. It is kept in memory, and in a file that outlives the process.
///
/// With `FAKE_CUDA_REPORT=PATH`, lines are appended to a file: `PID init`, `PID violation TEXT` for each violation when
/// it happens, and at process exit `PID exit` with the numbers of objects that still exist and of violations.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) violations: Vec<String>,
    path: Option<PathBuf>,
}

impl Report {
    pub(crate) fn from_environment() -> Self {
        Self { violations: Vec::new(), path: env::var_os("FAKE_CUDA_REPORT").map(PathBuf::from) }
    }

    /// Reports a violation.
    pub(crate) fn violation(&mut self, text: String) {
        eprintln!("fake CUDA: violation: {text}");
        self.append_line(&format!("violation {text}"));
        self.violations.push(text);
    }

    /// Appends a line to the file, if there is a file.
    pub(crate) fn append_line(&self, text: &str) {
        let Some(path) = &self.path else { return };
        if let Err(error) = append(path, &format!("{} {text}\n", process::id())) {
            eprintln!("fake CUDA: the report {} cannot be written: {error}", path.display());
        }
    }

    /// Clears the violations, but not the file.
    pub(crate) fn clear(&mut self) {
        self.violations.clear();
    }
}

/// Appends a line in one write, so that the lines of several processes do not mix.
fn append(path: &Path, line: &str) -> std::io::Result<()> {
    fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)?
        .write_all(line.as_bytes())
}

/// The numbers of existing objects and of reclaimed ones, as `name=number` pairs. All are zero after a program has
/// cleaned up.
pub(crate) fn live(state: &State) -> String {
    let (host_blocks, host_bytes) = state.host.blocks();
    let own_blocks = |device: &crate::device::Device| device.memory.blocks().0;
    let foreign_blocks = |device: &crate::device::Device| device.memory.blocks().1;
    let sum = |count: fn(&crate::device::Device) -> usize| state.devices.iter().map(count).sum::<usize>();
    let pairs = [
        ("device_blocks", sum(own_blocks)),
        ("device_bytes", sum(|device| device.memory.used_bytes)),
        ("shared", sum(foreign_blocks) + state.virtual_memory.count()),
        ("host_blocks", host_blocks),
        ("host_bytes", host_bytes),
        ("streams", sum(|device| device.created_streams())),
        ("events", sum(|device| device.events.len())),
        ("contexts", sum(|device| device.context.iter().count())),
        ("in_flight", sum(|device| device.copies_in_flight())),
        ("reclaimed", sum(|device| device.reclaimed)),
    ];
    pairs.map(|(name, number)| format!("{name}={number}")).join(" ")
}

/// Reports the remaining objects when the process exits normally: by returning from `main`, or by `exit`.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = {
    extern "C" fn at_exit() {
        let state = state::lock();
        if state.initialized {
            let violations = state.report.violations.len();
            state
                .report
                .append_line(&format!("exit {} violations={violations}", live(&state)));
        }
    }
    at_exit
};
