use super::*;
use crate::rate::Period;
use LaneKind::{Quic, Tcp};
use proptest::prelude::*;

/// The interval between samples.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

fn sample(period: Option<u64>, arrived_bytes: u64) -> Sample {
    let period = period.map(|index| Period { index, bytes: 0 });
    Sample { period, lanes: 1, has_settled: true, arrived_bytes, ..Sample::default() }
}

/// The decisions of a session on a simulated path.
#[derive(Debug)]
struct Run {
    /// The transports in turn, each with the second at which the session changed to it.
    changes: Vec<(u64, LaneKind)>,
    bytes: u64,
}

/// A session of `seconds` that receives one large version after another, over a path that carries `rate(transport,
/// second)` bytes per second; 0: the transport does not reach the server.
fn simulate(first: LaneKind, seconds: u64, rate: impl Fn(LaneKind, u64) -> u64) -> Run {
    let mut trial = TransportTrial::new(first);
    let mut run = Run { changes: vec![(0, first)], bytes: 0 };
    let (begun, mut kind) = (Instant::now(), first);
    trial.handle_connected(kind);
    for tick in 0..seconds * 10 {
        let second = tick / 10;
        let sample = sample(Some(tick / 200), run.bytes);
        match trial.handle_sample(begun + SAMPLE_INTERVAL * tick as u32, sample) {
            Some(wanted) if rate(wanted, second) > 0 => {
                kind = wanted;
                run.changes.push((second, kind));
                trial.handle_connected(kind);
            }
            Some(_) => trial.handle_unreachable(),
            None => {}
        }
        run.bytes += rate(kind, second) / 10;
    }
    run
}

#[test]
fn the_faster_transport_is_chosen() {
    let mbit = |mbit: u64| mbit * 1_000_000 / 8;
    // A path, the transport that the race chooses, the rates of QUIC and TCP, and the session's last transport.
    let paths = [
        ("MTU 1500, two cores, 0.1 ms", Tcp, (3_000, 9_000), Tcp),
        ("MTU 9000, 64 cores, 0.1 ms", Tcp, (9_000, 25_000), Tcp),
        ("1 Gbit/s, 1 ms", Tcp, (930, 935), Tcp),
        ("1 Gbit/s, 1 ms, 2 % loss", Tcp, (880, 60), Quic),
        ("10 Gbit/s, 10 ms, clean", Quic, (2_500, 4_800), Tcp),
        ("10 Gbit/s, 100 ms", Quic, (2_500, 500), Quic),
        ("100 Mbit/s, 40 ms", Quic, (93, 94), Quic),
        ("UDP is policed", Quic, (10, 900), Tcp),
        ("UDP is blocked", Tcp, (0, 900), Tcp),
        ("TCP is blocked", Quic, (900, 0), Quic),
        ("half a core", Quic, (700, 1_400), Tcp),
    ];
    for (path, first, (quic, tcp), last) in paths {
        let run = simulate(first, 300, |kind, _| mbit(if kind == Quic { quic } else { tcp }));
        assert_eq!(run.changes.last().unwrap().1, last, "{path}: {run:?}");
        let best = mbit(quic.max(tcp)) * 300;
        assert!(run.bytes as f64 >= best as f64 * 0.9, "{path}: {run:?}");
    }
}

#[test]
fn a_path_that_becomes_lossy_changes_the_transport() {
    let rate = |kind, second| match (kind, second) {
        (Tcp, 8..) => 5_000_000,
        (Tcp, _) => 1_000_000_000,
        _ => 400_000_000,
    };
    let changes = simulate(Tcp, 60, rate).changes;
    assert!(matches!(changes[..], [(0, Tcp), (8..=12, Quic)]), "{changes:?}");
}

/// The time with large versions until the next trial, at a rate that does not change.
fn due(trial: &TransportTrial) -> Duration {
    let (mut trial, begun) = (trial.clone(), Instant::now());
    let mut times = (0..).map(|tick| SAMPLE_INTERVAL * tick);
    let is_tried = |time: &Duration| {
        trial
            .handle_sample(begun + *time, sample(Some(1), time.as_millis() as u64))
            .is_some()
    };
    times.find(is_tried).unwrap()
}

/// A session whose trials have shown that TCP is faster, and that the race puts on QUIC after the server's restart.
#[test]
fn a_reconnection_over_the_other_transport_is_tried_soon() {
    let mut trial = TransportTrial::new(Tcp);
    trial.end_trial(false);
    trial.end_trial(false);
    trial.handle_connected(Tcp);
    trial.handle_reconnected(Tcp);
    assert!(due(&trial) > 10 * FIRST_QUIC_TRIAL_DELAY, "the same transport: nothing has changed");
    trial.handle_reconnected(Quic);
    trial.handle_connected(Quic);
    assert!((FIRST_TCP_TRIAL_DELAY..2 * FIRST_TCP_TRIAL_DELAY).contains(&due(&trial)), "{:?}", due(&trial));
    trial.trial.attempt(Tcp, 1.0);
    trial.handle_connected(Tcp);
    trial.handle_reconnected(Quic);
    assert!(
        due(&trial) > 2 * FIRST_TCP_TRIAL_DELAY,
        "the tried transport lost its connection: it is not tried again soon"
    );
}

#[test]
fn an_interrupted_path_does_not_change_the_transport() {
    // The interruption begins within one measurement and ends within another.
    let changes =
        simulate(Tcp, 18, |_, second| if (8..11).contains(&second) { 0 } else { 1_000_000_000 }).changes;
    assert_eq!(changes, [(0, Tcp)]);
}

#[test]
fn other_traffic_on_the_link_costs_one_trial() {
    let rate = |_, second| if second < 8 { 1_000_000_000 } else { 400_000_000 };
    let changes = simulate(Tcp, 60, rate).changes;
    assert!(matches!(changes[..], [(0, Tcp), (8..=12, Quic), (_, Tcp)]), "{changes:?}");
}

#[test]
fn nothing_is_measured_between_large_versions() {
    let mut trial = TransportTrial::new(Quic);
    let begun = Instant::now();
    for tick in 0..10_000u32 {
        let sample = sample(None, u64::from(tick));
        assert_eq!(trial.handle_sample(begun + SAMPLE_INTERVAL * tick, sample), None);
    }
}

#[test]
fn no_transport_is_tried_before_the_lanes_settle() {
    let mut trial = TransportTrial::new(Quic);
    let begun = Instant::now();
    for tick in 0..10_000u32 {
        let sample = Sample { has_settled: false, ..sample(Some(1), u64::from(tick)) };
        assert_eq!(trial.handle_sample(begun + SAMPLE_INTERVAL * tick, sample), None);
    }
}

proptest! {
    /// At any two rates: within ten minutes the trials cost less than a tenth of the bytes that the faster transport
    /// alone would have carried, and the session's last transport is nearly as fast as the faster one.
    #[test]
    fn trials_cost_little(is_long: bool, quic in 1_000_000u64..1_000_000_000, tcp in 1_000_000u64..1_000_000_000) {
        let rate = |kind, _| if kind == Quic { quic } else { tcp };
        let run = simulate(if is_long { Quic } else { Tcp }, 600, rate);
        let best = quic.max(tcp);
        prop_assert!(run.bytes as f64 >= (best * 600) as f64 * 0.9, "{run:?}");
        prop_assert!(rate(run.changes.last().unwrap().1, 0) as f64 * 1.1 >= best as f64, "{run:?}");
        prop_assert!(run.changes.len() <= 12, "{run:?}");
    }
}
