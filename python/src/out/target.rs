//! The tensors of `out=`: checked, lent to be written, and divided into those on the host and those on GPUs.

use super::{Out, extra_state::ExtraState};
use crate::{
    errors::Kind,
    gpu::Gpus,
    memory::{Footprint, Foreign, Identity, Lent, OnGpu, overlapping},
    metadata,
    tensors_in::{is_of_tensor, items, lend_to_write},
};
use pyo3::prelude::*;
use std::collections::{BTreeSet, HashMap};
use tensor_relay_client::{Buffers, NameMatch, Shape, TensorName};

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
}

/// The tensors by the place of their memory.
pub(super) struct ByPlace {
    pub(super) host: Vec<Target<Foreign>>,
    pub(super) gpu: Vec<Target<OnGpu>>,
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
        let memory = lend_to_write(&value, gpus).map_err(|error| match is_of_tensor(py, &error) {
            true => refuse(&error.value(py)),
            false => error,
        })?;
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
        self.values.push(value.clone().unbind());
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
            None => self.tensors.push(Target { name, memory, value: value.unbind() }),
        }
        Ok(())
    }

    /// Buffers that expect these tensors' names, dtypes, shapes and ties of a version, without the memory itself.
    pub(super) fn expected<B>(&self, py: Python<'_>, names: NameMatch) -> PyResult<Buffers<B>> {
        let mut buffers = Buffers::new();
        buffers.match_names(names);
        for Target { name, memory, .. } in &self.tensors {
            let shape = Shape::new(memory.shape()).map_err(Kind::Target.because(py))?;
            buffers.expect(name.clone(), memory.dtype(), shape);
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
    for Target { name, memory, value } in targets {
        match memory {
            Lent::Host(memory) => sorted.host.push(Target { name, memory, value }),
            Lent::Gpu(memory) => sorted.gpu.push(Target { name, memory, value }),
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
