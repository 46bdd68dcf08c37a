//! The check of memory: of the container or the machine.

use super::{
    cgroup::Cgroup,
    finding::{Finding, Fix, State},
};
use crate::units;
use std::fs;

/// The free memory below which the finding is a warning.
const WARN_BELOW_BYTES: u64 = 1 << 30;

/// The free memory below which the finding is a failure: even small tensors need this much.
const FAIL_BELOW_BYTES: u64 = 128 << 20;

pub(super) fn check(cgroup: &Cgroup) -> Finding {
    free(cgroup.memory(), available())
}

/// Judges the free memory: the minimum of what is free below the container's limit, and of the memory `available` on
/// the machine. `limit` is a pair of the limit and the memory used under it.
fn free(limit: Option<(u64, u64)>, available: Option<u64>) -> Finding {
    const NAME: &str = "memory";
    const FIX: Fix = Fix {
        host: "stop other programs, or limit tensor-relay with --staged-mem, --base-mem and --mem",
        docker: "--memory 8g: a version needs its size at each end, and once more as a base of deltas (not with \
                 --base-mem 0)",
        kubernetes: "resources.limits.memory: 8Gi: a version needs its size at each end, and once more as a base of \
                     deltas",
    };
    let in_container = limit.map(|(limit, used)| limit.saturating_sub(used));
    let Some(free) = [in_container, available].into_iter().flatten().min() else {
        return Finding::ok(NAME, "the free memory is unknown", "");
    };
    let measured = match limit {
        Some((limit, _)) => format!("{} free, within a limit of {}", units::bytes(free), units::bytes(limit)),
        None => format!("{} free, without a limit", units::bytes(free)),
    };
    let otherwise = if free < FAIL_BELOW_BYTES { State::Fail } else { State::Warn };
    let wanted = format!("{}, and the size of the versions", units::bytes(WARN_BELOW_BYTES));
    Finding::new(NAME, otherwise.unless(free >= WARN_BELOW_BYTES), measured, wanted, FIX)
}

fn available() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smaller_of_container_and_machine_memory_counts() {
        let state = |limit, available| free(limit, available).state;
        assert_eq!(state(None, Some(8 << 30)), State::Ok);
        assert_eq!(state(Some((2 << 30, 1 << 20)), Some(8 << 30)), State::Ok);
        assert_eq!(state(Some((2 << 30, 3 << 29)), Some(8 << 30)), State::Warn);
        assert_eq!(state(Some((64 << 20, 0)), Some(8 << 30)), State::Fail);
        assert_eq!(state(Some((8 << 30, 0)), Some(1 << 20)), State::Fail);
        assert_eq!(state(None, None), State::Ok);
    }
}
