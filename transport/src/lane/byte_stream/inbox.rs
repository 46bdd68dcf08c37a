//! [`Inbox`]: reads a byte stream, decrypts its records, and reassembles segments.

use crate::stops::timeout;
use std::{io, ops::Range, sync::Arc, time::Duration};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::{
    Role,
    records::{HEADER_BYTES, Opened, Opener, RecordError, opened_bytes, record_bytes},
    segment::{Assembler, Received, SegmentError, length_in},
    stream::Stream,
};

/// The maximum length of a read. A quarter of that is 10 % slower; four times as much gains nothing.
const READ_BYTES_MAX: usize = 256 << 10;

/// The initial length of reads: more than the longest record, and enough for a server, which receives little. So an
/// unauthenticated client cannot make its buffer grow.
pub(super) const READ_BYTES_MIN: usize = 32 << 10;

/// Why there is no next segment.
#[derive(Debug)]
pub(super) enum ReadError {
    /// The stream failed, timed out, or ended without a TLS close.
    Io(io::Error),
    /// The peer closed TLS without closing the lane.
    Ended,
    /// A record is invalid, was changed in transit, or contains a fatal alert.
    Record(RecordError),
    /// A segment is invalid.
    Segment(SegmentError),
}

/// The receiving direction of a connection.
pub(super) struct Inbox<R> {
    read: R,
    /// `None` without TLS.
    opener: Option<Opener>,
    assembler: Assembler,
    /// The read buffer. Grows when a read has filled it, up to `bytes_max`, and never shrinks.
    bytes: Vec<u8>,
    bytes_max: usize,
    /// The part of `bytes` as it was received.
    wire: Range<usize>,
    /// The part of `bytes` decrypted in place, or received without TLS, and not yet assembled.
    plain: Range<usize>,
}

impl<R: AsyncRead + Unpin> Inbox<R> {
    pub(super) fn new(read: R, opener: Option<Opener>, role: Role) -> Self {
        let bytes_max = match role {
            Role::Client => READ_BYTES_MAX,
            Role::Server => READ_BYTES_MIN,
        };
        let (bytes, assembler) = (vec![0; READ_BYTES_MIN], Assembler::default());
        Self { read, opener, assembler, bytes, bytes_max, wire: 0..0, plain: 0..0 }
    }

    /// Waits for the next segment. One that continues the `current` data stream is decrypted into the buffer lent by
    /// its reader, if any. Waits at most `idle_timeout` for each read. Cancel safe.
    pub(super) async fn next(
        &mut self,
        current: Option<&Arc<Stream>>,
        idle_timeout: Duration,
    ) -> Result<Received, ReadError> {
        loop {
            match self.take_segment(current)? {
                Some(received) => return Ok(received),
                None => self.read_more(idle_timeout).await.map_err(ReadError::Io)?,
            }
        }
    }

    /// The length of the next segment, if its header was in the same record as the last segment.
    pub(super) fn next_segment_bytes(&self) -> Option<usize> {
        length_in(&self.bytes[self.plain.clone()])
    }

    /// Takes the next segment, if it is complete.
    fn take_segment(&mut self, current: Option<&Arc<Stream>>) -> Result<Option<Received>, ReadError> {
        loop {
            while !self.plain.is_empty() {
                let mut rest = &self.bytes[self.plain.clone()];
                let taken = self.assembler.take(&mut rest, current);
                self.plain.start = self.plain.end - rest.len();
                if let Some(received) = taken.map_err(ReadError::Segment)? {
                    return Ok(Some(received));
                }
            }
            match self.open_record()? {
                Some(Opened::Data(_)) => {}
                Some(Opened::NoData) => continue,
                Some(Opened::Closed) => return Err(ReadError::Ended),
                None => return Ok(None),
            }
            if let Some(received) = self.assembler.take_complete() {
                return Ok(Some(received));
            }
        }
    }

    /// Decrypts the next record, if it is complete: into the memory of the current segment if all of its data belongs
    /// to that segment, otherwise in place. Returns the number of bytes written to the segment's memory. Without TLS, takes
    /// all that was received.
    fn open_record(&mut self) -> Result<Option<Opened<usize>>, ReadError> {
        let Some(opener) = &mut self.opener else {
            self.plain = self.wire.clone();
            self.wire.start = self.wire.end;
            return Ok((!self.plain.is_empty()).then_some(Opened::Data(0)));
        };
        let wire = &mut self.bytes[self.wire.clone()];
        let record_len = record_bytes(wire).map_err(ReadError::Record)?;
        let Some(record) = record_len.and_then(|bytes| wire.get_mut(..bytes)) else { return Ok(None) };
        let start = self.wire.start + HEADER_BYTES;
        self.wire.start += record.len();
        let mut placed = None;
        self.assembler.fill(opened_bytes(record.len()), |room| {
            let opened = opener.open_into(record, room).map(|opened| opened.map(<[u8]>::len));
            let bytes = if let Ok(Opened::Data(bytes)) = opened { bytes } else { 0 };
            placed = Some(opened);
            bytes
        });
        let opened = placed.unwrap_or_else(|| {
            opener.open(record).map(|opened| {
                opened.map(|data| {
                    self.plain = start..start + data.len();
                    0
                })
            })
        });
        opened.map(Some).map_err(ReadError::Record)
    }

    /// Moves the partial record to the front of the buffer, then waits for bytes and reads them.
    async fn read_more(&mut self, idle_timeout: Duration) -> io::Result<()> {
        self.bytes.copy_within(self.wire.clone(), 0);
        self.wire = 0..self.wire.len();
        let read = self.read.read(&mut self.bytes[self.wire.end..]);
        match timeout(idle_timeout, read).await {
            Ok(Ok(0)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => {
                self.wire.end += read?;
                if self.wire.end == self.bytes.len() && self.wire.end < self.bytes_max {
                    self.bytes.resize(2 * self.wire.end, 0);
                }
                Ok(())
            }
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

impl<R> Inbox<R> {
    pub(super) fn into_read(self) -> R {
        self.read
    }
}

#[cfg(test)]
mod tests {
    use super::{super::records::tests::pair, *};

    /// Clients send as much as they like, also before their login.
    #[tokio::test]
    async fn only_a_client_has_a_large_buffer() {
        for (role, max) in [(Role::Client, READ_BYTES_MAX), (Role::Server, READ_BYTES_MIN)] {
            let [(_, opener), _] = pair(1);
            let mut inbox = Inbox::new(tokio::io::repeat(0), Some(opener), role);
            for _ in 0..10 {
                inbox.wire = 0..0;
                inbox.read_more(Duration::from_secs(1)).await.unwrap();
            }
            assert_eq!(inbox.bytes.len(), max, "{role:?}");
        }
    }
}
