//! Files as versions: a safetensors file, read by position into staged memory.

use crate::{StageError, Staged, Staging};
use std::{
    fs::{File, Metadata},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
};
use tensor_relay_protocol::safetensors::{
    Header, PREFIX_BYTES, SafetensorsError, header_length, parse_header,
};

/// Why a file cannot be served. The file, or whoever changes it, is to blame.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The system refuses.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A folder, a pipe or a device.
    #[error("{} is no regular file: a model is served from a file that can be read by position", path.display())]
    NotAFile {
        /// What was given.
        path: PathBuf,
    },
    /// Not a safetensors file.
    #[error("{} is not a valid safetensors file: {source}", path.display())]
    Format {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        source: SafetensorsError,
    },
    /// Somebody wrote it at the same time.
    #[error("{} changed while it was read; write new content under another name and rename it into place", path.display())]
    Changed {
        /// Which file.
        path: PathBuf,
    },
    /// Its tensors cannot be staged.
    #[error("cannot stage the tensors of {}: {source}", path.display())]
    Stage {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: Box<StageError<io::Error>>,
    },
}

impl Staged {
    /// Stages the tensors and metadata of a safetensors file. Blocks for as long as reading takes.
    ///
    /// The file is read, not mapped: one that shrinks under a mapping would kill the process, here it is an error.
    ///
    /// # Errors
    /// [`FileError`] when the file cannot be read, is malformed, or changes meanwhile.
    pub fn from_safetensors(path: &Path, staging: &Staging) -> Result<Self, FileError> {
        let io_error = |source| FileError::Io { path: path.into(), source };
        // Looked at before it is opened: opening a pipe would wait for its writer.
        if !std::fs::metadata(path).map_err(io_error)?.is_file() {
            return Err(FileError::NotAFile { path: path.into() });
        }
        let file = File::open(path).map_err(io_error)?;
        let before = file.metadata().map_err(io_error)?;
        let header = read_header(path, &file, before.len())?;
        let (specs, ranges): (Vec<_>, Vec<_>) = header.tensors.into_iter().map(|t| (t.spec, t.range)).unzip();
        let staged = Self::new(staging, specs, header.metadata, |index, out| {
            file.read_exact_at(out, ranges[index].start)
        });
        let staged = staged.map_err(|error| match error {
            StageError::Fill(source) if source.kind() == io::ErrorKind::UnexpectedEof => {
                FileError::Changed { path: path.into() }
            }
            StageError::Fill(source) => FileError::Io { path: path.into(), source },
            other => FileError::Stage { path: path.into(), source: Box::new(other) },
        })?;
        let after = file.metadata().map_err(io_error)?;
        match same_content(&before, &after) {
            true => Ok(staged),
            false => Err(FileError::Changed { path: path.into() }),
        }
    }
}

fn read_header(path: &Path, file: &File, file_bytes: u64) -> Result<Header, FileError> {
    let format = |source| FileError::Format { path: path.into(), source };
    let io_error = |source| FileError::Io { path: path.into(), source };
    let mut prefix = [0; PREFIX_BYTES];
    if file_bytes < PREFIX_BYTES as u64 {
        return Err(format(SafetensorsError::HeaderLength { header_bytes: 0, file_bytes }));
    }
    file.read_exact_at(&mut prefix, 0).map_err(io_error)?;
    let mut json = vec![0; header_length(prefix, file_bytes).map_err(format)?];
    file.read_exact_at(&mut json, PREFIX_BYTES as u64).map_err(io_error)?;
    parse_header(&json, file_bytes).map_err(format)
}

/// As far as the file system tells: the size and the time of the last write, to the nanosecond.
fn same_content(before: &Metadata, after: &Metadata) -> bool {
    let stamp = |m: &Metadata| (m.len(), m.mtime(), m.mtime_nsec());
    stamp(before) == stamp(after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::{Dtype, tensor::TensorView};
    use std::{collections::HashMap, fs};
    use tensor_relay_device::HostMemory;
    use tensor_relay_protocol::Limits;

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

    #[test]
    fn a_model_file_is_staged_with_its_metadata() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        fs::write(&path, model()).unwrap();
        let staged = Staged::from_safetensors(&path, &staging()).unwrap();
        assert_eq!(staged.manifest().tensors().len(), 3);
        assert_eq!(staged.manifest().metadata(), [("format".into(), "pt".into())]);
        assert_eq!(staged.digest(), Staged::from_safetensors(&path, &staging()).unwrap().digest());
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
}
