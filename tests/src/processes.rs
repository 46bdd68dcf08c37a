//! Real processes of the program, and their environment: home folders, GPUs, network namespaces and proxies.
//!
//! A [`Home`] isolates the processes of a test from the user's environment. Every wait has a deadline, and dropping a
//! [`Process`] kills it.

mod container;
mod gpu;
mod lan;
mod process;
mod shim;
mod switch;
mod tcp_proxy;
mod udp_proxy;

pub use container::{Container, SHARED, contained};
pub use gpu::{Gpu, device, fake_nvml};
pub use lan::{Host, Lan};
pub use process::{Ended, Process, wait_until};
pub use rustix::process::Signal;
pub use shim::replace_function;
pub use switch::Switch;
pub use tcp_proxy::{TcpPath, TcpProxy};
pub use udp_proxy::UdpProxy;

use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};
use tempfile::TempDir;

/// The listen option of every server in these tests: the loopback address and a port that the system chooses.
pub const ANY_PORT: &str = "--listen=127.0.0.1:0";

/// The device option of servers that borrow tensors from files: borrowed tensors cannot be on a GPU.
pub const ON_HOST: &str = "--device=cpu";

/// Whether to run the tests that take minutes: `TENSOR_RELAY_SOAK=1`.
pub fn is_soak() -> bool {
    std::env::var_os("TENSOR_RELAY_SOAK").is_some_and(|value| value == "1")
}

/// A test's own home folder, for keys of its servers, files to serve and received files.
pub struct Home {
    folder: TempDir,
    gpu: Option<Gpu>,
    /// The transport of subscribers whose arguments choose none.
    transport: Option<String>,
    idle_timeout_ms: Option<u32>,
}

impl Home {
    /// A home with a new folder, which is removed on drop. Its processes hold tensors on [`device`] unless their
    /// arguments select another device.
    #[expect(clippy::new_without_default, reason = "it creates a folder")]
    pub fn new() -> Self {
        let transport = std::env::var("TENSOR_RELAY_TEST_TRANSPORT").ok();
        let gpu = Gpu::from_environment();
        Self { folder: tempfile::tempdir().unwrap(), gpu, transport, idle_timeout_ms: None }
    }

    /// As [`new`](Self::new), for processes that find `gpu`. They use it if their arguments select it.
    pub fn with_gpu(gpu: Gpu) -> Self {
        Self { gpu: Some(gpu), ..Self::new() }
    }

    /// Makes subscribers use QUIC, whatever `TENSOR_RELAY_TEST_TRANSPORT` is: for tests with a [`UdpProxy`].
    pub fn over_quic(self) -> Self {
        Self { transport: Some("quic".into()), ..self }
    }

    /// Makes subscribers use one transport, TCP unless `TENSOR_RELAY_TEST_TRANSPORT` is set: for tests that count
    /// connections. A client that chooses measures both, and a loaded machine may make it change between them.
    pub fn over_one_transport(self) -> Self {
        Self { transport: self.transport.or_else(|| Some("tcp".into())), ..self }
    }

    /// As this home, for processes to which a peer counts as lost after `idle_timeout_ms`.
    #[must_use]
    pub fn with_idle_timeout(self, idle_timeout_ms: u32) -> Self {
        Self { idle_timeout_ms: Some(idle_timeout_ms), ..self }
    }

    /// The path of `name` in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The [`path`](Self::path) of `name` as a command-line argument.
    pub fn argument(&self, name: &str) -> String {
        self.path(name).into_os_string().into_string().unwrap()
    }

    /// The program as an [`isolated`](Self::isolated) command.
    pub fn program(&self) -> Command {
        self.isolated(Command::new(program()))
    }

    /// `command` in this folder, with an environment in which the program uses this folder only.
    pub fn isolated(&self, mut command: Command) -> Command {
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("TENSOR_RELAY_") {
                command.env_remove(name);
            }
        }
        command
            .env("HOME", self.folder.path())
            .env("XDG_STATE_HOME", self.path("state"))
            .env_remove("XDG_CONFIG_HOME");
        command.current_dir(self.folder.path());
        let idle_timeout = self
            .idle_timeout_ms
            .map(|ms| ("TENSOR_RELAY_TEST_IDLE_TIMEOUT_MS", ms.to_string()));
        command.envs(idle_timeout);
        if let Some(gpu) = &self.gpu {
            gpu.set_environment(&mut command);
        }
        command
    }

    /// Starts the program with `args`. Subscribers whose `args` choose no transport use that of
    /// [`over_quic`](Self::over_quic) or `TENSOR_RELAY_TEST_TRANSPORT`.
    pub fn start(&self, args: &[&str]) -> Process {
        let mut command = self.program();
        command.args(args);
        self.choose_transport(&mut command, args);
        Process::start(command)
    }

    fn choose_transport(&self, command: &mut Command, args: &[&str]) {
        if args.first() == Some(&"subscribe") {
            command.envs(self.transport.iter().map(|transport| ("TENSOR_RELAY_TRANSPORT", transport)));
        }
    }

    /// Runs the program with `args` to its end.
    pub fn run(&self, args: &[&str]) -> Ended {
        self.start(args).wait()
    }

    /// Starts a server with `args`, on a port that the system chooses unless `args` contain one. Borrowed tensors stay
    /// on the host.
    pub fn serve(&self, args: &[&str]) -> Serving {
        let mut all_args = vec!["serve", "--json"];
        if !args.iter().any(|arg| arg.starts_with("--listen")) {
            all_args.push(ANY_PORT);
        }
        if args.contains(&"--hold=borrow") {
            all_args.push(ON_HOST);
        }
        all_args.extend(args);
        Serving::wait_for_report(self.start(&all_args))
    }

    /// Starts a server with `args` on the port in an earlier server's `report`.
    pub fn serve_again(&self, report: &Value, args: &[&str]) -> Serving {
        let listen = format!("--listen={}", report["listen"].as_str().unwrap());
        self.serve(&[&[&*listen], args].concat())
    }

    /// The topics of a server, as `list` reports them.
    pub fn list(&self, server: &Serving) -> Value {
        self.run(&["list", &self.create_ticket_for_all(server), "--json"])
            .expect_code(0)
            .json()["topics"]
            .clone()
    }

    /// Creates a ticket for all topics of `server` with `tickets create`.
    pub fn create_ticket_for_all(&self, server: &Serving) -> String {
        let address = format!("--address={}", server.listen());
        let folder = Path::new(server.report["ticket_file"].as_str().unwrap()).parent().unwrap();
        let state = match folder.join("access").exists() {
            true => format!("--state-dir={}", folder.display()),
            false => format!("--state-dir={}", self.argument("state/tensor-relay")),
        };
        let created = self
            .run(&["tickets", "create", "--topic=**", "--json", &address, &state])
            .expect_code(0);
        created.json()["ticket"].as_str().unwrap().to_owned()
    }

    /// The sorted relative paths of all files below `name`, through links to folders too; empty if there is no such
    /// folder.
    pub fn files_in(&self, name: &str) -> Vec<String> {
        let root = self.path(name);
        let mut found = vec![];
        collect_files(&root, &mut found);
        let mut names: Vec<_> = found
            .iter()
            .map(|path| path.strip_prefix(&root).unwrap().display().to_string())
            .collect();
        names.sort();
        names
    }
}

fn collect_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => collect_files(&path, found),
            false => found.push(path),
        }
    }
}

/// A running server that has printed its report.
pub struct Serving {
    /// The server's process.
    pub process: Process,
    /// The report.
    pub report: Value,
}

impl Serving {
    /// Waits for the report of a server that was started with `--json`. Adds each topic's `ticket` from the server's
    /// ticket file to the report, and the ticket for all topics if there is one.
    pub fn wait_for_report(mut process: Process) -> Self {
        let line = process.wait_for_stdout("");
        let mut report: Value =
            serde_json::from_str(&line).unwrap_or_else(|e| panic!("serve printed {line:?}: {e}"));
        // Test programs such as `publish-versions` write no ticket file.
        let Some(path) = report["ticket_file"].as_str() else { return Self { process, report } };
        let tickets = fs::read_to_string(path).unwrap();
        for topic in report["topics"].as_array_mut().unwrap() {
            let name = topic["topic"].as_str().unwrap();
            let names = [format!("/{name}?"), format!("?topic={name}&")];
            let is_for = |line: &&str| names.iter().any(|name| line.contains(name));
            topic["ticket"] = tickets.lines().find(is_for).unwrap().into();
        }
        let is_for_all = |line: &&str| line.strip_prefix("relay://").is_some_and(|rest| !rest.contains('/'));
        let for_all = tickets.lines().find(is_for_all);
        report["ticket"] = for_all.into();
        Self { process, report }
    }

    /// The address that the server listens on.
    pub fn listen(&self) -> &str {
        self.report["listen"].as_str().unwrap()
    }

    /// The server's report on a topic.
    pub fn topic(&self, name: &str) -> &Value {
        let topics = self.report["topics"].as_array().unwrap();
        topics.iter().find(|topic| topic["topic"] == name).unwrap()
    }

    /// The server's own ticket for all of its topics, which exists if there are several.
    pub fn ticket_for_all(&self) -> &str {
        self.report["ticket"].as_str().unwrap()
    }

    /// The ticket of a topic.
    pub fn ticket(&self, topic: &str) -> &str {
        self.topic(topic)["ticket"].as_str().unwrap()
    }
}

/// The path of the program: the value of `TENSOR_RELAY_BIN`, or cargo's output.
fn program() -> PathBuf {
    if let Some(path) = std::env::var_os("TENSOR_RELAY_BIN") {
        return path.into();
    }
    // target/<profile>/deps/<this test> → target/<profile>/tensor-relay
    let executable = std::env::current_exe().unwrap();
    let path = executable.ancestors().nth(2).unwrap().join("tensor-relay");
    assert!(path.is_file(), "there is no {}: run tests/run, or cargo build first", path.display());
    path
}
