//! Temporary files and folders: their names, and the lock held by their writer.
//!
//! A creator locks its file, and a sweep locks before it deletes. If the sweep wins the race between creation and lock,
//! another file is created.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::LazyLock,
};
use tempfile::Builder;

/// The prefix and suffix of temporary names.
pub(crate) const NAME: (&str, &str) = (".tensor-relay.", ".part");

/// The maximum number of attempts, because other processes may delete the file before it is locked.
const ATTEMPTS_MAX: usize = 16;

/// The prefix of names made on this host since it booted. Without a boot id, the common prefix.
static PREFIX: LazyLock<String> = LazyLock::new(|| {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot: String = boot.chars().take_while(char::is_ascii_hexdigit).collect();
    match boot.is_empty() {
        true => NAME.0.to_owned(),
        false => format!("{}{boot}.", NAME.0),
    }
});

/// A builder of temporary names.
pub(crate) fn builder() -> Builder<'static, 'static> {
    let mut builder = Builder::new();
    builder.prefix(prefix()).suffix(NAME.1);
    builder
}

/// The prefix of temporary names made on this host.
pub(crate) fn prefix() -> &'static str {
    &PREFIX
}

/// Whether this name was made on this host since it booted. Only then is a lock known to be visible: network file
/// systems may keep locks local to each host.
pub(crate) fn was_made_on_this_host(name: &str) -> bool {
    prefix() != NAME.0 && name.starts_with(prefix())
}

/// Repeats `make`, which creates and locks a file, while it returns `None` because the file was deleted in between.
pub(crate) fn claim<T>(make: impl Fn() -> io::Result<Option<T>>) -> io::Result<T> {
    for _ in 0..ATTEMPTS_MAX {
        if let Some(made) = make()? {
            return Ok(made);
        }
    }
    Err(io::Error::other("other processes delete temporary files in this folder as soon as they are created"))
}

/// Locks `file`, just created at `path`, until it is closed. Returns false if another process has locked or deleted it.
/// On a file system without locks, this only checks whether it still exists.
pub(crate) fn lock(path: &Path, file: &File) -> io::Result<bool> {
    if let Err(fs::TryLockError::WouldBlock) = file.try_lock() {
        return Ok(false); // Locked by a process that deletes it.
    }
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        found => found?,
    };
    let created = file.metadata()?;
    Ok((found.dev(), found.ino()) == (created.dev(), created.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A sweep between creation and lock costs another try; endless sweeps cause an error.
    #[test]
    fn a_file_deleted_before_it_is_locked_is_created_again() {
        let dir = tempfile::tempdir().unwrap();
        let (swept, tries) = (Cell::new(0), Cell::new(0));
        let make = || {
            tries.set(tries.get() + 1);
            let file = builder().tempfile_in(dir.path())?;
            if tries.get() <= swept.get() {
                fs::remove_file(file.path())?;
            }
            Ok(lock(file.path(), file.as_file())?.then_some(file))
        };
        swept.set(3);
        let file = claim(make).unwrap();
        assert!(file.path().exists() && tries.get() == 4);
        assert!(!lock(file.path(), &File::open(file.path()).unwrap()).unwrap(), "it is locked");
        swept.set(usize::MAX);
        assert!(claim(make).is_err());
    }
}
