//! The UDP socket of this machine, as quinn wants it.

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

/// The most bytes one system call may send, whatever the number of segments: the largest UDP payload over IPv4.
const BATCH_MAX_BYTES: usize = 65_507;

/// A UDP socket with segmentation offload both ways.
///
/// Beyond quinn's own socket it does two things. It never hands the kernel a batch above 65,507 bytes: quinn batches ten
/// segments whatever their size, which from an MTU of 6,551 on fails with EMSGSIZE, is taken for loss, and drops the path
/// to an MTU of 1,200. And it asks for buffers of a chosen size and says when it did not get them.
pub(super) struct Socket {
    io: UdpSocket,
    state: UdpSocketState,
    payload_max: u16,
}

impl Socket {
    /// Binds to `address`. `payload_max` is what quinn accepts in one datagram.
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

    fn send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.io
            .try_io(Interest::WRITABLE, || self.state.send((&self.io).into(), transmit))
    }
}

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Writable { socket: self, waiting: None })
    }

    /// When the socket fills up between two parts of a batch, quinn sends the whole batch again later. The receiver then
    /// has some packets twice, which QUIC drops by their number.
    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        match transmit.segment_size {
            Some(segment) if transmit.contents.len() > BATCH_MAX_BYTES => {
                let batch = batch_bytes(transmit.contents.len(), segment);
                transmit.contents.chunks(batch).try_for_each(|contents| {
                    let segment_size = (contents.len() > segment).then_some(segment);
                    self.send(&Transmit { contents, segment_size, ..*transmit })
                })
            }
            _ => self.send(transmit),
        }
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

    /// quinn multiplies this with the largest payload to size each of its 32 receive buffers, which have to hold any
    /// batch that the kernel coalesces. All 64 segments of the largest payload would be 133 MB of address space.
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

/// The size of the equal batches that `bytes` in segments of `segment` are sent in, each as large as the kernel takes.
fn batch_bytes(bytes: usize, segment: usize) -> usize {
    let segments = bytes.div_ceil(segment);
    let per_batch = (BATCH_MAX_BYTES / segment).max(1);
    let batches = segments.div_ceil(per_batch);
    segments.div_ceil(batches) * segment
}

/// How many datagrams of `payload_max` together have room for every batch the kernel coalesces: 64 KiB, and one more for
/// a last segment that is cut.
fn segments_received(payload_max: u16) -> usize {
    usize::from(u16::MAX).div_ceil(payload_max.into()) + 1
}

/// Asks for buffers of `bytes`, beyond the system's limit where this process may (CAP_NET_ADMIN), and warns once when
/// they stay smaller: a receive buffer below the window loses packets in every burst.
fn size_buffers(socket: &socket2::Socket, bytes: usize) {
    static WARN_ONCE: Once = Once::new();
    let _ = sockopt::set_socket_recv_buffer_size_force(socket, bytes)
        .or_else(|_| sockopt::set_socket_recv_buffer_size(socket, bytes));
    let _ = sockopt::set_socket_send_buffer_size_force(socket, bytes)
        .or_else(|_| sockopt::set_socket_send_buffer_size(socket, bytes));
    // The kernel doubles what it grants, for its own bookkeeping.
    let granted = socket.recv_buffer_size().unwrap_or(0) / 2;
    if granted < bytes {
        WARN_ONCE.call_once(|| {
            tracing::warn!(
                asked_bytes = bytes,
                granted_bytes = granted,
                "The kernel clamps UDP receive buffers below the transfer window, so bursts lose packets. \
                 Raise it on the host: sysctl -w net.core.rmem_max={bytes} net.core.wmem_max={bytes}"
            );
        });
    }
}

/// Waits until the socket can send again. Each waiter has its own, so none takes another's waker.
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
    use proptest::prelude::*;

    proptest! {
        /// Whatever quinn batches: every part is within the kernel's bound, made of whole segments, and nothing is lost.
        #[test]
        fn batches_fit_the_kernel(segment in 1_200usize..=65_000, segments in 1usize..=64, last in 1usize..=65_000) {
            let bytes = (segments - 1) * segment + last.min(segment);
            prop_assume!(bytes > BATCH_MAX_BYTES);
            let batch = batch_bytes(bytes, segment);
            prop_assert!(batch <= BATCH_MAX_BYTES && batch.is_multiple_of(segment) && batch > 0);
        }
    }

    /// A receive buffer shorter than a coalesced batch cuts it, and every datagram behind the cut is lost.
    #[test]
    fn receive_buffers_hold_whole_batches() {
        for payload_max in [1_200, 1_452, 1_472, 8_972, 65_000] {
            assert!(segments_received(payload_max) * usize::from(payload_max) >= 65_536);
        }
    }

    #[tokio::test]
    async fn a_jumbo_batch_arrives_whole() {
        let bind = || Socket::bind("127.0.0.1:0".parse().unwrap(), 4 << 20, 65_000).unwrap();
        let (a, b) = (bind(), bind());
        let contents: Vec<u8> = (0..10 * 8_972).map(|i| (i / 8_972) as u8).collect();
        let destination = b.local_addr().unwrap();
        let transmit =
            Transmit { destination, ecn: None, contents: &contents, segment_size: Some(8_972), src_ip: None };
        a.io.writable().await.unwrap();
        a.try_send(&transmit).unwrap();
        let mut got = Vec::new();
        while got.len() < contents.len() {
            let mut buf = vec![0; 1 << 17];
            let mut meta = [RecvMeta::default()];
            let receive =
                std::future::poll_fn(|cx| b.poll_recv(cx, &mut [IoSliceMut::new(&mut buf)], &mut meta));
            assert_eq!(
                tokio::time::timeout(std::time::Duration::from_secs(5), receive)
                    .await
                    .unwrap()
                    .unwrap(),
                1
            );
            got.extend_from_slice(&buf[..meta[0].len]);
        }
        assert_eq!(got, contents);
    }
}
