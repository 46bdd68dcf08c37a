//! The ledger: the published version numbers, stored beside the key, so that a restarted server continues them, and
//! subscribers that hold a version need not receive it again.

use crate::exit::message_of;
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::{self, File, Metadata, TryLockError},
    io::{self, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};
use tensor_relay_client::replace_file;
use tensor_relay_server::{Epoch, Topic, Version, VersionDigest, VersionId};

/// The newest version of each topic that was served from watched files.
///
/// One process at a time gives numbers from it: two would give one number to different content, and a subscriber that
/// holds the one would take the other for the same.
#[derive(Debug)]
pub(crate) struct Ledger {
    /// Where it is kept, with the lock on that place, which the system takes back however this process ends. None where
    /// nothing can be locked: epochs are then new after each start, so that no number means two things.
    kept: Option<Kept>,
    known: Known,
}

#[derive(Debug)]
struct Kept {
    path: PathBuf,
    lock_path: PathBuf,
    lock: File,
}

impl Kept {
    /// Whether the file that is locked is still the one that others would lock: it may have been deleted, with its folder
    /// perhaps.
    fn is_locked(&self) -> bool {
        let inode = |metadata: Metadata| (metadata.dev(), metadata.ino());
        let there = fs::metadata(&self.lock_path);
        there.is_ok_and(|there| self.lock.metadata().is_ok_and(|ours| inode(ours) == inode(there)))
    }
}

/// The content of the file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Known {
    topics: BTreeMap<String, Entry>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Entry {
    epoch: String,
    version: u64,
    digest: String,
}

/// The name of the file that is locked.
const LOCK: &str = "topics.lock";

impl Ledger {
    /// Takes what an earlier server left in `state_dir`. Nothing there is nothing published; what cannot be read is the
    /// same, and said: the topics then begin anew.
    ///
    /// # Errors
    /// When another process has it.
    pub(crate) fn open(state_dir: &Path) -> anyhow::Result<Self> {
        let lock_path = state_dir.join(LOCK);
        let lock = match lock(&lock_path) {
            Ok(lock) => lock,
            Err(TryLockError::WouldBlock) => bail!(
                "another `tensor-relay serve --watch` uses the state directory {}, and both would give the same numbers to \
                 different versions: end that one, or give this one a directory of its own with --state-dir",
                state_dir.display()
            ),
            Err(TryLockError::Error(error)) => {
                tracing::warn!(
                    "Cannot lock the state directory {}: {error}. Topics begin new epochs, and subscribers receive them \
                     again after each start; --state-dir names a directory on a file system that can lock.",
                    state_dir.display()
                );
                return Ok(Self { kept: None, known: Known::default() });
            }
        };
        let path = state_dir.join("topics.json");
        let known = read(&path).unwrap_or_else(|error| {
            let (path, error) = (path.display(), message_of(&error));
            tracing::warn!("Cannot read {path}: {error}. Topics begin new epochs.");
            Known::default()
        });
        Ok(Self { kept: Some(Kept { path, lock_path, lock }), known })
    }

    /// How content that hashes to `digest` is to be published: the version that it was, or the next one.
    pub(crate) fn place(&self, topic: &Topic, digest: VersionDigest) -> Option<(Epoch, Version)> {
        let entry = self.known.topics.get(topic.as_str())?;
        let epoch = Epoch(u64::from_str_radix(&entry.epoch, 16).ok()?);
        let version = Version(entry.version);
        let same = entry.digest == digest.to_string();
        Some((epoch, if same { version } else { version.next() }))
    }

    /// Notes what is about to be published: before anybody can receive it, so that its number means nothing else after
    /// a restart, whenever this process dies. Where nothing can be written, what was written before goes.
    ///
    /// # Errors
    /// When that is not possible either, or the lock is lost: then it must not be published.
    pub(crate) fn note(&mut self, id: &VersionId, digest: VersionDigest) -> anyhow::Result<()> {
        if let Some(kept) = self.kept.as_ref().filter(|kept| !kept.is_locked()) {
            bail!(
                "cannot note the number of {id}, so it is not published: somebody deleted or replaced {}, and another server may \
                 number versions there now; start this server again",
                kept.lock_path.display()
            );
        }
        let entry = Entry { epoch: id.epoch.to_string(), version: id.version.0, digest: digest.to_string() };
        self.known.topics.insert(id.topic.as_str().to_owned(), entry);
        let Some(Kept { path, .. }) = &self.kept else { return Ok(()) };
        let Err(error) = write(path, &self.known) else { return Ok(()) };
        match fs::remove_file(path) {
            Err(stays) if stays.kind() != io::ErrorKind::NotFound => Err(error).with_context(|| {
                format!("cannot note the number of {id} in {}, so it is not published", path.display())
            }),
            _ => {
                let path = path.display();
                tracing::warn!("Cannot write {path}: {error}. After a restart, topics begin new epochs.");
                Ok(())
            }
        }
    }
}

/// Locks a file, which is made if it is not there. A file and not the folder: NFS locks what can be written.
fn lock(path: &Path) -> Result<File, TryLockError> {
    let file = File::options().create(true).truncate(false).write(true).open(path);
    let file = file.map_err(TryLockError::Error)?;
    file.try_lock()?;
    Ok(file)
}

fn read(path: &Path) -> anyhow::Result<Known> {
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        bail!("it is no regular file"); // Reading a FIFO would wait for a writer.
    }
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).context("it is no list of topics"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Known::default()),
        Err(error) => Err(error.into()),
    }
}

/// Replaces the file in one step that outlives a loss of power.
fn write(path: &Path, known: &Known) -> io::Result<()> {
    replace_file(path, 0o600, |file| {
        serde_json::to_writer_pretty(&mut *file, known)?;
        writeln!(file)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(number: u64) -> VersionId {
        VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(7), version: Version(number) }
    }

    #[test]
    fn numbers_go_on_after_a_restart() {
        let state = tempfile::tempdir().unwrap();
        let (topic, one, two) = (version(3).topic, VersionDigest([1; 32]), VersionDigest([2; 32]));
        let mut ledger = Ledger::open(state.path()).unwrap();
        assert_eq!(ledger.place(&topic, one), None);
        ledger.note(&version(3), one).unwrap();
        drop(ledger);
        let again = Ledger::open(state.path()).unwrap();
        assert_eq!(again.place(&topic, one), Some((Epoch(7), Version(3))));
        assert_eq!(again.place(&topic, two), Some((Epoch(7), Version(4))));
        drop(again);
        fs::write(state.path().join("topics.json"), "rubbish").unwrap();
        assert_eq!(Ledger::open(state.path()).unwrap().place(&topic, one), None);
    }

    #[test]
    fn one_process_at_a_time_gives_numbers() {
        let state = tempfile::tempdir().unwrap();
        let first = Ledger::open(state.path()).unwrap();
        let refused = Ledger::open(state.path()).unwrap_err().to_string();
        assert!(refused.contains(&state.path().display().to_string()), "{refused}");
        drop(first);
        Ledger::open(state.path()).unwrap();
    }

    #[test]
    fn who_lost_the_lock_gives_no_numbers() {
        let state = tempfile::tempdir().unwrap();
        let one = VersionDigest([1; 32]);
        let mut first = Ledger::open(state.path()).unwrap();
        first.note(&version(3), one).unwrap();
        fs::remove_file(state.path().join(LOCK)).unwrap();
        let mut second = Ledger::open(state.path()).unwrap();
        let refused = first.note(&version(4), one).unwrap_err().to_string();
        assert!(refused.contains("topics.lock"), "{refused}");
        second.note(&version(4), one).unwrap();
        fs::remove_dir_all(state.path()).unwrap();
        second.note(&version(5), one).unwrap_err();
        assert!(!state.path().exists(), "nothing is made anew by halves");
    }

    #[test]
    fn without_a_lock_nothing_is_kept() {
        let state = tempfile::tempdir().unwrap();
        fs::create_dir(state.path().join("topics.lock")).unwrap();
        let (topic, one) = (version(3).topic, VersionDigest([1; 32]));
        let mut ledger = Ledger::open(state.path()).unwrap();
        ledger.note(&version(3), one).unwrap();
        assert_eq!(Ledger::open(state.path()).unwrap().place(&topic, one), None);
    }

    #[test]
    fn a_number_that_cannot_be_noted_is_not_remembered_wrongly() {
        let state = tempfile::tempdir().unwrap();
        let (path, one) = (state.path().join("topics.json"), VersionDigest([1; 32]));
        let mut ledger = Ledger::open(state.path()).unwrap();
        fs::create_dir(&path).unwrap();
        ledger.note(&version(3), one).unwrap_err();
        fs::remove_dir(&path).unwrap();
        ledger.note(&version(4), one).unwrap();
    }
}
