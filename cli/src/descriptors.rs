//! The limit on open files and sockets, checked before it is exceeded.

use crate::args::Command;
use anyhow::bail;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tensor_relay_client::Lanes;

/// The descriptors that every command opens after its start: the runtime, its signals, and a file that it reads.
const RUNTIME: u64 = 12;

/// The descriptors of a lane: a socket, and the runtime of its thread.
const LANE: u64 = 6;

/// The further descriptors of a server or a subscriber: sockets to find addresses, and files and folders.
const FILES: u64 = 12;

/// The descriptors of an admin port: its runtime, its listener, and a few connections.
const ADMIN: u64 = 8;

/// The highest limit requested. Programs run by `--exec` inherit it, and some close every number below it one by one; a
/// container's may be a billion.
const ENOUGH: u64 = 65_536;

/// Raises the limit as far as the system allows, and refuses a command that cannot work within it.
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

/// The effective limit, after raising it.
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

/// The least number that `command` needs. Peers beyond it have to wait.
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

/// The descriptors that a server needs to start.
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
