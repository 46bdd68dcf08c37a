use std::{
    collections::BTreeMap,
    ffi::c_void,
    ops::Range,
    ptr,
    sync::{Arc, Weak},
};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use crate::{
    memory::{Freed, Missing},
    status::{Answer, Status},
    uses::{Use, Uses},
};

/// The page-locked host memory: blocks that this driver allocated, and blocks that the program registered.
#[derive(Debug, Default)]
pub(crate) struct HostMemory {
    blocks: BTreeMap<usize, HostBlock>,
    /// The starts and lengths of freed blocks. Their addresses stay reserved, and accesses fault unless
    /// a copy used the block when it was freed.
    freed: BTreeMap<usize, usize>,
    /// The ranges that copies to a device read, until they have ended.
    reads: Vec<(Range<usize>, Weak<()>)>,
}

#[derive(Debug)]
struct HostBlock {
    bytes: usize,
    /// The device in whose context the block was page-locked. The block is removed when that context is destroyed.
    device: usize,
    origin: Locked,
    uses: Uses,
}

/// How host memory was page-locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Locked {
    /// `cuMemHostAlloc`
    Allocated,
    /// `cuMemHostRegister`
    Registered,
}

/// The kind of a range of host memory.
#[derive(Debug)]
pub(crate) enum HostRange {
    /// The whole range is page-locked.
    PageLocked(Use),
    /// No part is page-locked.
    Pageable,
    /// Only a part is page-locked, which is an error.
    Mixed,
    /// The range begins in a freed block.
    Freed,
}

impl HostMemory {
    pub(crate) fn allocate(&mut self, bytes: usize, device: usize) -> Answer<usize> {
        if bytes == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an address that nothing else uses.
        let mapped = unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) };
        let start = mapped.map_err(|_| Status::OUT_OF_MEMORY)? as usize;
        self.insert(start, bytes, device, Locked::Allocated);
        Ok(start)
    }

    pub(crate) fn register(&mut self, start: usize, bytes: usize, device: usize) -> Answer {
        if start == 0 || bytes == 0 || start.checked_add(bytes).is_none() {
            return Err(Status::INVALID_VALUE);
        }
        if self.overlaps(start, bytes) {
            return Err(Status::HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.insert(start, bytes, device, Locked::Registered);
        Ok(())
    }

    /// Frees or unregisters the block that begins at `start`, if it has this origin.
    pub(crate) fn remove(&mut self, start: usize, origin: Locked) -> Result<Freed, Missing> {
        let found = self.blocks.get(&start).is_some_and(|block| block.origin == origin);
        let Some(block) = found.then(|| self.blocks.remove(&start)).flatten() else {
            return Err(if self.freed.contains_key(&start) { Missing::Freed } else { Missing::Unknown });
        };
        let in_use = block.uses.any();
        if origin == Locked::Allocated {
            self.freed.insert(start, block.bytes);
            if !in_use {
                make_inaccessible(start, block.bytes);
            }
        }
        Ok(if in_use { Freed::InUse } else { Freed::Unused })
    }

    /// Removes all blocks of a device's context and returns their number.
    pub(crate) fn remove_all(&mut self, device: usize) -> usize {
        let of_device = self.blocks.iter().filter(|(_, block)| block.device == device);
        let starts: Vec<(usize, Locked)> = of_device.map(|(start, block)| (*start, block.origin)).collect();
        starts
            .iter()
            .filter(|(start, origin)| self.remove(*start, *origin).is_ok())
            .count()
    }

    pub(crate) fn range(&self, start: usize, bytes: usize) -> HostRange {
        let before = self.blocks.range(..=start).next_back();
        if let Some((block_start, block)) = before
            && start - block_start < block.bytes
        {
            let fits = bytes <= block.bytes - (start - block_start);
            return if fits { HostRange::PageLocked(block.uses.begin()) } else { HostRange::Mixed };
        }
        let freed = self.freed.range(..=start).next_back();
        if freed.is_some_and(|(block_start, block_bytes)| start - block_start < *block_bytes) {
            HostRange::Freed
        } else if self.overlaps(start, bytes) {
            HostRange::Mixed
        } else {
            HostRange::Pageable
        }
    }

    /// Records that a copy reads a range, until the result is dropped.
    pub(crate) fn begin_read(&mut self, start: usize, bytes: usize) -> Arc<()> {
        let read = Arc::new(());
        self.reads.retain(|(_, reader)| reader.strong_count() > 0);
        self.reads.push((start..start + bytes, Arc::downgrade(&read)));
        read
    }

    /// Whether a copy that has not ended reads bytes of a range.
    pub(crate) fn is_read(&self, start: usize, bytes: usize) -> bool {
        let overlaps = |range: &Range<usize>| range.start < start + bytes && start < range.end;
        self.reads
            .iter()
            .any(|(range, reader)| reader.strong_count() > 0 && overlaps(range))
    }

    /// The number of blocks and their total bytes.
    pub(crate) fn blocks(&self) -> (usize, usize) {
        (self.blocks.len(), self.blocks.values().map(|block| block.bytes).sum())
    }

    fn insert(&mut self, start: usize, bytes: usize, device: usize, origin: Locked) {
        self.blocks
            .insert(start, HostBlock { bytes, device, origin, uses: Uses::default() });
    }

    fn overlaps(&self, start: usize, bytes: usize) -> bool {
        let before = self.blocks.range(..start.saturating_add(bytes)).next_back();
        before.is_some_and(|(block_start, block)| block_start + block.bytes > start)
    }
}

/// Frees the memory but keeps the addresses reserved, so that any access to them faults.
fn make_inaccessible(start: usize, bytes: usize) {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    let start = ptr::without_provenance_mut::<c_void>(start);
    // SAFETY: the mapping was made by `allocate`, and was just freed.
    let replaced = unsafe { mmap_anonymous(start, bytes, ProtFlags::empty(), flags) };
    debug_assert!(replaced.is_ok(), "a mapping can be replaced: {replaced:?}");
}
