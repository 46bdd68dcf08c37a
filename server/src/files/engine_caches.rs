//! Caches of inference engines, packed as archives beside a model.

use super::{FileError, served::ServedFile};
use rustix::{
    fs::{Mode, OFlags, open},
    io::Errno,
};
use std::{
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};
use tar::{Builder, EntryType, Header};
use tensor_relay_protocol::engine_cache::{
    ARCHIVE_FILES_MAX, ARCHIVES_MAX_BYTES, EngineCache, FACTS_ENTRY, Facts, WORKING_PREFIX, check_entry,
};

/// A cache that was packed. Report it to the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedCache {
    /// The cache.
    pub cache: EngineCache,
    /// The number of files in the archive.
    pub files: usize,
    /// The size of the archive.
    pub bytes: u64,
    /// The entries of the folder that are not in the archive: links, special files, and names that receivers refuse.
    pub left_out: Vec<PathBuf>,
}

/// Packs the files below the folder of `cache`, sorted by path, after `facts`. The same files give the same bytes.
///
/// Files that are gone when they are opened are left out: engines write under temporary names.
///
/// # Errors
/// [`FileError`] when the folder has no file, has too many or too large ones, or one changes while it is read.
pub(super) fn pack(
    cache: &EngineCache,
    facts: &Facts,
    room_bytes: u64,
) -> Result<(PackedCache, Vec<u8>), FileError> {
    let mut archive = Builder::new(vec![]);
    let facts = facts.with_folder(&cache.folder).to_json();
    let io_error = |source| FileError::Io { path: cache.folder.clone(), source };
    append(&mut archive, Path::new(FACTS_ENTRY), &facts, (READABLE, 0)).map_err(io_error)?;
    let mut packed = PackedCache { cache: cache.clone(), files: 0, bytes: 0, left_out: vec![] };
    let mut found = vec![];
    walk(&cache.folder, &mut found, &mut packed.left_out)?;
    found.sort();
    for path in found {
        let below = path.strip_prefix(&cache.folder).unwrap_or(&path);
        let name = below.as_os_str().as_encoded_bytes();
        if name.starts_with(WORKING_PREFIX.as_bytes()) {
            continue; // A receiver's lock, or what a killed one left.
        }
        if check_entry(name).is_err() {
            packed.left_out.push(path);
            continue;
        }
        let Some(file) = open_file(&path)? else { continue };
        if packed.files == ARCHIVE_FILES_MAX || archive.get_ref().len() as u64 + file.len_bytes() > room_bytes
        {
            return Err(FileError::CacheTooLarge { folder: cache.folder.clone() });
        }
        let mut bytes = vec![0; file.len_bytes() as usize];
        file.read(&mut bytes, 0)?;
        file.check_unchanged()?;
        append(&mut archive, below, &bytes, mode_and_time(&file.metadata()?)).map_err(io_error)?;
        packed.files += 1;
    }
    if packed.files == 0 {
        return Err(FileError::CacheEmpty { name: cache.name.to_string(), folder: cache.folder.clone() });
    }
    let archive = archive.into_inner().map_err(io_error)?;
    packed.bytes = archive.len() as u64;
    if packed.bytes > room_bytes {
        return Err(FileError::CacheTooLarge { folder: cache.folder.clone() });
    }
    Ok((packed, archive))
}

/// The room for the archives of a version that has `used_bytes` of them.
pub(super) fn room_bytes(used_bytes: u64) -> u64 {
    ARCHIVES_MAX_BYTES.saturating_sub(used_bytes)
}

/// The modes of entries: who may execute a file is all that is kept.
const READABLE: u32 = 0o644;
const EXECUTABLE: u32 = 0o755;

fn mode_and_time(metadata: &Metadata) -> (u32, u64) {
    let mode = if metadata.mode() & 0o111 == 0 { READABLE } else { EXECUTABLE };
    (mode, u64::try_from(metadata.mtime()).unwrap_or(0))
}

fn append(
    archive: &mut Builder<Vec<u8>>,
    path: &Path,
    bytes: &[u8],
    (mode, modified_s): (u32, u64),
) -> io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_size(bytes.len() as u64);
    header.set_mode(mode);
    header.set_mtime(modified_s);
    archive.append_data(&mut header, path, bytes)
}

/// Collects the files below `folder`, without following links. What is gone when it is looked at is left out.
fn walk(folder: &Path, found: &mut Vec<PathBuf>, left_out: &mut Vec<PathBuf>) -> Result<(), FileError> {
    let io_error = |source| FileError::Io { path: folder.into(), source };
    let entries = match fs::read_dir(folder) {
        Err(error) if is_gone(&error) => return Ok(()),
        entries => entries.map_err(io_error)?,
    };
    for entry in entries {
        let entry = entry.map_err(io_error)?;
        let path = entry.path();
        // Some file systems tell the type only when the entry itself is asked.
        match entry.file_type() {
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(io_error(error)),
            Ok(kind) if kind.is_dir() => walk(&path, found, left_out)?,
            Ok(kind) if kind.is_file() => found.push(path),
            Ok(_) => left_out.push(path),
        }
    }
    Ok(())
}

/// Whether an entry, or a folder above it, was deleted or replaced by a file.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Opens a file of a cache; `None` if it is gone, or was replaced by a link.
fn open_file(path: &Path) -> Result<Option<ServedFile>, FileError> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match open(path, flags, Mode::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(error) => Err(FileError::Io { path: path.into(), source: error.into() }),
        Ok(file) => ServedFile::new(path.into(), file.into()).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::Read,
        os::unix::fs::{PermissionsExt, symlink},
    };
    use tar::Archive;

    fn cache(folder: &Path) -> EngineCache {
        EngineCache { name: "vllm".parse().unwrap(), folder: folder.into() }
    }

    fn write(path: &Path, bytes: &[u8], mode: u32) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Goal: the archive has the facts first, then the files and who may execute them, and nothing else. Method: a
    /// folder with links, a pipe, an unreadable name, leftovers of a receiver, and a path that needs a long name in a
    /// tar file.
    #[test]
    fn a_cache_is_packed_with_its_facts_and_without_links() {
        let dir = tempfile::tempdir().unwrap();
        let long = format!("{}/{}/k.so", "a".repeat(200), "b".repeat(200));
        write(&dir.path().join("z/kernel.so"), b"elf", 0o700);
        write(&dir.path().join("a.json"), b"{}", 0o600);
        write(&dir.path().join(&long), b"", 0o644);
        write(&dir.path().join("bad\nname"), b"x", 0o644);
        write(&dir.path().join(".tensor-relay.lock"), b"", 0o644);
        symlink("a.json", dir.path().join("link")).unwrap();
        symlink("/etc", dir.path().join("folder")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            dir.path().join("pipe"),
            rustix::fs::FileType::Fifo,
            Mode::RUSR,
            0,
        )
        .unwrap();
        let mut facts = Facts::default();
        facts.set("gpu", "H100");
        let (packed, bytes) = pack(&cache(dir.path()), &facts, 1 << 20).unwrap();
        let entries: Vec<(String, u32, Vec<u8>)> = Archive::new(&bytes[..])
            .entries()
            .unwrap()
            .map(|entry| {
                let mut entry = entry.unwrap();
                let path = entry.path().unwrap().display().to_string();
                let (mode, mut content) = (entry.header().mode().unwrap(), vec![]);
                entry.read_to_end(&mut content).unwrap();
                (path, mode, content)
            })
            .collect();
        let facts = format!("{{\n  \"folder\": \"{}\",\n  \"gpu\": \"H100\"\n}}", dir.path().display());
        assert_eq!(
            entries,
            [
                (FACTS_ENTRY.into(), READABLE, facts.into_bytes()),
                ("a.json".into(), READABLE, b"{}".to_vec()),
                (long, READABLE, vec![]),
                ("z/kernel.so".into(), EXECUTABLE, b"elf".to_vec()),
            ]
        );
        let mut left_out: Vec<_> = packed
            .left_out
            .iter()
            .map(|path| path.file_name().unwrap().to_string_lossy())
            .collect();
        left_out.sort();
        assert_eq!(left_out, ["bad\nname", "folder", "link", "pipe"]);
        assert_eq!((packed.files, packed.bytes), (3, bytes.len() as u64));
        let (_, again) = pack(&cache(dir.path()), &facts_of(&bytes), 1 << 20).unwrap();
        assert!(again == bytes, "the same files give the same archive");
        assert!(pack(&cache(dir.path()), &facts_of(&bytes), packed.bytes).is_ok());
        let too_large = pack(&cache(dir.path()), &facts_of(&bytes), packed.bytes - 1);
        assert!(matches!(too_large, Err(FileError::CacheTooLarge { .. })), "headers and the end count, too");
    }

    /// What disappears between its name and its type is left out, and so is a folder that became a file.
    #[test]
    fn what_is_gone_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("file"), b"x", 0o644);
        for gone in ["file", "none", "file/below", "none/below"] {
            let path = dir.path().join(gone);
            let (mut found, mut left_out) = (vec![], vec![]);
            walk(&path, &mut found, &mut left_out).unwrap();
            assert_eq!((found, left_out), (vec![], vec![]), "{gone}");
            assert!(gone == "file" || open_file(&path).unwrap().is_none(), "{gone}");
        }
    }

    fn facts_of(archive: &[u8]) -> Facts {
        let mut archive = Archive::new(archive);
        let mut first = archive.entries().unwrap().next().unwrap().unwrap();
        let mut json = vec![];
        first.read_to_end(&mut json).unwrap();
        Facts::parse(&json).unwrap()
    }

    #[test]
    fn an_empty_or_too_large_cache_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused =
            |folder: &Path, room| pack(&cache(folder), &Facts::default(), room).unwrap_err().to_string();
        let missing = refused(&dir.path().join("gone"), 1 << 20);
        assert!(missing.contains("gone, the cache vllm, is missing or has no file"), "{missing}");
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        assert!(refused(dir.path(), 1 << 20).contains("is missing or has no file"));
        write(&dir.path().join("a/b/c"), &[0; 4096], 0o644);
        assert!(refused(dir.path(), 4096).contains("do not fit"));
    }
}
