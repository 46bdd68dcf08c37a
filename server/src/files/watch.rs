//! [`FileWatch`]: detects complete changes of served files.

use super::{FileError, FolderRules, TensorFiles, directory::Listing, folder::Folder, served::Stamp};
use std::{
    collections::BTreeMap,
    fs, io, mem,
    path::{Path, PathBuf},
};

/// Polls files for new content to publish.
///
/// Content is new if it differs from the previous version and was the same in two polls in a row, so that a writer can
/// finish. Only stamps are compared (sizes, times, inodes), so a poll costs a few system calls per file. Files
/// rewritten with equal content count as new; their [digest](crate::Staged::hash) is the same.
///
/// Create it before the files are opened, so that no change is missed, and pass the opened files to
/// [`handle_opened`](Self::handle_opened).
///
/// It counts generations that it saw but that were never published: files replaced by others of the same name before
/// they were stable or could be published. Writes into a file are not a generation, and files replaced between two
/// polls are not seen.
#[derive(Debug)]
pub struct FileWatch {
    path: PathBuf,
    rules: FolderRules,
    detector: ChangeDetector<Stamps>,
    /// Why the last poll found nothing servable.
    problem: Option<FileError>,
}

/// The result of a poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Observation {
    /// Unchanged.
    Same,
    /// Changed, but perhaps incomplete. Poll again later.
    Settling,
    /// Changed and stable: open and publish it. Reported once; later polls compare with it.
    Changed,
    /// Nothing servable in two polls in a row: the file is missing, a folder lacks files of its index, or they cannot be
    /// read. Keep the published version, and warn of the [`problem`](FileWatch::problem).
    Missing,
}

/// The stamp of every file that may be served.
pub(super) type Stamps = BTreeMap<PathBuf, Stamp>;

impl FileWatch {
    /// Watches the file at `path`, or the files in the folder at `path` that `rules` serve.
    pub fn new(path: &Path, rules: FolderRules) -> Self {
        let mut watch = Self { path: path.into(), rules, detector: ChangeDetector::new(None), problem: None };
        watch.detector = ChangeDetector::new(watch.look());
        watch
    }

    /// Forgets the published state, so that the current files count as new: after a failed publish.
    pub fn reset(&mut self) {
        self.detector.reset();
    }

    /// Records the files opened for publishing: they may have been replaced since the poll.
    pub fn handle_opened(&mut self, files: &TensorFiles) {
        self.detector.handle_opened(files.stamps());
    }

    /// The number of generations seen but not published, beyond the reported ones.
    pub fn missed(&self) -> u64 {
        self.detector.missed
    }

    /// Subtracts `missed` generations, which the metadata of the newest version reports.
    pub fn handle_reported(&mut self, missed: u64) {
        self.detector.missed -= missed.min(self.detector.missed);
    }

    /// The watched path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Why the last poll found nothing servable; `None` if it found something.
    pub fn problem(&self) -> Option<&FileError> {
        self.problem.as_ref()
    }

    /// Polls once. Blocks on the file system.
    pub fn poll(&mut self) -> Observation {
        let seen = self.look();
        self.detector.handle_seen(seen)
    }

    /// Polls without reporting: counts missed generations, and returns whether the files changed since the last poll.
    /// For the time of a publish, and after a failed one. A later [`poll`](Self::poll) reports the change.
    pub fn poll_silently(&mut self) -> bool {
        let seen = self.look();
        self.detector.record_poll(seen.clone()) != seen
    }

    /// Reads the stamps of the servable files, and keeps the problem if there are none.
    fn look(&mut self) -> Option<Stamps> {
        match self.read_stamps() {
            Ok(stamps) => {
                self.problem = None;
                Some(stamps)
            }
            Err(problem) => {
                self.problem = Some(problem);
                None
            }
        }
    }

    /// Reads the stamps of the servable files. A folder must have weights, and all files of its index.
    fn read_stamps(&self) -> Result<Stamps, FileError> {
        let path = &self.path;
        let metadata = fs::metadata(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound if path.is_symlink() => FileError::Dangling { path: path.clone() },
            _ => FileError::Io { path: path.clone(), source },
        })?;
        if !metadata.is_dir() {
            return Ok(Stamps::from([(path.clone(), Stamp::of(&metadata))]));
        }
        let folder = Folder::open(path, self.rules)?;
        let listing = Listing::of(&folder)?;
        let stamps = listing.stamps.iter();
        let stamps = stamps.map(|(name, stamp)| (path.join(name), stamp.clone())).collect();
        if !self.detector.is_published(&stamps) {
            listing.complete_index(&folder)?;
            if listing.weights.is_empty() {
                return Err(FileError::NoWeights { path: path.clone() });
            }
        }
        Ok(stamps)
    }
}

/// One observed state of the files.
trait Generation: PartialEq + Clone {
    /// Whether this replaced `before`, an unreported state that had replaced `published`.
    fn replaces(&self, before: &Self, published: Option<&Self>) -> bool;
}

impl Generation for Stamps {
    /// Compares files that are new in `before`, since the shards of a folder are replaced one by one.
    fn replaces(&self, before: &Self, published: Option<&Self>) -> bool {
        before.iter().any(|(path, was)| {
            let is_new = published
                .and_then(|published| published.get(path))
                .is_none_or(|published| was.is_other_file(published));
            is_new && self.get(path).is_some_and(|now| now.is_other_file(was))
        })
    }
}

/// Derives observations from a series of polls. `None` means that nothing was servable.
#[derive(Debug)]
struct ChangeDetector<S> {
    /// The state last published, or reported as ready to be published.
    published: Option<S>,
    /// The state of the last poll.
    last: Option<S>,
    /// The new state that is not yet reported.
    pending: Option<S>,
    /// The number of times that an unreported state was replaced.
    missed: u64,
}

impl<S: Generation> ChangeDetector<S> {
    fn new(seen: Option<S>) -> Self {
        Self { published: seen.clone(), last: seen, pending: None, missed: 0 }
    }

    fn is_published(&self, seen: &S) -> bool {
        self.published.as_ref() == Some(seen)
    }

    fn reset(&mut self) {
        self.pending = self.published.take();
    }

    /// Records a poll; returns the state of the previous one.
    fn record_poll(&mut self, seen: Option<S>) -> Option<S> {
        if let Some(seen) = &seen {
            let pending = self.pending.take();
            let is_lost = pending.is_some_and(|pending| seen.replaces(&pending, self.published.as_ref()));
            self.missed += u64::from(is_lost);
            self.pending = (!self.is_published(seen)).then(|| seen.clone());
        }
        mem::replace(&mut self.last, seen)
    }

    fn handle_seen(&mut self, seen: Option<S>) -> Observation {
        let before = self.record_poll(seen.clone());
        match seen {
            None if before.is_none() => Observation::Missing,
            Some(_) if seen == self.published => Observation::Same,
            Some(_) if seen == before => {
                self.published = seen;
                self.pending = None;
                Observation::Changed
            }
            _ => Observation::Settling,
        }
    }
}

impl ChangeDetector<Stamps> {
    fn handle_opened(&mut self, opened: Stamps) {
        let Some(published) = &mut self.published else { return };
        let mut is_lost = false;
        for (path, stamp) in opened {
            if let Some(published) = published.get_mut(&path) {
                is_lost |= stamp.is_other_file(published);
                *published = stamp;
            }
        }
        self.missed += u64::from(is_lost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Generation for i32 {
        fn replaces(&self, before: &Self, _: Option<&Self>) -> bool {
            self != before
        }
    }

    #[test]
    fn new_content_must_be_stable_for_two_polls() {
        let mut detector = ChangeDetector::new(Some(1));
        let polls = [
            (Some(1), Observation::Same),
            (Some(2), Observation::Settling),
            (Some(3), Observation::Settling),
            (Some(3), Observation::Changed),
            (Some(3), Observation::Same),
            (None, Observation::Settling),
            (Some(3), Observation::Same),
            (None, Observation::Settling),
            (None, Observation::Missing),
            (None, Observation::Missing),
            (Some(4), Observation::Settling),
            (Some(4), Observation::Changed),
            (Some(5), Observation::Settling),
            (Some(4), Observation::Same),
        ];
        for (step, (seen, expected)) in polls.into_iter().enumerate() {
            assert_eq!(detector.handle_seen(seen), expected, "{step}");
        }
        assert_eq!(detector.missed, 2, "2 and 5 were never reported as ready");
    }

    /// Replaces the file at `path`. A hard link to the old file keeps its inode number in use.
    fn replace(path: &Path, number: u32) {
        fs::hard_link(path, path.with_extension(format!("old-{number}"))).unwrap();
        let aside = path.with_extension("aside");
        fs::write(&aside, header(number)).unwrap();
        fs::rename(&aside, path).unwrap();
    }

    /// A file without tensors.
    fn header(number: u32) -> Vec<u8> {
        let json = format!("{{\"__metadata__\":{{\"n\":\"{number}\"}}}}");
        [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat()
    }

    #[test]
    fn unpublished_generations_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        fs::write(&path, header(0)).unwrap();
        let mut watch = FileWatch::new(&path, FolderRules::default());
        let open = |watch: &mut FileWatch| watch.handle_opened(&TensorFiles::open(&path).unwrap());
        open(&mut watch);
        // In place: one generation, however many states.
        for number in 1..4 {
            fs::write(&path, header(number)).unwrap();
            watch.poll();
        }
        assert_eq!((watch.poll(), watch.missed()), (Observation::Changed, 0));
        // While that is published, two generations appear and are replaced, and a third stays.
        for number in 4..7 {
            replace(&path, number);
            watch.poll_silently();
        }
        assert_eq!((watch.missed(), watch.poll(), watch.missed()), (2, Observation::Changed, 2));
        watch.handle_reported(2);
        // One generation appears before the files are opened.
        replace(&path, 7);
        open(&mut watch);
        assert_eq!((watch.poll(), watch.missed()), (Observation::Same, 1));
        // One generation could not be published.
        replace(&path, 8);
        assert_eq!([watch.poll(), watch.poll()], [Observation::Settling, Observation::Changed]);
        watch.reset();
        assert_eq!((watch.poll(), watch.missed()), (Observation::Changed, 1), "it is tried again");
        watch.reset();
        replace(&path, 9);
        assert_eq!((watch.poll(), watch.missed()), (Observation::Settling, 2));
    }

    #[test]
    fn shards_that_are_replaced_one_by_one_are_one_generation() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a.safetensors", "b.safetensors"].map(|name| dir.path().join(name));
        for path in &paths {
            fs::write(path, header(0)).unwrap();
        }
        let mut watch = FileWatch::new(dir.path(), FolderRules::default());
        for path in &paths {
            replace(path, 1);
            watch.poll();
        }
        assert_eq!((watch.poll(), watch.missed()), (Observation::Changed, 0));
        for (path, number) in [(&paths[0], 2), (&paths[1], 2), (&paths[0], 3)] {
            replace(path, number);
            watch.poll_silently();
        }
        assert_eq!(watch.missed(), 1);
    }

    #[test]
    fn a_file_is_watched_through_replacement_and_loss() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        fs::write(&path, b"one").unwrap();
        let mut watch = FileWatch::new(&path, FolderRules::default());
        assert_eq!(watch.poll(), Observation::Same);
        fs::write(dir.path().join("new"), b"two").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        assert_eq!(
            [watch.poll(), watch.poll(), watch.poll()],
            [Observation::Settling, Observation::Changed, Observation::Same]
        );
        fs::remove_file(&path).unwrap();
        assert_eq!([watch.poll(), watch.poll()], [Observation::Settling, Observation::Missing]);
    }

    /// Goal: the problem of files that are not servable names the file and the cause, and ends with it. Method: each
    /// cause for a file and for a folder.
    #[test]
    fn the_problem_names_the_file_and_the_cause() {
        let dir = tempfile::tempdir().unwrap();
        let (path, index) = (dir.path().join("m"), "model.safetensors.index.json");
        let mut watch = FileWatch::new(&path, FolderRules::default());
        let mut problem = || {
            watch.poll();
            watch.problem().map(ToString::to_string).unwrap_or_default()
        };
        let link_to = |target: &str, path: &Path| std::os::unix::fs::symlink(target, path).unwrap();
        assert!(problem().ends_with("m: No such file or directory (os error 2)"), "{}", problem());
        link_to("gone", &path);
        assert!(problem().contains("m is a link that leads nowhere"), "{}", problem());
        fs::remove_file(&path).unwrap();
        link_to("m", &path);
        assert!(problem().contains("m: Too many levels of symbolic links"), "{}", problem());
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(problem().contains("m has no .safetensors file"), "{}", problem());
        let write = |name: &str, bytes: &str| fs::write(path.join(name), bytes).unwrap();
        write("a.safetensors", "a");
        write(index, r#"{"weight_map": {"t": "a.safetensors", "u": "b.safetensors"}}"#);
        assert!(problem().contains("places tensors in b.safetensors, which is missing"), "{}", problem());
        link_to("gone", &path.join("b.safetensors"));
        assert!(problem().contains("m/b.safetensors is a link that leads nowhere"), "{}", problem());
        fs::remove_file(path.join("b.safetensors")).unwrap();
        write(index, r#"{"weight_map": {"t""#);
        assert!(problem().contains("index.json is not a usable weight index"), "{}", problem());
        write(index, r#"{"weight_map": {"t": "a.safetensors"}}"#);
        assert_eq!(problem(), "");
        let denied = FileError::Io { path, source: io::ErrorKind::PermissionDenied.into() };
        assert!(denied.to_string().contains("let the server's user read it"), "{denied}");
    }

    #[test]
    fn a_folder_is_new_once_it_has_all_files_of_its_index() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &str| fs::write(dir.path().join(name), bytes).unwrap();
        let index = "model.safetensors.index.json";
        write("a.safetensors", "a");
        write("config.json", "{}");
        write(index, r#"{"weight_map": {"t": "a.safetensors"}}"#);
        let mut watch = FileWatch::new(dir.path(), FolderRules::default());
        assert_eq!(watch.poll(), Observation::Same);
        write("optimizer.pt", "not served");
        assert_eq!(watch.poll(), Observation::Same);
        write("config.json", "{ }");
        assert_eq!([watch.poll(), watch.poll()], [Observation::Settling, Observation::Changed]);
        write(index, r#"{"weight_map": {"t": "a.safetensors", "u": "b.safetensors"}}"#);
        assert_eq!([watch.poll(), watch.poll()], [Observation::Settling, Observation::Missing]);
        write("b.safetensors", "b");
        assert_eq!([watch.poll(), watch.poll()], [Observation::Settling, Observation::Changed]);
        write(index, r#"{"weight_map": {"t""#);
        assert_eq!(watch.poll(), Observation::Settling);
    }
}
