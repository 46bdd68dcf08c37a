//! A hash of a version, by which the harness compares received and published bytes.

use tensor_relay_protocol::{Dtype, Shape, TensorName};

/// Computes a hash of the names, dtypes, shapes and bytes of all tensors, added in any order. It is independent of
/// tensor-relay's chunk hashes: other code computes it, with another hash function.
#[derive(Default)]
pub(super) struct SnapshotHasher(Vec<[u8; blake3::OUT_LEN]>);

impl SnapshotHasher {
    /// Adds a tensor, at several GB/s. Each field has a fixed length or is preceded by its length, so different tensors
    /// never hash the same bytes.
    pub(super) fn add(&mut self, name: &TensorName, dtype: Dtype, shape: &Shape, bytes: &[u8]) {
        let (mut hasher, name) = (blake3::Hasher::new(), name.as_str().as_bytes());
        hasher.update(&(name.len() as u64).to_le_bytes()).update(name);
        hasher.update(&dtype.code().to_le_bytes());
        hasher.update(&(shape.dimensions().len() as u64).to_le_bytes());
        for dimension in shape.dimensions() {
            hasher.update(&dimension.to_le_bytes());
        }
        hasher.update(blake3::hash(bytes).as_bytes());
        self.0.push(hasher.finalize().into());
    }

    /// The hash of all tensors in hexadecimal digits.
    pub(super) fn finish(mut self) -> String {
        self.0.sort_unstable();
        blake3::hash(self.0.as_flattened()).to_hex().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(tensors: &[(&str, Dtype, &[u64], &[u8])]) -> String {
        let mut hasher = SnapshotHasher::default();
        for (name, dtype, shape, bytes) in tensors {
            hasher.add(&TensorName::new(name).unwrap(), *dtype, &Shape::new(shape).unwrap(), bytes);
        }
        hasher.finish()
    }

    #[test]
    fn every_field_changes_the_hash() {
        let base = hash(&[("a", Dtype::U8, &[2], b"xy"), ("b", Dtype::U8, &[1], b"z")]);
        assert_eq!(
            base,
            hash(&[("b", Dtype::U8, &[1], b"z"), ("a", Dtype::U8, &[2], b"xy")]),
            "in any order"
        );
        for other in [
            hash(&[("a", Dtype::U8, &[2], b"xy")]),
            hash(&[("c", Dtype::U8, &[2], b"xy"), ("b", Dtype::U8, &[1], b"z")]),
            hash(&[("a", Dtype::I8, &[2], b"xy"), ("b", Dtype::U8, &[1], b"z")]),
            hash(&[("a", Dtype::U8, &[2, 1], b"xy"), ("b", Dtype::U8, &[1], b"z")]),
            hash(&[("a", Dtype::U8, &[2], b"xx"), ("b", Dtype::U8, &[1], b"z")]),
        ] {
            assert_ne!(base, other);
        }
    }
}
