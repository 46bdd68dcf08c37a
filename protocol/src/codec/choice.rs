//! The choice of a codec for each chunk.

use super::{CodecId, CodecSet, SizeEstimate};

/// The setting that selects the codec for the chunks of a topic or a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum CodecChoice {
    /// A codec per chunk, chosen by a sample of its bytes and by the [`Effort`] that is fastest for the subscription.
    #[default]
    Auto,
    /// This codec for each chunk that it shrinks, if the receiver can decode it; otherwise raw.
    Fixed(CodecId),
}

impl From<CodecId> for CodecChoice {
    fn from(codec: CodecId) -> Self {
        Self::Fixed(codec)
    }
}

/// The size in bytes below which [`CodecChoice::Auto`] sends a chunk raw: on usual links encoding saves less time than
/// waking a worker takes.
pub const SMALL_BYTES: usize = 16 << 10;

/// The level of effort: the processor time that may be spent to make chunks smaller.
///
/// The sender chooses a level from what it measures: the rate, and the sizes and times of encoded samples. Subscribers
/// with the same level share encoded chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Effort {
    /// Every chunk is sent raw.
    None,
    /// Codecs that one core encodes at several GB/s: bit planes, and zstd for chunks that shrink to almost nothing.
    #[default]
    Light,
    /// Any codec: the one that makes a chunk smallest is chosen.
    Full,
}

impl Effort {
    /// Every level, the cheapest first.
    pub const ALL: [Self; 3] = [Self::None, Self::Light, Self::Full];
}

/// If zstd's encoding is smaller than this share of the raw bytes, the chunk consists mostly of repeats, which zstd
/// encodes several times as fast as other bytes.
const REPEATS_SHARE: f32 = 0.1;

/// The factor by which an encoding must be smaller than that of a cheaper codec to be chosen.
const SMALLER_MIN: f32 = 1.03;

/// The codecs that encode without a base, the cheapest first.
const BY_COST: [CodecId; 4] = [CodecId::Raw, CodecId::BitPlanes, CodecId::Zstd, CodecId::Planes];

impl SizeEstimate {
    /// The codec of `offered` that makes the estimated chunk smallest within `effort`, or a cheaper one whose encoding
    /// is nearly as small; raw if none saves enough.
    pub fn choose(&self, offered: CodecSet, effort: Effort) -> CodecId {
        let candidates = || {
            let is_allowed = |codec: &CodecId| offered.contains(*codec) && self.is_within(*codec, effort);
            let share = |codec: CodecId| Some((codec, self.share(codec)?));
            BY_COST.into_iter().filter(is_allowed).filter_map(share)
        };
        let smallest = candidates().map(|(_, share)| share).fold(1.0, f32::min);
        let mut near_smallest = candidates().filter(|(_, share)| *share <= smallest * SMALLER_MIN);
        near_smallest.next().map_or(CodecId::Raw, |(codec, _)| codec)
    }

    fn is_within(&self, codec: CodecId, effort: Effort) -> bool {
        match (codec, effort) {
            (CodecId::Raw, _) | (_, Effort::Full) | (CodecId::BitPlanes, Effort::Light) => true,
            (CodecId::Zstd, Effort::Light) => self.share(codec).is_some_and(|share| share < REPEATS_SHARE),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BIT_PLANES: CodecId = CodecId::BitPlanes;
    const PLANES: CodecId = CodecId::Planes;

    /// The choice at each level of effort.
    fn at_each_effort(shares: &[(CodecId, f32)]) -> [CodecId; 3] {
        let estimate = SizeEstimate::with(shares);
        Effort::ALL.map(|effort| estimate.choose(CodecSet::all(), effort))
    }

    /// The shares were measured on the models named in the comments.
    #[test]
    fn each_effort_chooses_its_smallest_codec() {
        let weights: &[_] = &[(BIT_PLANES, 0.671), (PLANES, 0.664)]; // MiniLM, bf16
        assert_eq!(at_each_effort(weights), [CodecId::Raw, BIT_PLANES, BIT_PLANES]);
        let rounded: &[_] = &[(BIT_PLANES, 0.836), (PLANES, 0.616)]; // CREPE, f32 with few bits of mantissa
        assert_eq!(at_each_effort(rounded), [CodecId::Raw, BIT_PLANES, PLANES]);
        let integers: &[_] = &[(CodecId::Zstd, 0.576), (PLANES, 0.576)]; // Kokoro, i8
        assert_eq!(at_each_effort(integers), [CodecId::Raw, CodecId::Raw, CodecId::Zstd]);
        let zeros: &[_] = &[(CodecId::Zstd, 0.01), (PLANES, 0.02)];
        assert_eq!(at_each_effort(zeros), [CodecId::Raw, CodecId::Zstd, CodecId::Zstd]);
        assert_eq!(at_each_effort(&[]), [CodecId::Raw; 3]);
    }

    proptest! {
        /// For any estimate: only an offered codec that shrinks the chunk is chosen, and with full effort no offered
        /// codec would make it smaller by more than 3 %.
        #[test]
        fn nothing_offered_is_much_smaller(
            shares in prop::collection::vec(prop::option::of(0.0f32..0.97), CodecId::ALL.len()),
            offered in prop::collection::vec(0u32..8, 0..5), effort in 0..Effort::ALL.len(),
        ) {
            let shares = CodecId::ALL.iter().zip(shares).filter_map(|(id, share)| Some((*id, share?)));
            let shares: Vec<_> = shares.filter(|(id, _)| !matches!(id, CodecId::Raw | CodecId::Sparse)).collect();
            let (estimate, offered) = (SizeEstimate::with(&shares), CodecSet::from_codes(&offered));
            let chosen = estimate.choose(offered, Effort::ALL[effort]);
            prop_assert!(offered.contains(chosen));
            let share = estimate.share(chosen).expect("the chosen codec has an estimate");
            let full = estimate.share(estimate.choose(offered, Effort::Full)).unwrap();
            prop_assert!(full <= share * SMALLER_MIN);
            for (_, other) in shares.iter().filter(|(id, _)| offered.contains(*id)) {
                prop_assert!(full <= other * SMALLER_MIN * 1.000_001);
            }
        }
    }
}
