//! Segments: strings of bytes within an encoding, each in one of three forms, chosen by the encoder
//! (PROTOCOL.md §8.5).

use super::{CodecId, DecodeError, histogram::Histogram, zstd};
use ::zstd::{
    bulk::Compressor,
    zstd_safe::{CParameter, ParamSwitch},
};
use std::{cell::RefCell, io};

const RAW: u8 = 0;
const CONSTANT: u8 = 1;
const ZSTD: u8 = 2;

/// The size in bytes of a segment's head: its form and its unpacked length.
pub(super) const HEAD_BYTES: usize = 5;

/// The size in bytes of the field with a frame's length, between the head and the frame.
const FRAME_HEAD_BYTES: usize = 4;

/// The entropy in bits per byte above which a segment is stored raw without an attempt to compress it: a gain of at
/// most 4 % is not worth six times the time. A compressed form that gains less than 1 % is discarded, to save decoding
/// time.
const INCOMPRESSIBLE_BITS: f64 = 7.7;

/// A writer of segments, one after the other, into memory of a fixed size.
pub(super) struct SegmentWriter<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl<'a> SegmentWriter<'a> {
    /// A writer that begins at the front of `out`.
    pub(super) fn new(out: &'a mut [u8]) -> Self {
        Self { out, at: 0 }
    }

    /// Appends `plain` as a segment: constant if all bytes are equal, otherwise compressed if that is tried and gains
    /// enough, otherwise raw. `None` when it does not fit.
    pub(super) fn push(&mut self, plain: &[u8]) -> Option<()> {
        match plain.first() {
            Some(byte) if is_constant(plain) => {
                self.push_head(CONSTANT, plain.len())?;
                self.push_bytes(&[*byte])
            }
            Some(_) => self.push_compressed(plain).or_else(|| self.push_raw(plain)),
            None => self.push_raw(plain),
        }
    }

    /// Appends `bytes` unchanged, without a head.
    pub(super) fn push_bytes(&mut self, bytes: &[u8]) -> Option<()> {
        let end = self.at.checked_add(bytes.len())?;
        self.out.get_mut(self.at..end)?.copy_from_slice(bytes);
        self.at = end;
        Some(())
    }

    /// The number of bytes written.
    pub(super) fn written(&self) -> usize {
        self.at
    }

    fn push_raw(&mut self, plain: &[u8]) -> Option<()> {
        self.push_head(RAW, plain.len())?;
        self.push_bytes(plain)
    }

    /// Appends `plain` as a compressed segment. `None`, with nothing appended, when compression is not tried or gains
    /// too little, or the frame does not fit.
    fn push_compressed(&mut self, plain: &[u8]) -> Option<()> {
        if Histogram::sampled(plain).bits_per_byte() > INCOMPRESSIBLE_BITS {
            return None;
        }
        let begin = self.at + HEAD_BYTES + FRAME_HEAD_BYTES;
        let frame_max = (plain.len() - plain.len() / 100).checked_sub(FRAME_HEAD_BYTES + 1)?;
        let end = self.out.len().min(begin.checked_add(frame_max)?);
        let frame_bytes = compress(plain, self.out.get_mut(begin..end)?)?;
        self.push_head(ZSTD, plain.len())?;
        self.push_bytes(&u32::try_from(frame_bytes).ok()?.to_le_bytes())?;
        self.at += frame_bytes;
        Some(())
    }

    fn push_head(&mut self, form: u8, unpacked_len: usize) -> Option<()> {
        let unpacked_len = u32::try_from(unpacked_len).ok()?.to_le_bytes();
        // The head is written whole or not at all: the caller may try another form in its place.
        (self.out.len() - self.at >= HEAD_BYTES).then_some(())?;
        self.push_bytes(&[form])?;
        self.push_bytes(&unpacked_len)
    }
}

/// Whether all bytes are equal: compares the string with itself shifted by one, which vectorises.
fn is_constant(plain: &[u8]) -> bool {
    plain.is_empty() || plain[1..] == plain[..plain.len() - 1]
}

thread_local! {
    static COMPRESSOR: RefCell<Option<Compressor<'static>>> = const { RefCell::new(None) };
}

/// Compresses `plain` into one zstd frame with this thread's [`huffman_coder`]. `None` when the frame does not fit.
fn compress(plain: &[u8], out: &mut [u8]) -> Option<usize> {
    COMPRESSOR.with_borrow_mut(|slot| {
        let compressor = match slot {
            Some(compressor) => compressor,
            None => slot.insert(huffman_coder().ok()?),
        };
        // The only failure of a valid context is an output that does not fit.
        compressor.compress_to_buffer(plain, out).ok()
    })
}

/// A zstd context that is a Huffman coder with one table for each 128 KiB: the lowest level finds hardly any matches,
/// and compression of literals, off by default at that level, is enabled. On the exponents of floats it encodes 1.5 to
/// 2 GB/s, three times as fast as level 1, and to fewer bytes: there, matches cost more than they save.
fn huffman_coder() -> io::Result<Compressor<'static>> {
    let mut compressor = Compressor::new(*::zstd::compression_level_range().start())?;
    compressor.set_parameter(CParameter::LiteralCompressionMode(ParamSwitch::Enable))?;
    Ok(compressor)
}

/// A segment of an encoding, with its head checked and its bytes not yet unpacked.
pub(super) struct Segment<'a> {
    codec: CodecId,
    form: Form<'a>,
    unpacked_len: usize,
}

enum Form<'a> {
    Raw(&'a [u8]),
    Constant(u8),
    Zstd(&'a [u8]),
}

impl<'a> Segment<'a> {
    /// Splits a segment off the front of `rest`, for a decoder of `codec`. Nothing is allocated.
    pub(super) fn read(codec: CodecId, rest: &mut &'a [u8]) -> Result<Self, DecodeError> {
        Self::take(codec, rest)
            .ok_or_else(|| DecodeError::malformed(codec, "a segment is truncated or of an unknown form"))
    }

    fn take(codec: CodecId, rest: &mut &'a [u8]) -> Option<Self> {
        let form = rest.split_off_first()?;
        let unpacked_len = take_length(rest)?;
        let form = match *form {
            RAW => Form::Raw(rest.split_off(..unpacked_len)?),
            CONSTANT => Form::Constant(*rest.split_off_first()?),
            ZSTD => {
                let frame_bytes = take_length(rest)?;
                Form::Zstd(rest.split_off(..frame_bytes)?)
            }
            _ => return None,
        };
        Some(Self { codec, form, unpacked_len })
    }

    /// The unpacked length that the head claims, in bytes. Check it against a limit before allocating.
    pub(super) fn len(&self) -> usize {
        self.unpacked_len
    }

    /// The plain bytes: a slice of the encoding, or the front of `scratch`, into which they are unpacked. `scratch`
    /// must have room for [`len`](Self::len) bytes.
    pub(super) fn unpack<'b>(&self, scratch: &'b mut [u8]) -> Result<&'b [u8], DecodeError>
    where
        'a: 'b,
    {
        let plain = &mut scratch[..self.unpacked_len];
        match self.form {
            Form::Raw(bytes) => return Ok(bytes),
            Form::Constant(byte) => plain.fill(byte),
            Form::Zstd(frame) => {
                let found = zstd::decompress(frame, plain);
                let found = found.map_err(|error| DecodeError::malformed(self.codec, error))?;
                if found != plain.len() {
                    return Err(DecodeError::malformed(
                        self.codec,
                        "a segment unpacks to fewer bytes than its head says",
                    ));
                }
            }
        }
        Ok(plain)
    }
}

fn take_length(rest: &mut &[u8]) -> Option<usize> {
    let (length, after) = rest.split_first_chunk()?;
    *rest = after;
    usize::try_from(u32::from_le_bytes(*length)).ok()
}

thread_local! {
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Calls `work` with `bytes` bytes of this thread's scratch memory, with arbitrary content. The memory keeps the
/// largest size ever requested, so `bytes` must be checked first if a peer claims it.
pub(super) fn with_scratch<T>(bytes: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < bytes {
            scratch.resize(bytes, 0);
        }
        work(&mut scratch[..bytes])
    })
}

/// The size of this thread's scratch memory in bytes, for tests of allocation bounds.
#[cfg(test)]
pub(super) fn scratch_bytes() -> usize {
    SCRATCH.with_borrow(Vec::len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(plain: &[u8], room: usize) -> Option<Vec<u8>> {
        let mut out = vec![0xaa; room];
        let mut segments = SegmentWriter::new(&mut out);
        segments.push(plain)?;
        let bytes = segments.written();
        out.truncate(bytes);
        Some(out)
    }

    /// Strings with 1, 4, 190 or 256 different bytes.
    fn plain() -> impl Strategy<Value = Vec<u8>> {
        (0usize..3000, prop_oneof![Just(1u32), Just(4), Just(190), Just(256)], any::<u32>()).prop_map(
            |(len, variety, seed)| {
                let byte = |at: u32| (at.wrapping_add(seed).wrapping_mul(2_654_435_769) >> 16) % variety;
                (0..len as u32).map(|at| byte(at) as u8).collect()
            },
        )
    }

    #[test]
    fn the_form_depends_on_the_content() {
        let few: Vec<u8> = (0..1000u32).map(|at| (at.wrapping_mul(2_654_435_769) >> 30) as u8).collect();
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(written(&[], 5), Some(vec![RAW, 0, 0, 0, 0]));
        assert_eq!(written(&[7; 1000], 6), Some(vec![CONSTANT, 0xe8, 3, 0, 0, 7]));
        let short = written(&few, 1005).unwrap();
        assert_eq!(short[..5], [ZSTD, 0xe8, 3, 0, 0]);
        assert!((250..350).contains(&short.len()), "2 bits of 8: {}", short.len());
        assert_eq!(written(&all, 261), Some([&[RAW, 0, 1, 0, 0], &all[..]].concat()));
        let many: Vec<u8> = (0..100_000u32).map(|at| (at.wrapping_mul(2_654_435_769) >> 26) as u8).collect();
        let short = written(&many, 100_005).unwrap().len();
        assert!((75_000..77_000).contains(&short), "6 bits of 8: {short}");
    }

    #[test]
    fn a_segment_shorter_than_its_head_says_is_refused() {
        let mut bytes = written(&[1, 2].repeat(500), 1005).unwrap();
        assert_eq!(bytes[..5], [ZSTD, 0xe8, 3, 0, 0]);
        bytes[1] += 1;
        let segment = Segment::read(CodecId::Planes, &mut &bytes[..]).unwrap();
        assert!(segment.unpack(&mut [0; 1001]).is_err());
    }

    proptest! {
        /// Any bytes into any room: no segment is longer than its raw form, and reading returns the bytes written.
        #[test]
        fn reading_reverses_writing(plain in plain(), room in 0usize..3100, more in prop::collection::vec(any::<u8>(), 0..9)) {
            let Some(mut bytes) = written(&plain, room) else {
                prop_assert!(room < HEAD_BYTES + plain.len());
                return Ok(());
            };
            prop_assert!(bytes.len() <= room.min(HEAD_BYTES + plain.len()));
            bytes.extend_from_slice(&more);
            let (mut rest, mut scratch) = (&bytes[..], vec![0x55; plain.len()]);
            let segment = Segment::read(CodecId::Planes, &mut rest).unwrap();
            prop_assert_eq!(segment.len(), plain.len());
            prop_assert_eq!(segment.unpack(&mut scratch).unwrap(), &plain[..]);
            prop_assert_eq!(rest, &more[..]);
        }
    }
}
