//! `bench run`, run as a user runs them: each workload once, small, with real processes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use serde_json::Value;
use std::{
    path::PathBuf,
    process::{Command, Output, Stdio},
};

fn bench(words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensor-relay-bench"));
    command.args(words.split_whitespace()).stdin(Stdio::null());
    command
}

/// The path of a temporary file. Dropping it removes the file.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("tensor-relay-bench-{}-{name}", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Runs `bench run` with `words`; returns its standard output and its result file.
fn run(name: &str, words: &str) -> (String, Value) {
    let json = Scratch::new(&format!("{name}.json"));
    let output = bench(&format!("run {words} --json {}", json.0.display())).output().unwrap();
    let table = succeeded(output);
    let document: Value = serde_json::from_slice(&std::fs::read(&json.0).unwrap()).unwrap();
    assert_eq!((&document["kind"], &document["version"]), (&"run".into(), &3.into()));
    (table, document)
}

/// The standard output of a command, which must have succeeded.
fn succeeded(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// The row of `table` with a setting whose value is `name`.
fn row<'a>(document: &'a Value, table: &str, name: &str) -> &'a Value {
    let tables = document["tables"].as_array().unwrap();
    let table = tables.iter().find(|other| other["name"] == table).unwrap();
    let is_named = |row: &&Value| row["setting"].as_object().unwrap().values().any(|value| value == name);
    table["rows"]
        .as_array()
        .unwrap()
        .iter()
        .find(is_named)
        .unwrap_or_else(|| panic!("{name}: {table}"))
}

/// The rounds of the only run in `document`, as all processes together measured them.
fn rounds(document: &Value) -> &Vec<Value> {
    let [run] = &document["runs"].as_array().unwrap()[..] else { panic!("one run: {document}") };
    run["rounds"].as_array().unwrap()
}

/// Goal: the numbers of a round are complete and consistent. Method: one tensor, staged and borrowed.
#[test]
fn the_numbers_of_a_round_are_consistent() {
    for hold in ["stage", "borrow"] {
        let (table, document) = run(hold, &format!("--size 9MiB --rounds 2 --hold {hold}"));
        assert!(table.contains("Workload bulk, over loopback"), "{table}");
        let scene = row(&document, "All runs", "bulk");
        assert_eq!(
            (&scene["samples"], rounds(&document).len()),
            (&2.into(), 2),
            "the warm-up does not count"
        );
        let rate = &scene["measured"]["gb_per_s"];
        assert!(number(&rate["min"]) > 0.0 && number(&rate["min"]) <= number(&rate["median"]));
        assert_eq!(scene["measured"]["version_mib"]["median"], 9.0);
        let (consumer, producer) =
            (row(&document, "Each process", "consumer 1"), row(&document, "Each process", "producer"));
        let of = |row: &Value, name: &str| number(&row["measured"][name]["median"]);
        let udp_payload_bytes = of(consumer, "udp_payload_bytes");
        assert!([0.0, 65_000.0].contains(&udp_payload_bytes), "over TCP, or QUIC on the loopback");
        assert!(of(producer, "sent_mib") > 8.5, "{producer}");
        // Three chunks of 4 MiB or less, hashed in the round only if they were not staged.
        assert_eq!(of(producer, "chunks_hashed"), if hold == "borrow" { 3.0 } else { 0.0 });
        assert_eq!((of(consumer, "chunks"), of(consumer, "lanes")), (3.0, 1.0));
        assert_eq!((&document["lanes"], &document["hold"]), (&1.into(), &hold.into()));
        assert!(of(producer, "peak_resident_mib") > 9.0 && of(consumer, "peak_resident_mib") > 9.0);
    }
}

#[test]
fn models_have_their_number_of_tensors() {
    let tensors = |document: &Value| number(&rounds(document)[0]["tensors"]);
    let (_, generated) = run("generated", "--workload state-dict --size 1MiB --rounds 1");
    assert!(tensors(&generated) > 100.0);
    let (_, small) = run("small", "--workload many-small --count 300 --rounds 1");
    assert_eq!(tensors(&small), 300.0);
}

/// Goal: a file's tensors are published, and its folder is not recorded.
#[test]
fn a_file_is_published_without_its_folder() {
    let file = Scratch::new("model.safetensors");
    let header = br#"{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}"#;
    std::fs::write(&file.0, [&(header.len() as u64).to_le_bytes(), &header[..], b"12345"].concat()).unwrap();
    let (_, document) = run("file", &format!("--content {} --rounds 1", file.0.display()));
    assert_eq!(rounds(&document)[0]["tensors"], 1.0);
    let work = document["work"].to_string();
    assert!(work.contains("model.safetensors") && !work.contains('/'), "{work}");
}

/// Goal: each version of a stream is counted and timed.
#[test]
fn every_version_of_a_stream_is_timed() {
    let sum = |document: &Value, name: &str| -> f64 {
        rounds(document).iter().map(|round| number(&round[name])).sum()
    };
    let (table, latency) = run("latency", "--workload latency --count 50 --rounds 2");
    // On a busy machine, a version may be replaced by the next one before it is received.
    assert_eq!(sum(&latency, "versions") + sum(&latency, "missed"), 100.0, "two rounds of 50: {latency}");
    for round in rounds(&latency) {
        let at = |name: &str| number(&round[name]);
        assert!(
            0.0 < at("p50_us") && at("p50_us") <= at("p99_us") && at("p99_us") <= at("max_us"),
            "{round}"
        );
        assert!(0.0 < at("committed_p50_us") && at("committed_p50_us") <= at("committed_p99_us"), "{round}");
    }
    assert!(table.contains("| p50, µs "), "both ends have one clock: {table}");

    // A size that the payload pads.
    let words = "--workload versions --size 1000B --per-second 200 --seconds 1 --rounds 1";
    let (_, latest) = run("latest", words);
    assert_eq!(sum(&latest, "versions") + sum(&latest, "missed"), 200.0);
    let rate = sum(&latest, "versions_per_s");
    assert!(rate <= 201.0, "{rate} a second are more than requested");

    let (_, every) = run("every", &format!("{words} --every"));
    assert_eq!((sum(&every, "missed"), sum(&every, "versions")), (0.0, 200.0));
}

#[test]
fn every_scene_has_its_own_consumers() {
    let (_, fan_out) = run("fan-out", "--workload fan-out --consumers 3 --size 5MiB --rounds 2");
    let processes = |run: &Value| run["processes"].as_array().unwrap().len();
    let of_scenes = |document: &Value| -> Vec<(String, usize)> {
        let runs = document["runs"].as_array().unwrap();
        runs.iter()
            .map(|run| (run["contender"].as_str().unwrap().to_owned(), processes(run)))
            .collect()
    };
    let [three, one] = [("3 consumers".to_owned(), 4), ("one consumer".to_owned(), 2)];
    assert_eq!(of_scenes(&fan_out), [three.clone(), one.clone(), one, three], "with the producer");
    let ratio = &row(&fan_out, "All runs", "one consumer")["ratios"]["gb_per_s"];
    assert_eq!(ratio["pairs"], 2);

    // The slow consumer is neither waited for nor measured.
    let (table, slow) = run("slow", "--workload slow-reader --size 5MiB --rounds 1");
    let [beside, without] = ["beside a slow one", "without the slow one"].map(|name| (name.to_owned(), 2));
    assert_eq!(of_scenes(&slow), [beside, without]);
    assert!(table.contains("ratio of GB/s"), "{table}");
}

/// Goal: a run across hosts, two consumers of which are on one. Method: `env` stands for `ssh HOST`.
#[test]
fn other_hosts_run_the_sides() {
    let host = format!("env {} ", env!("CARGO_BIN_EXE_tensor-relay-bench"));
    let json = Scratch::new("hosts.json");
    let mut command = bench("run --size 5MiB --rounds 1 --serve-at 127.0.0.1 --json");
    command.arg(&json.0).args(["--producer", &host, "--consumer", &host, &host]);
    let table = succeeded(command.output().unwrap());
    assert!(table.contains("between a host and the consumers on others: 2"), "{table}");
    let document: Value = serde_json::from_slice(&std::fs::read(&json.0).unwrap()).unwrap();
    assert_eq!(document["network"]["nodes"], 2);
    let processes = document["runs"][0]["processes"].as_array().unwrap();
    let names: Vec<&str> = processes.iter().map(|process| process["process"].as_str().unwrap()).collect();
    assert_eq!(names, ["consumer 1", "consumer 2", "producer"]);
    assert!(processes[0]["machine"]["cores"].as_u64().unwrap() > 0, "{document}");

    let without = bench("run --producer true --consumer true").output().unwrap();
    assert!(String::from_utf8_lossy(&without.stderr).contains("--serve-at"));
}

/// Goal: the death of a host ends the run, with an error that names the command. Method: an endless run, whose consumer
/// is ended after a second.
#[test]
fn an_error_names_the_host_that_died() {
    let host = format!("env {}", env!("CARGO_BIN_EXE_tensor-relay-bench"));
    let dying = format!("timeout 1 {host}");
    let mut command = bench("run --workload latency --count 10000000 --serve-at 127.0.0.1");
    let output = command.args(["--producer", &host, "--consumer", &dying]).output().unwrap();
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(table.contains(&format!("consumer 1 ({dying}) ended early")), "{table}");
    assert!(!output.status.success());
}
