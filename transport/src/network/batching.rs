//! A socket that collects what QUIC sends into batches as large as the kernel takes.

use super::batch::{Batch, Bounds, QUINN_SEGMENTS, burst_of};
use quinn::{
    AsyncUdpSocket, UdpPoller,
    udp::{RecvMeta, Transmit},
};
use std::{
    collections::HashMap,
    fmt,
    future::poll_fn,
    io::{self, IoSliceMut},
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};
use tokio::{
    runtime::{self, Handle},
    sync::Notify,
    task::yield_now,
};

/// The most peers with a line. A line costs some hundred bytes, and memory for its batch while it is busy. Further
/// peers replace a quiet one.
const LINES_MAX: usize = 4_096;

/// A UDP socket over another one, with a batch for each peer.
///
/// What a batch holds is sent when it is full, when something short follows, or when nothing followed until the runtime
/// has polled everything else that was ready, twice: no timer is involved. So a burst is one system call, and the end of
/// one waits for two turns of the runtime. Batches of several peers do not mix, since a system call has one destination.
pub struct Batching {
    socket: Arc<dyn AsyncUdpSocket>,
    lines: RwLock<HashMap<SocketAddr, Arc<Line>>>,
    /// The number of segments that quinn is asked to send at once: suited to the largest seen, since quinn asks without
    /// naming the peer.
    burst: AtomicUsize,
}

impl Batching {
    /// Collects what is sent to `socket`. Whoever sends has to do so from within a tokio runtime; what comes from elsewhere
    /// is sent as it comes.
    pub fn over(socket: Arc<dyn AsyncUdpSocket>) -> Self {
        Self { socket, lines: RwLock::default(), burst: AtomicUsize::new(QUINN_SEGMENTS) }
    }

    fn bounds(&self) -> Bounds {
        let burst = self.burst.load(Ordering::Relaxed);
        Bounds { burst, kernel: self.socket.max_transmit_segments() }
    }

    /// Looks at how large the segments of a burst are. Single datagrams may be probes of a path that carries less.
    fn note_segments(&self, transmit: &Transmit<'_>) {
        if let Some(burst) = transmit.segment_size.and_then(burst_of) {
            self.burst.fetch_min(burst, Ordering::Relaxed);
        }
    }

    /// The line to `peer`, made when there is none, and room for one.
    fn line(&self, peer: SocketAddr) -> Option<Arc<Line>> {
        let lines = self.lines.read().unwrap_or_else(PoisonError::into_inner);
        let found = lines.get(&peer).cloned();
        drop(lines);
        found.or_else(|| self.open_line(peer))
    }

    fn open_line(&self, peer: SocketAddr) -> Option<Arc<Line>> {
        let mut lines = self.lines.write().unwrap_or_else(PoisonError::into_inner);
        if lines.len() >= LINES_MAX {
            let quiet = *lines.iter().find(|(_, line)| line.is_quiet())?.0;
            lines.remove(&quiet);
        }
        let line = lines
            .entry(peer)
            .or_insert_with(|| Arc::new(Line::new(Arc::clone(&self.socket))));
        Some(Arc::clone(line))
    }
}

impl AsyncUdpSocket for Batching {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.socket).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.note_segments(transmit);
        match self.line(transmit.destination) {
            Some(line) => line.take(transmit, self.bounds()),
            // All of it leaves at once; of a part that does not, QUIC finds out.
            None => Batch::default().take(transmit, self.bounds(), |t| self.socket.try_send(t)),
        }
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.socket.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        let Bounds { burst, kernel } = self.bounds();
        burst.min(kernel)
    }

    fn max_receive_segments(&self) -> usize {
        self.socket.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.socket.may_fragment()
    }
}

impl fmt::Debug for Batching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Batching").field(&self.socket).finish()
    }
}

/// The batch of one peer, and its flush task.
struct Line {
    socket: Arc<dyn AsyncUdpSocket>,
    outbox: Mutex<Outbox>,
}

#[derive(Default)]
struct Outbox {
    batch: Batch,
    /// The task that sends what is held. None was needed yet while there is none.
    flush: Option<Flush>,
}

/// The task that flushes a line once nothing follows. Aborted when this is dropped.
struct Flush {
    /// Where it runs: where the peer's connection does, because it is that one's turns that it waits for. A connection may
    /// move to another thread.
    runtime: runtime::Id,
    held: Arc<Notify>,
}

impl Line {
    fn new(socket: Arc<dyn AsyncUdpSocket>) -> Self {
        Self { socket, outbox: Mutex::default() }
    }

    fn take(self: &Arc<Self>, transmit: &Transmit<'_>, bounds: Bounds) -> io::Result<()> {
        let mut outbox = self.outbox();
        let taken = outbox.batch.take(transmit, bounds, |t| self.socket.try_send(t));
        match Handle::try_current() {
            Ok(runtime) if !outbox.batch.is_empty() => outbox.flush_on(&runtime, self),
            Ok(_) => {}
            // Nobody would send it later. What the socket refuses now goes with the next send.
            Err(_) => drop(outbox.batch.flush(bounds, |t| self.socket.try_send(t))),
        }
        taken
    }

    fn flush(&self) -> io::Result<()> {
        let bounds = Bounds { burst: QUINN_SEGMENTS, kernel: self.socket.max_transmit_segments() };
        self.outbox().batch.flush(bounds, |t| self.socket.try_send(t))
    }

    /// Whether nothing is held and nobody is sending.
    fn is_quiet(&self) -> bool {
        self.outbox.try_lock().is_ok_and(|outbox| outbox.batch.is_empty())
    }

    /// See [`Batch::look`]. `None` too when another task flushes this line.
    fn look(&self, held: &Arc<Notify>) -> Option<u64> {
        let outbox = self.outbox();
        outbox.batch.look().filter(|_| outbox.is_flushed_by(held))
    }

    async fn writable(&self) -> io::Result<()> {
        let mut poller = Arc::clone(&self.socket).create_io_poller();
        poll_fn(|cx| poller.as_mut().poll_writable(cx)).await
    }

    /// A batch is whole after every step, so a panic elsewhere says nothing about it.
    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Outbox {
    /// Lets what `line` holds be sent once nothing follows on `runtime`.
    fn flush_on(&mut self, runtime: &Handle, line: &Arc<Line>) {
        match &self.flush {
            Some(flush) if flush.runtime == runtime.id() => flush.held.notify_one(),
            _ => self.flush = Some(Flush::start(runtime, line)),
        }
    }

    fn is_flushed_by(&self, held: &Arc<Notify>) -> bool {
        self.flush.as_ref().is_some_and(|flush| Arc::ptr_eq(&flush.held, held))
    }
}

impl Drop for Line {
    /// The last words of a connection may be held when its endpoint goes.
    fn drop(&mut self) {
        let _ = self.flush();
    }
}

impl Flush {
    /// Starts the task for `line`, which holds something.
    fn start(runtime: &Handle, line: &Arc<Line>) -> Self {
        let held = Arc::new(Notify::new());
        held.notify_one();
        runtime.spawn(flush_when_quiet(Arc::downgrade(line), Arc::clone(&held)));
        Self { runtime: runtime.id(), held }
    }
}

impl Drop for Flush {
    fn drop(&mut self) {
        self.held.notify_one();
    }
}

/// Sends what a line holds once nothing follows. Ends when `held` is no more what it is told by.
async fn flush_when_quiet(line: Weak<Line>, held: Arc<Notify>) {
    loop {
        held.notified().await;
        let Some(line) = line.upgrade().filter(|line| line.outbox().is_flushed_by(&held)) else { return };
        let mut last_look = None;
        // Between two looks, whatever is ready to send has its turn.
        while let look @ Some(_) = line.look(&held) {
            if look == last_look && line.flush().is_err() && line.writable().await.is_err() {
                return;
            }
            last_look = look;
            yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests;
