//! The parts of a stream, and where their bytes go.

use super::{Selection, chunks_in, overlap};
use crate::{Bounds, Overlap, Piece, RangeSet, Rectangle, Tensor};
use std::{collections::HashSet, ops::Range, sync::Arc};

/// A range of the stream of selected chunks, whose bytes go to the memory of one tensor or box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The range in the stream.
    pub range: Range<u64>,
    /// The tensor's index in the manifest.
    pub tensor: usize,
    /// Where the bytes go.
    pub place: PartPlace,
}

/// Where the bytes of a part go in the memory of its tensor or box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartPlace {
    /// They are all of it.
    Whole,
    /// Some of them go there, in runs.
    Spread(Spread),
}

/// How the bytes of a part are spread in the memory of a tensor or box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spread {
    overlap: Arc<Overlap>,
    /// The part's start in the tensor's piece.
    start: u64,
}

impl Spread {
    /// How the bytes of the piece with this number are spread in a dense array of the tensor. `None` if the tensor is not
    /// in pieces, or the piece has no bytes.
    pub fn of_piece(tensor: &Tensor, number: u64) -> Option<Self> {
        let piece = tensor.is_in_pieces().then(|| tensor.piece(number))?;
        let overlap = overlap(tensor, &piece, &Bounds::whole(&tensor.shape))?;
        Some(Self { overlap: Arc::new(overlap), start: 0 })
    }

    /// How a dense array of the tensor is spread in the piece with this number: the reverse of
    /// [`of_piece`](Self::of_piece).
    pub fn into_piece(tensor: &Tensor, number: u64) -> Option<Self> {
        let piece = tensor.is_in_pieces().then(|| tensor.piece(number))?;
        let overlap = Overlap::new(tensor.dtype, &Bounds::whole(&tensor.shape), &piece.bounds)
            .ok()
            .flatten()?;
        Some(Self { overlap: Arc::new(overlap), start: 0 })
    }

    /// Calls `each` for the runs of a range of the part whose bytes have a place: with the range of each in the part, and
    /// its offset in the memory.
    ///
    /// # Errors
    /// The first error of `each`, which is not called again.
    pub fn try_each_run<E>(
        &self,
        range: Range<u64>,
        mut each: impl FnMut(Range<u64>, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut outcome = Ok(());
        self.rectangles(range, |rectangle| {
            let Rectangle { from, to, run_bytes, runs, from_stride, to_stride } = rectangle;
            let mut runs = (0..runs).map(|run| (from + run * from_stride, to + run * to_stride));
            if outcome.is_ok() {
                outcome = runs.try_for_each(|(from, to)| each(from..from + run_bytes, to));
            }
        });
        outcome
    }

    /// Calls `each` with the rectangles whose bytes have a place, of a range of the part. `from` is the offset in the
    /// part, `to` that in the memory.
    pub fn rectangles(&self, range: Range<u64>, mut each: impl FnMut(Rectangle)) {
        let Self { overlap, start } = self;
        let of_piece = range.start.saturating_add(*start)..range.end.saturating_add(*start);
        overlap
            .rectangles(of_piece, |rectangle| each(Rectangle { from: rectangle.from - start, ..rectangle }));
    }
}

impl Selection {
    /// The parts of the stream whose bytes a receiver keeps: of each tensor or box, a part for each run of selected
    /// chunks. Tensors with one place are one of them. Parts of tensors that share their bytes, of which different boxes
    /// are selected, share their bytes too; other parts are disjoint.
    pub fn parts(&self) -> impl Iterator<Item = Part> {
        let mut starts = HashSet::new();
        let mut is_first = move |index: &u32| {
            let place = self.tensor_range(*index as usize).filter(|place| !place.is_empty());
            place.is_some_and(|place| starts.insert(place.start))
        };
        let tensors = self.tensors.iter().filter(move |index| is_first(index));
        tensors.flat_map(move |index| {
            let tensor = &self.manifest.tensors()[index as usize];
            let bounds = self.bounds(index as usize).cloned();
            let bounds = bounds.unwrap_or_else(|| Bounds::whole(&tensor.shape));
            tensor.pieces().flat_map(move |piece| match overlap(tensor, &piece, &bounds) {
                Some(overlap) => self.parts_of_piece(index as usize, &piece, overlap),
                None => vec![],
            })
        })
    }

    fn parts_of_piece(&self, tensor: usize, piece: &Piece, overlap: Overlap) -> Vec<Part> {
        let is_all = overlap.bytes() == self.tensor(tensor).byte_len();
        if let Some(run) = overlap.as_run().filter(|_| is_all) {
            let range = self.in_stream(piece.range.start + run.start..piece.range.start + run.end);
            return range
                .map(|range| Part { range, tensor, place: PartPlace::Whole })
                .into_iter()
                .collect();
        }
        let overlap = Arc::new(overlap);
        let chunks = RangeSet::from_range(chunks_in(self.manifest.chunking(), &piece.range));
        let runs = self.chunks.intersection(&chunks);
        let part = |run: &Range<u32>| {
            let bytes = super::run_bytes(self.manifest.chunking(), run);
            let bytes = bytes.start.max(piece.range.start)..bytes.end.min(piece.range.end);
            let spread = Spread { overlap: Arc::clone(&overlap), start: bytes.start - piece.range.start };
            Some(Part { range: self.in_stream(bytes)?, tensor, place: PartPlace::Spread(spread) })
        };
        runs.ranges().iter().filter_map(part).collect()
    }

    /// The range in the stream of a range of the payload whose chunks are all selected.
    fn in_stream(&self, bytes: Range<u64>) -> Option<Range<u64>> {
        let skipped = self.skipped_before(super::chunk_at(self.manifest.chunking(), bytes.start))?;
        Some(bytes.start - skipped..bytes.end - skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ChunkIndex, Cuts, CutsError, Dtype, Glob, Indices, LayoutError, Limits, Manifest, PAYLOAD_ALIGNMENT,
        Shape, Slice, TensorBox, TensorName, TensorSpec, manifest::any_cuts,
    };
    use proptest::prelude::*;

    fn any_manifest() -> impl Strategy<Value = Arc<Manifest>> {
        let dimensions = prop::collection::vec(prop_oneof![1 => Just(0u64), 9 => 1u64..12], 0..4);
        let dtype = prop::sample::select(vec![Dtype::U4, Dtype::U8, Dtype::Bf16, Dtype::F64]);
        let shape = dimensions.prop_map(|dimensions| Shape::new(&dimensions).unwrap());
        let shape = shape.prop_flat_map(|shape| any_cuts(&shape).prop_map(move |cuts| (shape.clone(), cuts)));
        let tensors = prop::collection::vec((dtype, shape, any::<bool>()), 1..6);
        (tensors, 1u32..5).prop_map(|(tensors, chunk)| {
            let mut specs: Vec<TensorSpec> = vec![];
            for (index, (dtype, (shape, cuts), is_tied)) in tensors.into_iter().enumerate() {
                let name = TensorName::new(&format!("t{index}")).unwrap();
                let before = index
                    .checked_sub(1)
                    .filter(|before| is_tied && specs[*before].alias_of.is_none());
                specs.push(match before {
                    Some(before) => {
                        let shape = specs[before].shape.clone();
                        let reversed: Vec<u64> = shape.dimensions().iter().rev().copied().collect();
                        let may_differ = index % 2 == 0 && specs[before].cuts.is_empty();
                        let shape = if may_differ { Shape::new(&reversed).unwrap() } else { shape };
                        TensorSpec { name, alias_of: Some(before), shape, ..specs[before].clone() }
                    }
                    None => TensorSpec { cuts, ..TensorSpec::new(name, dtype, shape) },
                });
            }
            let layout = |specs| Manifest::layout(specs, vec![], chunk * 256, &Limits::default());
            let manifest = layout(specs.clone()).or_else(|error| match error {
                LayoutError::Cuts { source: CutsError::WithinByte { .. }, .. } => {
                    specs
                        .iter_mut()
                        .filter(|spec| spec.dtype.bits() < 8)
                        .for_each(|spec| spec.cuts = Cuts::NONE);
                    layout(specs)
                }
                error => Err(error),
            });
            Arc::new(manifest.unwrap())
        })
    }

    /// The bytes of a tensor, put together from its pieces, element by element.
    fn whole(payload: &[u8], tensor: &Tensor) -> Vec<u8> {
        if let Some(range) = tensor.range() {
            return payload[at(&range)].to_vec();
        }
        let unit = tensor.dtype.bits().min(8) as usize;
        let units = tensor.dtype.bits() as usize / unit;
        let mut bytes = vec![0u8; tensor.byte_len() as usize];
        for piece in tensor.pieces() {
            let mut from = piece.range.start as usize * 8;
            for element in elements(&tensor.shape, &piece.bounds) {
                for at in 0..units {
                    let to = (element as usize * units + at) * unit;
                    let value = payload[from / 8] >> (from % 8) & (0xff >> (8 - unit));
                    bytes[to / 8] |= value << (to % 8);
                    from += unit;
                }
            }
        }
        bytes
    }

    fn any_boxes() -> impl Strategy<Value = Vec<TensorBox>> {
        let range = (0u64..12, 0u64..12).prop_map(|(start, length)| Indices::Range { start, length });
        let part = (1u32..6, any::<prop::sample::Index>())
            .prop_map(|(parts, part)| Indices::Part { part: part.index(parts as usize) as u32, parts });
        let slices = prop::collection::btree_map(0u32..4, prop_oneof![range, part], 0..3);
        let slices = slices.prop_map(|slices| {
            slices
                .into_iter()
                .map(|(dimension, indices)| Slice { dimension, indices })
                .collect::<Vec<_>>()
        });
        let tensors = "t[0-5*]".prop_map(|glob| Glob::new(&glob).unwrap());
        prop::collection::vec(
            (tensors, slices).prop_map(|(tensors, slices)| TensorBox { tensors, slices }),
            0..4,
        )
    }

    /// The bytes of a box of a dense array of bytes, element by element.
    fn sliced(array: &[u8], shape: &Shape, bounds: &Bounds, element_bytes: usize) -> Vec<u8> {
        let element = |index: &u64| &array[*index as usize * element_bytes..][..element_bytes];
        elements(shape, bounds).iter().flat_map(element).copied().collect()
    }

    /// The numbers of the elements of a box in a dense array of `shape`.
    fn elements(shape: &Shape, bounds: &Bounds) -> Vec<u64> {
        let mut indexes = vec![0u64];
        for (range, length) in bounds.ranges().iter().zip(shape.dimensions()) {
            indexes = indexes
                .iter()
                .flat_map(|outer| range.clone().map(move |at| outer * length + at))
                .collect();
        }
        indexes
    }

    fn at(range: &Range<u64>) -> Range<usize> {
        range.start as usize..range.end as usize
    }

    proptest! {
        /// For any tensors, ties, boxes and chunk sizes: the selected chunks are those with a byte of a box; chunk by
        /// chunk, the bytes of the stream fill the memory of each tensor with its box, and nothing else.
        #[test]
        fn memory_has_the_boxes(manifest in any_manifest(), boxes in any_boxes(), glob in "t[0-5*]") {
            let selection = Selection::new(manifest.clone(), &[Glob::new(&glob).unwrap()]).cut(&boxes);
            let payload: Vec<u8> = (0..manifest.payload_bytes()).map(|at| (at * 31 % 251) as u8).collect();
            let parts: Vec<_> = selection.parts().collect();
            let mut memory = vec![0u8; selection.memory_bytes() as usize];
            let mut kept = vec![0u8; memory.len()];
            let mut end = 0;
            for chunk in selection.chunks().iter().map(ChunkIndex) {
                let (bytes, _) = manifest.chunk(chunk);
                let place = selection.place(chunk).unwrap();
                prop_assert_eq!(place.start, end);
                end = place.end;
                let mut is_needed = false;
                for part in &parts {
                    let common = part.range.start.max(place.start)..part.range.end.min(place.end);
                    if common.is_empty() {
                        continue;
                    }
                    let of_part = common.start - part.range.start..common.end - part.range.start;
                    let tensor = selection.tensor_range(part.tensor).unwrap();
                    let mut copy = |from: u64, to: u64, length: u64| {
                        is_needed = true;
                        let from = bytes.start + (part.range.start + from - place.start);
                        let to = tensor.start + to;
                        assert!(to + length <= tensor.end, "within the place of the tensor");
                        memory[at(&(to..to + length))].copy_from_slice(&payload[at(&(from..from + length))]);
                        kept[at(&(to..to + length))].fill(1);
                    };
                    match &part.place {
                        PartPlace::Whole => copy(of_part.start, of_part.start, of_part.end - of_part.start),
                        PartPlace::Spread(spread) => spread.rectangles(of_part, |r| {
                            (0..r.runs).for_each(|run| {
                                copy(r.from + run * r.from_stride, r.to + run * r.to_stride, r.run_bytes);
                            });
                        }),
                    }
                }
                prop_assert!(is_needed, "{} has no byte that is kept", chunk);
            }
            prop_assert_eq!(end, selection.payload_bytes());
            for (index, tensor) in manifest.tensors().iter().enumerate() {
                let Some(place) = selection.tensor_range(index) else {
                    prop_assert!(!selection.tensors().contains(index as u32));
                    continue;
                };
                prop_assert!(place.start.is_multiple_of(PAYLOAD_ALIGNMENT));
                prop_assert_eq!(place.end - place.start, selection.tensor(index).byte_len());
                let whole = whole(&payload, tensor);
                let expected = match selection.bounds(index) {
                    Some(bounds) if tensor.dtype.bits() >= 8 => {
                        sliced(&whole, &tensor.shape, bounds, tensor.dtype.bits() as usize / 8)
                    }
                    Some(_) => continue, // Checked bit by bit in the tests of `Overlap`.
                    None => whole,
                };
                prop_assert_eq!(&memory[at(&place)], &expected[..]);
                prop_assert!(kept[at(&place)].iter().all(|kept| *kept == 1));
            }
        }
    }

    /// PROTOCOL.md §5.5: an eighth of the rows is an eighth of the chunks; of columns, all chunks are needed.
    #[test]
    fn rows_are_few_chunks_and_columns_all() {
        let name = TensorName::new("w").unwrap();
        let spec = TensorSpec::new(name, Dtype::U8, Shape::new(&[64, 1024]).unwrap());
        let manifest = Arc::new(Manifest::layout(vec![spec], vec![], 1024, &Limits::default()).unwrap());
        for (dimension, chunks) in [(0, 16..24), (1, 0..64)] {
            let indices = Indices::Part { part: 2, parts: 8 };
            let tensors = Glob::new("**").unwrap();
            let boxes = [TensorBox { tensors, slices: vec![Slice { dimension, indices }] }];
            let selection = Selection::all(manifest.clone()).cut(&boxes);
            assert_eq!(selection.chunks(), &RangeSet::from_range(chunks));
            assert_eq!(selection.memory_bytes(), 8192);
        }
    }
}
