//! The limit on open files and sockets, checked before it is exceeded.

use crate::args::Command;
use anyhow::bail;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tensor_relay_client::Lanes;

/// The descriptors that every command opens after its start: those of the runtime and of signals, and a file to read.
const RUNTIME_DESCRIPTORS: u64 = 12;

/// The descriptors of a lane: a socket, and the runtime of its thread.
const LANE_DESCRIPTORS: u64 = 6;

/// The further descriptors of a command with a network: files, folders, and sockets that determine local addresses.
const FILE_DESCRIPTORS: u64 = 12;

/// The descriptors of an admin port: its runtime, its listener, and a few connections.
const ADMIN_DESCRIPTORS: u64 = 8;

/// The descriptors of a hub: its listener, and the connections of a client.
const HUB_DESCRIPTORS: u64 = 16;

/// The highest limit that is requested. The maximum of a container may be a billion, but programs run by `--exec`
/// inherit the limit, and some programs close every descriptor below it one by one.
const LIMIT_MAX: u64 = 65_536;

/// Raises the limit as far as the system allows, up to [`LIMIT_MAX`].
///
/// # Errors
/// When the limit is too low for `command`.
pub(crate) fn reserve(command: &Command) -> anyhow::Result<()> {
    let limit = raise(getrlimit(Resource::Nofile));
    let (needed, open) = (needed_by(command), open_now());
    if limit < open + needed {
        bail!(
            "the limit of this process is {limit} open files and sockets; {open} are open already, and {needed} more \
             are needed: raise the limit with `ulimit -n {LIMIT_MAX}` in a shell, LimitNOFILE= in systemd, or \
             --ulimit nofile={LIMIT_MAX} in docker"
        );
    }
    Ok(())
}

/// Raises the soft limit as far as the hard one allows, up to [`LIMIT_MAX`], and returns the soft limit in effect.
fn raise(limit: Rlimit) -> u64 {
    let unlimited = u64::MAX;
    let (soft, hard) = (limit.current.unwrap_or(unlimited), limit.maximum.unwrap_or(unlimited));
    let wanted = hard.min(LIMIT_MAX);
    if wanted <= soft {
        return soft;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum }) {
        Ok(()) => wanted,
        Err(_) => soft, // The caller checks whether that is enough.
    }
}

/// The minimum number of descriptors that `command` needs. Connections beyond it wait for free descriptors.
fn needed_by(command: &Command) -> u64 {
    let lanes = |lanes| match lanes {
        Lanes::Fixed(lanes) => u64::from(lanes),
        _ => 1,
    };
    RUNTIME_DESCRIPTORS
        + match command {
            Command::Serve(args) => {
                LANE_DESCRIPTORS + FILE_DESCRIPTORS + admin(args.server.admin.is_wanted(true))
            }
            Command::Subscribe(args) => {
                lanes(args.lanes) * LANE_DESCRIPTORS + FILE_DESCRIPTORS + admin(args.admin.is_wanted(false))
            }
            Command::Hub(args) => {
                args.origins.tickets.len() as u64 * LANE_DESCRIPTORS + FILE_DESCRIPTORS + HUB_DESCRIPTORS
            }
            Command::Relay(args) => {
                let origins = args.origins.tickets.len() as u64 * lanes(args.lanes) * LANE_DESCRIPTORS;
                let hub = if args.hub.is_some() { HUB_DESCRIPTORS } else { 0 };
                origins + LANE_DESCRIPTORS + FILE_DESCRIPTORS + hub + admin(args.server.admin.is_wanted(true))
            }
            Command::Publish(_) | Command::List(_) | Command::Demo(_) | Command::Bench(_) => {
                LANE_DESCRIPTORS + FILE_DESCRIPTORS
            }
            _ => 0,
        }
}

fn admin(is_wanted: bool) -> u64 {
    if is_wanted { ADMIN_DESCRIPTORS } else { 0 }
}

/// The number of open descriptors. Without /proc: the three standard streams.
fn open_now() -> u64 {
    // The listing includes the descriptor of the folder itself.
    std::fs::read_dir("/proc/self/fd").map_or(3, |open| open.count().saturating_sub(1) as u64)
}
