//! Matching buffers with tensors.

use super::BufferError;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    ops::Range,
};
use tensor_relay_protocol::{Bounds, Dtype, Selection, Shape, TensorName};

/// The requirements on a version, beyond the length of each tensor with a buffer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Expected {
    pub(super) tensors: BTreeMap<TensorName, Expectation>,
    /// Names without a buffer of their own, with the name whose buffer they share.
    pub(super) tied: BTreeMap<TensorName, TensorName>,
    pub(super) names: NameMatch,
}

/// The requirement on one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Expectation {
    pub(super) dtype: Dtype,
    /// The shape of what is received of the tensor; of the whole tensor if there are `bounds`.
    pub(super) shape: Shape,
    /// The box of the tensor that the buffer holds, where it must be this one.
    pub(super) bounds: Option<Bounds>,
}

/// The strictness with which the names of buffers and tensors must match.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NameMatch {
    /// Every buffer must have its tensor. Tensors without a buffer are not received.
    #[default]
    Buffers,
    /// Every buffer must have its tensor, and every selected tensor its buffer, or that of a tensor that shares its
    /// bytes.
    Exact,
    /// Neither is required: tensors with a buffer are received, and other buffers stay unchanged. Of the buffers that
    /// [expect](crate::Buffers::expect) a dtype and shape, at least one must have its tensor.
    Common,
}

/// A buffer and its tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fit {
    /// The tensor's index in the manifest.
    pub(crate) tensor: usize,
    /// Its range in the selection's memory.
    pub(crate) range: Range<u64>,
}

/// Finds the tensor for each buffer, given as name and length: it must exist, be selected, and have that length.
pub(crate) fn fit<'a>(
    selection: &Selection,
    sized: impl Iterator<Item = (&'a str, u64)>,
) -> Result<Vec<Fit>, BufferError> {
    let manifest = selection.manifest();
    let fit_one = |(name, given_bytes): (&str, u64)| {
        let tensor = manifest
            .tensor_index(name)
            .ok_or_else(|| BufferError::NoSuchTensor { name: name.into() })?;
        let range = selection
            .tensor_range(tensor)
            .ok_or_else(|| BufferError::NotSelected { name: name.into() })?;
        let expected_bytes = range.end - range.start;
        match expected_bytes == given_bytes {
            true => Ok(Fit { tensor, range }),
            false => Err(BufferError::WrongSize { name: name.into(), expected_bytes, given_bytes }),
        }
    };
    sized.map(fit_one).collect()
}

impl Expected {
    /// Whether the tensor called `name` is to be received into its buffer. A missing required tensor is reported later.
    pub(crate) fn wants(&self, selection: &Selection, name: &str) -> bool {
        self.names != NameMatch::Common || range_of(selection, name).is_some()
    }

    /// Finds the tensor for each wanted buffer, given as name and length. Refuses two buffers for one tensor.
    pub(crate) fn fit<'a>(
        &self,
        selection: &Selection,
        sized: impl Iterator<Item = (&'a str, u64)>,
    ) -> Result<Vec<Fit>, BufferError> {
        let fits = self.check(selection, sized)?;
        check_shared(selection, &fits)?;
        Ok(fits)
    }

    /// Like [`fit`](Self::fit), but allows several buffers for tensors that share their bytes.
    pub(crate) fn check<'a>(
        &self,
        selection: &Selection,
        sized: impl Iterator<Item = (&'a str, u64)>,
    ) -> Result<Vec<Fit>, BufferError> {
        let sized: Vec<_> = sized.filter(|(name, _)| self.wants(selection, name)).collect();
        self.check_names(selection, &sized)?;
        self.check_common(selection)?;
        // Checked before lengths, because it explains why these differ.
        self.check_tensors(selection)?;
        let fits = fit(selection, sized.into_iter())?;
        self.check_tied(selection)?;
        Ok(fits)
    }

    /// In [`NameMatch::Common`], refuses a version without any of the expected names: it is probably another model.
    fn check_common(&self, selection: &Selection) -> Result<(), BufferError> {
        let manifest = selection.manifest();
        // Globs made from the buffers' names may select no tensor: then all names of the version count.
        let is_common = |name: &TensorName| match selection.tensors().is_empty() {
            true => manifest.tensor_index(name.as_str()).is_some(),
            false => range_of(selection, name.as_str()).is_some(),
        };
        let is_checked = self.names == NameMatch::Common && !self.tensors.is_empty();
        if !is_checked || manifest.tensors().is_empty() || self.tensors.keys().any(is_common) {
            return Ok(());
        }
        let tensors = manifest.tensors().iter().map(|tensor| tensor.name.as_str().into());
        let buffers = self.tensors.keys().map(|name| name.as_str().into());
        Err(BufferError::NothingInCommon { tensors: tensors.collect(), buffers: buffers.collect() })
    }

    fn check_names(&self, selection: &Selection, sized: &[(&str, u64)]) -> Result<(), BufferError> {
        if self.names != NameMatch::Exact {
            return Ok(());
        }
        let tied = self.tied.keys().map(TensorName::as_str);
        let named: BTreeSet<&str> = sized.iter().map(|(name, _)| *name).chain(tied).collect();
        // A buffer covers all names of its tensor.
        let start = |name: &str| {
            range_of(selection, name)
                .filter(|range| !range.is_empty())
                .map(|range| range.start)
        };
        let starts: HashSet<u64> = named.iter().filter_map(|name| start(name)).collect();
        let has_buffer =
            |name: &str| named.contains(name) || start(name).is_some_and(|start| starts.contains(&start));
        let tensors = selection.tensors().iter();
        let tensors = tensors.map(|index| selection.manifest().tensors()[index as usize].name.as_str());
        let missing: Vec<Box<str>> = tensors.filter(|name| !has_buffer(name)).map(Box::from).collect();
        let unexpected = named.iter().filter(|name| range_of(selection, name).is_none());
        let unexpected: Vec<Box<str>> = unexpected.map(|name| Box::from(*name)).collect();
        match missing.is_empty() && unexpected.is_empty() {
            true => Ok(()),
            false => Err(BufferError::OtherNames { missing: missing.into(), unexpected: unexpected.into() }),
        }
    }

    /// Refuses a version with another dtype or shape than expected, or of which another box is selected.
    fn check_tensors(&self, selection: &Selection) -> Result<(), BufferError> {
        for (name, Expectation { dtype, shape, bounds }) in &self.tensors {
            // Unless the match is `Common`, another check refuses a missing tensor.
            let Some(index) = selection.manifest().tensor_index(name.as_str()) else { continue };
            let tensor = &selection.manifest().tensors()[index];
            let is_selected = selection.tensors().contains(index as u32); // If not, another check refuses it.
            let found = if is_selected { selection.bounds(index) } else { bounds.as_ref() };
            let fits = match bounds {
                Some(_) => (&tensor.shape, found) == (shape, bounds.as_ref()),
                None if is_selected => &selection.tensor(index).shape == shape,
                None => &tensor.shape == shape,
            };
            if tensor.dtype != *dtype || !fits {
                let described = |dtype, shape, bounds: Option<&Bounds>| match bounds {
                    Some(bounds) => format!("the box {bounds} of {dtype} {shape}").into(),
                    None => format!("{dtype} {shape}").into(),
                };
                return Err(BufferError::OtherTensor {
                    name: name.as_str().into(),
                    expected: described(*dtype, shape, bounds.as_ref()),
                    found: described(tensor.dtype, &tensor.shape, found),
                });
            }
        }
        Ok(())
    }

    /// Refuses a version in which two names with one buffer are separate tensors.
    fn check_tied(&self, selection: &Selection) -> Result<(), BufferError> {
        for (name, to) in &self.tied {
            if !self.wants(selection, name.as_str()) || !self.wants(selection, to.as_str()) {
                continue;
            }
            let ranges = (range_of(selection, name.as_str()), range_of(selection, to.as_str()));
            if ranges.0.is_none() || ranges.0 != ranges.1 {
                return Err(BufferError::NotTied { name: name.as_str().into(), to: to.as_str().into() });
            }
        }
        Ok(())
    }
}

/// The range of the tensor called `name` in the selection's memory, if it is selected.
fn range_of(selection: &Selection, name: &str) -> Option<Range<u64>> {
    selection.tensor_range(selection.manifest().tensor_index(name)?)
}

/// Refuses two buffers for one tensor (tied weights): each byte is received once.
fn check_shared(selection: &Selection, fits: &[Fit]) -> Result<(), BufferError> {
    let name = |fit: &Fit| selection.manifest().tensors()[fit.tensor].name.as_str().into();
    let mut taken: HashMap<u64, &Fit> = HashMap::new();
    for fit in fits.iter().filter(|fit| !fit.range.is_empty()) {
        if let Some(other) = taken.insert(fit.range.start, fit) {
            return Err(BufferError::Shared { name: name(fit), other: name(other) });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffers;
    use std::sync::Arc;
    use tensor_relay_protocol::{Glob, Indices, Limits, Manifest, Slice, TensorBox, TensorSpec};

    fn name(name: &str) -> TensorName {
        TensorName::new(name).unwrap()
    }

    fn spec(tensor: &str, bytes: u64) -> TensorSpec {
        TensorSpec::new(name(tensor), Dtype::U8, Shape::new(&[bytes]).unwrap())
    }

    /// `a`, `b`, its alias `tied`, and `none` without bytes.
    fn manifest() -> Arc<Manifest> {
        let tied = TensorSpec { alias_of: Some(1), ..spec("tied", 1000) };
        let specs = vec![spec("a", 10), spec("b", 1000), tied, spec("none", 0)];
        Arc::new(Manifest::layout(specs, vec![], 256, &Limits::default()).unwrap())
    }

    fn fits(selection: &Selection, sized: &[(&str, u64)]) -> Result<Vec<Fit>, BufferError> {
        let fits = fit(selection, sized.iter().copied())?;
        check_shared(selection, &fits).map(|()| fits)
    }

    #[test]
    fn a_buffer_must_fit_a_selected_tensor_exactly() {
        let all = Selection::all(manifest());
        assert_eq!(fits(&all, &[("b", 1000), ("a", 10), ("none", 0)]).unwrap().len(), 3);
        let error = fits(&all, &[("a", 10), ("b", 999)]).unwrap_err();
        let expected = BufferError::WrongSize { name: "b".into(), expected_bytes: 1000, given_bytes: 999 };
        assert_eq!(error, expected);
        assert_eq!(fits(&all, &[("c", 1)]).unwrap_err(), BufferError::NoSuchTensor { name: "c".into() });
        let only_a = Selection::new(manifest(), &[Glob::new("a").unwrap()]);
        assert_eq!(fits(&only_a, &[("b", 1000)]).unwrap_err(), BufferError::NotSelected { name: "b".into() });
    }

    #[test]
    fn dtype_and_shape_are_checked_too() {
        let all = Selection::all(manifest());
        let expecting = |tensor: &str, dtype, shape: &[u64]| {
            let mut buffers: Buffers<Vec<u8>> = Buffers::new();
            buffers.expect(name(tensor), dtype, Shape::new(shape).unwrap());
            buffers.expected.check_tensors(&all)
        };
        assert_eq!(expecting("b", Dtype::U8, &[1000]), Ok(()));
        assert_eq!(expecting("c", Dtype::U8, &[1]), Ok(()), "another check refuses a missing tensor");
        for (dtype, shape) in [(Dtype::U8, &[10, 100][..]), (Dtype::I8, &[1000])] {
            let error = expecting("b", dtype, shape).unwrap_err();
            assert!(matches!(&error, BufferError::OtherTensor { name, .. } if &**name == "b"), "{error}");
        }
    }

    /// A buffer that expects a shape takes any box of it, and one that expects a box this box alone.
    #[test]
    fn boxes_are_checked_too() {
        let rows = |start, length| {
            let slices = vec![Slice { dimension: 0, indices: Indices::Range { start, length } }];
            TensorBox { tensors: Glob::new("b").unwrap(), slices }
        };
        let cut = Selection::all(manifest()).cut(&[rows(100, 300)]);
        let check = |shape: u64, bounds: Option<Bounds>, selection: &Selection| {
            let mut buffers: Buffers<Vec<u8>> = Buffers::new();
            let shape = Shape::new(&[shape]).unwrap();
            match bounds {
                Some(bounds) => buffers.expect_box(name("b"), Dtype::U8, shape, bounds),
                None => buffers.expect(name("b"), Dtype::U8, shape),
            }
            buffers.expected.check_tensors(selection)
        };
        assert_eq!(check(300, None, &cut), Ok(()));
        assert_eq!(check(1000, Some(Bounds::new(std::iter::once(100..400))), &cut), Ok(()));
        for (shape, bounds) in
            [(1000, None), (1000, Some(101..401)), (900, Some(100..400)), (1000, Some(0..1000))]
        {
            let bounds = bounds.map(|range| Bounds::new([range]));
            assert!(matches!(check(shape, bounds, &cut), Err(BufferError::OtherTensor { .. })));
        }
        assert!(
            check(1000, Some(Bounds::new(std::iter::once(100..400))), &Selection::all(manifest())).is_err()
        );
    }

    #[test]
    fn tied_weights_have_one_buffer() {
        let all = Selection::all(manifest());
        assert!(fits(&all, &[("tied", 1000)]).is_ok());
        let error = fits(&all, &[("b", 1000), ("tied", 1000)]).unwrap_err();
        assert_eq!(error, BufferError::Shared { name: "tied".into(), other: "b".into() });
    }

    #[test]
    fn names_match_as_strictly_as_requested() {
        let all = Selection::all(manifest());
        let matched = |names, buffers: &[(&str, u64)]| {
            let mut expected = Expected { names, ..Expected::default() };
            expected
                .tied
                .extend(buffers.contains(&("b", 1000)).then(|| (name("tied"), name("b"))));
            expected.check(&all, buffers.iter().copied()).map(|fits| fits.len())
        };
        let all_names = [("a", 10), ("b", 1000), ("none", 0)];
        assert_eq!(matched(NameMatch::Exact, &all_names), Ok(3));
        assert_eq!(matched(NameMatch::Exact, &[("a", 10), ("tied", 1000), ("none", 0)]), Ok(3), "b is tied");
        let error = matched(NameMatch::Exact, &[("b", 1000), ("c", 1)]).unwrap_err();
        let (missing, unexpected) = (["a".into(), "none".into()].into(), ["c".into()].into());
        assert_eq!(error, BufferError::OtherNames { missing, unexpected });
        assert_eq!(matched(NameMatch::Buffers, &all_names[..1]), Ok(1));
        assert!(matched(NameMatch::Buffers, &[("c", 1)]).is_err());
        assert_eq!(matched(NameMatch::Common, &[("b", 1000), ("c", 1)]), Ok(1));
        assert!(matched(NameMatch::Common, &[("b", 999), ("c", 1)]).is_err(), "common tensors must fit");
    }

    #[test]
    fn one_buffer_for_two_names_needs_tied_tensors() {
        let all = Selection::all(manifest());
        let tied = |one: &str, to: &str| {
            let mut buffers: Buffers<u64> = Buffers::new();
            buffers.expect_tied(name(one), name(to));
            buffers.expected.check_tied(&all)
        };
        assert_eq!(tied("tied", "b"), Ok(()));
        for (one, to) in [("a", "b"), ("c", "b")] {
            assert_eq!(tied(one, to), Err(BufferError::NotTied { name: one.into(), to: to.into() }));
        }
    }
}
