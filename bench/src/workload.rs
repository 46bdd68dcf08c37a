//! A model that is generated instead of downloaded.

mod content;
mod normal;
mod plan;

use crate::noise;
use content::Content;
use tensor_relay_protocol::{Dtype, TensorName, TensorSpec};

/// Fills `out` with values of `dtype` as models have them; `key` sets them apart from those of other tensors.
pub(crate) fn fill_with_weights(dtype: Dtype, key: u64, out: &mut [u8]) {
    Content::new(dtype, key).fill(0, out);
}

/// The `state_dict` of a small transformer, of any size, made from a seed.
///
/// It has what a real one has and what a transport must be good at: large bf16 matrices whose values are normal with a
/// deviation of 0.02 (so a codec finds the statistics of real weights), and up to two thousand tensors of 4 to 4096
/// bytes. No bytes are held: any piece of any tensor is computed where it is needed, at several GB/s, so that both ends
/// can generate, and check, the same 64 GiB.
///
/// Names, dtypes and shapes depend on the size alone; so another seed is another version of the same model.
#[derive(Debug, Clone)]
pub struct StateDict {
    tensors: Vec<TensorSpec>,
    seed: u64,
}

impl StateDict {
    /// Plans tensors of `size_bytes` in all: never more, and from 1 MiB on at most 1 % less.
    pub fn new(size_bytes: u64, seed: u64) -> Self {
        Self { tensors: plan::plan(size_bytes), seed }
    }

    /// The tensors, in the order in which a framework would list them. None is an alias.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// The size of the tensor at `index`, in bytes.
    ///
    /// # Panics
    /// When there is no such tensor.
    pub fn byte_len(&self, index: usize) -> u64 {
        plan::byte_len(&self.tensors[index])
    }

    /// The size of all tensors together, in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(plan::byte_len).sum()
    }

    /// Writes the bytes of the tensor at `index` that begin at `offset` and fill `out`.
    ///
    /// # Panics
    /// When there is no such tensor, or when the range reaches beyond its end.
    pub fn fill(&self, index: usize, offset: u64, out: &mut [u8]) {
        self.content(index, offset, out.len()).fill(offset, out);
    }

    /// Compares `bytes` with those of the tensor at `index` that begin at `offset`.
    ///
    /// # Errors
    /// The first [`Difference`].
    ///
    /// # Panics
    /// When there is no such tensor, or when the range reaches beyond its end.
    pub fn check(&self, index: usize, offset: u64, bytes: &[u8]) -> Result<(), Difference> {
        let content = self.content(index, offset, bytes.len());
        match content.first_difference(offset, bytes) {
            None => Ok(()),
            Some((offset, expected, found)) => {
                Err(Difference { tensor: self.tensors[index].name.clone(), offset, expected, found })
            }
        }
    }

    /// The content of the tensor at `index`, if `length` bytes at `offset` are inside of it.
    fn content(&self, index: usize, offset: u64, length: usize) -> Content {
        let spec = &self.tensors[index];
        let end = offset.checked_add(length as u64);
        assert!(
            end.is_some_and(|end| end <= plan::byte_len(spec)),
            "{length} bytes at {offset} reach beyond the end of {}",
            spec.name
        );
        Content::new(spec.dtype, noise::at(self.seed, index as u64))
    }
}

/// The first byte that is not what the seed says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("byte {offset} of tensor {tensor} should be {expected:#04x} and is {found:#04x}")]
pub struct Difference {
    /// In which tensor.
    pub tensor: TensorName,
    /// The offset in that tensor.
    pub offset: u64,
    /// The expected byte.
    pub expected: u8,
    /// The found byte.
    pub found: u8,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn whole(model: &StateDict, index: usize) -> Vec<u8> {
        let mut bytes = vec![0; model.byte_len(index) as usize];
        model.fill(index, 0, &mut bytes);
        bytes
    }

    fn largest(model: &StateDict) -> usize {
        (0..model.tensors().len()).max_by_key(|i| model.byte_len(*i)).unwrap()
    }

    /// Bits of information in a byte drawn from `bytes`.
    fn entropy(bytes: impl Iterator<Item = u8>) -> f64 {
        let mut counts = [0u32; 256];
        bytes.for_each(|byte| counts[usize::from(byte)] += 1);
        let total: u32 = counts.iter().sum();
        let shares = counts.iter().filter(|n| **n > 0).map(|n| f64::from(*n) / f64::from(total));
        shares.map(|share| -share * share.log2()).sum()
    }

    #[test]
    fn weights_have_the_statistics_of_weights() {
        let model = StateDict::new(16 << 20, 1);
        let bytes = whole(&model, largest(&model));
        let low = entropy(bytes.iter().copied().step_by(2));
        let high = entropy(bytes.iter().copied().skip(1).step_by(2));
        assert!(low > 7.9, "mantissas are noise: {low:.2} bits");
        assert!((2.0..3.5).contains(&high), "exponents repeat: {high:.2} bits");
    }

    #[test]
    fn a_flipped_bit_is_named() {
        let model = StateDict::new(1 << 20, 3);
        let index = largest(&model);
        let mut bytes = whole(&model, index);
        assert_eq!(model.check(index, 0, &bytes), Ok(()));
        bytes[10_000] ^= 1;
        let difference = model.check(index, 0, &bytes).unwrap_err();
        assert_eq!((difference.offset, difference.found), (10_000, bytes[10_000]));
        assert_eq!(difference.tensor, model.tensors()[index].name);
        assert_eq!(model.check(index, 9_000, &bytes[9_000..]), Err(difference), "from anywhere");
    }

    #[test]
    #[should_panic(expected = "reach beyond the end")]
    fn beyond_the_end_is_nothing() {
        StateDict::new(1 << 20, 3).fill(0, u64::MAX, &mut [0; 2]);
    }

    #[test]
    #[ignore = "a measurement, for a release build: cargo test --release -- --ignored --nocapture fill_speed"]
    fn fill_speed() {
        let model = StateDict::new(1 << 30, 5);
        let index = largest(&model);
        let mut out = vec![1u8; model.byte_len(index).min(64 << 20) as usize];
        for _ in 0..5 {
            let begun = std::time::Instant::now();
            model.fill(index, 0, &mut out);
            let filled = begun.elapsed().as_secs_f64();
            model.check(index, 0, &out).unwrap();
            let checked = begun.elapsed().as_secs_f64() - filled;
            let gigabytes = out.len() as f64 / 1e9;
            println!("fill {:.2} GB/s, check {:.2} GB/s", gigabytes / filled, gigabytes / checked);
        }
    }

    proptest! {
        /// Any range of any tensor holds what the whole tensor holds there.
        #[test]
        fn ranges_agree_with_the_whole(tensor: prop::sample::Index, from: prop::sample::Index, length in 0usize..9000) {
            let model = StateDict::new(2 << 20, 11);
            let index = tensor.index(model.tensors().len());
            let whole = whole(&model, index);
            let from = from.index(whole.len());
            let range = from..(from + length).min(whole.len());
            let mut part = vec![0; range.len()];
            model.fill(index, range.start as u64, &mut part);
            prop_assert_eq!(&part, &whole[range.clone()]);
            prop_assert_eq!(model.check(index, range.start as u64, &part), Ok(()));
        }

        /// Another seed changes the bytes and nothing else; the same one changes nothing. (A tenth of the bytes agree
        /// by chance, since exponents repeat.)
        #[test]
        fn the_seed_decides_the_bytes(seed: u64, other: u64) {
            prop_assume!(seed != other);
            let models = [seed, seed, other].map(|seed| StateDict::new(1 << 20, seed));
            prop_assert_eq!(models[0].tensors(), models[2].tensors());
            let index = largest(&models[0]);
            let [first, again, changed] = models.map(|model| whole(&model, index));
            let same = std::iter::zip(&first, &changed).filter(|(a, b)| a == b).count();
            prop_assert!(same * 5 < first.len(), "{} of {} bytes are the same", same, first.len());
            prop_assert_eq!(first, again);
        }

        /// No two tensors of one dtype begin alike.
        #[test]
        fn tensors_differ_from_each_other(seed: u64) {
            let model = StateDict::new(1 << 20, seed);
            let weights = (0..model.tensors().len()).filter(|i| model.tensors()[*i].dtype == Dtype::Bf16);
            let starts: Vec<[u8; 64]> = weights.map(|i| {
                let mut start = [0; 64];
                model.fill(i, 0, &mut start);
                start
            }).collect();
            let distinct: std::collections::HashSet<_> = starts.iter().collect();
            prop_assert_eq!(distinct.len(), starts.len());
        }
    }
}
