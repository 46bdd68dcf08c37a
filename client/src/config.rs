//! A client's configuration, with a reason for each default.

use std::{net::IpAddr, sync::Arc, time::Duration};
use tensor_relay_device::Device;
use tensor_relay_protocol::{CodecId, CodecSet, Credit, Limits};
use tensor_relay_transport::{Identity, Transport, Workers};

/// The most lanes of a session. Beyond them, a network card or memory is the bottleneck.
pub const LANES_MAX: u32 = 16;

/// The number of lanes of a session: connections to the server, each with a socket and a thread of its own. A server
/// may allow fewer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Lanes {
    /// Automatic: starts with one; during large versions the number doubles while that makes them at least a tenth
    /// faster, up to half the number of processors. With two processors, one.
    #[default]
    Auto,
    /// Automatic, up to this many, from 1 to 16, whatever the number of processors: for containers that see other
    /// processors than they may use, or slow lanes with idle processors.
    UpTo(u32),
    /// Exactly this many, from 1 to 16.
    Fixed(u32),
}

impl Lanes {
    /// Whether the number is automatic.
    pub(crate) fn is_sought(self) -> bool {
        !matches!(self, Self::Fixed(_))
    }

    /// The maximum.
    pub(crate) fn most(self) -> u32 {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        match self {
            Self::Auto => u32::try_from(processors / 2).unwrap_or(LANES_MAX).clamp(1, LANES_MAX),
            Self::UpTo(lanes) | Self::Fixed(lanes) => lanes.clamp(1, LANES_MAX),
        }
    }
}

/// The configuration of a client.
#[derive(Debug, Clone)]
pub struct Config {
    /// The name and version told to servers. Default `tensor-relay/` and the version of this crate.
    pub agent: String,
    /// The codecs that servers may use. Default: all of this build.
    pub codecs: CodecSet,
    /// The most memory of snapshots: those being received, those delivered and not dropped, and freed memory kept for
    /// reuse. Default: no bound but the machine's. A version that does not fit is an error, not an abort.
    pub memory_bytes: u64,
    /// The most memory of bases: copies of versions to which deltas are applied. Default 4 GiB, for all subscriptions
    /// of a session together, enough for most models. Each copy takes what its subscription selects, in host memory
    /// wherever versions land, and costs a copy of each byte that is received. Versions of which there is no copy come
    /// whole. 0: there are no copies.
    pub base_bytes: u64,
    /// Where versions land: on this device, or, by default, in host memory. Snapshots are
    /// [there](crate::Snapshot::is_on_device) then. Its memory bounds them, as `memory_bytes` does on the host.
    ///
    /// A chunk has one of the device's slots from its first byte until it is copied, so give it more slots than
    /// `credit_chunks` times lanes for each subscription, as long as the chunks of the server (4 MiB by default). With fewer,
    /// subscriptions wait for each other; longer chunks are copied once more on the way.
    pub device: Option<Device>,
    /// The number of lanes of a session. Default: automatic.
    pub lanes: Lanes,
    /// The allowed transports. Default: both, TCP on short paths and QUIC on long ones.
    pub transport: Transport,
    /// The client's key, if the server's access control list knows it. Default: none; the ticket's token gives access.
    pub identity: Option<Arc<Identity>>,
    /// The local addresses of lanes, in turn: one of each network card to be used. Default: the system chooses, and so
    /// one card.
    pub lane_addresses: Vec<IpAddr>,
    /// How many chunks of one subscription may be on their way at once for each lane. Default 8: QUIC needs two in flight, the rest
    /// covers what encoding and decoding take, and the time until credit for a finished one reaches the server.
    pub credit_chunks: u32,
    /// How long a subscription waits for a topic that does not exist yet, from when the server was asked. Default 10 s.
    pub topic_timeout: Duration,
    /// The time without a byte after which a running version is given up. Default 30 s.
    pub stall_timeout: Duration,
    /// How long to try to reconnect before subscriptions end with the connection. Default 60 s. Zero: not at all.
    pub reconnect_timeout: Duration,
    /// How many snapshots of one subscription the user may hold, beside the one that is ready and the one on its way.
    /// Default 4. It bounds memory: each holds a version.
    pub versions_held_max: usize,
    /// How long [`next`](crate::Subscription::next) waits, when the user holds as many as it may, for one to be dropped.
    /// Default 10 s.
    pub hold_timeout: Duration,
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
            lanes: Lanes::Auto,
            transport: Transport::Auto,
            identity: None,
            lane_addresses: vec![],
            credit_chunks: 8,
            topic_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(30),
            reconnect_timeout: Duration::from_secs(60),
            versions_held_max: 4,
            hold_timeout: Duration::from_secs(10),
            limits: Limits::default(),
            workers: Workers::Threads,
        }
    }
}

/// The longest deadline: longer ones would overflow the clock.
const DEADLINE_MAX: Duration = Duration::from_secs(10 * 365 * 24 * 3_600);

impl Config {
    /// Whether a delta codec is enabled.
    pub(crate) fn keeps_bases(&self) -> bool {
        self.codecs.iter().any(CodecId::needs_base)
    }

    /// The configuration clamped to valid values: credit within servers' limits, and deadlines that a clock can hold.
    pub(crate) fn within_reason(self) -> Self {
        Self {
            // Deltas are not offered if they cannot be applied.
            codecs: if self.base_bytes == 0 { self.codecs.without_bases() } else { self.codecs },
            credit_chunks: self.credit_chunks.clamp(1, Credit::MAX),
            topic_timeout: self.topic_timeout.min(DEADLINE_MAX),
            stall_timeout: self.stall_timeout.min(DEADLINE_MAX),
            reconnect_timeout: self.reconnect_timeout.min(DEADLINE_MAX),
            versions_held_max: self.versions_held_max.max(1),
            hold_timeout: self.hold_timeout.min(DEADLINE_MAX),
            ..self
        }
    }
}
