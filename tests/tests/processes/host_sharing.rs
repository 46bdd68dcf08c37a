//! Processes of one host that take versions from memory through a Unix socket: in containers, and while any of them is
//! killed or stopped.
//!
//! Containers need root and namespaces. Without them each such test prints why it is skipped, and passes.

use crate::{files, host::start_after};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use rustix::process::{Pid, geteuid, kill_process};
use serde_json::Value;
use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, chown},
    path::PathBuf,
    process::Command,
    time::Duration,
};
use tensor_relay_tests::{
    processes::{
        Container, Home, Process, SHARED, Serving, Signal, contained, is_soak, replace_function, wait_until,
    },
    skip,
};

/// The users of the containers.
const UIDS: [u32; 4] = [70_001, 70_002, 70_003, 70_004];

/// The growth of a taker's own memory that a version may cost, with its page tables.
const OWN_MEMORY_MAX_KIB: i64 = 20 << 10;

/// A server at a socket in a folder, and containers that share that folder alone.
struct SharedHost {
    home: Home,
    containers: Vec<Container>,
    server: Option<Serving>,
}

impl SharedHost {
    /// Serves the file `m`, of `bytes` of noise; `None` if this system permits no containers.
    fn try_new(bytes: usize) -> Option<Self> {
        let home = Home::new();
        let folder = home.path("socket");
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
        let containers = UIDS.map(|uid| Container::new(&home.path("roots"), &folder, uid));
        let containers = containers.into_iter().collect::<Result<Vec<_>, _>>();
        let containers = containers
            .inspect_err(|reason| skip(format_args!("the test cannot create containers here: {reason}")))
            .ok()?;
        files::write_noise(&home.path("m"), bytes, 1);
        let mut host = Self { home, containers, server: None };
        host.serve();
        Some(host)
    }

    fn serve(&mut self) {
        let socket = format!("--socket={}", self.home.path("socket/s").display());
        let args = [
            "--topic=m=m",
            "--watch",
            "--watch-interval=0.05",
            "--listen=none",
            &socket,
            "--socket-mode=0666",
        ];
        self.server = Some(self.home.serve(&args));
    }

    /// The ticket of the topic, as a container sees the socket.
    fn ticket(&self) -> String {
        let ticket = self.server.as_ref().unwrap().ticket("m");
        ticket.replace(&*self.home.path("socket").to_string_lossy(), SHARED)
    }

    fn taker(&self, number: usize) -> Process {
        self.containers[number].start(&take_versions(), &[&self.ticket()])
    }

    /// Publishes other content, and returns its hash.
    fn publish(&self, bytes: usize, seed: u64) -> String {
        files::write_noise(&self.home.path("next"), bytes, seed);
        fs::rename(self.home.path("next"), self.home.path("m")).unwrap();
        self.hash()
    }

    /// The hash of the tensors in the file.
    fn hash(&self) -> String {
        let file = fs::read(self.home.path("m")).unwrap();
        let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        blake3::hash(&file[8 + header..]).to_hex().to_string()
    }
}

/// The program that takes versions.
fn take_versions() -> PathBuf {
    // target/<profile>/deps/<this test> → target/<profile>/take-versions
    std::env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .with_file_name("take-versions")
}

/// Waits for a taker's report on the version with this hash.
fn wait_for(taker: &mut Process, hash: &str) -> Value {
    serde_json::from_str(&taker.wait_for_stdout(hash)).unwrap()
}

/// The descriptors of memory that a process has open.
fn memory_descriptors(id: u32) -> usize {
    let open = fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten().flatten();
    let targets = open.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets
        .filter(|target| target.to_string_lossy().contains("memfd:tensor-relay"))
        .count()
}

/// Goal: four containers, of different users and with namespaces of their own, take a version from the server's memory:
/// it costs each of them page tables and little more. Method: they share the folder of the socket alone, with the server
/// and with each other; each maps the version, reads all of it, and reports. Prints the times.
#[test]
fn containers_take_a_version_from_memory() {
    let bytes = if is_soak() { 1 << 30 } else { 256 << 20 };
    let Some(host) = SharedHost::try_new(bytes) else { return };
    let hash = host.hash();
    let mut takers = vec![];
    for number in 0..UIDS.len() {
        let mut taker = host.taker(number);
        let report = wait_for(&mut taker, &hash);
        println!("{report}");
        assert_eq!(report["sharing"], "Mapped", "{report}");
        let own_kib = report["anonymous_kib"].as_i64().unwrap() + report["page_tables_kib"].as_i64().unwrap();
        assert!(own_kib < OWN_MEMORY_MAX_KIB, "{report}");
        takers.push(taker);
    }
    let server = &host.server.as_ref().unwrap().process;
    assert_eq!(memory_descriptors(server.id()), 1, "one version in memory");
    drop(takers);
    let next = host.publish(bytes / 4, 2);
    let mut taker = host.taker(0);
    wait_for(&mut taker, &next);
    wait_until("the memory of the earlier version is given back", || memory_descriptors(server.id()) <= 2);
}

/// Goal: whoever of a server and four takers is killed or stopped, at any time, nobody sees a wrong byte, everybody who
/// lives gets the newest version, and memory and descriptors come back. Method: in each round one of the five, at random,
/// is killed and started again, or stopped for a while, just after a new version was written. Takers hold each version
/// until the next has come, and hash it before and after.
#[test]
fn killed_and_stopped_processes_disturb_nobody() {
    const BYTES: usize = 8 << 20;
    let Some(mut host) = SharedHost::try_new(BYTES) else { return };
    let rounds = if is_soak() { 200 } else { 8 };
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut hash = host.hash();
    let mut takers: Vec<Process> = (0..UIDS.len()).map(|number| host.taker(number)).collect();
    takers.iter_mut().for_each(|taker| drop(wait_for(taker, &hash)));
    for round in 0..rounds {
        let victim = random.random_range(0..=takers.len());
        let is_kill = random.random_bool(0.5);
        println!("round {round}: {} {victim}", if is_kill { "kill" } else { "stop" });
        hash = host.publish(BYTES, round + 2);
        std::thread::sleep(Duration::from_millis(random.random_range(0..150)));
        match victim.checked_sub(1) {
            None => disturb_server(&mut host, is_kill),
            Some(number) if is_kill => {
                let taker = std::mem::replace(&mut takers[number], host.taker(number));
                drop(taker); // Killed.
            }
            Some(number) => {
                let id = contained(&takers[number]).expect("it runs");
                let id = Pid::from_raw(id as i32).unwrap();
                kill_process(id, Signal::STOP).unwrap();
                for (other, taker) in takers.iter_mut().enumerate().filter(|(other, _)| *other != number) {
                    println!("taker {other}");
                    wait_for(taker, &hash);
                }
                kill_process(id, Signal::CONT).unwrap();
                wait_for(&mut takers[number], &hash);
                continue;
            }
        }
        for (number, taker) in takers.iter_mut().enumerate() {
            println!("taker {number}");
            wait_for(taker, &hash);
        }
    }
    let server = host.server.as_ref().unwrap().process.id();
    drop(takers);
    host.publish(BYTES, 1_000_000);
    let mut last = host.taker(0);
    wait_for(&mut last, &host.hash());
    wait_until("no memory of earlier versions is left", || memory_descriptors(server) <= 2);
}

/// Goal: in a sandbox that forbids `memfd_create`, takers get chunks over the socket, and the reason. Method: a filter
/// of system calls, as runtimes of containers install, around the server; then around the taker, which needs none.
#[test]
fn a_server_that_may_not_make_memory_sends_chunks() {
    const FILTER: &str = r#"
        #include <errno.h>
        #include <linux/filter.h>
        #include <linux/seccomp.h>
        #include <stddef.h>
        #include <sys/prctl.h>
        #include <sys/syscall.h>
        __attribute__((constructor)) static void forbid(void) {
            struct sock_filter rules[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
            };
            struct sock_fprog program = { sizeof rules / sizeof rules[0], rules };
            prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) __builtin_trap();
        }"#;
    let home = Home::new();
    files::write_noise(&home.path("m"), 1 << 20, 1);
    let sandboxed = |args: &[&str]| {
        let mut command = home.program();
        let replaced = replace_function(&mut command, &home.path(""), FILTER);
        command.args(args);
        replaced.map(|()| Process::start(command))
    };
    let socket = format!("--socket={}", home.argument("s"));
    let args = ["serve", "--json", "--topic=m=m", "--listen=none", &socket];
    let server = match sandboxed(&args) {
        Ok(server) => Serving::wait_for_report(server),
        Err(reason) => return skip(reason),
    };
    let taken = home
        .run(&["subscribe", server.ticket("m"), "--once", "--json", "--out=o"])
        .expect_code(0)
        .json();
    let sharing = taken["sharing"].as_str().unwrap();
    assert!(sharing.contains("the system of the server refused to make memory"), "{sharing}");
    let written = taken["path"].as_str().unwrap_or_else(|| panic!("{taken}"));
    assert_eq!(fs::read(home.path("m")).unwrap(), fs::read(home.path(written)).unwrap());
    let ended = server.process.signal_and_wait(Signal::TERM).expect_code(0);
    assert!(ended.err.contains("memfd_create"), "{ended:?}");

    let server = home.serve(&args[2..]);
    let taker = sandboxed(&["subscribe", server.ticket("m"), "--once", "--json"]).unwrap();
    assert_eq!(taker.wait().expect_code(0).json()["sharing"], "memory");
}

/// Goal: who may take through the socket is decided by the user, and follows the list while the server runs. Method: a
/// container of another user has no token; lines of the list admit it, and then another one.
#[test]
fn users_need_a_line_of_the_list() {
    let Some(host) = SharedHost::try_new(1 << 20) else { return };
    let with_token = host.ticket();
    let (ticket, _) = with_token.split_once("&token=").unwrap();
    let start = || host.containers[0].start(&take_versions(), &[ticket]);
    let mut taker = start(); // It tries again until it is admitted.
    let line = format!("`uid:{} list,subscribe TOPICS`", UIDS[0]);
    taker.wait_for_stderr(&line);
    let list = host.home.path("state/tensor-relay/access/acl");
    fs::write(&list, format!("uid:{} list,subscribe m\n", UIDS[0])).unwrap();
    wait_for(&mut taker, &host.hash());
    fs::write(&list, format!("uid:{} list,subscribe m\n", UIDS[1])).unwrap();
    taker.wait_for_stdout("ended");
    let mut own = host
        .home
        .start(&["list", &ticket.replace(SHARED, &host.home.argument("socket"))]);
    own.wait_for_stderr("user");
}

/// An origin of the file `m`, of a MiB, on the network, and its receiver, with `options`, that shares at the socket `s`.
fn shared_receiver(options: &[&str]) -> (Home, Serving, Process) {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1 << 20, 1);
    let origin = home.serve(&["--topic=m=m", "--watch", "--watch-interval=0.05"]);
    let share = format!("--share-host={}", home.path("s").display());
    let receive = ["subscribe", origin.ticket("m"), "--json", "--device=cpu", &share];
    let receiver = home.start(&[&receive, options].concat());
    (home, origin, receiver)
}

/// Goal: a consumer is the one receiver of its host: what it commits is taken from its memory under the same epoch and
/// number, and the end of the topic, and its own, are told. Method: an origin on the network, a receiver, and takers.
#[test]
fn a_receiver_shares_with_its_host() {
    let (home, origin, mut receiver) = shared_receiver(&[]);
    let parse = |line: String| -> Value { serde_json::from_str(&line).unwrap() };
    let received = parse(receiver.wait_for_stdout("committed"));
    let ticket = format!("unix:{}?topic=m", home.path("s").display());
    let mut taker =
        home.start(&["subscribe", &ticket, "--json", "--out=out", "--device=cpu", "--reconnect=60"]);
    let same = |received: &Value, taken: &Value| {
        assert_eq!(taken["sharing"], "memory", "{taken}");
        for key in ["topic", "epoch", "version", "payload_bytes", "metadata"] {
            assert_eq!(taken[key], received[key], "{key}");
        }
        files::assert_same(&home.path("m"), &home.path("out/m.safetensors"));
    };
    same(&received, &parse(taker.wait_for_stdout("committed")));
    files::write_noise(&home.path("next"), 1 << 20, 2);
    fs::rename(home.path("next"), home.path("m")).unwrap();
    let received = parse(receiver.wait_for_stdout("\"version\":2"));
    same(&received, &parse(taker.wait_for_stdout("\"version\":2")));
    // The origin is lost: the newest version stays on offer.
    origin.process.signal_and_wait(Signal::KILL);
    receiver.wait_for_stderr("reconnecting");
    let late = home
        .run(&["subscribe", &ticket, "--once", "--json", "--device=cpu"])
        .expect_code(0)
        .json();
    assert_eq!((&late["version"], &late["sharing"]), (&received["version"], &"memory".into()));
    // The receiver ends: its socket goes, and takers are told.
    receiver.signal_and_wait(Signal::TERM);
    assert!(!home.path("s").exists());
    taker.wait_for_stderr("shutting down");
}

/// Goal: takers of a receiver whose system makes no memory that can be shared are told so. Method: a receiver that may not
/// make files, and so no memfd.
#[test]
fn a_receiver_without_memfd_says_so() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1 << 20, 1);
    let origin = home.serve(&["--topic=m=m"]);
    let share = format!("--share-host={}", home.path("s").display());
    let receive = ["subscribe", origin.ticket("m"), "--json", "--device=cpu", &share];
    let mut receiver = start_after(&home, "ulimit -f 0", &receive);
    receiver.wait_for_stdout("committed");
    let ticket = format!("unix:{}?topic=m", home.path("s").display());
    let taken = home
        .run(&["subscribe", &ticket, "--once", "--json", "--device=cpu"])
        .expect_code(0)
        .json();
    let sharing = taken["sharing"].as_str().unwrap();
    assert!(sharing.contains("refused to make memory"), "{sharing}");
}

/// Goal: a process that listens where others may listen too is no server to a client of another user, unless the ticket
/// names its user; one in a folder of its own is. Method: a server of another user, with its socket in either.
#[test]
fn a_socket_that_anybody_could_have_made_is_refused() {
    const UID: u32 = 4_242;
    if !geteuid().is_root() {
        return skip("only root can start a server of another user");
    }
    let home = Home::new();
    fs::set_permissions(home.path(""), Permissions::from_mode(0o755)).unwrap();
    files::write_noise(&home.path("m"), 1 << 20, 1);
    let folder = home.path("socket");
    fs::create_dir(&folder).unwrap();
    chown(&folder, Some(UID), Some(UID)).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid=4242", "--regid=4242", "--clear-groups"]);
    command.arg(home.program().get_program());
    let (socket, model) = (home.argument("socket/s"), home.argument("m"));
    command.args(["serve", "--json", "--listen=none", "--admin=none", "--open", "--device=cpu"]);
    command.args([format!("--topic=m={model}"), format!("--socket={socket}"), "--socket-mode=0666".into()]);
    command.arg(format!("--state-dir={}", home.argument("socket/state")));
    let mut server = Process::start(home.isolated(command));
    server.wait_for_stdout("serving");
    let ticket = format!("unix:{socket}?topic=m");
    let take = |ticket: &str| home.run(&["subscribe", ticket, "--once", "--json", "--device=cpu"]);
    assert_eq!(take(&ticket).expect_code(0).json()["sharing"], "memory");
    take(&format!("{ticket}&server_uid=1")).expect_error(4, &["user 4242 listens", "names user 1 "]);
    fs::set_permissions(&folder, Permissions::from_mode(0o1777)).unwrap();
    take(&ticket).expect_error(4, &["user 4242 listens", "can create files in", "?server_uid=4242"]);
    take(&format!("{ticket}&server_uid=4242")).expect_code(0);
}

/// Goal: a taker that keeps a version, and never runs again, neither ends its receiver nor keeps others from new versions.
/// Method: a receiver with memory for four versions; stop a taker that holds the first; more versions.
#[test]
fn a_stopped_taker_keeps_nobody_from_new_versions() {
    let (home, _origin, mut receiver) = shared_receiver(&["--mem=4300KiB"]);
    receiver.wait_for_stdout("committed");
    let ticket = format!("unix:{}?topic=m", home.path("s").display());
    let mut command = Command::new(take_versions());
    command.arg(&ticket);
    let mut taker = Process::start(home.isolated(command));
    taker.wait_for_stdout("Mapped");
    taker.signal(Signal::STOP);
    for version in 2..=6 {
        files::write_noise(&home.path("next"), 1 << 20, version);
        fs::rename(home.path("next"), home.path("m")).unwrap();
        receiver.wait_for_stdout(&format!("\"version\":{version}"));
        let other = home.run(&["subscribe", &ticket, "--once", "--json", "--device=cpu"]);
        assert_eq!(other.expect_code(0).json()["version"], version);
    }
    taker.signal(Signal::CONT);
    taker.wait_for_stdout("\"version\":6"); // It ends with an error if the one that it held had changed.
}

/// Kills the server and starts it again, or stops it for a moment.
fn disturb_server(host: &mut SharedHost, is_kill: bool) {
    if is_kill {
        host.server.take().unwrap().process.signal_and_wait(Signal::KILL);
        host.serve();
        return;
    }
    let server = &host.server.as_ref().unwrap().process;
    server.signal(Signal::STOP);
    std::thread::sleep(Duration::from_millis(200));
    server.signal(Signal::CONT);
}
