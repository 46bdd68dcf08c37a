//! [`TensorFiles`]: safetensors files and folders of them, to be staged, borrowed in place, or sealed for a sidecar.

mod directory;
mod engine_caches;
mod error;
mod folder;
mod model_files;
mod served;
mod skipped;
mod source;
#[cfg(test)]
mod tests;
mod watch;

pub use engine_caches::PackedCache;
pub use error::FileError;
pub use folder::FolderRules;
pub use skipped::{SkipReason, SkippedEntry};
pub use watch::{FileWatch, Observation};

use crate::{
    Borrowed, Splits, Staged, Staging,
    sidecar::{SealError, SealedVersion, TensorWriter, Terms},
};
use served::ServedFile;
use source::{Extent, FilePayload, FileSource, Origin};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};
use tensor_relay_device::Source;
use tensor_relay_protocol::{
    ChunkHash, Manifest, Metadata, TensorSpec,
    engine_cache::{EngineCache, Facts},
    files::{FileForm, FileKind, is_reserved, side_file_spec},
    safetensors::{Header, PREFIX_BYTES, SafetensorsError, header_length, parse_header},
};

/// Opened files that can be served as one topic. Their headers are read, their tensors not yet.
///
/// Supported are a safetensors file, and a folder of them in Hugging Face's layout, with its side files. A folder needs
/// one file descriptor for each of its files.
///
/// Files are read by offset, never mapped: if a mapped file shrinks, access raises SIGBUS, while a read returns an
/// error. Methods that open or read files block on the disk; do not call them on an executor's thread.
#[derive(Debug)]
pub struct TensorFiles {
    path: PathBuf,
    form: FileForm,
    specs: Vec<TensorSpec>,
    /// Of each tensor.
    origins: Vec<Origin>,
    files: Arc<[ServedFile]>,
    metadata: Metadata,
    skipped: Vec<SkippedEntry>,
    caches: Vec<PackedCache>,
}

/// The size of reads while files are copied.
const PIECE_BYTES: u64 = 4 << 20;

/// Why files could not be copied into shared memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SealFileError {
    /// The files cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The system has no memory for them.
    #[error("cannot allocate shared memory: {0}")]
    Memory(#[from] io::Error),
}

impl TensorFiles {
    /// Opens the file at `path`, or the model's files in the folder at `path`.
    ///
    /// # Errors
    /// Those of [`open_with`](Self::open_with).
    pub fn open(path: &Path) -> Result<Self, FileError> {
        Self::open_with(path, FolderRules::default())
    }

    /// Opens the file or folder at `path` and reads the headers; `rules` select the files of a folder. A link at `path`
    /// itself is always followed. The files stay open: `stage` and `borrow` read the opened files even if others
    /// replace them meanwhile.
    ///
    /// # Errors
    /// [`FileError`], which names the file and the problem.
    pub fn open_with(path: &Path, rules: FolderRules) -> Result<Self, FileError> {
        let is_folder = fs::metadata(path)
            .map_err(|source| FileError::Io { path: path.into(), source })?
            .is_dir();
        let extension = path
            .extension()
            .and_then(|e| e.to_str())
            .unwrap_or_default()
            .to_ascii_lowercase();
        let contents = match () {
            () if is_folder => directory::read(path, rules)?,
            () if extension != "safetensors" && model_files::is_other_format(path) => {
                return Err(FileError::OtherFormat { path: path.into(), extension });
            }
            () => read_safetensors_file(ServedFile::open(path)?)?,
        };
        Ok(contents.into_files(path))
    }

    /// Cuts tensors into pieces, as the rules say.
    ///
    /// # Errors
    /// [`FileError::Split`] when a rule for one tensor does not fit.
    pub fn split(mut self, splits: &Splits) -> Result<Self, FileError> {
        let split = splits.apply(&mut self.specs);
        split.map_err(|source| FileError::Split { path: self.path.clone(), source: source.into() })?;
        Ok(self)
    }

    /// Adds caches of inference engines, each as an archive beside the weights with the `facts` that it depends on,
    /// from which receivers decide whether to unpack it (FILES.md §13.5). Reads the caches into memory, where the
    /// archives stay as long as this value or a version that borrows from it; at most 4 GiB together.
    ///
    /// # Errors
    /// [`FileError`] when this is a single file, or a cache is missing, empty, too large or changes while it is read.
    pub fn with_caches(mut self, caches: &[EngineCache], facts: &Facts) -> Result<Self, FileError> {
        if let (FileKind::Safetensors, false) = (self.kind(), caches.is_empty()) {
            return Err(FileError::CacheBesideFile { path: self.path });
        }
        let mut used_bytes = 0;
        for cache in caches {
            let archive = cache.name.archive();
            let (packed, bytes) = engine_caches::pack(cache, facts, engine_caches::room_bytes(used_bytes))?;
            let spec = side_file_spec(&archive, packed.bytes).expect("the name of an archive is short");
            if self.specs.iter().any(|other| other.name == spec.name) {
                return Err(FileError::CacheTwice { path: self.path, archive });
            }
            used_bytes += packed.bytes;
            self.specs.push(spec);
            self.origins.push(Origin::Memory(bytes.into()));
            self.caches.push(packed);
        }
        Ok(self)
    }

    /// The caches that were added; report them to the operator.
    pub fn caches(&self) -> &[PackedCache] {
        &self.caches
    }

    /// The opened path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The kind of files.
    pub fn kind(&self) -> FileKind {
        self.form.kind
    }

    /// The tensors, including those of side files.
    pub fn specs(&self) -> &[TensorSpec] {
        &self.specs
    }

    /// The metadata for the manifest: that of the files, and their kind.
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }

    /// The size of all tensors together.
    pub fn total_bytes(&self) -> u64 {
        total_bytes(&self.specs)
    }

    /// The names of the files that are served.
    pub fn names(&self) -> Vec<String> {
        let name = |file: &ServedFile| Some(file.path.file_name()?.to_string_lossy().into_owned());
        let caches = self.caches.iter().map(|packed| packed.cache.name.archive().to_string());
        self.files.iter().filter_map(name).chain(caches).collect()
    }

    /// The files' stamps when they were opened.
    fn stamps(&self) -> watch::Stamps {
        self.files
            .iter()
            .map(|file| (file.path.clone(), file.stamp().clone()))
            .collect()
    }

    /// The entries that are not served; report them to the operator.
    pub fn skipped(&self) -> &[SkippedEntry] {
        &self.skipped
    }

    /// Reads all tensors into staged memory.
    ///
    /// # Errors
    /// [`FileError`] when a file cannot be read, or changes meanwhile, or when there is no memory.
    pub fn stage(&self, staging: &Staging) -> Result<Staged, FileError> {
        let staged = Staged::new(staging, self.specs.clone(), self.metadata.clone(), |index, out| {
            self.fill(index, out)
        });
        let staged = staged.map_err(|error| FileError::staging(&self.path, error))?;
        self.check_unchanged()?;
        Ok(staged)
    }

    /// Borrows all tensors from the files: this takes memory only for chunks in flight, and each transfer reads the
    /// files anew. This method reads them, too, for their hashes. Every sent chunk is compared with its hash: a file
    /// changed in place fails the transfer instead of tearing it. Replacing a file by renaming another over it is not a
    /// change.
    ///
    /// # Errors
    /// [`FileError`] as for [`stage`](Self::stage).
    pub fn borrow(&self, staging: &Staging) -> Result<Borrowed, FileError> {
        let borrowed =
            Borrowed::from_hashed_source(staging, self.specs.clone(), self.metadata.clone(), |manifest| {
                self.source(manifest)
            });
        let borrowed = borrowed.map_err(|error| FileError::staging(&self.path, error))?;
        self.check_unchanged()?;
        Ok(borrowed)
    }

    /// Copies all tensors into shared memory for a [`sidecar`](crate::sidecar) server, without an intermediate copy.
    ///
    /// # Errors
    /// [`FileError`] as for [`stage`](Self::stage), or the system's error if it has no shared memory.
    pub fn seal(&self, terms: &Terms) -> Result<SealedVersion, SealError<SealFileError>> {
        let fill = |index: usize, out: &mut TensorWriter<'_>| self.write_tensor(index, out);
        let sealed = SealedVersion::new(terms, self.specs.clone(), self.metadata.clone(), fill)?;
        self.check_unchanged().map_err(|error| SealError::Fill(error.into()))?;
        Ok(sealed)
    }

    /// Writes one tensor, piece by piece.
    fn write_tensor(&self, index: usize, out: &mut TensorWriter<'_>) -> Result<(), SealFileError> {
        let (spec, origin) = (&self.specs[index], &self.origins[index]);
        // The header was checked against the file's size, so the product cannot overflow.
        let bytes = spec.shape.byte_len(spec.dtype).unwrap_or(0);
        let (file, start) = match origin {
            Origin::File(file, start) => (file, start),
            Origin::Memory(bytes) => return Ok(out.write(bytes)?),
        };
        let mut piece = vec![0; bytes.min(PIECE_BYTES) as usize];
        for offset in (0..bytes).step_by(PIECE_BYTES as usize) {
            let piece = &mut piece[..(bytes - offset).min(PIECE_BYTES) as usize];
            self.files[*file].read(piece, start + offset).map_err(FileError::from)?;
            out.write(piece)?;
        }
        Ok(())
    }

    /// Reads one tensor.
    fn fill(&self, index: usize, out: &mut [u8]) -> Result<(), FileError> {
        match &self.origins[index] {
            Origin::File(file, start) => self.files[*file].read(out, *start)?,
            Origin::Memory(bytes) => out.copy_from_slice(bytes),
        }
        Ok(())
    }

    fn source(&self, manifest: &Manifest) -> Result<(Arc<dyn Source>, Vec<ChunkHash>), FileError> {
        let tensors = manifest.tensors().iter().zip(&self.origins);
        let extents = tensors.flat_map(|(tensor, origin)| Extent::of(tensor, origin));
        let payload = FilePayload::new(Arc::clone(&self.files), extents.collect(), manifest.payload_bytes());
        let hashes = payload.hash(manifest)?;
        Ok((Arc::new(FileSource::new(payload, manifest, &hashes)), hashes))
    }

    fn check_unchanged(&self) -> Result<(), FileError> {
        self.files.iter().try_for_each(ServedFile::check_unchanged)
    }
}

fn total_bytes(specs: &[TensorSpec]) -> u64 {
    // Every header was checked against its file's size, so neither a tensor's size nor the sum can overflow.
    specs.iter().map(|spec| spec.shape.byte_len(spec.dtype).unwrap_or(0)).sum()
}

/// The parsed files, while the model is assembled.
#[derive(Debug)]
struct Contents {
    form: FileForm,
    specs: Vec<TensorSpec>,
    origins: Vec<Origin>,
    files: Vec<ServedFile>,
    metadata: Metadata,
    skipped: Vec<SkippedEntry>,
}

impl Contents {
    fn new(form: FileForm) -> Self {
        Self { form, specs: vec![], origins: vec![], files: vec![], metadata: vec![], skipped: vec![] }
    }

    fn push(&mut self, spec: TensorSpec, origin: Origin) {
        self.specs.push(spec);
        self.origins.push(origin);
    }

    fn total_bytes(&self) -> u64 {
        total_bytes(&self.specs)
    }

    /// Each tensor in a file, with the file's index.
    fn in_files(&self) -> impl Iterator<Item = (&str, usize)> {
        let tensors = self.specs.iter().zip(&self.origins);
        tensors.filter_map(|(spec, origin)| match origin {
            Origin::File(file, _) => Some((spec.name.as_str(), *file)),
            Origin::Memory(_) => None,
        })
    }

    fn into_files(self, path: &Path) -> TensorFiles {
        let Self { form, specs, origins, files, mut metadata, skipped } = self;
        metadata.extend(form.metadata());
        TensorFiles {
            path: path.into(),
            form,
            specs,
            origins,
            files: files.into(),
            metadata,
            skipped,
            caches: vec![],
        }
    }
}

fn read_safetensors_file(file: ServedFile) -> Result<Contents, FileError> {
    let mut contents = Contents::new(FileForm::new(FileKind::Safetensors));
    contents.metadata = read_safetensors(file, &mut contents, |_| None)?;
    Ok(contents)
}

/// Adds the tensors of a safetensors file to `contents`, without those that `skip` returns an entry for; returns the
/// file's metadata.
fn read_safetensors(
    file: ServedFile,
    contents: &mut Contents,
    skip: impl Fn(&str) -> Option<SkippedEntry>,
) -> Result<Metadata, FileError> {
    let Header { tensors, metadata } = read_header(&file)?;
    check_reserved(&file, metadata.iter().map(|(key, _)| &key[..]))?;
    check_reserved(&file, tensors.iter().map(|tensor| tensor.spec.name.as_str()))?;
    for tensor in tensors {
        match skip(tensor.spec.name.as_str()) {
            Some(skipped) => contents.skipped.push(skipped),
            None => contents.push(tensor.spec, Origin::File(contents.files.len(), tensor.range.start)),
        }
    }
    contents.files.push(file);
    Ok(metadata)
}

fn check_reserved<'a>(file: &ServedFile, mut names: impl Iterator<Item = &'a str>) -> Result<(), FileError> {
    match names.find(|name| is_reserved(name)) {
        Some(name) => Err(FileError::ReservedName { path: file.path.clone(), name: name.to_owned() }),
        None => Ok(()),
    }
}

fn read_header(file: &ServedFile) -> Result<Header, FileError> {
    let format = |source| FileError::Format { path: file.path.clone(), source };
    let file_bytes = file.len_bytes();
    let prefix = file.read_prefix(PREFIX_BYTES as u64)?;
    let prefix = prefix
        .try_into()
        .map_err(|_| format(SafetensorsError::HeaderLength { header_bytes: 0, file_bytes }))?;
    let mut json = vec![0; header_length(prefix, file_bytes).map_err(format)?];
    file.read(&mut json, PREFIX_BYTES as u64)?;
    parse_header(&json, file_bytes).map_err(format)
}
