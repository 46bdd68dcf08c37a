//! The tensors of `out=`: checked, lent to be written, and divided into those on the host and those on GPUs.

use super::{Out, extra_state::ExtraState};
use crate::{
    boxes::bounds,
    errors::Kind,
    gpu::Gpus,
    memory::{Footprint, Foreign, Identity, Lent, OnGpu, overlapping, to_dlpack},
    metadata,
    tensors_in::{is_of_tensor, items, lend_to_write},
};
use pyo3::prelude::*;
use std::collections::{BTreeSet, HashMap};
use tensor_relay_client::{Bounds, Buffers, Dtype, NameMatch, Shape, TensorName};

/// The tensors of a mapping, lent to be written.
#[derive(Default)]
pub(super) struct Targets {
    /// Each tensor once, under its first name.
    pub(super) tensors: Vec<Target>,
    /// The other names, each with the first name of its tensor.
    pub(super) tied: Vec<(TensorName, TensorName)>,
    /// The Python objects of all names.
    pub(super) values: Vec<Py<PyAny>>,
    /// The names of values that are not tensors.
    pub(super) entries: Vec<String>,
    /// The names of all tensors, except extra state.
    pub(super) names: BTreeSet<String>,
    pub(super) extra: ExtraState,
}

/// A tensor to be written.
pub(super) struct Target<M = Lent> {
    pub(super) name: TensorName,
    pub(super) memory: M,
    /// The Python object.
    pub(super) value: Py<PyAny>,
    /// What it holds of the version's tensor, if it is the part of a DTensor.
    pub(super) part: Option<Part>,
}

/// A box of a tensor.
pub(super) struct Part {
    of: Shape,
    bounds: Bounds,
}

/// The shape of a whole, and the start and the shape of a part of it.
type Place = [Vec<u64>; 3];

/// The tensors by the place of their memory.
pub(super) struct ByPlace {
    pub(super) host: Vec<Target<Foreign>>,
    pub(super) gpu: Vec<Target<OnGpu>>,
}

impl Part {
    /// A part of a tensor with elements of this dtype, of which PyTorch counts those of 4 bits in pairs.
    fn new(py: Python<'_>, place: Place, dtype: Dtype) -> PyResult<Self> {
        let per_element = to_dlpack(dtype).map_or(1, |(_, count)| count);
        let [whole, start, shape] = place.map(|mut numbers| {
            if let Some(last) = numbers.last_mut() {
                *last = last.saturating_mul(per_element);
            }
            numbers
        });
        Ok(Self { of: Shape::new(&whole).map_err(Kind::Target.because(py))?, bounds: bounds(&start, &shape) })
    }
}

/// The tensor that holds this process' part of a DTensor, and its place; `None` for every other tensor.
///
/// # Errors
/// `TypeError` if the part is not one box, or has other values than the whole.
fn local_part<'py>(value: &Bound<'py, PyAny>) -> PyResult<Option<(Bound<'py, PyAny>, Place)>> {
    let module = value.py().import("tensor_relay._dtensor")?;
    let part: Option<(_, Vec<u64>, Vec<u64>, Vec<u64>)> =
        module.call_method1("local_part", (value,))?.extract()?;
    Ok(part.map(|(local, whole, start, shape)| (local, [whole, start, shape])))
}

impl Targets {
    /// The tensors of `out`. Entries, such as numbers in a `state_dict`, are skipped. Extra state is received into the
    /// tensors that `get_extra_state` returned only with atomic=False.
    ///
    /// # Errors
    /// `TargetError` names a value that cannot be received into, or two tensors that share some of their memory.
    pub(super) fn of(py: Python<'_>, out: &Out) -> PyResult<Self> {
        let (mut targets, mut first_names) = (Self::default(), HashMap::new());
        let mapping = out.mapping.bind(py);
        for item in items(mapping, out.rename.as_ref().map(|rename| rename.bind(py)))? {
            let is_extra = metadata::is_extra_state(&item.own_name);
            let is_set = is_extra && targets.extra.add(mapping, &item, out.is_strict)?;
            match (is_extra, metadata::is_entry(&item.value)) {
                (false, true) => targets.entries.push(item.name),
                (true, true) => {}
                (true, false) if out.is_atomic || !is_set => {}
                (_, false) => {
                    targets.add(&item.name, item.value, &out.gpus, &mut first_names)?;
                    if !is_extra {
                        targets.names.insert(item.name);
                    }
                }
            }
        }
        check_overlap(py, &targets.tensors)?;
        Ok(targets)
    }

    fn add(
        &mut self,
        name: &str,
        value: Bound<'_, PyAny>,
        gpus: &Gpus,
        first_names: &mut HashMap<Identity, TensorName>,
    ) -> PyResult<()> {
        let py = value.py();
        let name = TensorName::new(name).map_err(Kind::Request.because(py))?;
        let refuse = |why: &dyn std::fmt::Display| {
            Kind::Target.raise(py, format!("{name} of `out` cannot be received into: {why}"))
        };
        let refused = |error: PyErr| match is_of_tensor(py, &error) {
            true => refuse(&error.value(py)),
            false => error,
        };
        self.values.push(value.clone().unbind());
        let (value, place) = match local_part(&value).map_err(refused)? {
            Some((local, place)) => (local, Some(place)),
            None => (value, None),
        };
        let memory = lend_to_write(&value, gpus).map_err(refused)?;
        let part = place.map(|place| Part::new(py, place, memory.dtype())).transpose()?;
        if !memory.is_writable() {
            return Err(refuse(&"it is read-only"));
        }
        if memory.footprint().is_some_and(|footprint| footprint.overlaps_itself()) {
            return Err(Kind::Target.raise(
                py,
                format!(
                    "elements of {name} in `out` share memory (as in an expanded tensor), so they cannot hold different \
                     values: receive into a contiguous tensor, and copy from that"
                ),
            ));
        }
        self.values.extend(part.is_some().then(|| value.clone().unbind()));
        let first = memory.identity().and_then(|identity| match first_names.get(&identity) {
            Some(first) => Some(first.clone()),
            None => {
                first_names.insert(identity, name.clone());
                None
            }
        });
        match first {
            Some(first) => {
                self.tied.push((name, first));
                memory.give_back(py);
            }
            None => self.tensors.push(Target { name, memory, value: value.unbind(), part }),
        }
        Ok(())
    }

    /// Buffers that expect these tensors' names, dtypes, shapes and ties of a version, without the memory itself.
    pub(super) fn expected<B>(&self, py: Python<'_>, names: NameMatch) -> PyResult<Buffers<B>> {
        let mut buffers = Buffers::new();
        buffers.match_names(names);
        for Target { name, memory, part, .. } in &self.tensors {
            let (name, dtype) = (name.clone(), memory.dtype());
            let shape = Shape::new(memory.shape()).map_err(Kind::Target.because(py))?;
            match part {
                Some(Part { of, bounds }) => buffers.expect_box(name, dtype, of.clone(), bounds.clone()),
                None => buffers.expect(name, dtype, shape),
            }
        }
        for (name, to) in &self.tied {
            buffers.expect_tied(name.clone(), to.clone());
        }
        Ok(buffers)
    }

    pub(super) fn give_back(self, py: Python<'_>) {
        self.tensors.into_iter().for_each(|target| target.memory.give_back(py));
    }
}

/// Refuses different tensors that share some of their memory.
fn check_overlap(py: Python<'_>, targets: &[Target]) -> PyResult<()> {
    let with_memory = targets
        .iter()
        .filter_map(|target| Some((&target.name, target.memory.footprint()?)));
    let (names, footprints): (Vec<&TensorName>, Vec<Footprint>) = with_memory.unzip();
    match overlapping(&footprints) {
        None => Ok(()),
        Some((one, other)) => Err(Kind::Target.raise(
            py,
            format!(
                "{} and {} of `out` share some of their memory, so each would overwrite the other: give tensors of \
                 their own",
                names[one], names[other]
            ),
        )),
    }
}

pub(super) fn sort_by_place(targets: Vec<Target>) -> ByPlace {
    let mut sorted = ByPlace { host: vec![], gpu: vec![] };
    for Target { name, memory, value, part } in targets {
        match memory {
            Lent::Host(memory) => sorted.host.push(Target { name, memory, value, part }),
            Lent::Gpu(memory) => sorted.gpu.push(Target { name, memory, value, part }),
        }
    }
    sorted
}

/// Refuses a tensor on a GPU that is not contiguous.
pub(super) fn check_dense(py: Python<'_>, name: &TensorName, memory: &OnGpu) -> PyResult<()> {
    match memory.is_dense() {
        true => Ok(()),
        false => {
            let message = format!(
                "the elements of {name} in `out` do not lie side by side on {}: receive into a contiguous tensor, and copy \
                 from that; atomic=True does so for PyTorch and CuPy",
                memory.device().name()
            );
            Err(Kind::Target.raise(py, message))
        }
    }
}
