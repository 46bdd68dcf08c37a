//! Folders written by a mirror: replaced in one step, and deleted only with what the mirror wrote.

use super::contents::Body;
use crate::{SaveError, mirror::sweep, temporary, whole_file::folder_of};
use rustix::{
    fs::{CWD, RenameFlags, renameat_with},
    io::Errno,
};
use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use tensor_relay_protocol::files::FileName;

/// The hidden file in which a folder lists what a mirror wrote into it, one name a line.
const LIST_NAME: &str = ".tensor-relay";

const LIST_HEAD: &str =
    "# Written by tensor-relay, which replaces this folder as long as it holds only these files:\n";

/// The longest list that is read: more than 16,000 names of full length.
const LIST_MAX_BYTES: u64 = 4 << 20;

/// Writes `files` to a temporary folder beside `path`, syncs it and renames it into place. An existing folder must
/// be empty or a mirror's. A mirror's folder is exchanged, atomically if the file system can, and then deleted.
pub(super) fn replace_folder(path: &Path, files: &[(FileName, Body)]) -> Result<(), SaveError> {
    let io_error = |source| SaveError::Io { path: path.into(), source };
    fs::create_dir_all(folder_of(path)).map_err(io_error)?;
    sweep(folder_of(path));
    let is_exchange = must_be_exchanged(path)?;
    let (temporary, _writing) = write_temporary(folder_of(path), files).map_err(io_error)?;
    // No recursive deletion from here on: this name may soon be the predecessor's, whose unlisted files must stay.
    let temporary = temporary.keep();
    let replaced = match is_exchange {
        true => exchange(&temporary, path).map(Some),
        false => fs::rename(&temporary, path).map(|()| None),
    };
    match replaced {
        Ok(old) => drop(old.map(|old| delete_or_warn(&old))),
        Err(source) => {
            delete_or_warn(&temporary);
            return Err(io_error(source));
        }
    }
    File::open(folder_of(path))
        .and_then(|folder| folder.sync_all())
        .map_err(io_error)
}

/// Whether a mirror's folder at `path` must be exchanged. False for an empty folder, because a rename replaces it.
fn must_be_exchanged(path: &Path) -> Result<bool, SaveError> {
    let io_error = |source| SaveError::Io { path: path.into(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io_error(error)),
        Ok(found) if !found.is_dir() => Err(SaveError::NotOurs { path: path.into() }),
        Ok(_) => match foreign_entry(path).map_err(io_error)? {
            Some(foreign) => Err(SaveError::NotOurs { path: foreign }),
            None => Ok(path.join(LIST_NAME).exists()),
        },
    }
}

/// An entry of a folder that is not in its list.
pub(super) fn foreign_entry(folder: &Path) -> io::Result<Option<PathBuf>> {
    let listed = read_list(folder)?;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let is_ours = name == LIST_NAME
            || (entry.file_type()?.is_file() && name.to_str().is_some_and(|name| listed.contains(name)));
        if !is_ours {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}

/// The names in a folder's list; empty without a list. Names that a mirror never writes are ignored.
fn read_list(folder: &Path) -> io::Result<BTreeSet<String>> {
    use io::Read;
    let list = match File::open(folder.join(LIST_NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        list => list?,
    };
    let mut text = vec![];
    list.take(LIST_MAX_BYTES).read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    Ok(text
        .lines()
        .filter(|name| FileName::new(name).is_ok())
        .map(str::to_owned)
        .collect())
}

/// Writes a folder with its list first, so that leftovers of a killed process are recognised. The list stays locked
/// until the returned file is closed.
fn write_temporary(parent: &Path, files: &[(FileName, Body)]) -> io::Result<(tempfile::TempDir, File)> {
    let (temporary, mut list) = temporary::claim(|| {
        let permissions = fs::Permissions::from_mode(0o777);
        let temporary = temporary::builder().permissions(permissions).tempdir_in(parent)?;
        let path = list_of(temporary.path());
        let list = match File::create_new(&path) {
            // Another process deleted it while it was empty.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            list => list?,
        };
        Ok(temporary::lock(&path, &list)?.then_some((temporary, list)))
    })?;
    list.write_all(LIST_HEAD.as_bytes())?;
    for (name, _) in files {
        writeln!(list, "{name}")?;
    }
    list.sync_all()?;
    for (name, body) in files {
        let mut file = File::create_new(temporary.path().join(name))?;
        body.write(&mut file)?;
        file.sync_all()?;
    }
    File::open(temporary.path())?.sync_all()?;
    Ok((temporary, list))
}

/// Exchanges `new` with `path` and returns the old folder's path.
fn exchange(new: &Path, path: &Path) -> io::Result<PathBuf> {
    match renameat_with(CWD, new, CWD, path, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(new.into()),
        // Some network file systems and old kernels cannot exchange.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => exchange_by_renames(new, path),
        Err(error) => Err(error.into()),
    }
}

/// Exchanges with two renames, between which `path` is missing.
fn exchange_by_renames(new: &Path, path: &Path) -> io::Result<PathBuf> {
    let mut aside = OsString::from(new.as_os_str());
    aside.push(".old");
    aside.push(temporary::NAME.1);
    // Locked, so that no sweep deletes it while the exchange may have to be undone.
    let list = File::options().read(true).write(true).open(list_of(path));
    let _locked = list.inspect(|list| drop(list.try_lock()));
    fs::rename(path, &aside)?;
    if let Err(error) = fs::rename(new, path) {
        fs::rename(&aside, path)?;
        return Err(error);
    }
    Ok(aside.into())
}

/// Deletes a mirror's folder under a temporary name. Failures are only logged: the version is saved already, or has
/// failed.
fn delete_or_warn(folder: &Path) {
    if let Err(error) = delete(folder) {
        tracing::warn!(path = %folder.display(), %error, "A temporary folder was not deleted.");
    }
}

/// Deletes the file or folder of an earlier version. Failures are only logged: the later version is saved already.
pub(super) fn delete_earlier(path: &Path) {
    let is_folder = fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    let deleted = match is_folder {
        true => rename_and_delete(path),
        false => ignore_missing(fs::remove_file(path)),
    };
    if let Err(error) = deleted {
        tracing::warn!(path = %path.display(), %error, "An earlier version was not deleted.");
    }
}

/// Renames a mirror's folder first, so that no incomplete one has its name.
fn rename_and_delete(folder: &Path) -> io::Result<()> {
    if let Some(foreign) = foreign_entry(folder)? {
        return Err(io::Error::other(format!("{} was not written by tensor-relay", foreign.display())));
    }
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let aside = folder.with_file_name(format!("{}{name}{}", temporary::prefix(), temporary::NAME.1));
    fs::rename(folder, &aside)?;
    delete(&aside)
}

/// Deletes the files in the list of `folder`, then the list, then the folder if it is empty. Other processes may do the
/// same concurrently.
pub(super) fn delete(folder: &Path) -> io::Result<()> {
    for name in read_list(folder)?.iter().map(String::as_str).chain([LIST_NAME]) {
        ignore_missing(fs::remove_file(folder.join(name)))?;
    }
    ignore_missing(fs::remove_dir(folder))
}

fn ignore_missing(deleted: io::Result<()>) -> io::Result<()> {
    match deleted {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        deleted => deleted,
    }
}

/// The path of a folder's list, which is locked while the folder is written.
pub(super) fn list_of(folder: &Path) -> PathBuf {
    folder.join(LIST_NAME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use tensor_relay_device::HostBytes;

    fn body(text: &'static str) -> Body {
        Body(vec![HostBytes::from(Bytes::copy_from_slice(text.as_bytes())).into()])
    }

    fn files(names: &[&str]) -> Vec<(FileName, Body)> {
        names.iter().map(|name| (FileName::new(name).unwrap(), body("x"))).collect()
    }

    #[test]
    fn a_folder_is_replaced_without_exchange_support() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (dir.path().join("m"), dir.path().join(".tensor-relay.new.part"));
        replace_folder(&old, &files(&["a"])).unwrap();
        replace_folder(&new, &files(&["b"])).unwrap();
        let aside = exchange_by_renames(&new, &old).unwrap();
        assert!(old.join("b").exists() && aside.join("a").exists() && !new.exists());
        delete(&aside).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(exchange_by_renames(&new, &old).is_err(), "there is no new folder");
        assert!(old.join("b").exists(), "the old folder is back");
    }

    /// Anybody can write a list: it must not make the mirror delete files elsewhere.
    #[test]
    fn a_forged_list_deletes_nothing_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let (precious, folder) = (dir.path().join("precious"), dir.path().join("m"));
        fs::write(&precious, "p").unwrap();
        fs::create_dir(&folder).unwrap();
        let list = format!("../precious\n{}\n..\n\n.\nsub\n", precious.display());
        fs::write(folder.join(LIST_NAME), list).unwrap();
        fs::create_dir(folder.join("sub")).unwrap();
        assert_eq!(foreign_entry(&folder).unwrap(), Some(folder.join("sub")));
        assert!(delete(&folder).is_err());
        assert!(precious.exists() && folder.join("sub").exists());
    }
}
