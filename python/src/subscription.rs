//! `tensor_relay.Subscription`: the versions of a topic, by iteration, call or coroutine.

use crate::{
    awaitable::awaitable,
    client::Client,
    closable::{Closable, ExclusiveUse},
    errors::{Kind, of_subscription},
    out::{Out, copying_in_background},
    range::one_of,
    runtime::ProcessLocal,
    select::Select,
    snapshot::Snapshot,
    wait::{at_most, seconds, wait},
};
use pyo3::{
    exceptions::{PyStopAsyncIteration, PyStopIteration},
    prelude::*,
    types::PyCFunction,
};
use std::{sync::Arc, time::Duration};
use tensor_relay_cli::{FollowedTopic, SharedTopic};
use tensor_relay_client::{self as client, EndReason, Gap, SubscriptionError, VersionId};
use tensor_relay_device::Lock;

/// Delivers the versions of one topic, each complete and verified.
#[pyclass(frozen, weakref, module = "tensor_relay")]
pub(crate) struct Subscription {
    inner: ProcessLocal<Arc<Inner>>,
    /// The topic's name.
    topic: String,
    /// Keeps the session open.
    client: Py<Client>,
    timeout: Option<Duration>,
    out: Option<Arc<Out>>,
    progress: Box<dyn Fn() -> client::Progress + Send + Sync>,
}

/// The state that calls and coroutines share.
pub(crate) struct Inner {
    pub(crate) open: Arc<Closable<Open>>,
    on_gap: OnGap,
    holding_limit_check: HoldingLimitCheck,
    pub(crate) select: Select,
    /// The topic as the client's admin port shows it, if there is a port, until the subscription is closed.
    followed: Lock<Option<FollowedTopic>>,
}

/// The open subscription, until it is closed. A caller that waits for the next version holds the turn.
pub(crate) struct Open {
    pub(crate) subscription: client::Subscription,
    /// A version that was taken and not delivered: its coroutine was cancelled, or the copy to `out` failed.
    undelivered: Option<Arrived>,
    /// Where versions are offered to processes of this host, and the last one that was.
    shared: Option<(SharedTopic, Option<VersionId>)>,
}

impl Open {
    /// Offers `snapshot` to processes of this host, if they may take it. Takes at most two seconds, for slow readers there.
    async fn offer(&mut self, snapshot: &client::Snapshot) {
        let Some((shared, offered)) = &mut self.shared else { return };
        if offered.as_ref() == Some(snapshot.id()) {
            return;
        }
        match shared.offer(snapshot).await {
            Ok(()) => *offered = Some(snapshot.id().clone()),
            Err(error) => tracing::warn!("{error:#}."),
        }
    }

    /// Tells processes of this host that the topic ended, if that is why no version came.
    fn handle_failure(&mut self, error: &SubscriptionError) {
        if let SubscriptionError::Ended { reason, .. } = error
            && let Some((shared, _)) = self.shared.take()
        {
            shared.end(*reason);
        }
    }
}

/// Returns the error for a timed-out wait of this length, if a version was ready but not delivered because the user
/// holds too many snapshots.
type HoldingLimitCheck = Box<dyn Fn(Duration) -> Option<SubscriptionError> + Send + Sync>;

/// A received version, and the gap before it.
pub(crate) struct Arrived {
    pub(crate) snapshot: client::Snapshot,
    pub(crate) gap: Option<Box<Gap>>,
}

/// A version between its receipt and its delivery. Other callers wait meanwhile, and if it is not delivered, the next
/// of them receives it.
struct Taken {
    /// `None` once it was delivered.
    arrived: Option<Arrived>,
    turn: ExclusiveUse<Open>,
}

impl Taken {
    /// Delivers the version with `deliver`. If that raises, the next call receives the version. A version that does not
    /// fit counts as delivered: the next call would fail as well.
    fn deliver(mut self, deliver: impl FnOnce(&Arrived) -> PyResult<Delivered>) -> PyResult<Delivered> {
        let delivered = deliver(self.arrived())?;
        self.arrived = None;
        Ok(delivered)
    }

    /// Counts the version as delivered.
    fn end(mut self) {
        self.arrived = None;
    }

    fn arrived(&self) -> &Arrived {
        self.arrived.as_ref().expect("only its delivery takes it")
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(open) = self.turn.value() {
            open.undelivered = self.arrived.take();
        }
    }
}

/// A version for the user.
pub(crate) type Delivered = Result<Snapshot, NotArrived>;

/// Why no version was delivered. The texts are messages for the user.
pub(crate) enum NotArrived {
    Subscription(SubscriptionError),
    /// The selection matches no tensor of the version, or its boxes are of another layout.
    OtherLayout(String),
    /// The version does not fit the tensors of `out`.
    Unfit(String),
    Closed,
    TimedOut,
}

/// The reaction to missing versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnGap {
    Raise,
    Continue,
}

impl OnGap {
    pub(crate) fn parse(py: Python<'_>, name: &str) -> PyResult<Self> {
        one_of(py, "on_gap", name, &[("raise", Self::Raise), ("continue", Self::Continue)])
    }
}

/// The progress of the version that is being received.
#[pyclass(frozen, get_all, module = "tensor_relay")]
pub(crate) struct Progress {
    /// The version's number; 0 before the first.
    version: u64,
    /// The number of bytes to be received of it, decoded; 0 until that is known.
    payload_bytes: u64,
    /// The number of verified bytes.
    verified_bytes: u64,
    /// The number of encoded bytes received over the network for it.
    wire_bytes: u64,
}

#[pymethods]
impl Progress {
    fn __repr__(&self) -> String {
        let Self { version, payload_bytes, verified_bytes, wire_bytes } = self;
        format!(
            "Progress(version {version}: {verified_bytes} of {payload_bytes} bytes, {wire_bytes} on the wire)"
        )
    }
}

impl Inner {
    /// Records a delivered version for the admin port.
    fn record_delivered(&self, snapshot: &Snapshot) {
        if let Some(followed) = &*self.followed.lock() {
            snapshot.record(followed);
        }
    }

    /// Waits for the next version. No version is lost when this future is dropped, nor when its result is.
    async fn next(self: Arc<Self>) -> Result<Taken, NotArrived> {
        let taken = self.open.unless_closed(self.take()).await;
        taken.unwrap_or(Err(NotArrived::Closed))
    }

    async fn take(&self) -> Result<Taken, NotArrived> {
        let mut turn = Arc::clone(&self.open).turn().await.ok_or(NotArrived::Closed)?;
        let open = turn.value().ok_or(NotArrived::Closed)?;
        let arrived = match open.undelivered.take() {
            Some(arrived) => arrived,
            None => match self.arrival(&mut open.subscription).await {
                Ok(arrived) => arrived,
                Err(error) => {
                    open.handle_failure(&error);
                    return Err(NotArrived::Subscription(error));
                }
            },
        };
        // A version that fails the check is dropped: the next call would fail as well.
        let Arrived { snapshot, .. } = &arrived;
        self.select
            .check(snapshot.id(), snapshot.manifest())
            .map_err(NotArrived::OtherLayout)?;
        let snapshot = snapshot.clone();
        let mut taken = Taken { arrived: Some(arrived), turn }; // From here on it is not lost if this future is dropped.
        if let Some(open) = taken.turn.value() {
            open.offer(&snapshot).await;
        }
        Ok(taken)
    }

    /// As [`next`](Self::next), within `timeout`. If a version is ready, but the user holds too many, the error says
    /// so.
    async fn next_within(self: Arc<Self>, timeout: Option<Duration>) -> Result<Taken, NotArrived> {
        let next = at_most(timeout, Arc::clone(&self).next()).await;
        next.unwrap_or_else(|| {
            let too_many = (self.holding_limit_check)(timeout.unwrap_or_default());
            Err(too_many.map_or(NotArrived::TimedOut, NotArrived::Subscription))
        })
    }

    async fn arrival(&self, subscription: &mut client::Subscription) -> Result<Arrived, SubscriptionError> {
        let mut gap = None;
        loop {
            match subscription.next().await {
                Ok(snapshot) => return Ok(Arrived { snapshot, gap }),
                Err(SubscriptionError::Gap(found)) if self.on_gap == OnGap::Continue => {
                    tracing::warn!("{found}.");
                    gap = Some(found);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl NotArrived {
    /// Whether this ends iteration without an error: the topic ended, or the subscription was closed.
    fn is_end(&self) -> bool {
        let is_regular = |reason: &EndReason| {
            matches!(reason, EndReason::TopicEnded | EndReason::Withdrawn | EndReason::Expired)
        };
        match self {
            Self::Subscription(SubscriptionError::Ended { reason, .. }) => is_regular(reason),
            Self::Closed => true,
            _ => false,
        }
    }

    pub(crate) fn raise(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Subscription(error) => of_subscription(py, error),
            Self::OtherLayout(message) => Kind::Request.raise(py, message),
            Self::Unfit(message) => Kind::Target.raise(py, message),
            Self::Closed => Kind::Closed.raise(py, "this subscription was closed: subscribe again"),
            Self::TimedOut => Kind::Timeout.raise(py, "no version came in time; the call can be repeated"),
        }
    }
}

#[pymethods]
impl Subscription {
    /// Waits for the next version. `timeout` is in seconds; None waits without limit.
    ///
    /// Raises RelayTimeoutError after `timeout`; TopicEndedError when no more versions will come; TopicNotFoundError
    /// when the topic does not appear; HoldingTooManyError; VersionsMissedError; RelayConnectionError when the
    /// connection is lost and cannot be made again; RequestError when `select` matches no tensor of the version; with
    /// `out`, TargetError and TornError. After RequestError and TargetError the next call continues with the next
    /// version. With `atomic=False`, a call that ends during a transfer, also by its `timeout`, raises TornError.
    #[pyo3(signature = (timeout = None))]
    fn next(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Snapshot> {
        self.receive(py, seconds("timeout", timeout)?, self.out.as_deref())?
            .map_err(|failed| self.raise(py, &failed))
    }

    /// Waits for the next version as `next` does, and does not touch the tensors of `out`: they may be in use until
    /// `activate`. Versions are also received in the background, so `prefetch(0)` returns one if it is ready.
    ///
    /// Raises the exceptions of `next`, and RequestError with `atomic=False`.
    #[pyo3(signature = (timeout = None))]
    fn prefetch(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Snapshot> {
        self._check_atomic(py)?;
        self.receive(py, seconds("timeout", timeout)?, None)?
            .map_err(|failed| self.raise(py, &failed))
    }

    /// Copies a version that `prefetch` returned to the tensors of `out`, all of them or none; by default to the
    /// subscription's `out`. It waits only for the copy, so it has no coroutine. `strict` and `rename` apply to the
    /// `out` of this call. Returns the version without tensors.
    ///
    /// Raises TargetError if the version does not fit, with nothing written; TornError if a GPU fails during the copy;
    /// RequestError without any `out`.
    #[pyo3(signature = (snapshot, out = None, *, strict = true, rename = None))]
    fn activate(
        &self,
        py: Python<'_>,
        snapshot: &Snapshot,
        out: Option<Bound<'_, PyAny>>,
        strict: bool,
        rename: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Snapshot> {
        match (out, &self.out) {
            (Some(out), _) => self.client.get().install(py, snapshot, out, strict, rename),
            (None, Some(out)) => {
                let select = &self.inner.get(py)?.select;
                out.copy(py, &snapshot.arrived(py)?, Some(select))?
                    .map_err(|failed| failed.raise(py))
            }
            (None, None) => Err(Kind::Request
                .raise(py, "there is no `out` to copy the version to: pass it here, or to `subscribe`")),
        }
    }

    /// The progress of the version that is being received.
    fn progress(&self) -> Progress {
        let client::Progress { version, payload_bytes, verified_bytes, wire_bytes, .. } = (self.progress)();
        Progress { version, payload_bytes, verified_bytes, wire_bytes }
    }

    /// In mode "every": acknowledges that the program has finished with its last snapshot, without requesting the next.
    /// Call this before the program ends: otherwise its reader receives that version again. Never waits: if another
    /// call is waiting for the next version, that call has acknowledged the snapshot.
    fn acknowledge(&self, py: Python<'_>) -> PyResult<()> {
        let mut turn = self.inner.get(py)?.open.try_turn();
        // A version that was not delivered is not acknowledged.
        if let Some(open) = turn.as_mut().and_then(ExclusiveUse::value)
            && open.undelivered.is_none()
            && !self.out.as_deref().is_some_and(Out::has_undelivered)
        {
            open.subscription.acknowledge();
        }
        Ok(())
    }

    /// Ends the subscription. Never waits: calls and coroutines that wait for a version raise ClosedError, and
    /// iteration ends. Closing again does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner.get(py)?;
        inner.open.close();
        drop(inner.followed.lock().take());
        Ok(())
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Snapshot> {
        self.receive(py, self.timeout, self.out.as_deref())?
            .map_err(|failed| match failed.is_end() {
                true => PyStopIteration::new_err(()),
                false => self.raise(py, &failed),
            })
    }

    fn __aiter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Begins `next_async`, or without `to_out` `prefetch_async`: an asyncio future of a function that returns the version.
    fn _begin_next<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
        to_out: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.receive_async(py, seconds("timeout", timeout)?, to_out, |py, failed| failed.raise(py))
    }

    /// Begins `__anext__`, like `_begin_next`.
    fn _begin_anext<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.receive_async(py, self.timeout, true, |py, failed| match failed.is_end() {
            true => PyStopAsyncIteration::new_err(()),
            false => failed.raise(py),
        })
    }

    /// Raises RequestError with atomic=False, with which a version cannot be received elsewhere than into `out`.
    fn _check_atomic(&self, py: Python<'_>) -> PyResult<()> {
        match self.out.as_ref().is_some_and(|out| !out.is_atomic()) {
            true => Err(Kind::Request.raise(
                py,
                "with atomic=False versions are received directly into `out`, and cannot be prefetched: use atomic=True",
            )),
            false => Ok(()),
        }
    }

    fn __repr__(&self) -> String {
        match (self.progress)().version {
            0 => format!("Subscription({}, no version yet)", self.topic),
            version => format!("Subscription({}, at version {version})", self.topic),
        }
    }
}

impl Subscription {
    pub(crate) fn new(
        (subscription, followed, shared): (client::Subscription, Option<FollowedTopic>, Option<SharedTopic>),
        client: Py<Client>,
        timeout: Option<Duration>,
        on_gap: OnGap,
        select: Select,
        out: Option<Arc<Out>>,
    ) -> Self {
        let (topic, progress) = (subscription.topic().to_string(), Box::new(subscription.progress_reader()));
        let holding_limit_check = Box::new(subscription.holding_limit_check());
        let open = Arc::new(Closable::new(Open {
            subscription,
            undelivered: None,
            shared: shared.map(|shared| (shared, None)),
        }));
        let followed = Lock::new(followed);
        let inner = Inner { open, on_gap, holding_limit_check, select, followed };
        Self { inner: ProcessLocal::new(Arc::new(inner)), topic, client, timeout, out, progress }
    }

    /// The exception for `failed`; for a timeout without a connection, the message says why it was lost.
    fn raise(&self, py: Python<'_>, failed: &NotArrived) -> PyErr {
        match (failed, self.client.get().connection_lost(py)) {
            (NotArrived::TimedOut, Some(lost)) => {
                let message = format!(
                    "no version came in time: the connection was lost ({lost}), and a new one is being made"
                );
                Kind::Timeout.raise(py, message)
            }
            _ => failed.raise(py),
        }
    }

    /// The next version, in its own memory or in the user's.
    fn receive(&self, py: Python<'_>, timeout: Option<Duration>, out: Option<&Out>) -> PyResult<Delivered> {
        let inner = self.inner.get(py)?;
        let delivered = match out.filter(|out| !out.is_atomic()) {
            Some(out) => out.receive_in_place(py, inner, timeout)?,
            None => match wait(py, Arc::clone(inner).next_within(timeout))? {
                Ok(taken) => taken.deliver(|arrived| to_python(py, arrived, out, &inner.select))?,
                Err(failed) => Err(failed),
            },
        };
        Ok(delivered.inspect(|snapshot| inner.record_delivered(snapshot)))
    }

    /// An asyncio future of a function that returns the next version. If the function is never called, no version is
    /// lost.
    fn receive_async<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<Duration>,
        to_out: bool,
        raise: fn(Python<'_>, &NotArrived) -> PyErr,
    ) -> PyResult<Bound<'py, PyAny>> {
        if self.out.as_ref().is_some_and(|out| !out.is_atomic()) {
            let message = "asyncio cannot wait with atomic=False: a coroutine may be cancelled, and the tensors would be torn; \
                           wait in a thread (`asyncio.to_thread(subscription.next)`), or use atomic=True";
            return Err(Kind::Request.raise(py, message));
        }
        let inner = Arc::clone(self.inner.get(py)?);
        let next = Arc::clone(&inner).next_within(timeout);
        let out = self.out.clone().filter(|_| to_out);
        awaitable(py, next, move |py, next| {
            let (unclaimed, inner) = (Lock::new(Some((next, out))), Arc::clone(&inner));
            let claim = PyCFunction::new_closure(py, None, None, move |args, _| {
                let claimed = unclaimed.lock().take();
                let closed = NotArrived::Closed;
                let (next, out) = claimed.unwrap_or((Err(closed), None));
                claim_next(args.py(), next, out.as_deref(), raise, Arc::clone(&inner))
            })?;
            Ok(claim.into_any().unbind())
        })
    }
}

/// The result of a coroutine: the snapshot, or a copy to `out` that began and that `_subscription` finishes.
fn claim_next(
    py: Python<'_>,
    next: Result<Taken, NotArrived>,
    out: Option<&Out>,
    raise: fn(Python<'_>, &NotArrived) -> PyErr,
    inner: Arc<Inner>,
) -> PyResult<Py<PyAny>> {
    let taken = next.map_err(|failed| raise(py, &failed))?;
    let Some(out) = out else {
        let delivered = taken.deliver(|arrived| Ok(Ok(Snapshot::with_tensors(arrived))))?;
        let snapshot = delivered.map_err(|failed| raise(py, &failed))?;
        inner.record_delivered(&snapshot);
        return Ok(Py::new(py, snapshot)?.into_any());
    };
    let copying = match out.prepare_copy(py, taken.arrived(), Some(&inner.select))? {
        Ok(copying) => copying,
        Err(unfit) => {
            taken.end(); // The next call would fail as well.
            return Err(raise(py, &unfit));
        }
    };
    copying_in_background(py, copying, move |is_delivered, copied| {
        let snapshot = copied?;
        if is_delivered {
            taken.end();
            inner.record_delivered(&snapshot);
        }
        Ok(snapshot)
    })
}

/// A version as a Python object: with its tensors, or without them after a copy to `out`.
fn to_python(py: Python<'_>, arrived: &Arrived, out: Option<&Out>, select: &Select) -> PyResult<Delivered> {
    match out {
        Some(out) => out.copy(py, arrived, Some(select)),
        None => Ok(Ok(Snapshot::with_tensors(arrived))),
    }
}
