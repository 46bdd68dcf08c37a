//! The receiver's side of one version: what came, what is missing, and when it may become visible (PROTOCOL.md §6.5).

use crate::{
    ChunkHash, ChunkHeader, ChunkIndex, Manifest, Misbehaved, RangeSet, Selection, Verified, VersionDigest,
};
use std::{ops::Range, sync::Arc};

/// What became of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Every selected chunk is here and verified, and together they are what the sender said: make it visible.
    Commit,
    /// Every selected chunk is here and verified on its own, but together they are not what the sender said.
    Mismatch {
        /// What the sender said.
        expected: VersionDigest,
        /// What the chunks give.
        found: VersionDigest,
    },
}

/// Assembles what is selected of one version from chunks that come in any order, over one connection or several.
///
/// Pure: it holds no payload, only what is known about each chunk. It is the one place that decides that a version is
/// whole, which is what makes "never a torn tensor" a property of one small type.
#[derive(Debug)]
pub struct Assembly {
    selection: Arc<Selection>,
    hashes: Vec<Option<ChunkHash>>,
    arriving: RangeSet,
    missing: u32,
    complete: Option<VersionDigest>,
}

impl Assembly {
    /// Begins a version of which `selection` is wanted. Costs 17 bytes per chunk of the manifest.
    pub fn new(selection: Arc<Selection>) -> Self {
        let chunks = selection.manifest().chunking().count() as usize;
        let missing = selection.chunks().len();
        Self { selection, hashes: vec![None; chunks], arriving: RangeSet::new(), missing, complete: None }
    }

    /// What the version holds.
    pub fn manifest(&self) -> &Arc<Manifest> {
        self.selection.manifest()
    }

    /// What of it is wanted, and where that goes.
    pub fn selection(&self) -> &Arc<Selection> {
        &self.selection
    }

    /// Takes the header of a chunk that begins to arrive and says where its bytes belong
    /// ([`Selection::place`]).
    ///
    /// # Errors
    /// [`Misbehaved`] when the manifest has no such chunk, gives it another size, it was not selected, or it came before.
    pub fn handle_header(&mut self, header: &ChunkHeader) -> Result<Range<u64>, Misbehaved> {
        let chunk = header.chunk;
        let count = self.manifest().chunking().count();
        if chunk.0 >= count {
            return Err(Misbehaved::NoSuchChunk { chunk, count });
        }
        let place = self.selection.place(chunk).ok_or(Misbehaved::NotSelected(chunk))?;
        let expected = place.end - place.start;
        if u64::from(header.raw_bytes) != expected {
            return Err(Misbehaved::WrongChunkSize { chunk, expected, found: header.raw_bytes });
        }
        if header.encoded_bytes > header.raw_bytes {
            return Err(Misbehaved::Inflated { chunk, encoded: header.encoded_bytes, raw: header.raw_bytes });
        }
        if let Some(base) = header.base {
            return Err(Misbehaved::UnknownBase { chunk, base });
        }
        if self.hashes[chunk.0 as usize].is_some() || !self.arriving.insert(chunk.0) {
            return Err(Misbehaved::DuplicateChunk(chunk));
        }
        Ok(place)
    }

    /// Takes the news that a chunk's bytes are in their place and verified.
    pub fn handle_verified(&mut self, verified: Verified) {
        // A chunk is verified only after its header was taken; anything else is not of this version.
        if self.arriving.remove(verified.chunk().0) {
            self.hashes[verified.chunk().0 as usize] = Some(verified.hash());
            self.missing -= 1;
        }
    }

    /// Takes the news that a chunk's stream ended early: it is missing again.
    pub fn handle_lost(&mut self, chunk: ChunkIndex) {
        self.arriving.remove(chunk.0);
    }

    /// Takes the sender's word that every chunk is on its way.
    pub fn handle_complete(&mut self, digest: VersionDigest) {
        self.complete = Some(digest);
    }

    /// Takes the news that the connection is lost: what was arriving is missing again, and the sender will have to say
    /// again what the whole is. What is verified stays.
    ///
    /// Whoever reads the lost streams must have stopped by now: their places may be written again.
    pub fn handle_detached(&mut self) {
        self.arriving = RangeSet::new();
        self.complete = None;
    }

    /// Forgets all that is held but the first `ranges` runs of chunks, so that the word of what is held stays small.
    /// Returns the chunks that are missing again.
    pub fn forget_beyond(&mut self, ranges: usize) -> RangeSet {
        let held = self.held();
        let forgotten: RangeSet = held.ranges().iter().skip(ranges).cloned().collect();
        for chunk in forgotten.iter() {
            self.hashes[chunk as usize] = None;
        }
        self.missing += forgotten.len();
        forgotten
    }

    /// What became of the version; `None` while something is missing.
    pub fn poll(&self) -> Option<Outcome> {
        let expected = self.complete?;
        if self.missing > 0 {
            return None;
        }
        let found = VersionDigest::of(self.manifest().digest(), self.hashes.iter().flatten().copied());
        Some(if found == expected { Outcome::Commit } else { Outcome::Mismatch { expected, found } })
    }

    /// How many chunks are verified.
    pub fn verified_chunks(&self) -> u32 {
        self.selection.chunks().len() - self.missing
    }

    /// The chunks that are verified: what a resume need not send again.
    pub fn held(&self) -> RangeSet {
        let held = (0u32..).zip(&self.hashes).filter(|(_, hash)| hash.is_some());
        held.map(|(chunk, _)| chunk..chunk + 1).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ChunkHasher, CodecId, Dtype, Epoch, Limits, Shape, SubscriptionId, TensorName, TensorSpec, Version,
    };
    use proptest::prelude::*;

    const CHUNK_BYTES: u32 = 256;

    fn manifest(chunks: u64) -> Arc<Manifest> {
        let shape = Shape::new(&[chunks * u64::from(CHUNK_BYTES)]).unwrap();
        let spec = TensorSpec::new(TensorName::new("w").unwrap(), Dtype::U8, shape);
        Arc::new(Manifest::layout(vec![spec], vec![], CHUNK_BYTES, &Limits::default()).unwrap())
    }

    fn header(chunk: u32) -> ChunkHeader {
        ChunkHeader {
            subscription: SubscriptionId(1),
            epoch: Epoch(1),
            version: Version(1),
            chunk: ChunkIndex(chunk),
            codec: CodecId::Raw,
            raw_bytes: CHUNK_BYTES,
            encoded_bytes: CHUNK_BYTES,
            hash: hash(chunk),
            base: None,
        }
    }

    fn hash(chunk: u32) -> ChunkHash {
        ChunkHash::of(&chunk.to_le_bytes())
    }

    fn verified(chunk: u32) -> Verified {
        let mut hasher = ChunkHasher::new();
        hasher.update(&chunk.to_le_bytes());
        hasher.verify(ChunkIndex(chunk), hash(chunk)).unwrap()
    }

    #[test]
    fn a_wrong_sum_is_never_committed() {
        let manifest = manifest(2);
        let mut assembly = Assembly::new(Arc::new(Selection::all(manifest.clone())));
        for chunk in [1, 0] {
            assembly.handle_header(&header(chunk)).unwrap();
            assembly.handle_verified(verified(chunk));
        }
        assert_eq!(assembly.poll(), None, "the sender has not said what the whole is");
        assembly.handle_complete(VersionDigest::of(manifest.digest(), [hash(1), hash(0)]));
        assert!(matches!(assembly.poll(), Some(Outcome::Mismatch { .. })));
    }

    #[test]
    fn rules_of_headers() {
        let mut assembly = Assembly::new(Arc::new(Selection::all(manifest(2))));
        assert!(matches!(assembly.handle_header(&header(2)), Err(Misbehaved::NoSuchChunk { .. })));
        let small = ChunkHeader { raw_bytes: 1, ..header(0) };
        assert!(matches!(assembly.handle_header(&small), Err(Misbehaved::WrongChunkSize { .. })));
        let inflated = ChunkHeader { encoded_bytes: CHUNK_BYTES + 1, ..header(0) };
        assert!(matches!(assembly.handle_header(&inflated), Err(Misbehaved::Inflated { .. })));
        let based = ChunkHeader { base: Some(Version(3)), ..header(0) };
        assert!(matches!(assembly.handle_header(&based), Err(Misbehaved::UnknownBase { .. })));
        assert_eq!(assembly.handle_header(&header(1)), Ok(256..512));
        assert_eq!(assembly.handle_header(&header(1)), Err(Misbehaved::DuplicateChunk(ChunkIndex(1))));
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Header(u32),
        Verified(u32),
        Lost(u32),
        Complete,
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0u32..6).prop_map(Step::Header),
            4 => (0u32..6).prop_map(Step::Verified),
            1 => (0u32..6).prop_map(Step::Lost),
            1 => Just(Step::Complete),
        ]
    }

    proptest! {
        /// Any order of events: commit exactly when every chunk was verified and the sender named the whole.
        #[test]
        fn commit_only_when_whole(chunks in 0u64..6, steps in prop::collection::vec(any_step(), 0..60)) {
            let manifest = manifest(chunks);
            let mut assembly = Assembly::new(Arc::new(Selection::all(manifest.clone())));
            let (mut arriving, mut done, mut complete) = (RangeSet::new(), RangeSet::new(), false);
            for step in steps {
                match step {
                    Step::Header(c) => {
                        let free = u64::from(c) < chunks && !arriving.contains(c) && !done.contains(c);
                        prop_assert_eq!(assembly.handle_header(&header(c)).is_ok(), free);
                        if free { arriving.insert(c); }
                    }
                    Step::Verified(c) if arriving.remove(c) => { assembly.handle_verified(verified(c)); done.insert(c); }
                    Step::Lost(c) if arriving.remove(c) => assembly.handle_lost(ChunkIndex(c)),
                    Step::Complete => {
                        let all = (0..chunks as u32).map(hash);
                        assembly.handle_complete(VersionDigest::of(manifest.digest(), all));
                        complete = true;
                    }
                    Step::Verified(_) | Step::Lost(_) => {}
                }
                let whole = complete && u64::from(done.len()) == chunks;
                prop_assert_eq!(assembly.poll(), whole.then_some(Outcome::Commit));
                prop_assert_eq!(assembly.held(), done.clone());
            }
        }
    }
}
