//! `out=`: receiving versions into a user's own tensors.

mod copy;
mod extra_state;
mod left_out;
mod target;

use crate::{
    errors::{Kind, of_fill},
    gpu::Gpus,
    memory::{Exclusive, Foreign, OnGpu, Returning},
    select::Select,
    snapshot::Snapshot,
    subscription::{Arrived, Delivered, Inner, NotArrived},
    tensors_in::{Fences, frameworks},
    wait::{at_most, wait},
};
use extra_state::{ExtraState, Matched};
use left_out::LeftOut;
use pyo3::prelude::*;
use std::{
    collections::BTreeSet,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use target::{ByPlace, Target, Targets, check_dense, sort_by_place};
use tensor_relay_client::{
    self as client, BufferError, Buffers, FillCause, FillError, Filled, Glob, Manifest, NameMatch,
    TensorName, VersionId,
};
use tensor_relay_device::DeviceBuffer;

/// The tensors of `out=`, with their options.
pub(crate) struct Out {
    mapping: Py<PyAny>,
    is_atomic: bool,
    /// Whether the version must have the same tensors.
    is_strict: bool,
    /// A function from a name in the mapping to the name in the version.
    rename: Option<Py<PyAny>>,
    left_out: Arc<LeftOut>,
    gpus: Arc<Gpus>,
    /// A version that is being received directly into the tensors after its caller gave up waiting (timeout or Ctrl-C).
    /// The tensors stay lent meanwhile, and the next call continues to wait for the version.
    pending: Arc<Mutex<Option<Pending>>>,
}

/// A version that is being received into the tensors.
struct Pending {
    received: Received,
    /// The Python objects of the tensors.
    values: Vec<Py<PyAny>>,
    /// The names of values in `out` that are not tensors.
    entries: Vec<String>,
    /// The names of the tensors, except extra state.
    names: BTreeSet<String>,
    extra: ExtraState,
}

type Received = Pin<Box<dyn Future<Output = Result<FilledTensors, Failed>> + Send>>;

/// A version received into tensors on the host or on a GPU.
enum FilledTensors {
    Host(Filled<Exclusive>),
    Gpu(Filled<DeviceBuffer>, Returning),
}

/// Why no version was received into the tensors.
enum Failed {
    Closed,
    Host(FillError<Exclusive>),
    Gpu(FillError<DeviceBuffer>),
}

impl Out {
    pub(crate) fn new(
        mapping: Bound<'_, PyAny>,
        is_atomic: bool,
        is_strict: bool,
        rename: Option<Bound<'_, PyAny>>,
        gpus: Arc<Gpus>,
    ) -> Self {
        let (mapping, rename) = (mapping.unbind(), rename.map(Bound::unbind));
        Self {
            mapping,
            is_atomic,
            is_strict,
            rename,
            left_out: Arc::default(),
            gpus,
            pending: Arc::default(),
        }
    }

    pub(crate) fn is_atomic(&self) -> bool {
        self.is_atomic
    }

    pub(crate) fn clone_ref(&self, py: Python<'_>) -> Self {
        Self {
            mapping: self.mapping.clone_ref(py),
            is_atomic: self.is_atomic,
            is_strict: self.is_strict,
            rename: self.rename.as_ref().map(|rename| rename.clone_ref(py)),
            left_out: Arc::clone(&self.left_out),
            gpus: Arc::clone(&self.gpus),
            pending: Arc::clone(&self.pending),
        }
    }

    /// The selection to subscribe to: all tensors if the version must match exactly, else those with names of `out`, so
    /// that few others are sent.
    ///
    /// # Errors
    /// `TargetError` for tensors that cannot be received into.
    pub(crate) fn selection(&self, py: Python<'_>) -> PyResult<Vec<Glob>> {
        let targets = self.targets(py)?;
        let mut names = Buffers::new();
        for Target { name, .. } in &targets.tensors {
            names.insert(name.clone(), ());
        }
        for name in targets.extra.names() {
            names.insert(TensorName::new(name).map_err(Kind::Request.because(py))?, ());
        }
        targets.give_back(py);
        Ok(if self.is_strict { vec![] } else { names.selection() })
    }

    /// Copies a complete version to the tensors, all of them or none. `select` is that of the subscription.
    ///
    /// # Errors
    /// `TargetError` for tensors that cannot be received into; `TornError` if a GPU or `set_extra_state` fails.
    pub(crate) fn copy(
        &self,
        py: Python<'_>,
        arrived: &Arrived,
        select: Option<&Select>,
    ) -> PyResult<Delivered> {
        copy::to_all(py, arrived, self, select)
    }

    /// Completes a version whose tensors were received: sets its extra state, and logs what was left out.
    ///
    /// # Errors
    /// `TornError` if a module refuses its extra state.
    fn finish(
        &self,
        py: Python<'_>,
        id: &VersionId,
        manifest: &Manifest,
        select: Option<&Select>,
        names: &BTreeSet<String>,
        extra: Matched,
    ) -> PyResult<()> {
        if !self.is_strict {
            self.left_out.log(id, manifest, select, names, &extra);
        }
        extra.set(py).map_err(|error| {
            let why = error.value(py).to_string();
            torn_by(
                py,
                &format!("{why}; `out` has the tensors of {id} without all of its extra state"),
                id,
                error,
            )
        })
    }

    /// Receives the next version directly into the tensors.
    pub(crate) fn receive_in_place(
        &self,
        py: Python<'_>,
        inner: &Inner,
        timeout: Option<Duration>,
    ) -> PyResult<Delivered> {
        let pending = self.pending().take();
        let mut pending = match pending {
            Some(pending) => pending,
            None => self.begin(py, inner)?,
        };
        let waited = wait(py, at_most(timeout, pending.received.as_mut()));
        // Also without a result: the tensors may already hold bytes of the pending version.
        if !matches!(&waited, Ok(Some(received)) if !may_have_written(received)) {
            notify_written(py, &pending.values)?;
        }
        let received = match waited {
            Ok(Some(received)) => received,
            interrupted => {
                *self.pending() = Some(pending);
                if inner.open.is_closed() {
                    self.cancel_pending(); // It was closed meanwhile, when nothing was pending.
                }
                return interrupted.map(|_| Err(NotArrived::TimedOut));
            }
        };
        let entries = &pending.entries;
        match received {
            Ok(FilledTensors::Host(filled)) => {
                let (manifest, snapshot) = (Arc::clone(filled.manifest()), Snapshot::filled(&filled));
                give_back(py, filled.into_buffers());
                self.deliver(py, inner, &pending, &manifest, snapshot)
            }
            Ok(FilledTensors::Gpu(filled, returning)) => {
                let (manifest, snapshot) = (Arc::clone(filled.manifest()), Snapshot::filled(&filled));
                drop(filled);
                returning.give_back(py);
                self.deliver(py, inner, &pending, &manifest, snapshot)
            }
            Err(Failed::Closed) => Ok(Err(NotArrived::Closed)),
            Err(Failed::Host(error)) => {
                let message = error.to_string();
                let FillError { cause, torn, refused, buffers, .. } = error;
                give_back(py, buffers);
                not_filled(py, &message, torn, refused, cause, entries)
            }
            Err(Failed::Gpu(error)) => {
                let message = error.to_string();
                not_filled(py, &message, error.torn, error.refused, error.cause, entries)
            }
        }
    }

    /// Delivers a version that was received into the tensors.
    fn deliver(
        &self,
        py: Python<'_>,
        inner: &Inner,
        pending: &Pending,
        manifest: &Manifest,
        snapshot: Snapshot,
    ) -> PyResult<Delivered> {
        let (id, select) = (snapshot.id(), &inner.select);
        if let Err(message) = select.check(id, manifest) {
            return Ok(Err(NotArrived::NothingSelected(message)));
        }
        let extra = pending
            .extra
            .matched(py, snapshot.wire_metadata(), Some(select), |name, value| {
                let is_received = manifest.tensor(name).is_some() && select.has(name);
                Ok(is_received.then(|| value.clone_ref(py)))
            })?;
        if let Err(error) = extra.check()
            && self.is_strict
            && select.patterns().is_none()
        {
            let message = format!("{error}; `out` has the tensors of {id} without all of its extra state");
            return Err(torn_by(py, &message, id, Kind::Target.raise(py, &error)));
        }
        self.finish(py, id, manifest, Some(select), &pending.names, extra)?;
        Ok(Ok(snapshot))
    }

    /// Stops waiting for the pending version. The tensors are returned when nothing writes to them.
    pub(crate) fn cancel_pending(&self) {
        drop(self.pending().take());
    }

    fn begin(&self, py: Python<'_>, inner: &Inner) -> PyResult<Pending> {
        let mut targets = self.targets(py)?;
        let names = self.name_match();
        let (on_host, on_gpu) = (targets.expected(py, names)?, targets.expected(py, names)?);
        let ByPlace { host, gpu } = sort_by_place(std::mem::take(&mut targets.tensors));
        if let (Some(host), Some(gpu)) = (host.first(), gpu.first()) {
            let message = format!(
                "{} of `out` lies on the host, and {} on {}: with atomic=False all tensors must lie in one place; use \
                 atomic=True",
                host.name,
                gpu.name,
                gpu.memory.device().name()
            );
            return Err(Kind::Target.raise(py, message));
        }
        let received = match gpu.is_empty() {
            true => begin_on_host(py, inner, host, on_host)?,
            false => begin_on_gpu(py, inner, gpu, on_gpu)?,
        };
        let Targets { values, entries, names, extra, .. } = targets;
        Ok(Pending { received, values, entries, names, extra })
    }

    /// The tensors that the mapping has now.
    fn targets(&self, py: Python<'_>) -> PyResult<Targets> {
        Targets::of(py, self)
    }

    fn name_match(&self) -> NameMatch {
        if self.is_strict { NameMatch::Exact } else { NameMatch::Common }
    }

    fn pending(&self) -> MutexGuard<'_, Option<Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn begin_on_host(
    py: Python<'_>,
    inner: &Inner,
    targets: Vec<Target<Foreign>>,
    mut buffers: Buffers<Exclusive>,
) -> PyResult<Received> {
    for Target { name, memory, .. } in targets {
        let exclusive = Exclusive::new(memory).ok_or_else(|| {
            let message = format!(
                "the elements of {name} in `out` do not lie side by side, so it cannot be received into directly: make it \
                 contiguous, or use atomic=True"
            );
            Kind::Target.raise(py, message)
        })?;
        buffers.insert(name, exclusive);
    }
    let open = Arc::clone(&inner.open);
    Ok(Box::pin(async move {
        let received = async {
            let mut turn = Arc::clone(&open).turn().await.ok_or(Failed::Closed)?;
            let subscription = &mut turn.value().ok_or(Failed::Closed)?.subscription;
            let filled = subscription.next_into(buffers).await;
            discard_refused(subscription, &filled);
            filled.map(FilledTensors::Host).map_err(Failed::Host)
        };
        open.unless_closed(received).await.unwrap_or(Err(Failed::Closed))
    }))
}

fn begin_on_gpu(
    py: Python<'_>,
    inner: &Inner,
    targets: Vec<Target<OnGpu>>,
    mut buffers: Buffers<DeviceBuffer>,
) -> PyResult<Received> {
    let mut fences = Fences::default();
    for Target { name, memory, .. } in targets {
        check_dense(py, &name, &memory)?;
        let buffer = py.detach(|| fences.lend(memory)).map_err(Kind::Other.because(py))?;
        buffers.insert(name, buffer);
    }
    let (open, returning) = (Arc::clone(&inner.open), fences.returning());
    Ok(Box::pin(async move {
        let received = async {
            let mut turn = Arc::clone(&open).turn().await.ok_or(Failed::Closed)?;
            let subscription = &mut turn.value().ok_or(Failed::Closed)?.subscription;
            let filled = subscription.next_into_device(buffers).await;
            discard_refused(subscription, &filled);
            filled.map_err(Failed::Gpu)
        };
        let filled = open.unless_closed(received).await.unwrap_or(Err(Failed::Closed))?;
        Ok(FilledTensors::Gpu(filled, returning))
    }))
}

/// Skips a version that does not fit the tensors, so that the next call continues with the next version.
fn discard_refused<B>(subscription: &mut client::Subscription, filled: &Result<Filled<B>, FillError<B>>) {
    if let Err(FillError { refused: Some(id), .. }) = filled {
        subscription.discard(id);
    }
}

fn give_back(py: Python<'_>, buffers: Buffers<Exclusive>) {
    buffers.into_iter().for_each(|(_, memory)| memory.give_back(py));
}

/// Whether the tensors may have been written.
fn may_have_written(received: &Result<FilledTensors, Failed>) -> bool {
    match received {
        Ok(_) | Err(Failed::Closed) => true,
        Err(Failed::Host(error)) => error.torn.is_some(),
        Err(Failed::Gpu(error)) => error.torn.is_some(),
    }
}

/// Tells the frameworks that the tensors may have been written.
fn notify_written(py: Python<'_>, values: &[Py<PyAny>]) -> PyResult<()> {
    let values: Vec<_> = values.iter().map(|value| value.bind(py)).collect();
    frameworks(py)?.call_method1("mark_written", (values,)).map(drop)
}

/// The result for a version that was not received. `torn` is a version of which the tensors hold some bytes, `refused`
/// one that does not fit.
fn not_filled(
    py: Python<'_>,
    message: &str,
    torn: Option<VersionId>,
    refused: Option<VersionId>,
    cause: FillCause,
    entries: &[String],
) -> PyResult<Delivered> {
    match (torn, refused, cause) {
        (None, _, FillCause::Subscription(error)) => Ok(Err(NotArrived::Subscription(error))),
        (None, Some(id), FillCause::Buffers(error)) => Ok(Err(unfit(&id, &error, entries))),
        (None, _, cause) => Err(of_fill(py, &cause)),
        (Some(id), _, cause) => Err(torn_by(py, message, &id, of_fill(py, &cause))),
    }
}

/// Why a version does not fit the tensors; `entries` are the names of values in `out` that are not tensors.
fn unfit(id: &VersionId, error: &BufferError, entries: &[String]) -> NotArrived {
    let more = match error {
        BufferError::OtherNames { missing, .. } => {
            let entries = entries.iter().filter(|entry| missing.iter().any(|name| **name == ***entry));
            let entries: String = entries.map(|entry| format!("; {entry} of `out` is no tensor")).collect();
            format!("{entries}; strict=False receives what both have")
        }
        _ => String::new(),
    };
    NotArrived::Unfit(format!(
        "{id} does not fit `out`: {error}{more}; nothing of it was written, and the next call goes on with the next \
         version"
    ))
}

fn torn_by(py: Python<'_>, message: &str, id: &VersionId, cause: PyErr) -> PyErr {
    let raised = Kind::Torn.raise(py, message);
    // The class has this attribute; setting it fails only when the interpreter is out of memory.
    let _ = raised.value(py).setattr("version", id.version.0);
    raised.set_cause(py, Some(cause));
    raised
}
