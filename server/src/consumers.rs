//! The consumers that committed or loaded a version, each counted once.

use crate::access::Principal;
use std::{collections::BTreeSet, sync::Arc};
use tensor_relay_device::Lock;
use tensor_relay_protocol::Consumer;
use tokio::sync::watch;

/// Counts the consumers that committed one version, or loaded it, for the publisher's `Publication`.
#[derive(Debug, Default)]
pub(crate) struct Consumers {
    count: watch::Sender<u64>,
    /// The named ones, at most [`NAMED_MAX`].
    named: Lock<BTreeSet<(Arc<str>, [u8; 16])>>,
}

/// The most named consumers of a version that are told apart; more are not counted. So a client that invents ids needs
/// no more than 4 MB for each version. Versions have at most thousands of subscribers.
const NAMED_MAX: usize = 1 << 16;

/// For whom the commits of a subscription are counted.
#[derive(Debug, Clone)]
pub(crate) enum ConsumerId {
    Own,
    Nobody,
    /// The principal, and its id of the consumer.
    Named(Arc<str>, [u8; 16]),
}

impl ConsumerId {
    pub(crate) fn of(principal: &Principal, consumer: Consumer) -> Self {
        match consumer {
            Consumer::Own => Self::Own,
            Consumer::Nobody => Self::Nobody,
            Consumer::Named(id) => Self::Named(principal.to_string().into(), id),
        }
    }
}

impl Consumers {
    /// Watches the number of consumers. Closes when this is dropped.
    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.count.subscribe()
    }

    /// Counts `consumer`, unless it was before.
    pub(crate) fn count(&self, consumer: &ConsumerId) {
        let is_new = match consumer {
            ConsumerId::Own => true,
            ConsumerId::Nobody => false,
            ConsumerId::Named(principal, id) => {
                let mut named = self.named.lock();
                named.len() < NAMED_MAX && named.insert((Arc::clone(principal), *id))
            }
        };
        if is_new {
            self.count.send_modify(|count| *count += 1);
        }
    }
}
