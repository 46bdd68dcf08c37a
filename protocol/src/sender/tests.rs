//! Tests of [`Sender`]: against messages, and against a [`Subscriber`](crate::Subscriber).

mod ends;
mod lent;
mod messages;
mod pair;
mod shared;
mod skips;
mod sources;
mod starts;
mod topic;
