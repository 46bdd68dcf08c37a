//! CPU time of this process.

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeVal,
};

/// CPU time that this process has used, the sum of all its threads.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usage {
    /// Seconds in the program itself.
    pub user_s: f64,
    /// Seconds in the kernel on the program's behalf.
    pub system_s: f64,
}

impl Usage {
    /// The CPU time used so far.
    pub fn now() -> Self {
        let usage = getrusage(UsageWho::RUSAGE_SELF).expect("getrusage of this process cannot fail");
        Self { user_s: seconds(usage.user_time()), system_s: seconds(usage.system_time()) }
    }

    /// The CPU time used since `earlier`.
    pub fn since(self, earlier: Self) -> Self {
        Self { user_s: self.user_s - earlier.user_s, system_s: self.system_s - earlier.system_s }
    }

    /// Seconds in program and kernel together.
    pub fn total_s(self) -> f64 {
        self.user_s + self.system_s
    }
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
        let before = Usage::now();
        // Until user time rises, not for a fixed duration: the kernel may account a short run as system time only.
        while Usage::now().user_s <= before.user_s {
            std::hint::black_box((0..10_000u64).map(std::hint::black_box).sum::<u64>());
        }
        assert!(Usage::now().since(before).total_s() > 0.0);
    }

    #[test]
    fn per_gib_divides_by_gib() {
        assert_eq!(per_gib(3.0, 1 << 30), 3.0);
        assert_eq!(per_gib(3.0, 1 << 31), 1.5);
    }
}
