//! [`Segment`]: a frame of a byte stream (PROTOCOL.md §10.7).

use bytes::{Buf, BufMut, Bytes, BytesMut};

use std::sync::Arc;

use super::{
    buffers::{Buffer, Pool},
    stream::Stream,
};

/// The maximum length of a segment without its header: four TLS records. A chunk of 4 MiB has 64 segments, so headers
/// cost little.
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

    fn flags(self) -> u8 {
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
        let too_long = SegmentError::Length { kind: code, bytes: length };
        let bytes = usize::try_from(length).map_err(|_| too_long)?;
        match () {
            () if reserved != 0 => Err(SegmentError::Reserved(reserved)),
            () if flags & !kind.flags() != 0 => Err(SegmentError::Flags { kind: code, flags }),
            () if !kind.allows_length(bytes) => Err(too_long),
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

    /// Splits off the first [`SEGMENT_BYTES_MAX`] of data, if it is longer.
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
        let number = |number: u64| Bytes::copy_from_slice(&number.to_le_bytes());
        let (kind, flags, bytes) = match self {
            Self::Control { bytes, last } => (Kind::Control, flag(LAST, last), bytes),
            Self::Data { bytes, first, last } => (Kind::Data, flag(FIRST, first) | flag(LAST, last), bytes),
            Self::Reset => (Kind::Reset, 0, Bytes::new()),
            Self::Stop { stream } => (Kind::Stop, 0, number(stream)),
            Self::Close { code, text } => {
                let mut bytes = BytesMut::with_capacity(4 + text.len());
                bytes.put_u32_le(code);
                bytes.put(text);
                (Kind::Close, 0, bytes.freeze())
            }
            Self::Ping { number: sent } => (Kind::Ping, 0, number(sent)),
            Self::Pong { number: sent } => (Kind::Pong, 0, number(sent)),
        };
        debug_assert!(kind.allows_length(bytes.len()), "{kind:?} of {} bytes", bytes.len());
        let [a, b, c, d] = (bytes.len() as u32).to_le_bytes();
        ([kind as u8, flags, 0, 0, a, b, c, d], bytes)
    }

    /// The length with its header.
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

/// Reassembles segments from received bytes. Allocates memory for one segment at a time.
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
    memory: Memory,
    filled: usize,
}

/// The memory for a segment's bytes.
#[derive(Debug)]
enum Memory {
    Own(Buffer),
    /// The buffer lent by the reader of a data stream. If the reader reclaims it, the bytes are dropped.
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
    /// Consumes the part of `bytes` that belongs to the next segment; returns the segment once it is complete.
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
            let memory = self.memory(header, current);
            self.body = Some(Body { header, memory, filled: 0 });
        }
        if let Some(Body { header, memory, filled }) = &mut self.body {
            let (now, later) = bytes.split_at((header.bytes - *filled).min(bytes.len()));
            match memory {
                Memory::Own(buffer) => buffer[*filled..*filled + now.len()].copy_from_slice(now),
                Memory::Stream(stream) => {
                    stream.put(now);
                }
            }
            *filled += now.len();
            *bytes = later;
        }
        Ok(self.take_complete())
    }

    /// Chooses the memory for the bytes after a header.
    fn memory(&self, header: Header, current: Option<&Arc<Stream>>) -> Memory {
        let is_continuation = header.kind == Kind::Data && header.flags & FIRST == 0;
        match current.filter(|stream| is_continuation && stream.has_room(header.bytes)) {
            Some(stream) => Memory::Stream(Arc::clone(stream)),
            // One more byte: decryption writes the content type after the data.
            None => Memory::Own(self.pool.take(header.bytes + 1)),
        }
    }

    /// Calls `fill` with `bytes` of the current segment's memory, if they fit its missing bytes and one more. `fill`
    /// returns the number of valid bytes.
    pub(super) fn fill(&mut self, bytes: usize, fill: impl FnOnce(&mut [u8]) -> usize) {
        let Some(Body { header, memory, filled }) = &mut self.body else { return };
        if bytes > header.bytes - *filled + 1 {
            return;
        }
        let start = *filled;
        let fill = |room: &mut [u8]| {
            let now = fill(room);
            *filled += now;
            now
        };
        match memory {
            Memory::Own(buffer) => {
                fill(&mut buffer[start..start + bytes]);
            }
            Memory::Stream(stream) => stream.fill(bytes, fill),
        }
    }

    /// Returns the current segment once it is complete.
    pub(super) fn take_complete(&mut self) -> Option<Received> {
        let Body { header, memory, .. } = self.body.take_if(|body| body.filled == body.header.bytes)?;
        self.header_filled = 0;
        Some(match memory {
            Memory::Own(buffer) => {
                Received::Segment(Segment::decode(header, Bytes::from_owner(buffer).slice(..header.bytes)))
            }
            Memory::Stream(_) => Received::Filled {
                wire_bytes: (SEGMENT_HEADER_BYTES + header.bytes) as u64,
                last: header.flags & LAST != 0,
            },
        })
    }
}

#[cfg(test)]
mod tests;
