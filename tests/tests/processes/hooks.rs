//! The command of `subscribe --exec`: its failures are reported, and it ends with the subscriber.

use crate::files;
use std::{fs, process::Command, thread, time::Duration};
use tensor_relay_tests::{
    processes::{Home, Process, Serving, Signal, wait_until},
    skip,
};

/// A server of the topic `w`.
fn server(home: &Home) -> Serving {
    files::write_noise(&home.path("w"), 1000, 1);
    home.serve(&["--topic=w=w"])
}

/// Goal: with `--once`, the exit code reports a failed command. Method: commands that fail, by exit code and by signal,
/// and one that succeeds; with --once and without.
#[test]
fn the_exit_code_reports_a_failed_command() {
    let home = Home::new();
    let server = server(&home);
    let once =
        |command| home.run(&["subscribe", server.ticket("w"), "--once", "--out=out", "--exec", command]);
    once("exit 3").expect_error(8, &["the command of --exec ended with exit status: 3 for w version 1"]);
    assert_eq!(home.files_in("out"), ["w.safetensors"], "the version is saved nevertheless");
    once("kill -9 $$").expect_error(8, &["the command of --exec ended with signal: 9"]);
    once("true").expect_code(0);
    let mut follower = home.start(&["subscribe", server.ticket("w"), "--exec=exit 3"]);
    follower.wait_for_stderr("warning: the command of --exec ended with exit status: 3");
    assert!(follower.is_running(), "the subscriber waits for the next version");
    follower.signal_and_wait(Signal::TERM).expect_code(143);
}

/// Whether a process still runs. A zombie does not count.
fn is_alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ")
        .next()
        .is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

/// Starts a subscriber, and waits until its command runs; returns it with the processes of the command: the shell and
/// its child. The shell runs `trap` first.
fn start_with_running_command(home: &Home, server: &Serving, trap: &str) -> (Process, Vec<String>) {
    let _ = fs::remove_file(home.path("pids"));
    let command =
        format!("{trap} sleep 1000 & echo $$ $! > pids.part; mv pids.part pids; while :; do wait; done");
    // Of its own, not inherited: `nohup` ignores SIGHUP for all of the tests.
    let mut subscriber = home.isolated(Command::new("env"));
    subscriber.arg("--default-signal=HUP").arg(home.program().get_program());
    subscriber.args(["subscribe", server.ticket("w"), "--exec", &command]);
    let subscriber = Process::start(subscriber);
    wait_until("the command runs", || home.path("pids").exists());
    let pids = fs::read_to_string(home.path("pids")).unwrap();
    let pids: Vec<String> = pids.split_whitespace().map(Into::into).collect();
    assert!(pids.len() == 2 && pids.iter().all(|pid| is_alive(pid)), "{pids:?}");
    (subscriber, pids)
}

/// Goal: a subscriber that is terminated leaves no process of its running command. Method: each signal, while the
/// command and its child sleep; then a command that, with its child, ignores SIGTERM.
#[test]
fn a_terminated_subscriber_ends_its_command() {
    let home = Home::new();
    let server = server(&home);
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129)] {
        let (subscriber, pids) = start_with_running_command(&home, &server, "");
        subscriber.signal_and_wait(signal).expect_code(code);
        assert!(!pids.iter().any(|pid| is_alive(pid)), "{pids:?}");
    }
    let (subscriber, pids) = start_with_running_command(&home, &server, "trap '' TERM;");
    subscriber.signal_and_wait(Signal::TERM).expect_code(143);
    wait_until("SIGKILL ends the command", || !pids.iter().any(|pid| is_alive(pid)));
}

/// Goal: a subscriber that fails leaves no process of its running command. Method: two topics; while the command of one
/// runs, the subscriber fails to print a version of the other, because its stdout is closed.
#[test]
fn a_failed_subscriber_ends_its_command() {
    let home = Home::new();
    for name in ["a", "b"] {
        files::write_noise(&home.path(name), 1000, 1);
    }
    let server = home.serve(&["--topic=a=a", "--topic=b=b", "--watch", "--watch-interval=0.05"]);
    let command = "test $TENSOR_RELAY_TOPIC = a || exit 0; \
                   sleep 1000 & echo $$ $! > pids.part; mv pids.part pids; wait";
    let script = r#""$@" | { read -r line; read -r line; while [ ! -e go ]; do sleep 0.05; done; }; true"#;
    let mut shell = home.isolated(Command::new("sh"));
    shell.args(["-c", script, "sh"]).arg(home.program().get_program());
    shell.args(["subscribe", server.ticket_for_all(), "--topic=*", "--exec", command]);
    let shell = Process::start(shell);
    wait_until("the command runs", || home.path("pids").exists());
    let pids = fs::read_to_string(home.path("pids")).unwrap();
    let pids: Vec<&str> = pids.split_whitespace().collect();
    fs::write(home.path("go"), "").unwrap();
    for version in 2.. {
        files::replace(&home.path("b"), |path| files::write_noise(path, 1000, version));
        thread::sleep(Duration::from_millis(200));
        if !pids.iter().any(|pid| is_alive(pid)) {
            break;
        }
        assert!(version < 300, "{pids:?}");
    }
    shell.wait().expect_code(0);
}

/// Goal: with --json, stdout has objects only. Method: a command that prints.
#[test]
fn the_output_of_a_command_is_not_mixed_with_objects() {
    let home = Home::new();
    let server = server(&home);
    let args = ["subscribe", server.ticket("w"), "--once", "--json", "--exec", "echo from the command"];
    let ended = home.run(&args).expect_code(0);
    assert_eq!(ended.json()["event"], "committed");
    assert!(ended.err.contains("from the command"), "{ended:?}");
}

/// Goal: as the first process of a container, a subscriber reaps what its commands leave behind. Method: in a namespace
/// of processes, a command whose child outlives its parent, and which succeeds once that child's process id is free.
#[test]
fn the_first_process_reaps_orphans() {
    let home = Home::new();
    let server = server(&home);
    let mut namespace = home.isolated(Command::new("unshare"));
    namespace.args(["--pid", "--fork", "--mount-proc"]);
    if !Command::new("unshare")
        .args(["--pid", "--fork", "--mount-proc", "true"])
        .status()
        .is_ok_and(|s| s.success())
    {
        return skip("this process may not create a namespace of processes");
    }
    let command = "(sleep 0.1 & echo $! > orphan); tries=0; \
                   while [ -e /proc/$(cat orphan) ] && [ $tries -lt 200 ]; do sleep 0.05; tries=$((tries+1)); done; \
                   [ ! -e /proc/$(cat orphan) ]";
    namespace.arg(home.program().get_program());
    namespace.args(["subscribe", server.ticket("w"), "--once", "--exec", command]);
    Process::start(namespace).wait().expect_code(0);
}
