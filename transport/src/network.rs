//! [`Network`]: the interface that creates UDP sockets and byte streams.

mod batch;
mod batching;
pub(crate) mod lane_threads;
pub(crate) mod moving;
mod socket;
mod streams;

use crate::{Tuning, listener::canonical, stops::Patient, unix::SocketStream};
use socket::Socket;
use std::{
    fmt::Debug,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    path::Path,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

pub use batching::Batching;
pub use streams::{ByteStream, Opening, StreamListener, StreamTuning};

/// The network that carries lanes: the operating system's, or a simulation whose time, loss and order follow from a
/// seed.
///
/// Only this trait and [`Batching`] expose quinn's types, since a simulation has to implement quinn's socket.
pub trait Network: Debug + Send + Sync + 'static {
    /// Binds a socket to `address`; port 0 lets the network choose.
    fn bind(&self, address: SocketAddr, tuning: &Tuning) -> io::Result<Arc<dyn quinn::AsyncUdpSocket>>;

    /// Opens a byte stream from `local` to `peer`, with segments of at most `segment_max` bytes if that is given. A
    /// network without byte streams returns an error.
    fn connect(&self, _local: IpAddr, _peer: SocketAddr, _segment_max: Option<u32>) -> Opening {
        Box::pin(std::future::ready(Err(io::ErrorKind::Unsupported.into())))
    }

    /// Opens a byte stream to the Unix socket at `path`. A simulated network has none and returns an error.
    fn connect_socket(&self, _path: &Path) -> Opening {
        Box::pin(std::future::ready(Err(io::ErrorKind::Unsupported.into())))
    }

    /// Listens for byte streams on `address`. A network without byte streams returns an error.
    fn listen(&self, _address: SocketAddr) -> io::Result<Box<dyn StreamListener>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The runtime that spawns quinn's tasks and provides its clock.
    fn runtime(&self) -> Arc<dyn quinn::Runtime>;

    /// The largest UDP payload that the first hop towards `peer` carries, if it is known.
    fn path_payload(&self, peer: SocketAddr) -> Option<u16>;

    /// Whether lanes may have their own threads. The clock of a simulation exists on one thread only.
    fn allows_lane_threads(&self) -> bool {
        false
    }

    /// The seed of quinn's random numbers; `None` for the system's randomness.
    fn rng_seed(&self) -> Option<[u8; 32]> {
        None
    }
}

/// Tokio as the runtime of one endpoint of quinn's, in a process that may be stopped.
#[derive(Debug, Default)]
struct SystemRuntime {
    has_endpoint: AtomicBool,
}

impl quinn::Runtime for SystemRuntime {
    fn new_timer(&self, at: Instant) -> Pin<Box<dyn quinn::AsyncTimer>> {
        quinn::TokioRuntime.new_timer(at)
    }

    fn spawn(&self, task: Pin<Box<dyn Future<Output = ()> + Send>>) {
        match self.has_endpoint.swap(true, Ordering::Relaxed) {
            // The endpoint, which quinn spawns first, reads the socket. Its connections have the timeouts.
            false => drop(tokio::spawn(task)),
            true => drop(tokio::spawn(Patient::new(task))),
        }
    }

    fn wrap_udp_socket(&self, socket: UdpSocket) -> io::Result<Arc<dyn quinn::AsyncUdpSocket>> {
        quinn::TokioRuntime.wrap_udp_socket(socket)
    }

    fn now(&self) -> Instant {
        quinn::TokioRuntime.now()
    }
}

/// The network of this machine: UDP sockets and TCP connections.
#[derive(Debug, Clone, Copy)]
pub struct SystemNetwork;

impl Network for SystemNetwork {
    fn bind(&self, address: SocketAddr, tuning: &Tuning) -> io::Result<Arc<dyn quinn::AsyncUdpSocket>> {
        let socket = Socket::bind(address, tuning.socket_buffer_bytes, tuning.payload_max())?;
        Ok(Arc::new(Batching::over(Arc::new(socket))))
    }

    fn connect(&self, local: IpAddr, peer: SocketAddr, segment_max: Option<u32>) -> Opening {
        let opening = streams::connect(local, peer, segment_max);
        Box::pin(async move { Ok(Box::new(opening.await?) as Box<dyn ByteStream>) })
    }

    fn connect_socket(&self, path: &Path) -> Opening {
        let path = path.to_owned();
        Box::pin(async move { Ok(Box::new(SocketStream::connect(&path).await?) as Box<dyn ByteStream>) })
    }

    fn listen(&self, address: SocketAddr) -> io::Result<Box<dyn StreamListener>> {
        Ok(Box::new(streams::listen(address)?))
    }

    fn runtime(&self) -> Arc<dyn quinn::Runtime> {
        Arc::new(SystemRuntime::default())
    }

    fn allows_lane_threads(&self) -> bool {
        true
    }

    /// Queries the kernel: "connecting" a UDP socket sends no packet, but looks up the route and its MTU.
    fn path_payload(&self, peer: SocketAddr) -> Option<u16> {
        let peer = canonical(peer); // The kernel has no IPv6 route to an IPv4 address.
        let any: SocketAddr = match peer {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        let probe = UdpSocket::bind(any).ok()?;
        probe.connect(peer).ok()?;
        // An IP header of 20 or 40 bytes and a UDP header of 8.
        let (mtu, headers) = match peer {
            SocketAddr::V4(_) => (rustix::net::sockopt::ip_mtu(&probe).ok()?, 28),
            SocketAddr::V6(_) => (rustix::net::sockopt::ipv6_mtu(&probe).ok()?, 48),
        };
        Some(u16::try_from(mtu.saturating_sub(headers)).unwrap_or(u16::MAX))
    }
}
