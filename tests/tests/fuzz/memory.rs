//! The peak memory of this process.

use std::fs;

/// The peak resident memory of this process. 0 on systems other than Linux, where the test does not check memory.
pub(crate) fn peak_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = peak.and_then(|rest| rest.trim().strip_suffix("kB"));
    kilobytes.map_or(0, |number| number.trim().parse::<u64>().unwrap_or(0) << 10)
}
