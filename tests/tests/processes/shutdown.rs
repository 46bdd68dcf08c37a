//! How processes end: signals, shutdowns and kills, when idle and during a transfer.

use crate::{files, held_transfer::HeldTransfer};
use std::time::Duration;
use tensor_relay_tests::processes::{Home, Signal};

/// The time without a packet after which the peer is considered dead (`Tuning::idle_timeout_ms`).
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts a held transfer whose subscriber does not wait for a lost server.
fn held_transfer(serve_options: &[&str]) -> HeldTransfer {
    HeldTransfer::new(serve_options, &["--once", "--reconnect=0"])
}

/// Goal: a subscriber detects the kill of its server during a transfer, and leaves no partial file. Method: kill -9
/// during a transfer. The server sends no close, so the detection takes the idle timeout.
#[test]
fn a_server_killed_during_a_transfer_leaves_no_partial_file() {
    let HeldTransfer { home, proxy, server, subscriber } = held_transfer(&[]);
    let killed = server.process.signal_and_wait(Signal::KILL);
    assert_eq!(killed.signal, Some(Signal::KILL.as_raw()), "{killed:?}");
    proxy.release();
    let ended = subscriber.wait();
    let slack = Duration::from_secs(10);
    assert!(ended.run_time < IDLE_TIMEOUT + slack, "{ended:?}");
    let ended = ended.expect_error(3, &["has not answered for the idle timeout"]);
    assert_eq!((home.files_in("out"), &*ended.out), (vec![], ""), "no partial file");
}

/// Goal: a subscriber that waits for the next version detects the kill of its server, too. Method: kill -9 after the
/// first version, over each transport. Over TCP, the system reports the lost connection immediately.
#[test]
fn the_kill_of_an_idle_server_is_noticed() {
    for (transport, cause) in [("quic", "has not answered for the idle timeout"), ("tcp", "killed")] {
        let home = Home::new();
        files::write_noise(&home.path("w"), 1000, 1);
        let server = home.serve(&["--topic=w=w"]);
        let transport_option = format!("--transport={transport}");
        let args = ["subscribe", server.ticket("w"), "--out=out", "--reconnect=0", &transport_option];
        let mut follower = home.start(&args);
        follower.wait_for_stdout("w version 1");
        server.process.signal_and_wait(Signal::KILL);
        let ended = follower.wait();
        assert!(transport == "tcp" || ended.run_time > IDLE_TIMEOUT / 2, "{ended:?}");
        ended.expect_error(3, &["the subscription to w ended", cause]);
        assert_eq!(home.files_in("out"), ["w.safetensors"], "complete files stay");
    }
}

/// Goal: SIGTERM and SIGINT end an idle server gracefully, without a wait for the end of its grace; its subscribers get
/// the reason. Method: each of the signals, while a subscriber waits for the next version.
#[test]
fn a_signal_ends_an_idle_server_immediately() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    for signal in [Signal::TERM, Signal::INT] {
        let server = home.serve(&["--topic=w=w", "--grace=30"]);
        let mut follower = home.start(&["subscribe", server.ticket("w"), "--reconnect=0"]);
        follower.wait_for_stdout("w version 1");
        let ended = server.process.signal_and_wait(signal).expect_code(0);
        assert!(
            ended.run_time < Duration::from_secs(20),
            "it waited although no transfer was in progress: {ended:?}"
        );
        follower
            .wait()
            .expect_error(3, &["the subscription to w ended", "the server is shutting down"]);
    }
}

/// Goal: a transfer in progress at a shutdown is completed; its subscriber is informed of the shutdown once. Method:
/// SIGTERM while the proxy holds; release it once the server reports that it finishes the transfer.
#[test]
fn a_shutdown_completes_transfers() {
    let HeldTransfer { home, proxy, mut server, subscriber } =
        HeldTransfer::new(&["--grace=50"], &["--once", "--reconnect=0", "-v"]);
    server.process.signal(Signal::TERM);
    server.process.wait_for_stderr("finishing 1 transfer");
    proxy.release();
    let received = subscriber.wait().expect_code(0);
    assert!(received.out.contains("saved to out/w.safetensors"), "{received:?}");
    assert_eq!(received.err.matches("The server is shutting down").count(), 1, "{received:?}");
    files::assert_same(&home.path("w"), &home.path("out/w.safetensors"));
    let ended = server.process.wait().expect_code(0);
    assert!(!ended.err.contains("cut off"), "{ended:?}");
}

/// Goal: a shutdown takes no longer than its grace; cancelled subscribers get an error and keep no partial file.
/// Method: SIGTERM with a short grace, and a proxy that holds until the server has exited.
#[test]
fn a_shutdown_takes_no_longer_than_its_grace() {
    let HeldTransfer { home, proxy, server, subscriber } = held_transfer(&["--grace=0.3"]);
    let ended = server.process.signal_and_wait(Signal::TERM).expect_code(0);
    assert!(ended.err.contains("transfers were cut off after 300 ms"), "{ended:?}");
    proxy.release();
    subscriber.wait().expect_error(3, &["the subscription to w ended"]);
    assert!(home.files_in("out").is_empty());
}

/// Goal: a second signal ends a server immediately. Method: SIGTERM twice while the proxy holds, with a grace longer
/// than the test's timeout.
#[test]
fn a_second_signal_ends_a_server_immediately() {
    let HeldTransfer { mut server, .. } = held_transfer(&["--grace=600"]);
    server.process.signal(Signal::TERM);
    server.process.wait_for_stderr("finishing 1 transfer");
    server.process.signal_and_wait(Signal::TERM).expect_code(143);
}

/// Goal: a version that waits for its readers when the server ends is named as not published. Method: SIGTERM while a
/// reader is busy with the version before, for a watched file and for the publish socket.
#[test]
fn a_version_that_a_shutdown_drops_is_named() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    files::write_noise(&home.path("next"), 1000, 2);
    let socket = home.argument("s");
    let publish_socket = format!("--publish-socket={socket}");
    let blocks = ["--when-full=block", "--publish-timeout=0.1", "--grace=0.1", "--bases=0"];
    let watched = ["--topic=p=w", "--watch", "--watch-interval=0.05"];
    for args in [&watched[..], &[&publish_socket]] {
        let mut server = home.serve(&[args, &blocks].concat());
        let publish = |file| home.start(&["publish", &socket, "p", file]);
        let by_socket = args.len() == 1;
        if by_socket {
            publish("w").wait().expect_code(0);
        }
        let ticket = home.create_ticket_for_all(&server);
        let every = ["subscribe", &ticket, "--topic=p", "--mode=every", "--exec=exec sleep 60", "--json"];
        let mut reader = home.start(&every);
        reader.wait_for_stdout(r#""version":1"#);
        let publishing = by_socket.then(|| publish("next"));
        if !by_socket {
            files::replace(&home.path("w"), |path| files::write_noise(path, 1000, 2));
        }
        server.process.wait_for_stderr("waits for 1 reader");
        let ended = server.process.signal_and_wait(Signal::TERM).expect_code(0);
        assert_eq!(ended.err.matches("is not published: its publish was cancelled").count(), 1, "{ended:?}");
        if let Some(publishing) = publishing {
            publishing.wait().expect_error(3, &["has ended"]);
        }
        reader.signal_and_wait(Signal::TERM).expect_code(143);
    }
}

/// Goal: SIGINT and SIGTERM end a subscriber with the exit code that shells expect, at any time, without a partial
/// file. Method: each signal while it waits for a version and while it receives one.
#[test]
fn a_signal_ends_a_subscriber_without_a_partial_file() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    let server = home.serve(&["--topic=w=w"]);
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut follower = home.start(&["subscribe", server.ticket("w")]);
        follower.wait_for_stdout("w version 1");
        follower.signal_and_wait(signal).expect_code(code);
        let held = held_transfer(&[]);
        held.subscriber.signal_and_wait(signal).expect_code(code);
        assert!(held.home.files_in("out").is_empty());
    }
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
}
