//! The publish socket: a file, and the users that may connect.

use rustix::{
    fs::{FileType, FlockOperation, Mode, OFlags, chmod, fchmod, flock, fstat, lstat, open, unlink},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with},
};
use std::{
    fs, io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{fs::FileTypeExt, net},
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};
use tokio::net::UnixListener;

/// The most producers waiting to be accepted.
const BACKLOG: i32 = 64;

/// How long another server may lock the same folder while it makes a socket. It takes a few system calls.
const TURN: Duration = Duration::from_secs(5);

/// What [`overflow_uid`] is where the system does not say.
const OVERFLOW_UID: u32 = 65_534;

/// A named, listening socket. Its file is removed when this is dropped.
#[derive(Debug)]
pub struct PublishSocket {
    listener: UnixListener,
    path: PathBuf,
    /// The identity of its file, whatever takes its name later.
    file: (u64, u64),
    uids: Vec<u32>,
    /// The number under which the system shows every user who has none in this user namespace. Never let in.
    overflow: u32,
}

/// Why the publish socket cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishSocketError {
    /// A running server listens there.
    #[error(
        "another server listens at {}: publish to that one, end it, or choose another path", path.display()
    )]
    InUse {
        /// Where.
        path: PathBuf,
    },
    /// Something other than a socket is there.
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
        /// The mode that let others in.
        mode: u32,
    },
    /// The uid stands for all users unknown in this namespace.
    #[error(
        "user {uid} cannot be let in by its number: the system gives it to every user of another container who has none here. \
         Let the process run as a user that this container knows"
    )]
    Overflow {
        /// Which number.
        uid: u32,
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

impl PublishSocket {
    /// Makes a socket at `path` that processes of this user and of root may publish to, and those of `uids`.
    ///
    /// The file is its user's alone from its first moment. With `uids` it is then opened for everybody, and who connects is
    /// asked for credentials that the system vouches for. A socket that was left behind is replaced; one that a server
    /// listens at is not. Call it in a tokio runtime.
    ///
    /// # Errors
    /// [`PublishSocketError`]; nothing is left behind then.
    pub fn open(path: &Path, uids: &[u32]) -> Result<Self, PublishSocketError> {
        let failed = |source: io::Error| PublishSocketError::Io { path: path.into(), source };
        let overflow = overflow_uid();
        if uids.contains(&overflow) {
            return Err(PublishSocketError::Overflow { uid: overflow });
        }
        let address =
            SocketAddrUnix::new(path).map_err(|_| PublishSocketError::TooLong { path: path.into() })?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        // Sockets in this folder are made and replaced under a lock: two servers that find the same stale one would
        // otherwise remove each other's.
        let turn = take_turn(folder.unwrap_or_else(|| Path::new("."))).map_err(failed)?;
        clear(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = socket.map_err(|error| failed(error.into()))?;
        // The file that `bind` makes has the socket's own mode: it is never anybody else's, not for a moment.
        fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(|error| failed(error.into()))?;
        bind(&socket, &address).map_err(|error| failed(error.into()))?;
        let door = Self::bound(socket, path, uids, overflow);
        drop(turn);
        door
    }

    /// A socket that has its name already, and gives it back when anything fails.
    fn bound(socket: OwnedFd, path: &Path, uids: &[u32], overflow: u32) -> Result<Self, PublishSocketError> {
        let failed = |source: io::Error| PublishSocketError::Io { path: path.into(), source };
        // Looked at once, and held: somebody else may give the name to another file, whose mode must stay as it is.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let held = open(path, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
        let found = fstat(&held).map_err(|error| failed(error.into()))?;
        if !FileType::from_raw_mode(found.st_mode).is_socket() {
            return Err(PublishSocketError::NotASocket { path: path.into() });
        }
        let file = (found.st_dev, found.st_ino);
        let made = || -> Result<UnixListener, PublishSocketError> {
            let mode = found.st_mode & 0o777;
            if mode & 0o077 != 0 {
                return Err(PublishSocketError::NotPrivate { path: path.into(), mode });
            }
            if !uids.is_empty() {
                let name = format!("/proc/self/fd/{}", held.as_raw_fd()); // What is held, whatever its name is by now.
                chmod(name, Mode::from_raw_mode(0o666)).map_err(|error| failed(error.into()))?;
            }
            listen(&socket, BACKLOG).map_err(|error| failed(error.into()))?;
            UnixListener::from_std(net::UnixListener::from(socket)).map_err(failed)
        };
        let listener = made().inspect_err(|_| unlink_if(path, file))?;
        Ok(Self { listener, path: path.into(), file, uids: uids.into(), overflow })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next producer that connects.
    pub(super) async fn accept(&self) -> io::Result<tokio::net::UnixStream> {
        self.listener.accept().await.map(|(stream, _)| stream)
    }

    /// Whether processes of `uid` may publish.
    pub(super) fn admits(&self, uid: u32) -> bool {
        let is_known = uid == rustix::process::geteuid().as_raw() || self.uids.contains(&uid);
        uid == 0 || (is_known && !self.is_nobody(uid))
    }

    /// Whether the system shows this uid for every user unknown in this namespace.
    pub(super) fn is_nobody(&self, uid: u32) -> bool {
        uid == self.overflow
    }
}

impl Drop for PublishSocket {
    fn drop(&mut self) {
        unlink_if(&self.path, self.file);
    }
}

/// Removes a name, if it still refers to `file`.
fn unlink_if(path: &Path, file: (u64, u64)) {
    if lstat(path).is_ok_and(|found| (found.st_dev, found.st_ino) == file) {
        let _ = unlink(path); // Gone already, or the folder is: what is wanted.
    }
}

/// The number that the system shows for users who have none in this user namespace.
fn overflow_uid() -> u32 {
    let said = fs::read_to_string("/proc/sys/fs/overflowuid").ok();
    said.and_then(|said| said.trim().parse().ok()).unwrap_or(OVERFLOW_UID)
}

/// Waits for the lock on `folder`.
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
            Err(Errno::WOULDBLOCK | Errno::INTR) => {
                let text = format!(
                    "another process has locked its folder for {} s: end it, or choose another path",
                    TURN.as_secs()
                );
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            // Some network file systems have no locks. Two servers that start at the same moment are what is lost.
            Err(Errno::OPNOTSUPP | Errno::NOLCK | Errno::NOSYS) => return Ok(folder),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Removes a stale socket.
fn clear(path: &Path) -> Result<(), PublishSocketError> {
    let failed = |source: io::Error| PublishSocketError::Io { path: path.into(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(PublishSocketError::NotASocket { path: path.into() });
        }
        Ok(_) => {}
    }
    // Does not wait: a server too busy to answer is running.
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
        Ok(()) | Err(_) => Err(PublishSocketError::InUse { path: path.into() }),
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
        let door = PublishSocket::open(&path, &[]).unwrap();
        assert_eq!(mode(&path), 0o600);
        assert!(door.admits(rustix::process::geteuid().as_raw()) && !door.admits(12_345));
        drop(door);
        assert!(!path.exists());
        let door = PublishSocket::open(&path, &[12_345]).unwrap();
        assert_eq!(mode(&path), 0o666, "who connects is asked who it is");
        assert!(door.admits(12_345) && !door.admits(12_346));
    }

    #[tokio::test]
    async fn a_socket_that_was_left_behind_is_replaced_and_a_live_one_is_not() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("s");
        drop(net::UnixListener::bind(&path).unwrap()); // Leaves its file, as a killed process does.
        let door = PublishSocket::open(&path, &[]).unwrap();
        let second = PublishSocket::open(&path, &[]);
        assert!(matches!(second, Err(PublishSocketError::InUse { .. })), "{second:?}");
        assert!(path.exists(), "who was refused takes nothing away");
        drop(door);
    }

    #[tokio::test]
    async fn what_is_no_socket_is_left_alone() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("model.safetensors");
        fs::write(&path, b"precious").unwrap();
        let refused = PublishSocket::open(&path, &[]);
        assert!(matches!(refused, Err(PublishSocketError::NotASocket { .. })), "{refused:?}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        let refused = PublishSocket::open(&home.path().join("x".repeat(120)), &[]);
        assert!(matches!(refused, Err(PublishSocketError::TooLong { .. })), "{refused:?}");
    }

    #[tokio::test]
    async fn a_door_takes_no_other_socket_away() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("s");
        let first = PublishSocket::open(&path, &[]).unwrap();
        fs::remove_file(&path).unwrap();
        let second = PublishSocket::open(&path, &[]).unwrap();
        drop(first);
        assert!(second.path().exists());
    }

    /// Goal: what is at the path when the socket is made is neither followed nor taken away.
    /// Method: a link in its place, to a file.
    #[tokio::test]
    async fn a_link_in_its_place_is_left_alone() {
        let home = tempfile::tempdir().unwrap();
        let (file, path) = (home.path().join("model.safetensors"), home.path().join("s"));
        fs::write(&file, b"precious").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&file, &path).unwrap();
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let refused = PublishSocket::bound(socket, &path, &[12_345], OVERFLOW_UID);
        assert!(matches!(refused, Err(PublishSocketError::NotASocket { .. })), "{refused:?}");
        assert_eq!((mode(&file), path.is_symlink()), (0o600, true));
    }

    #[tokio::test]
    async fn a_number_that_many_share_is_not_let_in() {
        let home = tempfile::tempdir().unwrap();
        let (path, nobody) = (home.path().join("s"), overflow_uid());
        let refused = PublishSocket::open(&path, &[nobody]);
        assert!(matches!(refused, Err(PublishSocketError::Overflow { uid }) if uid == nobody), "{refused:?}");
        let mut door = PublishSocket::open(&path, &[12_345]).unwrap();
        assert!(door.admits(12_345));
        door.overflow = 12_345;
        assert!(!door.admits(12_345), "though it was named");
    }
}
