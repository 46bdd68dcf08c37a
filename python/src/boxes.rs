//! `boxes=`: the parts of tensors that a subscription receives.

use crate::{description::Description, errors::Kind, select::Select, tensors_in::dtype_named};
use pyo3::{prelude::*, types::PyTuple};
use std::{collections::BTreeMap, sync::Arc};
use tensor_relay_client::{
    Bounds, Buffers, Dtype, Glob, Indices, Manifest, Shape, Slice, Tensor, TensorBox, TensorName, VersionId,
};
use tensor_relay_server::is_reserved;

/// What `boxes=` takes of every version.
#[pyclass(frozen, module = "tensor_relay._native")]
#[derive(Clone, Default)]
pub(crate) struct Boxes {
    boxes: Vec<TensorBox>,
    /// The tensors whose boxes were computed from their shapes. A version with others needs other boxes. `None` if no
    /// box depends on a shape.
    layout: Option<Arc<Layout>>,
}

/// Tensors by name.
type Layout = BTreeMap<TensorName, (Dtype, Shape)>;

/// A pattern in `boxes=`, and what is taken of the tensors that it matches.
struct Rule<'py> {
    tensors: Glob,
    place: Bound<'py, PyAny>,
    /// The slices that `place` takes of a tensor of any shape; `None` if it depends on the shape.
    slices: Option<Vec<Slice>>,
}

/// The slices as `_boxes` returns them: the dimension, whether it is divided into parts, and two numbers.
type SlicesOf = Option<Vec<(u32, bool, u64, u64)>>;

impl Boxes {
    /// The boxes of a user's `boxes=`; `None` if they depend on the tensors of a version.
    ///
    /// # Errors
    /// `RequestError` for what is no box, with the pattern that it is for.
    pub(crate) fn parse(py: Python<'_>, boxes: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Self>> {
        let Some(boxes) = boxes else { return Ok(Some(Self::default())) };
        if let Ok(computed) = boxes.cast::<Self>() {
            return Ok(Some(computed.get().clone()));
        }
        let each = rules(py, boxes)?
            .into_iter()
            .map(|Rule { tensors, slices, .. }| slices.map(|slices| TensorBox { tensors, slices }));
        Ok(each.collect::<Option<_>>().map(|boxes| Self { boxes, layout: None }))
    }

    /// The boxes of a user's `boxes=` for the selected tensors of a version.
    ///
    /// # Errors
    /// `RequestError` names a tensor that its box does not fit, and one that is not there; what a function of the user
    /// raises.
    pub(crate) fn of_version(
        py: Python<'_>,
        boxes: &Bound<'_, PyAny>,
        described: &Description,
        select: &Select,
    ) -> PyResult<Self> {
        let selected = selected(described.manifest(), select);
        let layout = selected.map(|tensor| (tensor.name.clone(), (tensor.dtype, tensor.shape.clone())));
        Self::of_layout(py, boxes, layout.collect())
    }

    fn of_layout(py: Python<'_>, boxes: &Bound<'_, PyAny>, layout: Layout) -> PyResult<Self> {
        let rules = rules(py, boxes)?;
        let mut buffers: Buffers<()> = Buffers::new();
        for (name, (dtype, shape)) in &layout {
            let rule = rules.iter().find(|rule| rule.tensors.matches(name.as_str()));
            let bounds = rule.map(|rule| rule.bounds(name, *dtype, shape)).transpose()?.flatten();
            match bounds {
                Some(bounds) => buffers.expect_box(name.clone(), *dtype, shape.clone(), bounds),
                None => buffers.expect(name.clone(), *dtype, shape.clone()),
            }
        }
        rules.iter().try_for_each(|rule| rule.check_has_tensor(py, &layout))?;
        Ok(Self { boxes: buffers.boxes(), layout: Some(Arc::new(layout)) })
    }

    /// Whether nothing is cut.
    pub(crate) fn is_empty(&self) -> bool {
        self.boxes.is_empty()
    }

    /// The boxes to request.
    pub(crate) fn to_vec(&self) -> Vec<TensorBox> {
        self.boxes.clone()
    }

    /// Refuses a version of which a selected tensor is another than the boxes were computed for; the error is the message
    /// for the user.
    pub(crate) fn check(&self, id: &VersionId, manifest: &Manifest, select: &Select) -> Result<(), String> {
        let Some(layout) = &self.layout else { return Ok(()) };
        let is_other =
            |tensor: &&Tensor| layout.get(&tensor.name) != Some(&(tensor.dtype, tensor.shape.clone()));
        let other = selected(manifest, select).find(is_other);
        let Some(tensor) = other else { return Ok(()) };
        let known = match layout.get(&tensor.name) {
            Some((dtype, shape)) => format!("{dtype} {shape}"),
            None => "a version without it".into(),
        };
        Err(format!(
            "tensor {} of {id} is {} {}, and the boxes of this subscription were computed for {known}: subscribe again",
            tensor.name, tensor.dtype, tensor.shape
        ))
    }
}

impl<'py> Rule<'py> {
    fn new(pattern: &str, place: Bound<'py, PyAny>) -> PyResult<Self> {
        let py = place.py();
        let tensors = pattern.parse().map_err(Kind::Request.because(py))?;
        let slices: SlicesOf = module(py)?.call_method1("slices_of", (&place, pattern))?.extract()?;
        let slices = slices.map(|slices| slices.into_iter().map(slice).collect()).transpose()?;
        Ok(Self { tensors, place, slices })
    }

    /// The box of a tensor; `None` for the whole.
    fn bounds(&self, name: &TensorName, dtype: Dtype, shape: &Shape) -> PyResult<Option<Bounds>> {
        let py = self.place.py();
        let lengths = PyTuple::new(py, shape.dimensions())?;
        let arguments = (&self.place, name.as_str(), lengths, dtype.name());
        let found: Option<(Vec<u64>, Vec<u64>)> = module(py)?.call_method1("box_of", arguments)?.extract()?;
        Ok(found.map(|(start, lengths)| bounds(&start, &lengths)))
    }

    /// Refuses a name that no tensor has. A pattern without a match is no error: it may be meant for other models.
    fn check_has_tensor(&self, py: Python<'_>, layout: &Layout) -> PyResult<()> {
        let has_match = || layout.keys().any(|name| self.tensors.matches(name.as_str()));
        match self.tensors.is_literal() && !has_match() {
            true => {
                let message = format!(
                    "`boxes` has a box of {}, and there is no such tensor, or it is not selected: correct the name",
                    self.tensors.as_str()
                );
                Err(Kind::Request.raise(py, message))
            }
            false => Ok(()),
        }
    }
}

/// The tensors of a version that may have boxes.
fn selected<'a>(manifest: &'a Manifest, select: &'a Select) -> impl Iterator<Item = &'a Tensor> {
    manifest
        .tensors()
        .iter()
        .filter(|tensor| may_have_box(tensor.name.as_str(), select))
}

/// Whether boxes are for a tensor of this name: if it is selected, and no side file of a folder, which are always whole.
fn may_have_box(name: &str, select: &Select) -> bool {
    select.has(name) && !is_reserved(name)
}

/// The box with this start and these lengths.
pub(crate) fn bounds(start: &[u64], lengths: &[u64]) -> Bounds {
    Bounds::new(
        start
            .iter()
            .zip(lengths)
            .map(|(start, length)| *start..start.saturating_add(*length)),
    )
}

fn rules<'py>(py: Python<'py>, boxes: &Bound<'py, PyAny>) -> PyResult<Vec<Rule<'py>>> {
    let rules: Vec<(String, Bound<'py, PyAny>)> = module(py)?.call_method1("rules", (boxes,))?.extract()?;
    rules.into_iter().map(|(pattern, place)| Rule::new(&pattern, place)).collect()
}

fn slice((dimension, is_part, first, second): (u32, bool, u64, u64)) -> PyResult<Slice> {
    let indices = match is_part {
        true => Indices::Part { part: first.try_into()?, parts: second.try_into()? },
        false => Indices::Range { start: first, length: second },
    };
    Ok(Slice { dimension, indices })
}

/// The Python module that understands `boxes=`.
fn module(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import("tensor_relay._boxes")
}

/// The boxes of a user's `boxes=` for tensors of these names, dtypes and shapes, of which `select` matches some.
#[pyfunction]
pub(crate) fn boxes_of(
    py: Python<'_>,
    boxes: &Bound<'_, PyAny>,
    tensors: Vec<(String, String, Vec<u64>)>,
    select: Option<&Bound<'_, PyAny>>,
) -> PyResult<Boxes> {
    let select = Select::parse(py, select)?;
    let known = |(name, dtype, shape): (String, String, Vec<u64>)| {
        let name = TensorName::new(&name).map_err(Kind::Request.because(py))?;
        let shape = Shape::new(&shape).map_err(Kind::Request.because(py))?;
        let unknown = || Kind::Request.raise(py, format!("{name} has the dtype {dtype}, which is unknown"));
        Ok((name.clone(), (dtype_named(&dtype).ok_or_else(unknown)?, shape)))
    };
    let selected = tensors.into_iter().filter(|(name, ..)| may_have_box(name, &select));
    Boxes::of_layout(py, boxes, selected.map(known).collect::<PyResult<_>>()?)
}
