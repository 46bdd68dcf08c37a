//! Checks of disks: the state directory, and shared memory.

use super::finding::{Finding, Fix, State};
use crate::{serve, units};
use rustix::fs::statvfs;
use std::{
    io,
    path::{Path, PathBuf},
};

/// Many times the size of keys and ledgers.
const LEAST: u64 = 1 << 20;

pub(super) fn check(state_dir: Option<&Path>) -> Vec<Finding> {
    let mut findings = vec![match serve::state_dir(state_dir) {
        Ok(folder) => state_folder(&folder),
        Err(error) => {
            Finding::fail("state folder", error.to_string(), "a folder for the server's key", STATE)
        }
    }];
    findings.extend(shared_memory());
    findings
}

const STATE: Fix = Fix {
    host: "--state-dir names a folder that this user may write to, on a disk with room",
    docker: "-v relay-state:/state and --state-dir /state; the root may then stay read-only",
    kubernetes: "a volume (persistentVolumeClaim, so that tickets stay valid) that is mounted, and --state-dir there",
};

/// Whether a server can keep its key: only `serve` writes there.
fn state_folder(folder: &Path) -> Finding {
    const NAME: &str = "state folder";
    let wanted = "a folder that can be written to: `serve` keeps its key there";
    let shown = folder.display();
    match try_folder(folder) {
        Ok(free) => {
            let measured = format!("{shown} can be written to, {} free", units::bytes(free));
            Finding::judge(NAME, (free >= LEAST, State::Fail), measured, wanted, STATE)
        }
        Err(error) => Finding::fail(NAME, format!("{shown} cannot be written to: {error}"), wanted, STATE),
    }
}

/// Writes a file where the folder is, or will be made, and takes it away again. Returns what is free there.
fn try_folder(folder: &Path) -> io::Result<u64> {
    let there = existing(folder).ok_or(io::ErrorKind::NotFound)?;
    tempfile::Builder::new().prefix(".tensor-relay-doctor").tempfile_in(&there)?;
    free(&there)
}

/// The folder itself, or the nearest one above it that is there.
fn existing(folder: &Path) -> Option<PathBuf> {
    // What is relative ends in nothing, which is here.
    let here = |folder: &Path| if folder.as_os_str().is_empty() { ".".into() } else { folder.to_owned() };
    folder.ancestors().map(here).find(|folder| folder.exists())
}

fn free(folder: &Path) -> io::Result<u64> {
    let there = statvfs(folder)?;
    Ok(there.f_bavail * there.f_frsize)
}

/// How much shared memory there is. This program does without; the frameworks beside it do not.
fn shared_memory() -> Option<Finding> {
    let there = statvfs("/dev/shm").ok()?;
    let (size, free) = (there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize);
    let measured = format!("{} free of {}", units::bytes(free), units::bytes(size));
    Some(Finding::ok("/dev/shm", measured, "any: tensor-relay does not use it, data loaders beside it may"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_tried_where_it_would_be_made() {
        let root = tempfile::tempdir().unwrap();
        let good = state_folder(&root.path().join("not/there/yet"));
        assert_eq!(good.state, State::Ok, "{good:?}");
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0, "nothing is left behind");
        assert_eq!(
            state_folder(Path::new("not/there/yet")).state,
            State::Ok,
            "what is relative is below here"
        );
        let file = root.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(state_folder(&file).state, State::Fail);
        assert_eq!(state_folder(Path::new("/proc/tensor-relay")).state, State::Fail);
    }
}
