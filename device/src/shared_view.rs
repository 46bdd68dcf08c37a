use std::{
    any::Any,
    io,
    os::fd::{AsFd, OwnedFd},
    ptr::NonNull,
    sync::Arc,
};

use rustix::{
    fs::{SealFlags, fcntl_get_seals, fstat, fstatfs},
    io::Errno,
};

use crate::{
    Region, VolatileBytes,
    mapping::{Mapping, PAGE_BYTES, View},
    region::Keeper,
    sealed::{BLOCK_BYTES, TMPFS},
    shared_range::{SharedFile, SharedRange},
};

/// Bytes in the memory of another process of this host, which lent them by the descriptor of a memfd
/// ([`SharedRange`]): what a taker has instead of a copy of its own.
///
/// The kernel guarantees, by the memfd's seals, that the bytes are there and that nobody can write them, except for the
/// lender: it may write to the memory when it was told that all views are gone. **The taker trusts the lender with
/// that**, as it trusts it with the content of the bytes. From a lender that writes all the same, a reader gets a
/// mixture of old and new bytes; nothing that it has written itself changes, and no access fails.
/// [`read_only`](Self::read_only) is sound even then. A [`private`](Self::private) view is memory behind references,
/// which the compiler assumes to be constant: distrustful users turn it into [`VolatileBytes`] at once.
///
/// Dropping this closes the descriptor. Views stay mapped.
#[derive(Debug)]
pub struct SharedView {
    fd: OwnedFd,
    offset_bytes: u64,
    len: usize,
}

impl SharedView {
    /// Checks the descriptor that a lender sent, and the range of it that holds the bytes: once for all views. Costs four
    /// system calls, and maps nothing yet.
    ///
    /// # Errors
    /// [`SharedError`] says what is wrong with the descriptor or the range.
    pub fn new(fd: OwnedFd, offset_bytes: u64, len_bytes: u64) -> Result<Self, SharedError> {
        let seals = match fcntl_get_seals(&fd) {
            Err(Errno::INVAL) => return Err(SharedError::NotAMemfd),
            seals => seals?,
        };
        // A memfd of huge pages has seals, too, but cannot be unmapped in units of plain pages.
        if u64::try_from(fstatfs(&fd)?.f_type).ok() != Some(TMPFS) {
            return Err(SharedError::NotAMemfd);
        }
        let is_constant = seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE);
        if !seals.contains(LENGTH_SEALS) || !is_constant {
            return Err(SharedError::NotSealed);
        }
        let stat = fstat(&fd)?; // After the check of the seals: the length cannot change any more.
        let file_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let end = offset_bytes.checked_add(len_bytes).filter(|&end| end <= file_bytes);
        let is_aligned = offset_bytes.is_multiple_of(PAGE_BYTES as u64);
        let (Some(_), true, 1..) = (end, is_aligned, len_bytes) else {
            return Err(SharedError::BadRange { offset_bytes, len_bytes, file_bytes });
        };
        // Of a hostile lender it proves nothing, but what its holes make this process allocate is no more than was asked for.
        let written_bytes = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(BLOCK_BYTES);
        if written_bytes < len_bytes {
            return Err(SharedError::Sparse { written_bytes, len_bytes });
        }
        let len = usize::try_from(len_bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { fd, offset_bytes, len })
    }

    /// Maps the bytes for reading and writing: the first write to a page copies it, so that nobody else sees what is
    /// written. Costs one system call, and memory only for what is written. `keep` is dropped after the bytes are unmapped.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn private(&self, keep: impl Any + Send + Sync) -> Result<Region, SharedError> {
        let mapping = self.map(View::PrivateWritable)?;
        Ok(Region::new(PrivateView { mapping, len: self.len, _keep: keep }))
    }

    /// Maps the lender's own pages for reading: for copies to a GPU, which can lock these pages without copying them, and
    /// to other memory. Writing to their address ends this process. Costs one system call. `keep` is dropped after the bytes are unmapped.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn read_only(&self, keep: impl Any + Send + Sync) -> Result<VolatileBytes, SharedError> {
        let mapping = match self.map(View::SharedReadOnly) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => self.map(View::ReadOnly)?,
            mapped => mapped?,
        };
        Ok(VolatileBytes::of_mapping(mapping, self.len, keep))
    }

    /// The bytes without a mapping, by the descriptor. `keep` is dropped with the last clone of the result.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn into_range(self, keep: impl Any + Send + Sync) -> Result<SharedRange, SharedError> {
        let file = Arc::new(SharedFile::new(self.fd)?);
        Ok(SharedRange::new(file, self.offset_bytes, self.len as u64, keep))
    }

    fn map(&self, view: View) -> io::Result<Mapping> {
        Mapping::of_file(self.fd.as_fd(), self.offset_bytes, self.len, view)
    }
}

/// The keeper of a region in a private view. The fields are dropped in this order.
struct PrivateView<K> {
    mapping: Mapping,
    len: usize,
    _keep: K,
}

// SAFETY: the mapping keeps its range mapped, readable and writable as long as it lives. `SharedView::new` checked that
// the file has `len` bytes there, and that it cannot shrink. Writes go to copies that only this process has, and this
// region is the only user of the mapping. That the pages without a copy stay constant is what the lender promises.
unsafe impl<K: Any + Send + Sync> Keeper for PrivateView<K> {
    fn start(&self) -> NonNull<u8> {
        self.mapping.start()
    }

    fn len(&self) -> usize {
        self.len
    }
}

/// Why lent memory cannot be mapped. Its lender is to blame, except for [`Os`](Self::Os).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SharedError {
    /// A file, a pipe, or memory of another kind.
    #[error("the server sent a descriptor that is not a memfd of plain pages")]
    NotAMemfd,
    /// A memfd that others could change.
    #[error(
        "the server sent a memfd that others could change: it must have F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL, and \
         F_SEAL_WRITE or F_SEAL_FUTURE_WRITE"
    )]
    NotSealed,
    /// The range is empty, does not begin on a page, or is not in the memfd.
    #[error(
        "the server sent a memfd of {file_bytes} bytes for {len_bytes} bytes from byte {offset_bytes} on: they must lie in \
         it, and begin on a page"
    )]
    BadRange {
        /// The stated start.
        offset_bytes: u64,
        /// The stated length.
        len_bytes: u64,
        /// The memfd's length.
        file_bytes: u64,
    },
    /// Parts of the memfd were never written: reading them in this process would allocate memory.
    #[error("the server lent {len_bytes} bytes of a memfd of which it has written only {written_bytes}")]
    Sparse {
        /// The bytes that were written.
        written_bytes: u64,
        /// The lent bytes.
        len_bytes: u64,
    },
    /// The system refused.
    #[error("the system refused to map the memory that the server lent: {0}")]
    Os(#[from] io::Error),
}

impl From<Errno> for SharedError {
    fn from(error: Errno) -> Self {
        Self::Os(error.into())
    }
}

/// The seals that keep the bytes where they are.
const LENGTH_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        os::{fd::AsRawFd, unix::fs::FileExt},
        process::{Command, Stdio},
        ptr,
        sync::atomic::{AtomicBool, Ordering},
    };

    use rustix::{
        fs::{FallocateFlags, MemfdFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create},
        mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mprotect, munmap},
    };

    use super::*;
    use crate::{HostMemory, Memfd, test_process};

    const LEN: usize = 300_000;

    /// A region of `LEN` ones in shareable memory, and what is shared of it.
    fn lent() -> (Region, SharedRange) {
        let mut region = HostMemory::new(u64::MAX).shareable().allocate(LEN).unwrap();
        region.fill(1);
        let shared = region.shared().unwrap();
        (region, shared)
    }

    /// The taker's own descriptor.
    fn taken(shared: &SharedRange) -> OwnedFd {
        shared.descriptor().try_clone_to_owned().unwrap()
    }

    fn view(shared: &SharedRange) -> SharedView {
        SharedView::new(taken(shared), shared.offset_bytes(), shared.len_bytes()).unwrap()
    }

    fn copy(bytes: &VolatileBytes) -> Vec<u8> {
        let mut copy = vec![0; bytes.len()];
        bytes.copy_to(&mut copy);
        copy
    }

    #[test]
    fn views_have_the_lenders_bytes() {
        let (region, shared) = lent();
        let view = view(&shared);
        let (private, read_only) = (view.private(()).unwrap(), view.read_only(()).unwrap());
        let range = view.into_range(()).unwrap();
        assert_eq!((range.inode(), range.len_bytes()), (shared.inode(), shared.len_bytes()));
        drop(range); // Views do not need the descriptor.
        assert_eq!(private[..], region[..]);
        assert_eq!(copy(&read_only), region[..]);
        assert!(private.shared().is_err());
    }

    #[test]
    fn writes_to_a_private_view_are_seen_by_nobody_else() {
        let (region, shared) = lent();
        let view = view(&shared);
        let mut private = view.private(()).unwrap();
        let mut own = shared.private_view().unwrap(); // In the lender itself.
        for private in [&mut private, &mut own] {
            private.fill(7);
            assert!(private.iter().all(|byte| *byte == 7));
        }
        for other in [copy(&view.read_only(()).unwrap()), view.private(()).unwrap().to_vec(), region.to_vec()]
        {
            assert!(other.iter().all(|byte| *byte == 1));
        }
    }

    /// Goal: a taker with the descriptor can change neither bytes nor length nor seals, by any call, and cannot open it
    /// again to do so; the lender still writes.
    #[test]
    fn a_taker_can_change_nothing() {
        let (mut region, shared) = lent();
        let fd = taken(&shared);
        assert_eq!(rustix::io::write(&fd, b"x"), Err(Errno::PERM));
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::PERM));
        for len in [0, 10, 1 << 30] {
            assert_eq!(ftruncate(&fd, len), Err(Errno::PERM));
        }
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert_eq!(fallocate(&fd, punch, 0, 4096), Err(Errno::PERM));
        assert_eq!(fallocate(&fd, FallocateFlags::empty(), 0, 1 << 30), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(&fd, SealFlags::WRITE), Err(Errno::PERM));
        if let Ok(again) = File::options().write(true).open(format!("/proc/self/fd/{}", fd.as_raw_fd())) {
            assert_eq!(again.write_at(b"x", 0).unwrap_err().raw_os_error(), Some(libc::EPERM));
            assert!(again.set_len(0).is_err());
        }
        let map = |access| {
            // SAFETY: without MAP_FIXED the kernel picks a range that nothing else in this process uses.
            unsafe { mmap(ptr::null_mut(), 4096, access, MapFlags::SHARED, &fd, 0) }
        };
        assert_eq!(map(ProtFlags::READ | ProtFlags::WRITE), Err(Errno::PERM));
        let page = map(ProtFlags::READ).unwrap();
        // SAFETY: the page is this test's own, and nothing refers to it.
        let writable = unsafe { mprotect(page, 4096, MprotectFlags::READ | MprotectFlags::WRITE) };
        assert_eq!(writable, Err(Errno::ACCESS));
        // SAFETY: as above.
        let removed = unsafe { madvise(page, 4096, Advice::LinuxRemove) };
        assert_eq!(removed, Err(Errno::ACCESS));
        // SAFETY: as above; it is not used any more.
        unsafe { munmap(page, 4096) }.unwrap();
        assert!(region.iter().all(|byte| *byte == 1));
        region.fill(2);
        assert!(view(&shared).private(()).unwrap().iter().all(|byte| *byte == 2));
    }

    /// Goal: as above for another process, which has the memfd as its standard input.
    #[test]
    fn another_process_can_change_nothing() {
        let (region, shared) = lent();
        for attempt in [
            "echo x >> /proc/self/fd/9",
            "echo x > /proc/self/fd/9",
            "echo x 1<> /proc/self/fd/9",
            "truncate -s 0 /proc/self/fd/9",
            "dd if=/dev/zero of=/proc/self/fd/9 bs=4096 count=1 conv=notrunc",
            "fallocate -p -o 0 -l 4096 /proc/self/fd/9",
        ] {
            let mut shell = Command::new("sh");
            let attempt = format!("exec 9<&0; {attempt}");
            let shell = shell
                .args(["-c", &attempt])
                .stdin(taken(&shared))
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            assert!(!shell.status().unwrap().success(), "{attempt}");
        }
        assert!(region.iter().all(|byte| *byte == 1));
        assert_eq!(
            fs::metadata(format!("/proc/self/fd/{}", shared.descriptor().as_raw_fd()))
                .unwrap()
                .len(),
            303_104
        );
    }

    #[test]
    fn memory_that_could_change_is_refused() {
        let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL | SealFlags::FUTURE_WRITE;
        let open = |seals: SealFlags| {
            let fd = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
            rustix::io::write(&fd, &[1; 5000]).unwrap();
            fcntl_add_seals(&fd, seals).unwrap();
            SharedView::new(fd, 0, 5000)
        };
        for missing in all.iter() {
            let refused = open(all.difference(missing));
            assert!(matches!(refused, Err(SharedError::NotSealed)), "{missing:?}: {refused:?}");
        }
        assert!(
            open(all).is_ok() && open(all.difference(SealFlags::FUTURE_WRITE) | SealFlags::WRITE).is_ok()
        );
    }

    #[test]
    fn other_descriptors_are_refused() {
        for path in ["/dev/zero", "/proc/self/exe", "/"] {
            let refused = SharedView::new(File::open(path).unwrap().into(), 0, 1);
            assert!(matches!(refused, Err(SharedError::NotAMemfd)), "{path}: {refused:?}");
        }
    }

    #[test]
    fn ranges_outside_are_refused() {
        let (_region, shared) = lent();
        let mapped = (LEN as u64).next_multiple_of(4096);
        let ranges = [
            (0, 0),
            (0, mapped + 1),
            (1, 10),
            (4095, 1),
            (mapped, 1),
            (4096, u64::MAX),
            (u64::MAX - 4095, 4096),
        ];
        for (offset, len) in ranges {
            let refused = SharedView::new(taken(&shared), offset, len);
            assert!(matches!(refused, Err(SharedError::BadRange { .. })), "{offset} {len}: {refused:?}");
        }
        let part = SharedView::new(taken(&shared), 8192, 5).unwrap().private(()).unwrap();
        assert_eq!(part[..], [1; 5]);
    }

    #[test]
    fn unwritten_memory_is_refused() {
        let memory = HostMemory::new(u64::MAX).shareable();
        let mut region = memory.allocate(1 << 20).unwrap();
        region[..8192].fill(1);
        let shared = region.shared().unwrap();
        let refused = SharedView::new(taken(&shared), 0, 1 << 20);
        assert!(matches!(refused, Err(SharedError::Sparse { written_bytes: 8192, .. })), "{refused:?}");
        assert!(SharedView::new(taken(&shared), 4096, 4096).is_ok());
    }

    /// Goal: the sealed memory of a producer can be passed on.
    #[test]
    fn sealed_memory_has_both_views() {
        let mut memfd = Memfd::new(5000).unwrap();
        memfd.write_at(&[3; 5000], 0).unwrap();
        let view = SharedView::new(memfd.seal().unwrap().into(), 0, 5000).unwrap();
        let mut private = view.private(()).unwrap();
        assert_eq!(private[..], [3; 5000]);
        private.fill(4);
        assert_eq!(copy(&view.read_only(()).unwrap()), [3; 5000]);
    }

    /// Goal: the lender is told of the end of a view after it, and mappings and descriptors come back.
    #[test]
    fn what_a_view_keeps_is_dropped_after_it() {
        /// Checks, when it is dropped, that the lender's mapping is the only one.
        struct Keep(u64, Arc<AtomicBool>);
        impl Drop for Keep {
            fn drop(&mut self) {
                self.1.store(test_process::uses_of(self.0) == (1, 1), Ordering::SeqCst);
            }
        }
        let (region, shared) = lent();
        for is_private in [true, false] {
            let is_last = Arc::new(AtomicBool::new(false));
            let (view, keep) = (view(&shared), Keep(shared.inode(), Arc::clone(&is_last)));
            let held: Box<dyn Any> = match is_private {
                true => Box::new(view.private(keep).unwrap().freeze()),
                false => Box::new(view.read_only(keep).unwrap()),
            };
            drop(view);
            assert_eq!(test_process::uses_of(shared.inode()), (2, 1));
            drop(held);
            assert!(is_last.load(Ordering::SeqCst));
        }
        let inode = shared.inode();
        drop((region, shared));
        assert_eq!(test_process::uses_of(inode), (0, 0));
    }

    /// Goal: a private view that is only read takes no memory of its own but for page tables.
    /// Method: count those of a process that does nothing else.
    #[test]
    fn a_view_that_is_read_takes_no_memory() {
        const BYTES: usize = 256 << 20;
        if !test_process::is_own("shared_view::tests::a_view_that_is_read_takes_no_memory", ":") {
            return;
        }
        let Some(before) = test_process::status_kib("RssAnon") else { return println!("skipped: no /proc") };
        let tables = test_process::status_kib("VmPTE").unwrap();
        let mut region = HostMemory::new(u64::MAX).shareable().allocate(BYTES).unwrap();
        region.fill(1);
        let private = view(&region.shared().unwrap()).private(()).unwrap();
        assert_eq!(private.iter().map(|byte| u64::from(*byte)).sum::<u64>(), BYTES as u64);
        let anonymous = test_process::status_kib("RssAnon").unwrap() - before;
        let tables = test_process::status_kib("VmPTE").unwrap() - tables;
        println!("RssAnon {anonymous} KiB, VmPTE {tables} KiB");
        assert!(anonymous < 5 << 10, "{anonymous} KiB");
        assert!(tables <= 2 * (BYTES >> 19) as u64 + 64, "{tables} KiB"); // Of the lender's mapping and of the view.
    }
}
