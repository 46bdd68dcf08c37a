//! Deletes temporary files of processes that were killed during a save.

use super::folder;
use crate::temporary;
use std::{
    fs::{self, DirEntry, File, Metadata, TryLockError},
    io,
    path::Path,
    time::Duration,
};

/// The age from which temporary files are deleted that are of other hosts, of an earlier boot, or on file systems
/// without locks.
const STALE_AGE: Duration = Duration::from_secs(3_600);

/// Deletes temporary files and folders in `folder` that are no longer being written. They are recognised by their
/// reserved names, and only the listed files in a temporary folder are deleted. Failures are ignored.
pub(crate) fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_temporary =
            |name: &&str| name.starts_with(temporary::NAME.0) && name.ends_with(temporary::NAME.1);
        if let Some(name) = name.to_str().filter(is_temporary) {
            let _ = delete_if_abandoned(name, &entry);
        }
    }
}

fn delete_if_abandoned(name: &str, entry: &DirEntry) -> io::Result<()> {
    let (path, metadata) = (entry.path(), entry.metadata()?);
    match metadata.file_type() {
        kind if kind.is_dir() => delete_folder_if_abandoned(name, &path, &metadata),
        kind if kind.is_file() => {
            let file = open_to_lock(&path)?;
            if is_abandoned(name, &file, &metadata) { fs::remove_file(&path) } else { Ok(()) }
        }
        // Links cannot be locked, and take no space.
        kind if kind.is_symlink() && is_old(&metadata) => fs::remove_file(&path),
        _ => Ok(()),
    }
}

/// A folder's list is locked while the folder is written. A folder without a list was only just created: if it is
/// deleted, its writer creates another one.
fn delete_folder_if_abandoned(name: &str, path: &Path, metadata: &Metadata) -> io::Result<()> {
    match open_to_lock(&folder::list_of(path)) {
        Ok(list) if is_abandoned(name, &list, metadata) && folder::foreign_entry(path)?.is_none() => {
            folder::delete(path)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let is_abandoned = temporary::was_made_on_this_host(name) || is_old(metadata);
            if is_abandoned { fs::remove_dir(path) } else { Ok(()) } // Only if it is empty.
        }
        list => list.map(drop),
    }
}

/// Opens `path` for locking: some network file systems do not lock files that are open only for reading.
fn open_to_lock(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

/// Whether the writer of the file or folder with this `lock` has ended: no other process holds the lock, and the name
/// was made on this host or `metadata` is old. Without support for locks, only the age counts. A lock that was taken
/// here stays taken while `lock` is open, so that no writer starts.
fn is_abandoned(name: &str, lock: &File, metadata: &Metadata) -> bool {
    match lock.try_lock() {
        Ok(()) => temporary::was_made_on_this_host(name) || is_old(metadata),
        Err(TryLockError::WouldBlock) => false,
        Err(TryLockError::Error(_)) => is_old(metadata),
    }
}

fn is_old(metadata: &Metadata) -> bool {
    let age = metadata.modified().ok().and_then(|modified| modified.elapsed().ok());
    age.is_some_and(|age| age > STALE_AGE)
}
