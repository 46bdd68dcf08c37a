//! What clients can make a server keep or do at most, with reasons; and how much memory that is.

use crate::{Config, inboxes::Inbox, probing::PROBES_MAX, strangers};
use tensor_relay_device::{AllocError, Reservation, container_memory_bytes};
use tensor_relay_protocol::{FRAME_MAX_BYTES, WATCHES_MAX};
use tensor_relay_transport::{LaneKind, Tuning};

/// The memory of the program itself and its runtime, measured: 20 to 40 MB.
const PROGRAM_BYTES: u64 = 48 << 20;

/// The memory of a subscription that moves nothing: its task, its place among readers, and the queue of its messages.
/// Measured: 13 KiB.
const SUBSCRIPTION_BYTES: u64 = 16 << 10;

/// How many subscriptions all sessions may have together, for each session that there may be.
const SUBSCRIPTIONS_PER_SESSION: u64 = 32;

/// At least as many clients can have all subscriptions that one may have.
const CLIENTS_WITH_ALL: u64 = 4;

/// One bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bound {
    /// What is bounded.
    pub name: &'static str,
    /// How much of it there may be.
    pub most: Amount,
    /// The memory that it may take of the host, 0 where it takes none of its own.
    pub memory_bytes: u64,
    /// Why there is this bound, or what it costs.
    pub reason: &'static str,
}

/// A number with its unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    /// So many.
    Count(u64),
    /// So many bytes.
    Bytes(u64),
    /// A time in milliseconds.
    Ms(u64),
}

/// The memory limit of this process's container has no room for a server as it is configured.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the memory limit of the container (cgroup) has no room for a server: {asked_bytes} bytes are needed beside its versions \
     and sessions, and {free_bytes} of its {limit_bytes} bytes are free. Raise that limit, or lower --encoded-mem"
)]
pub struct ContainerTooSmall {
    asked_bytes: u64,
    free_bytes: u64,
    limit_bytes: u64,
}

impl Config {
    /// This configuration for the memory limit of the container that the process runs in, if there is one: as much less for
    /// encodings and logins as keeps them below an eighth and a sixteenth of it. What was set by a user stays.
    pub fn for_container(self, encoded_bytes: Option<u64>) -> Self {
        self.for_limit(container_memory_bytes(), encoded_bytes)
    }

    fn for_limit(self, limit_bytes: Option<u64>, encoded_bytes: Option<u64>) -> Self {
        let limit = limit_bytes.unwrap_or(u64::MAX);
        let logins = usize::try_from(limit / 16 / strangers::LOGIN_BYTES).unwrap_or(usize::MAX);
        Self {
            encoded_bytes: encoded_bytes.unwrap_or_else(|| self.encoded_bytes.min(limit / 8)),
            logins_max: self.logins_max.min(logins).max(strangers::LEAST),
            ..self
        }
    }

    /// The further lanes that all sessions may have together.
    pub(crate) fn lanes_total_max(&self) -> u64 {
        match self.lanes_max {
            ..=1 => 0,
            _ => self.sessions_max as u64,
        }
    }

    /// The subscriptions that all sessions may have together.
    pub(crate) fn subscriptions_total_max(&self) -> u64 {
        let of_all = (self.sessions_max as u64).saturating_mul(SUBSCRIPTIONS_PER_SESSION);
        of_all.max(CLIENTS_WITH_ALL * u64::from(self.subscriptions_max))
    }

    /// All bounds on what clients can make a server with this configuration keep or do.
    pub fn bounds(&self) -> Vec<Bound> {
        let bound = |name, most, memory_bytes, reason| Bound { name, most, memory_bytes, reason };
        let lane_bytes = LaneKind::Tcp.memory_bytes_max().max(LaneKind::Quic.memory_bytes_max());
        let times = |count: u64, bytes: u64| count.saturating_mul(bytes);
        let (sessions, lanes) = (self.sessions_max as u64, self.lanes_total_max());
        let subscriptions = self.subscriptions_total_max();
        let login_ms = u64::from(Tuning::default().control_timeout_ms);
        let in_flight = times(self.chunks_in_flight as u64, self.chunk_bytes.into());
        vec![
            bound(
                "sessions",
                Amount::Count(sessions),
                times(sessions, lane_bytes),
                "--sessions; a client without one is refused at its login, after it has shown its token",
            ),
            bound(
                "further lanes, all sessions",
                Amount::Count(lanes),
                times(lanes, lane_bytes),
                "as many as sessions; who gets none goes on with the lanes that it has",
            ),
            bound(
                "lanes of a session",
                Amount::Count(self.lanes_max.into()),
                0,
                "--lanes-max; more than one client has cores and network cards for",
            ),
            bound(
                "subscriptions, all sessions",
                Amount::Count(subscriptions),
                times(subscriptions, SUBSCRIPTION_BYTES),
                "32 for each session that there may be, and as many as four clients may have at least",
            ),
            bound(
                "subscriptions of a session",
                Amount::Count(self.subscriptions_max.into()),
                0,
                "a glob follows as many topics",
            ),
            bound(
                "watches of a session",
                Amount::Count(WATCHES_MAX as u64),
                0,
                "one for each glob that it follows",
            ),
            bound(
                "chunks in flight of a subscription",
                Amount::Bytes(in_flight),
                0,
                "--chunks-in-flight of --chunk-size; slices of the version, but copies where that is borrowed from files",
            ),
            bound(
                "encoded chunks",
                Amount::Bytes(self.encoded_bytes),
                self.encoded_bytes,
                "--encoded-mem; being sent, and half of it kept for further subscribers; beyond it chunks travel raw",
            ),
            bound(
                "logins under way",
                Amount::Count(self.logins_max as u64),
                times(self.logins_max as u64, strangers::LOGIN_BYTES),
                "of whoever fills them from one network, the oldest goes: nobody elsewhere is locked out",
            ),
            bound(
                "time for a login",
                Amount::Ms(login_ms),
                0,
                "handshake and Hello each; longer than any round trip and a packet that is lost twice",
            ),
            bound(
                "handshakes a second without address check",
                Amount::Count(tensor_relay_transport::HANDSHAKES_PER_SECOND.into()),
                0,
                "beyond, QUIC's Retry makes clients prove their address: forged ones cost 6 % of a processor at most",
            ),
            bound(
                "a control message",
                Amount::Bytes(FRAME_MAX_BYTES as u64),
                0,
                "a resume names at most this much of what it holds",
            ),
            bound(
                "unread messages of a subscription",
                Amount::Count(Inbox::BOUND as u64),
                0,
                "beyond, the client's control stream is not read",
            ),
            bound(
                "probes at once",
                Amount::Count(PROBES_MAX),
                0,
                "what `doctor` asks for; each 10 s and 1 GiB at most, of bytes that are made as they are sent",
            ),
            bound(
                "time without progress",
                Amount::Ms(u64::try_from(self.stall_timeout.as_millis()).unwrap_or(u64::MAX)),
                0,
                "--stall-timeout; then a subscriber in mid-transfer is evicted",
            ),
            bound("the program", Amount::Bytes(PROGRAM_BYTES), PROGRAM_BYTES, "measured: 20 to 40 MB"),
        ]
    }

    /// The memory of the host that a server with this configuration takes at most, beside its versions, in bytes.
    ///
    /// Not in it: page-locked slots of GPUs (`--pinned-mem`), copies of chunks in flight where versions are borrowed from
    /// files, and buffers of the kernel's sockets.
    pub fn memory_bytes_max(&self) -> u64 {
        let bounds = self.bounds();
        bounds.iter().fold(0, |sum, bound| sum.saturating_add(bound.memory_bytes))
    }

    /// Keeps memory of the container's limit free for what a server needs beside versions and sessions, until the result is
    /// dropped. Each session and lane reserves its own when it is admitted.
    ///
    /// # Errors
    /// [`ContainerTooSmall`].
    pub fn reserve(&self) -> Result<Reservation, ContainerTooSmall> {
        let logins = (self.logins_max as u64).saturating_mul(strangers::LOGIN_BYTES);
        let bytes = self.encoded_bytes.saturating_add(logins).saturating_add(PROGRAM_BYTES);
        Reservation::fitting(bytes).map_err(|error| match error {
            AllocError::OverCgroup { asked_bytes, free_bytes, limit_bytes } => {
                ContainerTooSmall { asked_bytes, free_bytes, limit_bytes }
            }
            _ => ContainerTooSmall { asked_bytes: bytes, free_bytes: 0, limit_bytes: 0 },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_container_s_limit_lowers_what_nobody_set() {
        let config = |limit, encoded| Config::default().for_limit(limit, encoded);
        let free = config(None, None);
        assert_eq!((free.encoded_bytes, free.logins_max), (512 * MIB, 1_024));
        let small = config(Some(256 * MIB), None);
        assert_eq!((small.encoded_bytes, small.logins_max), (32 * MIB, 109));
        assert_eq!(config(Some(256 * MIB), Some(200 * MIB)).encoded_bytes, 200 * MIB);
        assert_eq!(config(Some(0), None).logins_max, strangers::LEAST);
    }

    #[test]
    fn memory_is_the_sum_of_what_is_bounded() {
        let few = Config { sessions_max: 1, lanes_max: 1, subscriptions_max: 1, ..Config::default() };
        let more = Config { sessions_max: 2, lanes_max: 2, ..few.clone() };
        let added = more.memory_bytes_max() - few.memory_bytes_max();
        let lane = LaneKind::Tcp.memory_bytes_max();
        assert_eq!(added, 3 * lane + SUBSCRIPTIONS_PER_SESSION * SUBSCRIPTION_BYTES);
        let endless = Config { sessions_max: usize::MAX, encoded_bytes: u64::MAX, ..Config::default() };
        assert_eq!(endless.memory_bytes_max(), u64::MAX);
    }
}
