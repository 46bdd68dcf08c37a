//! Swarms: clients that take chunks of a version from each other, as this server lets them (PROTOCOL.md §3.15).
//!
//! A client that says where it listens is a [`Sharer`]; its port is dialled back before anybody is told of it. Each of its
//! subscriptions has a [`Seat`] among the members of the version under way, a [`SharedVersion`], and keeps it after its
//! commit, to serve. What is pushed to which member, and who is named to whom, decides `protocol`'s `Swarm`.

mod addresses;
mod dial_back;
mod dialling;
mod grants;
mod held;
mod marks;
mod network;
mod seat;
mod shared_version;
mod sharer;
mod sharing;
mod signals;
mod status;
mod turns;

pub use dialling::PeerDialling;
pub(crate) use grants::Grants;
pub use network::{PeerNetwork, PeerNetworkError};
pub(crate) use seat::Seat;
pub(crate) use shared_version::SharedVersion;
pub(crate) use sharer::Sharer;
pub(crate) use sharing::Sharing;
pub(crate) use status::SwarmCounters;
pub use status::{MemberStatus, SwarmStatus};
