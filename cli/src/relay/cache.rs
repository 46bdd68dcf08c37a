//! [`Cache`]: the newest versions on disk, for the restart of a relay.

mod file;
mod room;

use anyhow::Context;
use file::{Content, Head};
use room::{Entry, Room};
use std::{
    fs::{self, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Arc, Once},
    time::SystemTime,
};
use tensor_relay_client::{Epoch, Snapshot, Ticket, Topic, Version, replace_file};
use tensor_relay_device::{HostMemory, Lock};
use tensor_relay_server::{ChunkHash, Relay, VersionDigest};

/// The ending of the name of a version's file.
const ENDING: &str = "version";

/// A folder of versions: one folder for each topic, named by a hash, with one file for each version. What is there is
/// compared with its hashes when it is read.
#[derive(Debug)]
pub(super) struct Cache {
    dir: PathBuf,
    bytes_max: u64,
    /// The most versions of a topic.
    versions_max: usize,
    /// Held while files are written or deleted, which may take minutes.
    changing: Lock<()>,
    /// Why the newest version is not kept, if so.
    problem: Lock<Option<String>>,
    /// Logs that versions are deleted before the next ones are on disk.
    no_room: Once,
}

/// A version that is here, as it is named to its origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kept {
    pub(super) epoch: Epoch,
    pub(super) version: Version,
    pub(super) digest: VersionDigest,
    /// Where it came from.
    pub(super) origin: OriginId,
}

/// A server as the cache names it: by the hash of a key or, for a socket, of its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OriginId([u8; 16]);

impl OriginId {
    /// The server that a ticket names. It has an id for each of the ticket's keys, of which any may have been its only one
    /// before.
    pub(super) fn of(ticket: &Ticket) -> Vec<Self> {
        let id = |bytes: &[u8]| Self(ChunkHash::of(bytes).0);
        match ticket.keys() {
            [] => vec![id(ticket.addresses().join(",").as_bytes())],
            keys => keys.iter().map(|key| id(key)).collect(),
        }
    }
}

/// Why a version is not kept, or not used.
#[derive(Debug, thiserror::Error)]
pub(super) enum CacheError {
    #[error("it has {bytes} bytes, and --cache-bytes allows {max}: raise it")]
    TooLarge { bytes: u64, max: u64 },
    #[error("its bytes are not in one piece of host memory")]
    Scattered,
    #[error("{} cannot be written: {source}; free the disk, or lower --cache-bytes", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} cannot be read: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is damaged ({what}): it is deleted, and comes from the origin again", path.display())]
    Damaged { path: PathBuf, what: String },
    #[error("{} does not fit into memory: {what}; raise --mem", path.display())]
    Memory { path: PathBuf, what: String },
}

impl Cache {
    /// Opens the folder, and creates it for its owner alone.
    pub(super) fn open(dir: &Path, bytes_max: u64, versions_max: usize) -> anyhow::Result<Self> {
        let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        created.with_context(|| {
            format!("cannot use the folder {}; choose another --cache-dir", dir.display())
        })?;
        Ok(Self {
            dir: dir.into(),
            bytes_max,
            versions_max,
            changing: Lock::default(),
            problem: Lock::default(),
            no_room: Once::new(),
        })
    }

    /// Keeps a version of an origin; the oldest ones give way once it is on disk, or before if there is no room for both.
    /// Blocks: it writes the version to the disk.
    ///
    /// # Errors
    /// [`CacheError`]. The files that were there before stay, except those that gave way before.
    pub(super) fn store(&self, snapshot: &Snapshot, origin: OriginId) -> Result<(), CacheError> {
        let _changing = self.changing.lock();
        let stored = self.write(snapshot, origin);
        *self.problem.lock() = stored.as_ref().err().map(ToString::to_string);
        stored
    }

    fn write(&self, snapshot: &Snapshot, origin: OriginId) -> Result<(), CacheError> {
        let source = snapshot.source().ok_or(CacheError::Scattered)?;
        let head = Head::of(snapshot, source.bytes(), origin);
        let (folder, bytes) = (self.folder(&snapshot.id().topic), head.file_bytes());
        if bytes > self.bytes_max {
            return Err(CacheError::TooLarge { bytes, max: self.bytes_max });
        }
        let id = snapshot.id();
        let path = folder.join(format!("{}-{:020}.{ENDING}", id.epoch, id.version.0));
        self.write_file(&path, bytes, |file| head.write(file, source.bytes()))
    }

    /// Writes a file of `bytes`, to which others give way.
    fn write_file(
        &self,
        path: &Path,
        bytes: u64,
        write: impl Fn(&mut File) -> io::Result<()>,
    ) -> Result<(), CacheError> {
        let Room { before, mut after, leaves_none } =
            Room::make(self.entries(), (path, bytes), self.versions_max, self.bytes_max);
        if leaves_none {
            self.report_no_room("--cache-bytes allows");
        }
        before.iter().for_each(delete);
        let mut written = replace_file(path, 0o600, &write);
        if !after.is_empty() && written.as_ref().is_err_and(is_full) {
            self.report_no_room("the disk has");
            std::mem::take(&mut after).iter().for_each(delete);
            written = replace_file(path, 0o600, &write);
        }
        written.map_err(|source| CacheError::Write { path: path.into(), source })?;
        after.iter().for_each(delete);
        Ok(())
    }

    /// Says once that a topic may be without a file for a while.
    fn report_no_room(&self, whose: &str) {
        self.no_room.call_once(|| {
            tracing::warn!(
                "{whose} no room for a new version of a topic beside its old one, which is therefore deleted before: a relay \
                 that is killed meanwhile restarts without a version of the topic."
            );
        });
    }

    /// Deletes the versions of a topic. Blocks, as [`store`](Self::store) does.
    pub(super) fn remove(&self, topic: &Topic) {
        let _changing = self.changing.lock();
        let _ = fs::remove_dir_all(self.folder(topic)); // It may never have been there.
    }

    /// The bytes of all files, and why the newest version is not kept, if so.
    pub(super) fn status(&self) -> (u64, Option<String>) {
        let bytes = self.entries().iter().map(|entry| entry.bytes).sum();
        (bytes, self.problem.lock().clone())
    }

    /// Every version, the oldest first.
    fn entries(&self) -> Vec<Entry> {
        let folders = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let mut all: Vec<Entry> = folders.flat_map(|folder| entries(&folder.path())).collect();
        all.sort_by_key(|entry| entry.written);
        all
    }

    fn folder(&self, topic: &Topic) -> PathBuf {
        let hash = ChunkHash::of(topic.as_str().as_bytes());
        self.dir
            .join(hash.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    }
}

/// The versions in a topic's folder, the oldest first.
fn entries(folder: &Path) -> Vec<Entry> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    let entry = |file: fs::DirEntry| {
        let (path, found) = (file.path(), file.metadata().ok()?);
        let is_version = path.extension().is_some_and(|ending| ending == ENDING) && found.is_file();
        is_version.then(|| Entry {
            bytes: found.len(),
            written: found.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            path,
        })
    };
    let mut all: Vec<Entry> = files.filter_map(entry).collect();
    all.sort_by_key(|entry| entry.written);
    all
}

/// Whether a file was not written because the disk, or the quota, is full.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn delete(entry: &Entry) {
    if let Err(error) = fs::remove_file(&entry.path) {
        tracing::warn!(path = %entry.path.display(), %error, "A file of the cache cannot be deleted.");
    }
}

/// Offers the versions in the folder, the oldest first; returns the newest of each topic. What cannot be read is reported
/// by name, and passed over; what is damaged is deleted.
pub(super) async fn restore(cache: &Arc<Cache>, memory: &HostMemory, relay: &Relay) -> Vec<(Topic, Kept)> {
    let mut newest = vec![];
    for entry in cache.entries() {
        let (path, memory) = (entry.path.clone(), memory.clone());
        let read = tokio::task::spawn_blocking(move || Content::read(&path, &memory)).await;
        let content = match read {
            Ok(Ok(content)) => content,
            Ok(Err(error)) => {
                tracing::error!("A cached version is not used: {error}.");
                if matches!(error, CacheError::Damaged { .. }) {
                    delete(&entry);
                }
                continue;
            }
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        };
        let (id, kept, version) = content.into_parts();
        crate::log::message!("{id} is here from an earlier run");
        let topic = id.topic.clone();
        relay.restore(id, version);
        relay.offered(&topic).await;
        newest.retain(|(other, _)| *other != topic);
        newest.push((topic, kept));
    }
    newest
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Ten bytes, after a look at what is in the folder meanwhile.
    fn write(dir: &Path, meanwhile: usize) -> impl Fn(&mut File) -> io::Result<()> {
        move |file| {
            assert_eq!(entries(dir).len(), meanwhile);
            file.write_all(&[7; 10])
        }
    }

    #[test]
    fn an_old_version_gives_way_to_one_that_is_on_disk() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("topic");
        for (bytes_max, meanwhile) in [(20, 1), (19, 0)] {
            let cache = Cache::open(folder.path(), bytes_max, 1).unwrap();
            let (one, two) = (dir.join("1.version"), dir.join("2.version"));
            cache.write_file(&one, 10, write(&dir, 0)).unwrap();
            cache.write_file(&two, 10, write(&dir, meanwhile)).unwrap();
            assert!(!one.exists() && two.exists());
            fs::remove_file(two).unwrap();
        }
    }

    #[test]
    fn an_old_version_stays_if_the_new_one_is_not_written_and_gives_way_if_the_disk_is_full() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path(), 100, 1).unwrap();
        let (one, two) = (folder.path().join("topic/1.version"), folder.path().join("topic/2.version"));
        cache.write_file(&one, 10, |_| Ok(())).unwrap();
        let failed = cache.write_file(&two, 10, |_| Err(io::Error::other("no disk")));
        assert!(failed.is_err() && one.exists() && !two.exists());
        let write = |_: &mut File| -> io::Result<()> {
            match one.exists() {
                true => Err(io::ErrorKind::StorageFull.into()),
                false => Ok(()),
            }
        };
        cache.write_file(&two, 10, write).unwrap();
        assert!(!one.exists() && two.exists());
    }
}
