use super::{
    meter::{Moment, Written},
    *,
};
use proptest::prelude::*;
use std::collections::VecDeque;

const CHUNK: u64 = 4 << 20;
const NS: f64 = 1e-9;

/// A model of sender, receiver and link.
#[derive(Debug, Clone, Copy)]
struct Path {
    /// The link in wire bytes per second.
    link: f64,
    /// The seconds in which the source yields a raw byte.
    source: f64,
    /// The processor seconds of sending, and of receiving, for each wire byte; most of them on the lane's thread.
    packets: f64,
    /// The processor seconds of encoding for each raw byte with light and with full effort. Decoding takes as long.
    codecs: [f64; 2],
    /// The encoded share of a chunk with either effort.
    shares: [f64; 2],
    /// The processors of the server and of the client; or those that they share.
    processors: [f64; 2],
    is_shared: bool,
}

/// bf16 and fp32 weights; f32 that holds f16; and noise.
const BF16: [f64; 2] = [0.67, 0.67];
const FP32: [f64; 2] = [0.835, 0.82];
const HALVES: [f64; 2] = [0.83, 0.42];
const NOISE: [f64; 2] = [1.0, 1.0];

/// Zen 4 with AVX-512 and VAES, a Xeon without these, and one with the portable codecs too.
const ZEN: Path = machine(0.23, [0.18, 0.69]);
const XEON: Path = machine(0.42, [0.3, 0.9]);
const SCALAR: Path = machine(0.5, [0.54, 1.3]);

/// A machine on which both ends run, with the nanoseconds of `packets` and `codecs`.
const fn machine(packets: f64, codecs: [f64; 2]) -> Path {
    Path {
        link: 0.0,
        source: 0.0,
        packets: packets * NS,
        codecs: [codecs[0] * NS, codecs[1] * NS],
        shares: BF16,
        processors: [2.0, 2.0],
        is_shared: true,
    }
}

impl Path {
    fn at(self, gbit_per_s: f64, shares: [f64; 2]) -> Self {
        let mut codecs = self.codecs;
        if shares[0] == shares[1] {
            codecs[1] = codecs[0]; // The same codec.
        }
        Self { link: gbit_per_s / 8.0 * 1e9, shares, codecs, ..self }
    }

    fn with_processors(self, processors: f64) -> Self {
        Self { processors: [processors; 2], ..self }
    }

    fn on_two_machines(self) -> Self {
        Self { is_shared: false, ..self }
    }

    fn level(&self, effort: Effort) -> Level {
        let (share, encode_s) = match effort {
            Effort::None => (1.0, 0.0),
            Effort::Light => (self.shares[0], self.codecs[0]),
            Effort::Full => (self.shares[1], self.codecs[1]),
        };
        match share < 1.0 {
            true => Level { share, encode_s },
            false => Level::RAW,
        }
    }

    /// The processor seconds of one end for each raw byte.
    fn processor_s(&self, effort: Effort) -> f64 {
        let Level { share, encode_s } = self.level(effort);
        share * self.packets + encode_s
    }

    /// The seconds for each raw byte: of the link, the lane's thread, or the processors.
    fn seconds(&self, effort: Effort) -> f64 {
        let (share, busy) = (self.level(effort).share, self.processor_s(effort));
        let by_processors = match self.is_shared {
            true => 2.0 * busy / self.processors[0],
            false => busy / self.processors[0].min(self.processors[1]),
        };
        (share / self.link)
            .max(share * self.packets)
            .max(by_processors)
            .max(self.source)
    }

    fn best(&self) -> f64 {
        Effort::ALL
            .map(|effort| self.seconds(effort))
            .into_iter()
            .fold(f64::MAX, f64::min)
    }
}

/// The time of a sample of a chunk.
const SAMPLE_TIME: Duration = Duration::from_micros(60);

/// Simulates sending chunks over a path, in order and eight in flight, as many as a client grants by default. `noise`
/// scales the time of each. Estimates are a fifth too optimistic about the time of encoding.
struct Run {
    meter: Meter,
    now: Moment,
    in_flight: VecDeque<Effort>,
    /// The number of chunks sent with each effort, and of samples.
    sent: [u64; Effort::ALL.len()],
    samples: u32,
    busy: Duration,
    /// The number of chunks that a sample covers, and of those that were not sent yet.
    covered: u32,
    estimated: u32,
}

impl Run {
    fn over(kind: LaneKind, path: &Path) -> Self {
        Self {
            meter: Meter::new(first_effort(kind), path.processors[0]),
            now: Moment { at: Instant::now(), processor_time: Duration::ZERO },
            in_flight: VecDeque::new(),
            sent: [0; Effort::ALL.len()],
            samples: 0,
            busy: Duration::ZERO,
            covered: 17,
            estimated: 0,
        }
    }

    /// Sends a version of `bytes`, and waits a second.
    fn send(&mut self, bytes: u64, path: &Path, mut noise: impl FnMut(u64) -> f64) {
        self.meter.handle_pause();
        let mut remaining = bytes.div_ceil(CHUNK);
        while remaining > 0 || !self.in_flight.is_empty() {
            while remaining > 0 && self.in_flight.len() < 8 {
                self.in_flight.push_back(self.meter.effort());
                self.estimate(path);
                remaining -= 1;
            }
            let effort = self.in_flight.pop_front().unwrap();
            let seconds = path.seconds(effort) * CHUNK as f64 * noise(self.sent.iter().sum());
            let took = Duration::from_secs_f64(seconds);
            self.now.at += took;
            self.now.processor_time += Duration::from_secs_f64(path.processor_s(effort) * CHUNK as f64);
            self.busy += took;
            self.sent[effort as usize] += 1;
            let Level { share, encode_s } = path.level(effort);
            let chunk = Written {
                effort,
                raw_bytes: CHUNK,
                wire_bytes: (share * CHUNK as f64) as u64,
                encode_time: Duration::from_secs_f64(encode_s * CHUNK as f64),
                is_chosen: true,
            };
            self.meter.handle_written(chunk, self.now);
        }
        self.now.at += Duration::from_secs(1);
    }

    fn estimate(&mut self, path: &Path) {
        if self.estimated == 0 && (self.meter.may_sample() || self.meter.effort() > Effort::None) {
            self.meter.handle_sampled(SAMPLE_TIME);
            self.samples += 1;
            self.estimated = self.covered;
        }
        if self.estimated > 0 {
            self.estimated -= 1;
            let optimistic = |level: Level| Level { encode_s: level.encode_s * 0.8, ..level };
            let levels = Effort::ALL.map(|effort| optimistic(path.level(effort)));
            self.meter.handle_estimate(levels, CHUNK);
        }
    }

    /// The overall rate, relative to one of these `seconds` for each byte.
    fn relative_rate(&self, seconds: f64) -> f64 {
        let bytes = self.sent.iter().sum::<u64>() * CHUNK;
        bytes as f64 * seconds / self.busy.as_secs_f64()
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

/// The chosen level, by machine, data and link. No session is slower than raw bytes would have been, by more than
/// noise.
#[test]
fn it_chooses_by_machine_data_and_link() {
    use Effort::{Full, Light, None};
    // Links of 0.1, 1, 5 and 100 Gbit/s.
    let table = [
        ("Zen 4", ZEN, BF16, [Light, Light, Light, None]),
        ("Zen 4", ZEN, FP32, [Light, Light, Light, None]),
        ("Zen 4", ZEN, HALVES, [Full, Full, Light, None]),
        ("Zen 4", ZEN, NOISE, [None; 4]),
        ("Xeon", XEON, BF16, [Light, Light, Light, None]),
        ("Xeon", XEON, FP32, [Light, Light, Light, None]),
        ("Xeon", XEON, HALVES, [Full, Full, Light, None]),
        ("Xeon", XEON, NOISE, [None; 4]),
        ("scalar Xeon", SCALAR, BF16, [Light, Light, Light, None]),
        ("one processor", ZEN.with_processors(1.0), BF16, [Light, Light, Light, None]),
        ("one processor", XEON.with_processors(1.0), BF16, [Light, Light, None, None]),
        ("16 processors", ZEN.with_processors(16.0), BF16, [Light; 4]),
        ("16 processors", ZEN.with_processors(16.0), HALVES, [Full, Full, Full, Light]),
        ("16 processors", XEON.with_processors(16.0), BF16, [Light; 4]),
        ("16 processors", XEON.with_processors(16.0), NOISE, [None; 4]),
        ("two Xeons", XEON.on_two_machines(), BF16, [Light, Light, Light, None]),
    ];
    for (name, machine, data, expected) in table {
        for (gbit_per_s, expected) in [0.1, 1.0, 5.0, 100.0].into_iter().zip(expected) {
            let path = machine.at(gbit_per_s, data);
            let mut run = Run::over(LaneKind::Tcp, &path);
            (0..8).for_each(|version| run.send(256 << 20, &path, noise(version, 0.1)));
            let case = format!("{name}, {data:?}, {gbit_per_s} Gbit/s, {:?}", run.sent);
            assert_eq!(run.meter.effort(), expected, "{case}");
            let raw = run.relative_rate(path.seconds(None));
            assert!(raw >= 0.97, "{case}: {raw} of raw bytes");
            let first = u64::from(gbit_per_s < 50.0); // The warm-up of 150 ms.
            assert!(first + run.sent.iter().filter(|chunks| **chunks > 0).count() as u64 <= 3, "{case}");
        }
    }
}

/// Where the processors bind, no chunk is encoded to find that out, whatever the data: in the first version, in the
/// second, and in later ones.
#[test]
fn nothing_is_encoded_on_trial_where_the_processors_bind() {
    for machine in [ZEN, XEON, SCALAR, XEON.with_processors(1.0), XEON.on_two_machines()] {
        for data in [BF16, FP32, HALVES, NOISE] {
            let path = machine.at(100.0, data);
            let mut run = Run::over(LaneKind::Tcp, &path);
            (0..1000).for_each(|version| run.send(256 << 20, &path, noise(version, 0.3)));
            assert_eq!(run.sent[1..], [0, 0], "{path:?}");
        }
    }
}

/// Samples take at most a hundredth of the time of sending, after the first, even if no two chunks are similar.
#[test]
fn samples_are_bounded() {
    for gbit_per_s in [1.0, 100.0, 10_000.0] {
        let path = ZEN.with_processors(64.0).at(gbit_per_s, NOISE);
        let mut run = Run { covered: 1, ..Run::over(LaneKind::Tcp, &path) };
        (0..100).for_each(|version| run.send(64 << 20, &path, noise(version, 0.1)));
        let sampled = SAMPLE_TIME * (run.samples - 1);
        assert!(run.samples > 10 && sampled * 100 <= run.busy, "{sampled:?} of {:?}", run.busy);
    }
}

/// 64 MiB at 1 Gbit/s: the second version is encoded from its first chunk.
#[test]
fn a_slow_link_is_noticed_in_the_first_version() {
    let path = XEON.at(1.0, BF16);
    let mut run = Run::over(LaneKind::Tcp, &path);
    run.send(64 << 20, &path, noise(3, 0.1));
    assert_eq!(run.meter.effort(), Effort::Light);
    let raw = run.sent[0];
    (0..10).for_each(|version| run.send(64 << 20, &path, noise(version, 0.1)));
    assert_eq!(run.sent[0], raw);
}

/// A receiver with few processors, of which the sender knows nothing: the change is undone after a window, and less and
/// less often repeated.
#[test]
fn a_change_that_does_not_help_is_undone() {
    let weak = Path { processors: [16.0, 0.5], ..XEON.on_two_machines() };
    for path in [weak.at(100.0, BF16), Path { processors: [64.0, 1.0], ..weak }.at(100.0, HALVES)] {
        let mut run = Run::over(LaneKind::Tcp, &path);
        (0..400).for_each(|version| run.send(256 << 20, &path, noise(version, 0.1)));
        assert_eq!(run.meter.effort(), Effort::None);
        let raw = run.relative_rate(path.seconds(Effort::None));
        assert!(raw > 0.98, "{raw}: {:?}", run.sent);
    }
}

/// Another program that holds up every tenth chunk.
#[test]
fn a_disturbed_machine_keeps_its_level() {
    let path = XEON.at(1.0, BF16);
    let mut run = Run::over(LaneKind::Tcp, &path);
    for version in 0..60 {
        let mut noise = noise(version, 1.0);
        run.send(256 << 20, &path, |at| if noise(at) > 1.8 { 12.0 } else { 1.0 });
    }
    assert!(run.sent[1] > 9 * run.sent[0], "{:?}", run.sent);
}

/// A source that is slower than the path: encoding gains nothing, and costs processor time.
#[test]
fn encoding_that_gains_nothing_is_given_up() {
    let path = Path { source: 2.0 * NS, ..ZEN.with_processors(16.0).at(10.0, BF16) };
    let mut run = Run::over(LaneKind::Tcp, &path);
    (0..400).for_each(|version| run.send(64 << 20, &path, noise(version, 0.05)));
    assert!(run.sent[0] > 9 * run.sent[1], "{:?}", run.sent);
}

/// A lane of QUIC begins with light effort, and leaves it where the processors bind.
#[test]
fn a_lane_of_quic_leaves_light_effort_on_a_fast_path() {
    for machine in [ZEN, XEON, SCALAR] {
        let path = machine.at(100.0, BF16);
        let mut run = Run::over(LaneKind::Quic, &path);
        run.send(1 << 30, &path, noise(1, 0.1));
        assert_eq!(run.meter.effort(), Effort::None, "{path:?}");
    }
}

#[test]
fn a_path_that_changes_is_noticed() {
    let (fast, slow) = (XEON.at(100.0, BF16), XEON.at(1.0, BF16));
    let mut run = Run::over(LaneKind::Tcp, &fast);
    for (path, expected) in [(fast, Effort::None), (slow, Effort::Light), (fast, Effort::None)] {
        run.send(1 << 30, &path, noise(5, 0.1));
        assert_eq!(run.meter.effort(), expected);
    }
}

/// A version of one chunk cannot be measured: it has the first level.
#[test]
fn a_version_of_one_chunk_is_not_measured() {
    let path = XEON.at(100.0, BF16);
    let mut run = Run::over(LaneKind::Quic, &path);
    (0..1000).for_each(|_| run.send(CHUNK, &path, |_| 1.0));
    assert_eq!(run.sent, [0, 1000, 0]);
}

proptest! {
    /// For any machine, data, link and noise: a session of 4 GiB is not slower than raw bytes by more than 3 %; and
    /// where links are slow for the processors, it is nearly as fast as with the best level.
    #[test]
    fn it_is_never_much_slower_than_raw(
        gbit_per_s in 0.1f64..100.0, packets in 0.1f64..1.0, light in 0.1f64..1.0, full in 0.2f64..4.0,
        smaller in 0.3f64..1.0, processors in 1u32..17, is_shared: bool, seed: u64, spread in 0.0f64..0.2,
    ) {
        let mut path = machine(packets, [light, full.max(light)]).with_processors(f64::from(processors));
        path.is_shared = is_shared;
        let path = path.at(gbit_per_s, [smaller.midpoint(1.0), smaller]);
        let mut run = Run::over(LaneKind::Tcp, &path);
        (0..16).for_each(|version| run.send(256 << 20, &path, noise(seed ^ version, spread)));
        let raw = run.relative_rate(path.seconds(Effort::None));
        prop_assert!(raw >= 0.97 - spread / 2.0, "{raw} of raw bytes, {:?}", run.sent);
        let is_slow = 8.0 * path.processor_s(Effort::Full) < path.best() * f64::from(processors);
        if is_slow {
            let seconds = path.seconds(run.meter.effort());
            prop_assert!(seconds <= path.best() * 1.06, "{:?}: {}", run.meter.effort(), seconds / path.best());
        }
    }
}
