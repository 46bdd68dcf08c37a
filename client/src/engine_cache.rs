//! Unpacks the caches of inference engines that came with a version, if they fit this machine.

mod merge;

use merge::merge;
use rustix::{
    fs::{Mode, OFlags, open, syncfs},
    process::geteuid,
};
use std::{
    fs::{self, File, FileTimes},
    io::{self, BufReader, Read},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};
use tar::{Archive, Entry, EntryType};
use tensor_relay_protocol::engine_cache::{
    ARCHIVE_FILES_MAX, Difference, EngineCache, EntryError, FACTS_ENTRY, FACTS_MAX_BYTES, Facts, check_entry,
};

/// A cache that was unpacked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unpacked {
    /// The number of files that are new.
    pub new: usize,
    /// The number of files that were there already, whatever their content, and stayed.
    pub kept: usize,
}

/// Why a cache was not unpacked. Nothing of it is visible to the engine then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnpackError {
    /// The version has no cache of this name.
    #[error("the version has none of this name")]
    Absent,
    /// It was filled on a machine that differs from this one.
    #[error("it was filled elsewhere: {}", join(.0))]
    Differs(Vec<Difference>),
    /// The archive breaks a rule. Its publisher is to blame.
    #[error("its archive is not valid: {0}")]
    Invalid(String),
    /// The folder of the engine belongs to another user, who could replace what is unpacked.
    #[error("{} belongs to another user (uid {uid})", folder.display())]
    Stranger {
        /// The folder.
        folder: PathBuf,
        /// Its owner.
        uid: u32,
    },
    /// The system's error.
    #[error("cannot unpack to {}: {source}", folder.display())]
    Io {
        /// The folder of the engine.
        folder: PathBuf,
        /// The error.
        source: io::Error,
    },
}

fn join(differences: &[Difference]) -> String {
    differences.iter().map(Difference::to_string).collect::<Vec<_>>().join("; ")
}

impl From<EntryError> for UnpackError {
    fn from(error: EntryError) -> Self {
        Self::Invalid(error.to_string())
    }
}

/// The file that is locked while a cache is unpacked.
const LOCK_NAME: &str = ".tensor-relay.lock";

/// The folder in which files are written before they are moved to their places. Whoever has the lock may delete it.
const STAGING_NAME: &str = ".tensor-relay.unpacking";

/// Unpacks `cache` from its archive in the folder of a version, at `version`, into the folder in which its engine
/// looks, if the archive's facts hold `here`. What is unpacked is code that the engine runs: call it only where the
/// publisher is trusted with that.
///
/// Files that exist stay as they are. Each other one appears complete, and a new folder with all that is in it, so that
/// an engine which runs meanwhile, or a kill at any moment, finds no part of an entry. Links and special files are
/// never created, and nothing outside the folder. Waits for another process that unpacks into the same folder. Blocks;
/// the archive needs room on disk once more.
///
/// # Errors
/// [`UnpackError`]; then no file was added, unless the system failed while files were moved.
pub fn unpack_engine_cache(
    version: &Path,
    cache: &EngineCache,
    here: &Facts,
) -> Result<Unpacked, UnpackError> {
    let folder = &cache.folder;
    let io_error = |source| UnpackError::Io { folder: folder.clone(), source };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let archive =
        open(version.join(cache.name.archive()), flags, Mode::empty()).map_err(|_| UnpackError::Absent)?;
    let archive = File::from(archive);
    let len_bytes = archive.metadata().map_err(io_error)?.len();
    let mut archive = Archive::new(BufReader::new(archive));
    let mut entries = archive.entries().map_err(invalid)?;
    let first = entries.next().ok_or_else(|| UnpackError::Invalid("it is empty".into()))?;
    let facts = read_facts(first.map_err(invalid)?)?;
    let differences = facts.differences(&here.with_folder(folder));
    if !differences.is_empty() {
        return Err(UnpackError::Differs(differences));
    }
    fs::create_dir_all(folder).map_err(io_error)?;
    let (uid, own) = (fs::metadata(folder).map_err(io_error)?.uid(), geteuid().as_raw());
    if own != 0 && ![0, own].contains(&uid) {
        return Err(UnpackError::Stranger { folder: folder.clone(), uid });
    }
    let _lock = lock(folder).map_err(io_error)?;
    let staging = Staging::new(folder).map_err(io_error)?;
    let mut unpacked = Unpacked::default();
    for entry in entries {
        let mut entry = entry.map_err(invalid)?;
        let path = entry.path_bytes().into_owned();
        let path = check_entry(&path)?;
        if entry.header().entry_type() != EntryType::Regular {
            return Err(UnpackError::Invalid(format!("{path:?} is not a regular file")));
        }
        if unpacked.new + unpacked.kept == ARCHIVE_FILES_MAX || entry.size() > len_bytes {
            return Err(UnpackError::Invalid("it has too many files, or larger ones than itself".into()));
        }
        match fs::symlink_metadata(folder.join(path)) {
            Ok(_) => unpacked.kept += 1,
            Err(_) => {
                staging.write(path, &mut entry).map_err(io_error)?;
                unpacked.new += 1;
            }
        }
    }
    if unpacked.new > 0 {
        staging.sync().map_err(io_error)?;
        let kept = merge(&staging.0, folder).map_err(io_error)?;
        (unpacked.new, unpacked.kept) = (unpacked.new - kept, unpacked.kept + kept);
    }
    Ok(unpacked)
}

fn invalid(error: io::Error) -> UnpackError {
    UnpackError::Invalid(error.to_string())
}

/// Reads the facts, the first entry.
fn read_facts(entry: Entry<'_, impl Read>) -> Result<Facts, UnpackError> {
    if *entry.path_bytes() != *FACTS_ENTRY.as_bytes() {
        return Err(UnpackError::Invalid(format!("its first entry is not {FACTS_ENTRY}")));
    }
    let mut json = vec![];
    entry.take(FACTS_MAX_BYTES).read_to_end(&mut json).map_err(invalid)?;
    Facts::parse(&json).map_err(|error| UnpackError::Invalid(format!("{FACTS_ENTRY}: {error}")))
}

/// Locks `folder` against other processes that unpack, until the file is closed.
fn lock(folder: &Path) -> io::Result<File> {
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(false);
    let file = options
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(folder.join(LOCK_NAME))?;
    file.lock()?;
    Ok(file)
}

/// The folder for files before they are moved. It is deleted with all that is left in it.
struct Staging(PathBuf);

impl Staging {
    /// A new one, in place of one that a killed process left.
    fn new(folder: &Path) -> io::Result<Self> {
        let staging = Self(folder.join(STAGING_NAME));
        match fs::remove_dir_all(&staging.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => fs::create_dir(&staging.0)?,
        }
        Ok(staging)
    }

    /// Writes an entry. A path that was written already is an error.
    fn write(&self, path: &Path, entry: &mut Entry<'_, impl Read>) -> io::Result<()> {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap_or(&self.0))?;
        let is_executable = entry.header().mode()? & 0o111 != 0;
        let mode = if is_executable { 0o777 } else { 0o666 };
        let mut file = File::options().write(true).create_new(true).mode(mode).open(&path)?;
        let (wanted, written) = (entry.size(), io::copy(entry, &mut file)?);
        if written != wanted {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let modified = SystemTime::UNIX_EPOCH + Duration::from_secs(entry.header().mtime()?.min(MTIME_MAX_S));
        file.set_times(FileTimes::new().set_modified(modified))
    }

    fn sync(&self) -> io::Result<()> {
        Ok(syncfs(File::open(&self.0)?)?)
    }
}

/// The latest time of a file that every system can hold.
const MTIME_MAX_S: u64 = u32::MAX as u64;

impl Drop for Staging {
    fn drop(&mut self) {
        // Left for the next one to delete, if this fails.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests;
