//! Lives: random sequences of operations on servers, clients and readers, made from seeds. The events that each client
//! sees are checked against every promise.

mod checker;
mod operation;
mod runner;

use checker::History;
use operation::{Operation, Setup};
use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};
use tensor_relay_tests::pair::{seeds, simulate};

/// Goal: no operation of servers, clients, the network and access control breaks a promise of [`checker::Promise`].
/// Method: a life of random operations from each seed; a separate checker that knows only the events that clients saw. A
/// life that fails is shortened, operation by operation, and printed.
#[test]
fn no_promise_is_broken() {
    let (mut lives, mut event_counts) = (0, BTreeMap::new());
    for seed in seeds(SEEDS) {
        let (setup, operations) = operation::life(seed);
        let history = match live(seed, setup, &operations) {
            Ok(history) => history,
            Err(first) => {
                let necessary = operation::shrink(operations, |fewer| live(seed, setup, fewer).is_err());
                let last = live(seed, setup, &necessary).err();
                panic!("seed {seed}: {first}\nwith these alone: {last:?}\n{setup:?}\n{necessary:#?}");
            }
        };
        lives += 1;
        for (name, count) in checker::event_counts(&history) {
            *event_counts.entry(name).or_insert(0) += count;
        }
        if lives % 1_000 == 0 {
            println!("{lives} lives: {event_counts:?}");
        }
    }
    let rare = event_counts
        .iter()
        .filter(|(_, count)| **count < lives / 50)
        .collect::<Vec<_>>();
    assert!(
        rare.is_empty(),
        "these happen in fewer than one of fifty lives, so they are not tested: {rare:?}"
    );
}

/// The number of lives: 40 s on one processor.
const SEEDS: u64 = 400;

/// The history of a life; the error names its breaches.
fn live(seed: u64, setup: Setup, operations: &[Operation]) -> Result<History, String> {
    let live = || simulate(seed, async |sim| runner::run(&sim, setup, operations).await);
    let history = catch_unwind(AssertUnwindSafe(live)).map_err(|_| "it panicked, with the message above")?;
    let breaches = checker::check(&history);
    if breaches.is_empty() { Ok(history) } else { Err(format!("{breaches:#?}")) }
}
