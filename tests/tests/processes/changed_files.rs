//! Borrowed files that are changed in place while they are served: server and subscribers report the change, and no
//! process waits forever.

use crate::{
    files,
    held_transfer::{HeldTransfer, MODEL_BYTES},
};
use std::fs::File;
use tensor_relay_tests::processes::{Home, Signal};

/// Starts a held transfer of the borrowed file `w`, beside the small file `s`.
fn held_transfer(serve_options: &[&str], subscribe_options: &[&str]) -> HeldTransfer {
    let home = Home::new().with_idle_timeout(60_000); // The transfer may be held for long on a busy machine.
    files::write_noise(&home.path("s"), 1000, 2);
    let serve_options = [&["--hold=borrow"], serve_options].concat();
    HeldTransfer::in_home(home, &serve_options, &[&["--reconnect=5"], subscribe_options].concat())
}

/// Truncates the transfer's file, and releases its proxy.
fn truncate(transfer: &HeldTransfer) {
    let file = File::options().write(true).open(transfer.home.path("w"));
    file.unwrap().set_len(1000).unwrap();
    transfer.proxy.release();
}

/// A ticket for the server's own address, which bypasses the proxy.
fn direct_ticket(transfer: &HeldTransfer, topic: &str) -> String {
    let ticket = transfer.home.create_ticket_for_all(&transfer.server);
    ticket.replace('?', &format!("/{topic}?"))
}

/// Goal: a server whose only topic is lost, without `--watch`, informs its subscribers and exits with an error. Method:
/// truncate its only file during a transfer.
#[test]
fn a_server_without_topics_exits() {
    for subscribe_options in [&["--once", "--wait=5"][..], &["--mode=every", "--reader=r"]] {
        let transfer = held_transfer(&[], subscribe_options);
        truncate(&transfer);
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
    let transfer = held_transfer(&["--topic=s=s"], &["--once", "--wait=5"]);
    let (ticket, other) = (direct_ticket(&transfer, "w"), direct_ticket(&transfer, "s"));
    let every = ["subscribe", &ticket, "--mode=every", "--reader=r"];
    let mut follower = transfer.home.start(&every);
    follower.wait_for_stdout("w version 1");
    truncate(&transfer);
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
    let transfer = held_transfer(&["--watch", "--watch-interval=0.05"], &["--once", "--wait=2"]);
    let ticket = direct_ticket(&transfer, "w");
    let mut follower = transfer.home.start(&["subscribe", &ticket, "--out=follower", "--wait=1"]);
    follower.wait_for_stdout("w version 1");
    truncate(&transfer);
    transfer
        .subscriber
        .wait()
        .expect_error(5, &["its publisher wrote to", "no other version was received", "within 2000 ms"]);
    transfer
        .home
        .run(&["subscribe", &ticket, "--once", "--wait=1"])
        .expect_error(5, &["no topic w"]);
    files::write_noise(&transfer.home.path("w"), MODEL_BYTES, 1);
    follower.wait_for_stdout("w version 2");
    files::assert_same(&transfer.home.path("w"), &transfer.home.path("follower/w.safetensors"));
    transfer.home.run(&["subscribe", &ticket, "--once"]).expect_code(0);
    transfer.server.process.signal_and_wait(Signal::TERM).expect_code(0);
}
