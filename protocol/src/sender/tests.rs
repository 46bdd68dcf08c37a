//! Tests of [`Sender`]: against messages, and against a [`Subscriber`](crate::Subscriber).

mod ends;
mod messages;
mod pair;
mod skips;
mod starts;
mod topic;
