//! `out=`: a user's own tensors, which versions are received into.

use crate::{
    entries,
    errors::{Kind, of_device, of_fill},
    gpu::Gpus,
    memory::{Exclusive, Foreign, Lent, OnGpu},
    runtime,
    snapshot::Snapshot,
    subscription::{Arrived, Inner, NotArrived},
    tensor::Tensor,
    tensors_in::{Fences, frameworks, lend_to_write, text_of},
    wait::{at_most, wait},
};
use pyo3::prelude::*;
use std::{
    collections::{BTreeMap, HashSet},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tensor_relay_client::{self as client, Buffers, FillCause, FillError, Filled, Glob, Shape, TensorName};
use tensor_relay_device::DeviceBuffer;

/// A mapping of tensors, and how they are received into.
pub(crate) struct Out {
    mapping: Py<PyAny>,
    is_atomic: bool,
    gpus: Arc<Gpus>,
    /// A version that is received right into the tensors, when nobody waits for it any more: after a timeout, or Ctrl-C.
    /// The tensors stay lent until then.
    pending: Arc<Mutex<Option<Pending>>>,
}

type Pending = Pin<Box<dyn Future<Output = Result<Got, Failed>> + Send>>;

/// A version in the tensors, which are on the host or on a GPU.
enum Got {
    Host(Filled<Exclusive>),
    Gpu(Filled<DeviceBuffer>),
}

/// Why no version came into the tensors.
enum Failed {
    Closed,
    Host(FillError<Exclusive>),
    Gpu(FillError<DeviceBuffer>),
}

/// One of the tensors.
struct Target<M = Lent> {
    name: TensorName,
    memory: M,
    /// The tensor itself.
    value: Py<PyAny>,
}

/// The tensors by where they are.
struct Sorted {
    host: Vec<Target<Foreign>>,
    gpu: Vec<Target<OnGpu>>,
}

impl Out {
    pub(crate) fn new(mapping: Py<PyAny>, is_atomic: bool, gpus: Arc<Gpus>) -> Self {
        Self { mapping, is_atomic, gpus, pending: Arc::default() }
    }

    pub(crate) fn is_atomic(&self) -> bool {
        self.is_atomic
    }

    pub(crate) fn clone_ref(&self, py: Python<'_>) -> Self {
        Self {
            mapping: self.mapping.clone_ref(py),
            is_atomic: self.is_atomic,
            gpus: Arc::clone(&self.gpus),
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
    /// `TargetError` names the first that is not of the version; `TornError` where a GPU fails in the middle.
    pub(crate) fn copy(&self, py: Python<'_>, arrived: &Arrived) -> PyResult<Snapshot> {
        let snapshot = &arrived.snapshot;
        let targets = self.targets(py)?;
        targets.iter().try_for_each(|target| check(py, snapshot, target))?;
        let Sorted { host, gpu } = sorted(targets);
        let (copiers, gpu) = copiers(py, &Snapshot::whole(arrived), gpu)?;
        let rounds = rounds(py, snapshot, gpu)?;
        let on_host = match snapshot.is_on_device() && !host.is_empty() {
            true => wait(py, snapshot.to_host())?.map_err(|error| of_device(py, &error))?,
            false => snapshot.clone(),
        };
        // From here on nothing ends it but a device.
        let runtime = runtime::handle(py)?;
        let copied = py.detach(|| {
            rounds
                .iter()
                .try_for_each(|buffers| runtime.block_on(snapshot.copy_into_device(buffers)))
        });
        match copied {
            Ok(()) => copiers.iter().try_for_each(|copy| copy.call0().map(drop))?,
            Err(FillCause::Device(error)) => {
                let message =
                    format!("{error}; tensors of `out` are torn: some hold bytes of {}", snapshot.id());
                return Err(torn_by(py, &message, snapshot.id(), &FillCause::Device(error)));
            }
            Err(cause) => return Err(of_fill(py, &cause)),
        }
        copy_to_host(py, &on_host, host);
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
            Ok(Got::Host(filled)) => {
                let snapshot = Snapshot::filled(&filled);
                give_back(py, filled.into_buffers());
                Ok(Ok(snapshot))
            }
            Ok(Got::Gpu(filled)) => Ok(Ok(Snapshot::filled(&filled))),
            Err(Failed::Closed) => Ok(Err(NotArrived::Closed)),
            Err(Failed::Host(error)) => {
                let message = error.to_string();
                let FillError { cause, torn, buffers, .. } = error;
                give_back(py, buffers);
                not_filled(py, &message, torn, cause)
            }
            Err(Failed::Gpu(error)) => not_filled(py, &error.to_string(), error.torn, error.cause),
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
        let Sorted { host, gpu } = sorted(self.targets(py)?);
        if let (Some(host), Some(gpu)) = (host.first(), gpu.first()) {
            let message = format!(
                "{} of `out` lies on the host, and {} on {}: right into them, a version is received in one place; take \
                 atomic=True",
                host.name,
                gpu.name,
                gpu.memory.device().name()
            );
            return Err(Kind::Target.raise(py, message));
        }
        match gpu.is_empty() {
            true => begin_on_host(py, inner, host),
            false => begin_on_gpu(py, inner, gpu),
        }
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
            let memory = lend_to_write(&value, &self.gpus).map_err(|error| refuse(&error.value(py)))?;
            if !memory.is_writable() {
                return Err(refuse(&"it is read-only"));
            }
            if memory.identity().is_none_or(|identity| known.insert(identity)) {
                targets.push(Target { name, memory, value: value.unbind() });
            }
        }
        Ok(targets)
    }

    fn pending(&self) -> MutexGuard<'_, Option<Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn sorted(targets: Vec<Target>) -> Sorted {
    let mut sorted = Sorted { host: vec![], gpu: vec![] };
    for Target { name, memory, value } in targets {
        match memory {
            Lent::Host(memory) => sorted.host.push(Target { name, memory, value }),
            Lent::Gpu(memory) => sorted.gpu.push(Target { name, memory, value }),
        }
    }
    sorted
}

/// Refuses a tensor that is not one of the version.
fn check(py: Python<'_>, snapshot: &client::Snapshot, Target { name, memory, .. }: &Target) -> PyResult<()> {
    let of = snapshot.manifest().tensor(name.as_str());
    let is_here = snapshot.tensor(name.as_str()).is_some() || snapshot.device_tensor(name.as_str()).is_some();
    let Some(tensor) = of.filter(|_| is_here) else {
        let message =
            format!("`out` has a tensor {name}, and {} has none, or it is not selected", snapshot.id());
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
    Ok(())
}

/// Copies what is on the host. Every tensor was found to fit.
fn copy_to_host(py: Python<'_>, snapshot: &client::Snapshot, targets: Vec<Target<Foreign>>) {
    let mut targets = targets;
    py.detach(|| {
        for Target { name, memory, .. } in &mut targets {
            if let Some(bytes) = snapshot.tensor(name.as_str()) {
                memory.copy_from(&bytes);
            }
        }
    });
    targets.into_iter().for_each(|target| target.memory.give_back(py));
}

/// What copies to those tensors whose own framework can do it on the GPU where the version has landed; and the others.
fn copiers<'py>(
    py: Python<'py>,
    snapshot: &Snapshot,
    targets: Vec<Target<OnGpu>>,
) -> PyResult<(Vec<Bound<'py, PyAny>>, Vec<Target<OnGpu>>)> {
    let (mut copiers, mut others) = (vec![], vec![]);
    let copier = frameworks(py)?.getattr("copier")?;
    for target in targets {
        let tensor = snapshot.tensor(target.name.as_str()).filter(Tensor::is_on_gpu);
        let found = match tensor {
            Some(tensor) => copier.call1((target.value.bind(py), tensor))?,
            None => py.None().into_bound(py),
        };
        match found.is_none() {
            true => others.push(target),
            false => copiers.push(found),
        }
    }
    Ok((copiers, others))
}

/// The tensors on GPUs as they can be copied to, some at a time: those of one GPU, and of several that are tied in the
/// version, one.
fn rounds(
    py: Python<'_>,
    snapshot: &client::Snapshot,
    targets: Vec<Target<OnGpu>>,
) -> PyResult<Vec<Buffers<DeviceBuffer>>> {
    let mut fences = Fences::default();
    let mut seen: BTreeMap<(String, u64), usize> = BTreeMap::new();
    let mut rounds: BTreeMap<(String, usize), Buffers<DeviceBuffer>> = BTreeMap::new();
    for Target { name, memory, .. } in targets {
        check_dense(py, &name, &memory)?;
        let device = memory.device().name().to_owned();
        let start = snapshot
            .manifest()
            .tensor(name.as_str())
            .map_or(0, |tensor| tensor.range().start);
        let round = match memory.len() {
            0 => continue,
            _ => seen.entry((device.clone(), start)).or_default(),
        };
        let buffer = py.detach(|| fences.lend(memory)).map_err(Kind::Other.because(py))?;
        rounds.entry((device, *round)).or_default().insert(name, buffer);
        *round += 1;
    }
    Ok(rounds.into_values().collect())
}

fn check_dense(py: Python<'_>, name: &TensorName, memory: &OnGpu) -> PyResult<()> {
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

fn begin_on_host(py: Python<'_>, inner: &Inner, targets: Vec<Target<Foreign>>) -> PyResult<Pending> {
    let mut buffers = Buffers::new();
    for Target { name, memory, .. } in targets {
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
        subscription.next_into(buffers).await.map(Got::Host).map_err(Failed::Host)
    }))
}

fn begin_on_gpu(py: Python<'_>, inner: &Inner, targets: Vec<Target<OnGpu>>) -> PyResult<Pending> {
    let (mut buffers, mut fences) = (Buffers::new(), Fences::default());
    for Target { name, memory, .. } in targets {
        check_dense(py, &name, &memory)?;
        let shape = Shape::new(memory.shape()).map_err(Kind::Target.because(py))?;
        buffers.expect(name.clone(), memory.dtype(), shape);
        let buffer = py.detach(|| fences.lend(memory)).map_err(Kind::Other.because(py))?;
        buffers.insert(name, buffer);
    }
    let subscription = Arc::clone(&inner.subscription);
    Ok(Box::pin(async move {
        let mut subscription = subscription.lock_owned().await;
        let subscription = subscription.as_mut().ok_or(Failed::Closed)?;
        subscription.next_into_device(buffers).await.map(Got::Gpu).map_err(Failed::Gpu)
    }))
}

fn give_back(py: Python<'_>, buffers: Buffers<Exclusive>) {
    buffers.into_iter().for_each(|(_, memory)| memory.give_back(py));
}

/// Says why, and whether the tensors are torn.
fn not_filled(
    py: Python<'_>,
    message: &str,
    torn: Option<client::VersionId>,
    cause: FillCause,
) -> PyResult<Result<Snapshot, NotArrived>> {
    match (torn, cause) {
        (None, FillCause::Subscription(error)) => Ok(Err(NotArrived::Subscription(error))),
        (None, cause) => Err(of_fill(py, &cause)),
        (Some(id), cause) => Err(torn_by(py, message, &id, &cause)),
    }
}

fn torn_by(py: Python<'_>, message: &str, id: &client::VersionId, cause: &FillCause) -> PyErr {
    let raised = Kind::Torn.raise(py, message);
    // The class has this attribute; an interpreter without memory for it has worse to tell.
    let _ = raised.value(py).setattr("version", id.version.0);
    raised.set_cause(py, Some(of_fill(py, cause)));
    raised
}
