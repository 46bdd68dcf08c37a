//! [`Signals`]: what a member's subscription is to be told, until its task has time for it.

use std::collections::BTreeMap;
use tensor_relay_device::Lock;
use tensor_relay_protocol::{ServerMessage, SubscriptionId};
use tensor_relay_transport::sending::Input;
use tokio::sync::Notify;

/// What happened to one subscription of a member since it looked. Signals of one kind are merged, so that a burst of changes
/// costs one message.
#[derive(Debug, Default)]
pub(super) struct Signals {
    raised: Lock<Raised>,
    wake: Notify,
}

/// The signals that are raised.
#[derive(Debug, Default)]
pub(super) struct Raised {
    /// There may be a chunk to push to it.
    pub(super) is_woken: bool,
    /// It holds more chunks than before.
    pub(super) has_progress: bool,
    /// Its sources may have changed.
    pub(super) are_sources_changed: bool,
    /// The keys whose owners lost their right to take from it, or have it again (true).
    pub(super) revocations: BTreeMap<[u8; 32], bool>,
}

impl Signals {
    /// Forgets the signals of the last version. What is said of rights stays: it is about all versions of the topic.
    pub(super) fn begin_version(&self) {
        let mut raised = self.raised.lock();
        *raised = Raised { revocations: std::mem::take(&mut raised.revocations), ..Raised::default() };
    }

    /// Takes the next message about a right that was lost, or is restored.
    pub(super) fn take_revocation(&self, subscription: SubscriptionId) -> Option<Input> {
        let (taker, restored) = self.raised.lock().revocations.pop_first()?;
        Some(Input::Tell(Box::new(ServerMessage::Revoke { subscription, taker, restored })))
    }

    /// Waits for the next such message. Cancel safe, for one waiter.
    pub(super) async fn revocation(&self, subscription: SubscriptionId) -> Input {
        loop {
            if let Some(revocation) = self.take_revocation(subscription) {
                return revocation;
            }
            self.raised().await;
        }
    }

    /// Raises signals, and wakes the subscription.
    pub(super) fn raise(&self, change: impl FnOnce(&mut Raised)) {
        change(&mut self.raised.lock());
        self.wake.notify_one();
    }

    /// Takes or looks at the signals.
    pub(super) fn with<R>(&self, look: impl FnOnce(&mut Raised) -> R) -> R {
        look(&mut self.raised.lock())
    }

    /// Waits until a signal is raised; at once, if one was since the last call that returned. Cancel safe, for one waiter.
    pub(super) async fn raised(&self) {
        self.wake.notified().await;
    }
}
