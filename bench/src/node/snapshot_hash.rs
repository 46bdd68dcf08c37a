//! A hash of a snapshot, by which the driver compares received and published bytes.

use serde::{Deserialize, Serialize};
use tensor_relay_protocol::{Dtype, Shape, TensorName};

/// A hash of the names, dtypes, shapes and bytes of all tensors, in their order. It is independent of tensor-relay's
/// chunk hashes: other code computes it, with another hash function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotHash(String);

/// Computes a [`SnapshotHash`], tensor by tensor.
pub(crate) struct SnapshotHasher(blake3::Hasher);

/// The hash of one tensor's bytes.
pub(crate) type TensorHash = blake3::Hash;

/// Hashes the bytes of one tensor, at several GB/s.
pub(crate) fn hash_bytes(bytes: &[u8]) -> TensorHash {
    blake3::hash(bytes)
}

impl SnapshotHasher {
    pub(crate) fn new() -> Self {
        Self(blake3::Hasher::new())
    }

    /// Adds the next tensor. Each field has a fixed length or is preceded by its length, so different lists of tensors
    /// never hash the same bytes.
    pub(crate) fn add(&mut self, name: &TensorName, dtype: Dtype, shape: &Shape, tensor_hash: &TensorHash) {
        let name = name.as_str().as_bytes();
        self.0.update(&(name.len() as u64).to_le_bytes()).update(name);
        self.0.update(&dtype.code().to_le_bytes());
        self.0.update(&(shape.dimensions().len() as u64).to_le_bytes());
        for dimension in shape.dimensions() {
            self.0.update(&dimension.to_le_bytes());
        }
        self.0.update(tensor_hash.as_bytes());
    }

    pub(crate) fn finish(self) -> SnapshotHash {
        SnapshotHash(self.0.finalize().to_hex().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(tensors: &[(&str, Dtype, &[u64], &[u8])]) -> SnapshotHash {
        let mut hasher = SnapshotHasher::new();
        for (name, dtype, shape, bytes) in tensors {
            hasher.add(
                &TensorName::new(name).unwrap(),
                *dtype,
                &Shape::new(shape).unwrap(),
                &hash_bytes(bytes),
            );
        }
        hasher.finish()
    }

    #[test]
    fn every_field_changes_the_hash() {
        let base = hash(&[("a", Dtype::U8, &[2], b"xy"), ("b", Dtype::U8, &[1], b"z")]);
        assert_eq!(base, hash(&[("a", Dtype::U8, &[2], b"xy"), ("b", Dtype::U8, &[1], b"z")]));
        for other in [
            hash(&[("a", Dtype::U8, &[2], b"xy")]),
            hash(&[("b", Dtype::U8, &[1], b"z"), ("a", Dtype::U8, &[2], b"xy")]),
            hash(&[("c", Dtype::U8, &[2], b"xy"), ("b", Dtype::U8, &[1], b"z")]),
            hash(&[("a", Dtype::I8, &[2], b"xy"), ("b", Dtype::U8, &[1], b"z")]),
            hash(&[("a", Dtype::U8, &[2, 1], b"xy"), ("b", Dtype::U8, &[1], b"z")]),
            hash(&[("a", Dtype::U8, &[2], b"xx"), ("b", Dtype::U8, &[1], b"z")]),
        ] {
            assert_ne!(base, other);
        }
    }
}
