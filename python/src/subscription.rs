//! `tensor_relay.Subscription`: the versions of a topic, by iteration, call or coroutine.

use crate::{
    awaitable::{Outcome, awaitable},
    client::Client,
    errors::{Kind, of_subscription},
    out::Out,
    runtime::Here,
    snapshot::Snapshot,
    wait::{at_most, seconds, wait},
};
use pyo3::{
    exceptions::{PyStopAsyncIteration, PyStopIteration},
    prelude::*,
};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tensor_relay_client::{self as client, EndReason, Gap, SubscriptionError};

/// Delivers the versions of one topic, each whole and verified.
#[pyclass(frozen, weakref, module = "tensor_relay")]
pub(crate) struct Subscription {
    inner: Here<Arc<Inner>>,
    /// Keeps the session.
    _client: Py<Client>,
    timeout: Option<Duration>,
    out: Option<Out>,
    progress: Box<dyn Fn() -> client::Progress + Send + Sync>,
}

/// What calls and coroutines share.
pub(crate) struct Inner {
    /// `None` once it is closed.
    pub(crate) subscription: Arc<tokio::sync::Mutex<Option<client::Subscription>>>,
    /// A version that came while its coroutine was cancelled.
    undelivered: Mutex<Option<Arrived>>,
    on_gap: OnGap,
}

/// A version, and what is missing before it.
pub(crate) struct Arrived {
    pub(crate) snapshot: client::Snapshot,
    pub(crate) gap: Option<Box<Gap>>,
}

/// Why none came.
pub(crate) enum NotArrived {
    Subscription(SubscriptionError),
    Closed,
    TimedOut,
}

/// What is done about missing versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnGap {
    Raise,
    Continue,
}

impl OnGap {
    pub(crate) fn called(py: Python<'_>, name: &str) -> PyResult<Self> {
        match name {
            "raise" => Ok(Self::Raise),
            "continue" => Ok(Self::Continue),
            other => {
                Err(Kind::Request
                    .raise(py, format!("on_gap is \"raise\" or \"continue\", and not {other:?}")))
            }
        }
    }
}

/// How far the version that is being received has come.
#[pyclass(frozen, get_all, module = "tensor_relay")]
pub(crate) struct Progress {
    /// The version's number; 0 before the first.
    version: u64,
    /// The size of what is received of it, in bytes; 0 until that is known.
    payload_bytes: u64,
    /// How much of that is verified and in place.
    verified_bytes: u64,
    /// The bytes that came over the network for it, as encoded.
    wire_bytes: u64,
}

impl Inner {
    /// Waits for the next version. No version is lost when this is dropped.
    pub(crate) async fn next(&self) -> Result<Arrived, NotArrived> {
        let mut subscription = self.subscription.lock().await;
        let subscription = subscription.as_mut().ok_or(NotArrived::Closed)?;
        if let Some(arrived) = self.undelivered().take() {
            return Ok(arrived);
        }
        let mut gap = None;
        loop {
            match subscription.next().await {
                Ok(snapshot) => return Ok(Arrived { snapshot, gap }),
                Err(SubscriptionError::Gap(found)) if self.on_gap == OnGap::Continue => {
                    tracing::warn!("{found}.");
                    gap = Some(found);
                }
                Err(error) => return Err(NotArrived::Subscription(error)),
            }
        }
    }

    /// The same within `timeout`.
    async fn next_within(&self, timeout: Option<Duration>) -> Result<Arrived, NotArrived> {
        at_most(timeout, self.next()).await.unwrap_or(Err(NotArrived::TimedOut))
    }

    /// Keeps a version for the next call.
    fn put_back(&self, arrived: Arrived) {
        *self.undelivered() = Some(arrived);
    }

    fn undelivered(&self) -> std::sync::MutexGuard<'_, Option<Arrived>> {
        self.undelivered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NotArrived {
    /// Whether the topic ended as topics do, which ends iteration.
    fn is_end(&self) -> bool {
        let ends = |reason: &EndReason| {
            matches!(reason, EndReason::TopicEnded | EndReason::Withdrawn | EndReason::Expired)
        };
        match self {
            Self::Subscription(SubscriptionError::Ended { reason, .. }) => ends(reason),
            Self::Closed => true,
            _ => false,
        }
    }

    pub(crate) fn raise(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Subscription(error) => of_subscription(py, error),
            Self::Closed => Kind::Closed.raise(py, "this subscription was closed: subscribe again"),
            Self::TimedOut => {
                Kind::Timeout.raise(py, "no new version came in time; the next call goes on waiting for it")
            }
        }
    }
}

#[pymethods]
impl Subscription {
    /// Waits for the next version. `timeout` is in seconds; None waits for as long as it takes.
    ///
    /// Raises RelayTimeoutError after `timeout`; TopicEndedError when nothing more will come; TopicNotFoundError when
    /// the topic does not appear; HoldingTooManyError; VersionsMissedError; RelayConnectionError when the connection is
    /// lost for good; with `out`, TargetError and TornError.
    #[pyo3(signature = (timeout = None))]
    fn next(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Snapshot> {
        self.receive(py, seconds("timeout", timeout)?)?
            .map_err(|failed| failed.raise(py))
    }

    /// The same as a coroutine of asyncio. When it is cancelled, no version is lost. Not with `atomic=False`.
    #[pyo3(signature = (timeout = None))]
    fn next_async<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        self.receive_async(py, seconds("timeout", timeout)?, |py, failed| failed.raise(py))
    }

    /// How far the version that is being received has come.
    fn progress(&self) -> Progress {
        let client::Progress { version, payload_bytes, verified_bytes, wire_bytes } = (self.progress)();
        Progress { version, payload_bytes, verified_bytes, wire_bytes }
    }

    /// In mode "every": says that the program is done with the snapshot taken last, without asking for another. One that
    /// ends says so before, or its reader gets that version again.
    fn acknowledge(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner.get(py)?;
        if self.out.as_ref().is_some_and(Out::is_pending) {
            return Ok(()); // Asking for the one that is waited for has said so.
        }
        wait(py, async {
            if let Some(subscription) = inner.subscription.lock().await.as_mut() {
                subscription.acknowledge();
            }
        })
    }

    /// Ends the subscription. Closing again does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner.get(py)?;
        self.out.iter().for_each(Out::forget);
        let subscription = wait(py, async { inner.subscription.lock().await.take() })?;
        drop((subscription, inner.undelivered().take()));
        Ok(())
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Snapshot> {
        self.receive(py, self.timeout)?.map_err(|failed| match failed.is_end() {
            true => PyStopIteration::new_err(()),
            false => failed.raise(py),
        })
    }

    fn __aiter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __anext__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.receive_async(py, self.timeout, |py, failed| match failed.is_end() {
            true => PyStopAsyncIteration::new_err(()),
            false => failed.raise(py),
        })
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }
}

impl Subscription {
    pub(crate) fn new(
        subscription: client::Subscription,
        client: Py<Client>,
        timeout: Option<Duration>,
        on_gap: OnGap,
        out: Option<Out>,
    ) -> Self {
        let progress = Box::new(subscription.progress_reader());
        let subscription = Arc::new(tokio::sync::Mutex::new(Some(subscription)));
        let inner = Inner { subscription, undelivered: Mutex::default(), on_gap };
        Self { inner: Here::new(Arc::new(inner)), _client: client, timeout, out, progress }
    }

    /// The next version, in its own memory or in the user's.
    fn receive(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<Result<Snapshot, NotArrived>> {
        let inner = self.inner.get(py)?;
        if let Some(out) = self.out.as_ref().filter(|out| !out.is_atomic()) {
            return out.receive_in_place(py, inner, timeout);
        }
        match wait(py, inner.next_within(timeout))? {
            Ok(arrived) => hand_over(py, inner, arrived, self.out.as_ref()).map(Ok),
            Err(failed) => Ok(Err(failed)),
        }
    }

    fn receive_async<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<Duration>,
        raise: fn(Python<'_>, &NotArrived) -> PyErr,
    ) -> PyResult<Bound<'py, PyAny>> {
        if self.out.as_ref().is_some_and(|out| !out.is_atomic()) {
            let message = "asyncio cannot wait with atomic=False: a coroutine may be cancelled, and the tensors would be torn; \
                           wait in a thread (`asyncio.to_thread(subscription.next)`), or take atomic=True";
            return Err(Kind::Request.raise(py, message));
        }
        let inner = self.inner.get(py)?;
        let (giving, kept, inner) = (Arc::clone(inner), Arc::clone(inner), Arc::clone(inner));
        let out = self.out.as_ref().map(|out| out.clone_ref(py));
        let outcome = Outcome {
            give: Box::new(move |py, next: Result<Arrived, NotArrived>| match next {
                Ok(arrived) => Ok(Py::new(py, hand_over(py, &giving, arrived, out.as_ref())?)?.into_any()),
                Err(failed) => Err(raise(py, &failed)),
            }),
            keep: Box::new(move |next| {
                if let Ok(arrived) = next {
                    kept.put_back(arrived);
                }
            }),
        };
        awaitable(py, async move { inner.next_within(timeout).await }, outcome)
    }
}

/// A version as Python has it: with its tensors, or with those copied to where the user wants them. One that does not fit
/// there waits to be taken by the next call.
fn hand_over(py: Python<'_>, inner: &Inner, arrived: Arrived, out: Option<&Out>) -> PyResult<Snapshot> {
    let Some(out) = out else { return Ok(Snapshot::whole(arrived)) };
    let copied = out.copy(py, &arrived);
    if copied.is_err() {
        inner.put_back(arrived);
    }
    copied
}
