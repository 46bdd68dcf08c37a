//! A UDP socket that never sends a batch larger than the kernel accepts.

use quinn::{
    AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller,
    udp::{RecvMeta, Transmit},
};
use socket2::{Domain, Socket, Type};
use std::{
    io::{self, IoSliceMut},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

/// quinn's own socket, with batches limited to the 65,507 bytes that one UDP send may have.
///
/// quinn batches ten packets of any size. If each has more than 6550 bytes, the kernel refuses the batch, quinn counts
/// it as sent, and the losses reduce the connection to packets of 1200 bytes.
#[derive(Debug)]
pub(super) struct CappedSocket {
    inner: Arc<dyn AsyncUdpSocket>,
    segments_max: usize,
}

impl CappedSocket {
    /// Binds to `address`, for packets of `mtu` bytes, with kernel buffers of `buffer_bytes`.
    pub(super) fn bind(address: SocketAddr, mtu: u16, buffer_bytes: usize) -> io::Result<Self> {
        let socket = Socket::new(Domain::for_address(address), Type::DGRAM, None)?;
        socket.set_recv_buffer_size(buffer_bytes)?;
        socket.set_send_buffer_size(buffer_bytes)?;
        // Linux reports twice the granted size, because it includes its own bookkeeping.
        warn_of_small_buffer(socket.recv_buffer_size()? / 2, buffer_bytes);
        socket.bind(&address.into())?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            inner: TokioRuntime.wrap_udp_socket(socket.into())?,
            segments_max: (SEND_MAX_BYTES / usize::from(mtu)).max(1),
        })
    }
}

/// Prints a warning if the kernel granted less than requested, which it does without an error.
fn warn_of_small_buffer(granted_bytes: usize, wanted_bytes: usize) {
    if granted_bytes < wanted_bytes {
        eprintln!(
            "The kernel grants a socket buffer of {granted_bytes} bytes instead of {wanted_bytes}, and packets will be \
             lost: run `sysctl -w net.core.rmem_max={wanted_bytes} net.core.wmem_max={wanted_bytes}`."
        );
    }
}

impl AsyncUdpSocket for CappedSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.inner).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.inner.try_send(transmit)
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.inner.poll_recv(context, buffers, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.inner.max_transmit_segments().min(self.segments_max)
    }

    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}

/// The largest UDP payload over IPv4, segmented or not.
const SEND_MAX_BYTES: usize = 65_507;
