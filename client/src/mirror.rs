//! A mirror: a folder that follows topics and holds each version as files.

mod contents;
mod folder;
mod leftovers;
mod versions;

pub(crate) use contents::Body;
pub(crate) use leftovers::sweep;

use crate::{SaveError, Snapshot, save::READABLE_MODE, temporary, whole_file::replace_file};
use contents::Contents;
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{Topic, VersionId};
use versions::KeptVersion;

/// Writes snapshots below one folder, each version in its published form: a safetensors file, or a folder of them with
/// side files. Tensors that were not published from files become a safetensors file.
///
/// Without `keep`, topic `a/b` is `DIR/a/b.safetensors` or the folder `DIR/a/b`, and each version replaces the previous
/// one atomically. (If the file system cannot exchange two folders, a folder's name is missing between two renames.) If
/// a topic changes between a file and a folder, the earlier one is deleted if this mirror wrote it; one of an earlier
/// process stays.
///
/// With `keep`, versions stay side by side as `DIR/a/b/VERSION-EPOCH.safetensors` and so on, and the link
/// `DIR/a/b/latest.safetensors` (for folders `DIR/a/b/latest`) points to the last saved version. All but the newest
/// `keep` of the versions recognised by their names are deleted.
///
/// Each version is written atomically, also if the process crashes. No name from a server leads out of the folder, not
/// even through a link. A file under a topic's name is replaced even if no mirror wrote it: give each mirror its own
/// folder. A folder is replaced only if it holds no files but those that its hidden file `.tensor-relay` lists as
/// written by a mirror. Except for temporary files of killed processes ([`save`](Self::save)), nothing else is ever
/// deleted.
#[derive(Debug, Clone)]
pub struct Mirror {
    dir: PathBuf,
    keep: Option<u32>,
    /// Without `keep`: the path of each topic's last save.
    saved: Arc<Lock<HashMap<Topic, PathBuf>>>,
}

impl Mirror {
    /// A mirror in `dir`, which is created when needed. `keep` versions of each topic stay, at least one; `None` keeps
    /// one under the topic's own name.
    pub fn new(dir: impl Into<PathBuf>, keep: Option<u32>) -> Self {
        Self { dir: dir.into(), keep: keep.map(|keep| keep.max(1)), saved: Arc::default() }
    }

    /// Writes `snapshot`, makes it durable, and returns its path. First it deletes incomplete files that killed
    /// processes left in the same folder: those created on this machine since boot immediately, if the file system has
    /// locks; all others after an hour. Blocks until the disk is done. A snapshot on a device is refused:
    /// save the result of [`Snapshot::to_host`].
    ///
    /// # Errors
    /// [`SaveError`]; the files saved before are then unchanged, unless the replacement could not be made durable.
    pub fn save(&self, snapshot: &Snapshot) -> Result<PathBuf, SaveError> {
        snapshot.must_be_on_host()?;
        let (kind, contents) = Contents::of(snapshot)?;
        let topic_path = self.topic_path(&snapshot.id)?;
        let Some(keep) = self.keep else {
            let path = with_extension(&topic_path, kind.extension());
            write(&path, &contents)?;
            if let Some(before) = self.note_saved(&snapshot.id.topic, &path).filter(|before| *before != path)
            {
                folder::delete_earlier(&before);
            }
            return Ok(path);
        };
        let version = KeptVersion { folder: &topic_path, kind, id: &snapshot.id };
        let path = version.path();
        write(&path, &contents)?;
        version.link_latest()?;
        version.prune(keep);
        Ok(path)
    }

    /// Notes where a topic was saved; returns where it was saved before.
    fn note_saved(&self, topic: &Topic, path: &Path) -> Option<PathBuf> {
        let mut saved = self.saved.lock();
        saved.insert(topic.clone(), path.to_owned())
    }

    /// The path of a topic, which is always below the folder: no folder on the way is a link, nor is with `keep` the path
    /// itself, and none is the folder of another topic's files.
    fn topic_path(&self, id: &VersionId) -> Result<PathBuf, SaveError> {
        let hidden = temporary::NAME.0.trim_end_matches('.');
        let segments: Vec<&str> = id.topic.as_str().split('/').collect();
        if segments.iter().any(|segment| segment.starts_with(hidden)) {
            return Err(SaveError::Topic { topic: id.topic.clone() });
        }
        let mut path = self.dir.clone();
        for (following, segment) in (0..segments.len()).rev().zip(segments) {
            path.push(segment);
            let (is_parent, is_folder) = (following > 0, following > 0 || self.keep.is_some());
            if is_folder && path.is_symlink() || is_parent && folder::list_of(&path).exists() {
                return Err(SaveError::NotOurs { path });
            }
        }
        Ok(path)
    }
}

fn write(path: &Path, contents: &Contents) -> Result<(), SaveError> {
    match contents {
        Contents::File(body) => {
            let replaced = replace_file(path, READABLE_MODE, |file| body.write(file));
            replaced.map_err(|source| SaveError::Io { path: path.into(), source })
        }
        Contents::Folder(files) => folder::replace_folder(path, files),
    }
}

/// Appends an extension to `path`, whose name may contain dots.
fn with_extension(path: &Path, extension: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(extension);
    path.into()
}

#[cfg(test)]
mod tests;
