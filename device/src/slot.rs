use std::{
    fmt, mem,
    ops::{Deref, DerefMut},
    sync::Arc,
};

use bytes::Bytes;

use crate::{host_memory::HostMemory, id::Id, ledger::Entry, pool::Shared, region::Region};

/// One staging buffer of a [`SlotPool`](crate::SlotPool): memory, permission and back-pressure at once.
///
/// The holder of a slot may write its bytes and have one chunk in flight. Dropping the slot returns it to the pool, for
/// the oldest waiter if there is one. Its content is unspecified: zeros, or the bytes of an earlier holder.
pub struct Slot {
    region: Region,
    pool: Arc<Shared>,
    /// The ledger entry of the sink's range that the bytes are copied to. It ends with the copy, since the engine holds
    /// the slot until then.
    entry: Option<Arc<Entry>>,
}

impl Slot {
    pub(crate) fn new(region: Region, pool: Arc<Shared>) -> Self {
        Self { region, pool, entry: None }
    }

    /// Attaches the entry of the range that the bytes are copied to.
    pub(crate) fn attach(&mut self, entry: Arc<Entry>) {
        self.entry = Some(entry);
    }

    /// Makes the first `len` bytes immutable and shareable, without a copy. The slot returns to its pool when the last
    /// clone is dropped; for a `len` of zero that is at once.
    ///
    /// # Panics
    ///
    /// When the slot is shorter than `len`.
    pub fn freeze(self, len: usize) -> Bytes {
        Bytes::from_owner(self).slice(..len)
    }

    /// Leaks the slot's memory, since a failed device may still access it, and replaces it in the pool by ordinary
    /// memory. So no caller waits for ever for a slot: its next holder gets the engine's error. The copy's destination
    /// stays in its ledger. If there is no memory, the pool has one slot less. Returns the number of leaked bytes, and
    /// reads none of them.
    pub(crate) fn forfeit(mut self) -> usize {
        let len = self.region.len();
        mem::forget(self.entry.take());
        match HostMemory::lazy(u64::MAX).allocate(len) {
            Ok(region) => mem::forget(mem::replace(&mut self.region, region)),
            Err(_) => mem::forget(self),
        }
        len
    }

    /// The engine that can copy from and to this slot, if one made it.
    pub(crate) fn engine(&self) -> Option<Id> {
        self.pool.engine()
    }
}

impl Deref for Slot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.region
    }
}

impl DerefMut for Slot {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.region
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        &self.region
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.pool.put_back(mem::take(&mut self.region));
    }
}
