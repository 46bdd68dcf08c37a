//! [`Folder`]: opens entries of a served folder, and refuses links that lead out of it.

use super::{FileError, SkipReason, served::ServedFile};
use rustix::{
    fs::{Dir, Mode, OFlags, open, openat, readlink},
    io::Errno,
};
use std::{
    ffi::{OsStr, OsString},
    fs::{File, Metadata},
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
};

/// The rules that select the files of a folder. By default, only a model's files are served, and no links that lead
/// out: every client that may subscribe can receive all served files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FolderRules {
    /// Serves every file directly in the folder that is not hidden, whether models need it or not.
    pub all_files: bool,
    /// Follows links anywhere. Otherwise their targets must be in the folder or, if it is in Hugging Face's cache,
    /// among the blobs of the same model.
    pub follow_links: bool,
}

/// An open folder. Replacing its path by a link does not redirect it.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) path: PathBuf,
    pub(super) rules: FolderRules,
    folder: OwnedFd,
    /// The folders that links in it may lead to.
    roots: Vec<PathBuf>,
}

impl Folder {
    /// Opens the folder at `path`, following links at `path` itself.
    pub(super) fn open(path: &Path, rules: FolderRules) -> Result<Self, FileError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = open(path, flags, Mode::empty())
            .map_err(|error| FileError::Io { path: path.into(), source: error.into() })?;
        let roots = path_of(&folder).map(roots_of).unwrap_or_default();
        Ok(Self { path: path.into(), rules, folder, roots })
    }

    /// The names of its entries, sorted.
    pub(super) fn names(&self) -> Result<Vec<OsString>, FileError> {
        let io_error = |error: Errno| FileError::Io { path: self.path.clone(), source: error.into() };
        let mut names = vec![];
        for entry in Dir::read_from(&self.folder).map_err(io_error)? {
            let name = OsStr::from_bytes(entry.map_err(io_error)?.file_name().to_bytes()).to_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// The metadata of an entry or of a link's target, and whether it may be served: a link may lead out of the folder.
    /// Opens nothing for reading.
    ///
    /// # Errors
    /// `Dangling` for a link whose target cannot be opened, `NotAFile` for an entry that cannot.
    pub(super) fn look_up(&self, name: &OsStr) -> Result<(Metadata, bool), SkipReason> {
        let open_entry = |flags| -> io::Result<(File, Metadata)> {
            let file = File::from(self.open_at(name, OFlags::PATH | flags)?);
            let metadata = file.metadata()?;
            Ok((file, metadata))
        };
        let (_, metadata) = open_entry(OFlags::NOFOLLOW).map_err(|_| SkipReason::NotAFile)?;
        if !metadata.is_symlink() {
            return Ok((metadata, true));
        }
        let (target, metadata) = open_entry(OFlags::empty()).map_err(|_| SkipReason::Dangling)?;
        Ok((metadata, self.may_serve_target(&target)))
    }

    /// Opens the file with this name. A link's target is checked on the opened file: it cannot change in between.
    pub(super) fn open_file(&self, name: impl AsRef<Path>) -> Result<ServedFile, FileError> {
        let (name, path) = (name.as_ref().as_os_str(), self.path.join(name.as_ref()));
        // Opening a pipe would block.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let opened = match self.open_at(name, flags | OFlags::NOFOLLOW) {
            Err(Errno::LOOP) => match self.open_at(name, flags).map(File::from) {
                Ok(target) if !self.may_serve_target(&target) => return Err(FileError::LeadsOut { path }),
                opened => opened,
            },
            opened => opened.map(File::from),
        };
        let file = opened.map_err(|error| FileError::Io { path: path.clone(), source: error.into() })?;
        ServedFile::new(path, file)
    }

    fn open_at(&self, name: &OsStr, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        openat(&self.folder, name, flags | OFlags::CLOEXEC, Mode::empty())
    }

    /// Whether the target of a link is in a permitted folder.
    fn may_serve_target(&self, file: &File) -> bool {
        let is_permitted = |path: PathBuf| self.roots.iter().any(|root| path.starts_with(root));
        self.rules.follow_links || path_of(file).is_some_and(is_permitted)
    }
}

/// The path of an open file or folder, if the system reports it.
fn path_of(opened: impl AsFd) -> Option<PathBuf> {
    let link = format!("/proc/self/fd/{}", opened.as_fd().as_raw_fd());
    let path = readlink(link, vec![]).ok()?.into_bytes();
    Some(PathBuf::from(OsString::from_vec(path))).filter(|path| path.is_absolute())
}

/// The folder itself; and for `MODEL/snapshots/REVISION` of Hugging Face's cache, or a folder in it, `MODEL/blobs`.
fn roots_of(folder: PathBuf) -> Vec<PathBuf> {
    let snapshots = folder
        .ancestors()
        .skip(1)
        .find(|above| above.file_name() == Some("snapshots".as_ref()));
    let blobs = snapshots.and_then(Path::parent).map(|model| model.join("blobs"));
    [folder].into_iter().chain(blobs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink};

    /// The entries of a folder by name, and whether each may be served.
    fn servable_entries(folder: &Folder) -> Vec<(String, bool)> {
        let names = folder.names().unwrap();
        let look = |name: OsString| {
            let reached = folder.look_up(&name).is_ok_and(|(_, reached)| reached);
            assert_eq!(folder.open_file(&name).is_ok(), reached, "{name:?}");
            (name.into_string().unwrap(), reached)
        };
        names.into_iter().map(look).collect()
    }

    #[test]
    fn links_lead_within_the_folder_or_to_the_blobs_of_its_model() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("models--a--b");
        let snapshot = model.join("snapshots/0123");
        fs::create_dir_all(&snapshot).unwrap();
        for folder in ["blobs", "refs"] {
            fs::create_dir(model.join(folder)).unwrap();
            fs::write(model.join(folder).join("x"), "x").unwrap();
        }
        fs::write(snapshot.join("plain"), "x").unwrap();
        for (name, target) in [
            ("beside", "plain"),
            ("blob", "../../blobs/x"),
            ("blobs-of-another", "../../../models--a--b-secret/blobs/x"),
            ("nowhere", "gone"),
            ("ref", "../../refs/x"),
            ("root", "/etc/hostname"),
            ("two-steps", "ref"),
        ] {
            symlink(target, snapshot.join(name)).unwrap();
        }
        let other = dir.path().join("models--a--b-secret/blobs");
        fs::create_dir_all(&other).unwrap();
        fs::write(other.join("x"), "x").unwrap();
        symlink(&snapshot, dir.path().join("latest")).unwrap();
        let folder = Folder::open(&dir.path().join("latest"), FolderRules::default()).unwrap();
        let mut expected =
            ["beside", "blob", "blobs-of-another", "nowhere", "plain", "ref", "root", "two-steps"]
                .map(|name| (name.to_owned(), matches!(name, "beside" | "blob" | "plain")));
        assert_eq!(servable_entries(&folder), expected);
        let rules = FolderRules { follow_links: true, all_files: false };
        for (name, reached) in &mut expected {
            *reached = name != "nowhere" && (name != "root" || Path::new("/etc/hostname").exists());
        }
        assert_eq!(servable_entries(&Folder::open(&snapshot, rules).unwrap()), expected);
    }

    /// A file replaced by a link between `look_up` and `open_file`.
    #[test]
    fn a_replaced_file_is_checked_when_opened() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, outside) = (dir.path().join("in"), dir.path().join("out"));
        fs::create_dir(&inside).unwrap();
        fs::write(&outside, "secret").unwrap();
        fs::write(inside.join("a"), "x").unwrap();
        let folder = Folder::open(&inside, FolderRules::default()).unwrap();
        assert!(folder.look_up("a".as_ref()).unwrap().1);
        fs::remove_file(inside.join("a")).unwrap();
        symlink(&outside, inside.join("a")).unwrap();
        assert!(matches!(folder.open_file("a"), Err(FileError::LeadsOut { .. })));
    }
}
