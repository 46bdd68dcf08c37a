//! The kinds of connection, and which of them may be used.

use std::{fmt, str::FromStr};

/// The kinds of connection that a lane can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LaneKind {
    /// QUIC over UDP.
    Quic,
    /// TLS 1.3 over TCP, or over another byte stream in a simulation.
    Tcp,
}

/// Which kinds of connection one end uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Transport {
    /// Whichever works, and of those the better one.
    #[default]
    Auto,
    /// QUIC alone.
    Quic,
    /// TCP alone.
    Tcp,
}

/// Why a connection is of its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KindReason {
    /// No other kind was allowed.
    Forced,
    /// QUIC answered.
    Answered,
    /// TCP answered, and QUIC had not, though it was asked before.
    UdpSilent,
    /// TCP connected within milliseconds: on such ways it carries more, at less cost.
    ShortWay,
}

/// A transport has one of three names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the transport is auto, quic or tcp")]
pub struct UnknownTransport;

impl LaneKind {
    /// The name that users see.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quic => "quic",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for LaneKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Quic => "QUIC",
            Self::Tcp => "TCP",
        })
    }
}

impl Transport {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Quic, Self::Tcp];

    /// The name that users write.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Quic => "quic",
            Self::Tcp => "tcp",
        }
    }

    /// The kinds that it allows, the one that is tried first before the other.
    pub fn kinds(self) -> &'static [LaneKind] {
        match self {
            Self::Auto => &[LaneKind::Quic, LaneKind::Tcp],
            Self::Quic => &[LaneKind::Quic],
            Self::Tcp => &[LaneKind::Tcp],
        }
    }

    /// Whether it allows `kind`.
    pub fn allows(self, kind: LaneKind) -> bool {
        self.kinds().contains(&kind)
    }
}

impl FromStr for Transport {
    type Err = UnknownTransport;

    fn from_str(text: &str) -> Result<Self, UnknownTransport> {
        let named = Self::ALL.into_iter().find(|transport| transport.name() == text);
        named.ok_or(UnknownTransport)
    }
}

impl KindReason {
    /// Why, in one phrase for logs and reports.
    pub fn text(self) -> &'static str {
        match self {
            Self::Forced => "no other transport is allowed",
            Self::Answered => "QUIC answered",
            Self::UdpSilent => "TCP answered, and UDP did not",
            Self::ShortWay => "the way is short",
        }
    }
}
