//! A mapping of tensors, as a version: what each is, where its memory lies, and which are one.

use crate::{
    entries,
    errors::Kind,
    memory::{Foreign, Identity},
};
use bytes::Bytes;
use pyo3::{
    exceptions::{PyException, PyMemoryError},
    prelude::*,
    types::PyString,
};
use std::{collections::HashMap, io};
use tensor_relay_server::{
    Borrowed, Dtype, LendError, Metadata, Shape, StageError, Staged, Staging, TensorName, TensorSpec,
    beside::{SealError, SealedVersion, Terms},
};

/// What somebody wants to publish, taken from Python. Its memory is lent to us meanwhile.
pub(crate) struct TensorsIn {
    specs: Vec<TensorSpec>,
    /// One for each spec; none for an alias.
    memory: Vec<Option<Foreign>>,
    /// The values that are no tensors.
    pub(crate) entries: Metadata,
}

impl TensorsIn {
    /// Takes all values of `mapping`, with a cast of floating-point tensors to `dtype` where one is given.
    ///
    /// # Errors
    /// `UnsupportedTensorError` names the first value that cannot travel.
    pub(crate) fn of(mapping: &Bound<'_, PyAny>, dtype: Option<Dtype>) -> PyResult<Self> {
        let mut taken = Self { specs: vec![], memory: vec![], entries: vec![] };
        let mut known = HashMap::new();
        for item in mapping.call_method0("items")?.try_iter()? {
            let (name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
            let name = text_of(&name)?;
            match entries::is_entry(&value) {
                true => taken.entries.push(entries::to_metadata(&name, &value)?),
                false => taken
                    .add(&name, &value, dtype, &mut known)
                    .map_err(|error| blame(&name, &value, error))?,
            }
        }
        Ok(taken)
    }

    fn add(
        &mut self,
        name: &str,
        value: &Bound<'_, PyAny>,
        dtype: Option<Dtype>,
        known: &mut HashMap<Identity, usize>,
    ) -> PyResult<()> {
        let py = value.py();
        let name = TensorName::new(name).map_err(Kind::Request.because(py))?;
        let mut memory = lend(value)?;
        if let Some(identity) = memory.identity() {
            if let Some(first) = known.get(&identity) {
                let spec = TensorSpec { name, alias_of: Some(*first), ..self.specs[*first].clone() };
                self.specs.push(spec);
                self.memory.push(None);
                memory.give_back(py);
                return Ok(());
            }
            known.insert(identity, self.specs.len());
        }
        if let Some(dtype) = dtype.filter(|dtype| is_float(memory.dtype()) && memory.dtype() != *dtype) {
            memory.give_back(py);
            memory = lend(&frameworks(py)?.call_method1("cast", (value, dtype.name()))?)?;
        }
        let shape = Shape::new(memory.shape()).map_err(Kind::UnsupportedTensor.because(py))?;
        self.specs.push(TensorSpec::new(name, memory.dtype(), shape));
        self.memory.push(Some(memory));
        Ok(())
    }

    /// Copies all tensors to memory of the relay's. Needs no GIL.
    ///
    /// # Errors
    /// [`StageError`] when they cannot be laid out, or there is no memory.
    pub(crate) fn stage(&self, staging: &Staging) -> Result<Staged, StageError> {
        Staged::new(staging, self.specs.clone(), vec![], |index, out| {
            if let Some(memory) = &self.memory[index] {
                memory.copy_to(out);
            }
            Ok(())
        })
    }

    /// Copies all tensors to memory for a server beside this process. Needs no GIL.
    ///
    /// # Errors
    /// [`SealError`] when they cannot be laid out, or there is no memory.
    pub(crate) fn seal(&self, terms: &Terms) -> Result<SealedVersion, SealError<io::Error>> {
        SealedVersion::new(terms, self.specs.clone(), vec![], |index, out| match &self.memory[index] {
            None => Ok(()),
            Some(memory) if memory.is_dense() => out.write(memory.as_ref()),
            Some(memory) => out.write(&gathered(memory).ok_or(io::ErrorKind::OutOfMemory)?),
        })
    }

    /// Lends all tensors to who reads them, and says how many bytes had to be copied for that: those of tensors whose
    /// elements do not lie side by side. Needs no GIL.
    ///
    /// # Errors
    /// [`LendError`] when they cannot be laid out; `None` when there is no memory for the copies.
    pub(crate) fn lend(self, staging: &Staging) -> Result<(Borrowed, u64), Option<LendError>> {
        let mut copied_bytes = 0;
        let mut tensors = Vec::with_capacity(self.specs.len());
        for (spec, memory) in self.specs.into_iter().zip(self.memory) {
            let bytes = match memory {
                None => Bytes::new(),
                Some(memory) if memory.is_dense() => memory.into_bytes(),
                Some(memory) => {
                    copied_bytes += memory.len() as u64;
                    gathered(&memory).ok_or(None)?
                }
            };
            tensors.push((spec, bytes));
        }
        Ok((Borrowed::from_tensors(staging, tensors, vec![])?, copied_bytes))
    }

    /// Gives the memory back that is still lent.
    pub(crate) fn give_back(self, py: Python<'_>) {
        self.memory.into_iter().flatten().for_each(|memory| memory.give_back(py));
    }
}

/// The elements side by side.
fn gathered(memory: &Foreign) -> Option<Bytes> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(memory.len()).ok()?;
    bytes.resize(memory.len(), 0);
    memory.copy_to(&mut bytes);
    Some(bytes.into())
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64)
}

fn frameworks(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import("tensor_relay._frameworks")
}

/// A tensor's memory, whatever framework it is of; for some, that of a copy.
fn lend(value: &Bound<'_, PyAny>) -> PyResult<Foreign> {
    lent_by(&frameworks(value.py())?.call_method1("lender", (value,))?)
}

/// A tensor's own memory, to be written.
pub(crate) fn lend_to_write(value: &Bound<'_, PyAny>) -> PyResult<Foreign> {
    lent_by(&frameworks(value.py())?.call_method1("lender_to_write", (value,))?)
}

/// The memory of what `_frameworks` found: who lends it, and the dtype if that cannot say it.
fn lent_by(found: &Bound<'_, PyAny>) -> PyResult<Foreign> {
    let (lender, dtype): (Bound<'_, PyAny>, Option<String>) = found.extract()?;
    let memory = Foreign::of(&lender)?;
    let dtype = dtype.and_then(|name| dtype_called(&name));
    Ok(match dtype {
        Some(dtype) => memory.taken_for(dtype),
        None => memory,
    })
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
    let kind = value.get_type().fully_qualified_name();
    name_it(
        value.py(),
        &format!("{name} ({})", kind.map_or_else(|_| "?".into(), |kind| kind.to_string())),
        error,
    )
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
