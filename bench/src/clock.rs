//! The monotonic clock, which all processes in one time namespace of a machine share.

use nix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`: the same for all processes in one time namespace.
pub(crate) fn monotonic_ns() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has this clock since 2.6");
    time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64
}

/// An identifier of this process's clock: equal for two processes if they run on the same boot of the same kernel, in
/// the same time namespace. It is a hash, so it does not reveal the machine.
///
/// `None` when the kernel does not report its boot ID; such a clock counts as shared with no other process.
pub(crate) fn identifier() -> Option<String> {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    // Kernels without time namespaces have no such link, and one clock for all processes.
    let namespace = std::fs::read_link("/proc/self/ns/time").unwrap_or_default();
    let both = format!("{}{}", boot_id.trim(), namespace.display());
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
    fn the_time_never_decreases() {
        let readings: Vec<u64> = (0..1000).map(|_| monotonic_ns()).collect();
        assert!(readings.is_sorted() && readings[0] > 0);
    }

    #[test]
    fn the_identifier_is_stable_and_hides_the_boot_id() {
        assert_eq!(identifier(), identifier());
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        assert!(identifier().is_none_or(|clock| clock.len() == 16 && !boot_id.contains(&clock)));
    }
}
