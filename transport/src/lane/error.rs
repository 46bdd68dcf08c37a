//! Errors that end lanes.

use std::net::SocketAddr;
use tensor_relay_protocol::{CloseCode, MessageError};

/// Why a lane ended. Everything on it ended with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaneError {
    /// Nothing came within the idle timeout.
    #[error(
        "the other end ({peer}) has not answered for the idle timeout: it died, or the network between is down"
    )]
    TimedOut {
        /// The other end's address.
        peer: SocketAddr,
    },
    /// The other end closed the lane with a reason.
    #[error("the other end ({peer}) closed the connection: {}", reason_text(*code, text))]
    ClosedByPeer {
        /// The other end's address.
        peer: SocketAddr,
        /// Its reason, if this build knows it.
        code: Option<CloseCode>,
        /// Its reason in words.
        text: String,
    },
    /// The other end no longer knows the connection: it was restarted.
    #[error("the other end ({peer}) was restarted and does not know this connection any more")]
    Reset {
        /// The other end's address.
        peer: SocketAddr,
    },
    /// A TCP connection was cut without a close.
    #[error(
        "the connection to {peer} was cut: {detail}; the program at the other end was killed, or something between ended the \
         connection"
    )]
    Cut {
        /// The other end's address.
        peer: SocketAddr,
        /// The system's error.
        detail: String,
    },
    /// This end closed the lane.
    #[error("this end closed the connection")]
    ClosedHere,
    /// This end closed the lane because the other one stopped reading its control stream: it hangs, breaks the rules,
    /// or closed the lane and its close was lost.
    #[error("the other end ({peer}) does not hear what it is told: {detail}")]
    Unheard {
        /// The other end's address.
        peer: SocketAddr,
        /// What happened to the control stream.
        detail: &'static str,
    },
    /// The connection itself failed: QUIC or TLS refused what came, or the other end broke the rules of the connection.
    #[error("the connection to {peer} failed: {detail}")]
    Protocol {
        /// The other end's address.
        peer: SocketAddr,
        /// The error.
        detail: String,
    },
    /// The other end reset or stopped one data stream. The lane lives.
    #[error("the other end gave up a data stream")]
    StreamGivenUp,
}

fn reason_text(code: Option<CloseCode>, text: &str) -> String {
    match (code, text) {
        (Some(code), "") => code.to_string(),
        (Some(code), text) => format!("{code} ({text})"),
        (None, "") => "it gave a reason that this build does not know".into(),
        (None, text) => text.into(),
    }
}

impl LaneError {
    /// The error for the other end's close. Control sequences are removed from its text, which is shown to people.
    pub(crate) fn closed_by(peer: SocketAddr, code: u64, text: &[u8]) -> Self {
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
