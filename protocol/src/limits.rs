//! Limits on what one end accepts from the other.

/// The limits of one end for manifests and chunks. They come from its configuration, never from the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The largest encoded manifest accepted, in bytes. Default 128 MiB: half a million tensors with names of 80
    /// bytes take 55 MiB.
    pub manifest_bytes: u32,
    /// The most tensors in one snapshot, and the most entries of a manifest's metadata. Default 2^20, twice as many
    /// as the largest published models have. Limits the memory for a small hostile manifest, to about 200 MiB.
    pub tensors: usize,
    /// The largest payload accepted, in bytes. Default 4 TiB, far more than memory budgets usually allow.
    pub payload_bytes: u64,
    /// The largest chunk accepted, in bytes. Default 64 MiB.
    pub chunk_bytes: u32,
    /// The most chunks in one version. Default 2^20, which is 4 TiB in chunks of 4 MiB.
    pub chunks: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            manifest_bytes: 128 << 20,
            tensors: 1 << 20,
            payload_bytes: 4 << 40,
            chunk_bytes: 64 << 20,
            chunks: 1 << 20,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Manifest, Shape, TensorName, TensorSpec};

    /// Goal: the largest published models fit: 82,432 routed experts, each with three projections of packed weights and
    /// scales, 1.6 TB in all. Method: lay one out, and read its manifest.
    #[test]
    fn todays_largest_models_fit() {
        let spec = |number: u64| {
            let (layer, expert, projection) = (number / 5_376 + 1, number / 6 % 896, number % 6 / 2 + 1);
            let (part, dtype, bytes) = match number % 2 {
                0 => ("weight_packed", Dtype::U8, 6_193_152),
                _ => ("weight_scale", Dtype::F8E4M3Fn, 193_536),
            };
            let name = format!(
                "language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.w{projection}.{part}"
            );
            TensorSpec::new(TensorName::new(&name).unwrap(), dtype, Shape::new(&[bytes]).unwrap())
        };
        let limits = Limits::default();
        let manifest = Manifest::layout((0..494_592).map(spec).collect(), vec![], 4 << 20, &limits).unwrap();
        assert!(manifest.payload_bytes() > 1_570_000_000_000, "{}", manifest.payload_bytes());
        let encoded_bytes = manifest.encoded().len();
        assert!((30 << 20..80 << 20).contains(&encoded_bytes), "{encoded_bytes}");
        assert!(Manifest::decode(manifest.encoded().clone(), &limits).unwrap() == manifest);
    }
}
