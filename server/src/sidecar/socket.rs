//! [`PublishSocket`]: the socket of producers, and the users that may connect.

use rustix::process::geteuid;
use std::{io, path::Path};
use tensor_relay_transport::unix::{SocketError, SocketListener, overflow_uid};
use tokio::net::UnixStream;

/// The mode of a socket for several users: their access is checked by peer credentials.
const SHARED: u32 = 0o666;

/// A named, listening socket. Its file is removed when this is dropped.
#[derive(Debug)]
pub struct PublishSocket {
    listener: SocketListener,
    uids: Vec<u32>,
    /// The uid that the system reports for every user without a number in this user namespace. Never admitted.
    overflow: u32,
}

/// Why the publish socket cannot be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishSocketError {
    /// The socket cannot be created.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The uid stands for every user without a number in this namespace.
    #[error(
        "user {uid} cannot be admitted by its number: it stands for every user of another container without a number \
         here. Run the process as a user that this container has"
    )]
    Overflow {
        /// The uid.
        uid: u32,
    },
}

impl PublishSocket {
    /// Creates a socket at `path` to which processes of this user, of root and of `uids` may publish.
    ///
    /// As [`SocketListener::bind`]. With `uids`, the mode of the file admits everybody. In both cases each connection is
    /// checked by its peer credentials.
    ///
    /// # Errors
    /// [`PublishSocketError`]; then no new file is left.
    pub fn open(path: &Path, uids: &[u32]) -> Result<Self, PublishSocketError> {
        let overflow = overflow_uid();
        if uids.contains(&overflow) {
            return Err(PublishSocketError::Overflow { uid: overflow });
        }
        let mode = if uids.is_empty() { SocketListener::PRIVATE } else { SHARED };
        Ok(Self { listener: SocketListener::bind(path, mode)?, uids: uids.into(), overflow })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.listener.path()
    }

    /// Accepts the next producer.
    pub(super) async fn accept(&self) -> io::Result<UnixStream> {
        self.listener.accept().await
    }

    /// Whether processes of `uid` may publish.
    pub(super) fn admits(&self, uid: u32) -> bool {
        let is_known = uid == geteuid().as_raw() || self.uids.contains(&uid);
        uid == 0 || (is_known && !self.is_overflow(uid))
    }

    /// Whether the system reports this uid for every user unknown in this namespace.
    pub(super) fn is_overflow(&self, uid: u32) -> bool {
        uid == self.overflow
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt};

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[tokio::test]
    async fn named_users_are_admitted() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("s");
        let socket = PublishSocket::open(&path, &[]).unwrap();
        assert_eq!(mode(&path), 0o600);
        assert!(socket.admits(geteuid().as_raw()) && !socket.admits(12_345));
        drop(socket);
        let socket = PublishSocket::open(&path, &[12_345]).unwrap();
        assert_eq!(mode(&path), 0o666, "access is checked by peer credentials");
        assert!(socket.admits(12_345) && !socket.admits(12_346));
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
