//! A server's configuration, with a reason for each default.

use crate::swarm::PeerDialling;
use std::time::Duration;
use tensor_relay_protocol::{CodecChoice, Limits};
use tensor_relay_transport::Workers;

/// The configuration of a server.
#[derive(Debug, Clone)]
pub struct Config {
    /// The name and version sent to clients. Default `tensor-relay/` and the version of this crate.
    pub agent: String,
    /// The maximum number of open sessions. Default 1,024; the next one is refused at its `Hello`.
    pub sessions_max: usize,
    /// The maximum number of lanes of one session, the first included. Default 16: more than the cores and network
    /// cards of one client can use. With 1 there are no further lanes. A session is offered fewer where
    /// [`processors`](Self::processors) are shared.
    pub lanes_max: u32,
    /// The processors that lanes share: a session is offered at most two lanes for each of them, divided by the
    /// transfers in progress when it begins, and at least two. Default: those that this process may use.
    pub processors: u32,
    /// The maximum number of further lanes of all sessions together. Default: as many as sessions; with
    /// [`for_container`](Self::for_container), what a sixteenth of the container's memory limit holds.
    pub further_lanes_max: usize,
    /// The number of threads for the further lanes of all sessions. The first lane of each session stays on the
    /// server's runtime. Default: the number of processors less one, at least 1 and at most 8, which fill 100 Gbit/s.
    /// They are started on demand.
    pub lane_threads: usize,
    /// The maximum number of subscriptions of one session. Default 1,024. Each costs a task and the chunks that its
    /// credit allows in flight.
    pub subscriptions_max: u32,
    /// The number of chunks of one subscription, for each lane, that are read, encoded or written at the same time.
    /// Default 8: two at each stage, since chunks take unequal times, and two to spare. QUIC needs two in flight to
    /// keep a lane busy.
    pub chunks_in_flight: usize,
    /// The size of chunks. Default 4 MiB: a GPU's copy engine is saturated from 1 MiB on, and a resume repeats little.
    pub chunk_bytes: u32,
    /// The codec of chunks, for subscribers that can decode it. Default: chosen for each chunk by its content
    /// and the speed of the link. A topic ([`TopicOptions::codec`](crate::TopicOptions::codec)) or a subscriber may
    /// override it.
    pub codec: CodecChoice,
    /// The memory for encoded chunks: those being sent and, in up to half of it, those cached for further subscribers.
    /// Beyond it chunks are sent raw. Default 512 MiB.
    pub encoded_bytes: u64,
    /// The maximum number of unauthenticated connections. Default 1,024: a login takes milliseconds, and an unfinished
    /// handshake occupies at most 150 KiB.
    pub logins_max: usize,
    /// The bytes read from each device that are cached for further subscribers, so that each chunk is read once for all
    /// of them. A chunk counts at least as much as a slot. Default: what half of the device's slots hold. Subscribers
    /// further apart than that read the device again. With a larger number, chunks that slots cannot hold are copied to
    /// ordinary memory: then nearly every byte is copied even for a single subscriber.
    pub device_cache_bytes: Option<u64>,
    /// The memory for staged versions, retained and in transfer. Default: no bound but the machine's.
    pub staged_bytes: u64,
    /// Whether clients of this host and of this process's user that want it ([`client::Config::share_gpu`]) get a
    /// version on a GPU in memory that they have in common, and use it there. Default: no, each gets a copy of its own,
    /// because any of them could write to common memory. The common copy is used for nobody else, and takes the
    /// version's size on the GPU while the version is retained or anybody has it.
    ///
    /// [`client::Config::share_gpu`]: https://docs.rs/tensor-relay-client
    pub share_gpu: bool,
    /// The memory for bases that left retention, over all topics ([`TopicOptions::bases`](crate::TopicOptions::bases)).
    /// These bytes do not count towards a topic's retention, but do count towards `staged_bytes`. Default 4 GiB. Bases
    /// without room are released, those that no subscriber holds first; then subscribers get whole versions. With 0
    /// there are none.
    pub base_bytes: u64,
    /// The time without progress after which a subscriber is evicted during a transfer. Default 30 s.
    pub stall_timeout: Duration,
    /// The time for which a named reader in mode `every` keeps its place after its connection is lost, so that it
    /// misses no version, and for which bases stay when all subscribers of their topic are lost. Default 30 s: longer
    /// than a client takes to notice and to reconnect.
    pub reader_linger: Duration,
    /// How the ports of clients that share are reached. Default `None`: clients take no chunks from each other, and are
    /// not told of each other.
    pub peers: Option<PeerDialling>,
    /// The limits on published payloads, so that no receiver has to refuse them.
    pub limits: Limits,
    /// The workers for hashing and encoding.
    pub workers: Workers,
}

impl Default for Config {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |processors| processors.get() as u32);
        Self {
            agent: concat!("tensor-relay/", env!("CARGO_PKG_VERSION")).into(),
            sessions_max: 1_024,
            lanes_max: 16,
            processors,
            further_lanes_max: usize::MAX,
            lane_threads: (processors as usize).saturating_sub(1).clamp(1, 8),
            subscriptions_max: 1_024,
            chunks_in_flight: 8,
            chunk_bytes: 4 << 20,
            codec: CodecChoice::Auto,
            encoded_bytes: 512 << 20,
            logins_max: 1_024,
            device_cache_bytes: None,
            staged_bytes: u64::MAX,
            share_gpu: false,
            base_bytes: 4 << 30,
            stall_timeout: Duration::from_secs(30),
            reader_linger: Duration::from_secs(30),
            peers: None,
            limits: Limits::default(),
            workers: Workers::Threads,
        }
    }
}

/// The longest timeout: longer ones would overflow the clock.
pub(crate) const TIMEOUT_MAX: Duration = Duration::from_secs(10 * 365 * 24 * 3_600);

impl Config {
    /// The lanes that a session is offered that begins beside so many transfers. One of these may be its client's own,
    /// over a connection that this one replaces; and a session may outlive all of them, so that it is offered two at least.
    pub(crate) fn lanes_offer(&self, transfers: u64) -> u32 {
        let share = 2 * u64::from(self.processors) / transfers.max(1);
        self.lanes_max.min(u32::try_from(share.max(2)).unwrap_or(u32::MAX))
    }

    /// The configuration clamped to valid values.
    pub(crate) fn clamped(self) -> Self {
        Self {
            chunks_in_flight: self.chunks_in_flight.max(1),
            stall_timeout: self.stall_timeout.min(TIMEOUT_MAX),
            reader_linger: self.reader_linger.min(TIMEOUT_MAX),
            ..self
        }
    }
}
