//! Borrowed files that are changed in place while they are served: server and subscribers report the change, and no
//! process waits forever.

use crate::files;
use std::fs::{self, File};
use tensor_relay_tests::processes::{Home, Process, Serving, Signal, UdpProxy};

/// Larger than all buffers on the path.
const MODEL_BYTES: usize = 64 << 20;

/// A server of the borrowed file `w` and of the small one `s`, and a subscriber that waits in the middle of `w`.
struct HeldTransfer {
    home: Home,
    proxy: UdpProxy,
    server: Serving,
    subscriber: Process,
}

impl HeldTransfer {
    /// Starts the server with `serve_options`, and the subscriber of `w` with `subscribe_options`.
    fn new(serve_options: &[&str], subscribe_options: &[&str]) -> Self {
        let (home, mut proxy) = (Home::new().over_quic(), UdpProxy::new());
        files::write_noise(&home.path("w"), MODEL_BYTES, 1);
        files::write_noise(&home.path("s"), 1000, 2);
        fs::copy(home.path("w"), home.path("intact")).unwrap();
        let server =
            home.serve(&[&["--topic=w=w", "--hold=borrow", &proxy.advertise()], serve_options].concat());
        proxy.forward_to(server.listen(), MODEL_BYTES as u64 / 4);
        let args = ["subscribe", server.ticket("w"), "--out=out", "--reconnect=5"];
        let subscriber = home.start(&[&args, subscribe_options].concat());
        proxy.wait_until_held();
        Self { home, proxy, server, subscriber }
    }

    /// Truncates `w`, and releases the proxy.
    fn truncate(&self) {
        File::options()
            .write(true)
            .open(self.home.path("w"))
            .unwrap()
            .set_len(1000)
            .unwrap();
        self.proxy.release();
    }

    /// A ticket for the server's own address, which bypasses the proxy.
    fn ticket(&self, topic: &str) -> String {
        self.home
            .create_ticket_for_all(&self.server)
            .replace('?', &format!("/{topic}?"))
    }
}

/// Goal: a server whose only topic is lost, without `--watch`, informs its subscribers and exits with an error. Method:
/// truncate its only file during a transfer.
#[test]
fn a_server_without_topics_exits() {
    for subscribe_options in [&["--once", "--wait=5"][..], &["--mode=every", "--reader=r"]] {
        let transfer = HeldTransfer::new(&[], subscribe_options);
        transfer.truncate();
        transfer.subscriber.wait().expect_error(5, &["withdrawn"]);
        let ended = transfer.server.process.wait();
        assert!(ended.err.contains("w: w was changed in place"), "{ended:?}");
        ended.expect_error(1, &["nothing is on offer any more", "start the server again"]);
        assert!(transfer.home.files_in("out").is_empty());
    }
}

/// Goal: a lost topic ends immediately for its current and later subscribers; other topics continue. Method: truncate
/// one of two files during a transfer; a named reader that has the version, and readers that subscribe afterwards.
#[test]
fn a_lost_topic_ends_its_subscriptions() {
    let transfer = HeldTransfer::new(&["--topic=s=s"], &["--once", "--wait=5"]);
    let (ticket, other) = (transfer.ticket("w"), transfer.ticket("s"));
    let every = ["subscribe", &ticket, "--mode=every", "--reader=r"];
    let mut follower = transfer.home.start(&every);
    follower.wait_for_stdout("w version 1");
    transfer.truncate();
    transfer.subscriber.wait().expect_error(5, &["withdrawn"]);
    follower.wait().expect_error(5, &["withdrawn"]);
    for late in [&every[..], &["subscribe", &ticket, "--once", "--wait=600"]] {
        transfer.home.run(late).expect_error(5, &["withdrawn"]);
    }
    transfer.home.run(&["subscribe", &other, "--once"]).expect_code(0);
    transfer.server.process.signal_and_wait(Signal::TERM).expect_code(0);
}

/// Goal: with `--watch`, another version may follow a lost one: a subscriber without a version waits for it within
/// `--wait`, others without limit. The restored file becomes a version again. Method: truncate the file during a
/// transfer; later, restore it.
#[test]
fn a_watched_topic_continues_after_a_lost_version() {
    let transfer = HeldTransfer::new(&["--watch", "--watch-interval=0.05"], &["--once", "--wait=2"]);
    let ticket = transfer.ticket("w");
    let mut follower = transfer.home.start(&["subscribe", &ticket, "--out=follower", "--wait=1"]);
    follower.wait_for_stdout("w version 1");
    transfer.truncate();
    transfer
        .subscriber
        .wait()
        .expect_error(5, &["could not be read", "no other version was received", "within 2000 ms"]);
    transfer
        .home
        .run(&["subscribe", &ticket, "--once", "--wait=1"])
        .expect_error(5, &["no topic w"]);
    fs::copy(transfer.home.path("intact"), transfer.home.path("w")).unwrap();
    follower.wait_for_stdout("w version 2");
    files::assert_same(&transfer.home.path("w"), &transfer.home.path("follower/w.safetensors"));
    transfer.home.run(&["subscribe", &ticket, "--once"]).expect_code(0);
    transfer.server.process.signal_and_wait(Signal::TERM).expect_code(0);
}
