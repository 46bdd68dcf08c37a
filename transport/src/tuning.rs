//! [`Tuning`]: the parameters of lanes, with their benefits and costs.

use crate::window::SendWindow;
use quinn::{
    EndpointConfig, IdleTimeout, MtuDiscoveryConfig, TransportConfig, VarInt,
    congestion::{BbrConfig, ControllerFactory, CubicConfig},
};
use std::{sync::Arc, time::Duration};

/// The largest accepted datagram payload. The smaller bound of both peers applies. A large one costs address space for
/// receive buffers, not memory. The limit of UDP over IPv4 is 65,507.
pub(crate) const UDP_PAYLOAD_MAX: u16 = 65_000;

/// The UDP payload that every path must be able to carry for QUIC (RFC 9000 §14).
const UDP_PAYLOAD_MIN: u16 = 1_200;

/// The bound of MTU discovery if the path's MTU is unknown: Ethernet with MTU 1500 over IPv6.
const UDP_PAYLOAD_ETHERNET: u16 = 1_452;

/// The tuning of lanes. Windows, buffers, payload and congestion controller are those of QUIC. The defaults were
/// measured best on ordinary Ethernet.
#[derive(Debug, Clone)]
pub struct Tuning {
    /// The maximum of unacknowledged bytes on one lane of a short path. Default 4 MiB.
    ///
    /// It bounds how far a burst can fill the receiver's socket buffer, so it should not exceed
    /// [`socket_buffer_bytes`](Self::socket_buffer_bytes): with windows of 64 MiB over a buffer of 4 MiB the buffer
    /// overflows and 10 to 30 % of the rate is lost to retransmission.
    pub window_bytes: u32,
    /// The maximum of unacknowledged bytes on one lane of a long path, whose window grows by 2.5 MB for each
    /// millisecond of round trip time. Default 64 MiB. It costs no copy: sent bytes are held in their source's memory.
    ///
    /// The subscriber's credit is another bound, by default eight chunks of 4 MiB per lane: 2.7 Gbit/s at 100 ms. Long
    /// and fast paths need more chunks in flight, or more lanes.
    pub window_max_bytes: u32,
    /// The requested size of the send and receive buffers of the UDP socket. Default 4 MiB. Unless the process has
    /// `CAP_NET_ADMIN`, the kernel clamps it to `net.core.rmem_max` and `wmem_max`; a clamped receive buffer is logged
    /// once as a warning.
    pub socket_buffer_bytes: u32,
    /// An upper bound on the UDP payload, besides what the path can carry. Default none.
    pub udp_payload_max: Option<u16>,
    /// The congestion controller. Default BBR: with 1 % loss it reaches 1.6 GB/s, CUBIC 0.67; on a clean link they are
    /// equal.
    pub congestion: Congestion,
    /// The time without a received packet (over TCP: byte) after which a peer counts as lost. Default 10 s.
    pub idle_timeout_ms: u32,
    /// The interval of pings on an idle lane; over TCP on any lane. Default 3 s: three chances within the idle timeout.
    pub keep_alive_ms: u32,
    /// The deadline for resolving a server's name, and then for connecting with the handshake. Default 10 s each.
    pub connect_timeout_ms: u32,
    /// The deadline for a peer's `Hello` or `Welcome`, for writing a control message, and for the answer to a request.
    /// Default 10 s each.
    pub control_timeout_ms: u32,
}

/// A congestion controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Congestion {
    /// Follows the measured bottleneck rate. Tolerates random loss.
    Bbr,
    /// Follows loss, as Linux TCP does.
    Cubic,
}

/// The part of the connection's receive window for control messages and manifests, in addition to that for granted
/// credit.
pub(crate) const WINDOW_RESERVE_BYTES: u32 = 1 << 20;

/// The maximum of unread bytes of one stream. Larger than a chunk of the usual 4 MiB with its header, so that such a
/// chunk does not wait a round trip for its last bytes. Credit bounds the sum over all streams.
const STREAM_WINDOW_BYTES: u32 = 8 << 20;

/// The maximum of unread bytes that a client may send to a server over QUIC, also before its login. Clients send only
/// control messages, of at most 64 KiB, which are read as they arrive.
const SERVER_WINDOW_BYTES: u32 = 64 << 10;

/// The maximum number of concurrent data streams of a server. It bounds the state that a hostile server can create at a
/// client; credit keeps chunks far below it.
const DATA_STREAMS_MAX: u32 = 1_024;

impl Default for Tuning {
    fn default() -> Self {
        let idle_timeout_ms = idle_timeout_of_tests().unwrap_or(10_000);
        Self {
            window_bytes: 4 << 20,
            window_max_bytes: 64 << 20,
            socket_buffer_bytes: 4 << 20,
            udp_payload_max: None,
            congestion: Congestion::Bbr,
            idle_timeout_ms,
            keep_alive_ms: idle_timeout_ms / 10 * 3,
            connect_timeout_ms: 10_000,
            control_timeout_ms: 10_000,
        }
    }
}

/// The idle timeout of tests of whole processes, which would wait for it otherwise.
fn idle_timeout_of_tests() -> Option<u32> {
    std::env::var("TENSOR_RELAY_TEST_IDLE_TIMEOUT_MS").ok()?.parse().ok()
}

impl Tuning {
    /// The connect deadline.
    pub fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms.into())
    }

    /// The idle timeout.
    pub fn idle_timeout(&self) -> Duration {
        Duration::from_millis(self.idle_timeout_ms.into())
    }

    /// The send window of a new lane.
    pub(crate) fn send_window(&self) -> SendWindow {
        SendWindow::new(self.window_bytes, self.window_max_bytes)
    }

    /// The deadline of one step of the control stream.
    pub fn control_timeout(&self) -> Duration {
        Duration::from_millis(self.control_timeout_ms.into())
    }

    /// The largest accepted UDP payload.
    pub(crate) fn payload_max(&self) -> u16 {
        self.udp_payload_max
            .unwrap_or(UDP_PAYLOAD_MAX)
            .clamp(UDP_PAYLOAD_MIN, UDP_PAYLOAD_MAX)
    }

    pub(crate) fn endpoint(&self, rng_seed: Option<[u8; 32]>) -> EndpointConfig {
        let mut config = EndpointConfig::default();
        config
            .max_udp_payload_size(self.payload_max())
            .expect("clamped to what QUIC allows");
        config.rng_seed(rng_seed);
        config
    }

    /// QUIC's settings at a server. quinn's defaults suit trusted peers: a connection may have 200 streams, without a
    /// limit of unread data for all of them. These settings bound both.
    pub(crate) fn server(&self, path_payload: Option<u16>) -> TransportConfig {
        let mut config = self.common(path_payload);
        config.max_concurrent_bidi_streams(VarInt::from_u32(1)); // The control stream.
        config.max_concurrent_uni_streams(VarInt::from_u32(0));
        config.stream_receive_window(VarInt::from_u32(SERVER_WINDOW_BYTES));
        config.receive_window(VarInt::from_u32(SERVER_WINDOW_BYTES));
        config
    }

    /// QUIC's settings at a client.
    pub(crate) fn client(&self, path_payload: Option<u16>) -> TransportConfig {
        let mut config = self.common(path_payload);
        config.max_concurrent_bidi_streams(VarInt::from_u32(0));
        config.max_concurrent_uni_streams(VarInt::from_u32(DATA_STREAMS_MAX));
        config.stream_receive_window(VarInt::from_u32(STREAM_WINDOW_BYTES));
        // The first subscription gives credit and raises this window (`Lane::allow_unread`).
        config.receive_window(VarInt::from_u32(WINDOW_RESERVE_BYTES));
        config
    }

    fn common(&self, path_payload: Option<u16>) -> TransportConfig {
        let mut config = TransportConfig::default();
        config.send_window(self.window_bytes.into());
        config.send_fairness(false); // Sends chunks one after another, so that the first is complete earlier.
        config.datagram_receive_buffer_size(None); // Datagram frames are not used; quinn refuses a peer that sends any.
        config.max_idle_timeout(Some(IdleTimeout::from(VarInt::from_u32(self.idle_timeout_ms))));
        config.keep_alive_interval(Some(Duration::from_millis(self.keep_alive_ms.into())));
        config.congestion_controller_factory(self.congestion.factory());
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(self.mtu_bound(path_payload));
        config.mtu_discovery_config(Some(discovery));
        config
    }

    /// The upper bound of MTU discovery: the payload that the first hop carries or, if the kernel does not know it,
    /// that of Ethernet.
    fn mtu_bound(&self, path_payload: Option<u16>) -> u16 {
        path_payload
            .unwrap_or(UDP_PAYLOAD_ETHERNET)
            .clamp(UDP_PAYLOAD_MIN, self.payload_max())
    }
}

impl Congestion {
    fn factory(self) -> Arc<dyn ControllerFactory + Send + Sync> {
        match self {
            Self::Bbr => Arc::new(BbrConfig::default()),
            Self::Cubic => Arc::new(CubicConfig::default()),
        }
    }
}
