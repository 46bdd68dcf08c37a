//! Moves what was unpacked into the folder of an engine, without replacing anything.

use super::folder::Folder;
use rustix::{
    fs::{CWD, RenameFlags, renameat_with},
    io::Errno,
};
use std::{fs, io, path::Path};

/// Moves the entries of `from` into `to`: a folder as a whole if `to` has none of its name, else its entries. Returns
/// the number of files that were not moved because something of their name was there.
pub(super) fn merge(from: &Folder, to: &Folder) -> io::Result<usize> {
    let mut kept = 0;
    for entry in from.entries()? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.at(entry.file_name()));
        if !rename_new(&source, &target)? {
            // Not through a link, which may lead elsewhere.
            kept += match (Folder::open(&source)?, Folder::open(&target)?) {
                (Some(source), Some(target)) => merge(&source, &target)?,
                _ => files_in(&source)?,
            };
        }
    }
    Ok(kept)
}

/// Renames `source` if there is nothing at `target`; returns whether it did.
fn rename_new(source: &Path, target: &Path) -> io::Result<bool> {
    match renameat_with(CWD, source, CWD, target, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST | Errno::NOTEMPTY) => Ok(false),
        // Some network file systems cannot. Two processes that unpack have a lock, and what an engine writes meanwhile
        // under the same name is as good.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => match fs::symlink_metadata(target) {
            Ok(_) => Ok(false),
            Err(_) => fs::rename(source, target).map(|()| true),
        },
        Err(error) => Err(error.into()),
    }
}

fn files_in(path: &Path) -> io::Result<usize> {
    if !path.is_dir() {
        return Ok(1);
    }
    let count = |entry: io::Result<fs::DirEntry>| files_in(&entry?.path());
    fs::read_dir(path)?.map(count).sum()
}
