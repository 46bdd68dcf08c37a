//! Codecs: how the raw bytes of a chunk become the bytes on the wire, and back (PROTOCOL.md §8).
//!
//! All codecs are lossless. A receiver offers the codecs that it can decode; the sender chooses one of them per chunk
//! and names it in the chunk's header. Codecs are CPU-bound: on an async executor, call them for small chunks only.

mod bitplanes;
mod choice;
mod histogram;
mod planes;
mod raw;
mod segment;
#[cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "vector instructions: up to six times the speed of portable code")
)]
mod simd;
mod size_estimate;
mod sparse;
mod zstd;

pub use self::{
    bitplanes::BitPlanes,
    choice::{CodecChoice, Effort, SMALL_BYTES},
    planes::Planes,
    raw::Raw,
    size_estimate::{SizeEstimate, worthwhile_bytes},
    sparse::Sparse,
    zstd::Zstd,
};
#[doc(hidden)]
pub use self::{bitplanes::BitPlanesOn, simd::Path as CodecPath};

use crate::Dtype;

/// The context of a chunk that a codec may use: its dtype and its base.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// The dtype of every tensor in the chunk.
    pub dtype: Dtype,
    /// The same chunk of the base version, for delta codecs.
    pub base: Option<&'a [u8]>,
}

/// An encoding of chunks.
///
/// Both directions write into memory of a known length that the caller owns, so no size that a peer claims can make a
/// codec allocate.
pub trait Codec: Send + Sync {
    /// The id by which headers and messages name the codec.
    fn id(&self) -> CodecId;

    /// Encodes `raw` into the front of `out` and returns the encoded length in bytes; `None` when the encoding does not
    /// fit. The caller limits `out` to the largest encoding that is worth sending; a chunk that does not fit is sent
    /// raw.
    fn encode(&self, context: Context<'_>, raw: &[u8], out: &mut [u8]) -> Option<usize>;

    /// Decodes `encoded` into all of `raw`. No input causes a panic.
    ///
    /// # Errors
    /// [`DecodeError`] when `encoded` is not an encoding of exactly `raw.len()` bytes. The content of `raw` is then
    /// unspecified.
    fn decode(&self, context: Context<'_>, encoded: &[u8], raw: &mut [u8]) -> Result<(), DecodeError>;
}

/// The implementation of the codec `id`.
pub fn codec(id: CodecId) -> &'static dyn Codec {
    match id {
        CodecId::Raw => &Raw,
        CodecId::Zstd => &Zstd,
        CodecId::BitPlanes => &BitPlanes,
        CodecId::Planes => &Planes,
        CodecId::Sparse => &Sparse,
    }
}

/// The size in bytes of the numbers in a chunk of `dtype`: of its elements, or of the two parts of a complex element. 1
/// for elements smaller than a byte.
fn width(dtype: Dtype) -> usize {
    match dtype {
        Dtype::C32 => 2,
        Dtype::C64 => 4,
        Dtype::C128 => 8,
        real => (real.bits() as usize / 8).max(1),
    }
}

/// The id of a codec, by which headers and messages name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum CodecId {
    /// The bytes as they are.
    Raw,
    /// One zstd frame (RFC 8878).
    Zstd,
    /// The exponents of floats as bit planes.
    BitPlanes,
    /// Byte planes, each Huffman-coded.
    Planes,
    /// Sparse deltas: the elements that changed since a base version.
    Sparse,
}

impl CodecId {
    /// Every codec of this build.
    pub const ALL: &'static [Self] = &[Self::Raw, Self::Zstd, Self::BitPlanes, Self::Planes, Self::Sparse];

    /// The codec's number on the wire.
    pub fn code(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Zstd => 1,
            Self::BitPlanes => 2,
            Self::Planes => 3,
            Self::Sparse => 4,
        }
    }

    /// The codec with this number; `None` if this build does not know it.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.iter().copied().find(|id| id.code() == code)
    }

    /// Whether the codec encodes deltas and so needs the same chunk of a base version.
    pub fn needs_base(self) -> bool {
        match self {
            Self::Sparse => true,
            Self::Raw | Self::Zstd | Self::BitPlanes | Self::Planes => false,
        }
    }

    /// The name in errors, reports and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Zstd => "zstd",
            Self::BitPlanes => "bitplanes",
            Self::Planes => "planes",
            Self::Sparse => "sparse",
        }
    }
}

/// A set of codecs. `raw` is always in it: every end can copy bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodecSet(u32);

impl CodecSet {
    /// Every codec of this build.
    pub fn all() -> Self {
        CodecId::ALL
            .iter()
            .fold(Self::only_raw(), |set, id| Self(set.0 | Self::bit(*id)))
    }

    /// Only `raw`.
    pub fn only_raw() -> Self {
        Self(Self::bit(CodecId::Raw))
    }

    /// The codecs with these numbers. Unknown numbers are ignored: a newer client may offer codecs that an older server
    /// lacks.
    pub fn from_codes(codes: &[u32]) -> Self {
        let codecs = codes.iter().filter_map(|code| CodecId::from_code(u8::try_from(*code).ok()?));
        codecs.fold(Self::only_raw(), |set, id| Self(set.0 | Self::bit(id)))
    }

    /// Whether `id` is in the set.
    pub fn contains(self, id: CodecId) -> bool {
        self.0 & Self::bit(id) != 0
    }

    /// The codecs that need no base.
    #[must_use]
    pub fn without_bases(self) -> Self {
        let needing = CodecId::ALL.iter().filter(|id| id.needs_base());
        needing.fold(self, |set, id| Self(set.0 & !Self::bit(*id)))
    }

    /// The codecs in the set, by rising number.
    pub fn iter(self) -> impl Iterator<Item = CodecId> {
        CodecId::ALL.iter().copied().filter(move |id| self.contains(*id))
    }

    fn bit(id: CodecId) -> u32 {
        1 << id.code()
    }
}

/// Why bytes could not be decoded. The fault is the sender's, since TLS detects changes on the network; except for
/// [`NoBase`](Self::NoBase), which is the receiver's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The codec's own format is broken.
    #[error("the encoded bytes are not valid {codec} data: {detail}")]
    Malformed {
        /// The codec.
        codec: &'static str,
        /// The error of its decoder.
        detail: String,
    },
    /// A valid encoding of the wrong number of bytes.
    #[error("the encoded bytes decode to {found} bytes where the chunk has {expected}")]
    WrongLength {
        /// The size of the chunk.
        expected: usize,
        /// The decoded size.
        found: usize,
    },
    /// The chunk needs a base of its own length, and the receiver has none.
    #[error("the chunk is coded against a base of {expected} bytes, which this end does not hold")]
    NoBase {
        /// The size of the chunk.
        expected: usize,
    },
}

impl DecodeError {
    fn malformed(codec: CodecId, detail: impl ToString) -> Self {
        Self::Malformed { codec: codec.name(), detail: detail.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Encodes `raw` with every codec, against a base that differs in one byte, and passes each encoding that fits
    /// `room` bytes to `each`.
    fn encodings(dtype: Dtype, raw: &[u8], room: usize, each: impl Fn(&dyn Codec, Context<'_>, &[u8])) {
        let mut base = raw.to_vec();
        base.first_mut().into_iter().for_each(|byte| *byte ^= 1);
        let context = Context { dtype, base: Some(&base) };
        for codec in CodecId::ALL.iter().map(|id| codec(*id)) {
            let mut out = vec![0xaa; room];
            if let Some(bytes) = codec.encode(context, raw, &mut out) {
                each(codec, context, &out[..bytes]);
            }
        }
    }

    #[test]
    fn sets_contain_raw_and_ignore_unknown_numbers() {
        assert_eq!(CodecSet::from_codes(&[]).iter().collect::<Vec<_>>(), [CodecId::Raw]);
        let zstd = CodecSet::from_codes(&[1, 77, u32::MAX]);
        assert_eq!(zstd.iter().collect::<Vec<_>>(), [CodecId::Raw, CodecId::Zstd]);
        let baseless = CodecSet::all().without_bases();
        assert!(
            baseless
                .iter()
                .eq(CodecId::ALL.iter().copied().filter(|id| *id != CodecId::Sparse))
        );
    }

    #[test]
    fn codec_numbers_never_change() {
        assert!(CodecId::ALL.iter().all(|id| codec(*id).id() == *id));
        assert!(CodecId::ALL.iter().map(|id| id.code()).eq(0..5));
    }

    /// PROTOCOL.md §8.6 and §8.7: both ends divide a chunk into numbers of this width.
    #[test]
    fn a_complex_element_is_two_numbers() {
        use Dtype::{Bf16, C32, C64, C128, F32, F64, I4, I64, U8};
        for (dtype, bytes) in
            [(I4, 1), (U8, 1), (Bf16, 2), (C32, 2), (F32, 4), (C64, 4), (I64, 8), (F64, 8), (C128, 8)]
        {
            assert_eq!(width(dtype), bytes, "{dtype}");
        }
    }

    proptest! {
        /// Every codec, any bytes, every dtype: decoding reverses encoding, and refuses another output length.
        #[test]
        fn round_trip(raw in prop::collection::vec(0u8..4, 0..3000), room in 0usize..3500, dtype in 0..Dtype::ALL.len()) {
            encodings(Dtype::ALL[dtype], &raw, room, |codec, context, encoded| {
                let mut back = vec![0x55; raw.len()];
                codec.decode(context, encoded, &mut back).unwrap();
                assert_eq!(back, raw, "{}", codec.id().name());
                let mut longer = vec![0; raw.len() + 1];
                assert!(codec.decode(context, encoded, &mut longer).is_err(), "{}", codec.id().name());
            });
        }

        #[test]
        fn any_bytes_are_survived(encoded in prop::collection::vec(any::<u8>(), 0..300), len in 0usize..5000, dtype in 0..Dtype::ALL.len()) {
            let base = vec![0x3f; len];
            for id in CodecId::ALL {
                for base in [None, Some(&base[..])] {
                    let context = Context { dtype: Dtype::ALL[dtype], base };
                    let _ = codec(*id).decode(context, &encoded, &mut vec![0; len]);
                }
            }
        }

        /// A real encoding with one byte changed, the likeliest hostile input.
        #[test]
        fn a_changed_byte_is_survived(raw in prop::collection::vec(0u8..4, 1..3000), at: prop::sample::Index, value: u8, dtype in 0..Dtype::ALL.len()) {
            encodings(Dtype::ALL[dtype], &raw, 4000, |codec, context, encoded| {
                let at = at.index(encoded.len());
                let mut encoded = encoded.to_vec();
                encoded[at] = value;
                let _ = codec.decode(context, &encoded, &mut vec![0; raw.len()]);
            });
        }
    }
}
