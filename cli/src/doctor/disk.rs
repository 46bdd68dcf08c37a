//! The check of the state directory.

use super::finding::{Finding, Fix, State};
use crate::{serve, units};
use rustix::fs::statvfs;
use std::{
    io,
    path::{Path, PathBuf},
};

/// The required free space in the state directory: many times the size of keys and ledgers.
const FREE_MIN_BYTES: u64 = 1 << 20;

pub(super) fn check(state_dir: Option<&Path>) -> Finding {
    match serve::state_dir_or_default(state_dir) {
        Ok(folder) => state_folder(&folder),
        Err(error) => Finding::new(NAME, State::Fail, error.to_string(), WANTED, STATE_FIX),
    }
}

const NAME: &str = "state folder";

const WANTED: &str = "a writable folder, because `serve` stores its key there";

const STATE_FIX: Fix = Fix {
    host: "set --state-dir to a folder that this user may write to, on a disk with free space",
    docker: "-v relay-state:/state and --state-dir /state; the root file system may then stay read-only",
    kubernetes: "mount a volume (a persistentVolumeClaim, so that tickets stay valid), and set --state-dir to it",
};

/// Checks that `serve` can store its key; other commands do not write there.
fn state_folder(folder: &Path) -> Finding {
    let path = folder.display();
    match try_write(folder) {
        Ok(free) => {
            let measured = format!("{path} is writable, {} free", units::bytes(free));
            Finding::new(NAME, State::Fail.unless(free >= FREE_MIN_BYTES), measured, WANTED, STATE_FIX)
        }
        Err(error) => {
            Finding::new(NAME, State::Fail, format!("{path} is not writable: {error}"), WANTED, STATE_FIX)
        }
    }
}

/// Creates a temporary file in `folder`, or in its nearest existing parent, and removes the file. Returns the free
/// space there, in bytes.
fn try_write(folder: &Path) -> io::Result<u64> {
    let existing = nearest_existing(folder).ok_or(io::ErrorKind::NotFound)?;
    tempfile::Builder::new().prefix(".tensor-relay-doctor").tempfile_in(&existing)?;
    let stats = statvfs(&existing)?;
    Ok(stats.f_bavail * stats.f_frsize)
}

/// The folder itself, or its nearest parent that exists.
fn nearest_existing(folder: &Path) -> Option<PathBuf> {
    // The last ancestor of a relative path is empty, which stands for the working directory.
    let non_empty =
        |folder: &Path| if folder.as_os_str().is_empty() { ".".into() } else { folder.to_owned() };
    folder.ancestors().map(non_empty).find(|folder| folder.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_folder_is_checked_where_it_would_be_created() {
        let root = tempfile::tempdir().unwrap();
        let good = state_folder(&root.path().join("not/there/yet"));
        assert_eq!(good.state, State::Ok, "{good:?}");
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0, "nothing is left behind");
        assert_eq!(
            state_folder(Path::new("not/there/yet")).state,
            State::Ok,
            "a relative path is below the working directory"
        );
        let file = root.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(state_folder(&file).state, State::Fail);
        assert_eq!(state_folder(Path::new("/proc/tensor-relay")).state, State::Fail);
    }
}
