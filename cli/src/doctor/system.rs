//! Checks of system limits: descriptors, and the clock.

use super::finding::{Finding, Fix, State};
use crate::{descriptors, units};
use rustix::process::{Resource, getrlimit};
use std::{
    fs,
    time::{Duration, SystemTime},
};

/// How many descriptors let a server have its 1024 clients over one lane each, and their files.
const ENOUGH: u64 = 4_096;

/// How far behind the program's own file the clock may be: files are unpacked with dates of other time zones.
const DAY: Duration = Duration::from_secs(86_400);

pub(super) fn check() -> Vec<Finding> {
    vec![files(getrlimit(Resource::Nofile).maximum, descriptors::needed_to_serve()), clock()]
}

/// How many files and sockets may be open. The soft limit is raised to the hard one by itself.
fn files(hard: Option<u64>, needed: u64) -> Finding {
    let fix = Fix {
        host: "ulimit -n 65536 in a shell, LimitNOFILE=65536 in systemd",
        docker: "--ulimit nofile=65536",
        kubernetes: "the limit of the container runtime on the node (LimitNOFILE= of containerd)",
    };
    let hard = hard.unwrap_or(u64::MAX);
    let measured = format!("{hard} may be open");
    let wanted = format!("{ENOUGH}; at least {needed} to begin at all");
    let otherwise = if hard < needed { State::Fail } else { State::Warn };
    Finding::judge("files and sockets", (hard >= ENOUGH, otherwise), measured, wanted, fix)
}

/// Whether the clock can be right: it is after this program was made.
fn clock() -> Finding {
    let made = fs::metadata("/proc/self/exe").and_then(|file| file.modified());
    judge_clock(SystemTime::now(), made.unwrap_or(SystemTime::UNIX_EPOCH))
}

fn judge_clock(now: SystemTime, made: SystemTime) -> Finding {
    let fix = Fix {
        host: "timedatectl set-ntp true",
        docker: "the clock is the host's: timedatectl set-ntp true there",
        kubernetes: "the clock is the node's: timedatectl set-ntp true there",
    };
    let measured = match made.duration_since(now) {
        Ok(before) => format!("it is {} before this program was made", units::time(before)),
        Err(_) => "it is after this program was made".into(),
    };
    let is_good = now + DAY >= made;
    Finding::judge(
        "clock",
        (is_good, State::Warn),
        measured,
        "the time of day: logs and metrics carry it",
        fix,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_descriptors_are_told_and_too_few_fail() {
        assert_eq!(files(None, 50).state, State::Ok);
        assert_eq!(files(Some(1_024), 50).state, State::Warn);
        assert_eq!(files(Some(40), 50).state, State::Fail);
    }

    #[test]
    fn a_clock_that_lives_in_the_past_is_told() {
        let made = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        assert_eq!(judge_clock(made - DAY, made).state, State::Ok);
        assert_eq!(judge_clock(SystemTime::UNIX_EPOCH, made).state, State::Warn);
    }
}
