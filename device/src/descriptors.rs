//! The free descriptors of this process.

use rustix::process::{Resource, getrlimit};
use std::os::fd::{AsFd, AsRawFd};

/// Whether half of the descriptors that this process may have are in use: the rest is for connections. `latest` is a
/// descriptor that was just made: the kernel gives out the lowest free number, so a number is also how many are in use.
pub fn descriptors_are_scarce(latest: impl AsFd) -> bool {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    latest.as_fd().as_raw_fd() as u64 >= most / 2
}
