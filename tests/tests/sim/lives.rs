//! Lives: random sequences of operations on servers, clients and readers, made from seeds. The record of a life is
//! checked against every promise.

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
/// Method: a life of random operations from each seed; a separate checker that knows only the record: what was
/// published, granted, cut and stopped, and what clients saw. The operations of a life that fails are reduced to the
/// necessary ones, and printed.
#[test]
fn no_promise_is_broken() {
    let (mut lives, mut event_counts) = (0, BTreeMap::new());
    for seed in seeds(SEEDS) {
        let (setup, operations) = operation::life(seed);
        let history = match run_life(seed, setup, &operations) {
            Ok(history) => history,
            Err(error) => {
                let necessary = operation::shrink(operations, |fewer| run_life(seed, setup, fewer).is_err());
                let last_error = run_life(seed, setup, &necessary).err();
                panic!("seed {seed}: {error}\nwith these alone: {last_error:?}\n{setup:?}\n{necessary:#?}");
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
    assert!(rare.is_empty(), "fewer than one event in fifty lives, which tests too little: {rare:?}");
}

/// The number of lives, which take 40 s on one processor.
const SEEDS: u64 = 400;

/// Runs a life and returns its history. The error names the broken promises, or says that the life panicked.
fn run_life(seed: u64, setup: Setup, operations: &[Operation]) -> Result<History, String> {
    let run = || simulate(seed, async |sim| runner::run(&sim, setup, operations).await);
    let history = catch_unwind(AssertUnwindSafe(run)).map_err(|_| "it panicked, with the message above")?;
    let breaches = checker::check(&history);
    if breaches.is_empty() { Ok(history) } else { Err(format!("{breaches:#?}")) }
}
