//! Unpacks the caches of inference engines that came with a version, if they fit this machine.

mod archive;
mod folder;
mod merge;

use archive::Entries;
use folder::Folder;
use merge::merge;
use rustix::{
    fs::{Mode, OFlags, open},
    io::Errno,
};
use std::{
    fs::{self, DirBuilder, File, FileTimes, TryLockError},
    io::{self, BufReader, Read},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime},
};
use tar::{Archive, Entry};
use tensor_relay_protocol::engine_cache::{
    ARCHIVE_FILES_MAX, ARCHIVES_MAX_BYTES, Difference, EngineCache, EntryError, FACTS_ENTRY, FACTS_MAX_BYTES,
    Facts, check_entry,
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
    /// The folder of the engine is a link: whoever may change it decides where files appear.
    #[error("{} is a link: name the folder itself, to the engine as well", .0.display())]
    Link(PathBuf),
    /// The folder of the engine belongs to a user who is neither this one nor root, and could replace what is unpacked.
    #[error("{} belongs to another user (uid {uid})", folder.display())]
    Stranger {
        /// The folder.
        folder: PathBuf,
        /// Its owner.
        uid: u32,
    },
    /// The system's error.
    #[error("{}: {source}", path.display())]
    Io {
        /// The folder of the engine, or the archive.
        path: PathBuf,
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

/// How long another process may take to unpack into the same folder: some GiB on a slow disk.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);

/// The interval at which its lock is tried.
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// The folder in which files are written before they are moved to their places. Whoever has the lock may delete it.
const STAGING_NAME: &str = ".tensor-relay.unpacking";

/// Unpacks `cache` from its archive in the folder of a version, at `version`, into the folder in which its engine
/// looks, if the archive's facts hold `here`. What is unpacked is code that the engine runs: call it only where the
/// publisher is trusted with that.
///
/// Files that exist stay as they are. Each other one appears complete, and a new folder with all that is in it, so that
/// an engine which runs meanwhile, or a kill at any moment, finds no part of an entry. Links and special files are
/// never created, and nothing outside the folder, whatever others rename meanwhile. Waits up to 60 s for another process
/// that unpacks into the same folder. Blocks; the archive needs room on disk once more. Needs `/proc`.
///
/// # Errors
/// [`UnpackError`]; then no file was added, unless the system failed while files were moved.
pub fn unpack_engine_cache(
    version: &Path,
    cache: &EngineCache,
    here: &Facts,
) -> Result<Unpacked, UnpackError> {
    let archive = open_archive(&version.join(cache.name.archive()))?;
    let len_bytes = archive.get_ref().metadata().map_err(invalid)?.len();
    if len_bytes > ARCHIVES_MAX_BYTES {
        return Err(UnpackError::Invalid(format!(
            "it has {len_bytes} bytes, more than {ARCHIVES_MAX_BYTES}"
        )));
    }
    let mut archive = Archive::new(archive);
    let mut entries = Entries::new(&mut archive)?;
    let first = entries.next_file()?.ok_or_else(|| UnpackError::Invalid("it is empty".into()))?;
    let facts = read_facts(first)?;
    let differences = facts.differences(&here.with_folder(&cache.folder));
    if !differences.is_empty() {
        return Err(UnpackError::Differs(differences));
    }
    let folder = Folder::of_engine(&cache.folder)?;
    let io_error = |source| UnpackError::Io { path: cache.folder.clone(), source };
    let _lock = lock(&folder, LOCK_TIMEOUT).map_err(io_error)?;
    let staging = Staging::new(&folder).map_err(io_error)?;
    let mut unpacked = Unpacked::default();
    while let Some((path, mut entry)) = entries.next_file()? {
        let path = check_entry(&path)?;
        if unpacked.new + unpacked.kept == ARCHIVE_FILES_MAX || entry.size() > len_bytes {
            return Err(UnpackError::Invalid("it has too many files, or larger ones than itself".into()));
        }
        match fs::symlink_metadata(folder.at(path)) {
            Ok(_) => unpacked.kept += 1,
            Err(_) => {
                staging.write(path, &mut entry).map_err(io_error)?;
                unpacked.new += 1;
            }
        }
    }
    if unpacked.new > 0 {
        staging.folder.sync().map_err(io_error)?;
        let kept = merge(&staging.folder, &folder).map_err(io_error)?;
        (unpacked.new, unpacked.kept) = (unpacked.new - kept, unpacked.kept + kept);
    }
    Ok(unpacked)
}

fn invalid(error: io::Error) -> UnpackError {
    UnpackError::Invalid(error.to_string())
}

fn open_archive(path: &Path) -> Result<BufReader<File>, UnpackError> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    match open(path, flags, Mode::empty()) {
        Ok(archive) => Ok(BufReader::new(archive.into())),
        Err(Errno::NOENT) => Err(UnpackError::Absent),
        Err(error) => Err(UnpackError::Io { path: path.into(), source: error.into() }),
    }
}

/// Reads the facts, the first entry.
fn read_facts((path, entry): (Vec<u8>, Entry<'_, impl Read>)) -> Result<Facts, UnpackError> {
    if path != FACTS_ENTRY.as_bytes() {
        return Err(UnpackError::Invalid(format!("its first entry is not {FACTS_ENTRY}")));
    }
    let mut json = vec![];
    entry.take(FACTS_MAX_BYTES).read_to_end(&mut json).map_err(invalid)?;
    Facts::parse(&json).map_err(|error| UnpackError::Invalid(format!("{FACTS_ENTRY}: {error}")))
}

/// Locks `folder` against other processes that unpack, until the file is closed. Waits `within` this time.
fn lock(folder: &Folder, within: Duration) -> io::Result<File> {
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(false);
    let file = options
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(folder.at(LOCK_NAME))?;
    let deadline = Instant::now() + within;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) if error.kind() != io::ErrorKind::Interrupted => {
                return Err(error);
            }
            Err(_) if Instant::now() < deadline => thread::sleep(LOCK_INTERVAL),
            Err(_) => {
                let text =
                    format!("another process has unpacked into it for more than {within:?} ({LOCK_NAME})");
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
        }
    }
}

/// The folder for files before they are moved. It is deleted with all that is left in it.
struct Staging<'a> {
    engine: &'a Folder,
    folder: Folder,
}

impl<'a> Staging<'a> {
    /// A new one in the folder of an engine, in place of one that a killed process left.
    fn new(engine: &'a Folder) -> io::Result<Self> {
        let path = engine.at(STAGING_NAME);
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => DirBuilder::new().mode(0o700).create(&path)?,
        }
        let folder = Folder::open(&path)?.ok_or(io::ErrorKind::NotADirectory)?;
        Ok(Self { engine, folder })
    }

    /// Writes an entry. A path that was written already is an error.
    fn write(&self, path: &Path, entry: &mut Entry<'_, impl Read>) -> io::Result<()> {
        let path = self.folder.at(path);
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
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
}

/// The latest time of a file that every system can hold.
const MTIME_MAX_S: u64 = u32::MAX as u64;

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        // Left for the next one to delete, if this fails.
        let _ = fs::remove_dir_all(self.engine.at(STAGING_NAME));
    }
}

#[cfg(test)]
mod tests;
