//! A client's configuration and its defaults.

use crate::Membership;
use std::{net::IpAddr, sync::Arc, time::Duration};
use tensor_relay_device::Device;
use tensor_relay_protocol::{CodecId, CodecSet, Credit, Feature, FeatureSet, Limits, RelayId, Ticket};
use tensor_relay_transport::{Identity, Transport, Workers, forwarding::Forward};

/// The maximum number of lanes of a session. Beyond it, a network card or memory is the bottleneck.
pub const LANES_MAX: u32 = 16;

/// The most further servers of a session.
pub(crate) const SOURCES_MAX: usize = 15;

/// The number of lanes of a session: connections to the server, each with its own socket and thread. A server may
/// allow fewer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Lanes {
    /// Automatic: a large version begins with a lane for every two processors, as many as its size is worth. More and
    /// fewer are tried during large versions, and kept if they gain: up to a lane for every two processors, at least
    /// two, while this process is busy, otherwise up to 16.
    #[default]
    Auto,
    /// Automatic, up to this number, from 1 to 16, whatever the number of processors: for containers that may not use
    /// all visible processors, or for slow lanes and idle processors.
    UpTo(u32),
    /// Exactly this number, from 1 to 16.
    Fixed(u32),
}

impl Lanes {
    /// Whether the number is automatic.
    pub(crate) fn is_automatic(self) -> bool {
        !matches!(self, Self::Fixed(_))
    }

    /// The maximum number of lanes.
    pub(crate) fn max(self) -> u32 {
        match self {
            Self::Auto => LANES_MAX,
            Self::UpTo(lanes) | Self::Fixed(lanes) => lanes.clamp(1, LANES_MAX),
        }
    }

    /// The maximum number of lanes while this process is busy.
    pub(crate) fn busy_max(self, processors: u32) -> u32 {
        match self {
            Self::Auto => (processors / 2).max(2), // With fewer than four processors, a second may help, too.
            Self::UpTo(_) | Self::Fixed(_) => self.max(),
        }
    }
}

/// The receiving half of a relay (PROTOCOL.md §3.20).
#[derive(Debug, Clone)]
pub struct Relaying {
    /// The relay. A version that came through it before is refused: its subscription ends with
    /// [`NotRelayed`](crate::SubscriptionError::NotRelayed).
    pub id: RelayId,
    /// What offers the versions. It takes the place of that of [`Config::sharing`], to which it should pass them on.
    pub forward: Arc<dyn Forward>,
}

/// The configuration of a client.
#[derive(Debug, Clone)]
pub struct Config {
    /// The name and version sent to servers. Default `tensor-relay/` and the version of this crate.
    pub agent: String,
    /// The codecs that servers may use. Default: all of this build.
    pub codecs: CodecSet,
    /// The maximum memory of snapshots: those being received, those delivered and not dropped, and freed memory kept
    /// for reuse. Default: unlimited. A version that does not fit is reported as an error; the process does not abort.
    pub memory_bytes: u64,
    /// The maximum memory of bases: copies of versions to which deltas are applied. Default 4 GiB for all subscriptions
    /// of a session together, enough for most models. A base is as large as its subscription's selection, is in host
    /// memory even if versions are received on a device, and costs one copy of each received byte. Without a base, the
    /// server sends no deltas. 0 disables bases.
    pub base_bytes: u64,
    /// The device that receives versions. Default: none, host memory receives them. With a device, snapshots are
    /// [on the device](crate::Snapshot::is_on_device), and its memory bounds them, as `memory_bytes` does on the host.
    ///
    /// A chunk occupies one of the device's slots from its first byte until it is copied. Provide more slots than
    /// `credit_chunks` times lanes for each subscription, each as long as the server's chunks (4 MiB by default). With
    /// fewer slots, subscriptions wait for each other; chunks longer than a slot cost another copy.
    pub device: Option<Device>,
    /// Whether versions on a GPU that a server of this host [shares] are used where they are, in memory that other
    /// processes of this user have as well: nothing is copied, and nobody may write to the tensors. Default: no, they
    /// are copied within the GPU. It needs a `device`, whole versions, and no buffers of the user.
    ///
    /// [shares]: https://docs.rs/tensor-relay-server
    pub share_gpu: bool,
    /// The number of lanes of a session. Default: automatic.
    pub lanes: Lanes,
    /// The processors for which the number of lanes is chosen. Default: those that this process may use, by its affinity
    /// and its cgroup's quota, rounded down.
    pub processors: u32,
    /// The allowed transports. Default: both. A session begins with TCP on a short path and with QUIC on a long one,
    /// and may change to the other when large versions measure it as faster.
    pub transport: Transport,
    /// The client's key, if the server's access control list knows it. Default: none; the ticket's token gives access.
    pub identity: Option<Arc<Identity>>,
    /// The tickets of other servers with the same content: the same bytes under the same epochs and versions, as of files
    /// that several servers serve. Chunks of a large version are received from all of them at once, and if one is lost,
    /// the others send what it had not sent. Those beyond the 15th are not used. Default: none.
    pub sources: Vec<Ticket>,
    /// How this client takes chunks of large versions from other clients of the server, and offers its own to them.
    /// Default: not at all. A server that does not support it, or must not, sends everything itself.
    pub sharing: Option<Membership>,
    /// Makes this client the receiving half of a relay: what it receives is offered to others. Default: not.
    pub relay: Option<Relaying>,
    /// The local addresses that lanes use in turn: one for each network card. Default: the system chooses an address,
    /// and so one card.
    pub lane_addresses: Vec<IpAddr>,
    /// The maximum number of chunks of one subscription in transit for each lane. Default 8: QUIC needs two in
    /// flight; the other six cover the time for encoding, for decoding, and for credit to reach the server.
    pub credit_chunks: u32,
    /// How long a subscription waits for a topic that does not exist yet, counted from the request. Default 10 s.
    pub topic_timeout: Duration,
    /// The time without a received byte of a subscription after which its version in transfer is aborted. Default 30 s.
    pub stall_timeout: Duration,
    /// How long to try to reconnect before subscriptions end with the connection. Default 60 s. Zero: not at all.
    pub reconnect_timeout: Duration,
    /// The maximum number of snapshots of one subscription held by the user, in addition to the one that is ready and
    /// the one being received. Default 4. It bounds memory: each snapshot holds one version.
    pub versions_held_max: usize,
    /// How long [`next`](crate::Subscription::next) waits for the user to drop a snapshot while the user holds the
    /// maximum number. Default 10 s.
    pub hold_timeout: Duration,
    /// Whether users of the program may write to the memory of snapshots on the host, as those of a binding for another
    /// language may. Default: no. If so, [`volatile_tensor`](crate::Snapshot::volatile_tensor) returns that memory, and
    /// [`Bytes`](bytes::Bytes) of a tensor are a copy.
    pub volatile_snapshots: bool,
    /// Whether received versions lie in memory that other processes of the host can map, to offer them there
    /// ([`Snapshot::source`](crate::Snapshot::source)). Default: no. It costs a file descriptor for each version.
    pub shareable: bool,
    /// The consumer as which publishers count this client's commits: those of all clients with the same id and
    /// credentials count once for each version; a [named reader](crate::Request::reader) counts by its name. Default:
    /// random, so each client counts. Programs with several clients in one process may give them one id.
    pub consumer: [u8; 16],
    /// The limits on manifests and payloads.
    pub limits: Limits,
    /// The workers for decoding.
    pub workers: Workers,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            agent: concat!("tensor-relay/", env!("CARGO_PKG_VERSION")).into(),
            codecs: CodecSet::all(),
            memory_bytes: u64::MAX,
            base_bytes: 4 << 30,
            device: None,
            share_gpu: false,
            lanes: Lanes::Auto,
            processors: std::thread::available_parallelism().map_or(1, |processors| processors.get() as u32),
            transport: Transport::Auto,
            identity: None,
            sources: vec![],
            sharing: None,
            relay: None,
            lane_addresses: vec![],
            credit_chunks: 8,
            topic_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(30),
            reconnect_timeout: Duration::from_secs(60),
            versions_held_max: 4,
            hold_timeout: Duration::from_secs(10),
            volatile_snapshots: false,
            shareable: false,
            consumer: rand::random(),
            limits: Limits::default(),
            workers: Workers::Threads,
        }
    }
}

/// The longest timeout: longer ones would overflow the clock.
const TIMEOUT_MAX: Duration = Duration::from_secs(10 * 365 * 24 * 3_600);

impl Config {
    /// The features that servers may use towards this client.
    pub(crate) fn features(&self) -> FeatureSet {
        match self.sharing {
            Some(_) => FeatureSet::OF_CLIENT.with(Feature::Peers),
            None => FeatureSet::OF_CLIENT,
        }
    }

    /// Whether a delta codec is enabled.
    pub(crate) fn keeps_bases(&self) -> bool {
        self.codecs.iter().any(CodecId::needs_base)
    }

    /// The configuration clamped to valid values: credit within servers' limits, and deadlines that a clock can hold.
    pub(crate) fn clamped(self) -> Self {
        let mut sources = self.sources;
        sources.truncate(SOURCES_MAX);
        Self {
            sources,
            // Deltas are not offered if they cannot be applied.
            codecs: if self.base_bytes == 0 { self.codecs.without_bases() } else { self.codecs },
            credit_chunks: self.credit_chunks.clamp(1, Credit::MAX),
            topic_timeout: self.topic_timeout.min(TIMEOUT_MAX),
            stall_timeout: self.stall_timeout.min(TIMEOUT_MAX),
            reconnect_timeout: self.reconnect_timeout.min(TIMEOUT_MAX),
            versions_held_max: self.versions_held_max.max(1),
            hold_timeout: self.hold_timeout.min(TIMEOUT_MAX),
            ..self
        }
    }
}
