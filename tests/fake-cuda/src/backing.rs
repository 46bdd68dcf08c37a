use std::{
    ffi::c_void,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
};

use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap},
};

use crate::status::{Answer, Status};

/// The fill byte of fresh device memory, so that unwritten memory is not read as zeros.
const FRESH: u8 = 0xD7;

/// The bytes of a block of device memory, accessed through raw pointers only.
///
/// The bytes are private to this process until the block is shared. Only then do they move to a file in memory, which
/// other processes map too.
#[derive(Debug)]
pub(crate) struct Backing {
    start: NonNull<u8>,
    bytes: usize,
    file: Option<OwnedFd>,
}

// SAFETY: a `Backing` owns its mapping, which is bound to no thread.
unsafe impl Send for Backing {}

impl Backing {
    /// Maps memory private to this process.
    pub(crate) fn new(bytes: usize) -> Answer<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an address that nothing else uses.
        let mapped = unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) };
        let backing = Self { start: start_of(mapped)?, bytes, file: None };
        // SAFETY: the mapping is new and has `bytes` bytes.
        unsafe { backing.start.as_ptr().write_bytes(FRESH, bytes) };
        Ok(backing)
    }

    /// Creates a file in memory filled with [`FRESH`], for [`of`](Self::of).
    pub(crate) fn fresh_file(name: &str, bytes: usize) -> Answer<OwnedFd> {
        let file = file(name, bytes)?;
        let filled = Self::of(file.try_clone().map_err(|_| Status::OUT_OF_MEMORY)?, bytes)?;
        // SAFETY: the mapping has `bytes` bytes, and nobody else has the file.
        unsafe { filled.start.as_ptr().write_bytes(FRESH, bytes) };
        Ok(file)
    }

    /// Maps the first `bytes` bytes of a file in memory, which other processes may map too.
    pub(crate) fn of(file: OwnedFd, bytes: usize) -> Answer<Self> {
        let start = map(ptr::null_mut(), bytes, MapFlags::SHARED, file.as_fd())?;
        Ok(Self { start, bytes, file: Some(file) })
    }

    /// Moves the bytes into a file of this name, unless they are in a file already. Their address does not change.
    /// Writes during the move would be lost.
    pub(crate) fn move_to_file(&mut self, name: &str) -> Answer<BorrowedFd<'_>> {
        if self.file.is_none() {
            let file = file(name, self.bytes)?;
            let copy = Self::of(file.try_clone().map_err(|_| Status::OUT_OF_MEMORY)?, self.bytes)?;
            // SAFETY: both mappings have `self.bytes` bytes and do not overlap.
            unsafe { self.start.as_ptr().copy_to_nonoverlapping(copy.start.as_ptr(), self.bytes) };
            map(self.start.as_ptr().cast(), self.bytes, MapFlags::SHARED | MapFlags::FIXED, file.as_fd())?;
            self.file = Some(file);
        }
        self.file().ok_or(Status::UNKNOWN)
    }

    /// The file that holds the bytes, if they are in one.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(OwnedFd::as_fd)
    }

    /// The address of the bytes in this process, for copies.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to `self`. The caller that drops it has checked that no copy uses it.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "a mapping can be unmapped: {unmapped:?}");
    }
}

fn file(name: &str, bytes: usize) -> Answer<OwnedFd> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC).map_err(|_| Status::OUT_OF_MEMORY)?;
    ftruncate(&file, bytes as u64).map_err(|_| Status::OUT_OF_MEMORY)?;
    Ok(file)
}

/// Maps a file. With `FIXED`, `at` must be the start of a mapping of `bytes` bytes that the caller owns; it is
/// replaced.
fn map(at: *mut c_void, bytes: usize, flags: MapFlags, file: BorrowedFd<'_>) -> Answer<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: either the kernel chooses the address, or the caller replaces its own mapping by a file with the same
    // bytes.
    start_of(unsafe { mmap(at, bytes, protection, flags, file, 0) })
}

fn start_of(mapped: rustix::io::Result<*mut c_void>) -> Answer<NonNull<u8>> {
    let start = mapped.map_err(|_| Status::OUT_OF_MEMORY)?;
    NonNull::new(start.cast()).ok_or(Status::OUT_OF_MEMORY)
}
