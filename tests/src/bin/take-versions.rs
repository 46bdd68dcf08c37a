//! Takes the versions of a topic, checks that none changes while it is held, and reports their cost:
//! `take-versions TICKET [once]`.
//!
//! It prints an object for each version: the times of `next`, of the first and the second pass over all bytes, and of a
//! pass over a copy in its own memory; the growth of its anonymous memory and page tables; the hash of the tensors; and
//! how the bytes came. It holds each version until the next has arrived, and then hashes it again: a version whose bytes
//! changed meanwhile ends the program with code 9. With `once`, it ends after the first version.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a taker that cannot continue has failed its test")]

use bytes::Bytes;
use serde_json::json;
use std::{
    fs,
    hint::black_box,
    process::ExitCode,
    time::{Duration, Instant},
};
use tensor_relay_client::{Client, Config, Request, Snapshot, Ticket};

/// The size of the buffer that bytes are read into.
const PIECE_BYTES: usize = 64 << 10;

/// The time for the server to come, or to come back.
const PATIENCE: Duration = Duration::from_secs(120);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let ticket: Ticket = arguments.next().unwrap().parse().unwrap();
    let is_once = arguments.next().is_some();
    let config = Config { reconnect_timeout: PATIENCE, topic_timeout: PATIENCE, ..Config::default() };
    let client = loop {
        match Client::connect(&ticket, config.clone()).await {
            Ok(client) => break client,
            Err(error) => eprintln!("{error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let mut held: Option<(Snapshot, blake3::Hash)> = None;
    let topic = ticket.topic().unwrap().clone();
    let began = Instant::now();
    let mut subscription = client.subscribe_to(Request::latest(topic)).await.unwrap();
    let (mut asked, mut before) = (began, Memory::now());
    loop {
        let snapshot = match subscription.next().await {
            Ok(snapshot) => snapshot,
            Err(error) => {
                println!("{}", json!({"ended": error.to_string()}));
                return ExitCode::SUCCESS;
            }
        };
        let next = asked.elapsed();
        let hash = report(&snapshot, next, &before);
        if let Some((earlier, known)) = held.replace((snapshot, hash))
            && hash_of(&earlier) != known
        {
            println!("{}", json!({"changed": earlier.id().version.0}));
            return ExitCode::from(9);
        }
        if is_once {
            return ExitCode::SUCCESS;
        }
        (before, asked) = (Memory::now(), Instant::now());
    }
}

/// Measures and prints what a version costs, given the memory `before` it came. Returns its hash.
fn report(snapshot: &Snapshot, next: Duration, before: &Memory) -> blake3::Hash {
    let tensors: Vec<Bytes> = snapshot.tensors().map(|(_, bytes)| bytes).collect();
    let first = read(&tensors);
    let after = Memory::now();
    let second = read(&tensors);
    let copies: Vec<Bytes> = tensors.iter().map(|bytes| bytes.to_vec().into()).collect();
    let own = read(&copies);
    drop(copies);
    let hash = hash_of(snapshot);
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    println!(
        "{}",
        json!({
            "version": snapshot.id().version.0,
            "bytes": snapshot.payload_bytes(),
            "sharing": format!("{:?}", snapshot.receipt().sharing),
            "hash": hash.to_hex().as_str(),
            "next_ms": ms(next), "received_ms": ms(snapshot.receipt().duration),
            "first_read_ms": ms(first), "second_read_ms": ms(second), "own_read_ms": ms(own),
            "anonymous_kib": after.anonymous_kib - before.anonymous_kib,
            "page_tables_kib": after.page_tables_kib - before.page_tables_kib,
        })
    );
    hash
}

/// Reads all bytes, into a buffer that the processor's cache holds, which is as fast in a debug build. Returns how long
/// that took.
fn read(tensors: &[Bytes]) -> Duration {
    let mut buffer = vec![0; PIECE_BYTES];
    let began = Instant::now();
    for piece in tensors.iter().flat_map(|bytes| bytes.chunks(PIECE_BYTES)) {
        black_box(&mut buffer)[..piece.len()].copy_from_slice(piece);
    }
    began.elapsed()
}

fn hash_of(snapshot: &Snapshot) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for (_, bytes) in snapshot.tensors() {
        hasher.update(&bytes);
    }
    hasher.finalize()
}

/// Memory of this process that nobody else shares.
struct Memory {
    anonymous_kib: i64,
    page_tables_kib: i64,
}

impl Memory {
    fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let kib = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().trim_end_matches(" kB").parse().unwrap()
        };
        Self { anonymous_kib: kib("RssAnon:"), page_tables_kib: kib("VmPTE:") }
    }
}
