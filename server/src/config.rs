//! A server's configuration, with a reason for each default.

use std::time::Duration;
use tensor_relay_protocol::{CodecChoice, Limits};
use tensor_relay_transport::Workers;

/// The configuration of a server.
#[derive(Debug, Clone)]
pub struct Config {
    /// The name and version told to clients. Default `tensor-relay/` and the version of this crate.
    pub agent: String,
    /// The most open sessions, and the most further lanes of all of them together. Default 1,024; one more is refused at its
    /// `Hello`.
    pub sessions_max: usize,
    /// How many lanes one session may have, the first included. Default 16: more than one client has cores and network
    /// cards for. With 1 there are no further lanes.
    pub lanes_max: u32,
    /// The threads for the further lanes of all sessions. The first lane of each stays on the runtime that runs the
    /// server. Default: as many as there are processors beside that one's, and one at least; 8 at most, which fill 100
    /// Gbit/s. They are started when they are needed.
    pub lane_threads: usize,
    /// How many subscriptions one session may have. Default 1,024. Each costs a task and what its credit allows in flight.
    pub subscriptions_max: u32,
    /// How many chunks of one subscription are read, encoded or written at the same time. Default 8: two at each
    /// stage, since chunks do not take equally long, and two to spare. QUIC needs two in flight to keep a lane busy.
    pub chunks_in_flight: usize,
    /// How large chunks are. Default 4 MiB: from 1 MiB on a GPU's copy engine is saturated, and a resume after an error
    /// repeats little.
    pub chunk_bytes: u32,
    /// How chunks are encoded, as far as subscribers can decode it. Default: each by what it holds and how fast the link
    /// is. A topic may say otherwise for its own ([`TopicOptions::codec`](crate::TopicOptions::codec)), and a subscriber
    /// for what it gets.
    pub codec: CodecChoice,
    /// The memory for encoded chunks: those that are being sent, and up to half of it for those kept for further
    /// subscribers. Beyond it chunks are sent raw. Default 512 MiB.
    pub encoded_bytes: u64,
    /// How many connections may be in their login at once. Default 1,024: a client takes milliseconds for it, and an
    /// unfinished handshake up to 150 KiB.
    pub logins_max: usize,
    /// How much of what was read of each device is kept for further subscribers, so that each chunk is read once however
    /// many subscribe. A chunk counts at least as much as a slot. Default: as much as half of the device's slots hold.
    /// Subscribers who are further apart than that read again. With a larger number, what slots cannot hold is copied to
    /// ordinary memory, which costs a single subscriber as well a copy of nearly every byte.
    pub device_cache_bytes: Option<u64>,
    /// The memory of staged versions, retained and in transfer. Default: no bound but the machine's.
    pub staged_bytes: u64,
    /// How much memory versions may take that left retention and are kept to code later ones against, over all topics
    /// ([`TopicOptions::bases`](crate::TopicOptions::bases)). It counts beside retention and within `staged_bytes`. Default
    /// 4 GiB. What has no room is let go, those that nobody holds first, and subscribers get whole versions. 0: none are kept.
    pub base_bytes: u64,
    /// The time without progress after which a subscriber in mid-transfer is evicted. Default 30 s.
    pub stall_timeout: Duration,
    /// How long the place of a named reader in mode `every` is kept when its connection is lost, so that it misses nothing.
    /// Default 30 s: longer than a client takes to notice and to come back.
    pub reader_linger: Duration,
    /// The limits on published payloads, so that no receiver has to refuse them.
    pub limits: Limits,
    /// The workers for hashing and encoding.
    pub workers: Workers,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            agent: concat!("tensor-relay/", env!("CARGO_PKG_VERSION")).into(),
            sessions_max: 1_024,
            lanes_max: 16,
            lane_threads: std::thread::available_parallelism()
                .map_or(1, |cores| cores.get().saturating_sub(1).clamp(1, 8)),
            subscriptions_max: 1_024,
            chunks_in_flight: 8,
            chunk_bytes: 4 << 20,
            codec: CodecChoice::Auto,
            encoded_bytes: 512 << 20,
            logins_max: 1_024,
            device_cache_bytes: None,
            staged_bytes: u64::MAX,
            base_bytes: 4 << 30,
            stall_timeout: Duration::from_secs(30),
            reader_linger: Duration::from_secs(30),
            limits: Limits::default(),
            workers: Workers::Threads,
        }
    }
}

/// The longest deadline: longer ones would overflow the clock.
pub(crate) const DEADLINE_MAX: Duration = Duration::from_secs(10 * 365 * 24 * 3_600);

impl Config {
    /// The configuration clamped to valid values.
    pub(crate) fn within_reason(self) -> Self {
        Self {
            chunks_in_flight: self.chunks_in_flight.max(1),
            stall_timeout: self.stall_timeout.min(DEADLINE_MAX),
            reader_linger: self.reader_linger.min(DEADLINE_MAX),
            ..self
        }
    }
}
