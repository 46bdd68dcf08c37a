//! [`LaneError`]: why lanes and streams end.

use crate::Peer;
use tensor_relay_protocol::{CloseCode, MessageError};

/// Why a lane, with all its streams, ended; or why one stream did.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaneError {
    /// Nothing was received from the peer, or sent data was not acknowledged, within the idle timeout; or the peer did
    /// not answer within the connect timeout.
    #[error("the peer {peer} has not answered for the idle timeout: it died, or the network between is down")]
    TimedOut {
        /// The peer.
        peer: Peer,
    },
    /// The peer closed the lane with a reason.
    #[error("the peer {peer} closed the connection: {}", reason_text(*code, text))]
    ClosedByPeer {
        /// The peer.
        peer: Peer,
        /// Its reason; `None` if this build does not know the code.
        code: Option<CloseCode>,
        /// Its reason as text.
        text: String,
    },
    /// The peer was restarted and does not know the connection.
    #[error("the peer {peer} was restarted and does not know this connection any more")]
    Reset {
        /// The peer.
        peer: Peer,
    },
    /// A TCP connection or a Unix socket ended without a close.
    #[error(
        "the connection to {peer} was lost: {detail}; the peer's process was killed, or a device between them ended \
         it"
    )]
    ConnectionLost {
        /// The peer.
        peer: Peer,
        /// The system's error, or how the connection ended.
        detail: String,
    },
    /// This process closed the lane.
    #[error("this process closed the connection")]
    ClosedLocally,
    /// This process closed the lane because the peer does not read its control stream: the peer hangs, violates the
    /// protocol, or its close was lost.
    #[error("the peer {peer} does not read its control messages: {detail}")]
    ControlUnread {
        /// The peer.
        peer: Peer,
        /// The failure of the control stream.
        detail: &'static str,
    },
    /// The connection failed: QUIC or TLS rejected received data, the peer violated the protocol, or this process did
    /// not read its control stream (over TCP).
    #[error("the connection to {peer} failed: {detail}")]
    Protocol {
        /// The peer.
        peer: Peer,
        /// The error.
        detail: String,
    },
    /// The peer reset or stopped one stream, or ended it too early. The lane stays open.
    #[error("the peer reset, stopped or ended a stream too early")]
    StreamAborted,
}

fn reason_text(code: Option<CloseCode>, text: &str) -> String {
    match (code, text) {
        (Some(code), "") => code.to_string(),
        (Some(code), text) => format!("{code} ({text})"),
        (None, "") => "for a reason that this build does not know".into(),
        (None, text) => text.into(),
    }
}

impl LaneError {
    /// The error for a close by the peer. Escapes the close's text, since it is shown to users.
    pub(crate) fn closed_by(peer: Peer, code: u64, text: &[u8]) -> Self {
        let text = String::from_utf8_lossy(text).escape_debug().to_string();
        Self::ClosedByPeer { peer, code: CloseCode::from_code(code), text }
    }
}

/// Why a stream's header could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The lane or the stream ended.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// The header is invalid.
    #[error(transparent)]
    Message(#[from] MessageError),
}
