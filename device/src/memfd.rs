use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    io::{Errno, pwrite},
};

use crate::mapping::{Mapping, View};

/// A memfd: anonymous shared memory that this process writes once, seals, and passes to another process.
///
/// It is written by system calls and not mapped, so that the writer pays one copy and no page faults. Pass it on only
/// after it is sealed; from then on nobody can change it, not even its writer. It needs no mount: it is bounded by the
/// container's memory, not by the usual 64 MiB of its `/dev/shm`.
#[derive(Debug)]
pub struct Memfd {
    fd: OwnedFd,
    len_bytes: u64,
    written_bytes: u64,
}

/// A sealed [`Memfd`], which nobody can change. Its memory is freed when no process has a descriptor or a mapping of it
/// any more.
#[derive(Debug)]
pub struct SealedFd(OwnedFd);

/// The required seals: neither bytes, length nor seals can change.
pub(crate) const SEALS: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// The seals of a memfd that one mapping may still write: there can be no other way to change it.
const OWNER_SEALS: SealFlags = SealFlags::FUTURE_WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

impl Memfd {
    /// Creates a memfd of `len_bytes` zeros. Allocates nothing yet: the kernel allocates each page at its first write.
    pub fn new(len_bytes: u64) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = match memfd_create(NAME, flags | MemfdFlags::NOEXEC_SEAL) {
            // Linux before 6.3 does not know `NOEXEC_SEAL`; newer versions may require it.
            Err(Errno::INVAL) => memfd_create(NAME, flags),
            created => created,
        }?;
        ftruncate(&fd, len_bytes)?;
        Ok(Self { fd, len_bytes, written_bytes: 0 })
    }

    /// Its length.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The number of bytes copied into it. A byte that was written twice counts twice.
    pub fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Copies `bytes` to `offset`. One thread writes as fast as several: the kernel admits one writer at a time.
    ///
    /// Fails if the bytes reach beyond the end, or the system has no memory.
    pub fn write_at(&mut self, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > self.len_bytes) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "written beyond the end"));
        }
        while !bytes.is_empty() {
            let written = match pwrite(&self.fd, bytes, offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => written,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            bytes = &bytes[written..];
            offset += written as u64;
            self.written_bytes += written as u64;
        }
        Ok(())
    }

    /// Seals the memfd. Unwritten bytes stay zero.
    pub fn seal(self) -> io::Result<SealedFd> {
        fcntl_add_seals(&self.fd, SEALS)?;
        Ok(SealedFd(self.fd))
    }

    /// Maps all of the memfd for this process to write, now and later, and seals it for everybody else: from then on nobody
    /// can map it for writing or write to it by other means, nor change its length. Needs Linux 5.1. Fails for a length
    /// of zero.
    pub(crate) fn map_writable(self) -> io::Result<(Mapping, OwnedFd)> {
        let len = usize::try_from(self.len_bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let mapping = Mapping::of_file(self.fd.as_fd(), 0, len, View::SharedWritable)?;
        fcntl_add_seals(&self.fd, OWNER_SEALS)?; // After the mapping was made: it keeps its access.
        Ok((mapping, self.fd))
    }
}

impl From<SealedFd> for OwnedFd {
    fn from(sealed: SealedFd) -> Self {
        sealed.0
    }
}

impl AsFd for SealedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The memfd's name in listings of a process's files.
const NAME: &str = "tensor-relay";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_memfd_cannot_be_written() {
        let mut memfd = Memfd::new(10).unwrap();
        memfd.write_at(b"abc", 7).unwrap();
        assert_eq!(memfd.written_bytes(), 3);
        let sealed = memfd.seal().unwrap();
        assert_eq!(pwrite(&sealed, b"x", 0), Err(Errno::PERM));
        assert_eq!(ftruncate(&sealed, 5), Err(Errno::PERM));
        assert_eq!(ftruncate(&sealed, 50), Err(Errno::PERM));
    }

    #[test]
    fn writes_beyond_the_end_are_refused() {
        let mut memfd = Memfd::new(10).unwrap();
        for offset in [8, 10, u64::MAX] {
            assert!(memfd.write_at(b"abc", offset).is_err(), "{offset}");
        }
        assert_eq!(memfd.written_bytes(), 0);
    }
}
