//! Opens lanes over a server's Unix socket.

use std::{io, path::Path, time::Duration};
use tokio::time::{sleep, timeout};

use super::{ConnectError, Connector, listening_user::check_user};
use crate::{
    Lane, LaneKindReason, Peer,
    lane::{ByteStreamConnection, Role, Secured, Settings},
};

/// The wait before the next attempt, while the server's queue of connections to accept is full.
const FULL_QUEUE_DELAY: Duration = Duration::from_millis(20);

impl Connector {
    /// Opens a lane over the socket at `path`, if its listener is of an expected user. There is no handshake.
    pub(super) async fn connect_socket(&self, path: &Path, limit: Duration) -> Result<Lane, ConnectError> {
        let failed = |source| ConnectError::UnixSocket { path: path.into(), source };
        let opening = async {
            loop {
                match self.network.connect_socket(path).await {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(FULL_QUEUE_DELAY).await,
                    opened => return opened,
                }
            }
        };
        let opened = timeout(limit, opening)
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        let stream = opened.map_err(failed)?;
        let Some((process, _)) = stream.local() else {
            return Err(failed(io::ErrorKind::Unsupported.into()));
        };
        check_user(process, path, self.server_uid).map_err(|why| ConnectError::UnexpectedUser {
            path: path.into(),
            found_uid: process.uid,
            why,
        })?;
        let (secured, settings) = (Secured::plain(stream), Settings::from(&self.tuning));
        let connection =
            ByteStreamConnection::start(secured, Role::Client, Peer::Local(process), settings, None);
        Ok(Lane::byte_stream(connection).with_reason(LaneKindReason::Local))
    }
}

/// What to do about a failure of this kind.
pub(super) fn advice(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::NotFound => {
            "is the server running with `--socket`, and does this container share the folder of its socket?"
        }
        io::ErrorKind::ConnectionRefused => "no server listens there any more: start it again",
        io::ErrorKind::PermissionDenied => {
            "this user may not write to the socket or enter its folder: run as the server's user, or give the socket \
             another mode with `serve --socket-mode`"
        }
        io::ErrorKind::TimedOut => "the server accepts no connection: is it stopped or overloaded?",
        io::ErrorKind::InvalidInput => {
            "the path of a socket may have at most 107 bytes: choose a shorter one"
        }
        _ => "is it the socket of a server on this host?",
    }
}
