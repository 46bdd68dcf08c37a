//! [`lock_folder`]: one process at a time changes the files of a folder.

use rustix::{
    fs::{FlockOperation, Mode, OFlags, flock, open},
    io::Errno,
};
use std::{
    io,
    os::fd::OwnedFd,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// The time for which another process may lock the folder: it makes a few system calls meanwhile.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits for the lock on `folder`, at most 5 s; it is held until the result is dropped. Blocks. File systems without locks
/// give a result that locks nothing.
///
/// # Errors
/// The folder cannot be opened, or another process has it locked for longer.
pub fn lock_folder(folder: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = open(folder, flags, Mode::empty())?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(folder),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(10));
            }
            Err(Errno::WOULDBLOCK | Errno::INTR) => {
                let text = format!(
                    "another process has locked its folder for {} s: end it, or choose another path",
                    LOCK_TIMEOUT.as_secs()
                );
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            // Some network file systems have no locks: two concurrent processes may conflict.
            Err(Errno::OPNOTSUPP | Errno::NOLCK | Errno::NOSYS) => return Ok(folder),
            Err(error) => return Err(error.into()),
        }
    }
}
