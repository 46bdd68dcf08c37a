//! [`Segment`]: a frame of a byte stream (PROTOCOL.md §10.7).

use bytes::{Buf, BufMut, Bytes, BytesMut};

use std::sync::Arc;

use super::{
    buffers::{Buffer, Pool},
    stream::Stream,
};

/// The maximum length of a segment without its header: four TLS records. A chunk of 4 MiB is sent in 65 segments (one
/// for its stream header), so segment headers cost little.
pub(crate) const SEGMENT_BYTES_MAX: usize = 64 << 10;

/// The length of the header of a segment.
pub(crate) const SEGMENT_HEADER_BYTES: usize = 8;

/// The maximum length of the text in a close.
const CLOSE_TEXT_BYTES_MAX: usize = 1_024;

/// The flag of the first segment of a data stream.
const FIRST: u8 = 1;

/// The flag of the last segment of a data stream or of the control stream.
const LAST: u8 = 2;

/// One segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Segment {
    /// Bytes of the control stream; `last` ends it.
    Control { bytes: Bytes, last: bool },
    /// Bytes of the current data stream; `first` begins and `last` ends it.
    Data { bytes: Bytes, first: bool, last: bool },
    /// Aborts the current data stream, which stays incomplete.
    Reset,
    /// Requests that the sender stop the data stream with this number.
    Stop { stream: u64 },
    /// Closes the lane. No segment follows.
    Close { code: u32, text: Bytes },
    /// A ping, to be answered with the same number.
    Ping { number: u64 },
    /// The answer to a ping.
    Pong { number: u64 },
}

/// A validated segment header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    kind: Kind,
    flags: u8,
    bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Control = 1,
    Data = 2,
    Reset = 3,
    Stop = 4,
    Close = 5,
    Ping = 6,
    Pong = 7,
}

impl Kind {
    const ALL: [Self; 7] =
        [Self::Control, Self::Data, Self::Reset, Self::Stop, Self::Close, Self::Ping, Self::Pong];

    fn allowed_flags(self) -> u8 {
        match self {
            Self::Control => LAST,
            Self::Data => FIRST | LAST,
            _ => 0,
        }
    }

    fn allows_length(self, bytes: usize) -> bool {
        match self {
            Self::Control | Self::Data => bytes <= SEGMENT_BYTES_MAX,
            Self::Reset => bytes == 0,
            Self::Stop | Self::Ping | Self::Pong => bytes == 8,
            Self::Close => (4..=4 + CLOSE_TEXT_BYTES_MAX).contains(&bytes),
        }
    }
}

/// Why bytes are not a valid segment. The peer violated the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SegmentError {
    #[error("it sent a segment of kind {0}, which this revision does not have")]
    Kind(u8),
    #[error("it sent a segment of kind {kind} with the flags {flags:#04x}, which that kind does not have")]
    Flags { kind: u8, flags: u8 },
    #[error("it sent a segment whose reserved bytes are {0:#06x} and must be 0")]
    Reserved(u16),
    #[error("it sent a segment of kind {kind} with {bytes} bytes, which that kind cannot have")]
    Length { kind: u8, bytes: u32 },
}

impl Header {
    fn decode(bytes: [u8; SEGMENT_HEADER_BYTES]) -> Result<Self, SegmentError> {
        let [code, flags, ..] = bytes;
        let reserved = u16::from_le_bytes([bytes[2], bytes[3]]);
        let length = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let kind = Kind::ALL.into_iter().find(|kind| *kind as u8 == code);
        let kind = kind.ok_or(SegmentError::Kind(code))?;
        let wrong_length = SegmentError::Length { kind: code, bytes: length };
        let bytes = usize::try_from(length).map_err(|_| wrong_length)?;
        match () {
            () if reserved != 0 => Err(SegmentError::Reserved(reserved)),
            () if flags & !kind.allowed_flags() != 0 => Err(SegmentError::Flags { kind: code, flags }),
            () if !kind.allows_length(bytes) => Err(wrong_length),
            () => Ok(Self { kind, flags, bytes }),
        }
    }
}

impl Segment {
    /// A close, whose text is truncated if it is too long.
    pub(crate) fn close(code: u32, text: &str) -> Self {
        let end = text.floor_char_boundary(CLOSE_TEXT_BYTES_MAX);
        Self::Close { code, text: Bytes::copy_from_slice(&text.as_bytes()[..end]) }
    }

    /// Splits off the first [`SEGMENT_BYTES_MAX`] bytes of data, if the data is longer.
    pub(crate) fn split_front(&mut self) -> Option<Self> {
        let Self::Data { bytes, first, .. } = self else { return None };
        if bytes.len() <= SEGMENT_BYTES_MAX {
            return None;
        }
        let front = bytes.split_to(SEGMENT_BYTES_MAX);
        Some(Self::Data { bytes: front, first: std::mem::take(first), last: false })
    }

    /// Encodes the header, and returns it with the body. Control and data bytes are not copied.
    pub(crate) fn encode(self) -> ([u8; SEGMENT_HEADER_BYTES], Bytes) {
        let flag = |flag, set| if set { flag } else { 0 };
        let eight_bytes = |number: u64| Bytes::copy_from_slice(&number.to_le_bytes());
        let (kind, flags, bytes) = match self {
            Self::Control { bytes, last } => (Kind::Control, flag(LAST, last), bytes),
            Self::Data { bytes, first, last } => (Kind::Data, flag(FIRST, first) | flag(LAST, last), bytes),
            Self::Reset => (Kind::Reset, 0, Bytes::new()),
            Self::Stop { stream } => (Kind::Stop, 0, eight_bytes(stream)),
            Self::Close { code, text } => {
                let mut bytes = BytesMut::with_capacity(4 + text.len());
                bytes.put_u32_le(code);
                bytes.put(text);
                (Kind::Close, 0, bytes.freeze())
            }
            Self::Ping { number } => (Kind::Ping, 0, eight_bytes(number)),
            Self::Pong { number } => (Kind::Pong, 0, eight_bytes(number)),
        };
        debug_assert!(kind.allows_length(bytes.len()), "{kind:?} of {} bytes", bytes.len());
        let [a, b, c, d] = (bytes.len() as u32).to_le_bytes();
        ([kind as u8, flags, 0, 0, a, b, c, d], bytes)
    }

    /// The length of the segment with its header.
    pub(crate) fn wire_bytes(&self) -> u64 {
        let bytes = match self {
            Self::Control { bytes, .. } | Self::Data { bytes, .. } => bytes.len(),
            Self::Reset => 0,
            Self::Stop { .. } | Self::Ping { .. } | Self::Pong { .. } => 8,
            Self::Close { text, .. } => 4 + text.len(),
        };
        (SEGMENT_HEADER_BYTES + bytes) as u64
    }

    fn decode(header: Header, mut bytes: Bytes) -> Self {
        let (first, last) = (header.flags & FIRST != 0, header.flags & LAST != 0);
        match header.kind {
            Kind::Control => Self::Control { bytes, last },
            Kind::Data => Self::Data { bytes, first, last },
            Kind::Reset => Self::Reset,
            Kind::Stop => Self::Stop { stream: bytes.get_u64_le() },
            Kind::Close => Self::Close { code: bytes.get_u32_le(), text: bytes },
            Kind::Ping => Self::Ping { number: bytes.get_u64_le() },
            Kind::Pong => Self::Pong { number: bytes.get_u64_le() },
        }
    }
}

/// Reassembles segments from received bytes, one at a time.
#[derive(Debug, Default)]
pub(crate) struct Assembler {
    header: [u8; SEGMENT_HEADER_BYTES],
    header_filled: usize,
    /// The current segment, once its header is complete.
    body: Option<Body>,
    pool: Pool,
}

#[derive(Debug)]
struct Body {
    header: Header,
    destination: Destination,
    filled: usize,
}

/// The length of the segment whose valid header begins `bytes`; without its header.
pub(super) fn length_in(bytes: &[u8]) -> Option<usize> {
    let header = Header::decode(*bytes.first_chunk()?).ok()?;
    Some(header.bytes)
}

/// The memory for a segment's bytes.
#[derive(Debug)]
enum Destination {
    Own(Buffer),
    /// The buffer lent by the reader of a data stream. If the reader takes it back, the bytes are discarded.
    Stream(Arc<Stream>),
}

/// A received segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Received {
    Segment(Segment),
    /// A segment of the current data stream, written to the buffer lent by the reader.
    Filled {
        wire_bytes: u64,
        last: bool,
    },
}

impl Assembler {
    /// Consumes the part of `bytes` that belongs to the current segment; returns the segment once it is complete.
    pub(super) fn take(
        &mut self,
        bytes: &mut &[u8],
        current: Option<&Arc<Stream>>,
    ) -> Result<Option<Received>, SegmentError> {
        if self.body.is_none() {
            let missing = &mut self.header[self.header_filled..];
            let now = missing.len().min(bytes.len());
            bytes.copy_to_slice(&mut missing[..now]);
            self.header_filled += now;
            if self.header_filled < SEGMENT_HEADER_BYTES {
                return Ok(None);
            }
            let header = Header::decode(self.header)?;
            let destination = self.destination(header, current);
            self.body = Some(Body { header, destination, filled: 0 });
        }
        if let Some(Body { header, destination, filled }) = &mut self.body {
            let (now, later) = bytes.split_at((header.bytes - *filled).min(bytes.len()));
            match destination {
                Destination::Own(buffer) => buffer[*filled..*filled + now.len()].copy_from_slice(now),
                Destination::Stream(stream) => {
                    stream.put(now);
                }
            }
            *filled += now.len();
            *bytes = later;
        }
        Ok(self.take_complete())
    }

    /// Chooses the memory for the bytes after a header.
    fn destination(&self, header: Header, current: Option<&Arc<Stream>>) -> Destination {
        let is_continuation = header.kind == Kind::Data && header.flags & FIRST == 0;
        match current.filter(|stream| is_continuation && stream.has_room(header.bytes)) {
            Some(stream) => Destination::Stream(Arc::clone(stream)),
            // One more byte: decryption writes the content type after the data.
            None => Destination::Own(self.pool.take(header.bytes + 1)),
        }
    }

    /// Calls `decrypt` with the next `bytes` bytes of the current segment's memory; `decrypt` returns how many of them
    /// are data. Does nothing if no segment has begun, if more than one of these bytes is beyond the segment's end, or
    /// if the memory has no room for them.
    pub(super) fn fill(&mut self, bytes: usize, decrypt: impl FnOnce(&mut [u8]) -> usize) {
        let Some(Body { header, destination, filled }) = &mut self.body else { return };
        if bytes > header.bytes - *filled + 1 {
            return;
        }
        let start = *filled;
        let decrypt_and_count = |room: &mut [u8]| {
            let now = decrypt(room);
            *filled += now;
            now
        };
        match destination {
            Destination::Own(buffer) => {
                decrypt_and_count(&mut buffer[start..start + bytes]);
            }
            Destination::Stream(stream) => stream.fill(bytes, decrypt_and_count),
        }
    }

    /// Takes the current segment if it is complete.
    pub(super) fn take_complete(&mut self) -> Option<Received> {
        let Body { header, destination, .. } = self.body.take_if(|body| body.filled == body.header.bytes)?;
        self.header_filled = 0;
        Some(match destination {
            Destination::Own(buffer) => {
                Received::Segment(Segment::decode(header, Bytes::from_owner(buffer).slice(..header.bytes)))
            }
            Destination::Stream(_) => Received::Filled {
                wire_bytes: (SEGMENT_HEADER_BYTES + header.bytes) as u64,
                last: header.flags & LAST != 0,
            },
        })
    }
}

#[cfg(test)]
mod tests;
