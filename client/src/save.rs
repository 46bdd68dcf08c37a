//! Saves snapshots as files, atomically.

use crate::{FilesError, Snapshot, mirror::Body, whole_file::replace_file};
use std::{
    io,
    path::{Path, PathBuf},
};
use tensor_relay_protocol::{Topic, VersionId, safetensors::SafetensorsError};

/// The mode of saved files, before the umask.
pub(crate) const READABLE_MODE: u32 = 0o666;

/// Why a snapshot was not saved. No half-written file is left behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The system reported an error: no space, no permission.
    #[error("cannot write {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The tensors cannot be represented in the format.
    #[error("cannot save {id} as a safetensors file: {source}")]
    Format {
        /// The version.
        id: VersionId,
        /// The mismatch.
        source: Box<SafetensorsError>,
    },
    /// The snapshot cannot be written as the files that it came from. The publisher is to blame, or a partial
    /// selection.
    #[error("cannot save {id} as its original files: {source}")]
    Files {
        /// The version.
        id: VersionId,
        /// The reason.
        source: FilesError,
    },
    /// Its tensors are in the memory of a device.
    #[error(
        "{id} is on {device}, and files are written from host memory: save the result of `Snapshot::to_host`"
    )]
    OnDevice {
        /// The version.
        id: VersionId,
        /// The device of its tensors.
        device: Box<str>,
    },
    /// A file, a folder or a link in the way is not of this topic, and is not replaced.
    #[error(
        "{} was not written by tensor-relay for this topic and is not replaced: move it away, or write to another folder",
        path.display()
    )]
    NotOurs {
        /// The obstacle.
        path: PathBuf,
    },
    /// The topic's name looks like that of a temporary file.
    #[error(
        "topic {topic} is not saved: names that begin with `.tensor-relay` are reserved for temporary files"
    )]
    Topic {
        /// The topic.
        topic: Topic,
    },
}

impl Snapshot {
    /// Writes the snapshot to `path` as a safetensors file and makes it durable; missing folders are created. An
    /// existing file is replaced atomically: readers see the old one or the new one, also after a crash. Blocks.
    ///
    /// Of a snapshot of a folder, only the tensors are written; [`Mirror`](crate::Mirror) also writes the side files. A
    /// snapshot on a device is refused: save the result of [`to_host`](Self::to_host).
    ///
    /// # Errors
    /// [`SaveError`]; `path` is then unchanged, unless the replacement could not be made durable.
    pub fn save_safetensors(&self, path: &Path) -> Result<(), SaveError> {
        self.must_be_on_host()?;
        let body = Body::of_model(self)?;
        replace_file(path, READABLE_MODE, |file| body.write(file))
            .map_err(|source| SaveError::Io { path: path.into(), source })
    }

    pub(crate) fn must_be_on_host(&self) -> Result<(), SaveError> {
        match self.device() {
            Some(device) => Err(SaveError::OnDevice { id: self.id.clone(), device: device.name().into() }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::destination::{Backing, Payload};
    use bytes::Bytes;
    use safetensors::SafeTensors;
    use std::{fs, sync::Arc};
    use tensor_relay_device::HostMemory;
    use tensor_relay_protocol::{Dtype, Limits, Manifest, Selection, Shape, TensorName, TensorSpec};

    /// Goal: bytes that a server lends are written from its memory; the header and small tensors are not. Method: a server's
    /// memory that, unlike in reality, has other bytes than the view, which is a tensor of each size.
    #[test]
    fn lent_bytes_are_written_from_the_servers_memory() {
        let lengths = [100, 200_000];
        let specs = lengths.iter().map(|len| {
            let name = TensorName::new(&format!("t{len}")).unwrap();
            TensorSpec::new(name, Dtype::U8, Shape::new(&[*len]).unwrap())
        });
        let manifest = Manifest::layout(specs.collect(), vec![], 4096, &Limits::default()).unwrap();
        let bytes = manifest.payload_bytes() as usize;
        let selection = Arc::new(Selection::all(Arc::new(manifest)));
        let mut memory = HostMemory::new(u64::MAX).shareable().allocate(bytes).unwrap();
        memory.fill(2);
        let payload =
            Payload::Region(Bytes::from(vec![1; bytes]).into(), Backing::Lent(memory.shared().unwrap()));
        let snapshot = Snapshot { selection, payload, ..Snapshot::empty() };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model");
        snapshot.save_safetensors(&path).unwrap();
        let written = fs::read(&path).unwrap();
        let read = SafeTensors::deserialize(&written).unwrap();
        assert!(read.tensor("t100").unwrap().data() == vec![1; 100]);
        assert!(read.tensor("t200000").unwrap().data() == vec![2; 200_000]);
    }

    fn snapshot(names: &[&str]) -> Snapshot {
        let spec = |name: &&str| {
            TensorSpec::new(TensorName::new(name).unwrap(), Dtype::F32, Shape::new(&[3]).unwrap())
        };
        let specs = names.iter().map(spec).collect();
        let manifest =
            Manifest::layout(specs, vec![("k".into(), "v".into())], 4096, &Limits::default()).unwrap();
        let payload: Vec<u8> = (0..manifest.payload_bytes()).map(|i| i as u8).collect();
        let selection = Arc::new(Selection::all(Arc::new(manifest)));
        Snapshot { selection, payload: payload.into(), ..Snapshot::empty() }
    }

    fn files_in(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn the_file_has_the_tensors_and_replaces_its_predecessor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/m.safetensors");
        for names in [&["old"][..], &["b", "a"][..]] {
            snapshot(names).save_safetensors(&path).unwrap();
        }
        let bytes = fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.len(), 2);
        assert_eq!(file.tensor("b").unwrap().data(), &snapshot(&["b", "a"]).tensor("b").unwrap()[..]);
        assert_eq!(files_in(&dir.path().join("sub")), ["m.safetensors"], "no temporary file stays");
    }

    #[test]
    fn a_failed_save_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let blocked = dir.path().join("m.safetensors");
        fs::create_dir(&blocked).unwrap();
        let error = snapshot(&["a"]).save_safetensors(&blocked).unwrap_err();
        assert!(matches!(error, SaveError::Io { .. }), "{error}");
        let error = snapshot(&["__metadata__"]).save_safetensors(&dir.path().join("x")).unwrap_err();
        assert!(matches!(error, SaveError::Format { .. }), "{error}");
        assert_eq!(files_in(dir.path()), ["m.safetensors"]);
    }
}
