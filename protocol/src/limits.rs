//! Limits on what one end accepts from the other.

/// The limits of one end for manifests and chunks. They come from its configuration, never from the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The largest encoded manifest accepted, in bytes. Default 32 MiB: a hundred thousand tensors with names of 80
    /// bytes take 10 MiB.
    pub manifest_bytes: u32,
    /// The most tensors in one snapshot, and the most entries of a manifest's metadata. Default 262,144. Limits the
    /// memory for a small hostile manifest.
    pub tensors: usize,
    /// The largest payload accepted, in bytes. Default 1 TiB, far more than memory budgets usually allow.
    pub payload_bytes: u64,
    /// The largest chunk accepted, in bytes. Default 64 MiB.
    pub chunk_bytes: u32,
    /// The most chunks in one version. Default 2^20, which is 4 TiB in chunks of 4 MiB.
    pub chunks: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            manifest_bytes: 32 << 20,
            tensors: 1 << 18,
            payload_bytes: 1 << 40,
            chunk_bytes: 64 << 20,
            chunks: 1 << 20,
        }
    }
}
