//! `tensor_relay.Relay`: a server inside the producer's process.

use crate::{
    closable::Closable,
    engine_caches,
    errors::Kind,
    gpu::Gpus,
    hold::HoldUntil,
    memory::Places,
    metadata,
    publication::Publication,
    range::{at_least, one_of},
    runtime::{self, ProcessLocal},
    split,
    tensors_in::{TensorOptions, TensorsIn},
    tickets::Tickets,
    topic_publisher::TopicPublisher,
    until_closed::UntilClosed,
    version::Version,
    wait::{finite_seconds, seconds, wait, wait_at_most},
};
use pyo3::{
    prelude::*,
    types::{IntoPyDict, PyDict},
};
use std::{
    collections::{BTreeMap, HashMap},
    mem,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tensor_relay_cli::AdminPort;
use tensor_relay_server::{
    self as server, Device, FileError, Keep, Metadata, Publishable, Publisher, Server, Staging, TensorFiles,
    Topic, TopicOptions, WhenFull,
};

/// A server that runs in this process, on threads of its own.
#[pyclass(frozen, weakref, module = "tensor_relay")]
pub(crate) struct Relay {
    open: UntilClosed<Open>,
    address: SocketAddr,
    admin_address: Option<SocketAddr>,
    tickets: Tickets,
    gpus: ProcessLocal<Gpus>,
    /// The GPU that staged versions are copied to; `None` for host memory.
    device: Option<usize>,
    /// The number of bytes copied to publish all versions.
    copied_bytes: AtomicU64,
}

/// A topic's publisher, shared by concurrent publishes.
type SharedPublisher = Arc<Closable<TopicPublisher>>;

/// The number of topics at which the names of withdrawn topics are forgotten, so that a program that keeps creating
/// and withdrawing topics needs bounded memory.
pub(crate) const REMEMBERED_MAX: usize = 4_096;

/// The state until it is closed.
struct Open {
    server: Server,
    topics: HashMap<Topic, TopicState>,
    _admin: Option<AdminPort>,
}

/// A topic that was published or opened here. Ended topics are remembered: ending one again is allowed, while ending
/// an unknown name is an error.
enum TopicState {
    Open(SharedPublisher),
    /// Retained versions can still be subscribed to.
    Ended,
    Withdrawn,
}

#[pymethods]
impl Relay {
    /// The address that it listens on, as `IP:PORT`.
    #[getter]
    fn address(&self) -> String {
        self.address.to_string()
    }

    /// The address of the admin port, as `IP:PORT`; None without one.
    #[getter]
    fn admin(&self) -> Option<String> {
        self.admin_address.map(|address| address.to_string())
    }

    /// The ticket with which consumers connect, for `tensor_relay.connect` and `tensor-relay subscribe`. Treat it as a
    /// secret if the tensors are secret. It stays valid while `state_dir` is kept.
    #[getter]
    fn ticket(&self) -> String {
        self.tickets.own(self.tickets.bare.clone())
    }

    /// A ticket for one topic only.
    ///
    /// With `expires` it is valid for that many seconds; with `holder`, `tensor-relay tickets list` shows that name.
    /// With either, the ticket is a separate one, which can be revoked alone.
    ///
    /// Raises RequestError for an invalid topic name, and for a server that is open or ephemeral, which has no such
    /// tickets.
    #[pyo3(signature = (topic, *, expires=None, holder=None))]
    fn ticket_for(
        &self,
        py: Python<'_>,
        topic: &str,
        expires: Option<f64>,
        holder: Option<&str>,
    ) -> PyResult<String> {
        let ticket = self.tickets.bare.clone().with_topic(parse_topic(py, topic)?);
        match (expires, holder) {
            (None, None) => Ok(self.tickets.own(ticket)),
            _ => self.tickets.issue(py, ticket, expires, holder.unwrap_or_default()),
        }
    }

    /// Opens a topic with its own options; without it, the first `publish` opens the topic with these defaults.
    ///
    /// The last `keep_versions` versions, of at most `keep_bytes` bytes together, are retained for late subscribers and
    /// for readers in mode `every`. While such a reader still needs the oldest of them, `publish` waits for
    /// `publish_timeout` seconds; then the reader is evicted, or with `when_full="block"` the wait continues. Transfers
    /// of replaced versions may take `release_timeout` seconds more (None: ten minutes, or ten seconds if borrowed).
    /// After `expire_after` seconds without a publish the topic ends.
    ///
    /// Raises PublishError if the topic is open.
    #[pyo3(signature = (topic, *, keep_versions = 1, keep_bytes = None, when_full = "evict", publish_timeout = 10.0,
                        release_timeout = None, expire_after = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords, each with its name where it is called")]
    fn open(
        &self,
        py: Python<'_>,
        topic: &str,
        keep_versions: u32,
        keep_bytes: Option<u64>,
        when_full: &str,
        publish_timeout: f64,
        release_timeout: Option<f64>,
        expire_after: Option<f64>,
    ) -> PyResult<()> {
        let topic = parse_topic(py, topic)?;
        let when_full =
            one_of(py, "when_full", when_full, &[("evict", WhenFull::Evict), ("block", WhenFull::Block)])?;
        let versions = at_least(py, "keep_versions", keep_versions, 1)?;
        let options = TopicOptions {
            keep: Keep { versions, bytes: keep_bytes.unwrap_or(u64::MAX) },
            when_full,
            publish_timeout: finite_seconds("publish_timeout", publish_timeout)?,
            release_timeout: seconds("release_timeout", release_timeout)?,
            expire_after: seconds("expire_after", expire_after)?,
            ..TopicOptions::default()
        };
        let _in_runtime = runtime::handle(py)?.enter();
        self.open.with(py, |open| open.open(py, topic, options).map(drop))
    }

    /// Publishes tensors as the next version of `topic`, atomically for all subscribers.
    ///
    /// `tensors` maps names to tensors, or is a model, whose `state_dict()` is used, or a list, whose tensors are named
    /// "0", "1", and so on. Tensors may be in host memory or on CUDA GPUs, and of PyTorch, NumPy (with ml_dtypes), JAX,
    /// CuPy, or any type with `__dlpack__` or the buffer protocol. Strings, numbers, booleans and None are sent as the
    /// version's `entries`. Tensors that share their memory and are alike (tied weights) are sent once. Nothing is ever
    /// pickled.
    ///
    /// With `hold="stage"` all tensors are copied, and may be written again when this returns. With `hold="borrow"`
    /// contiguous tensors are not copied as a whole: each chunk is copied when it is sent, and they must not be written
    /// before the publication is `released`; they must be all on the host, or all on one GPU. `dtype`, e.g. "bf16",
    /// casts floating-point tensors first; it accepts names, and the dtype objects of PyTorch, NumPy, JAX and
    /// safetensors. `rename` is a function from each name to the name in the version, such as
    /// `lambda name: name.removeprefix("module.")`. `split` cuts tensors into pieces for readers of parts of them: a
    /// dictionary from globs to `(dimension, parts)`, such as `{"**.o_proj.weight": (1, 8)}`, or "tensor-parallel=8";
    /// the first glob that matches a name applies. A version without tensors is published only with `allow_empty=True`.
    ///
    /// GPU tensors are read after the work that is already queued on their framework's current stream. Waiting for that
    /// work does not block this or any other stream.
    ///
    /// `metadata` is sent with the version: strings, numbers, booleans, None, and lists and dictionaries of these.
    /// Values other than strings are sent as JSON, which is what programs outside of Python receive. `timeout` limits,
    /// in seconds, the wait for readers in mode `every`, in addition to the options of `open`.
    ///
    /// Raises UnsupportedTensorError, which names the value that cannot be published; PublishError; NoRoomError beyond
    /// `staged_bytes`; RelayTimeoutError after `timeout`. In these cases nothing was published.
    #[pyo3(signature = (topic, tensors, *, hold = "stage", metadata = None, dtype = None, rename = None,
                        split = None, allow_empty = false, timeout = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords, each with its name where it is called")]
    fn publish(
        &self,
        py: Python<'_>,
        topic: &str,
        tensors: &Bound<'_, PyAny>,
        hold: &str,
        metadata: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        rename: Option<&Bound<'_, PyAny>>,
        split: Option<&Bound<'_, PyAny>>,
        allow_empty: bool,
        timeout: Option<f64>,
    ) -> PyResult<Publication> {
        let (topic, timeout) = (parse_topic(py, topic)?, seconds("timeout", timeout)?);
        let hold = HoldUntil::parse(py, hold)?;
        let mut metadata = metadata.map_or_else(|| Ok(vec![]), metadata::of_user)?;
        let options = TensorOptions { dtype, rename, split: split::of(py, split)?, allow_empty };
        let mut lent = TensorsIn::of(tensors, &options, hold, self.gpus.get(py)?)?;
        let (publisher, staging) = self.publisher(py, &topic)?;
        metadata.append(&mut lent.entries);
        let places = match hold {
            HoldUntil::Stage => Places::default(),
            HoldUntil::Borrow => lent.places(),
        };
        let readable = py.detach(|| lent.into_readable()).map_err(Kind::Publish.because(py))?;
        let Version { publishable, payload_bytes, copied_bytes } = match hold {
            HoldUntil::Stage => readable.stage(py, &staging, self.staged_on(py)?.as_ref())?,
            HoldUntil::Borrow => readable.lend(py, &staging)?,
        };
        let version = (publishable, metadata, places);
        let publication = publish_in_turn(py, &topic, publisher, version, timeout)?;
        if matches!(hold, HoldUntil::Stage) && self.device.is_none() {
            py.detach(|| staging.prepare(payload_bytes));
        }
        self.copied_bytes.fetch_add(copied_bytes, Ordering::Relaxed);
        Ok(Publication::new(publication, payload_bytes, copied_bytes))
    }

    /// Publishes files as the next version of `topic`, as `tensor-relay serve` does: a safetensors file, or the
    /// folder of a model. Subscribers receive tensors; `tensor_relay.pull` and the command line
    /// write the same files again. All bytes are read and copied before this returns. `metadata`, `split` and
    /// `timeout` are as for `publish`.
    ///
    /// `engine_caches` are sent with the folder of a model: `vllm`, `inductor` or `triton` from where that engine keeps
    /// its cache, or `NAME=FOLDER` for any. Consumers unpack them with `pull(engine_caches=)` where the machine is
    /// alike. `engine_facts` says what they were made for, instead of what is found out: `gpu`, `driver`, `torch` and
    /// so on.
    ///
    /// Raises PublishError, which names the file that cannot be served; RelayTimeoutError after `timeout`. In these
    /// cases nothing was published.
    #[pyo3(signature = (topic, path, *, metadata = None, split = None, engine_caches = None, engine_facts = None, timeout = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords, each with its name where it is called")]
    fn publish_files(
        &self,
        py: Python<'_>,
        topic: &str,
        path: PathBuf,
        metadata: Option<&Bound<'_, PyAny>>,
        split: Option<&Bound<'_, PyAny>>,
        engine_caches: Option<Vec<String>>,
        engine_facts: Option<BTreeMap<String, String>>,
        timeout: Option<f64>,
    ) -> PyResult<Publication> {
        let (topic, timeout) = (parse_topic(py, topic)?, seconds("timeout", timeout)?);
        let splits = split::of(py, split)?;
        let (caches, facts) = engine_caches::of(py, engine_caches, engine_facts)?;
        let metadata = metadata.map_or_else(|| Ok(vec![]), metadata::of_user)?;
        let (publisher, staging) = self.publisher(py, &topic)?;
        let read = || {
            let files = TensorFiles::open(&path)?.split(&splits)?.with_caches(&caches, &facts)?;
            Ok((files.total_bytes(), files.stage(&staging)?))
        };
        let (bytes, staged) = py.detach(read).map_err(|error: FileError| Kind::Publish.raise(py, error))?;
        let version = (staged.into(), metadata, Places::default());
        let publication = publish_in_turn(py, &topic, publisher, version, timeout)?;
        self.copied_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(Publication::new(publication, bytes, bytes))
    }

    /// Ends `topic`: no version follows, and subscriptions end once they have received what they requested. Retained
    /// versions can still be subscribed to. Another `publish` opens the topic again, in another epoch. Ending a topic
    /// that has ended or was withdrawn has no effect. A concurrent `publish` in another thread completes first; this
    /// call does not wait for it.
    ///
    /// Raises PublishError if the topic was never published or opened.
    fn end(&self, py: Python<'_>, topic: &str) -> PyResult<()> {
        if let TopicState::Open(publisher) = self.leave(py, &parse_topic(py, topic)?, TopicState::Ended)? {
            publisher.end_with(TopicPublisher::end);
        }
        Ok(())
    }

    /// Withdraws `topic`: subscriptions end, and retained versions are dropped, also if the topic had ended.
    /// Withdrawing a topic again has no effect. A `publish` that waits in another thread ends with PublishError.
    ///
    /// Raises PublishError if the topic was never published or opened.
    fn withdraw(&self, py: Python<'_>, topic: &str) -> PyResult<()> {
        let topic = parse_topic(py, topic)?;
        match self.leave(py, &topic, TopicState::Withdrawn)? {
            TopicState::Open(publisher) => publisher.close_with(TopicPublisher::withdraw),
            TopicState::Ended => self.publisher_of_ended(py, topic)?.withdraw(),
            TopicState::Withdrawn => {}
        }
        Ok(())
    }

    /// Counters and gauges of this relay by name: open `sessions`; active `transfers`; versions `committed` by
    /// subscribers; `evicted` subscribers; host memory: `staged_bytes` of versions, of which `base_bytes` of replaced
    /// ones are kept for deltas, `reusable_bytes`, kept for the next versions until two seconds after their topics end,
    /// and `encoded_bytes`, encodings for further subscribers; `read_bytes`, the bytes of chunks read for sending, and
    /// `copied_bytes`, those copied for that or for publishing; and the counters of the network. With `hold="borrow"`
    /// host tensors are copied chunk by chunk, each time they are sent.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.open.with(py, |open| Ok(open.server.stats()))?;
        let counters = [
            ("sessions", stats.sessions),
            ("transfers", stats.transfers),
            ("committed", stats.committed),
            ("evicted", stats.evicted),
            ("staged_bytes", stats.staged_bytes),
            ("base_bytes", stats.bases.bytes),
            ("reusable_bytes", stats.reusable_bytes),
            ("encoded_bytes", stats.encoder.encoded_bytes),
            ("read_bytes", stats.encoder.host_read_bytes),
            ("copied_bytes", self.copied_bytes.load(Ordering::Relaxed) + stats.encoder.host_copied_bytes),
            ("sent_bytes", stats.traffic.sent_bytes),
            ("received_bytes", stats.traffic.received_bytes),
            ("sent_packets", stats.traffic.sent_packets),
            ("lost_packets", stats.traffic.lost_packets),
        ];
        counters.into_py_dict(py)
    }

    /// Shuts down within `grace` seconds: new sessions are refused, active transfers finish, subscribers of ended
    /// topics receive what they requested, and all clients are notified. Returns whether everything finished. Closing
    /// again has no effect.
    ///
    /// All topics end first, as by `end`, and with them the loops of their subscribers. With `end=False` they do not:
    /// their subscribers wait, for their `reconnect_timeout`, for another relay at this address with the same
    /// `state_dir`. A `with` block ends topics when it completes, but not when an exception leaves it.
    #[pyo3(signature = (grace = 8.0, *, end = true))]
    fn close(&self, py: Python<'_>, grace: f64, end: bool) -> PyResult<bool> {
        let grace = finite_seconds("grace", grace)?;
        let open = self.open.lock(py)?.take();
        let finished = match open {
            Some(open) => {
                if end {
                    open.end_topics();
                }
                wait(py, open.close(grace))
            }
            None => Ok(true),
        };
        self.gpus.get(py)?.close(py);
        finished
    }

    fn __repr__(&self) -> String {
        format!("Relay({})", self.address)
    }
}

impl Relay {
    pub(crate) fn new(
        (server, admin): (Server, Option<AdminPort>),
        address: SocketAddr,
        tickets: Tickets,
        gpus: Gpus,
        device: Option<usize>,
    ) -> Self {
        let admin_address = admin.as_ref().map(AdminPort::address);
        let open = Open { server, topics: HashMap::new(), _admin: admin };
        Self {
            open: UntilClosed::new(open, "this relay was closed: start another with `tensor_relay.serve`"),
            address,
            admin_address,
            tickets,
            gpus: ProcessLocal::new(gpus),
            device,
            copied_bytes: AtomicU64::new(0),
        }
    }

    /// The GPU that staged versions are copied to.
    fn staged_on(&self, py: Python<'_>) -> PyResult<Option<Device>> {
        let (gpus, Some(ordinal)) = (self.gpus.get(py)?, self.device) else { return Ok(None) };
        gpus.device(py, ordinal).map(Some).map_err(|error| error.raise(py))
    }

    /// The publisher of a topic, opened if necessary, and the server's settings for staging versions.
    fn publisher(&self, py: Python<'_>, topic: &Topic) -> PyResult<(SharedPublisher, Staging)> {
        let _in_runtime = runtime::handle(py)?.enter();
        self.open
            .with(py, |open| Ok((open.publisher(py, topic)?, open.server.staging())))
    }

    /// Records that a topic ended or is withdrawn, and returns its previous state.
    fn leave(&self, py: Python<'_>, topic: &Topic, new: TopicState) -> PyResult<TopicState> {
        self.open
            .with(py, |open| match open.topics.get_mut(topic).ok_or_else(|| ended(py, topic))? {
                TopicState::Withdrawn => Ok(TopicState::Withdrawn),
                state => Ok(mem::replace(state, new)),
            })
    }

    /// A publisher for a topic that has ended, to drop its retained versions.
    fn publisher_of_ended(&self, py: Python<'_>, topic: Topic) -> PyResult<Publisher> {
        let _in_runtime = runtime::handle(py)?.enter();
        self.open
            .with(py, |open| open.server.publisher(topic).map_err(Kind::Publish.because(py)))
    }
}

impl Open {
    /// Ends every topic, except those with a concurrent publish in another thread.
    fn end_topics(&self) {
        for publisher in publishers(&self.topics) {
            if let Some(_turn) = publisher.try_turn() {
                publisher.end_with(TopicPublisher::end); // Takes effect when this turn ends.
            }
        }
    }

    async fn close(self, grace: Duration) -> bool {
        let Self { server, topics, _admin } = self; // The admin port answers until the end.
        let finished = server.shutdown(grace).await;
        // Not earlier: this cancels publishes in other threads.
        publishers(&topics).for_each(|publisher| publisher.close());
        finished
    }

    /// The publisher of a topic, opened if necessary. Runs in the runtime.
    fn publisher(&mut self, py: Python<'_>, topic: &Topic) -> PyResult<SharedPublisher> {
        match self.topics.get(topic) {
            Some(TopicState::Open(publisher)) => Ok(Arc::clone(publisher)),
            _ => self.open(py, topic.clone(), TopicOptions::default()),
        }
    }

    fn open(&mut self, py: Python<'_>, topic: Topic, options: TopicOptions) -> PyResult<SharedPublisher> {
        let publisher = self
            .server
            .publisher_with(topic.clone(), None, options)
            .map_err(Kind::Publish.because(py))?;
        let publisher = Arc::new(Closable::new(TopicPublisher::new(publisher)));
        if self.topics.len() >= REMEMBERED_MAX {
            self.topics.retain(|_, state| !matches!(state, TopicState::Withdrawn));
        }
        self.topics.insert(topic, TopicState::Open(Arc::clone(&publisher)));
        Ok(publisher)
    }
}

/// Publishes a version, with its metadata and the memory that it borrows, once concurrent calls for the topic have
/// ended and readers in mode `every` permit it.
fn publish_in_turn(
    py: Python<'_>,
    topic: &Topic,
    publisher: SharedPublisher,
    (version, metadata, places): (Publishable, Metadata, Places),
    timeout: Option<Duration>,
) -> PyResult<server::Publication> {
    let publish = async {
        let mut turn = Arc::clone(&publisher).turn().await?;
        Some(turn.value()?.publish(version, metadata, places).await)
    };
    let publish = async { publisher.unless_closed(publish).await.flatten() };
    let published = wait_at_most(py, timeout, publish)?.ok_or_else(|| {
        let waited = timeout.unwrap_or_default().as_secs_f64();
        let message = format!("readers of {topic} were not done with older versions within {waited} s");
        Kind::Timeout.raise(py, message)
    })?;
    let published = published.ok_or_else(|| ended(py, topic))?; // Another thread ended the topic.
    published.map_err(Kind::Publish.because(py))
}

/// The publishers of the open topics.
fn publishers(topics: &HashMap<Topic, TopicState>) -> impl Iterator<Item = &SharedPublisher> {
    topics.values().filter_map(|topic| match topic {
        TopicState::Open(publisher) => Some(publisher),
        _ => None,
    })
}

pub(crate) fn parse_topic(py: Python<'_>, name: &str) -> PyResult<Topic> {
    Topic::new(name).map_err(Kind::Request.because(py))
}

fn ended(py: Python<'_>, topic: &Topic) -> PyErr {
    Kind::Publish.raise(py, format!("topic {topic} is not open: it was ended, withdrawn, or never published"))
}
