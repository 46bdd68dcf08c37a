//! Copying a complete version into a user's own tensors: all of them or none.

use super::{
    Out, Rest, notify_written,
    target::{ByPlace, Target, Targets, check_dense, sort_by_place},
    torn_by, unfit,
};
use crate::{
    errors::{Kind, of_device, of_fill},
    memory::{Foreign, OnGpu, Returning},
    runtime,
    select::Select,
    snapshot::Snapshot,
    subscription::{Arrived, Delivered, NotArrived},
    tensor::Tensor,
    tensors_in::{Fences, frameworks},
    wait::wait,
};
use pyo3::{exceptions::PyException, prelude::*};
use std::{collections::BTreeMap, fmt::Display, thread};
use tensor_relay_client::{self as client, BufferError, Buffers, FillCause, NameMatch};
use tensor_relay_device::{DeviceBuffer, Lock};
use tokio::runtime::Handle;

/// A copy of a complete version to the tensors: all of them or none.
pub(crate) struct Copying {
    snapshot: client::Snapshot,
    /// The version in host memory, if tensors on the host are copied from there and it lies on a GPU.
    on_host: Option<client::Snapshot>,
    delivered: Snapshot,
    host: Vec<Target<Foreign>>,
    rounds: Vec<Buffers<DeviceBuffer>>,
    returning: Returning,
    /// The functions with which frameworks copy on their own GPU.
    copiers: Vec<Py<PyAny>>,
    /// The Python objects of the tensors.
    values: Vec<Py<PyAny>>,
    rest: Rest,
}

/// The result of [`Copying::run`]: the error, and whether tensors may have been written before it.
pub(crate) type Copied = Result<(), (FillCause, bool)>;

/// Copies a complete version to the tensors of `out`, waits for the end of the copy, and sets extra state.
///
/// # Errors
/// Those of [`Copying::prepare`] and [`Copying::finish`]. An exception of a signal handler (Ctrl-C) is raised before
/// the first tensor is copied, or after the last one.
pub(super) fn to_all(
    py: Python<'_>,
    arrived: &Arrived,
    out: &Out,
    select: Option<&Select>,
) -> PyResult<Delivered> {
    let mut copying = match Copying::prepare(py, arrived, out, select)? {
        Ok(copying) => copying,
        Err(unfit) => return Ok(Err(unfit)),
    };
    if copying.needs_host_copy() {
        let on_host = wait(py, copying.snapshot.to_host())?;
        copying.on_host = Some(on_host.map_err(|error| of_device(py, &error))?);
    }
    let runtime = runtime::handle(py)?;
    let copied = py.detach(|| copying.run(runtime));
    copying.finish(py, copied).map(Ok)
}

impl Copying {
    /// Checks that the version fits the tensors, and lends them for the copy. The error in the result is that it does
    /// not fit.
    pub(super) fn prepare(
        py: Python<'_>,
        arrived: &Arrived,
        out: &Out,
        select: Option<&Select>,
    ) -> PyResult<Result<Self, NotArrived>> {
        let (snapshot, mut targets) = (&arrived.snapshot, out.targets(py)?);
        let of_version = Snapshot::with_tensors(arrived);
        let own_copy = |name: &str, _: &_| of_version.own_copy(py, name);
        let extra = targets.extra.matched(py, snapshot.metadata(), select, own_copy)?;
        let mut checked = check(py, snapshot, &targets, out.name_match())?;
        if out.is_strict && snapshot.described().count() == snapshot.manifest().tensors().len() {
            checked = checked.and_then(|()| extra.check());
        }
        if let Err(error) = checked {
            return Ok(Err(unfit(snapshot.id(), &error, &targets.entries)));
        }
        let rest = out.rest(snapshot.manifest(), select, &targets.names, extra);
        let all = std::mem::take(&mut targets.tensors).into_iter();
        let (received, missing): (Vec<_>, Vec<_>) =
            all.partition(|target| is_selected(snapshot, target.name.as_str()));
        missing.into_iter().for_each(|target| target.memory.give_back(py));
        let ByPlace { host, gpu } = sort_by_place(received);
        let (copiers, gpu) = framework_copiers(py, &of_version, gpu)?;
        let (rounds, returning) = divide_into_rounds(py, snapshot, gpu)?;
        Ok(Ok(Self {
            snapshot: snapshot.clone(),
            on_host: None,
            delivered: Snapshot::without_tensors(snapshot, arrived.gap.as_deref()),
            host,
            rounds,
            returning,
            copiers: copiers.into_iter().map(Bound::unbind).collect(),
            values: targets.values,
            rest,
        }))
    }

    fn needs_host_copy(&self) -> bool {
        self.snapshot.is_on_device() && !self.host.is_empty() && self.on_host.is_none()
    }

    /// Copies all but what the frameworks copy themselves. Without the GIL.
    pub(crate) fn run(&mut self, runtime: &Handle) -> Copied {
        let on_host = match self.on_host.take() {
            Some(on_host) => on_host,
            None if self.needs_host_copy() => {
                let on_host = runtime.block_on(self.snapshot.to_host());
                on_host.map_err(|error| (FillCause::Device(error), false))?
            }
            None => self.snapshot.clone(),
        };
        // From here on, only a failing device or framework ends the copy.
        let rounds = std::mem::take(&mut self.rounds);
        let copied = rounds
            .iter()
            .try_for_each(|buffers| runtime.block_on(self.snapshot.copy_into_device(buffers)));
        copied.map_err(|cause| {
            let is_torn = matches!(cause, FillCause::Device(_));
            (cause, is_torn)
        })?;
        copy_to_host(&on_host, &mut self.host);
        Ok(())
    }

    /// Lets the frameworks copy, and returns the tensors. To be called on the thread whose current streams are to copy.
    ///
    /// # Errors
    /// `TornError` if a GPU, or a framework that copies on it, failed during the copy, or a module's `set_extra_state`
    /// after it; an exception of a signal handler, after the last tensor was copied.
    pub(crate) fn finish(self, py: Python<'_>, copied: Copied) -> PyResult<Snapshot> {
        let Self { snapshot, delivered, host, returning, copiers, values, rest, .. } = self;
        host.into_iter().for_each(|target| target.memory.give_back(py));
        let torn = |why: &dyn Display, cause: PyErr| {
            let message = format!("{why}; tensors of `out` are torn: some hold bytes of {}", snapshot.id());
            torn_by(py, &message, snapshot.id(), Some(cause))
        };
        let finished = match copied {
            Ok(()) => {
                returning.give_back(py);
                let mut interrupted = None;
                let copied = copiers.iter().try_for_each(|copy| {
                    let copied = call_despite_interrupts(copy.bind(py), &mut interrupted);
                    copied.map_err(|error| torn(&error.value(py).to_string(), error))
                });
                let completed = copied.and_then(|()| rest.complete(py, snapshot.id()));
                completed.and_then(|()| interrupted.map_or(Ok(()), Err))
            }
            Err((cause, true)) => Err(torn(&cause.to_string(), of_fill(py, &cause))),
            Err((cause, false)) => return Err(of_fill(py, &cause)),
        };
        notify_written(py, &values)?;
        finished.map(|()| delivered)
    }
}

/// The number of times that a copy interrupted by Ctrl-C is repeated.
const INTERRUPTS_MAX: u32 = 8;

/// Calls a framework's copy of one tensor, and repeats it when Ctrl-C interrupts it: copying twice does no harm. The
/// exception is stored in `interrupted`, to be raised after all copies.
fn call_despite_interrupts(copy: &Bound<'_, PyAny>, interrupted: &mut Option<PyErr>) -> PyResult<()> {
    for _ in 0..INTERRUPTS_MAX {
        match copy.call0() {
            Err(error) if !error.is_instance_of::<PyException>(copy.py()) => *interrupted = Some(error),
            copied => return copied.map(drop),
        }
    }
    copy.call0().map(drop)
}

/// Whether the version fits the tensors.
fn check(
    py: Python<'_>,
    snapshot: &client::Snapshot,
    targets: &Targets,
    names: NameMatch,
) -> PyResult<Result<(), BufferError>> {
    let mut buffers = targets.expected(py, names)?;
    for Target { name, memory, .. } in &targets.tensors {
        buffers.insert(name.clone(), memory.len() as u64);
    }
    // Extra state has whatever size the version gives it.
    for tensor in targets.extra.names().filter_map(|name| snapshot.manifest().tensor(name)) {
        if is_selected(snapshot, tensor.name.as_str()) {
            buffers.insert(tensor.name.clone(), tensor.byte_len());
        }
    }
    Ok(buffers.check(snapshot, |len_bytes| *len_bytes))
}

fn is_selected(snapshot: &client::Snapshot, name: &str) -> bool {
    snapshot.volatile_tensor(name).is_some() || snapshot.device_tensor(name).is_some()
}

/// The size from which a copy is worth the start of further threads.
const PARALLEL_BYTES: usize = 8 << 20;

/// The maximum number of copying threads. One does not use the whole memory bandwidth, and more than this add little.
const COPY_THREADS_MAX: usize = 4;

/// Copies to the tensors on the host, on several threads that copy one tensor at a time. All tensors fit, and no two
/// share memory.
fn copy_to_host(snapshot: &client::Snapshot, targets: &mut [Target<Foreign>]) {
    let bytes: usize = targets.iter().map(|target| target.memory.len()).sum();
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let threads = if bytes < PARALLEL_BYTES { 1 } else { processors.min(COPY_THREADS_MAX) };
    let queue = Lock::new(targets.iter_mut());
    let next = || queue.lock().next();
    let copy = || {
        while let Some(Target { name, memory, .. }) = next() {
            if let Some(bytes) = snapshot.volatile_tensor(name.as_str()) {
                memory.copy_from(&bytes);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // If no thread can be started, this one does all the work.
            let _ = thread::Builder::new().name("relay-copy".into()).spawn_scoped(scope, copy);
        }
        copy();
    });
}

/// Copies by frameworks, and the tensors that cannot be copied in this way.
type Copiers<'py> = (Vec<Bound<'py, PyAny>>, Vec<Target<OnGpu>>);

/// The functions with which the tensors' own frameworks copy on the GPU where the version lies; and the other tensors.
fn framework_copiers<'py>(
    py: Python<'py>,
    snapshot: &Snapshot,
    targets: Vec<Target<OnGpu>>,
) -> PyResult<Copiers<'py>> {
    let (mut copiers, mut others) = (vec![], vec![]);
    let copier = frameworks(py)?.getattr("copier")?;
    for target in targets {
        let tensor = snapshot.tensor(target.name.as_str()).filter(Tensor::is_on_gpu);
        let copy = match tensor {
            Some(tensor) => copier.call1((target.value.bind(py), tensor))?,
            None => py.None().into_bound(py),
        };
        match copy.is_none() {
            true => others.push(target),
            false => {
                target.memory.give_back(py);
                copiers.push(copy);
            }
        }
    }
    Ok((copiers, others))
}

/// The tensors on GPUs, divided into sets that one copy each can write: a set has tensors of one GPU, and at most one
/// of several tensors that are tied in the version.
fn divide_into_rounds(
    py: Python<'_>,
    snapshot: &client::Snapshot,
    targets: Vec<Target<OnGpu>>,
) -> PyResult<(Vec<Buffers<DeviceBuffer>>, Returning)> {
    let mut fences = Fences::default();
    let mut next_round: BTreeMap<(String, u64), usize> = BTreeMap::new();
    let mut rounds: BTreeMap<(String, usize), Buffers<DeviceBuffer>> = BTreeMap::new();
    for Target { name, memory, .. } in targets {
        check_dense(py, &name, &memory)?;
        let device = memory.device().name().to_owned();
        let start = snapshot
            .manifest()
            .tensor(name.as_str())
            .map_or(0, tensor_relay_client::Tensor::offset);
        if memory.len() == 0 {
            memory.give_back(py);
            continue;
        }
        let round = next_round.entry((device.clone(), start)).or_default();
        let buffer = py.detach(|| fences.lend(memory)).map_err(Kind::Other.because(py))?;
        rounds.entry((device, *round)).or_default().insert(name, buffer);
        *round += 1;
    }
    Ok((rounds.into_values().collect(), fences.returning()))
}
