//! Outgoing segments: encrypted one after another, and written at once.

use rustls::AlertDescription;
use std::{io, ops::RangeFrom};
use tensor_relay_device::{HostMemory, Region};
use tokio::io::{AsyncWrite, AsyncWriteExt};

use super::{
    records::{RecordError, Sealer},
    segment::{SEGMENT_BYTES_MAX, SEGMENT_HEADER_BYTES, Segment},
    sending::SPAN_BYTES_MAX,
};

/// The number of maximal segments written at once: a megabyte. A quarter of it costs a tenth of the speed, since each
/// write ends with a partial packet.
const SEGMENTS: usize = 16;

/// An alert: its level and its description (RFC 8446 §6).
const ALERT_BYTES: usize = 2;

/// The longest segment that is one record with its header. A longer one is encrypted straight from its memory.
const JOINED_BYTES_MAX: usize = 1 << 10;

/// The most space for a segment: a record for its header, and its bytes.
const SEGMENT_ROOM: usize =
    Sealer::sealed_bytes_max(SEGMENT_HEADER_BYTES) + Sealer::sealed_bytes_max(SEGMENT_BYTES_MAX);

/// The most space for one [`add`](Batch::add).
const SPAN_ROOM: usize = SPAN_BYTES_MAX / SEGMENT_BYTES_MAX * SEGMENT_ROOM;

/// The most space for what is written at once.
pub(super) const ROOM_MAX: usize = SEGMENTS * SEGMENT_ROOM;

/// The space of a connection that has sent little: control messages and small versions.
const ROOM_MIN: usize = 4 << 10;

/// The sending direction of a connection. Its buffer is as long as what was sent needed, so that a connection without
/// transfers takes little. It is mapped from the system: allocators keep what is freed, a megabyte for each connection that
/// was busy once.
pub(super) struct Batch<W> {
    write: W,
    sealer: Sealer,
    memory: HostMemory,
    bytes: Region,
    filled: usize,
    /// The most that was filled since the last [`trim`](Batch::trim).
    peak: usize,
}

impl<W: AsyncWrite + Unpin> Batch<W> {
    pub(super) fn new(write: W, sealer: Sealer) -> Self {
        let memory = HostMemory::on_demand(u64::MAX);
        Self { write, sealer, memory, bytes: Region::default(), filled: 0, peak: 0 }
    }

    /// Whether there is space for any segment.
    pub(super) fn has_room(&self) -> bool {
        ROOM_MAX - self.filled >= SPAN_ROOM
    }

    /// Whether it is so short that the next segment should be written with it.
    pub(super) fn is_short(&self) -> bool {
        self.filled < SEGMENT_BYTES_MAX
    }

    /// Encrypts a segment; there must be [space](Self::has_room). One with up to [`SPAN_BYTES_MAX`] of data becomes
    /// several.
    pub(super) fn add(&mut self, mut segment: Segment) -> io::Result<()> {
        while let Some(front) = segment.split_front() {
            self.add_one(front)?;
        }
        self.add_one(segment)
    }

    fn add_one(&mut self, segment: Segment) -> io::Result<()> {
        let (header, bytes) = segment.encode();
        if bytes.len() > JOINED_BYTES_MAX {
            self.seal(&header)?;
            return self.seal(&bytes);
        }
        let mut joined = [0; SEGMENT_HEADER_BYTES + JOINED_BYTES_MAX];
        let joined = &mut joined[..SEGMENT_HEADER_BYTES + bytes.len()];
        joined[..SEGMENT_HEADER_BYTES].copy_from_slice(&header);
        joined[SEGMENT_HEADER_BYTES..].copy_from_slice(&bytes);
        self.seal(joined)
    }

    pub(super) fn add_alert(&mut self, alert: AlertDescription) -> io::Result<()> {
        let room = self.room(Sealer::sealed_bytes_max(ALERT_BYTES))?;
        let sealed = self.sealer.seal_alert(alert, &mut self.bytes[room]);
        self.filled += sealed.map_err(no_keys)?;
        Ok(())
    }

    /// Writes what was added.
    pub(super) async fn write(&mut self) -> io::Result<()> {
        let filled = std::mem::take(&mut self.filled);
        self.peak = self.peak.max(filled);
        self.write.write_all(&self.bytes[..filled]).await?;
        self.write.flush().await
    }

    pub(super) async fn shutdown(&mut self) -> io::Result<()> {
        self.write.shutdown().await
    }

    /// Gives back memory of which nothing has needed half since the last time. To be called now and then: a buffer that grows
    /// again is mapped again.
    pub(super) fn trim(&mut self) {
        let needed = std::mem::take(&mut self.peak).max(self.filled).max(ROOM_MIN);
        if self.filled == 0 && needed <= self.bytes.len() / 2 {
            self.bytes = Region::default();
        }
    }

    fn seal(&mut self, bytes: &[u8]) -> io::Result<()> {
        let room = self.room(Sealer::sealed_bytes_max(bytes.len()))?;
        let sealed = self.sealer.seal(bytes, &mut self.bytes[room]);
        self.filled += sealed.map_err(no_keys)?;
        Ok(())
    }

    /// The free space, of `bytes` at least. Fails when the system has no memory.
    fn room(&mut self, bytes: usize) -> io::Result<RangeFrom<usize>> {
        let needed = self.filled + bytes;
        if needed > self.bytes.len() {
            let len = needed.next_power_of_two().min(ROOM_MAX).max(needed).max(ROOM_MIN);
            let mut longer = self.memory.allocate(len).map_err(io::Error::other)?;
            longer[..self.filled].copy_from_slice(&self.bytes[..self.filled]);
            self.bytes = longer;
        }
        Ok(self.filled..)
    }
}

fn no_keys(error: RecordError) -> io::Error {
    io::Error::other(error)
}
