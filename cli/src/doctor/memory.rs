//! Checks of memory: of the container or the machine, and the limit on locked memory.

use super::{
    cgroup::Cgroup,
    finding::{Finding, Fix, State},
};
use crate::units;
use rustix::process::{Resource, getrlimit};
use std::fs;

/// Below this there is no room for much more than the program itself.
const LITTLE: u64 = 1 << 30;

/// The need of a server or a consumer of small tensors.
const LEAST: u64 = 128 << 20;

pub(super) fn check(cgroup: &Cgroup) -> Vec<Finding> {
    vec![free(cgroup.memory(), available()), locked()]
}

/// How much is free: within the container's limit, or of the machine.
fn free(limit: Option<(u64, u64)>, available: Option<u64>) -> Finding {
    const NAME: &str = "memory";
    const FIX: Fix = Fix {
        host: "end what uses it, or bound what tensor-relay takes with --staged-mem, --base-mem and --mem",
        docker: "--memory 8g: a version needs its size at each end, and once more for deltas (--base-mem 0 does without)",
        kubernetes: "resources.limits.memory: 8Gi: a version needs its size at each end, and once more for deltas",
    };
    let within = limit.map(|(limit, used)| limit.saturating_sub(used));
    let Some(free) = [within, available].into_iter().flatten().min() else {
        return Finding::ok(NAME, "the free memory is unknown", "");
    };
    let measured = match limit {
        Some((limit, _)) => format!("{} free, within a limit of {}", units::bytes(free), units::bytes(limit)),
        None => format!("{} free, without a limit", units::bytes(free)),
    };
    let otherwise = if free < LEAST { State::Fail } else { State::Warn };
    let wanted = format!("{} and the versions that are moved", units::bytes(LITTLE));
    Finding::judge(NAME, (free >= LITTLE, otherwise), measured, wanted, FIX)
}

fn available() -> Option<u64> {
    let told = fs::read_to_string("/proc/meminfo").ok()?;
    let line = told.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kib << 10)
}

/// How much may be locked. The driver of a GPU locks memory without counting it here on most systems, so that a low limit
/// is told and never fails.
fn locked() -> Finding {
    let limit = getrlimit(Resource::Memlock).current;
    let measured = limit.map_or_else(
        || "any amount may be locked".into(),
        |bytes| format!("{} may be locked", units::bytes(bytes)),
    );
    Finding::ok("locked memory", measured, "the driver of a GPU counts what it locks elsewhere")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smaller_of_limit_and_machine_counts() {
        let state = |limit, available| free(limit, available).state;
        assert_eq!(state(None, Some(8 << 30)), State::Ok);
        assert_eq!(state(Some((2 << 30, 1 << 20)), Some(8 << 30)), State::Ok);
        assert_eq!(state(Some((2 << 30, 3 << 29)), Some(8 << 30)), State::Warn);
        assert_eq!(state(Some((64 << 20, 0)), Some(8 << 30)), State::Fail);
        assert_eq!(state(Some((8 << 30, 0)), Some(1 << 20)), State::Fail);
        assert_eq!(state(None, None), State::Ok);
    }
}
