use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd},
    slice,
};

use bytes::Bytes;
use rustix::{
    fs::{SeekFrom, Stat, fcntl_get_seals, fstat, fstatfs, seek},
    io::Errno,
};

use crate::{
    mapping::{Mapping, View},
    memfd::SEALS,
};

/// A read-only mapping of memory that another process wrote and sealed, without a copy.
///
/// Why the seals: a mapped file that shrinks kills its readers, and a file that changes corrupts the bytes being sent.
/// A memfd with all four seals can neither shrink nor change, whatever its creator does. The mapping keeps the memory
/// until it is dropped, without the descriptor.
pub struct Sealed {
    /// The mapping of whole pages: up to the end of the last page, which may lie after `len`.
    mapping: Mapping,
    len: usize,
}

impl Sealed {
    /// Maps all of `fd`, if it has exactly `len_bytes`, all of them written and immutable.
    ///
    /// A shorter `len_bytes` is refused: the mapping would keep the whole file in memory, and only `len_bytes` would be
    /// counted. Checks every page for holes: do not call this on an async executor's thread.
    ///
    /// # Errors
    /// [`SealedError`] says what is wrong with the descriptor.
    pub fn map(fd: impl AsFd, len_bytes: u64) -> Result<Self, SealedError> {
        let fd = fd.as_fd();
        let seals = match fcntl_get_seals(fd) {
            Err(Errno::INVAL) => return Err(SealedError::NotAMemfd),
            seals => seals?,
        };
        // A memfd of huge pages has seals, too, but cannot be unmapped in units of plain pages.
        if u64::try_from(fstatfs(fd)?.f_type).ok() != Some(TMPFS) {
            return Err(SealedError::NotAMemfd);
        }
        if !seals.contains(SEALS) {
            return Err(SealedError::NotSealed);
        }
        let stat = fstat(fd)?; // After the check of the seals: the length cannot change any more.
        let found_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if found_bytes != len_bytes || len_bytes == 0 {
            return Err(SealedError::WrongLength { len_bytes, found_bytes });
        }
        let written_bytes = count_written_bytes(fd, &stat)?;
        if written_bytes < found_bytes {
            return Err(SealedError::Sparse { written_bytes, found_bytes });
        }
        let len = usize::try_from(len_bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { mapping: Mapping::of_file(fd, 0, len, View::ReadOnly)?, len })
    }
}

/// The number of bytes before the first unwritten one. The file's allocated size alone proves nothing: pages can be
/// reserved beyond its end while others are missing before it.
fn count_written_bytes(fd: BorrowedFd<'_>, stat: &Stat) -> Result<u64, SealedError> {
    let taken_bytes = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(BLOCK_BYTES);
    match seek(fd, SeekFrom::Hole(0)) {
        Ok(hole) => Ok(hole.min(taken_bytes)),
        Err(Errno::INVAL) => Ok(taken_bytes), // A sandbox's kernel has no `SEEK_HOLE`, only its count of pages.
        Err(error) => Err(error.into()),
    }
}

impl AsRef<[u8]> for Sealed {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `map` checked that the file has `len` bytes under the mapping, which `self` keeps. The seals, which
        // `map` checked and nobody can remove, guarantee that these bytes stay, and that no process, this one included,
        // can write them.
        unsafe { slice::from_raw_parts(self.mapping.start().as_ptr(), self.len) }
    }
}

impl From<Sealed> for Bytes {
    fn from(sealed: Sealed) -> Self {
        Self::from_owner(sealed)
    }
}

impl fmt::Debug for Sealed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealed").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Why a descriptor cannot be mapped as sealed memory. Its sender is to blame, except for [`Os`](Self::Os).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SealedError {
    /// A file, a pipe, or memory of another kind.
    #[error("the descriptor is not a memfd of plain pages: make one with memfd_create, and allow sealing")]
    NotAMemfd,
    /// A memfd that could still change.
    #[error(
        "the memfd is not sealed: its bytes or its length could change while they are sent. Add F_SEAL_WRITE, F_SEAL_SHRINK, \
         F_SEAL_GROW and F_SEAL_SEAL before it is sent"
    )]
    NotSealed,
    /// A memfd of another length than stated.
    #[error(
        "the memfd has {found_bytes} bytes instead of the stated {len_bytes}: lend one that holds the payload and nothing else"
    )]
    WrongLength {
        /// The stated length.
        len_bytes: u64,
        /// The actual length.
        found_bytes: u64,
    },
    /// Parts of the memfd were never written: reading them in this process would allocate memory.
    #[error(
        "the memfd has {found_bytes} bytes, of which only the first {written_bytes} were ever written: write all of them"
    )]
    Sparse {
        /// The bytes before the first unwritten one.
        written_bytes: u64,
        /// The length.
        found_bytes: u64,
    },
    /// The system refused.
    #[error("the system refused to map the memfd: {0}")]
    Os(#[from] io::Error),
}

impl From<Errno> for SealedError {
    fn from(error: Errno) -> Self {
        Self::Os(error.into())
    }
}

/// The file system type of plain memory (`TMPFS_MAGIC`).
pub(crate) const TMPFS: u64 = 0x0102_1994;

/// The unit of a file's allocated size.
pub(crate) const BLOCK_BYTES: u64 = 512;

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::fs::{
        FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
    };

    use super::*;
    use crate::Memfd;

    /// A memfd of `bytes`, with `seals`.
    fn memfd(bytes: &[u8], seals: SealFlags) -> std::fs::File {
        let fd = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
        let mut file = std::fs::File::from(fd);
        file.write_all(bytes).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    }

    #[test]
    fn sealed_memory_is_read_in_place() {
        let bytes: Vec<u8> = (0..10_000).map(|i| i as u8).collect();
        let mut memfd = Memfd::new(10_000).unwrap();
        memfd.write_at(&bytes, 0).unwrap();
        let fd = memfd.seal().unwrap();
        let (one, other) = (Sealed::map(&fd, 10_000).unwrap(), Sealed::map(&fd, 10_000).unwrap());
        drop(fd); // The mappings keep the memory.
        assert_eq!(one.as_ref(), &bytes[..]);
        let other = Bytes::from(other);
        drop(one);
        assert_eq!(other[..], bytes[..]);
    }

    #[test]
    fn memory_without_all_seals_is_refused() {
        for missing in [SealFlags::WRITE, SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL] {
            let refused = Sealed::map(memfd(b"abc", SEALS.difference(missing)), 3);
            assert!(matches!(refused, Err(SealedError::NotSealed)), "{missing:?}: {refused:?}");
        }
        assert!(Sealed::map(memfd(b"abc", SEALS), 3).is_ok());
    }

    #[test]
    fn other_descriptors_are_refused() {
        for path in ["/dev/zero", "/proc/self/exe", "/"] {
            let refused = Sealed::map(std::fs::File::open(path).unwrap(), 1);
            assert!(matches!(refused, Err(SealedError::NotAMemfd)), "{path}: {refused:?}");
        }
    }

    #[test]
    fn memory_of_another_length_is_refused() {
        let file = memfd(&[1; 5000], SEALS);
        for len in [5001, 4999, 4096, 1, u64::MAX, 0] {
            let refused = Sealed::map(&file, len);
            assert!(matches!(refused, Err(SealedError::WrongLength { .. })), "{len}: {refused:?}");
        }
    }

    #[test]
    fn unwritten_memory_is_refused() {
        let file = memfd(b"abc", SealFlags::empty());
        ftruncate(&file, 1 << 30).unwrap();
        fcntl_add_seals(&file, SEALS).unwrap();
        let refused = Sealed::map(&file, 1 << 30);
        assert!(matches!(refused, Err(SealedError::Sparse { .. })), "{refused:?}");
    }

    /// Goal: a file that has enough pages in total, but not for all of its bytes, is refused.
    /// Method: leave its pages unwritten, and reserve as many beyond its end.
    #[test]
    fn pages_reserved_beyond_the_end_do_not_count() {
        let len = 64 << 10;
        let file = memfd(b"abc", SealFlags::empty());
        ftruncate(&file, len).unwrap();
        fallocate(&file, FallocateFlags::KEEP_SIZE, len, len).unwrap();
        fcntl_add_seals(&file, SEALS).unwrap();
        assert!(fstat(&file).unwrap().st_blocks as u64 * BLOCK_BYTES >= len);
        let refused = Sealed::map(&file, len);
        assert!(matches!(refused, Err(SealedError::Sparse { .. })), "{refused:?}");
    }
}
