//! A network in memory: datagrams have delay, loss, duplication and corruption, all derived from one seed; byte streams
//! have delay. A test partitions hosts and resets streams.

mod clock;
mod socket;
mod stream;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use socket::Socket;
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Waker,
    time::Duration,
};
use stream::Streams;
use tensor_relay_transport::{Batching, Network, Opening, StreamListener, Tuning};
use tokio::time::Instant;

/// The delay, faults and MTU of the path between two hosts.
#[derive(Debug, Clone)]
pub struct Path {
    /// The delay, drawn for each datagram and for each write of a byte stream. A wide range reorders datagrams, but not
    /// the bytes of a stream.
    pub delay: RangeInclusive<Duration>,
    /// The fraction of datagrams that are lost.
    pub loss: f64,
    /// The fraction of datagrams that arrive twice.
    pub duplication: f64,
    /// The fraction of datagrams in which one bit is flipped.
    pub corruption: f64,
    /// The largest UDP payload that is delivered, in bytes; larger ones are dropped silently, as in an MTU black hole.
    pub mtu: usize,
    /// The largest UDP payload that the first hop carries, in bytes, which hosts know: the upper limit of MTU
    /// discovery.
    pub first_hop: u16,
}

impl Default for Path {
    /// A link with a delay of one millisecond, without faults, that carries the largest UDP payload of an Ethernet
    /// packet.
    fn default() -> Self {
        Self {
            delay: Duration::from_millis(1)..=Duration::from_millis(1),
            loss: 0.0,
            duplication: 0.0,
            corruption: 0.0,
            mtu: 1_472,
            first_hop: 1_472,
        }
    }
}

/// The traffic that one host has sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The number of sent datagrams.
    pub datagrams: u64,
    /// The number of sent bytes, in datagrams and byte streams.
    pub bytes: u64,
    /// The number of datagrams that the network dropped: lost, too large, or stopped by a partition.
    pub dropped: u64,
}

/// The simulated network. Cheap to clone; clones share one network.
#[derive(Debug, Clone)]
pub struct SimNet {
    state: Arc<Mutex<State>>,
}

/// One host's connection to a [`SimNet`].
#[derive(Debug, Clone)]
pub struct Host {
    net: SimNet,
    address: IpAddr,
}

#[derive(Debug)]
struct State {
    rng: ChaCha8Rng,
    path: Path,
    partitions: BTreeSet<(IpAddr, IpAddr)>,
    inboxes: BTreeMap<SocketAddr, Inbox>,
    streams: Streams,
    traffic: BTreeMap<IpAddr, Traffic>,
    /// The number of delivered datagrams: orders the datagrams that arrive at the same instant.
    delivered: u64,
    next_port: u16,
}

/// The datagrams on their way to one socket, in order of arrival.
#[derive(Debug, Default)]
struct Inbox {
    datagrams: BTreeMap<(Instant, u64), Datagram>,
    waker: Option<Waker>,
}

#[derive(Debug)]
struct Datagram {
    from: SocketAddr,
    bytes: Vec<u8>,
}

/// The fraction of send calls for which the socket's buffer is full.
const BUFFER_FULL_PROBABILITY: f64 = 1.0 / 64.0;

/// The first port for sockets that ask for any port.
const FIRST_FREE_PORT: u16 = 49_152;

impl SimNet {
    /// A network whose random faults follow from `seed`, at first with the default [`Path`].
    pub fn new(seed: u64) -> Self {
        let state = State {
            rng: ChaCha8Rng::seed_from_u64(seed),
            path: Path::default(),
            partitions: BTreeSet::new(),
            inboxes: BTreeMap::new(),
            streams: Streams::default(),
            traffic: BTreeMap::new(),
            delivered: 0,
            next_port: FIRST_FREE_PORT,
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// The host at `address`.
    pub fn host(&self, address: impl Into<IpAddr>) -> Host {
        Host { net: self.clone(), address: address.into() }
    }

    /// Sets the path of all datagrams and stream bytes that are sent from now on.
    pub fn set_path(&self, path: Path) {
        self.state().path = path;
    }

    /// Partitions two hosts in both directions: datagrams that are sent from now on are dropped, and byte streams stall
    /// until [`repair`](Self::repair).
    pub fn partition(&self, one: &Host, other: &Host) {
        let mut state = self.state();
        state.partitions.insert((one.address, other.address));
        state.partitions.insert((other.address, one.address));
    }

    /// Ends the partition between two hosts.
    pub fn repair(&self, one: &Host, other: &Host) {
        let mut state = self.state();
        state.partitions.remove(&(one.address, other.address));
        state.partitions.remove(&(other.address, one.address));
        state.streams.wake_all();
    }

    /// Resets every byte stream between two hosts: both peers see an error.
    pub fn reset_streams(&self, one: &Host, other: &Host) {
        self.state().streams.reset(one.address, other.address);
    }

    /// The traffic that `host` has sent so far.
    pub fn sent_by(&self, host: &Host) -> Traffic {
        self.state().traffic.get(&host.address).copied().unwrap_or_default()
    }

    /// The traffic that all hosts have sent so far.
    pub fn sent(&self) -> Traffic {
        let state = self.state();
        state.traffic.values().fold(Traffic::default(), |sum, host| Traffic {
            datagrams: sum.datagrams + host.datagrams,
            bytes: sum.bytes + host.bytes,
            dropped: sum.dropped + host.dropped,
        })
    }

    /// Ignores poisoning: a test that panics while it holds the lock has failed already.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Network for Host {
    fn bind(&self, address: SocketAddr, _: &Tuning) -> io::Result<Arc<dyn quinn::AsyncUdpSocket>> {
        let mut state = self.net.state();
        let port = match address.port() {
            0 => state.free_port(),
            port => port,
        };
        let ip = if address.ip().is_unspecified() { self.address } else { address.ip() };
        let address = SocketAddr::new(ip, port);
        if state.inboxes.contains_key(&address) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        state.inboxes.insert(address, Inbox::default());
        let socket = Socket::new(self.net.clone(), address);
        Ok(Arc::new(Batching::over(Arc::new(socket))))
    }

    fn connect(&self, local: IpAddr, peer: SocketAddr, _segment_max: Option<u32>) -> Opening {
        let local = if local.is_unspecified() { self.address } else { local };
        Box::pin(stream::connect(self.net.clone(), local, peer))
    }

    fn listen(&self, address: SocketAddr) -> io::Result<Box<dyn StreamListener>> {
        let ip = if address.ip().is_unspecified() { self.address } else { address.ip() };
        stream::listen(self.net.clone(), SocketAddr::new(ip, address.port()))
    }

    fn runtime(&self) -> Arc<dyn quinn::Runtime> {
        Arc::new(clock::SimRuntime)
    }

    fn path_payload(&self, _: SocketAddr) -> Option<u16> {
        Some(self.net.state().path.first_hop)
    }

    fn rng_seed(&self) -> Option<[u8; 32]> {
        Some(self.net.state().rng.random())
    }
}

impl State {
    fn free_port(&mut self) -> u16 {
        self.next_port += 1;
        self.next_port - 1
    }

    fn draw_delay(&mut self) -> Duration {
        self.rng.random_range(self.path.delay.clone())
    }

    fn is_partitioned(&self, from: SocketAddr, to: SocketAddr) -> bool {
        self.partitions.contains(&(from.ip(), to.ip()))
    }

    /// Draws whether a socket's buffer is full, so that the sender has to retry.
    fn draw_is_full(&mut self) -> bool {
        self.rng.random_bool(BUFFER_FULL_PROBABILITY)
    }

    /// Sends a datagram, with the faults drawn for it.
    fn send(&mut self, from: SocketAddr, to: SocketAddr, bytes: &[u8]) {
        let is_dropped = self.draw_is_dropped(from, to, bytes.len());
        let traffic = self.traffic.entry(from.ip()).or_default();
        traffic.datagrams += 1;
        traffic.bytes += bytes.len() as u64;
        traffic.dropped += u64::from(is_dropped);
        if is_dropped {
            return;
        }
        let copies = 1 + usize::from(self.rng.random_bool(self.path.duplication));
        for _ in 0..copies {
            self.deliver(from, to, bytes.to_vec());
        }
    }

    /// Draws whether a datagram is lost, and checks whether it passes the path.
    fn draw_is_dropped(&mut self, from: SocketAddr, to: SocketAddr, len: usize) -> bool {
        let is_lost = self.rng.random_bool(self.path.loss);
        is_lost || len > self.path.mtu || self.is_partitioned(from, to)
    }

    /// Puts a datagram into the inbox of its receiver. A closed port has no inbox, and does not answer.
    fn deliver(&mut self, from: SocketAddr, to: SocketAddr, mut bytes: Vec<u8>) {
        let arrives_at = Instant::now() + self.draw_delay();
        if !bytes.is_empty() && self.rng.random_bool(self.path.corruption) {
            let index = self.rng.random_range(0..bytes.len());
            bytes[index] ^= 1 << self.rng.random_range(0..8);
        }
        self.delivered += 1;
        if let Some(inbox) = self.inboxes.get_mut(&to) {
            inbox.datagrams.insert((arrives_at, self.delivered), Datagram { from, bytes });
            inbox.waker.take().inspect(Waker::wake_by_ref);
        }
    }
}

impl Inbox {
    /// The next datagram that has arrived by `now`, or the time when the next one will arrive, if one is on its way.
    fn take(&mut self, now: Instant) -> Result<Datagram, Option<Instant>> {
        match self.datagrams.first_entry() {
            Some(first) if first.key().0 <= now => Ok(first.remove()),
            Some(first) => Err(Some(first.key().0)),
            None => Err(None),
        }
    }
}
