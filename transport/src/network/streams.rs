//! [`ByteStream`]: TCP connections, or simulated ones.

use rustix::net::sockopt;
use socket2::SockRef;
use std::{
    fmt::Debug,
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpSocket, TcpStream},
};

/// An unencrypted connection that carries bytes reliably and in order, in both directions.
pub trait ByteStream: AsyncRead + AsyncWrite + Debug + Send + Unpin + 'static {
    /// Tunes the stream by a lane's measurements.
    fn tune(&self, _tuning: StreamTuning) {}
}

/// A lane's measurements and settings for its byte stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamTuning {
    /// The time that the peer took to answer the handshake: a round trip and its work.
    pub answer_time: Duration,
    /// The time without an acknowledgement after which the peer counts as lost.
    pub idle_timeout: Duration,
}

/// The answer time below which a path counts as short: within one region, even with a busy peer.
const SHORT_PATH: Duration = Duration::from_millis(20);

/// The maximum of unsent bytes in the system's queue: enough until the lane is woken and writes more, 200 us at 10
/// Gbit/s.
///
/// With a full send buffer, two processors send for one connection: that of the lane, and that on which
/// acknowledgements arrive. Between containers of one host (veth) their packets overtake each other, TCP takes that for
/// loss, and the congestion window stays small for the life of the connection: every second connection ran at a third
/// of the speed (docs/tcp-lanes.md).
const UNSENT_BYTES: u32 = 256 << 10;

impl ByteStream for TcpStream {
    /// Bounds the unsent bytes. On a short path, replaces BBR by CUBIC if the system allows it: BBR paces with a timer
    /// for each packet, which at MTU 1500 halved the speed at twice the CPU. On a long path its tolerance of loss is
    /// worth that.
    fn tune(&self, tuning: StreamTuning) {
        let timeout_ms = u32::try_from(tuning.idle_timeout.as_millis()).unwrap_or(u32::MAX);
        if let Err(error) = sockopt::set_tcp_user_timeout(self, timeout_ms) {
            tracing::debug!(%error, "The timeout for unacknowledged data of a TCP lane could not be set.");
        }
        if let Err(error) = SockRef::from(self).set_tcp_notsent_lowat(UNSENT_BYTES) {
            tracing::debug!(%error, "The unsent bytes of a TCP lane could not be bounded.");
        }
        let is_bbr = || sockopt::tcp_congestion(self).is_ok_and(|name| name == "bbr");
        if tuning.answer_time < SHORT_PATH
            && is_bbr()
            && let Err(error) = sockopt::set_tcp_congestion(self, "cubic")
        {
            tracing::debug!(%error, "A TCP lane keeps BBR, which costs processor time on a short path.");
        }
    }
}

/// A byte stream that is being opened. The caller sets the deadline.
pub type Opening = Pin<Box<dyn Future<Output = io::Result<Box<dyn ByteStream>>> + Send>>;

/// Accepts byte streams.
pub trait StreamListener: Debug + Send + Sync + 'static {
    /// Accepts the next one, with its peer's address.
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Box<dyn ByteStream>, SocketAddr)>>;

    /// The local address.
    fn local_address(&self) -> io::Result<SocketAddr>;
}

/// The maximum number of connections waiting to be accepted, which cost only the kernel; as many as QUIC's.
const BACKLOG: i32 = 1_024;

/// Opens a TCP connection from `local` to `peer`.
pub(super) async fn connect(local: IpAddr, peer: SocketAddr) -> io::Result<Box<dyn ByteStream>> {
    let socket = match peer {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    if !local.is_unspecified() {
        socket.bind(SocketAddr::new(local, 0))?;
    }
    let stream = socket.connect(peer).await?;
    stream.set_nodelay(true)?; // Segments are written whole, and must not wait for more.
    Ok(Box::new(stream))
}

/// Listens on `address`; for both families if it is IPv6's unspecified address, as with UDP.
pub(super) fn listen(address: SocketAddr) -> io::Result<Box<dyn StreamListener>> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    // The kernel keeps connections of an ended server for a minute; they must not block the port for the next server.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(Box::new(TcpListener::from_std(socket.into())?))
}

impl StreamListener for TcpListener {
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Box<dyn ByteStream>, SocketAddr)>> {
        let (stream, peer) = ready!(Self::poll_accept(self, cx))?;
        stream.set_nodelay(true)?;
        Poll::Ready(Ok((Box::new(stream), peer)))
    }

    fn local_address(&self) -> io::Result<SocketAddr> {
        self.local_addr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a stream is tuned to its path. Without BBR, or without CUBIC for this process, that part is skipped.
    #[tokio::test]
    async fn short_paths_leave_bbr() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let idle_timeout = Duration::from_millis(7_000);
        for (answer_time, expected) in [(SHORT_PATH / 2, "cubic"), (SHORT_PATH, "bbr")] {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let has_both = ["cubic", "bbr"].map(|name| sockopt::set_tcp_congestion(&stream, name).is_ok());
            stream.tune(StreamTuning { answer_time, idle_timeout });
            assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 7_000);
            assert_eq!(SockRef::from(&stream).tcp_notsent_lowat().unwrap(), UNSENT_BYTES);
            if has_both == [true; 2] {
                assert_eq!(sockopt::tcp_congestion(&stream).unwrap(), expected);
            }
        }
    }

    /// Goal: a configured congestion control other than BBR stays.
    #[tokio::test]
    async fn other_congestion_controls_stay() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        sockopt::set_tcp_congestion(&stream, "reno").unwrap(); // Every system has it, for every process.
        stream.tune(StreamTuning { answer_time: Duration::ZERO, idle_timeout: Duration::from_secs(10) });
        assert_eq!(sockopt::tcp_congestion(&stream).unwrap(), "reno");
    }
}
