//! A second process on the same machine: another run of this test binary, with an engine of its own. It reads commands
//! and prints answers, one per line.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

use std::{
    env, fs,
    io::{BufRead, BufReader, Write},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use tensor_relay_device::{
    Capacity, Device,
    cuda::{
        CudaEngine, CudaMemory,
        share::{DeviceUuid, Exported, FdMemory, Imported, IpcMemory, ShareError},
    },
};
use tensor_relay_tests::fake_cuda::{Installed, Library, Report};

use tokio::time::timeout;

use crate::{
    endpoint::{CHUNK, Endpoint, pattern, short_timeouts},
    lending,
};

/// The environment variable that makes this test binary a neighbour.
const NEIGHBOUR: &str = "FAKE_CUDA_NEIGHBOUR";
/// The start of the neighbour's answers.
const ANSWER: &str = "neighbour answers: ";

/// The test's handle to the process. Dropping it kills the process.
pub(crate) struct Neighbour {
    process: Child,
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    installed: Installed,
}

impl Neighbour {
    /// Starts the process. Its device `cuda:0` is the machine's device `first_device`. The process inherits `fd` under
    /// the same number.
    pub(crate) fn start(first_device: usize, fd: Option<BorrowedFd<'_>>) -> Self {
        if let Some(fd) = fd {
            rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty()).unwrap();
        }
        Self::spawn(&[], &[("FAKE_CUDA_FIRST_DEVICE", &first_device.to_string())])
    }

    /// Starts the process in a namespace of processes of its own; `None` if this process may not create one.
    pub(crate) fn start_in_namespace() -> Option<Self> {
        let unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
        let mut trial = Command::new(unshare[0]);
        let may = trial.args(&unshare[1..]).arg("true").stderr(Stdio::null()).status();
        may.is_ok_and(|status| status.success()).then(|| Self::spawn(&unshare, &[]))
    }

    /// Starts the process with these faults of its driver.
    pub(crate) fn start_with_faults(faults: &str) -> Self {
        Self::spawn(&[], &[("FAKE_CUDA_FAULTS", faults)])
    }

    /// Starts the process with a driver that can share memory as descriptors, or only by handles.
    pub(crate) fn start_shareable(as_descriptors: bool) -> Self {
        Self::spawn(&[], &[("FAKE_CUDA_SHAREABLE_FDS", if as_descriptors { "1" } else { "0" })])
    }

    /// Starts the process with `prefix` before its command line, and these variables.
    fn spawn(prefix: &[&str], variables: &[(&str, &str)]) -> Self {
        let installed = Installed::new(Library::Fake);
        let own = env::current_exe().unwrap();
        let mut words = prefix.iter().map(std::ffi::OsStr::new).chain([own.as_os_str()]);
        let mut command = Command::new(words.next().unwrap());
        command
            .args(words)
            .args(["--exact", "neighbour::neighbour", "--nocapture", "--test-threads=1"])
            .envs(installed.environment())
            .envs(variables.iter().copied())
            .env(NEIGHBOUR, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let commands = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().unwrap());
        Self { process, commands, answers, installed }
    }

    /// Sends the process a command and waits for its answer: the result of the command or its error.
    pub(crate) fn send(&mut self, command: &str) -> Result<String, String> {
        let commands = self.commands.as_mut().unwrap();
        writeln!(commands, "{command}").unwrap();
        loop {
            let mut line = String::new();
            let read = self.answers.read_line(&mut line).unwrap();
            assert!(read > 0, "the neighbour exited instead of executing: {command}");
            if let Some((_, answer)) = line.trim_end().split_once(ANSWER) {
                return match answer.split_once(' ') {
                    Some(("failed", why)) => Err(why.to_owned()),
                    _ => Ok(answer.to_owned()),
                };
            }
        }
    }

    /// Makes the process import a part of an allocation.
    pub(crate) fn import(&mut self, memory: &IpcMemory) -> Result<String, String> {
        self.send(&format!("import {}", text_of(memory)))
    }

    /// Makes the process import `len` bytes of the buffer whose descriptor it has inherited.
    pub(crate) fn import_fd(
        &mut self,
        device: DeviceUuid,
        fd: BorrowedFd<'_>,
        len: u64,
    ) -> Result<String, String> {
        self.send(&format!("import fd {} {} {len}", hex(&device.bytes()), fd.as_raw_fd()))
    }

    /// Returns the bytes of the memory that the process has imported.
    pub(crate) fn read(&mut self) -> Result<Vec<u8>, String> {
        let path = self.path();
        self.send(&format!("read {}", path.display()))?;
        Ok(fs::read(path).unwrap())
    }

    /// Makes the process export a tensor of `pattern` in its own memory.
    pub(crate) fn export(&mut self) -> IpcMemory {
        let answer = self.send("export").unwrap();
        match parse(&answer) {
            Exported::Ipc(memory) => memory,
            Exported::Fd(_) => panic!("{answer}"),
        }
    }

    /// Makes the process subscribe at a socket, and wants versions on its device.
    pub(crate) fn take(&mut self, socket: &Path) {
        self.send(&format!("take {}", socket.display())).unwrap();
    }

    /// Makes the process check the next version that it takes. Returns how that was shared.
    pub(crate) fn next(&mut self) -> Result<String, String> {
        self.send("next")
    }

    /// Makes the process drop its subscription.
    pub(crate) fn end_taking(&mut self) {
        self.send("leave").unwrap();
    }

    /// Makes the process serve a version at a socket.
    pub(crate) fn serve(&mut self, socket: &Path) {
        self.send(&format!("serve {}", socket.display())).unwrap();
    }

    /// Makes the process exit, and returns its driver's report.
    pub(crate) fn end(mut self) -> Report {
        drop(self.commands.take());
        assert!(self.process.wait().unwrap().success());
        self.installed.report()
    }

    /// Kills the process.
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    fn path(&self) -> PathBuf {
        self.installed.path().join("bytes")
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = self.process.kill(); // Fails if the process has ended.
        let _ = self.process.wait();
    }
}

/// The text form of memory in commands and answers.
fn text_of(memory: &IpcMemory) -> String {
    let IpcMemory { device, handle, offset, len } = memory;
    format!("ipc {} {} {offset} {len}", hex(&device.bytes()), hex(handle))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses the text form of memory.
fn parse(text: &str) -> Exported {
    fn bytes<const N: usize>(hex: &str) -> [u8; N] {
        let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap();
        std::array::from_fn(byte)
    }
    let words: Vec<&str> = text.split(' ').collect();
    match words[..] {
        ["ipc", device, handle, offset, len] => Exported::Ipc(IpcMemory {
            device: DeviceUuid::new(bytes(device)),
            handle: bytes(handle),
            offset: offset.parse().unwrap(),
            len: len.parse().unwrap(),
        }),
        ["fd", device, number, len] => Exported::Fd(FdMemory {
            device: DeviceUuid::new(bytes(device)),
            // SAFETY: this process has inherited the descriptor for this purpose, and uses it once.
            fd: unsafe { OwnedFd::from_raw_fd(number.parse().unwrap()) },
            len: len.parse().unwrap(),
        }),
        _ => panic!("{words:?} does not describe memory"),
    }
}

/// Imports memory that a test or its neighbour has exported.
pub(crate) fn import(engine: &CudaEngine, exported: Exported) -> Result<Imported, ShareError> {
    // SAFETY: the tests keep exported memory until it is returned. The tests that violate this rule on purpose are safe
    // on the fake device.
    unsafe { engine.import(exported) }
}

#[test]
fn neighbour() {
    if env::var_os(NEIGHBOUR).is_none() {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let engine = CudaEngine::open(0, short_timeouts()).unwrap();
    let endpoint = Endpoint::of(engine).unwrap();
    let device = Device::new(Arc::clone(&endpoint.engine), Capacity { slots: 8, slot_bytes: CHUNK }).unwrap();
    let (mut imported, mut taken, mut host) = (None, None, None);
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let result = match line.split_once(' ').unwrap_or((&line, "")) {
            ("export", _) => Ok(runtime.block_on(export(&endpoint))),
            ("import", words) => import(&endpoint.engine, parse(words))
                .map(|new| imported = Some(new))
                .map(|()| "done".to_owned()),
            ("read", path) => {
                let memory = imported.as_ref().unwrap().memory.clone();
                fs::write(path, runtime.block_on(endpoint.with(memory).read()).unwrap()).unwrap();
                Ok("done".to_owned())
            }
            ("drop", _) => {
                let Imported { memory, returned } = imported.take().unwrap();
                drop(memory);
                let waiting = async { timeout(Duration::from_secs(5), returned.wait()).await };
                runtime.block_on(waiting).unwrap();
                Ok("done".to_owned())
            }
            ("take", socket) => {
                taken = Some(runtime.block_on(async {
                    let client = lending::connect(Path::new(socket), Some(device.clone())).await;
                    (client.subscribe(&lending::topic()).await.unwrap(), client)
                }));
                Ok("done".to_owned())
            }
            ("next", _) => {
                let (subscription, _) = taken.as_mut().unwrap();
                let snapshot = runtime.block_on(subscription.next()).unwrap();
                runtime.block_on(lending::check(&snapshot));
                Ok(snapshot.receipt().sharing.to_string())
            }
            ("leave", _) => {
                let (subscription, client) = taken.take().unwrap();
                drop(subscription);
                runtime.block_on(client.close());
                Ok("done".to_owned())
            }
            ("serve", socket) => {
                host = Some(runtime.block_on(async {
                    let mut host = lending::Host::new(Path::new(socket), device.clone());
                    let publication = host.publish(1).await;
                    (host, vec![publication])
                }));
                Ok("done".to_owned())
            }
            ("publish", version) => {
                let (host, publications) = host.as_mut().unwrap();
                publications.push(runtime.block_on(host.publish(version.parse().unwrap())));
                Ok("done".to_owned())
            }
            _ => panic!("unknown command {line:?}"),
        };
        match result {
            Ok(answer) => println!("{ANSWER}{answer}"),
            Err(error) => println!("{ANSWER}failed {error}"),
        }
    }
    drop((imported, taken, host, device, endpoint));
    assert!(tensor_relay_device::cuda::all_closed(Duration::from_secs(5)));
}

async fn export(endpoint: &Endpoint) -> String {
    endpoint.fill(&pattern(endpoint.memory.len_bytes() as usize)).await.unwrap();
    let exported = endpoint.engine.export_in_place(std::slice::from_ref(&endpoint.memory)).unwrap();
    let memory: IpcMemory = exported.into_iter().next().unwrap().unwrap();
    text_of(&memory)
}

impl Endpoint {
    /// The same engine and slots, with other memory.
    pub(crate) fn with(&self, memory: Arc<CudaMemory>) -> Self {
        Self { engine: self.engine.clone(), slots: self.slots.clone(), memory }
    }
}
