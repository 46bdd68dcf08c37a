//! The program as a person runs it.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensor-relay-bench"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Goal: the harness starts both sides, follows their rounds, and reports. Method: the rival alone, small and on
/// loopback.
#[test]
fn raw_measures_the_rival() {
    let json = std::env::temp_dir().join(format!("tensor-relay-bench-{}.json", std::process::id()));
    let json_option = format!("--json={}", json.display());
    let small = ["raw", "--only=stock-quinn", "--size=9MiB", "--rounds=2", "--pairs=2", &json_option];
    let output = bench(&small).output().unwrap();
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(table.contains("stock-quinn"), "{table}");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    std::fs::remove_file(json).unwrap();
    let rounds = report["contenders"][0]["runs"][1]["rounds"].as_array().unwrap();
    assert_eq!(rounds.len(), 2, "the warm-up is not counted");
    assert!(rounds[0]["gb_per_s"].as_f64().unwrap() > 0.0);
}

/// Goal: no side outlives the harness, even if the harness has no chance to say so. Method: close its standard input.
#[test]
fn a_side_ends_with_its_standard_input() {
    let serve = ["--end-with-stdin", "stock-quinn", "serve", "--bytes=1MiB"];
    let mut side = bench(&serve).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    drop(side.stdin.take());
    let begun = Instant::now();
    while side.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(30), "the side still runs");
        std::thread::sleep(Duration::from_millis(10));
    }
}
