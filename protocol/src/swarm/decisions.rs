//! Measures single decisions with 2¹⁴ and 2²⁰ chunks, and 64 sources or members.

use super::{Choice, Joining, MemberId, Swarm};
use crate::{ChunkIndex, Pick, RangeSet, SubscriptionId, subscriber::fixtures};
use std::time::Duration;

const SOURCES: u32 = 64;
const DECISIONS: u32 = 10_000;

/// Prints the time of one operation.
fn measure(what: &str, count: u32, operate: impl FnOnce()) {
    let began = fixtures::now();
    operate();
    println!("{what}: {:.0} ns", began.elapsed().as_nanos() as f64 / f64::from(count));
}

#[test]
#[ignore = "a measurement, for a release build: cargo test --release -- --ignored --nocapture decisions"]
fn decisions() {
    for chunks in [1 << 14, 1 << 20] {
        println!("{chunks} chunks");
        decide(chunks);
    }
}

fn decide(chunks: u32) {
    let all = RangeSet::from_range(0..chunks);
    let mut choice = Choice::new(chunks, 1);
    measure("want, for each chunk", chunks, || choice.want(&all));
    (0..SOURCES).for_each(|source| choice.add_source(SubscriptionId(source)));
    measure("what a source holds, for each chunk", chunks * SOURCES, || {
        for source in 0..SOURCES {
            // Every source holds other runs of chunks.
            let held = (0..chunks / 64).filter(|run| (run * 7 + source * 13) % 5 < 3);
            let held = held.map(|run| run * 64..run * 64 + 64).collect();
            choice.handle_held(SubscriptionId(source), &held, &RangeSet::new());
        }
    });
    let mut now = fixtures::now();
    measure("an order and its delivery", DECISIONS, || {
        for decision in 0..DECISIONS {
            let source = SubscriptionId(decision % SOURCES);
            now += Duration::from_millis(10);
            if let Some(chunk) = choice.next(source, now) {
                choice.handle_delivered(source, chunk, now);
            }
        }
    });
    let mut swarm = Swarm::new(chunks, 1);
    for member in 0..u64::from(SOURCES) {
        let selected = all.clone();
        swarm.join(MemberId(member), Joining { selected, serves: true, ..Joining::default() }, now);
    }
    let mut wanted = vec![all; SOURCES as usize];
    let mut pushed = 0;
    measure("a push and its credit", DECISIONS, || {
        for decision in 0..DECISIONS {
            let member = decision % SOURCES;
            let wanted = &mut wanted[member as usize];
            now += Duration::from_millis(1);
            if let Pick::Chunk(ChunkIndex(chunk)) = swarm.pick(MemberId(member.into()), wanted, now) {
                wanted.remove(chunk);
                pushed += 1;
            }
            swarm.handle_credited(MemberId(member.into()), 1, now);
            swarm.take_woken();
        }
    });
    println!("{pushed} of {DECISIONS} pushed");
    let (part, none) = (RangeSet::from_range(0..chunks.min(1 << 14)), RangeSet::new());
    measure("a message about 16,384 chunks", 1, || swarm.handle_held(MemberId(0), &part, &none, now));
    measure("a commit", 1, || swarm.handle_committed(MemberId(1), now));
    measure("the chunks that are named of a holder", 1, || drop(swarm.held(MemberId(1), 16)));
    measure("a member that leaves", 1, || swarm.leave(MemberId(1), now));
    let joining = Joining { selected: RangeSet::from_range(0..chunks), serves: true, ..Joining::default() };
    measure("a member that joins", 1, || swarm.join(MemberId(1), joining, now));
    measure("its commit", 1, || swarm.handle_committed(MemberId(1), now));
    measure("its end", 1, || swarm.leave(MemberId(1), now));
}
