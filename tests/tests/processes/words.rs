//! Help texts, logs without secrets, the demo and the benchmark.

use crate::files;
use tensor_relay_tests::processes::{ANY_PORT, Home, Process, Serving, Signal};

/// Goal: the help of a command describes it and its options. Method: every command with `--help`; and the version.
#[test]
fn help_and_version() {
    let home = Home::new();
    let expected: [(&[&str], &[&str]); 6] = [
        (&["--help"], &["serve", "subscribe", "list", "demo", "Exit codes: 0 done", "Examples:"]),
        (
            &["serve", "--help"],
            &["Serve files of tensors as topics", "--topic <NAME=PATH>", "--grace", "--watch"],
        ),
        (
            &["subscribe", "--help"],
            &["Receive the versions of a topic", "<TICKET>", "--once", "--out <DIR>", "--mode <MODE>"],
        ),
        (&["list", "--help"], &["List the topics of a server", "<TICKET>", "--json"]),
        (
            &["bench", "compare", "--help"],
            &["alternating pairs", "--namespaces", "--peers <FILE>", "all --peers"],
        ),
        (&["demo", "--help"], &["between two processes on this machine", "--size <SIZE>", "--versions <N>"]),
    ];
    for (words, parts) in expected {
        let said = home.run(words).expect_code(0);
        assert!(parts.iter().all(|part| said.out.contains(part)) && said.err.is_empty(), "{said:?}");
        assert!(!said.out.contains("demo-producer"), "the demo's own processes are not for people: {said:?}");
    }
    let version = home.run(&["--version"]).expect_code(0);
    assert_eq!(version.out, format!("tensor-relay {}\n", env!("CARGO_PKG_VERSION")));
    for word in ["demo-produce", "demo-consum", "dem"] {
        let mistyped = home.run(&[word]).expect_code(2);
        assert!(
            !mistyped.err.contains("demo-producer") && !mistyped.err.contains("demo-consumer"),
            "{mistyped:?}"
        );
    }
    assert!(home.run(&["serv"]).expect_code(2).err.contains("'serve'"), "others are suggested");
    let nothing = home.run(&[]).expect_code(2);
    assert!(nothing.err.contains("Usage: tensor-relay"), "{nothing:?}");
}

/// Goal: with any filter, no log shows a stateless reset token, which lets anyone end the connection, or the token of a
/// ticket, which lets anyone connect. Method: a transfer with full logs, by filters of several forms; other messages
/// are logged.
#[test]
fn no_log_has_a_reset_token() {
    for filter in ["trace", "warn,quinn_proto::connection=trace,quinn=trace"] {
        let home = Home::new();
        files::noise(&home.path("m"), 1 << 20, 1);
        let start = |words: &[&str]| {
            let mut command = home.program();
            command.args(words).env("TENSOR_RELAY_LOG", filter);
            Process::start(command)
        };
        let server = Serving::wait_for_report(start(&[
            "serve",
            "--json",
            ANY_PORT,
            "--topic=m=m",
            "--transport=quic",
        ]));
        let token = server.ticket("m").split("&token=").nth(1).unwrap().to_owned();
        let words = [
            "subscribe",
            server.report["ticket_file"].as_str().unwrap(),
            "--once",
            "--out=out",
            "--transport=quic",
        ];
        let subscribed = start(&words).end().expect_code(0);
        let served = server.process.end_by(Signal::TERM).expect_code(0);
        for said in [&subscribed.err, &served.err] {
            assert!(!said.to_lowercase().contains("reset_token"), "{filter}: {said}");
            assert!(!said.contains(&token), "{filter}: {said}");
        }
        if filter == "trace" {
            assert!(subscribed.err.contains("INFO") && served.err.contains("INFO"), "nothing is logged");
        }
    }
}

/// Goal: the demo moves a model and verifies it, with text for people and JSON for programs. Method: a small one, both
/// ways.
#[test]
fn the_demo() {
    let home = Home::new();
    let words = ["demo", "--size=8MiB", "--versions=2", "--small=20"];
    let told = home.run(&[&words[..], &["--json"]].concat()).expect_code(0);
    let told_json = told.json();
    assert_eq!(told_json["all_bytes_equal"], true);
    let versions = told_json["versions"].as_array().unwrap();
    for (version, number) in versions.iter().zip(1..) {
        assert_eq!(version["version"], number);
        let checked = version["checked_bytes"].as_u64().unwrap();
        assert!((7 << 20..=8 << 20).contains(&checked), "{version}");
    }
    let small = &told_json["small"];
    let came = small["received"].as_u64().unwrap() + small["skipped"].as_u64().unwrap();
    assert_eq!((versions.len(), came), (2, 20), "{told_json}");
    let people = home.run(&words).expect_code(0);
    for part in ["version 1: ", "version 2: ", "all equal", "What happened", "Next: on two hosts"] {
        assert!(people.out.contains(part), "{part:?}: {people:?}");
    }
    home.run(&["demo", "--size=1KiB"]).expect_error(2, &["at least 1MiB"]);
}

/// Goal: `bench` runs the benchmark harness, and hides its internal roles. Method: one contender, which runs as two
/// processes; and the help.
#[test]
fn the_benchmark() {
    let home = Home::new();
    let compared = home
        .run(&["bench", "compare", "tcp", "--size=1MiB", "--rounds=1", "--pairs=1"])
        .expect_code(0);
    assert!(compared.out.contains("over loopback") && compared.out.contains("1 MiB a round"), "{compared:?}");
    let help = home.run(&["bench", "--help"]).expect_code(0);
    assert!(help.out.contains("compare") && !help.out.contains("stock-quinn"), "{help:?}");
}
