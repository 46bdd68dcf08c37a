//! Checks of system limits: descriptors, and the clock.

use super::finding::{Finding, Fix, State};
use crate::{descriptors, units};
use rustix::process::{Resource, getrlimit};
use std::{
    fs,
    time::{Duration, SystemTime},
};

/// The descriptors of a server with 1024 clients of one lane each, including its files.
const RECOMMENDED_DESCRIPTORS: u64 = 4_096;

/// The time by which the clock may be behind the date of the program's file, because archives may contain dates of
/// other time zones.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(86_400);

pub(super) fn check() -> Vec<Finding> {
    vec![open_files(getrlimit(Resource::Nofile).maximum, descriptors::needed_to_serve()), clock()]
}

/// Checks the hard limit of open files and sockets: every command raises its soft limit to the hard one, up to 65,536.
fn open_files(hard: Option<u64>, needed: u64) -> Finding {
    let fix = Fix {
        host: "ulimit -n 65536 in a shell, LimitNOFILE=65536 in systemd",
        docker: "--ulimit nofile=65536",
        kubernetes: "the limit of the container runtime on the node (LimitNOFILE= of containerd)",
    };
    let measured = hard.map_or_else(|| "no limit".into(), |hard| format!("{hard} may be open"));
    let hard = hard.unwrap_or(u64::MAX);
    let wanted = format!("{RECOMMENDED_DESCRIPTORS}; at least {needed} to start");
    let state = if hard < needed { State::Fail } else { State::Warn.unless(hard >= RECOMMENDED_DESCRIPTORS) };
    Finding::new("files and sockets", state, measured, wanted, fix)
}

/// Checks that the clock is not before the date of this program's file.
fn clock() -> Finding {
    let built = fs::metadata("/proc/self/exe").and_then(|file| file.modified());
    judge_clock(SystemTime::now(), built.unwrap_or(SystemTime::UNIX_EPOCH))
}

fn judge_clock(now: SystemTime, built: SystemTime) -> Finding {
    let fix = Fix {
        host: "timedatectl set-ntp true",
        docker: "the clock is the host's: timedatectl set-ntp true there",
        kubernetes: "the clock is the node's: timedatectl set-ntp true there",
    };
    let measured = match built.duration_since(now) {
        Ok(behind) => format!("{} before the date of this program's file", units::time(behind)),
        Err(_) => "after the date of this program's file".into(),
    };
    let state = State::Warn.unless(now + CLOCK_TOLERANCE >= built);
    Finding::new("clock", state, measured, "the correct time, for logs and metrics", fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_descriptors_are_a_warning_and_too_few_fail() {
        assert_eq!(open_files(None, 50).state, State::Ok);
        assert_eq!(open_files(Some(1_024), 50).state, State::Warn);
        assert_eq!(open_files(Some(40), 50).state, State::Fail);
    }

    #[test]
    fn a_clock_in_the_past_is_a_warning() {
        let built = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        assert_eq!(judge_clock(built - CLOCK_TOLERANCE, built).state, State::Ok);
        assert_eq!(judge_clock(SystemTime::UNIX_EPOCH, built).state, State::Warn);
    }
}
