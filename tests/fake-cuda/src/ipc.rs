use std::{
    fs,
    os::fd::{AsRawFd, BorrowedFd},
    process,
};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};

use crate::{
    backing::Backing,
    status::{Answer, Status},
};

/// A `CUipcMemHandle`: 64 bytes that identify a block of device memory to other processes.
///
/// In this driver, the bytes contain the exporter's process id and the number of its file descriptor. A process that
/// may read the exporter's files under `/proc` can open the block. A process in another PID namespace cannot, although
/// some real drivers (580) permit it: so the tests cover a handle that does not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    process: u32,
    file: u32,
    /// The block's address in the exporter. Addresses are never reused, so this distinguishes the block from a later
    /// one whose file descriptor has the same number.
    address: u64,
    bytes: u64,
    device_number: u32,
}

pub(crate) const HANDLE_BYTES: usize = 64;
const MAGIC: [u8; 8] = *b"FAKE-IPC";

impl Handle {
    pub(crate) fn new(file: BorrowedFd<'_>, address: u64, bytes: usize, device_number: usize) -> Self {
        Self {
            process: process::id(),
            file: file.as_raw_fd().unsigned_abs(),
            address,
            bytes: bytes as u64,
            device_number: device_number as u32,
        }
    }

    pub(crate) fn device_number(self) -> usize {
        self.device_number as usize
    }

    pub(crate) fn encode(self) -> [u8; HANDLE_BYTES] {
        let parts: [&[u8]; 6] = [
            &MAGIC,
            &self.process.to_le_bytes(),
            &self.file.to_le_bytes(),
            &self.address.to_le_bytes(),
            &self.bytes.to_le_bytes(),
            &self.device_number.to_le_bytes(),
        ];
        let mut bytes = [0; HANDLE_BYTES];
        for (to, from) in bytes.iter_mut().zip(parts.concat()) {
            *to = from;
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HANDLE_BYTES]) -> Option<Self> {
        let u32_at = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let u64_at = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let handle = Self {
            process: u32_at(8)?,
            file: u32_at(12)?,
            address: u64_at(16)?,
            bytes: u64_at(24)?,
            device_number: u32_at(32)?,
        };
        (bytes[..8] == MAGIC && handle.encode() == *bytes).then_some(handle)
    }

    /// Maps the block. For a block of this process, or of a process that this one cannot see, the error is
    /// `INVALID_CONTEXT`, as with the real driver.
    pub(crate) fn open(self) -> Answer<(Backing, usize)> {
        let process = format!("/proc/{}", self.process);
        if self.process == process::id() || fs::metadata(&process).is_err() {
            return Err(Status::INVALID_CONTEXT);
        }
        let path = format!("{process}/fd/{}", self.file);
        let is_the_block = |target: &std::path::Path| {
            target.to_string_lossy() == format!("/memfd:{} (deleted)", name_of(self.address))
        };
        if !fs::read_link(&path).is_ok_and(|target| is_the_block(&target)) {
            return Err(Status::INVALID_VALUE);
        }
        let file = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|_| Status::INVALID_CONTEXT)?;
        // When the exporter frees the block, it recognises by this lock that the block is open.
        flock(&file, FlockOperation::NonBlockingLockShared).map_err(|_| Status::INVALID_VALUE)?;
        let file_bytes = rustix::fs::fstat(&file)
            .map_err(|_| Status::INVALID_VALUE)?
            .st_size
            .unsigned_abs();
        if file_bytes != self.bytes || file_bytes == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let bytes = file_bytes as usize;
        Ok((Backing::of(file, bytes)?, bytes))
    }
}

/// The name of the file that holds the bytes of the block at `address`.
pub(crate) fn name_of(address: u64) -> String {
    format!("fake-cuda-block-{address:x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_decoded_and_invalid_ones_are_refused() {
        let handle = Handle { process: 7, file: 8, address: 9 << 40, bytes: 10, device_number: 1 };
        let bytes = handle.encode();
        assert_eq!(Handle::decode(&bytes), Some(handle));
        for at in (0..8).chain(36..64) {
            let mut wrong = bytes;
            wrong[at] ^= 1;
            assert_eq!(Handle::decode(&wrong), None, "byte {at}");
        }
    }
}
