use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::fs::{FlockOperation, flock};

use crate::{
    backing::Backing,
    ipc::{self, Handle},
    status::{Answer, Status},
    uses::{Use, Uses},
};

/// The alignment of `cuMemAlloc`, and the unit in which blocks count against the device's memory.
const ALIGNMENT: usize = 512;
/// The first device address. A CPU cannot map memory there, so an access from the host faults.
const FIRST_ADDRESS: u64 = 1 << 60;

/// The next device address. Addresses are never reused, so that use after free is recognised.
static NEXT_ADDRESS: AtomicU64 = AtomicU64::new(FIRST_ADDRESS);

/// Why an address cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// No block has this address or range, or the block does not permit this use.
    Unknown,
    /// The address is in a block that was freed, closed or unmapped.
    Freed,
}

/// The result of freeing, closing or unmapping a block.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    /// The block was not in use.
    Unused,
    /// A copy or fill uses the block. Memory of this driver is leaked, so that the copy overwrites nothing else.
    InUse,
    /// Another process has the block open by CUDA IPC, which is undefined in CUDA.
    OpenElsewhere,
}

/// The memory of one device.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    pub(crate) limit_bytes: usize,
    pub(crate) used_bytes: usize,
    blocks: BTreeMap<u64, Block>,
    /// The starts and lengths of freed blocks.
    freed: BTreeMap<u64, usize>,
}

#[derive(Debug)]
struct Block {
    bytes: usize,
    backing: Backing,
    uses: Uses,
    origin: Origin,
}

/// The origin of a block of device memory, which determines its permitted uses.
#[derive(Debug)]
pub(crate) enum Origin {
    /// `cuMemAlloc`
    Allocated,
    /// `cuMemAllocAsync`: from a pool, so it cannot be exported.
    Pooled,
    /// `cuIpcOpenMemHandle`: owned by another process; `times` counts how often this process has opened it.
    Opened { handle: Handle, times: usize },
    /// `cuMemMap`; `accessible` is true once `cuMemSetAccess` has allowed access.
    Mapped { accessible: bool },
}

impl Origin {
    /// Whether `cuMemFree` frees such blocks.
    fn is_own(&self) -> bool {
        matches!(self, Self::Allocated | Self::Pooled)
    }
}

/// A range of device memory: its address for copies, and a use count that keeps it allocated.
#[derive(Debug)]
pub(crate) struct DeviceRange {
    pub(crate) start: *mut u8,
    pub(crate) used: Use,
}

impl DeviceMemory {
    pub(crate) fn new(limit_bytes: usize) -> Self {
        Self { limit_bytes, used_bytes: 0, blocks: BTreeMap::new(), freed: BTreeMap::new() }
    }

    pub(crate) fn allocate(&mut self, bytes: usize, origin: Origin) -> Answer<u64> {
        if bytes == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let taken_bytes = bytes.checked_next_multiple_of(ALIGNMENT).ok_or(Status::OUT_OF_MEMORY)?;
        self.take(taken_bytes)?;
        let address = unused_address(taken_bytes, ALIGNMENT);
        self.insert(address, bytes, Backing::new(bytes)?, origin);
        Ok(address)
    }

    /// Counts bytes as used. Fails if the device has fewer free bytes.
    pub(crate) fn take(&mut self, bytes: usize) -> Answer {
        if bytes > self.limit_bytes - self.used_bytes {
            return Err(Status::OUT_OF_MEMORY);
        }
        self.used_bytes += bytes;
        Ok(())
    }

    /// Frees the block that begins at an address.
    pub(crate) fn free(&mut self, address: u64) -> Result<Freed, Missing> {
        if !self.is_freeable_block(address) {
            return Err(self.why_missing(address));
        }
        let Some(block) = self.remove(address) else { return Err(Missing::Unknown) };
        self.used_bytes -= block.bytes.next_multiple_of(ALIGNMENT);
        Ok(block.free())
    }

    /// Makes a handle by which other processes can open the block that begins at an address. No copy may run meanwhile.
    pub(crate) fn export(&mut self, address: u64, device_number: usize) -> Answer<Handle> {
        let block = self.blocks.get_mut(&address).ok_or(Status::INVALID_VALUE)?;
        let Origin::Allocated = block.origin else { return Err(Status::INVALID_VALUE) };
        let file = block.backing.move_to_file(&ipc::name_of(address))?;
        Ok(Handle::new(file, address, block.bytes, device_number))
    }

    /// Opens another process's block, or adds an opening if it is open already.
    pub(crate) fn open(&mut self, handle: Handle) -> Answer<u64> {
        for (address, block) in &mut self.blocks {
            if let Origin::Opened { handle: opened, times } = &mut block.origin
                && *opened == handle
            {
                *times += 1;
                return Ok(*address);
            }
        }
        let (backing, bytes) = handle.open()?;
        let address = unused_address(bytes, ALIGNMENT);
        self.insert(address, bytes, backing, Origin::Opened { handle, times: 1 });
        Ok(address)
    }

    /// Undoes one opening of the block at an address. The last one closes the block.
    pub(crate) fn close(&mut self, address: u64) -> Result<Freed, Missing> {
        let missing = self.why_missing(address);
        let Some(Block { origin: Origin::Opened { times, .. }, .. }) = self.blocks.get_mut(&address) else {
            return Err(missing);
        };
        *times -= 1;
        if *times > 0 {
            return Ok(Freed::Unused);
        }
        Ok(self.remove(address).map_or(Freed::Unused, Block::free))
    }

    /// Maps bytes at an unmapped address.
    pub(crate) fn map(&mut self, address: u64, bytes: usize, backing: Backing) {
        self.freed.remove(&address);
        self.insert(address, bytes, backing, Origin::Mapped { accessible: false });
    }

    /// Allows or forbids the use of a mapping, which must have exactly this range.
    pub(crate) fn set_access(&mut self, address: u64, bytes: usize, allowed: bool) -> Answer {
        match self.blocks.get_mut(&address) {
            Some(Block { origin: Origin::Mapped { accessible }, bytes: all, .. }) if *all == bytes => {
                *accessible = allowed;
                Ok(())
            }
            _ => Err(Status::INVALID_VALUE),
        }
    }

    /// Removes a mapping, which must have exactly this range.
    pub(crate) fn unmap(&mut self, address: u64, bytes: usize) -> Answer<Freed> {
        match self.blocks.get(&address) {
            Some(Block { origin: Origin::Mapped { .. }, bytes: all, .. }) if *all == bytes => {
                Ok(self.remove(address).map_or(Freed::Unused, Block::free))
            }
            _ => Err(Status::INVALID_VALUE),
        }
    }

    /// Whether anything is mapped between two addresses.
    pub(crate) fn has_block_between(&self, start: u64, end: u64) -> bool {
        self.blocks.range(start..end).next().is_some()
    }

    fn insert(&mut self, address: u64, bytes: usize, backing: Backing, origin: Origin) {
        self.blocks
            .insert(address, Block { bytes, backing, uses: Uses::default(), origin });
    }

    fn remove(&mut self, address: u64) -> Option<Block> {
        let block = self.blocks.remove(&address)?;
        self.freed.insert(address, block.bytes);
        Some(block)
    }

    /// Frees all blocks of a context and returns their number; mappings belong to no context.
    pub(crate) fn free_all(&mut self) -> usize {
        let of_context = |block: &Block| !matches!(block.origin, Origin::Mapped { .. });
        let found = self.blocks.iter().filter(|(_, block)| of_context(block));
        let addresses: Vec<u64> = found.map(|(address, _)| *address).collect();
        for address in &addresses {
            if self.free(*address).is_err()
                && let Some(block) = self.remove(*address)
            {
                block.free();
            }
        }
        addresses.len()
    }

    pub(crate) fn range(&self, address: u64, bytes: usize) -> Result<DeviceRange, Missing> {
        let (block, offset) = self.block_at(address).ok_or_else(|| self.why_missing(address))?;
        if bytes > block.bytes - offset || matches!(block.origin, Origin::Mapped { accessible: false }) {
            return Err(Missing::Unknown);
        }
        // In bounds: the offset is inside the block, which the pointer is the start of.
        let start = block.backing.start().wrapping_add(offset);
        Ok(DeviceRange { start, used: block.uses.begin() })
    }

    /// The start and length of the block that contains an address.
    pub(crate) fn extent(&self, address: u64) -> Option<(u64, usize)> {
        let (block, offset) = self.block_at(address)?;
        Some((address - offset as u64, block.bytes))
    }

    /// Whether a block that `cuMemFree` frees begins at an address.
    pub(crate) fn is_freeable_block(&self, address: u64) -> bool {
        self.blocks.get(&address).is_some_and(|block| block.origin.is_own())
    }

    /// Whether a copy or fill uses the block that contains an address.
    pub(crate) fn is_in_use(&self, address: u64) -> bool {
        self.block_at(address).is_some_and(|(block, _)| block.uses.any())
    }

    /// The number of this process's own blocks, and that of opened or mapped ones.
    pub(crate) fn blocks(&self) -> (usize, usize) {
        let own = self.blocks.values().filter(|block| block.origin.is_own()).count();
        (own, self.blocks.len() - own)
    }

    fn block_at(&self, address: u64) -> Option<(&Block, usize)> {
        let (start, block) = self.blocks.range(..=address).next_back()?;
        let offset = (address - start) as usize;
        (offset < block.bytes).then_some((block, offset))
    }

    fn why_missing(&self, address: u64) -> Missing {
        let before = self.freed.range(..=address).next_back();
        if before.is_some_and(|(start, bytes)| address - start < *bytes as u64) {
            Missing::Freed
        } else {
            Missing::Unknown
        }
    }
}

impl Block {
    /// Frees the block's bytes, unless a copy or fill uses them.
    fn free(self) -> Freed {
        if self.uses.any() {
            std::mem::forget(self.backing);
            return Freed::InUse;
        }
        // A process that has opened the block holds a lock on its file until it closes the block or exits.
        let exported = self.backing.file().filter(|_| self.origin.is_own());
        match exported.map(|file| flock(file, FlockOperation::NonBlockingLockExclusive)) {
            Some(Err(_)) => Freed::OpenElsewhere,
            _ => Freed::Unused,
        }
    }
}

/// Takes a new address for `bytes` bytes. Between blocks, some addresses stay unused.
pub(crate) fn unused_address(bytes: usize, alignment: usize) -> u64 {
    let (room, alignment) = ((bytes + 2 * alignment) as u64, alignment as u64);
    NEXT_ADDRESS
        .fetch_add(room.next_multiple_of(alignment), Ordering::Relaxed)
        .next_multiple_of(alignment)
}
