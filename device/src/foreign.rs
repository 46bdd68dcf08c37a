use std::{any::Any, fmt, io, mem::MaybeUninit, ops::Range, process, ptr, sync::Arc};

/// Shared bytes in memory of another owner, such as a tensor of another library, who may write them at any time, and
/// may free, move or cut them off although they are lent.
///
/// Why: the owner of a tensor keeps an object alive, but not the memory behind it: PyTorch's `resize_` frees it, and a
/// mapped file may become shorter. Reading such memory would end this process. So the kernel copies the bytes
/// (`process_vm_readv`), which reports missing memory as an error. Measured on a virtual machine with an Intel Xeon, in
/// pieces of 4 MiB: 0.16 s for each GB, where `memcpy` took 0.11 s.
///
/// A copy made during a write is a mixture of old and new bytes, and memory that was freed and is in use again has
/// other bytes: only the owner can tell.
#[derive(Clone)]
pub struct ForeignBytes {
    address: usize,
    len: usize,
    /// Keeps what the owner keeps of the memory.
    owner: Arc<dyn Any + Send + Sync>,
}

impl ForeignBytes {
    /// The `len` bytes at `address` of this process. Keeps `owner` until the last clone is dropped.
    pub fn new(address: usize, len: usize, owner: impl Any + Send + Sync) -> Self {
        Self { address, len, owner: Arc::new(owner) }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The same bytes, which also keep `other` alive: it is dropped after their owner.
    #[must_use]
    pub fn keep(self, other: impl Any + Send + Sync) -> Self {
        Self { owner: Arc::new((self.owner, other)), ..self }
    }

    /// Appends a copy of the bytes in `range` to `out`, which has room for them.
    ///
    /// # Errors
    /// The kernel's, with a part of the bytes appended: `EFAULT` for memory that is gone, `EPERM` or `ENOSYS` where
    /// processes may not use `process_vm_readv`.
    ///
    /// # Panics
    /// When the range is out of bounds, or longer than the room in `out`.
    pub fn append_to(&self, range: Range<usize>, out: &mut Vec<u8>) -> io::Result<()> {
        assert!(range.start <= range.end && range.end <= self.len, "within the bytes");
        let mut from = self.address + range.start..self.address + range.end;
        while !from.is_empty() {
            let room = &mut out.spare_capacity_mut()[..from.len()];
            let copied = copy_by_kernel(from.start, room)?;
            from.start += copied;
            let len = out.len() + copied;
            // SAFETY: `room` has these bytes, so they are within the capacity, and the kernel has written them.
            unsafe { out.set_len(len) };
        }
        Ok(())
    }
}

/// Copies the first bytes at `address` to `out`, which is not empty; returns how many, at least one.
fn copy_by_kernel(address: usize, out: &mut [MaybeUninit<u8>]) -> io::Result<usize> {
    let iov_len = out.len();
    let to = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len };
    let from = libc::iovec { iov_base: ptr::without_provenance_mut(address), iov_len };
    let pid = process::id() as libc::pid_t; // Linux's are positive `i32`.
    // SAFETY: the kernel writes to `out` alone, which is exclusive. It reads any address: a missing one is an error.
    let copied = unsafe { libc::process_vm_readv(pid, &to, 1, &from, 1, 0) };
    match usize::try_from(copied) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(copied) => Ok(copied),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

impl fmt::Debug for ForeignBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignBytes").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::mapping::{Mapping, PAGE_BYTES, PageSize};

    #[test]
    fn bytes_are_copied_in_part() {
        let owner: Vec<u8> = (0..100).collect();
        let bytes = ForeignBytes::new(owner.as_ptr().addr(), owner.len(), owner);
        let mut out = Vec::with_capacity(11);
        out.push(7);
        bytes.append_to(20..30, &mut out).unwrap();
        bytes.append_to(100..100, &mut out).unwrap();
        assert_eq!(out, [7, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29]);
    }

    #[test]
    fn memory_that_is_gone_is_an_error() {
        let mapping = Mapping::new(2 * PAGE_BYTES, PageSize::Small).unwrap();
        let bytes = ForeignBytes::new(mapping.start().addr().get(), mapping.len(), ());
        let mut out = Vec::with_capacity(2 * PAGE_BYTES);
        bytes.append_to(0..bytes.len(), &mut out).unwrap();
        drop(mapping);
        out.clear();
        let error = bytes.append_to(0..bytes.len(), &mut out).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }

    /// A mapped file that becomes shorter would end the process by SIGBUS.
    #[test]
    fn a_file_that_was_cut_off_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * PAGE_BYTES as u64).unwrap();
        let mapping = Mapping::of_file(file.as_fd(), 0, 2 * PAGE_BYTES).unwrap();
        let bytes = ForeignBytes::new(mapping.start().addr().get(), mapping.len(), mapping);
        file.set_len(PAGE_BYTES as u64).unwrap();
        let mut out = Vec::with_capacity(2 * PAGE_BYTES);
        let error = bytes.append_to(0..bytes.len(), &mut out).unwrap_err();
        assert_eq!((error.raw_os_error(), out.len()), (Some(libc::EFAULT), PAGE_BYTES));
    }
}
