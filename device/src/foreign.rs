use std::{any::Any, fmt, io, mem::MaybeUninit, ops::Range, process, ptr, sync::Arc};

use crate::spread::Rectangle;

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

    /// Copies the runs of a rectangle, which fits these bytes and `part`, to their places in `part`.
    ///
    /// The kernel takes about a microsecond for each run, so runs that lie close together are copied with what is between
    /// them. Measured on a busy virtual machine, of 4 MiB, one run in eight: 0.07 GB/s in runs of 2 bytes, 0.2 to 0.3 in runs
    /// of 16 to 1024, for which eight times as many bytes are read, and 1.9 in runs of 4096.
    ///
    /// # Errors
    /// The kernel's, as for `append_to`, with a part of the bytes copied.
    pub(crate) fn gather(&self, rectangle: Rectangle, part: &mut [u8]) -> io::Result<()> {
        let rectangle = rectangle.joined();
        let Rectangle { run_bytes, runs, memory_stride, .. } = rectangle;
        match () {
            () if run_bytes == 0 || runs == 0 => Ok(()),
            () if runs > 1 && memory_stride <= CLOSE_BYTES => self.gather_close(rectangle, part),
            () => self.gather_apart(rectangle, part),
        }
    }

    /// Copies runs with what is between them, through a buffer that stays in the processor's cache.
    fn gather_close(&self, rectangle: Rectangle, part: &mut [u8]) -> io::Result<()> {
        let rows_max = BUFFER_BYTES / rectangle.memory_stride;
        let first_hull = rectangle.rows(0..rectangle.runs.min(rows_max)).memory_hull();
        let mut buffer = Vec::with_capacity((first_hull.end - first_hull.start) as usize);
        for first in (0..rectangle.runs).step_by(rows_max as usize) {
            let rows = rectangle.rows(first..rectangle.runs.min(first + rows_max));
            let hull = rows.memory_hull();
            buffer.clear();
            self.append_to(hull.start as usize..hull.end as usize, &mut buffer)?;
            Rectangle { memory: 0, ..rows }.gather(&buffer, part);
        }
        Ok(())
    }

    /// Copies runs one by one, up to [`RUNS_MAX`] with each call.
    fn gather_apart(&self, rectangle: Rectangle, part: &mut [u8]) -> io::Result<()> {
        let Rectangle { part: at, memory, run_bytes, runs, part_stride, memory_stride } = rectangle;
        let run_bytes = run_bytes as usize; // Within `part`, whose length is a `usize`, as are all of these.
        let rooms = part[at as usize..].chunks_mut((part_stride as usize).max(run_bytes));
        let addresses =
            (0..runs as usize).map(|run| self.address + memory as usize + run * memory_stride as usize);
        let mut runs = addresses.zip(rooms.map(|room| &mut room[..run_bytes]));
        loop {
            let batch: Vec<_> = runs.by_ref().take(RUNS_MAX).collect();
            if batch.is_empty() {
                return Ok(());
            }
            copy_runs_by_kernel(batch)?;
        }
    }
}

/// The longest stride of runs that are copied with what is between them: that takes as long as the kernel takes for a
/// run more.
const CLOSE_BYTES: u64 = 8 << 10;
/// The bytes that are copied with one call if they are copied with what is between them.
const BUFFER_BYTES: u64 = 256 << 10;
/// The most runs of one call: Linux's limit, `UIO_MAXIOV`.
const RUNS_MAX: usize = 1024;

/// Copies the bytes at each address to the slice beside it. None of them is empty.
fn copy_runs_by_kernel(runs: Vec<(usize, &mut [u8])>) -> io::Result<()> {
    let from = |(address, to): &(usize, &mut [u8])| libc::iovec {
        iov_base: ptr::without_provenance_mut(*address),
        iov_len: to.len(),
    };
    let from: Vec<_> = runs.iter().map(from).collect();
    let into =
        |(_, to): (usize, &mut [u8])| libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
    let to: Vec<_> = runs.into_iter().map(into).collect();
    let count = to.len() as libc::c_ulong;
    let pid = process::id() as libc::pid_t; // Linux's are positive `i32`.
    // SAFETY: the kernel writes to the slices alone, which are exclusive and live until this returns. It reads any
    // address: a missing one is an error.
    let copied = unsafe { libc::process_vm_readv(pid, to.as_ptr(), count, from.as_ptr(), count, 0) };
    let all: usize = to.iter().map(|run| run.iov_len).sum();
    match usize::try_from(copied) {
        Ok(copied) if copied == all => Ok(()),
        // The kernel stops at the first byte that is missing.
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
        Err(_) => Err(io::Error::last_os_error()),
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
    use crate::mapping::{Mapping, PAGE_BYTES, PageSize, View};

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

    /// Close together and far apart, in one call of the kernel and in several.
    #[test]
    fn runs_are_copied_to_their_places() {
        let owner: Vec<u8> = (0..10_000_000).map(|at| (at % 251) as u8).collect();
        let bytes = ForeignBytes::new(owner.as_ptr().addr(), owner.len(), ());
        for (memory_stride, runs) in [(3, 7), (9, 90_000), (CLOSE_BYTES, 40), (CLOSE_BYTES + 1, 1100), (0, 1)]
        {
            let rectangle = Rectangle { runs, part_stride: 5, memory_stride, ..Rectangle::run(2, 4, 3) };
            let mut part = vec![0; 5 * runs as usize + 2];
            let mut expected = part.clone();
            rectangle.gather(&owner, &mut expected);
            bytes.gather(rectangle, &mut part).unwrap();
            assert!(part == expected, "{rectangle:?}");
        }
    }

    #[test]
    fn memory_that_is_gone_is_an_error() {
        let mapping = Mapping::new(2 * PAGE_BYTES, PageSize::Small).unwrap();
        let bytes = ForeignBytes::new(mapping.start().addr().get(), mapping.len(), ());
        let mut out = Vec::with_capacity(2 * PAGE_BYTES);
        bytes.append_to(0..bytes.len(), &mut out).unwrap();
        mapping.take_access();
        out.clear();
        let error = bytes.append_to(0..bytes.len(), &mut out).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }

    /// A mapped file that becomes shorter would end the process by SIGBUS.
    #[test]
    fn a_file_that_was_cut_off_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * PAGE_BYTES as u64).unwrap();
        let mapping = Mapping::of_file(file.as_fd(), 0, 2 * PAGE_BYTES, View::ReadOnly).unwrap();
        let bytes = ForeignBytes::new(mapping.start().addr().get(), mapping.len(), mapping);
        file.set_len(PAGE_BYTES as u64).unwrap();
        let mut out = Vec::with_capacity(2 * PAGE_BYTES);
        let error = bytes.append_to(0..bytes.len(), &mut out).unwrap_err();
        assert_eq!((error.raw_os_error(), out.len()), (Some(libc::EFAULT), PAGE_BYTES));
    }
}
