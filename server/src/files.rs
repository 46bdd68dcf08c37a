//! Files as versions: safetensors files, folders of them, NumPy arrays; read into staged memory, or from where they are.

mod directory;
mod error;
mod left_out;
mod npz;
mod served;
mod source;
mod watch;

pub use error::FileError;
pub use left_out::{LeftOut, LeftOutReason};
pub use watch::{FileWatch, Look};

use crate::{Borrowed, Staged, Staging};
use bytes::Bytes;
use npz::Archive;
use served::ServedFile;
use source::{Extent, FilePayload, FileSource, Origin};
use std::{
    fs,
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

/// Files that can be served as one topic: what they hold is known, their tensors are not read yet.
///
/// Understood are a safetensors file; a folder of them, as Hugging Face has it, with what lies beside the weights; a
/// NumPy array (`.npy`); and an archive of arrays (`.npz`). A folder needs one open file for each of its files.
///
/// Files are read by position and never mapped: one that shrinks under a mapping would kill the process, here it is an
/// error. Everything here blocks for as long as the disk does; call it off the executor.
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

/// The bytes of one tensor.
#[derive(Debug)]
struct Piece {
    /// The number of the file.
    file: usize,
    place: Place,
}

/// Where in its file a tensor is.
#[derive(Debug)]
enum Place {
    /// As it travels, from this position on.
    At(u64),
    /// The same in Fortran order.
    Turned(u64),
    /// In an archive.
    Entry {
        /// The number of the entry.
        entry: usize,
        /// What is before the elements.
        head_bytes: u64,
        /// Whether the elements are in Fortran order.
        turned: bool,
        /// The position of the elements in the file, unless they are compressed.
        bytes_at: Option<u64>,
    },
    /// In no file: made up here.
    Memory(Bytes),
}

impl TensorFiles {
    /// Looks at `path` and reads the headers of what is there. The files stay open: what is staged or borrowed later is
    /// what was opened, though another file took its name meanwhile.
    ///
    /// # Errors
    /// [`FileError`] names the file and says what is wrong with it.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let is_folder = fs::metadata(path)
            .map_err(|source| FileError::Io { path: path.into(), source })?
            .is_dir();
        let extension = path
            .extension()
            .and_then(|e| e.to_str())
            .unwrap_or_default()
            .to_ascii_lowercase();
        let contents = match &extension[..] {
            _ if is_folder => directory::read(path)?,
            "npy" => read_npy(ServedFile::open(path)?)?,
            "npz" => npz::read(ServedFile::open(path)?)?,
            "safetensors" => read_one(ServedFile::open(path)?)?,
            _ if directory::is_other_format(path) => {
                return Err(FileError::OtherFormat { path: path.into(), extension });
            }
            _ => read_one(ServedFile::open(path)?)?,
        };
        Ok(contents.into_files(path))
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Which kind of files they are.
    pub fn kind(&self) -> FileKind {
        self.form.kind
    }

    /// The tensors, files beside the weights included.
    pub fn specs(&self) -> &[TensorSpec] {
        &self.specs
    }

    /// What the manifest will say beyond the tensors: the files' own metadata, and which kind of files they are.
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }

    /// The size of all tensors together.
    pub fn total_bytes(&self) -> u64 {
        total_bytes(&self.specs)
    }

    /// What is not served of what lies there. Whoever serves it should hear of it.
    pub fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }

    /// Reads everything into staged memory. Arrays in Fortran order are turned, which takes their size in memory once
    /// more while it lasts.
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

    /// Lends everything from where it is: no memory is taken, and each transfer reads the files anew. They are read once
    /// here, for their hashes. Every chunk that is sent is compared with its hash: a file that was changed in place
    /// fails the transfer instead of tearing it. Replacing a file by renaming another over it is no change.
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

    /// The archive that the tensors are in, if that is what they are in.
    fn archive(&self) -> Result<Option<Archive<'_>>, FileError> {
        let archived = self.form.kind == FileKind::Npz;
        self.files.first().filter(|_| archived).map(Archive::open).transpose()
    }

    /// Reads one tensor.
    fn fill(&self, index: usize, archive: Option<&mut Archive<'_>>, out: &mut [u8]) -> Result<(), FileError> {
        let (spec, Piece { file, place }) = (&self.specs[index], &self.pieces[index]);
        match place {
            Place::At(start) => Ok(self.files[*file].read(out, *start)?),
            Place::Turned(start) => turned(spec, out, |raw| Ok(self.files[*file].read(raw, *start)?)),
            Place::Memory(bytes) => {
                out.copy_from_slice(bytes);
                Ok(())
            }
            Place::Entry { entry, head_bytes, turned: is_turned, .. } => {
                let archive = archive.expect("entries are in archives");
                match is_turned {
                    true => turned(spec, out, |raw| archive.read_elements(*entry, *head_bytes, raw)),
                    false => archive.read_elements(*entry, *head_bytes, out),
                }
            }
        }
    }

    /// Where one tensor can be read as it travels.
    fn lend(&self, index: usize) -> Result<Origin, FileError> {
        let Piece { file, place } = &self.pieces[index];
        let path = || self.files[*file].path.clone();
        let tensor = || self.specs[index].name.as_str().to_owned();
        match place {
            Place::At(start) => Ok(Origin::File(*file, *start)),
            Place::Memory(bytes) => Ok(Origin::Memory(bytes.clone())),
            Place::Turned(_) | Place::Entry { turned: true, .. } => {
                Err(FileError::FortranOrder { path: path(), tensor: tensor() })
            }
            Place::Entry { bytes_at: None, .. } => {
                Err(FileError::Compressed { path: path(), tensor: tensor() })
            }
            Place::Entry { bytes_at: Some(start), .. } => Ok(Origin::File(*file, *start)),
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

    /// Compares the entries of an archive with their checksums, which only a pass over the whole of each can do.
    fn verify_archive(&self) -> Result<(), FileError> {
        let Some(mut archive) = self.archive()? else { return Ok(()) };
        for piece in &self.pieces {
            if let Place::Entry { entry, .. } = piece.place {
                archive.verify(entry)?;
            }
        }
        Ok(())
    }

    fn check_unchanged(&self) -> Result<(), FileError> {
        self.files.iter().try_for_each(ServedFile::check_unchanged)
    }
}

/// Reads elements in Fortran order and turns them into `out`.
fn turned(
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

/// What was found, while it is put together.
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

    fn push(&mut self, spec: TensorSpec, file: usize, place: Place) {
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

/// Adds the tensors of a safetensors file to `contents`, and gives back the file's metadata.
fn read_safetensors(file: ServedFile, contents: &mut Contents) -> Result<Metadata, FileError> {
    let Header { tensors, metadata } = read_header(&file)?;
    check_reserved(&file, metadata.iter().map(|(key, _)| &key[..]))?;
    check_reserved(&file, tensors.iter().map(|tensor| tensor.spec.name.as_str()))?;
    for tensor in tensors {
        contents.push(tensor.spec, contents.files.len(), Place::At(tensor.range.start));
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
        true => Place::Turned(header.data_start),
        false => Place::At(header.data_start),
    };
    let name = TensorName::new(NPY_TENSOR).expect("a constant name");
    let mut contents = Contents::new(FileForm::new(FileKind::Npy));
    contents.push(TensorSpec::new(name, header.dtype, header.shape), 0, place);
    contents.files.push(file);
    Ok(contents)
}

impl Staged {
    /// Stages the tensors and metadata of a safetensors file, and nothing that says that they were one. Blocks for as
    /// long as reading takes. [`TensorFiles`] does the same for more kinds of files.
    ///
    /// # Errors
    /// [`FileError`] when the file cannot be read, is malformed, or changes meanwhile.
    pub fn from_safetensors(path: &Path, staging: &Staging) -> Result<Self, FileError> {
        let contents = read_one(ServedFile::open(path)?)?;
        let metadata = contents.metadata.clone();
        TensorFiles { metadata, ..contents.into_files(path) }.stage(staging)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Held, SourceError};
    use safetensors::{Dtype, tensor::TensorView};
    use std::{
        collections::HashMap,
        io::{Cursor, Write},
    };
    use tensor_relay_device::HostMemory;
    use tensor_relay_protocol::{ChunkIndex, CodecId, Dtype as OurDtype, Limits, Shape};
    use tensor_relay_transport::{Workers, egress::Encoder};
    use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

    fn staging() -> Staging {
        Staging { memory: HostMemory::new(64 << 20), chunk_bytes: 4096, limits: Limits::default() }
    }

    fn model() -> Vec<u8> {
        let data: Vec<u8> = (0..4000).map(|i| i as u8).collect();
        let tensors = [
            ("w", TensorView::new(Dtype::F32, vec![10, 100], &data).unwrap()),
            ("b", TensorView::new(Dtype::BF16, vec![3], &data[..6]).unwrap()),
            ("none", TensorView::new(Dtype::I64, vec![0, 7], &[]).unwrap()),
        ];
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        safetensors::serialize(tensors, Some(metadata)).unwrap()
    }

    /// A file with tensors of the given names, each of 8 bytes that are its name's first.
    fn shard(names: &[&str]) -> Vec<u8> {
        let bytes: Vec<_> = names.iter().map(|name| [name.as_bytes()[0]; 8]).collect();
        let views = bytes.iter().map(|bytes| TensorView::new(Dtype::F32, vec![2], bytes).unwrap());
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        safetensors::serialize(names.iter().zip(views), Some(metadata)).unwrap()
    }

    fn npy(descr: &str, order: &str, shape: &str, data: &[u8]) -> Vec<u8> {
        let header = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n");
        [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), data].concat()
    }

    fn npz(entries: &[(&str, &[u8])], method: CompressionMethod) -> Vec<u8> {
        let mut writer = ZipWriter::new(Cursor::new(vec![]));
        for (name, bytes) in entries {
            writer
                .start_file(*name, SimpleFileOptions::default().compression_method(method))
                .unwrap();
            writer.write_all(bytes).unwrap();
        }
        writer.finish().unwrap().into_inner()
    }

    /// A folder with `files`, which is removed when the first value is dropped.
    fn folder(files: &[(&str, &[u8])]) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            fs::write(dir.path().join(name), bytes).unwrap();
        }
        let path = dir.path().to_owned();
        (dir, path)
    }

    fn refused(files: &[(&str, &[u8])], path: &str) -> FileError {
        let (_dir, dir) = folder(files);
        TensorFiles::open(&dir.join(path)).unwrap_err()
    }

    /// The last chunk of a version, as a subscriber's transfer reads it.
    async fn last_chunk(held: &Held) -> Result<Bytes, SourceError> {
        let encoder = Encoder::new(0, Workers::Inline);
        let last = ChunkIndex(held.manifest().chunking().count() - 1);
        let encoded = encoder.encode(&held.payload, last, CodecId::Raw).await?;
        Ok(encoded.bytes)
    }

    /// The bytes of a tensor of a version, read likewise.
    async fn bytes(held: &Held, tensor: &str) -> Vec<u8> {
        let encoder = Encoder::new(0, Workers::Inline);
        let mut payload = vec![];
        for (chunk, _) in held.manifest().chunking().iter() {
            let encoded = encoder.encode(&held.payload, chunk, CodecId::Raw).await.unwrap();
            payload.extend_from_slice(&encoded.bytes);
        }
        let range = held.manifest().tensor(tensor).unwrap().range();
        payload[range.start as usize..range.end as usize].to_vec()
    }

    fn names(files: &TensorFiles) -> Vec<&str> {
        files.specs().iter().map(|spec| spec.name.as_str()).collect()
    }

    #[test]
    fn a_model_file_is_staged_with_its_metadata() {
        let (_dir, dir) = folder(&[("m.safetensors", &model())]);
        let path = dir.join("m.safetensors");
        let staged = Staged::from_safetensors(&path, &staging()).unwrap();
        assert_eq!(staged.manifest().tensors().len(), 3);
        assert_eq!(staged.manifest().metadata(), [("format".into(), "pt".into())]);
        assert_eq!(staged.digest(), Staged::from_safetensors(&path, &staging()).unwrap().digest());
        let files = TensorFiles::open(&path).unwrap();
        assert_eq!((files.kind(), files.total_bytes()), (FileKind::Safetensors, 4006));
        assert_eq!(files.metadata()[1], ("tensor-relay.kind".into(), "safetensors".into()));
    }

    #[test]
    fn broken_files_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        let good = model();
        for (what, bytes) in [
            ("empty", vec![]),
            ("short", good[..7].to_vec()),
            ("cut header", good[..40].to_vec()),
            ("cut data", good[..good.len() - 1].to_vec()),
            ("longer", [&good[..], b"x"].concat()),
            ("a picture", b"\x89PNG\r\n\x1a\n0000000000000000".to_vec()),
            ("huge header", [&(1u64 << 62).to_le_bytes()[..], b"{}"].concat()),
        ] {
            fs::write(&path, bytes).unwrap();
            let error = Staged::from_safetensors(&path, &staging()).unwrap_err();
            assert!(matches!(error, FileError::Format { .. }), "{what}: {error}");
            assert!(error.to_string().contains("m.safetensors"), "{error}");
        }
        let missing = Staged::from_safetensors(&dir.path().join("no"), &staging()).unwrap_err();
        assert!(matches!(missing, FileError::Io { .. }));
        let folder = Staged::from_safetensors(dir.path(), &staging()).unwrap_err();
        assert!(matches!(folder, FileError::NotAFile { .. }), "{folder}");
    }

    #[test]
    fn names_that_mean_something_else_are_refused() {
        let reserved = refused(&[("m.safetensors", &shard(&["tensor-relay.file:a"]))], "m.safetensors");
        assert!(matches!(reserved, FileError::ReservedName { .. }), "{reserved}");
        let other = refused(&[("m.GGUF", b"GGUF")], "m.GGUF");
        assert!(matches!(other, FileError::OtherFormat { .. }), "{other}");
    }

    /// Staged and borrowed are the same version, whatever kind of files it is.
    #[test]
    fn borrowed_files_are_what_staged_ones_are() {
        let array = npy("<i2", "False", "(3,)", &[1, 0, 2, 0, 3, 0]);
        let (_dir, dir) = folder(&[
            ("m.safetensors", &model()),
            ("n.safetensors", &shard(&["a", "c"])),
            ("config.json", b"{}"),
            ("empty.txt", b""),
            ("a.npy", &array),
            ("a.npz", &npz(&[("x.npy", &array), ("y.npy", &array)], CompressionMethod::Stored)),
        ]);
        for name in ["m.safetensors", "", "a.npy", "a.npz"] {
            let files = TensorFiles::open(&dir.join(name)).unwrap();
            let (staged, borrowed) = (files.stage(&staging()).unwrap(), files.borrow(&staging()).unwrap());
            assert_eq!(Some(staged.digest()), borrowed.digest(), "{name}");
            assert_eq!(staged.manifest(), borrowed.manifest(), "{name}");
        }
    }

    #[tokio::test]
    async fn a_folder_travels_with_what_makes_it_load() {
        let index = br#"{"metadata": {"total_size": 24}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}}"#;
        let large = vec![0; (64 << 20) - index.len() - 1];
        let (_dir, dir) = folder(&[
            ("1.safetensors", &shard(&["a", "c"])),
            ("2.safetensors", &shard(&["b"])),
            ("consolidated.safetensors", &shard(&["x"])),
            ("model.safetensors.index.json", index),
            ("config.json", b"{}"),
            ("large.json", &large),
            ("pytorch_model.bin", b"pickle"),
            ("pytorch_model.bin.index.json", b"{}"),
            (".hidden", b""),
        ]);
        fs::create_dir(dir.join("onnx")).unwrap();
        let files = TensorFiles::open(&dir).unwrap();
        let index_name = "tensor-relay.file:model.safetensors.index.json";
        assert_eq!(names(&files), ["a", "c", "b", index_name, "tensor-relay.file:config.json"]);
        let mut left_out: Vec<String> = files.left_out().iter().map(LeftOut::to_string).collect();
        left_out.sort();
        let expected = [
            ".hidden (hidden)",
            "consolidated.safetensors (weights that the index does not name)",
            "large.json (too large beside the weights, which may have 64 MiB of other files with them)",
            "onnx (a folder)",
            "pytorch_model.bin (weights in another format)",
            "pytorch_model.bin.index.json (weights in another format)",
        ];
        assert_eq!(left_out, expected);
        let held = Held::from(files.borrow(&staging()).unwrap());
        assert_eq!(bytes(&held, "b").await, b"bbbbbbbb");
        assert_eq!(bytes(&held, index_name).await, index);
        let metadata = [("format".into(), "pt".into()), ("tensor-relay.kind".into(), "directory".into())];
        assert_eq!(held.manifest().metadata(), metadata);
    }

    #[tokio::test]
    async fn a_folder_without_an_index_keeps_its_file_names() {
        let (_dir, dir) = folder(&[("adapter_model.safetensors", &shard(&["a"]))]);
        let one = TensorFiles::open(&dir).unwrap();
        let weights = ("tensor-relay.weights".into(), "adapter_model.safetensors".into());
        assert_eq!(one.metadata().last(), Some(&weights));
        fs::write(dir.join("other.safetensors"), shard(&["b"])).unwrap();
        let two = TensorFiles::open(&dir).unwrap();
        let index_name = "tensor-relay.file:model.safetensors.index.json";
        assert_eq!(names(&two), ["a", "b", index_name]);
        let index = bytes(&two.borrow(&staging()).unwrap().into(), index_name).await;
        assert!(String::from_utf8(index).unwrap().contains(r#""b": "other.safetensors""#));
        fs::write(dir.join("model.safetensors"), shard(&["a"])).unwrap();
        let model = TensorFiles::open(&dir).unwrap();
        assert_eq!((names(&model), model.left_out().len()), (vec!["a"], 2));
    }

    #[test]
    fn folders_that_do_not_agree_with_themselves_are_refused() {
        let (a, ab) = (shard(&["a"]), shard(&["a", "b"]));
        let index = |map: &str| format!(r#"{{"weight_map": {map}}}"#).into_bytes();
        let name = "model.safetensors.index.json";
        let both = index(r#"{"a": "1.safetensors", "b": "2.safetensors"}"#);
        let error = refused(&[("1.safetensors", &a), (name, &both)], "");
        assert!(matches!(&error, FileError::MissingShard { shard, .. } if shard.as_str() == "2.safetensors"));
        let error = refused(&[("1.safetensors", &a), ("2.safetensors", &a), (name, &both)], "");
        assert!(matches!(&error, FileError::Twice { tensor, .. } if tensor == "a"), "{error}");
        assert!(error.to_string().contains("1.safetensors") && error.to_string().contains("2.safetensors"));
        let one = index(r#"{"a": "1.safetensors", "b": "1.safetensors"}"#);
        let error = refused(&[("1.safetensors", &a), (name, &one)], "");
        assert!(matches!(&error, FileError::MissingTensor { tensor, .. } if tensor == "b"), "{error}");
        let only_a = index(r#"{"a": "1.safetensors"}"#);
        let error = refused(&[("1.safetensors", &ab), (name, &only_a)], "");
        assert!(matches!(&error, FileError::NotInIndex { tensor, .. } if tensor == "b"), "{error}");
        let error =
            refused(&[("1.safetensors", &a), (name, &only_a), ("x.safetensors.index.json", &only_a)], "");
        assert!(matches!(error, FileError::TwoIndexes { .. }), "{error}");
        let error = refused(&[("1.safetensors", &a), (name, b"{")], "");
        assert!(matches!(error, FileError::Index { .. }), "{error}");
        let error = refused(&[("config.json", b"{}"), ("pytorch_model.bin", b"")], "");
        assert!(matches!(error, FileError::NoWeights { .. }), "{error}");
    }

    #[tokio::test]
    async fn arrays_are_tensors() {
        let c_order = npy("<u2", "False", "(2, 3)", &[1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0]);
        let turned = npy("<u2", "True", "(2, 3)", &[1, 0, 4, 0, 2, 0, 5, 0, 3, 0, 6, 0]);
        let entries = [("c.npy", &c_order[..]), ("turned.npy", &turned), ("notes.txt", b"hello")];
        for method in [CompressionMethod::Stored, CompressionMethod::Deflated] {
            let (_dir, dir) = folder(&[("a.npz", &npz(&entries, method)), ("a.npy", &turned)]);
            let archive = TensorFiles::open(&dir.join("a.npz")).unwrap();
            assert_eq!(names(&archive), ["c", "turned"]);
            assert_eq!(archive.left_out(), [LeftOut::new("notes.txt".into(), LeftOutReason::NoArray)]);
            let held = Held::from(archive.stage(&staging()).unwrap());
            let expected = [1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0];
            assert_eq!(bytes(&held, "c").await, expected);
            assert_eq!(bytes(&held, "turned").await, expected);
            let array = TensorFiles::open(&dir.join("a.npy")).unwrap();
            assert_eq!(bytes(&array.stage(&staging()).unwrap().into(), "array").await, expected);
            let spec = &array.specs()[0];
            assert_eq!((spec.dtype, &spec.shape), (OurDtype::U16, &Shape::new(&[2, 3]).unwrap()));
            assert!(matches!(array.borrow(&staging()), Err(FileError::FortranOrder { .. })));
            let refused = archive.borrow(&staging()).unwrap_err();
            match method {
                CompressionMethod::Stored => assert!(matches!(refused, FileError::FortranOrder { .. })),
                _ => assert!(matches!(refused, FileError::Compressed { .. }), "{refused}"),
            }
        }
    }

    #[test]
    fn broken_arrays_are_refused_by_name() {
        let good = npy("<u2", "False", "(2,)", &[1, 0, 2, 0]);
        let error = refused(&[("a.npy", &good[..good.len() - 1])], "a.npy");
        assert!(matches!(error, FileError::Npy { .. }), "{error}");
        let object = npy("|O", "False", "(2,)", b"pickle");
        let error = refused(&[("a.npz", &npz(&[("o.npy", &object)], CompressionMethod::Deflated))], "a.npz");
        assert!(matches!(&error, FileError::Entry { entry, .. } if entry == "o.npy"), "{error}");
        let archive = npz(&[("x.npy", &good)], CompressionMethod::Stored);
        let error = refused(&[("a.npz", &archive[..archive.len() - 30])], "a.npz");
        assert!(matches!(error, FileError::Archive { .. }), "{error}");
        let mut flipped = archive;
        let at = flipped.windows(6).position(|window| window == b"\n\x01\0\x02\0P").unwrap() + 1;
        flipped[at] ^= 1;
        let (_dir, dir) = folder(&[("a.npz", &flipped)]);
        let files = TensorFiles::open(&dir.join("a.npz")).unwrap();
        for error in [files.stage(&staging()).unwrap_err(), files.borrow(&staging()).unwrap_err()] {
            assert!(matches!(error, FileError::Archive { .. }), "the checksum is wrong: {error}");
        }
    }

    /// A file that was changed in place is never sent, though its size and its time are as they were.
    #[tokio::test]
    async fn a_change_under_a_transfer_is_an_error_that_names_the_file() {
        let (_dir, dir) = folder(&[("a.safetensors", &shard(&["a"])), ("b.safetensors", &shard(&["b"]))]);
        let held = Held::from(TensorFiles::open(&dir).unwrap().borrow(&staging()).unwrap());
        last_chunk(&held).await.unwrap();
        let path = dir.join("b.safetensors");
        let replaced = dir.join("replaced");
        fs::copy(&path, &replaced).unwrap();
        fs::rename(&replaced, &path).unwrap();
        last_chunk(&held).await.expect("a file that lost its name is still what it was");
        let held = Held::from(TensorFiles::open(&dir).unwrap().borrow(&staging()).unwrap());
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_len(file.metadata().unwrap().len() - 8).unwrap();
        let shrunk = last_chunk(&held).await.unwrap_err();
        assert!(
            matches!(&shrunk, SourceError::Changed { path } if path.ends_with("b.safetensors")),
            "{shrunk}"
        );
        fs::write(&path, shard(&["z"])).unwrap();
        file.set_modified(modified).unwrap();
        let torn = last_chunk(&held).await.unwrap_err();
        assert!(matches!(&torn, SourceError::Changed { .. }), "{torn}");
    }

    #[test]
    fn a_change_after_opening_is_an_error() {
        let (_dir, dir) = folder(&[("m.safetensors", &model())]);
        let path = dir.join("m.safetensors");
        let files = TensorFiles::open(&path).unwrap();
        let mut longer = model();
        longer.push(0);
        fs::write(&path, longer).unwrap();
        assert!(matches!(files.stage(&staging()), Err(FileError::Changed { .. })));
        assert!(matches!(files.borrow(&staging()), Err(FileError::Changed { .. })));
    }
}
