//! [`Ledger`]: the last published version numbers, stored in the state directory. A restarted server continues with
//! them, so that subscribers do not receive a version that they already hold.

use crate::exit::message_of;
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::{self, File, Metadata, TryLockError},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};
use tensor_relay_client::replace_file;
use tensor_relay_device::Lock;
use tensor_relay_server::{Epoch, Topic, Version, VersionDigest, VersionId};

/// The newest version of each topic that was served from watched files.
///
/// A record writes the whole file. Records that are made while one is written are written together, so that a start
/// with many topics, or new files of all of them, cost a few writes.
///
/// Only one process at a time may use a ledger. Two processes would give the same number to different content, and a
/// subscriber that holds one of the two versions would not receive the other.
#[derive(Debug)]
pub(crate) struct Ledger {
    content: Arc<Lock<Content>>,
    writer: Arc<tokio::sync::Mutex<Writer>>,
}

/// Writes the ledger's file.
#[derive(Debug)]
struct Writer {
    /// The file and its lock. `None` where locking is not possible; then each start begins new epochs, so that no
    /// number is used twice.
    storage: Option<Storage>,
    /// The number of records that were written.
    written: u64,
}

/// The ledger's file, and the lock that protects it. The system releases the lock when this process ends.
#[derive(Debug)]
struct Storage {
    path: PathBuf,
    lock_path: PathBuf,
    lock: File,
}

impl Storage {
    /// Whether the locked file is still at its path. If it was deleted or replaced, another process can lock the file
    /// that is there now.
    fn is_locked(&self) -> bool {
        let inode = |metadata: Metadata| (metadata.dev(), metadata.ino());
        let current = fs::metadata(&self.lock_path);
        current.is_ok_and(|current| self.lock.metadata().is_ok_and(|locked| inode(locked) == inode(current)))
    }
}

/// The content of the ledger's file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Content {
    topics: BTreeMap<String, Entry>,
    /// The number of records that were made.
    #[serde(skip)]
    records: u64,
}

/// The newest version of one topic.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Entry {
    epoch: String,
    version: u64,
    digest: String,
}

/// The highest version number that is continued. A higher one is damage, after which numbers would overflow.
const NUMBER_MAX: u64 = 1 << 62;

/// The name of the lock file.
const LOCK_FILE: &str = "topics.lock";

impl Ledger {
    /// Opens the ledger in `state_dir`. A missing file counts as an empty ledger. An unreadable file does too, with a
    /// warning, and topics then begin new epochs.
    ///
    /// # Errors
    /// When another process has locked the ledger.
    pub(crate) fn open(state_dir: &Path) -> anyhow::Result<Self> {
        let lock_path = state_dir.join(LOCK_FILE);
        let lock = match open_locked(&lock_path) {
            Ok(lock) => lock,
            Err(TryLockError::WouldBlock) => bail!(
                "another `tensor-relay serve --watch` uses the state directory {}, and both would give the same \
                 numbers to different versions: stop that server, or choose another directory for this one with \
                 --state-dir",
                state_dir.display()
            ),
            Err(TryLockError::Error(error)) => {
                tracing::warn!(
                    "Cannot lock the state directory {}: {error}. Topics begin new epochs, and subscribers receive \
                     them again after each start. Set --state-dir to a directory on a file system that supports locks.",
                    state_dir.display()
                );
                return Ok(Self::new(None, Content::default()));
            }
        };
        let path = state_dir.join("topics.json");
        let content = read(&path).unwrap_or_else(|error| {
            let (path, error) = (path.display(), message_of(&error));
            tracing::warn!("Cannot read {path}: {error}. Topics begin new epochs.");
            Content::default()
        });
        Ok(Self::new(Some(Storage { path, lock_path, lock }), content))
    }

    fn new(storage: Option<Storage>, content: Content) -> Self {
        let writer = Writer { storage, written: 0 };
        Self { content: Arc::new(Lock::new(content)), writer: Arc::new(tokio::sync::Mutex::new(writer)) }
    }

    /// The epoch and version number for content with `digest`: those of the recorded version if it has the same digest,
    /// else its epoch and the next number. `None` for an unknown topic.
    pub(crate) fn epoch_and_version(&self, topic: &Topic, digest: VersionDigest) -> Option<(Epoch, Version)> {
        let content = self.content.lock();
        let entry = content.topics.get(topic.as_str())?;
        let epoch = Epoch(u64::from_str_radix(&entry.epoch, 16).ok()?);
        let version = Version(entry.version);
        let is_same = entry.digest == digest.to_string();
        Some((epoch, if is_same { version } else { version.next() }))
    }

    /// Records a version before it is published, so that its number is never reused for other content, even if this
    /// process dies before the publish. If the file cannot be written, it is removed, and topics begin new epochs after
    /// a restart.
    ///
    /// # Errors
    /// When the file cannot be removed either, or the lock is lost. The version must not be published then.
    pub(crate) async fn record(&self, id: VersionId, digest: VersionDigest) -> anyhow::Result<()> {
        let entry = Entry { epoch: id.epoch.to_string(), version: id.version.0, digest: digest.to_string() };
        let record = self.content.lock().record(id.topic.as_str(), entry);
        let mut writer = Arc::clone(&self.writer).lock_owned().await;
        if writer.written >= record {
            return Ok(());
        }
        let content = Arc::clone(&self.content);
        tokio::task::spawn_blocking(move || writer.write(&id, &content)).await?
    }
}

impl Content {
    /// Records the newest version of a topic; returns the number of the record.
    fn record(&mut self, topic: &str, entry: Entry) -> u64 {
        self.topics.insert(topic.to_owned(), entry);
        self.records += 1;
        self.records
    }
}

impl Writer {
    /// Writes all records so far, that of `id` among them.
    fn write(&mut self, id: &VersionId, content: &Lock<Content>) -> anyhow::Result<()> {
        let Some(storage) = &self.storage else { return Ok(()) };
        if !storage.is_locked() {
            bail!(
                "cannot record the number of {id}, so it is not published: {} was deleted or replaced, and another \
                 server may number versions there now; start this server again",
                storage.lock_path.display()
            );
        }
        let content = content.lock().clone();
        let written = write(&storage.path, &content);
        if let Err(error) = written {
            let path = storage.path.display();
            match fs::remove_file(&storage.path) {
                Err(removal) if removal.kind() != io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| {
                        format!("cannot record the number of {id} in {path}, so it is not published")
                    });
                }
                _ => {
                    tracing::warn!("Cannot write {path}: {error}. After a restart, topics begin new epochs.")
                }
            }
        }
        self.written = content.records;
        Ok(())
    }
}

/// Opens and locks the file at `path`, which is created if it is missing. The folder itself is not locked, because NFS
/// locks only files that are open for writing.
fn open_locked(path: &Path) -> Result<File, TryLockError> {
    // Private: who can open it can lock it.
    let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(path);
    let file = file.map_err(TryLockError::Error)?;
    file.try_lock()?;
    Ok(file)
}

fn read(path: &Path) -> anyhow::Result<Content> {
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        bail!("it is not a regular file"); // Reading a FIFO would wait for a writer.
    }
    let content: Content = match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).context("it is not a ledger")?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Content::default(),
        Err(error) => return Err(error.into()),
    };
    if content.topics.values().any(|entry| entry.version > NUMBER_MAX) {
        bail!("it has a version number above {NUMBER_MAX}, which no server reaches");
    }
    Ok(content)
}

/// Replaces the file in one step, durably.
fn write(path: &Path, content: &Content) -> io::Result<()> {
    replace_file(path, 0o600, |file| {
        serde_json::to_writer_pretty(&mut *file, content)?;
        writeln!(file)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(version: u64) -> VersionId {
        VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(7), version: Version(version) }
    }

    #[tokio::test]
    async fn numbers_continue_after_a_restart() {
        let state = tempfile::tempdir().unwrap();
        let (topic, one, two) = (version(3).topic, VersionDigest([1; 32]), VersionDigest([2; 32]));
        let ledger = Ledger::open(state.path()).unwrap();
        assert_eq!(ledger.epoch_and_version(&topic, one), None);
        ledger.record(version(3), one).await.unwrap();
        drop(ledger);
        let reopened = Ledger::open(state.path()).unwrap();
        assert_eq!(reopened.epoch_and_version(&topic, one), Some((Epoch(7), Version(3))));
        assert_eq!(reopened.epoch_and_version(&topic, two), Some((Epoch(7), Version(4))));
        drop(reopened);
        let too_high = r#"{"topics": {"t": {"epoch": "7", "version": 18446744073709551615, "digest": ""}}}"#;
        for damaged in ["rubbish", too_high] {
            fs::write(state.path().join("topics.json"), damaged).unwrap();
            assert_eq!(Ledger::open(state.path()).unwrap().epoch_and_version(&topic, one), None);
        }
    }

    #[test]
    fn only_one_ledger_at_a_time_is_open() {
        let state = tempfile::tempdir().unwrap();
        let first = Ledger::open(state.path()).unwrap();
        let refused = Ledger::open(state.path()).unwrap_err().to_string();
        assert!(refused.contains(&state.path().display().to_string()), "{refused}");
        drop(first);
        Ledger::open(state.path()).unwrap();
    }

    #[tokio::test]
    async fn a_ledger_that_lost_its_lock_records_nothing() {
        let state = tempfile::tempdir().unwrap();
        let one = VersionDigest([1; 32]);
        let first = Ledger::open(state.path()).unwrap();
        first.record(version(3), one).await.unwrap();
        fs::remove_file(state.path().join(LOCK_FILE)).unwrap();
        let second = Ledger::open(state.path()).unwrap();
        let refused = first.record(version(4), one).await.unwrap_err().to_string();
        assert!(refused.contains("topics.lock"), "{refused}");
        second.record(version(4), one).await.unwrap();
        fs::remove_dir_all(state.path()).unwrap();
        second.record(version(5), one).await.unwrap_err();
        assert!(!state.path().exists(), "the folder is not created again");
    }

    #[tokio::test]
    async fn without_a_lock_nothing_is_stored() {
        let state = tempfile::tempdir().unwrap();
        fs::create_dir(state.path().join("topics.lock")).unwrap();
        let (topic, one) = (version(3).topic, VersionDigest([1; 32]));
        let ledger = Ledger::open(state.path()).unwrap();
        ledger.record(version(3), one).await.unwrap();
        assert_eq!(Ledger::open(state.path()).unwrap().epoch_and_version(&topic, one), None);
    }

    #[tokio::test]
    async fn recording_works_again_after_a_failure() {
        let state = tempfile::tempdir().unwrap();
        let (path, one) = (state.path().join("topics.json"), VersionDigest([1; 32]));
        let ledger = Ledger::open(state.path()).unwrap();
        fs::create_dir(&path).unwrap();
        ledger.record(version(3), one).await.unwrap_err();
        fs::remove_dir(&path).unwrap();
        ledger.record(version(4), one).await.unwrap();
        drop(ledger);
        let reopened = Ledger::open(state.path()).unwrap();
        let next = reopened.epoch_and_version(&version(4).topic, VersionDigest([2; 32]));
        assert_eq!(next, Some((Epoch(7), Version(5))));
    }

    /// Goal: the cost of recording many topics at once does not grow with the square of their number.
    #[tokio::test]
    async fn records_made_together_are_written_together() {
        let state = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(state.path()).unwrap();
        let ledger = Arc::new(ledger);
        let id = |number| VersionId { topic: Topic::new(&format!("t/{number}")).unwrap(), ..version(1) };
        let writing = ledger.writer.lock().await;
        let mut recording = tokio::task::JoinSet::new();
        for number in 0..100 {
            let (ledger, id) = (Arc::clone(&ledger), id(number));
            recording.spawn(async move { ledger.record(id, VersionDigest([1; 32])).await });
        }
        tokio::task::yield_now().await; // All of them wait for the writer.
        drop(writing);
        recording.join_next().await.unwrap().unwrap().unwrap();
        fs::remove_file(state.path().join(LOCK_FILE)).unwrap(); // A second write would fail.
        assert!(recording.join_all().await.iter().all(Result::is_ok));
        drop(ledger);
        let reopened = Ledger::open(state.path()).unwrap();
        let next = reopened.epoch_and_version(&id(99).topic, VersionDigest([2; 32]));
        assert_eq!(next, Some((Epoch(7), Version(2))));
    }
}
