//! A socket that collects what QUIC sends into batches as large as the kernel takes.

use super::batch::Batch;
use quinn::{
    AsyncUdpSocket, UdpPoller,
    udp::{RecvMeta, Transmit},
};
use std::{
    fmt,
    future::poll_fn,
    io::{self, IoSliceMut},
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak},
    task::{Context, Poll},
};
use tokio::{runtime::Handle, sync::Notify, task::yield_now};

/// How many peers have a batch at the same time. A batch costs up to 130 KB; peers beyond these send without.
const LINES_MAX: usize = 64;

/// A UDP socket over another one, with a [`Batch`] for each peer.
///
/// What a batch holds is sent when it is full, when something short follows, or when nothing followed until the runtime
/// has polled everything else that was ready: no timer is involved. So a burst is one system call, and the end of one
/// waits for microseconds. Batches of several peers do not mix, since a system call has one destination.
pub struct Batching {
    socket: Arc<dyn AsyncUdpSocket>,
    lines: RwLock<Vec<Arc<Line>>>,
}

impl Batching {
    /// Collects what is sent to `socket`. Whoever sends has to do so from within a tokio runtime; what comes from elsewhere
    /// is sent as it comes.
    pub fn over(socket: Arc<dyn AsyncUdpSocket>) -> Self {
        Self { socket, lines: RwLock::default() }
    }

    /// The line to `peer`, made when there is none, and room for one.
    fn line(&self, peer: SocketAddr) -> Option<Arc<Line>> {
        let lines = self.lines.read().unwrap_or_else(PoisonError::into_inner);
        let found = lines.iter().find(|line| line.peer == peer).cloned();
        drop(lines);
        found.or_else(|| self.open_line(peer))
    }

    /// Opens a line. Its task runs where the peer's connection does, because it is that one's turns that it waits for.
    fn open_line(&self, peer: SocketAddr) -> Option<Arc<Line>> {
        let runtime = Handle::try_current().ok()?;
        let mut lines = self.lines.write().unwrap_or_else(PoisonError::into_inner);
        if lines.len() >= LINES_MAX {
            let idle = lines.iter().position(|line| line.batch().is_empty())?;
            lines.swap_remove(idle);
        }
        let line = Arc::new(Line::new(peer, Arc::clone(&self.socket)));
        runtime.spawn(flush_when_quiet(Arc::downgrade(&line), Arc::clone(&line.held)));
        lines.push(Arc::clone(&line));
        Some(line)
    }
}

impl AsyncUdpSocket for Batching {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.socket).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        match self.line(transmit.destination) {
            Some(line) => line.take(transmit),
            None => self.socket.try_send(transmit),
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
        self.socket.max_transmit_segments()
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

/// The way to one peer.
struct Line {
    peer: SocketAddr,
    socket: Arc<dyn AsyncUdpSocket>,
    batch: Mutex<Batch>,
    /// Says to the line's task that something is held, or that the line is gone.
    held: Arc<Notify>,
}

impl Line {
    fn new(peer: SocketAddr, socket: Arc<dyn AsyncUdpSocket>) -> Self {
        Self { peer, socket, batch: Mutex::default(), held: Arc::default() }
    }

    fn take(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let mut batch = self.batch();
        let was_empty = batch.is_empty();
        let taken = batch.take(transmit, self.socket.max_transmit_segments(), |t| self.socket.try_send(t));
        if was_empty && !batch.is_empty() {
            self.held.notify_one();
        }
        taken
    }

    fn flush(&self) -> io::Result<()> {
        self.batch()
            .flush(self.socket.max_transmit_segments(), |t| self.socket.try_send(t))
    }

    /// See [`Batch::look`].
    fn look(&self) -> Option<u64> {
        self.batch().look()
    }

    async fn writable(&self) -> io::Result<()> {
        let mut poller = Arc::clone(&self.socket).create_io_poller();
        poll_fn(|cx| poller.as_mut().poll_writable(cx)).await
    }

    /// A batch is whole after every step, so a panic elsewhere says nothing about it.
    fn batch(&self) -> MutexGuard<'_, Batch> {
        self.batch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Line {
    /// The last words of a connection may be held when its endpoint goes.
    fn drop(&mut self) {
        let _ = self.flush();
        self.held.notify_one();
    }
}

/// Sends what a line holds once nothing follows. Ends with the line.
async fn flush_when_quiet(line: Weak<Line>, held: Arc<Notify>) {
    loop {
        held.notified().await;
        let Some(line) = line.upgrade() else { return };
        let mut last_look = None;
        // Between two looks, whatever is ready to send has its turn.
        while let look @ Some(_) = line.look() {
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
