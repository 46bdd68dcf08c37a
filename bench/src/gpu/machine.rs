//! What the numbers depend on: the machine, as far as it tells.

use super::line::Cells;
use std::{fs, thread::available_parallelism};

/// The facts of the machine without its GPU. What the system does not tell is left out; nothing that names the machine
/// or its owner is taken down.
pub(super) fn facts() -> Cells<String> {
    let cores = available_parallelism().ok().map(|cores| cores.to_string());
    Cells::of([])
        .and("CPU", cpuinfo("model name"))
        .and("CPU cores usable", cores)
        .and("memory", meminfo("MemTotal").map(|bytes| format!("{} GiB", bytes >> 30)))
        .and(
            "memory available at the start",
            meminfo("MemAvailable").map(|bytes| format!("{} GiB", bytes >> 30)),
        )
        .and("kernel", line("/proc/sys/kernel/osrelease"))
        .and(
            "UDP receive buffer allowed",
            line("/proc/sys/net/core/rmem_max").map(|bytes| format!("{bytes} bytes")),
        )
        .and(
            "UDP send buffer allowed",
            line("/proc/sys/net/core/wmem_max").map(|bytes| format!("{bytes} bytes")),
        )
}

/// How much memory can still be taken.
pub(super) fn available_bytes() -> Option<u64> {
    meminfo("MemAvailable")
}

fn meminfo(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let value = field(&text, name)?;
    value.strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn cpuinfo(name: &str) -> Option<String> {
    field(&fs::read_to_string("/proc/cpuinfo").ok()?, name)
}

/// What stands behind `name` and a colon, in the first line that begins so.
fn field(text: &str, name: &str) -> Option<String> {
    let value = |line: &str| {
        line.strip_prefix(name)?
            .trim_start()
            .strip_prefix(':')
            .map(|value| value.trim().to_owned())
    };
    text.lines().find_map(value)
}

/// The one line of a small file.
pub(super) fn line(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.trim();
    (!line.is_empty()).then(|| line.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_the_kernels_files() {
        let text = "MemTotal:       24000000 kB\nmodel name\t: A CPU\n";
        assert_eq!(field(text, "MemTotal").as_deref(), Some("24000000 kB"));
        assert_eq!(field(text, "model name").as_deref(), Some("A CPU"));
        assert_eq!(field(text, "Mem"), None, "the whole name");
    }
}
