//! [`Turns`]: bounds the ports that are dialled at once, of all clients and of each.

use std::{collections::BTreeMap, sync::Arc};
use tensor_relay_device::Lock;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The ports that are dialled at once, of all clients.
const AT_ONCE_MAX: usize = 32;

/// Those of the clients of one principal: its silent ports, which take five seconds each, leave others as many.
const AT_ONCE_EACH_MAX: usize = AT_ONCE_MAX / 2;

/// The turns to dial a port. A principal's clients wait for each other before they wait for others, so that they have at
/// most half of the turns, and half a queue of them before the next principal's.
#[derive(Debug)]
pub(super) struct Turns {
    all: Arc<Semaphore>,
    each: Lock<BTreeMap<Arc<str>, Arc<Semaphore>>>,
}

/// A turn, until this is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    _of_all: OwnedSemaphorePermit,
    _of_each: OwnedSemaphorePermit,
}

impl Default for Turns {
    fn default() -> Self {
        Self { all: Arc::new(Semaphore::new(AT_ONCE_MAX)), each: Lock::default() }
    }
}

impl Turns {
    /// Waits for a turn of a client of `principal`. Cancel safe.
    pub(super) async fn take(&self, principal: &Arc<str>) -> Option<Turn> {
        let own = {
            let mut each = self.each.lock();
            each.retain(|_, semaphore| Arc::strong_count(semaphore) > 1);
            let own = each.entry(Arc::clone(principal));
            Arc::clone(own.or_insert_with(|| Arc::new(Semaphore::new(AT_ONCE_EACH_MAX))))
        };
        let of_each = own.acquire_owned().await.ok()?;
        let of_all = Arc::clone(&self.all).acquire_owned().await.ok()?;
        Some(Turn { _of_all: of_all, _of_each: of_each })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        pin::pin,
        task::{Context, Poll, Waker},
    };

    /// Goal: however many ports one principal has dialled, another one's is dialled at once.
    #[test]
    fn no_principal_holds_all_turns() {
        let (turns, [one, other, third]) =
            (Turns::default(), ["one", "other", "third"].map(Arc::<str>::from));
        let take = |principal| match pin!(turns.take(principal)).poll(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Ready(turn) => turn,
            Poll::Pending => None,
        };
        let mut held: Vec<Turn> = std::iter::from_fn(|| take(&one)).collect();
        assert_eq!(held.len(), AT_ONCE_EACH_MAX);
        held.extend(std::iter::from_fn(|| take(&other)));
        assert_eq!(held.len(), AT_ONCE_MAX);
        assert!(take(&third).is_none(), "all are taken");
        held.truncate(1);
        assert!(take(&third).is_some() && take(&one).is_some());
        drop(held);
        assert!(take(&other).is_some());
        assert_eq!(turns.each.lock().len(), 1, "those without a turn are forgotten");
    }
}
