//! A mirror: a folder that follows topics and holds each version as files.

mod contents;
mod folder;
mod leftovers;
mod versions;

pub(crate) use contents::Body;
pub use contents::FilesError;
pub(crate) use leftovers::sweep;

use crate::{SaveError, Snapshot, save::READABLE, temporary, whole_file::replace_file};
use contents::Contents;
use std::path::{Path, PathBuf};
use tensor_relay_protocol::VersionId;
use versions::Kept;

/// Writes snapshots below one folder, each version as what it was on the other side: a safetensors file, a folder of
/// them with what lies beside, a NumPy array or an archive of arrays. Tensors that were no files become a safetensors
/// file.
///
/// Without `keep`, topic `a/b` is `DIR/a/b.safetensors`, `.npy` or `.npz`, or the folder `DIR/a/b`, and each version
/// replaces the one before in one step. (Where the file system cannot exchange two folders, a folder's name is missing
/// for the moment between two renames. A topic that becomes another kind of files leaves its older files behind.)
///
/// With `keep`, versions stay side by side as `DIR/a/b/VERSION-EPOCH.safetensors` and so on, and the link
/// `DIR/a/b/latest.safetensors` (for folders `DIR/a/b/latest`) leads to the one saved last. Of those that are recognised
/// by their names, all but the newest `keep` are deleted.
///
/// A version is there whole or not at all, after a crash too. No name that a server gave leads out of the folder, not by
/// a link either. A file under a topic's name is replaced, whoever wrote it: give a mirror a folder of its own. Folders
/// are not: each says in its hidden file `.tensor-relay` which of its files a mirror wrote, and where there are others, it
/// is left alone. Nothing else is ever deleted.
#[derive(Debug, Clone)]
pub struct Mirror {
    dir: PathBuf,
    keep: Option<u32>,
}

impl Mirror {
    /// A mirror in `dir`, which is created when needed. `keep` versions of each topic stay, at least one; `None` keeps
    /// one under the topic's own name.
    pub fn new(dir: impl Into<PathBuf>, keep: Option<u32>) -> Self {
        Self { dir: dir.into(), keep: keep.map(|keep| keep.max(1)) }
    }

    /// Writes `snapshot`, makes it durable, and gives back where it is. Before, it deletes what killed processes left
    /// half-written in the same folder: at once what processes of this machine made since it was booted, where the file
    /// system has locks; anything else after an hour. Blocks for as long as the disk takes. A snapshot on a device is refused:
    /// save what [`Snapshot::to_host`] gives.
    ///
    /// # Errors
    /// [`SaveError`]; what was there before is then as it was.
    pub fn save(&self, snapshot: &Snapshot) -> Result<PathBuf, SaveError> {
        snapshot.must_be_on_host()?;
        let (kind, contents) = Contents::of(snapshot)?;
        let topic_path = self.topic_path(&snapshot.id)?;
        let Some(keep) = self.keep else {
            let path = with_extension(&topic_path, kind.extension());
            write(&path, &contents)?;
            return Ok(path);
        };
        let kept = Kept { folder: &topic_path, kind, id: &snapshot.id };
        let path = kept.path();
        write(&path, &contents)?;
        kept.link_latest()?;
        kept.prune(keep);
        Ok(path)
    }

    /// The path of a topic: below the folder, whatever its name.
    fn topic_path(&self, id: &VersionId) -> Result<PathBuf, SaveError> {
        let hidden = temporary::NAME.0.trim_end_matches('.');
        match id.topic.as_str().split('/').any(|segment| segment.starts_with(hidden)) {
            true => Err(SaveError::Topic { topic: id.topic.clone() }),
            false => self.without_links(id.topic.as_str()),
        }
    }

    /// A path below the folder, unless a link on the way leads out of it.
    fn without_links(&self, topic: &str) -> Result<PathBuf, SaveError> {
        let mut path = self.dir.clone();
        let (parents, name) = topic.rsplit_once('/').unwrap_or(("", topic));
        for segment in parents.split('/').filter(|segment| !segment.is_empty()) {
            path.push(segment);
            if path.is_symlink() {
                return Err(SaveError::NotOurs { path });
            }
        }
        Ok(path.join(name))
    }
}

fn write(path: &Path, contents: &Contents) -> Result<(), SaveError> {
    match contents {
        Contents::File(body) => {
            let replaced = replace_file(path, READABLE, |file| body.write(file));
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
