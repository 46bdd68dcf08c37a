//! `tensor_relay.connect` and `Client`: a connection to a server.

use crate::{
    admin::AdminOptions,
    awaitable::awaitable,
    description::{Description, VersionSelector},
    errors::{Kind, of_client},
    gpu::{GpuOptions, Gpus, ordinal_called},
    out::Out,
    range::{at_least, positive_seconds, within},
    relay::topic_called,
    runtime::{self, ProcessLocal},
    select::Select,
    serve::transport_called,
    snapshot::Snapshot,
    start::{epoch_called, start_called},
    subscription::{OnGap, Subscription},
    topic_info::TopicInfo,
    wait::{finite_seconds, seconds, wait, wait_at_most},
};
use pyo3::{
    prelude::*,
    sync::MutexExt,
    types::{PyCFunction, PyDict},
};
use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tensor_relay_cli::{AdminPort, Consumer};
use tensor_relay_client::{
    self as client, Config, Connector, Identity, LANES_MAX, Lanes, MemoryStats, ReaderName, Request, Ticket,
    Topic, Tuning, Version,
};

fn no_such_version(py: Python<'_>) -> PyErr {
    Kind::Timeout.raise(py, "no such version came in time; the same call may be made again")
}

/// A session with a server. It connects again by itself when the connection is lost.
#[pyclass(frozen, weakref, module = "tensor_relay")]
pub(crate) struct Client {
    open: ProcessLocal<Mutex<Option<Open>>>,
    ticket: Ticket,
    gpus: ProcessLocal<Arc<Gpus>>,
    /// The state that the admin port shows; without a port nothing is recorded.
    consumer: Option<Consumer>,
    admin_address: Option<SocketAddr>,
}

/// The state until it is closed.
struct Open {
    client: Arc<client::Client>,
    admin: Option<AdminPort>,
}

/// The length of a GPU's slots: the default size of chunks. Longer chunks are copied twice.
const CHUNK_BYTES: u32 = 4 << 20;

/// The deadline for closing a connection.
const GOOD_BYE: Duration = Duration::from_secs(2);

/// Connects to a server. `tensor_relay.connect` says what each option is.
#[pyfunction]
#[pyo3(signature = (ticket, *, timeout, memory_bytes, base_bytes, lanes, topic_timeout, stall_timeout, reconnect_timeout,
                    versions_held_max, hold_timeout, transport, identity, certificate, device, gpu_memory_bytes, pinned_bytes,
                    admin, admin_token_file, ready_within))]
#[expect(clippy::too_many_arguments, reason = "keywords, each with its name where it is called")]
pub(crate) fn connect(
    py: Python<'_>,
    ticket: &str,
    timeout: f64,
    memory_bytes: Option<u64>,
    base_bytes: u64,
    lanes: Option<u32>,
    topic_timeout: f64,
    stall_timeout: f64,
    reconnect_timeout: f64,
    versions_held_max: usize,
    hold_timeout: f64,
    transport: &str,
    identity: Option<PathBuf>,
    certificate: Option<PathBuf>,
    device: &str,
    gpu_memory_bytes: Option<u64>,
    pinned_bytes: u64,
    admin: Option<&str>,
    admin_token_file: Option<PathBuf>,
    ready_within: Option<f64>,
) -> PyResult<Client> {
    let ticket: Ticket = ticket.parse().map_err(Kind::Ticket.because(py))?;
    let options = GpuOptions { memory_bytes: gpu_memory_bytes, pinned_bytes, chunk_bytes: CHUNK_BYTES };
    let gpus = Gpus::new(py, options)?;
    let open = |ordinal| gpus.device(py, ordinal).map_err(|error| error.raise(py));
    let device = ordinal_called(py, device)?.map(open).transpose()?;
    if ready_within.is_some() && admin.is_none() {
        return Err(Kind::Request.raise(py, "ready_within means nothing without admin=\"IP:PORT\""));
    }
    let consumer = Consumer::new(seconds("ready_within", ready_within)?);
    let _in_runtime = runtime::handle(py)?.enter();
    let admin = AdminOptions { address: admin, token_file: admin_token_file };
    // Before it connects: /readyz says no meanwhile.
    let admin = admin
        .open(py, |address, token_file| AdminPort::for_consumer(address, token_file, consumer.clone()))?;
    let config = Config {
        device: device.clone(),
        memory_bytes: memory_bytes.unwrap_or(u64::MAX),
        base_bytes,
        lanes: lanes_called(py, lanes)?,
        transport: transport_called(py, transport)?,
        identity: identity_of(py, identity.as_deref(), certificate.as_deref())?,
        topic_timeout: finite_seconds("topic_timeout", topic_timeout)?,
        stall_timeout: positive_seconds(py, "stall_timeout", stall_timeout)?,
        reconnect_timeout: finite_seconds("reconnect_timeout", reconnect_timeout)?,
        versions_held_max: at_least(py, "versions_held_max", versions_held_max, 1)?,
        hold_timeout: finite_seconds("hold_timeout", hold_timeout)?,
        ..Config::default()
    };
    let timeout = finite_seconds("timeout", timeout)?;
    let connect_timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
    let connector = Connector::new(Tuning { connect_timeout_ms, ..Tuning::default() });
    let connected = wait(py, client::Client::connect_with(&connector, &ticket, config))?;
    let client = Arc::new(connected.map_err(|error| of_client(py, &error))?);
    consumer.connected(client.status_reader(), device.as_ref());
    let admin_address = admin.as_ref().map(AdminPort::address);
    Ok(Client {
        open: ProcessLocal::new(Mutex::new(Some(Open { client, admin }))),
        ticket,
        gpus: ProcessLocal::new(Arc::new(gpus)),
        consumer: admin_address.map(|_| consumer),
        admin_address,
    })
}

/// The key of this client, and its certificate, if they are given.
fn identity_of(
    py: Python<'_>,
    key: Option<&Path>,
    certificate: Option<&Path>,
) -> PyResult<Option<Arc<Identity>>> {
    match (key, certificate) {
        (None, None) => Ok(None),
        (None, Some(_)) => {
            Err(Kind::Request.raise(py, "certificate needs the file of its key: give identity too"))
        }
        (Some(key), _) => {
            let identity = Identity::from_files(key, certificate).map_err(Kind::Other.because(py))?;
            Ok(Some(Arc::new(identity)))
        }
    }
}

#[pymethods]
impl Client {
    /// The topics that have a version, in order of name.
    ///
    /// Raises RelayConnectionError when the session is gone.
    fn topics(&self, py: Python<'_>) -> PyResult<Vec<TopicInfo>> {
        let client = self.client(py)?;
        let topics = wait(py, client.list())?.map_err(|error| of_client(py, &error))?;
        Ok(topics.into_iter().map(TopicInfo::of).collect())
    }

    /// Subscribes to a topic, which need not exist yet; without a name, to the one that the ticket names.
    ///
    /// In mode "latest", each snapshot is the newest; what is stale is skipped, and counted. In mode "every", all
    /// versions come in order; asking for the next says that the program is done with the one before.
    ///
    /// select: only tensors whose names match this pattern, or one of these, travel: `?` is one character and `*` any number,
    /// but no `/`, and `**` any number with `/`. A version of which none match is refused with RequestError; the log tells of
    /// single patterns without a match.
    /// start: "newest" or "next", and in mode "every" also "oldest", a version's number, or its epoch and number; by default
    /// the newest, or in mode "every" the oldest.
    /// window: in mode "every", how many versions may be received ahead, the one in use included (3).
    /// reader: in mode "every", a name under which the server keeps this reader's place while it is away.
    /// preempt: in mode "latest", whether a version under way is given up for a newer one.
    /// timeout: how long iteration waits for each version, in seconds; None waits for as long as it takes.
    /// on_gap: in mode "every", what to do about missing versions: "raise" VersionsMissedError and go on with the next
    /// call, or "continue", with `Snapshot.gap` set.
    /// out: a mapping, a list or a model of tensors that are received into. The snapshots then have no tensors of their own. With
    /// `atomic=True` each version is received elsewhere and copied when it is whole: a failure leaves the tensors as they
    /// were, for memory for a second version and one copy. With `atomic=False` it is received right into them, without
    /// either, and a failure leaves them torn (TornError); keep everybody away from them meanwhile. They may lie on a GPU:
    /// what was put on their framework's current stream before is waited for, and nothing is written before it is done.
    ///
    /// strict: whether `out` must have all tensors of the version (that are selected), and no others. With `strict=False`
    /// what both have is received, and nothing else; a version that has nothing in common with `out` is refused.
    ///
    /// Raises RequestError for what is no name or pattern, and for an empty `select`; TargetError for tensors of `out` that
    /// nothing can be received into, or that share some of their memory. What becomes of the subscription is told by the snapshots.
    #[pyo3(signature = (topic = None, *, mode = "latest", select = None, start = None, window = None, reader = None,
                        preempt = false, timeout = None, on_gap = "raise", out = None, atomic = true, strict = true))]
    #[expect(clippy::too_many_arguments, reason = "keywords, each with its name where it is called")]
    fn subscribe(
        slf: Bound<'_, Self>,
        topic: Option<&str>,
        mode: &str,
        select: Option<Bound<'_, PyAny>>,
        start: Option<Bound<'_, PyAny>>,
        window: Option<u32>,
        reader: Option<&str>,
        preempt: bool,
        timeout: Option<f64>,
        on_gap: &str,
        out: Option<Bound<'_, PyAny>>,
        atomic: bool,
        strict: bool,
    ) -> PyResult<Subscription> {
        let (py, this) = (slf.py(), slf.get());
        let topic = this.topic_meant(py, topic)?;
        let timeout = seconds("timeout", timeout)?;
        let on_gap = OnGap::called(py, on_gap)?;
        let gpus = this.gpus.get(py)?;
        let out = out.map(|mapping| Out::new(mapping.unbind(), atomic, strict, Arc::clone(gpus)));
        let followed = this.consumer.as_ref().map(|consumer| consumer.follow(&topic));
        let mut request = match mode {
            "latest" => Request::latest(topic),
            "every" => Request::every(topic),
            other => {
                return Err(
                    Kind::Request.raise(py, format!("mode is \"latest\" or \"every\", and not {other:?}"))
                );
            }
        };
        if let Some(start) = start {
            request = request.from(start_called(&start)?);
        }
        if let Some(window) = window {
            request = request.window(window);
        }
        if let Some(reader) = reader {
            request = request.reader(ReaderName::new(reader).map_err(Kind::Request.because(py))?);
        }
        let select = Select::called(py, select.as_ref())?;
        let of_out = out.as_ref().map(|out| out.selection(py)).transpose()?;
        let globs = select.patterns().map(<[_]>::to_vec).or(of_out).unwrap_or_default();
        let client = this.client(py)?;
        let subscribed = wait(py, client.subscribe_to(request.select(globs).preempt(preempt)))?;
        let subscription = subscribed.map_err(|error| of_client(py, &error))?;
        let subscription = (subscription, followed);
        Ok(Subscription::new(subscription, slf.clone().unbind(), timeout, on_gap, select, out))
    }

    /// Receives one version of a topic: the first that `subscribe` would deliver, without a lasting subscription.
    ///
    /// topic: its name; by default the topic that the ticket names.
    /// version: the number of the version; None is the newest. A version that is not yet published is waited for; one that
    /// is no longer retained is an error.
    /// epoch: with `version`, the epoch of the topic, as in `Snapshot.epoch`: after a restart a publisher counts versions
    /// from 1 again, in a new epoch.
    /// select, out, atomic, strict: as for `subscribe`.
    /// timeout: the deadline for the whole call in seconds; None waits without limit. A topic that does not exist is
    /// waited for at most for the client's `topic_timeout`.
    ///
    /// Raises VersionNotFoundError, TopicNotFoundError, RelayTimeoutError, TopicEndedError, and the other exceptions of
    /// `Subscription.next`. With `atomic=False`, a timeout after the first byte is a TornError.
    #[pyo3(signature = (topic = None, version = None, *, epoch = None, select = None, out = None, atomic = true,
                        strict = true, timeout = 60.0))]
    #[expect(clippy::too_many_arguments, reason = "keywords, each with its name where it is called")]
    fn get<'py>(
        slf: Bound<'py, Self>,
        topic: Option<&str>,
        version: Option<u64>,
        epoch: Option<&str>,
        select: Option<Bound<'py, PyAny>>,
        out: Option<Bound<'py, PyAny>>,
        atomic: bool,
        strict: bool,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let wanted = (topic, version, epoch, select, out, atomic, strict, timeout);
        in_python(slf, "get", wanted)
    }

    /// The same as a coroutine of asyncio. Not with `atomic=False`.
    #[pyo3(signature = (topic = None, version = None, *, epoch = None, select = None, out = None, atomic = true,
                        strict = true, timeout = 60.0))]
    #[expect(clippy::too_many_arguments, reason = "keywords, each with its name where it is called")]
    fn get_async<'py>(
        slf: Bound<'py, Self>,
        topic: Option<&str>,
        version: Option<u64>,
        epoch: Option<&str>,
        select: Option<Bound<'py, PyAny>>,
        out: Option<Bound<'py, PyAny>>,
        atomic: bool,
        strict: bool,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let wanted = (topic, version, epoch, select, out, atomic, strict, timeout);
        in_python(slf, "get_async", wanted)
    }

    /// Copies a snapshot to the tensors of `out`, all or none, as `subscribe(out=…)` does with a complete version: it can
    /// be received while the tensors are in use (`get`), and is installed in a pause of one copy. `strict` is as
    /// there. Returns the description of the version.
    ///
    /// Raises TargetError if the version does not fit, with nothing written; TornError if a GPU fails during the copy.
    #[pyo3(signature = (snapshot, out, *, strict = true))]
    pub(crate) fn install(
        &self,
        py: Python<'_>,
        snapshot: &Snapshot,
        out: Bound<'_, PyAny>,
        strict: bool,
    ) -> PyResult<Snapshot> {
        let out = Out::new(out.unbind(), true, strict, Arc::clone(self.gpus.get(py)?));
        out.copy(py, &snapshot.arrived(py)?)?.map_err(|failed| failed.raise(py))
    }

    /// Iterates over the tensors of one version with their names, in published order. They are received in parts, so that
    /// a version larger than this machine's memory can be read. The next part is received while the current one is in
    /// use. A part is delivered once it is complete and verified, the last one only if all parts are of one version. The
    /// version is complete only when the iteration has ended without an error: do not use its tensors before.
    ///
    /// topic, version, epoch, select: as for `get`. The publisher's next version waits as for a reader in mode "every".
    /// bucket_bytes: the maximum size of a part, not counting tensors that share a chunk with it; a larger tensor is a
    /// part by itself. Three parts are in memory at a time: that of the previous tensor, the current one and the next one.
    /// Do not keep tensors longer.
    /// timeout: the deadline for each part in seconds; None waits without limit.
    ///
    /// Raises the exceptions of `get`, and TornError after a failure behind the first tensor: the delivered tensors are
    /// not a version.
    #[pyo3(signature = (topic = None, version = None, *, epoch = None, select = None, bucket_bytes = 134_217_728,
                        timeout = 60.0))]
    fn stream<'py>(
        slf: Bound<'py, Self>,
        topic: Option<&str>,
        version: Option<u64>,
        epoch: Option<&str>,
        select: Option<Bound<'py, PyAny>>,
        bucket_bytes: usize,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        at_least(py, "bucket_bytes", bucket_bytes, 1)?;
        let wanted = (slf, topic, version, epoch, select, bucket_bytes, timeout);
        py.import("tensor_relay._stream")?.call_method1("stream", wanted)
    }

    /// The same as an asynchronous generator, for `async for`: it starts when the first tensor is requested. To
    /// leave it early, close it (`contextlib.aclosing`); cancellation releases everything.
    #[pyo3(signature = (topic = None, version = None, *, epoch = None, select = None, bucket_bytes = 134_217_728,
                        timeout = 60.0))]
    fn stream_async<'py>(
        slf: Bound<'py, Self>,
        topic: Option<&str>,
        version: Option<u64>,
        epoch: Option<&str>,
        select: Option<Bound<'py, PyAny>>,
        bucket_bytes: usize,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        at_least(py, "bucket_bytes", bucket_bytes, 1)?;
        let wanted = (slf, topic, version, epoch, select, bucket_bytes, timeout);
        py.import("tensor_relay._stream")?.call_method1("stream_async", wanted)
    }

    /// The description of a version, without its tensors: little more than their names travels. `topic`, `version`,
    /// `epoch`, `timeout` and the exceptions are as for `get`.
    #[pyo3(signature = (topic = None, version = None, *, epoch = None, timeout = 60.0))]
    fn describe(
        slf: Bound<'_, Self>,
        topic: Option<&str>,
        version: Option<u64>,
        epoch: Option<&str>,
        timeout: Option<f64>,
    ) -> PyResult<Description> {
        let (py, this) = (slf.py(), slf.get());
        let wanted = this.version_meant(py, topic, version, epoch)?;
        let (client, timeout) = (this.client(py)?, seconds("timeout", timeout)?);
        match wait_at_most(py, timeout, wanted.receive(&client))? {
            Some(described) => described.map_err(|failed| failed.raise(py)),
            None => Err(no_such_version(py)),
        }
    }

    /// The same as a coroutine of asyncio.
    #[pyo3(signature = (topic = None, version = None, *, epoch = None, timeout = 60.0))]
    fn describe_async<'py>(
        slf: Bound<'py, Self>,
        topic: Option<&str>,
        version: Option<u64>,
        epoch: Option<&str>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let wanted = Arc::new(this.version_meant(py, topic, version, epoch)?);
        let (client, timeout) = (this.client(py)?, seconds("timeout", timeout)?);
        let begin = PyCFunction::new_closure(py, None, None, move |args, _| {
            let (client, wanted) = (Arc::clone(&client), Arc::clone(&wanted));
            let describing = async move {
                let described = wanted.receive(&client);
                match timeout {
                    Some(timeout) => tokio::time::timeout(timeout, described).await.ok(),
                    None => Some(described.await),
                }
            };
            let begun = awaitable(args.py(), describing, |py, described| match described {
                Some(Ok(description)) => Ok(Py::new(py, description)?.into_any()),
                Some(Err(failed)) => Err(failed.raise(py)),
                None => Err(no_such_version(py)),
            });
            begun.map(Bound::unbind)
        })?;
        py.import("tensor_relay._coroutines")?.call_method1("awaited", (begin,))
    }

    /// The ticket that it was connected with. Treat it as a secret if the tensors are.
    #[getter]
    fn ticket(&self) -> String {
        self.ticket.to_string()
    }

    /// Counters and gauges of this client by name: `reconnects`; and of this machine's memory `snapshot_bytes`, which
    /// snapshots take that are being received, ready or held; `reusable_bytes`, which are kept for the next ones until
    /// two seconds after the last subscription ends; and `base_bytes`, copies of versions to which deltas are applied.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let client = self.client(py)?;
        let MemoryStats { snapshot_bytes, reusable_bytes, base_bytes } = client.memory();
        let by_name = PyDict::new(py);
        for (name, value) in [
            ("reconnects", client.reconnects()),
            ("snapshot_bytes", snapshot_bytes),
            ("reusable_bytes", reusable_bytes),
            ("base_bytes", base_bytes),
        ] {
            by_name.set_item(name, value)?;
        }
        Ok(by_name)
    }

    /// Whether it is of no use any more: it was closed, or its server was gone for longer than `reconnect_timeout`.
    #[getter]
    fn closed(&self, py: Python<'_>) -> PyResult<bool> {
        let open = self.open.get(py)?.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        Ok(open.as_ref().is_none_or(|open| open.client.has_ended()))
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

    /// Ends the session and tells the server. Snapshots stay; subscriptions end. Closing again does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let open = self
            .open
            .get(py)?
            .lock_py_attached(py)
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(Open { client, admin }) = open {
            py.detach(|| drop(admin)); // It waits for the thread of the port, which takes a moment.
            // If another thread is in the middle of a call, the session closes when that call ends.
            if let Some(client) = Arc::into_inner(client) {
                wait(py, async { tokio::time::timeout(GOOD_BYE, client.close()).await.ok() })?;
            }
        }
        self.gpus.get(py)?.close(py);
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        // A forked child leaves the block with what it was forked from: that is the parent's to close.
        if !self.open.is_usable() {
            return Ok(());
        }
        self.close(py)
    }

    fn __repr__(&self) -> String {
        format!("Client({})", self.ticket.addresses().join(","))
    }
}

impl Client {
    /// Why there is no connection now.
    pub(crate) fn connection_lost(&self, py: Python<'_>) -> Option<Arc<client::ClientError>> {
        self.client(py).ok()?.connection_lost()
    }

    /// The topic of this name; without one, that which the ticket names.
    fn version_meant(
        &self,
        py: Python<'_>,
        topic: Option<&str>,
        version: Option<u64>,
        epoch: Option<&str>,
    ) -> PyResult<VersionSelector> {
        let epoch = epoch.map(|epoch| epoch_called(py, epoch)).transpose()?;
        let version = version.map(|version| (epoch, Version(version)));
        Ok(VersionSelector { topic: self.topic_meant(py, topic)?, version })
    }

    fn topic_meant(&self, py: Python<'_>, topic: Option<&str>) -> PyResult<Topic> {
        match (topic, self.ticket.topic()) {
            (Some(name), _) => topic_called(py, name),
            (None, Some(topic)) => Ok(topic.clone()),
            (None, None) => Err(Kind::Request.raise(py, "the ticket names no topic: say which")),
        }
    }

    fn client(&self, py: Python<'_>) -> PyResult<Arc<client::Client>> {
        let open = self
            .open
            .get(py)?
            .lock_py_attached(py)
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map(|open| Arc::clone(&open.client));
        let closed =
            || Kind::Closed.raise(py, "this client was closed: connect another with `tensor_relay.connect`");
        open.ok_or_else(closed)
    }
}

fn lanes_called(py: Python<'_>, lanes: Option<u32>) -> PyResult<Lanes> {
    match lanes {
        None => Ok(Lanes::Auto),
        Some(lanes) => within(py, "lanes", lanes, 1..=LANES_MAX).map(Lanes::Fixed),
    }
}

/// The ticket without its topic: the same text for all tickets of a server that name it alike and have the same token. Two with
/// other tokens have other rights, and share nothing.
///
/// # Errors
/// `TicketError` for what is no ticket.
#[pyfunction]
pub(crate) fn server_of(py: Python<'_>, ticket: &str) -> PyResult<String> {
    let ticket: Ticket = ticket.parse().map_err(Kind::Ticket.because(py))?;
    let server = Ticket::new(ticket.addresses().to_vec(), ticket.keys().to_vec(), None);
    let server = server.map_err(Kind::Ticket.because(py))?;
    Ok(match ticket.token() {
        Some(token) => server.with_token(token.clone()).to_string(),
        None => server.to_string(),
    })
}

/// A call of the same name that is written in Python.
fn in_python<'py>(
    client: Bound<'py, Client>,
    name: &str,
    (topic, version, epoch, select, out, atomic, strict, timeout): Get<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = client.py();
    let options = PyDict::new(py);
    options.set_item("select", select)?;
    options.set_item("out", out)?;
    options.set_item("atomic", atomic)?;
    options.set_item("strict", strict)?;
    py.import("tensor_relay._get")?
        .call_method1(name, (client, topic, version, epoch, timeout, options))
}

/// The arguments of `Client.get`.
type Get<'a, 'py> = (
    Option<&'a str>,
    Option<u64>,
    Option<&'a str>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    bool,
    bool,
    Option<f64>,
);
