//! [`FileSource`]: files as the source of a borrowed version.

use super::{error::ReadError, served::ServedFile};
use bytes::Bytes;
use std::{ops::Range, sync::Arc};
use tensor_relay_device::{BoxFuture, Lock, Source, SourceError};
use tensor_relay_protocol::{ChunkHash, Manifest, Spread, Tensor};
use tensor_relay_transport::Workers;

/// A range of the payload, and the origin of its bytes: a piece of a tensor.
#[derive(Debug)]
pub(super) struct Extent {
    /// Its range in the payload.
    range: Range<u64>,
    /// The origin of the tensor.
    origin: Origin,
    /// How the piece is spread in the tensor; `None` if it is the whole tensor.
    spread: Option<Spread>,
}

/// The origin of an extent's bytes.
#[derive(Debug, Clone)]
pub(super) enum Origin {
    /// A file by its index, and the offset in it.
    File(usize, u64),
    Memory(Bytes),
}

impl Extent {
    /// The extents of a tensor.
    pub(super) fn of<'a>(tensor: &'a Tensor, origin: &'a Origin) -> impl Iterator<Item = Self> + 'a {
        let pieces = (0..).zip(tensor.ranges());
        pieces.map(|(number, range)| Self {
            range,
            origin: origin.clone(),
            spread: Spread::of_piece(tensor, number),
        })
    }

    /// Calls `read` for each run of its bytes, from `skipped` on and as many as `out` has, that lie together in the
    /// tensor: with the offset in the tensor and the place to read to.
    fn try_each_run<E>(
        &self,
        skipped: u64,
        out: &mut [u8],
        read: impl Fn(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(spread) = &self.spread else { return read(skipped, out) };
        spread.try_each_run(skipped..skipped + out.len() as u64, |range, offset| {
            read(offset, &mut out[(range.start - skipped) as usize..(range.end - skipped) as usize])
        })
    }
}

/// A payload in files, read by offset.
#[derive(Debug)]
pub(super) struct FilePayload {
    files: Arc<[ServedFile]>,
    extents: Vec<Extent>,
    len_bytes: u64,
}

impl FilePayload {
    /// A payload of `extents`, in any order. The gaps between them are padding, which is zeros.
    pub(super) fn new(files: Arc<[ServedFile]>, mut extents: Vec<Extent>, len_bytes: u64) -> Self {
        extents.retain(|extent| !extent.range.is_empty());
        extents.sort_by_key(|extent| extent.range.start);
        Self { files, extents, len_bytes }
    }

    /// The bytes of `range`, which must be within the payload.
    fn read(&self, range: &Range<u64>) -> Result<Vec<u8>, ReadError> {
        let mut out = vec![0; (range.end - range.start) as usize];
        for extent in self.overlapping(range) {
            let (start, end) = (extent.range.start.max(range.start), extent.range.end.min(range.end));
            let part = &mut out[(start - range.start) as usize..(end - range.start) as usize];
            let skipped = start - extent.range.start;
            extent.try_each_run(skipped, part, |at, out| match &extent.origin {
                Origin::File(file, offset) => self.files[*file].read(out, offset + at),
                Origin::Memory(bytes) => {
                    out.copy_from_slice(&bytes[at as usize..][..out.len()]);
                    Ok(())
                }
            })?;
        }
        Ok(out)
    }

    fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = &Extent> {
        let (start, end) = (range.start, range.end);
        let first = self.extents.partition_point(|extent| extent.range.end <= start);
        self.extents[first..].iter().take_while(move |extent| extent.range.start < end)
    }

    /// Reads and hashes every chunk of `manifest`, with at most one thread per processor.
    pub(super) fn hash(&self, manifest: &Manifest) -> Result<Vec<ChunkHash>, ReadError> {
        let chunks: Vec<_> = manifest.chunking().iter().collect();
        let hashes = Lock::new(vec![ChunkHash([0; 16]); chunks.len()]);
        Workers::Threads.each(chunks, |(chunk, range)| {
            let hash = ChunkHash::of(&self.read(&range)?);
            hashes.lock()[chunk.0 as usize] = hash;
            Ok(())
        })?;
        Ok(hashes.into_inner())
    }
}

/// A [`FilePayload`] with known chunk hashes: chunks that read back differently are refused.
#[derive(Debug)]
pub(super) struct FileSource {
    hashed: Arc<HashedPayload>,
}

/// A payload with the expected hash of every chunk.
#[derive(Debug)]
struct HashedPayload {
    payload: FilePayload,
    /// The chunks in order, with their hashes.
    chunks: Vec<(Range<u64>, ChunkHash)>,
}

impl FileSource {
    /// `hashes` are those of `manifest`'s chunks in `payload`.
    pub(super) fn new(payload: FilePayload, manifest: &Manifest, hashes: &[ChunkHash]) -> Self {
        let ranges = manifest.chunking().iter().map(|(_, range)| range);
        let chunks = ranges.zip(hashes.iter().copied()).collect();
        Self { hashed: Arc::new(HashedPayload { payload, chunks }) }
    }
}

impl Source for FileSource {
    fn len_bytes(&self) -> u64 {
        self.hashed.payload.len_bytes
    }

    /// Reads on a blocking thread of the runtime, since a disk or a network folder may be slow. The bytes take memory
    /// until their last clone is dropped.
    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        let hashed = Arc::clone(&self.hashed);
        Box::pin(async move {
            match tokio::task::spawn_blocking(move || hashed.read(&range)).await {
                Ok(read) => read,
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                // The runtime shuts down: this task will not be polled again.
                Err(_) => std::future::pending().await,
            }
        })
    }
}

impl HashedPayload {
    fn read(&self, range: &Range<u64>) -> Result<Bytes, SourceError> {
        let len_bytes = self.payload.len_bytes;
        if range.start > range.end || range.end > len_bytes {
            return Err(SourceError::OutOfBounds { start: range.start, end: range.end, len_bytes });
        }
        let bytes = self.payload.read(range)?;
        match self.hash_of(range) {
            Some(hash) if hash != ChunkHash::of(&bytes) => Err(self.changed_error(range)),
            _ => Ok(bytes.into()),
        }
    }

    /// The expected hash of `range`. Transfers read whole chunks only.
    fn hash_of(&self, range: &Range<u64>) -> Option<ChunkHash> {
        let index = self.chunks.binary_search_by_key(&range.start, |(chunk, _)| chunk.start).ok()?;
        let (chunk, hash) = &self.chunks[index];
        (chunk == range).then_some(*hash)
    }

    /// The error for a changed file: the one whose stamp changed, otherwise the first file of the chunk.
    fn changed_error(&self, range: &Range<u64>) -> SourceError {
        let files: Vec<&ServedFile> = self
            .payload
            .overlapping(range)
            .filter_map(|extent| match &extent.origin {
                Origin::File(file, _) => Some(&self.payload.files[*file]),
                Origin::Memory(_) => None,
            })
            .collect();
        let changed = files.iter().find(|file| !file.is_unchanged().unwrap_or(false));
        let path = changed
            .or_else(|| files.first())
            .map(|file| file.path.clone())
            .unwrap_or_default();
        SourceError::Changed { path }
    }
}
