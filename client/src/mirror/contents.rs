//! The files of a snapshot, and their contents.

use crate::{SaveError, Snapshot};
use bytes::Bytes;
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Write},
};
use tensor_relay_device::HostBytes;
use tensor_relay_protocol::{
    Tensor, TensorName,
    files::{FileForm, FileKind, FileName, FileNameError, is_entry_name, without_reserved},
    npy::{self, NpyError},
    safetensors::{IndexError, WeightIndex, plan_tensors},
};
use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

/// Why a snapshot cannot be written as files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FilesError {
    /// A file name could escape the folder.
    #[error(transparent)]
    Name(#[from] FileNameError),
    /// The weight index cannot be read.
    #[error("{name} is not a usable weight index: {source}")]
    Index {
        /// The index.
        name: FileName,
        /// The reason.
        source: IndexError,
    },
    /// The snapshot has two weight indexes, which could contradict each other.
    #[error("it has two weight indexes, {first} and {second}")]
    TwoIndexes {
        /// One of them.
        first: FileName,
        /// The other one.
        second: FileName,
    },
    /// An array file holds exactly one tensor, and the snapshot has fewer or more.
    #[error("an .npy file holds one array, and this snapshot has {0} tensors")]
    NotOneArray(usize),
    /// A tensor cannot be represented in NumPy's format.
    #[error("tensor {name:?} cannot be written as a NumPy array: {source}")]
    Npy {
        /// The tensor.
        name: TensorName,
        /// The reason.
        source: NpyError,
    },
    /// An array's name could escape the folder into which the archive is unpacked.
    #[error("cannot write the archive entry {0:?}: when unpacked, it could escape the folder")]
    EntryName(TensorName),
}

/// The files of a snapshot.
#[derive(Debug)]
pub(super) enum Contents {
    File(Body),
    /// The files of a folder, each name once.
    Folder(Vec<(FileName, Body)>),
}

/// The content of one file. The tensors' bytes are shared with the snapshot.
#[derive(Debug)]
pub(crate) enum Body {
    /// Parts, written in sequence.
    Parts(Vec<HostBytes>),
    /// A ZIP archive.
    Archive(Vec<Entry>),
}

/// One array of an archive.
#[derive(Debug)]
pub(crate) struct Entry {
    name: String,
    header: Vec<u8>,
    elements: HostBytes,
}

impl Contents {
    /// The files of `snapshot`, by the form in its manifest.
    pub(super) fn of(snapshot: &Snapshot) -> Result<(FileKind, Self), SaveError> {
        let refuse = |source| SaveError::Files { id: snapshot.id.clone(), source };
        let form = FileForm::of(snapshot.manifest().metadata()).map_err(|e| refuse(e.into()))?;
        let contents = match form.kind {
            FileKind::Directory => Self::Folder(folder(snapshot, &form)?),
            FileKind::Npy => Self::File(array(snapshot).map_err(refuse)?),
            FileKind::Npz => Self::File(archive(snapshot).map_err(refuse)?),
            _ => {
                let tensors: Vec<&Tensor> = snapshot.described().collect();
                Self::File(Body::safetensors(snapshot, &tensors)?)
            }
        };
        Ok((form.kind, contents))
    }
}

impl Body {
    /// A safetensors file of some of a snapshot's tensors.
    pub(crate) fn safetensors(snapshot: &Snapshot, tensors: &[&Tensor]) -> Result<Self, SaveError> {
        let layout = plan_tensors(tensors, without_reserved(snapshot.manifest().metadata()));
        let layout = layout
            .map_err(|source| SaveError::Format { id: snapshot.id.clone(), source: Box::new(source) })?;
        let bodies = layout.order.iter().map(|index| snapshot.bytes(tensors[*index]));
        let header = HostBytes::from(Bytes::from(layout.head));
        Ok(Self::Parts(std::iter::once(header).chain(bodies).collect()))
    }

    /// Writes the content to an empty file.
    pub(crate) fn write(&self, file: &mut File) -> io::Result<()> {
        match self {
            Self::Parts(parts) => parts.iter().try_for_each(|part| part.write_to(file)),
            Self::Archive(entries) => write_archive(entries, file),
        }
    }
}

/// Writes a ZIP archive. Entries have no compression, alignment or time, so that equal arrays make equal files.
fn write_archive(entries: &[Entry], file: &mut File) -> io::Result<()> {
    let mut archive = ZipWriter::new(file);
    for Entry { name, header, elements } in entries {
        let is_large = (header.len() + elements.len()) as u64 >= u64::from(u32::MAX);
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Stored)
            .unix_permissions(0o644)
            .large_file(is_large);
        archive.start_file(name.as_str(), options)?;
        archive.write_all(header)?;
        elements.write_to(&mut archive)?;
    }
    archive.finish()?;
    Ok(())
}

fn array(snapshot: &Snapshot) -> Result<Body, FilesError> {
    let tensors: Vec<_> = snapshot.described().collect();
    match &tensors[..] {
        [tensor] => {
            let header = Bytes::from(array_header(tensor)?);
            Ok(Body::Parts(vec![header.into(), snapshot.bytes(tensor)]))
        }
        _ => Err(FilesError::NotOneArray(tensors.len())),
    }
}

fn archive(snapshot: &Snapshot) -> Result<Body, FilesError> {
    let entry = |tensor: &Tensor| {
        let (name, elements) = (tensor.name.as_str(), snapshot.bytes(tensor));
        match is_entry_name(name) {
            false => Err(FilesError::EntryName(tensor.name.clone())),
            true => Ok(Entry { name: format!("{name}.npy"), header: array_header(tensor)?, elements }),
        }
    };
    Ok(Body::Archive(snapshot.described().map(entry).collect::<Result<_, _>>()?))
}

fn array_header(tensor: &Tensor) -> Result<Vec<u8>, FilesError> {
    let header = npy::file_head(tensor.dtype, &tensor.shape);
    header.map_err(|source| FilesError::Npy { name: tensor.name.clone(), source })
}

/// The files of a folder: weights, divided as the index specifies, and side files. The written index lists only the
/// received tensors.
fn folder(snapshot: &Snapshot, form: &FileForm) -> Result<Vec<(FileName, Body)>, SaveError> {
    let refuse = |source| SaveError::Files { id: snapshot.id.clone(), source };
    let SplitTensors { model, mut side_files } =
        split_side_files(snapshot, form).map_err(|source| refuse(source.into()))?;
    let index_position = find_index(&side_files).map_err(refuse)?;
    let published_index = match index_position {
        Some(position) => parse_index(&mut side_files[position]).map_err(refuse)?,
        None => WeightIndex::default(),
    };
    let mut weights: BTreeMap<&FileName, Vec<&Tensor>> = BTreeMap::new();
    for tensor in &model {
        let file = published_index.file_of(tensor.name.as_str()).unwrap_or(&form.weights);
        weights.entry(file).or_default().push(tensor);
    }
    if let Some(position) = index_position {
        let placed = weights
            .iter()
            .flat_map(|(file, tensors)| tensors.iter().map(move |tensor| (tensor, file)));
        let actual_index = placed.map(|(tensor, file)| (tensor.name.as_str().into(), (*file).clone()));
        let actual_index: WeightIndex = actual_index.collect();
        if actual_index != published_index {
            let total_bytes = model.iter().map(|tensor| tensor.byte_len()).sum();
            side_files[position].1 = Bytes::from(actual_index.to_json(total_bytes)).into();
        }
    }
    let mut files = vec![];
    for (name, tensors) in weights {
        files.push((name.clone(), Body::safetensors(snapshot, &tensors)?));
    }
    files.extend(side_files.into_iter().map(|(name, bytes)| (name, Body::Parts(vec![bytes]))));
    Ok(files)
}

/// A snapshot's tensors, split into those of the model and side files. No side file has the name of a weight file: the
/// extension distinguishes them.
struct SplitTensors<'a> {
    model: Vec<&'a Tensor>,
    side_files: Vec<(FileName, HostBytes)>,
}

fn split_side_files<'a>(snapshot: &'a Snapshot, form: &FileForm) -> Result<SplitTensors<'a>, FileNameError> {
    let (mut model, mut side_files) = (vec![], vec![]);
    for tensor in snapshot.described() {
        match form.side_file(tensor)? {
            Some(name) => side_files.push((name, snapshot.bytes(tensor))),
            None => model.push(tensor),
        }
    }
    Ok(SplitTensors { model, side_files })
}

fn find_index(side_files: &[(FileName, HostBytes)]) -> Result<Option<usize>, FilesError> {
    let mut positions = (0..side_files.len()).filter(|position| side_files[*position].0.is_index());
    match (positions.next(), positions.next()) {
        (Some(first), Some(second)) => {
            let name = |position: usize| side_files[position].0.clone();
            Err(FilesError::TwoIndexes { first: name(first), second: name(second) })
        }
        (position, _) => Ok(position),
    }
}

/// Parses the index, and replaces it by the bytes that were parsed.
fn parse_index((name, bytes): &mut (FileName, HostBytes)) -> Result<WeightIndex, FilesError> {
    let parsed = std::mem::replace(bytes, Bytes::new().into()).into_stable();
    *bytes = parsed.clone().into();
    WeightIndex::parse(&parsed).map_err(|source| FilesError::Index { name: name.clone(), source })
}
