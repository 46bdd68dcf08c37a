//! [`Entries`]: the files in an archive with their paths, in bounded memory.

use super::{UnpackError, invalid};
use std::io::Read;
use tar::{Archive, Entry, EntryType};

/// The maximum size of an entry that has the path of the next one: more than any path that is accepted.
const LONG_PATH_MAX_BYTES: u64 = 64 << 10;

/// The entries of an archive as they lie in it: those of `tar`, which understands more kinds, are read into memory before
/// anything of them can be checked.
pub(super) struct Entries<'a, R: Read>(tar::Entries<'a, R>);

/// The path of a file, and the file.
type FileAt<'a, R> = (Vec<u8>, Entry<'a, R>);

impl<'a, R: Read> Entries<'a, R> {
    pub(super) fn new(archive: &'a mut Archive<R>) -> Result<Self, UnpackError> {
        Ok(Self(archive.entries().map_err(invalid)?.raw(true)))
    }

    /// The next file and its path, which is not checked.
    ///
    /// # Errors
    /// [`UnpackError::Invalid`] for anything else than regular files and, before one, GNU's entry for its long path.
    pub(super) fn next_file(&mut self) -> Result<Option<FileAt<'a, R>>, UnpackError> {
        let Some(entry) = self.0.next() else { return Ok(None) };
        let mut entry = entry.map_err(invalid)?;
        let mut path = entry.path_bytes().into_owned();
        if entry.header().entry_type() == EntryType::GNULongName {
            if entry.size() > LONG_PATH_MAX_BYTES {
                return Err(UnpackError::Invalid(format!("it has a path of {} bytes", entry.size())));
            }
            path.clear();
            entry.read_to_end(&mut path).map_err(invalid)?;
            path.pop_if(|last| *last == 0);
            let file = self
                .0
                .next()
                .ok_or_else(|| UnpackError::Invalid("it ends before a file".into()))?;
            entry = file.map_err(invalid)?;
        }
        if entry.header().entry_type() != EntryType::Regular {
            let path = String::from_utf8_lossy(&path);
            return Err(UnpackError::Invalid(format!("{path:?} is not a regular file")));
        }
        Ok(Some((path, entry)))
    }
}
