//! `tensor_relay.Client`: a connection to a server.

use crate::{
    awaitable::awaitable,
    boxes::Boxes,
    description::{Description, VersionSelector},
    errors::{Kind, of_client, of_get},
    gpu::Gpus,
    out::Out,
    range::{at_least, one_of},
    relay::parse_topic,
    runtime::ProcessLocal,
    select::Select,
    snapshot::Snapshot,
    start::{parse_start, parse_version},
    subscription::{NotArrived, OnGap, Subscription},
    topic_info::TopicInfo,
    until_closed::UntilClosed,
    wait::{at_most, seconds, wait},
};
use pyo3::{
    prelude::*,
    types::{IntoPyDict, PyDict},
};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tensor_relay_cli::{AdminPort, Consumer, Sharing};
use tensor_relay_client::{self as client, GetError, MemoryStats, ReaderName, Request, Ticket, Topic};

/// A session with a server, which reconnects by itself when the connection is lost.
#[pyclass(frozen, weakref, module = "tensor_relay")]
pub(crate) struct Client {
    open: UntilClosed<Open>,
    ticket: Ticket,
    gpus: ProcessLocal<Arc<Gpus>>,
    /// The state that the admin port shows; `None` without a port.
    consumer: Option<Consumer>,
    admin_address: Option<SocketAddr>,
}

/// The state until the client is closed.
struct Open {
    client: Arc<client::Client>,
    admin: Option<AdminPort>,
    sharing: Sharing,
}

/// What a subscription is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// The user follows the topic: it is on the admin port, and offered to processes of this host.
    Follows,
    /// The user wants one version or a part of it, and the admin port shows the topic.
    IsShown,
    /// It belongs to another subscription.
    IsHidden,
}

/// The deadline for the description of the version that boxes are computed for, where the caller gives none.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(60);

/// The message for `boxes` beside a DTensor.
const PARTS_AND_BOXES: &str =
    "`out` has DTensors, whose placements say which boxes are received: leave `boxes` out";

/// The deadline for closing a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

#[pymethods]
impl Client {
    /// The topics that have a version, in order of name.
    ///
    /// Raises RelayConnectionError when the session has ended.
    fn topics(&self, py: Python<'_>) -> PyResult<Vec<TopicInfo>> {
        let client = self.client(py)?;
        let topics = wait(py, client.list())?.map_err(|error| of_client(py, &error))?;
        Ok(topics.into_iter().map(TopicInfo::of).collect())
    }

    /// Subscribes to a topic, which need not exist yet; by default to the topic that the ticket names.
    ///
    /// In mode "latest", each snapshot is the newest version; older ones are skipped and counted. In mode "every", all
    /// versions come in order; the request for the next one acknowledges that the program has finished with the
    /// previous one.
    ///
    /// select: one or several patterns; only tensors whose names match one of them are received. `?` stands for one
    /// character and `*` for any number of them, both except `/`; `**` for any number, including `/`. A version without
    /// a matching tensor raises RequestError; a single pattern without a match is logged.
    /// boxes: the parts of the selected tensors that are received. By name or pattern, of which the first match counts: a
    /// `Box`, slices as of `numpy.s_`, `slice_rows`, `slice_columns`, or None for the whole; or a function of a tensor's
    /// name, shape and dtype that returns one of these; or one of them alone, for every tensor. Tensors without a box are
    /// received whole. Functions, and slices that count from the end, are evaluated for the tensors of the newest version,
    /// which this call waits for; a version with others raises RequestError, and needs another subscription. A box that
    /// does not fit raises RequestError before anything of the version is sent.
    /// start: "newest" or "next", and in mode "every" also "oldest", a version's number, or its epoch and number; by
    /// default "newest", or in mode "every" "oldest".
    /// window: in mode "every", the maximum number of versions received ahead, including the one in use; by default 3.
    /// reader: in mode "every", a name under which the server keeps this reader's place while it is disconnected.
    /// preempt: in mode "latest", whether a newer version replaces one that is being received.
    /// timeout: the deadline of iteration for each version in seconds; None waits without limit.
    /// on_gap: in mode "every", the reaction to missing versions: "raise" raises VersionsMissedError, after which the
    /// next call continues; "continue" sets `Snapshot.gap`.
    /// out: a mapping, a list or a model of tensors to receive into. The snapshots then have no tensors of their own. Of
    /// the tensor of a DTensor, this process receives its own part; `boxes` is then left out.
    /// With `atomic=True` each version is received into other memory and copied once it is complete: a failure leaves
    /// the tensors unchanged, at the cost of memory for a second version and one copy. With `atomic=False` it is
    /// received directly into the tensors, without that cost, and a failure leaves them torn (TornError); do not use
    /// them during a call. On a GPU, nothing is written before the work that is already queued on their framework's current
    /// stream has completed.
    /// strict: whether `out` must have exactly the version's (selected) tensors and extra state. With `strict=False`
    /// the tensors that both have are received, and the names of the others are logged; a version that has none in
    /// common with `out` is refused.
    /// rename: a function from a name in `out` to its name in the version, such as
    /// `lambda name: name.removeprefix("_orig_mod.")`.
    ///
    /// If `out` is a module, the values of `get_extra_state` are set by its modules' `set_extra_state`. A dictionary
    /// cannot set them, so it must have none, or strict=False leaves them out.
    ///
    /// Raises RequestError for an invalid name or pattern, and for an empty `select`; TargetError for tensors of `out`
    /// that cannot be received into, or that share some of their memory. Later errors are raised by
    /// `Subscription.next`.
    #[pyo3(signature = (topic = None, *, mode = "latest", select = None, boxes = None, start = None, window = None,
                        reader = None, preempt = false, timeout = None, on_gap = "raise", out = None, atomic = true,
                        strict = true, rename = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords, each with its name where it is called")]
    fn subscribe(
        slf: Bound<'_, Self>,
        topic: Option<&str>,
        mode: &str,
        select: Option<Bound<'_, PyAny>>,
        boxes: Option<Bound<'_, PyAny>>,
        start: Option<Bound<'_, PyAny>>,
        window: Option<u32>,
        reader: Option<&str>,
        preempt: bool,
        timeout: Option<f64>,
        on_gap: &str,
        out: Option<Bound<'_, PyAny>>,
        atomic: bool,
        strict: bool,
        rename: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Subscription> {
        let (py, this) = (slf.py(), slf.get());
        let topic = this.topic_or_default(py, topic)?;
        let timeout = seconds("timeout", timeout)?;
        let on_gap = OnGap::parse(py, on_gap)?;
        let out = this.optional_out(py, out, atomic, strict, rename)?;
        let is_every = one_of(py, "mode", mode, &[("latest", false), ("every", true)])?;
        if !is_every && (window.is_some() || reader.is_some()) {
            return Err(Kind::Request.raise(py, "window and reader have an effect in mode \"every\" only"));
        }
        let mut request = if is_every { Request::every(topic) } else { Request::latest(topic) };
        if let Some(start) = start {
            request = request.from(parse_start(&start)?);
        }
        if let Some(window) = window {
            request = request.window(window);
        }
        if let Some(reader) = reader {
            request = request.reader(ReaderName::new(reader).map_err(Kind::Request.because(py))?);
        }
        let select = this.select(py, request.topic(), select.as_ref(), boxes.as_ref(), timeout)?;
        Self::subscribe_for(&slf, (request.preempt(preempt), Role::Follows), timeout, on_gap, select, out)
    }

    /// Subscribes to the version that `get` receives.
    #[expect(clippy::too_many_arguments, reason = "keywords, each with its name where it is called")]
    fn _subscribe_once(
        slf: Bound<'_, Self>,
        topic: Option<&str>,
        version: Option<u64>,
        epoch: Option<&str>,
        select: Option<Bound<'_, PyAny>>,
        boxes: Option<Bound<'_, PyAny>>,
        out: Option<Bound<'_, PyAny>>,
        atomic: bool,
        strict: bool,
        rename: Option<Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Subscription> {
        let (py, this) = (slf.py(), slf.get());
        seconds("timeout", timeout)?; // An invalid one is refused before the server begins to send.
        let wanted = this.version_selector(py, topic, version, epoch)?;
        let out = this.optional_out(py, out, atomic, strict, rename)?;
        let select = this.select(py, &wanted.topic, select.as_ref(), boxes.as_ref(), None)?;
        Self::subscribe_for(&slf, (wanted.request(), Role::IsShown), None, OnGap::Raise, select, out)
    }

    /// Copies a snapshot to the tensors of `out`, all or none, as `subscribe(out=…)` does with a complete version: it
    /// can be received while the tensors are in use (`get`), and their use pauses only for the copy. `strict` and
    /// `rename` are as for `subscribe`. Returns the version without tensors.
    ///
    /// Raises TargetError if the version does not fit, with nothing written; TornError if a GPU fails during the copy.
    #[pyo3(signature = (snapshot, out, *, strict = true, rename = None))]
    pub(crate) fn install(
        &self,
        py: Python<'_>,
        snapshot: &Snapshot,
        out: Bound<'_, PyAny>,
        strict: bool,
        rename: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Snapshot> {
        let out = self.out(py, out, true, strict, rename)?;
        out.copy(py, &snapshot.arrived(py)?, None)?.map_err(|failed| failed.raise(py))
    }

    /// The description of a version: its metadata, and the names, dtypes and shapes of its tensors, whose data is not
    /// transferred. `topic`, `version`, `epoch`, `timeout` and the exceptions are as for `get`.
    #[pyo3(signature = (topic = None, version = None, *, epoch = None, timeout = 60.0))]
    fn describe(
        slf: Bound<'_, Self>,
        topic: Option<&str>,
        version: Option<u64>,
        epoch: Option<&str>,
        timeout: Option<f64>,
    ) -> PyResult<Description> {
        let (py, this) = (slf.py(), slf.get());
        let wanted = this.version_selector(py, topic, version, epoch)?;
        let (client, timeout) = (this.client(py)?, seconds("timeout", timeout)?);
        described(py, wait(py, at_most(timeout, wanted.receive(&client)))?)
    }

    /// Begins `describe`; an asyncio future of its result.
    fn _describe_async<'py>(
        &self,
        py: Python<'py>,
        topic: Option<&str>,
        version: Option<u64>,
        epoch: Option<&str>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let wanted = self.version_selector(py, topic, version, epoch)?;
        let (client, timeout) = (self.client(py)?, seconds("timeout", timeout)?);
        let describing = async move { at_most(timeout, wanted.receive(&client)).await };
        awaitable(py, describing, |py, result| Ok(Py::new(py, described(py, result)?)?.into_any()))
    }

    /// The ticket that this client connected with. Treat it as a secret if the tensors are secret.
    #[getter]
    fn ticket(&self) -> String {
        self.ticket.to_string()
    }

    /// Counters and gauges of this client by name: `reconnects`; and, of host memory, `snapshot_bytes` of snapshots
    /// that are being received, ready or held; `reusable_bytes`, kept for the next snapshots until two seconds after
    /// the last subscription ends; and `base_bytes`, copies of versions to which deltas are applied.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let client = self.client(py)?;
        let MemoryStats { snapshot_bytes, reusable_bytes, base_bytes } = client.memory();
        let counters = [
            ("reconnects", client.reconnects()),
            ("snapshot_bytes", snapshot_bytes),
            ("reusable_bytes", reusable_bytes),
            ("base_bytes", base_bytes),
        ];
        counters.into_py_dict(py)
    }

    /// Whether this client was closed or its session has ended, as after losing the server for `reconnect_timeout`.
    #[getter]
    fn closed(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.open.lock(py)?.as_ref().is_none_or(|open| open.client.has_ended()))
    }

    /// The address of the admin port, as `IP:PORT`; None without one.
    #[getter]
    fn admin(&self) -> Option<String> {
        self.admin_address.map(|address| address.to_string())
    }

    /// The number of reconnections.
    #[getter]
    fn reconnects(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.client(py)?.reconnects())
    }

    /// Ends the session and notifies the server. Subscriptions end; snapshots stay valid. Closing again does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let open = self.open.lock(py)?.take();
        if let Some(Open { client, admin, sharing }) = open {
            py.detach(|| drop(admin)); // Waits briefly for the port's thread.
            // If another thread is in a call, the session closes when that call ends.
            if let Some(client) = Arc::into_inner(client) {
                wait(py, async { tokio::time::timeout(CLOSE_TIMEOUT, client.close()).await.ok() })?;
            }
            wait(py, sharing.close(CLOSE_TIMEOUT))?;
        }
        self.gpus.get(py)?.close(py);
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("Client({})", self.ticket.addresses().join(","))
    }
}

impl Client {
    /// A client that shows its state to `consumer`.
    pub(crate) fn new(
        (client, sharing): (client::Client, Sharing),
        ticket: Ticket,
        gpus: Gpus,
        consumer: Consumer,
        admin: Option<AdminPort>,
    ) -> Self {
        let admin_address = admin.as_ref().map(AdminPort::address);
        let open = Open { client: Arc::new(client), admin, sharing };
        Self {
            open: UntilClosed::new(
                open,
                "this client was closed: connect another with `tensor_relay.connect`",
            ),
            ticket,
            gpus: ProcessLocal::new(Arc::new(gpus)),
            consumer: admin_address.map(|_| consumer),
            admin_address,
        }
    }

    /// Why the connection is lost; `None` while it is up.
    pub(crate) fn connection_lost(&self, py: Python<'_>) -> Option<Arc<client::ClientError>> {
        self.client(py).ok()?.connection_lost()
    }

    /// Subscribes for a user's call.
    fn subscribe_for(
        slf: &Bound<'_, Self>,
        (request, role): (Request, Role),
        timeout: Option<Duration>,
        on_gap: OnGap,
        select: Select,
        out: Option<Arc<Out>>,
    ) -> PyResult<Subscription> {
        let py = slf.py();
        let of_out = out.as_ref().map(|out| out.selection(py)).transpose()?;
        let (names, parts) = of_out.map_or((None, vec![]), |(names, parts)| (Some(names), parts));
        let globs = select.patterns().map(<[_]>::to_vec).or(names).unwrap_or_default();
        let boxes = match (parts.is_empty(), select.boxes().is_empty()) {
            (false, false) => return Err(Kind::Request.raise(py, PARTS_AND_BOXES)),
            (true, _) => select.boxes().to_vec(),
            (false, true) => parts,
        };
        let request = request.select(globs).boxes(boxes);
        let request = match out.as_ref().is_some_and(|out| out.takes_what_is_there()) {
            true => request.allow_missing_boxes(),
            false => request,
        };
        Self::begin(slf, (request, role), timeout, on_gap, select, out)
    }

    /// What a user's call receives. Waits for the topic's newest version if the boxes depend on its tensors.
    fn select(
        &self,
        py: Python<'_>,
        topic: &Topic,
        select: Option<&Bound<'_, PyAny>>,
        boxes: Option<&Bound<'_, PyAny>>,
        timeout: Option<Duration>,
    ) -> PyResult<Select> {
        let select = Select::parse(py, select)?;
        let boxes = match (Boxes::parse(py, boxes)?, boxes) {
            (None, Some(boxes)) => {
                let newest = VersionSelector { topic: topic.clone(), version: None };
                let (client, timeout) = (self.client(py)?, timeout.unwrap_or(DESCRIBE_TIMEOUT));
                let described = described(py, wait(py, at_most(Some(timeout), newest.receive(&client)))?)?;
                Boxes::of_version(py, boxes, &described, &select)?
            }
            (parsed, _) => parsed.unwrap_or_default(),
        };
        Ok(select.with_boxes(boxes))
    }

    /// Subscribes to a part of a version. The admin port shows the topic if it `is_shown`.
    pub(crate) fn subscribe_to_part(
        slf: &Bound<'_, Self>,
        request: Request,
        is_shown: bool,
    ) -> PyResult<Subscription> {
        let role = if is_shown { Role::IsShown } else { Role::IsHidden };
        Self::begin(slf, (request, role), None, OnGap::Raise, Select::parse(slf.py(), None)?, None)
    }

    fn begin(
        slf: &Bound<'_, Self>,
        (request, role): (Request, Role),
        timeout: Option<Duration>,
        on_gap: OnGap,
        select: Select,
        out: Option<Arc<Out>>,
    ) -> PyResult<Subscription> {
        let (py, this) = (slf.py(), slf.get());
        let followed = this.consumer.as_ref().filter(|_| role != Role::IsHidden);
        let followed = followed.map(|consumer| consumer.follow(request.topic()));
        let shared = this
            .open
            .with(py, |open| Ok(open.sharing.topic(request.topic()).filter(|_| role == Role::Follows)))?;
        let subscribed = wait(py, this.client(py)?.subscribe_to(request))?;
        let subscription = (subscribed.map_err(|error| of_client(py, &error))?, followed, shared);
        Ok(Subscription::new(subscription, slf.clone().unbind(), timeout, on_gap, select, out))
    }

    /// The tensors of a user's `out`.
    fn out(
        &self,
        py: Python<'_>,
        mapping: Bound<'_, PyAny>,
        atomic: bool,
        strict: bool,
        rename: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Out> {
        Ok(Out::new(mapping, atomic, strict, rename, Arc::clone(self.gpus.get(py)?)))
    }

    /// [`out`](Self::out) of a call in which it may be missing.
    fn optional_out(
        &self,
        py: Python<'_>,
        mapping: Option<Bound<'_, PyAny>>,
        atomic: bool,
        strict: bool,
        rename: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Option<Arc<Out>>> {
        match (mapping, rename) {
            (Some(mapping), rename) => {
                self.out(py, mapping, atomic, strict, rename).map(|out| Some(Arc::new(out)))
            }
            (None, Some(_)) => {
                Err(Kind::Request.raise(py, "rename has no effect without out: it names the tensors of out"))
            }
            (None, None) => Ok(None),
        }
    }

    fn version_selector(
        &self,
        py: Python<'_>,
        topic: Option<&str>,
        version: Option<u64>,
        epoch: Option<&str>,
    ) -> PyResult<VersionSelector> {
        let version = parse_version(py, version, epoch)?;
        Ok(VersionSelector { topic: self.topic_or_default(py, topic)?, version })
    }

    /// The topic of this name; without a name, the ticket's topic.
    fn topic_or_default(&self, py: Python<'_>, topic: Option<&str>) -> PyResult<Topic> {
        match (topic, self.ticket.topic()) {
            (Some(name), _) => parse_topic(py, name),
            (None, Some(topic)) => Ok(topic.clone()),
            (None, None) => Err(Kind::Request.raise(py, "the ticket names no topic: give the topic's name")),
        }
    }

    fn client(&self, py: Python<'_>) -> PyResult<Arc<client::Client>> {
        self.open.with(py, |open| Ok(Arc::clone(&open.client)))
    }
}

/// The result of `describe`; `None` if the time was over.
fn described(py: Python<'_>, described: Option<Result<Description, GetError>>) -> PyResult<Description> {
    match described {
        Some(described) => described.map_err(|failed| of_get(py, &failed)),
        None => Err(NotArrived::TimedOut.raise(py)),
    }
}

/// Checks the arguments of `stream`.
///
/// # Errors
/// `RequestError` for an invalid epoch, for one without a version, and for buckets without bytes; `ValueError` for an
/// invalid timeout.
#[pyfunction]
pub(crate) fn check_stream(
    py: Python<'_>,
    version: Option<u64>,
    epoch: Option<&str>,
    bucket_bytes: usize,
    timeout: Option<f64>,
) -> PyResult<()> {
    parse_version(py, version, epoch)?;
    at_least(py, "bucket_bytes", bucket_bytes, 1)?;
    seconds("timeout", timeout).map(drop)
}
