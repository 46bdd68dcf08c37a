//! [`Socket`]: the system's UDP socket, for quinn.

use quinn::{
    AsyncUdpSocket, UdpPoller,
    udp::{RecvMeta, Transmit, UdpSocketState},
};
use rustix::net::sockopt;
use std::{
    fmt,
    future::Future,
    io::{self, IoSliceMut},
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Once},
    task::{Context, Poll, ready},
};
use tokio::{io::Interest, net::UdpSocket};

/// A UDP socket with segmentation offload for sending and receiving.
///
/// Unlike quinn's socket, it requests buffers of a configured size and warns if the kernel grants less. Callers must
/// respect the kernel's bounds on batches, as [`Batching`](super::Batching) does.
pub(super) struct Socket {
    io: UdpSocket,
    state: UdpSocketState,
    payload_max: u16,
}

impl Socket {
    /// Binds to `address`. `payload_max` is the largest datagram that quinn accepts.
    pub(super) fn bind(address: SocketAddr, buffer_bytes: u32, payload_max: u16) -> io::Result<Self> {
        let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::DGRAM, None)?;
        if address.is_ipv6() && address.ip().is_unspecified() {
            socket.set_only_v6(false)?;
        }
        size_buffers(&socket, buffer_bytes as usize);
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        let io = UdpSocket::from_std(socket.into())?;
        Ok(Self { state: UdpSocketState::new((&io).into())?, io, payload_max })
    }
}

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Writable { socket: self, waiting: None })
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.io
            .try_io(Interest::WRITABLE, || self.state.send((&self.io).into(), transmit))
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.io.poll_recv_ready(cx))?;
            let received = self
                .io
                .try_io(Interest::READABLE, || self.state.recv((&self.io).into(), bufs, meta));
            if let Ok(count) = received {
                return Poll::Ready(Ok(count));
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.io.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.state.max_gso_segments()
    }

    /// quinn multiplies this number by the largest payload to size each of its 32 receive buffers, which must hold any
    /// batch that the kernel coalesces. With all 64 segments of the largest payload they would take 133 MB of address
    /// space.
    fn max_receive_segments(&self) -> usize {
        self.state.gro_segments().min(segments_received(self.payload_max))
    }

    fn may_fragment(&self) -> bool {
        self.state.may_fragment()
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket")
            .field("local", &self.io.local_addr().ok())
            .finish_non_exhaustive()
    }
}

/// The number of datagrams of `payload_max` that are as long as any batch that the kernel coalesces, which is at most
/// 64 KiB; and one more for a short last segment.
fn segments_received(payload_max: u16) -> usize {
    usize::from(u16::MAX).div_ceil(payload_max.into()) + 1
}

/// Requests buffers of `bytes`, beyond the system's limit if permitted (CAP_NET_ADMIN). Warns once if the kernel grants
/// less: a receive buffer below the window loses packets in every burst.
fn size_buffers(socket: &socket2::Socket, bytes: usize) {
    static WARN_ONCE: Once = Once::new();
    let _ = sockopt::set_socket_recv_buffer_size_force(socket, bytes)
        .or_else(|_| sockopt::set_socket_recv_buffer_size(socket, bytes));
    let _ = sockopt::set_socket_send_buffer_size_force(socket, bytes)
        .or_else(|_| sockopt::set_socket_send_buffer_size(socket, bytes));
    // The kernel doubles the granted size, for its bookkeeping.
    let granted = socket.recv_buffer_size().unwrap_or(0) / 2;
    if granted < bytes {
        WARN_ONCE.call_once(|| {
            tracing::warn!(
                asked_bytes = bytes,
                granted_bytes = granted,
                "The kernel grants smaller UDP receive buffers than requested, so bursts may lose packets. \
                 Raise the limits on the host: sysctl -w net.core.rmem_max={bytes} net.core.wmem_max={bytes}"
            );
        });
    }
}

/// Waits until the socket is writable. Each task has its own poller, so that no task replaces the waker of another
/// task.
struct Writable {
    socket: Arc<Socket>,
    waiting: Option<Pin<Box<dyn Future<Output = io::Result<()>> + Send + Sync>>>,
}

impl UdpPoller for Writable {
    fn poll_writable(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let socket = Arc::clone(&self.socket);
        let waiting = self
            .waiting
            .get_or_insert_with(|| Box::pin(async move { socket.io.writable().await }));
        let result = ready!(waiting.as_mut().poll(cx));
        self.waiting = None;
        Poll::Ready(result)
    }
}

impl fmt::Debug for Writable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writable").field("socket", &self.socket).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A receive buffer that is shorter than a coalesced batch truncates the batch, and the datagrams beyond are lost.
    #[test]
    fn receive_buffers_hold_complete_batches() {
        for payload_max in [1_200, 1_452, 1_472, 8_972, 65_000] {
            assert!(segments_received(payload_max) * usize::from(payload_max) >= 65_536);
        }
    }
}
