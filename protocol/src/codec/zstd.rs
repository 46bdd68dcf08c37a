//! Zstandard (RFC 8878), for bytes that are not floats.

use super::{Codec, CodecId, Context, DecodeError};
use std::{cell::RefCell, io};
use zstd::bulk::{Compressor, Decompressor};

/// One zstd frame per chunk, at level 1.
///
/// bf16 weights become 1.28 times smaller. Higher levels gain nothing on floats and cost three times the time; negative
/// levels do not shrink floats at all. Each worker thread keeps a context for each direction (about 1 MiB), since
/// making one costs as much as compressing 100 KiB.
#[derive(Debug, Clone, Copy)]
pub struct Zstd;

const LEVEL: i32 = 1;

thread_local! {
    static COMPRESSOR: RefCell<Option<Compressor<'static>>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

impl Codec for Zstd {
    fn id(&self) -> CodecId {
        CodecId::Zstd
    }

    fn encode(&self, _: Context<'_>, raw: &[u8], out: &mut [u8]) -> Option<usize> {
        COMPRESSOR.with_borrow_mut(|slot| {
            let compressor = match slot {
                Some(compressor) => compressor,
                None => slot.insert(Compressor::new(LEVEL).ok()?),
            };
            // The only failure of a valid context is an output that does not fit.
            compressor.compress_to_buffer(raw, out).ok()
        })
    }

    /// Decodes into `raw` directly. The size in the frame's header is never used to allocate (a forged terabyte would
    /// abort the process), and may be absent.
    fn decode(&self, _: Context<'_>, encoded: &[u8], raw: &mut [u8]) -> Result<(), DecodeError> {
        let found = decompress(encoded, raw);
        let found = found.map_err(|error| DecodeError::malformed(CodecId::Zstd, error))?;
        match found == raw.len() {
            true => Ok(()),
            false => Err(DecodeError::WrongLength { expected: raw.len(), found }),
        }
    }
}

/// Decompresses zstd frames into the front of `plain`, with this thread's context, and returns the length of the
/// result.
pub(super) fn decompress(frames: &[u8], plain: &mut [u8]) -> io::Result<usize> {
    DECOMPRESSOR.with_borrow_mut(|slot| {
        let decompressor = match slot {
            Some(decompressor) => decompressor,
            None => slot.insert(Decompressor::new()?),
        };
        decompressor.decompress_to_buffer(frames, plain)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dtype;

    /// A frame header of 14 bytes claims 1 TiB: an error, without an allocation of that size.
    #[test]
    fn a_forged_size_is_refused() {
        let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0xc0, 0x00];
        frame.extend_from_slice(&(1u64 << 40).to_le_bytes());
        frame.extend_from_slice(&[1, 0, 0]);
        let mut raw = vec![0; 1000];
        assert!(Zstd.decode(Context { dtype: Dtype::U8, base: None }, &frame, &mut raw).is_err());
    }
}
