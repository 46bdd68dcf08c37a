//! The codec `raw`, which copies bytes.

use super::{Codec, CodecId, Context, DecodeError};

/// Unchanged bytes. Sender and receiver move raw chunks without calling this codec; it exists so that code over all
/// codecs needs no special case.
#[derive(Debug, Clone, Copy)]
pub struct Raw;

impl Codec for Raw {
    fn id(&self) -> CodecId {
        CodecId::Raw
    }

    fn encode(&self, _: Context<'_>, raw: &[u8], out: &mut [u8]) -> Option<usize> {
        out.get_mut(..raw.len())?.copy_from_slice(raw);
        Some(raw.len())
    }

    fn decode(&self, _: Context<'_>, encoded: &[u8], raw: &mut [u8]) -> Result<(), DecodeError> {
        if encoded.len() != raw.len() {
            return Err(DecodeError::WrongLength { expected: raw.len(), found: encoded.len() });
        }
        raw.copy_from_slice(encoded);
        Ok(())
    }
}
