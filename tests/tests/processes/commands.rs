//! Help texts, the demo and the benchmark.

use tensor_relay_tests::processes::Home;

/// Goal: `--help` describes a command and its options; `--version` prints the version. Method: the help of several
/// commands; a mistyped command; no command.
#[test]
fn help_and_version_are_printed() {
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
        (
            &["demo", "--help"],
            &["from a server to a subscriber on this machine", "--size <SIZE>", "--versions <N>"],
        ),
    ];
    for (args, parts) in expected {
        let output = home.run(args).expect_code(0);
        assert!(parts.iter().all(|part| output.out.contains(part)) && output.err.is_empty(), "{output:?}");
    }
    let version = home.run(&["--version"]).expect_code(0);
    assert_eq!(version.out, format!("tensor-relay {}\n", env!("CARGO_PKG_VERSION")));
    assert!(home.run(&["serv"]).expect_code(2).err.contains("'serve'"), "similar commands are suggested");
    let without_command = home.run(&[]).expect_code(2);
    assert!(without_command.err.contains("Usage: tensor-relay"), "{without_command:?}");
}

/// Goal: the demo transfers a model and verifies it, with text and JSON output. Method: a small model, with each
/// output.
#[test]
fn the_demo_verifies_its_transfer() {
    let home = Home::new();
    let args = ["demo", "--size=8MiB", "--versions=2", "--small=20"];
    let output = home.run(&[&args[..], &["--json"]].concat()).expect_code(0);
    let report = output.json();
    assert_eq!(report["all_bytes_equal"], true);
    let versions = report["versions"].as_array().unwrap();
    for (version, number) in versions.iter().zip(1..) {
        assert_eq!(version["version"], number);
        let checked = version["checked_bytes"].as_u64().unwrap();
        assert!((7 << 20..=8 << 20).contains(&checked), "{version}");
    }
    let small = &report["small"];
    let total = small["received"].as_u64().unwrap() + small["skipped"].as_u64().unwrap();
    assert_eq!((versions.len(), total), (2, 20), "{report}");
    let plain = home.run(&args).expect_code(0);
    for part in ["version 1: ", "version 2: ", "all equal", "What happened", "Next: on two hosts"] {
        assert!(plain.out.contains(part), "{part:?}: {plain:?}");
    }
    home.run(&["demo", "--size=1KiB"]).expect_error(2, &["at least 1MiB"]);
}

/// Goal: `bench` runs the benchmark harness; its help does not show the internal roles of processes. Method: compare
/// one contender, which runs as two processes; and the help.
#[test]
fn bench_hides_its_internal_roles() {
    let home = Home::new();
    let compared = home
        .run(&["bench", "compare", "tcp", "--size=1MiB", "--rounds=1", "--pairs=1"])
        .expect_code(0);
    assert!(compared.out.contains("over loopback") && compared.out.contains("1 MiB a round"), "{compared:?}");
    let help = home.run(&["bench", "--help"]).expect_code(0);
    assert!(help.out.contains("compare") && !help.out.contains("stock-quinn"), "{help:?}");
}
