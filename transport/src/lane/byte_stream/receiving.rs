//! The way in of a byte stream: what came and was not read yet, and the streams that it is read from.

use bytes::{Buf, Bytes, BytesMut};
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, DuplexStream},
    sync::{Notify, mpsc},
    time::timeout,
};

use super::{Connection, LaneError};
use crate::tuning::{SERVER_WINDOW_BYTES, WINDOW_RESERVE_BYTES};

/// What a segment counts beside its bytes: what keeping it takes, so that empty ones are not free.
const SEGMENT_COST_BYTES: u64 = 256;

/// How much of the control stream is taken at once; a frame is at most 64 KiB and usually below 100 bytes.
const CONTROL_READ_BYTES: usize = 4 << 10;

/// The control stream between the driver and its reader. Its bound is that of QUIC's: a connection whose control stream
/// is full is not read.
pub(super) type ControlPipe = DuplexStream;

/// The two ends of a control pipe.
pub(super) fn control_pipe() -> (ControlPipe, ControlPipe) {
    tokio::io::duplex(SERVER_WINDOW_BYTES as usize)
}

/// How much of what came waits to be read, and how much may.
#[derive(Debug)]
pub(super) struct Unread {
    bytes: AtomicU64,
    max_bytes: AtomicU64,
    /// Told when there may be more room.
    has_room: Notify,
}

impl Default for Unread {
    fn default() -> Self {
        let max_bytes = AtomicU64::new(WINDOW_RESERVE_BYTES.into());
        Self { bytes: AtomicU64::new(0), max_bytes, has_room: Notify::new() }
    }
}

/// More came than may wait, and nobody made room in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it sent more than it had credit for: {unread} bytes wait to be read, and {max} may")]
pub(super) struct TooMuchUnread {
    unread: u64,
    max: u64,
}

impl Unread {
    /// Lets `bytes` wait, and a reserve. What was allowed once stays allowed.
    pub(super) fn allow(&self, bytes: u64) {
        let bytes = bytes.saturating_add(WINDOW_RESERVE_BYTES.into());
        self.max_bytes.fetch_max(bytes, Ordering::Relaxed);
        self.has_room.notify_one();
    }

    /// Counts a segment with these `bytes`. Where there is no room for it, waits for some: credit may be given faster than what is allowed
    /// follows, as when a manifest came whose chunks are larger than usual.
    pub(super) async fn count(&self, bytes: &Bytes, patience: Duration) -> Result<(), TooMuchUnread> {
        let cost = cost(bytes);
        let counted = async {
            while !self.try_count(cost) {
                self.has_room.notified().await;
            }
        };
        timeout(patience, counted).await.map_err(|_| {
            let unread = self.bytes.load(Ordering::Relaxed) + cost;
            TooMuchUnread { unread, max: self.max_bytes.load(Ordering::Relaxed) }
        })
    }

    /// Only the driver counts, so nothing is added between the look and the addition.
    fn try_count(&self, cost: u64) -> bool {
        let fits = self.bytes.load(Ordering::Relaxed) + cost <= self.max_bytes.load(Ordering::Relaxed);
        if fits {
            self.bytes.fetch_add(cost, Ordering::Relaxed);
        }
        fits
    }

    pub(super) fn release(&self, bytes: &Bytes) {
        self.bytes.fetch_sub(cost(bytes), Ordering::Relaxed);
        self.has_room.notify_one();
    }
}

fn cost(bytes: &Bytes) -> u64 {
    bytes.len() as u64 + SEGMENT_COST_BYTES
}

/// One segment's worth of a data stream.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) bytes: Bytes,
    pub(super) last: bool,
}

/// A data stream that has begun.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) number: u64,
    /// Bounded by what may be unread. It ends without its last piece where the stream was reset or the lane ended.
    pub(super) pieces: mpsc::UnboundedReceiver<Piece>,
}

/// The receiving end of a data stream. Dropped early, it tells the sender to stop.
#[derive(Debug)]
pub(crate) struct DataIn {
    incoming: Incoming,
    connection: Connection,
    /// What was taken and not read.
    rest: Bytes,
    /// Whether the last piece was taken.
    is_whole: bool,
}

impl DataIn {
    pub(super) fn new(incoming: Incoming, connection: Connection) -> Self {
        Self { incoming, connection, rest: Bytes::new(), is_whole: false }
    }

    pub(crate) async fn read_exact(&mut self, mut out: &mut [u8]) -> Result<(), LaneError> {
        while !out.is_empty() {
            if !self.take_piece().await? {
                return Err(LaneError::StreamGivenUp);
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

    /// Waits for bytes where there are none; returns false at the end of the stream. Cancel safe.
    async fn take_piece(&mut self) -> Result<bool, LaneError> {
        while self.rest.is_empty() && !self.is_whole {
            let Some(piece) = self.incoming.pieces.recv().await else {
                return Err(self.connection.ended().unwrap_or(LaneError::StreamGivenUp));
            };
            self.connection.shared().unread.release(&piece.bytes);
            (self.rest, self.is_whole) = (piece.bytes, piece.last);
        }
        Ok(!self.rest.is_empty())
    }
}

impl Drop for DataIn {
    fn drop(&mut self) {
        let shared = self.connection.shared();
        let is_over = self.is_whole || self.incoming.discard(|bytes| shared.unread.release(bytes));
        if !is_over {
            shared.outbox.stop(self.incoming.number);
        }
    }
}

impl Incoming {
    /// Takes nothing more. Returns whether nothing more would have come.
    fn discard(&mut self, mut release: impl FnMut(&Bytes)) -> bool {
        let is_over = self.pieces.is_closed();
        self.pieces.close();
        let mut is_whole = false;
        while let Ok(piece) = self.pieces.try_recv() {
            release(&piece.bytes);
            is_whole |= piece.last;
        }
        is_over || is_whole
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
