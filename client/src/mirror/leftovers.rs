//! Leftovers of processes that were killed during a save.

use super::folder;
use crate::temporary;
use std::{
    fs::{self, DirEntry, File, Metadata, TryLockError},
    io,
    path::Path,
    time::Duration,
};

/// The age from which an unlockable leftover is deleted.
const AGE: Duration = Duration::from_secs(3_600);

/// Deletes temporary files in `folder` that are no longer being written. Nothing else has such a name, and folders are
/// deleted by their list. Best effort: failures are left for the next time.
pub(crate) fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_temporary =
            |name: &&str| name.starts_with(temporary::NAME.0) && name.ends_with(temporary::NAME.1);
        if let Some(name) = name.to_str().filter(is_temporary) {
            let _ = delete_if_left(name, &entry);
        }
    }
}

fn delete_if_left(name: &str, entry: &DirEntry) -> io::Result<()> {
    let (path, metadata) = (entry.path(), entry.metadata()?);
    match metadata.file_type() {
        kind if kind.is_dir() => delete_folder_if_left(name, &path, &metadata),
        kind if kind.is_file() => {
            let file = to_lock(&path)?;
            if is_left(name, &file, &metadata) { fs::remove_file(&path) } else { Ok(()) }
        }
        // Links cannot be locked, and take no space.
        kind if kind.is_symlink() && is_old(&metadata) => fs::remove_file(&path),
        _ => Ok(()),
    }
}

/// A folder's list is locked while the folder is written. It has none at its very beginning: who is there then makes
/// another one.
fn delete_folder_if_left(name: &str, path: &Path, metadata: &Metadata) -> io::Result<()> {
    match to_lock(&folder::list_of(path)) {
        Ok(list) if is_left(name, &list, metadata) && folder::foreign_entry(path)?.is_none() => {
            folder::delete(path)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let may_go = temporary::is_of_this_kernel(name) || is_old(metadata);
            if may_go { fs::remove_dir(path) } else { Ok(()) } // Where it is empty.
        }
        list => list.map(drop),
    }
}

/// Some network file systems let nobody lock what is open for reading alone.
fn to_lock(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

/// Whether the writer of what `lock` belongs to is gone: the lock is free on a file system with locks, or it is old. It
/// stays locked, so that no writer starts.
fn is_left(name: &str, lock: &File, metadata: &Metadata) -> bool {
    match lock.try_lock() {
        Ok(()) => temporary::is_of_this_kernel(name) || is_old(metadata),
        Err(TryLockError::WouldBlock) => false,
        Err(TryLockError::Error(_)) => is_old(metadata),
    }
}

fn is_old(metadata: &Metadata) -> bool {
    let age = metadata.modified().ok().and_then(|modified| modified.elapsed().ok());
    age.is_some_and(|age| age > AGE)
}
