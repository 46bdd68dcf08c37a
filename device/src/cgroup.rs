//! The memory limit of this process's container (cgroup). A process that exceeds the limit is killed by the kernel,
//! without a message, so allocations are checked beforehand.

use std::{fs, path::Path};

/// The mount points of cgroup version 2 and of version 1's memory controller on all known systems.
const MOUNTS: [(&str, &Files); 2] = [("/sys/fs/cgroup", &V2), ("/sys/fs/cgroup/memory", &V1)];

/// An allocation fits closely if it leaves less than the limit divided by this.
const CLOSE_FRACTION: u64 = 16;

/// Version 1 reports a larger number for "no limit".
const UNLIMITED: u64 = 1 << 62;

/// The file and field names of a cgroup version.
struct Files {
    /// The controller by which the line of `/proc/self/cgroup` is found; version 2 has none.
    controller: &'static str,
    limit: &'static str,
    used: &'static str,
    /// The limit and the use of swap.
    swap: [&'static str; 2],
    /// Whether the two numbers of swap include memory.
    swap_has_memory: bool,
    /// The fields of `memory.stat` that count file pages, which the kernel reclaims when it needs room.
    file_pages: [&'static str; 2],
}

const V2: Files = Files {
    controller: "",
    limit: "memory.max",
    used: "memory.current",
    swap: ["memory.swap.max", "memory.swap.current"],
    swap_has_memory: false,
    file_pages: ["inactive_file", "active_file"],
};

const V1: Files = Files {
    controller: "memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    swap: ["memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"],
    swap_has_memory: true,
    file_pages: ["total_inactive_file", "total_active_file"],
};

/// The memory use and limit of a cgroup, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Level {
    pub(crate) limit: u64,
    pub(crate) used: u64,
    /// The part of `used` that the kernel can reclaim: file pages.
    pub(crate) reclaimable: u64,
    /// The swap space that the cgroup may still use, if the host has any.
    pub(crate) swap_free: u64,
}

/// Whether an allocation fits the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The allocation fits.
    Well,
    /// The allocation fits, but leaves little of the limit.
    Closely { left: u64, limit: u64 },
    /// The allocation does not fit, even if the kernel reclaims all it can.
    Not { free: u64, limit: u64 },
}

impl Level {
    fn free(&self, host_swap_free: u64) -> u64 {
        let taken = self.used.saturating_sub(self.reclaimable);
        let swap_free = self.swap_free.min(host_swap_free);
        self.limit.saturating_sub(taken).saturating_add(swap_free)
    }
}

/// Whether `asked` more bytes fit into a cgroup and all its parents. The kernel does not count mapped but untouched
/// memory, so concurrent requests may all succeed.
pub(crate) fn judge(asked: u64, levels: &[Level], host_swap_free: u64) -> Fit {
    let free = |level: &Level| level.free(host_swap_free);
    let Some(tightest) = levels.iter().min_by_key(|level| free(level)) else { return Fit::Well };
    let (free, limit) = (free(tightest), tightest.limit);
    match free.checked_sub(asked) {
        None => Fit::Not { free, limit },
        Some(left) if left < limit / CLOSE_FRACTION => Fit::Closely { left, limit },
        Some(_) => Fit::Well,
    }
}

/// Whether `asked` more bytes fit into this process's cgroup now. [`Fit::Well`] without a limit, or if it cannot be
/// read.
pub(crate) fn fits(asked: u64) -> Fit {
    let levels = own_levels();
    match levels.is_empty() {
        true => Fit::Well,
        false => judge(asked, &levels, host_swap_free()),
    }
}

/// The smallest limit on this process; `None` without a limit, or if it cannot be read.
pub(crate) fn limit_bytes() -> Option<u64> {
    own_levels().iter().map(|level| level.limit).min()
}

/// The levels of this process's cgroups that have a limit.
fn own_levels() -> Vec<Level> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of = |(mount, files): &(&str, &Files)| read_levels(Path::new(mount), files, &own);
    MOUNTS.iter().flat_map(of).collect()
}

/// The levels with a limit, from the cgroup named in `own`, the text of `/proc/self/cgroup`, up to the root. In a
/// container the named path is often the host's, and only the mount point exists.
fn read_levels(mount: &Path, files: &Files, own: &str) -> Vec<Level> {
    let Some(path) = own.lines().find_map(|line| path_of(line, files.controller)) else { return vec![] };
    let folder = mount.join(path.trim_start_matches('/'));
    let folders = folder.ancestors().take_while(|folder| folder.starts_with(mount));
    folders.filter_map(|folder| read_level(folder, files)).collect()
}

/// The path in a line `number:controllers:path`, if `controller` is one of the line's, which are separated by commas.
fn path_of<'a>(line: &'a str, controller: &str) -> Option<&'a str> {
    let mut parts = line.splitn(3, ':').skip(1);
    let found = parts.next()?.split(',').any(|name| name == controller);
    parts.next().filter(|_| found)
}

fn read_level(folder: &Path, files: &Files) -> Option<Level> {
    let read_number = |name: &str| -> Option<u64> {
        let text = fs::read_to_string(folder.join(name)).ok()?;
        text.trim().parse().ok().filter(|number| *number < UNLIMITED) // `max` is no number.
    };
    let (limit, used) = (read_number(files.limit)?, read_number(files.used)?);
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let reclaimable = files.file_pages.iter().filter_map(|name| value_in(&stat, name)).sum();
    let included_memory = |bytes| if files.swap_has_memory { bytes } else { 0 };
    let swap_free = match files.swap.map(read_number) {
        [Some(max), Some(current)] => {
            let swap_max = max.saturating_sub(included_memory(limit));
            swap_max.saturating_sub(current.saturating_sub(included_memory(used)))
        }
        _ => u64::MAX,
    };
    Some(Level { limit, used, reclaimable, swap_free })
}

/// The free swap of the host.
fn host_swap_free() -> u64 {
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    value_in(&memory, "SwapFree:").map_or(0, |kib| kib << 10)
}

/// The number in a line `name number …`.
fn value_in(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_whitespace);
    let mut line = lines.find_map(|mut line| (line.next() == Some(name)).then_some(line))?;
    line.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn level(limit: u64, used: u64, reclaimable: u64) -> Level {
        let swap_free = 512 * MIB;
        Level { limit: limit * MIB, used: used * MIB, reclaimable: reclaimable * MIB, swap_free }
    }

    #[test]
    fn the_fit_follows_from_limit_use_and_swap() {
        let levels = [level(1024, 300, 100)];
        assert_eq!(judge(400 * MIB, &levels, 0), Fit::Well);
        assert_eq!(judge(800 * MIB, &levels, 0), Fit::Closely { left: 24 * MIB, limit: 1024 * MIB });
        let refused = Fit::Not { free: 824 * MIB, limit: 1024 * MIB };
        assert_eq!(judge(825 * MIB, &levels, 0), refused);
        assert_eq!(judge(900 * MIB, &levels, u64::MAX), Fit::Well, "the excess fits into swap");
        let refused_with_swap = Fit::Not { free: (824 + 512) * MIB, limit: 1024 * MIB };
        assert_eq!(judge(1337 * MIB, &levels, u64::MAX), refused_with_swap, "swap is limited, too");
        assert_eq!(judge(u64::MAX, &levels, 0), refused);
        assert_eq!(judge(u64::MAX, &[], 0), Fit::Well, "there is no limit");
    }

    #[test]
    fn the_tightest_level_decides() {
        let levels = [level(1024, 10, 0), level(512, 500, 100), level(4096, 600, 0)];
        assert_eq!(judge(200 * MIB, &levels, 0), Fit::Not { free: 112 * MIB, limit: 512 * MIB });
        let over = [level(100, 200, 0)];
        assert_eq!(judge(1, &over, 0), Fit::Not { free: 0, limit: 100 * MIB });
    }

    #[test]
    fn the_files_of_both_versions_are_read() {
        let mount = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(mount.path().join(name), text).unwrap();
        fs::create_dir_all(mount.path().join("a/b")).unwrap();
        write("memory.max", "max\n");
        write("a/memory.max", "1000\n");
        write("a/memory.current", "500\n");
        write("a/memory.stat", "anon 100\nactive_file 20\ninactive_file 30\n");
        write("a/memory.swap.max", "60\n");
        write("a/memory.swap.current", "20\n");
        write("a/b/memory.memsw.limit_in_bytes", "2500\n");
        write("a/b/memory.memsw.usage_in_bytes", "800\n");
        write("a/b/memory.limit_in_bytes", "2000\n");
        write("a/b/memory.usage_in_bytes", "700\n");
        write("a/b/memory.stat", "total_active_file 5\n");
        write("memory.limit_in_bytes", "9223372036854771712\n");
        let found = read_levels(mount.path(), &V2, "4:memory:/x\n0::/a/b\n");
        assert_eq!(found, [Level { limit: 1000, used: 500, reclaimable: 50, swap_free: 40 }]);
        let found = read_levels(mount.path(), &V1, "4:cpu,memory:/a/b\n0::/x\n");
        assert_eq!(found, [Level { limit: 2000, used: 700, reclaimable: 5, swap_free: 400 }]);
        assert_eq!(read_levels(mount.path(), &V2, "0::/docker/elsewhere\n"), [], "a path of the host's");
        assert_eq!(read_levels(mount.path(), &V1, ""), []);
    }
}
