//! How many files and sockets this process may have open: looked at before the first one is missing.

use crate::args::Command;
use anyhow::bail;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tensor_relay_client::Lanes;

/// What every command opens beyond what it has at its start: the runtime, its signals, and a file that it reads.
const RUNTIME: u64 = 12;

/// What a lane has: a socket, and the runtime of its thread.
const LANE: u64 = 6;

/// What a server or a subscriber has beside: sockets that look for addresses, files and folders that are read or written.
const FILES: u64 = 12;

/// What an admin port has: its runtime, what it listens on, and a few who ask.
const ADMIN: u64 = 8;

/// The most that is asked for. Programs that `--exec` runs inherit the limit, and some close every number below it one by one;
/// a container's may be a billion.
const ENOUGH: u64 = 65_536;

/// Raises the limit as far as the system lets it be raised, and refuses to begin what cannot be done within it.
pub(crate) fn reserve(command: &Command) -> anyhow::Result<()> {
    let limit = raise(getrlimit(Resource::Nofile));
    let (needed, open) = (needed(command), open_now());
    if limit < open + needed {
        bail!(
            "this process may have {limit} files and sockets open, has {open} already, and needs {needed} more: raise the \
             limit, with `ulimit -n {ENOUGH}` in a shell, LimitNOFILE= in systemd, or --ulimit nofile={ENOUGH} in docker"
        );
    }
    Ok(())
}

/// The limit in force, after it was raised.
fn raise(limit: Rlimit) -> u64 {
    let unlimited = u64::MAX;
    let (soft, hard) = (limit.current.unwrap_or(unlimited), limit.maximum.unwrap_or(unlimited));
    let wanted = hard.min(ENOUGH);
    if wanted <= soft {
        return soft;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum }) {
        Ok(()) => wanted,
        Err(_) => soft, // Then what there is has to do.
    }
}

/// How many more `command` needs at least. What its peers make it open beyond is theirs to wait for.
fn needed(command: &Command) -> u64 {
    let lanes = |lanes| match lanes {
        Lanes::Fixed(lanes) => u64::from(lanes),
        _ => 1,
    };
    RUNTIME
        + match command {
            Command::Serve(args) => LANE + FILES + admin(args.admin.is_wanted(true)),
            Command::Subscribe(args) => lanes(args.lanes) * LANE + FILES + admin(args.admin.is_wanted(false)),
            Command::Publish(_) | Command::List(_) | Command::Demo(_) | Command::Bench(_) => LANE + FILES,
            _ => 0,
        }
}

/// How many files and sockets a server needs to begin.
pub(crate) fn needed_to_serve() -> u64 {
    RUNTIME + LANE + FILES + ADMIN + open_now()
}

fn admin(is_wanted: bool) -> u64 {
    if is_wanted { ADMIN } else { 0 }
}

/// How many are open. Without /proc: the three that every process begins with.
fn open_now() -> u64 {
    // The folder itself is open while it is read.
    std::fs::read_dir("/proc/self/fd").map_or(3, |open| open.count().saturating_sub(1) as u64)
}
