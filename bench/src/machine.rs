//! Properties of this machine, as the kernel reports them.

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

/// The value called `name` in /proc/meminfo, in bytes.
#[cfg(feature = "gpu")]
pub(crate) fn memory_bytes(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let value = field(&text, name)?;
    value.strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
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
    }
}
