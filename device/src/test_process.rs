//! Tests that need a process of their own, and what the system says about this one.

use std::{
    env, fs,
    os::{fd::RawFd, unix::fs::MetadataExt},
    process::Command,
};

/// Runs the test `name` of this program in a process of its own, after the shell command `setup`. Returns true in that
/// process: go on with the test.
pub(crate) fn is_own(name: &str, setup: &str) -> bool {
    if env::var_os(MARK).is_some() {
        return true;
    }
    let program = env::current_exe().unwrap();
    let script = format!("{setup}; exec \"$0\" --exact {name} --nocapture");
    let output = Command::new("sh")
        .args(["-c", &script])
        .arg(program)
        .env(MARK, "")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    false
}

/// A number of KiB from `/proc/self/status`; `None` without that file.
pub(crate) fn status_kib(field: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

/// The numbers of this process's mappings and descriptors of the memfd with this inode.
pub(crate) fn uses_of(inode: u64) -> (usize, usize) {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let of_memfd =
        |line: &&str| line.contains("/memfd:") && line.split_whitespace().nth(4) == Some(&inode.to_string());
    let numbers = fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
    let is_open = |number: RawFd| {
        let path = format!("/proc/self/fd/{number}");
        let is_memfd =
            fs::read_link(&path).is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:"));
        is_memfd && fs::metadata(path).is_ok_and(|file| file.ino() == inode)
    };
    let numbers = numbers.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok());
    (maps.lines().filter(of_memfd).count(), numbers.filter(|&number| is_open(number)).count())
}

/// Tells a child process that it is one.
const MARK: &str = "TENSOR_RELAY_TEST_PROCESS";
