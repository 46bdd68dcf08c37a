//! The machine's properties in the document.

use super::line::Cells;
use crate::machine::{memory_bytes, trimmed_file};

/// The properties of the machine without its GPU and without those of every [`Origin`](crate::origin::Origin). Properties that the system does not report are left out, and so are
/// those that identify the machine or its owner.
pub(super) fn facts() -> Cells<String> {
    let gib = |bytes: u64| format!("{} GiB", bytes >> 30);
    let bytes = |path| trimmed_file(path).map(|bytes| format!("{bytes} bytes"));
    Cells::of([])
        .and("memory", memory_bytes("MemTotal").map(gib))
        .and("memory available at the start", memory_bytes("MemAvailable").map(gib))
        .and("UDP receive buffer allowed", bytes("/proc/sys/net/core/rmem_max"))
        .and("UDP send buffer allowed", bytes("/proc/sys/net/core/wmem_max"))
}
