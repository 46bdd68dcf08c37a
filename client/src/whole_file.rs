//! Atomic replacement of files.

use crate::{mirror::sweep, temporary};
use std::{
    fs::{self, File, Metadata},
    io,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::Path,
};

/// The folder of a file.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or_else(|| Path::new("."))
}

/// Replaces the file at `path` atomically: `write` fills a temporary file beside it, which is synced and renamed into
/// place; then the folder is synced. Missing folders are created. The file has `mode`, reduced by the umask. The
/// temporary name is unique, and is removed on failure. Temporary files of killed processes are deleted first, because
/// they may fill the disk. Blocks.
///
/// # Errors
/// The system's error, or that of [`check_replaceable`]; `path` is then unchanged, unless only the last sync failed.
pub fn replace_file(
    path: &Path,
    mode: u32,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    check_replaceable(path)?; // Fails before gigabytes are written.
    let folder = folder_of(path);
    fs::create_dir_all(folder)?;
    sweep(folder);
    let mut file = temporary::claim(|| {
        let permissions = fs::Permissions::from_mode(mode);
        let file = temporary::builder().permissions(permissions).tempfile_in(folder)?;
        Ok(temporary::lock(file.path(), file.as_file())?.then_some(file))
    })?;
    write(file.as_file_mut())?;
    file.as_file().sync_all()?;
    check_replaceable(path)?;
    file.persist(path).map_err(|failed| failed.error)?;
    File::open(folder)?.sync_all()
}

/// Refuses a path that a rename would destroy: a device, a FIFO, a socket, a folder, or a link to one of these. A link
/// to a regular file, or a dangling link, is itself replaced; its target stays unchanged.
///
/// The check takes no lock: a device that is created between it and the rename is replaced.
///
/// # Errors
/// An error of kind [`io::ErrorKind::InvalidInput`] that names the kind of file; or the system's error.
pub fn check_replaceable(path: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    match special_kind(path, &found)? {
        None => Ok(()),
        Some(kind) => {
            let text = format!("it is {kind}, not a regular file, and is not replaced: name another file");
            Err(io::Error::new(io::ErrorKind::InvalidInput, text))
        }
    }
}

/// The kind of `path`, if it is not a regular file.
fn special_kind(path: &Path, found: &Metadata) -> io::Result<Option<&'static str>> {
    if !found.is_symlink() {
        return Ok(kind_of(found));
    }
    // Such as /dev/stdout, whatever its current target.
    if fs::read_link(path)?.starts_with("/proc") {
        return Ok(Some("a link into /proc"));
    }
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        target => Ok(kind_of(&target?).map(|_| "a link to a folder or special file")),
    }
}

fn kind_of(found: &Metadata) -> Option<&'static str> {
    let kind = found.file_type();
    match () {
        () if kind.is_file() => None,
        () if kind.is_dir() => Some("a folder"),
        () if kind.is_fifo() => Some("a FIFO"),
        () if kind.is_socket() => Some("a socket"),
        () => Some("a device"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::os::unix::{fs::symlink, net::UnixListener};

    fn replace(path: &Path) -> io::Result<()> {
        replace_file(path, 0o600, |file| io::Write::write_all(file, b"new"))
    }

    #[test]
    fn a_file_and_a_link_to_one_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "old").unwrap();
        symlink(&file, &link).unwrap();
        replace(&link).unwrap();
        assert!(!link.is_symlink(), "the link itself is replaced");
        assert_eq!(fs::read(&file).unwrap(), b"old");
        replace(&file).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
        let dangling = dir.path().join("dangling");
        symlink("nothing", &dangling).unwrap();
        replace(&dangling).unwrap();
        assert_eq!(fs::read(&dangling).unwrap(), b"new");
    }

    /// Goal: a folder or special file is not replaced, and the error names its kind. Method: each kind that any user
    /// can create, and links like those in /dev.
    #[test]
    fn a_folder_or_special_file_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        fs::create_dir(at("folder")).unwrap();
        let _listener = UnixListener::bind(at("socket")).unwrap();
        symlink("/proc/self/fd/1", at("stdout")).unwrap();
        symlink("fifo", at("link")).unwrap();
        let before = fs::read_dir(dir.path()).unwrap().count();
        for (name, expected) in [
            ("fifo", "a FIFO"),
            ("folder", "a folder"),
            ("socket", "a socket"),
            ("stdout", "a link into /proc"),
            ("link", "a link to a folder or special file"),
        ] {
            let kind = || fs::symlink_metadata(at(name)).unwrap().file_type();
            let (was, error) = (kind(), replace(&at(name)).unwrap_err());
            assert!(
                error.to_string().starts_with(&format!("it is {expected}, not a regular file")),
                "{error}"
            );
            assert_eq!(kind(), was);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), before, "no temporary file stays");
        let device = check_replaceable(Path::new("/dev/null")).unwrap_err();
        assert!(device.to_string().contains("it is a device"), "{device}");
    }
}
