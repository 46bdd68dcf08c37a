//! Which codec brings a chunk to its subscriber soonest.

use super::{
    CodecId, CodecSet, LinkClass, SizeEstimate,
    simd::{Instructions, Path},
};
use crate::Dtype;

/// How the chunks of a topic or subscription are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum CodecChoice {
    /// Each chunk by what a look at it and the speed of the link make best ([`Machine::choose`]).
    #[default]
    Auto,
    /// All with this one, where it gains something and the receiver can decode it; otherwise raw.
    Fixed(CodecId),
}

impl From<CodecId> for CodecChoice {
    fn from(codec: CodecId) -> Self {
        Self::Fixed(codec)
    }
}

/// Chunks below this size travel raw when the choice is free: what encoding saves on any usual link is less than it takes
/// a worker to wake.
pub const SMALL_BYTES: usize = 16 << 10;

/// What encodes: how fast one processor is with each codec, and how many there are.
///
/// The receiver is taken to be such a machine too: it says nothing about itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    instructions: Instructions,
    workers: u32,
}

/// How many chunks of one transfer are encoded or decoded at once, while others travel: with more processors than that, it is
/// no faster.
const CHUNKS_IN_WORK: usize = 4;

/// What one codec does to one chunk.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Offer {
    codec: CodecId,
    /// Raw bytes that arrive per second.
    bytes_per_s: f64,
    /// Seconds of processors at both ends, per raw byte.
    cpu_s: f64,
}

/// Which advantage decides. Of codecs that are closer than this, the one that costs less CPU is taken, and raw costs none:
/// so what would gain less than 3 % travels raw.
const ADVANTAGE_MIN: f64 = 1.03;

impl Machine {
    /// A machine like this one, of whose `processors` one has its hands full with packets.
    pub fn this(processors: usize) -> Self {
        Self { instructions: Path::fastest().instructions(), workers: workers_of(processors) }
    }

    /// The codec with which a chunk of `dtype` that looks like this takes the least time over a link of this class: what
    /// makes `min(encode rate, link rate × ratio, decode rate)` largest, among those `offered`. Costs less than a
    /// microsecond.
    pub fn choose(&self, look: &SizeEstimate, dtype: Dtype, offered: CodecSet, link: LinkClass) -> CodecId {
        let offers = || offered.iter().filter_map(|codec| self.offer(look, dtype, codec, link));
        let best = offers().map(|offer| offer.bytes_per_s).fold(0.0, f64::max);
        let good = offers().filter(|offer| offer.bytes_per_s * ADVANTAGE_MIN >= best);
        good.min_by(|a, b| a.cpu_s.total_cmp(&b.cpu_s))
            .map_or(CodecId::Raw, |offer| offer.codec)
    }

    fn offer(&self, look: &SizeEstimate, dtype: Dtype, codec: CodecId, link: LinkClass) -> Option<Offer> {
        let share = f64::from(look.share(codec)?);
        let arriving = link.bytes_per_s() / share.max(f64::MIN_POSITIVE);
        Some(match self.rates(codec, dtype, share) {
            None => Offer { codec, bytes_per_s: arriving, cpu_s: 0.0 },
            Some((encode, decode)) => {
                let workers = f64::from(self.workers) * 1e9;
                let bytes_per_s = arriving.min(encode * workers).min(decode * workers);
                Offer { codec, bytes_per_s, cpu_s: 1e-9 / encode + 1e-9 / decode }
            }
        })
    }

    /// How many GB/s of raw bytes one processor encodes and decodes, where `share` of them is left; `None` where there is
    /// nothing to do.
    ///
    /// Of one core of a Zen 5 that copies memory at 26 to 28 GB/s, at 4 MiB chunks of real weights, gradients and caches.
    /// On the slower machine of `bench/results/2026-11-22-codecs.md`, which copies at 7 to 11 GB/s, bit planes of bf16 do 5.3
    /// to 6.3 and 7.2 to 9.0: all are nearer to each other where memory is slow.
    ///
    /// They are constants, because what matters is their order and their rough distance to the link: a clock would tell the
    /// same on every machine of a kind, but differently on a busy one, and choices that change with the load encode chunks
    /// twice.
    fn rates(&self, codec: CodecId, dtype: Dtype, share: f64) -> Option<(f64, f64)> {
        let bytes = dtype.bits().div_ceil(8);
        match (codec, self.instructions, bytes) {
            // What needs a base is compared with it instead of being chosen.
            (CodecId::Raw | CodecId::Sparse, ..) => None,
            // The more repeats, the faster: 5 GB/s where nearly nothing is left, 1.2 on floats.
            (CodecId::Zstd, ..) => Some((1.0 / (0.25 + 0.75 * share), 1.0 / (0.1 + 0.6 * share))),
            (CodecId::BitPlanes, Instructions::Avx512, 0..=1) => Some((6.5, 7.0)),
            (CodecId::BitPlanes, Instructions::Avx512, _) => Some((9.5, 17.5)),
            (CodecId::BitPlanes, Instructions::Avx2, 0..=1) => Some((4.9, 5.7)),
            (CodecId::BitPlanes, Instructions::Avx2, _) => Some((7.6, 12.7)),
            (CodecId::BitPlanes, Instructions::Portable, _) => Some((1.6, 2.6)),
            (CodecId::Planes, _, 0..=1) => Some((1.5, 2.0)),
            (CodecId::Planes, _, 2) => Some((2.6, 5.2)),
            (CodecId::Planes, ..) => Some((3.6, 7.5)),
        }
    }
}

/// How many processors work on the chunks of one transfer: all but the one for packets, as far as there is work.
fn workers_of(processors: usize) -> u32 {
    processors.saturating_sub(1).clamp(1, CHUNKS_IN_WORK) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BIT_PLANES: CodecId = CodecId::BitPlanes;
    const PLANES: CodecId = CodecId::Planes;

    fn machine(instructions: Instructions, processors: usize) -> Machine {
        Machine { instructions, workers: workers_of(processors) }
    }

    /// What is chosen at each class of link, the slowest first.
    fn at_each_class(machine: Machine, dtype: Dtype, shares: &[(CodecId, f32)]) -> Vec<CodecId> {
        let look = SizeEstimate::with(shares);
        LinkClass::ALL
            .iter()
            .map(|link| machine.choose(&look, dtype, CodecSet::all(), *link))
            .collect()
    }

    /// The shares are those measured on real tensors, named in the comments.
    #[test]
    fn each_link_gets_what_brings_the_bytes_soonest() {
        let (two, many) = (machine(Instructions::Avx512, 2), machine(Instructions::Avx512, 16));
        let weights: &[_] = &[(BIT_PLANES, 0.671), (PLANES, 0.664)]; // MiniLM, bf16
        assert_eq!(
            at_each_class(two, Dtype::Bf16, weights),
            [BIT_PLANES, BIT_PLANES, BIT_PLANES, BIT_PLANES, CodecId::Raw],
            "one worker is slower than 100 Gbit/s"
        );
        assert_eq!(at_each_class(many, Dtype::Bf16, weights), [BIT_PLANES; 5]);
        assert_eq!(
            at_each_class(machine(Instructions::Portable, 2), Dtype::Bf16, weights),
            [PLANES, PLANES, PLANES, CodecId::Raw, CodecId::Raw],
            "without SIMD the bit planes are the dearer ones"
        );
        assert_eq!(
            at_each_class(machine(Instructions::Portable, 63), Dtype::Bf16, weights),
            [PLANES, PLANES, PLANES, PLANES, CodecId::Raw],
            "most of many processors have no chunk to work on"
        );
        let rounded: &[_] = &[(BIT_PLANES, 0.836), (PLANES, 0.616)]; // CREPE, f32 with few bits of mantissa
        assert_eq!(
            at_each_class(two, Dtype::F32, rounded),
            [PLANES, PLANES, PLANES, BIT_PLANES, CodecId::Raw],
            "what takes longer to encode loses on a fast link"
        );
        let integers: &[_] = &[(CodecId::Zstd, 0.576), (PLANES, 0.576)]; // Kokoro, i8
        assert_eq!(
            at_each_class(two, Dtype::I8, integers),
            [CodecId::Zstd, CodecId::Zstd, CodecId::Zstd, CodecId::Raw, CodecId::Raw],
            "of two that are as small, the cheaper one; and none that is slower than the link"
        );
    }

    #[test]
    fn one_processor_has_its_hands_full_with_packets() {
        assert_eq!([0, 1, 2, 3, 5, 6, 64].map(workers_of), [1, 1, 1, 2, 4, 4, 4]);
    }

    #[test]
    fn what_gains_less_than_three_per_cent_travels_raw() {
        let machine = machine(Instructions::Avx512, 5);
        for (share, chosen) in [(0.98, CodecId::Raw), (0.972, CodecId::Raw), (0.95, PLANES)] {
            let look = SizeEstimate::with(&[(PLANES, share)]);
            assert_eq!(
                machine.choose(&look, Dtype::I4, CodecSet::all(), LinkClass::UpTo1),
                chosen,
                "{share}"
            );
        }
        assert_eq!(at_each_class(machine, Dtype::U8, &[]), [CodecId::Raw; 5]);
    }

    fn any_share() -> impl Strategy<Value = Option<f32>> {
        prop::option::of(0.0f32..0.97)
    }

    proptest! {
        /// Whatever a look says: only what is offered is chosen, only what gains something, and nothing that is offered
        /// would be faster by more than the least advantage.
        #[test]
        fn nothing_offered_is_much_faster(
            shares in prop::collection::vec(any_share(), CodecId::ALL.len()),
            offered in prop::collection::vec(0u32..8, 0..5),
            dtype in 0..Dtype::ALL.len(), link in 0..LinkClass::ALL.len(),
            processors in 1usize..64, instructions in 0usize..3,
        ) {
            let found = CodecId::ALL.iter().zip(shares).skip(1).filter_map(|(id, share)| Some((*id, share?)));
            let look = SizeEstimate::with(&found.collect::<Vec<_>>());
            let all = [Instructions::Avx512, Instructions::Avx2, Instructions::Portable];
            let machine = machine(all[instructions], processors);
            let (dtype, offered, link) = (Dtype::ALL[dtype], CodecSet::from_codes(&offered), LinkClass::ALL[link]);
            let chosen = machine.choose(&look, dtype, offered, link);
            prop_assert!(offered.contains(chosen));
            let rate = |codec| machine.offer(&look, dtype, codec, link).map(|offer| offer.bytes_per_s);
            let chosen = rate(chosen).expect("what does not gain is not chosen");
            for other in offered.iter().filter_map(rate) {
                prop_assert!(other <= chosen * ADVANTAGE_MIN * 1.000_001);
            }
        }
    }
}
