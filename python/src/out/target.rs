//! The tensors of `out=`, and where they are.

use crate::{
    entries,
    errors::Kind,
    gpu::Gpus,
    memory::{Foreign, Lent, OnGpu},
    tensors_in::{items, lend_to_write, text_of},
};
use pyo3::prelude::*;
use std::collections::HashSet;
use tensor_relay_client::TensorName;

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

/// The tensors, as they are now; one for all names that share it. What is no tensor is passed over, as in a
/// `state_dict` that is published.
pub(super) fn all_of(mapping: &Bound<'_, PyAny>, gpus: &Gpus) -> PyResult<Vec<Target>> {
    let py = mapping.py();
    let (mut targets, mut known) = (vec![], HashSet::new());
    for item in items(mapping)? {
        let (name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
        if entries::is_entry(&value) {
            continue;
        }
        let text = text_of(&name)?;
        let name = TensorName::new(&text).map_err(Kind::Request.because(py))?;
        let refuse = |why: &dyn std::fmt::Display| {
            Kind::Target.raise(py, format!("{name} of `out` cannot be received into: {why}"))
        };
        let memory = lend_to_write(&value, gpus).map_err(|error| refuse(&error.value(py)))?;
        if !memory.is_writable() {
            return Err(refuse(&"it is read-only"));
        }
        match memory.identity().is_none_or(|identity| known.insert(identity)) {
            true => targets.push(Target { name, memory, value: value.unbind() }),
            false => memory.give_back(py),
        }
    }
    Ok(targets)
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
