//! The limits of a container, from the cgroups (version 2) of this process and their parents.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The folder of this process's cgroup, and the root folder of the hierarchy.
#[derive(Debug, Clone)]
pub(super) struct Cgroup {
    root: PathBuf,
    own: PathBuf,
}

impl Cgroup {
    /// The cgroup of this process. In a container this is the root of the visible hierarchy.
    pub(super) fn own() -> Self {
        let listing = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::in_hierarchy(Path::new("/sys/fs/cgroup"), &listing)
    }

    /// The cgroup below `root` that is named in `listing`, the content of `/proc/self/cgroup`; `root` itself if that
    /// folder does not exist.
    fn in_hierarchy(root: &Path, listing: &str) -> Self {
        let path = listing.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
        let own = root.join(path.trim_start_matches('/'));
        let own = if own.is_dir() { own } else { root.to_owned() };
        Self { root: root.to_owned(), own }
    }

    /// The memory limit under which the least is free, and the memory used under it, in bytes; `None` without a limit.
    pub(super) fn memory(&self) -> Option<(u64, u64)> {
        let limits = self.read_all("memory.max", |text, folder| {
            let used = fs::read_to_string(folder.join("memory.current")).ok()?;
            Some((text.trim().parse().ok()?, used.trim().parse().ok()?))
        });
        limits
            .into_iter()
            .min_by_key(|(limit, used): &(u64, u64)| limit.saturating_sub(*used))
    }

    /// The lowest quota of processors; `None` without a quota.
    pub(super) fn processors(&self) -> Option<f64> {
        let quotas = self.read_all("cpu.max", |text, _| {
            let mut fields = text.split_whitespace();
            let (quota, period): (f64, f64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
            Some(quota / period)
        });
        quotas.into_iter().min_by(f64::total_cmp)
    }

    /// The results of `read` for the content of `file` in this cgroup and its parents. `read` returns `None` for `max`,
    /// which means no limit.
    fn read_all<T>(&self, file: &str, read: impl Fn(&str, &Path) -> Option<T>) -> Vec<T> {
        let folders = self.own.ancestors().take_while(|folder| folder.starts_with(&self.root));
        folders
            .filter_map(|folder| read(&fs::read_to_string(folder.join(file)).ok()?, folder))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_limit_counts() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("a/b");
        fs::create_dir_all(&inner).unwrap();
        let write = |folder: &Path, file: &str, text: &str| fs::write(folder.join(file), text).unwrap();
        let cgroup = Cgroup::in_hierarchy(root.path(), "1:cpu:/x\n0::/a/b\n");
        assert_eq!((cgroup.memory(), cgroup.processors()), (None, None));
        write(&inner, "memory.max", "max\n");
        write(&root.path().join("a"), "memory.max", "1000\n");
        write(&root.path().join("a"), "memory.current", "10\n");
        write(&inner, "cpu.max", "150000 100000\n");
        write(root.path(), "cpu.max", "max 100000\n");
        assert_eq!(cgroup.memory(), Some((1000, 10)));
        assert_eq!(cgroup.processors(), Some(1.5));
        write(root.path(), "memory.max", "2000\n");
        write(root.path(), "memory.current", "1900\n");
        assert_eq!(cgroup.memory(), Some((2000, 1900)), "less is free under the parent's limit");
        let not_mounted = Cgroup::in_hierarchy(root.path(), "0::/not/mounted/here");
        assert_eq!(
            not_mounted.memory(),
            Some((2000, 1900)),
            "for a folder that is not mounted, only the root counts"
        );
    }
}
