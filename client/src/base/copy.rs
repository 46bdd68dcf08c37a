//! A private copy of a payload, in chunks that are each labelled with their version. Pure.

use super::VersionKey;
use std::collections::BTreeMap;
use tensor_relay_protocol::{ChunkIndex, RangeSet};

/// The chunks of a payload, each in memory of type `M` and with its version.
#[derive(Debug)]
pub(crate) struct VersionCopy<M> {
    /// `None` while a chunk is lent. If it is never put back, the copy is never complete again.
    chunks_by_index: BTreeMap<u32, Option<StoredChunk<M>>>,
}

#[derive(Debug)]
struct StoredChunk<M> {
    /// `None` for memory that holds nothing yet.
    version: Option<VersionKey>,
    memory: M,
}

impl<M> Default for VersionCopy<M> {
    fn default() -> Self {
        Self { chunks_by_index: BTreeMap::new() }
    }
}

impl<M> FromIterator<(u32, M)> for VersionCopy<M> {
    /// An empty copy, with memory for these chunks.
    fn from_iter<I: IntoIterator<Item = (u32, M)>>(chunks: I) -> Self {
        let stored = |(chunk, memory)| (chunk, Some(StoredChunk { version: None, memory }));
        Self { chunks_by_index: chunks.into_iter().map(stored).collect() }
    }
}

impl<M> VersionCopy<M> {
    /// Lends the memory of `chunk`, with its version. `None` when it is lent already, or there is no such chunk.
    pub(crate) fn take(&mut self, chunk: ChunkIndex) -> Option<(Option<VersionKey>, M)> {
        let stored = self.chunks_by_index.get_mut(&chunk.0)?.take()?;
        Some((stored.version, stored.memory))
    }

    /// Takes back lent memory, now of `version`.
    pub(crate) fn put(&mut self, chunk: ChunkIndex, version: Option<VersionKey>, memory: M) {
        if let Some(stored @ None) = self.chunks_by_index.get_mut(&chunk.0) {
            *stored = Some(StoredChunk { version, memory });
        }
    }

    /// The common version of all chunks, if there is one.
    pub(crate) fn common_version(&self) -> Option<VersionKey> {
        self.common_version_except(&RangeSet::new())
    }

    /// The common version of the chunks that are not `held`, if there is one.
    pub(crate) fn common_version_except(&self, held: &RangeSet) -> Option<VersionKey> {
        let mut remaining = self.chunks_by_index.iter().filter(|(chunk, _)| !held.contains(**chunk));
        let version_of = |stored: &Option<StoredChunk<M>>| stored.as_ref().and_then(|stored| stored.version);
        let first = version_of(remaining.next()?.1)?;
        remaining.all(|(_, stored)| version_of(stored) == Some(first)).then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tensor_relay_protocol::{Epoch, Version};

    const CHUNKS: u32 = 5;

    fn key(version: u64) -> VersionKey {
        (Epoch(1), Version(version))
    }

    fn chunks() -> impl Strategy<Value = RangeSet> {
        prop::collection::btree_set(0..CHUNKS, 0..=CHUNKS as usize)
            .prop_map(|chunks| chunks.into_iter().map(|chunk| chunk..chunk + 1).collect())
    }

    #[derive(Debug, Clone)]
    enum Step {
        /// A worker takes a chunk.
        Take(u32),
        /// The worker puts the chunk back: with `keep` as that of the version in transfer, otherwise unchanged.
        Put { chunk: u32, keep: bool },
        /// The next version begins.
        Next,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..CHUNKS + 1).prop_map(Step::Take),
            4 => (0..CHUNKS + 1, prop::bool::weighted(0.8)).prop_map(|(chunk, keep)| Step::Put { chunk, keep }),
            1 => Just(Step::Next),
        ]
    }

    #[test]
    fn a_copy_is_complete_when_all_chunks_have_one_version() {
        let mut copy: VersionCopy<u32> = (0..3).map(|chunk| (chunk, chunk)).collect();
        assert_eq!(copy.common_version(), None, "it holds nothing yet");
        for chunk in 0..3 {
            let (old_version, memory) = copy.take(ChunkIndex(chunk)).unwrap();
            assert_eq!((old_version, memory), (None, chunk));
            assert_eq!(copy.common_version(), None);
            copy.put(ChunkIndex(chunk), Some(key(1)), memory);
        }
        assert_eq!(copy.common_version(), Some(key(1)));
        let (_, memory) = copy.take(ChunkIndex(1)).unwrap();
        assert_eq!(copy.take(ChunkIndex(1)), None, "it is lent once");
        assert_eq!(
            (copy.common_version(), copy.common_version_except(&RangeSet::from_range(1..2))),
            (None, Some(key(1)))
        );
        copy.put(ChunkIndex(1), Some(key(2)), memory);
        assert_eq!(
            (copy.common_version(), copy.common_version_except(&RangeSet::from_range(1..2))),
            (None, Some(key(1)))
        );
        assert_eq!(copy.common_version_except(&RangeSet::from_range(0..3)), None, "no chunk remains");
    }

    proptest! {
        /// After any sequence of takes and puts, the copy agrees with a simple model, and no memory is lent twice.
        #[test]
        fn a_chunk_keeps_the_version_that_it_was_put_back_with(steps in prop::collection::vec(step(), 0..60), held in chunks()) {
            let mut copy: VersionCopy<u32> = (0..CHUNKS).map(|chunk| (chunk, chunk)).collect();
            // For each chunk: its version, and whether it is lent.
            let mut model = vec![(None, false); CHUNKS as usize];
            let mut version = 1;
            for step in steps {
                match step {
                    Step::Take(chunk) => {
                        let taken = copy.take(ChunkIndex(chunk));
                        let expected = model.get_mut(chunk as usize).filter(|(_, lent)| !lent);
                        prop_assert_eq!(taken, expected.as_ref().map(|(of, _)| (*of, chunk)));
                        if let Some((_, lent)) = expected { *lent = true; }
                    }
                    Step::Put { chunk, keep } => {
                        let Some(entry) = model.get_mut(chunk as usize).filter(|(_, lent)| *lent) else { continue };
                        *entry = (if keep { Some(key(version)) } else { entry.0 }, false);
                        copy.put(ChunkIndex(chunk), entry.0, chunk);
                    }
                    Step::Next => version += 1,
                }
                for held in [RangeSet::new(), held.clone()] {
                    let remaining = (0..CHUNKS).filter(|chunk| !held.contains(*chunk)).map(|chunk| model[chunk as usize]);
                    let remaining: Vec<_> = remaining.map(|(of, lent)| of.filter(|_| !lent)).collect();
                    let expected = remaining.first().copied().flatten().filter(|of| remaining.iter().all(|other| other == &Some(*of)));
                    prop_assert_eq!(copy.common_version_except(&held), expected);
                }
            }
        }
    }
}
