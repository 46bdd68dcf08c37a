//! Byte streams: TCP connections, or simulated ones.

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

/// Both directions of one connection, in order and whole as long as it lives. Nothing is encrypted yet.
pub trait ByteStream: AsyncRead + AsyncWrite + Debug + Send + Unpin + 'static {
    /// Tunes the stream with what a lane has found out.
    fn tune(&self, _tuning: StreamTuning) {}
}

/// A lane's measurements and settings for its byte stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamTuning {
    /// The time that the other end took to answer the handshake: a round trip and its work.
    pub answer_time: Duration,
    /// The time without an acknowledgement after which the other end counts as dead.
    pub idle_timeout: Duration,
}

/// Up to which time to an answer a path is short: within one region, and with a busy machine at its other end.
const SHORT_PATH: Duration = Duration::from_millis(20);

/// How much the system may have queued that it has not sent yet: enough for the time until the lane is woken and writes
/// more, which is 200 us at 10 Gbit/s.
///
/// With a full send buffer, two processors send for one connection: that of the lane, and that on which acknowledgements
/// arrive. Between containers of one host (veth) they overtake each other, TCP takes that for loss, and the congestion
/// window stays small for the life of the connection: every second one ran at a third of the speed (docs/tcp-lanes.md).
const UNSENT_BYTES: u32 = 256 << 10;

impl ByteStream for TcpStream {
    /// What is queued and not sent is bounded. On a short path CUBIC takes the place of BBR, where the system has that and allows this. BBR spreads what is sent by a
    /// timer for each packet: at MTU 1500 that was half of the speed at twice the CPU. On a long path its answer to loss is
    /// worth that.
    fn tune(&self, tuning: StreamTuning) {
        let timeout_ms = u32::try_from(tuning.idle_timeout.as_millis()).unwrap_or(u32::MAX);
        if let Err(error) = sockopt::set_tcp_user_timeout(self, timeout_ms) {
            tracing::debug!(%error, "The system keeps its own timeout for what is not acknowledged.");
        }
        if let Err(error) = SockRef::from(self).set_tcp_notsent_lowat(UNSENT_BYTES) {
            tracing::debug!(%error, "The system queues as much of a TCP lane as it likes.");
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

/// The connections that wait to be accepted, all costs of which are the kernel's; as many as QUIC's.
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
    stream.set_nodelay(true)?; // Whole segments are written, and none waits for the next.
    Ok(Box::new(stream))
}

/// Listens on `address`, for both families where it is IPv6's unspecified address, as UDP does.
pub(super) fn listen(address: SocketAddr) -> io::Result<Box<dyn StreamListener>> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    // Connections of a server that ended linger in the kernel for a minute, and must not keep the next one from its port.
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

    /// Goal: a stream is tuned to its path. Where the system has no BBR, or no CUBIC for this process, that half says nothing.
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

    /// Goal: what the system uses by choice, other than BBR, stays.
    #[tokio::test]
    async fn what_is_not_bbr_stays() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        sockopt::set_tcp_congestion(&stream, "reno").unwrap(); // Every system has it, for every process.
        stream.tune(StreamTuning { answer_time: Duration::ZERO, idle_timeout: Duration::from_secs(10) });
        assert_eq!(sockopt::tcp_congestion(&stream).unwrap(), "reno");
    }
}
