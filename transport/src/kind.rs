//! [`LaneKind`], and the setting [`Transport`] that restricts it.

use crate::{lane::byte_stream, tuning::UDP_PAYLOAD_MAX};
use std::{fmt, str::FromStr};

/// The kind of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LaneKind {
    /// QUIC over UDP.
    Quic,
    /// TLS 1.3 over TCP, or over another byte stream in a simulation.
    Tcp,
    /// A Unix socket of this host, without TLS. Used for addresses `unix:PATH`, whatever the [`Transport`].
    Unix,
}

/// One way to a server: the kind of its lanes, and the size of their packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Way {
    /// The kind of the lanes.
    pub kind: LaneKind,
    /// Over TCP, the maximum length of a segment (`TCP_MAXSEG`); `None` for what the route allows.
    pub segment_max: Option<u32>,
}

/// The kinds of lanes that a setting allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Transport {
    /// Both: the faster one that works is used.
    #[default]
    Auto,
    /// Only QUIC.
    Quic,
    /// Only TCP.
    Tcp,
}

/// Why a kind of lane was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LaneKindReason {
    /// No other kind was allowed.
    Forced,
    /// QUIC connected first: the path is not short, or TCP failed or had not completed its handshake within 250 ms.
    Answered,
    /// TCP connected first, although the path is not short: QUIC failed, or did not answer within its head start. QUIC
    /// has no head start if TCP was chosen for this reason the last time.
    UdpSilent,
    /// TCP connected within milliseconds: on short paths it is faster and costs less.
    ShortPath,
    /// TCP connected first, and the caller expected that ([`Connector::expecting_tcp`](crate::Connector::expecting_tcp)).
    Expected,
    /// This kind was measured to be faster on this path, or is being measured.
    Faster,
    /// The server's address is a Unix socket.
    Local,
    /// Connections of the other kind, or with larger packets, opened on this path but carried no chunk to its end.
    OthersFailed,
}

/// An unknown transport name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the transport must be auto, quic or tcp")]
pub struct UnknownTransport;

impl LaneKind {
    /// The maximum memory of a lane and its session at a server, in bytes. The session is counted for each lane, though
    /// the lanes of a session share it. Excludes chunks that are being sent, and the kernel's socket buffers.
    ///
    /// Over TCP: a megabyte of encrypted output, and half a megabyte of input from the client. The output buffer is
    /// allocated while a lane is busy and freed seconds later: an idle lane takes 0.1 MiB. Over QUIC: quinn's buffer
    /// for ten packets, which stays allocated. On loopback, packets have up to 65,000 bytes. The buffer grows with the
    /// discovered packet size, so its capacity may be that of twenty packets (1.3 MB measured).
    pub fn memory_bytes_max(self) -> u64 {
        let session = 256 << 10; // Its tasks, messages in both directions, and TLS.
        match self {
            Self::Quic => 2 * 10 * u64::from(UDP_PAYLOAD_MAX) + session,
            Self::Tcp | Self::Unix => byte_stream::SERVER_BYTES_MAX as u64 + session,
        }
    }

    /// The name of the kind for users and programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quic => "quic",
            Self::Tcp => "tcp",
            Self::Unix => "unix",
        }
    }
}

impl fmt::Display for LaneKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Quic => "QUIC",
            Self::Tcp => "TCP",
            Self::Unix => "a Unix socket",
        })
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.segment_max {
            Some(bytes) => write!(f, "{} in segments of {bytes} bytes", self.kind),
            None => self.kind.fmt(f),
        }
    }
}

impl Transport {
    /// All settings.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Quic, Self::Tcp];

    /// The name of the setting in options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Quic => "quic",
            Self::Tcp => "tcp",
        }
    }

    /// The allowed kinds.
    pub fn kinds(self) -> &'static [LaneKind] {
        match self {
            Self::Auto => &[LaneKind::Quic, LaneKind::Tcp],
            Self::Quic => &[LaneKind::Quic],
            Self::Tcp => &[LaneKind::Tcp],
        }
    }

    /// Whether the setting allows `kind`.
    pub fn allows(self, kind: LaneKind) -> bool {
        self.kinds().contains(&kind)
    }
}

impl FromStr for Transport {
    type Err = UnknownTransport;

    fn from_str(text: &str) -> Result<Self, UnknownTransport> {
        let found = Self::ALL.into_iter().find(|transport| transport.name() == text);
        found.ok_or(UnknownTransport)
    }
}

impl LaneKindReason {
    /// The reason as a phrase for logs and reports.
    pub fn text(self) -> &'static str {
        match self {
            Self::Forced => "no other transport is allowed",
            Self::Answered => "QUIC answered",
            Self::UdpSilent => "TCP answered, and UDP did not",
            Self::ShortPath => "the path is short",
            Self::Expected => "the server that named it uses TCP",
            Self::Local => "the server's address is a socket of this host",
            Self::Faster => "it is faster on this path, or being tried",
            Self::OthersFailed => "the other transport, or larger packets, do not get through on this path",
        }
    }
}
