//! A mapping of tensors, as a version: what each is, where its memory lies, and which are one.

use crate::{
    entries,
    errors::Kind,
    gpu::{self, Gpus},
    memory::{Foreign, Identity, Lent, OnGpu, Returning, ToReturn},
    version::ReadableTensors,
};
use pyo3::{
    exceptions::{PyBufferError, PyException, PyMemoryError, PyTypeError},
    prelude::*,
    types::{PyDict, PyIterator, PyList, PyString, PyTuple},
};
use std::collections::{BTreeMap, HashMap};
use tensor_relay_device::{
    Device, DeviceBuffer,
    cuda::{CudaError, Fence},
};
use tensor_relay_server::{Dtype, Metadata, Shape, TensorName, TensorSpec};

/// The tensors to publish, taken from Python. Their memory is lent until this is dropped.
pub(crate) struct TensorsIn {
    specs: Vec<TensorSpec>,
    /// One for each spec; none for an alias.
    memory: Vec<Option<Lent>>,
    /// The values that are no tensors.
    pub(crate) entries: Metadata,
    /// The number of bytes copied by the tensors' own libraries, because their layout in memory is not supported.
    copied_bytes: u64,
}

impl TensorsIn {
    /// Takes all values of `mapping`, or of a model, with a cast of floating-point tensors to `dtype` where one is given.
    ///
    /// # Errors
    /// `UnsupportedTensorError` names the first value that cannot travel.
    pub(crate) fn of(mapping: &Bound<'_, PyAny>, dtype: Option<Dtype>, gpus: &Gpus) -> PyResult<Self> {
        let mut taken = Self { specs: vec![], memory: vec![], entries: vec![], copied_bytes: 0 };
        let mut known = Known::default();
        for item in items(mapping)? {
            let (name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
            let name = text_of(&name)?;
            match entries::is_entry(&value) {
                true => taken.entries.push(entries::to_metadata(&name, &value)?),
                false => taken
                    .add(&name, &value, dtype, gpus, &mut known)
                    .map_err(|error| blame(&name, &value, error))?,
            }
        }
        known.uncast.into_iter().for_each(|memory| memory.give_back(mapping.py()));
        Ok(taken)
    }

    fn add(
        &mut self,
        name: &str,
        value: &Bound<'_, PyAny>,
        dtype: Option<Dtype>,
        gpus: &Gpus,
        known: &mut Known,
    ) -> PyResult<()> {
        let py = value.py();
        let name = TensorName::new(name).map_err(Kind::Request.because(py))?;
        let (mut memory, mut was_copied) = lend(value, gpus)?;
        // A copy is made anew for each name, so it is never the memory of another one.
        if let Some(identity) = memory.identity().filter(|_| !was_copied) {
            if let Some(first) = known.places.get(&identity) {
                let spec = TensorSpec { name, alias_of: Some(*first), ..self.specs[*first].clone() };
                self.specs.push(spec);
                self.memory.push(None);
                memory.give_back(py);
                return Ok(());
            }
            known.places.insert(identity, self.specs.len());
        }
        if let Some(dtype) = dtype.filter(|dtype| is_float(memory.dtype()) && memory.dtype() != *dtype) {
            match was_copied {
                true => memory.give_back(py),
                false => known.uncast.push(memory),
            }
            let cast = frameworks(py)?.call_method1("cast", (value, dtype.name()))?;
            (memory, was_copied) = lend(&cast, gpus)?;
        }
        if let Lent::Gpu(tensor) = &memory {
            check_dense(tensor)?;
            self.copied_bytes += if was_copied { tensor.len() as u64 } else { 0 };
        }
        let shape = Shape::new(memory.shape()).map_err(Kind::UnsupportedTensor.because(py))?;
        self.specs.push(TensorSpec::new(name, memory.dtype(), shape));
        self.memory.push(Some(memory));
        Ok(())
    }

    /// The tensors as they are published, those of GPUs lent to their engines: each with its memory, and none for an alias; and
    /// the number of bytes copied. Needs no GIL.
    ///
    /// # Errors
    /// The error of a GPU's engine.
    pub(crate) fn settle(self) -> Result<ReadableTensors, CudaError> {
        let mut fences = Fences::default();
        let mut settle = |memory: Lent| {
            Ok::<_, CudaError>(match memory {
                Lent::Host(tensor) => Memory::Host(tensor),
                Lent::Gpu(tensor) => Memory::Gpu(fences.lend(tensor)?),
            })
        };
        let memory = self.memory.into_iter().map(|memory| memory.map(&mut settle).transpose());
        let memory = memory.collect::<Result<_, _>>()?;
        Ok(ReadableTensors {
            specs: self.specs,
            memory,
            copied_bytes: self.copied_bytes,
            returning: fences.returning(),
        })
    }
}

/// The tensors of a mapping so far, to detect aliases.
#[derive(Default)]
struct Known {
    /// The indices of tensors in the version.
    places: HashMap<Identity, usize>,
    /// The memory of cast tensors before the cast. It stays lent, because its library could otherwise reuse the
    /// address for another tensor, which would be mistaken for the first.
    uncast: Vec<Lent>,
}

/// A tensor's memory, to be copied from or to.
pub(crate) enum Memory {
    Host(Foreign),
    Gpu(DeviceBuffer),
}

/// One fence for each GPU. It passes when the work that produces the tensors, by their libraries' streams, is done. Recorded
/// after all libraries exported their memory.
pub(crate) struct Fences {
    passed: BTreeMap<usize, Fence>,
    back: ToReturn,
    returning: Returning,
}

impl Default for Fences {
    fn default() -> Self {
        let (back, returning) = Returning::new();
        Self { passed: BTreeMap::new(), back, returning }
    }
}

impl Fences {
    /// Receives the lent tensors back. No tensor is lent afterwards.
    pub(crate) fn returning(self) -> Returning {
        self.returning
    }

    /// Lends a tensor to its GPU. Needs no GIL.
    ///
    /// # Errors
    /// The error of the GPU's engine.
    pub(crate) fn lend(&mut self, tensor: OnGpu) -> Result<DeviceBuffer, CudaError> {
        let fence = self.of(tensor.device())?;
        Ok(tensor.into_buffer(fence, self.back.clone()))
    }

    fn of(&mut self, device: &Device) -> Result<Fence, CudaError> {
        let engine = gpu::engine(device);
        match self.passed.get(&engine.info().ordinal) {
            Some(fence) => Ok(fence.clone()),
            None => {
                let fence = engine.fence_intake()?;
                self.passed.insert(engine.info().ordinal, fence.clone());
                Ok(fence)
            }
        }
    }
}

/// Refuses a tensor on a GPU whose library did not bring its elements side by side.
fn check_dense(tensor: &OnGpu) -> PyResult<()> {
    match tensor.is_dense() {
        true => Ok(()),
        false => Err(PyBufferError::new_err(format!(
            "its elements do not lie side by side on {}, and its library has no way to bring them together that is known \
             here: publish a contiguous copy of it",
            tensor.device().name()
        ))),
    }
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64)
}

/// The parts specific to a framework, in Python.
pub(crate) fn frameworks(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import("tensor_relay._frameworks")
}

/// A tensor's memory, whatever framework it is of; for some, that of a copy, which is told.
fn lend(value: &Bound<'_, PyAny>, gpus: &Gpus) -> PyResult<(Lent, bool)> {
    lent_by(&frameworks(value.py())?.call_method1("lender", (value,))?, gpus)
}

/// A tensor's own memory, to be written.
pub(crate) fn lend_to_write(value: &Bound<'_, PyAny>, gpus: &Gpus) -> PyResult<Lent> {
    Ok(lent_by(&frameworks(value.py())?.call_method1("lender_to_write", (value,))?, gpus)?.0)
}

/// The memory of what `_frameworks` found: who lends it, the dtype if that cannot say it, and whether it is a copy.
fn lent_by(found: &Bound<'_, PyAny>, gpus: &Gpus) -> PyResult<(Lent, bool)> {
    let (lender, dtype, is_copy): (Bound<'_, PyAny>, Option<String>, bool) = found.extract()?;
    let memory = Lent::of(&lender, gpus)?;
    let dtype = dtype.and_then(|name| dtype_called(&name));
    Ok(match dtype {
        Some(dtype) => (memory.taken_for(dtype), is_copy),
        None => (memory, is_copy),
    })
}

/// The names and tensors of a mapping; of a model, those of its `state_dict`; of a list or tuple, by their places.
///
/// # Errors
/// `UnsupportedTensorError` for what is none of these.
pub(crate) fn items<'py>(tensors: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyIterator>> {
    let mapping = match tensors.hasattr("state_dict")? {
        true => tensors.call_method0("state_dict")?,
        false if is_sequence(tensors)? => named_by_place(tensors)?.into_any(),
        false => tensors.clone(),
    };
    if !mapping.hasattr("items")? {
        let message = format!(
            "tensors travel by name, and this is a {}: give a mapping of names to tensors, a list of tensors, \
             or a model with `state_dict()`",
            type_name(&mapping)
        );
        return Err(Kind::UnsupportedTensor.raise(tensors.py(), message));
    }
    mapping.call_method0("items")?.try_iter()
}

/// Whether this is a list or a tuple, which is not one of named fields: their names would be lost.
fn is_sequence(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    let is_sequence = value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>();
    Ok(is_sequence && !value.hasattr("_fields")?)
}

/// The values of a list or tuple under the names "0", "1", and so on.
fn named_by_place<'py>(values: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    let named = PyDict::new(values.py());
    for (place, value) in values.try_iter()?.enumerate() {
        named.set_item(place.to_string(), value?)?;
    }
    Ok(named)
}

/// The dtype of this name.
pub(crate) fn dtype_called(name: &str) -> Option<Dtype> {
    Dtype::ALL.iter().copied().find(|dtype| dtype.name() == name)
}

/// A name in a mapping of tensors.
pub(crate) fn text_of(name: &Bound<'_, PyAny>) -> PyResult<String> {
    let refused = || {
        let message = format!("tensors have names, and {:?} is none: use text for the keys", name);
        Kind::UnsupportedTensor.raise(name.py(), message)
    };
    Ok(name.cast::<PyString>().map_err(|_| refused())?.to_cow()?.into_owned())
}

/// Says which value was refused, with what its framework said as the cause.
fn blame(name: &str, value: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let kind = type_name(value);
    let error = match error.is_instance_of::<PyTypeError>(value.py()) && entries::is_extra_state(name) {
        true => PyTypeError::new_err(format!(
            "it is what a module's `get_extra_state` gave, and only tensors, text, numbers, truth values and None travel: leave \
             it out, or let that give one of these ({})",
            error.value(value.py())
        )),
        false => match value.cast::<PyDict>() {
            Ok(dictionary) => PyTypeError::new_err(format!(
                "it is a dictionary, and tensors travel by one name each: flatten it, to names like `{name}{}`, or let \
                 `tensor_relay.tree.flatten` do so for the whole tree",
                keys_below(dictionary)
            )),
            Err(_) => error,
        },
    };
    name_it(value.py(), &format!("{name} ({kind})"), error)
}

/// The maximum depth of a name given as an example.
const NESTED_TOLD: usize = 3;

/// The first keys of nested dictionaries, as a flat name ends.
fn keys_below(dictionary: &Bound<'_, PyDict>) -> String {
    let (mut names, mut next) = (String::new(), Some(dictionary.clone()));
    for _ in 0..NESTED_TOLD {
        let Some((key, value)) = next.and_then(|dictionary| dictionary.iter().next()) else { break };
        names.push_str(&format!(".{key}"));
        next = value.cast_into::<PyDict>().ok();
    }
    names
}

/// The name of a value's type, for people.
pub(crate) fn type_name(value: &Bound<'_, PyAny>) -> String {
    let name = value.get_type().fully_qualified_name();
    name.map_or_else(|_| "?".into(), |name| name.to_string())
}

/// The same where the value's type is known anyway.
pub(crate) fn name_it(py: Python<'_>, name: &str, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyException>(py) || error.is_instance_of::<PyMemoryError>(py) {
        return error; // Ctrl-C, or no memory: not the value's fault.
    }
    let raised = Kind::UnsupportedTensor.raise(py, format!("tensor {name}: {}", error.value(py)));
    raised.set_cause(py, Some(error));
    raised
}
