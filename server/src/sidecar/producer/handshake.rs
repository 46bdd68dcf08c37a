//! The handshake between producer and server, and connection errors.

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

/// Why a server cannot be connected to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// There is no socket.
    #[error("there is no socket at {}: start `tensor-relay serve --publish-socket` with this path", path.display())]
    NoSocket {
        /// The path.
        path: PathBuf,
    },
    /// The server that created it has ended, or the path is not a socket.
    #[error(
        "no server listens at {}: the server that created the socket has ended, or the path is not a socket",
        path.display()
    )]
    NobodyListens {
        /// The path.
        path: PathBuf,
    },
    /// Too many connections are waiting to be accepted.
    #[error("the server at {} is too busy to accept this process: try again", path.display())]
    Busy {
        /// The path.
        path: PathBuf,
    },
    /// The socket is private to another user.
    #[error(
        "the socket {} is private to another user: run as that user, or start the server with --publish-uid {uid}",
        path.display()
    )]
    NotPermitted {
        /// The path.
        path: PathBuf,
        /// This process's user.
        uid: u32,
    },
    /// A process of an unexpected user listens. Nothing was sent to it.
    #[error(
        "a process of user {found_uid} listens at {}, not of user {expected_uid}: check who created this socket, or \
         name the server's user",
        path.display()
    )]
    Stranger {
        /// The path.
        path: PathBuf,
        /// The listening user.
        found_uid: u32,
        /// The expected user.
        expected_uid: u32,
    },
    /// The server refused this producer.
    #[error("the server at {} does not allow this process to publish: {why}", path.display())]
    Refused {
        /// The path.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The server does not answer.
    #[error("the server at {} did not answer before the timeout", path.display())]
    NoAnswer {
        /// The path.
        path: PathBuf,
    },
    /// The connection failed, or the listener is not a server.
    #[error("cannot connect to {}: {why}", path.display())]
    Broken {
        /// The path.
        path: PathBuf,
        /// The cause.
        why: String,
    },
}

/// Connects, and exchanges `Hello` and `Welcome`.
pub(super) async fn handshake(
    path: &Path,
    server_uid: Option<u32>,
) -> Result<(FrameReader, FrameWriter, Terms), ConnectError> {
    let stream = UnixStream::connect(path).await.map_err(|error| connect_error(path, &error))?;
    if let Some(expected_uid) = server_uid {
        let found_uid = stream.peer_cred().map_err(|error| connect_error(path, &error))?.uid();
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
    // If the server rejects this producer, writing fails, but the reason can be read.
    let _ = writer.write(&encode_producer(ProducerMessage::Hello(hello)), None).await;
    let broken = |why: String| ConnectError::Broken { path: path.into(), why };
    let frame = reader.next().await.map_err(|error| broken(error.to_string()))?;
    let frame =
        frame.ok_or_else(|| broken("the listener closed the connection before it answered".into()))?;
    match ServerMessage::decode(&frame).map_err(|error| broken(error.to_string()))? {
        ServerMessage::Welcome(welcome) => {
            let terms = Terms { chunk_bytes: welcome.chunk_bytes, memories: welcome.memories };
            Ok((reader, writer, terms))
        }
        ServerMessage::Close { text } => {
            Err(ConnectError::Refused { path: path.into(), why: text.to_string() })
        }
        _ => Err(broken("the listener is not a tensor-relay server".into())),
    }
}

fn connect_error(path: &Path, error: &io::Error) -> ConnectError {
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
