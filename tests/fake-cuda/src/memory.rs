use std::{
    collections::BTreeMap,
    ffi::c_void,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use crate::status::{Answer, Status};

/// What fresh device memory is full of: whoever reads what he never wrote does not find zeroes.
const FRESH: u8 = 0xD7;
/// `cuMemAlloc` aligns to this; every block takes a multiple of it from the device.
const ALIGNMENT: usize = 512;
/// No processor that runs tests maps memory here, so the CPU cannot use a device's address.
const FIRST_ADDRESS: u64 = 1 << 60;

/// Addresses are used once. So what was freed is known when it comes back.
static NEXT_ADDRESS: AtomicU64 = AtomicU64::new(FIRST_ADDRESS);

/// How many copies use a block.
#[derive(Clone, Debug, Default)]
struct Uses(Arc<AtomicUsize>);

/// One copy that uses a block, from when it is asked for until it has ended.
#[derive(Debug)]
pub(crate) struct Use(Arc<AtomicUsize>);

impl Uses {
    fn another(&self) -> Use {
        self.0.fetch_add(1, Ordering::AcqRel);
        Use(self.0.clone())
    }

    fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Why an address cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// It never was allocated, or the range leaves its block.
    Unknown,
    /// It was freed.
    Freed,
}

/// What freeing a block came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    /// Nobody used it.
    Unused,
    /// A copy uses it. It is kept for good, so that the copy harms nobody.
    InUse,
}

/// The memory of one device.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    pub(crate) limit_bytes: usize,
    pub(crate) used_bytes: usize,
    blocks: BTreeMap<u64, Block>,
    /// Where blocks were, and how long.
    freed: BTreeMap<u64, usize>,
}

#[derive(Debug)]
struct Block {
    bytes: usize,
    backing: Backing,
    uses: Uses,
}

/// A range of device memory: where it is for copies, and the right to use it.
#[derive(Debug)]
pub(crate) struct DeviceRange {
    pub(crate) start: *mut u8,
    pub(crate) used: Use,
}

impl DeviceMemory {
    pub(crate) fn new(limit_bytes: usize) -> Self {
        Self { limit_bytes, used_bytes: 0, blocks: BTreeMap::new(), freed: BTreeMap::new() }
    }

    pub(crate) fn allocate(&mut self, bytes: usize) -> Answer<u64> {
        if bytes == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let taken_bytes = bytes.checked_next_multiple_of(ALIGNMENT).ok_or(Status::OUT_OF_MEMORY)?;
        if taken_bytes > self.limit_bytes - self.used_bytes {
            return Err(Status::OUT_OF_MEMORY);
        }
        self.used_bytes += taken_bytes;
        // What lies between two blocks belongs to none.
        let address = NEXT_ADDRESS.fetch_add((taken_bytes + ALIGNMENT) as u64, Ordering::Relaxed);
        self.blocks
            .insert(address, Block { bytes, backing: Backing::new(bytes), uses: Uses::default() });
        Ok(address)
    }

    /// Frees the block that begins at an address.
    pub(crate) fn free(&mut self, address: u64) -> Result<Freed, Missing> {
        let Some(block) = self.blocks.remove(&address) else {
            return Err(self.why_missing(address));
        };
        self.freed.insert(address, block.bytes);
        self.used_bytes -= block.bytes.next_multiple_of(ALIGNMENT);
        if block.uses.any() {
            std::mem::forget(block.backing);
            return Ok(Freed::InUse);
        }
        Ok(Freed::Unused)
    }

    /// Frees everything, as the end of a context does. Says how many blocks there were.
    pub(crate) fn free_all(&mut self) -> usize {
        let addresses: Vec<u64> = self.blocks.keys().copied().collect();
        addresses.iter().filter(|address| self.free(**address).is_ok()).count()
    }

    pub(crate) fn range(&self, address: u64, bytes: usize) -> Result<DeviceRange, Missing> {
        let (block, offset) = self.block_at(address).ok_or_else(|| self.why_missing(address))?;
        if bytes > block.bytes - offset {
            return Err(Missing::Unknown);
        }
        // In bounds: the offset is inside the block, which the pointer is the start of.
        let start = block.backing.0.cast::<u8>().as_ptr().wrapping_add(offset);
        Ok(DeviceRange { start, used: block.uses.another() })
    }

    /// The block that an address lies in: its start and its length.
    pub(crate) fn extent(&self, address: u64) -> Option<(u64, usize)> {
        let (block, offset) = self.block_at(address)?;
        Some((address - offset as u64, block.bytes))
    }

    /// Whether a block begins at an address.
    pub(crate) fn is_block(&self, address: u64) -> bool {
        self.blocks.contains_key(&address)
    }

    /// Whether a copy uses the block at an address.
    pub(crate) fn is_used(&self, address: u64) -> bool {
        self.block_at(address).is_some_and(|(block, _)| block.uses.any())
    }

    pub(crate) fn blocks(&self) -> usize {
        self.blocks.len()
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

/// The bytes behind a block of device memory, reached through raw pointers alone.
#[derive(Debug)]
struct Backing(NonNull<[u8]>);

// SAFETY: it owns its bytes, as the box that it came from did.
unsafe impl Send for Backing {}

impl Backing {
    fn new(bytes: usize) -> Self {
        let fresh = vec![FRESH; bytes].into_boxed_slice();
        Self(NonNull::from(Box::leak(fresh)))
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a box in `new`, and this is its only owner. `free` drops none that a copy uses.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// Host memory that is page-locked: allocated here, or registered by its owner.
#[derive(Debug, Default)]
pub(crate) struct HostMemory {
    blocks: BTreeMap<usize, HostBlock>,
    /// Where allocated blocks were, and how long. Their addresses stay reserved, and fault.
    freed: BTreeMap<usize, usize>,
}

#[derive(Debug)]
struct HostBlock {
    bytes: usize,
    /// The device whose context it was allocated in, and dies with.
    device: usize,
    origin: Origin,
    uses: Uses,
}

/// How host memory came to be page-locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// `cuMemHostAlloc`
    Allocated,
    /// `cuMemHostRegister`
    Registered,
}

/// What a range of host memory is for a copy.
#[derive(Debug)]
pub(crate) enum HostRange {
    /// All of it is page-locked.
    PageLocked(Use),
    /// None of it is.
    Pageable,
    /// Only some of it is, which is an error.
    Mixed,
    /// It was freed.
    Freed,
}

impl HostMemory {
    pub(crate) fn allocate(&mut self, bytes: usize, device: usize) -> Answer<usize> {
        if bytes == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: new memory at an address that the kernel chooses changes no memory that exists.
        let mapped = unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) };
        let start = mapped.map_err(|_| Status::OUT_OF_MEMORY)? as usize;
        self.insert(start, bytes, device, Origin::Allocated);
        Ok(start)
    }

    pub(crate) fn register(&mut self, start: usize, bytes: usize, device: usize) -> Answer {
        if start == 0 || bytes == 0 || start.checked_add(bytes).is_none() {
            return Err(Status::INVALID_VALUE);
        }
        if self.overlaps(start, bytes) {
            return Err(Status::HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.insert(start, bytes, device, Origin::Registered);
        Ok(())
    }

    /// Frees or unregisters the block that begins at an address, if it came to be in that way.
    pub(crate) fn remove(&mut self, start: usize, origin: Origin) -> Result<Freed, Missing> {
        let found = self.blocks.get(&start).is_some_and(|block| block.origin == origin);
        let Some(block) = found.then(|| self.blocks.remove(&start)).flatten() else {
            return Err(if self.freed.contains_key(&start) { Missing::Freed } else { Missing::Unknown });
        };
        let in_use = block.uses.any();
        if origin == Origin::Allocated {
            self.freed.insert(start, block.bytes);
            if !in_use {
                make_inaccessible(start, block.bytes);
            }
        }
        Ok(if in_use { Freed::InUse } else { Freed::Unused })
    }

    /// Removes all that belongs to a device's context. Says how many blocks there were.
    pub(crate) fn remove_all(&mut self, device: usize) -> usize {
        let of_device = self.blocks.iter().filter(|(_, block)| block.device == device);
        let starts: Vec<(usize, Origin)> = of_device.map(|(start, block)| (*start, block.origin)).collect();
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
            return if fits { HostRange::PageLocked(block.uses.another()) } else { HostRange::Mixed };
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

    /// How many blocks there are, and their bytes.
    pub(crate) fn blocks(&self) -> (usize, usize) {
        (self.blocks.len(), self.blocks.values().map(|block| block.bytes).sum())
    }

    fn insert(&mut self, start: usize, bytes: usize, device: usize, origin: Origin) {
        self.blocks
            .insert(start, HostBlock { bytes, device, origin, uses: Uses::default() });
    }

    fn overlaps(&self, start: usize, bytes: usize) -> bool {
        let before = self.blocks.range(..start.saturating_add(bytes)).next_back();
        before.is_some_and(|(block_start, block)| block_start + block.bytes > start)
    }
}

/// Gives the memory back but keeps the addresses, so that whoever still uses them faults at once.
fn make_inaccessible(start: usize, bytes: usize) {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    let start = ptr::without_provenance_mut::<c_void>(start);
    // SAFETY: the mapping is one that `allocate` made, and that its owner has just given back.
    let replaced = unsafe { mmap_anonymous(start, bytes, ProtFlags::empty(), flags) };
    debug_assert!(replaced.is_ok(), "a mapping can be replaced: {replaced:?}");
}
