//! A network with fault injection for its byte streams.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::Path,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, Waker, ready},
};
use tensor_relay_transport::{
    ByteStream, LocalProcess, Network, Opening, StreamListener, StreamTuning, Tuning, unix::Descriptors,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Injects faults into the streams of a [`FaultyNetwork`]. Clones share their state.
#[derive(Debug, Clone, Default)]
pub(crate) struct Faults(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    fault: Option<Fault>,
    reader: Option<Waker>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Reads stay pending; writes succeed, but their bytes are dropped.
    Blackhole,
    /// One bit of the next read is flipped.
    FlipBit,
    /// Reads return end of file.
    Eof,
    /// Reads fail with a reset.
    Reset,
}

impl Faults {
    pub(crate) fn blackhole(&self) {
        self.set(Fault::Blackhole);
    }

    pub(crate) fn flip_bit(&self) {
        self.set(Fault::FlipBit);
    }

    pub(crate) fn eof(&self) {
        self.set(Fault::Eof);
    }

    pub(crate) fn reset(&self) {
        self.set(Fault::Reset);
    }

    fn set(&self, fault: Fault) {
        let mut state = self.state();
        state.fault = Some(fault);
        state.reader.take().inspect(Waker::wake_by_ref);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

/// Wraps a network, and injects `faults` into the byte streams that it opens.
#[derive(Debug)]
pub(crate) struct FaultyNetwork {
    pub(crate) inner: Arc<dyn Network>,
    pub(crate) faults: Faults,
}

impl Network for FaultyNetwork {
    fn bind(&self, address: SocketAddr, tuning: &Tuning) -> io::Result<Arc<dyn quinn::AsyncUdpSocket>> {
        self.inner.bind(address, tuning)
    }

    fn connect(&self, local: IpAddr, peer: SocketAddr, segment_max: Option<u32>) -> Opening {
        let (opening, faults) = (self.inner.connect(local, peer, segment_max), self.faults.clone());
        Box::pin(async move { Ok(Box::new(Stream { inner: opening.await?, faults }) as Box<dyn ByteStream>) })
    }

    fn connect_socket(&self, path: &Path) -> Opening {
        let (opening, faults) = (self.inner.connect_socket(path), self.faults.clone());
        Box::pin(async move { Ok(Box::new(Stream { inner: opening.await?, faults }) as Box<dyn ByteStream>) })
    }

    fn listen(&self, address: SocketAddr) -> io::Result<Box<dyn StreamListener>> {
        self.inner.listen(address)
    }

    fn runtime(&self) -> Arc<dyn quinn::Runtime> {
        self.inner.runtime()
    }

    fn path_payload(&self, peer: SocketAddr) -> Option<u16> {
        self.inner.path_payload(peer)
    }

    fn allows_lane_threads(&self) -> bool {
        self.inner.allows_lane_threads()
    }

    fn rng_seed(&self) -> Option<[u8; 32]> {
        self.inner.rng_seed()
    }
}

#[derive(Debug)]
struct Stream {
    inner: Box<dyn ByteStream>,
    faults: Faults,
}

impl ByteStream for Stream {
    fn tune(&self, tuning: StreamTuning) {
        self.inner.tune(tuning);
    }

    fn local(&self) -> Option<(LocalProcess, Descriptors)> {
        self.inner.local()
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let fault = {
            let mut state = self.faults.state();
            state.reader = Some(cx.waker().clone());
            state.fault
        };
        match fault {
            Some(Fault::Blackhole) => return Poll::Pending,
            Some(Fault::Eof) => return Poll::Ready(Ok(())),
            Some(Fault::Reset) => return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
            Some(Fault::FlipBit) | None => {}
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        if let (Some(Fault::FlipBit), Some(byte)) = (fault, buf.filled_mut()[before..].last_mut()) {
            *byte ^= 1;
            self.faults.state().fault = None;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let fault = self.faults.state().fault;
        match fault {
            Some(Fault::Blackhole) => Poll::Ready(Ok(bytes.len())), // As a kernel accepts the bytes into its buffer.
            _ => Pin::new(&mut self.inner).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let fault = self.faults.state().fault;
        match fault {
            Some(Fault::Blackhole) => Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum())),
            _ => Pin::new(&mut self.inner).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
