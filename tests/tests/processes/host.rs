//! The program's requirements on its machine, and its errors if they are not met: open files, modes of private files,
//! memory.

use crate::files;
use rustix::process::geteuid;
use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};
use tensor_relay_client::{Client, Config, Lanes, Subscription, Ticket, Transport, Version};
use tensor_relay_tests::{
    processes::{ANY_PORT, Home, ON_HOST, Process, Serving, Signal, replace_function},
    skip,
};
use tokio::{runtime::Builder, task::JoinSet};

/// Starts the program with `args` from a shell that first runs the command `setup`, such as a limit. If `setup` fails,
/// the program is not started.
pub(crate) fn start_after(home: &Home, setup: &str, args: &[&str]) -> Process {
    let mut shell = home.isolated(Command::new("sh"));
    shell.args(["-c", &format!("{setup} && exec \"$@\""), "sh"]);
    shell.arg(home.program().get_program()).args(args);
    Process::start(shell)
}

/// Goal: too few descriptors are an error that says how to raise the limit, whatever the limit is; the program raises a
/// soft limit itself. Method: every hard limit from the lowest at which the program starts up to one that suffices;
/// then a soft limit.
#[test]
fn too_few_descriptors_are_an_error() {
    let home = files::home_with_model();
    let args = ["serve", "--json", ANY_PORT, "--topic=w=w", "--publish-socket=s"];
    let mut limit = 5;
    let serving = loop {
        let mut server = start_after(&home, &format!("ulimit -n {limit}"), &args);
        if server.try_wait_for_stdout("serving") {
            break server;
        }
        server.wait().expect_error(1, &["files and sockets", "ulimit -n"]);
        limit += 1;
        assert!(limit < 100, "a server needs fewer descriptors");
    };
    drop(serving);
    for args in [&["list", "relay://x"][..], &["keys", "show"], &["subscribe", "relay://x"]] {
        start_after(&home, "ulimit -n 6", args)
            .wait()
            .expect_error(1, &["files and sockets"]);
    }
    let server = Serving::wait_for_report(start_after(&home, "ulimit -S -n 8", &args));
    home.run(&["subscribe", server.ticket("w"), "--once"]).expect_code(0);
    let ended = start_after(
        &home,
        &format!("ulimit -n {limit}"),
        &["subscribe", server.ticket("w"), "--once", "--out=o"],
    );
    ended.wait().expect_code(0);
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// The folder and the file of the server's key.
fn key(home: &Home) -> (PathBuf, PathBuf) {
    (home.path("state/tensor-relay"), home.path("state/tensor-relay/identity.key"))
}

/// Goal: the server's files are private, whatever the umask. Method: serve watched files with umask 000; check the
/// modes.
#[test]
fn private_files_ignore_the_umask() {
    let home = files::home_with_model();
    let args = ["serve", "--json", ANY_PORT, "--topic=w=w", "--watch", "--ticket-file=t"];
    let server = Serving::wait_for_report(start_after(&home, "umask 000", &args));
    let (folder, key) = key(&home);
    assert_eq!((mode(&folder), mode(&home.path("state")), mode(&key)), (0o700, 0o700, 0o600));
    assert_eq!((mode(&folder.join("topics.json")), mode(&home.path("t"))), (0o600, 0o600));
    let ended = server.process.signal_and_wait(Signal::TERM).expect_code(0);
    assert!(!ended.err.contains("mode"), "{ended:?}");
}

/// Goal: a key that other users can read, or its group can write to, is used with a warning, because secrets are often
/// mounted with such a mode; a key that every user can write to, or that belongs to another user, is refused. Method:
/// several modes of the key and of its folder; another owner, if the test runs as root; a FIFO in place of the key.
#[test]
fn unsafe_keys_are_refused() {
    let home = files::home_with_model();
    home.run(&["keys", "create"]).expect_code(0);
    let (folder, key) = key(&home);
    let serve = || home.start(&["serve", "--json", ANY_PORT, "--topic=w=w"]);
    for readable in [0o644, 0o440, 0o660] {
        set_mode(&key, readable);
        let mut server = serve();
        server.wait_for_stderr(&format!("identity.key has mode {readable:04o}"));
        server.wait_for_stdout("serving");
    }
    set_mode(&key, 0o602);
    serve().wait().expect_error(1, &["identity.key has mode 0602", "chmod 600"]);
    set_mode(&key, 0o600);
    set_mode(&folder, 0o777);
    let mut server = serve();
    server.wait_for_stderr("has mode 0777: others can replace the server's key");
    server.wait_for_stdout("serving");
    drop(server);
    set_mode(&folder, 0o700);
    if geteuid().is_root() {
        chown(&key, Some(12_345), None).unwrap();
        serve()
            .wait()
            .expect_error(1, &["identity.key belongs to user 12345", "chown 0"]);
    }
    fs::remove_file(&key).unwrap();
    let (fifo, owner) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR);
    rustix::fs::mknodat(rustix::fs::CWD, &key, fifo, owner, 0).unwrap();
    serve().wait().expect_error(1, &["identity.key", "not a regular file"]);
}

/// A cgroup that limits memory, removed on drop.
struct Cgroup(PathBuf);

impl Cgroup {
    /// Creates a cgroup of version 2 or 1, if this system permits it.
    fn new(limit_bytes: u64) -> Result<Self, String> {
        static CREATED: AtomicU32 = AtomicU32::new(0);
        let number = CREATED.fetch_add(1, Ordering::Relaxed);
        let name = format!("tensor-relay-test-{}-{number}", std::process::id());
        let versions = [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")];
        let mut reason = String::from("no memory controller");
        for (mount, limit) in versions {
            let folder = Path::new(mount).join(&name);
            if !Path::new(mount).join("cgroup.procs").exists() {
                continue;
            }
            if let Err(error) = fs::create_dir(&folder) {
                reason = error.to_string();
                continue;
            }
            let created = Self(folder);
            let _ = fs::write(created.0.join("memory.swap.max"), "0");
            match fs::write(created.0.join(limit), limit_bytes.to_string()) {
                Ok(()) => {
                    let _ = fs::write(created.0.join("memory.memsw.limit_in_bytes"), limit_bytes.to_string());
                    return Ok(created);
                }
                Err(error) => reason = error.to_string(),
            }
        }
        Err(reason)
    }

    /// The shell command that moves the shell into the cgroup.
    fn enter(&self) -> String {
        format!("echo $$ > {}/cgroup.procs", self.0.display())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A cgroup can be removed once its last process was reaped.
        let removed = (0..500).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            fs::remove_dir(&self.0).is_ok()
        });
        assert!(removed || std::thread::panicking(), "{} is not empty", self.0.display());
    }
}

/// Goal: a server accepts as many clients as its container has memory for, refuses others with the reason, and is not
/// killed; accepted clients get the next version. Method: a server in a cgroup of 128 MiB, and subscribers until one
/// more client is refused.
#[test]
fn a_full_container_refuses_clients() {
    let cgroup = match Cgroup::new(128 << 20) {
        Ok(cgroup) => cgroup,
        Err(reason) => return skip(format_args!("the test cannot create a cgroup here: {reason}")),
    };
    let home = files::home_with_model();
    let serve = ["serve", ANY_PORT, ON_HOST, "--topic=w=w", "--watch", "--json"];
    let mut server = Serving::wait_for_report(start_after(&home, &cgroup.enter(), &serve));
    let ticket = server.ticket("w").to_owned();
    let list = || home.run(&["list", &ticket, "--transport=tcp"]);
    let mut clients = vec![];
    let refused = loop {
        let listed = list();
        if listed.code != Some(0) {
            break listed;
        }
        assert!(clients.len() < 60, "a container of 128 MiB has no room for so many");
        let out = format!("--out=out-{}", clients.len());
        let mut client = home.start(&["subscribe", &ticket, "--transport=tcp", &out, ON_HOST]);
        client.wait_for_stdout("version 1");
        clients.push(client);
    };
    refused.expect_error(3, &["as many sessions as it may"]);
    server.process.wait_for_stderr("there is no memory for another session");
    assert!(clients.len() > 2, "only {} clients were accepted", clients.len());
    files::write_zeros(&home.path("new"), 2_048);
    fs::rename(home.path("new"), home.path("w")).unwrap();
    for client in &mut clients {
        client.wait_for_stdout("version 2");
    }
    let other = ["tickets", "create", "--topic=w", "--ticket-file=other"];
    home.run(&[&other[..], &[&format!("--address={}", server.listen())]].concat())
        .expect_code(0);
    home.run(&["list", "other", "--transport=tcp"]).expect_code(0); // Another principal gets the newest one's memory.
    drop(clients);
    let again = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(100));
        list().code == Some(0)
    });
    assert!(again, "the memory of disconnected clients is released");
}

/// Goal: further lanes refuse nobody. Method: eight clients take the memory for further lanes of a server in a cgroup of
/// 512 MiB; then 192 more connect at once. All 200 get the next version over their first connections.
#[test]
fn two_hundred_clients_are_served_beside_lanes() {
    let cgroup = match Cgroup::new(512 << 20) {
        Ok(cgroup) => cgroup,
        Err(reason) => return skip(format_args!("the test cannot create a cgroup here: {reason}")),
    };
    let home = files::home_with_model();
    let serve = ["serve", ANY_PORT, ON_HOST, "--topic=w=w", "--watch", "--watch-interval=0.05", "--json"];
    let server = Serving::wait_for_report(start_after(&home, &cgroup.enter(), &serve));
    let ticket: Ticket = server.ticket("w").parse().unwrap();
    let runtime = Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut followers = vec![];
        for _ in 0..8 {
            followers.push(follow(ticket.clone(), Lanes::Fixed(8)).await);
        }
        let lanes = || followers.iter().map(|(client, _)| client.lanes().len()).sum::<usize>();
        while lanes() < 8 + 16 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let entering: JoinSet<_> = (0..192).map(|_| follow(ticket.clone(), Lanes::Fixed(1))).collect();
        followers.extend(entering.join_all().await);
        files::replace(&home.path("w"), |path| files::write_zeros(path, 2_048));
        for (client, subscription) in &mut followers {
            assert_eq!(subscription.next().await.unwrap().id().version, Version(2));
            assert_eq!(client.reconnects(), 0);
        }
    });
}

/// A client that has received the first version of the ticket's topic, and its subscription.
async fn follow(ticket: Ticket, lanes: Lanes) -> (Client, Subscription) {
    let config = Config { lanes, transport: Transport::Tcp, ..Config::default() };
    let client = Client::connect(&ticket, config).await.unwrap();
    let mut subscription = client.subscribe(ticket.topic().unwrap()).await.unwrap();
    assert_eq!(subscription.next().await.unwrap().id().version, Version(1));
    (client, subscription)
}

/// Goal: a model that exceeds the container's memory is refused with the numbers, by server and subscriber, and neither
/// is killed. Method: in a cgroup of 128 MiB, serve a model of 192 MiB, and receive it from a server with enough
/// memory; then receive a model that fits.
#[test]
fn too_large_models_are_refused() {
    let cgroup = match Cgroup::new(128 << 20) {
        Ok(cgroup) => cgroup,
        Err(reason) => return skip(format_args!("the test cannot create a cgroup here: {reason}")),
    };
    let home = files::home_with_model();
    files::write_zeros(&home.path("m"), 192 << 20);
    let server = home.serve(&["--topic=m=m", "--topic=w=w"]);
    let causes = ["within the container's (cgroup) memory limit of 134217728 bytes"];
    let serve = ["serve", ANY_PORT, ON_HOST, "--topic=m=m"];
    start_after(&home, &cgroup.enter(), &serve).wait().expect_error(1, &causes);
    let subscribe = |topic| ["subscribe", server.ticket(topic), "--once", "--out=out", ON_HOST];
    start_after(&home, &cgroup.enter(), &subscribe("m"))
        .wait()
        .expect_error(1, &causes);
    start_after(&home, &cgroup.enter(), &subscribe("w")).wait().expect_code(0);
    assert_eq!(home.files_in("out"), ["w.safetensors"]);
}

/// Goal: a clock before 1970, as after a power loss, stops neither end. Method: a shim before the system's clock.
#[test]
fn a_clock_before_1970_is_survived() {
    const CLOCK: &str = r#"
        #define _GNU_SOURCE
        #include <time.h>
        #include <unistd.h>
        #include <sys/syscall.h>
        int clock_gettime(clockid_t clock, struct timespec *at) {
            int result = syscall(SYS_clock_gettime, clock, at);
            if (clock == CLOCK_REALTIME) at->tv_sec = -86400;
            return result;
        }"#;
    let home = files::home_with_model();
    let shimmed = |args: &[&str]| {
        let mut command = home.program();
        let replaced = replace_function(&mut command, &home.path(""), CLOCK);
        command.args(args);
        replaced.map(|()| Process::start(command))
    };
    let server = match shimmed(&["serve", "--json", ANY_PORT, "--topic=w=w"]) {
        Ok(server) => Serving::wait_for_report(server),
        Err(reason) => return skip(reason),
    };
    for transport in ["--transport=quic", "--transport=tcp"] {
        let received = shimmed(&["subscribe", server.ticket("w"), "--once", "--json", transport]).unwrap();
        assert_eq!(received.wait().expect_code(0).json()["event"], "committed");
    }
}
