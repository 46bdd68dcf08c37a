//! The bounds on the resources that clients can use of a server, with their reasons and memory.

use crate::{Config, handshakes, inboxes::Inbox, logins, shared::PROBES_MAX};
use tensor_relay_device::{AllocError, Reservation, container_memory_bytes};
use tensor_relay_protocol::{FRAME_MAX_BYTES, WATCHES_MAX};
use tensor_relay_transport::{LaneKind, Tuning};

/// The memory of the program itself and its runtime, measured: 20 to 40 MB.
const PROGRAM_BYTES: u64 = 48 << 20;

/// The memory of an idle subscription: its task, its place as a reader, and its message queue. Measured: 13 KiB.
const SUBSCRIPTION_BYTES: u64 = 16 << 10;

/// The number of subscriptions that each possible session adds to the maximum of all sessions.
const SUBSCRIPTIONS_PER_SESSION: u64 = 32;

/// The number of clients that can each have the maximum number of subscriptions of a session.
const CLIENTS_WITH_ALL: u64 = 4;

/// One bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bound {
    /// The bounded quantity.
    pub name: &'static str,
    /// The limit.
    pub max: Amount,
    /// The host memory that it may take; 0 if another bound includes it, or it takes none.
    pub memory_bytes: u64,
    /// The reason for this bound, or its cost.
    pub reason: &'static str,
}

/// A number with its unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    /// A number.
    Count(u64),
    /// A number of bytes.
    Bytes(u64),
    /// A time in milliseconds.
    Ms(u64),
}

/// The memory limit of this process's container is too low for the configured server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the memory limit of the container (cgroup) is too low for a server: {asked_bytes} bytes are needed in addition to \
     versions and sessions, and {free_bytes} of {limit_bytes} bytes are free. Raise that limit, or lower --encoded-mem"
)]
pub struct ContainerTooSmall {
    asked_bytes: u64,
    free_bytes: u64,
    limit_bytes: u64,
}

/// The maximum memory of a lane of either kind.
fn lane_bytes() -> u64 {
    LaneKind::Tcp.memory_bytes_max().max(LaneKind::Quic.memory_bytes_max())
}

impl Config {
    /// Fits this configuration to the memory limit of the process's container, if there is one: limits encoded chunks
    /// to an eighth of it, and logins and further lanes to a sixteenth each, but allows at least 64 logins.
    /// `encoded_bytes`, set by a user, is not changed.
    pub fn for_container(self, encoded_bytes: Option<u64>) -> Self {
        self.for_limit(container_memory_bytes(), encoded_bytes)
    }

    fn for_limit(self, limit_bytes: Option<u64>, encoded_bytes: Option<u64>) -> Self {
        let limit = limit_bytes.unwrap_or(u64::MAX);
        let in_a_sixteenth = |bytes| usize::try_from(limit / 16 / bytes).unwrap_or(usize::MAX);
        Self {
            encoded_bytes: encoded_bytes.unwrap_or_else(|| self.encoded_bytes.min(limit / 8)),
            logins_max: self.logins_max.min(in_a_sixteenth(logins::LOGIN_BYTES)).max(logins::PLACES_MIN),
            further_lanes_max: self.further_lanes_max.min(in_a_sixteenth(lane_bytes())),
            ..self
        }
    }

    /// The maximum number of further lanes of all sessions together.
    pub(crate) fn lanes_total_max(&self) -> u64 {
        match self.lanes_max {
            ..=1 => 0,
            _ => self.sessions_max.min(self.further_lanes_max) as u64,
        }
    }

    /// The maximum number of subscriptions of all sessions together.
    pub(crate) fn subscriptions_total_max(&self) -> u64 {
        let by_sessions = (self.sessions_max as u64).saturating_mul(SUBSCRIPTIONS_PER_SESSION);
        by_sessions.max(CLIENTS_WITH_ALL * u64::from(self.subscriptions_max))
    }

    /// All bounds on the resources that clients can use of a server with this configuration.
    pub fn bounds(&self) -> Vec<Bound> {
        let bound = |name, max, memory_bytes, reason| Bound { name, max, memory_bytes, reason };
        let times = |count: u64, bytes: u64| count.saturating_mul(bytes);
        let (sessions, lanes) = (self.sessions_max as u64, self.lanes_total_max());
        let subscriptions = self.subscriptions_total_max();
        let login_ms = u64::from(Tuning::default().control_timeout_ms);
        let in_flight = times(self.chunks_in_flight as u64, self.chunk_bytes.into());
        vec![
            bound(
                "sessions",
                Amount::Count(sessions),
                times(sessions, lane_bytes()),
                "--sessions; a client without one is refused at its login, after it has shown its token",
            ),
            bound(
                "further lanes, all sessions",
                Amount::Count(lanes),
                times(lanes, lane_bytes()),
                "as many as sessions, in a container what a sixteenth of its limit holds, or none with --lanes-max 1; the \
                 client with the most gives way to other clients, and all to new sessions",
            ),
            bound(
                "lanes of a session",
                Amount::Count(self.lanes_max.into()),
                0,
                "--lanes-max; offered are at most two for each processor, shared by the transfers in progress",
            ),
            bound(
                "subscriptions, all sessions",
                Amount::Count(subscriptions),
                times(subscriptions, SUBSCRIPTION_BYTES),
                "32 for each possible session, and at least as many as four clients may have",
            ),
            bound(
                "subscriptions of a session",
                Amount::Count(self.subscriptions_max.into()),
                0,
                "a glob may follow this many topics",
            ),
            bound("watches of a session", Amount::Count(WATCHES_MAX as u64), 0, "one for each followed glob"),
            bound(
                "chunks in flight of a subscription",
                Amount::Bytes(in_flight),
                0,
                "--chunks-in-flight of --chunk-size for each lane; slices of the version, but copies if it is borrowed from \
                 files",
            ),
            bound(
                "encoded chunks",
                Amount::Bytes(self.encoded_bytes),
                self.encoded_bytes,
                "--encoded-mem; being sent, and up to half of it cached for further subscribers; beyond it chunks are \
                 sent raw",
            ),
            bound(
                "logins in progress",
                Amount::Count(self.logins_max as u64),
                times(self.logins_max as u64, logins::LOGIN_BYTES),
                "the oldest of the network with the most is evicted: no network can lock out the others",
            ),
            bound(
                "time for a login",
                Amount::Ms(login_ms),
                0,
                "for the handshake, and for Hello; longer than any round trip with a packet that is lost twice",
            ),
            bound(
                "handshakes a second without address check",
                Amount::Count(tensor_relay_transport::HANDSHAKES_PER_SECOND.into()),
                0,
                "beyond it, QUIC's Retry makes clients prove their address: a flood of forged ones costs at most 7 % of \
                 a processor",
            ),
            bound(
                "handshakes a second, of a network",
                Amount::Count(handshakes::PER_SECOND.into()),
                0,
                "beyond a burst; further ones are delayed, and then refused: they all use the network's thread",
            ),
            bound(
                "a control message",
                Amount::Bytes(FRAME_MAX_BYTES as u64),
                0,
                "a resume can list held chunks only up to this size",
            ),
            bound(
                "unread messages of a subscription",
                Amount::Count(Inbox::CAPACITY as u64),
                0,
                "beyond it, the client's control stream is not read",
            ),
            bound(
                "concurrent probes",
                Amount::Count(PROBES_MAX),
                0,
                "requested by `doctor`; each at most 10 s and 1 GiB, of bytes generated while sending",
            ),
            bound(
                "time without progress",
                Amount::Ms(u64::try_from(self.stall_timeout.as_millis()).unwrap_or(u64::MAX)),
                0,
                "--stall-timeout; then a subscriber is evicted during a transfer",
            ),
            bound("the program", Amount::Bytes(PROGRAM_BYTES), PROGRAM_BYTES, "measured: 20 to 40 MB"),
        ]
    }

    /// The maximum host memory of a server with this configuration in addition to its versions, in bytes.
    ///
    /// Not included: page-locked slots of GPUs (`--pinned-mem`), copies of chunks of versions that are not in memory in one
    /// piece (`encoded_bytes`, and a chunk for each subscription), and the kernel's socket buffers.
    pub fn memory_bytes_max(&self) -> u64 {
        let bounds = self.bounds();
        bounds.iter().fold(0, |sum, bound| sum.saturating_add(bound.memory_bytes))
    }

    /// Reserves the memory that a server needs in addition to versions and sessions, within the container's limit,
    /// until the result is dropped. Each session and lane reserves its own at admission.
    ///
    /// # Errors
    /// [`ContainerTooSmall`], if the limit leaves too little memory.
    pub fn reserve(&self) -> Result<Reservation, ContainerTooSmall> {
        let logins = (self.logins_max as u64).saturating_mul(logins::LOGIN_BYTES);
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
    fn a_container_limit_lowers_the_defaults() {
        let config = |limit, encoded| Config::default().for_limit(limit, encoded);
        let free = config(None, None);
        assert_eq!((free.encoded_bytes, free.logins_max), (512 * MIB, 1_024));
        let small = config(Some(256 * MIB), None);
        assert_eq!((small.encoded_bytes, small.logins_max), (32 * MIB, 109));
        assert_eq!(config(Some(256 * MIB), Some(200 * MIB)).encoded_bytes, 200 * MIB);
        assert_eq!(config(Some(0), None).logins_max, logins::PLACES_MIN);
        for limit_mib in [0, 512, 4_096] {
            let config = config(Some(limit_mib * MIB), None);
            let bytes = config.lanes_total_max() * lane_bytes();
            assert!(
                bytes * 16 <= limit_mib * MIB && (bytes + lane_bytes()) * 16 > limit_mib * MIB,
                "{bytes}"
            );
        }
        assert_eq!(free.lanes_total_max(), 1_024);
    }

    #[test]
    fn processors_are_shared_by_transfers() {
        let config = Config { processors: 4, lanes_max: 6, ..Config::default() };
        assert_eq!([0, 1, 2, 3, 7, 8].map(|transfers| config.lanes_offer(transfers)), [6, 6, 4, 2, 2, 2]);
    }

    #[test]
    fn memory_is_the_sum_of_the_bounds() {
        let few = Config { sessions_max: 1, lanes_max: 1, subscriptions_max: 1, ..Config::default() };
        let more = Config { sessions_max: 2, lanes_max: 2, ..few.clone() };
        let added = more.memory_bytes_max() - few.memory_bytes_max();
        assert_eq!(added, 3 * lane_bytes() + SUBSCRIPTIONS_PER_SESSION * SUBSCRIPTION_BYTES);
        let endless = Config { sessions_max: usize::MAX, encoded_bytes: u64::MAX, ..Config::default() };
        assert_eq!(endless.memory_bytes_max(), u64::MAX);
    }
}
