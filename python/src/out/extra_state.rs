//! Extra state of PyTorch's modules: the values of `get_extra_state` in a state dict. They are not memory of the
//! module, so a version's values are passed to the module's `set_extra_state`. A dictionary as `out` has no module: its
//! extra state is refused, or left out.

use crate::{
    errors::Kind,
    metadata,
    select::Select,
    tensors_in::{Item, frameworks},
};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use tensor_relay_client::BufferError;

/// The extra state that `out` can receive, by name in the version.
#[derive(Default)]
pub(super) struct ExtraState(BTreeMap<String, OfModule>);

/// The extra state of one module.
struct OfModule {
    /// The module's `set_extra_state`.
    setter: Py<PyAny>,
    /// The value that `get_extra_state` returned.
    value: Py<PyAny>,
}

/// The values of a version for modules, each with its setter; and what is missing at either end.
pub(super) struct Matched {
    values: Vec<(Py<PyAny>, Py<PyAny>)>,
    /// The names of values that are for no module of `out`.
    pub(super) without_module: Vec<Box<str>>,
    /// The names of extra state in `out` that the version lacks.
    pub(super) without_value: Vec<Box<str>>,
}

impl ExtraState {
    /// Adds a value in the state dict of `out`. Returns whether it can be received.
    ///
    /// # Errors
    /// `TargetError` if `out` is no module and `is_strict`.
    pub(super) fn add(&mut self, out: &Bound<'_, PyAny>, item: &Item<'_>, is_strict: bool) -> PyResult<bool> {
        let (py, name) = (out.py(), &item.name);
        let setter = frameworks(py)?.call_method1("extra_state_setter", (out, &item.own_name));
        let setter = setter.map_err(|error| {
            let message =
                format!("{name} of `out` is the extra state of no module of it: {}", error.value(py));
            Kind::Target.raise(py, message)
        })?;
        if !setter.is_none() {
            let extra = OfModule { setter: setter.unbind(), value: item.value.clone().unbind() };
            self.0.insert(name.clone(), extra);
        } else if is_strict {
            let message = format!(
                "{name} of `out` is the extra state of a module (`get_extra_state`), and a dictionary cannot set it: \
                 give the module itself as `out`, or leave extra state out by strict=False"
            );
            return Err(Kind::Target.raise(py, message));
        }
        Ok(self.0.contains_key(name))
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The values of a version: from its metadata, else as tensors that `tensor` finds, given the name and what
    /// `get_extra_state` returned.
    pub(super) fn matched<'py>(
        &self,
        py: Python<'py>,
        sent: &[(String, String)],
        select: Option<&Select>,
        tensor: impl Fn(&str, &Py<PyAny>) -> PyResult<Option<Py<PyAny>>>,
    ) -> PyResult<Matched> {
        let mut values: BTreeMap<String, Py<PyAny>> = BTreeMap::new();
        for (name, value) in metadata::entries(py, sent)? {
            let name: String = name.extract()?;
            if metadata::is_extra_state(&name) && select.is_none_or(|select| select.has(&name)) {
                values.insert(name, value.unbind());
            }
        }
        let mut matched = Matched { values: vec![], without_module: vec![], without_value: vec![] };
        for (name, OfModule { setter, value }) in &self.0 {
            let received = match values.remove(name) {
                Some(received) => Some(received),
                None => tensor(name, value)?,
            };
            match received {
                Some(received) => matched.values.push((setter.clone_ref(py), received)),
                None => matched.without_value.push(name.as_str().into()),
            }
        }
        matched.without_module = values.into_keys().map(Box::from).collect();
        Ok(matched)
    }
}

impl Matched {
    /// The mismatch, if there is one.
    pub(super) fn check(&self) -> Result<(), BufferError> {
        match self.without_module.is_empty() && self.without_value.is_empty() {
            true => Ok(()),
            false => Err(BufferError::OtherNames {
                missing: self.without_module.clone().into(),
                unexpected: self.without_value.clone().into(),
            }),
        }
    }

    /// Passes the values to their modules.
    pub(super) fn set(self, py: Python<'_>) -> PyResult<()> {
        self.values
            .into_iter()
            .try_for_each(|(setter, value)| setter.call1(py, (value,)).map(drop))
    }
}
