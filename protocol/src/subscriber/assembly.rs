//! The assembly of one version: what was received, what is missing, and when it may become visible (PROTOCOL.md §6.5).

use crate::{
    ChunkHash, ChunkHeader, ChunkIndex, Manifest, Misbehaved, RangeSet, Selection, Verified, Version,
    VersionDigest,
};
use std::{ops::Range, sync::Arc};

/// The result of an assembly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Every selected chunk is verified, and the digest of the whole is the sender's: make it visible.
    Commit,
    /// Every selected chunk is verified, but the digest of the whole differs from the sender's.
    Mismatch {
        /// The sender's digest.
        expected: VersionDigest,
        /// The digest of the chunks.
        found: VersionDigest,
    },
}

/// Assembles the selected part of one version from chunks that come in any order, over any lanes and connections.
///
/// Pure: it holds no payload, only what is known about each chunk. It is the one place that decides that a version is
/// whole, which is what makes "never a torn tensor" a property of one small type.
#[derive(Debug)]
pub struct Assembly {
    selection: Arc<Selection>,
    hashes: Vec<Option<ChunkHash>>,
    arriving: RangeSet,
    missing: u32,
    held_bytes: u64,
    complete: Option<VersionDigest>,
    /// The version that chunks may be encoded against.
    base: Option<Version>,
}

impl Assembly {
    /// Starts a version with `selection`. Costs 17 bytes per chunk of the manifest.
    pub fn new(selection: Arc<Selection>) -> Self {
        let chunks = selection.manifest().chunking().count() as usize;
        let missing = selection.chunks().len();
        Self {
            selection,
            hashes: vec![None; chunks],
            arriving: RangeSet::new(),
            missing,
            held_bytes: 0,
            complete: None,
            base: None,
        }
    }

    /// The manifest.
    pub fn manifest(&self) -> &Arc<Manifest> {
        self.selection.manifest()
    }

    /// The selection and its layout.
    pub fn selection(&self) -> &Arc<Selection> {
        &self.selection
    }

    /// Allows chunks from now on to be encoded against version `base` of the same epoch, which must have the same
    /// manifest. None at first, and after the connection is lost.
    pub fn set_base(&mut self, base: Option<Version>) {
        self.base = base;
    }

    /// Handles the header of a chunk and returns the place of its bytes ([`Selection::place`]).
    ///
    /// # Errors
    /// [`Misbehaved`] when the manifest has no such chunk or another size for it, it was not selected, its base is not
    /// allowed, or it is verified or arriving already.
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
        self.check_base(header)?;
        let is_new = self.hashes[chunk.0 as usize].is_none() && self.arriving.insert(chunk.0);
        if is_new { Ok(place) } else { Err(Misbehaved::DuplicateChunk(chunk)) }
    }

    fn check_base(&self, header: &ChunkHeader) -> Result<(), Misbehaved> {
        let chunk = header.chunk;
        match header.base {
            Some(base) if self.base != Some(base) => Err(Misbehaved::UnknownBase { chunk, base }),
            base if base.is_some() != header.codec.needs_base() => {
                Err(Misbehaved::CodecAndBase { chunk, codec: header.codec.name() })
            }
            _ => Ok(()),
        }
    }

    /// Handles a chunk whose bytes are verified and in their place.
    pub fn handle_verified(&mut self, verified: Verified) {
        // Only a chunk with a handled header can be verified; any other is not of this version.
        if self.arriving.remove(verified.chunk().0) {
            self.hashes[verified.chunk().0 as usize] = Some(verified.hash());
            self.missing -= 1;
            self.held_bytes += self.chunk_bytes(verified.chunk());
        }
    }

    /// Handles the early end of a chunk's stream: it is missing again, and may come once more.
    ///
    /// The stream's reader must have stopped by now: the place may be written again.
    pub fn handle_lost(&mut self, chunk: ChunkIndex) {
        self.arriving.remove(chunk.0);
    }

    /// Handles `Complete`: every chunk is sent.
    pub fn handle_complete(&mut self, digest: VersionDigest) {
        self.complete = Some(digest);
    }

    /// Handles the loss of the connection: unfinished chunks are missing again, and the digest must be sent again.
    /// Verified chunks stay.
    ///
    /// The readers of lost streams must have stopped by now: their places may be written again.
    pub fn handle_detached(&mut self) {
        self.arriving = RangeSet::new();
        self.complete = None;
        self.base = None;
    }

    /// Forgets all held chunks but the first `ranges` runs, so that `partial` stays small. Returns the chunks that are
    /// missing again.
    pub fn forget_beyond(&mut self, ranges: usize) -> RangeSet {
        let held = self.held();
        let forgotten: RangeSet = held.ranges().iter().skip(ranges).cloned().collect();
        for chunk in forgotten.iter() {
            self.hashes[chunk as usize] = None;
            self.held_bytes -= self.chunk_bytes(ChunkIndex(chunk));
        }
        self.missing += forgotten.len();
        forgotten
    }

    /// The result; `None` while something is missing.
    pub fn poll(&self) -> Option<Outcome> {
        let expected = self.complete?;
        if self.missing > 0 {
            return None;
        }
        let found = self.held_digest();
        Some(if found == expected { Outcome::Commit } else { Outcome::Mismatch { expected, found } })
    }

    /// The size of the verified chunks.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// The selected chunks that are neither verified nor arriving.
    pub fn missing(&self) -> RangeSet {
        self.selection.chunks().difference(&self.held()).difference(&self.arriving)
    }

    fn chunk_bytes(&self, chunk: ChunkIndex) -> u64 {
        let (range, _) = self.manifest().chunk(chunk);
        range.end - range.start
    }

    /// The number of verified chunks.
    pub fn verified_chunks(&self) -> u32 {
        self.selection.chunks().len() - self.missing
    }

    /// The verified chunks, which a resume need not send again.
    pub fn held(&self) -> RangeSet {
        let held = (0u32..).zip(&self.hashes).filter(|(_, hash)| hash.is_some());
        held.map(|(chunk, _)| chunk..chunk + 1).collect()
    }

    /// The digest of the verified chunks: sent with them in a resume, and that of the version once it is whole.
    pub fn held_digest(&self) -> VersionDigest {
        VersionDigest::of(self.manifest().digest(), self.hashes.iter().flatten().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subscriber::fixtures::{self, CHUNK_BYTES, hash, manifest, select, verified};
    use proptest::prelude::*;

    fn all(chunks: u32) -> Assembly {
        Assembly::new(Arc::new(Selection::all(manifest(chunks))))
    }

    fn header(chunk: u32) -> ChunkHeader {
        fixtures::header(1, chunk)
    }

    #[test]
    fn a_wrong_sum_is_never_committed() {
        let mut assembly = all(2);
        for chunk in [1, 0] {
            assembly.handle_header(&header(chunk)).unwrap();
            assembly.handle_verified(verified(chunk));
        }
        assert_eq!(assembly.poll(), None, "the sender has not said what the whole is");
        assembly.handle_complete(VersionDigest::of(assembly.manifest().digest(), [hash(1), hash(0)]));
        assert!(matches!(assembly.poll(), Some(Outcome::Mismatch { .. })));
    }

    #[test]
    fn rules_of_headers() {
        let mut assembly = all(2);
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

    /// PROTOCOL.md §5.4 and §6.5: what was not selected is not taken, and what was lies without gaps.
    #[test]
    fn only_selected_chunks_are_taken() {
        let mut assembly = Assembly::new(select(manifest(4), &[1, 3]));
        assert_eq!(assembly.handle_header(&header(0)), Err(Misbehaved::NotSelected(ChunkIndex(0))));
        assert_eq!(assembly.handle_header(&header(3)), Ok(256..512));
        assert_eq!(assembly.handle_header(&header(1)), Ok(0..256));
        assert!(matches!(assembly.handle_header(&header(4)), Err(Misbehaved::NoSuchChunk { .. })));
    }

    /// PROTOCOL.md §6.8: a chunk comes once more only after it was lost.
    #[test]
    fn a_lost_chunk_may_come_again() {
        let mut assembly = all(2);
        assembly.handle_header(&header(0)).unwrap();
        assembly.handle_lost(ChunkIndex(0));
        assert_eq!(assembly.missing(), RangeSet::from_range(0..2));
        assert_eq!(assembly.handle_header(&header(0)), Ok(0..256));
        assert_eq!(assembly.missing(), RangeSet::from_range(1..2));
        assembly.handle_verified(verified(0));
        assert_eq!(assembly.handle_header(&header(0)), Err(Misbehaved::DuplicateChunk(ChunkIndex(0))));
        assembly.handle_lost(ChunkIndex(0));
        assert_eq!(
            (assembly.held(), assembly.held_bytes()),
            (RangeSet::from_range(0..1), 256),
            "it is verified"
        );
    }

    /// PROTOCOL.md §6.6: the sender's digest is void once its connection is lost.
    #[test]
    fn a_lost_connection_takes_back_what_was_arriving() {
        let mut assembly = all(2);
        let digest = VersionDigest::of(assembly.manifest().digest(), [hash(0), hash(1)]);
        assembly.handle_header(&header(0)).unwrap();
        assembly.handle_verified(verified(0));
        assembly.handle_header(&header(1)).unwrap();
        assembly.handle_complete(digest);
        assembly.handle_detached();
        assembly.handle_verified(verified(1));
        assert_eq!(assembly.held(), RangeSet::from_range(0..1), "what ends late belongs to nobody");
        assembly.handle_header(&header(1)).unwrap();
        assembly.handle_verified(verified(1));
        assert_eq!(assembly.poll(), None);
        assembly.handle_complete(digest);
        assert_eq!(assembly.poll(), Some(Outcome::Commit));
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Header(u32),
        Verified(u32),
        Lost(u32),
        Complete,
        Detached,
        ForgetBeyond(usize),
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0u32..7).prop_map(Step::Header),
            8 => (0u32..7).prop_map(Step::Verified),
            2 => (0u32..7).prop_map(Step::Lost),
            3 => Just(Step::Complete),
            1 => Just(Step::Detached),
            1 => (0usize..3).prop_map(Step::ForgetBeyond),
        ]
    }

    proptest! {
        /// Any selection and any order of events: commit exactly when every selected chunk was verified, over however
        /// many connections, and the sender named the whole on the connection that there is.
        #[test]
        fn commit_only_when_whole(
            wanted in prop::collection::btree_set(0u32..6, 0..7),
            steps in prop::collection::vec(any_step(), 0..80),
        ) {
            let selection = select(manifest(6), &Vec::from_iter(wanted.clone()));
            let digest = VersionDigest::of(selection.manifest().digest(), wanted.iter().copied().map(hash));
            let mut assembly = Assembly::new(selection.clone());
            let (mut arriving, mut done, mut complete) = (RangeSet::new(), RangeSet::new(), false);
            for step in steps {
                match step {
                    Step::Header(c) => {
                        let is_new = !done.contains(c) && !arriving.contains(c);
                        let expected = selection.place(ChunkIndex(c)).filter(|_| is_new);
                        prop_assert_eq!(assembly.handle_header(&header(c)).ok(), expected.clone());
                        if expected.is_some() { arriving.insert(c); }
                    }
                    Step::Verified(c) => {
                        assembly.handle_verified(verified(c));
                        if arriving.remove(c) { done.insert(c); }
                    }
                    Step::Lost(c) => { assembly.handle_lost(ChunkIndex(c)); arriving.remove(c); }
                    Step::Complete => { assembly.handle_complete(digest); complete = true; }
                    Step::Detached => {
                        assembly.handle_detached();
                        (arriving, complete) = (RangeSet::new(), false);
                    }
                    Step::ForgetBeyond(ranges) => {
                        let kept: RangeSet = done.ranges().iter().take(ranges).cloned().collect();
                        prop_assert_eq!(assembly.forget_beyond(ranges), done.difference(&kept));
                        done = kept;
                    }
                }
                let whole = complete && done.len() as usize == wanted.len();
                prop_assert_eq!(assembly.poll(), whole.then_some(Outcome::Commit));
                prop_assert_eq!(assembly.held(), done.clone());
                prop_assert_eq!(assembly.verified_chunks(), done.len());
                prop_assert_eq!(assembly.held_bytes(), u64::from(done.len() * CHUNK_BYTES));
                let wanted: RangeSet = selection.chunks().difference(&done).difference(&arriving);
                prop_assert_eq!(assembly.missing(), wanted);
            }
        }

        /// A version that comes over two connections, the second one sending only what the first did not bring, is
        /// whole in the end, and nothing comes twice.
        #[test]
        fn a_resume_brings_what_is_missing(
            wanted in prop::collection::vec(0u32..12, 0..12),
            came in prop::collection::btree_set(0u32..12, 0..12),
            ranges in 0usize..4,
        ) {
            let selection = select(manifest(12), &wanted);
            let mut assembly = Assembly::new(selection.clone());
            let receive = |assembly: &mut Assembly, chunks: RangeSet| {
                let mut credit = crate::Credit::new(crate::Credit::MAX).unwrap();
                let mut plan = crate::SendPlan::new(chunks, false);
                while let Some(action) = plan.poll(&mut credit, Some(crate::LaneId(0))) {
                    match action {
                        crate::SendAction::Chunk(chunk, _) => {
                            assembly.handle_header(&header(chunk.0)).unwrap();
                            assembly.handle_verified(verified(chunk.0));
                            plan.handle_ended();
                        }
                        _ => break,
                    }
                }
            };
            let first = selection.chunks().iter().filter(|chunk| came.contains(chunk)).map(|c| c..c + 1).collect();
            receive(&mut assembly, first);
            assembly.handle_detached();
            assembly.forget_beyond(ranges);
            let held = assembly.held();
            prop_assert!(held.ranges().len() <= ranges);
            receive(&mut assembly, selection.chunks().difference(&held));
            assembly.handle_complete(VersionDigest::of(selection.manifest().digest(), selection.chunks().iter().map(hash)));
            prop_assert_eq!(assembly.poll(), Some(Outcome::Commit));
        }
    }
}
