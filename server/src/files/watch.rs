//! The watch over files that are served: tells when there is something new, and when it is complete.

use super::{
    FileError, FolderRules,
    directory::{Listing, read_index},
    folder::Folder,
    served::Stamp,
};
use std::{
    collections::BTreeMap,
    fs, mem,
    path::{Path, PathBuf},
};

/// Looks at files now and then, and says whether there is a new version to publish.
///
/// New is what differs from the version before and was the same at two looks in a row: whoever still writes is let
/// finish. Only stamps are compared (sizes, times, places on the disk), so a look costs a system call a file. Files
/// touched without a change count as new; their [digest](crate::Staged::digest) says that they are not.
///
/// Make it before the files are opened, so that no change falls in between.
#[derive(Debug)]
pub struct FileWatch {
    path: PathBuf,
    rules: FolderRules,
    settling: Settling<Stamps>,
}

/// What a look found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// What was there before.
    Same,
    /// Something else, perhaps not complete yet. Look again later.
    Settling,
    /// Something else that stays: open and publish it. Said once; what comes after is compared with this.
    Changed,
    /// Nothing that could be served, at two looks in a row: the file is gone, or a folder lacks what its index names.
    /// Keep what is published, and tell.
    Missing,
}

/// The stamp of every file that is or may be served.
type Stamps = BTreeMap<PathBuf, Stamp>;

impl FileWatch {
    /// Watches what is at `path` now for changes: of a folder, what is served by `rules`.
    pub fn new(path: &Path, rules: FolderRules) -> Self {
        let mut watch = Self { path: path.into(), rules, settling: Settling::new(None) };
        watch.settling = Settling::new(watch.see());
        watch
    }

    /// Forgets what was seen, so that what is there counts as new again: for who could not publish it.
    pub fn forget(&mut self) {
        self.settling.known = None;
    }

    /// What is watched.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Looks once. Blocks for as long as the file system takes.
    pub fn look(&mut self) -> Look {
        let seen = self.see();
        self.settling.handle_seen(seen)
    }

    /// The stamps of what can be served, if there is anything: a folder has to have all that its index names. Files are
    /// complete as far as a look can tell.
    fn see(&self) -> Option<Stamps> {
        let metadata = fs::metadata(&self.path).ok()?;
        if !metadata.is_dir() {
            return Some(Stamps::from([(self.path.clone(), Stamp::of(&metadata))]));
        }
        let folder = Folder::open(&self.path, self.rules).ok()?;
        let listing = Listing::of(&folder).ok().filter(|listing| !listing.weights.is_empty())?;
        let stamps = listing.stamps.iter();
        let stamps = stamps.map(|(name, stamp)| (self.path.join(name), stamp.clone())).collect();
        let is_complete =
            self.settling.is_known(&stamps) || has_all_shards(&folder, &listing).unwrap_or(false);
        is_complete.then_some(stamps)
    }
}

fn has_all_shards(folder: &Folder, listing: &Listing) -> Result<bool, FileError> {
    let index = read_index(folder, &listing.indexes)?;
    let mut wanted = index.iter().flat_map(|(_, index)| index.files());
    Ok(wanted.all(|shard| listing.weights.contains(shard)))
}

/// Decides from what was seen look by look. `None` is nothing to be served.
#[derive(Debug)]
struct Settling<S> {
    /// What was published, or was said to be ready for it.
    known: Option<S>,
    /// What was seen last.
    last: Option<S>,
}

impl<S: PartialEq + Clone> Settling<S> {
    fn new(seen: Option<S>) -> Self {
        Self { known: seen.clone(), last: seen }
    }

    fn is_known(&self, seen: &S) -> bool {
        self.known.as_ref() == Some(seen)
    }

    fn handle_seen(&mut self, seen: Option<S>) -> Look {
        let before = mem::replace(&mut self.last, seen.clone());
        match seen {
            None if before.is_none() => Look::Missing,
            Some(_) if seen == self.known => Look::Same,
            Some(_) if seen == before => {
                self.known = seen;
                Look::Changed
            }
            _ => Look::Settling,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_new_must_stay_for_two_looks() {
        let mut settling = Settling::new(Some(1));
        let looks = [
            (Some(1), Look::Same),
            (Some(2), Look::Settling),
            (Some(3), Look::Settling),
            (Some(3), Look::Changed),
            (Some(3), Look::Same),
            (None, Look::Settling),
            (Some(3), Look::Same),
            (None, Look::Settling),
            (None, Look::Missing),
            (None, Look::Missing),
            (Some(4), Look::Settling),
            (Some(4), Look::Changed),
            (Some(5), Look::Settling),
            (Some(4), Look::Same),
        ];
        for (step, (seen, expected)) in looks.into_iter().enumerate() {
            assert_eq!(settling.handle_seen(seen), expected, "{step}");
        }
    }

    #[test]
    fn a_file_is_watched_through_replacement_and_loss() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        fs::write(&path, b"one").unwrap();
        let mut watch = FileWatch::new(&path, FolderRules::default());
        assert_eq!(watch.look(), Look::Same);
        fs::write(dir.path().join("new"), b"two").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        assert_eq!([watch.look(), watch.look(), watch.look()], [Look::Settling, Look::Changed, Look::Same]);
        fs::remove_file(&path).unwrap();
        assert_eq!([watch.look(), watch.look()], [Look::Settling, Look::Missing]);
    }

    #[test]
    fn a_folder_is_new_when_all_that_its_index_names_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &str| fs::write(dir.path().join(name), bytes).unwrap();
        let index = "model.safetensors.index.json";
        write("a.safetensors", "a");
        write("config.json", "{}");
        write(index, r#"{"weight_map": {"t": "a.safetensors"}}"#);
        let mut watch = FileWatch::new(dir.path(), FolderRules::default());
        assert_eq!(watch.look(), Look::Same);
        write("optimizer.pt", "not served");
        assert_eq!(watch.look(), Look::Same);
        write("config.json", "{ }");
        assert_eq!([watch.look(), watch.look()], [Look::Settling, Look::Changed]);
        write(index, r#"{"weight_map": {"t": "a.safetensors", "u": "b.safetensors"}}"#);
        assert_eq!([watch.look(), watch.look()], [Look::Settling, Look::Missing]);
        write("b.safetensors", "b");
        assert_eq!([watch.look(), watch.look()], [Look::Settling, Look::Changed]);
        write(index, r#"{"weight_map": {"t""#);
        assert_eq!(watch.look(), Look::Settling);
    }
}
