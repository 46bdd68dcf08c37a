//! Memory that other processes can map: [`HostMemory::shareable`](super::HostMemory::shareable).

use std::{io, sync::Arc};

use rustix::process::{Resource, getrlimit};

use crate::{Memfd, descriptors_are_scarce, mapping::Mapping, shared_range::SharedFile};

/// Whether new mappings can be shared.
#[derive(Debug, Default)]
pub(super) enum Sharing {
    #[default]
    Unwanted,
    Wanted,
    /// The system refused to make the last one, for this reason.
    Refused(String),
}

impl Sharing {
    /// Notes that the system refused; logs the first refusal.
    pub(super) fn refuse(&mut self, error: &io::Error) {
        if matches!(self, Self::Wanted) {
            tracing::warn!(
                "Takers on this host will receive copies instead of this process's memory, which the system refused to make \
                 shareable: {error}. It needs memfd_create with F_SEAL_FUTURE_WRITE (Linux 5.1, no sandbox that forbids it)."
            );
        }
        *self = Self::Refused(error.to_string());
    }
}

/// The smallest mapping that is made shareable: less is sent faster than mapped, and each takes a descriptor.
pub(super) const SHAREABLE_BYTES_MIN: usize = 64 << 10;

/// Maps `len` bytes, a multiple of a page, that other processes can read but not write.
pub(super) fn map(len: usize) -> io::Result<(Mapping, Arc<SharedFile>)> {
    let file_bytes_max = getrlimit(Resource::Fsize).current; // Beyond it, the kernel would send a signal.
    if file_bytes_max.is_some_and(|max| max < len as u64) {
        return Err(io::Error::other("the limit on the length of files (ulimit -f) is smaller"));
    }
    let (mapping, fd) = Memfd::new(len as u64)?.map_writable()?;
    if descriptors_are_scarce(&fd) {
        return Err(io::Error::other(
            "half of the descriptors (ulimit -n) are in use, the rest is for connections",
        ));
    }
    mapping.keep_from_children(); // A child that lives on would keep memory that was given back.
    Ok((mapping, Arc::new(SharedFile::new(fd)?)))
}

#[cfg(test)]
mod tests {
    use rustix::io::pread;

    use super::*;
    use crate::{HostMemory, NotShared, Region, SharedRange, mapping::PAGE_BYTES, test_process};

    const LEN: usize = 32 << 20; // Populated in the background.

    fn memory() -> HostMemory {
        HostMemory::new(u64::MAX).shareable()
    }

    fn read(shared: &SharedRange, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0xee; len];
        assert_eq!(pread(shared.descriptor(), &mut bytes, offset as u64), Ok(len));
        bytes
    }

    fn filled(memory: &HostMemory, len: usize, value: u8) -> Region {
        let mut region = memory.allocate(len).unwrap();
        region.fill(value);
        region
    }

    /// Goal: larger pages change no byte for anybody, end, and are not made again in reused memory. Method: a length that
    /// ends within a huge page; whether there are huge pages depends on the system.
    #[test]
    fn larger_pages_change_no_byte() {
        let (memory, len) = (memory(), 9 << 20);
        let region = filled(&memory, len, 7);
        let shared = region.shared().unwrap();
        assert!(shared.has_small_pages());
        let rounds = (0..100).take_while(|_| shared.enlarge_next_pages()).count();
        assert!(rounds < 3, "{rounds} pieces of 4 MiB before the last one");
        assert!(!shared.has_small_pages());
        assert!(region.iter().all(|byte| *byte == 7) && read(&shared, 0, len).iter().all(|byte| *byte == 7));
        drop((region, shared));
        let again = filled(&memory, len, 8).shared().unwrap();
        assert!(!again.enlarge_next_pages());
        assert!(read(&again, 0, len).iter().all(|byte| *byte == 8));
    }

    /// Goal: memory that was prepared, and memory that is reused, keeps its memfd, and is written although it is sealed.
    #[test]
    fn reused_memory_keeps_its_descriptor() {
        let memory = memory();
        memory.prepare(LEN);
        let mut inode = None;
        for value in 1..4 {
            let shared = filled(&memory, LEN, value).shared().unwrap();
            assert_eq!(*inode.get_or_insert_with(|| shared.inode()), shared.inode());
            assert!(read(&shared, 0, LEN).iter().all(|byte| *byte == value));
            assert_eq!(memory.stats().in_use_bytes, LEN as u64, "held by what is shared");
        }
        assert_eq!((memory.stats().fresh, memory.stats().reused), (1, 3));
        assert!(
            matches!(test_process::uses_of(inode.unwrap()), (1.., 1)),
            "in parts of different page sizes"
        );
        drop(memory);
        while test_process::uses_of(inode.unwrap()) != (0, 0) {
            std::thread::yield_now(); // A thread that populated it lets go of it.
        }
    }

    #[test]
    fn retired_memory_is_not_reused() {
        let memory = memory();
        let region = filled(&memory, SHAREABLE_BYTES_MIN, 1);
        let shared = region.shared().unwrap();
        shared.retire();
        drop(region);
        assert_eq!(memory.stats().in_use_bytes, SHAREABLE_BYTES_MIN as u64);
        let inode = shared.inode();
        drop(shared);
        assert_eq!((memory.stats().in_use_bytes, memory.stats().cached_bytes), (0, 0));
        assert_eq!(test_process::uses_of(inode), (0, 0));
    }

    /// Goal: a process that maps a version in reused memory sees nothing of a longer one that was there before.
    #[test]
    fn the_rest_of_reused_memory_is_zero() {
        let (memory, long) = (memory(), 2 * SHAREABLE_BYTES_MIN);
        drop(filled(&memory, long - 5, 1));
        for short in [long - PAGE_BYTES - 77, long / 2, long - 9] {
            let shared = filled(&memory, short, 2).shared().unwrap();
            assert_eq!(memory.stats().fresh, 1);
            assert_eq!(read(&shared, short - 1, long - short + 1)[..2], [2, 0]);
            assert!(read(&shared, short, long - short).iter().all(|byte| *byte == 0), "{short}");
        }
    }

    #[test]
    fn small_memory_is_private() {
        let memory = memory();
        assert!(memory.allocate(SHAREABLE_BYTES_MIN - PAGE_BYTES).unwrap().shared().is_err());
        assert!(memory.allocate(SHAREABLE_BYTES_MIN).unwrap().shared().is_ok());
        let private = HostMemory::new(u64::MAX).allocate(LEN).unwrap();
        assert_eq!(private.shared().err(), Some(NotShared::Private));
        assert_eq!(memory.why_not_shareable(), None);
    }

    /// Goal: where the system refuses, memory is private, the reason is known, and no signal ends the process.
    /// Method: a process that may not make files.
    #[test]
    fn refused_memory_is_private() {
        if test_process::is_own("host_memory::sharing::tests::refused_memory_is_private", "ulimit -f 0") {
            let memory = memory();
            assert_eq!(filled(&memory, LEN, 1).shared().err(), Some(NotShared::Refused));
            let small = filled(&memory, SHAREABLE_BYTES_MIN - PAGE_BYTES, 1);
            assert_eq!(small.shared().err(), Some(NotShared::Private), "nothing was asked for");
            let reason = memory.why_not_shareable().unwrap();
            assert!(reason.contains("ulimit -f"), "{reason}");
        }
    }

    /// Goal: shared memory leaves descriptors to connections.
    #[test]
    fn half_of_the_descriptors_are_left() {
        if test_process::is_own(
            "host_memory::sharing::tests::half_of_the_descriptors_are_left",
            "ulimit -n 40",
        ) {
            let memory = memory();
            let regions: Vec<_> = (0..40).map(|_| memory.allocate(SHAREABLE_BYTES_MIN).unwrap()).collect();
            let shared = regions.iter().filter(|region| region.shared().is_ok()).count();
            assert!((10..20).contains(&shared), "{shared}");
            let reason = memory.why_not_shareable().unwrap();
            assert!(reason.contains("ulimit -n"), "{reason}");
        }
    }
}
