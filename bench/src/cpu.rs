//! CPU time of this process.

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeVal,
};

/// CPU seconds that this process has used, in the program and in the kernel, the sum of all its threads.
pub(crate) fn used_s() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("getrusage of this process cannot fail");
    seconds(usage.user_time()) + seconds(usage.system_time())
}

/// CPU seconds per GiB of a transfer of `bytes` that took `cpu_s`.
pub fn per_gib(cpu_s: f64, bytes: u64) -> f64 {
    cpu_s / (bytes as f64 / (1u64 << 30) as f64)
}

fn seconds(time: TimeVal) -> f64 {
    time.tv_sec() as f64 + time.tv_usec() as f64 * 1e-6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_increases_cpu_time() {
        let before = used_s();
        while used_s() <= before {
            std::hint::black_box((0..10_000u64).map(std::hint::black_box).sum::<u64>());
        }
    }

    #[test]
    fn per_gib_divides_by_gib() {
        assert_eq!(per_gib(3.0, 1 << 30), 3.0);
        assert_eq!(per_gib(3.0, 1 << 31), 1.5);
    }
}
