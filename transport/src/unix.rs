//! Unix sockets: lanes between processes of one host, and descriptors that are passed over them.

mod descriptors;
mod listener;
mod messages;
mod stream;

use std::fs;

pub use descriptors::{CannotPass, Descriptors};
pub use listener::{SocketError, SocketListener};
pub use messages::{DESCRIPTORS_MAX, LostDescriptors, receive, send};
pub(crate) use stream::SocketStream;

/// The result of [`overflow_uid`] if the system does not report it.
const OVERFLOW_UID: u32 = 65_534;

/// The uid that the system reports for every user without a number in this user namespace, such as root of a container
/// that has its own. Access must not be given to it, since it stands for many users. Reads a file.
pub fn overflow_uid() -> u32 {
    let text = fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(OVERFLOW_UID)
}
