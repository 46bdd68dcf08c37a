use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

const CHUNK: u64 = 4 << 20;
const GB: f64 = 1e9;

/// A model of sender, receiver and link.
#[derive(Debug, Clone, Copy)]
struct Path {
    name: &'static str,
    /// The rate of the link in wire bytes per second.
    link: f64,
    /// The rate of sending and receiving by one core, in wire bytes per second.
    packets: f64,
    /// The rate of encoding and decoding by one core, in raw bytes per second, with light and with full effort.
    codecs: [f64; 2],
    /// The encoded share of a chunk with either effort.
    shares: [f64; 2],
    /// The cores of each host, or of one that sender and receiver share.
    cores: f64,
}

impl Path {
    /// The rate with that effort, in raw bytes per second, bound by the link or the cores.
    fn rate(&self, effort: Effort) -> f64 {
        let (share, encoding) = match effort {
            Effort::None => (1.0, 0.0),
            Effort::Light => (self.shares[0], 1.0 / self.codecs[0]),
            Effort::Full => (self.shares[1], 1.0 / self.codecs[1]),
        };
        let cpu_s = share / self.packets + encoding;
        (self.link / share).min(self.cores / cpu_s)
    }

    /// Whether both efforts encode a chunk in the same way.
    fn is_equivalent(&self, a: Effort, b: Effort) -> bool {
        let share = |effort| match effort {
            Effort::None => 1.0,
            Effort::Light => self.shares[0],
            Effort::Full => self.shares[1],
        };
        share(a) == share(b)
    }

    fn best(&self) -> f64 {
        Effort::ALL.iter().map(|effort| self.rate(*effort)).fold(0.0, f64::max)
    }
}

/// Converts Gbit/s to bytes per second.
fn gbit(gbit: f64) -> f64 {
    gbit * GB / 8.0
}

/// Simulates sending chunks over a path, in order and eight in flight, as many as a client grants by default. `noise` scales the time of each.
struct Run {
    trial: EffortTrial,
    now: Instant,
    in_flight: VecDeque<(Effort, u64)>,
    sent: u64,
    busy: Duration,
}

impl Run {
    fn new() -> Self {
        let (trial, now) = (EffortTrial::new(Effort::Light), Instant::now());
        Self { trial, now, in_flight: VecDeque::new(), sent: 0, busy: Duration::ZERO }
    }

    /// Sends a version of `bytes`, and waits a second.
    fn send(&mut self, bytes: u64, path: &Path, mut noise: impl FnMut(u64) -> f64) {
        self.trial.handle_pause();
        let mut remaining = bytes.div_ceil(CHUNK);
        while remaining > 0 || !self.in_flight.is_empty() {
            while remaining > 0 && self.in_flight.len() < 8 {
                self.in_flight.push_back(self.trial.assign(CHUNK));
                remaining -= 1;
            }
            let (effort, block) = self.in_flight.pop_front().unwrap();
            let took = Duration::from_secs_f64(CHUNK as f64 / path.rate(effort) * noise(self.sent));
            self.now += took;
            self.busy += took;
            self.sent += 1;
            let equivalent: Vec<_> = Effort::ALL
                .into_iter()
                .filter(|other| path.is_equivalent(*other, effort))
                .collect();
            self.trial.handle_sent(block, &equivalent, CHUNK, self.now);
            self.trial.handle_ended(block, CHUNK);
        }
        self.now += Duration::from_secs(1);
    }

    /// The overall rate, relative to that of the best effort.
    fn relative_rate(&self, path: &Path) -> f64 {
        (self.sent * CHUNK) as f64 / self.busy.as_secs_f64() / path.best()
    }
}

/// Pseudorandom factors in `1/(1+spread) ..= 1+spread`, reproducible by `seed`.
fn noise(seed: u64, spread: f64) -> impl FnMut(u64) -> f64 {
    move |at| {
        let mixed = (at ^ seed)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
            .wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (1.0 + spread).powf((mixed >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
    }
}

/// Two cores of a processor without VAES.
const XEON: Path = Path {
    name: "Xeon",
    link: 10e9 / 8.0,
    packets: 1.2 * GB,
    codecs: [1.1 * GB, 1.1 * GB],
    shares: WEIGHTS,
    cores: 2.0,
};

/// bf16 weights with both efforts the same; f32 that holds f16.
const WEIGHTS: [f64; 2] = [0.67, 0.67];
const HALVES: [f64; 2] = [0.83, 0.42];

/// The chosen level, by machine and link. The rates of codecs and packets were measured on such machines.
#[test]
fn it_settles_on_the_fastest_level() {
    use Effort::{Full, Light, None};
    let zen = Path {
        name: "Zen 5",
        link: 0.0,
        packets: 2.4 * GB,
        codecs: [3.4 * GB, 1.0 * GB],
        shares: WEIGHTS,
        cores: 2.0,
    };
    let xeon = Path { codecs: [1.1 * GB, 0.5 * GB], ..XEON };
    let quota = Path { name: "half a core", cores: 0.5, ..xeon };
    let large = Path { name: "64 cores", cores: 16.0, ..zen };
    let scalar = Path { name: "without SIMD", codecs: [0.9 * GB, 0.8 * GB], ..xeon };
    let table = [
        (zen, WEIGHTS, [Light, Light, Light, None]),
        (xeon, WEIGHTS, [Light, Light, Light, None]),
        (quota, WEIGHTS, [Light, None, None, None]),
        (large, WEIGHTS, [Light, Light, Light, Light]),
        (scalar, WEIGHTS, [Light, Light, None, None]),
        (zen, HALVES, [Full, Full, Full, None]),
        (quota, HALVES, [Full, None, None, None]),
        (large, HALVES, [Full, Full, Full, Light]),
    ];
    for (machine, shares, expected) in table {
        for (gbit_per_s, expected) in [1.0, 5.0, 10.0, 100.0].into_iter().zip(expected) {
            let codecs = match shares {
                WEIGHTS => [machine.codecs[0]; 2],
                _ => machine.codecs,
            };
            let path = Path { link: gbit(gbit_per_s), shares, codecs, ..machine };
            let mut run = Run::new();
            run.send(12 << 30, &path, noise(7, 0.1));
            let name = format!(
                "{}, {shares:?}, {gbit_per_s} Gbit/s: {:?}",
                path.name,
                Effort::ALL.map(|e| path.rate(e) as u64)
            );
            assert_eq!(run.trial.settled(), Some(expected), "{name}");
            assert!(run.relative_rate(&path) >= 0.95, "{name}: {}", run.relative_rate(&path));
        }
    }
}

/// Fast paths, where every encoding is slower: a short first version is no experiment, and a long one loses little.
#[test]
fn a_first_version_loses_little_to_the_trial() {
    for shares in [WEIGHTS, HALVES] {
        for codecs in [[1.1 * GB, 0.5 * GB], [0.4 * GB, 0.2 * GB]] {
            let path = Path { link: gbit(100.0), shares, codecs, ..XEON };
            for (bytes, settled, relative_min) in
                [(256 << 20, None, 0.99), (3 << 30, Some(Effort::None), 0.9)]
            {
                let mut run = Run { trial: EffortTrial::new(first_effort(LaneKind::Tcp)), ..Run::new() };
                run.send(bytes, &path, noise(5, 0.1));
                let relative = run.relative_rate(&path);
                assert!(relative > relative_min, "{shares:?}, {codecs:?}, {bytes}: {relative}");
                assert_eq!(run.trial.settled(), settled);
            }
        }
    }
}

/// Chunks that are sent raw with every effort decide nothing.
#[test]
fn incompressible_data_is_not_tried() {
    let mut run = Run::new();
    run.send(4 << 30, &Path { shares: [1.0, 1.0], ..XEON }, noise(9, 0.1));
    assert_eq!((run.trial.settled(), run.trial.rounds), (None, 0));
}

/// A small model, published many times with a few chunks each.
#[test]
fn small_versions_are_measured_together() {
    let path = Path { link: gbit(100.0), ..XEON };
    let mut run = Run::new();
    for _ in 0..40 {
        run.send(4 * CHUNK, &path, noise(3, 0.1));
    }
    assert_eq!(run.trial.settled(), Some(Effort::None));
}

/// A block must not end while all its chunks are in flight, of which none is measured.
#[test]
fn versions_of_few_chunks_are_measured_on_a_slow_link() {
    let mut run = Run { trial: EffortTrial::new(first_effort(LaneKind::Tcp)), ..Run::new() };
    for _ in 0..4 {
        run.send(64 << 20, &Path { link: gbit(1.0), ..XEON }, noise(3, 0.1));
    }
    let candidates = run.trial.candidates.iter().map(|candidate| candidate.effort);
    assert_eq!(candidates.collect::<Vec<_>>(), [Effort::Light, Effort::Full], "both encode alike");
}

/// A version of one chunk cannot be measured: it has the level that a trial begins with.
#[test]
fn a_version_of_one_chunk_is_not_measured() {
    let mut run = Run::new();
    for _ in 0..1000 {
        run.send(CHUNK, &Path { link: gbit(100.0), ..XEON }, |_| 1.0);
    }
    assert_eq!((run.trial.settled(), run.trial.rounds), (None, 0));
}

#[test]
fn a_path_that_changes_is_tried_again() {
    let mut run = Run::new();
    let (fast, slow) = (Path { link: gbit(100.0), ..XEON }, Path { link: gbit(1.0), ..XEON });
    run.send(4 << 30, &fast, noise(5, 0.1));
    assert_eq!(run.trial.settled(), Some(Effort::None));
    run.send(4 << 30, &slow, noise(6, 0.1));
    assert_eq!(run.trial.settled(), Some(Effort::Light));
    run.send(4 << 30, &fast, noise(7, 0.1));
    assert_eq!(run.trial.settled(), Some(Effort::None));
}

/// A better level may become possible without a change of the rate, as when another process releases its processors.
#[test]
fn a_settled_trial_is_repeated_periodically() {
    let mut run = Run::new();
    let mut settled = 0;
    for _ in 0..300 {
        run.send(256 << 20, &XEON, |_| 1.0);
        settled += u32::from(run.trial.settled().is_some());
    }
    assert_eq!(run.trial.standing.rest, 2048, "75 GiB: after 1024 blocks");
    assert!(settled > 280, "{settled} of 300");
}

#[test]
fn lost_chunks_do_not_count_as_in_flight() {
    let meter = EffortMeter::beginning_with(Effort::Light);
    let chunks: Vec<_> = (0..5).map(|_| meter.begin(CHUNK)).collect();
    assert_eq!(meter.trial().in_flight_bytes, 5 * CHUNK);
    drop(chunks);
    assert_eq!(meter.trial().in_flight_bytes, 0);
}

proptest! {
    /// For any path and noise: the trial settles within 8 GiB, on a level that is slower than the best by at most what
    /// noise hides.
    #[test]
    fn it_settles_near_the_best(
        gbit_per_s in 0.1f64..100.0, packets in 0.3f64..4.0, light in 0.5f64..10.0, full in 0.2f64..2.0,
        smaller in 0.3f64..1.0, cores in 0.5f64..16.0, seed: u64, spread in 0.0f64..0.3,
    ) {
        let path = Path {
            name: "any", link: gbit(gbit_per_s), packets: packets * GB, codecs: [light * GB, full.min(light) * GB],
            shares: [smaller.midpoint(1.0), smaller], cores,
        };
        let mut run = Run::new();
        run.send(8 << 30, &path, noise(seed, spread));
        let settled = run.trial.settled();
        prop_assert!(settled.is_some());
        let rate = path.rate(settled.unwrap());
        prop_assert!(rate >= path.best() * 0.85, "{settled:?} at {} of the best", rate / path.best());
    }
}
