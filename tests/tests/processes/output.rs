//! Output that nobody reads: a pipe whose reader stopped, as a log collector that hangs or a terminal with Ctrl-S.

use crate::files;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::{
    fs,
    io::{PipeReader, Write, pipe},
    process::Child,
    thread,
    time::{Duration, Instant},
};
use tensor_relay_tests::processes::{ANY_PORT, Home, Signal, wait_until};

/// The time for a process to end: much longer than its last output may take.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// Starts the program with a full stdout and a full stderr; returns the unread ends.
fn start_unread(home: &Home, args: &[&str]) -> (Child, [PipeReader; 2]) {
    let full = || {
        let (reader, mut writer) = pipe().unwrap();
        let flags = fcntl_getfl(&writer).unwrap();
        fcntl_setfl(&writer, flags | OFlags::NONBLOCK).unwrap();
        while writer.write(&[b'\n'; 4096]).is_ok() {}
        while writer.write(b"\n").is_ok() {}
        fcntl_setfl(&writer, flags).unwrap();
        (reader, writer)
    };
    let ((out, unread_out), (err, unread_err)) = (full(), full());
    let mut command = home.program();
    command
        .args(args)
        .stdin(std::process::Stdio::null())
        .stdout(unread_out)
        .stderr(unread_err);
    (command.spawn().unwrap(), [out, err])
}

/// Sends SIGTERM, and returns the exit code.
fn terminate(mut child: Child) -> Option<i32> {
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::TERM).unwrap();
    let deadline = Instant::now() + END_TIMEOUT;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    panic!("it did not end after SIGTERM");
}

/// Goal: a server whose output nobody reads starts, serves, publishes and obeys SIGTERM. Method: full pipes, with debug
/// logs and events; the ticket is in a file.
#[test]
fn unread_output_holds_up_no_server() {
    let home = files::home_with_model();
    let args = ["serve", "-vv", "--json", ANY_PORT, "--topic=w=w", "--watch", "--ticket-file=t"];
    let (server, _unread) = start_unread(&home, &args);
    wait_until("the server starts", || home.path("t").exists());
    let mut follower = home.start(&["subscribe", "t", "--json"]);
    follower.wait_for_stdout(r#""version":1"#);
    files::replace(&home.path("w"), |path| files::write_noise(path, 1000, 2));
    follower.wait_for_stdout(r#""version":2"#);
    assert_eq!(terminate(server), Some(0));
}

/// Goal: the same of a subscriber: it receives and saves versions, and obeys SIGTERM; in mode `every`, where a program
/// follows the objects on stdout, it obeys SIGTERM.
#[test]
fn unread_output_holds_up_no_subscriber() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w", "--watch"]);
    let args = ["subscribe", "-vv", server.ticket("w"), "--out=out"];
    let (subscriber, _unread) = start_unread(&home, &args);
    let is_saved = || fs::read(home.path("out/w.safetensors")).ok() == fs::read(home.path("w")).ok();
    wait_until("version 1 is saved", is_saved);
    files::replace(&home.path("w"), |path| files::write_noise(path, 1000, 2));
    wait_until("version 2 is saved", is_saved);
    assert_eq!(terminate(subscriber), Some(143));
    let args = ["subscribe", "-vv", server.ticket("w"), "--out=every", "--json", "--mode=every"];
    let (reader, _unread) = start_unread(&home, &args);
    wait_until("a version is saved", || home.path("every/w.safetensors").exists());
    assert_eq!(terminate(reader), Some(143));
}

/// Goal: an output that cannot be written, as on a full disk, ends no server, and is a failure of a subscriber, whose
/// output it is. Method: /dev/full.
#[test]
fn a_failed_write_to_stdout_is_reported() {
    let home = files::home_with_model();
    let full = || fs::File::options().write(true).open("/dev/full").unwrap();
    let mut command = home.program();
    command.args(["serve", "-vv", "--json", ANY_PORT, "--topic=w=w", "--ticket-file=t"]);
    let server = command.stdout(full()).stderr(full()).spawn().unwrap();
    wait_until("the server starts", || home.path("t").exists());
    home.run(&["list", "t"]).expect_code(0);
    for once in [&["--once"][..], &[]] {
        let mut command = home.program();
        let output = command.args(["subscribe", "t"]).args(once).stdout(full()).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("error: cannot write to stdout"),
            "{output:?}"
        );
    }
    assert_eq!(terminate(server), Some(0));
}
