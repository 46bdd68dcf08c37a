//! Staged versions: tensors copied to the server's own memory and laid out, ready to be sent.

mod targets;

use crate::{bases::Bases, hashing, layouts::Layouts};
use std::{collections::BTreeMap, convert::Infallible, sync::Arc};
use targets::Target;
use tensor_relay_device::{AllocError, HostMemory, HostSource, Region};
use tensor_relay_protocol::{LayoutError, Limits, Manifest, Metadata, TensorSpec, VersionDigest};
use tensor_relay_transport::{IN_PLACE_BYTES, Workers, egress::Payload};

/// The staging of a server: its memory, chunk size, limits and workers. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Staging {
    pub(crate) memory: HostMemory,
    /// The bases in that memory, evicted when a new version needs room.
    pub(crate) bases: Arc<Bases>,
    pub(crate) chunk_bytes: u32,
    pub(crate) limits: Limits,
    pub(crate) workers: Workers,
    pub(crate) layouts: Arc<Layouts>,
}

/// A staged version, in the server's memory: the producer may change its tensors while the version is sent.
///
/// Costs the payload's size in memory, which is reused between versions, and one pass of copying. Larger versions than
/// 64 KiB are hashed after they were published: in the background, or when they are sent.
#[derive(Debug)]
pub struct Staged {
    pub(crate) payload: Payload,
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

    /// Prepares memory for the next version of `payload_bytes`, in the background. For publishers of one version after the
    /// other: the memory that the first version needs is new, and to allocate it takes the kernel longer than to copy. Takes
    /// no more memory than the next version takes in any case, but earlier; it returns to the system if it is not used within a
    /// minute.
    pub fn prepare(&self, payload_bytes: u64) {
        self.memory.prepare(payload_bytes as usize);
    }

    /// Allocates memory for a version of `len` bytes; if there is too little memory, waits until the background
    /// has hashed its chunk of a replaced version, and releases bases.
    pub(crate) fn allocate(&self, len: usize) -> Result<Region, AllocError> {
        let is_full = |given: &Result<Region, AllocError>| match given {
            Err(AllocError::OverBudget { .. } | AllocError::OverCgroup { .. } | AllocError::Os { .. }) => {
                true
            }
            Ok(_) | Err(_) => false,
        };
        let mut given = self.memory.allocate(len);
        if is_full(&given) && hashing::wait_until_released() {
            given = self.memory.allocate(len);
        }
        if is_full(&given) && self.bases.release_all() {
            given = self.memory.allocate(len);
        }
        given
    }

    pub(crate) fn lay_out(
        &self,
        specs: Vec<TensorSpec>,
        metadata: Metadata,
    ) -> Result<Arc<Manifest>, LayoutError> {
        let lay_out = |specs, metadata| Manifest::layout(specs, metadata, self.chunk_bytes, &self.limits);
        self.layouts.find_or(specs, metadata, lay_out)
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
    /// Blocks for `fill`: do not call it on an executor's thread. A tensor in pieces is written to memory of its own
    /// first, and copied from there.
    ///
    /// # Errors
    /// [`StageError`]; then no memory stays allocated.
    pub fn new<E: std::error::Error>(
        staging: &Staging,
        specs: Vec<TensorSpec>,
        metadata: Metadata,
        mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<Self, StageError<E>> {
        Self::filled(staging, specs, metadata, |targets| {
            let mut in_pieces: BTreeMap<usize, Vec<Target<'_>>> = BTreeMap::new();
            for target in targets {
                match target.into_tensor() {
                    Ok((tensor, out)) => fill(tensor, out).map_err(StageError::Fill)?,
                    Err(piece) => in_pieces.entry(piece.tensor).or_default().push(piece),
                }
            }
            for (tensor, pieces) in in_pieces {
                let bytes = pieces.iter().map(|piece| piece.out.len()).sum();
                let mut whole = staging.allocate(bytes)?;
                fill(tensor, &mut whole).map_err(StageError::Fill)?;
                pieces.into_iter().for_each(|piece| piece.copy_from(&whole));
            }
            Ok(())
        })
    }

    /// Like [`new`](Self::new), with several threads: calls `copy` for parts of the tensors, given the index of the
    /// tensor and the offset of the part in it. For tensors in memory, where one thread does not reach the memory's rate.
    /// The parts of a tensor in pieces are as long as the runs in which a piece lies in the tensor.
    ///
    /// # Errors
    /// [`StageError`]; then no memory stays allocated.
    pub fn copied<E: std::error::Error + Send>(
        staging: &Staging,
        specs: Vec<TensorSpec>,
        metadata: Metadata,
        copy: impl Fn(usize, usize, &mut [u8]) -> Result<(), E> + Sync,
    ) -> Result<Self, StageError<E>> {
        Self::filled(staging, specs, metadata, |targets| {
            let payload_bytes: usize = targets.iter().map(|target| target.out.len()).sum();
            let workers = if payload_bytes <= COPY_BYTES { Workers::Inline } else { staging.workers };
            let part_bytes = payload_bytes.div_ceil(workers.threads()).max(COPY_BYTES);
            let parts = targets.into_iter().flat_map(|target| target.split(part_bytes));
            let copied = workers.each(parts.collect(), |part| {
                part.try_each_run(|tensor, offset, out| copy(tensor, offset, out))
            });
            copied.map_err(StageError::Fill)
        })
    }

    /// Lays `specs` out, and has `fill` write the bytes of the tensors other than aliases: the targets of their pieces, in
    /// the order of the payload.
    fn filled<E: std::error::Error>(
        staging: &Staging,
        specs: Vec<TensorSpec>,
        metadata: Metadata,
        fill: impl FnOnce(Vec<Target<'_>>) -> Result<(), StageError<E>>,
    ) -> Result<Self, StageError<E>> {
        let stored: Vec<bool> = specs.iter().map(|spec| spec.alias_of.is_none()).collect();
        let manifest = staging.lay_out(specs, metadata)?;
        let mut region = staging.allocate(manifest.payload_bytes() as usize)?;
        fill(targets::of(&manifest, &stored, &mut region))?;
        Ok(Self::of(staging, manifest, region))
    }

    /// A version of the bytes of `region` laid out as in `manifest`. A small one is hashed now, which costs less than to do
    /// it later.
    pub(crate) fn of(staging: &Staging, manifest: Arc<Manifest>, region: Region) -> Self {
        let is_small = region.len() <= IN_PLACE_BYTES;
        let payload = Payload::new(manifest, Arc::new(HostSource::of_region(region)));
        if is_small {
            payload.hash_in_place(Workers::Inline).expect("memory can be read");
        }
        Self { payload, workers: staging.workers }
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        self.payload.manifest()
    }

    /// Hashes the version now, with all processors, instead of after it is published. Returns its digest: equal tensors,
    /// laid out alike, have equal digests. Blocks for a pass over the payload.
    pub fn hash(&self) -> VersionDigest {
        self.payload.hash_in_place(self.workers).expect("memory can be read");
        self.payload.digest().expect("every chunk is hashed")
    }
}

/// The least that a thread copies before it takes more. A large tensor is divided once by the number of threads: very long
/// copies go past the caches (in glibc from three quarters of the last cache on), in 36 instead of 52 ms for a GiB (AMD
/// Zen 5, two threads).
const COPY_BYTES: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::{Cuts, Dtype, RangeSet, Shape, TensorName};

    fn spec(name: &str, elements: u64) -> TensorSpec {
        TensorSpec::new(TensorName::new(name).unwrap(), Dtype::U8, Shape::new(&[elements]).unwrap())
    }

    fn staging(memory: &HostMemory) -> Staging {
        Staging {
            memory: memory.clone(),
            bases: Arc::default(),
            layouts: Arc::default(),
            chunk_bytes: 1024,
            limits: Limits::default(),
            workers: Workers::Inline,
        }
    }

    fn stage(memory: &HostMemory, value: u8) -> Staged {
        let specs = vec![spec("a", 3), spec("none", 0), spec("b", 2000), spec("c", 300)];
        Staged::new::<Infallible>(&staging(memory), specs, vec![], |_, out| {
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
        let first = stage(&memory, 1).hash();
        drop(stage(&memory, 0xff));
        assert_eq!(stage(&memory, 1).hash(), first);
        assert_ne!(stage(&memory, 2).hash(), first);
        assert!(memory.stats().reused >= 2, "{:?}", memory.stats());
    }

    /// Goal: several threads write what one writes, and the same padding; a failure is returned, and holds no memory.
    #[test]
    fn tensors_copied_in_pieces_are_the_same_version() {
        let memory = HostMemory::new(64 << 20);
        let staging = Staging { workers: Workers::Threads, ..staging(&memory) };
        let large = 2 * COPY_BYTES as u64 + 77;
        let alias = TensorSpec { alias_of: Some(1), ..spec("tied", large) };
        let in_pieces = TensorSpec { cuts: Cuts::equal(0, 5000, 3), ..spec("pieces", 5000) };
        let specs =
            vec![spec("small", 3), spec("large", large), spec("none", 0), alias, in_pieces, spec("one", 5)];
        let byte = |index: usize, at: usize| (at % 251 + index) as u8;
        let fill = |index: usize, start: usize, out: &mut [u8]| {
            out.iter_mut().enumerate().for_each(|(at, out)| *out = byte(index, start + at));
            Ok::<(), Infallible>(())
        };
        let whole = Staged::new(&staging, specs.clone(), vec![], |index, out| fill(index, 0, out)).unwrap();
        let digest = whole.hash();
        drop(whole);
        memory.allocate(large as usize + 4096).unwrap().fill(0xff); // Reused.
        let pieces = Staged::copied(&staging, specs.clone(), vec![], fill).unwrap();
        assert_eq!(
            pieces.payload.unhashed(&RangeSet::from_range(0..1)).len(),
            1,
            "no hash before the publish"
        );
        assert_eq!(pieces.hash(), digest);
        drop(pieces);
        let failed = Staged::copied(&staging, specs, vec![], |index, start, _| match (index, start) {
            (1, 1..) => Err(std::fmt::Error),
            _ => Ok(()),
        });
        assert!(matches!(failed, Err(StageError::Fill(_))));
        assert_eq!(memory.stats().in_use_bytes, 0);
    }

    #[test]
    fn a_version_over_budget_is_refused_with_sizes() {
        let staging = staging(&HostMemory::new(1 << 12));
        let error =
            Staged::new::<Infallible>(&staging, vec![spec("a", 1 << 20)], vec![], |_, _| Ok(())).unwrap_err();
        assert!(
            matches!(error, StageError::Memory(AllocError::OverBudget { asked_bytes: 1_048_576, .. })),
            "{error}"
        );
    }
}
