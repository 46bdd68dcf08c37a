//! The choice of a codec for each chunk.

use super::{CodecId, CodecSet, SizeEstimate};

/// The codec of a topic's or a subscription's chunks, or the choice of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum CodecChoice {
    /// Each chunk by a sample of its bytes, with the effort that measurements of this subscription favour.
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

/// The level of effort: the processor time that may be spent to make chunks smaller.
///
/// Three levels and not rates of codecs and links: a rate of a codec is a constant of one processor, and a rate of a link
/// that is shared with encoding says nothing. Which level is fastest is measured where it runs. What is encoded for one
/// subscriber is used for all with the same level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Effort {
    /// Everything travels raw.
    None,
    /// Codecs that one core encodes at several GB/s: bit planes, and zstd for chunks that shrink to almost nothing.
    #[default]
    Light,
    /// Whatever makes a chunk smallest.
    Full,
}

impl Effort {
    /// Every level, the cheapest first.
    pub const ALL: [Self; 3] = [Self::None, Self::Light, Self::Full];
}

/// The share of a chunk below which zstd finds mostly repeats, which it encodes several times as fast as other bytes.
const REPEATS_SHARE: f32 = 0.1;

/// Of two codecs whose results differ less than this, the one that costs less is taken.
const SMALLER_MIN: f32 = 1.03;

/// The codecs that encode without a base, the cheapest first.
const BY_COST: [CodecId; 4] = [CodecId::Raw, CodecId::BitPlanes, CodecId::Zstd, CodecId::Planes];

impl SizeEstimate {
    /// The codec of `offered` that makes such a chunk smallest within `effort`; raw where none of them saves enough.
    pub fn choose(&self, offered: CodecSet, effort: Effort) -> CodecId {
        let candidates = || {
            let is_allowed = |codec: &CodecId| offered.contains(*codec) && self.is_within(*codec, effort);
            let share = |codec: CodecId| Some((codec, self.share(codec)?));
            BY_COST.into_iter().filter(is_allowed).filter_map(share)
        };
        let smallest = candidates().map(|(_, share)| share).fold(1.0, f32::min);
        let mut good = candidates().filter(|(_, share)| *share <= smallest * SMALLER_MIN);
        good.next().map_or(CodecId::Raw, |(codec, _)| codec)
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

    /// The shares are those measured on real tensors, named in the comments.
    #[test]
    fn each_effort_gets_the_smallest_that_it_allows() {
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
        /// Whatever an estimate says: only what is offered is chosen, only what gains something, and with full effort
        /// nothing that is offered would be smaller by more than 3 %.
        #[test]
        fn nothing_offered_is_much_smaller(
            shares in prop::collection::vec(prop::option::of(0.0f32..0.97), CodecId::ALL.len()),
            offered in prop::collection::vec(0u32..8, 0..5), effort in 0..Effort::ALL.len(),
        ) {
            let found = CodecId::ALL.iter().zip(shares).filter_map(|(id, share)| Some((*id, share?)));
            let found: Vec<_> = found.filter(|(id, _)| !matches!(id, CodecId::Raw | CodecId::Sparse)).collect();
            let (estimate, offered) = (SizeEstimate::with(&found), CodecSet::from_codes(&offered));
            let chosen = estimate.choose(offered, Effort::ALL[effort]);
            prop_assert!(offered.contains(chosen));
            let share = estimate.share(chosen).expect("what does not gain is not chosen");
            let full = estimate.share(estimate.choose(offered, Effort::Full)).unwrap();
            prop_assert!(full <= share * SMALLER_MIN);
            for (_, other) in found.iter().filter(|(id, _)| offered.contains(*id)) {
                prop_assert!(full <= other * SMALLER_MIN * 1.000_001);
            }
        }
    }
}
