//! NUMA locality: binds threads to the processors near a device.
//!
//! Why: the kernel allocates memory on the NUMA node of the thread that touches it first. Copies between a GPU and the
//! memory of a far node were measured at less than half the rate (XLA, eight H100: 13.5 instead of 33 GiB/s).

use std::fs;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Binds the calling thread to those of its processors that are near the PCI device, so that memory it touches first is
/// near too. Threads that it starts, the driver's among them, inherit this.
///
/// Changes nothing if the system does not report the near processors, or the thread may use none of them. Only affects
/// speed.
pub(super) fn stay_near(pci_bus_id: &str) {
    let path = format!("/sys/bus/pci/devices/{pci_bus_id}/local_cpulist");
    let Ok(list) = fs::read_to_string(path) else { return };
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let mut near = CpuSet::new();
    let usable = parse(&list).filter(|&cpu| cpu < CpuSet::MAX_CPU && allowed.is_set(cpu));
    usable.for_each(|cpu| near.set(cpu));
    if near.count() > 0 {
        // If the system refuses, the thread keeps its processors.
        let _ = sched_setaffinity(None, &near);
    }
}

/// The numbers in a list such as `0-15,32-47`. Invalid entries are skipped.
fn parse(list: &str) -> impl Iterator<Item = usize> {
    list.trim().split(',').flat_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        match (first.parse::<usize>(), last.parse::<usize>()) {
            (Ok(first), Ok(last)) => first..last.saturating_add(1).min(CpuSet::MAX_CPU),
            _ => 0..0,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_read() {
        let read = |list| parse(list).collect::<Vec<_>>();
        assert_eq!(read("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert_eq!(read("5"), [5]);
        assert_eq!(read(""), []);
        assert_eq!(read("x,2-y,7-6,3"), [3]);
        assert_eq!(read("0-99999999999999999999"), []);
        assert_eq!(read("0-18446744073709551615").len(), CpuSet::MAX_CPU);
    }

    #[test]
    fn an_unknown_device_changes_nothing() {
        let before = sched_getaffinity(None).unwrap();
        stay_near("ffff:ff:1f.7");
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
