//! What operations cost, as counts that no machine's speed or load changes: allocations, sent datagrams and bytes, and
//! how often a thread that has nothing to do wakes up. Both ends run on one thread, over a simulated network.
//!
//! `counts.tsv` has the counts that are known. A count that differs from it by more than 2 % fails the test: run it with
//! `TENSOR_RELAY_TEST_COUNTS=write`, which writes the file anew, and say in the commit why the cost has changed.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use std::{
    alloc::System,
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    sync::{Arc, Mutex},
    time::Duration,
};
use tensor_relay_client::{Client, Config, Connector};
use tensor_relay_protocol::{Epoch, Limits};
use tensor_relay_server::{Access, Listener, Server};
use tensor_relay_tests::{
    pair::{self, Sim, client_config, publish, retaining, server_config, simulate, topic},
    tensors,
};
use tensor_relay_transport::Transport;
use tokio::runtime::Handle;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Held by each test: the allocator counts for all threads.
static ALONE: Mutex<()> = Mutex::new(());

/// The file of known counts.
const KNOWN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/counts/counts.tsv");

/// The largest accepted difference of a count: that of the addresses and hash seeds of one process and another.
const DIFFERENCE_MAX: f64 = 0.02;

const NAMES: [&str; 5] = ["allocations", "allocated_bytes", "datagrams", "sent_bytes", "wakeups"];

/// The counts of one operation, in the order of [`NAMES`].
type Counts = [f64; 5];

/// A server and a client of one transport.
struct Pair {
    sim: Sim,
    server: Server,
    client: Client,
}

impl Pair {
    async fn new(sim: Sim, transport: Transport) -> Self {
        let (host, address) = (Arc::new(sim.server_host()), sim.server_address());
        let listener = Listener::bind_on(host, transport, address, &sim.identity(), sim.tuning.clone());
        let config = tensor_relay_server::Config { chunk_bytes: 4 << 20, ..server_config() };
        let server = Server::start(listener.unwrap(), Access::new(pair::rules()), config);
        let connector = Connector::over(Arc::new(sim.client_host(1)), sim.tuning.clone());
        let limits = Limits::default();
        let config = Config { credit_chunks: 8, limits, transport, device: None, ..client_config() };
        let connector = connector.with_transport(transport);
        let client = Client::connect_with(&connector, &sim.ticket(), config).await.unwrap();
        Self { sim, server, client }
    }

    /// Counts an operation that is repeated `times` times: the mean of one.
    async fn count(&self, times: u32, mut operation: impl AsyncFnMut()) -> Counts {
        operation().await; // The first one fills caches.
        let wakeups = || Handle::current().metrics().worker_park_count(0);
        let (sent_before, wakeups_before) = (self.sim.net.sent(), wakeups());
        let region = Region::new(ALLOCATOR);
        for _ in 0..times {
            operation().await;
        }
        let (allocated, sent) = (region.change(), self.sim.net.sent());
        let sums = [
            (allocated.allocations + allocated.reallocations) as u64,
            allocated.bytes_allocated as u64,
            sent.datagrams - sent_before.datagrams,
            sent.bytes - sent_before.bytes,
            wakeups() - wakeups_before,
        ];
        sums.map(|sum| sum as f64 / f64::from(times))
    }

    /// A version from `publish` to the snapshot. It waits for its predecessor's memory.
    async fn version(&self, times: u32, bytes: u64) -> Counts {
        let mut publisher = self.server.publisher_with(topic("t"), Some(Epoch(1)), retaining(1)).unwrap();
        let mut subscription = self.client.subscribe(&topic("t")).await.unwrap();
        let mut version = 0;
        let counts = self.count(times, async || {
            version += 1;
            publish(&self.server, &mut publisher, version, bytes).await;
            let snapshot = subscription.next().await.unwrap();
            assert_eq!(snapshot.id().version.0, version);
            tokio::time::sleep(Duration::from_millis(100)).await; // Acknowledgements are delayed.
        });
        counts.await
    }

    /// A publication that nobody receives.
    async fn publication(&self, times: u32) -> Counts {
        let mut publisher = self.server.publisher_with(topic("p"), Some(Epoch(1)), retaining(1)).unwrap();
        let mut version = 0;
        let counts = self.count(times, async || {
            version += 1;
            publish(&self.server, &mut publisher, version, 4 << 10).await;
        });
        counts.await
    }

    /// A list of a thousand topics.
    async fn list(&self, times: u32) -> Counts {
        let mut publishers = vec![];
        for number in 0..1_000 {
            let topic = topic(&format!("topic-{number}"));
            let mut publisher = self.server.publisher_with(topic, Some(Epoch(1)), retaining(1)).unwrap();
            let staged = tensors::stage(&self.server, vec![tensors::noise("n", 4)], 1);
            publisher.publish(staged, vec![]).await.unwrap();
            publishers.push(publisher);
        }
        let counts = self.count(times, async || {
            assert_eq!(self.client.list().await.unwrap().len(), publishers.len());
            tokio::time::sleep(Duration::from_millis(100)).await;
        });
        counts.await
    }
}

/// The counts of each operation, by its name.
fn measure() -> BTreeMap<String, Counts> {
    let mut counts = BTreeMap::new();
    for (name, transport) in [("QUIC", Transport::Quic), ("TCP", Transport::Tcp)] {
        let mut insert = |operation: &str, found| counts.insert(format!("{operation} over {name}"), found);
        let pair = async |sim| Pair::new(sim, transport).await;
        insert("a version of 4 KiB", simulate(1, async |sim| pair(sim).await.version(200, 4 << 10).await));
        insert("a version of 64 MiB", simulate(1, async |sim| pair(sim).await.version(2, 64 << 20).await));
        insert("a list of 1,000 topics", simulate(1, async |sim| pair(sim).await.list(10).await));
    }
    let publication = async |sim| Pair::new(sim, Transport::Tcp).await.publication(200).await;
    counts.insert("a publication of 4 KiB".into(), simulate(1, publication));
    counts
}

/// The counts as a table, whose first line names the columns.
fn table(counts: &BTreeMap<String, Counts>) -> String {
    let mut text = format!("operation\t{}\n", NAMES.join("\t"));
    for (operation, counts) in counts {
        let counts = counts.map(|count| format!("{count:.1}"));
        writeln!(text, "{operation}\t{}", counts.join("\t")).unwrap();
    }
    text
}

fn parse(table: &str) -> BTreeMap<String, Counts> {
    let rows = table.lines().skip(1).map(|line| {
        let mut cells = line.split('\t');
        let operation = cells.next().unwrap().to_owned();
        let counts: Vec<f64> = cells.map(|cell| cell.parse().unwrap()).collect();
        (operation, counts.try_into().unwrap())
    });
    rows.collect()
}

/// The counts that differ, a line for each.
fn differences(known: &BTreeMap<String, Counts>, found: &BTreeMap<String, Counts>) -> Vec<String> {
    let mut differing = vec![];
    for (operation, found) in found {
        let known = known.get(operation).copied().unwrap_or_default();
        for ((name, known), found) in NAMES.iter().zip(known).zip(*found) {
            // Less than one in two operations is noise.
            if (found - known).abs() > (known * DIFFERENCE_MAX).max(0.5) {
                differing.push(format!("{operation}: {name} {found:.1} instead of {known:.1}"));
            }
        }
    }
    differing
}

#[test]
fn operations_cost_what_is_known() {
    let _alone = ALONE.lock();
    let found = measure();
    if std::env::var("TENSOR_RELAY_TEST_COUNTS").is_ok_and(|value| value == "write") {
        fs::write(KNOWN, table(&found)).unwrap();
    }
    let known = parse(&fs::read_to_string(KNOWN).unwrap());
    let differing = differences(&known, &found);
    let advice =
        "if that is intended, run the test with TENSOR_RELAY_TEST_COUNTS=write and say why in the commit";
    assert!(differing.is_empty(), "{}\n{advice}\n{}", differing.join("\n"), table(&found));
    assert_eq!(known.len(), found.len(), "{KNOWN} has operations that are not measured any more");
}

#[test]
fn one_more_of_each_is_found() {
    let _alone = ALONE.lock();
    let known = BTreeMap::from([("x".to_owned(), [40.0, 10_000.0, 3.0, 5_000.0, 6.0])]);
    let same = BTreeMap::from([("x".to_owned(), [40.4, 10_190.0, 3.0, 5_090.0, 6.4])]);
    assert_eq!(differences(&known, &same), Vec::<String>::new());
    let more = BTreeMap::from([("x".to_owned(), [41.0, 14_096.0, 4.0, 5_101.0, 7.0])]);
    assert_eq!(differences(&known, &more).len(), NAMES.len());
    assert_eq!(differences(&BTreeMap::new(), &known).len(), NAMES.len(), "a new operation");
}
