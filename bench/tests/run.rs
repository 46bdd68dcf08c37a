//! `bench run` and `bench node`, run as a user runs them: each workload once, small, with real processes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    time::Duration,
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

/// A node on loopback, with its address and its token.
struct Node {
    process: Child,
    address: String,
    token: String,
}

impl Node {
    fn start(token: Option<&str>) -> Self {
        let mut command = bench("node --listen 127.0.0.1:0");
        command.envs(token.map(|token| ("TENSOR_RELAY_BENCH_TOKEN", token)));
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (address, generated) = line.split_once(", token ").unwrap_or((&line, ""));
        let address = address.rsplit(' ').next().unwrap().trim().to_owned();
        let token = token.unwrap_or(generated).trim().to_owned();
        Self { process, address, token }
    }

    /// Ends it by SIGTERM.
    fn terminate(&mut self) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        self.process.wait().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The standard error of `command`, which must fail.
fn failure(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Goal: a run across hosts, one of which has two consumers. Method: two nodes on loopback, after invalid connections.
#[test]
fn nodes_run_the_workers_of_another_machine() {
    let a = Node::start(None);
    let b = Node::start(Some(&a.token));
    for invalid in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[b'x'; 5_000], b""] {
        let mut stream = TcpStream::connect(&b.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let _ = stream.write_all(invalid);
        let _ = stream.shutdown(std::net::Shutdown::Write); // Fails if the node has already closed the connection.
        let _ = stream.read_to_end(&mut Vec::new()); // Until the node closes the connection.
    }
    let at = format!("--producer {} --consumer {} {}", a.address, b.address, b.address);
    let (table, document) = run("nodes", &format!("{at} --token {} --size 5MiB --rounds 1", a.token));
    assert!(table.contains("between a node and 2 consumers"), "{table}");
    assert_eq!(document["network"]["nodes"], 2);
    let processes = document["runs"][0]["processes"].as_array().unwrap();
    let names: Vec<&str> = processes.iter().map(|process| process["process"].as_str().unwrap()).collect();
    assert_eq!(names, ["consumer 1", "consumer 2", "producer"]);
    assert!(processes[0]["machine"]["cores"].as_u64().unwrap() > 0, "{document}");

    let wrong = failure(&mut bench(&format!("run {at} --token wrong-token --rounds 1")));
    assert!(wrong.contains(&format!("producer ({})", a.address)) && wrong.contains("wrong token"), "{wrong}");
    let without = failure(&mut bench(&format!("run {at}")));
    assert!(without.contains("--token"), "{without}");
}

/// Goal: the death of a node ends the run, with an error that names the node. Method: an endless run, during which the
/// consumer's node is ended.
#[test]
fn an_error_names_the_node_that_died() {
    let a = Node::start(None);
    let mut b = Node::start(Some(&a.token));
    let words = format!(
        "run --workload latency --count 10000000 --producer {} --consumer {} --token {}",
        a.address, b.address, a.token
    );
    let driver = bench(&words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while children(&b.process) == 0 {
        std::thread::sleep(Duration::from_millis(10));
    }
    b.terminate();
    let output = driver.wait_with_output().unwrap();
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(table.contains(&format!("consumer 1 ({})", b.address)), "{table}");
    assert!(table.contains("is gone"), "{table}");
    assert!(!output.status.success());
}

/// The number of child processes of `process`.
fn children(process: &Child) -> usize {
    let id = process.id();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    children.split_whitespace().count()
}
