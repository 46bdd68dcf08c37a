//! [`ServedFile`]: an open file, with a stamp that detects changes.

use super::{FileError, error::ReadError};
use std::{
    fs::{self, File, Metadata},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    thread,
    time::SystemTime,
};

/// The minimum size of a read by several threads. For smaller reads, starting threads costs more than it saves.
const PARALLEL_READ_MIN_BYTES: usize = 32 << 20;

/// The number of threads of such a read. Four saturate the memory bus of a small host, and queue enough for a fast
/// disk.
const READERS_MAX: usize = 4;

/// How a Git LFS pointer begins (<https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md>), and its maximum size.
const LFS_POINTER: (&[u8], u64) = (b"version https://git-lfs.github.com/spec/", 1024);

/// An open file, which stays readable after its name is replaced.
#[derive(Debug)]
pub(super) struct ServedFile {
    pub(super) path: PathBuf,
    file: File,
    stamp: Stamp,
}

/// The metadata by which changes of a file are detected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stamp {
    len: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    inode: (u64, u64),
    /// The time of creation, if the file system reports it: inode numbers are soon reused.
    created: Option<SystemTime>,
}

impl Stamp {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self {
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            inode: (metadata.dev(), metadata.ino()),
            created: metadata.created().ok(),
        }
    }

    /// Whether it belongs to another file than `other`, rather than to the same file modified.
    pub(super) fn is_other_file(&self, other: &Self) -> bool {
        (self.inode, self.created) != (other.inode, other.created)
    }

    /// Whether an open file has the same content, judged by its size and modification time. Ignores the ctime, which
    /// changes when the file loses its name.
    fn has_same_content(&self, other: &Self) -> bool {
        (self.len, self.modified) == (other.len, other.modified)
    }
}

impl ServedFile {
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        let io_error = |source| FileError::Io { path: path.into(), source };
        // Checked before opening: opening a pipe would wait for its writer.
        if !fs::metadata(path).map_err(io_error)?.is_file() {
            return Err(FileError::NotAFile { path: path.into() });
        }
        Self::new(path.into(), File::open(path).map_err(io_error)?)
    }

    /// Wraps an open file, if it is a regular one.
    pub(super) fn new(path: PathBuf, file: File) -> Result<Self, FileError> {
        let served = match file.metadata() {
            Ok(metadata) if metadata.is_file() => Self { path, file, stamp: Stamp::of(&metadata) },
            Ok(_) => return Err(FileError::NotAFile { path }),
            Err(source) => return Err(FileError::Io { path, source }),
        };
        match served.is_lfs_pointer()? {
            true => Err(FileError::LfsPointer { path: served.path }),
            false => Ok(served),
        }
    }

    /// Whether it is a placeholder, which must not be served in place of the file.
    fn is_lfs_pointer(&self) -> Result<bool, FileError> {
        let (head, max_bytes) = LFS_POINTER;
        Ok(self.len_bytes() <= max_bytes && self.read_prefix(head.len() as u64)? == head)
    }

    /// Its stamp when it was opened.
    pub(super) fn stamp(&self) -> &Stamp {
        &self.stamp
    }

    /// What the file system says of it now.
    pub(super) fn metadata(&self) -> Result<Metadata, FileError> {
        self.file
            .metadata()
            .map_err(|source| FileError::Io { path: self.path.clone(), source })
    }

    /// Its size when it was opened.
    pub(super) fn len_bytes(&self) -> u64 {
        self.stamp.len
    }

    /// Fills `out` from offset `start`; a large read uses several threads.
    pub(super) fn read(&self, out: &mut [u8], start: u64) -> Result<(), ReadError> {
        let read = if out.len() < PARALLEL_READ_MIN_BYTES {
            self.file.read_exact_at(out, start)
        } else {
            self.read_parallel(out, start)
        };
        read.map_err(|source| ReadError { path: self.path.clone(), source })
    }

    fn read_parallel(&self, out: &mut [u8], start: u64) -> io::Result<()> {
        let part_bytes = out.len().div_ceil(READERS_MAX);
        let starts = (start..).step_by(part_bytes);
        thread::scope(|scope| {
            let parts = out.chunks_mut(part_bytes).zip(starts);
            let readers: Vec<_> = parts
                .map(|(part, start)| scope.spawn(move || self.file.read_exact_at(part, start)))
                .collect();
            let join = |reader: thread::ScopedJoinHandle<'_, _>| {
                reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            readers.into_iter().try_for_each(join)
        })
    }

    /// Reads the first `len` bytes, or all bytes of a shorter file.
    pub(super) fn read_prefix(&self, len: u64) -> Result<Vec<u8>, FileError> {
        let mut head = vec![0; len.min(self.len_bytes()) as usize];
        self.read(&mut head, 0)?;
        Ok(head)
    }

    /// Whether it is unchanged since it was opened, according to the file system.
    pub(super) fn is_unchanged(&self) -> io::Result<bool> {
        Ok(Stamp::of(&self.file.metadata()?).has_same_content(&self.stamp))
    }

    /// Fails if it was changed.
    pub(super) fn check_unchanged(&self) -> Result<(), FileError> {
        match self.is_unchanged() {
            Ok(true) => Ok(()),
            Ok(false) => Err(FileError::Changed { path: self.path.clone() }),
            Err(source) => Err(FileError::Io { path: self.path.clone(), source }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_by_several_threads_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("large");
        let bytes: Vec<u8> = (0..PARALLEL_READ_MIN_BYTES + 1001).map(|i| (i / 3) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        let served = ServedFile::open(&path).unwrap();
        let mut out = vec![0; bytes.len() - 500];
        served.read(&mut out, 500).unwrap();
        assert!(out == bytes[500..]);
        let beyond = served.read(&mut out, 501).unwrap_err();
        assert!(matches!(beyond.into(), FileError::Changed { .. }));
    }

    #[test]
    fn a_file_that_lost_its_name_is_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, b"old").unwrap();
        let served = ServedFile::open(&path).unwrap();
        fs::write(dir.path().join("new"), b"newer").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        assert!(served.is_unchanged().unwrap());
        assert_eq!(served.read_prefix(9).unwrap(), b"old");
        let served = ServedFile::open(&path).unwrap();
        fs::write(&path, b"newer still").unwrap();
        assert!(matches!(served.check_unchanged(), Err(FileError::Changed { .. })));
    }
}
