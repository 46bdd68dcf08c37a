//! `out=`: a user's own tensors, which versions are received into.

use crate::{
    entries,
    errors::{Kind, of_fill},
    memory::{Exclusive, Foreign},
    snapshot::Snapshot,
    subscription::{Arrived, Inner, NotArrived},
    tensors_in::{lend_to_write, text_of},
    wait::{at_most, wait},
};
use pyo3::prelude::*;
use std::{
    collections::HashSet,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tensor_relay_client::{self as client, Buffers, FillCause, FillError, Filled, Glob, Shape, TensorName};

/// A mapping of tensors, and how they are received into.
pub(crate) struct Out {
    mapping: Py<PyAny>,
    is_atomic: bool,
    /// A version that is received right into the tensors, when nobody waits for it any more: after a timeout, or Ctrl-C.
    /// The tensors stay lent until then.
    pending: Arc<Mutex<Option<Pending>>>,
}

type Pending = Pin<Box<dyn Future<Output = Result<Filled<Exclusive>, Failed>> + Send>>;

/// Why no version came into the tensors.
enum Failed {
    Closed,
    Fill(FillError<Exclusive>),
}

/// One of the tensors.
struct Target {
    name: TensorName,
    memory: Foreign,
}

impl Out {
    pub(crate) fn new(mapping: Py<PyAny>, is_atomic: bool) -> Self {
        Self { mapping, is_atomic, pending: Arc::default() }
    }

    pub(crate) fn is_atomic(&self) -> bool {
        self.is_atomic
    }

    pub(crate) fn clone_ref(&self, py: Python<'_>) -> Self {
        Self {
            mapping: self.mapping.clone_ref(py),
            is_atomic: self.is_atomic,
            pending: Arc::clone(&self.pending),
        }
    }

    /// What to subscribe to, so that little travels but these tensors.
    pub(crate) fn selection(&self, py: Python<'_>) -> PyResult<Vec<Glob>> {
        let named: Buffers<()> = self.targets(py)?.into_iter().map(|target| (target.name, ())).collect();
        Ok(named.selection())
    }

    /// Copies a whole version to the tensors, all of them or none.
    ///
    /// # Errors
    /// `TargetError` names the first that is not of the version.
    pub(crate) fn copy(&self, py: Python<'_>, arrived: &Arrived) -> PyResult<Snapshot> {
        let snapshot = &arrived.snapshot;
        let mut copies = vec![];
        for Target { name, memory } in self.targets(py)? {
            let bytes = snapshot.tensor(name.as_str());
            let (Some(tensor), Some(bytes)) = (snapshot.manifest().tensor(name.as_str()), bytes) else {
                let message = format!(
                    "`out` has a tensor {name}, and {} has none, or it is not selected",
                    snapshot.id()
                );
                return Err(Kind::Target.raise(py, message));
            };
            if (tensor.dtype, tensor.shape.dimensions()) != (memory.dtype(), memory.shape()) {
                let message = format!(
                    "tensor {name} is {} {} in {}, and {} {:?} in `out`",
                    tensor.dtype,
                    tensor.shape,
                    snapshot.id(),
                    memory.dtype(),
                    memory.shape()
                );
                return Err(Kind::Target.raise(py, message));
            }
            copies.push((memory, bytes));
        }
        py.detach(|| copies.iter_mut().for_each(|(memory, bytes)| memory.copy_from(bytes)));
        copies.into_iter().for_each(|(memory, _)| memory.give_back(py));
        Ok(Snapshot::without_tensors(snapshot, arrived.gap.as_deref()))
    }

    /// Receives the next version right into the tensors.
    pub(crate) fn receive_in_place(
        &self,
        py: Python<'_>,
        inner: &Inner,
        timeout: Option<Duration>,
    ) -> PyResult<Result<Snapshot, NotArrived>> {
        let pending = self.pending().take();
        let mut pending = match pending {
            Some(pending) => pending,
            None => self.begin(py, inner)?,
        };
        let received = match wait(py, at_most(timeout, pending.as_mut())) {
            Ok(Some(received)) => received,
            not_yet => {
                *self.pending() = Some(pending);
                return not_yet.map(|_| Err(NotArrived::TimedOut));
            }
        };
        match received {
            Ok(filled) => {
                let snapshot = Snapshot::filled(&filled);
                give_back(py, filled.into_buffers());
                Ok(Ok(snapshot))
            }
            Err(Failed::Closed) => Ok(Err(NotArrived::Closed)),
            Err(Failed::Fill(error)) => not_filled(py, error),
        }
    }

    /// Whether tensors are lent to a version that nobody waits for at present.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending().is_some()
    }

    /// Waits for no version any more. The tensors come back when nothing writes to them.
    pub(crate) fn forget(&self) {
        drop(self.pending().take());
    }

    fn begin(&self, py: Python<'_>, inner: &Inner) -> PyResult<Pending> {
        let mut buffers = Buffers::new();
        for Target { name, memory } in self.targets(py)? {
            let (dtype, shape) = (memory.dtype(), Shape::new(memory.shape()));
            let shape = shape.map_err(Kind::Target.because(py))?;
            let exclusive = Exclusive::new(memory).ok_or_else(|| {
                let message = format!(
                    "the elements of {name} in `out` do not lie side by side, so nothing can be received right into it: make \
                     it contiguous, or take atomic=True"
                );
                Kind::Target.raise(py, message)
            })?;
            buffers.expect(name.clone(), dtype, shape);
            buffers.insert(name, exclusive);
        }
        let subscription = Arc::clone(&inner.subscription);
        Ok(Box::pin(async move {
            let mut subscription = subscription.lock_owned().await;
            let subscription = subscription.as_mut().ok_or(Failed::Closed)?;
            subscription.next_into(buffers).await.map_err(Failed::Fill)
        }))
    }

    /// The tensors, as they are now; one for all names that share it. What is no tensor is passed over, as in a
    /// `state_dict` that is published.
    fn targets(&self, py: Python<'_>) -> PyResult<Vec<Target>> {
        let (mut targets, mut known) = (vec![], HashSet::new());
        for item in self.mapping.bind(py).call_method0("items")?.try_iter()? {
            let (name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
            if entries::is_entry(&value) {
                continue;
            }
            let text = text_of(&name)?;
            let name = TensorName::new(&text).map_err(Kind::Request.because(py))?;
            let refuse = |why: &dyn std::fmt::Display| {
                Kind::Target.raise(py, format!("{name} of `out` cannot be received into: {why}"))
            };
            let memory = lend_to_write(&value).map_err(|error| refuse(&error.value(py)))?;
            if !memory.is_writable() {
                return Err(refuse(&"it is read-only"));
            }
            if memory.identity().is_none_or(|identity| known.insert(identity)) {
                targets.push(Target { name, memory });
            }
        }
        Ok(targets)
    }

    fn pending(&self) -> MutexGuard<'_, Option<Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn give_back(py: Python<'_>, buffers: Buffers<Exclusive>) {
    buffers.into_iter().for_each(|(_, memory)| memory.give_back(py));
}

/// Says why, and whether the tensors are torn.
fn not_filled(py: Python<'_>, error: FillError<Exclusive>) -> PyResult<Result<Snapshot, NotArrived>> {
    let message = error.to_string();
    let FillError { cause, torn, buffers, .. } = error;
    give_back(py, buffers);
    match (torn, cause) {
        (None, FillCause::Subscription(error)) => Ok(Err(NotArrived::Subscription(error))),
        (None, cause) => Err(of_fill(py, &cause)),
        (Some(id), cause) => Err(torn_by(py, &message, &id, &cause)),
    }
}

fn torn_by(py: Python<'_>, message: &str, id: &client::VersionId, cause: &FillCause) -> PyErr {
    let raised = Kind::Torn.raise(py, message);
    // The class has this attribute; an interpreter without memory for it has worse to tell.
    let _ = raised.value(py).setattr("version", id.version.0);
    raised.set_cause(py, Some(of_fill(py, cause)));
    raised
}
