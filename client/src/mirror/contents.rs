//! The files of a snapshot, and their contents.

use crate::{
    SaveError, Snapshot,
    files::{FilePart, FileSet, FilesError, model_file},
};
use std::{fs::File, io, ops::Range};
use tensor_relay_device::{HostBytes, SharedRange};
use tensor_relay_protocol::{
    Tensor,
    files::{FileKind, FileName},
};

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
        let tensors: Vec<&Tensor> = snapshot.described().collect();
        let index = |position: usize| snapshot.bytes(tensors[position]).into_stable();
        let files = FileSet::new(snapshot.manifest(), &tensors, snapshot.has_boxes(), index);
        let FileSet { kind, files } = files.map_err(|source| refuse(snapshot, source))?;
        let mut bodies = files
            .into_iter()
            .map(|file| (file.name, Body::of(snapshot, &tensors, file.parts)));
        let contents = match kind {
            FileKind::Directory => Self::Folder(bodies.collect()),
            _ => Self::File(bodies.next().map_or_else(|| Body(vec![]), |(_, body)| body)),
        };
        Ok((kind, contents))
    }
}

impl Body {
    /// A safetensors file of the tensors of a snapshot's model.
    pub(crate) fn of_model(snapshot: &Snapshot) -> Result<Self, SaveError> {
        let tensors: Vec<&Tensor> = snapshot.described().collect();
        let parts = model_file(snapshot.manifest(), &tensors).map_err(|source| refuse(snapshot, source))?;
        Ok(Self::of(snapshot, &tensors, parts))
    }

    fn of(snapshot: &Snapshot, tensors: &[&Tensor], parts: Vec<FilePart>) -> Self {
        let part = |part| match part {
            FilePart::Literal(bytes) => HostBytes::from(bytes).into(),
            FilePart::Tensor(position) => Part {
                bytes: snapshot.bytes(tensors[position]),
                lent: snapshot.lent(tensors[position]).map(|(lent, range)| (lent.clone(), range)),
            },
        };
        Self(parts.into_iter().map(part).collect())
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

fn refuse(snapshot: &Snapshot, source: FilesError) -> SaveError {
    let id = snapshot.id.clone();
    match source {
        FilesError::Format(source) => SaveError::Format { id, source },
        source => SaveError::Files { id, source },
    }
}
