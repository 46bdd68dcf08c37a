//! The tensors of a model of a given size.

use tensor_relay_protocol::{Dtype, Shape, TensorName, TensorSpec};

/// Plans a model of at most `size_bytes`: small tensors, called adapters, and a transformer of the remaining size.
pub(super) fn plan(size_bytes: u64) -> Vec<TensorSpec> {
    let small = adapters(size_bytes / ADAPTERS_SHARE);
    let small_bytes: u64 = small.iter().map(byte_len).sum();
    let mut tensors = Transformer::of_size((size_bytes - small_bytes) / 2).weights();
    tensors.extend(small);
    tensors
}

/// The size of a planned tensor. Elements of its dtype have whole bytes, and the sum of all sizes fits 64 bits.
pub(super) fn byte_len(spec: &TensorSpec) -> u64 {
    spec.shape.elements() * u64::from(spec.dtype.bits() / 8)
}

/// The shape of a Llama-like model.
#[derive(Debug)]
struct Transformer {
    hidden: u64,
    layers: u64,
    vocabulary: u64,
}

impl Transformer {
    /// Divides `parameters`: as many layers as fit into nine tenths, and embeddings of the remainder.
    fn of_size(parameters: u64) -> Self {
        let hidden = hidden_size(parameters);
        let layer_parameters: u64 = layer(hidden).iter().map(|(_, dimensions)| product(dimensions)).sum();
        let layers = (parameters - parameters / 10) / layer_parameters;
        let remainder = (parameters - layers * layer_parameters).saturating_sub(hidden);
        Self { hidden, layers, vocabulary: remainder / (2 * hidden) }
    }

    fn weights(&self) -> Vec<TensorSpec> {
        let embedding = [self.vocabulary, self.hidden];
        let mut weights = vec![bf16("model.embed_tokens.weight", &embedding)];
        for index in 0..self.layers {
            for (name, dimensions) in layer(self.hidden) {
                weights.push(bf16(&format!("model.layers.{index}.{name}"), &dimensions));
            }
        }
        weights.push(bf16("model.norm.weight", &[self.hidden]));
        weights.push(bf16("lm_head.weight", &embedding));
        weights
    }
}

/// The width of a model with `parameters`: models have about width³ / 10 parameters (8 × 10⁹ for a width of 4096).
fn hidden_size(parameters: u64) -> u64 {
    let fits = |hidden: &u64| u128::from(*hidden).pow(3) <= 10 * u128::from(parameters);
    let sizes = (1..).map(|n| n * HIDDEN_STEP);
    sizes.take_while(fits).last().unwrap_or(HIDDEN_STEP)
}

/// The matrices and vectors of one layer, with one head of keys and values for four heads of queries.
fn layer(hidden: u64) -> [(&'static str, Vec<u64>); 9] {
    let (key_value_width, mlp_width) = (hidden / 4, hidden / 4 * 11);
    [
        ("input_layernorm.weight", vec![hidden]),
        ("self_attn.q_proj.weight", vec![hidden, hidden]),
        ("self_attn.k_proj.weight", vec![key_value_width, hidden]),
        ("self_attn.v_proj.weight", vec![key_value_width, hidden]),
        ("self_attn.o_proj.weight", vec![hidden, hidden]),
        ("post_attention_layernorm.weight", vec![hidden]),
        ("mlp.gate_proj.weight", vec![mlp_width, hidden]),
        ("mlp.up_proj.weight", vec![mlp_width, hidden]),
        ("mlp.down_proj.weight", vec![hidden, mlp_width]),
    ]
}

/// Up to two thousand small tensors that take no more than `budget_bytes`.
fn adapters(budget_bytes: u64) -> Vec<TensorSpec> {
    let mut remaining = budget_bytes;
    let fits = |spec: &TensorSpec| match remaining.checked_sub(byte_len(spec)) {
        Some(bytes) => {
            remaining = bytes;
            true
        }
        None => false,
    };
    (0..ADAPTERS_MAX).map(adapter).take_while(fits).collect()
}

/// A bias, a scale or a step counter, of 4 to 4096 bytes.
fn adapter(index: u64) -> TensorSpec {
    let (name, dtype) = match index % 3 {
        0 => ("bias", Dtype::F32),
        1 => ("scale", Dtype::F32),
        _ => ("steps", Dtype::I64),
    };
    let bytes = 4 << (index % 11);
    let elements = (bytes / u64::from(dtype.bits() / 8)).max(1);
    spec(&format!("model.adapters.{index}.{name}"), dtype, &[elements])
}

fn bf16(name: &str, dimensions: &[u64]) -> TensorSpec {
    spec(name, Dtype::Bf16, dimensions)
}

fn spec(name: &str, dtype: Dtype, dimensions: &[u64]) -> TensorSpec {
    let name = TensorName::new(name).expect("the plan's names are short ASCII words and numbers");
    let shape = Shape::new(dimensions).expect("the plan divides a u64 of bytes, so no product overflows");
    TensorSpec::new(name, dtype, shape)
}

fn product(dimensions: &[u64]) -> u64 {
    dimensions.iter().product()
}

/// Widths of real models are multiples of this, because heads are 64 or 128 wide.
const HIDDEN_STEP: u64 = 64;

/// The maximum number of small tensors: enough to show their cost, and as many as a checkpoint with biases and
/// quantisation scales has.
const ADAPTERS_MAX: u64 = 2000;

/// Small tensors take at most one part in sixteen, so that a tiny model is still mostly matrices.
const ADAPTERS_SHARE: u64 = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tensor_relay_protocol::{Limits, Manifest};

    #[test]
    fn a_gibibyte_resembles_a_real_model() {
        let model = Transformer::of_size(1 << 29);
        assert_eq!((model.hidden, model.layers), (1728, 15), "{model:?}");
        assert!((10_000..60_000).contains(&model.vocabulary), "{model:?}");
        let small = plan(1 << 30).iter().filter(|t| (4..=4096).contains(&byte_len(t))).count();
        assert!(small >= 2000, "{small} small tensors");
    }

    #[test]
    fn absurd_sizes_do_not_panic() {
        for size_bytes in [0, 1, 1000, 100_000, u64::MAX] {
            plan(size_bytes);
        }
    }

    proptest! {
        /// From 1 MiB to 64 GiB, all tensors together have the requested size or at most 1 % less, and the protocol
        /// accepts them.
        #[test]
        fn sizes_add_up(exponent in 20f64..=36.0) {
            let size_bytes = exponent.exp2() as u64;
            let tensors = plan(size_bytes);
            let sum: u64 = tensors.iter().map(byte_len).sum();
            prop_assert!(sum <= size_bytes && sum >= size_bytes / 100 * 99, "{} of {}", sum, size_bytes);
            prop_assert!(tensors.iter().all(|t| t.alias_of.is_none() && byte_len(t) >= 4));
            let manifest = Manifest::layout(tensors, vec![], 4 << 20, &Limits::default());
            prop_assert!(manifest.is_ok(), "{:?}", manifest);
        }
    }
}
