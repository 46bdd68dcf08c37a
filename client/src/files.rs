//! [`FileSet`]: the files that a version is written as, without the bytes of its tensors.

use bytes::Bytes;
use std::collections::BTreeMap;
use tensor_relay_protocol::{
    Manifest, Tensor,
    files::{FileForm, FileKind, FileName, FileNameError, WEIGHTS_DEFAULT, without_reserved},
    safetensors::{IndexError, SafetensorsError, WeightIndex, plan_tensors},
};

/// Why a version cannot be written as files.
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
    /// The version has two weight indexes, which could contradict each other.
    #[error("it has two weight indexes, {first} and {second}")]
    TwoIndexes {
        /// One of them.
        first: FileName,
        /// The other one.
        second: FileName,
    },
    /// Its tensors cannot be represented in the format.
    #[error("it cannot be a safetensors file: {0}")]
    Format(Box<SafetensorsError>),
}

/// The files of a version, or of the selected tensors of one, each name once. A version that was not published from a
/// folder is one file, `model.safetensors`.
///
/// Needs the memory of the files' headers, which are about as large as the manifest, and 40 bytes for each tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSet {
    /// The kind of files.
    pub kind: FileKind,
    /// The files: weights in the order of their names, then the files beside them.
    pub files: Vec<FilePlan>,
}

/// A file, whose content is its parts end to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePlan {
    /// Its name.
    pub name: FileName,
    /// Its parts.
    pub parts: Vec<FilePart>,
}

/// A part of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FilePart {
    /// These bytes.
    Literal(Bytes),
    /// The bytes of the tensor with this position in the argument of [`FileSet::new`].
    Tensor(usize),
}

impl FileSet {
    /// The position of the tensor that holds the weight index, whose content [`new`](Self::new) needs.
    ///
    /// # Errors
    /// [`FilesError`] when there are two, or a file name is invalid.
    pub fn index_of(manifest: &Manifest, tensors: &[&Tensor]) -> Result<Option<usize>, FilesError> {
        let form = FileForm::of(manifest.metadata())?;
        Ok(find_index(&Sorted::new(&form, tensors)?.side_files)?.map(|(position, _)| position))
    }

    /// The files of `tensors` of a version, in the order of its manifest: all of them or those that were selected, and of
    /// these boxes if `are_cut`. `index` returns the bytes of the tensor that holds the weight index, if there is one. An
    /// index that does not name exactly `tensors`, or any if they are cut, is replaced by one that does.
    ///
    /// # Errors
    /// [`FilesError`]: the publisher is to blame, or the selection.
    pub fn new(
        manifest: &Manifest,
        tensors: &[&Tensor],
        are_cut: bool,
        index: impl FnOnce(usize) -> Bytes,
    ) -> Result<Self, FilesError> {
        let form = FileForm::of(manifest.metadata())?;
        let metadata = manifest.metadata();
        if form.kind != FileKind::Directory {
            let all: Vec<usize> = (0..tensors.len()).collect();
            let name = FileName::of_weights(WEIGHTS_DEFAULT)?;
            let files = vec![FilePlan { name, parts: safetensors(metadata, tensors, &all)? }];
            return Ok(Self { kind: form.kind, files });
        }
        let Sorted { model, side_files } = Sorted::new(&form, tensors)?;
        let published = match find_index(&side_files)? {
            Some((position, name)) => {
                let bytes = index(position);
                let parsed = WeightIndex::parse(&bytes);
                let parsed = parsed.map_err(|source| FilesError::Index { name: name.clone(), source })?;
                Some((position, bytes, parsed))
            }
            None => None,
        };
        let mut weights: BTreeMap<&FileName, Vec<usize>> = BTreeMap::new();
        for position in &model {
            let found = published
                .as_ref()
                .and_then(|(_, _, index)| index.file_of(tensors[*position].name.as_str()));
            weights.entry(found.unwrap_or(&form.weights)).or_default().push(*position);
        }
        let index = published.as_ref().map(|(position, bytes, index)| {
            let content = match is_index_of(index, &weights, tensors) {
                true if !are_cut => bytes.clone(),
                _ => index_of(&weights, tensors).into(),
            };
            (*position, content)
        });
        let mut files = vec![];
        for (name, positions) in &weights {
            let parts = safetensors(metadata, tensors, positions)?;
            files.push(FilePlan { name: (*name).clone(), parts });
        }
        files.extend(side_files.into_iter().map(|(position, name)| {
            let replaced = index.as_ref().filter(|(of_index, _)| *of_index == position);
            let part = replaced.map(|(_, content)| FilePart::Literal(content.clone()));
            FilePlan { name, parts: vec![part.unwrap_or(FilePart::Tensor(position))] }
        }));
        Ok(Self { kind: form.kind, files })
    }
}

/// The parts of one safetensors file with the tensors of the model, and without files beside them.
///
/// # Errors
/// Those of [`FileSet::new`].
pub(crate) fn model_file(manifest: &Manifest, tensors: &[&Tensor]) -> Result<Vec<FilePart>, FilesError> {
    let form = FileForm::of(manifest.metadata())?;
    safetensors(manifest.metadata(), tensors, &Sorted::new(&form, tensors)?.model)
}

/// Tensors, divided into those of the model and side files. No side file has the name of a weight file: the extension
/// distinguishes them.
struct Sorted {
    model: Vec<usize>,
    side_files: Vec<(usize, FileName)>,
}

impl Sorted {
    fn new(form: &FileForm, tensors: &[&Tensor]) -> Result<Self, FileNameError> {
        let (mut model, mut side_files) = (vec![], vec![]);
        for (position, tensor) in tensors.iter().enumerate() {
            match form.side_file(tensor)? {
                Some(name) => side_files.push((position, name)),
                None => model.push(position),
            }
        }
        Ok(Self { model, side_files })
    }
}

fn find_index(side_files: &[(usize, FileName)]) -> Result<Option<(usize, &FileName)>, FilesError> {
    let mut indexes = side_files.iter().filter(|(_, name)| name.is_index());
    match (indexes.next(), indexes.next()) {
        (Some((_, first)), Some((_, second))) => {
            Err(FilesError::TwoIndexes { first: first.clone(), second: second.clone() })
        }
        (first, _) => Ok(first.map(|(position, name)| (*position, name))),
    }
}

/// Whether `index` names exactly these tensors, in these files.
fn is_index_of(index: &WeightIndex, weights: &BTreeMap<&FileName, Vec<usize>>, tensors: &[&Tensor]) -> bool {
    let mut positions = weights
        .iter()
        .flat_map(|(file, positions)| positions.iter().map(move |at| (at, *file)));
    let count = weights.values().map(Vec::len).sum::<usize>();
    let is_named = |(at, file): (&usize, &FileName)| index.file_of(tensors[*at].name.as_str()) == Some(file);
    count == index.tensors().count() && positions.all(is_named)
}

fn index_of(weights: &BTreeMap<&FileName, Vec<usize>>, tensors: &[&Tensor]) -> Vec<u8> {
    let placed = weights
        .iter()
        .flat_map(|(file, positions)| positions.iter().map(move |at| (*at, *file)));
    let index = placed.map(|(at, file)| (tensors[at].name.as_str().into(), file.clone()));
    let index: WeightIndex = index.collect();
    let total_bytes = weights.values().flatten().map(|at| tensors[*at].byte_len()).sum();
    index.to_json(total_bytes)
}

/// The parts of a safetensors file of the tensors at `positions`.
fn safetensors(
    metadata: &[(String, String)],
    tensors: &[&Tensor],
    positions: &[usize],
) -> Result<Vec<FilePart>, FilesError> {
    let chosen: Vec<&Tensor> = positions.iter().map(|position| tensors[*position]).collect();
    let layout = plan_tensors(&chosen, without_reserved(metadata));
    let layout = layout.map_err(|source| FilesError::Format(Box::new(source)))?;
    let bodies = layout.order.iter().map(|at| FilePart::Tensor(positions[*at]));
    Ok(std::iter::once(FilePart::Literal(layout.head.into())).chain(bodies).collect())
}
