//! The fixed header in front of every data stream (PROTOCOL.md §6.1).

use super::ChunkIndex;
use crate::{ChunkHash, CodecId, Epoch, ManifestDigest, MessageError, SubscriptionId, Version};

/// The size of every stream header in bytes. All kinds have one size, so a receiver reads the header in one step.
pub const HEADER_BYTES: usize = 64;

const KIND_MANIFEST: u8 = 1;
const KIND_CHUNK: u8 = 2;
const KIND_PROBE: u8 = 3;

/// The header of a data stream, with the kind and size of the bytes that follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StreamHeader {
    /// A manifest follows.
    Manifest(ManifestHeader),
    /// The encoded bytes of one chunk follow.
    Chunk(ChunkHeader),
    /// Meaningless bytes and a report follow: the answer to a `Probe`.
    Probe(ProbeHeader),
}

/// The header of a stream that carries an encoded manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ManifestHeader {
    /// The subscription whose `Announce` named the digest.
    pub subscription: SubscriptionId,
    /// The number of bytes that follow.
    pub bytes: u32,
    /// The digest that those bytes must have.
    pub digest: ManifestDigest,
}

/// The header of a stream that carries one encoded chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkHeader {
    /// The subscription that the chunk belongs to.
    pub subscription: SubscriptionId,
    /// The topic's epoch.
    pub epoch: Epoch,
    /// The version that the chunk belongs to.
    pub version: Version,
    /// The chunk's number within the version.
    pub chunk: ChunkIndex,
    /// The codec of the encoded bytes.
    pub codec: CodecId,
    /// The decoded size in bytes.
    pub raw_bytes: u32,
    /// The number of encoded bytes that follow.
    pub encoded_bytes: u32,
    /// The hash that the decoded bytes must have.
    pub hash: ChunkHash,
    /// The base version that the chunk was encoded against, if the codec needs one.
    pub base: Option<Version>,
}

/// The header of a stream that carries probe bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeHeader {
    /// The id of the probe that this stream answers.
    pub probe: u32,
    /// The number of bytes that follow, before the report.
    pub bytes: u32,
}

impl StreamHeader {
    /// The header's bytes on the wire.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        match self {
            Self::Manifest(header) => {
                out[0] = KIND_MANIFEST;
                out[4..8].copy_from_slice(&header.subscription.0.to_le_bytes());
                out[8..12].copy_from_slice(&header.bytes.to_le_bytes());
                out[16..48].copy_from_slice(&header.digest.0);
            }
            Self::Chunk(header) => {
                out[0] = KIND_CHUNK;
                out[1] = header.codec.code();
                out[4..8].copy_from_slice(&header.subscription.0.to_le_bytes());
                out[8..16].copy_from_slice(&header.epoch.0.to_le_bytes());
                out[16..24].copy_from_slice(&header.version.0.to_le_bytes());
                out[24..32].copy_from_slice(&header.base.map_or(0, |v| v.0).to_le_bytes());
                out[32..36].copy_from_slice(&header.chunk.0.to_le_bytes());
                out[36..40].copy_from_slice(&header.raw_bytes.to_le_bytes());
                out[40..44].copy_from_slice(&header.encoded_bytes.to_le_bytes());
                out[48..64].copy_from_slice(&header.hash.0);
            }
            Self::Probe(header) => {
                out[0] = KIND_PROBE;
                out[4..8].copy_from_slice(&header.probe.to_le_bytes());
                out[8..12].copy_from_slice(&header.bytes.to_le_bytes());
            }
        }
        out
    }

    /// Parses a header.
    ///
    /// # Errors
    /// [`MessageError`] for a kind or codec that this build does not know, and for reserved bytes that are not zero: a
    /// later revision may define a meaning for them that must not be ignored.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, MessageError> {
        match bytes[0] {
            KIND_MANIFEST => decode_manifest(bytes),
            KIND_CHUNK => decode_chunk(bytes),
            KIND_PROBE => decode_probe(bytes),
            kind => Err(MessageError::UnknownStreamKind(kind)),
        }
    }
}

fn decode_manifest(bytes: &[u8; HEADER_BYTES]) -> Result<StreamHeader, MessageError> {
    expect_zero(&[&bytes[1..4], &bytes[12..16], &bytes[48..64]])?;
    Ok(StreamHeader::Manifest(ManifestHeader {
        subscription: SubscriptionId(u32_at(bytes, 4)),
        bytes: u32_at(bytes, 8),
        digest: ManifestDigest(array_at(bytes, 16)),
    }))
}

fn decode_chunk(bytes: &[u8; HEADER_BYTES]) -> Result<StreamHeader, MessageError> {
    expect_zero(&[&bytes[2..4], &bytes[44..48]])?;
    Ok(StreamHeader::Chunk(ChunkHeader {
        codec: CodecId::from_code(bytes[1]).ok_or(MessageError::UnknownCodec(bytes[1]))?,
        subscription: SubscriptionId(u32_at(bytes, 4)),
        epoch: Epoch(u64_at(bytes, 8)),
        version: Version(u64_at(bytes, 16)),
        base: Some(Version(u64_at(bytes, 24))).filter(|v| v.0 != 0),
        chunk: ChunkIndex(u32_at(bytes, 32)),
        raw_bytes: u32_at(bytes, 36),
        encoded_bytes: u32_at(bytes, 40),
        hash: ChunkHash(array_at(bytes, 48)),
    }))
}

fn decode_probe(bytes: &[u8; HEADER_BYTES]) -> Result<StreamHeader, MessageError> {
    expect_zero(&[&bytes[1..4], &bytes[12..64]])?;
    Ok(StreamHeader::Probe(ProbeHeader { probe: u32_at(bytes, 4), bytes: u32_at(bytes, 8) }))
}

fn expect_zero(reserved: &[&[u8]]) -> Result<(), MessageError> {
    match reserved.iter().all(|part| part.iter().all(|b| *b == 0)) {
        true => Ok(()),
        false => Err(MessageError::ReservedNotZero),
    }
}

fn array_at<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chunk_header() -> ChunkHeader {
        ChunkHeader {
            subscription: SubscriptionId(0x0403_0201),
            epoch: Epoch(0x1817_1615_1413_1211),
            version: Version(0x2827_2625_2423_2221),
            chunk: ChunkIndex(0x3433_3231),
            codec: CodecId::Zstd,
            raw_bytes: 0x4443_4241,
            encoded_bytes: 0x5453_5251,
            hash: ChunkHash([0x61; 16]),
            base: Some(Version(0x7877_7675_7473_7271)),
        }
    }

    /// PROTOCOL.md §6.1, golden bytes of revision 1.
    #[test]
    fn golden_chunk_header() {
        let bytes = StreamHeader::Chunk(chunk_header()).encode();
        let golden = "02010000 01020304 1112131415161718 2122232425262728 7172737475767778 31323334 41424344 51525354 00000000 61616161616161616161616161616161";
        assert_eq!(hex(&bytes), golden.replace(' ', ""));
    }

    /// PROTOCOL.md §6.1, golden bytes of revision 1.
    #[test]
    fn golden_manifest_header() {
        let header = ManifestHeader {
            subscription: SubscriptionId(7),
            bytes: 513,
            digest: ManifestDigest([0xab; 32]),
        };
        let bytes = StreamHeader::Manifest(header).encode();
        let golden = format!("01000000 07000000 01020000 00000000 {} {}", "ab".repeat(32), "00".repeat(16));
        assert_eq!(hex(&bytes), golden.replace(' ', ""));
    }

    /// PROTOCOL.md §6.1, golden bytes of revision 1.
    #[test]
    fn golden_probe_header() {
        let header = StreamHeader::Probe(ProbeHeader { probe: 0x0403_0201, bytes: 513 });
        let golden = format!("03000000 01020304 01020000 {}", "00".repeat(52));
        assert_eq!(hex(&header.encode()), golden.replace(' ', ""));
        assert_eq!(StreamHeader::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn reserved_bytes_must_be_zero() {
        let good = StreamHeader::Chunk(chunk_header()).encode();
        for at in [2, 3, 44, 47] {
            let mut bad = good;
            bad[at] = 1;
            assert_eq!(StreamHeader::decode(&bad), Err(MessageError::ReservedNotZero), "byte {at}");
        }
    }

    proptest! {
        /// Bytes that decode are encoded to the same bytes: every header has one encoding.
        #[test]
        fn encoding_is_the_inverse_of_decoding(bytes in prop::array::uniform32(any::<u8>()), kind in 0u8..4, codec in 0u8..6) {
            let mut header = [0; HEADER_BYTES];
            header[..32].copy_from_slice(&bytes);
            header[32..].copy_from_slice(&bytes);
            header[0] = kind;
            header[1] = codec;
            header[2..4].fill(0);
            header[44..48].fill(0);
            if let Ok(decoded) = StreamHeader::decode(&header) {
                prop_assert_eq!(decoded.encode(), header);
            }
        }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }
}
