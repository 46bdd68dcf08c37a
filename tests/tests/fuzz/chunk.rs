//! Random chunks of every dtype and many lengths, with compressible and incompressible content.

use rand::{Rng, RngExt};
use tensor_relay_protocol::{CodecId, Context, Dtype, codec};

/// The maximum length of nine in ten chunks: long enough for several blocks of short elements.
const BYTES_MAX: usize = 40_000;

/// The maximum length of any chunk: long enough for several blocks of long elements. Longer encodings have the same
/// parts, and would take the time of many short ones.
const LONG_BYTES_MAX: usize = 200_000;

/// A chunk and its base.
pub(crate) struct Chunk {
    pub(crate) dtype: Dtype,
    pub(crate) base: Vec<u8>,
    pub(crate) raw: Vec<u8>,
}

impl Chunk {
    /// A random chunk: one in two is very short, one in ten may be long.
    pub(crate) fn random(rng: &mut impl Rng) -> Self {
        let dtype = Dtype::ALL[rng.random_range(0..Dtype::ALL.len())];
        let len_max = match rng.random_range(0..10) {
            0..5 => 200,
            5..9 => BYTES_MAX,
            _ => LONG_BYTES_MAX,
        };
        let len = rng.random_range(0..len_max);
        let raw = content(rng, len);
        let base = base_of(rng, &raw);
        Self { dtype, base, raw }
    }

    /// The encoding by the codec `id`, if the codec encodes it.
    pub(crate) fn encode(&self, id: CodecId) -> Option<Vec<u8>> {
        let mut out = vec![0; self.raw.len() + 1000];
        let context = Context { dtype: self.dtype, base: Some(&self.base) };
        let bytes = codec(id).encode(context, &self.raw, &mut out)?;
        out.truncate(bytes);
        Some(out)
    }
}

fn content(rng: &mut impl Rng, len: usize) -> Vec<u8> {
    match rng.random_range(0..5) {
        0 => vec![rng.random(); len],
        1 => (0..len).map(|_| rng.random()).collect(),
        2 => (0..len).map(|_| rng.random_range(0..4)).collect(),
        3 => (0..len)
            .map(|at| if at % 2 == 0 { rng.random() } else { 0x3b + rng.random_range(0..3u8) })
            .collect(),
        _ => weights(rng, len),
    }
}

/// Random `f32` numbers near 0, like a model's weights. Their upper halves are `bf16` numbers.
fn weights(rng: &mut impl Rng, len: usize) -> Vec<u8> {
    let mut weight = || (0..6).map(|_| rng.random_range(-0.05..0.05f32)).sum::<f32>();
    (0..len.div_ceil(4)).flat_map(|_| weight().to_le_bytes()).take(len).collect()
}

/// A base for `raw`: the same bytes, of which few or many are changed.
fn base_of(rng: &mut impl Rng, raw: &[u8]) -> Vec<u8> {
    let mut base = raw.to_vec();
    let one_in = [8, 100, 3000][rng.random_range(0..3)];
    for byte in &mut base {
        if rng.random_ratio(1, one_in) {
            *byte ^= 1 << [0, 0, 0, 0, 1, 7][rng.random_range(0..6)];
        }
    }
    base
}
