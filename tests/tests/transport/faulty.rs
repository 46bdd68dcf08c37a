//! A network whose byte streams go wrong when they are told to.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, Waker, ready},
};
use tensor_relay_transport::{ByteStream, Network, Opening, StreamListener, StreamTuning, Tuning};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What becomes of the streams of a [`Faulty`] network. All clones are one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Faults(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    fault: Option<Fault>,
    reader: Option<Waker>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Nothing passes any more, either way, and nobody says so.
    Silence,
    /// One bit of what is read next is flipped.
    Flip,
    /// The stream ends.
    End,
    /// The stream fails.
    Reset,
}

impl Faults {
    pub(crate) fn silence(&self) {
        self.set(Fault::Silence);
    }

    pub(crate) fn flip(&self) {
        self.set(Fault::Flip);
    }

    pub(crate) fn end(&self) {
        self.set(Fault::End);
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

/// A network whose outgoing byte streams have these faults.
#[derive(Debug)]
pub(crate) struct Faulty {
    pub(crate) inner: Arc<dyn Network>,
    pub(crate) faults: Faults,
}

impl Network for Faulty {
    fn bind(&self, address: SocketAddr, tuning: &Tuning) -> io::Result<Arc<dyn quinn::AsyncUdpSocket>> {
        self.inner.bind(address, tuning)
    }

    fn connect(&self, local: IpAddr, peer: SocketAddr) -> Opening {
        let (opening, faults) = (self.inner.connect(local, peer), self.faults.clone());
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

    fn has_threads(&self) -> bool {
        self.inner.has_threads()
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
            Some(Fault::Silence) => return Poll::Pending,
            Some(Fault::End) => return Poll::Ready(Ok(())),
            Some(Fault::Reset) => return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
            Some(Fault::Flip) | None => {}
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        if let (Some(Fault::Flip), Some(byte)) = (fault, buf.filled_mut()[before..].last_mut()) {
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
            Some(Fault::Silence) => Poll::Ready(Ok(bytes.len())), // The kernel takes it, and it leads nowhere.
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
            Some(Fault::Silence) => Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum())),
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
