use std::{
    any::Any,
    fmt,
    fs::File,
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::{
    fs::{fstat, sendfile},
    io::Errno,
};

use crate::{HostMemory, Region, SharedError, SharedView, region::Keeper};

/// Bytes in memory that other processes of the host can map: the descriptor of a memfd, and the range of it that holds
/// them. The memory is this process's, or [lent](crate::SharedView::into_range) to it. Whoever receives the descriptor
/// opens it with [`SharedView`].
///
/// The bytes stay as they are until the last clone of this value is dropped; then the memory may be reused. So keep one
/// until nobody maps the bytes any more: a [`Lifeline`](crate::Lifeline) tells.
///
/// The descriptor shows the whole memfd, and whatever this process writes to it later. Nobody who has it can write,
/// shrink or unseal it. Memory outside of regions reads as zeros, or as bytes that were shown before.
#[derive(Clone)]
pub struct SharedRange {
    file: Arc<SharedFile>,
    offset_bytes: u64,
    len_bytes: u64,
    /// The memory, if this process allocated it.
    own: Option<Arc<dyn Keeper>>,
    /// Keeps the bytes. Never read.
    _keeper: Arc<dyn Any + Send + Sync>,
}

/// Why other processes cannot map bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotShared {
    /// They do not lie in one piece of memory that is meant to be shared.
    Private,
    /// They would, but the system refused to make such memory: [`HostMemory::why_not_shareable`].
    Refused,
}

impl SharedRange {
    pub(crate) fn new(
        file: Arc<SharedFile>,
        offset_bytes: u64,
        len_bytes: u64,
        keeper: impl Any + Send + Sync,
    ) -> Self {
        Self { file, offset_bytes, len_bytes, own: None, _keeper: Arc::new(keeper) }
    }

    /// A range in memory of this process.
    pub(crate) fn in_memory(
        file: Arc<SharedFile>,
        offset_bytes: u64,
        len_bytes: u64,
        keeper: Arc<dyn Keeper>,
    ) -> Self {
        Self { own: Some(keeper), ..Self::new(file, offset_bytes, len_bytes, ()) }
    }

    /// The allocator of the memory; `None` for memory of another process.
    pub fn memory(&self) -> Option<HostMemory> {
        self.own.as_ref()?.memory()
    }

    /// Whether [`enlarge_next_pages`](Self::enlarge_next_pages) may find small pages: not where the memory was made of huge
    /// ones, or has been through it.
    pub fn has_small_pages(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.has_small_pages())
    }

    /// Puts huge pages in the place of the small ones of the next 4 MiB of its memory, also where the system makes none by
    /// itself, and returns whether more remain. Readers of other processes then read as fast as of their own memory, instead
    /// of waiting for the kernel at every 16 small pages. Copies these bytes: call it on a thread of low priority, when the
    /// bytes are written. Does nothing for memory that has been through it, before Linux 6.1, or of another process.
    pub fn enlarge_next_pages(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.enlarge_next_pages())
    }

    /// A view of the bytes in this process, for a user who may write while others read them: the first write to a page copies
    /// it. The memory is not reused while the view exists. Costs six system calls and a mapping, and memory only for what is
    /// written.
    ///
    /// # Errors
    /// If the system refuses the mapping.
    pub fn private_view(&self) -> Result<Region, SharedError> {
        let fd = self.file.fd.try_clone()?;
        SharedView::new(fd, self.offset_bytes, self.len_bytes)?.private(self.clone())
    }

    /// Appends the bytes of `range` to `file`, which is at its end, without mapping them: to a disk's file system this takes
    /// about 0.6 of the processor time of writing them from a new mapping, and no page tables. Returns how many were
    /// appended: fewer if the system does not do this for this kind of file. Blocks.
    ///
    /// # Errors
    /// Those of writing, such as no space. `InvalidInput` for a range outside of the bytes.
    pub fn append_to(&self, range: Range<u64>, file: &File) -> io::Result<u64> {
        let len_bytes = range.end.checked_sub(range.start).filter(|_| range.end <= self.len_bytes);
        let len_bytes = len_bytes.ok_or(io::ErrorKind::InvalidInput)?;
        let (mut at, mut appended) = (self.offset_bytes + range.start, 0);
        while appended < len_bytes {
            let rest = usize::try_from(len_bytes - appended).unwrap_or(usize::MAX);
            match sendfile(file, &self.file.fd, Some(&mut at), rest) {
                Ok(0) => break,
                Ok(sent) => appended += sent as u64,
                Err(Errno::INTR) => {}
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::XDEV | Errno::PERM) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(appended)
    }

    /// Where the bytes begin in the memfd.
    pub fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    /// The number of bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The memfd.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.fd.as_fd()
    }

    /// The number by which a taker recognises a memfd that it has mapped already: no two that exist have the same.
    pub fn inode(&self) -> u64 {
        self.file.inode
    }

    /// Gives the memory back to the system when the bytes are released, instead of reusing it.
    ///
    /// Why: somebody who kept the descriptor, although it said that it released the bytes, sees what is written to this
    /// memory later. Retire memory that was shown to somebody who may not read everything that this process will write
    /// there. The next version then costs new memory.
    pub fn retire(&self) {
        self.file.is_retired.store(true, Ordering::Release);
    }
}

impl fmt::Debug for SharedRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedRange")
            .field("inode", &self.file.inode)
            .field("offset_bytes", &self.offset_bytes)
            .field("len_bytes", &self.len_bytes)
            .finish_non_exhaustive()
    }
}

/// A memfd that other processes may map.
#[derive(Debug)]
pub(crate) struct SharedFile {
    fd: OwnedFd,
    inode: u64,
    is_retired: AtomicBool,
}

impl SharedFile {
    /// Fails if the system does not know the descriptor.
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        let inode = fstat(&fd)?.st_ino;
        Ok(Self { fd, inode, is_retired: AtomicBool::new(false) })
    }

    /// Whether the memory must not be reused.
    pub(crate) fn is_retired(&self) -> bool {
        self.is_retired.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, SeekFrom, Write};

    use super::*;
    use crate::HostMemory;

    /// Goal: a range is appended as it is, or not at all where the system cannot; then the file can be written to. Method:
    /// ranges that do not begin on pages; a file that is opened to append, to which the kernel sends nothing.
    #[test]
    fn ranges_are_appended_to_files() {
        let mut region = HostMemory::new(u64::MAX).shareable().allocate(300_000).unwrap();
        region.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8);
        let mut second = region.split_off(4096).unwrap();
        let shared = second.shared().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        file.write_all(b"head").unwrap();
        for range in [0..0, 100..100_001, 200_000..shared.len_bytes()] {
            assert_eq!(shared.append_to(range.clone(), &file).unwrap(), range.end - range.start);
        }
        let mut written = vec![];
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_end(&mut written).unwrap();
        assert!(written == [b"head", &second[100..100_001], &second[200_000..]].concat());
        let appending = File::options().append(true).open(&path).unwrap();
        assert_eq!(shared.append_to(0..100_000, &appending).unwrap(), 0);
        for outside in [0..shared.len_bytes() + 1, Range { start: 5, end: 4 }, u64::MAX..u64::MAX] {
            assert_eq!(shared.append_to(outside, &file).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
        second.fill(0);
    }
}
