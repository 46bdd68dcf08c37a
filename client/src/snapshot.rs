//! What a subscriber gets: the tensors of one version, whole and verified.

use bytes::Bytes;
use std::{sync::Arc, time::Duration};
use tensor_relay_protocol::{Manifest, Metadata, Tensor, VersionId};

/// The tensors of one committed version.
///
/// The payload lies in one piece of memory, each tensor aligned to 256 bytes, and is shared by clones. When the last
/// clone, and every `Bytes` taken from it, is gone, the memory is used again for a later version.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub(crate) id: VersionId,
    pub(crate) manifest: Arc<Manifest>,
    pub(crate) payload: Bytes,
    pub(crate) metadata: Metadata,
    pub(crate) skipped: u64,
    pub(crate) receipt: Receipt,
}

/// What it took to receive a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receipt {
    /// From the announcement to the commit.
    pub duration: Duration,
    /// The bytes that came over the network, as encoded, without headers and retransmissions.
    pub wire_bytes: u64,
    /// The chunks that were verified.
    pub chunks: u32,
}

impl Snapshot {
    /// Which version.
    pub fn id(&self) -> &VersionId {
        &self.id
    }

    /// What it holds, and the metadata that all versions of this manifest share.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// What the publisher said of this version.
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }

    /// How many versions were published and not delivered since the snapshot before this one.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// What it took to receive it.
    pub fn receipt(&self) -> Receipt {
        self.receipt
    }

    /// The bytes of the tensor called `name`, without a copy.
    pub fn tensor(&self, name: &str) -> Option<Bytes> {
        self.manifest.tensor(name).map(|tensor| self.bytes(tensor))
    }

    /// Every tensor with its bytes, in the order in which they were published.
    pub fn tensors(&self) -> impl Iterator<Item = (&Tensor, Bytes)> {
        self.manifest.tensors().iter().map(|tensor| (tensor, self.bytes(tensor)))
    }

    pub(crate) fn bytes(&self, tensor: &Tensor) -> Bytes {
        let range = tensor.range();
        self.payload.slice(range.start as usize..range.end as usize)
    }
}
