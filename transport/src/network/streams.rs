//! Byte streams of a network: TCP connections on this machine's own, whatever a simulation makes of them on its own.

use std::{
    fmt::Debug,
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpSocket},
};

/// Both directions of one connection, in order and whole as long as it lives. Nothing is encrypted yet.
pub trait ByteStream: AsyncRead + AsyncWrite + Debug + Send + Unpin + 'static {}

impl<S: AsyncRead + AsyncWrite + Debug + Send + Unpin + 'static> ByteStream for S {}

/// A byte stream that is being opened. The caller sets the deadline.
pub type Opening = Pin<Box<dyn Future<Output = io::Result<Box<dyn ByteStream>>> + Send>>;

/// Where byte streams come in.
pub trait StreamListener: Debug + Send + Sync + 'static {
    /// Takes the next one, with where it is from.
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Box<dyn ByteStream>, SocketAddr)>>;

    /// Where it listens.
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
