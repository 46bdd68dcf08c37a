//! The topics and versions that a subscription receives: globs, modes, starting versions, gaps, and places of readers.

use crate::files;
use serde_json::{Value, json};
use std::{fs, thread, time::Duration};
use tensor_relay_tests::processes::{Ended, Home, ON_HOST, Process, Serving, Signal};

/// Goal: a subscriber receives all topics that match its glob, and no others. Method: a glob with and without `--once`,
/// and one that matches nothing.
#[test]
fn a_glob_selects_topics() {
    let home = Home::new();
    for (name, seed) in [("a", 1), ("b", 2), ("c", 3)] {
        files::write_noise(&home.path(name), 1000, seed);
    }
    let topics = ["--topic=kv/a=a", "--topic=kv/b=b", "--topic=kv/deep/c=c", "--topic=c=c"];
    let server = home.serve(&[&topics[..], &["--watch", "--watch-interval=0.05"]].concat());
    let ticket = server.ticket_for_all();
    let mut follower = home.start(&["subscribe", ticket, "--topic=kv/*", "--out=out", "--json"]);
    for topic in [follower.wait_for_stdout("committed"), follower.wait_for_stdout("committed")] {
        assert!(topic.contains("kv/a") || topic.contains("kv/b"), "{topic}");
    }
    assert_eq!(home.files_in("out"), ["kv/a.safetensors", "kv/b.safetensors"]);
    files::replace(&home.path("b"), |path| files::write_noise(path, 1000, 4));
    let line = follower.wait_for_stdout(r#""version":2"#);
    assert!(line.contains("kv/b"), "{line}");
    assert_eq!(follower.signal_and_wait(Signal::TERM).expect_code(143).events().len(), 3);

    home.run(&["subscribe", ticket, "--topic=**", "--once", "--out=all"])
        .expect_code(0);
    let all = ["c.safetensors", "kv/a.safetensors", "kv/b.safetensors", "kv/deep/c.safetensors"];
    assert_eq!(home.files_in("all"), all);
    for (topic, file) in all.iter().zip(["c", "a", "b", "c"]) {
        files::assert_same(&home.path(file), &home.path("all").join(topic));
    }
    home.run(&["subscribe", ticket, "--topic=no/*", "--once"])
        .expect_error(5, &["no topic that matches no/*", "tensor-relay list"]);
    // Of a file with several tickets, the one for all topics is used.
    let file = server.report["ticket_file"].as_str().unwrap();
    home.run(&["subscribe", file, "--topic=**", "--once", "--out=from-file"])
        .expect_code(0);
    assert_eq!(home.files_in("from-file"), all);
    assert_eq!(home.run(&["list", file, "--json"]).json()["topics"].as_array().unwrap().len(), 4);
}

/// Goal: a named reader that returns after its place was given up is told what it missed, by exit code 7. Method: a
/// short linger; two versions are published after it, of which one is retained.
#[test]
fn a_reader_that_returns_late_is_told_what_it_missed() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    let mut server = home.serve(&["--topic=w=w", "--watch", "--watch-interval=0.05", "--reader-linger=0.2"]);
    let ticket = server.ticket("w").to_owned();
    let reader = ["subscribe", &ticket, "--mode=every", "--reader=r", "--json"];
    // Acknowledges version 1 before it ends, which a signal after the line might prevent.
    home.run(&[&reader[..], &["--once"]].concat()).expect_code(0);
    thread::sleep(Duration::from_millis(500)); // More than twice the linger.
    for version in 2..4 {
        files::replace(&home.path("w"), |path| files::write_noise(path, 1000, version));
        server.process.wait_for_stdout(&format!(r#""version":{version}"#));
    }
    home.run(&reader)
        .expect_error(7, &["missing of w: 2 was expected, 3 was received"]);
    let mut second = home.start(&reader);
    second.wait_for_stdout(r#""version":3"#);
}

/// Goal: `--once-within` bounds `--once`, whatever it waits for, and nothing else. Method: an existing topic without a
/// matching version, in both modes and for a glob; a lost server; a version that is there; the option alone.
#[test]
fn once_is_bounded_by_its_deadline() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    let server = home.serve(&["--topic=w=w"]);
    let ticket = server.ticket("w").to_owned();
    let once = |args: &[&str]| home.start(&[&["subscribe", &ticket, "--once"], args].concat());
    for args in [&["--from=next"][..], &["--mode=every", "--from=9"], &["--topic=*", "--from=next"]] {
        let ended = once(&[args, &["--once-within=1"]].concat()).wait();
        ended.expect_error(3, &["not received within 1s", "--once-within"]);
    }
    once(&["--once-within=60"]).wait().expect_code(0);
    let alone = home.run(&["subscribe", &ticket, "--once-within=1"]).expect_code(2);
    assert!(alone.err.contains("not provided:\n  --once"), "{alone:?}");
    let mut waiting = once(&["--from=next", "--once-within=3", "--reconnect=600"]);
    waiting.wait_for_stderr("waiting for topic w");
    server.process.signal_and_wait(Signal::KILL);
    waiting.wait().expect_error(3, &["not received within 3s"]);
}

/// Goal: a failure to write one topic ends only that topic; it is reported immediately and by the exit code. Method: a
/// folder in place of the file of one topic; with and without `--once`; finally, the server ends.
#[test]
fn a_failed_topic_does_not_affect_others() {
    let home = Home::new();
    for (name, seed) in [("a", 1), ("b", 2)] {
        files::write_noise(&home.path(name), 1000, seed);
    }
    fs::create_dir_all(home.path("out/a.safetensors")).unwrap();
    let server = home.serve(&["--topic=a=a", "--topic=b=b", "--watch", "--watch-interval=0.05"]);
    let all = ["subscribe", server.ticket_for_all(), "--topic=**", "--out=out"];
    let once = home.run(&[&all[..], &["--once"]].concat()).expect_error(1, &["a.safetensors"]);
    assert!(once.err.contains("warning: topic a is not followed any more"), "{once:?}");
    files::assert_same(&home.path("b"), &home.path("out/b.safetensors"));

    let mut follower = home.start(&[&all[..], &["--json", "--reconnect=0"]].concat());
    follower.wait_for_stdout(r#""event":"failed""#);
    files::replace(&home.path("b"), |path| files::write_noise(path, 1000, 3));
    follower.wait_for_stdout(r#""version":2"#);
    files::assert_same(&home.path("b"), &home.path("out/b.safetensors"));
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
    let ended = follower.wait().expect_error(1, &["a.safetensors"]);
    assert!(ended.err.contains("warning: topic b is not followed any more"), "{ended:?}");
}

/// A server that retains versions of a watched file.
struct Series {
    home: Home,
    server: Serving,
    args: Vec<String>,
}

impl Series {
    fn new(args: &[&str]) -> Self {
        let home = Home::new();
        files::write_noise(&home.path("w"), 1000, 1);
        let all = [&["--topic=w=w", "--watch", "--watch-interval=0.05", "--state-dir=keys"], args].concat();
        let server = home.serve(&all);
        Self { home, server, args: all.iter().map(|arg| (*arg).into()).collect() }
    }

    /// Publishes version `version`, and waits until it is published.
    fn publish(&mut self, version: u64) {
        self.replace(version);
        self.server.process.wait_for_stdout(&format!(r#""version":{version}"#));
    }

    fn replace(&self, seed: u64) {
        files::replace(&self.home.path("w"), |path| files::write_noise(path, 1000, seed));
    }

    /// Starts a reader in mode `every`.
    fn start_reader(&self, args: &[&str]) -> Process {
        let all = ["subscribe", self.server.ticket("w"), "--mode=every", "--json"];
        self.home.start(&[&all[..], args].concat())
    }

    fn epoch(&self) -> &str {
        self.server.topic("w")["epoch"].as_str().unwrap()
    }

    /// Stops the server gracefully, runs `between`, and starts the server again.
    fn restart(&mut self, between: impl FnOnce(&Home)) {
        let report = self.server.report.clone();
        self.server.process.signal(Signal::TERM);
        while self.server.process.is_running() {
            thread::sleep(Duration::from_millis(5));
        }
        between(&self.home);
        let args: Vec<&str> = self.args.iter().map(|arg| &**arg).collect();
        self.server = self.home.serve_again(&report, &args);
    }
}

/// Waits until `follower` reports version `last`, and ends it; returns the versions that it reported.
fn versions_until(mut follower: Process, last: u64) -> Vec<u64> {
    follower.wait_for_stdout(&format!(r#""version":{last}"#));
    versions(&follower.signal_and_wait(Signal::TERM).expect_code(143))
}

/// The versions that a subscriber reported.
fn versions(ended: &Ended) -> Vec<u64> {
    let committed = ended.events().into_iter().filter(|event| event["event"] == "committed");
    committed.map(|event| event["version"].as_u64().unwrap()).collect()
}

/// Goal: in mode `every`, each version arrives once and in order from the chosen start; in mode `latest`, the newest
/// arrives. Method: each form of `--from` with four retained versions; then a fifth version.
#[test]
fn mode_every_starts_at_any_version() {
    let mut series = Series::new(&["--keep-versions=10"]);
    for version in 2..=4 {
        series.publish(version);
    }
    let from_third = format!("--from={}:3", series.epoch());
    for (from, expected) in [
        ("--from=oldest", &[1, 2, 3, 4][..]),
        ("--window=1", &[1, 2, 3, 4]),
        ("--from=newest", &[4]),
        ("--from=2", &[2, 3, 4]),
        (&from_third, &[3, 4]),
    ] {
        assert_eq!(versions_until(series.start_reader(&[from]), 4), expected, "{from}");
    }
    let latest = ["subscribe", series.server.ticket("w"), "--once", "--json"];
    assert_eq!(series.home.run(&latest).expect_code(0).json()["version"], 4);
    let next = [series.start_reader(&["--from=next"]), series.start_reader(&["--from=5"])];
    while series.home.list(&series.server)[0]["subscribers"] != 2 {
        thread::sleep(Duration::from_millis(20));
    }
    series.publish(5);
    assert_eq!(next.map(|follower| versions_until(follower, 5)), [[5], [5]]);
    for from in ["--from=1", "--from=5", "--from=oldest", &from_third] {
        let refused = series.home.run(&["subscribe", series.server.ticket("w"), "--once", from]);
        refused.expect_error(2, &["--mode latest begins with --from newest or next", "--mode every"]);
    }
    let wrong = series.start_reader(&["--from=soon"]).wait();
    wrong.expect_error(2, &["--from", "newest, next, oldest, a version"]);
}

/// Goal: missing versions in mode `every` are a failure, or with `--on-gap=continue` a line of output. Method: start at
/// version 1 when two of five are retained; then the publisher begins a new epoch.
#[test]
fn a_gap_is_reported() {
    let mut series = Series::new(&["--keep-versions=2"]);
    for version in 2..=5 {
        series.publish(version);
    }
    let from = format!("--from={}:1", series.epoch());
    let failed = series
        .start_reader(&[&from])
        .wait()
        .expect_error(7, &["3 versions are missing of w"]);
    assert_eq!(failed.out, "");
    let mut follower = series.start_reader(&[&from, "--on-gap=continue"]);
    let gap: Value = serde_json::from_str(&follower.wait_for_stdout("gap")).unwrap();
    let epoch = series.epoch().to_owned();
    let expected =
        json!({"event": "gap", "topic": "w", "after": 0, "found": 4, "epoch": epoch, "missing": 3});
    assert_eq!(gap, expected);
    let mut strict = series.start_reader(&["--from=newest"]);
    follower.wait_for_stdout(r#""version":5"#);
    strict.wait_for_stdout(r#""version":5"#);
    // Without its ledger a server cannot know what it published before.
    series.restart(|home| fs::remove_file(home.path("keys/topics.json")).unwrap());
    assert_ne!(series.epoch(), epoch);
    strict.wait().expect_error(7, &["w has begun a new epoch", series.epoch()]);
    follower.wait_for_stdout("gap");
    let line: Value = serde_json::from_str(&follower.wait_for_stdout("committed")).unwrap();
    assert_eq!((&line["version"], &line["new_epoch"]), (&1.into(), &true.into()));
    assert_eq!(versions(&follower.signal_and_wait(Signal::TERM).expect_code(143)), [4, 5, 1]);
}

/// Goal: a named reader that is killed and returns in time misses no version, although the server retains fewer
/// versions than the file has had by then: the publisher waits. Method: kill -9 after the first version; replace the
/// file more often than versions are retained; subscribe again under the same name.
#[test]
fn a_named_reader_resumes_at_its_place() {
    let mut series = Series::new(&["--keep-versions=2", "--publish-timeout=50"]);
    let mut reader = series.start_reader(&["--reader=r"]);
    reader.wait_for_stdout(r#""version":1"#);
    reader.signal_and_wait(Signal::KILL);
    series.publish(2);
    series.replace(3); // Version 3 would replace version 1 or 2, which the reader has not acknowledged.
    thread::sleep(Duration::from_millis(500));
    let again = series.start_reader(&["--reader=r", &format!("--from={}:2", series.epoch())]);
    assert_eq!(versions_until(again, 3), [2, 3]);
}

/// Goal: a named reader that is too slow is evicted, and its process reports that. Method: a short publish timeout, and
/// a command that takes longer.
#[test]
fn a_slow_reader_is_evicted() {
    let mut series = Series::new(&["--keep-versions=1", "--publish-timeout=0.3"]);
    let mut slow = series.start_reader(&["--reader=slow", "--exec=sleep 1"]);
    slow.wait_for_stdout(r#""version":1"#);
    series.publish(2);
    slow.wait().expect_error(7, &["the server ended the subscription to w"]);
}

/// Goal: a second process with a reader's name takes over its place. The first process ends with a special exit code,
/// because a supervisor that restarts it would take the place back.
#[test]
fn a_second_process_takes_the_readers_place() {
    let mut series = Series::new(&["--keep-versions=2"]);
    let mut first = series.start_reader(&["--reader=r"]);
    first.wait_for_stdout(r#""version":1"#);
    let second = series.start_reader(&["--reader=r"]);
    first.wait().expect_error(9, &["another subscription has the same reader name"]);
    series.publish(2);
    assert_eq!(versions_until(second, 2).last(), Some(&2));
}

/// Goal: a version that exceeds the memory limit is an error with both numbers. Method: a version of 8 MiB, and limits
/// of 4 MiB at a subscriber and at a server.
#[test]
fn too_large_versions_are_refused() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 8 << 20, 1);
    let server = home.serve(&["--topic=w=w"]);
    let args = ["subscribe", server.ticket("w"), "--once", "--out=out", "--mem=4MiB", ON_HOST];
    home.run(&args)
        .expect_error(1, &["w version 1", "does not fit", "8388608", "4194304"]);
    assert!(home.files_in("out").is_empty());
    let args = ["serve", "--listen=127.0.0.1:0", "--topic=w=w", "--staged-mem=4MiB"];
    home.run(&args).expect_error(1, &["w", "8388608", "4194304"]);
}
