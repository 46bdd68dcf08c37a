//! The tensors of `out=`, by the kind of their memory.

use crate::{
    entries,
    errors::Kind,
    gpu::Gpus,
    memory::{Footprint, Foreign, Identity, Lent, OnGpu, overlapping},
    tensors_in::{items, lend_to_write, text_of},
};
use pyo3::prelude::*;
use std::collections::HashMap;
use tensor_relay_client::{Buffers, NameMatch, Shape, TensorName};

/// The tensors as they are now.
#[derive(Default)]
pub(super) struct Targets {
    /// One for all names that share it.
    pub(super) tensors: Vec<Target>,
    /// The other names, each with that of its tensor above.
    pub(super) tied: Vec<(TensorName, TensorName)>,
    /// The tensors of all names as Python has them.
    pub(super) values: Vec<Py<PyAny>>,
    /// The names of what is no tensor.
    pub(super) entries: Vec<String>,
}

/// One of the tensors.
pub(super) struct Target<M = Lent> {
    pub(super) name: TensorName,
    pub(super) memory: M,
    /// The tensor itself.
    pub(super) value: Py<PyAny>,
}

/// The tensors by where they are.
pub(super) struct Sorted {
    pub(super) host: Vec<Target<Foreign>>,
    pub(super) gpu: Vec<Target<OnGpu>>,
}

impl Targets {
    /// Those of a mapping. What is no tensor is passed over, as in a `state_dict` that is published.
    ///
    /// # Errors
    /// `TargetError` names what cannot be received into, and tensors that share some of their memory.
    pub(super) fn of(mapping: &Bound<'_, PyAny>, gpus: &Gpus) -> PyResult<Self> {
        let (mut targets, mut known) = (Self::default(), HashMap::new());
        for item in items(mapping)? {
            let (name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
            let text = text_of(&name)?;
            match entries::is_entry(&value) {
                true => targets.entries.push(text),
                false => targets.add(&text, value, gpus, &mut known)?,
            }
        }
        check_overlap(mapping.py(), &targets.tensors)?;
        Ok(targets)
    }

    fn add(
        &mut self,
        name: &str,
        value: Bound<'_, PyAny>,
        gpus: &Gpus,
        known: &mut HashMap<Identity, TensorName>,
    ) -> PyResult<()> {
        let py = value.py();
        let name = TensorName::new(name).map_err(Kind::Request.because(py))?;
        let refuse = |why: &dyn std::fmt::Display| {
            Kind::Target.raise(py, format!("{name} of `out` cannot be received into: {why}"))
        };
        let memory = lend_to_write(&value, gpus).map_err(|error| refuse(&error.value(py)))?;
        if !memory.is_writable() {
            return Err(refuse(&"it is read-only"));
        }
        if memory.footprint().is_some_and(|footprint| footprint.overlaps_itself()) {
            return Err(Kind::Target.raise(
                py,
                format!(
                    "elements of {name} in `out` share memory (as in an expanded tensor), so they cannot hold what a version \
                     has: give a tensor of its own"
                ),
            ));
        }
        self.values.push(value.clone().unbind());
        let first = memory.identity().and_then(|identity| match known.get(&identity) {
            Some(first) => Some(first.clone()),
            None => {
                known.insert(identity, name.clone());
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

    /// No buffers yet, which expect of a version what is known of these tensors.
    pub(super) fn expecting<B>(&self, py: Python<'_>, names: NameMatch) -> PyResult<Buffers<B>> {
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

/// Refuses tensors that share some of their memory without being one.
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
                "{} and {} of `out` share some of their memory, so each would overwrite the other: give tensors of their own",
                names[one], names[other]
            ),
        )),
    }
}

pub(super) fn sorted(targets: Vec<Target>) -> Sorted {
    let mut sorted = Sorted { host: vec![], gpu: vec![] };
    for Target { name, memory, value } in targets {
        match memory {
            Lent::Host(memory) => sorted.host.push(Target { name, memory, value }),
            Lent::Gpu(memory) => sorted.gpu.push(Target { name, memory, value }),
        }
    }
    sorted
}

/// Refuses a tensor on a GPU whose elements have gaps between them.
pub(super) fn check_dense(py: Python<'_>, name: &TensorName, memory: &OnGpu) -> PyResult<()> {
    match memory.is_dense() {
        true => Ok(()),
        false => {
            let message = format!(
                "the elements of {name} in `out` do not lie side by side on {}: make it contiguous",
                memory.device().name()
            );
            Err(Kind::Target.raise(py, message))
        }
    }
}
