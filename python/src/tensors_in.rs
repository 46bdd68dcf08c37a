//! A Python mapping of tensors, converted to the tensors of a version: specs, lent memory, and aliases.

use crate::{
    errors::Kind,
    gpu::{self, Gpus},
    guards::Guard,
    hold::HoldUntil,
    memory::{Foreign, Identity, Lent, OnGpu, Places, Returning, ToReturn, Unordered, not_lent},
    metadata,
    version::ReadableTensors,
};
use pyo3::{
    exceptions::{PyBufferError, PyException, PyMemoryError, PyTypeError},
    prelude::*,
};
use std::collections::{BTreeMap, HashMap};
use tensor_relay_device::{
    Device, DeviceBuffer,
    cuda::{CudaError, Fence},
};
use tensor_relay_server::{Dtype, Metadata, Shape, Splits, TensorName, TensorSpec};

/// The tensors to publish, taken from Python. Their memory is lent until this is dropped.
pub(crate) struct TensorsIn {
    specs: Vec<TensorSpec>,
    /// The memory of each spec; `None` for an alias.
    memory: Vec<Option<Lent>>,
    /// The guards of the tensors whose memory is borrowed.
    guards: Vec<Option<Guard>>,
    /// The values that are not tensors.
    pub(crate) entries: Metadata,
    /// The number of bytes of GPU tensors that their own libraries copied, because the memory itself cannot be lent.
    copied_bytes: u64,
}

impl TensorsIn {
    /// The values of `mapping`, or of a model, with floating-point tensors cast to `dtype` if it is given.
    ///
    /// # Errors
    /// `UnsupportedTensorError` names the first value that cannot be sent; `PublishError` if there is no tensor.
    pub(crate) fn of(
        mapping: &Bound<'_, PyAny>,
        options: &TensorOptions<'_, '_>,
        hold: HoldUntil,
        gpus: &Gpus,
    ) -> PyResult<Self> {
        let dtype = options.dtype.map(cast_to).transpose()?;
        let mut tensors =
            Self { specs: vec![], memory: vec![], guards: vec![], entries: vec![], copied_bytes: 0 };
        let mut aliases = AliasFinder::default();
        for Item { name, value, .. } in items(mapping, options.rename)? {
            match metadata::is_entry(&value) {
                true => tensors.entries.push(metadata::of_entry(&name, &value)?),
                false => tensors
                    .add(&name, &value, (dtype, hold), gpus, &mut aliases)
                    .map_err(|error| unsupported_value(&name, &value, error))?,
            }
        }
        aliases.unordered.order()?;
        aliases.uncast.into_iter().for_each(|memory| memory.give_back(mapping.py()));
        if tensors.specs.is_empty() && !options.allow_empty {
            return Err(Kind::Publish.raise(mapping.py(), NO_TENSORS));
        }
        options
            .split
            .apply(&mut tensors.specs)
            .map_err(Kind::Publish.because(mapping.py()))?;
        Ok(tensors)
    }

    fn add<'py>(
        &mut self,
        name: &str,
        value: &Bound<'py, PyAny>,
        (dtype, hold): (Option<Dtype>, HoldUntil),
        gpus: &Gpus,
        aliases: &mut AliasFinder<'py>,
    ) -> PyResult<()> {
        let py = value.py();
        let name = TensorName::new(name).map_err(Kind::Request.because(py))?;
        let Lending { mut memory, mut was_copied, mut exporter } = lend(value, gpus, &mut aliases.unordered)?;
        // Each name gets a new copy, so a copy is never the memory of another tensor.
        if let Some(identity) = memory.identity().filter(|_| !was_copied) {
            if let Some(first) = aliases.indices.get(&identity) {
                let spec = TensorSpec { name, alias_of: Some(*first), ..self.specs[*first].clone() };
                self.specs.push(spec);
                self.memory.push(None);
                self.guards.push(None);
                memory.give_back(py);
                return Ok(());
            }
            aliases.indices.insert(identity, self.specs.len());
        }
        if let Some(dtype) = dtype.filter(|dtype| is_float(memory.dtype()) && memory.dtype() != *dtype) {
            match was_copied {
                true => memory.give_back(py),
                false => aliases.uncast.push(memory),
            }
            let cast = frameworks(py)?.call_method1("cast", (value, dtype.name()))?;
            Lending { memory, was_copied, exporter } = lend(&cast, gpus, &mut aliases.unordered)?;
        }
        if let Lent::Gpu(tensor) = &memory {
            check_dense(tensor)?;
            self.copied_bytes += if was_copied { tensor.len() as u64 } else { 0 };
        }
        let is_borrowed = matches!(hold, HoldUntil::Borrow) && memory.is_dense(); // Others are copied.
        self.guards.push(is_borrowed.then(|| Guard::of(&exporter)).transpose()?);
        let shape = Shape::new(memory.shape()).map_err(Kind::UnsupportedTensor.because(py))?;
        self.specs.push(TensorSpec::new(name, memory.dtype(), shape));
        self.memory.push(Some(memory));
        Ok(())
    }

    /// The memory that a version borrows and its owner can write: tensors that are not contiguous are copied.
    pub(crate) fn places(&self) -> Places {
        let tensors = self.specs.iter().zip(&self.memory);
        let tensors = tensors.filter_map(|(spec, memory)| Some((spec, memory.as_ref()?)));
        let lent = tensors.filter(|(_, memory)| memory.is_dense() && memory.is_writable());
        Places::new(lent.filter_map(|(spec, memory)| Some((spec.name.as_str().into(), memory.footprint()?))))
    }

    /// Lends the tensors of GPUs to their engines, which makes all tensors readable. Needs no GIL.
    ///
    /// # Errors
    /// The error of a GPU's engine.
    pub(crate) fn into_readable(self) -> Result<ReadableTensors, CudaError> {
        let mut fences = Fences::default();
        let mut into_readable = |memory: Lent| {
            Ok::<_, CudaError>(match memory {
                Lent::Host(tensor) => Memory::Host(tensor),
                Lent::Gpu(tensor) => Memory::Gpu(fences.lend(tensor)?),
            })
        };
        let memory = self.memory.into_iter().map(|memory| memory.map(&mut into_readable).transpose());
        let memory = memory.collect::<Result<_, _>>()?;
        Ok(ReadableTensors {
            specs: self.specs,
            memory,
            guards: self.guards,
            copied_bytes: self.copied_bytes,
            returning: fences.returning(),
        })
    }
}

/// The message for a version without tensors.
const NO_TENSORS: &str = "there are no tensors, and this version would replace the one that subscribers have: where \
                          PyTorch gathers a sharded model (`full_state_dict=True`), rank 0 alone has its tensors, so \
                          publish from rank 0 alone; allow_empty=True publishes a version without tensors";

/// The options of `publish` for the tensors.
pub(crate) struct TensorOptions<'a, 'py> {
    /// The dtype that floating-point tensors are cast to.
    pub(crate) dtype: Option<&'a Bound<'py, PyAny>>,
    /// The function from a name to the name in the version.
    pub(crate) rename: Option<&'a Bound<'py, PyAny>>,
    /// Which tensors are cut into pieces.
    pub(crate) split: Splits,
    /// Whether a version without tensors is published.
    pub(crate) allow_empty: bool,
}

/// The memory of a mapping's tensors so far, to detect aliases.
#[derive(Default)]
struct AliasFinder<'py> {
    /// The index of each tensor in the version.
    indices: HashMap<Identity, usize>,
    /// The memory of cast tensors before the cast. It stays lent: otherwise its library could reuse the address for
    /// another tensor, which would be mistaken for an alias of the first.
    uncast: Vec<Lent>,
    /// The tensors of GPUs that wait for no work yet.
    unordered: Unordered<'py>,
}

/// A tensor's memory, to be copied from or to.
pub(crate) enum Memory {
    Host(Foreign),
    Gpu(DeviceBuffer),
}

/// One fence for each GPU, recorded after all libraries exported their memory. It passes when the work that produces
/// the tensors, on their libraries' streams, has completed.
pub(crate) struct Fences {
    by_ordinal: BTreeMap<usize, Fence>,
    to_return: ToReturn,
    returning: Returning,
}

impl Default for Fences {
    fn default() -> Self {
        let (to_return, returning) = Returning::new();
        Self { by_ordinal: BTreeMap::new(), to_return, returning }
    }
}

impl Fences {
    /// The receiver of the lent tensors. Afterwards none can be lent.
    pub(crate) fn returning(self) -> Returning {
        self.returning
    }

    /// Lends a tensor to its GPU. Needs no GIL.
    ///
    /// # Errors
    /// The error of the GPU's engine.
    pub(crate) fn lend(&mut self, tensor: OnGpu) -> Result<DeviceBuffer, CudaError> {
        let fence = self.of(tensor.device())?;
        Ok(tensor.into_buffer(fence, self.to_return.clone()))
    }

    fn of(&mut self, device: &Device) -> Result<Fence, CudaError> {
        let engine = gpu::engine(device);
        match self.by_ordinal.get(&engine.info().ordinal) {
            Some(fence) => Ok(fence.clone()),
            None => {
                let fence = engine.fence_intake()?;
                self.by_ordinal.insert(engine.info().ordinal, fence.clone());
                Ok(fence)
            }
        }
    }
}

/// Refuses a tensor on a GPU that is not contiguous and that `_frameworks` cannot copy.
fn check_dense(tensor: &OnGpu) -> PyResult<()> {
    match tensor.is_dense() {
        true => Ok(()),
        false => Err(PyBufferError::new_err(format!(
            "its elements do not lie side by side on {}, and Tensor Relay does not know how its library makes a contiguous \
             copy: publish such a copy yourself",
            tensor.device().name()
        ))),
    }
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64)
}

/// The Python module with the code for each framework.
pub(crate) fn frameworks(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import("tensor_relay._frameworks")
}

/// The memory of a tensor of any framework.
struct Lending<'py> {
    memory: Lent,
    /// Whether it is that of a copy: some frameworks cannot lend their own.
    was_copied: bool,
    /// The object that lends it.
    exporter: Bound<'py, PyAny>,
}

fn lend<'py>(
    value: &Bound<'py, PyAny>,
    gpus: &Gpus,
    unordered: &mut Unordered<'py>,
) -> PyResult<Lending<'py>> {
    lent_by(&exporter(value, "exporter")?, gpus, unordered)
}

/// A tensor's own memory, to be written.
pub(crate) fn lend_to_write(value: &Bound<'_, PyAny>, gpus: &Gpus) -> PyResult<Lent> {
    let mut unordered = Unordered::default();
    let Lending { memory, .. } = lent_by(&exporter(value, "writable_exporter")?, gpus, &mut unordered)?;
    unordered.order()?;
    Ok(memory)
}

/// The answer of a function of `_frameworks`, which refuses by `TypeError`: other exceptions are the library's.
fn exporter<'py>(value: &Bound<'py, PyAny>, function: &str) -> PyResult<Bound<'py, PyAny>> {
    let py = value.py();
    let answer = frameworks(py)?.call_method1(function, (value,));
    answer.map_err(|error| if error.is_instance_of::<PyTypeError>(py) { error } else { not_lent(py, error) })
}

/// The memory that `_frameworks` found: `answer` is the object that lends it, the dtype if that object cannot name it,
/// and whether the memory is a copy.
fn lent_by<'py>(
    answer: &Bound<'py, PyAny>,
    gpus: &Gpus,
    unordered: &mut Unordered<'py>,
) -> PyResult<Lending<'py>> {
    let (exporter, dtype, was_copied): (Bound<'py, PyAny>, Option<String>, bool) = answer.extract()?;
    let mut memory = Lent::of(&exporter, gpus, unordered)?;
    if let Some(dtype) = dtype.and_then(|name| dtype_named(&name)) {
        memory.reinterpret_as(dtype);
    }
    Ok(Lending { memory, was_copied, exporter })
}

/// A value in a mapping of tensors.
pub(crate) struct Item<'py> {
    /// Its name in a version.
    pub(crate) name: String,
    /// Its name in the mapping.
    pub(crate) own_name: String,
    pub(crate) value: Bound<'py, PyAny>,
}

/// The values of a mapping, of a model or of a list (`_state_dict.items`). `rename` is a function from a name in the
/// mapping to the name in a version.
///
/// # Errors
/// `UnsupportedTensorError` for any other value, and for names that are not text; `RequestError` if `rename` gives two
/// values one name.
pub(crate) fn items<'py>(
    tensors: &Bound<'py, PyAny>,
    rename: Option<&Bound<'py, PyAny>>,
) -> PyResult<Vec<Item<'py>>> {
    let items = state_dict(tensors.py())?.call_method1("items", (tensors, rename))?;
    let items: Vec<(String, String, Bound<'py, PyAny>)> = items.extract()?;
    Ok(items
        .into_iter()
        .map(|(name, own_name, value)| Item { name, own_name, value })
        .collect())
}

/// The Python module with the names and values of a user's tensors.
fn state_dict(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import("tensor_relay._state_dict")
}

/// The dtype of this name.
pub(crate) fn dtype_named(name: &str) -> Option<Dtype> {
    Dtype::ALL.iter().copied().find(|dtype| dtype.name() == name)
}

/// The dtype that a user passes, as a name or as a framework's dtype object.
fn cast_to(dtype: &Bound<'_, PyAny>) -> PyResult<Dtype> {
    let py = dtype.py();
    let name: String = frameworks(py)?.call_method1("dtype_name", (dtype,))?.extract()?;
    let unknown = || Kind::Request.raise(py, format!("there is no dtype {name:?}: e.g. bf16, f16 or f32"));
    dtype_named(&name).ok_or_else(unknown)
}

/// The `UnsupportedTensorError` that names the value, with its framework's error, or a better reason, as the cause.
fn unsupported_value(name: &str, value: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = value.py();
    let explained = state_dict(py).and_then(|module| {
        let explained = module.call_method1("why_unsupported", (name, value, error.value(py)))?;
        explained.extract::<(String, Bound<'_, PyAny>)>()
    });
    match explained {
        Ok((tensor, why)) => unsupported(py, &tensor, PyErr::from_value(why)),
        Err(error) => error,
    }
}

/// The `UnsupportedTensorError` of the tensor `name`, caused by `error`.
pub(crate) fn unsupported(py: Python<'_>, name: &str, error: PyErr) -> PyErr {
    if !is_of_tensor(py, &error) {
        return error;
    }
    let raised = Kind::UnsupportedTensor.raise(py, format!("tensor {name}: {}", error.value(py)));
    raised.set_cause(py, Some(error));
    raised
}

/// Whether an error is the fault of a tensor, and neither Ctrl-C nor a lack of memory.
pub(crate) fn is_of_tensor(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyException>(py) && !error.is_instance_of::<PyMemoryError>(py)
}
