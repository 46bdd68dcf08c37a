//! The receiver's side of one version: what came, what is missing, and when it may become visible (PROTOCOL.md §6.5).

use crate::{
    ChunkHash, ChunkHeader, ChunkIndex, Manifest, Misbehaved, RangeSet, Selection, Verified, Version,
    VersionDigest,
};
use std::{collections::BTreeMap, ops::Range, sync::Arc};

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

/// What to do with the stream of a chunk whose header came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arrival {
    /// The chunk is missing: receive it into this place.
    Begin(Range<u64>),
    /// An earlier attempt at the chunk is arriving, which its sender has given up: end that one, and receive this one
    /// into this place instead.
    Instead(Range<u64>),
    /// The chunk is here, or a later attempt at it is arriving: the stream is of no use.
    Late,
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
    /// For chunks that were lost or begun again over another lane: the first attempt that is news. Few have one.
    attempts: BTreeMap<u32, u16>,
    missing: u32,
    complete: Option<VersionDigest>,
    /// The version that chunks may be coded against.
    base: Option<Version>,
}

impl Assembly {
    /// Begins a version of which `selection` is wanted. Costs 17 bytes per chunk of the manifest.
    pub fn new(selection: Arc<Selection>) -> Self {
        let chunks = selection.manifest().chunking().count() as usize;
        let missing = selection.chunks().len();
        Self {
            selection,
            hashes: vec![None; chunks],
            arriving: RangeSet::new(),
            attempts: BTreeMap::new(),
            missing,
            complete: None,
            base: None,
        }
    }

    /// What the version holds.
    pub fn manifest(&self) -> &Arc<Manifest> {
        self.selection.manifest()
    }

    /// What of it is wanted, and where that goes.
    pub fn selection(&self) -> &Arc<Selection> {
        &self.selection
    }

    /// Lets chunks that come from now on be coded against version `base` of the same epoch, which must have the same
    /// manifest; against none at first, and when the connection is lost.
    pub fn set_base(&mut self, base: Option<Version>) {
        self.base = base;
    }

    /// Takes the header of a chunk that begins to arrive and says where its bytes belong
    /// ([`Selection::place`]), if they are wanted.
    ///
    /// # Errors
    /// [`Misbehaved`] when the manifest has no such chunk, gives it another size, it was not selected, it is coded against
    /// another version than it may be, or the same attempt at it came before.
    pub fn handle_header(&mut self, header: &ChunkHeader) -> Result<Arrival, Misbehaved> {
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
        let (attempt, news) = (u16::from(header.attempt), self.next_attempt(chunk));
        if attempt < news {
            let twice = attempt + 1 == news;
            return if twice { Err(Misbehaved::DuplicateChunk(chunk)) } else { Ok(Arrival::Late) };
        }
        if attempt > 0 {
            self.attempts.insert(chunk.0, attempt + 1);
        }
        Ok(match self.is_here(chunk) {
            true => Arrival::Late,
            false if self.arriving.insert(chunk.0) => Arrival::Begin(place),
            false => Arrival::Instead(place),
        })
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

    fn is_here(&self, chunk: ChunkIndex) -> bool {
        self.hashes[chunk.0 as usize].is_some()
    }

    /// The first attempt at `chunk` that is news.
    fn next_attempt(&self, chunk: ChunkIndex) -> u16 {
        let came = self.is_here(chunk) || self.arriving.contains(chunk.0);
        self.attempts.get(&chunk.0).copied().unwrap_or_else(|| came.into())
    }

    /// Takes the news that a chunk's bytes are in their place and verified.
    pub fn handle_verified(&mut self, verified: Verified) {
        // A chunk is verified only after its header was taken; anything else is not of this version.
        if self.arriving.remove(verified.chunk().0) {
            self.hashes[verified.chunk().0 as usize] = Some(verified.hash());
            self.missing -= 1;
        }
    }

    /// Takes the news that a chunk's stream ended early: it is missing again, until a later attempt brings it.
    pub fn handle_lost(&mut self, chunk: ChunkIndex) {
        if self.arriving.remove(chunk.0) {
            self.attempts.entry(chunk.0).or_insert(1);
        }
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
        self.attempts.clear();
        self.complete = None;
        self.base = None;
    }

    /// Forgets all that is held but the first `ranges` runs of chunks, so that the word of what is held stays small.
    /// Returns the chunks that are missing again.
    pub fn forget_beyond(&mut self, ranges: usize) -> RangeSet {
        let held = self.held();
        let forgotten: RangeSet = held.ranges().iter().skip(ranges).cloned().collect();
        for chunk in forgotten.iter() {
            self.hashes[chunk as usize] = None;
            self.attempts.remove(&chunk);
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
        ChunkHasher, CodecId, Dtype, Epoch, Glob, Limits, Shape, SubscriptionId, TensorName, TensorSpec,
        Version,
    };
    use proptest::prelude::*;

    const CHUNK_BYTES: u32 = 256;

    /// Tensors `t0`, `t1`, … of one chunk each.
    fn manifest(chunks: u32) -> Arc<Manifest> {
        let shape = Shape::new(&[CHUNK_BYTES.into()]).unwrap();
        let name = |chunk| TensorName::new(&format!("t{chunk}")).unwrap();
        let specs = (0..chunks).map(|chunk| TensorSpec::new(name(chunk), Dtype::U8, shape.clone()));
        Arc::new(Manifest::layout(specs.collect(), vec![], CHUNK_BYTES, &Limits::default()).unwrap())
    }

    fn select(manifest: Arc<Manifest>, chunks: &[u32]) -> Arc<Selection> {
        let globs = chunks.iter().map(|chunk| format!("t{chunk}")).chain(["nothing".into()]);
        let globs: Vec<Glob> = globs.map(|name| Glob::new(&name).unwrap()).collect();
        Arc::new(Selection::new(manifest, &globs))
    }

    fn all(chunks: u32) -> Assembly {
        Assembly::new(Arc::new(Selection::all(manifest(chunks))))
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
            attempt: 0,
        }
    }

    fn again(chunk: u32, attempt: u8) -> ChunkHeader {
        ChunkHeader { attempt, ..header(chunk) }
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
        assert_eq!(assembly.handle_header(&header(1)), Ok(Arrival::Begin(256..512)));
        assert_eq!(assembly.handle_header(&header(1)), Err(Misbehaved::DuplicateChunk(ChunkIndex(1))));
    }

    /// PROTOCOL.md §5.4 and §6.5: what was not selected is not taken, and what was lies without gaps.
    #[test]
    fn only_selected_chunks_are_taken() {
        let mut assembly = Assembly::new(select(manifest(4), &[1, 3]));
        assert_eq!(assembly.handle_header(&header(0)), Err(Misbehaved::NotSelected(ChunkIndex(0))));
        assert_eq!(assembly.handle_header(&header(3)), Ok(Arrival::Begin(256..512)));
        assert_eq!(assembly.handle_header(&header(1)), Ok(Arrival::Begin(0..256)));
        assert!(matches!(assembly.handle_header(&header(4)), Err(Misbehaved::NoSuchChunk { .. })));
    }

    /// PROTOCOL.md §6.8: of several attempts at a chunk, the latest counts, in whatever order they arrive.
    #[test]
    fn the_latest_attempt_counts() {
        let mut assembly = all(2);
        let late = Ok(Arrival::Late);
        assert_eq!(assembly.handle_header(&header(0)), Ok(Arrival::Begin(0..256)));
        assert_eq!(assembly.handle_header(&again(0, 2)), Ok(Arrival::Instead(0..256)));
        assert_eq!(assembly.handle_header(&again(0, 1)), late, "it was given up before the second");
        assert_eq!(assembly.handle_header(&again(0, 2)), Err(Misbehaved::DuplicateChunk(ChunkIndex(0))));
        assembly.handle_lost(ChunkIndex(0));
        assert_eq!(assembly.handle_header(&header(0)), late);
        assert_eq!(assembly.handle_header(&again(0, 3)), Ok(Arrival::Begin(0..256)));
        assembly.handle_verified(verified(0));
        assert_eq!(assembly.handle_header(&again(0, 255)), late, "it is here");

        assert_eq!(
            assembly.handle_header(&again(1, 1)),
            Ok(Arrival::Begin(256..512)),
            "it overtook the first"
        );
        assert_eq!(assembly.handle_header(&header(1)), late);
        assembly.handle_detached();
        assert_eq!(
            assembly.handle_header(&header(1)),
            Ok(Arrival::Begin(256..512)),
            "another session counts anew"
        );
        assembly.handle_lost(ChunkIndex(1));
        assert_eq!(assembly.handle_header(&header(1)), Err(Misbehaved::DuplicateChunk(ChunkIndex(1))));
    }

    /// PROTOCOL.md §6.6: the sender's word on the whole is worth nothing once its connection is lost.
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
        Header(u32, u8),
        Verified(u32),
        Lost(u32),
        Complete,
        Detached,
        ForgetBeyond(usize),
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0u32..7, 0u8..3).prop_map(|(chunk, attempt)| Step::Header(chunk, attempt)),
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
            let mut came = [0u8; 7]; // Of each chunk, the first attempt that is news.
            for step in steps {
                match step {
                    Step::Header(c, attempt) => {
                        let place = selection.place(ChunkIndex(c));
                        let news = attempt >= came[c as usize];
                        let expected = place.and_then(|place| match () {
                            () if attempt + 1 == came[c as usize] => None,
                            () if !news || done.contains(c) => Some(Arrival::Late),
                            () if arriving.contains(c) => Some(Arrival::Instead(place)),
                            () => Some(Arrival::Begin(place)),
                        });
                        prop_assert_eq!(assembly.handle_header(&again(c, attempt)).ok(), expected);
                        if news && wanted.contains(&c) {
                            came[c as usize] = attempt + 1;
                            if !done.contains(c) { arriving.insert(c); }
                        }
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
                        came = std::array::from_fn(|c| done.contains(c as u32).into());
                    }
                    Step::ForgetBeyond(ranges) => {
                        let kept: RangeSet = done.ranges().iter().take(ranges).cloned().collect();
                        prop_assert_eq!(assembly.forget_beyond(ranges), done.difference(&kept));
                        (0..7).filter(|c| done.contains(*c) && !kept.contains(*c)).for_each(|c| came[c as usize] = 0);
                        done = kept;
                    }
                }
                let whole = complete && done.len() as usize == wanted.len();
                prop_assert_eq!(assembly.poll(), whole.then_some(Outcome::Commit));
                prop_assert_eq!(assembly.held(), done.clone());
                prop_assert_eq!(assembly.verified_chunks(), done.len());
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
                while let Some(action) = plan.poll(&mut credit) {
                    match action {
                        crate::SendAction::Chunk(chunk) => {
                            assembly.handle_header(&header(chunk.0)).unwrap();
                            assembly.handle_verified(verified(chunk.0));
                            plan.handle_sent();
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
