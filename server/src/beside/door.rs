//! The socket that producers connect to: a file with a name, and who may use it.

use rustix::{
    fs::{FlockOperation, Mode, OFlags, chmod, fchmod, flock, lstat, open, unlink},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with},
};
use std::{
    fs, io,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net,
        },
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};
use tokio::net::UnixListener;

/// How many producers may wait to be let in, before the system turns them away.
const BACKLOG: i32 = 64;

/// How long another server may take that makes a socket in the same folder. It takes it a few system calls.
const TURN: Duration = Duration::from_secs(5);

/// A socket with a name, that listens. Its name goes when this is dropped.
#[derive(Debug)]
pub struct Door {
    listener: UnixListener,
    path: PathBuf,
    /// Which file it is, whatever takes its name later.
    file: (u64, u64),
    uids: Vec<u32>,
}

/// Why there is no socket to publish to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DoorError {
    /// A server that runs has it.
    #[error(
        "another server listens at {}: publish to that one, end it, or choose another path", path.display()
    )]
    InUse {
        /// Where.
        path: PathBuf,
    },
    /// There is something else.
    #[error(
        "there is something at {} that is no socket, and it is left alone: choose another path, or remove it",
        path.display()
    )]
    NotASocket {
        /// Where.
        path: PathBuf,
    },
    /// The name is longer than the system takes.
    #[error("the path of a socket may have 107 bytes, and {} has more: choose a shorter one", path.display())]
    TooLong {
        /// Which one.
        path: PathBuf,
    },
    /// The file system does not keep others out.
    #[error(
        "the socket at {} could be used by others (mode {mode:o}) before it was made private: choose a path on another file system",
        path.display()
    )]
    NotPrivate {
        /// Where.
        path: PathBuf,
        /// Who could have used it.
        mode: u32,
    },
    /// The system refused.
    #[error("cannot make the socket {}: {source}", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
}

impl Door {
    /// Makes a socket at `path` that processes of this user and of root may publish to, and those of `uids`.
    ///
    /// The file is its user's alone from its first moment. With `uids` it is then opened for everybody, and who connects is
    /// asked for credentials that the system vouches for. A socket that was left behind is replaced; one that a server
    /// listens at is not. Call it in a tokio runtime.
    ///
    /// # Errors
    /// [`DoorError`]; nothing is left behind then.
    pub fn open(path: &Path, uids: &[u32]) -> Result<Self, DoorError> {
        let failed = |source: io::Error| DoorError::Io { path: path.into(), source };
        let address = SocketAddrUnix::new(path).map_err(|_| DoorError::TooLong { path: path.into() })?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        // Whoever makes or replaces a socket in this folder does it alone: two that find the same one left behind would
        // otherwise remove each other's.
        let turn = take_turn(folder.unwrap_or_else(|| Path::new("."))).map_err(failed)?;
        clear(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = socket.map_err(|error| failed(error.into()))?;
        // The file that `bind` makes has the socket's own mode: it is never anybody else's, not for a moment.
        fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(|error| failed(error.into()))?;
        bind(&socket, &address).map_err(|error| failed(error.into()))?;
        let door = Self::bound(socket, path, uids);
        drop(turn);
        door
    }

    /// A socket that has its name already, and gives it back when anything fails.
    fn bound(socket: OwnedFd, path: &Path, uids: &[u32]) -> Result<Self, DoorError> {
        let made = || -> Result<(u64, u64), DoorError> {
            let failed = |source: io::Error| DoorError::Io { path: path.into(), source };
            let found = fs::symlink_metadata(path).map_err(failed)?;
            let mode = found.mode() & 0o777;
            if mode & 0o077 != 0 {
                return Err(DoorError::NotPrivate { path: path.into(), mode });
            }
            if !uids.is_empty() {
                chmod(path, Mode::from_raw_mode(0o666)).map_err(|error| failed(error.into()))?;
            }
            listen(&socket, BACKLOG).map_err(|error| failed(error.into()))?;
            Ok((found.dev(), found.ino()))
        };
        let file = made().inspect_err(|_| {
            let _ = unlink(path); // It is ours: nobody else makes one here meanwhile.
        })?;
        let listener = UnixListener::from_std(net::UnixListener::from(socket));
        let listener = listener.map_err(|source| DoorError::Io { path: path.into(), source })?;
        Ok(Self { listener, path: path.into(), file, uids: uids.into() })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next producer that connects.
    pub(super) async fn accept(&self) -> io::Result<tokio::net::UnixStream> {
        self.listener.accept().await.map(|(stream, _)| stream)
    }

    /// Whether processes of `uid` may publish.
    pub(super) fn admits(&self, uid: u32) -> bool {
        uid == 0 || uid == rustix::process::geteuid().as_raw() || self.uids.contains(&uid)
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        let is_ours = lstat(&self.path).is_ok_and(|found| (found.st_dev, found.st_ino) == self.file);
        if is_ours {
            let _ = unlink(&self.path); // Gone already, or the folder is: what is wanted.
        }
    }
}

/// Waits until nobody else makes a socket in `folder`.
fn take_turn(folder: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = open(folder, flags, Mode::empty())?;
    let deadline = Instant::now() + TURN;
    loop {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(folder),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(10));
            }
            // Some network file systems have no locks. Two servers that start at the same moment are what is lost.
            Err(Errno::OPNOTSUPP | Errno::NOLCK | Errno::NOSYS) => return Ok(folder),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Removes a socket that nobody listens at any more.
fn clear(path: &Path) -> Result<(), DoorError> {
    let failed = |source: io::Error| DoorError::Io { path: path.into(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(DoorError::NotASocket { path: path.into() });
        }
        Ok(_) => {}
    }
    // Does not wait: a server that is too busy to be asked is one.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let asked = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .and_then(|socket| connect(&socket, &SocketAddrUnix::new(path)?));
    match asked {
        Err(Errno::CONNREFUSED) => {
            tracing::info!(path = %path.display(), "A socket that an earlier server left behind is replaced.");
            fs::remove_file(path).map_err(failed)
        }
        Err(Errno::NOENT) => Ok(()),
        // It listens, or nobody but its owner may know.
        Ok(()) | Err(_) => Err(DoorError::InUse { path: path.into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[tokio::test]
    async fn a_socket_is_private_and_goes_with_its_door() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("s");
        let door = Door::open(&path, &[]).unwrap();
        assert_eq!(mode(&path), 0o600);
        assert!(door.admits(rustix::process::geteuid().as_raw()) && !door.admits(12_345));
        drop(door);
        assert!(!path.exists());
        let door = Door::open(&path, &[12_345]).unwrap();
        assert_eq!(mode(&path), 0o666, "who connects is asked who it is");
        assert!(door.admits(12_345) && !door.admits(12_346));
    }

    #[tokio::test]
    async fn a_socket_that_was_left_behind_is_replaced_and_a_live_one_is_not() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("s");
        drop(net::UnixListener::bind(&path).unwrap()); // Leaves its file, as a killed process does.
        let door = Door::open(&path, &[]).unwrap();
        let second = Door::open(&path, &[]);
        assert!(matches!(second, Err(DoorError::InUse { .. })), "{second:?}");
        assert!(path.exists(), "who was refused takes nothing away");
        drop(door);
    }

    #[tokio::test]
    async fn what_is_no_socket_is_left_alone() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("model.safetensors");
        fs::write(&path, b"precious").unwrap();
        let refused = Door::open(&path, &[]);
        assert!(matches!(refused, Err(DoorError::NotASocket { .. })), "{refused:?}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        let refused = Door::open(&home.path().join("x".repeat(120)), &[]);
        assert!(matches!(refused, Err(DoorError::TooLong { .. })), "{refused:?}");
    }

    #[tokio::test]
    async fn a_door_takes_no_other_socket_away() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("s");
        let first = Door::open(&path, &[]).unwrap();
        fs::remove_file(&path).unwrap();
        let second = Door::open(&path, &[]).unwrap();
        drop(first);
        assert!(second.path().exists());
    }
}
