//! How much memory this process took at most.

use std::fs;

/// The most memory that this process ever had, as Linux counts it. 0 elsewhere, where nothing is checked by it.
pub(crate) fn peak_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = peak.and_then(|rest| rest.trim().strip_suffix("kB"));
    kilobytes.map_or(0, |number| number.trim().parse::<u64>().unwrap_or(0) << 10)
}
