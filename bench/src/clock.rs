//! The clock that two processes of one machine share.

use nix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`: since the machine started, the same for all its processes and containers.
pub(crate) fn monotonic_ns() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has this clock since 2.6");
    time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64
}

/// Names the clock of this process: equal for processes that share it, and nothing that tells which machine it is. Two
/// processes do when they run on the same boot of the same kernel, and in the same time namespace.
///
/// `None` when the kernel does not tell; such a clock is shared with nobody.
pub(crate) fn name() -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    // Kernels without time namespaces have no such link, and one clock for all.
    let namespace = std::fs::read_link("/proc/self/ns/time").unwrap_or_default();
    let both = format!("{}{}", boot.trim(), namespace.display());
    Some(
        blake3::derive_key(PURPOSE, both.as_bytes())
            .iter()
            .take(8)
            .map(|b| format!("{b:02x}"))
            .collect(),
    )
}

const PURPOSE: &str = "tensor-relay bench 2026-11-21: the name of a clock";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_only_goes_forward() {
        let readings: Vec<u64> = (0..1000).map(|_| monotonic_ns()).collect();
        assert!(readings.is_sorted() && readings[0] > 0);
    }

    #[test]
    fn one_process_has_one_clock() {
        assert_eq!(name(), name());
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        assert!(name().is_none_or(|name| name.len() == 16 && !boot.contains(&name)));
    }
}
