//! Copying a complete version into a user's own tensors: all of them or none.

use super::{
    Out, notify_written,
    target::{ByPlace, Target, Targets, check_dense, sort_by_place},
    torn_by, unfit,
};
use crate::{
    errors::{Kind, of_device, of_fill},
    memory::{Foreign, OnGpu, Returning},
    runtime,
    select::Select,
    snapshot::Snapshot,
    subscription::{Arrived, Delivered},
    tensor::Tensor,
    tensors_in::{Fences, frameworks},
    wait::wait,
};
use pyo3::{exceptions::PyException, prelude::*};
use std::{
    collections::BTreeMap,
    fmt::Display,
    sync::{Mutex, PoisonError},
    thread,
};
use tensor_relay_client::{self as client, BufferError, Buffers, FillCause, NameMatch};
use tensor_relay_device::DeviceBuffer;

/// Copies a complete version to the tensors of `out`, all of them or none, and then sets extra state.
///
/// # Errors
/// `TornError` if a GPU, or a framework that copies on it, fails during the copy, or a module's `set_extra_state` after
/// it. An exception of a signal handler
/// (Ctrl-C) is raised before the first tensor is copied, or after the last one. Other exceptions are raised before the
/// first.
pub(super) fn to_all(
    py: Python<'_>,
    arrived: &Arrived,
    out: &Out,
    select: Option<&Select>,
) -> PyResult<Delivered> {
    let (snapshot, mut targets) = (&arrived.snapshot, out.targets(py)?);
    let of_version = Snapshot::with_tensors(arrived);
    let extra = targets
        .extra
        .matched(py, snapshot.metadata(), select, |name, _| of_version.own_copy(py, name));
    let extra = extra?;
    let mut checked = check(py, snapshot, &targets, out.name_match())?;
    if out.is_strict && snapshot.described().count() == snapshot.manifest().tensors().len() {
        checked = checked.and(extra.check());
    }
    if let Err(error) = checked {
        return Ok(Err(unfit(snapshot.id(), &error, &targets.entries)));
    }
    let all = std::mem::take(&mut targets.tensors).into_iter();
    let (received, missing): (Vec<_>, Vec<_>) =
        all.partition(|target| is_selected(snapshot, target.name.as_str()));
    missing.into_iter().for_each(|target| target.memory.give_back(py));
    let ByPlace { host, gpu } = sort_by_place(received);
    let (copiers, gpu) = framework_copiers(py, &of_version, gpu)?;
    let (rounds, returning) = divide_into_rounds(py, snapshot, gpu)?;
    let on_host = match snapshot.is_on_device() && !host.is_empty() {
        true => wait(py, snapshot.to_host())?.map_err(|error| of_device(py, &error))?,
        false => snapshot.clone(),
    };
    // From here on, only a failing device or framework ends the copy.
    let copied = write(py, snapshot, rounds, returning, &copiers);
    if copied.is_ok() {
        copy_to_host(py, &on_host, host);
    }
    notify_written(py, &targets.values)?;
    let interrupted = copied?;
    out.finish(py, snapshot.id(), snapshot.manifest(), select, &targets.names, extra)?;
    match interrupted {
        Some(interrupt) => Err(interrupt),
        None => Ok(Ok(Snapshot::without_tensors(snapshot, arrived.gap.as_deref()))),
    }
}

/// Copies to the GPUs. Returns an exception that a signal handler raised meanwhile.
fn write(
    py: Python<'_>,
    snapshot: &client::Snapshot,
    rounds: Vec<Buffers<DeviceBuffer>>,
    returning: Returning,
    copiers: &[Bound<'_, PyAny>],
) -> PyResult<Option<PyErr>> {
    let runtime = runtime::handle(py)?;
    let copied = py.detach(|| {
        rounds
            .iter()
            .try_for_each(|buffers| runtime.block_on(snapshot.copy_into_device(buffers)))
    });
    drop(rounds);
    let torn = |why: &dyn Display, cause: PyErr| {
        let message = format!("{why}; tensors of `out` are torn: some hold bytes of {}", snapshot.id());
        torn_by(py, &message, snapshot.id(), cause)
    };
    match copied {
        Ok(()) => returning.give_back(py),
        Err(FillCause::Device(error)) => {
            return Err(torn(&error.to_string(), of_fill(py, &FillCause::Device(error))));
        }
        Err(cause) => return Err(of_fill(py, &cause)),
    }
    let mut interrupted = None;
    for copy in copiers {
        let copied = call_despite_interrupts(copy, &mut interrupted);
        copied.map_err(|error| torn(&error.value(py).to_string(), error))?;
    }
    Ok(interrupted)
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
fn copy_to_host(py: Python<'_>, snapshot: &client::Snapshot, mut targets: Vec<Target<Foreign>>) {
    let bytes: usize = targets.iter().map(|target| target.memory.len()).sum();
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let threads = if bytes < PARALLEL_BYTES { 1 } else { processors.min(COPY_THREADS_MAX) };
    py.detach(|| {
        let queue = Mutex::new(targets.iter_mut());
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
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
    });
    targets.into_iter().for_each(|target| target.memory.give_back(py));
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
            .map_or(0, |tensor| tensor.range().start);
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
