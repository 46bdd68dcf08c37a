//! Copying whole versions into a user's own tensors: all of them or none.

use super::{
    target::{Sorted, Target, Targets, check_dense, sorted},
    tell_written, torn_by, unfit,
};
use crate::{
    errors::{Kind, of_device, of_fill},
    memory::{Foreign, OnGpu, Returning},
    runtime,
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

/// Copies a whole version to the tensors, all of them or none.
///
/// # Errors
/// `TornError` where a GPU, or a framework that copies within it,
/// fails in the middle; and what a signal handler raised meanwhile (Ctrl-C), once all are copied.
pub(super) fn to_all(
    py: Python<'_>,
    arrived: &Arrived,
    mut targets: Targets,
    names: NameMatch,
) -> PyResult<Delivered> {
    let snapshot = &arrived.snapshot;
    if let Err(error) = check(py, snapshot, &targets, names)? {
        return Ok(Err(unfit(snapshot.id(), &error, &targets.entries)));
    }
    let all = std::mem::take(&mut targets.tensors).into_iter();
    let (wanted, others): (Vec<_>, Vec<_>) = all.partition(|target| is_here(snapshot, target));
    others.into_iter().for_each(|target| target.memory.give_back(py));
    let Sorted { host, gpu } = sorted(wanted);
    let (copiers, gpu) = copiers(py, &Snapshot::whole(arrived), gpu)?;
    let (rounds, returning) = rounds(py, snapshot, gpu)?;
    let on_host = match snapshot.is_on_device() && !host.is_empty() {
        true => wait(py, snapshot.to_host())?.map_err(|error| of_device(py, &error))?,
        false => snapshot.clone(),
    };
    // From here on nothing ends it but a device, or a framework that refuses.
    let copied = write(py, snapshot, rounds, returning, &copiers);
    if copied.is_ok() {
        copy_to_host(py, &on_host, host);
    }
    tell_written(py, &targets.values)?;
    match copied? {
        Some(interrupt) => Err(interrupt),
        None => Ok(Ok(Snapshot::without_tensors(snapshot, arrived.gap.as_deref()))),
    }
}

/// Copies to the GPUs. Gives what a signal handler raised meanwhile.
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
        let copied = call_through(copy, &mut interrupted);
        copied.map_err(|error| torn(&error.value(py).to_string(), error))?;
    }
    Ok(interrupted)
}

/// The number of times that a copy ended by Ctrl-C is retried.
const INTERRUPTS_MAX: u32 = 8;

/// Calls what copies a tensor, as often as it takes: Ctrl-C raises in the middle of it, wherever that is, and a copy that
/// is made twice is made once. What was raised is kept for later.
fn call_through(copy: &Bound<'_, PyAny>, interrupted: &mut Option<PyErr>) -> PyResult<()> {
    for _ in 0..INTERRUPTS_MAX {
        match copy.call0() {
            Err(error) if !error.is_instance_of::<PyException>(copy.py()) => *interrupted = Some(error),
            copied => return copied.map(drop),
        }
    }
    copy.call0().map(drop)
}

/// Whether the tensors are those of the version.
fn check(
    py: Python<'_>,
    snapshot: &client::Snapshot,
    targets: &Targets,
    names: NameMatch,
) -> PyResult<Result<(), BufferError>> {
    let mut buffers = targets.expecting(py, names)?;
    for Target { name, memory, .. } in &targets.tensors {
        buffers.insert(name.clone(), memory.len() as u64);
    }
    Ok(buffers.check(snapshot, |len_bytes| *len_bytes))
}

fn is_here(snapshot: &client::Snapshot, Target { name, .. }: &Target) -> bool {
    snapshot.tensor(name.as_str()).is_some() || snapshot.device_tensor(name.as_str()).is_some()
}

/// From how many bytes on a second thread is worth its start.
const PARALLEL_BYTES: usize = 8 << 20;

/// One processor does not fill the memory's bandwidth, and more than these add little.
const COPY_THREADS_MAX: usize = 4;

/// Copies what is on the host, a tensor at a time on each of several threads. Every tensor was found to fit, and no two share
/// memory.
fn copy_to_host(py: Python<'_>, snapshot: &client::Snapshot, mut targets: Vec<Target<Foreign>>) {
    let bytes: usize = targets.iter().map(|target| target.memory.len()).sum();
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let threads = if bytes < PARALLEL_BYTES { 1 } else { processors.min(COPY_THREADS_MAX) };
    py.detach(|| {
        let waiting = Mutex::new(targets.iter_mut());
        let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
        let copy = || {
            while let Some(Target { name, memory, .. }) = next() {
                if let Some(bytes) = snapshot.tensor(name.as_str()) {
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

/// The copies within GPUs, and the tensors that cannot be copied so.
type Copiers<'py> = (Vec<Bound<'py, PyAny>>, Vec<Target<OnGpu>>);

/// The copies by the tensors' own framework on the GPU where the version has landed; and the other tensors.
fn copiers<'py>(py: Python<'py>, snapshot: &Snapshot, targets: Vec<Target<OnGpu>>) -> PyResult<Copiers<'py>> {
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
            false => {
                target.memory.give_back(py);
                copiers.push(found);
            }
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
) -> PyResult<(Vec<Buffers<DeviceBuffer>>, Returning)> {
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
        if memory.len() == 0 {
            memory.give_back(py);
            continue;
        }
        let round = seen.entry((device.clone(), start)).or_default();
        let buffer = py.detach(|| fences.lend(memory)).map_err(Kind::Other.because(py))?;
        rounds.entry((device, *round)).or_default().insert(name, buffer);
        *round += 1;
    }
    Ok((rounds.into_values().collect(), fences.returning()))
}
