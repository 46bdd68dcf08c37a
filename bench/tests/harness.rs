//! `bench compare` and `deltas`, run as a user runs them.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../tests/src/skip.rs"]
#[expect(unreachable_pub, reason = "the crate of the tests exports it; it depends on this one")]
mod skip;

use serde_json::Value;
use skip::skip;
use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensor-relay-bench"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// The standard output of `command`, which must succeed.
fn output_of(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Goal: all contenders of this program are compared, even if a peer fails. Method: little data over loopback, and a peer that exits with an error.
#[test]
fn contenders_are_compared_and_reported() {
    let folder = std::env::temp_dir().join(format!("tensor-relay-bench-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let option = |name: &str, file: &str| format!("--{name}={}", folder.join(file).display());
    let broken = r#"{"peers":[{"name":"broken","program":["sh","-c","echo no such module >&2; exit 3"],
        "encrypted":false,"receives_into":"fresh","note":"never works"}]}"#;
    fs::write(folder.join("peers.json"), broken).unwrap();

    let options = [option("peers", "peers.json"), option("json", "result.json")];
    let words = ["compare", "all", "--size=5MiB", "--rounds=2", "--pairs=2", "--small=20"];
    let table = output_of(bench(&words).args(options));
    assert!(table.contains("broken failed: broken serve ended early"), "{table}");
    assert!(table.contains("no such module"), "{table}");
    assert!(table.contains("A ratio divides tensor-relay by"), "{table}");

    let result = folder.join("result.json");
    let json: Value = serde_json::from_slice(&fs::read(&result).unwrap()).unwrap();
    let rows = json["tables"][0]["rows"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| &row["setting"]["contender"]).collect();
    assert_eq!(names, ["tensor-relay", "stock-quinn", "tcp", "tcp-tls", "broken"]);
    assert_eq!(
        json["runs"].as_array().unwrap().len(),
        13,
        "6 runs of the other contenders of this program, 6 of tensor-relay beside these, and 1 beside the broken peer"
    );
    for run in json["runs"].as_array().unwrap() {
        assert_eq!(run["rounds"].as_array().unwrap().len(), 2, "the warm-up is not counted");
        assert_eq!(run["small"]["small"], 20);
        assert!(run["rounds"][1]["gb_per_s"].as_f64().unwrap() > 0.0);
    }

    fs::remove_dir_all(folder).unwrap();
}

/// Goal: versions are measured as deltas and whole, and deltas are smaller. Method: few weights, two pairs.
#[test]
fn versions_are_measured_as_deltas_and_whole() {
    let table = output_of(&mut bench(&["deltas", "--size=5MiB", "--versions=4", "--pairs=2"]));
    let row = |start: &str| {
        let line = table
            .lines()
            .find(|line| line.starts_with(start))
            .unwrap_or_else(|| panic!("{table}"));
        line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>()
    };
    let (head, delta) = (row("| contender "), row("| delta "));
    let cell = |name: &str| &delta[head.iter().position(|head| head == name).unwrap()];
    let smaller: f64 = cell("times smaller").split(' ').next().unwrap().parse().unwrap();
    assert!(smaller > 5.0, "{table}");
    assert!(cell("ratio of publish to commit, ms").ends_with("(–, pairs: 2)"), "{table}");
    for version in ["3", "4"] {
        assert!(
            row(&format!("| {version}  ")).contains(&"whole".to_owned()),
            "each counted version has a row for `whole`: {table}"
        );
    }
}

/// Goal: a network has the requested rate and delay, and is removed completely. Method: TCP over a link with all
/// properties at once; neither rate nor latency is better than the link allows. The test requires root, `ip`, `tc`,
/// `nft` and TUN devices; without them it prints the reason and passes.
#[test]
fn a_network_has_its_properties_and_is_removed() {
    let json = std::env::temp_dir().join(format!("tensor-relay-bench-network-{}.json", std::process::id()));
    let compare = ["compare", "tcp", "--size=1MiB", "--rounds=1", "--pairs=1", "--small=5", "--namespaces"];
    let network = ["--mtu=1472", "--rate=100Mbit", "--segments", "--loss=0.1", "--delay-ms=10"];
    let mut command = bench(&[&compare[..], &network].concat());
    command
        .arg(format!("--json={}", json.display()))
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let harness = command.spawn().unwrap();
    let namespaces = format!("relay-bench-{}-", harness.id());
    let output = harness.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    if ["needs root", "cannot run `", "needs nftables", "TUN device"]
        .iter()
        .any(|part| stderr.contains(part))
    {
        return skip(format_args!("no network can be made here: {stderr}"));
    }
    assert!(output.status.success(), "{stderr}");

    let result: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    fs::remove_file(json).unwrap();
    assert_eq!(result["network"]["rate_bits_per_s"], 100_000_000);
    let run = &result["runs"][0];
    assert!(run["small"]["min_us"].as_f64().unwrap() >= 10_000.0, "{run}");
    // The rate may be exceeded only by the content of the token bucket.
    assert!(run["rounds"][0]["gb_per_s"].as_f64().unwrap() < 0.0125 * 1.2, "{run}");
    let remaining = output_of(Command::new("ip").args(["netns", "list"]));
    assert!(!remaining.contains(&namespaces), "{remaining}");
}

/// Goal: the exit status shows that a contender that is no peer failed. Method: another build that exits at once.
#[test]
fn a_failing_contender_that_is_no_peer_fails_the_command() {
    let other = ["compare", "other-build", "--relay=/bin/false", "--size=1MiB", "--pairs=2"];
    let output = bench(&other).output().unwrap();
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success(), "{table}");
    assert!(table.contains("other-build failed:"), "{table}");
}

/// Goal: a payload is divided into tensors of unequal size. Method: a size that is no multiple of the number of
/// tensors.
#[test]
fn a_payload_is_divided_into_ten_thousand_tensors() {
    let table =
        output_of(&mut bench(&["compare", "10000-tensors", "--size=5MiB", "--rounds=1", "--pairs=1"]));
    assert!(table.contains("| 10000-tensors | yes "), "{table}");
    assert!(!table.contains("failed"), "{table}");
}

/// Goal: no side runs longer than the harness, even if the harness is killed. Method: close the side's standard input.
#[test]
fn a_side_exits_when_its_standard_input_closes() {
    let serve = ["--end-with-stdin", "stock-quinn", "serve", "--bytes=1MiB"];
    let mut side = bench(&serve).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    drop(side.stdin.take());
    let begun = Instant::now();
    while side.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(30), "the side still runs");
        std::thread::sleep(Duration::from_millis(10));
    }
}
