//! Size estimates: the encoded size of a chunk under each codec, from a sample.

use super::{BitPlanes, CodecId, Context, codec};
use crate::Dtype;
use std::{cell::RefCell, time::Duration};

/// The encoded size of a chunk under each codec, and the time of encoding it, estimated from a sample.
///
/// The sample is encoded with every candidate codec. This takes 30 to 60 microseconds, even for large chunks; encoding
/// 4 MiB takes at least ten times as long, hashing 4 MiB twice as long. A whole chunk may take longer for each byte
/// than the sample, which is in the processor's cache.
///
/// The sample consists of slices spread evenly over the chunk, so it covers the larger tensors that share the chunk. It
/// misses repeats over longer distances: zstd may encode to less than estimated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SizeEstimate {
    /// For each codec of [`CodecId::ALL`], the encoded size divided by the raw size; `None` if the codec saves too
    /// little or is not a candidate for the dtype.
    shares: [Option<f32>; CodecId::ALL.len()],
    /// For each codec that has a share, the time of encoding in seconds for each raw byte.
    seconds: [f32; CodecId::ALL.len()],
}

/// The size of a sample in bytes. Long enough that the tables in front of each encoding weigh less than 1 %.
const SAMPLE_BYTES: usize = 32 << 10;

/// The number of slices of a sample. A slice is long enough for the processor to prefetch most of it.
const SLICES: usize = 16;
const SLICE_BYTES: usize = SAMPLE_BYTES / SLICES;

/// An encoding must save this share of the raw bytes, or the chunk is sent raw: decoding would cost more time than
/// sending the saved bytes.
const GAIN_MIN_PER_CENT: usize = 3;

/// The size in bytes of the largest encoding of `raw_bytes` raw bytes that is worth sending.
pub fn worthwhile_bytes(raw_bytes: usize) -> usize {
    raw_bytes - raw_bytes * GAIN_MIN_PER_CENT / 100
}

/// Scratch memory of a thread, kept because estimates are frequent.
#[derive(Debug, Default)]
struct Scratch {
    raw: Vec<u8>,
    encoded: Vec<u8>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl SizeEstimate {
    /// The estimate that no codec saves enough.
    pub const NO_GAIN: Self = Self { shares: [None; CodecId::ALL.len()], seconds: [0.0; CodecId::ALL.len()] };

    /// Estimates `raw`, a chunk of `dtype`; `now` is the clock by which encoding is timed. Delta codecs are left out:
    /// the sender tries them first.
    pub fn of(dtype: Dtype, raw: &[u8], now: impl Fn() -> Duration) -> Self {
        SCRATCH.with_borrow_mut(|scratch| scratch.estimate(dtype, raw, now))
    }

    /// The time of encoding in `codec`, in seconds for each raw byte; zero for raw, and for a codec without an
    /// estimate.
    pub fn seconds_per_byte(&self, codec: CodecId) -> f32 {
        index_of(codec).map_or(0.0, |index| self.seconds[index])
    }

    /// The encoded size of `raw_bytes` bytes under `codec`; `None` if the codec saves too little or was not tried.
    pub fn encoded_bytes(&self, codec: CodecId, raw_bytes: usize) -> Option<usize> {
        match codec {
            CodecId::Raw => Some(raw_bytes),
            codec => Some((self.share(codec)? * raw_bytes as f32) as usize),
        }
    }

    /// The encoded size under `codec`, divided by the raw size; `None` if the codec saves too little or was not tried.
    pub fn share(&self, codec: CodecId) -> Option<f32> {
        match codec {
            CodecId::Raw => Some(1.0),
            codec => self.shares[index_of(codec)?],
        }
    }

    /// Whether the size of an actual encoding of `raw_bytes` bytes is far from the estimate; false if there is no
    /// estimate for `codec`. `encoded_bytes` is `None` if the encoding did not fit, which counts as the raw size.
    pub fn is_refuted_by(&self, codec: CodecId, raw_bytes: usize, encoded_bytes: Option<usize>) -> bool {
        let found = encoded_bytes.map_or(1.0, |bytes| bytes as f32 / raw_bytes.max(1) as f32);
        self.share(codec).is_some_and(|share| (found - share).abs() > ERROR_MAX)
    }

    #[cfg(test)]
    pub(super) fn with(shares: &[(CodecId, f32)]) -> Self {
        let mut estimate = Self::NO_GAIN;
        for (codec, share) in shares {
            estimate.shares[index_of(*codec).unwrap()] = Some(*share);
        }
        estimate
    }
}

/// The error, as a share of the raw bytes, above which an estimate counts as outdated. A fresh estimate was within 0.03
/// of its own chunk on all measured data.
const ERROR_MAX: f32 = 0.06;

fn index_of(codec: CodecId) -> Option<usize> {
    CodecId::ALL.iter().position(|id| *id == codec)
}

impl Scratch {
    fn estimate(&mut self, dtype: Dtype, raw: &[u8], now: impl Fn() -> Duration) -> SizeEstimate {
        let Self { raw: sample, encoded } = self;
        gather(dtype, raw, sample);
        let context = Context { dtype, base: None };
        encoded.resize(worthwhile_bytes(sample.len()), 0);
        let sample_bytes = sample.len() as f32;
        let mut estimate = SizeEstimate::NO_GAIN;
        for (index, id) in CodecId::ALL.iter().enumerate().filter(|(_, id)| is_candidate(**id, dtype)) {
            let began = now();
            if let Some(bytes) = codec(*id).encode(context, sample, encoded) {
                estimate.shares[index] = Some(bytes as f32 / sample_bytes);
                estimate.seconds[index] = now().saturating_sub(began).as_secs_f32() / sample_bytes;
            }
        }
        estimate
    }
}

/// Whether `id` may be the best codec for `dtype`. On floats zstd saves less than the float codecs, in more time.
fn is_candidate(id: CodecId, dtype: Dtype) -> bool {
    match id {
        CodecId::Raw | CodecId::Sparse => false,
        CodecId::Zstd => !BitPlanes::suits(dtype),
        CodecId::BitPlanes => BitPlanes::suits(dtype),
        CodecId::Planes => true,
    }
}

/// Fills `sample` with all of `bytes` if they are shorter than two samples, otherwise with slices of them, each of
/// which begins with an element.
fn gather(dtype: Dtype, bytes: &[u8], sample: &mut Vec<u8>) {
    sample.clear();
    if bytes.len() < 2 * SAMPLE_BYTES {
        sample.extend_from_slice(bytes);
        return;
    }
    let element_bytes = (dtype.bits() as usize).div_ceil(8);
    let step = bytes.len() / SLICES / element_bytes * element_bytes;
    for (index, part) in bytes.chunks_exact(step).take(SLICES).enumerate() {
        // The offset differs from part to part: at equal offsets all slices might be beginnings of matrix rows.
        let room = part.len() - SLICE_BYTES;
        let start = room * (index * 7 % SLICES) / SLICES / element_bytes * element_bytes;
        sample.extend_from_slice(&part[start..start + SLICE_BYTES]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An estimate without a clock.
    fn estimate_of(dtype: Dtype, raw: &[u8]) -> SizeEstimate {
        SizeEstimate::of(dtype, raw, || Duration::ZERO)
    }

    fn noise(bytes: usize) -> Vec<u8> {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        (0..bytes).map(|_| next()).collect()
    }

    /// Values around zero, like weights: sums of eight random numbers.
    fn weights(elements: usize) -> Vec<f32> {
        let value = |noise: &[u8]| noise.iter().map(|byte| (f32::from(*byte) - 127.5) / 4_000.0).sum();
        noise(8 * elements).chunks(8).map(value).collect()
    }

    fn bf16(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()[2..].to_vec()).collect()
    }

    /// Encodes all of `raw` and compares the size with the estimate.
    fn assert_estimate_is_close(codec_id: CodecId, dtype: Dtype, raw: &[u8]) {
        let estimated = estimate_of(dtype, raw).encoded_bytes(codec_id, raw.len()).unwrap();
        let mut out = vec![0; worthwhile_bytes(raw.len())];
        let context = Context { dtype, base: None };
        let actual = codec(codec_id).encode(context, raw, &mut out).unwrap();
        let error = (estimated as f32 - actual as f32) / raw.len() as f32;
        assert!(error.abs() < 0.015, "{codec_id:?}: estimated {estimated} bytes, encoded to {actual}");
    }

    #[test]
    fn estimates_are_close_to_encodings() {
        let values = weights(300_000);
        let halves = bf16(&values);
        assert_estimate_is_close(CodecId::BitPlanes, Dtype::Bf16, &halves);
        assert_estimate_is_close(CodecId::Planes, Dtype::Bf16, &halves);
        let singles: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_estimate_is_close(CodecId::BitPlanes, Dtype::F32, &singles);
        assert_estimate_is_close(CodecId::Planes, Dtype::F32, &singles);
        let tokens: Vec<u8> = noise(200_000).chunks(2).flat_map(|low| [low, &[0; 6]].concat()).collect();
        assert_estimate_is_close(CodecId::Planes, Dtype::I64, &tokens);
        assert_estimate_is_close(CodecId::Zstd, Dtype::I64, &tokens);
    }

    #[test]
    fn encoding_is_timed_for_each_codec() {
        let (ticks, raw) = (std::cell::Cell::new(0), bf16(&weights(100_000)));
        let now = || Duration::from_micros(ticks.replace(ticks.get() + 1));
        let estimate = SizeEstimate::of(Dtype::Bf16, &raw, now);
        let seconds =
            [CodecId::Raw, CodecId::BitPlanes, CodecId::Zstd].map(|id| estimate.seconds_per_byte(id));
        assert_eq!(seconds, [0.0, 1e-6 / SAMPLE_BYTES as f32, 0.0], "zstd is not tried");
    }

    #[test]
    fn noise_gains_nothing() {
        for dtype in [Dtype::U8, Dtype::Bf16, Dtype::F64, Dtype::I4] {
            assert_eq!(estimate_of(dtype, &noise(1 << 20)), SizeEstimate::NO_GAIN, "{dtype}");
        }
    }

    /// The values of `f8_e8m0fnu`, used as scales, are exponents alone.
    #[test]
    fn every_dtype_with_an_exponent_is_tried_in_bit_planes() {
        let scales: Vec<u8> = noise(100_000)
            .iter()
            .map(|byte| 120 + byte.trailing_zeros().min(5) as u8)
            .collect();
        for dtype in [Dtype::F8E8M0, Dtype::F8E4M3Fn] {
            assert!(estimate_of(dtype, &scales).share(CodecId::BitPlanes).is_some(), "{dtype}");
        }
        assert_eq!(estimate_of(Dtype::U8, &scales).share(CodecId::BitPlanes), None);
        assert_eq!(estimate_of(Dtype::F8E8M0, &scales).share(CodecId::Zstd), None, "zstd is not tried");
    }

    /// Half of the chunk is zeros, half is noise.
    #[test]
    fn a_sample_covers_unlike_tensors() {
        let mut mixed = vec![0; 500_000];
        mixed.extend(noise(500_000));
        let share = estimate_of(Dtype::U8, &mixed).share(CodecId::Zstd).unwrap();
        assert!((0.45..0.55).contains(&share), "{share}");
    }

    #[test]
    fn a_very_different_encoding_refutes_the_estimate() {
        let estimate = SizeEstimate::with(&[(CodecId::Planes, 0.7)]);
        let refuted = |bytes| estimate.is_refuted_by(CodecId::Planes, 1000, bytes);
        assert_eq!(
            [refuted(Some(690)), refuted(Some(750)), refuted(Some(800)), refuted(None)],
            [false, false, true, true]
        );
        assert!(!estimate.is_refuted_by(CodecId::Zstd, 1000, None), "there is no estimate for zstd");
        let small_gain = SizeEstimate::with(&[(CodecId::Planes, 0.95)]);
        assert!(!small_gain.is_refuted_by(CodecId::Planes, 1000, None), "the raw size is near the estimate");
        assert_eq!(SizeEstimate::NO_GAIN.encoded_bytes(CodecId::Raw, 7), Some(7));
    }

    #[test]
    fn an_encoding_must_save_three_per_cent() {
        assert_eq!([0, 33, 34, 100, 4 << 20].map(worthwhile_bytes), [0, 33, 33, 97, 4_068_475]);
    }

    /// Sixteen slices, one from each part of the chunk, at different offsets. Small chunks are copied whole.
    #[test]
    fn slices_are_spread_and_begin_with_elements() {
        const ELEMENTS: usize = 100_003;
        const PART: usize = ELEMENTS / SLICES;
        let bytes: Vec<u8> = (0..ELEMENTS as u64).flat_map(u64::to_le_bytes).collect();
        let mut sample = vec![];
        gather(Dtype::I64, &bytes, &mut sample);
        let mut offsets = vec![];
        for (index, slice) in sample.chunks(SLICE_BYTES).enumerate() {
            let start = u64::from_le_bytes(*slice.first_chunk().unwrap()) as usize;
            assert!(slice == &bytes[8 * start..][..SLICE_BYTES] && start / PART == index, "slice {index}");
            offsets.push(start % PART);
        }
        offsets.sort_unstable();
        offsets.dedup();
        assert_eq!((sample.len(), offsets.len()), (SAMPLE_BYTES, SLICES));
        for (bytes, sampled) in
            [(2 * SAMPLE_BYTES - 1, 2 * SAMPLE_BYTES - 1), (2 * SAMPLE_BYTES, SAMPLE_BYTES)]
        {
            gather(Dtype::I64, &vec![0; bytes], &mut sample);
            assert_eq!(sample.len(), sampled);
        }
    }

    proptest! {
        /// An estimate of a chunk no longer than a sample is exact.
        #[test]
        fn estimates_of_small_chunks_are_exact(
            raw in prop::collection::vec(0u8..6, 0..5_000), dtype in 0..Dtype::ALL.len(),
        ) {
            let dtype = Dtype::ALL[dtype];
            let (estimate, context) = (estimate_of(dtype, &raw), Context { dtype, base: None });
            for id in CodecId::ALL.iter().copied().skip(1) {
                if let Some(estimated) = estimate.encoded_bytes(id, raw.len()) {
                    let mut out = vec![0; worthwhile_bytes(raw.len())];
                    let actual = codec(id).encode(context, &raw, &mut out);
                    let is_close = actual.is_some_and(|actual| actual.abs_diff(estimated) <= 1);
                    prop_assert!(is_close, "{:?}: {:?} {}", id, actual, estimated);
                }
            }
        }
    }
}
