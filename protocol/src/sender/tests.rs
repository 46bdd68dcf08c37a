//! Tests of [`Sender`]: against messages, and against a [`Subscriber`](crate::Subscriber).

mod ends;
mod messages;
mod pair;
mod skips;
mod sources;
mod starts;
mod topic;
