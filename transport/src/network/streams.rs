//! [`ByteStream`]: a TCP connection, a Unix socket, or a simulated connection.

use rustix::net::sockopt;
use socket2::SockRef;
use std::{
    fmt::Debug,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::AsFd,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpSocket, TcpStream},
};

use crate::{LocalProcess, Peer, listener::canonical, unix::Descriptors};

/// An unencrypted connection that carries bytes reliably and in order, in both directions.
pub trait ByteStream: AsyncRead + AsyncWrite + Debug + Send + Unpin + 'static {
    /// Tunes the stream by a lane's measurements and settings.
    fn tune(&self, _tuning: StreamTuning) {}

    /// For a Unix socket, the process at its other end, and the descriptors passed over it. Such a lane has no TLS.
    fn local(&self) -> Option<(LocalProcess, Descriptors)> {
        None
    }
}

/// A lane's measurements and settings for its byte stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamTuning {
    /// The time until the peer's answer in the handshake: a round trip, and computation at both ends.
    pub answer_time: Duration,
    /// The time without an acknowledgement after which the connection fails.
    pub idle_timeout: Duration,
}

/// The minimum answer time of a long path. Within one region, answers are faster even from a busy peer.
const LONG_PATH_ANSWER_TIME: Duration = Duration::from_millis(20);

/// The maximum of unsent bytes in the kernel's send buffer: 200 us at 10 Gbit/s, enough until the lane's task is woken
/// and writes more.
///
/// Without this limit the send buffer, of 4 MiB and more, is always full during a transfer. Then each control message
/// waits behind it, and two processors send packets of one connection, that which runs the lane and that which handles
/// acknowledgements, so packets can be reordered (docs/tcp-lanes.md).
const UNSENT_BYTES: u32 = 256 << 10;

impl ByteStream for TcpStream {
    /// Bounds the unsent bytes, and the time without an acknowledgement. On a long path, restores the system's default
    /// congestion control if that is BBR, which `start_with_cubic` replaced.
    fn tune(&self, tuning: StreamTuning) {
        let timeout_ms = u32::try_from(tuning.idle_timeout.as_millis()).unwrap_or(u32::MAX);
        if let Err(error) = sockopt::set_tcp_user_timeout(self, timeout_ms) {
            tracing::debug!(%error, "The timeout for unacknowledged data of a TCP lane could not be set.");
        }
        if let Err(error) = SockRef::from(self).set_tcp_notsent_lowat(UNSENT_BYTES) {
            tracing::debug!(%error, "The unsent bytes of a TCP lane could not be bounded.");
        }
        if tuning.answer_time >= LONG_PATH_ANSWER_TIME
            && sockopt::tcp_congestion(self).is_ok_and(|name| name == CUBIC)
            && let Some(BBR) = system_congestion().as_deref()
            && let Err(error) = sockopt::set_tcp_congestion(self, BBR)
        {
            tracing::debug!(%error, "A TCP lane on a long path could not return to the system's BBR.");
        }
    }
}

const BBR: &str = "bbr";
const CUBIC: &str = "cubic";

/// Replaces BBR by CUBIC on an unconnected or listening socket. Keeps other congestion controls.
///
/// BBR paces with a timer for each packet, which costs half of the speed at MTU 1500. On a long path its loss tolerance
/// is worth this cost, but the path's length is known only after the handshake. To replace BBR then would be too late:
/// the kernel continues to pace the connection, which without segmentation offload ran at a tenth of the speed
/// (docs/tcp-lanes.md).
fn start_with_cubic(socket: impl AsFd) {
    if sockopt::tcp_congestion(&socket).is_ok_and(|name| name == BBR)
        && let Err(error) = sockopt::set_tcp_congestion(&socket, CUBIC)
    {
        tracing::debug!(%error, "TCP lanes keep BBR, which costs processor time on a short path.");
    }
}

/// The system's default congestion control.
fn system_congestion() -> Option<String> {
    let socket = TcpSocket::new_v4().or_else(|_| TcpSocket::new_v6()).ok()?;
    sockopt::tcp_congestion(&socket).ok()
}

/// The future of a byte stream that is being opened. The caller sets the deadline.
pub type Opening = Pin<Box<dyn Future<Output = io::Result<Box<dyn ByteStream>>> + Send>>;

/// Accepts byte streams.
pub trait StreamListener: Debug + Send + Sync + 'static {
    /// Accepts the next byte stream, with its peer.
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Box<dyn ByteStream>, Peer)>>;

    /// The local address.
    fn local_address(&self) -> io::Result<SocketAddr>;
}

/// The maximum number of connections in the kernel that wait to be accepted; the same number as for QUIC.
const BACKLOG: i32 = 1_024;

/// Opens a TCP connection from `local` to `peer`. A `segment_max` bounds the segments of both ends: the handshake
/// announces it.
pub(super) async fn connect(
    local: IpAddr,
    peer: SocketAddr,
    segment_max: Option<u32>,
) -> io::Result<TcpStream> {
    let socket = match peer {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    if !local.is_unspecified() {
        socket.bind(SocketAddr::new(local, 0))?;
    }
    if let Some(bytes) = segment_max {
        SockRef::from(&socket).set_tcp_mss(bytes)?;
    }
    start_with_cubic(&socket);
    let stream = socket.connect(peer).await?;
    stream.set_nodelay(true)?; // Each write is complete, and must not wait for more data.
    Ok(stream)
}

/// Listens on `address`; for IPv4 and IPv6 if it is IPv6's unspecified address, as with UDP.
pub(super) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    // The kernel keeps a terminated server's connections for a minute; they must not block the port for the next
    // server.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    start_with_cubic(&socket); // Accepted connections inherit it.
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

impl StreamListener for TcpListener {
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Box<dyn ByteStream>, Peer)>> {
        let (stream, peer) = ready!(Self::poll_accept(self, cx))?;
        stream.set_nodelay(true)?;
        Poll::Ready(Ok((Box::new(stream), canonical(peer).into())))
    }

    fn local_address(&self) -> io::Result<SocketAddr> {
        self.local_addr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: no connection starts with BBR, whose pacing would persist; long paths return to the system's congestion
    /// control. Method: both ends of a connection. If the system's default is not BBR, or CUBIC is refused, connections
    /// keep the default.
    #[tokio::test]
    async fn connections_start_without_bbr() {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let system = system_congestion().unwrap();
        let allowed = sockopt::set_tcp_congestion(TcpSocket::new_v4().unwrap(), CUBIC).is_ok();
        let initial = if system == BBR && allowed { CUBIC } else { &system };
        let idle_timeout = Duration::from_millis(7_000);
        for (answer_time, tuned) in [(LONG_PATH_ANSWER_TIME / 2, initial), (LONG_PATH_ANSWER_TIME, &system)] {
            let connected = connect(address.ip(), address, None).await.unwrap();
            let (accepted, _) = listener.accept().await.unwrap();
            for stream in [connected, accepted] {
                assert_eq!(sockopt::tcp_congestion(&stream).unwrap(), initial);
                stream.tune(StreamTuning { answer_time, idle_timeout });
                assert_eq!(sockopt::tcp_congestion(&stream).unwrap(), tuned);
                assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 7_000);
                assert_eq!(SockRef::from(&stream).tcp_notsent_lowat().unwrap(), UNSENT_BYTES);
            }
        }
    }

    /// Goal: a configured congestion control other than BBR is kept.
    #[tokio::test]
    async fn other_congestion_controls_stay() {
        let socket = TcpSocket::new_v4().unwrap();
        sockopt::set_tcp_congestion(&socket, "reno").unwrap(); // Every system has it, for every process.
        start_with_cubic(&socket);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = socket.connect(listener.local_addr().unwrap()).await.unwrap();
        for answer_time in [Duration::ZERO, LONG_PATH_ANSWER_TIME] {
            stream.tune(StreamTuning { answer_time, idle_timeout: Duration::from_secs(10) });
            assert_eq!(sockopt::tcp_congestion(&stream).unwrap(), "reno");
        }
    }
}
