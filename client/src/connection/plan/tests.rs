use super::*;
use crate::rate::Period;
use proptest::prelude::*;
use std::fmt::Write;

/// A model of both ends and of the path between them. Rates are in 10^9 bytes a second, and costs in processor seconds
/// for 10^9 bytes.
#[derive(Debug, Clone, Copy)]
struct World {
    /// The processors of the server and of the client, less those that other programs use; or those that both share.
    processors: [f64; 2],
    is_shared: bool,
    /// The processors that the client believes to have.
    believed: u32,
    /// The server's offer.
    offer: u32,
    /// The limits of one flow and of all.
    flow: f64,
    link: f64,
}

/// The processors that one lane keeps busy, at both ends together.
const LANE_PROCESSORS: f64 = 1.87;

/// The cost of one lane, at both ends together, and its growth with the number of lanes: caches and memory are shared.
const COST: f64 = 0.63;
const COST_GROWTH: f64 = 0.25;

/// The exponent with which processors get scarce: the larger, the later.
const SCARCITY: f64 = 4.0;

/// The processors that are used where `wanted` would be and there are `available`.
fn used(wanted: f64, available: f64) -> f64 {
    wanted * (1.0 + (wanted / available).powf(SCARCITY)).powf(-1.0 / SCARCITY)
}

impl World {
    /// One machine, or two like it, without other programs and limits.
    fn new(processors: u32, is_shared: bool) -> Self {
        Self {
            processors: [processors.into(); 2],
            is_shared,
            believed: processors,
            offer: (2 * processors).min(16),
            flow: f64::INFINITY,
            link: f64::INFINITY,
        }
    }

    fn cost(lanes: u32) -> f64 {
        COST * f64::from(lanes).powf(COST_GROWTH)
    }

    /// The rate of so many lanes.
    fn rate(&self, lanes: u32) -> f64 {
        let wanted = LANE_PROCESSORS * f64::from(lanes);
        let [server, client] = self.processors;
        let processors = match self.is_shared {
            true => used(wanted, client),
            false => 2.0 * used(wanted / 2.0, server.min(client)),
        };
        (processors / Self::cost(lanes))
            .min(self.flow * f64::from(lanes))
            .min(self.link)
    }

    fn best(&self) -> f64 {
        (1..=self.offer).map(|lanes| self.rate(lanes)).fold(0.0, f64::max)
    }

    fn bounds(&self) -> Bounds {
        let busy_max = (self.believed / 2).max(2);
        Bounds { processors: self.believed, max: self.offer, busy_max, known: None }
    }
}

/// What a client did in a world.
struct Run {
    plan: Plan,
    /// The numbers of lanes in turn, each with the milliseconds of transfer at which it was wanted.
    wanted: Vec<(u32, u32)>,
    /// The millisecond of transfer from which on nothing is tried for the first time.
    settled_ms: Option<u32>,
    bytes: f64,
    /// The bytes that arrived in each second.
    by_second: Vec<f64>,
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let first = &self.by_second[..self.by_second.len().min(8)];
        write!(f, "(ms, lanes) {:?}, settled {:?}, by second {first:.0?}", self.wanted, self.settled_ms)
    }
}

const SECOND_MS: u32 = 1_000;

/// The time for a lane to join.
const JOIN_MS: u32 = 5;

/// A client that receives versions of `version_bytes`, one after another, for `milliseconds`.
fn run(
    bounds: Bounds,
    milliseconds: u32,
    version_bytes: u64,
    joinable: u32,
    rate: impl Fn(u32) -> Rate,
) -> Run {
    let plan = Plan::new(bounds);
    let mut run = Run { plan, wanted: vec![(0, 1)], settled_ms: None, bytes: 0.0, by_second: vec![] };
    let (begun, mut lanes, mut version, mut left) = (Instant::now(), 1, 0, 0.0);
    let (mut processor_s, mut now_us, mut sampled_ms) = (0.0, 0, 0);
    for ms in 0..milliseconds {
        let sample = |run: &mut Run, now_us: u64, index: Option<u64>, processor_s: f64| {
            let period = index.map(|index| Period { index, bytes: version_bytes });
            let processor_time = Duration::from_secs_f64(processor_s);
            let arrived_bytes = run.bytes as u64;
            run.plan.handle_sample(
                begun + Duration::from_micros(now_us),
                Sample { period, lanes, arrived_bytes, processor_time, has_settled: false },
            );
            if run.wanted.last().unwrap().1 != run.plan.lanes() {
                run.wanted.push((ms, run.plan.lanes()));
            }
            if run.plan.is_settled() && run.settled_ms.is_none() {
                run.settled_ms = Some(ms);
            }
        };
        if left <= 0.0 {
            if version > 0 {
                sample(&mut run, now_us, Some(version), processor_s);
                sample(&mut run, now_us, None, processor_s);
                now_us += 50_000; // Between versions.
            }
            version += 1;
            left += version_bytes as f64;
            sample(&mut run, now_us, Some(version), processor_s);
            sampled_ms = ms;
        } else if ms == sampled_ms + 100 {
            sample(&mut run, now_us, Some(version), processor_s);
            sampled_ms = ms;
        }
        let target = run.plan.lanes().min(joinable);
        if target < lanes || run.wanted.last().unwrap().0 + JOIN_MS <= ms {
            lanes = target;
        }
        let Rate { bytes_per_s, processors } = rate(lanes);
        let bytes = bytes_per_s / f64::from(SECOND_MS);
        (run.bytes, left, processor_s) = (run.bytes + bytes, left - bytes, processor_s + processors / 1e3);
        now_us += 1_000;
        if ms % SECOND_MS == 0 {
            run.by_second.push(0.0);
        }
        *run.by_second.last_mut().unwrap() += bytes;
    }
    run
}

const GIB: u64 = 1 << 30;

impl World {
    fn run(&self, seconds: u32) -> Run {
        run(self.bounds(), seconds * SECOND_MS, GIB, 16, |lanes| {
            let rate = self.rate(lanes);
            Rate { bytes_per_s: rate * 1e9, processors: rate * Self::cost(lanes) / 2.0 }
        })
    }
}

fn assert_near(found: f64, measured: f64) {
    assert!((found / measured - 1.0).abs() <= 0.15, "{found:.2} where {measured:.2} was measured");
}

/// The world has the rates and the processor times that were measured on 16 cores (`bench compare`, 2026-11-26): of 1,
/// 2, 4 and 8 lanes; and of sixteen versions of 1 GiB with automatic lanes, which doubled after 1.5 s each.
#[test]
fn the_world_is_as_measured() {
    let world = World::new(16, true);
    let measured = [(1, 2.747, 0.731), (2, 4.432, 0.890), (4, 7.730, 0.982), (8, 12.554, 1.074)];
    for (lanes, gb_per_s, cpu_s_per_gib) in measured {
        assert_near(world.rate(lanes), gb_per_s);
        assert_near(World::cost(lanes) * 1.0737, cpu_s_per_gib);
    }
    let (mut second, mut rates) = (0.0_f64, vec![]);
    for _ in 0..16 {
        let (began, mut left) = (second, 1.0737);
        while left > 0.0 {
            left -= world.rate(1 << (second / 1.5) as u32) * 0.001;
            second += 0.001;
        }
        rates.push(1.0737 / (second - began));
    }
    assert_near(rates[0], 3.392);
    rates.sort_by(f64::total_cmp);
    assert_near(rates[7].midpoint(rates[8]), 4.498);
    assert_near(world.rate(8), 13.829);
}

/// The cases of the table in docs/decisions.md.
fn cases() -> Vec<(&'static str, World)> {
    let gbit = |gbit: f64| gbit / 8.0;
    let two = |processors| World::new(processors, false);
    let flows = |processors| World { flow: gbit(0.2), link: gbit(0.8), ..two(processors) };
    vec![
        ("2 cores", World::new(2, true)),
        ("4 cores", World::new(4, true)),
        ("16 cores", World::new(16, true)),
        ("64 cores", World::new(64, true)),
        ("16 cores, 12 of them busy", World { processors: [4.0; 2], ..World::new(16, true) }),
        ("client with a quota of 1.5", World { processors: [16.0, 1.5], believed: 1, ..two(16) }),
        ("2 cores each, flows of 0.2 Gbit/s, link 0.8", flows(2)),
        ("16 cores each, flows of 0.2 Gbit/s, link 0.8", flows(16)),
        ("16 cores each, flows of 5 Gbit/s, link 50", World { flow: gbit(5.0), link: gbit(50.0), ..two(16) }),
        ("16 cores each, link 1 Gbit/s", World { link: gbit(1.0), ..two(16) }),
        ("16 cores each, link 10 Gbit/s", World { link: gbit(10.0), ..two(16) }),
        ("16 cores each, link 100 Gbit/s", World { link: gbit(100.0), ..two(16) }),
    ]
}

/// In each world the settled number is nearly as fast as the best one, and what the trials cost is bounded. The table
/// in docs/decisions.md is what comes out.
#[test]
fn the_table_of_decisions_is_what_comes_out() {
    let mut table = String::from(
        "| both ends on | begins with | settles on | after s | GB/s | of the best |\n|---|---:|---:|---:|---:|---:|\n",
    );
    for (name, world) in cases() {
        let run = world.run(60);
        let (first, lanes) = (world.bounds().first(GIB), run.plan.lanes());
        let (rate, best) = (world.rate(lanes), world.best());
        let settled_s = f64::from(run.settled_ms.expect("it settles")) / 1e3;
        writeln!(table, "| {name} | {first} | {lanes} | {settled_s:.1} | {rate:.2} | {:.2} |", rate / best)
            .unwrap();
        assert!(rate >= 0.9 * best, "{name}: {run:?}");
        assert!(run.bytes / 1e9 >= 0.9 * 60.0 * rate, "{name}: trials cost too much: {run:?}");
        assert!(settled_s < 8.0, "{name}: {run:?}");
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/decisions.md");
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.contains(&table), "docs/decisions.md does not contain this table:\n{table}");
}

/// Where each flow is limited, all that help have joined within the first second, whatever the processors.
#[test]
fn limited_flows_get_more_lanes_within_a_second() {
    for (name, world) in cases().into_iter().filter(|(name, _)| name.contains("link 0.8")) {
        let run = world.run(10);
        let one = world.rate(1) * 1e9;
        assert!(run.by_second[1..].iter().all(|bytes| *bytes >= 3.2 * one), "{name}: {run:?}");
        let later: f64 = run.by_second[1..].iter().sum();
        assert!(later >= 9.0 * 3.5 * one, "{name}: {run:?}");
    }
}

/// On 8 cores and more, the first second is nearly as fast as with the best number of lanes.
#[test]
fn many_cores_are_used_from_the_first_version_on() {
    for processors in [8, 16, 64] {
        let world = World::new(processors, true);
        let run = world.run(1);
        assert!(run.by_second[0] >= 0.85e9 * world.best(), "{processors}: {run:?}");
    }
}

#[test]
fn the_first_number_follows_what_is_known() {
    let bounds = World::new(16, true).bounds();
    let first = |bounds: Bounds, mib: u64| bounds.first(mib << 20);
    assert_eq!([64, 128, 256, 1024].map(|mib| first(bounds, mib)), [2, 4, 8, 8], "a lane has its share");
    assert_eq!(first(Bounds { max: 3, ..bounds }, 1024), 3);
    assert_eq!(first(Bounds { max: 0, ..bounds }, 1024), 1);
    for (processors, expected) in [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (16, 8)] {
        assert_eq!(first(Bounds { processors, ..bounds }, 1024), expected);
    }
    let known = |lanes, lane_bytes_per_s| Bounds { known: Some(Known { lanes, lane_bytes_per_s }), ..bounds };
    assert_eq!(first(known(4, 2.5e7), 64), 4, "slow lanes are busy for long");
    assert_eq!(first(known(1, 2.5e9), 1024), 1, "more were of no use");
}

#[test]
fn a_plan_for_one_lane_is_settled_at_once() {
    let plan = Plan::new(Bounds { max: 1, ..World::new(16, true).bounds() });
    assert_eq!((plan.lanes(), plan.is_settled()), (1, true));
}

/// Lanes that cannot join, for example because the server has no memory for them, are given up.
#[test]
fn lanes_that_do_not_join_are_given_up() {
    let world = World::new(16, true);
    let run = run(world.bounds(), 60 * SECOND_MS, GIB, 3, |lanes| Rate {
        bytes_per_s: f64::from(lanes) * 1e9,
        processors: f64::from(lanes),
    });
    assert_eq!((run.plan.lanes(), run.plan.is_settled()), (3, true), "{run:?}");
}

proptest! {
    /// For any rates: the plan stays within its bounds, what it settles on is not clearly slower than any smaller or
    /// larger number that it tried last, and in the long run trials cost little.
    #[test]
    fn the_best_number_is_chosen(
        offer in 2u32..=16, processors in 1u32..=32, busy in 0.0f64..1.0,
        rates in prop::collection::vec(0.2f64..5.0, 17),
    ) {
        let world = World { offer, ..World::new(processors, true) };
        let rate = |lanes: u32| rates[lanes as usize] * 1e9;
        let run = run(world.bounds(), 120 * SECOND_MS, GIB, 16, |lanes| {
            Rate { bytes_per_s: rate(lanes), processors: busy * rate(lanes) / 1e9 }
        });
        prop_assert!(run.wanted.iter().all(|(_, lanes)| (1..=offer.max(1)).contains(lanes)), "{:?}", run);
        let settled = run.plan.trial.incumbent().map_or_else(|| run.plan.lanes(), |(lanes, _)| lanes);
        let first = rate(world.bounds().first(GIB));
        prop_assert!(rate(settled) * 1.3 >= first, "{:?}", run);
        prop_assert!(run.wanted.len() < 30, "{:?}", run);
        prop_assert!(run.settled_ms.is_some_and(|ms| ms < 20 * SECOND_MS), "{:?}", run);
    }

    /// Small versions are not sampled: none adds a lane, whatever arrives and joins.
    #[test]
    fn small_versions_add_no_lane(arrived in prop::collection::vec((0u64..1 << 40, 1u32..4), 1..200)) {
        let (mut plan, mut now) = (Plan::new(World::new(64, true).bounds()), Instant::now());
        for (arrived_bytes, lanes) in arrived {
            plan.handle_sample(now, Sample { lanes, arrived_bytes, ..Sample::default() });
            now += Duration::from_millis(100);
            prop_assert_eq!(plan.lanes(), 1);
        }
    }
}
