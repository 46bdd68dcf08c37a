//! `out=`: receiving versions into a user's own tensors.

mod background;
mod copy;
mod extra_state;
mod left_out;
mod target;

pub(crate) use background::copying_in_background;
use copy::Copying;

use crate::{
    closable::{Closable, ExclusiveUse},
    errors::{Kind, of_fill},
    gpu::Gpus,
    memory::{Exclusive, Foreign, OnGpu, Returning},
    runtime,
    select::Select,
    snapshot::Snapshot,
    subscription::{Arrived, Delivered, Inner, NotArrived, Open},
    tensors_in::{Fences, frameworks},
    wait::{at_most, wait},
};
use extra_state::{ExtraState, Matched};
use left_out::LeftOut;
use pyo3::prelude::*;
use std::{
    collections::BTreeSet,
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};
use target::{ByPlace, Target, Targets, check_dense, sort_by_place};
use tensor_relay_client::{
    self as client, BufferError, Buffers, FillCause, FillError, Filled, Glob, Manifest, NameMatch, TensorBox,
    TensorName, VersionId,
};
use tensor_relay_device::{DeviceBuffer, Lock};
use tokio::sync::oneshot;

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
    /// The version of which the tensors hold a part, since a call received it directly and failed.
    torn: Lock<Option<VersionId>>,
    /// The version that the tensors hold whole, if the call that received it directly was interrupted.
    undelivered: Lock<Option<Snapshot>>,
}

/// A version that is being received directly into the tensors.
struct Receiving {
    received: Pin<Box<dyn Future<Output = Received> + Send>>,
    /// Dropped to end the wait.
    stop: oneshot::Sender<()>,
    /// The Python objects of the tensors.
    values: Vec<Py<PyAny>>,
    /// The names of values in `out` that are not tensors.
    entries: Vec<String>,
    /// The names of the tensors, except extra state.
    names: BTreeSet<String>,
    extra: ExtraState,
}

/// The result of receiving into tensors on the host or on a GPU.
enum Received {
    Host(Result<Filled<Exclusive>, FillError<Exclusive>>),
    Gpu(Result<Filled<DeviceBuffer>, FillError<DeviceBuffer>>, Returning),
    /// The wait ended before the tensors were lent.
    NotLent,
}

/// What remains once the tensors of a version are received: its extra state, and the log of what was left out.
struct Rest {
    log: Arc<LeftOut>,
    left_out: Option<BufferError>,
    extra: Matched,
}

impl Rest {
    /// Sets the extra state, and logs what was left out.
    ///
    /// # Errors
    /// `TornError` if a module refuses its extra state.
    fn complete(self, py: Python<'_>, id: &VersionId) -> PyResult<()> {
        self.log.log(id, self.left_out);
        self.extra.set(py).map_err(|error| {
            let why = error.value(py).to_string();
            let message = format!("{why}; `out` has the tensors of {id} without all of its extra state");
            torn_by(py, &message, id, Some(error))
        })
    }
}

/// Why no version was received into the tensors.
struct Unfilled {
    cause: FillCause,
    /// A version of which the tensors hold some bytes.
    torn: Option<VersionId>,
    /// A version that does not fit.
    refused: Option<VersionId>,
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
        let (left_out, torn, undelivered) = (Arc::default(), Lock::default(), Lock::default());
        Self { mapping, is_atomic, is_strict, rename, left_out, gpus, torn, undelivered }
    }

    /// Whether versions may lack its tensors (`strict=False`).
    pub(crate) fn takes_what_is_there(&self) -> bool {
        !self.is_strict
    }

    pub(crate) fn is_atomic(&self) -> bool {
        self.is_atomic
    }

    /// The selection to subscribe to: all tensors if the version must match exactly, else those with names of `out`, so
    /// that few others are sent. And the boxes of those of which `out` holds a part.
    ///
    /// # Errors
    /// `TargetError` for tensors that cannot be received into.
    pub(crate) fn selection(&self, py: Python<'_>) -> PyResult<(Vec<Glob>, Vec<TensorBox>)> {
        let targets = self.targets(py)?;
        let mut names = targets.expected(py, self.name_match())?;
        for Target { name, .. } in &targets.tensors {
            names.insert(name.clone(), ());
        }
        for name in targets.extra.names() {
            names.insert(TensorName::new(name).map_err(Kind::Request.because(py))?, ());
        }
        targets.give_back(py);
        Ok((if self.is_strict { vec![] } else { names.selection() }, names.boxes()))
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

    /// What remains to be done once the tensors of a version are received.
    fn rest(
        &self,
        manifest: &Manifest,
        select: Option<&Select>,
        names: &BTreeSet<String>,
        extra: Matched,
    ) -> Rest {
        let left_out = match self.is_strict {
            true => None,
            false => left_out::of(manifest, select, names, &extra),
        };
        Rest { log: Arc::clone(&self.left_out), left_out, extra }
    }

    /// Begins such a copy.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub(crate) fn prepare_copy(
        &self,
        py: Python<'_>,
        arrived: &Arrived,
        select: Option<&Select>,
    ) -> PyResult<Result<Copying, NotArrived>> {
        Copying::prepare(py, arrived, self, select)
    }

    /// Receives the next version directly into the tensors. Nothing writes to them once this returns. If the call
    /// before was interrupted after it had received a version whole, this delivers that version.
    ///
    /// # Errors
    /// `TornError` while the tensors hold a part of a version; `TargetError` for tensors that cannot be received into;
    /// an exception of a signal handler, caused by `TornError` if that is the case, and with a note that names a version
    /// that was received whole.
    pub(crate) fn receive_in_place(
        &self,
        py: Python<'_>,
        inner: &Inner,
        timeout: Option<Duration>,
    ) -> PyResult<Delivered> {
        if !inner.open.is_closed()
            && let Some(snapshot) = self.undelivered.lock().take()
        {
            return Ok(Ok(snapshot));
        }
        let Receiving { mut received, stop, values, entries, names, extra } = self.begin(py, inner)?;
        let waited = wait(py, at_most(timeout, received.as_mut()));
        let (received, interrupt) = match waited {
            Ok(Some(received)) => (received, None),
            unfinished => {
                drop(stop);
                let runtime = runtime::handle(py)?;
                (py.detach(|| runtime.block_on(received)), unfinished.err())
            }
        };
        let arrival = received.give_back(py);
        let is_unchanged = arrival.as_ref().is_err_and(|unfilled| unfilled.torn.is_none());
        if !is_unchanged {
            notify_written(py, &values)?;
        }
        let unfilled = match arrival {
            Ok(arrival) => {
                let delivered = self.deliver(py, inner, arrival, &names, &extra);
                if !matches!(delivered, Ok(Err(_))) {
                    *self.torn.lock() = None;
                }
                return match (interrupt, delivered) {
                    (None, delivered) => delivered,
                    (Some(interrupt), delivered) => {
                        match delivered {
                            Ok(Ok(snapshot)) => {
                                let note =
                                    format!("tensor_relay: `out` has {}, whole", snapshot.received().id());
                                *self.undelivered.lock() = Some(snapshot);
                                interrupt.value(py).call_method1("add_note", (note,))?;
                            }
                            Ok(Err(_)) => {}
                            Err(error) => interrupt.set_cause(py, Some(error)),
                        }
                        Err(interrupt)
                    }
                };
            }
            Err(unfilled) => *unfilled,
        };
        let torn = self.add_torn(unfilled.torn.clone());
        match (torn, interrupt) {
            (None, None) => not_filled(py, unfilled, inner.open.is_closed(), &entries).map(Err),
            (None, Some(interrupt)) => Err(interrupt),
            (Some(id), None) => {
                let failed = not_filled(py, unfilled, inner.open.is_closed(), &entries);
                let cause = failed.map_or_else(|error| error, |failed| failed.raise(py));
                Err(torn_by(py, &torn_message(&cause.value(py).to_string(), &id), &id, Some(cause)))
            }
            (Some(id), Some(interrupt)) => {
                let torn = torn_by(py, &torn_message("the call was interrupted", &id), &id, None);
                interrupt.set_cause(py, Some(torn));
                Err(interrupt)
            }
        }
    }

    /// Delivers a version that was received into the tensors.
    fn deliver(
        &self,
        py: Python<'_>,
        inner: &Inner,
        snapshot: Snapshot,
        names: &BTreeSet<String>,
        extra: &ExtraState,
    ) -> PyResult<Delivered> {
        let (version, select) = (snapshot.received(), &inner.select);
        let (id, manifest) = (version.id(), version.manifest());
        if let Err(message) = select.check(id, manifest) {
            return Ok(Err(NotArrived::OtherLayout(message)));
        }
        let extra = extra.matched(py, version.metadata(), Some(select), |name, value| {
            let is_received = manifest.tensor(name).is_some() && select.has(name);
            Ok(is_received.then(|| value.clone_ref(py)))
        })?;
        if let Err(error) = extra.check()
            && self.is_strict
            && select.patterns().is_none()
        {
            let message = format!("{error}; `out` has the tensors of {id} without all of its extra state");
            return Err(torn_by(py, &message, id, Some(Kind::Target.raise(py, &error))));
        }
        self.rest(manifest, Some(select), names, extra).complete(py, id)?;
        Ok(Ok(snapshot))
    }

    /// Records a version of which the tensors hold a part. Returns the last one, if they are torn.
    fn add_torn(&self, new: Option<VersionId>) -> Option<VersionId> {
        let mut torn = self.torn.lock();
        if new.is_some() {
            *torn = new;
        }
        torn.clone()
    }

    fn begin(&self, py: Python<'_>, inner: &Inner) -> PyResult<Receiving> {
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
        let (stop, stopped) = oneshot::channel();
        let received = match gpu.is_empty() {
            true => begin_on_host(py, inner, host, on_host, stopped)?,
            false => begin_on_gpu(py, inner, gpu, on_gpu, stopped)?,
        };
        let Targets { values, entries, names, extra, .. } = targets;
        Ok(Receiving { received, stop, values, entries, names, extra })
    }

    /// The tensors that the mapping has now.
    fn targets(&self, py: Python<'_>) -> PyResult<Targets> {
        Targets::of(py, self)
    }

    fn name_match(&self) -> NameMatch {
        if self.is_strict { NameMatch::Exact } else { NameMatch::Common }
    }

    /// Whether the next call delivers a version that the tensors hold already.
    pub(crate) fn has_undelivered(&self) -> bool {
        self.undelivered.lock().is_some()
    }
}

impl Received {
    /// Returns the tensors to their libraries.
    fn give_back(self, py: Python<'_>) -> Result<Snapshot, Box<Unfilled>> {
        match self {
            Self::Host(received) => {
                let arrival = arrival(&received);
                let buffers = received.map_or_else(|error| error.buffers, Filled::into_buffers);
                buffers.into_iter().for_each(|(_, memory)| memory.give_back(py));
                arrival
            }
            Self::Gpu(received, returning) => {
                let arrival = arrival(&received);
                let is_withheld = received.as_ref().is_err_and(|error| !error.withheld.is_empty());
                drop(received);
                if !is_withheld {
                    returning.give_back(py);
                }
                arrival
            }
            Self::NotLent => Err(Box::new(Unfilled { cause: FillCause::Stopped, torn: None, refused: None })),
        }
    }
}

fn arrival<B>(received: &Result<Filled<B>, FillError<B>>) -> Result<Snapshot, Box<Unfilled>> {
    match received {
        Ok(filled) => Ok(Snapshot::without_tensors(filled.version(), filled.gap())),
        Err(FillError { cause, torn, refused, .. }) => {
            let (cause, torn, refused) = (cause.clone(), torn.clone(), refused.clone());
            Err(Box::new(Unfilled { cause, torn, refused }))
        }
    }
}

/// The turn to use the subscription; `None` if the wait for it was `stopped`, or the subscription was closed.
async fn turn(
    open: &Arc<Closable<Open>>,
    stopped: Pin<&mut impl Future<Output = ()>>,
) -> Option<ExclusiveUse<Open>> {
    tokio::select! {
        turn = Arc::clone(open).turn() => turn,
        () = stopped => None,
    }
}

/// Ends when the caller stops waiting, or the subscription is closed.
async fn stopped(open: Arc<Closable<Open>>, stop: oneshot::Receiver<()>) {
    tokio::select! {
        () = open.closed() => {}
        _ = stop => {}
    }
}

fn begin_on_host(
    py: Python<'_>,
    inner: &Inner,
    targets: Vec<Target<Foreign>>,
    mut buffers: Buffers<Exclusive>,
    stop: oneshot::Receiver<()>,
) -> PyResult<Pin<Box<dyn Future<Output = Received> + Send>>> {
    for Target { name, memory, .. } in targets {
        let exclusive = Exclusive::new(memory).ok_or_else(|| {
            let message = format!(
                "the elements of {name} in `out` do not lie side by side, so it cannot be received into directly: use \
                 atomic=True, or receive into a contiguous tensor, and copy from that"
            );
            Kind::Target.raise(py, message)
        })?;
        buffers.insert(name, exclusive);
    }
    let open = Arc::clone(&inner.open);
    Ok(Box::pin(async move {
        let mut stopped = pin!(stopped(Arc::clone(&open), stop));
        let Some(mut turn) = turn(&open, stopped.as_mut()).await else { return Received::NotLent };
        let Some(Open { subscription, .. }) = turn.value() else { return Received::NotLent };
        let filled = subscription.next_into_until(buffers, stopped).await;
        discard_refused(subscription, &filled);
        Received::Host(filled)
    }))
}

fn begin_on_gpu(
    py: Python<'_>,
    inner: &Inner,
    targets: Vec<Target<OnGpu>>,
    mut buffers: Buffers<DeviceBuffer>,
    stop: oneshot::Receiver<()>,
) -> PyResult<Pin<Box<dyn Future<Output = Received> + Send>>> {
    let mut fences = Fences::default();
    for Target { name, memory, .. } in targets {
        check_dense(py, &name, &memory)?;
        let buffer = py.detach(|| fences.lend(memory)).map_err(Kind::Other.because(py))?;
        buffers.insert(name, buffer);
    }
    let (open, returning) = (Arc::clone(&inner.open), fences.returning());
    Ok(Box::pin(async move {
        let mut stopped = pin!(stopped(Arc::clone(&open), stop));
        let Some(mut turn) = turn(&open, stopped.as_mut()).await else { return Received::NotLent };
        let Some(Open { subscription, .. }) = turn.value() else { return Received::NotLent };
        let filled = subscription.next_into_device_until(buffers, stopped).await;
        discard_refused(subscription, &filled);
        Received::Gpu(filled, returning)
    }))
}

/// Skips a version that does not fit the tensors, so that the next call continues with the next version.
fn discard_refused<B>(subscription: &mut client::Subscription, filled: &Result<Filled<B>, FillError<B>>) {
    if let Err(FillError { refused: Some(id), .. }) = filled {
        subscription.discard(id);
    }
}

/// Tells the frameworks that the tensors may have been written.
fn notify_written(py: Python<'_>, values: &[Py<PyAny>]) -> PyResult<()> {
    let values: Vec<_> = values.iter().map(|value| value.bind(py)).collect();
    frameworks(py)?.call_method1("mark_written", (values,)).map(drop)
}

/// The result for a version that was not received.
fn not_filled(
    py: Python<'_>,
    Unfilled { cause, torn, refused }: Unfilled,
    is_closed: bool,
    entries: &[String],
) -> PyResult<NotArrived> {
    match (torn, refused, cause) {
        (_, _, FillCause::Stopped) if is_closed => Ok(NotArrived::Closed),
        (_, _, FillCause::Stopped) => Ok(NotArrived::TimedOut),
        (_, _, FillCause::Subscription(error)) => Ok(NotArrived::Subscription(error)),
        (None, Some(id), FillCause::Buffers(error)) => Ok(unfit(&id, &error, entries)),
        (_, _, cause) => Err(of_fill(py, &cause)),
    }
}

fn torn_message(why: &str, id: &VersionId) -> String {
    format!(
        "{why}; tensors of `out` are torn: they may hold a part of {id}, until a call returns a version, so do not use \
         them before"
    )
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
        "{id} does not fit `out`: {error}{more}; nothing of it was written, and a subscription goes on with the next \
         version"
    ))
}

fn torn_by(py: Python<'_>, message: &str, id: &VersionId, cause: Option<PyErr>) -> PyErr {
    let raised = Kind::Torn.raise(py, message);
    // The class has this attribute; setting it fails only when the interpreter is out of memory.
    let _ = raised.value(py).setattr("version", id.version.0);
    raised.set_cause(py, cause);
    raised
}
