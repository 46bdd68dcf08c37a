use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use bytes::Bytes;
use tokio::sync::Notify;

use crate::foreign::ForeignBytes;

/// A loan of bytes, which reports to their owner when the last reference to them is dropped.
///
/// Why: the lender of a version's tensors may write to them again only when the last reader has finished, and QUIC
/// keeps slices until they are acknowledged. The loan ends when this value and every clone and slice of all lent bytes
/// are dropped: drop this value when everything is lent.
///
/// A loan uses no thread and no timer. Leaked bytes stay on loan for ever.
#[derive(Debug)]
pub struct Loan {
    count: Arc<LoanRef>,
}

impl Loan {
    /// Starts a loan, and returns the handle that reports its end.
    pub fn new() -> (Self, Returned) {
        let end = Arc::new(End::default());
        let count = Arc::new(LoanRef { end: Arc::clone(&end) });
        (Self { count }, Returned { end })
    }

    /// Lends `bytes`, without a copy. Costs one small allocation.
    ///
    /// The result is on loan; clones that were made of `bytes` before are not.
    pub fn lend(&self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(Lent { bytes, _count: Arc::clone(&self.count) })
    }

    /// Lends bytes of another owner's memory.
    pub fn lend_foreign(&self, bytes: ForeignBytes) -> ForeignBytes {
        bytes.keep(Arc::clone(&self.count))
    }
}

/// A handle that reports the end of a [`Loan`]. Clones are equivalent.
///
/// The loan ends after all reads of the bytes, so whoever observes its end may write or free the bytes.
#[derive(Debug, Clone)]
pub struct Returned {
    end: Arc<End>,
}

impl Returned {
    /// Whether the loan has ended. Once true, it stays true.
    pub fn is_returned(&self) -> bool {
        // Pairs with the release in the drop of `LoanRef`.
        self.end.returned.load(Ordering::Acquire)
    }

    /// Resolves when the loan has ended, at once if it already has. This waits for the slowest reader: use a deadline.
    /// Cancel safe.
    pub async fn wait(&self) {
        // Created before the check, so that an end in between wakes this waiter.
        let woken = self.end.woken.notified();
        if !self.is_returned() {
            woken.await;
        }
    }
}

/// The state shared by a loan and its [`Returned`] handles: whether the loan has ended.
#[derive(Debug, Default)]
struct End {
    returned: AtomicBool,
    woken: Notify,
}

/// The reference count shared by the loan and all lent bytes. Dropping the last reference ends the loan.
#[derive(Debug)]
struct LoanRef {
    end: Arc<End>,
}

impl Drop for LoanRef {
    fn drop(&mut self) {
        self.end.returned.store(true, Ordering::Release);
        self.end.woken.notify_waiters();
    }
}

/// Bytes on loan. The fields are dropped in this order, so that the loan ends after the bytes are dropped.
struct Lent {
    bytes: Bytes,
    _count: Arc<LoanRef>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::{collection::vec, prelude::*};
    use tokio::{task::yield_now, time::timeout};

    use super::*;

    #[test]
    fn bytes_on_loan_are_the_bytes() {
        let bytes = Bytes::from(vec![1, 2, 3]);
        let (loan, _) = Loan::new();
        assert_eq!(loan.lend(bytes.clone()).as_ptr(), bytes.as_ptr());
    }

    #[tokio::test]
    async fn an_unused_loan_ends_when_it_is_dropped() {
        let (loan, returned) = Loan::new();
        assert!(!returned.is_returned());
        drop(loan);
        returned.wait().await;
    }

    #[tokio::test]
    async fn every_waiter_is_woken_at_the_end() {
        let (loan, returned) = Loan::new();
        let lent = loan.lend(Bytes::from_static(b"tensor")).slice(2..3);
        drop(loan);
        let wait = |returned: Returned| tokio::spawn(async move { returned.wait().await });
        let waiting = [wait(returned.clone()), wait(returned.clone())];
        yield_now().await;
        assert!(waiting.iter().all(|waits| !waits.is_finished()));
        std::thread::spawn(move || drop(lent)).join().unwrap();
        for waits in waiting {
            waits.await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_cancelled_wait_can_be_repeated() {
        let (loan, returned) = Loan::new();
        assert!(timeout(Duration::ZERO, returned.wait()).await.is_err());
        drop(loan);
        returned.wait().await;
    }

    #[test]
    fn the_owner_of_the_bytes_is_dropped_before_the_loan_ends() {
        /// An owner that checks, when it is dropped, that the loan has not ended yet.
        struct Owner(Returned);
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                b"tensor"
            }
        }
        impl Drop for Owner {
            fn drop(&mut self) {
                assert!(!self.0.is_returned());
            }
        }
        let (loan, returned) = Loan::new();
        let lent = loan.lend(Bytes::from_owner(Owner(returned.clone())));
        drop(loan);
        drop(lent);
        assert!(returned.is_returned());
    }

    #[derive(Debug, Clone)]
    enum Op {
        Lend(usize),
        Clone(usize),
        Slice(usize, usize),
        Drop(usize),
    }

    fn any_op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (0usize..9).prop_map(Op::Lend),
            any::<usize>().prop_map(Op::Clone),
            (any::<usize>(), 0usize..9).prop_map(|(i, at)| Op::Slice(i, at)),
            any::<usize>().prop_map(Op::Drop),
        ]
    }

    proptest! {
        #[test]
        fn a_loan_is_over_with_the_last_slice(ops in vec(any_op(), 0..40)) {
            let (loan, returned) = Loan::new();
            let mut held: Vec<Bytes> = Vec::new();
            for op in ops {
                let count = held.len();
                match op {
                    Op::Lend(len) => held.push(loan.lend(vec![7; len].into())),
                    Op::Clone(i) if count > 0 => held.push(held[i % count].clone()),
                    Op::Slice(i, at) if count > 0 => {
                        let bytes = &mut held[i % count];
                        let tail = bytes.split_off(at.min(bytes.len()));
                        held.push(tail);
                    }
                    Op::Drop(i) if count > 0 => drop(held.swap_remove(i % count)),
                    _ => {}
                }
                prop_assert!(!returned.is_returned());
            }
            drop(loan);
            // Empty bytes may or may not hold the loan; all others do.
            held.retain(|bytes| !bytes.is_empty());
            while let Some(bytes) = held.pop() {
                prop_assert!(!returned.is_returned());
                drop(bytes);
            }
            prop_assert!(returned.is_returned());
        }
    }
}
