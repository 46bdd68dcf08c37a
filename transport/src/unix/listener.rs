//! [`SocketListener`]: a listening Unix socket and its file.

use rustix::{
    fs::{FileType, Mode, OFlags, chmod, fchmod, fstat, lstat, open, unlink},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with},
};
use std::{
    fs, io,
    net::SocketAddr,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{fs::FileTypeExt, net},
    },
    path::{Path, PathBuf},
    task::{Context, Poll, ready},
};
use tokio::net::{UnixListener, UnixStream};

use super::SocketStream;
use crate::{ByteStream, Peer, StreamListener, folder_lock::lock_folder};

/// The maximum number of connections waiting to be accepted; the system may allow fewer (`net.core.somaxconn`).
const BACKLOG: i32 = 1_024;

/// A named, listening socket. Its file is removed when this is dropped.
#[derive(Debug)]
pub struct SocketListener {
    listener: UnixListener,
    path: PathBuf,
    /// The device and inode of its file, whose name may be reused later.
    file: (u64, u64),
}

/// Why a socket cannot be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketError {
    /// A running server listens at the path.
    #[error("another server listens at {}: end it, or choose another path", path.display())]
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
    /// A system call failed.
    #[error("cannot create the socket {}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl SocketListener {
    /// The mode of a socket for processes of this user alone, and root.
    pub const PRIVATE: u32 = 0o600;

    /// Creates a socket at `path`, whose file has the permissions `mode`: who may write to it can connect.
    ///
    /// The file is private to its user when it is created, and then gets its mode. A stale socket is replaced; one with
    /// a listening server is not. Call this in a tokio runtime.
    ///
    /// # Errors
    /// [`SocketError`]; then no new file is left.
    pub fn bind(path: &Path, mode: u32) -> Result<Self, SocketError> {
        let failed = |source: io::Error| SocketError::Io { path: path.into(), source };
        let address = SocketAddrUnix::new(path).map_err(|_| SocketError::TooLong { path: path.into() })?;
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
        let socket = Self::listen_on(socket, path, mode);
        drop(lock);
        socket
    }

    /// Listens on a bound socket; removes its file on failure.
    fn listen_on(socket: OwnedFd, path: &Path, mode: u32) -> Result<Self, SocketError> {
        let failed = |source: io::Error| SocketError::Io { path: path.into(), source };
        // Opened once and held: the name may be given to another file, whose mode must not be changed.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let held = open(path, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
        let found = fstat(&held).map_err(|error| failed(error.into()))?;
        if !FileType::from_raw_mode(found.st_mode).is_socket() {
            return Err(SocketError::NotASocket { path: path.into() });
        }
        let file = (found.st_dev, found.st_ino);
        let listen = || -> Result<UnixListener, SocketError> {
            let found_mode = found.st_mode & 0o777;
            if found_mode & 0o077 != 0 {
                return Err(SocketError::NotPrivate { path: path.into(), mode: found_mode });
            }
            if mode != Self::PRIVATE {
                let name = format!("/proc/self/fd/{}", held.as_raw_fd()); // The held file, even if it was renamed.
                chmod(name, Mode::from_raw_mode(mode)).map_err(|error| failed(error.into()))?;
            }
            rustix::net::listen(&socket, BACKLOG).map_err(|error| failed(error.into()))?;
            UnixListener::from_std(net::UnixListener::from(socket)).map_err(failed)
        };
        let listener = listen().inspect_err(|_| unlink_if(path, file))?;
        Ok(Self { listener, path: path.into(), file })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts the next connection. Cancel safe.
    ///
    /// # Errors
    /// Those of accept(2), usually too many open files.
    pub async fn accept(&self) -> io::Result<UnixStream> {
        self.listener.accept().await.map(|(stream, _)| stream)
    }
}

impl StreamListener for SocketListener {
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Box<dyn ByteStream>, Peer)>> {
        let (stream, _) = ready!(self.listener.poll_accept(cx))?;
        Poll::Ready(SocketStream::accepted(stream).map(|stream| {
            let peer = Peer::Local(stream.process());
            (Box::new(stream) as Box<dyn ByteStream>, peer)
        }))
    }

    /// A socket has a path instead.
    fn local_address(&self) -> io::Result<SocketAddr> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Drop for SocketListener {
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

/// Removes a stale socket.
fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let failed = |source: io::Error| SocketError::Io { path: path.into(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(SocketError::NotASocket { path: path.into() });
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
        Ok(()) | Err(_) => Err(SocketError::InUse { path: path.into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const PRIVATE: u32 = SocketListener::PRIVATE;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[tokio::test]
    async fn a_socket_has_its_mode_and_is_removed_on_drop() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("s");
        for wanted in [PRIVATE, 0o660, 0o666] {
            let socket = SocketListener::bind(&path, wanted).unwrap();
            assert_eq!(mode(&path), wanted);
            drop(socket);
            assert!(!path.exists());
        }
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("s");
        drop(net::UnixListener::bind(&path).unwrap()); // Leaves its file, as a killed process does.
        let socket = SocketListener::bind(&path, PRIVATE).unwrap();
        let second = SocketListener::bind(&path, PRIVATE);
        assert!(matches!(second, Err(SocketError::InUse { .. })), "{second:?}");
        assert!(path.exists(), "the refused server removed nothing");
        drop(socket);
    }

    #[tokio::test]
    async fn other_files_are_left_unchanged() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("model.safetensors");
        fs::write(&path, b"precious").unwrap();
        let refused = SocketListener::bind(&path, PRIVATE);
        assert!(matches!(refused, Err(SocketError::NotASocket { .. })), "{refused:?}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        let refused = SocketListener::bind(&home.path().join("x".repeat(120)), PRIVATE);
        assert!(matches!(refused, Err(SocketError::TooLong { .. })), "{refused:?}");
    }

    #[tokio::test]
    async fn a_socket_removes_only_its_own_file() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("s");
        let first = SocketListener::bind(&path, PRIVATE).unwrap();
        fs::remove_file(&path).unwrap();
        let second = SocketListener::bind(&path, PRIVATE).unwrap();
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
        let refused = SocketListener::listen_on(socket, &path, 0o666);
        assert!(matches!(refused, Err(SocketError::NotASocket { .. })), "{refused:?}");
        assert_eq!((mode(&file), path.is_symlink()), (0o600, true));
    }
}
