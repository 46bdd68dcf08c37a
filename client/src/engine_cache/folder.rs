//! [`Folder`]: an opened folder, so that nothing is written elsewhere if others swap what is at its path.

use super::UnpackError;
use rustix::{
    fs::{Mode, OFlags, open, syncfs},
    io::Errno,
    process::geteuid,
};
use std::{
    fs::{self, File, ReadDir},
    io,
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

/// An opened folder. Its entries are reached through the descriptor, by way of `/proc`.
#[derive(Debug)]
pub(super) struct Folder(File);

impl Folder {
    /// The folder of an engine, which is made if there is none.
    ///
    /// # Errors
    /// [`UnpackError::Link`] and [`UnpackError::Stranger`] if others decide what is in it; [`UnpackError::Io`].
    pub(super) fn of_engine(path: &Path) -> Result<Self, UnpackError> {
        // Without a slash at the end, with which the system would follow a link.
        let path: PathBuf = path.components().collect();
        let io_error = |source| UnpackError::Io { path: path.clone(), source };
        fs::create_dir_all(&path).map_err(io_error)?;
        let folder = Self::open(&path)
            .map_err(io_error)?
            .ok_or_else(|| UnpackError::Link(path.clone()))?;
        let uid = folder.0.metadata().map_err(io_error)?.uid();
        match [0, geteuid().as_raw()].contains(&uid) {
            true => Ok(folder),
            false => Err(UnpackError::Stranger { folder: path, uid }),
        }
    }

    /// Opens the folder at `path`; `None` for a link, even if it leads to one, and for files.
    pub(super) fn open(path: &Path) -> io::Result<Option<Self>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match open(path, flags, Mode::empty()) {
            Ok(folder) => Ok(Some(Self(folder.into()))),
            Err(Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The path of what is at `below` it, as long as this is open.
    pub(super) fn at(&self, below: impl AsRef<Path>) -> PathBuf {
        self.path().join(below)
    }

    pub(super) fn entries(&self) -> io::Result<ReadDir> {
        fs::read_dir(self.path())
    }

    /// Writes to disk what its file system holds in memory.
    pub(super) fn sync(&self) -> io::Result<()> {
        Ok(syncfs(&self.0)?)
    }

    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}
