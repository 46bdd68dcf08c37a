//! Selections: the tensors of a snapshot that a subscription requests, or boxes of them, and their chunks (PROTOCOL.md
//! §5.4, §5.5).

mod cut;
mod parts;
mod places;
mod wanted;

pub use cut::BoxError;
pub use parts::{Part, PartPlace, Spread};
pub use wanted::Wanted;

use crate::{Bounds, ChunkIndex, Chunking, Glob, Manifest, Overlap, Piece, RangeSet, Tensor, TensorBox};
use cut::Cut;
use places::Places;
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::{Arc, OnceLock},
};

/// The tensors of a manifest that match a list of globs, or boxes of them; the chunks that contain them; and their
/// layout in the receiver's memory.
///
/// Both ends compute a selection from the manifest, the globs and the boxes, so only these are sent. The selected
/// chunks, end to end, are the *stream*. Their sizes are multiples of 256 bytes, so tensors stay aligned; all chunks of
/// a selected tensor are selected, so its bytes stay contiguous. With all tensors selected, the stream is the payload.
///
/// A receiver's memory is laid out as the stream, unless boxes or tensors in pieces are selected: then it has the selected
/// tensors and boxes alone, each of them dense and aligned, and [`parts`](Self::parts) say where the bytes of the stream go.
///
/// A selection needs memory for each run of selected tensors and each run of selected chunks; with boxes, for each
/// selected tensor.
#[derive(Debug, Clone)]
pub struct Selection {
    manifest: Arc<Manifest>,
    tensors: RangeSet,
    chunks: RangeSet,
    /// The selected tensors that are not selected whole.
    cut: Arc<HashMap<u32, Cut>>,
    /// For each run of selected chunks, the number of unselected payload bytes before it.
    skipped_bytes: Box<[u64]>,
    /// The size of the selected chunks in bytes.
    payload_bytes: u64,
    /// The size of the selected tensors and boxes in bytes, once it was asked for.
    wanted_bytes: OnceLock<u64>,
    /// Why a box is not exactly what was requested.
    misfit: Option<Arc<BoxError>>,
    /// Whether the receiver's memory is laid out otherwise than the stream.
    has_parts: bool,
    /// That memory, once it was asked for: receivers alone do.
    places: OnceLock<Arc<Places>>,
}

impl Selection {
    /// Selects every tensor.
    pub fn all(manifest: Arc<Manifest>) -> Self {
        let tensors = RangeSet::from_range(0..manifest.tensors().len() as u32);
        let chunks = RangeSet::from_range(0..manifest.chunking().count());
        Self::laid_out(manifest, tensors, chunks, Arc::default())
    }

    /// Selects nothing, as for a description.
    pub fn none(manifest: Arc<Manifest>) -> Self {
        Self::laid_out(manifest, RangeSet::new(), RangeSet::new(), Arc::default())
    }

    /// Selects the tensors whose name matches one of `globs`. Without globs, every tensor is selected, as in
    /// `Subscribe`. An alias whose own name does not match is not selected, although its bytes are.
    ///
    /// Matches every tensor against every glob: for a hundred thousand tensors up to a tenth of a second per glob, so
    /// keep the selection while the manifest stays the same.
    pub fn new(manifest: Arc<Manifest>, globs: &[Glob]) -> Self {
        if globs.is_empty() {
            return Self::all(manifest);
        }
        let tensors = matching(&manifest, globs);
        let tensors_selected = tensors.iter().map(|index| &manifest.tensors()[index as usize]);
        let chunks = tensors_selected.flat_map(|tensor| chunks_of(&manifest, tensor)).collect();
        Self::laid_out(manifest, tensors, chunks, Arc::default())
    }

    /// Selects, of each selected tensor, the box of the first of `boxes` whose glob matches its name, cut off at the
    /// tensor's end. A tensor without one stays selected whole; also one whose box is not of whole bytes, or that shares its
    /// bytes with an earlier one of another shape. [`misfit`](Self::misfit) tells.
    #[must_use]
    pub fn cut(self, boxes: &[TensorBox]) -> Self {
        if boxes.is_empty() {
            return self;
        }
        let (cuts, misfit) = cut::cut(&self.manifest, &self.tensors, boxes);
        let cut = Self { cut: Arc::new(cuts), misfit: misfit.map(Arc::new), ..self };
        let chunks = cut.chunks_of_all();
        let Self { manifest, tensors, cut, misfit, .. } = cut;
        Self { misfit, ..Self::laid_out(manifest, tensors, chunks, cut) }
    }

    /// Why a box is not exactly what was requested, if one is not.
    pub fn misfit(&self) -> Option<&BoxError> {
        self.misfit.as_deref()
    }

    /// The chunks that contain a byte of what is selected. Tensors that share their bytes, of which the same is selected,
    /// are looked at once.
    fn chunks_of_all(&self) -> RangeSet {
        let mut is_needed = vec![false; self.manifest.chunking().count() as usize];
        let mut seen = HashSet::new();
        for index in self.tensors.iter() {
            let tensor = &self.manifest.tensors()[index as usize];
            if tensor.byte_len() > 0 && seen.insert((tensor.offset(), self.bounds(index as usize))) {
                let chunks = self.chunks_of(index);
                chunks
                    .ranges()
                    .iter()
                    .for_each(|run| is_needed[run.start as usize..run.end as usize].fill(true));
            }
        }
        let needed = (0..).zip(is_needed).filter(|(_, is_needed)| *is_needed);
        needed.map(|(chunk, _)| chunk..chunk + 1).collect()
    }

    /// Divides the selection at chunks that no tensor spans, into parts of at most `bytes_max` where that is possible:
    /// together they have each tensor once, except that every part has the empty ones, and no chunk twice. In the order
    /// of the payload. No parts without a tensor.
    pub fn split(&self, bytes_max: u64) -> Vec<Self> {
        let spans = self.tensors.iter().filter_map(|index| {
            let chunks = self.chunks_of(index);
            let (first, last) = chunks.ranges().first().zip(chunks.ranges().last())?;
            Some(first.start + 1..last.end)
        });
        let spanned: RangeSet = spans.collect();
        let mut parts: Vec<(Range<u32>, u64)> = vec![];
        let mut piece: Option<(Range<u32>, u64)> = None; // Ends before the next chunk that may begin a part.
        for chunk in self.chunks.iter() {
            let (bytes, _) = self.manifest.chunk(ChunkIndex(chunk));
            let bytes = bytes.end - bytes.start;
            match &mut piece {
                Some((chunks, piece_bytes)) if spanned.contains(chunk) => {
                    (chunks.end, *piece_bytes) = (chunk + 1, *piece_bytes + bytes);
                }
                _ => extend(&mut parts, piece.replace((chunk..chunk + 1, bytes)), bytes_max),
            }
        }
        extend(&mut parts, piece, bytes_max);
        match parts.is_empty() {
            true if self.tensors.is_empty() => vec![],
            true => vec![self.clone()],
            false => parts
                .into_iter()
                .map(|(chunks, _)| self.clone().within(&RangeSet::from_range(chunks)))
                .collect(),
        }
    }

    /// The part of this selection within `chunks`: these chunks, and the tensors, or boxes, that lie completely in
    /// them; empty ones stay selected. Without `chunks`, all of it, as in `Subscribe`.
    #[must_use]
    pub fn within(self, chunks: &RangeSet) -> Self {
        if chunks.is_empty() {
            return self;
        }
        let is_within = |index: u32| match self.cut.contains_key(&index) {
            true => self.chunks_of(index).difference(chunks).is_empty(),
            false => chunks_of(&self.manifest, &self.manifest.tensors()[index as usize])
                .flatten()
                .all(|chunk| chunks.contains(chunk)),
        };
        let tensors = self.tensors.iter().filter(|index| is_within(*index));
        let tensors = tensors.map(|index| index..index + 1).collect();
        let misfit = self.misfit.clone();
        Self { misfit, ..Self::laid_out(self.manifest, tensors, self.chunks.intersection(chunks), self.cut) }
    }

    fn laid_out(
        manifest: Arc<Manifest>,
        tensors: RangeSet,
        chunks: RangeSet,
        cut: Arc<HashMap<u32, Cut>>,
    ) -> Self {
        let mut payload_bytes = 0;
        let mut skipped_bytes = Vec::with_capacity(chunks.ranges().len());
        for run in chunks.ranges() {
            let bytes = run_bytes(manifest.chunking(), run);
            skipped_bytes.push(bytes.start - payload_bytes);
            payload_bytes += bytes.end - bytes.start;
        }
        let skipped_bytes = skipped_bytes.into();
        let (misfit, wanted_bytes) = (None, OnceLock::new());
        let streamed = Self {
            manifest,
            tensors,
            chunks,
            cut,
            skipped_bytes,
            payload_bytes,
            wanted_bytes,
            misfit,
            has_parts: false,
            places: OnceLock::new(),
        };
        let has_parts = streamed.has_boxes() || streamed.has_pieces();
        Self { has_parts, ..streamed }
    }

    /// The receiver's memory, if it is not laid out as the stream.
    fn places(&self) -> Option<&Places> {
        self.has_parts
            .then(|| &**self.places.get_or_init(|| Arc::new(Places::of(self))))
    }

    /// A selection with the same chunks and layout, but only the tensors for whose index `keep` returns true.
    pub fn retain(&self, keep: impl Fn(usize) -> bool) -> Self {
        let _ = self.places(); // The layout is that of all tensors.
        let retained = self.tensors.iter().filter(|index| keep(*index as usize));
        let tensors = retained.map(|index| index..index + 1).collect();
        Self { tensors, wanted_bytes: OnceLock::new(), ..self.clone() }
    }

    /// The manifest.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// The indexes of the selected tensors in [`Manifest::tensors`].
    pub fn tensors(&self) -> &RangeSet {
        &self.tensors
    }

    /// What is selected of the tensor with this index, which exists: the tensor, or a box of it, whose
    /// [shard](Tensor::shard) says where it lies. Its range in the payload is not meaningful.
    ///
    /// # Panics
    /// When there is no such tensor.
    pub fn tensor(&self, index: usize) -> &Tensor {
        self.cut_of(index)
            .map_or_else(|| &self.manifest.tensors()[index], |cut| &cut.tensor)
    }

    /// The box of the tensor with this index, if it is selected and not whole.
    pub fn bounds(&self, index: usize) -> Option<&Bounds> {
        self.cut_of(index).map(|cut| &cut.bounds)
    }

    fn cut_of(&self, index: usize) -> Option<&Cut> {
        u32::try_from(index).ok().and_then(|index| self.cut.get(&index))
    }

    /// The chunks that contain a byte of a selected tensor or box. They may also contain unselected small tensors.
    pub fn chunks(&self) -> &RangeSet {
        &self.chunks
    }

    /// The size of the selected chunks in bytes: what a receiver receives.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// The size in bytes of the memory that a receiver needs. Without boxes, that of the selected chunks.
    pub fn memory_bytes(&self) -> u64 {
        self.places().map_or(self.payload_bytes, Places::bytes)
    }

    /// The size in bytes of the selected tensors and boxes together, without padding. Tensors that share their place count
    /// once. Looks at each of them the first time.
    pub fn wanted_bytes(&self) -> u64 {
        *self.wanted_bytes.get_or_init(|| {
            let mut starts = HashSet::new();
            let places = self.tensors.iter().filter_map(|index| self.tensor_range(index as usize));
            let distinct = places.filter(|place| !place.is_empty() && starts.insert(place.start));
            distinct.map(|place| place.end - place.start).sum()
        })
    }

    /// Whether a receiver's memory is laid out otherwise than the stream, as [`parts`](Self::parts) say.
    pub fn has_parts(&self) -> bool {
        self.has_parts
    }

    /// Whether a tensor is not selected whole.
    pub fn has_boxes(&self) -> bool {
        !self.cut.is_empty()
    }

    /// The range of the raw bytes of `chunk` in the stream; `None` if the chunk is not selected.
    pub fn place(&self, chunk: ChunkIndex) -> Option<Range<u64>> {
        let skipped = self.skipped_before(chunk.0)?;
        let bytes = self.manifest.chunking().range(chunk)?;
        Some(bytes.start - skipped..bytes.end - skipped)
    }

    /// The range of a part of the payload in the receiver's memory; `None` if a chunk of it is not selected, or that memory
    /// is not laid out as the stream.
    pub fn memory_range(&self, payload: Range<u64>) -> Option<Range<u64>> {
        let chunking = self.manifest.chunking();
        if payload.is_empty() {
            return Some(0..0);
        }
        if self.has_parts || payload.end > self.manifest.payload_bytes() {
            return None;
        }
        let (first, last) = (chunk_at(chunking, payload.start), chunk_at(chunking, payload.end - 1));
        let runs = self.chunks.ranges();
        let run = runs.get(runs.partition_point(|run| run.end <= first))?;
        (run.contains(&first) && run.contains(&last)).then_some(())?;
        let skipped = self.skipped_before(first)?;
        Some(payload.start - skipped..payload.end - skipped)
    }

    /// The range, in the receiver's memory, of what is selected of the tensor with this index; `None` if it is not
    /// selected. Empty tensors and boxes have the range `0..0`.
    pub fn tensor_range(&self, index: usize) -> Option<Range<u64>> {
        let number = u32::try_from(index).ok().filter(|index| self.tensors.contains(*index))?;
        if let Some(places) = self.places() {
            return places.tensor(number);
        }
        let tensor = &self.manifest.tensors()[index];
        if tensor.byte_len() == 0 {
            return Some(0..0);
        }
        let skipped = self.skipped_before(chunk_at(self.manifest.chunking(), tensor.offset()))?;
        let start = tensor.offset() - skipped;
        Some(start..start + tensor.byte_len())
    }

    /// Whether a selected tensor is in pieces.
    fn has_pieces(&self) -> bool {
        let tensors = self.manifest.tensors();
        self.manifest.feature().is_some()
            && self.tensors.iter().any(|index| tensors[index as usize].is_in_pieces())
    }

    /// The chunks that contain a byte of what is selected of the tensor with this index.
    fn chunks_of(&self, index: u32) -> RangeSet {
        let tensor = &self.manifest.tensors()[index as usize];
        let Some(Cut { bounds, .. }) = self.cut.get(&index) else {
            return chunks_of(&self.manifest, tensor).collect();
        };
        let pieces = tensor
            .pieces()
            .filter_map(|piece| Some((overlap(tensor, &piece, bounds)?, piece.range)));
        let chunks = pieces.flat_map(|(overlap, range)| {
            let chunks = chunks_in(self.manifest.chunking(), &range);
            chunks.filter(move |chunk| {
                let (bytes, _) = self.manifest.chunk(ChunkIndex(*chunk));
                overlap.meets(&(bytes.start.saturating_sub(range.start)..bytes.end - range.start))
            })
        });
        chunks.map(|chunk| chunk..chunk + 1).collect()
    }

    /// The number of unselected payload bytes before `chunk`; `None` if `chunk` is not selected.
    fn skipped_before(&self, chunk: u32) -> Option<u64> {
        let runs = self.chunks.ranges();
        let at = runs.partition_point(|run| run.end <= chunk);
        runs.get(at).filter(|run| run.contains(&chunk)).map(|_| self.skipped_bytes[at])
    }
}

/// Adds a piece to the last part if it fits, else as a new part.
fn extend(parts: &mut Vec<(Range<u32>, u64)>, piece: Option<(Range<u32>, u64)>, bytes_max: u64) {
    let Some((chunks, bytes)) = piece else { return };
    match parts
        .last_mut()
        .filter(|(_, part_bytes)| part_bytes.saturating_add(bytes) <= bytes_max)
    {
        Some((part, part_bytes)) => (part.end, *part_bytes) = (chunks.end, *part_bytes + bytes),
        None => parts.push((chunks, bytes)),
    }
}

/// The indexes of the tensors whose name matches one of `globs`.
fn matching(manifest: &Manifest, globs: &[Glob]) -> RangeSet {
    let matches = |name: &str| globs.iter().any(|glob| glob.matches(name));
    let tensors = (0..).zip(manifest.tensors());
    tensors
        .filter(|(_, tensor)| matches(tensor.name.as_str()))
        .map(|(index, _)| index..index + 1)
        .collect()
}

/// The chunks that contain a tensor, a range for each of its pieces.
fn chunks_of(manifest: &Manifest, tensor: &Tensor) -> impl Iterator<Item = Range<u32>> {
    let pieces = tensor.ranges().filter(|range| !range.is_empty());
    pieces.map(|range| chunks_in(manifest.chunking(), &range))
}

/// The chunks that contain a range of the payload that is not empty.
fn chunks_in(chunking: &Chunking, bytes: &Range<u64>) -> Range<u32> {
    chunk_at(chunking, bytes.start)..chunk_at(chunking, bytes.end - 1) + 1
}

/// The bytes that a piece of a tensor and its box have in common. The box is of whole bytes.
fn overlap(tensor: &Tensor, piece: &Piece, bounds: &Bounds) -> Option<Overlap> {
    Overlap::new(tensor.dtype, &piece.bounds, bounds).ok().flatten()
}

/// The chunk that contains the payload byte at offset `byte`.
fn chunk_at(chunking: &Chunking, byte: u64) -> u32 {
    let (mut low, mut high) = (0, chunking.count());
    while low < high {
        let middle = low + (high - low) / 2;
        match chunking.range(ChunkIndex(middle)).is_some_and(|range| range.end <= byte) {
            true => low = middle + 1,
            false => high = middle,
        }
    }
    low
}

/// The payload range of a run of adjacent chunks.
fn run_bytes(chunking: &Chunking, run: &Range<u32>) -> Range<u64> {
    let first = chunking.range(ChunkIndex(run.start));
    let last = chunking.range(ChunkIndex(run.end - 1));
    first.zip(last).map_or(0..0, |(first, last)| first.start..last.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Limits, PAYLOAD_ALIGNMENT, Shape, TensorName, TensorSpec};
    use proptest::prelude::*;

    fn glob(pattern: &str) -> Glob {
        Glob::new(pattern).unwrap()
    }

    fn spec(name: &str, dtype: Dtype, elements: u64) -> TensorSpec {
        TensorSpec::new(TensorName::new(name).unwrap(), dtype, Shape::new(&[elements]).unwrap())
    }

    fn manifest_of(specs: Vec<TensorSpec>, chunk_bytes: u32) -> Arc<Manifest> {
        Arc::new(Manifest::layout(specs, vec![], chunk_bytes, &Limits::default()).unwrap())
    }

    /// PROTOCOL.md §5.4, the example.
    #[test]
    fn small_tensors_of_a_selected_chunk_are_included() {
        let tensors = vec![spec("a", Dtype::F32, 10), spec("big", Dtype::F32, 700), spec("b", Dtype::F32, 3)];
        let selection = Selection::new(manifest_of(tensors, 1024), &[glob("?")]);
        assert_eq!(selection.chunks(), &RangeSet::from_range(3..4));
        assert_eq!(selection.payload_bytes(), 512);
        assert_eq!(selection.place(ChunkIndex(3)), Some(0..512));
        assert_eq!(selection.place(ChunkIndex(2)), None);
        assert_eq!(selection.tensor_range(0), Some(0..40));
        assert_eq!(selection.tensor_range(1), None);
        assert_eq!(selection.tensor_range(2), Some(256..268));
        assert_eq!(selection.tensor_range(3), None, "there is no such tensor");
    }

    #[test]
    fn an_alias_is_selected_by_its_own_name() {
        let mut tied = spec("lm_head", Dtype::Bf16, 64);
        tied.alias_of = Some(0);
        let manifest =
            manifest_of(vec![spec("embed", Dtype::Bf16, 64), tied, spec("none", Dtype::Bf16, 0)], 1024);
        for (pattern, selected) in [("embed", 0), ("lm_*", 1)] {
            let selection = Selection::new(manifest.clone(), &[glob(pattern)]);
            assert_eq!(selection.tensors(), &RangeSet::from_range(selected..selected + 1));
            assert_eq!(selection.tensor_range(selected as usize), Some(0..128));
            assert_eq!(
                (selection.payload_bytes(), selection.tensor_range(1 - selected as usize)),
                (256, None)
            );
        }
    }

    /// PROTOCOL.md §5.4: the parts of a selection have its tensors, each once, and no chunk twice.
    #[test]
    fn parts_share_no_chunk_and_have_every_tensor() {
        let mut tensors: Vec<_> = (0..20).map(|i| spec(&format!("s{i}"), Dtype::F32, 20)).collect();
        tensors.extend([spec("big", Dtype::F32, 700), spec("empty", Dtype::F32, 0)]);
        let whole = Selection::new(manifest_of(tensors, 1024), &[glob("s*"), glob("big")]);
        let cut = 2; // Within the large tensor, which no part has.
        for (at, lost) in [(3, vec![]), (cut, vec![20])] {
            let parts = [0..at, at..whole.manifest().chunking().count()];
            let parts = parts.map(|part| whole.clone().within(&RangeSet::from_range(part)));
            let mut found: Vec<u32> = parts.iter().flat_map(|part| part.tensors().iter()).collect();
            found.sort_unstable();
            let expected: Vec<u32> = whole.tensors().iter().filter(|index| !lost.contains(index)).collect();
            assert_eq!(found, expected);
            assert_eq!(parts[0].chunks().union(parts[1].chunks()), *whole.chunks());
            assert!(parts[0].chunks().intersection(parts[1].chunks()).is_empty());
            let bytes = parts.iter().map(Selection::payload_bytes).sum::<u64>();
            assert_eq!(bytes, whole.payload_bytes());
        }
        assert_eq!(whole.clone().within(&RangeSet::new()).tensors(), whole.tensors());
        for bytes_max in [1, 2048, 1 << 20] {
            let parts = whole.split(bytes_max);
            let chunks: Vec<u32> = parts.iter().flat_map(|part| part.chunks().iter()).collect();
            assert_eq!(chunks, whole.chunks().iter().collect::<Vec<_>>());
            let mut found: Vec<u32> = parts.iter().flat_map(|part| part.tensors().iter()).collect();
            found.sort_unstable();
            assert_eq!(found, whole.tensors().iter().collect::<Vec<_>>());
            let is_small = |part: &Selection| part.payload_bytes() <= bytes_max.max(1024 * 3);
            assert!(parts.iter().all(is_small), "the large tensor has three chunks");
        }
    }

    #[test]
    fn a_selection_may_be_empty() {
        let manifest = manifest_of(vec![spec("w", Dtype::U8, 10), spec("empty", Dtype::U8, 0)], 1024);
        let no_tensor = Selection::new(manifest.clone(), &[glob("x")]);
        assert!(no_tensor.tensors().is_empty() && no_tensor.chunks().is_empty());
        let empty_tensor = Selection::new(manifest, &[glob("empty")]);
        assert_eq!((empty_tensor.tensor_range(1), empty_tensor.wanted_bytes()), (Some(0..0), 0));
        assert_eq!((empty_tensor.payload_bytes(), empty_tensor.chunks().len()), (0, 0));
        let empty_first = vec![spec("empty", Dtype::U8, 0), spec("w", Dtype::U8, 10)];
        assert_eq!(Selection::all(manifest_of(empty_first, 1024)).wanted_bytes(), 10);
    }

    /// Tensors of several dtypes, some of them empty and some of them aliases of earlier ones.
    fn any_specs() -> impl Strategy<Value = Vec<TensorSpec>> {
        let size = prop_oneof![1 => Just(0u64), 4 => 1u64..300, 4 => 1u64..3000];
        let tensor = (0..3usize, size, prop::option::weighted(0.2, any::<prop::sample::Index>()));
        prop::collection::vec(tensor, 0..30).prop_map(|tensors| {
            let mut specs: Vec<TensorSpec> = vec![];
            for (index, (dtype, elements, alias)) in tensors.into_iter().enumerate() {
                let name = format!("t{index}");
                let dtype = [Dtype::U8, Dtype::Bf16, Dtype::F32][dtype];
                let target = alias.filter(|_| index > 0).map(|at| at.index(index));
                specs.push(match target.filter(|target| specs[*target].alias_of.is_none()) {
                    Some(target) => TensorSpec {
                        name: TensorName::new(&name).unwrap(),
                        alias_of: Some(target),
                        ..specs[target].clone()
                    },
                    None => spec(&name, dtype, elements),
                });
            }
            specs
        })
    }

    fn any_manifest() -> impl Strategy<Value = Arc<Manifest>> {
        (any_specs(), (1u32..9).prop_map(|n| n * 256))
            .prop_map(|(specs, chunk_bytes)| manifest_of(specs, chunk_bytes))
    }

    fn any_globs() -> impl Strategy<Value = Vec<Glob>> {
        prop::collection::vec("t[0-2?*][0-9?*]{0,1}".prop_map(|pattern| glob(&pattern)), 1..5)
    }

    proptest! {
        /// For any tensors and globs: the selected tensors are those that match; the selected chunks are those with a
        /// byte of a selected tensor; chunks lie end to end in order, aligned; and each selected tensor has the same
        /// bytes as in the payload.
        #[test]
        fn selected_tensors_have_their_bytes(manifest in any_manifest(), globs in any_globs()) {
            let selection = Selection::new(manifest.clone(), &globs);
            let tensors = manifest.tensors();
            let is_selected = |t: &Tensor| globs.iter().any(|glob| glob.matches(t.name.as_str()));
            for (index, tensor) in tensors.iter().enumerate() {
                prop_assert_eq!(selection.tensors().contains(index as u32), is_selected(tensor));
            }
            let payload: Vec<u8> = (0..manifest.payload_bytes()).map(|at| (at * 31 % 251) as u8).collect();
            let mut compact = vec![];
            for (chunk, range) in manifest.chunking().iter() {
                let overlaps = |t: &Tensor| t.ranges().any(|of| of.start < range.end && range.start < of.end);
                let wanted = tensors.iter().any(|t| is_selected(t) && t.byte_len() > 0 && overlaps(t));
                prop_assert_eq!(selection.chunks().contains(chunk.0), wanted);
                let end = compact.len() as u64;
                let place = end..end + range.end - range.start;
                prop_assert_eq!(selection.place(chunk), wanted.then_some(place));
                if wanted {
                    prop_assert!(end.is_multiple_of(PAYLOAD_ALIGNMENT));
                    compact.extend_from_slice(&payload[range.start as usize..range.end as usize]);
                }
            }
            prop_assert_eq!(compact.len() as u64, selection.payload_bytes());
            for (index, tensor) in tensors.iter().enumerate() {
                let slice = |range: Range<u64>| range.start as usize..range.end as usize;
                let range = selection.tensor_range(index);
                prop_assert_eq!(range.is_some(), is_selected(tensor));
                if let Some(range) = range {
                    prop_assert!(range.start.is_multiple_of(PAYLOAD_ALIGNMENT));
                    prop_assert_eq!(&compact[slice(range)], &payload[slice(tensor.range().unwrap())]);
                }
            }
        }

        /// With all tensors selected, by no glob or by `**`, the layout is that of the manifest, in one run.
        #[test]
        fn a_selection_of_all_tensors_has_the_layout_of_the_payload(manifest in any_manifest()) {
            for globs in [vec![], vec![glob("**")]] {
                let selection = Selection::new(manifest.clone(), &globs);
                prop_assert!(selection.chunks().ranges().len() <= 1 && selection.tensors().ranges().len() <= 1);
                prop_assert_eq!(selection.payload_bytes(), manifest.payload_bytes());
                for (chunk, range) in manifest.chunking().iter() {
                    prop_assert_eq!(selection.place(chunk), Some(range));
                }
                for (index, tensor) in manifest.tensors().iter().enumerate().filter(|(_, t)| t.byte_len() > 0) {
                    prop_assert_eq!(selection.tensor_range(index), tensor.range());
                }
            }
        }
    }
}
