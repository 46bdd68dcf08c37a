//! The base of a subscription: a private copy of a version, against which later versions are encoded.
//!
//! It is never the user's snapshot, which the user may write. Its memory has a separate budget, shared by all
//! subscriptions of a session.

mod copy;

pub(crate) use copy::VersionCopy;

use std::sync::Arc;
use tensor_relay_device::{HostMemory, Lock, Region};
use tensor_relay_protocol::{Announce, ChunkIndex, Epoch, ManifestDigest, RangeSet, Selection, Version};
use tensor_relay_transport::{Workers, ingress};

/// The epoch and number of a version of one topic.
pub(crate) type VersionKey = (Epoch, Version);

/// The base of one subscription.
///
/// During a transfer, the base becomes the new version chunk by chunk, on the worker that verifies the chunk: a delta
/// is applied in place, and the user's copy is made from it, in one pass over memory. Meanwhile the base is
/// partly the old and partly the new version; verified chunks are not decoded again, and giving up the version ends the
/// base. A worker owns the memory of its chunk. If the worker fails or is aborted, that memory is lost, since the delta
/// may be partly applied, and the base can no longer be used.
///
/// The first version of a manifest is not copied, only a version that follows one with the same manifest: a subscriber
/// of a single version, or of a new manifest each time, pays nothing for deltas that never come.
#[derive(Debug)]
pub(crate) struct Base {
    /// The memory of copies; `None` if no base is kept.
    memory: Option<HostMemory>,
    /// The workers that free memory.
    workers: Workers,
    copy: Option<(ManifestDigest, Arc<SharedCopy>)>,
    /// The manifest of the last committed version.
    committed: Option<ManifestDigest>,
    /// The version in transfer.
    pending: Option<PendingBase>,
    /// The base that the server knows of, on this connection.
    offered: Option<VersionKey>,
    /// Whether a lack of memory for the copy was logged.
    is_shortage_logged: bool,
}

#[derive(Debug)]
struct PendingBase {
    version: VersionKey,
    manifest: ManifestDigest,
    /// Whether the copy becomes this version.
    keep: bool,
    /// The version that its chunks may be encoded against.
    against: Option<VersionKey>,
}

#[derive(Debug, Default)]
struct SharedCopy(Lock<VersionCopy<Region>>);

/// A chunk of the base, for the worker that decodes the same chunk of the version in transfer.
#[derive(Debug)]
pub(crate) struct Chunk {
    shared: Arc<SharedCopy>,
    chunk: ChunkIndex,
    keep: bool,
    against: Option<VersionKey>,
    becomes: VersionKey,
}

impl Base {
    /// An empty base, with `memory` if one is to be kept.
    pub(crate) fn new(memory: Option<HostMemory>, workers: Workers) -> Self {
        Self {
            memory,
            workers,
            copy: None,
            committed: None,
            pending: None,
            offered: None,
            is_shortage_logged: false,
        }
    }

    /// The base to name on a new connection. The server may encode against it the missing chunks of a continued
    /// version, whose chunks `held` are received; or, without `held`, all chunks of the next version.
    pub(crate) fn offer(&mut self, held: Option<&RangeSet>) -> Option<VersionKey> {
        let none = RangeSet::new();
        let (_, shared) = self.copy.as_ref()?;
        self.offered = shared.0.lock().common_version_except(held.unwrap_or(&none));
        self.offered
    }

    /// Starts a version with `selection`. Returns the version that its chunks may be encoded against.
    pub(crate) fn begin(&mut self, announce: &Announce, selection: &Selection) -> Option<Version> {
        let has_same_manifest =
            self.copy.as_ref().is_some_and(|(manifest, _)| *manifest == announce.manifest);
        if !has_same_manifest {
            self.release_copy(); // Before the next copy allocates memory.
        }
        let is_first = self.committed != Some(announce.manifest);
        if announce.may_be_base && !is_first && self.copy.is_none() {
            self.copy = self.allocate(selection).map(|copy| (announce.manifest, copy));
        }
        self.set_pending(announce)
    }

    /// Continues the current version over another connection. Returns the base of its remaining chunks.
    pub(crate) fn resume(&mut self, announce: &Announce) -> Option<Version> {
        self.set_pending(announce)
    }

    fn set_pending(&mut self, announce: &Announce) -> Option<Version> {
        let (version, manifest) = ((announce.id.epoch, announce.id.version), announce.manifest);
        let against = self.offered.filter(|(epoch, base)| *epoch == version.0 && *base < version.1);
        let keep = announce.may_be_base && self.copy.is_some();
        self.pending = Some(PendingBase { version, manifest, keep, against });
        against.map(|(_, version)| version)
    }

    /// The base data needed to decode `chunk`; `None` without a base.
    pub(crate) fn chunk(&self, chunk: ChunkIndex) -> Option<Chunk> {
        let (_, shared) = self.copy.as_ref()?;
        let pending = self.pending.as_ref()?;
        let PendingBase { version: becomes, keep, against, .. } = *pending;
        (keep || against.is_some()).then(|| Chunk {
            shared: Arc::clone(shared),
            chunk,
            keep,
            against,
            becomes,
        })
    }

    /// Handles the commit of the version in transfer; returns whether it is the base now.
    pub(crate) fn handle_committed(&mut self) -> bool {
        let pending = self.pending.take();
        self.committed = pending.as_ref().map(|now| now.manifest);
        let version = pending.as_ref().map(|now| now.version);
        let keep = pending.is_some_and(|now| now.keep);
        let common = self.copy.as_ref().and_then(|(_, shared)| shared.0.lock().common_version());
        self.offered = common.filter(|common| Some(*common) == version);
        match (self.offered, keep) {
            (Some(_), _) => return true,
            (None, true) => self.copy = None, // The next copy reuses its memory.
            (None, false) => self.release_copy(),
        }
        false
    }

    /// Drops the copy, and unmaps cached memory on a worker: no version of this topic will need it soon.
    fn release_copy(&mut self) {
        self.offered = None;
        let had_copy = self.copy.take().is_some();
        if let Some(memory) = self.memory.clone().filter(|_| had_copy) {
            self.workers.spawn(move || memory.release_cached());
        }
    }

    /// Gives up the current version, and the base with it. A worker that still writes a chunk writes to memory that is
    /// no longer read.
    pub(crate) fn handle_given_up(&mut self) {
        (self.copy, self.pending, self.offered) = (None, None, None);
    }

    /// Allocates memory for a copy of the selection, within the budget.
    fn allocate(&mut self, selection: &Selection) -> Option<Arc<SharedCopy>> {
        let memory = self.memory.as_ref()?;
        let bytes = selection.payload_bytes();
        match memory.allocate(usize::try_from(bytes).ok()?) {
            Ok(mut region) => {
                let chunks = selection.chunks().iter().map_while(|chunk| {
                    let range = selection.place(ChunkIndex(chunk))?;
                    Some((chunk, region.split_to((range.end - range.start) as usize)?))
                });
                Some(Arc::new(SharedCopy(Lock::new(chunks.collect()))))
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_shortage_logged, true) {
                    tracing::info!(payload_bytes = bytes, %error, "A topic receives no deltas: there is no memory for the copy that they are applied to.");
                }
                None
            }
        }
    }
}

impl Drop for Base {
    fn drop(&mut self) {
        self.release_copy();
    }
}

impl Chunk {
    /// Takes the chunk's memory out of the copy, for a delta or a plain chunk of the current version. `None` if it is
    /// not needed, is lent to another worker, or was lost; also if the delta was made from another version than the
    /// chunk's: then this call loses the chunk. Until a chunk is [put back](Self::put), the copy is incomplete.
    pub(crate) fn take(&self, is_delta: bool) -> Option<ingress::Base> {
        if !is_delta && !self.keep {
            return None;
        }
        let (version, memory) = self.shared.0.lock().take(self.chunk)?;
        (!is_delta || version == self.against).then_some(ingress::Base { memory, keep: self.keep })
    }

    /// Puts the memory back. If the current version becomes the base, the memory now holds that version.
    pub(crate) fn put(&self, base: ingress::Base) {
        let version = if base.keep { Some(self.becomes) } else { self.against };
        self.shared.0.lock().put(self.chunk, version, base.memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use tensor_relay_protocol::{
        Dtype, Limits, Manifest, Shape, SubscriptionId, TensorName, TensorSpec, Topic, VersionId,
    };

    const CHUNKS: u32 = 3;

    fn selection() -> Selection {
        let shape = Shape::new(&[u64::from(CHUNKS) * 256]).unwrap();
        let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, shape);
        Selection::all(Arc::new(Manifest::layout(vec![spec], vec![], 256, &Limits::default()).unwrap()))
    }

    fn key(version: u64) -> VersionKey {
        (Epoch(1), Version(version))
    }

    fn announce(version: u64, may_be_base: bool) -> Announce {
        let (epoch, version) = key(version);
        Announce {
            subscription: SubscriptionId(1),
            id: VersionId { topic: Topic::new("t").unwrap(), epoch, version },
            manifest: selection().manifest().digest(),
            skipped: 0,
            metadata: vec![],
            may_be_base,
            afresh: false,
            shared: false,
            lost_place: None,
            lending: None,
            relays: tensor_relay_protocol::RelayPath::default(),
        }
    }

    /// Decodes chunks of the version in transfer. For each chunk in `torn`, the worker fails after it took the memory.
    fn decode(base: &Base, chunks: impl IntoIterator<Item = u32>, is_delta: bool, torn: &[u32]) {
        for index in chunks {
            let Some(chunk) = base.chunk(ChunkIndex(index)) else { continue };
            match chunk.take(is_delta) {
                Some(taken) if !torn.contains(&index) => chunk.put(taken),
                taken => drop(taken),
            }
        }
    }

    /// Receives a version without making a copy of it.
    fn receive_without_copy(base: &mut Base, version: u64) {
        assert_eq!(base.begin(&announce(version, true), &selection()), None);
        decode(base, 0..CHUNKS, false, &[]);
        assert!(!base.handle_committed());
    }

    /// A base that holds version 1, the second version of its manifest.
    fn first_base() -> Base {
        let mut base = Base::new(Some(HostMemory::new(u64::MAX)), Workers::Inline);
        receive_without_copy(&mut base, 0);
        assert_eq!(base.memory.as_ref().unwrap().stats().fresh, 0, "one version alone takes no memory");
        assert_eq!(base.begin(&announce(1, true), &selection()), None);
        decode(&base, 0..CHUNKS, false, &[]);
        assert!(base.handle_committed());
        base
    }

    #[test]
    fn a_version_that_was_applied_is_the_base_of_the_next() {
        let mut base = first_base();
        for version in 2..5 {
            assert_eq!(base.begin(&announce(version, true), &selection()), Some(Version(version - 1)));
            decode(&base, 0..CHUNKS, true, &[]);
            assert!(base.handle_committed());
            assert_eq!(base.offer(None), Some(key(version)));
        }
    }

    /// The connection is lost, or the bytes are wrong, while a delta is applied to a chunk.
    #[test]
    fn a_torn_chunk_is_never_offered() {
        for torn in 0..CHUNKS {
            let mut base = first_base();
            base.begin(&announce(2, true), &selection());
            decode(&base, 0..CHUNKS, true, &[torn]);
            let verified: BTreeSet<u32> = (0..CHUNKS).filter(|chunk| *chunk != torn).collect();
            let held: RangeSet = verified.iter().map(|chunk| *chunk..chunk + 1).collect();
            assert_eq!((base.offer(Some(&held)), base.offer(None)), (None, None));
            let again = base.resume(&announce(2, true));
            assert_eq!(again, None, "the missing chunk comes without a base");
            decode(&base, [torn], false, &[]);
            assert!(!base.handle_committed(), "its memory is lost");
            assert_eq!(base.begin(&announce(3, true), &selection()), None);
            decode(&base, 0..CHUNKS, false, &[]);
            assert!(base.handle_committed(), "there is another copy");
        }
    }

    /// A chunk was decoded and put back, but its result was lost with the connection.
    #[test]
    fn a_delta_whose_result_was_lost_is_not_applied_again() {
        let mut base = first_base();
        base.begin(&announce(2, true), &selection());
        decode(&base, [0], true, &[]);
        assert_eq!(
            base.offer(Some(&RangeSet::new())),
            None,
            "one chunk is of version 2, the others of version 1"
        );
        assert_eq!(base.offer(Some(&RangeSet::from_range(0..1))), Some(key(1)), "if the result had arrived");
        assert_eq!(base.resume(&announce(2, true)), Some(Version(1)));
        let applied = base.chunk(ChunkIndex(0)).unwrap();
        assert!(applied.take(true).is_none(), "it is not of version 1 any more");
    }

    #[test]
    fn an_aborted_or_unkept_version_ends_the_base() {
        let mut base = first_base();
        base.begin(&announce(2, true), &selection());
        let late = base.chunk(ChunkIndex(1)).unwrap();
        let taken = late.take(true).unwrap();
        base.handle_given_up();
        late.put(taken);
        assert_eq!((base.offer(None), base.begin(&announce(3, true), &selection())), (None, None));

        let mut base = first_base();
        base.begin(&announce(2, true), &selection());
        base.handle_given_up();
        assert_eq!(base.offer(None), None, "even though no chunk arrived");

        let mut base = first_base();
        assert_eq!(base.begin(&announce(2, false), &selection()), Some(Version(1)));
        let chunk = base.chunk(ChunkIndex(0)).unwrap();
        assert!(chunk.take(false).is_none(), "a whole chunk needs no base");
        chunk.put(chunk.take(true).unwrap());
        decode(&base, 0..CHUNKS, true, &[]);
        assert!(!base.handle_committed());
        assert_eq!(base.offer(None), None);
    }

    #[test]
    fn another_epoch_manifest_or_order_has_no_base() {
        let next = announce(2, true);
        let id = |epoch, version| VersionId { epoch, version, ..next.id.clone() };
        for (id, manifest, expected) in [
            (id(Epoch(1), Version(2)), next.manifest, Some(Version(1))),
            (id(Epoch(1), Version(7)), next.manifest, Some(Version(1))),
            (id(Epoch(1), Version(1)), next.manifest, None),
            (id(Epoch(1), Version(0)), next.manifest, None),
            (id(Epoch(2), Version(2)), next.manifest, None),
            (id(Epoch(1), Version(2)), ManifestDigest::of(b"another"), None),
        ] {
            let (mut base, announce) = (first_base(), Announce { id, manifest, ..next.clone() });
            assert_eq!(base.begin(&announce, &selection()), expected, "{announce:?}");
        }
    }
}
