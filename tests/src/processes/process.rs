//! A child process, its output and its exit status.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader, Read},
    os::unix::process::ExitStatusExt,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

/// The deadline of every wait for a process: much longer than any wait on a busy machine, and than the idle timeout of
/// 10 s, after which the program treats a silent peer as lost.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The interval at which [`Process::wait`] checks whether the process has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A running process, killed on drop.
pub struct Process {
    child: Child,
    command: String,
    started: Instant,
    out: Output,
    err: Output,
}

impl Process {
    /// Starts `command` with an empty standard input.
    ///
    /// # Panics
    /// If the system cannot start it.
    pub fn start(command: Command) -> Self {
        Self::start_with(command, Stdio::null())
    }

    /// Starts `command` with `stdin`.
    pub fn start_with(mut command: Command, stdin: impl Into<Stdio>) -> Self {
        let command_line = command_line(&command);
        command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("cannot start {command_line}: {e}"));
        let out = Output::of(child.stdout.take().unwrap());
        let err = Output::of(child.stderr.take().unwrap());
        Self { child, command: command_line, started: Instant::now(), out, err }
    }

    /// Waits for a line on stdout that contains `wanted`.
    pub fn wait_for_stdout(&mut self, wanted: &str) -> String {
        let line = self.out.wait_for(wanted);
        line.unwrap_or_else(|error| self.fail(&format!("no {wanted:?} on stdout: {error}")))
    }

    /// As [`wait_for_stdout`](Self::wait_for_stdout), but returns false if there is no such line.
    pub fn try_wait_for_stdout(&mut self, wanted: &str) -> bool {
        self.out.wait_for(wanted).is_ok()
    }

    /// Waits for a line on stderr that contains `wanted`.
    pub fn wait_for_stderr(&mut self, wanted: &str) -> String {
        let line = self.err.wait_for(wanted);
        line.unwrap_or_else(|error| self.fail(&format!("no {wanted:?} on stderr: {error}")))
    }

    /// The process's number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the process.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Sends a signal to the process and waits until it has ended.
    pub fn signal_and_wait(self, signal: Signal) -> Ended {
        self.signal(signal);
        self.wait()
    }

    /// The files mapped into the process's memory now, including its libraries.
    pub fn mapped_files(&self) -> String {
        fs::read_to_string(format!("/proc/{}/maps", self.child.id())).unwrap()
    }

    /// The number of open file descriptors of the process.
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    /// The number of threads of the process.
    pub fn threads(&self) -> usize {
        fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap().count()
    }

    /// Whether the process still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// The size of the process's resident memory.
    pub fn resident_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// Waits until the process has ended.
    ///
    /// # Panics
    /// If it has not ended after a minute.
    pub fn wait(mut self) -> Ended {
        let deadline = Instant::now() + TIMEOUT;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() >= deadline {
                self.fail("it has not ended");
            }
            thread::sleep(POLL_INTERVAL);
        };
        Ended {
            command: self.command.clone(),
            code: status.code(),
            signal: status.signal(),
            run_time: self.started.elapsed(),
            out: self.out.all(),
            err: self.err.all(),
        }
    }

    fn fail(&mut self, reason: &str) -> ! {
        let _ = self.child.kill();
        panic!("{}\n{reason}\nstdout:\n{}\nstderr:\n{}", self.command, self.out.all(), self.err.all());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail if it has already ended, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command_line(command: &Command) -> String {
    let arguments = std::iter::once(command.get_program()).chain(command.get_args());
    arguments
        .map(|argument| argument.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// How a process ended, and all of its output.
#[derive(Debug)]
pub struct Ended {
    /// The command line.
    pub command: String,
    /// The exit code; `None` if a signal ended the process.
    pub code: Option<i32>,
    /// The signal that ended the process, if one did.
    pub signal: Option<i32>,
    /// The run time.
    pub run_time: Duration,
    /// The output on stdout.
    pub out: String,
    /// The output on stderr.
    pub err: String,
}

impl Ended {
    /// Checks the exit code.
    ///
    /// # Panics
    /// If the exit code is not `code`, with all output of the process.
    #[track_caller]
    pub fn expect_code(self, code: i32) -> Self {
        assert!(self.code == Some(code), "expected exit code {code}\n{self:#?}");
        self
    }

    /// Checks that the process failed with exit code `code` and an error line on stderr that contains each of `causes`.
    ///
    /// # Panics
    /// If the exit code is not `code` or there is no such line, with all output of the process.
    #[track_caller]
    pub fn expect_error(self, code: i32, causes: &[&str]) -> Self {
        let is_error =
            |line: &str| line.starts_with("error: ") && causes.iter().all(|cause| line.contains(cause));
        assert!(self.err.lines().any(is_error), "expected an error with {causes:?}\n{self:#?}");
        self.expect_code(code)
    }

    /// The output on stdout as one JSON value per line, up to the first line that is not JSON, such as one cut off by a
    /// signal.
    pub fn events(&self) -> Vec<Value> {
        self.out.lines().map_while(|line| serde_json::from_str(line).ok()).collect()
    }

    /// The output on stdout as one JSON value.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}\n{self:#?}"))
    }
}

/// The lines of one output of a process.
struct Output {
    /// Unbounded, so that a process never waits for the test to read; these outputs are short.
    lines: Receiver<String>,
    lines_read: Vec<String>,
}

impl Output {
    fn of(stream: impl Read + Send + 'static) -> Self {
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Self { lines, lines_read: vec![] }
    }

    fn wait_for(&mut self, wanted: &str) -> Result<String, &'static str> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let remaining = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(remaining).map_err(|error| match error {
                RecvTimeoutError::Timeout => "not within the timeout",
                RecvTimeoutError::Disconnected => "the output ended",
            })?;
            self.lines_read.push(line.clone());
            if line.contains(wanted) {
                return Ok(line);
            }
        }
    }

    /// All output until the pipe ends, or until it has been silent for five seconds: child processes may have inherited the
    /// pipe.
    fn all(&mut self) -> String {
        while let Ok(line) = self.lines.recv_timeout(Duration::from_secs(5)) {
            self.lines_read.push(line);
        }
        self.lines_read.iter().map(|line| format!("{line}\n")).collect()
    }
}

/// Waits until `condition` returns true.
///
/// # Panics
/// If it still returns false after a minute, with `description`.
pub fn wait_until(description: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out: {description}");
        thread::sleep(Duration::from_millis(5));
    }
}
