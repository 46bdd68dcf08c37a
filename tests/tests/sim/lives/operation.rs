//! The operations of a life: a list that is derived from a seed, and reduced after a failure.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The number of clients. The last one authenticates with a key, the others with tickets.
pub(crate) const CLIENTS: u8 = 3;

/// The number of topics.
pub(crate) const TOPICS: usize = 2;

/// The settings of a life.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    /// Whether publishers wait for slow readers without limit; otherwise they evict them.
    pub(crate) blocks: bool,
    /// Whether versions are read when they are sent, so that reads can fail; otherwise they are staged.
    pub(crate) borrows: bool,
    pub(crate) keep_versions: u32,
    pub(crate) linger_s: u64,
    pub(crate) publish_timeout_ms: u64,
    pub(crate) delay_ms: u64,
    pub(crate) jitter_ms: u64,
    pub(crate) loss: f64,
}

/// How a client subscribes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SubscriptionKind {
    Latest {
        preempt: bool,
    },
    Every {
        window: u32,
    },
    /// In mode `every` under a reader name, so that the server keeps its place.
    Named {
        window: u32,
    },
    /// In mode `every` after the version that the client received last.
    Continue {
        window: u32,
    },
}

/// The terms of a ticket. A client keeps its ticket while the ticket is valid and has the terms of the operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TicketTerms {
    /// Whether the ticket is for the first topic only.
    pub(crate) is_narrow: bool,
    pub(crate) expires_s: Option<u64>,
}

/// The state with which a server starts: the epoch and the newest version of each topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StartState {
    /// None: topics begin new epochs.
    None,
    /// That of the last server. The newest versions are published again under their numbers.
    Last,
    /// The one that was backed up last, so that numbers are used again for other content.
    Restored,
}

/// An operation. An operation that is impossible at its time has no effect, so every part of a list is a life, too.
#[derive(Debug, Clone)]
pub(crate) enum Operation {
    Wait {
        ms: u64,
    },
    Publish {
        topic: usize,
        versions: u64,
        bytes: u64,
    },
    /// The publisher withdraws the topic; the next publish opens it in a new epoch.
    Withdraw {
        topic: usize,
    },
    /// The server is stopped, with or without notifying its clients.
    Stop {
        silently: bool,
    },
    Start {
        state: StartState,
    },
    /// The server's state is backed up.
    BackUp,
    /// Reads of versions fail, or succeed again.
    FailReads {
        failing: bool,
    },
    /// A client closes its earlier connection, connects, and subscribes to all topics.
    Join {
        client: u8,
        tcp: bool,
        lanes: u8,
        kind: SubscriptionKind,
        pause_ms: u64,
        terms: TicketTerms,
    },
    /// A client connects again with its ticket, which may have expired or been revoked.
    JoinAgain {
        client: u8,
    },
    Leave {
        client: u8,
    },
    List {
        client: u8,
    },
    Cut {
        client: u8,
    },
    CutLane {
        client: u8,
        lane: u8,
    },
    ResetStreams {
        client: u8,
    },
    Mend {
        client: u8,
    },
    Revoke {
        client: u8,
    },
    /// The access list allows the client with the key the topics whose bits are set.
    Allow {
        topics: u8,
    },
}

/// The settings and operations that are derived from `seed`.
pub(crate) fn life(seed: u64) -> (Setup, Vec<Operation>) {
    let mut rng = ChaCha8Rng::seed_from_u64(!seed);
    let blocks = rng.random_bool(0.5);
    let setup = Setup {
        blocks,
        borrows: rng.random_bool(0.5),
        keep_versions: rng.random_range(1..=6),
        linger_s: if blocks { 20 } else { rng.random_range(0..20) },
        publish_timeout_ms: rng.random_range(100..8_000),
        delay_ms: rng.random_range(1..30),
        jitter_ms: rng.random_range(0..10),
        loss: [0.0, 0.0, 0.01, 0.03][rng.random_range(0..4)],
    };
    let mut operations = vec![Operation::Start { state: StartState::None }];
    for client in 1..=CLIENTS {
        operations.push(join(&mut rng, client));
    }
    for _ in 0..rng.random_range(10..45) {
        operations.push(operation(&mut rng));
        if rng.random_bool(0.07) {
            operations.extend(outage(&mut rng));
        }
        if rng.random_bool(0.04) {
            operations.extend(restoration(&mut rng));
        }
    }
    (setup, operations)
}

fn operation(rng: &mut ChaCha8Rng) -> Operation {
    let (client, topic) = (rng.random_range(1..=CLIENTS), rng.random_range(0..TOPICS));
    match rng.random_range(0..100) {
        0..35 => Operation::Publish { topic, versions: rng.random_range(1..5), bytes: bytes(rng) },
        35..48 => Operation::Wait { ms: wait_ms(rng) },
        48..56 => join(rng, client),
        56..60 => Operation::JoinAgain { client },
        60..64 => Operation::Leave { client },
        64..67 => Operation::List { client },
        67..72 => Operation::Cut { client },
        72..76 => Operation::CutLane { client, lane: rng.random_range(0..3) },
        76..78 => Operation::ResetStreams { client },
        78..85 => Operation::Mend { client },
        85..88 => Operation::Revoke { client },
        88..91 => Operation::Allow { topics: rng.random_range(0..1 << TOPICS) },
        91..93 => Operation::Withdraw { topic },
        93..95 => Operation::Stop { silently: rng.random_bool(0.5) },
        95..97 => Operation::FailReads { failing: rng.random_bool(0.7) },
        97 => Operation::BackUp,
        _ => start(rng),
    }
}

fn start(rng: &mut ChaCha8Rng) -> Operation {
    let states = [StartState::None, StartState::Last, StartState::Last, StartState::Restored];
    Operation::Start { state: states[rng.random_range(0..4)] }
}

/// The operations after which a server continues from a backup, and clients may have newer versions.
fn restoration(rng: &mut ChaCha8Rng) -> [Operation; 6] {
    let topic = rng.random_range(0..TOPICS);
    let publish = |rng: &mut ChaCha8Rng| Operation::Publish {
        topic,
        versions: rng.random_range(1..5),
        bytes: bytes(rng),
    };
    [
        Operation::BackUp,
        publish(rng),
        Operation::Wait { ms: wait_ms(rng) },
        Operation::Stop { silently: rng.random_bool(0.5) },
        Operation::Start { state: StartState::Restored },
        publish(rng),
    ]
}

/// The operations that cut a path during a transfer, for longer than the idle timeout or for less.
fn outage(rng: &mut ChaCha8Rng) -> [Operation; 5] {
    let (client, topic) = (rng.random_range(1..=CLIENTS), rng.random_range(0..TOPICS));
    [
        Operation::Publish { topic, versions: 1, bytes: rng.random_range(300_000..1_500_000) },
        Operation::Wait { ms: rng.random_range(10..500) },
        Operation::Cut { client },
        Operation::Wait { ms: rng.random_range(1_000..16_000) },
        Operation::Mend { client },
    ]
}

fn join(rng: &mut ChaCha8Rng, client: u8) -> Operation {
    let window = rng.random_range(1..5);
    let kind = match rng.random_range(0..5) {
        0 => SubscriptionKind::Latest { preempt: rng.random_bool(0.5) },
        1 => SubscriptionKind::Every { window },
        2 => SubscriptionKind::Continue { window },
        _ => SubscriptionKind::Named { window },
    };
    let expires_s = rng.random_bool(0.15).then(|| rng.random_range(1..40));
    Operation::Join {
        client,
        tcp: rng.random_bool(0.4),
        lanes: [1, 1, 2, 3][rng.random_range(0..4)],
        kind,
        pause_ms: [0, 0, 300, 6_000][rng.random_range(0..4)],
        terms: TicketTerms { is_narrow: rng.random_bool(0.1), expires_s },
    }
}

fn bytes(rng: &mut ChaCha8Rng) -> u64 {
    match rng.random_range(0..4) {
        0 => rng.random_range(0..2_000),
        1 | 2 => rng.random_range(2_000..80_000),
        _ => rng.random_range(80_000..900_000),
    }
}

/// A waiting time: mostly short, sometimes longer than the idle timeout.
fn wait_ms(rng: &mut ChaCha8Rng) -> u64 {
    match rng.random_range(0..8) {
        0..4 => rng.random_range(0..200),
        4..7 => rng.random_range(200..4_000),
        _ => rng.random_range(10_000..30_000),
    }
}

/// Removes operations, in ever smaller groups, as long as the remaining ones still fail.
pub(crate) fn shrink<T: Clone>(mut operations: Vec<T>, mut fails: impl FnMut(&[T]) -> bool) -> Vec<T> {
    let mut size = operations.len() / 2;
    while size > 0 {
        let mut start = 0;
        while start < operations.len() {
            let mut shorter = operations.clone();
            shorter.drain(start..(start + size).min(operations.len()));
            match fails(&shorter) {
                true => operations = shorter,
                false => start += size,
            }
        }
        size /= 2;
    }
    operations
}

#[test]
fn the_necessary_operations_are_found() {
    let fails = |operations: &[u32]| operations.contains(&3) && operations.contains(&17);
    assert_eq!(shrink((0..30).collect(), fails), [3, 17]);
}

#[test]
fn equal_seeds_make_equal_lives() {
    let text = |seed| format!("{:?}", life(seed));
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
}
