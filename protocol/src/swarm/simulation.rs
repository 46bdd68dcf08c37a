//! Whole swarms without sockets: the real [`Swarm`](super::Swarm) and [`Choice`](super::Choice)s of up to 1,000
//! members, over links with rates and delays, with members that leave, are slow, or lie.
//!
//! Simulated are the messages of the control streams with their delays and limits of rate (`Held`, `Sources`, credit,
//! requests), links that transfers share, and lost connections. Not simulated are handshakes, losses, processors, and
//! encodings that only some members can decode.

mod links;
mod world;

use crate::subscriber::fixtures;
use world::{Kind, Outcome, Scenario, Setup, World};

/// 256 MiB in chunks of 1 MiB.
const CHUNKS: u32 = 256;

/// The time of a chunk of 1 MiB at 200 Mbit/s, in microseconds.
const CHUNK_US: u64 = 41_943;

const MEMBER: Setup = Setup { kind: Kind::Honest, chunk_us: CHUNK_US, joins_at: 0, leaves_at: None };

/// So many members that join at once, with links of 200 Mbit/s in each direction and a round trip of 1 ms.
fn scenario(members: usize) -> Scenario {
    Scenario {
        chunks: CHUNKS,
        chunk_us: CHUNK_US,
        delay_us: 500,
        window: 16,
        members: vec![MEMBER; members],
        seed: 42,
        is_unfair: false,
    }
}

/// The same with a fifth of the members leaving, one after the other.
fn leaving(members: usize) -> Scenario {
    let mut scenario = scenario(members);
    let step = 5 * u64::from(CHUNKS) / members as u64;
    for (which, member) in scenario.members.iter_mut().skip(3).step_by(5).enumerate() {
        member.leaves_at = Some((10 + which as u64 * step) * CHUNK_US);
    }
    scenario
}

/// The same with every tenth member of this kind.
fn with_tenth(members: usize, kind: Kind) -> Scenario {
    let mut scenario = scenario(members);
    scenario
        .members
        .iter_mut()
        .skip(3)
        .step_by(10)
        .for_each(|member| member.kind = kind);
    scenario
}

fn run(scenario: &Scenario) -> Outcome {
    World::run(scenario, fixtures::now())
}

/// The time until the last member is whole, in times of one chunk; of members that tell the truth, without `except`.
fn last(scenario: &Scenario, outcome: &Outcome, except: Option<usize>) -> f64 {
    let members = scenario.members.iter().zip(&outcome.took_us).enumerate();
    let counted =
        members.filter(|(which, (member, _))| member.kind == Kind::Honest && Some(*which) != except);
    let last = counted.filter_map(|(_, (_, took))| *took).max();
    last.unwrap_or(0) as f64 / scenario.chunk_us as f64
}

/// The time until the last of some members is whole.
fn last_of(scenario: &Scenario) -> f64 {
    last(scenario, &run(scenario), None)
}

/// S/B + ⌈log₂N⌉ × c/B, in times of one chunk: what doubling in each of them would take.
fn ideal(scenario: &Scenario) -> f64 {
    f64::from(scenario.chunks + scenario.members.len().next_power_of_two().ilog2())
}

/// Half of the chunks, of twice the size: half of the work, and harder, because the chunks are less for the members.
fn coarse(mut scenario: Scenario) -> Scenario {
    (scenario.chunks, scenario.chunk_us) = (scenario.chunks / 2, 2 * scenario.chunk_us);
    scenario.members.iter_mut().for_each(|member| member.chunk_us *= 2);
    scenario
}

/// Checks that the last member is whole after so many times the ideal.
fn check_ideal(scenario: &Scenario, times: f64) {
    let (took, ideal) = (last_of(scenario), ideal(scenario));
    assert!(took <= times * ideal, "{took} instead of {ideal} chunks");
}

#[test]
fn eight_at_once_take_little_longer_than_one_and_cost_the_origin_one() {
    let one = last_of(&scenario(1));
    let eight = scenario(8);
    let outcome = run(&eight);
    let took = last(&eight, &outcome, None);
    assert!(took <= 1.3 * one, "{took} chunks, one takes {one}");
    assert!(f64::from(outcome.egress) <= 1.15 * f64::from(CHUNKS), "{outcome:?}");
}

#[test]
fn a_late_member_takes_little_from_the_origin() {
    for joins_at in [64, 128, 250, 400] {
        let mut nine = scenario(9);
        nine.members[8].joins_at = joins_at * CHUNK_US;
        let outcome = run(&nine);
        assert!(f64::from(outcome.by_origin[8]) <= 0.2 * f64::from(CHUNKS), "{joins_at}: {outcome:?}");
        assert!(last(&nine, &outcome, None) <= 1.3 * f64::from(CHUNKS), "{joins_at}: {outcome:?}");
    }
}

#[test]
fn a_hundred_members_are_near_the_ideal_even_if_a_fifth_leaves() {
    check_ideal(&scenario(100), 1.5);
    check_ideal(&leaving(100), 2.5);
}

#[test]
fn a_thousand_members_are_near_the_ideal() {
    check_ideal(&coarse(scenario(1_000)), 1.5);
}

#[test]
fn a_thousand_members_of_which_a_fifth_leaves_are_near_the_ideal() {
    check_ideal(&coarse(leaving(1_000)), 2.5);
}

#[test]
fn a_member_at_a_tenth_delays_no_other() {
    for members in [8, 100] {
        let (equal, mut slow) = (scenario(members), scenario(members));
        slow.members[3].chunk_us *= 10;
        let (usual, took) = (last(&equal, &run(&equal), Some(3)), last(&slow, &run(&slow), Some(3)));
        assert!(took <= 1.1 * usual, "{took} instead of {usual} chunks");
    }
}

/// In the mean of some seeds: single ones differ by 3 %, with liars and without.
#[test]
fn ten_liars_of_a_hundred_cost_little() {
    let mean = |scenario: Scenario| {
        let seeds = 1..=4;
        let count = seeds.clone().count() as f64;
        seeds.map(|seed| last_of(&Scenario { seed, ..scenario.clone() })).sum::<f64>() / count
    };
    let usual = mean(scenario(100));
    for kind in [Kind::Liar, Kind::Silent] {
        let took = mean(with_tenth(100, kind));
        assert!(took <= 1.03 * usual, "{kind:?}: {took} instead of {usual} chunks");
    }
}

/// Round trips of 100 ms, and congestion that favours some transfers as that of TCP does: the origin's link is never idle,
/// and what is slow by chance is not pushed twice.
#[test]
fn far_members_with_unequal_transfers_take_little_longer_than_one() {
    for members in [2, 4, 8] {
        let far = Scenario { delay_us: 50_000, is_unfair: true, ..scenario(members) };
        let outcome = run(&far);
        assert!(last(&far, &outcome, None) <= 1.15 * f64::from(CHUNKS), "{members}: {outcome:?}");
        assert!(f64::from(outcome.egress) <= 1.02 * f64::from(CHUNKS), "{members}: {outcome:?}");
    }
}

/// Slow links: what is usual is measured, so that nothing is pushed twice.
#[test]
fn at_10_mbit_nothing_is_pushed_twice() {
    let mut eight = scenario(8);
    eight.chunk_us *= 20;
    eight.members.iter_mut().for_each(|member| member.chunk_us *= 20);
    let outcome = run(&eight);
    assert!(last(&eight, &outcome, None) <= 1.3 * f64::from(CHUNKS), "{outcome:?}");
    assert!(f64::from(outcome.egress) <= 1.15 * f64::from(CHUNKS), "{outcome:?}");
}

/// If nobody serves but liars, everything comes from the origin.
#[test]
fn liars_alone_do_not_stop_a_member() {
    for kind in [Kind::Liar, Kind::Silent] {
        let mut two = scenario(4);
        two.chunks = 16;
        two.members[1..].iter_mut().for_each(|member| member.kind = kind);
        assert!(run(&two).took_us[0].is_some());
    }
}

/// Prints the table of docs/performance.md.
#[test]
#[ignore = "a measurement: cargo test --release -- --ignored --nocapture table_of_swarms"]
fn table_of_swarms() {
    println!(
        "| members | 200 Mbit/s: seconds to the last | times one | origin sends | 1 Gbit/s | a fifth leaves |"
    );
    println!("|---|---|---|---|---|---|");
    for members in [1, 2, 4, 8, 16, 32, 100, 316, 1_000] {
        let (slow, mut fast) = (scenario(members), scenario(members));
        (fast.chunk_us, fast.delay_us) = (CHUNK_US / 5, 500);
        fast.members.iter_mut().for_each(|member| member.chunk_us /= 5);
        let outcome = run(&slow);
        let seconds = |chunks: f64, chunk_us: u64| chunks * chunk_us as f64 / 1e6;
        let took = last(&slow, &outcome, None);
        let fast_s = seconds(last_of(&fast), fast.chunk_us);
        let left = if members >= 8 {
            format!("{:.1} s", seconds(last_of(&leaving(members)), CHUNK_US))
        } else {
            "".into()
        };
        println!(
            "| {members} | {:.1} s | {:.2} | {:.2} × the size | {fast_s:.1} s | {left} |",
            seconds(took, CHUNK_US),
            took / f64::from(CHUNKS),
            f64::from(outcome.egress) / f64::from(CHUNKS),
        );
    }
    let usual = last_of(&scenario(100));
    for kind in [Kind::Liar, Kind::Silent] {
        println!(
            "a tenth of 100 {kind:?}: {:+.1} %",
            100.0 * (last_of(&with_tenth(100, kind)) / usual - 1.0)
        );
    }
    for members in [8, 100] {
        let mut slow = scenario(members);
        slow.members[3].chunk_us *= 10;
        let took = last(&slow, &run(&slow), Some(3));
        println!("one of {members} at a tenth: {:+.1} %", 100.0 * (took / last_of(&scenario(members)) - 1.0));
    }
}
