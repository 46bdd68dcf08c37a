//! Properties of this machine, as the kernel reports them.

use crate::cells::Cells;
use std::fs;

/// The processor's model name.
pub(crate) fn cpu() -> Option<String> {
    field(&fs::read_to_string("/proc/cpuinfo").ok()?, "model name")
}

/// The number of processors that this process may use.
pub(crate) fn cores() -> Option<usize> {
    std::thread::available_parallelism().ok().map(usize::from)
}

/// The kernel's version.
pub(crate) fn kernel() -> Option<String> {
    trimmed_file("/proc/sys/kernel/osrelease")
}

/// Adds to `cells` the peak resident memory of this process (`VmHWM`), and its excess over the `bytes` of a version; a
/// kernel that does not report it adds nothing.
pub(crate) fn with_peak_memory(cells: Cells<f64>, bytes: u64) -> Cells<f64> {
    let peak = fs::read_to_string("/proc/self/status").ok();
    let peak = peak.and_then(|status| kib(&field(&status, "VmHWM")?));
    cells
        .and("peak_resident_mib", peak.map(mib))
        .and("beyond_a_version_mib", peak.map(|peak| mib(peak.saturating_sub(bytes))))
}

/// `bytes` in MiB.
pub(crate) fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The number of bytes in `value`, such as `12 kB`.
fn kib(value: &str) -> Option<u64> {
    value.strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The value called `name` in /proc/meminfo, in bytes.
#[cfg(feature = "gpu")]
pub(crate) fn memory_bytes(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    kib(&field(&text, name)?)
}

/// The trimmed content of the file at `path`; `None` if it is empty or unreadable.
pub(crate) fn trimmed_file(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// The value after `name` and a colon, in the first line that begins with both.
fn field(text: &str, name: &str) -> Option<String> {
    let value = |line: &str| {
        line.strip_prefix(name)?
            .trim_start()
            .strip_prefix(':')
            .map(|value| value.trim().to_owned())
    };
    text.lines().find_map(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_complete_name() {
        let text = "MemTotal:       24000000 kB\nmodel name\t: A CPU\n";
        assert_eq!(field(text, "MemTotal").as_deref(), Some("24000000 kB"));
        assert_eq!(field(text, "model name").as_deref(), Some("A CPU"));
        assert_eq!(field(text, "Mem"), None, "a prefix of a name is no name");
        assert_eq!((kib("12 kB"), kib("many kB"), kib("")), (Some(12 << 10), None, None));
    }

    #[test]
    fn touched_memory_counts() {
        let touched = std::hint::black_box(vec![1u8; 64 << 20]);
        let cells = with_peak_memory(Cells::default(), 1 << 20);
        let Some(peak) = cells.get("peak_resident_mib") else { return };
        assert!(*peak >= (touched.len() >> 20) as f64, "{cells:?}");
        assert_eq!(cells.get("beyond_a_version_mib"), Some(&(peak - 1.0)));
    }
}
