//! [`PublishSocket`]: the listening socket, its file, and the users that may connect.

use crate::folder_lock::lock_folder;
use rustix::{
    fs::{FileType, Mode, OFlags, chmod, fchmod, fstat, lstat, open, unlink},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with},
};
use std::{
    fs, io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{fs::FileTypeExt, net},
    },
    path::{Path, PathBuf},
};
use tokio::net::UnixListener;

/// The maximum number of producers waiting to be accepted.
const BACKLOG: i32 = 64;

/// The default of [`overflow_uid`], if the system does not report it.
const OVERFLOW_UID: u32 = 65_534;

/// A named, listening socket. Its file is removed when this is dropped.
#[derive(Debug)]
pub struct PublishSocket {
    listener: UnixListener,
    path: PathBuf,
    /// The device and inode of its file, whose name may be reused later.
    file: (u64, u64),
    uids: Vec<u32>,
    /// The uid that the system reports for every user without a number in this user namespace. Never admitted.
    overflow: u32,
}

/// Why the publish socket cannot be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishSocketError {
    /// A running server listens at the path.
    #[error(
        "another server listens at {}: publish to that server, end it, or choose another path", path.display()
    )]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// The path exists and is not a socket.
    #[error(
        "{} exists and is not a socket, so it is left unchanged: choose another path, or remove it",
        path.display()
    )]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The path is longer than the system allows.
    #[error("the path of a socket may have at most 107 bytes, and {} has more: choose a shorter one", path.display())]
    TooLong {
        /// The path.
        path: PathBuf,
    },
    /// The file system does not protect the socket from other users.
    #[error(
        "other users can connect to the socket at {} (mode {mode:o}): choose a path on another file system",
        path.display()
    )]
    NotPrivate {
        /// The path.
        path: PathBuf,
        /// The mode that admits others.
        mode: u32,
    },
    /// The uid stands for every user without a number in this namespace.
    #[error(
        "user {uid} cannot be admitted by its number: it stands for every user of another container without a number \
         here. Run the process as a user that this container has"
    )]
    Overflow {
        /// The uid.
        uid: u32,
    },
    /// A system call failed.
    #[error("cannot create the socket {}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl PublishSocket {
    /// Creates a socket at `path` to which processes of this user, of root and of `uids` may publish.
    ///
    /// The file is private to its user when it is created. With `uids`, its mode then admits everybody. In both cases
    /// each connection is checked by its peer credentials. A stale socket is replaced; one with a listening server is
    /// not. Call this in a tokio runtime.
    ///
    /// # Errors
    /// [`PublishSocketError`]; then no new file is left.
    pub fn open(path: &Path, uids: &[u32]) -> Result<Self, PublishSocketError> {
        let failed = |source: io::Error| PublishSocketError::Io { path: path.into(), source };
        let overflow = overflow_uid();
        if uids.contains(&overflow) {
            return Err(PublishSocketError::Overflow { uid: overflow });
        }
        let address =
            SocketAddrUnix::new(path).map_err(|_| PublishSocketError::TooLong { path: path.into() })?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        // Sockets in this folder are created and replaced under a lock: otherwise two servers that find the same stale
        // socket could remove each other's.
        let lock = lock_folder(folder.unwrap_or_else(|| Path::new("."))).map_err(failed)?;
        remove_stale(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = socket.map_err(|error| failed(error.into()))?;
        // `bind` creates the file with the mode of the socket, so it is never accessible to others.
        fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(|error| failed(error.into()))?;
        bind(&socket, &address).map_err(|error| failed(error.into()))?;
        let socket = Self::listen_on(socket, path, uids, overflow);
        drop(lock);
        socket
    }

    /// Listens on a bound socket; removes its file on failure.
    fn listen_on(
        socket: OwnedFd,
        path: &Path,
        uids: &[u32],
        overflow: u32,
    ) -> Result<Self, PublishSocketError> {
        let failed = |source: io::Error| PublishSocketError::Io { path: path.into(), source };
        // Opened once and held: the name may be given to another file, whose mode must not be changed.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let held = open(path, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
        let found = fstat(&held).map_err(|error| failed(error.into()))?;
        if !FileType::from_raw_mode(found.st_mode).is_socket() {
            return Err(PublishSocketError::NotASocket { path: path.into() });
        }
        let file = (found.st_dev, found.st_ino);
        let listen = || -> Result<UnixListener, PublishSocketError> {
            let mode = found.st_mode & 0o777;
            if mode & 0o077 != 0 {
                return Err(PublishSocketError::NotPrivate { path: path.into(), mode });
            }
            if !uids.is_empty() {
                let name = format!("/proc/self/fd/{}", held.as_raw_fd()); // The held file, even if it was renamed.
                chmod(name, Mode::from_raw_mode(0o666)).map_err(|error| failed(error.into()))?;
            }
            rustix::net::listen(&socket, BACKLOG).map_err(|error| failed(error.into()))?;
            UnixListener::from_std(net::UnixListener::from(socket)).map_err(failed)
        };
        let listener = listen().inspect_err(|_| unlink_if(path, file))?;
        Ok(Self { listener, path: path.into(), file, uids: uids.into(), overflow })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts the next producer.
    pub(super) async fn accept(&self) -> io::Result<tokio::net::UnixStream> {
        self.listener.accept().await.map(|(stream, _)| stream)
    }

    /// Whether processes of `uid` may publish.
    pub(super) fn admits(&self, uid: u32) -> bool {
        let is_known = uid == rustix::process::geteuid().as_raw() || self.uids.contains(&uid);
        uid == 0 || (is_known && !self.is_overflow(uid))
    }

    /// Whether the system reports this uid for every user unknown in this namespace.
    pub(super) fn is_overflow(&self, uid: u32) -> bool {
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
        let _ = unlink(path); // Fails if it was removed already.
    }
}

/// The uid that the system reports for users without a number in this user namespace.
fn overflow_uid() -> u32 {
    let text = fs::read_to_string("/proc/sys/fs/overflowuid").ok();
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(OVERFLOW_UID)
}

/// Removes a stale socket.
fn remove_stale(path: &Path) -> Result<(), PublishSocketError> {
    let failed = |source: io::Error| PublishSocketError::Io { path: path.into(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(PublishSocketError::NotASocket { path: path.into() });
        }
        Ok(_) => {}
    }
    // Does not wait: a server that is too busy to answer is running.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connected = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .and_then(|socket| connect(&socket, &SocketAddrUnix::new(path)?));
    match connected {
        Err(Errno::CONNREFUSED) => {
            tracing::info!(path = %path.display(), "The stale socket of an earlier server is replaced.");
            fs::remove_file(path).map_err(failed)
        }
        Err(Errno::NOENT) => Ok(()),
        // A server listens, or only the owner may check.
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
    async fn a_socket_is_private_and_removed_on_drop() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("s");
        let socket = PublishSocket::open(&path, &[]).unwrap();
        assert_eq!(mode(&path), 0o600);
        assert!(socket.admits(rustix::process::geteuid().as_raw()) && !socket.admits(12_345));
        drop(socket);
        assert!(!path.exists());
        let socket = PublishSocket::open(&path, &[12_345]).unwrap();
        assert_eq!(mode(&path), 0o666, "access is checked by peer credentials");
        assert!(socket.admits(12_345) && !socket.admits(12_346));
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("s");
        drop(net::UnixListener::bind(&path).unwrap()); // Leaves its file, as a killed process does.
        let socket = PublishSocket::open(&path, &[]).unwrap();
        let second = PublishSocket::open(&path, &[]);
        assert!(matches!(second, Err(PublishSocketError::InUse { .. })), "{second:?}");
        assert!(path.exists(), "the refused server removed nothing");
        drop(socket);
    }

    #[tokio::test]
    async fn other_files_are_left_unchanged() {
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
    async fn a_socket_removes_only_its_own_file() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("s");
        let first = PublishSocket::open(&path, &[]).unwrap();
        fs::remove_file(&path).unwrap();
        let second = PublishSocket::open(&path, &[]).unwrap();
        drop(first);
        assert!(second.path().exists());
    }

    /// Goal: an existing file at the path is neither followed nor removed. Method: a link to a file.
    #[tokio::test]
    async fn a_link_at_the_path_is_left_unchanged() {
        let home = tempfile::tempdir().unwrap();
        let (file, path) = (home.path().join("model.safetensors"), home.path().join("s"));
        fs::write(&file, b"precious").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&file, &path).unwrap();
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let refused = PublishSocket::listen_on(socket, &path, &[12_345], OVERFLOW_UID);
        assert!(matches!(refused, Err(PublishSocketError::NotASocket { .. })), "{refused:?}");
        assert_eq!((mode(&file), path.is_symlink()), (0o600, true));
    }

    #[tokio::test]
    async fn the_overflow_uid_is_not_admitted() {
        let home = tempfile::tempdir().unwrap();
        let (path, nobody) = (home.path().join("s"), overflow_uid());
        let refused = PublishSocket::open(&path, &[nobody]);
        assert!(matches!(refused, Err(PublishSocketError::Overflow { uid }) if uid == nobody), "{refused:?}");
        let mut socket = PublishSocket::open(&path, &[12_345]).unwrap();
        assert!(socket.admits(12_345));
        socket.overflow = 12_345;
        assert!(!socket.admits(12_345), "although it is listed");
    }
}
