//! Why files cannot be served.

use crate::{SplitError, StageError};
use std::{
    io,
    path::{Path, PathBuf},
};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{
    NameError,
    files::FileName,
    safetensors::{IndexError, SafetensorsError},
};

/// Why files cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}{}", path.display(), remedy(source))]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Not a regular file: a pipe, a device or a folder.
    #[error("{} is not a regular file: serve a model from a file that can be read at any offset", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// A link in a folder leads out of it.
    #[error(
        "{} is a link that leads out of the served folder: put the file itself there, or follow links \
         (--follow-links) if all clients may have their targets", path.display()
    )]
    LeadsOut {
        /// The link.
        path: PathBuf,
    },
    /// A link leads nowhere: the watched path itself, or a file in a folder whose name says that the model needs it.
    #[error(
        "{} is a link that leads nowhere, so the model is incomplete: finish its download, or replace or remove the link",
        path.display()
    )]
    Dangling {
        /// The link.
        path: PathBuf,
    },
    /// The placeholder that Git leaves for a large file.
    #[error("{} is a Git LFS pointer, not the file itself: run `git lfs pull` in the repository", path.display())]
    LfsPointer {
        /// The file.
        path: PathBuf,
    },
    /// A model in an unsupported format.
    #[error(
        "{} is a .{extension} file, and only .safetensors files and folders of them are served: convert it to safetensors \
         first", path.display()
    )]
    OtherFormat {
        /// The file.
        path: PathBuf,
        /// The extension of its name.
        extension: String,
    },
    /// Not a safetensors file.
    #[error("{} is not a valid safetensors file: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: SafetensorsError,
    },
    /// An invalid tensor name.
    #[error("{} has an invalid tensor name: {source}", path.display())]
    Name {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: NameError,
    },
    /// A reserved name, which means something else to receivers.
    #[error(
        "{} uses the name {name:?}, and names that begin with `tensor-relay.` are reserved: rename it", path.display()
    )]
    ReservedName {
        /// The file.
        path: PathBuf,
        /// The tensor or the metadata key.
        name: String,
    },
    /// A rule for one tensor that does not fit.
    #[error("the tensors of {} cannot be split: {source}", path.display())]
    Split {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: Box<SplitError>,
    },
    /// A folder without a model.
    #[error("{} has no .safetensors file directly in it: name the folder that has one, or a file", path.display())]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
    /// A folder with several models.
    #[error(
        "{} has two indexes, {first} and {second}: serve each model from a separate folder", path.display()
    )]
    TwoIndexes {
        /// The folder.
        path: PathBuf,
        /// One of them.
        first: FileName,
        /// Another one.
        second: FileName,
    },
    /// An index that cannot be read.
    #[error("{} is not a usable weight index: {source}", path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: IndexError,
    },
    /// An index without tensors, beside weights.
    #[error(
        "{} places no tensor in any file (its weight_map is empty): correct it, or remove it to serve all files of \
         weights", index.display()
    )]
    EmptyIndex {
        /// The index.
        index: PathBuf,
    },
    /// An index that names a missing file.
    #[error("{} places tensors in {shard}, which is missing: is the model still being written?", index.display())]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The file that it names.
        shard: FileName,
    },
    /// An index that names a missing tensor.
    #[error(
        "{} places tensor {tensor:?} in {shard}, which does not have it: index and weights do not match",
        index.display()
    )]
    MissingTensor {
        /// The index.
        index: PathBuf,
        /// The file that it names.
        shard: FileName,
        /// The tensor.
        tensor: String,
    },
    /// A tensor in two files.
    #[error(
        "tensor {tensor:?} is in {} and in {}: take one of the two files out of the folder",
        first.display(), second.display()
    )]
    Twice {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other one.
        second: PathBuf,
    },
    /// The cache of an engine beside a single file.
    #[error("{} is a single file: the cache of an engine is sent with the folder of a model", path.display())]
    CacheBesideFile {
        /// The file.
        path: PathBuf,
    },
    /// A cache without a file.
    #[error(
        "{}, the cache {name}, is missing or has no file: let the engine fill it once, or publish without it",
        folder.display()
    )]
    CacheEmpty {
        /// The name of the cache.
        name: String,
        /// Its folder.
        folder: PathBuf,
    },
    /// Caches beyond the limits.
    #[error(
        "the files of {} do not fit: caches of engines have at most 4 GiB together, and 262,144 files each: delete \
         what is not used any more", folder.display()
    )]
    CacheTooLarge {
        /// The folder of the cache.
        folder: PathBuf,
    },
    /// A cache whose archive lies in the folder already.
    #[error(
        "{} has {archive}, the archive of a cache that shall be packed anew: remove it, or publish without the cache",
        path.display()
    )]
    CacheTwice {
        /// The folder of the model.
        path: PathBuf,
        /// The archive.
        archive: FileName,
    },
    /// The file changed while it was read.
    #[error(
        "{} changed while it was read; write new content under another name and rename it into place",
        path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The tensors cannot be staged or borrowed.
    #[error("cannot publish the tensors of {}: {source}", path.display())]
    Stage {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: Box<StageError>,
    },
}

/// What to do about a failed system call on a file.
fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied => ": let the server's user read it, and enter its folder",
        _ => "",
    }
}

impl FileError {
    /// The error for a failed read of `path` by offset. A file that became too short has changed.
    pub(super) fn reading(path: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::UnexpectedEof => Self::Changed { path: path.into() },
            _ => Self::Io { path: path.into(), source },
        }
    }

    /// The error for failed staging or borrowing of the tensors of `path`.
    pub(super) fn staging(path: &Path, error: StageError<Self>) -> Self {
        let stage = |source| Self::Stage { path: path.into(), source: Box::new(source) };
        error.into_fill().unwrap_or_else(stage)
    }
}

/// A failed read of a file by offset.
#[derive(Debug)]
pub(super) struct ReadError {
    pub(super) path: PathBuf,
    pub(super) source: io::Error,
}

impl From<ReadError> for FileError {
    fn from(error: ReadError) -> Self {
        Self::reading(&error.path, error.source)
    }
}

impl From<ReadError> for SourceError {
    fn from(ReadError { path, source }: ReadError) -> Self {
        match source.kind() {
            io::ErrorKind::UnexpectedEof => Self::Changed { path },
            _ => Self::Io { path, source },
        }
    }
}
