//! Lives of servers, clients and readers, made from seeds: what each client sees in them is held against every promise.

mod judge;
mod operation;
mod stage;

use judge::History;
use operation::{Operation, Setup};
use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};
use tensor_relay_tests::pair::{seeds, simulate};

/// Goal: whatever servers, clients, the network and who decides about access do, no promise of [`judge::Promise`] is
/// broken.
/// Method: a life of random operations from each seed; a judge of its own that knows what clients saw and nothing else.
/// A life that fails is made shorter, operation by operation, and printed.
#[test]
fn no_promise_is_broken() {
    let (mut lives, mut occasions) = (0, BTreeMap::new());
    for seed in seeds(SEEDS) {
        let (setup, operations) = operation::life(seed);
        let history = match live(seed, setup, &operations) {
            Ok(history) => history,
            Err(first) => {
                let enough = operation::shrink(operations, |fewer| live(seed, setup, fewer).is_err());
                let last = live(seed, setup, &enough).err();
                panic!("seed {seed}: {first}\nwith these alone: {last:?}\n{setup:?}\n{enough:#?}");
            }
        };
        lives += 1;
        for (name, count) in judge::occasions(&history) {
            *occasions.entry(name).or_insert(0) += count;
        }
        if lives % 1_000 == 0 {
            println!("{lives} lives: {occasions:?}");
        }
    }
    let rare = occasions.iter().filter(|(_, count)| **count < lives / 50).collect::<Vec<_>>();
    assert!(rare.is_empty(), "what happens in fewer than one of fifty lives is not tested: {rare:?}");
}

/// As many lives as fit into 40 s of one processor.
const SEEDS: u64 = 400;

/// What was seen in a life, or what is wrong with it.
fn live(seed: u64, setup: Setup, operations: &[Operation]) -> Result<History, String> {
    let live = || simulate(seed, async |sim| stage::live(&sim, setup, operations).await);
    let history = catch_unwind(AssertUnwindSafe(live)).map_err(|_| "something panicked, as said above")?;
    let breaches = judge::judge(&history);
    if breaches.is_empty() { Ok(history) } else { Err(format!("{breaches:#?}")) }
}
