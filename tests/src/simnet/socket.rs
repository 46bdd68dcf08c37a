//! A UDP socket of the simulated network, for quinn.

use super::{Datagram, SimNet};
use quinn::{
    AsyncUdpSocket, UdpPoller,
    udp::{RecvMeta, Transmit},
};
use std::{
    fmt,
    io::{self, IoSliceMut},
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
};
use tokio::time::{Instant, Sleep};

pub(super) struct Socket {
    net: SimNet,
    address: SocketAddr,
    /// Wakes the reader when the next datagram arrives.
    arrival: Mutex<Option<Pin<Box<Sleep>>>>,
}

impl Socket {
    pub(super) fn new(net: SimNet, address: SocketAddr) -> Self {
        Self { net, address, arrival: Mutex::new(None) }
    }

    /// Receives the datagrams that have arrived, as many as fit, and returns their number. If none has arrived, returns
    /// the time when the next one will, if one was sent; datagrams sent later wake `cx`.
    fn take_arrived(
        &self,
        cx: &Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Result<usize, Option<Instant>> {
        let mut state = self.net.state();
        let Some(inbox) = state.inboxes.get_mut(&self.address) else {
            return Err(None);
        };
        let mut taken = 0;
        for (buf, meta) in bufs.iter_mut().zip(meta) {
            match inbox.take(Instant::now()) {
                Ok(datagram) => *meta = copy_into(buf, &datagram),
                Err(_) if taken > 0 => break,
                Err(next_arrival) => {
                    inbox.waker = Some(cx.waker().clone());
                    return Err(next_arrival);
                }
            }
            taken += 1;
        }
        Ok(taken)
    }

    fn poll_arrival(&self, cx: &mut Context<'_>, at: Instant) -> Poll<()> {
        let mut arrival = self.arrival.lock().unwrap_or_else(PoisonError::into_inner);
        let sleep = arrival.insert(Box::pin(tokio::time::sleep_until(at)));
        sleep.as_mut().poll(cx)
    }
}

/// Copies a datagram into `buf`, and truncates one that does not fit, as the kernel does.
fn copy_into(buf: &mut [u8], datagram: &Datagram) -> RecvMeta {
    let len = datagram.bytes.len().min(buf.len());
    buf[..len].copy_from_slice(&datagram.bytes[..len]);
    let mut meta = RecvMeta::default();
    (meta.addr, meta.len, meta.stride) = (datagram.from, len, len);
    meta
}

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(AlwaysWritable)
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let mut state = self.net.state();
        if state.draw_is_full() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let segment = transmit.segment_size.unwrap_or(transmit.contents.len());
        for bytes in transmit.contents.chunks(segment) {
            state.send(self.address, transmit.destination, bytes);
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        loop {
            match self.take_arrived(cx, bufs, meta) {
                Ok(taken) => return Poll::Ready(Ok(taken)),
                Err(Some(at)) => ready!(self.poll_arrival(cx, at)),
                Err(None) => return Poll::Pending,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }

    fn max_transmit_segments(&self) -> usize {
        SEGMENTS_MAX
    }

    fn may_fragment(&self) -> bool {
        false
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.net.state().inboxes.remove(&self.address);
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Socket({})", self.address)
    }
}

/// The maximum number of datagrams per send call, as on Linux.
const SEGMENTS_MAX: usize = 64;

/// Always ready: a datagram that the socket refused may be accepted on the next try.
#[derive(Debug)]
struct AlwaysWritable;

impl UdpPoller for AlwaysWritable {
    fn poll_writable(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
