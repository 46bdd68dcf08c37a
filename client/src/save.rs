//! Snapshots as safetensors files, whole or not at all.

use crate::Snapshot;
use std::{
    fs,
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use tensor_relay_protocol::{
    VersionId,
    safetensors::{SafetensorsError, plan_file},
};

/// Why a snapshot was not saved. No half-written file is left under the name asked for, nor under any other.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The system refuses: no space, no permission.
    #[error("cannot write {}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The tensors do not fit the format.
    #[error("cannot save {id} as a safetensors file: {source}")]
    Format {
        /// Which version.
        id: VersionId,
        /// What does not fit.
        source: SafetensorsError,
    },
}

impl Snapshot {
    /// Writes the snapshot to `path` as a safetensors file and makes it durable; missing folders are made. A file that
    /// was there is replaced in one step: readers see the old one or the new one, after a crash too. Blocks.
    ///
    /// # Errors
    /// [`SaveError`]; `path` is then as it was.
    pub fn save_safetensors(&self, path: &Path) -> Result<(), SaveError> {
        let layout = plan_file(self.manifest(), self.selection.tensors())
            .map_err(|source| SaveError::Format { id: self.id.clone(), source })?;
        let bodies: Vec<_> = layout.order.iter().filter_map(|index| self.bytes(*index)).collect();
        let parts = std::iter::once(&layout.head[..]).chain(bodies.iter().map(|body| &body[..]));
        replace_file(path, parts).map_err(|source| SaveError::Io { path: path.into(), source })
    }
}

/// Writes `parts` to a temporary file beside `path`, syncs it, renames it into place and syncs the folder. The temporary
/// name is nobody else's, whoever saves here at the same time, and goes when this fails.
fn replace_file<'a>(path: &Path, parts: impl Iterator<Item = &'a [u8]>) -> io::Result<()> {
    let folder = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or_else(|| Path::new("."));
    fs::create_dir_all(folder)?;
    // As readable as any file that this user makes; temporary files are private otherwise.
    let permissions = fs::Permissions::from_mode(0o666);
    let mut file = tempfile::Builder::new()
        .prefix(".tensor-relay.")
        .suffix(".part")
        .permissions(permissions)
        .tempfile_in(folder)?;
    for part in parts {
        file.write_all(part)?;
    }
    file.as_file().sync_all()?;
    file.persist(path).map_err(|failed| failed.error)?;
    fs::File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;
    use std::sync::Arc;
    use tensor_relay_protocol::{Dtype, Limits, Manifest, Selection, Shape, TensorName, TensorSpec};

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
    fn the_file_holds_the_tensors_and_replaces_its_predecessor() {
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
