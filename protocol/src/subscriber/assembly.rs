//! The assembly of one version: its received and missing chunks, and whether it may be committed (PROTOCOL.md §6.5).

use crate::{
    ChunkHash, ChunkHeader, ChunkIndex, Manifest, ProtocolViolation, RangeSet, Selection, Verified, Version,
    VersionDigest,
};
use std::{ops::Range, sync::Arc};

/// The result of an assembly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Every selected chunk is verified, and the version's digest, which this is, equals the sender's: it may become
    /// visible.
    Commit(VersionDigest),
    /// Every selected chunk is verified, but the version's digest differs from the sender's.
    Mismatch {
        /// The sender's digest.
        expected: VersionDigest,
        /// The digest of the chunks.
        found: VersionDigest,
    },
}

/// The assembly of the selected chunks of one version, which arrive in any order, over any lanes and connections.
///
/// Pure: it holds no payload, only the state of each chunk. No other code decides that a version is complete, so the
/// promise that no incomplete version becomes visible depends on this type alone.
#[derive(Debug)]
pub struct Assembly {
    selection: Arc<Selection>,
    /// The hash of each verified chunk.
    hashes: Vec<Option<ChunkHash>>,
    arriving: RangeSet,
    /// The number of selected chunks that are not verified.
    unverified: u32,
    /// The total size of the verified chunks.
    held_bytes: u64,
    /// The digest in the sender's `Complete` on this connection.
    complete: Option<VersionDigest>,
    /// The sender's list of the hashes of all selected chunks, as far as it has arrived; `None` without one.
    list: Option<List>,
    /// The version that chunks may be encoded against.
    base: Option<Version>,
    /// The sender's digest, once all bytes came from memory that it lent.
    lent: Option<VersionDigest>,
}

/// A sender's list of chunk hashes.
#[derive(Debug)]
struct List {
    /// The hash of each listed chunk.
    hashes: Vec<Option<ChunkHash>>,
    /// The number of listed chunks: the first selected ones.
    listed: u32,
}

impl Assembly {
    /// An assembly without chunks. Needs 17 bytes of memory per chunk of the manifest.
    pub fn new(selection: Arc<Selection>) -> Self {
        let chunks = selection.manifest().chunking().count() as usize;
        let unverified = selection.chunks().len();
        Self {
            selection,
            hashes: vec![None; chunks],
            arriving: RangeSet::new(),
            unverified,
            held_bytes: 0,
            complete: None,
            list: None,
            base: None,
            lent: None,
        }
    }

    /// The manifest.
    pub fn manifest(&self) -> &Arc<Manifest> {
        self.selection.manifest()
    }

    /// The selection, whose chunks are assembled.
    pub fn selection(&self) -> &Arc<Selection> {
        &self.selection
    }

    /// Sets the version that later chunks may be encoded against, which must have the same epoch and manifest.
    /// Initially, and after the connection is lost, there is none.
    pub fn set_base(&mut self, base: Option<Version>) {
        self.base = base;
    }

    /// Handles the header of a chunk and returns its range in the receiver's memory ([`Selection::place`]).
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the manifest has no such chunk or another size for it, when the encoding is longer
    /// than the chunk or its codec and base are not allowed, and when the chunk is not selected, already verified or
    /// arriving.
    pub fn handle_header(&mut self, header: &ChunkHeader) -> Result<Range<u64>, ProtocolViolation> {
        let chunk = header.chunk;
        let count = self.manifest().chunking().count();
        if chunk.0 >= count {
            return Err(ProtocolViolation::NoSuchChunk { chunk, count });
        }
        let place = self.selection.place(chunk).ok_or(ProtocolViolation::NotSelected(chunk))?;
        let expected = place.end - place.start;
        if u64::from(header.raw_bytes) != expected {
            return Err(ProtocolViolation::WrongChunkSize { chunk, expected, found: header.raw_bytes });
        }
        if header.encoded_bytes > header.raw_bytes {
            return Err(ProtocolViolation::Inflated {
                chunk,
                encoded: header.encoded_bytes,
                raw: header.raw_bytes,
            });
        }
        self.check_base(header)?;
        let is_new = self.hashes[chunk.0 as usize].is_none() && self.arriving.insert(chunk.0);
        if is_new { Ok(place) } else { Err(ProtocolViolation::DuplicateChunk(chunk)) }
    }

    fn check_base(&self, header: &ChunkHeader) -> Result<(), ProtocolViolation> {
        let chunk = header.chunk;
        match header.base {
            Some(base) if self.base != Some(base) => Err(ProtocolViolation::UnknownBase { chunk, base }),
            base if base.is_some() != header.codec.needs_base() => {
                Err(ProtocolViolation::CodecAndBase { chunk, codec: header.codec.name() })
            }
            _ => Ok(()),
        }
    }

    /// Handles a chunk whose bytes are verified and in the receiver's memory.
    pub fn handle_verified(&mut self, verified: Verified) {
        // A chunk that is not arriving belongs to another version or a lost connection.
        if self.arriving.remove(verified.chunk().0) {
            self.hashes[verified.chunk().0 as usize] = Some(verified.hash());
            self.unverified -= 1;
            self.held_bytes += self.chunk_bytes(verified.chunk());
        }
    }

    /// Handles the early end of a chunk's stream: the chunk is missing again, and may be sent again. No effect on a
    /// chunk that is verified.
    ///
    /// The stream's reader must have stopped, because another stream may write the chunk's range from now on.
    pub fn handle_lost(&mut self, chunk: ChunkIndex) {
        self.arriving.remove(chunk.0);
    }

    /// Handles `Complete` with the sender's digest. Chunks may still arrive after it.
    pub fn handle_complete(&mut self, digest: VersionDigest) {
        self.complete = Some(digest);
    }

    /// Whether `Complete` arrived on this connection.
    pub(super) fn is_sent(&self) -> bool {
        self.complete.is_some()
    }

    /// Handles that all bytes are in place, from memory that the sender lent. They are not verified: whoever can lend
    /// memory is the sender itself, on the same host.
    pub fn handle_lent(&mut self, digest: VersionDigest) {
        self.lent = Some(digest);
    }

    /// Begins a list of chunk hashes, in place of an earlier one. Needs 17 bytes of memory per chunk of the manifest.
    pub(super) fn begin_list(&mut self) {
        self.list = Some(List { hashes: vec![None; self.hashes.len()], listed: 0 });
    }

    /// Handles the next `hashes` of the list, after the `first` ones, and returns the verified chunks that have other
    /// hashes. Without a list they are ignored. Costs a pass over the ranges of selected chunks.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when they do not continue the list, or are more than the selected chunks.
    pub(super) fn handle_hashes(
        &mut self,
        first: u32,
        hashes: &[ChunkHash],
    ) -> Result<Vec<ChunkIndex>, ProtocolViolation> {
        let Some(list) = &mut self.list else { return Ok(vec![]) };
        let selected = self.selection.chunks();
        if first != list.listed || hashes.is_empty() || hashes.len() > (selected.len() - list.listed) as usize
        {
            let expected = "the next hashes of the list";
            return Err(ProtocolViolation::OutOfTurn { found: "Hashes", expected });
        }
        let mut differing = vec![];
        for (chunk, hash) in selected.iter().skip(first as usize).zip(hashes) {
            list.hashes[chunk as usize] = Some(*hash);
            if self.hashes[chunk as usize].is_some_and(|found| found != *hash) {
                differing.push(ChunkIndex(chunk));
            }
        }
        list.listed += hashes.len() as u32;
        Ok(differing)
    }

    /// Whether the list has another hash than `hash` for a chunk.
    pub(super) fn is_listed_otherwise(&self, chunk: ChunkIndex, hash: ChunkHash) -> bool {
        self.listed_hash(chunk).is_some_and(|listed| listed != hash)
    }

    /// The hash of a chunk in the list, if it has arrived.
    pub(super) fn listed_hash(&self, chunk: ChunkIndex) -> Option<ChunkHash> {
        *self.list.as_ref()?.hashes.get(chunk.0 as usize)?
    }

    /// Whether the list of all selected chunks has arrived.
    pub(super) fn is_listed(&self) -> bool {
        self.list
            .as_ref()
            .is_some_and(|list| list.listed == self.selection.chunks().len())
    }

    /// Discards a verified chunk, which is missing again.
    pub(super) fn discard(&mut self, chunk: ChunkIndex) {
        if self.hashes[chunk.0 as usize].take().is_some() {
            self.held_bytes -= self.chunk_bytes(chunk);
            self.unverified += 1;
        }
    }

    /// Handles the loss of the connection: unfinished chunks are missing again, and the digest must be sent again.
    /// Verified chunks stay.
    ///
    /// The readers of lost streams must have stopped, because other streams may write their chunks' ranges from now on.
    pub fn handle_detached(&mut self) {
        self.arriving = RangeSet::new();
        (self.complete, self.list, self.base, self.lent) = (None, None, None, None);
    }

    /// Handles the loss of the sender that sent `Complete` or would have sent it, while others send the version.
    pub(super) fn forget_complete(&mut self) {
        self.complete = None;
    }

    /// Discards all verified chunks except those of the first `ranges_max` ranges, to limit the size of
    /// `Subscribe.partial`. Returns the discarded chunks, which are missing again.
    pub fn discard_beyond(&mut self, ranges_max: usize) -> RangeSet {
        let held = self.held();
        let discarded: RangeSet = held.ranges().iter().skip(ranges_max).cloned().collect();
        discarded.iter().for_each(|chunk| self.discard(ChunkIndex(chunk)));
        discarded
    }

    /// The result; `None` until every selected chunk is verified, and the sender's digest or its list of all hashes has
    /// arrived; or all bytes came from lent memory. Chunks that differ from the list are not verified.
    pub fn poll(&self) -> Option<Outcome> {
        if let Some(digest) = self.lent {
            return Some(Outcome::Commit(digest));
        }
        if self.unverified > 0 {
            return None;
        }
        if self.list.is_some() {
            return self.is_listed().then(|| Outcome::Commit(self.held_digest()));
        }
        let expected = self.complete?;
        let found = self.held_digest();
        Some(if found == expected { Outcome::Commit(found) } else { Outcome::Mismatch { expected, found } })
    }

    /// The total size of the verified chunks.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// The selected chunks that are neither verified nor arriving.
    pub fn missing(&self) -> RangeSet {
        self.selection.chunks().difference(&self.held()).difference(&self.arriving)
    }

    /// Whether this chunk is verified.
    pub(super) fn is_verified(&self, chunk: ChunkIndex) -> bool {
        self.hashes.get(chunk.0 as usize).is_some_and(Option::is_some)
    }

    /// Whether this selected chunk is neither verified nor arriving.
    pub(super) fn is_missing(&self, chunk: ChunkIndex) -> bool {
        let hash = self.hashes.get(chunk.0 as usize);
        hash.is_some_and(Option::is_none) && !self.arriving.contains(chunk.0)
    }

    fn chunk_bytes(&self, chunk: ChunkIndex) -> u64 {
        let (range, _) = self.manifest().chunk(chunk);
        range.end - range.start
    }

    /// The number of verified chunks.
    pub fn verified_chunks(&self) -> u32 {
        self.selection.chunks().len() - self.unverified
    }

    /// The verified chunks, which are not sent again after a reconnection.
    pub fn held(&self) -> RangeSet {
        let held = (0u32..).zip(&self.hashes).filter(|(_, hash)| hash.is_some());
        held.map(|(chunk, _)| chunk..chunk + 1).collect()
    }

    /// The verified chunks in the first `ranges_max` ranges, and their digest.
    pub(super) fn claim(&self, ranges_max: usize) -> (RangeSet, VersionDigest) {
        let held: RangeSet = self.held().ranges().iter().take(ranges_max).cloned().collect();
        let hashes = held.iter().filter_map(|chunk| self.hashes[chunk as usize]);
        let digest = VersionDigest::of(self.manifest().digest(), hashes);
        (held, digest)
    }

    /// The number of selected chunks that are not verified.
    pub(super) fn unverified(&self) -> u32 {
        self.unverified
    }

    /// The version that chunks may be encoded against.
    pub(super) fn base(&self) -> Option<Version> {
        self.base
    }

    /// The digest by which the version is named once it is complete.
    pub(super) fn committed_digest(&self) -> VersionDigest {
        self.lent.unwrap_or_else(|| self.held_digest())
    }

    /// The digest of the verified chunks: that of `Subscribe.partial`, and that of the version once it is complete.
    pub fn held_digest(&self) -> VersionDigest {
        VersionDigest::of(self.manifest().digest(), self.hashes.iter().flatten().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CodecId;
    use crate::subscriber::fixtures::{self, CHUNK_BYTES, hash, manifest, select, verified};
    use proptest::prelude::*;

    fn all(chunks: u32) -> Assembly {
        Assembly::new(Arc::new(Selection::all(manifest(chunks))))
    }

    fn header(chunk: u32) -> ChunkHeader {
        fixtures::header(1, chunk)
    }

    #[test]
    fn a_wrong_digest_is_never_committed() {
        let mut assembly = all(2);
        for chunk in [1, 0] {
            assembly.handle_header(&header(chunk)).unwrap();
            assembly.handle_verified(verified(chunk));
        }
        assert_eq!(assembly.poll(), None, "the sender's digest has not arrived");
        assembly.handle_complete(VersionDigest::of(assembly.manifest().digest(), [hash(1), hash(0)]));
        assert!(matches!(assembly.poll(), Some(Outcome::Mismatch { .. })));
    }

    #[test]
    fn invalid_headers_are_refused() {
        let mut assembly = all(2);
        assert!(matches!(assembly.handle_header(&header(2)), Err(ProtocolViolation::NoSuchChunk { .. })));
        let small = ChunkHeader { raw_bytes: 1, ..header(0) };
        assert!(matches!(assembly.handle_header(&small), Err(ProtocolViolation::WrongChunkSize { .. })));
        let inflated = ChunkHeader { encoded_bytes: CHUNK_BYTES + 1, ..header(0) };
        assert!(matches!(assembly.handle_header(&inflated), Err(ProtocolViolation::Inflated { .. })));
        let based = ChunkHeader { base: Some(Version(3)), ..header(0) };
        assert!(matches!(assembly.handle_header(&based), Err(ProtocolViolation::UnknownBase { .. })));
        assert_eq!(assembly.handle_header(&header(1)), Ok(256..512));
        assert_eq!(assembly.handle_header(&header(1)), Err(ProtocolViolation::DuplicateChunk(ChunkIndex(1))));
    }

    /// PROTOCOL.md §6.9: a chunk is encoded against the version that this connection has as its base, or against none.
    #[test]
    fn only_the_base_of_the_connection_is_allowed() {
        let mut assembly = all(2);
        assembly.set_base(Some(Version(3)));
        let against = |version| ChunkHeader { codec: CodecId::Sparse, base: version, ..header(0) };
        let refused = assembly.handle_header(&against(Some(Version(4))));
        assert!(matches!(refused, Err(ProtocolViolation::UnknownBase { .. })), "{refused:?}");
        let refused = assembly.handle_header(&against(None));
        assert!(matches!(refused, Err(ProtocolViolation::CodecAndBase { .. })), "{refused:?}");
        assert_eq!(assembly.handle_header(&against(Some(Version(3)))), Ok(0..256));
        assert_eq!(assembly.handle_header(&header(1)), Ok(256..512), "it needs none");
        assembly.handle_detached();
        let refused = assembly.handle_header(&against(Some(Version(3))));
        assert!(matches!(refused, Err(ProtocolViolation::UnknownBase { .. })), "{refused:?}");
    }

    /// PROTOCOL.md §5.4 and §6.5: unselected chunks are refused, and selected ones lie end to end.
    #[test]
    fn only_selected_chunks_are_taken() {
        let mut assembly = Assembly::new(select(manifest(4), &[1, 3]));
        assert_eq!(assembly.handle_header(&header(0)), Err(ProtocolViolation::NotSelected(ChunkIndex(0))));
        assert_eq!(assembly.handle_header(&header(3)), Ok(256..512));
        assert_eq!(assembly.handle_header(&header(1)), Ok(0..256));
        assert!(matches!(assembly.handle_header(&header(4)), Err(ProtocolViolation::NoSuchChunk { .. })));
    }

    /// PROTOCOL.md §6.8: a chunk may be sent again only after it was lost.
    #[test]
    fn a_lost_chunk_may_be_sent_again() {
        let mut assembly = all(2);
        assembly.handle_header(&header(0)).unwrap();
        assembly.handle_lost(ChunkIndex(0));
        assert_eq!(assembly.missing(), RangeSet::from_range(0..2));
        assert_eq!(assembly.handle_header(&header(0)), Ok(0..256));
        assert_eq!(assembly.missing(), RangeSet::from_range(1..2));
        assembly.handle_verified(verified(0));
        assert_eq!(assembly.handle_header(&header(0)), Err(ProtocolViolation::DuplicateChunk(ChunkIndex(0))));
        assembly.handle_lost(ChunkIndex(0));
        assert_eq!(
            (assembly.held(), assembly.held_bytes()),
            (RangeSet::from_range(0..1), 256),
            "chunk 0 is verified"
        );
    }

    /// PROTOCOL.md §6.6: the sender's digest is void once its connection is lost.
    #[test]
    fn a_lost_connection_discards_arriving_chunks() {
        let mut assembly = all(2);
        let digest = VersionDigest::of(assembly.manifest().digest(), [hash(0), hash(1)]);
        assembly.handle_header(&header(0)).unwrap();
        assembly.handle_verified(verified(0));
        assembly.handle_header(&header(1)).unwrap();
        assembly.handle_complete(digest);
        assembly.handle_detached();
        assembly.handle_verified(verified(1));
        assert_eq!(assembly.held(), RangeSet::from_range(0..1), "a chunk of the lost connection is ignored");
        assembly.handle_header(&header(1)).unwrap();
        assembly.handle_verified(verified(1));
        assert_eq!(assembly.poll(), None);
        assembly.handle_complete(digest);
        assert_eq!(assembly.poll(), Some(Outcome::Commit(assembly.held_digest())));
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Header(u32),
        Verified(u32),
        Lost(u32),
        Complete,
        Detached,
        DiscardBeyond(usize),
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0u32..7).prop_map(Step::Header),
            8 => (0u32..7).prop_map(Step::Verified),
            2 => (0u32..7).prop_map(Step::Lost),
            3 => Just(Step::Complete),
            1 => Just(Step::Detached),
            1 => (0usize..3).prop_map(Step::DiscardBeyond),
        ]
    }

    proptest! {
        /// For any selection and order of events: the version is committed exactly when every selected chunk was
        /// verified, on any connections, and the sender sent its digest on the current connection.
        #[test]
        fn commit_only_when_whole(
            wanted in prop::collection::btree_set(0u32..6, 0..7),
            steps in prop::collection::vec(any_step(), 0..80),
        ) {
            let selection = select(manifest(6), &Vec::from_iter(wanted.clone()));
            let digest = VersionDigest::of(selection.manifest().digest(), wanted.iter().copied().map(hash));
            let mut assembly = Assembly::new(selection.clone());
            let (mut arriving, mut held, mut complete) = (RangeSet::new(), RangeSet::new(), false);
            for step in steps {
                match step {
                    Step::Header(c) => {
                        let is_new = !held.contains(c) && !arriving.contains(c);
                        let expected = selection.place(ChunkIndex(c)).filter(|_| is_new);
                        prop_assert_eq!(assembly.handle_header(&header(c)).ok(), expected.clone());
                        if expected.is_some() { arriving.insert(c); }
                    }
                    Step::Verified(c) => {
                        assembly.handle_verified(verified(c));
                        if arriving.remove(c) { held.insert(c); }
                    }
                    Step::Lost(c) => { assembly.handle_lost(ChunkIndex(c)); arriving.remove(c); }
                    Step::Complete => { assembly.handle_complete(digest); complete = true; }
                    Step::Detached => {
                        assembly.handle_detached();
                        (arriving, complete) = (RangeSet::new(), false);
                    }
                    Step::DiscardBeyond(ranges) => {
                        let kept: RangeSet = held.ranges().iter().take(ranges).cloned().collect();
                        prop_assert_eq!(assembly.discard_beyond(ranges), held.difference(&kept));
                        held = kept;
                    }
                }
                let is_whole = complete && held.len() as usize == wanted.len();
                prop_assert_eq!(assembly.poll(), is_whole.then_some(Outcome::Commit(digest)));
                prop_assert_eq!(assembly.held(), held.clone());
                prop_assert_eq!(assembly.verified_chunks(), held.len());
                prop_assert_eq!(assembly.held_bytes(), u64::from(held.len() * CHUNK_BYTES));
                let missing: RangeSet = selection.chunks().difference(&held).difference(&arriving);
                prop_assert_eq!(assembly.missing(), missing);
            }
        }

        /// A version received over two connections, the second of which sends only the chunks missing after the first,
        /// is complete.
        #[test]
        fn a_resume_needs_only_missing_chunks(
            wanted in prop::collection::vec(0u32..12, 0..12),
            received in prop::collection::btree_set(0u32..12, 0..12),
            ranges in 0usize..4,
        ) {
            let selection = select(manifest(12), &wanted);
            let mut assembly = Assembly::new(selection.clone());
            let receive = |assembly: &mut Assembly, chunks: RangeSet| {
                for chunk in chunks.iter() {
                    assembly.handle_header(&header(chunk)).unwrap();
                    assembly.handle_verified(verified(chunk));
                }
            };
            let first = selection.chunks().iter().filter(|chunk| received.contains(chunk)).map(|c| c..c + 1).collect();
            receive(&mut assembly, first);
            assembly.handle_detached();
            assembly.discard_beyond(ranges);
            let held = assembly.held();
            prop_assert!(held.ranges().len() <= ranges);
            receive(&mut assembly, selection.chunks().difference(&held));
            assembly.handle_complete(VersionDigest::of(selection.manifest().digest(), selection.chunks().iter().map(hash)));
            prop_assert_eq!(assembly.poll(), Some(Outcome::Commit(assembly.held_digest())));
        }
    }
}
