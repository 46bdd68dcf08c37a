//! The receiving half of a connection: its streams, and the limit of unread bytes.

use bytes::{Buf, Bytes, BytesMut};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, DuplexStream},
    sync::{Notify, mpsc},
    time::timeout,
};

use super::{
    Connection, LaneError,
    stream::{Stream, StreamEnd, StreamIn},
};
use crate::{receive_buffer::ReceiveBuffer, tuning::WINDOW_RESERVE_BYTES};

/// The overhead counted for each segment, so that empty ones are bounded.
const SEGMENT_COST_BYTES: u64 = 256;

/// The size of reads from the control stream; a frame is at most 64 KiB and usually below 100 bytes.
const CONTROL_READ_BYTES: usize = 4 << 10;

/// The size of the pipe from the driver to the reader of the control stream: both run often enough for little. It counts
/// for each client that has not logged in yet.
pub(super) const CONTROL_PIPE_BYTES: usize = 16 << 10;

/// The pipe from the driver to the reader of the control stream. While it is full, the driver does not read the
/// connection.
pub(super) type ControlPipe = DuplexStream;

/// Both ends of a new control pipe.
pub(super) fn control_pipe() -> (ControlPipe, ControlPipe) {
    tokio::io::duplex(CONTROL_PIPE_BYTES)
}

/// The number of received data bytes that are queued for readers, and its limit.
#[derive(Debug)]
pub(super) struct Unread {
    bytes: AtomicU64,
    max_bytes: AtomicU64,
    /// Signals that the limit or the count changed.
    changed: Notify,
}

impl Default for Unread {
    fn default() -> Self {
        let max_bytes = AtomicU64::new(WINDOW_RESERVE_BYTES.into());
        Self { bytes: AtomicU64::new(0), max_bytes, changed: Notify::new() }
    }
}

/// The peer exceeded the limit of unread bytes for longer than the timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it sent more than it had credit for: {unread} bytes wait to be read, and {max} may")]
pub(super) struct UnreadLimitExceeded {
    unread: u64,
    max: u64,
}

impl Unread {
    /// Raises the limit to `bytes` plus a reserve. Never lowers it.
    pub(super) fn allow(&self, bytes: u64) {
        let bytes = bytes.saturating_add(WINDOW_RESERVE_BYTES.into());
        self.max_bytes.fetch_max(bytes, Ordering::Relaxed);
        self.changed.notify_one();
    }

    /// Counts a segment with these `bytes`. If the limit is exceeded, waits at most `max_wait` until segments are read
    /// or the limit is raised. Sometimes the limit is raised later than the credit is granted, for example if a
    /// manifest has larger chunks than usual.
    pub(super) async fn count(&self, bytes: &Bytes, max_wait: Duration) -> Result<(), UnreadLimitExceeded> {
        let cost = cost_of(bytes);
        let counted = async {
            while !self.try_count(cost) {
                self.changed.notified().await;
            }
        };
        timeout(max_wait, counted).await.map_err(|_| {
            let unread = self.bytes.load(Ordering::Relaxed) + cost;
            UnreadLimitExceeded { unread, max: self.max_bytes.load(Ordering::Relaxed) }
        })
    }

    /// Counts a segment if the limit allows it. Only the driver calls this, so the check and the addition need not be
    /// one atomic operation.
    fn try_count(&self, cost: u64) -> bool {
        let fits = self.bytes.load(Ordering::Relaxed) + cost <= self.max_bytes.load(Ordering::Relaxed);
        if fits {
            self.bytes.fetch_add(cost, Ordering::Relaxed);
        }
        fits
    }

    pub(super) fn release(&self, bytes: &Bytes) {
        self.bytes.fetch_sub(cost_of(bytes), Ordering::Relaxed);
        self.changed.notify_one();
    }
}

fn cost_of(bytes: &Bytes) -> u64 {
    bytes.len() as u64 + SEGMENT_COST_BYTES
}

/// An incoming data stream and its number.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) number: u64,
    pub(super) stream: Arc<Stream>,
}

impl Incoming {
    /// Begins the data stream with the number `next_stream`, which is then incremented, and queues it for
    /// `accept_data`.
    pub(super) fn begin(begun: &mpsc::UnboundedSender<Self>, next_stream: &mut u64) -> StreamIn {
        let stream = StreamIn::default();
        // Fails only if the lane was dropped.
        let _ = begun.send(Self { number: *next_stream, stream: Arc::clone(&stream.0) });
        *next_stream += 1;
        stream
    }
}

/// The receiving half of a data stream. Dropping it early asks the sender to stop.
#[derive(Debug)]
pub(crate) struct DataIn {
    incoming: Incoming,
    connection: Connection,
    /// Bytes taken from the stream but not read yet.
    rest: Bytes,
}

impl DataIn {
    pub(super) fn new(incoming: Incoming, connection: Connection) -> Self {
        Self { incoming, connection, rest: Bytes::new() }
    }

    pub(crate) async fn read_exact(&mut self, mut out: &mut [u8]) -> Result<(), LaneError> {
        while !out.is_empty() {
            if !self.take_piece().await? {
                return Err(LaneError::StreamAborted);
            }
            let (now, later) = out.split_at_mut(self.rest.len().min(out.len()));
            self.rest.copy_to_slice(now);
            out = later;
        }
        Ok(())
    }

    pub(crate) async fn read_pieces(&mut self, mut take: impl FnMut(&[u8])) -> Result<bool, LaneError> {
        let more = self.take_piece().await?;
        take(&std::mem::take(&mut self.rest));
        Ok(more)
    }

    /// Copies the bytes received so far into `buffer`, then lends it to the driver for further bytes.
    pub(crate) async fn fill(mut self, mut buffer: ReceiveBuffer) -> Result<ReceiveBuffer, LaneError> {
        buffer.put(&std::mem::take(&mut self.rest));
        let (unread, stream) = (&self.connection.shared().unread, &self.incoming.stream);
        while let Some((returned, piece)) = stream.lend(buffer) {
            buffer = returned;
            buffer.put(&piece);
            unread.release(&piece);
        }
        match stream.filled().await {
            (Some(buffer), end) if end == Some(StreamEnd::Complete) || buffer.is_overfull() => Ok(buffer),
            _ => Err(self.abort_error()),
        }
    }

    /// Waits for bytes if `rest` is empty; returns false at the end of the stream. Cancel safe.
    async fn take_piece(&mut self) -> Result<bool, LaneError> {
        while self.rest.is_empty() {
            match self.incoming.stream.next().await {
                Ok(piece) => {
                    self.connection.shared().unread.release(&piece);
                    self.rest = piece;
                }
                Err(StreamEnd::Complete) => return Ok(false),
                Err(StreamEnd::Aborted) => return Err(self.abort_error()),
            }
        }
        Ok(true)
    }

    fn abort_error(&self) -> LaneError {
        self.connection.ended().unwrap_or(LaneError::StreamAborted)
    }
}

impl Drop for DataIn {
    fn drop(&mut self) {
        let shared = self.connection.shared();
        let (may_continue, pieces) = self.incoming.stream.discard();
        pieces.iter().for_each(|piece| shared.unread.release(piece));
        if may_continue {
            shared.outbox.queue_stop(self.incoming.number);
        }
    }
}

/// The receiving half of the control stream.
#[derive(Debug)]
pub(crate) struct ControlIn {
    pipe: ControlPipe,
    connection: Connection,
}

impl ControlIn {
    pub(super) fn new(pipe: ControlPipe, connection: Connection) -> Self {
        Self { pipe, connection }
    }

    pub(crate) async fn read(&mut self) -> Result<Option<Bytes>, LaneError> {
        let mut bytes = BytesMut::with_capacity(CONTROL_READ_BYTES);
        match self.pipe.read_buf(&mut bytes).await {
            Ok(1..) => Ok(Some(bytes.freeze())),
            _ => self.connection.ended().map_or(Ok(None), Err),
        }
    }
}
