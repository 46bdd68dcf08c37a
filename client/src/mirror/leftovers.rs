//! What processes that were killed in the middle of a save left behind.

use super::folder;
use crate::whole_file::TEMPORARY;
use std::{
    fs::{self, DirEntry, File, Metadata},
    io,
    path::Path,
    time::Duration,
};

/// How old something must be. Who writes holds a lock as well; the age is for file systems without locks.
const AGE: Duration = Duration::from_secs(3_600);

/// Deletes old temporary files in `folder`. Nothing else has such a name, nobody writes them, and folders go only with
/// what their list names. A courtesy: what fails is left for the next time.
pub(super) fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten().filter(is_temporary) {
        let _ = delete_if_old(&entry);
    }
}

fn is_temporary(entry: &DirEntry) -> bool {
    let name = entry.file_name();
    name.to_str()
        .is_some_and(|name| name.starts_with(TEMPORARY.0) && name.ends_with(TEMPORARY.1))
}

fn delete_if_old(entry: &DirEntry) -> io::Result<()> {
    let (path, metadata) = (entry.path(), entry.metadata()?);
    if !is_old(&metadata) {
        return Ok(());
    }
    match metadata.file_type() {
        kind if kind.is_dir() && folder::is_being_written(&path) => Ok(()),
        kind if kind.is_dir() && folder::foreign_entry(&path)?.is_none() => folder::delete(&path),
        kind if kind.is_file() && File::open(&path)?.try_lock().is_ok() => fs::remove_file(&path),
        kind if kind.is_symlink() => fs::remove_file(&path),
        _ => Ok(()),
    }
}

fn is_old(metadata: &Metadata) -> bool {
    let age = metadata.modified().ok().and_then(|modified| modified.elapsed().ok());
    age.is_some_and(|age| age > AGE)
}
