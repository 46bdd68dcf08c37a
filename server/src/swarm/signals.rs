//! [`Signals`]: what a member's subscription is to be told, until its task has time for it.

use std::collections::BTreeMap;
use tensor_relay_device::Lock;
use tokio::sync::Notify;

/// What happened to one member since its subscription looked. Signals of one kind are merged, so that a burst of changes
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
