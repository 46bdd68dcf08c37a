//! Staged versions: tensors copied to the server's own memory, laid out and hashed, ready to be sent.

use crate::bases::Bases;
use bytes::Bytes;
use std::{convert::Infallible, sync::Arc};
use tensor_relay_device::{AllocError, HostMemory, HostSource, Region};
use tensor_relay_protocol::{ChunkHash, LayoutError, Limits, Manifest, Metadata, TensorSpec, VersionDigest};
use tensor_relay_transport::{Workers, egress::Payload};

/// The staging of a server: its memory, chunk size, limits and workers. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Staging {
    pub(crate) memory: HostMemory,
    /// The bases in that memory, evicted when a new version needs room.
    pub(crate) bases: Arc<Bases>,
    pub(crate) chunk_bytes: u32,
    pub(crate) limits: Limits,
    pub(crate) workers: Workers,
}

/// A staged version, in the server's memory: the producer may change its tensors while the version is sent.
///
/// Costs the payload's size in memory, which is reused between versions, and one pass of copying and one of hashing.
#[derive(Debug)]
pub struct Staged {
    pub(crate) payload: Payload,
    digest: VersionDigest,
    /// The workers for later work on the version.
    pub(crate) workers: Workers,
}

/// Why tensors cannot be staged. `E` is the error of the callback that fills them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StageError<E: std::error::Error + 'static = Infallible> {
    /// They cannot be laid out together.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// There is no memory for them.
    #[error(transparent)]
    Memory(#[from] AllocError),
    /// Their bytes could not be read.
    #[error(transparent)]
    Fill(E),
    /// The source of a borrowed version is not as long as its tensors laid out.
    #[error(
        "the tensors laid out take {payload_bytes} bytes, but the source to borrow them from has {source_bytes}"
    )]
    Source {
        /// The size of the layout.
        payload_bytes: u64,
        /// The length of the source.
        source_bytes: u64,
    },
}

impl Staging {
    /// Frees the cached memory of released versions: for producers that move versions onto a device.
    pub fn release_cached(&self) {
        self.memory.release_cached();
    }

    /// Allocates memory for a version of `len` bytes; releases bases if there is too little memory.
    pub(crate) fn allocate(&self, len: usize) -> Result<Region, AllocError> {
        match self.memory.allocate(len) {
            Err(AllocError::OverBudget { .. } | AllocError::OverCgroup { .. } | AllocError::Os { .. })
                if self.bases.release_all() =>
            {
                self.memory.allocate(len)
            }
            given => given,
        }
    }

    pub(crate) fn lay_out(
        &self,
        specs: Vec<TensorSpec>,
        metadata: Metadata,
    ) -> Result<Manifest, LayoutError> {
        Manifest::layout(specs, metadata, self.chunk_bytes, &self.limits)
    }
}

impl<E: std::error::Error> StageError<E> {
    /// Returns the error of the fill callback as `Ok`, and any other error, without the type parameter, as `Err`.
    pub(crate) fn into_fill(self) -> Result<E, StageError> {
        match self {
            Self::Fill(error) => Ok(error),
            Self::Layout(error) => Err(StageError::Layout(error)),
            Self::Memory(error) => Err(StageError::Memory(error)),
            Self::Source { payload_bytes, source_bytes } => {
                Err(StageError::Source { payload_bytes, source_bytes })
            }
        }
    }
}

impl Staged {
    /// Lays `specs` out and calls `fill` to write the bytes of each tensor except aliases, given its index in `specs`.
    /// Blocks for `fill` and a pass of hashing at about 10 GB/s: do not call it on an executor's thread.
    ///
    /// # Errors
    /// [`StageError`]; then no memory stays allocated.
    pub fn new<E: std::error::Error>(
        staging: &Staging,
        specs: Vec<TensorSpec>,
        metadata: Metadata,
        mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<Self, StageError<E>> {
        let stored: Vec<bool> = specs.iter().map(|spec| spec.alias_of.is_none()).collect();
        let manifest = staging.lay_out(specs, metadata)?;
        let mut region = staging.allocate(manifest.payload_bytes() as usize)?;
        let mut order: Vec<usize> = (0..stored.len()).filter(|i| stored[*i]).collect();
        order.sort_by_key(|i| manifest.tensors()[*i].range().start);
        let mut end = 0;
        for index in order {
            let range = manifest.tensors()[index].range();
            let (start, stop) = (range.start as usize, range.end as usize);
            if start < stop {
                region[end..start].fill(0);
                end = stop;
            }
            fill(index, &mut region[start..stop]).map_err(StageError::Fill)?;
        }
        region[end..].fill(0);
        let bytes = region.freeze();
        let chunks = manifest.chunking().iter();
        let hashes: Vec<ChunkHash> = chunks
            .map(|(_, range)| ChunkHash::of(&bytes[range.start as usize..range.end as usize]))
            .collect();
        Ok(Self::hashed(staging, manifest, bytes, &hashes))
    }

    /// A version whose chunks are hashed already: one hash for each, in order.
    pub(crate) fn hashed(staging: &Staging, manifest: Manifest, bytes: Bytes, hashes: &[ChunkHash]) -> Self {
        let digest = VersionDigest::of(manifest.digest(), hashes.iter().copied());
        let payload = Payload::with_hashes(Arc::new(manifest), Arc::new(HostSource::new(bytes)), hashes);
        Self { payload, digest, workers: staging.workers }
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        self.payload.manifest()
    }

    /// The version's digest: equal tensors, laid out alike, have equal digests.
    pub fn digest(&self) -> VersionDigest {
        self.digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::{Dtype, Shape, TensorName};

    fn spec(name: &str, elements: u64) -> TensorSpec {
        TensorSpec::new(TensorName::new(name).unwrap(), Dtype::U8, Shape::new(&[elements]).unwrap())
    }

    fn stage(memory: &HostMemory, value: u8) -> Staged {
        let staging = Staging {
            memory: memory.clone(),
            bases: Arc::default(),
            chunk_bytes: 1024,
            limits: Limits::default(),
            workers: Workers::Inline,
        };
        let specs = vec![spec("a", 3), spec("none", 0), spec("b", 2000), spec("c", 300)];
        Staged::new::<Infallible>(&staging, specs, vec![], |_, out| {
            out.fill(value);
            Ok(())
        })
        .unwrap()
    }

    /// Reused memory holds an older version's bytes. The padding between tensors must not expose them, nor change
    /// the digest.
    #[test]
    fn reused_memory_does_not_change_the_digest() {
        let memory = HostMemory::new(1 << 20);
        let first = stage(&memory, 1).digest();
        drop(stage(&memory, 0xff));
        assert_eq!(stage(&memory, 1).digest(), first);
        assert_ne!(stage(&memory, 2).digest(), first);
        assert!(memory.stats().reused >= 2, "{:?}", memory.stats());
    }

    #[test]
    fn a_version_over_budget_is_refused_with_sizes() {
        let staging = Staging {
            memory: HostMemory::new(1 << 12),
            bases: Arc::default(),
            chunk_bytes: 1024,
            limits: Limits::default(),
            workers: Workers::Inline,
        };
        let error =
            Staged::new::<Infallible>(&staging, vec![spec("a", 1 << 20)], vec![], |_, _| Ok(())).unwrap_err();
        assert!(
            matches!(error, StageError::Memory(AllocError::OverBudget { asked_bytes: 1_048_576, .. })),
            "{error}"
        );
    }
}
