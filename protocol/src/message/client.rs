//! Control messages from a client.

use super::{
    AbortReason, FeatureSet, Field, Held, InstanceId, LaneGrant, LaneId, ProbeBytes, Share, Subscribe,
    SubscriptionId, WatchId,
    field::{message_fields, message_kinds},
};
use crate::{CodecSet, Epoch, Glob, MessageError, RangeSet, Token, Version, VersionDigest};

/// A control message from a client.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
#[expect(clippy::large_enum_variant, reason = "few exist at a time, each briefly")]
pub enum ClientMessage {
    /// Opens a session.
    Hello(Hello),
    /// Subscribes to the versions of a topic.
    Subscribe(Subscribe),
    /// Grants a subscription credit for further chunks.
    Credit {
        /// The subscription.
        subscription: SubscriptionId,
        /// The number of further chunks.
        chunks: u32,
    },
    /// Reports that a version is complete, verified and visible to the user.
    Committed {
        /// The subscription.
        subscription: SubscriptionId,
        /// The topic's epoch.
        epoch: Epoch,
        /// The version.
        version: Version,
        /// Whether the client keeps the version as a base for deltas of the next one.
        kept: bool,
    },
    /// Aborts the transfer of a version.
    Abort {
        /// The subscription.
        subscription: SubscriptionId,
        /// The topic's epoch.
        epoch: Epoch,
        /// The version.
        version: Version,
        /// The reason.
        reason: AbortReason,
    },
    /// Ends a subscription.
    Unsubscribe {
        /// The subscription.
        subscription: SubscriptionId,
        /// Whether the server keeps the place of a named reader for a while, because the reader will subscribe again.
        keep_place: bool,
    },
    /// Requests the list of topics.
    List,
    /// Joins a connection to a session as a further lane.
    Join {
        /// The session number from `Welcome`.
        session: u64,
        /// The lane's id, not used before in this session.
        lane: LaneId,
        /// The server's grant for further lanes.
        grant: LaneGrant,
        /// The instance of the session's server process, from `Welcome`.
        instance: InstanceId,
    },
    /// Acknowledges, in mode `every`, that the user has processed this version and all before it.
    Acknowledge {
        /// The subscription.
        subscription: SubscriptionId,
        /// The topic's epoch.
        epoch: Epoch,
        /// The version.
        version: Version,
    },
    /// Watches for topics that match a glob, present and future.
    Watch {
        /// The id of the new watch.
        watch: WatchId,
        /// The glob over topics.
        glob: Glob,
    },
    /// Ends a watch.
    Unwatch(WatchId),
    /// Requests chunks of the current version, and ends the pushing of its chunks.
    Request {
        /// The subscription.
        subscription: SubscriptionId,
        /// The topic's epoch.
        epoch: Epoch,
        /// The version.
        version: Version,
        /// The chunks. The server passes over those that were begun on a lane that was not retired since.
        chunks: RangeSet,
        /// Whether the server sends the hashes of all selected chunks. Needs [`Feature::Hashes`](super::Feature::Hashes).
        hashes: bool,
        /// Whether the server begins the chunks even if it began them on lanes that live, and without a base: the client
        /// has discarded what it received of them. Needs [`Feature::Hashes`](super::Feature::Hashes).
        again: bool,
    },
    /// Declines the memory that the server lent for a version: the server sends its chunks. Needs
    /// [`Feature::Memory`](super::Feature::Memory).
    Decline {
        /// The subscription.
        subscription: SubscriptionId,
        /// The topic's epoch.
        epoch: Epoch,
        /// The version.
        version: Version,
    },
    /// Retires a lane that the client has closed or will close: the server begins no more chunks on it.
    Retire(LaneId),
    /// Reports that the program behind a subscription has loaded a version that it committed. Needs
    /// [`Feature::Loaded`](super::Feature::Loaded).
    Loaded {
        /// The subscription, which may have ended.
        subscription: SubscriptionId,
        /// The topic's epoch.
        epoch: Epoch,
        /// The version.
        version: Version,
        /// The digest of the selected chunks as they were loaded.
        digest: VersionDigest,
    },
    /// Says where this client listens for peers. Needs [`Feature::Peers`](super::Feature::Peers).
    Share(Share),
    /// Names chunks that this client can send to peers. Needs [`Feature::Peers`](super::Feature::Peers).
    Held(Held),
    /// Reports that a peer sent another encoding of a chunk than the server named. Needs
    /// [`Feature::Peers`](super::Feature::Peers).
    BadPeer {
        /// The subscription.
        subscription: SubscriptionId,
        /// The topic's epoch.
        epoch: Epoch,
        /// The version.
        version: Version,
        /// The SHA-256 of the peer's public key.
        key: [u8; 32],
    },
    /// A server's question to a client's port, before it names the port to peers: the first message on a connection. Needs
    /// [`Feature::Peers`](super::Feature::Peers).
    Check {
        /// The number of the client's session.
        session: u64,
        /// Random bytes.
        nonce: [u8; 32],
    },
    /// Requests meaningless bytes, to measure the rate of a lane. Needs [`Feature::Probe`](super::Feature::Probe).
    Probe {
        /// The probe's id, repeated in the header of the data stream.
        probe: u32,
        /// The lane to measure.
        lane: LaneId,
        /// The number of bytes.
        bytes: ProbeBytes,
    },
}

impl ClientMessage {
    /// The subscription that the message is about; `None` for a message of the session.
    pub fn subscription(&self) -> Option<SubscriptionId> {
        match self {
            Self::Subscribe(subscribe) => Some(subscribe.subscription),
            Self::Credit { subscription, .. }
            | Self::Committed { subscription, .. }
            | Self::Abort { subscription, .. }
            | Self::Unsubscribe { subscription, .. }
            | Self::Acknowledge { subscription, .. }
            | Self::Request { subscription, .. }
            | Self::Loaded { subscription, .. }
            | Self::BadPeer { subscription, .. }
            | Self::Decline { subscription, .. } => Some(*subscription),
            Self::Held(held) => Some(held.subscription),
            Self::Hello(_)
            | Self::List
            | Self::Join { .. }
            | Self::Watch { .. }
            | Self::Unwatch(_)
            | Self::Retire(_)
            | Self::Probe { .. }
            | Self::Share(_)
            | Self::Check { .. } => None,
        }
    }
}

/// A client's identity and capabilities.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The oldest protocol revision that the client supports.
    pub revision_min: u32,
    /// The newest protocol revision that the client supports.
    pub revision_max: u32,
    /// The client's name and version, for logs.
    pub agent: String,
    /// The codecs that the client can decode.
    pub codecs: CodecSet,
    /// The token of the client's ticket, if it has one.
    pub token: Option<Token>,
    /// The features that the server may use towards the client.
    pub features: FeatureSet,
}

message_fields! {
    Hello { revision_min, revision_max, agent, codecs, token, features } =>
    Hello { revision_min, revision_max, agent, codecs, token, features }
}

message_kinds! {
    ClientMessage as FromClient, ClientKind: Hello Subscribe Share Held;
    Credit { subscription, chunks } => Credit { subscription, chunks }
    Committed { subscription, epoch, version, kept } => Committed { subscription, epoch, version, kept }
    Abort { subscription, epoch, version, reason } => Abort { subscription, epoch, version, reason }
    Unsubscribe { subscription, keep_place } => Unsubscribe { subscription, keep_place }
    List {} => List {}
    Join { session, lane, grant: lane_grant, instance } => Join { session, lane_grant, lane, instance }
    Acknowledge { subscription, epoch, version } => Acknowledge { subscription, epoch, version }
    Watch { watch, glob } => Watch { watch, glob }
    Unwatch(watch) => Unwatch { watch }
    Request { subscription, epoch, version, chunks, hashes, again } =>
        Request { subscription, epoch, version, chunks, hashes, again }
    Retire(lane) => Retire { lane }
    Probe { probe, lane, bytes } => Probe { probe, lane, bytes }
    Loaded { subscription, epoch, version, digest } => Loaded { subscription, epoch, version, digest }
    Decline { subscription, epoch, version } => Decline { subscription, epoch, version }
    Check { session, nonce } => Check { session, nonce }
    BadPeer { subscription, epoch, version, key } => BadPeer { subscription, epoch, version, key }
}

impl Field for CodecSet {
    type Wire = Vec<u32>;

    fn into_wire(self) -> Vec<u32> {
        self.iter().map(|codec| codec.code().into()).collect()
    }

    fn from_wire(_: &'static str, wire: Vec<u32>) -> Result<Self, MessageError> {
        Ok(Self::from_codes(&wire))
    }
}

impl Field for ProbeBytes {
    type Wire = u32;

    fn into_wire(self) -> u32 {
        self.get()
    }

    fn from_wire(_: &'static str, wire: u32) -> Result<Self, MessageError> {
        let (bytes, max) = (wire as usize, Self::MAX as usize);
        Self::new(wire).ok_or(MessageError::TooLarge { what: "a probe", bytes, max })
    }
}
