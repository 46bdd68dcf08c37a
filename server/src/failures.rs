//! Failure counters by place and reason.

use std::collections::BTreeMap;
use tensor_relay_device::Lock;
use tensor_relay_protocol::{AbortReason, EndReason};

/// The place of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FailedAt {
    /// A connection, before its first message.
    Connection,
    /// A session, refused or admitted, that its client did not end.
    Session,
    /// A subscription that the server ended before its topic did.
    Subscription,
    /// A transfer that was aborted.
    Transfer,
}

/// A failure counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailureCount {
    /// The place.
    pub at: FailedAt,
    /// The reason, as an identifier for programs.
    pub reason: &'static str,
    /// The number of occurrences.
    pub count: u64,
}

/// The failure counters. Failures are rare and reasons are constants of this program, so a locked map suffices and
/// stays small.
#[derive(Debug, Default)]
pub(crate) struct Failures(Lock<BTreeMap<(FailedAt, &'static str), u64>>);

impl FailedAt {
    /// Its identifier for programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connection => "connection",
            Self::Session => "session",
            Self::Subscription => "subscription",
            Self::Transfer => "transfer",
        }
    }
}

impl Failures {
    /// Counts one failure.
    pub(crate) fn note(&self, at: FailedAt, reason: &'static str) {
        let mut counts = self.0.lock();
        *counts.entry((at, reason)).or_default() += 1;
    }

    /// Counts the end of a subscription, unless it is a regular one.
    pub(crate) fn note_end(&self, reason: EndReason) {
        let name = match reason {
            EndReason::Evicted => "evicted",
            EndReason::TooManySubscriptions => "too_many_subscriptions",
            EndReason::TooSlow => "too_slow",
            EndReason::Replaced => "replaced",
            EndReason::NotFound => "not_found",
            EndReason::NotSupported => "not_supported",
            _ => return, // The topic ended, or the client lacks permission.
        };
        self.note(FailedAt::Subscription, name);
    }

    /// Counts an aborted version.
    pub(crate) fn note_abort(&self, reason: AbortReason) {
        let name = match reason {
            AbortReason::Corrupt => "corrupt",
            AbortReason::SourceLost => "source_lost",
            AbortReason::Stalled => "stalled",
            AbortReason::OverBudget => "over_budget",
            AbortReason::Withdrawn => "withdrawn",
            AbortReason::Superseded => "superseded",
            AbortReason::DeviceFailed => "device_failed",
            AbortReason::SourceChanged => "source_changed",
            _ => "other",
        };
        self.note(FailedAt::Transfer, name);
    }

    /// The current counts.
    pub(crate) fn counts(&self) -> Vec<FailureCount> {
        let counts = self.0.lock();
        let failure =
            |(&(at, reason), &count): (&(FailedAt, &'static str), &u64)| FailureCount { at, reason, count };
        counts.iter().map(failure).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_regular_end_is_not_a_failure() {
        let failures = Failures::default();
        failures.note_end(EndReason::TopicEnded);
        assert_eq!(failures.counts(), []);
        failures.note_end(EndReason::TooSlow);
        failures.note_end(EndReason::TooSlow);
        failures.note_abort(AbortReason::Corrupt);
        let expected = [(FailedAt::Subscription, "too_slow", 2), (FailedAt::Transfer, "corrupt", 1)];
        assert_eq!(failures.counts(), expected.map(|(at, reason, count)| FailureCount { at, reason, count }));
    }
}
