//! Versions of one topic side by side: their names, the `latest` link, and pruning.

use super::{folder, with_extension};
use crate::{SaveError, temporary};
use std::{
    cmp::Reverse,
    fs::{self, DirEntry},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::SystemTime,
};
use tensor_relay_protocol::{
    Epoch, Version, VersionId,
    files::{FileKind, FileName, WEIGHTS_EXTENSION},
};

/// The link to the last saved version, without the extension.
const LATEST: &str = "latest";

/// A version kept beside others in the folder of its topic.
#[derive(Debug)]
pub(super) struct KeptVersion<'a> {
    pub(super) folder: &'a Path,
    pub(super) kind: FileKind,
    pub(super) id: &'a VersionId,
}

/// A saved version, found by its name.
#[derive(Debug)]
struct SavedVersion {
    path: PathBuf,
    version: Version,
    epoch: Epoch,
    modified: SystemTime,
}

impl KeptVersion<'_> {
    /// Its path. Names sort by version number.
    pub(super) fn path(&self) -> PathBuf {
        self.folder.join(self.name())
    }

    fn name(&self) -> String {
        format!("{:020}-{}{}", self.id.version.0, self.id.epoch, self.kind.extension())
    }

    /// Points the `latest` link to this version, atomically, and deletes those of other kinds of files.
    pub(super) fn link_latest(&self) -> Result<(), SaveError> {
        let link = with_extension(&self.folder.join(LATEST), self.kind.extension());
        if fs::symlink_metadata(&link).is_ok_and(|found| !found.is_symlink()) {
            return Err(SaveError::NotOurs { path: link });
        }
        let made = temporary::builder().make_in(self.folder, |path| symlink(self.name(), path));
        let replaced = made.and_then(|made| made.persist(&link).map_err(|failed| failed.error));
        let synced = replaced.and_then(|()| {
            self.unlink_others();
            fs::File::open(self.folder)?.sync_all()
        });
        synced.map_err(|source| SaveError::Io { path: link, source })
    }

    /// Deletes all but the newest `keep` versions.
    pub(super) fn prune(&self, keep: u32) {
        for found in self.superseded(keep) {
            folder::delete_earlier(&found.path);
        }
    }

    /// Deletes the links of other kinds of files: they point to older versions.
    fn unlink_others(&self) {
        for kind in FileKind::ALL.into_iter().filter(|kind| *kind != self.kind) {
            let link = with_extension(&self.folder.join(LATEST), kind.extension());
            let target = fs::read_link(&link).ok();
            if target
                .as_deref()
                .and_then(Path::to_str)
                .is_some_and(|name| parse(name).is_some())
            {
                let _ = fs::remove_file(link);
            }
        }
    }

    /// The versions to delete. This version counts as the newest. Of the earlier ones of its epoch a higher number is
    /// newer; versions of other epochs, or with higher numbers, count as older, in the order of modification times.
    fn superseded(&self, keep: u32) -> Vec<SavedVersion> {
        let entries = fs::read_dir(self.folder).into_iter().flatten().flatten();
        let mut found: Vec<SavedVersion> = entries.filter_map(|entry| SavedVersion::of(&entry)).collect();
        let this = self.path();
        found.sort_by_key(|found| {
            let same_epoch = found.epoch == self.id.epoch && found.version <= self.id.version;
            let written = if same_epoch { SystemTime::UNIX_EPOCH } else { found.modified };
            Reverse((found.path == this, same_epoch, written, found.version))
        });
        found.split_off(found.len().min(keep as usize))
    }
}

impl SavedVersion {
    fn of(entry: &DirEntry) -> Option<Self> {
        let (version, epoch, kind) = parse(entry.file_name().to_str()?)?;
        let metadata = entry.metadata().ok()?;
        let is_kind = if kind == FileKind::Directory { metadata.is_dir() } else { metadata.is_file() };
        let modified = metadata.modified().ok()?;
        is_kind.then(|| Self { path: entry.path(), version, epoch, modified })
    }
}

/// Parses a name made by [`KeptVersion::name`]; `None` for any other name.
fn parse(name: &str) -> Option<(Version, Epoch, FileKind)> {
    FileName::new(name).ok()?;
    let (stem, kind) = match name.strip_suffix(WEIGHTS_EXTENSION) {
        None => (name, FileKind::Directory),
        Some(stem) => (stem, FileKind::Safetensors),
    };
    let (version, epoch) = stem.split_once('-')?;
    let is_number = version.len() == 20 && version.bytes().all(|byte| byte.is_ascii_digit());
    let is_hex = epoch.len() == 16 && epoch.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let (version, epoch) = (version.parse().ok()?, u64::from_str_radix(epoch, 16).ok()?);
    (is_number && is_hex).then_some((Version(version), Epoch(epoch), kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_versions_are_recognised() {
        let name = "00000000000000000007-00000000000000ff";
        for (extension, kind) in [(".safetensors", FileKind::Safetensors), ("", FileKind::Directory)] {
            assert_eq!(parse(&format!("{name}{extension}")), Some((Version(7), Epoch(255), kind)));
        }
        for other in [
            "latest",
            "config.json",
            "7-ff.safetensors",
            "00000000000000000007-00000000000000FF",
            "00000000000000000007-00000000000000ff.bin",
            "00000000000000000007-00000000000000ff.",
            "+0000000000000000007-00000000000000ff",
            "99999999999999999999-00000000000000ff",
            ".00000000000000000007-00000000000000ff",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
