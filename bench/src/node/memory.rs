//! The peak memory of a process.

/// The peak resident memory of this process in bytes (`VmHWM`); `None` if the kernel does not report it.
pub(crate) fn peak_resident_bytes() -> Option<u64> {
    peak_in(&std::fs::read_to_string("/proc/self/status").ok()?)
}

fn peak_in(status: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    value.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_parsed() {
        assert_eq!(peak_in("VmPeak:\t 99 kB\nVmHWM:\t  12 kB\nVmRSS:\t 1 kB\n"), Some(12 << 10));
        assert_eq!(peak_in("VmHWM:\t many kB\n"), None);
        assert_eq!(peak_in(""), None);
    }

    #[test]
    fn touched_memory_counts() {
        let Some(before) = peak_resident_bytes() else { return };
        let touched = std::hint::black_box(vec![1u8; 64 << 20]);
        let after = peak_resident_bytes().unwrap_or_default();
        assert!(after >= touched.len() as u64 && after >= before, "{before} and then {after}");
    }
}
