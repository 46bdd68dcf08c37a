//! The files of a snapshot, and their contents.

use crate::{SaveError, Snapshot};
use bytes::Bytes;
use std::{collections::BTreeMap, fs::File, io, ops::Range};
use tensor_relay_device::{HostBytes, SharedRange};
use tensor_relay_protocol::{
    Tensor,
    files::{FileForm, FileKind, FileName, FileNameError, without_reserved},
    safetensors::{IndexError, WeightIndex, plan_tensors},
};

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
}

/// The files of a snapshot.
#[derive(Debug)]
pub(super) enum Contents {
    File(Body),
    /// The files of a folder, each name once.
    Folder(Vec<(FileName, Body)>),
}

/// The content of one file: parts, written in sequence. The tensors' bytes are shared with the snapshot.
#[derive(Debug)]
pub(crate) struct Body(pub(super) Vec<Part>);

/// A part of a file.
#[derive(Debug)]
pub(crate) struct Part {
    bytes: HostBytes,
    /// The same bytes in the memory that the server lends, if they are there: they need not be mapped then.
    lent: Option<(SharedRange, Range<u64>)>,
}

/// The size below which bytes are written from their mapping, which costs less than a system call of their own kind.
const LENT_BYTES_MIN: usize = 64 << 10;

impl Contents {
    /// The files of `snapshot`, by the form in its manifest.
    pub(super) fn of(snapshot: &Snapshot) -> Result<(FileKind, Self), SaveError> {
        let refuse = |source| SaveError::Files { id: snapshot.id.clone(), source };
        let form = FileForm::of(snapshot.manifest().metadata()).map_err(|e| refuse(e.into()))?;
        let contents = match form.kind {
            FileKind::Directory => Self::Folder(folder(snapshot, &form)?),
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
        let bodies = layout.order.iter().map(|index| Part {
            bytes: snapshot.bytes(tensors[*index]),
            lent: snapshot.lent(tensors[*index]).map(|(lent, range)| (lent.clone(), range)),
        });
        let header = HostBytes::from(Bytes::from(layout.head)).into();
        Ok(Self(std::iter::once(header).chain(bodies).collect()))
    }

    /// Writes the content to an empty file.
    pub(crate) fn write(&self, file: &mut File) -> io::Result<()> {
        self.0.iter().try_for_each(|part| part.write(file))
    }
}

impl Part {
    /// Appends it to `file`: from the server's memory, as far as it is there and the system can.
    fn write(&self, file: &mut File) -> io::Result<()> {
        let appended = match &self.lent {
            Some((lent, range)) if self.bytes.len() >= LENT_BYTES_MIN => {
                lent.append_to(range.clone(), file)?
            }
            _ => 0,
        };
        self.bytes.slice(appended as usize..self.bytes.len()).write_to(file)
    }
}

impl From<HostBytes> for Part {
    fn from(bytes: HostBytes) -> Self {
        Self { bytes, lent: None }
    }
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
        if actual_index != published_index || snapshot.has_boxes() {
            let total_bytes = model.iter().map(|tensor| tensor.byte_len()).sum();
            side_files[position].1 = Bytes::from(actual_index.to_json(total_bytes)).into();
        }
    }
    let mut files = vec![];
    for (name, tensors) in weights {
        files.push((name.clone(), Body::safetensors(snapshot, &tensors)?));
    }
    files.extend(side_files.into_iter().map(|(name, bytes)| (name, Body(vec![bytes.into()]))));
    Ok(files)
}

/// A snapshot's tensors, split into those of the model and side files. No side file has the name of a weight file: the
/// extension distinguishes them.
pub(crate) struct SplitTensors<'a> {
    pub(crate) model: Vec<&'a Tensor>,
    side_files: Vec<(FileName, HostBytes)>,
}

pub(crate) fn split_side_files<'a>(
    snapshot: &'a Snapshot,
    form: &FileForm,
) -> Result<SplitTensors<'a>, FileNameError> {
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
