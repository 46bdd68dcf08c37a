use std::{fmt, ptr::NonNull};

use tokio::sync::oneshot;

use crate::region::Keeper;

/// Returns the owner that lent its memory to a [`Region`](crate::Region), once nothing of the region is left: no part,
/// and no [`Bytes`](bytes::Bytes) frozen from one.
///
/// After dropping this, the owner is dropped with the last part.
pub struct GiveBack<O> {
    /// `None` once the owner was returned.
    receiver: Option<oneshot::Receiver<O>>,
}

impl<O> GiveBack<O> {
    /// Waits until nothing of the region is left, and returns the owner; `None` if it was returned before. It waits for
    /// the slowest holder: use a deadline. Cancel safe.
    pub async fn wait(&mut self) -> Option<O> {
        let owner = self.receiver.as_mut()?.await.ok();
        self.receiver = None;
        owner
    }

    /// Returns the owner, unless something of the region is left or it was returned before.
    pub fn try_take(&mut self) -> Option<O> {
        let owner = self.receiver.as_mut()?.try_recv().ok()?;
        self.receiver = None;
        Some(owner)
    }
}

impl<O> fmt::Debug for GiveBack<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GiveBack")
            .field("given", &self.receiver.is_none())
            .finish_non_exhaustive()
    }
}

/// The keeper of a region in a caller's memory.
///
/// The owner is put into a box of its own, behind a plain pointer, before it is asked for its bytes: they may lie
/// inside of it (an array), so it must not move, and neither must a `Box` that claims to be the only way to it.
/// It is asked once and not touched again until nobody reaches its bytes; what it would answer to a second
/// question does not matter.
pub(crate) struct Owned<O> {
    owner: NonNull<O>,
    start: NonNull<u8>,
    len: usize,
    give_back: Option<oneshot::Sender<O>>,
}

impl<O: AsMut<[u8]> + Send + 'static> Owned<O> {
    /// Takes over all bytes of `owner`, and drops it when it is dropped itself.
    pub(crate) fn new(owner: O) -> Self {
        let owner = NonNull::from(Box::leak(Box::new(owner)));
        // Whole before the owner is asked: if that panics, dropping this drops the owner.
        let mut owned = Self { owner, start: NonNull::dangling(), len: 0, give_back: None };
        // SAFETY: `Box::leak` made the pointer, and nothing else has it. The borrow may last for ever (`O` is
        // 'static), so what `as_mut` returns is valid and exclusive for as long as nobody touches the owner
        // through another way; the only one who ever does is the drop of `Owned`.
        let owner: &'static mut O = unsafe { owned.owner.as_mut() };
        let bytes: &'static mut [u8] = owner.as_mut();
        owned.len = bytes.len();
        owned.start = NonNull::from(bytes).cast();
        owned
    }

    /// Like `new`, but returns the owner instead of dropping it.
    pub(crate) fn lent(owner: O) -> (Self, GiveBack<O>) {
        let (sender, receiver) = oneshot::channel();
        let mut owned = Self::new(owner);
        owned.give_back = Some(sender);
        (owned, GiveBack { receiver: Some(receiver) })
    }
}

// SAFETY: the owner may be dropped and given away on any thread, since it is `Send`; its bytes are plain bytes,
// which have no thread.
unsafe impl<O: Send> Send for Owned<O> {}
// SAFETY: `&Owned` gives two numbers; nobody reaches the owner through it.
unsafe impl<O: Send> Sync for Owned<O> {}

// SAFETY: `start` and `len` are set once, from a `&'static mut [u8]`: initialised bytes that any thread may read
// and write, and that the compiler vouches for nobody else reaching, until the owner is touched again. That is
// in `drop`, when the keeper's owner, the region, is gone with all its parts.
unsafe impl<O: Send + 'static> Keeper for Owned<O> {
    fn start(&self) -> NonNull<u8> {
        self.start
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl<O> Drop for Owned<O> {
    fn drop(&mut self) {
        // SAFETY: `new` leaked this box, and this is the one place that takes it back. No part of the region is
        // left (`Keeper`), so nobody reaches the owner's bytes any more.
        let owner = unsafe { Box::from_raw(self.owner.as_ptr()) };
        if let Some(give_back) = self.give_back.take() {
            // Not wanted: dropped here.
            let _ = give_back.send(*owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::Arc,
        time::Duration,
    };

    use tokio::time::timeout;

    use crate::Region;

    #[tokio::test]
    async fn an_owner_comes_back_with_what_was_written() {
        let owner = vec![0; 100];
        let address = owner.as_ptr();
        let (mut region, mut back) = Region::lent_by(owner);
        assert_eq!(region.as_ptr(), address);
        region[..50].fill(7);
        let tail = region.split_off(50).unwrap();
        drop(region);
        assert!(timeout(Duration::ZERO, back.wait()).await.is_err());
        let tail = tail.freeze();
        let clone = tail.slice(40..);
        drop(tail);
        assert!(back.try_take().is_none());
        std::thread::spawn(move || drop(clone)).join().unwrap();
        let owner = back.wait().await.unwrap();
        assert_eq!(owner.as_ptr(), address);
        assert_eq!(owner, [[7; 50], [0; 50]].concat());
        assert_eq!((back.wait().await, back.try_take()), (None, None));
    }

    #[test]
    fn bytes_inside_of_the_owner_do_not_move() {
        let (mut region, mut back) = Region::lent_by([1, 2, 3, 4]);
        let address = region.as_ptr();
        let moved = std::mem::take(&mut region);
        assert_eq!((moved.as_ptr(), &moved[..]), (address, &[1, 2, 3, 4][..]));
        let (mut first, rest) = std::thread::spawn(move || {
            let mut moved = moved;
            (moved.split_to(2).unwrap(), moved)
        })
        .join()
        .unwrap();
        first.fill(9);
        drop(first.join(rest).unwrap());
        assert_eq!(back.try_take(), Some([9, 9, 3, 4]));
    }

    #[test]
    fn an_owner_that_is_not_wanted_back_is_dropped() {
        /// Bytes with a count of living owners.
        struct Owner(Vec<u8>, #[expect(dead_code, reason = "counts")] Arc<()>);
        impl AsMut<[u8]> for Owner {
            fn as_mut(&mut self) -> &mut [u8] {
                &mut self.0
            }
        }
        let alive = Arc::new(());
        let owner = || Owner(vec![1; 8], Arc::clone(&alive));
        let region = Region::from_owner(owner());
        let (lent, back) = Region::lent_by(owner());
        drop(back);
        assert_eq!(Arc::strong_count(&alive), 3);
        drop((region, lent.freeze()));
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[test]
    fn an_owner_is_asked_once() {
        /// Returns other bytes each time.
        struct Fickle(Vec<Vec<u8>>);
        impl AsMut<[u8]> for Fickle {
            fn as_mut(&mut self) -> &mut [u8] {
                self.0.push(vec![self.0.len() as u8; 8]);
                self.0.last_mut().unwrap()
            }
        }
        let (mut region, mut back) = Region::lent_by(Fickle(Vec::new()));
        assert_eq!(region[..], [0; 8]);
        region.fill(5);
        drop(region);
        assert_eq!(back.try_take().unwrap().0, [vec![5; 8]]);
    }

    #[test]
    fn an_owner_that_panics_is_dropped() {
        struct Panics(#[expect(dead_code, reason = "counts")] Arc<()>);
        impl AsMut<[u8]> for Panics {
            fn as_mut(&mut self) -> &mut [u8] {
                panic!("no bytes")
            }
        }
        let alive = Arc::new(());
        let owner = Panics(Arc::clone(&alive));
        assert!(catch_unwind(AssertUnwindSafe(|| Region::lent_by(owner))).is_err());
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[test]
    fn an_owner_without_bytes_is_kept_too() {
        let (region, mut back) = Region::lent_by(Vec::new());
        assert!(region.is_empty() && back.try_take().is_none());
        drop(region.freeze());
        assert_eq!(back.try_take(), Some(Vec::new()));
    }

    #[test]
    fn an_owner_that_may_only_be_sent_is_enough() {
        /// Not `Sync`: its bytes are reached by several threads, and it is not.
        struct Owner(std::cell::Cell<u8>, Box<[u8]>);
        impl AsMut<[u8]> for Owner {
            fn as_mut(&mut self) -> &mut [u8] {
                self.0.set(self.0.get() + 1);
                &mut self.1
            }
        }
        let (mut first, mut back) = Region::lent_by(Owner(std::cell::Cell::new(0), vec![0; 64].into()));
        let mut second = first.split_off(32).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| first.fill(1));
            scope.spawn(|| second.fill(2));
        });
        drop((first, second));
        let owner = back.try_take().unwrap();
        assert_eq!((owner.0.get(), &owner.1[..]), (1, &[[1; 32], [2; 32]].concat()[..]));
    }
}
