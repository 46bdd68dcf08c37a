use std::{
    fmt,
    num::NonZeroUsize,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    slice,
    sync::Arc,
};

use bytes::Bytes;

use crate::{
    HostMemory,
    mapping::PAGE_BYTES,
    owner::{GiveBack, Owned},
    shared_range::{NotShared, SharedFile, SharedRange},
};

/// An exclusive handle on a byte range of memory, pooled or a caller's: what `BytesMut` is to the heap.
///
/// An allocated region starts on a page, so that tensors in it keep their 256-byte alignment; its parts start where
/// they were cut, and a caller's memory where the caller placed it. Splitting and joining move no byte, and cost one
/// update of an atomic reference count. When the last part and the last [`Bytes`] frozen from any part are dropped, the
/// memory returns to its cache, pool or owner.
///
/// The default is the empty region, which holds no memory.
pub struct Region {
    start: NonNull<u8>,
    len: usize,
    /// Owns the memory. `None` only for an empty region.
    keeper: Option<Arc<dyn Keeper>>,
}

impl Region {
    /// Takes over all bytes of `keeper`, which is dropped with the region.
    pub(crate) fn new(keeper: impl Keeper) -> Self {
        Self { start: keeper.start(), len: keeper.len(), keeper: Some(Arc::new(keeper)) }
    }

    /// Makes a region of all bytes of `owner`, in place: memory that a caller provides, such as a `Vec<u8>` or a tensor
    /// of another library. The owner is dropped with the last part of the region, on the thread that drops that part.
    ///
    /// `as_mut` is called once, now. Costs two small allocations.
    pub fn from_owner<O: AsMut<[u8]> + Send + 'static>(owner: O) -> Self {
        Self::new(Owned::new(owner))
    }

    /// Like [`from_owner`](Self::from_owner). The handle gives the owner back, with the bytes that were written, once
    /// every part of the region and every `Bytes` frozen from one are dropped.
    pub fn lent_by<O: AsMut<[u8]> + Send + 'static>(owner: O) -> (Self, GiveBack<O>) {
        let (owned, give_back) = Owned::lent(owner);
        (Self::new(owned), give_back)
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Cuts off and returns the first `at` bytes; `self` keeps the remaining ones. `None`, and nothing changes, if the
    /// region is shorter than `at`.
    pub fn split_to(&mut self, at: usize) -> Option<Self> {
        let rest = self.split_off(at)?;
        Some(std::mem::replace(self, rest))
    }

    /// Cuts off and returns all bytes after the first `at`, which `self` keeps. `None`, and nothing changes, if the
    /// region is shorter than `at`.
    pub fn split_off(&mut self, at: usize) -> Option<Self> {
        let len = self.len.checked_sub(at)?;
        // SAFETY: `at` is at most `self.len`, so this stays within or one past the range that `keeper` keeps.
        let start = unsafe { self.start.add(at) };
        self.len = at;
        Some(Self { start, len, keeper: self.keeper.clone() })
    }

    /// Undoes a split: joins `self` and `next` to one region if `next` begins right where `self` ends, in the same
    /// memory. Otherwise both are returned unchanged.
    pub fn join(self, next: Self) -> Result<Self, (Self, Self)> {
        if !self.is_followed_by(&next) {
            return Err((self, next));
        }
        Ok(Self { start: self.start, len: self.len + next.len, keeper: self.keeper })
    }

    /// Makes the bytes immutable and shareable, without a copy. The memory is held until the last clone is dropped.
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }

    /// The bytes as other processes can map them, if they lie in [shareable](crate::HostMemory::shareable) memory. The
    /// memory is held, and not reused, until the last clone of the result is dropped.
    ///
    /// # Errors
    /// [`NotShared`]: why they do not.
    pub fn shared(&self) -> Result<SharedRange, NotShared> {
        let keeper = self.keeper.as_ref().ok_or(NotShared::Private)?;
        let Some(file) = keeper.file() else {
            return Err(if keeper.was_refused() { NotShared::Refused } else { NotShared::Private });
        };
        let offset_bytes = self.start.addr().get() - keeper.start().addr().get();
        let (file, keeper) = (Arc::clone(file), Arc::clone(keeper));
        Ok(SharedRange::in_memory(file, offset_bytes as u64, self.len as u64, keeper))
    }

    /// The address of the first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    fn is_followed_by(&self, next: &Self) -> bool {
        let same_memory = match (&self.keeper, &next.keeper) {
            (Some(keeper), Some(other)) => Arc::ptr_eq(keeper, other),
            (None, None) => true,
            _ => false,
        };
        same_memory && self.start.addr().get() + self.len == next.start.addr().get()
    }
}

// SAFETY: a region is the only handle on its bytes (guaranteed by `Keeper` and by splitting), like a `Box<[u8]>`.
unsafe impl Send for Region {}
// SAFETY: `&Region` only reads.
unsafe impl Sync for Region {}

impl Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are initialised and stay valid while `keeper` lives. Only this region accesses them, and
        // `&self` excludes writers; nobody calls this any more once others may write them (`VolatileBytes`).
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` excludes every other reader and writer.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for Region {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Default for Region {
    fn default() -> Self {
        Self { start: NonNull::without_provenance(EMPTY_ADDRESS), len: 0, keeper: None }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("start", &self.start)
            .field("len", &self.len)
            .finish()
    }
}

/// The owner of the memory under a region, which returns the memory when it is dropped: a mapping of the host's,
/// page-locked memory of a GPU's engine, or a caller's.
///
/// # Safety
///
/// For as long as the keeper lives, `start` and `len` are constant and name initialised bytes, valid for reads and
/// writes by any thread, that are accessed only through the region made of this keeper. Dropping a keeper is allowed on
/// any thread.
pub(crate) unsafe trait Keeper: Send + Sync + 'static {
    fn start(&self) -> NonNull<u8>;
    fn len(&self) -> usize;

    /// The file of which these bytes are the beginning, if other processes can map it.
    fn file(&self) -> Option<&Arc<SharedFile>> {
        None
    }

    /// Whether other processes could map the bytes, had the system not refused it.
    fn was_refused(&self) -> bool {
        false
    }

    /// Whether other processes can map the bytes, and huge pages may take the place of small ones.
    fn has_small_pages(&self) -> bool {
        false
    }

    /// Puts huge pages in the place of the small ones of the next piece, if other processes can map the bytes. Returns
    /// whether another piece remains.
    fn enlarge_next_pages(&self) -> bool {
        false
    }

    /// The allocator that the bytes go back to, if any.
    fn memory(&self) -> Option<HostMemory> {
        None
    }
}

/// The address of empty regions: no memory, but on a page boundary, like that of an allocated region.
const EMPTY_ADDRESS: NonZeroUsize = NonZeroUsize::new(PAGE_BYTES).expect("a page has bytes");

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};
    use rustix::io::pread;

    use super::*;
    use crate::HostMemory;

    fn allocate(len: usize) -> Region {
        HostMemory::new(u64::MAX).allocate(len).unwrap()
    }

    #[derive(Debug, Clone, Copy)]
    enum Kind {
        Owned,
        Pooled,
        Shared,
    }

    /// A region whose bytes count up, in memory of this kind, and its model: the same bytes on the heap.
    fn counted(len: usize, kind: Kind) -> (Region, Vec<u8>) {
        let model: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        let mut region = match kind {
            Kind::Owned => Region::from_owner(vec![0; len]),
            Kind::Pooled => allocate(len),
            Kind::Shared => {
                let mut whole = HostMemory::new(u64::MAX).shareable().allocate(1 << 20).unwrap();
                whole.split_to(len).unwrap()
            }
        };
        region.copy_from_slice(&model);
        (region, model)
    }

    #[test]
    fn regions_of_different_memory_do_not_join() {
        let (a, b) = allocate(4096).join(allocate(4096)).unwrap_err();
        assert_eq!((a.len(), b.len()), (4096, 4096));
    }

    #[test]
    fn parts_join_only_in_order_and_without_a_gap() {
        let mut first = allocate(30);
        let mut second = first.split_off(10).unwrap();
        let third = second.split_off(10).unwrap();
        let (first, third) = first.join(third).unwrap_err();
        let (second, first) = second.join(first).unwrap_err();
        let whole = first.join(second).unwrap().join(third).unwrap();
        assert_eq!(whole.len(), 30);
    }

    #[test]
    fn cutting_past_the_end_changes_nothing() {
        let mut region = allocate(10);
        assert!(region.split_to(11).is_none());
        assert!(region.split_off(usize::MAX).is_none());
        assert_eq!(region.len(), 10);
    }

    #[test]
    fn empty_regions_are_aligned_and_join() {
        let mut empty = Region::default();
        assert_eq!(empty.as_ptr().addr() % 256, 0);
        let also_empty = empty.split_off(0).unwrap();
        assert!(empty.join(also_empty).unwrap().freeze().is_empty());
    }

    #[test]
    fn parts_are_written_from_several_threads() {
        let mut rest = allocate(1 << 16);
        let parts: Vec<Region> = (0..4).map(|_| rest.split_to(1 << 14).unwrap()).collect();
        let fill = |(i, mut part): (usize, Region)| {
            std::thread::spawn(move || {
                part.fill(i as u8);
                part
            })
        };
        let threads: Vec<_> = parts.into_iter().enumerate().map(fill).collect();
        let parts = threads.into_iter().map(|thread| thread.join().unwrap());
        let whole = parts.reduce(|whole, part| whole.join(part).unwrap()).unwrap();
        assert!(
            whole
                .chunks(1 << 14)
                .enumerate()
                .all(|(i, chunk)| chunk.iter().all(|&b| b == i as u8))
        );
    }

    #[derive(Debug, Clone)]
    enum Op {
        SplitTo(usize, usize),
        SplitOff(usize, usize),
        Join(usize, usize),
        Write(usize, u8),
    }

    fn any_op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (any::<usize>(), 0usize..300).prop_map(|(part, at)| Op::SplitTo(part, at)),
            (any::<usize>(), 0usize..300).prop_map(|(part, at)| Op::SplitOff(part, at)),
            (any::<usize>(), any::<usize>()).prop_map(|(part, next)| Op::Join(part, next)),
            (any::<usize>(), any::<u8>()).prop_map(|(part, byte)| Op::Write(part, byte)),
        ]
    }

    fn any_kind() -> impl Strategy<Value = Kind> {
        prop_oneof![Just(Kind::Owned), Just(Kind::Pooled), Just(Kind::Shared)]
    }

    /// A part, its start in the original region, and its expected bytes.
    type Part = (Region, usize, Vec<u8>);

    fn apply(parts: &mut Vec<Part>, op: Op) {
        let count = parts.len();
        match op {
            Op::SplitTo(i, at) => {
                let (region, begin, model) = &mut parts[i % count];
                let head = region.split_to(at);
                assert_eq!(head.is_some(), at <= model.len());
                if let Some(head) = head {
                    let rest = model.split_off(at);
                    let new = (head, *begin, std::mem::replace(model, rest));
                    *begin += at;
                    parts.push(new);
                }
            }
            Op::SplitOff(i, at) => {
                let (region, begin, model) = &mut parts[i % count];
                let rest = region.split_off(at);
                assert_eq!(rest.is_some(), at <= model.len());
                if let Some(rest) = rest {
                    let new = (rest, *begin + at, model.split_off(at));
                    parts.push(new);
                }
            }
            Op::Join(i, next) => {
                if count < 2 {
                    return;
                }
                let (a, begin, mut model) = parts.swap_remove(i % count);
                let (b, next_begin, next_model) = parts.swap_remove(next % (count - 1));
                match a.join(b) {
                    Ok(joined) => {
                        assert_eq!(begin + model.len(), next_begin);
                        model.extend(next_model);
                        parts.push((joined, begin, model));
                    }
                    Err((a, b)) => {
                        assert_ne!(begin + model.len(), next_begin);
                        parts.push((a, begin, model));
                        parts.push((b, next_begin, next_model));
                    }
                }
            }
            Op::Write(i, byte) => {
                let (region, _, model) = &mut parts[i % count];
                region.fill(byte);
                model.fill(byte);
            }
        }
    }

    proptest! {
        #[test]
        fn parts_behave_as_separate_vectors(len in 0usize..600, kind in any_kind(), ops in vec(any_op(), 0..60)) {
            let (whole, model) = counted(len, kind);
            let mut parts = vec![(whole, 0, model)];
            for op in ops {
                apply(&mut parts, op);
                for (region, _, model) in &parts {
                    prop_assert_eq!(&region[..], &model[..]);
                }
            }
            for (region, begin, model) in &parts {
                let shared = region.shared();
                prop_assert_eq!(shared.is_ok(), matches!(kind, Kind::Shared));
                let Ok(shared) = shared else { continue };
                prop_assert_eq!((shared.offset_bytes(), shared.len_bytes()), (*begin as u64, model.len() as u64));
                let mut seen = vec![0; model.len()];
                prop_assert_eq!(pread(shared.descriptor(), &mut seen, *begin as u64), Ok(model.len()));
                prop_assert_eq!(&seen, model);
            }
            // An empty part may remain at an offset inside a joined one.
            parts.retain(|(region, ..)| !region.is_empty());
            parts.sort_by_key(|(_, begin, _)| *begin);
            let whole = parts.into_iter().map(|(region, ..)| region).reduce(|a, b| a.join(b).unwrap());
            prop_assert_eq!(whole.unwrap_or_default().len(), len);
        }
    }
}
