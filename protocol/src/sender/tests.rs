//! Tests of [`Sender`]: against messages, and against a [`Subscriber`](crate::Subscriber).

mod messages;
mod pair;
mod sources;
mod topic;
