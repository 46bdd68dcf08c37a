//! The boxes to request for buffers that hold boxes of tensors.

use super::{Expectation, Expected};
use std::collections::BTreeMap;
use tensor_relay_protocol::{Glob, Indices, Slice, TensorBox};

/// The boxes of the tensors whose buffers expect one. Names that differ only in numbers, as those of layers do, become
/// one glob if their slices are equal, so that a model of thousands of tensors needs few boxes.
///
/// The first box that matches a name counts, and a glob may match names that are cut otherwise, or not at all: longer
/// globs come before shorter ones, and names for which that does not suffice before all globs.
///
/// A name that shares the buffer of another one has its box.
pub(super) fn boxes_of(expected: &Expected) -> Vec<TensorBox> {
    let own = expected.tensors.iter();
    let tied = expected
        .tied
        .iter()
        .filter_map(|(name, to)| Some((name, expected.tensors.get(to)?)));
    let all: BTreeMap<_, _> = tied.chain(own).collect();
    let boxes: Vec<_> = all
        .into_iter()
        .map(|(name, expectation)| (name.as_str(), slices_of(expectation)))
        .collect();
    let globs = globs_of(&boxes);
    let by_globs = |name: &str| {
        globs
            .iter()
            .find(|glob| glob.tensors.matches(name))
            .map(|glob| &glob.slices[..])
    };
    let named = boxes
        .iter()
        .filter(|(name, slices)| by_globs(name).unwrap_or_default() != slices);
    named
        .filter_map(|(name, slices)| box_of(name, slices))
        .chain(globs.iter().cloned())
        .collect()
}

/// The globs of names that differ only in numbers and are cut alike; of those that are not cut, the ones whose names a
/// later glob would cut.
fn globs_of(boxes: &[(&str, Vec<Slice>)]) -> Vec<TensorBox> {
    let mut alike: BTreeMap<String, Vec<&(&str, Vec<Slice>)>> = BTreeMap::new();
    for each in boxes {
        alike.entry(without_numbers(each.0)).or_default().push(each);
    }
    alike.retain(|_, tensors| tensors.len() > 1 && tensors.iter().all(|(_, slices)| *slices == tensors[0].1));
    let mut shortest_first: Vec<_> = alike.into_iter().collect();
    shortest_first.sort_by_key(|(pattern, _)| pattern.len());
    let mut globs: Vec<TensorBox> = vec![];
    for (pattern, tensors) in shortest_first {
        let slices = &tensors[0].1;
        let is_cut =
            |name: &str| globs.iter().any(|glob| !glob.slices.is_empty() && glob.tensors.matches(name));
        if !slices.is_empty() || tensors.iter().any(|(name, _)| is_cut(name)) {
            globs.extend(box_of(&pattern, slices));
        }
    }
    globs.reverse();
    globs
}

fn box_of(pattern: &str, slices: &[Slice]) -> Option<TensorBox> {
    let tensors = Glob::new(pattern).ok()?;
    Some(TensorBox { tensors, slices: slices.to_vec() })
}

/// The name with `*` in place of each part between dots that is a number.
fn without_numbers(name: &str) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let parts: Vec<_> = name.split('.').map(|part| if is_number(part) { "*" } else { part }).collect();
    parts.join(".")
}

/// The dimensions that a box cuts; none for a whole tensor.
fn slices_of(expectation: &Expectation) -> Vec<Slice> {
    let Some(bounds) = &expectation.bounds else { return vec![] };
    let lengths = (0..).zip(bounds.ranges()).zip(expectation.shape.dimensions());
    let cut = lengths.filter(|((_, range), length)| **range != (0..**length));
    cut.map(|((dimension, range), _)| {
        let indices = Indices::Range { start: range.start, length: range.end - range.start };
        Slice { dimension, indices }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use crate::{Bounds, Buffers, Dtype, Shape, TensorBox, TensorName};
    use proptest::prelude::*;

    const ROWS: u64 = 8;

    fn shape() -> Shape {
        Shape::new(&[ROWS, 4]).unwrap()
    }

    fn boxes_of<'a>(rows: impl IntoIterator<Item = (&'a str, std::ops::Range<u64>)>) -> Vec<TensorBox> {
        let mut buffers: Buffers<Vec<u8>> = Buffers::new();
        for (name, rows) in rows {
            let bounds = Bounds::new([rows, 0..4]);
            buffers.expect_box(TensorName::new(name).unwrap(), Dtype::U8, shape(), bounds);
        }
        buffers.boxes()
    }

    /// The box of a name: the first one that matches it, or the whole.
    fn first(boxes: &[TensorBox], name: &str) -> Bounds {
        let found = boxes.iter().find(|each| each.tensors.matches(name));
        found.map_or_else(|| Bounds::whole(&shape()), |found| found.bounds(&shape()))
    }

    proptest! {
        /// Whatever the names are that globs match beside their own, each name has its own box.
        #[test]
        fn each_name_has_its_box(
            rows in prop::collection::btree_map("[ab01](\\.[ab01]){0,3}", prop_oneof![Just(0..ROWS), Just(2..4), Just(3..3)], 1..40),
        ) {
            let boxes = boxes_of(rows.iter().map(|(name, rows)| (name.as_str(), rows.clone())));
            for (name, rows) in &rows {
                prop_assert_eq!(first(&boxes, name), Bounds::new([rows.clone(), 0..4]), "{}", name);
            }
        }
    }

    /// Ten thousand names fit a request: alike layers are one glob, and whole tensors need none.
    #[test]
    fn layers_that_are_alike_are_one_box() {
        let mut rows = vec![("embed".to_owned(), 0..4)];
        for layer in 0..2_500 {
            rows.push((format!("layers.{layer}.q.weight"), 2..4));
            rows.push((format!("layers.{layer}.norm"), 0..8));
            rows.push((format!("layers.{layer}.odd"), if layer == 7 { 0..1 } else { 4..8 }));
            rows.push((format!("layers.{layer}.k"), 4..8));
        }
        rows.retain(|(name, _)| !name.ends_with(".odd") || name.len() < 14); // Names of up to two digits.
        let boxes = boxes_of(rows.iter().map(|(name, rows)| (name.as_str(), rows.clone())));
        assert_eq!(boxes.len(), 1 + 100 + 2);
        for (name, rows) in rows {
            assert_eq!(first(&boxes, &name), Bounds::new([rows, 0..4]), "{name}");
        }
    }

    #[test]
    fn a_tied_name_has_the_box_of_its_buffer() {
        let mut buffers: Buffers<Vec<u8>> = Buffers::new();
        let [embed, head] = ["embed", "head"].map(|name| TensorName::new(name).unwrap());
        buffers.expect_box(embed.clone(), Dtype::U8, shape(), Bounds::new([2..4, 0..4]));
        buffers.expect_tied(head, embed);
        assert_eq!(first(&buffers.boxes(), "head"), Bounds::new([2..4, 0..4]));
    }

    /// Of `torch.nn.Sequential`: `*.weight` would also match `1.norm.weight`, which is whole.
    #[test]
    fn a_glob_cuts_no_other_tensor() {
        let rows = [
            ("0.weight", 2..4),
            ("2.weight", 2..4),
            ("1.norm.weight", 0..8),
            ("3.norm.weight", 0..8),
            ("head.weight", 0..8),
        ];
        let boxes = boxes_of(rows.clone());
        for (name, rows) in rows {
            assert_eq!(first(&boxes, name), Bounds::new([rows, 0..4]), "{name}");
        }
        let globs: Vec<_> = boxes.iter().map(|each| each.tensors.as_str()).collect();
        assert_eq!(globs, ["head.weight", "*.norm.weight", "*.weight"]);
    }
}
