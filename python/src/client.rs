//! `tensor_relay.connect` and `Client`: a connection to a server.

use crate::{
    admin::AdminOptions,
    awaitable::awaitable,
    description::{Description, VersionSelector},
    errors::{Kind, of_client, of_get},
    gpu::{GpuOptions, Gpus, parse_device},
    out::Out,
    range::{at_least, positive_seconds, within},
    relay::parse_topic,
    runtime::{self, ProcessLocal},
    select::Select,
    serve::parse_transport,
    snapshot::Snapshot,
    start::{parse_epoch, parse_start},
    subscription::{NotArrived, OnGap, Subscription},
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
    sync::{Arc, LazyLock, Mutex, PoisonError},
    time::Duration,
};
use tensor_relay_cli::{AdminPort, Consumer};
use tensor_relay_client::{
    self as client, Config, Connector, Epoch, Identity, LANES_MAX, Lanes, MemoryStats, ReaderName, Request,
    Ticket, Topic, Tuning, Version,
};

/// A session with a server, which reconnects by itself when the connection is lost.
#[pyclass(frozen, weakref, module = "tensor_relay")]
pub(crate) struct Client {
    open: ProcessLocal<Mutex<Option<Open>>>,
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
}

/// The length of a GPU's slots: the default size of chunks. A longer chunk is copied once more.
const CHUNK_BYTES: u32 = 4 << 20;

/// The consumer as which publishers count the commits of this process' clients, unless a client counts alone.
static THIS_PROCESS: LazyLock<[u8; 16]> = LazyLock::new(|| Config::default().consumer);

/// The deadline for closing a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Connects to a server. `tensor_relay.connect` documents the options.
#[pyfunction]
#[pyo3(signature = (ticket, *, timeout, memory_bytes, base_bytes, lanes, topic_timeout, stall_timeout, reconnect_timeout,
                    versions_held_max, hold_timeout, transport, identity, certificate, device, gpu_memory_bytes, pinned_bytes,
                    admin, admin_token_file, ready_within, consumer, sources))]
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
    consumer: &str,
    sources: Vec<String>,
) -> PyResult<Client> {
    let ticket: Ticket = ticket.parse().map_err(Kind::Ticket.because(py))?;
    let sources: Result<Vec<Ticket>, _> = sources.iter().map(|source| source.parse()).collect();
    let options = GpuOptions { memory_bytes: gpu_memory_bytes, pinned_bytes, chunk_bytes: CHUNK_BYTES };
    let gpus = Gpus::new(py, options)?;
    let open = |ordinal| gpus.device(py, ordinal).map_err(|error| error.raise(py));
    let device = parse_device(py, device)?.map(open).transpose()?;
    if ready_within.is_some() && admin.is_none() {
        return Err(Kind::Request.raise(py, "ready_within has no effect without admin=\"IP:PORT\""));
    }
    let counted_as = parse_consumer(py, consumer)?;
    let consumer = Consumer::new(seconds("ready_within", ready_within)?);
    let _in_runtime = runtime::handle(py)?.enter();
    let admin = AdminOptions { address: admin, token_file: admin_token_file };
    // Before connecting, so that /readyz answers "not ready" meanwhile.
    let admin = admin
        .open(py, |address, token_file| AdminPort::for_consumer(address, token_file, consumer.clone()))?;
    let config = Config {
        device: device.clone(),
        memory_bytes: memory_bytes.unwrap_or(u64::MAX),
        base_bytes,
        consumer: counted_as,
        sources: sources.map_err(Kind::Ticket.because(py))?,
        lanes: parse_lanes(py, lanes)?,
        transport: parse_transport(py, transport)?,
        identity: identity_of(py, identity.as_deref(), certificate.as_deref())?,
        topic_timeout: finite_seconds("topic_timeout", topic_timeout)?,
        stall_timeout: positive_seconds(py, "stall_timeout", stall_timeout)?,
        reconnect_timeout: finite_seconds("reconnect_timeout", reconnect_timeout)?,
        versions_held_max: at_least(py, "versions_held_max", versions_held_max, 1)?,
        hold_timeout: finite_seconds("hold_timeout", hold_timeout)?,
        volatile_snapshots: true, // Views of tensors are writable.
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

/// The client's key and certificate, if the user gave their files.
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
    /// start: "newest" or "next", and in mode "every" also "oldest", a version's number, or its epoch and number; by
    /// default "newest", or in mode "every" "oldest".
    /// window: in mode "every", the maximum number of versions received ahead, including the one in use; by default 3.
    /// reader: in mode "every", a name under which the server keeps this reader's place while it is disconnected.
    /// preempt: in mode "latest", whether a newer version replaces one that is being received.
    /// timeout: the deadline of iteration for each version in seconds; None waits without limit.
    /// on_gap: in mode "every", the reaction to missing versions: "raise" raises VersionsMissedError, after which the
    /// next call continues; "continue" sets `Snapshot.gap`.
    /// out: a mapping, a list or a model of tensors to receive into. The snapshots then have no tensors of their own.
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
    #[pyo3(signature = (topic = None, *, mode = "latest", select = None, start = None, window = None, reader = None,
                        preempt = false, timeout = None, on_gap = "raise", out = None, atomic = true, strict = true,
                        rename = None))]
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
        rename: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Subscription> {
        let (py, this) = (slf.py(), slf.get());
        let topic = this.topic_or_default(py, topic)?;
        let timeout = seconds("timeout", timeout)?;
        let on_gap = OnGap::parse(py, on_gap)?;
        let out = this.optional_out(py, out, atomic, strict, rename)?;
        let mut request = match mode {
            "latest" if window.is_some() || reader.is_some() => {
                return Err(
                    Kind::Request.raise(py, "window and reader have an effect in mode \"every\" only")
                );
            }
            "latest" => Request::latest(topic),
            "every" => Request::every(topic),
            other => {
                return Err(Kind::Request
                    .raise(py, format!("mode is {other:?}, but must be \"latest\" or \"every\"")));
            }
        };
        if let Some(start) = start {
            request = request.from(parse_start(&start)?);
        }
        if let Some(window) = window {
            request = request.window(window);
        }
        if let Some(reader) = reader {
            request = request.reader(ReaderName::new(reader).map_err(Kind::Request.because(py))?);
        }
        Self::subscribe_for(&slf, request.preempt(preempt), timeout, on_gap, select, out)
    }

    /// Subscribes to the version that `get` receives.
    #[pyo3(signature = (topic, version, epoch, *, select, out, atomic, strict, rename))]
    #[expect(clippy::too_many_arguments, reason = "keywords, each with its name where it is called")]
    fn _subscribe_once(
        slf: Bound<'_, Self>,
        topic: Option<&str>,
        version: Option<u64>,
        epoch: Option<&str>,
        select: Option<Bound<'_, PyAny>>,
        out: Option<Bound<'_, PyAny>>,
        atomic: bool,
        strict: bool,
        rename: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Subscription> {
        let (py, this) = (slf.py(), slf.get());
        let wanted = this.version_selector(py, topic, version, epoch)?;
        let out = this.optional_out(py, out, atomic, strict, rename)?;
        Self::subscribe_for(&slf, wanted.request(), None, OnGap::Raise, select, out)
    }

    /// Receives one version of a topic, without a lasting subscription.
    ///
    /// topic: its name; by default the topic that the ticket names.
    /// version: the number of the version; None is the newest. A version that is not yet published is waited for; one
    /// that is no longer retained is an error.
    /// epoch: with `version`, the epoch of the topic, as in `Snapshot.epoch`: after a restart a publisher counts
    /// versions from 1 again, in a new epoch. Without `version` it is a RequestError.
    /// select, out, atomic, strict, rename: as for `subscribe`.
    /// timeout: the deadline for the whole call in seconds; None waits without limit. A topic that does not exist is
    /// waited for at most for the client's `topic_timeout`.
    ///
    /// Raises VersionNotFoundError, TopicNotFoundError, RelayTimeoutError, TopicEndedError, and the other exceptions of
    /// `Subscription.next`. With `atomic=False`, a timeout during the transfer is a TornError.
    #[pyo3(signature = (topic = None, version = None, *, epoch = None, select = None, out = None, atomic = true,
                        strict = true, rename = None, timeout = 60.0))]
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
        rename: Option<Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let wanted = (topic, version, epoch, select, out, atomic, strict, rename, timeout);
        call_python(slf, "get", wanted)
    }

    /// `get` as a coroutine of asyncio. Not with `atomic=False`. When it is cancelled, the tensors of `out` may have the
    /// whole version.
    #[pyo3(signature = (topic = None, version = None, *, epoch = None, select = None, out = None, atomic = true,
                        strict = true, rename = None, timeout = 60.0))]
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
        rename: Option<Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let wanted = (topic, version, epoch, select, out, atomic, strict, rename, timeout);
        call_python(slf, "get_async", wanted)
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

    /// Iterates over the tensors of one version with their names, in the order in which they are sent. They are received
    /// in buckets, so that a version larger than this machine's memory can be read. The next bucket is received while
    /// the current one is in use. A bucket is delivered once it is complete and verified, the last one only if all
    /// buckets are of one version. The version is complete only when the iteration has ended without an error: do not
    /// use its tensors before.
    ///
    /// topic, version, epoch, select: as for `get`. The publisher's next version waits as for a reader in mode "every".
    /// bucket_bytes: the maximum size of a bucket; a larger chunk or tensor is a bucket by itself. Three buckets are in
    /// memory at a time: the previous, the current and the next one. Do not keep tensors of earlier buckets.
    /// timeout: the deadline for each bucket in seconds; None waits without limit.
    ///
    /// Raises the exceptions of `get`, and TornError for a failure after the first tensor: the tensors delivered so far
    /// are not a complete version.
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
        check_wanted(py, version, epoch, timeout)?;
        let wanted = (slf, topic, version, epoch, select, bucket_bytes, timeout);
        py.import("tensor_relay._stream")?.call_method1("stream", wanted)
    }

    /// `stream` as an asynchronous generator, for `async for`: it starts when the first tensor is requested. To leave
    /// it early, close it (`contextlib.aclosing`); cancellation releases everything.
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
        check_wanted(py, version, epoch, timeout)?;
        let wanted = (slf, topic, version, epoch, select, bucket_bytes, timeout);
        py.import("tensor_relay._stream")?.call_method1("stream_async", wanted)
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
        match wait_at_most(py, timeout, wanted.receive(&client))? {
            Some(described) => described.map_err(|failed| of_get(py, &failed)),
            None => Err(NotArrived::TimedOut.raise(py)),
        }
    }

    /// `describe` as a coroutine of asyncio.
    #[pyo3(signature = (topic = None, version = None, *, epoch = None, timeout = 60.0))]
    fn describe_async<'py>(
        slf: Bound<'py, Self>,
        topic: Option<&str>,
        version: Option<u64>,
        epoch: Option<&str>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let wanted = Arc::new(this.version_selector(py, topic, version, epoch)?);
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
                Some(Err(failed)) => Err(of_get(py, &failed)),
                None => Err(NotArrived::TimedOut.raise(py)),
            });
            begun.map(Bound::unbind)
        })?;
        py.import("tensor_relay._coroutines")?.call_method1("await_lazily", (begin,))
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

    /// Whether this client was closed or its session has ended, as after losing the server for `reconnect_timeout`.
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

    /// Ends the session and notifies the server. Subscriptions end; snapshots stay valid. Closing again does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let open = self
            .open
            .get(py)?
            .lock_py_attached(py)
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(Open { client, admin }) = open {
            py.detach(|| drop(admin)); // Waits briefly for the port's thread.
            // If another thread is in a call, the session closes when that call ends.
            if let Some(client) = Arc::into_inner(client) {
                wait(py, async { tokio::time::timeout(CLOSE_TIMEOUT, client.close()).await.ok() })?;
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
        // In a forked child, the parent's client must not be closed.
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
    /// Why the connection is lost; `None` while it is up.
    pub(crate) fn connection_lost(&self, py: Python<'_>) -> Option<Arc<client::ClientError>> {
        self.client(py).ok()?.connection_lost()
    }

    /// Subscribes for a user's call.
    fn subscribe_for(
        slf: &Bound<'_, Self>,
        request: Request,
        timeout: Option<Duration>,
        on_gap: OnGap,
        select: Option<Bound<'_, PyAny>>,
        out: Option<Out>,
    ) -> PyResult<Subscription> {
        let (py, this) = (slf.py(), slf.get());
        let followed = this.consumer.as_ref().map(|consumer| consumer.follow(request.topic()));
        let select = Select::parse(py, select.as_ref())?;
        let names_of_out = out.as_ref().map(|out| out.selection(py)).transpose()?;
        let globs = select.patterns().map(<[_]>::to_vec).or(names_of_out).unwrap_or_default();
        let client = this.client(py)?;
        let subscribed = wait(py, client.subscribe_to(request.select(globs)))?;
        let subscription = (subscribed.map_err(|error| of_client(py, &error))?, followed);
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
    ) -> PyResult<Option<Out>> {
        match (mapping, rename) {
            (Some(mapping), rename) => self.out(py, mapping, atomic, strict, rename).map(Some),
            (None, Some(_)) => {
                Err(Kind::Request.raise(py, "rename has no effect without out: it names the tensors of out"))
            }
            (None, None) => Ok(None),
        }
    }

    /// Subscribes to a part of a version. The admin port shows the topic if it `is_shown`.
    pub(crate) fn subscribe_to_part(
        slf: &Bound<'_, Self>,
        request: Request,
        is_shown: bool,
    ) -> PyResult<Subscription> {
        let (py, this) = (slf.py(), slf.get());
        let followed = this.consumer.as_ref().filter(|_| is_shown);
        let followed = followed.map(|consumer| consumer.follow(request.topic()));
        let client = this.client(py)?;
        let subscribed = wait(py, client.subscribe_to(request))?.map_err(|error| of_client(py, &error))?;
        let (all, client) = (Select::parse(py, None)?, slf.clone().unbind());
        Ok(Subscription::new((subscribed, followed), client, None, OnGap::Raise, all, None))
    }

    fn version_selector(
        &self,
        py: Python<'_>,
        topic: Option<&str>,
        version: Option<u64>,
        epoch: Option<&str>,
    ) -> PyResult<VersionSelector> {
        let version = version_in(py, version, epoch)?;
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

/// The consumer as which publishers count a client's commits.
fn parse_consumer(py: Python<'_>, name: &str) -> PyResult<[u8; 16]> {
    match name {
        "process" => Ok(*THIS_PROCESS),
        "client" => Ok(Config::default().consumer),
        other => {
            Err(Kind::Request
                .raise(py, format!("consumer is {other:?}, but must be \"process\" or \"client\"")))
        }
    }
}

fn parse_lanes(py: Python<'_>, lanes: Option<u32>) -> PyResult<Lanes> {
    match lanes {
        None => Ok(Lanes::Auto),
        Some(lanes) => within(py, "lanes", lanes, 1..=LANES_MAX).map(Lanes::Fixed),
    }
}

/// The ticket without its topic: the same text for all tickets with the same server addresses, keys and token. Tickets
/// with different tokens have different rights, so their texts differ.
///
/// # Errors
/// `TicketError` for an invalid ticket; `ForkError` in a forked process that cannot connect.
#[pyfunction]
pub(crate) fn server_of(py: Python<'_>, ticket: &str) -> PyResult<String> {
    runtime::handle(py)?;
    let ticket: Ticket = ticket.parse().map_err(Kind::Ticket.because(py))?;
    let server = Ticket::new(ticket.addresses().to_vec(), ticket.keys().to_vec(), None);
    let server = server.map_err(Kind::Ticket.because(py))?;
    Ok(match ticket.token() {
        Some(token) => server.with_token(token.clone()).to_string(),
        None => server.to_string(),
    })
}

/// Checks the arguments of the methods that are implemented in Python.
///
/// # Errors
/// `RequestError` for an invalid epoch, or one without a version; `ValueError` for an invalid timeout.
fn check_wanted(
    py: Python<'_>,
    version: Option<u64>,
    epoch: Option<&str>,
    timeout: Option<f64>,
) -> PyResult<()> {
    version_in(py, version, epoch)?;
    seconds("timeout", timeout).map(drop)
}

/// A version's number, with its epoch if it is given.
///
/// # Errors
/// `RequestError` for an invalid epoch, or one without a version.
fn version_in(
    py: Python<'_>,
    version: Option<u64>,
    epoch: Option<&str>,
) -> PyResult<Option<(Option<Epoch>, Version)>> {
    let epoch = epoch.map(|epoch| parse_epoch(py, epoch)).transpose()?;
    match (version, epoch) {
        (None, Some(_)) => Err(Kind::Request
            .raise(py, "`epoch` says in which epoch `version` is: give the version's number too")),
        (version, epoch) => Ok(version.map(|version| (epoch, Version(version)))),
    }
}

/// Calls the implementation of a method in Python, which has the same name.
fn call_python<'py>(
    client: Bound<'py, Client>,
    name: &str,
    (topic, version, epoch, select, out, atomic, strict, rename, timeout): Get<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = client.py();
    check_wanted(py, version, epoch, timeout)?;
    let options = PyDict::new(py);
    options.set_item("select", select)?;
    options.set_item("out", out)?;
    options.set_item("atomic", atomic)?;
    options.set_item("strict", strict)?;
    options.set_item("rename", rename)?;
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
    Option<Bound<'py, PyAny>>,
    Option<f64>,
);
