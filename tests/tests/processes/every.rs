//! Mode `every` over many versions: a fast producer, several readers, and one that is restarted repeatedly.

use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{
    io::{PipeWriter, Write},
    process::Command,
    time::Instant,
};
use tensor_relay_tests::{
    processes::{Ended, Home, Process, Serving, Signal, is_soak},
    skip,
};

/// The number of restarts of one reader.
const RESTARTS: u64 = 10;

/// Goal: in mode `every` each version arrives once and in order, even if a reader is killed. Method: 3,000 small
/// versions for three processes, of which one is killed or terminated ten times at random moments, and continues after
/// its last output line.
#[test]
fn every_version_arrives_once_and_in_order() {
    run(3_000, 1);
}

/// As [`every_version_arrives_once_and_in_order`], with more versions.
#[test]
fn every_version_arrives_in_a_soak() {
    match is_soak() {
        true => run(100_000, 2),
        false => skip("it takes minutes; TENSOR_RELAY_SOAK=1 runs it"),
    }
}

fn run(count: u64, seed: u64) {
    let home = Home::new();
    let (producer, mut go) = start_producer(&home, count);
    let mut steady = ["a", "b"].map(|name| Reader::start(&home, &producer, name));
    let mut restarted = Reader::start(&home, &producer, "restarted");
    for reader in steady.iter_mut().chain([&mut restarted]) {
        reader.wait_for(1); // From now on the producer waits for this reader.
    }
    let started = Instant::now();
    writeln!(go, "go").unwrap();
    let mut rng = StdRng::seed_from_u64(seed);
    for restart in 1..=RESTARTS {
        let step = count / (RESTARTS + 1);
        restarted.wait_for(restart * step + rng.random_range(0..step / 2));
        let signal = if restart % 2 == 0 { Signal::TERM } else { Signal::KILL };
        restarted = restarted.restart(&home, &producer, signal);
    }
    for reader in steady.iter_mut().chain([&mut restarted]) {
        reader.wait_for(count);
    }
    let elapsed = started.elapsed();
    for reader in steady.into_iter().chain([restarted]) {
        let (name, received) = reader.terminate();
        let first_wrong = received.iter().zip(1..).find(|(received, expected)| **received != *expected);
        assert_eq!((first_wrong, received.len() as u64), (None, count), "reader {name}");
    }
    println!("{count} versions for three readers, one restarted {RESTARTS} times: {elapsed:.1?}");
}

fn start_producer(home: &Home, count: u64) -> (Serving, PipeWriter) {
    let mut command = home.isolated(Command::new(env!("CARGO_BIN_EXE_publish-versions")));
    command.arg(count.to_string()).arg(home.path("keys"));
    let (stdin, go) = std::io::pipe().unwrap();
    (Serving::wait_for_report(Process::start_with(command, stdin)), go)
}

/// A reader across its successive processes.
struct Reader {
    name: &'static str,
    process: Process,
    /// The versions that its earlier processes reported.
    versions: Vec<u64>,
}

impl Reader {
    fn start(home: &Home, producer: &Serving, name: &'static str) -> Self {
        Self { name, process: start_process(home, producer, name, 1), versions: vec![] }
    }

    /// Waits until the reader reports this version.
    fn wait_for(&mut self, version: u64) {
        self.process.wait_for_stdout(&format!(r#""version":{version},"#));
    }

    /// Ends the reader's process with `signal`, and starts another that continues after its last reported version.
    fn restart(self, home: &Home, producer: &Serving, signal: Signal) -> Self {
        let Self { name, process, mut versions } = self;
        versions.extend(reported_versions(&process.signal_and_wait(signal)));
        let next = versions.last().map_or(1, |last| last + 1);
        Self { name, process: start_process(home, producer, name, next), versions }
    }

    /// Ends the reader; returns all versions that it reported.
    fn terminate(self) -> (&'static str, Vec<u64>) {
        let Self { name, process, mut versions } = self;
        versions.extend(reported_versions(&process.signal_and_wait(Signal::TERM).expect_code(143)));
        (name, versions)
    }
}

fn start_process(home: &Home, producer: &Serving, name: &str, next: u64) -> Process {
    let from = format!("--from={}:{next}", producer.topic("counter")["epoch"].as_str().unwrap());
    let reader = format!("--reader={name}");
    let ticket = producer.ticket("counter");
    home.start(&["subscribe", ticket, "--mode=every", "--json", &reader, &from])
}

fn reported_versions(ended: &Ended) -> Vec<u64> {
    ended.events().iter().map(|event| event["version"].as_u64().unwrap()).collect()
}
