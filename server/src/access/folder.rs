//! [`Folder`]: the access files of a state directory. Each is read completely, within a size limit, and changed in one
//! way: under a lock, by lines, atomically, and read back.

use rustix::fs::OFlags;
use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, fchown},
    path::{Path, PathBuf},
};
use tensor_relay_transport::{Exposure, lock_folder};

/// The maximum size of a file: a revoked ticket takes 17 bytes, a key 80.
const FILE_MAX_BYTES: u64 = 16 << 20;

/// Why a file of [names](has_names) is refused.
pub(super) const UNFINISHED: &str =
    "its last line has no line end, so it may be truncated: check that line, and end it with one";

/// Whether lines of `file` end with names: a truncated one may name another client. Other files become invalid if
/// truncated, or lose what only informs.
pub(super) fn has_names(file: &str) -> bool {
    matches!(file, "keys" | "acl")
}

/// The last line of `text`, if it has no line end.
pub(super) fn unfinished_line(text: &str) -> Option<&str> {
    text.lines().last().filter(|_| !text.ends_with('\n'))
}

/// Why the access files cannot be used. The administrator of the state directory has to act.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccessStoreError {
    /// An operation on a file failed.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// The operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The requested ticket cannot be made.
    #[error("cannot make the ticket: {0}")]
    Unfit(&'static str),
    /// The content of a file is invalid.
    #[error("{}: {why}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The invalid part.
        why: String,
    },
}

#[derive(Debug, Clone)]
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.0.join(file)
    }

    pub(super) fn content_error(&self, file: &str, why: &dyn std::fmt::Display) -> AccessStoreError {
        AccessStoreError::Content { path: self.path(file), why: why.to_string() }
    }

    fn io_error(&self, action: &'static str, file: &str) -> impl Fn(io::Error) -> AccessStoreError {
        let path = self.path(file);
        move |source| AccessStoreError::File { action, path: path.clone(), source }
    }

    /// Creates the folder, with access for its owner alone.
    pub(super) fn make(&self) -> Result<(), AccessStoreError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.0);
        made.map_err(self.io_error("create", ""))
    }

    /// Warns if others can read one of `files`, or can create or replace files in the folder.
    pub(super) fn warn_if_exposed(&self, files: &[&str]) {
        let Ok(folder) = fs::metadata(&self.0) else { return };
        if folder.mode() & 0o022 != 0 {
            tracing::warn!(
                "The folder {0} can be written by others, who can replace its files: run `chmod go-w {0}`.",
                self.0.display()
            );
        }
        let is_accessible_to_others = folder.mode() & 0o011 != 0;
        for file in files {
            // Errors are reported when the file is read.
            let Ok(found) = fs::metadata(self.path(file)) else { continue };
            let exposure = Exposure::of(&found);
            let is_shared = matches!(exposure, Exposure::Readable | Exposure::GroupWritable);
            if is_shared && (is_accessible_to_others || *file == "secrets") {
                let what = match *file {
                    "secrets" => "who can make tickets with it",
                    _ => "who thereby learn which clients are admitted",
                };
                tracing::warn!(
                    "The file {0} {exposure}, {what}: run `chmod 600 {0}`.",
                    self.path(file).display()
                );
            }
        }
    }

    /// The text of `file`, with the line ends of Unix; `None` if it does not exist. Does not block on a FIFO.
    pub(super) fn read(&self, file: &str) -> Result<Option<String>, AccessStoreError> {
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let opened = match OpenOptions::new().read(true).custom_flags(flags).open(self.path(file)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(self.io_error("read", file))?,
        };
        let found = opened.metadata().map_err(self.io_error("inspect", file))?;
        if !found.is_file() {
            return Err(self.content_error(file, &"it is not a regular file"));
        }
        match Exposure::of(&found) {
            Exposure::None | Exposure::Readable | Exposure::GroupWritable => {}
            Exposure::Writable => {
                let why = format!("everybody can write it: run `chmod 600 {}`", self.path(file).display());
                return Err(self.content_error(file, &why));
            }
            Exposure::Foreign => {
                let why = format!(
                    "it belongs to user {}, which is neither root nor the user of this process: run `chown`",
                    found.uid()
                );
                return Err(self.content_error(file, &why));
            }
        }
        let mut text = String::new();
        let read = opened.take(FILE_MAX_BYTES + 1).read_to_string(&mut text);
        match read.map_err(self.io_error("read", file))? as u64 {
            0..=FILE_MAX_BYTES => Ok(Some(with_unix_line_ends(text))),
            _ => Err(self.content_error(file, &format!("it has more than {FILE_MAX_BYTES} bytes"))),
        }
    }

    /// Parses each line of `text`, the content of `file`, except empty lines and comments.
    pub(super) fn parse_lines<T>(
        &self,
        file: &str,
        text: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, AccessStoreError> {
        let lines = text.lines().enumerate().map(|(index, line)| (index, line.trim_matches(' ')));
        let content = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        // The error does not quote the line, which may be a secret.
        let parsed = content.map(|(index, line)| {
            parse(line).ok_or_else(|| self.content_error(file, &format!("line {} is invalid", index + 1)))
        });
        parsed.collect()
    }

    /// Lets `edit` change the lines of `file`, which is created if it is missing, and returns its result.
    ///
    /// Changes by several processes are made one after the other, readers see the file before or after one, and an
    /// unfinished last line is never continued: in a file of [names](has_names) it stays unfinished, elsewhere it is
    /// finished. Returns only once the change is on the disk and was read back.
    ///
    /// # Errors
    /// [`AccessStoreError`], also when `edit` adds lines after an unfinished name.
    pub(super) fn change<T>(
        &self,
        file: &str,
        edit: impl FnOnce(&mut Vec<String>) -> Result<T, AccessStoreError>,
    ) -> Result<T, AccessStoreError> {
        let lock = lock_folder(&self.0).map_err(self.io_error("lock the folder of", file))?;
        let before = self.read(file)?.unwrap_or_default();
        let mut lines = before.lines().map(str::to_owned).collect();
        let result = edit(&mut lines)?;
        let mut text: String = lines.iter().flat_map(|line| [line, "\n"]).collect();
        let is_unfinished = |line: &String| has_names(file) && unfinished_line(&before) == Some(line);
        match lines.iter().rposition(is_unfinished) {
            Some(at) if at + 1 < lines.len() => return Err(self.content_error(file, &UNFINISHED)),
            Some(_) => drop(text.pop()),
            None => {}
        }
        if text == before {
            return Ok(result);
        }
        if text.len() as u64 > FILE_MAX_BYTES {
            return Err(self.content_error(file, &format!("it would have more than {FILE_MAX_BYTES} bytes")));
        }
        let replaced = replace(&self.path(file), &self.path("secrets"), &text)
            .and_then(|()| Ok(rustix::fs::fsync(&lock)?));
        replaced.map_err(self.io_error("write", file))?;
        match self.read(file)? {
            Some(now) if now == text => Ok(result),
            _ => Err(self.content_error(
                file,
                &"another program changed it at the same time: check it, and repeat the command",
            )),
        }
    }
}

/// `text` without a byte order mark, and with the line ends of Unix instead of those of other systems.
fn with_unix_line_ends(text: String) -> String {
    match text.strip_prefix('\u{feff}').unwrap_or(&text) {
        unmarked if unmarked.contains('\r') => unmarked.replace("\r\n", "\n").replace('\r', "\n"),
        unmarked => unmarked.to_owned(),
    }
}

/// Replaces the file at `path` atomically. A link to it stays, and so do its mode and owner; a new file has those of
/// `model`, if that exists: the server must be able to read what root changed for it.
fn replace(path: &Path, model: &Path, text: &str) -> io::Result<()> {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.into());
    let mut temporary = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(&path))?; // Private from the start.
    temporary.write_all(text.as_bytes())?;
    if let Ok(model) = fs::metadata(&path).or_else(|_| fs::metadata(model)) {
        if rustix::process::geteuid().is_root() {
            fchown(temporary.as_file(), Some(model.uid()), Some(model.gid()))?;
        }
        temporary.as_file().set_permissions(model.permissions())?;
    }
    temporary.as_file().sync_all()?;
    temporary.persist(&path).map(drop).map_err(|failed| failed.error)
}
