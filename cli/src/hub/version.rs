//! [`HubVersion`]: the files of one version, and the blocks in which its bytes are received.

use super::{blocks::Blocks, failure::Failure, names, origin::Origin};
use hyper::{StatusCode, body::Bytes};
use std::{
    ops::Range,
    sync::{Arc, OnceLock},
    time::{Duration, Instant, SystemTime},
};
use tensor_relay_client::{
    FilePart, FilePlan, FileSet, FilesError, InstanceId, Manifest, Request, Selection, Snapshot, Start,
    Tensor, VersionId,
};
use tensor_relay_device::Lock;

/// The size of a block, in bytes: a chunk of the default size. Smaller ones cost more messages, larger ones delay the
/// first byte, which clients on slow links wait 10 s for.
const BLOCK_BYTES: u64 = 4 << 20;

/// The number of tensors for which a block grows by [`BLOCK_BYTES`]: both ends look at each tensor for each block.
const TENSORS_PER_STEP: u64 = 64 << 10;

/// The interval at which the server of a version that is read is told so: it keeps it for 30 s.
const KEEP_INTERVAL: Duration = Duration::from_secs(5);

/// One version of a topic.
#[derive(Debug)]
pub(super) struct HubVersion {
    /// Its origin.
    pub(super) origin: Arc<Origin>,
    /// Its number in this process.
    pub(super) number: u64,
    /// The server process that has it.
    pub(super) instance: InstanceId,
    pub(super) id: VersionId,
    pub(super) commit: String,
    /// When the hub learned of it.
    pub(super) seen: SystemTime,
    manifest: Arc<Manifest>,
    blocks: Vec<Block>,
    /// Known once the weight index was received.
    files: OnceLock<Vec<HubFile>>,
    /// When the server was last asked to keep it.
    kept_at: Lock<Instant>,
}

/// A part of a version that is received at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) chunks: Range<u32>,
    pub(super) payload: Range<u64>,
}

/// A file of a version.
#[derive(Debug)]
pub(super) struct HubFile {
    pub(super) name: String,
    /// The entity tag, without quotes.
    pub(super) tag: String,
    pub(super) bytes: u64,
    parts: Vec<FilePart>,
    /// The offset of each part.
    starts: Vec<u64>,
}

/// What a file has somewhere.
pub(super) enum Piece<'a> {
    Literal(Bytes),
    /// Bytes of a tensor of the manifest, of which the file has `range` there.
    Tensor(&'a Tensor, Range<u64>),
}

impl HubVersion {
    /// Finds out which files a described version has. Its weight index is received, if it has one.
    ///
    /// # Errors
    /// [`Failure`] when the index does not arrive, or the version cannot be files.
    pub(super) async fn new(
        origin: Arc<Origin>,
        number: u64,
        (described, instance): (Snapshot, InstanceId),
        cache: &Arc<Blocks>,
    ) -> Result<Arc<Self>, Failure> {
        let (id, manifest) = (described.id().clone(), Arc::clone(described.manifest()));
        let (manifest, blocks) = blocking(move || {
            let blocks = blocks_of(&manifest);
            (manifest, blocks)
        })
        .await?;
        let commit = names::commit(&id);
        let (seen, files, kept_at) = (SystemTime::now(), OnceLock::new(), Lock::new(Instant::now()));
        let version = Self { origin, number, instance, id, commit, seen, manifest, blocks, files, kept_at };
        let version = Arc::new(version);
        let tensors: Vec<&Tensor> = version.manifest.tensors().iter().collect();
        let index = FileSet::index_of(&version.manifest, &tensors);
        let index_bytes = match index.map_err(|error| version.refuse(&error))? {
            Some(index) => cache.read(&version, tensors[index], 0..tensors[index].byte_len()).await?,
            None => Bytes::new(),
        };
        drop(tensors);
        let planned = Arc::clone(&version);
        let files = blocking(move || {
            let tensors: Vec<&Tensor> = planned.manifest.tensors().iter().collect();
            let files = FileSet::new(&planned.manifest, &tensors, false, |_| index_bytes)?;
            let file = |plan| HubFile::new(plan, &planned.id, planned.manifest.tensors());
            Ok(files.files.into_iter().map(file).collect())
        })
        .await?;
        let files = files.map_err(|error: FilesError| version.refuse(&error))?;
        let _ = version.files.set(files);
        Ok(version)
    }

    fn refuse(&self, error: &FilesError) -> Failure {
        let message = format!("{} cannot be offered as files: {error}", self.id);
        Failure::new(StatusCode::BAD_GATEWAY, message)
    }

    /// Its files.
    pub(super) fn files(&self) -> &[HubFile] {
        self.files.get().map_or(&[], Vec::as_slice)
    }

    /// The position of the file with this name.
    pub(super) fn file(&self, name: &str) -> Option<usize> {
        self.files().iter().position(|file| file.name == name)
    }

    /// The block that contains this byte of the payload.
    pub(super) fn block_at(&self, byte: u64) -> usize {
        self.blocks.partition_point(|block| block.payload.end <= byte)
    }

    pub(super) fn block(&self, number: usize) -> Option<&Block> {
        self.blocks.get(number)
    }

    /// The request for a block.
    pub(super) fn request(&self, block: &Block) -> Request {
        let VersionId { topic, epoch, version } = self.id.clone();
        let request = Request::newest(topic).from(Start::Exactly(Some(epoch), version));
        request.part(Arc::clone(&self.manifest), block.chunks.clone()).uncounted()
    }

    pub(super) fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// Tells the server now and then that the version is asked for or read: it keeps what is read in parts for a while,
    /// and all that is asked for may be in memory.
    pub(super) fn keep(self: &Arc<Self>) {
        let Some(block) = self.block(0) else { return };
        let mut kept_at = self.kept_at.lock();
        if kept_at.elapsed() < KEEP_INTERVAL {
            return;
        }
        *kept_at = Instant::now();
        let (version, request) = (Arc::clone(self), self.request(block).describe());
        tokio::spawn(async move {
            let kept = version.origin.get(request, "a version's description", KEEP_INTERVAL).await;
            if let Err(error) = kept.map_err(Failure::from) {
                tracing::debug!(version = %version.id, %error, "The server may not keep a version that is read.");
            }
        });
    }

    /// Begins to receive the block that has the byte of `file` at `at`.
    pub(super) fn prefetch(self: &Arc<Self>, file: &HubFile, at: u64, cache: &Arc<Blocks>) {
        let Some(Piece::Tensor(tensor, range)) = self.piece(file, at, at + 1) else { return };
        let offset = if tensor.is_in_pieces() { 0 } else { range.start };
        cache.prefetch(self, self.block_at(tensor.offset() + offset));
    }

    /// What `file` has at `at`, up to `end` at most.
    pub(super) fn piece(&self, file: &HubFile, at: u64, end: u64) -> Option<Piece<'_>> {
        // Empty parts begin where the next one does.
        let part = file.starts.partition_point(|start| *start <= at).checked_sub(1)?;
        let start = file.starts[part];
        let inner = |bytes: u64| (at - start)..(end - start).min(bytes);
        Some(match &file.parts[part] {
            FilePart::Literal(bytes) => {
                let range = inner(bytes.len() as u64);
                Piece::Literal(bytes.slice(range.start as usize..range.end as usize))
            }
            FilePart::Tensor(index) => {
                let tensor = self.manifest.tensors().get(*index)?;
                Piece::Tensor(tensor, inner(tensor.byte_len()))
            }
        })
    }
}

impl HubFile {
    fn new(plan: FilePlan, id: &VersionId, tensors: &[Tensor]) -> Self {
        let mut bytes = 0;
        let mut starts = Vec::with_capacity(plan.parts.len());
        for part in &plan.parts {
            starts.push(bytes);
            bytes += match part {
                FilePart::Literal(literal) => literal.len() as u64,
                FilePart::Tensor(index) => tensors[*index].byte_len(),
            };
        }
        let name = plan.name.as_str().to_owned();
        Self { tag: names::tag(id, &name), name, bytes, parts: plan.parts, starts }
    }
}

/// Divides a version into blocks. If tensors are in pieces, which lie apart, no block ends within a tensor.
fn blocks_of(manifest: &Arc<Manifest>) -> Vec<Block> {
    let block_bytes = BLOCK_BYTES * (1 + manifest.tensors().len() as u64 / TENSORS_PER_STEP);
    if manifest.feature().is_some() {
        let parts = Selection::all(Arc::clone(manifest)).split(block_bytes);
        let chunks = parts.iter().filter_map(|part| {
            let runs = part.chunks().ranges();
            Some(runs.first()?.start..runs.last()?.end)
        });
        return chunks
            .map(|chunks| Block { payload: payload_of(manifest, &chunks), chunks })
            .collect();
    }
    let mut blocks: Vec<Block> = vec![];
    for (chunk, range) in manifest.chunking().iter() {
        match blocks.last_mut() {
            Some(block) if range.end - block.payload.start <= block_bytes => {
                (block.chunks.end, block.payload.end) = (chunk.0 + 1, range.end);
            }
            _ => blocks.push(Block { chunks: chunk.0..chunk.0 + 1, payload: range }),
        }
    }
    blocks
}

fn payload_of(manifest: &Manifest, chunks: &Range<u32>) -> Range<u64> {
    let mut ranges = manifest.chunking().iter().skip(chunks.start as usize).take(chunks.len());
    let first = ranges.next().map_or(0..0, |(_, range)| range);
    let end = ranges.last().map_or(first.end, |(_, last)| last.end);
    first.start..end
}

/// Runs what takes a while for half a million tensors.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Failure> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}
