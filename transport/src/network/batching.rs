//! [`Batching`]: a UDP socket that collects QUIC's datagrams into batches as large as the kernel accepts.

use super::batch::{Bounds, DatagramBatch, QUINN_SEGMENTS, burst_of};
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

/// The maximum number of peer queues. A queue takes a few hundred bytes, plus a batch while it holds datagrams. A new
/// peer replaces an idle one.
const PEERS_MAX: usize = 4_096;

/// A UDP socket that wraps another one and keeps a batch for each peer.
///
/// A batch is sent when it is full, when a transmit follows that is shorter than a burst or of another kind, or when
/// nothing followed while the runtime polled all other ready tasks twice; there is no timer. So a burst takes few
/// system calls, and its last datagrams wait for two rounds of the runtime. Each peer has a batch, since a system call
/// has one destination.
pub struct Batching {
    socket: Arc<dyn AsyncUdpSocket>,
    peers: RwLock<HashMap<SocketAddr, Arc<PeerQueue>>>,
    /// The number of segments that quinn should send at once: the smallest such number of all peers, since a socket has
    /// one number for all. Larger segments allow fewer.
    burst: AtomicUsize,
}

impl Batching {
    /// Wraps `socket`. Datagrams that are sent within a tokio runtime are batched, others are passed on immediately.
    pub fn over(socket: Arc<dyn AsyncUdpSocket>) -> Self {
        Self { socket, peers: RwLock::default(), burst: AtomicUsize::new(QUINN_SEGMENTS) }
    }

    fn bounds(&self) -> Bounds {
        let burst = self.burst.load(Ordering::Relaxed);
        Bounds { burst, kernel: self.socket.max_transmit_segments() }
    }

    /// Records the segment size of a burst. Single datagrams are ignored: they may be probes beyond the path's MTU.
    fn note_segments(&self, transmit: &Transmit<'_>) {
        if let Some(burst) = transmit.segment_size.and_then(burst_of) {
            self.burst.fetch_min(burst, Ordering::Relaxed);
        }
    }

    /// The queue for `peer`, created if necessary; `None` if there are too many busy peers.
    fn queue(&self, peer: SocketAddr) -> Option<Arc<PeerQueue>> {
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        let found = peers.get(&peer).cloned();
        drop(peers);
        found.or_else(|| self.add_peer(peer))
    }

    fn add_peer(&self, peer: SocketAddr) -> Option<Arc<PeerQueue>> {
        let mut peers = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        if peers.len() >= PEERS_MAX {
            let idle = *peers.iter().find(|(_, queue)| queue.is_idle())?.0;
            peers.remove(&idle);
        }
        let queue = peers
            .entry(peer)
            .or_insert_with(|| Arc::new(PeerQueue::new(Arc::clone(&self.socket))));
        Some(Arc::clone(queue))
    }
}

impl AsyncUdpSocket for Batching {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.socket).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.note_segments(transmit);
        match self.queue(transmit.destination) {
            Some(queue) => queue.take(transmit, self.bounds()),
            // Nothing is held. If the socket accepts only a part, the remainder is lost, which QUIC detects.
            None => DatagramBatch::default().take(transmit, self.bounds(), |t| self.socket.try_send(t)),
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
struct PeerQueue {
    socket: Arc<dyn AsyncUdpSocket>,
    state: Mutex<QueueState>,
}

#[derive(Default)]
struct QueueState {
    batch: DatagramBatch,
    /// The flush task, started when first needed.
    flush: Option<FlushTask>,
}

/// The task that flushes a queue once nothing follows. Dropping this ends it.
struct FlushTask {
    /// The runtime that the task runs on, that of the peer's connection. The connection may move to another one.
    runtime: runtime::Id,
    /// Wakes the task when the queue holds datagrams or the task should end. Its address identifies the task.
    wake: Arc<Notify>,
}

impl PeerQueue {
    fn new(socket: Arc<dyn AsyncUdpSocket>) -> Self {
        Self { socket, state: Mutex::default() }
    }

    fn take(self: &Arc<Self>, transmit: &Transmit<'_>, bounds: Bounds) -> io::Result<()> {
        let mut state = self.state();
        let taken = state.batch.take(transmit, bounds, |t| self.socket.try_send(t));
        match Handle::try_current() {
            Ok(runtime) if !state.batch.is_empty() => state.flush_on(&runtime, self),
            Ok(_) => {}
            // No task can send the batch later. Datagrams that the socket refuses now are sent with the next ones.
            Err(_) => drop(state.batch.flush(bounds, |t| self.socket.try_send(t))),
        }
        taken
    }

    fn flush(&self) -> io::Result<()> {
        let bounds = Bounds { burst: QUINN_SEGMENTS, kernel: self.socket.max_transmit_segments() };
        self.state().batch.flush(bounds, |t| self.socket.try_send(t))
    }

    /// Whether the queue holds no datagram and no thread uses it.
    fn is_idle(&self) -> bool {
        self.state.try_lock().is_ok_and(|state| state.batch.is_empty())
    }

    /// The [`DatagramBatch::change_count`]; `None` if nothing is held or another task flushes this queue.
    fn change_count(&self, wake: &Arc<Notify>) -> Option<u64> {
        let state = self.state();
        state.batch.change_count().filter(|_| state.is_flushed_by(wake))
    }

    async fn writable(&self) -> io::Result<()> {
        let mut poller = Arc::clone(&self.socket).create_io_poller();
        poll_fn(|cx| poller.as_mut().poll_writable(cx)).await
    }

    /// Ignores lock poisoning: a batch is consistent after every step.
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueueState {
    /// Wakes or starts the task on `runtime` that flushes `queue` once nothing follows.
    fn flush_on(&mut self, runtime: &Handle, queue: &Arc<PeerQueue>) {
        match &self.flush {
            Some(flush) if flush.runtime == runtime.id() => flush.wake.notify_one(),
            _ => self.flush = Some(FlushTask::start(runtime, queue)),
        }
    }

    fn is_flushed_by(&self, wake: &Arc<Notify>) -> bool {
        self.flush.as_ref().is_some_and(|flush| Arc::ptr_eq(&flush.wake, wake))
    }
}

impl Drop for PeerQueue {
    /// Sends the last held datagrams of a connection when its endpoint is dropped.
    fn drop(&mut self) {
        let _ = self.flush();
    }
}

impl FlushTask {
    /// Starts the task for `queue`, which holds datagrams.
    fn start(runtime: &Handle, queue: &Arc<PeerQueue>) -> Self {
        let wake = Arc::new(Notify::new());
        wake.notify_one();
        runtime.spawn(flush_when_idle(Arc::downgrade(queue), Arc::clone(&wake)));
        Self { runtime: runtime.id(), wake }
    }
}

impl Drop for FlushTask {
    fn drop(&mut self) {
        self.wake.notify_one();
    }
}

/// Sends the held datagrams of a queue once nothing follows. Ends when the queue is dropped or has another flush task.
async fn flush_when_idle(queue: Weak<PeerQueue>, wake: Arc<Notify>) {
    loop {
        wake.notified().await;
        let Some(queue) = queue.upgrade().filter(|queue| queue.state().is_flushed_by(&wake)) else { return };
        let mut last_changes = None;
        // Between two checks, all other ready tasks of the runtime run.
        while let changes @ Some(_) = queue.change_count(&wake) {
            if changes == last_changes && queue.flush().is_err() && queue.writable().await.is_err() {
                return;
            }
            last_changes = changes;
            yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests;
