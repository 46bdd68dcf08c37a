//! Byte streams of the simulated network: ordered, reliable, delayed and flow-controlled.

use super::{SimNet, State};
use std::{
    collections::{BTreeMap, VecDeque},
    fmt, io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{Mutex, PoisonError},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};
use tensor_relay_transport::{ByteStream, Peer, StreamListener};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep},
};

/// The maximum number of bytes of one direction that are in flight or unread: the buffers of both kernels. Writers wait
/// beyond it.
const BUFFER_BYTES: usize = 256 << 10;

/// The interval at which a connection attempt is retried during a partition.
const SYN_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// All byte streams of a network.
#[derive(Debug, Default)]
pub(super) struct Streams {
    acceptors: BTreeMap<SocketAddr, Acceptor>,
    pipes: BTreeMap<u64, Pipe>,
    opened: u64,
}

/// A listening address.
#[derive(Debug, Default)]
struct Acceptor {
    waiting: VecDeque<(Stream, SocketAddr)>,
    waker: Option<Waker>,
}

/// One direction of a stream.
#[derive(Debug)]
struct Pipe {
    from: SocketAddr,
    to: SocketAddr,
    /// The written bytes that were not read yet, with their times of arrival.
    pieces: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    last_arrival: Instant,
    /// Set when the writer closes: the end of the stream, or a reset because the writer dropped unread bytes. Delivered
    /// after the last piece.
    end: Option<io::Result<()>>,
    /// Whether the test reset the stream: both endpoints fail immediately, without the bytes in flight.
    is_reset: bool,
    /// Whether the reader was dropped. Later writes are discarded; the writer sees the end of the other direction.
    reader_dropped: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Streams {
    /// Wakes all readers and writers.
    pub(super) fn wake_all(&mut self) {
        self.pipes.values_mut().for_each(Pipe::wake);
    }

    pub(super) fn reset(&mut self, one: IpAddr, other: IpAddr) {
        let between = |pipe: &Pipe| [(one, other), (other, one)].contains(&(pipe.from.ip(), pipe.to.ip()));
        for pipe in self.pipes.values_mut().filter(|pipe| between(pipe)) {
            pipe.is_reset = true;
            pipe.wake();
        }
    }

    fn open(&mut self, from: SocketAddr, to: SocketAddr) -> u64 {
        self.opened += 1;
        let pipe = Pipe {
            from,
            to,
            pieces: VecDeque::new(),
            bytes: 0,
            last_arrival: Instant::now(),
            end: None,
            is_reset: false,
            reader_dropped: false,
            reader: None,
            writer: None,
        };
        self.pipes.insert(self.opened, pipe);
        self.opened
    }
}

impl Pipe {
    fn wake(&mut self) {
        let wakers = [self.reader.take(), self.writer.take()];
        wakers.into_iter().flatten().for_each(Waker::wake);
    }
}

/// Opens a stream from `local` to `peer`.
pub(super) async fn connect(net: SimNet, local: IpAddr, peer: SocketAddr) -> io::Result<Box<dyn ByteStream>> {
    let local = SocketAddr::new(local, net.state().free_port());
    let delay = net.state().draw_delay();
    tokio::time::sleep(delay).await;
    while net.state().is_partitioned(local, peer) {
        tokio::time::sleep(SYN_RETRY_INTERVAL).await;
    }
    let (connected, delay) = {
        let mut state = net.state();
        (state.connect(&net, local, peer), state.draw_delay())
    };
    tokio::time::sleep(delay).await;
    Ok(Box::new(connected?))
}

impl State {
    fn connect(&mut self, net: &SimNet, local: SocketAddr, peer: SocketAddr) -> io::Result<Stream> {
        let streams = &mut self.streams;
        let (to_peer, to_local) = (streams.open(local, peer), streams.open(peer, local));
        let Some(acceptor) = streams.acceptors.get_mut(&peer) else {
            streams.pipes.remove(&to_peer);
            streams.pipes.remove(&to_local);
            return Err(io::ErrorKind::ConnectionRefused.into());
        };
        acceptor.waiting.push_back((Stream::new(net, to_peer, to_local), local));
        acceptor.waker.take().inspect(Waker::wake_by_ref);
        Ok(Stream::new(net, to_local, to_peer))
    }
}

/// Listens at `address`.
pub(super) fn listen(net: SimNet, address: SocketAddr) -> io::Result<Box<dyn StreamListener>> {
    let is_in_use = net.state().streams.acceptors.contains_key(&address);
    if is_in_use {
        return Err(io::ErrorKind::AddrInUse.into());
    }
    net.state().streams.acceptors.insert(address, Acceptor::default());
    Ok(Box::new(Listener { net, address }))
}

#[derive(Debug)]
struct Listener {
    net: SimNet,
    address: SocketAddr,
}

impl StreamListener for Listener {
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Box<dyn ByteStream>, Peer)>> {
        let mut state = self.net.state();
        let Some(acceptor) = state.streams.acceptors.get_mut(&self.address) else { return Poll::Pending };
        match acceptor.waiting.pop_front() {
            Some((stream, from)) => Poll::Ready(Ok((Box::new(stream), from.into()))),
            None => {
                acceptor.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    fn local_address(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let acceptor = self.net.state().streams.acceptors.remove(&self.address);
        // After the lock is released: dropping the queued streams locks it again.
        drop(acceptor);
    }
}

/// One endpoint of a stream.
struct Stream {
    net: SimNet,
    incoming: u64,
    outgoing: u64,
    /// Wakes the reader when the next piece arrives.
    arrival: Mutex<Option<Pin<Box<Sleep>>>>,
}

impl Stream {
    fn new(net: &SimNet, incoming: u64, outgoing: u64) -> Self {
        Self { net: net.clone(), incoming, outgoing, arrival: Mutex::new(None) }
    }

    /// `Ok`: received bytes, the end, or a reset. `Err(Some(time))`: nothing has arrived, and the next piece arrives at
    /// `time`. `Err(None)`: nothing is on its way, or a partition stalls the stream.
    fn take_arrived(
        &self,
        cx: &Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Result<io::Result<()>, Option<Instant>> {
        let mut state = self.net.state();
        let is_partitioned = state
            .streams
            .pipes
            .get(&self.incoming)
            .is_some_and(|pipe| state.is_partitioned(pipe.from, pipe.to));
        let Some(pipe) = state.streams.pipes.get_mut(&self.incoming) else { return Ok(Ok(())) };
        if pipe.is_reset {
            return Ok(Err(io::ErrorKind::ConnectionReset.into()));
        }
        pipe.reader = Some(cx.waker().clone());
        if is_partitioned {
            return Err(None);
        }
        match pipe.pieces.front_mut() {
            Some((arrives_at, _)) if *arrives_at > Instant::now() => return Err(Some(*arrives_at)),
            Some((_, piece)) => {
                let taken = piece.len().min(buf.remaining());
                buf.put_slice(&piece[..taken]);
                piece.drain(..taken);
                pipe.bytes -= taken;
            }
            None if pipe.end.is_some() && pipe.last_arrival > Instant::now() => {
                return Err(Some(pipe.last_arrival));
            }
            None => {
                return pipe
                    .end
                    .as_ref()
                    .map(|end| end.as_ref().map_err(|e| e.kind().into()).copied())
                    .ok_or(None);
            }
        }
        pipe.pieces.pop_front_if(|(_, piece)| piece.is_empty());
        pipe.writer.take().inspect(Waker::wake_by_ref);
        Ok(Ok(()))
    }

    fn poll_arrival(&self, cx: &mut Context<'_>, at: Instant) -> Poll<()> {
        let mut arrival = self.arrival.lock().unwrap_or_else(PoisonError::into_inner);
        arrival.insert(Box::pin(tokio::time::sleep_until(at))).as_mut().poll(cx)
    }

    /// Ends the outgoing direction: `end` arrives after all written bytes.
    fn end(&self, end: io::Result<()>) {
        let mut state = self.net.state();
        let arrives_at = Instant::now() + state.draw_delay();
        if let Some(pipe) = state.streams.pipes.get_mut(&self.outgoing).filter(|pipe| pipe.end.is_none()) {
            pipe.last_arrival = pipe.last_arrival.max(arrives_at);
            pipe.end = Some(end);
            pipe.reader.take().inspect(Waker::wake_by_ref);
        }
    }
}

impl ByteStream for Stream {}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            match self.take_arrived(cx, buf) {
                Ok(taken) => return Poll::Ready(taken),
                Err(Some(at)) => ready!(self.poll_arrival(cx, at)),
                Err(None) => return Poll::Pending,
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut state = self.net.state();
        let arrives_at = Instant::now() + state.draw_delay();
        let State { streams, traffic, .. } = &mut *state;
        let Some(pipe) = streams.pipes.get_mut(&self.outgoing) else {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        };
        if pipe.is_reset {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        if pipe.end.is_some() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let taken = bytes.len().min(BUFFER_BYTES - pipe.bytes);
        if pipe.reader_dropped {
            return Poll::Ready(Ok(bytes.len()));
        }
        if taken == 0 {
            pipe.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        pipe.last_arrival = pipe.last_arrival.max(arrives_at);
        pipe.pieces.push_back((pipe.last_arrival, bytes[..taken].to_vec()));
        pipe.bytes += taken;
        pipe.reader.take().inspect(Waker::wake_by_ref);
        traffic.entry(pipe.from.ip()).or_default().bytes += taken as u64;
        Poll::Ready(Ok(taken))
    }

    /// Writes all buffers in one call, as kernels do.
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let bytes: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
        self.poll_write(cx, &bytes)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end(Ok(()));
        Poll::Ready(Ok(()))
    }
}

impl Drop for Stream {
    /// Behaves as a kernel: a stream that is dropped with unread bytes is reset, otherwise ended.
    fn drop(&mut self) {
        let has_unread = self
            .net
            .state()
            .streams
            .pipes
            .get(&self.incoming)
            .is_some_and(|pipe| pipe.bytes > 0);
        self.end(if has_unread { Err(io::ErrorKind::ConnectionReset.into()) } else { Ok(()) });
        let mut state = self.net.state();
        if let Some(pipe) = state.streams.pipes.get_mut(&self.incoming) {
            pipe.reader_dropped = true;
            (pipe.bytes, pipe.pieces) = (0, VecDeque::new());
            pipe.wake();
        }
        let pipes = &mut state.streams.pipes;
        let is_finished = |id| pipes.get(id).is_none_or(|pipe: &Pipe| pipe.reader_dropped);
        if is_finished(&self.incoming) && is_finished(&self.outgoing) {
            pipes.remove(&self.incoming);
            pipes.remove(&self.outgoing);
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({} in, {} out)", self.incoming, self.outgoing)
    }
}
