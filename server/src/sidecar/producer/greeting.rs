//! The first words with a server beside, and why there may be none.

use super::super::{
    channel::{FrameReader, FrameWriter, split},
    version::Terms,
};
use std::{
    io,
    path::{Path, PathBuf},
};
use tensor_relay_protocol::sidecar::{Hello, ProducerMessage, REVISIONS, ServerMessage, encode_producer};
use tokio::net::UnixStream;

/// Why there is no connection to a server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// There is no socket.
    #[error("there is no socket at {}: start `tensor-relay serve --publish-socket` with this path", path.display())]
    NoSocket {
        /// Where.
        path: PathBuf,
    },
    /// The server that made it is gone, or something else is there.
    #[error("nobody listens at {}: the server that made it has ended", path.display())]
    NobodyListens {
        /// Where.
        path: PathBuf,
    },
    /// So many wait to be let in that the system turns further ones away.
    #[error("the server at {} is too busy to let this process in: try again", path.display())]
    Busy {
        /// Where.
        path: PathBuf,
    },
    /// The socket is another user's.
    #[error(
        "the socket {} is private to another user: run as that user, or start the server with --publish-uid {uid}",
        path.display()
    )]
    NotPermitted {
        /// Where.
        path: PathBuf,
        /// Who asks.
        uid: u32,
    },
    /// Somebody else than expected listens. Nothing was told to them.
    #[error(
        "a process of user {found_uid} listens at {}, and not one of user {expected_uid}: see who made this socket, or name \
         the user that the server runs as",
        path.display()
    )]
    Stranger {
        /// Where.
        path: PathBuf,
        /// Who listens.
        found_uid: u32,
        /// Who should.
        expected_uid: u32,
    },
    /// The server said why not.
    #[error("the server at {} does not let this process publish: {why}", path.display())]
    Refused {
        /// Where.
        path: PathBuf,
        /// What it said.
        why: String,
    },
    /// The server does not answer.
    #[error("the server at {} did not answer in time", path.display())]
    NoAnswer {
        /// Where.
        path: PathBuf,
    },
    /// The system refused, or what answered is no server.
    #[error("cannot connect to {}: {why}", path.display())]
    Broken {
        /// Where.
        path: PathBuf,
        /// What happened.
        why: String,
    },
}

/// Connects and exchanges the first messages.
pub(super) async fn greet(
    path: &Path,
    server_uid: Option<u32>,
) -> Result<(FrameReader, FrameWriter, Terms), ConnectError> {
    let stream = UnixStream::connect(path).await.map_err(|error| why_not(path, &error))?;
    if let Some(expected_uid) = server_uid {
        let found_uid = stream.peer_cred().map_err(|error| why_not(path, &error))?.uid();
        if found_uid != expected_uid {
            return Err(ConnectError::Stranger { path: path.into(), found_uid, expected_uid });
        }
    }
    let (mut reader, writer) = split(stream);
    let hello = Hello {
        revision_min: *REVISIONS.start(),
        revision_max: *REVISIONS.end(),
        agent: concat!("tensor-relay/", env!("CARGO_PKG_VERSION")).into(),
    };
    // Who is turned away finds the socket closed, and why in it.
    let _ = writer.say(&encode_producer(ProducerMessage::Hello(hello)), None).await;
    let broken = |why: String| ConnectError::Broken { path: path.into(), why };
    let frame = reader.next().await.map_err(|error| broken(error.to_string()))?;
    let frame = frame.ok_or_else(|| broken("it ended before it answered".into()))?;
    match ServerMessage::decode(&frame).map_err(|error| broken(error.to_string()))? {
        ServerMessage::Welcome(welcome) => {
            let terms = Terms { chunk_bytes: welcome.chunk_bytes, memories: welcome.memories };
            Ok((reader, writer, terms))
        }
        ServerMessage::Close { text } => Err(ConnectError::Refused { path: path.into(), why: text }),
        _ => Err(broken("what answers is no server".into())),
    }
}

fn why_not(path: &Path, error: &io::Error) -> ConnectError {
    let path = path.to_owned();
    match error.kind() {
        io::ErrorKind::NotFound => ConnectError::NoSocket { path },
        io::ErrorKind::ConnectionRefused => ConnectError::NobodyListens { path },
        io::ErrorKind::WouldBlock => ConnectError::Busy { path },
        io::ErrorKind::PermissionDenied => {
            ConnectError::NotPermitted { path, uid: rustix::process::geteuid().as_raw() }
        }
        _ => ConnectError::Broken { path, why: error.to_string() },
    }
}
