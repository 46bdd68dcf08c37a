use std::{fmt, ptr::NonNull};

use tokio::sync::oneshot;

use crate::region::Keeper;

/// A handle that returns the owner whose memory was lent to a [`Region`](crate::Region), once every part of the region
/// and all [`Bytes`](bytes::Bytes) frozen from one are dropped.
///
/// If this handle is dropped first, the owner is dropped with the last part.
pub struct GiveBack<O> {
    /// `None` once the owner was returned.
    receiver: Option<oneshot::Receiver<O>>,
}

impl<O> GiveBack<O> {
    /// Waits until all parts of the region are dropped, and returns the owner; `None` if it was returned before. This
    /// waits for the slowest holder: use a deadline. Cancel safe.
    pub async fn wait(&mut self) -> Option<O> {
        let owner = self.receiver.as_mut()?.await.ok();
        self.receiver = None;
        owner
    }

    /// Returns the owner; `None` while any part of the region exists, or if the owner was returned before.
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
/// The owner is moved into a box before `as_mut` is called: its bytes may lie inside of it (an array), so it must not
/// move. The box is leaked and held by a plain pointer, since a `Box` claims to be the only access to its content.
/// `as_mut` is called once, and the owner is not touched again until nobody accesses its bytes; a second call could
/// return other bytes.
pub(crate) struct Owned<O> {
    owner: NonNull<O>,
    start: NonNull<u8>,
    len: usize,
    give_back: Option<oneshot::Sender<O>>,
}

impl<O: AsMut<[u8]> + Send + 'static> Owned<O> {
    /// Takes over all bytes of `owner`, which is dropped with the result.
    pub(crate) fn new(owner: O) -> Self {
        let owner = NonNull::from(Box::leak(Box::new(owner)));
        // Complete before `as_mut` is called: if that panics, dropping `owned` drops the owner.
        let mut owned = Self { owner, start: NonNull::dangling(), len: 0, give_back: None };
        // SAFETY: `Box::leak` made the pointer, and nothing else has it. The borrow may last for ever (`O` is 'static),
        // so the slice that `as_mut` returns is valid and exclusive for as long as nobody accesses the owner otherwise;
        // only the drop of `Owned` does.
        let owner: &'static mut O = unsafe { owned.owner.as_mut() };
        let bytes: &'static mut [u8] = owner.as_mut();
        owned.len = bytes.len();
        owned.start = NonNull::from(bytes).cast();
        owned
    }

    /// Like `new`, but when the result is dropped, the owner goes to the [`GiveBack`] handle.
    pub(crate) fn lent(owner: O) -> (Self, GiveBack<O>) {
        let (sender, receiver) = oneshot::channel();
        let mut owned = Self::new(owner);
        owned.give_back = Some(sender);
        (owned, GiveBack { receiver: Some(receiver) })
    }
}

// SAFETY: the owner may be dropped and returned on any thread, since it is `Send`; its bytes are plain bytes, which are
// bound to no thread.
unsafe impl<O: Send> Send for Owned<O> {}
// SAFETY: `&Owned` returns only an address and a length; nobody accesses the owner through it.
unsafe impl<O: Send> Sync for Owned<O> {}

// SAFETY: `start` and `len` are set once, from a `&'static mut [u8]`: initialised bytes that any thread may read and
// write, and that, as the compiler guarantees, nobody else accesses until the owner is touched again. That happens in
// `drop`, after the region that holds this keeper was dropped with all its parts.
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
        // SAFETY: `new` leaked this box, and only this call takes it back. All parts of the region are dropped
        // (`Keeper`), so nobody accesses the owner's bytes any more.
        let owner = unsafe { Box::from_raw(self.owner.as_ptr()) };
        if let Some(give_back) = self.give_back.take() {
            // If the `GiveBack` was dropped, this drops the owner.
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
    async fn an_owner_is_returned_with_the_written_bytes() {
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
    fn an_owner_without_a_give_back_handle_is_dropped() {
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
    fn as_mut_is_called_once() {
        /// An owner whose `as_mut` returns other bytes on each call.
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
    fn an_owner_without_bytes_is_returned_too() {
        let (region, mut back) = Region::lent_by(Vec::new());
        assert!(region.is_empty() && back.try_take().is_none());
        drop(region.freeze());
        assert_eq!(back.try_take(), Some(Vec::new()));
    }

    #[test]
    fn an_owner_need_not_be_sync() {
        /// An owner that is not `Sync`. Several threads access its bytes, but only one thread the owner itself.
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
