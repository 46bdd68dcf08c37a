//! [`TensorFiles`]: safetensors files, folders of them and NumPy arrays as versions, staged or borrowed in place.

mod directory;
mod error;
mod folder;
mod left_out;
mod model_files;
mod npz;
mod served;
mod source;
#[cfg(test)]
mod tests;
mod watch;

pub use error::FileError;
pub use folder::FolderRules;
pub use left_out::{LeftOut, LeftOutReason};
pub use watch::{FileWatch, Observation};

use crate::{
    Borrowed, Staged, Staging,
    sidecar::{SealError, SealedVersion, TensorWriter, Terms},
};
use bytes::Bytes;
use npz::Archive;
use served::ServedFile;
use source::{Extent, FilePayload, FileSource, Origin};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};
use tensor_relay_device::Source;
use tensor_relay_protocol::{
    ChunkHash, Manifest, Metadata, TensorName, TensorSpec,
    files::{FileForm, FileKind, NPY_TENSOR, is_reserved},
    npy,
    safetensors::{Header, PREFIX_BYTES, SafetensorsError, header_length, parse_header},
};

/// Opened files that can be served as one topic. Their headers are read, their tensors not yet.
///
/// Supported are a safetensors file; a folder of them in Hugging Face's layout, with its side files; a NumPy array
/// (`.npy`); and an archive of arrays (`.npz`). A folder needs one file descriptor for each of its files.
///
/// Files are read by offset and never mapped: a file that shrinks under a mapping kills the process; here it is an
/// error. All methods block on the disk; do not call them on an executor's thread.
#[derive(Debug)]
pub struct TensorFiles {
    path: PathBuf,
    form: FileForm,
    specs: Vec<TensorSpec>,
    pieces: Vec<Piece>,
    files: Arc<[ServedFile]>,
    metadata: Metadata,
    left_out: Vec<LeftOut>,
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

/// The bytes of one tensor.
#[derive(Debug)]
struct Piece {
    /// The number of the file.
    file: usize,
    place: Location,
}

/// The location of a tensor's bytes.
#[derive(Debug)]
enum Location {
    /// In the file at this offset, in transfer order.
    At(u64),
    /// In the file at this offset, in Fortran order.
    Fortran(u64),
    /// In an archive.
    Entry {
        /// The number of the entry.
        entry: usize,
        /// The length of the header before the elements.
        head_bytes: u64,
        /// Whether the elements are in Fortran order.
        is_fortran: bool,
        /// The offset of the elements in the file, unless they are compressed.
        bytes_at: Option<u64>,
    },
    /// In memory, without a file.
    Memory(Bytes),
}

impl TensorFiles {
    /// Opens the file or folder at `path`; of a folder, the files of its model.
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
    /// [`FileError`], with the file and its problem.
    pub fn open_with(path: &Path, rules: FolderRules) -> Result<Self, FileError> {
        let is_folder = fs::metadata(path)
            .map_err(|source| FileError::Io { path: path.into(), source })?
            .is_dir();
        let extension = path
            .extension()
            .and_then(|e| e.to_str())
            .unwrap_or_default()
            .to_ascii_lowercase();
        let contents = match &extension[..] {
            _ if is_folder => directory::read(path, rules)?,
            "npy" => read_npy(ServedFile::open(path)?)?,
            "npz" => npz::read(ServedFile::open(path)?)?,
            "safetensors" => read_one(ServedFile::open(path)?)?,
            _ if model_files::is_other_format(path) => {
                return Err(FileError::OtherFormat { path: path.into(), extension });
            }
            _ => read_one(ServedFile::open(path)?)?,
        };
        Ok(contents.into_files(path))
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

    /// The metadata for the manifest: the files' own, and the kind of files.
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
        self.files.iter().filter_map(name).collect()
    }

    /// The files' stamps when they were opened.
    fn stamps(&self) -> watch::Stamps {
        self.files
            .iter()
            .map(|file| (file.path.clone(), file.stamp().clone()))
            .collect()
    }

    /// The entries that are not served; report them to the operator.
    pub fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }

    /// Reads all tensors into staged memory. Arrays in Fortran order are reordered, which temporarily takes their size
    /// in memory again.
    ///
    /// # Errors
    /// [`FileError`] when a file cannot be read, or changes meanwhile, or when there is no memory.
    pub fn stage(&self, staging: &Staging) -> Result<Staged, FileError> {
        let mut archive = self.archive()?;
        let staged = Staged::new(staging, self.specs.clone(), self.metadata.clone(), |index, out| {
            self.fill(index, archive.as_mut(), out)
        });
        let staged = staged.map_err(|error| FileError::staging(&self.path, error))?;
        self.check_unchanged()?;
        Ok(staged)
    }

    /// Borrows all tensors from the files: this takes no memory, and each transfer reads the files anew. They are read
    /// once here, for their hashes. Every sent chunk is compared with its hash: a file changed in place fails the
    /// transfer instead of tearing it. Replacing a file by renaming another over it is not a change.
    ///
    /// # Errors
    /// [`FileError`] also when an array is compressed or in Fortran order: such arrays can be staged.
    pub fn borrow(&self, staging: &Staging) -> Result<Borrowed, FileError> {
        let places = (0..self.specs.len())
            .map(|index| self.lend(index))
            .collect::<Result<Vec<_>, _>>()?;
        self.verify_archive()?;
        let borrowed =
            Borrowed::from_hashed_source(staging, self.specs.clone(), self.metadata.clone(), |manifest| {
                self.source(manifest, places)
            });
        let borrowed = borrowed.map_err(|error| FileError::staging(&self.path, error))?;
        self.check_unchanged()?;
        Ok(borrowed)
    }

    /// Copies all tensors into shared memory for a [`sidecar`](crate::sidecar) server, without an intermediate copy of
    /// the whole.
    ///
    /// # Errors
    /// [`FileError`] as [`stage`](Self::stage) has, and when the system has no shared memory.
    pub fn seal(&self, terms: &Terms) -> Result<SealedVersion, SealError<SealFileError>> {
        let mut archive = self.archive().map_err(|error| SealError::Fill(error.into()))?;
        let fill = |index: usize, out: &mut TensorWriter<'_>| -> Result<(), SealFileError> {
            self.write_pieces(index, archive.as_mut(), out)
        };
        let sealed = SealedVersion::new(terms, self.specs.clone(), self.metadata.clone(), fill)?;
        self.check_unchanged().map_err(|error| SealError::Fill(error.into()))?;
        Ok(sealed)
    }

    /// Writes one tensor: in pieces if its file has it in transfer order, otherwise at once.
    fn write_pieces(
        &self,
        index: usize,
        archive: Option<&mut Archive<'_>>,
        out: &mut TensorWriter<'_>,
    ) -> Result<(), SealFileError> {
        let (spec, Piece { file, place }) = (&self.specs[index], &self.pieces[index]);
        // Checked against a file that exists, so it cannot overflow.
        let bytes = spec.shape.byte_len(spec.dtype).unwrap_or(0);
        let Location::At(start) = place else {
            let mut whole = vec![0; bytes as usize];
            self.fill(index, archive, &mut whole)?;
            return Ok(out.write(&whole)?);
        };
        let mut piece = vec![0; bytes.min(PIECE_BYTES) as usize];
        for at in (0..bytes).step_by(PIECE_BYTES as usize) {
            let piece = &mut piece[..(bytes - at).min(PIECE_BYTES) as usize];
            self.files[*file].read(piece, start + at).map_err(FileError::from)?;
            out.write(piece)?;
        }
        Ok(())
    }

    /// The archive of the tensors, if they are in one.
    fn archive(&self) -> Result<Option<Archive<'_>>, FileError> {
        let archived = self.form.kind == FileKind::Npz;
        self.files.first().filter(|_| archived).map(Archive::open).transpose()
    }

    /// Reads one tensor.
    fn fill(&self, index: usize, archive: Option<&mut Archive<'_>>, out: &mut [u8]) -> Result<(), FileError> {
        let (spec, Piece { file, place }) = (&self.specs[index], &self.pieces[index]);
        match place {
            Location::At(start) => Ok(self.files[*file].read(out, *start)?),
            Location::Fortran(start) => {
                read_fortran(spec, out, |raw| Ok(self.files[*file].read(raw, *start)?))
            }
            Location::Memory(bytes) => {
                out.copy_from_slice(bytes);
                Ok(())
            }
            Location::Entry { entry, head_bytes, is_fortran, .. } => {
                let archive = archive.expect("entries are in archives");
                match is_fortran {
                    true => read_fortran(spec, out, |raw| archive.read_elements(*entry, *head_bytes, raw)),
                    false => archive.read_elements(*entry, *head_bytes, out),
                }
            }
        }
    }

    /// The origin from which a tensor is read in transfer order.
    fn lend(&self, index: usize) -> Result<Origin, FileError> {
        let Piece { file, place } = &self.pieces[index];
        let path = || self.files[*file].path.clone();
        let tensor = || self.specs[index].name.as_str().to_owned();
        match place {
            Location::At(start) => Ok(Origin::File(*file, *start)),
            Location::Memory(bytes) => Ok(Origin::Memory(bytes.clone())),
            Location::Fortran(_) | Location::Entry { is_fortran: true, .. } => {
                Err(FileError::FortranOrder { path: path(), tensor: tensor() })
            }
            Location::Entry { bytes_at: None, .. } => {
                Err(FileError::Compressed { path: path(), tensor: tensor() })
            }
            Location::Entry { bytes_at: Some(start), .. } => Ok(Origin::File(*file, *start)),
        }
    }

    fn source(
        &self,
        manifest: &Manifest,
        places: Vec<Origin>,
    ) -> Result<(Arc<dyn Source>, Vec<ChunkHash>), FileError> {
        let tensors = manifest.tensors().iter();
        let extents = tensors.zip(places).map(|(tensor, from)| Extent { range: tensor.range(), from });
        let payload = FilePayload::new(Arc::clone(&self.files), extents.collect(), manifest.payload_bytes());
        let hashes = payload.hash(manifest)?;
        Ok((Arc::new(FileSource::new(payload, manifest, &hashes)), hashes))
    }

    /// Verifies the checksums of an archive's entries, with a pass over each.
    fn verify_archive(&self) -> Result<(), FileError> {
        let Some(mut archive) = self.archive()? else { return Ok(()) };
        for piece in &self.pieces {
            if let Location::Entry { entry, .. } = piece.place {
                archive.verify(entry)?;
            }
        }
        Ok(())
    }

    fn check_unchanged(&self) -> Result<(), FileError> {
        self.files.iter().try_for_each(ServedFile::check_unchanged)
    }
}

/// Reads elements in Fortran order and reorders them into `out`.
fn read_fortran(
    spec: &TensorSpec,
    out: &mut [u8],
    read: impl FnOnce(&mut [u8]) -> Result<(), FileError>,
) -> Result<(), FileError> {
    let mut raw = vec![0; out.len()];
    read(&mut raw)?;
    npy::to_c_order(&raw, out, spec.dtype, &spec.shape);
    Ok(())
}

fn total_bytes(specs: &[TensorSpec]) -> u64 {
    // Every spec was checked against a file that exists, so neither can overflow.
    specs.iter().map(|spec| spec.shape.byte_len(spec.dtype).unwrap_or(0)).sum()
}

/// The parsed files, while the model is assembled.
#[derive(Debug)]
struct Contents {
    form: FileForm,
    specs: Vec<TensorSpec>,
    pieces: Vec<Piece>,
    files: Vec<ServedFile>,
    metadata: Metadata,
    left_out: Vec<LeftOut>,
}

impl Contents {
    fn new(form: FileForm) -> Self {
        Self { form, specs: vec![], pieces: vec![], files: vec![], metadata: vec![], left_out: vec![] }
    }

    fn push(&mut self, spec: TensorSpec, file: usize, place: Location) {
        self.specs.push(spec);
        self.pieces.push(Piece { file, place });
    }

    fn total_bytes(&self) -> u64 {
        total_bytes(&self.specs)
    }

    fn into_files(self, path: &Path) -> TensorFiles {
        let Self { form, specs, pieces, files, mut metadata, left_out } = self;
        metadata.extend(form.metadata());
        TensorFiles { path: path.into(), form, specs, pieces, files: files.into(), metadata, left_out }
    }
}

fn read_one(file: ServedFile) -> Result<Contents, FileError> {
    let mut contents = Contents::new(FileForm::new(FileKind::Safetensors));
    contents.metadata = read_safetensors(file, &mut contents)?;
    Ok(contents)
}

/// Adds the tensors of a safetensors file to `contents`; returns the file's metadata.
fn read_safetensors(file: ServedFile, contents: &mut Contents) -> Result<Metadata, FileError> {
    let Header { tensors, metadata } = read_header(&file)?;
    check_reserved(&file, metadata.iter().map(|(key, _)| &key[..]))?;
    check_reserved(&file, tensors.iter().map(|tensor| tensor.spec.name.as_str()))?;
    for tensor in tensors {
        contents.push(tensor.spec, contents.files.len(), Location::At(tensor.range.start));
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
    let prefix = file.read_head(PREFIX_BYTES as u64)?;
    let prefix = prefix
        .try_into()
        .map_err(|_| format(SafetensorsError::HeaderLength { header_bytes: 0, file_bytes }))?;
    let mut json = vec![0; header_length(prefix, file_bytes).map_err(format)?];
    file.read(&mut json, PREFIX_BYTES as u64)?;
    parse_header(&json, file_bytes).map_err(format)
}

fn read_npy(file: ServedFile) -> Result<Contents, FileError> {
    let refuse = |source| FileError::Npy { path: file.path.clone(), source };
    let file_bytes = file.len_bytes();
    let prefix = file.read_head(npy::PREFIX_BYTES as u64)?;
    let head = file.read_head(npy::header_end(&prefix, file_bytes).map_err(refuse)? as u64)?;
    let header = npy::parse_header(&head, file_bytes).map_err(refuse)?;
    let place = match header.fortran_order {
        true => Location::Fortran(header.data_start),
        false => Location::At(header.data_start),
    };
    let name = TensorName::new(NPY_TENSOR).expect("a constant name");
    let mut contents = Contents::new(FileForm::new(FileKind::Npy));
    contents.push(TensorSpec::new(name, header.dtype, header.shape), 0, place);
    contents.files.push(file);
    Ok(contents)
}

impl Staged {
    /// Stages the tensors and metadata of a safetensors file, without recording that they came from a file. Blocks on
    /// the disk. [`TensorFiles`] does the same for more kinds of files.
    ///
    /// # Errors
    /// [`FileError`] when the file cannot be read, is malformed, or changes meanwhile.
    pub fn from_safetensors(path: &Path, staging: &Staging) -> Result<Self, FileError> {
        let contents = read_one(ServedFile::open(path)?)?;
        let metadata = contents.metadata.clone();
        TensorFiles { metadata, ..contents.into_files(path) }.stage(staging)
    }
}
