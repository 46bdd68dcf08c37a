//! The policy of sharing (PROTOCOL.md §3.15), pure: facts in, decisions out.
//!
//! [`Choice`] decides for a taker which chunk it orders of which holder, [`Swarm`] for the origin which chunk it pushes
//! to which member, and whom it names to whom. Neither knows addresses, messages or bytes. Both measure with the time
//! that they are given, draw at random from a seed, and need memory that the chunks and members bound.

mod bits;
mod choice;
#[cfg(test)]
mod decisions;
mod graph;
mod orders;
mod origin;
mod pace;
mod pushes;
mod random;
mod range_counts;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod sites;
mod spread;
mod supply;

pub use choice::Choice;
pub use origin::{Joining, MemberId, Swarm};

/// The most holders that a taker uses at once, and that the origin names to a member.
pub const NEIGHBOURS_MAX: usize = 16;
