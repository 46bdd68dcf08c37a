//! The receiving pipeline: data stream → verify and decode → sink.
//!
//! A raw chunk is read from the stream straight into the sink's memory and hashed while its bytes are in the cache.
//! Into host memory, QUIC copies once, from packet to tensor; TCP only decrypts. An encoded chunk is received into a
//! slot and decoded by a worker. A chunk is complete once its raw bytes match the header's hash and are in the sink.
//! For a sink on a device this includes the end of the copy.

use crate::{
    DataIn, LaneError, Progress, Tally, Workers,
    forwarding::Forwarded,
    receive_buffer::{COPY_BYTES, Memory, ReceiveBuffer},
    stages::{AtStage, Stage, StageStats, Stages},
};
use bytes::{Bytes, BytesMut};
use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};
use tensor_relay_device::{Region, Sink, SinkError, Slot, SlotPool, Target};
use tensor_relay_protocol::{
    ChunkHasher, ChunkHeader, CodecId, Context, CorruptChunk, DecodeError, Dtype, EncodingHash, Limits,
    Manifest, ManifestDigest, ManifestError, ManifestHeader, Sparse, Verified, codec,
};

/// Why a chunk was not received.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// The lane or the stream ended.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// The stream has more or fewer bytes than its header says.
    #[error("the stream of chunk {chunk} carried {found} bytes where its header promised {expected}")]
    WrongLength {
        /// The chunk.
        chunk: u32,
        /// The expected number of bytes.
        expected: usize,
        /// The number of received bytes, not counted further once it exceeds the expected one. Or the size of the
        /// chunk's memory, if that does not fit the expected number.
        found: usize,
    },
    /// The hash does not match.
    #[error(transparent)]
    Corrupt(#[from] CorruptChunk),
    /// The header or the encoding is not what the origin vouches for.
    #[error("the encoding of chunk {chunk} is not the one that the origin named")]
    OtherEncoding {
        /// The chunk.
        chunk: u32,
    },
    /// The encoding is invalid.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The sink cannot be written to.
    #[error(transparent)]
    Sink(#[from] SinkError),
}

impl ReceiveError {
    /// Whether the chunk itself is wrong, by its sender's fault.
    pub fn is_invalid(&self) -> bool {
        matches!(
            self,
            Self::WrongLength { .. } | Self::Corrupt(_) | Self::Decode(_) | Self::OtherEncoding { .. }
        )
    }
}

/// A chunk whose bytes were received completely: a raw chunk is verified, an encoded one not decoded yet.
#[derive(Debug)]
pub struct Gathered<'a> {
    header: ChunkHeader,
    content: Content,
    receiving: AtStage<'a>,
}

/// The received bytes, and their destination.
#[derive(Debug)]
enum Content {
    Raw(Verified, Target),
    Encoded(Slot, Target),
}

/// The receiver's copy of a delta's base chunk, of the chunk's length.
#[derive(Debug)]
pub struct Base {
    /// The copy. The caller knows its version.
    pub memory: Region,
    /// Whether to update the base to the received chunk. If so, a delta is applied to the base in place, before
    /// verification: on success the base equals the verified chunk; after a failure it is dropped.
    pub keep: bool,
}

impl Base {
    /// Overwrites the base with a raw, verified chunk, if the base is to be updated.
    fn overwrite(&mut self, raw: &[u8]) {
        if self.keep && self.memory.len() == raw.len() {
            copy(raw, &mut self.memory, |_| ());
        }
    }
}

/// Receives chunks from data streams into a sink.
#[derive(Debug, Clone)]
pub struct Ingress {
    slots: SlotPool,
    workers: Workers,
    stages: Arc<Stages>,
    tally: Arc<Tally>,
}

impl Ingress {
    /// Receives each encoded chunk into one of `slots`. A chunk whose encoding is larger than a slot fails with
    /// [`ReceiveError::WrongLength`]: make slots as large as the largest accepted chunk.
    pub fn new(slots: SlotPool, workers: Workers) -> Self {
        Self { slots, workers, stages: Arc::default(), tally: Arc::default() }
    }

    /// Counts chunks in `tally` once they are decoded and verified.
    pub fn with_tally(self, tally: &Arc<Tally>) -> Self {
        Self { tally: Arc::clone(tally), ..self }
    }

    /// The counters of pipeline stages, shared by all clones. A healthy pipeline receives one chunk while it writes
    /// another.
    pub fn stages(&self) -> StageStats {
        self.stages.stats()
    }

    /// Receives the chunk with `header`, without decoding it, for `range` of `sink`. `progress` is called with the
    /// number of encoded bytes in each received piece. Cancel safe: after cancellation the range can be received again
    /// immediately.
    ///
    /// If the origin named the `encoding`, nothing of another one is decoded or counts: a delta is applied to the base in
    /// place, so that its bytes must be known to be right before. It is hashed while it arrives, at 0.3 ns for each byte.
    ///
    /// # Errors
    /// [`ReceiveError`]. The bytes in `range` are then unspecified, and the range can be received again.
    pub async fn gather_chunk(
        &self,
        stream: DataIn,
        header: &ChunkHeader,
        range: Range<u64>,
        sink: &dyn Sink,
        progress: &Progress,
        encoding: Option<EncodingHash>,
    ) -> Result<Gathered<'_>, ReceiveError> {
        let target = sink.open(range).await?;
        let receiving = self.stages.begin(Stage::Receive);
        let memory = match header.codec {
            CodecId::Raw => Memory::Raw(target, Box::new(ChunkHasher::new())),
            _ => Memory::Encoded(self.slots.acquire().await, target),
        };
        let content = match read_exactly(stream, header, memory, progress, encoding).await? {
            Memory::Raw(target, hasher) => Content::Raw(hasher.verify(header.chunk, header.hash)?, target),
            Memory::Encoded(slot, target) => Content::Encoded(slot, target),
        };
        Ok(Gathered { header: *header, content, receiving })
    }

    /// Decodes and verifies a gathered chunk of `dtype` and writes it to `sink`. Not cancel safe: a worker or a copy
    /// continues after cancellation, and until its end the range is [busy](SinkError::Busy).
    ///
    /// A chunk whose header names a base is decoded against `base`, which is dropped on failure or cancellation. The
    /// caller checks the version of `base`; a chunk decoded against another version fails verification.
    ///
    /// If it is `forwarded`, its encoding is kept for others, which costs a copy if it is not raw.
    ///
    /// # Errors
    /// [`ReceiveError`], except [`ReceiveError::Lane`]: the chunk is already received.
    pub async fn finish_chunk(
        &self,
        gathered: Gathered<'_>,
        dtype: Dtype,
        sink: &dyn Sink,
        base: Option<Base>,
        forwarded: Option<Arc<dyn Forwarded>>,
    ) -> Result<(Verified, Option<Base>), ReceiveError> {
        let Gathered { header, content, receiving } = gathered;
        let Decoded { verified, target, base, kept } = match content {
            Content::Raw(verified, target) => {
                count(&self.tally, &header, Duration::ZERO);
                let kept = forwarded.as_ref().and_then(|forwarded| forwarded.keep(&header, &target));
                let (target, base) = self.overwrite(target, base).await;
                Decoded { verified, target, base, kept }
            }
            Content::Encoded(slot, target) => {
                self.decode(header, dtype, slot, (target, base), forwarded.clone()).await?
            }
        };
        drop(receiving);
        let _writing = self.stages.begin(Stage::Write);
        sink.write(target).await?;
        if let Some(forwarded) = forwarded {
            forwarded.handle_verified(&header, kept);
        }
        Ok((verified, base))
    }

    /// Overwrites `base` with a verified chunk, on a worker.
    async fn overwrite(&self, target: Target, base: Option<Base>) -> (Target, Option<Base>) {
        let Some(mut base) = base else { return (target, None) };
        let bytes = target.len();
        self.stages.pass(bytes);
        let overwrite = move || {
            base.overwrite(&target);
            (target, Some(base))
        };
        self.workers.run_over(bytes, overwrite).await
    }

    async fn decode(
        &self,
        header: ChunkHeader,
        dtype: Dtype,
        slot: Slot,
        (mut target, mut base): (Target, Option<Base>),
        forwarded: Option<Arc<dyn Forwarded>>,
    ) -> Result<Decoded, ReceiveError> {
        let (expected, tally, stages) =
            (header.encoded_bytes as usize, Arc::clone(&self.tally), Arc::clone(&self.stages));
        self.workers
            .run_over(target.len(), move || {
                let began = Instant::now();
                let encoded = &slot[..expected];
                let verified = decode_verified(&header, dtype, encoded, base.as_mut(), &mut target, &stages)?;
                count(&tally, &header, began.elapsed());
                let kept = forwarded.and_then(|forwarded| forwarded.keep(&header, encoded));
                Ok(Decoded { verified, target, base, kept })
            })
            .await
    }
}

/// A chunk that is verified and not written yet.
struct Decoded {
    verified: Verified,
    target: Target,
    base: Option<Base>,
    /// Its encoding, kept for others.
    kept: Option<Bytes>,
}

/// Decodes a chunk into `target`, updates the base if it is to be kept, and verifies the chunk. After a failure the
/// base is invalid.
fn decode_verified(
    header: &ChunkHeader,
    dtype: Dtype,
    encoded: &[u8],
    base: Option<&mut Base>,
    target: &mut [u8],
    stages: &Stages,
) -> Result<Verified, ReceiveError> {
    stages.pass(target.len());
    let hasher = match base {
        Some(base) if base.keep && header.base.is_some() => apply_delta(dtype, encoded, base, target)?,
        base => {
            stages.pass(target.len());
            decode_and_hash(header, dtype, encoded, base, target)?
        }
    };
    Ok(hasher.verify(header.chunk, header.hash)?)
}

/// Decodes a delta into `target` and into the base, and hashes the chunk, in one pass over memory.
fn apply_delta(
    dtype: Dtype,
    encoded: &[u8],
    base: &mut Base,
    target: &mut [u8],
) -> Result<ChunkHasher, DecodeError> {
    let mut hasher = ChunkHasher::new();
    Sparse::apply(dtype, encoded, &mut base.memory, target, |tile| hasher.update(tile))?;
    Ok(hasher)
}

/// Decodes a chunk into `target`, and in a second pass hashes it, and updates the base if that is to be kept.
fn decode_and_hash(
    header: &ChunkHeader,
    dtype: Dtype,
    encoded: &[u8],
    base: Option<&mut Base>,
    target: &mut [u8],
) -> Result<ChunkHasher, DecodeError> {
    let against = base.as_ref().filter(|_| header.base.is_some());
    let context = Context { dtype, base: against.map(|base| &*base.memory) };
    codec(header.codec).decode(context, encoded, target)?;
    let mut hasher = ChunkHasher::new();
    match base.filter(|base| base.keep && base.memory.len() == target.len()) {
        Some(base) => copy(target, &mut base.memory, |piece| hasher.update(piece)),
        None => hasher.update(target),
    }
    Ok(hasher)
}

fn count(tally: &Tally, header: &ChunkHeader, worker_time: Duration) {
    tally.count(header.codec, header.raw_bytes.into(), header.encoded_bytes.into(), worker_time);
}

/// Copies between slices of equal length. Passes each copied piece to `process` while the piece is in the L1 cache.
fn copy(from: &[u8], to: &mut [u8], mut process: impl FnMut(&[u8])) {
    for (to, from) in to.chunks_mut(COPY_BYTES).zip(from.chunks(COPY_BYTES)) {
        to.copy_from_slice(from);
        process(to);
    }
}

/// Reads one chunk from `stream` into `memory`. The stream must end after the chunk.
async fn read_exactly(
    stream: DataIn,
    header: &ChunkHeader,
    memory: Memory,
    progress: &Progress,
    encoding: Option<EncodingHash>,
) -> Result<Memory, ReceiveError> {
    let expected = header.encoded_bytes as usize;
    let size = memory.size_bytes();
    let fits = match &memory {
        Memory::Raw(..) => size == expected,
        Memory::Encoded(..) => size >= expected,
    };
    if !fits {
        return Err(wrong_length(header, size));
    }
    let buffer = ReceiveBuffer::new(memory, expected, progress).checking(header, encoding);
    let mut filled = stream.fill(buffer).await?;
    let is_expected = filled.is_expected_encoding();
    match filled.into_parts() {
        (_, found) if found != expected => Err(wrong_length(header, found)),
        (memory, _) if is_expected => Ok(memory),
        _ => Err(ReceiveError::OtherEncoding { chunk: header.chunk.0 }),
    }
}

fn wrong_length(header: &ChunkHeader, found: usize) -> ReceiveError {
    ReceiveError::WrongLength { chunk: header.chunk.0, expected: header.encoded_bytes as usize, found }
}

/// Why a manifest was not received.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveManifestError {
    /// The lane or the stream ended.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// The bytes are not a valid manifest.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The manifest's digest differs from the header's.
    #[error("the received manifest is {found}, its header says {expected}")]
    WrongDigest {
        /// The digest in the header.
        expected: ManifestDigest,
        /// The digest of the bytes.
        found: ManifestDigest,
    },
    /// The stream has more or fewer bytes than its header says.
    #[error("the stream of a manifest carried {found} bytes where its header promised {expected}")]
    WrongLength {
        /// The expected number of bytes.
        expected: usize,
        /// The number of received bytes, not counted further once it exceeds the expected one.
        found: usize,
    },
}

/// Receives the manifest with `header`. Memory grows with the received bytes, not with the announced length. `progress`
/// is called with the number of bytes in each received piece.
///
/// # Errors
/// [`ReceiveManifestError`].
pub async fn receive_manifest(
    mut stream: DataIn,
    header: &ManifestHeader,
    limits: &Limits,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Manifest, ReceiveManifestError> {
    let expected = header.bytes as usize;
    if header.bytes > limits.manifest_bytes {
        let (found, max) = (header.bytes.into(), limits.manifest_bytes.into());
        return Err(ManifestError::TooMuch { what: "bytes", found, max }.into());
    }
    let mut encoded = BytesMut::new();
    loop {
        let before = encoded.len();
        let more = stream.read_pieces(|piece| encoded.extend_from_slice(piece)).await?;
        progress((encoded.len() - before) as u64);
        if !more || encoded.len() > expected {
            break;
        }
    }
    if encoded.len() != expected {
        return Err(ReceiveManifestError::WrongLength { expected, found: encoded.len() });
    }
    let found = ManifestDigest::of(&encoded);
    if found != header.digest {
        return Err(ReceiveManifestError::WrongDigest { expected: header.digest, found });
    }
    Ok(Manifest::decode(encoded.freeze(), limits)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_device::HostMemory;
    use tensor_relay_protocol::{ChunkHash, ChunkIndex, Epoch, SubscriptionId, Version};

    const BYTES: usize = 100_001;

    /// Two versions of a chunk, and the header and bytes of the delta from the first to the second.
    struct Delta {
        before: Vec<u8>,
        after: Vec<u8>,
        header: ChunkHeader,
        encoded: Vec<u8>,
    }

    impl Delta {
        fn new() -> Self {
            let before: Vec<u8> = (0..BYTES as u32).map(|at| (at.wrapping_mul(at) >> 7) as u8).collect();
            let mut after = before.clone();
            after.iter_mut().step_by(997).for_each(|byte| *byte ^= 0x55);
            let mut encoded = vec![0; BYTES];
            let context = Context { dtype: Dtype::Bf16, base: Some(&before) };
            let written = codec(CodecId::Sparse).encode(context, &after, &mut encoded).unwrap();
            encoded.truncate(written);
            let header = ChunkHeader {
                subscription: SubscriptionId(1),
                epoch: Epoch(1),
                version: Version(2),
                chunk: ChunkIndex(0),
                codec: CodecId::Sparse,
                raw_bytes: BYTES as u32,
                encoded_bytes: written as u32,
                hash: ChunkHash::of(&after),
                base: Some(Version(1)),
            };
            Self { before, after, header, encoded }
        }

        fn base(&self, keep: bool) -> Base {
            let mut memory = HostMemory::new(u64::MAX).allocate(BYTES).unwrap();
            memory.copy_from_slice(&self.before);
            Base { memory, keep }
        }

        /// Decodes `encoded` as this chunk; returns the chunk's memory and the base.
        fn finish(&self, encoded: &[u8], mut base: Base) -> Result<(Vec<u8>, Base), ReceiveError> {
            let (mut target, stages) = (vec![0x5a; BYTES], Stages::default());
            let (base_of, target_of) = (Some(&mut base), &mut target);
            let verified = decode_verified(&self.header, Dtype::Bf16, encoded, base_of, target_of, &stages)?;
            assert_eq!(verified.hash(), ChunkHash::of(&target));
            let passes = if base.keep && self.header.base.is_some() { 1 } else { 2 };
            assert_eq!(stages.stats().passed_bytes(), passes * BYTES as u64);
            Ok((target, base))
        }
    }

    #[test]
    fn a_kept_base_is_updated_in_place() {
        let delta = Delta::new();
        let (target, base) = delta.finish(&delta.encoded, delta.base(true)).unwrap();
        assert!(target == delta.after && *base.memory == *delta.after);
        let (target, base) = delta.finish(&delta.encoded, delta.base(false)).unwrap();
        assert!(target == delta.after && *base.memory == *delta.before);
    }

    /// A failure drops the base, since a part of the delta may have been applied to it.
    #[test]
    fn an_invalid_delta_drops_the_base() {
        let delta = Delta::new();
        let other = ChunkHash::of(&delta.before);
        let mismatched = Delta { header: ChunkHeader { hash: other, ..delta.header }, ..Delta::new() };
        let truncated = &delta.encoded[..delta.encoded.len() - 1];
        let mut longer = delta.encoded.clone();
        longer.push(0);
        for keep in [true, false] {
            let outcome = mismatched.finish(&delta.encoded, mismatched.base(keep));
            assert!(matches!(outcome, Err(ReceiveError::Corrupt(_))), "{outcome:?}");
            for bytes in [truncated, &longer] {
                let outcome = delta.finish(bytes, delta.base(keep));
                assert!(matches!(outcome, Err(ReceiveError::Decode(_))), "{outcome:?}");
            }
            let memory = HostMemory::new(u64::MAX).allocate(BYTES - 1).unwrap();
            let outcome = delta.finish(&delta.encoded, Base { memory, keep });
            assert!(matches!(outcome, Err(ReceiveError::Decode(DecodeError::NoBase { .. }))), "{outcome:?}");
        }
    }

    #[test]
    fn a_chunk_without_base_updates_the_base() {
        let delta = Delta::new();
        let mut encoded = vec![0; 2 * BYTES];
        let context = Context { dtype: Dtype::Bf16, base: None };
        let written = codec(CodecId::Planes).encode(context, &delta.after, &mut encoded).unwrap();
        let header = ChunkHeader { codec: CodecId::Planes, base: None, ..delta.header };
        let chunk = Delta { header, ..delta };
        for keep in [true, false] {
            let (target, base) = chunk.finish(&encoded[..written], chunk.base(keep)).unwrap();
            assert!(target == chunk.after);
            assert!(*base.memory == *if keep { &chunk.after } else { &chunk.before });
        }
    }
}
