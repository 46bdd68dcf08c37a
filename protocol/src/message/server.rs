//! Control messages from a server.

use super::{
    AbortReason, FeatureSet, Field, Held, InstanceId, LaneAddress, LaneId, LaneOffer, Lending, Metadata,
    RelayPath, Source, SubscriptionId, WatchId, check_metadata,
    field::{exactly, list, message_fields, message_kinds},
    reasons, wire,
};
use crate::{
    ChunkHash, EncodingEntry, Epoch, ManifestDigest, MessageError, Topic, Version, VersionDigest, VersionId,
};

/// The most chunk hashes in one message: so many fit a frame.
pub const HASHES_MAX: usize = 4000;

/// A control message from a server.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerMessage {
    /// Accepts a client and opens its session.
    Welcome(Welcome),
    /// Begins a version on a subscription; its chunks follow without a request.
    Announce(Announce),
    /// Reports that every selected chunk that the client did not hold was sent, or was lost with its lane.
    Complete {
        /// The subscription.
        subscription: SubscriptionId,
        /// The topic's epoch.
        epoch: Epoch,
        /// The version.
        version: Version,
        /// The version's digest.
        digest: VersionDigest,
    },
    /// Reports that the server waits for the source of the version under way, e.g. a disk. The transfer continues later,
    /// and both ends' deadlines for the version start again.
    Waiting {
        /// The subscription.
        subscription: SubscriptionId,
        /// The topic's epoch.
        epoch: Epoch,
        /// The version.
        version: Version,
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
    End {
        /// The subscription.
        subscription: SubscriptionId,
        /// The reason.
        reason: EndReason,
    },
    /// A part of the answer to `List`; `more` is false in the last part.
    Topics {
        /// The topics in this part.
        topics: Vec<TopicEntry>,
        /// Whether another part follows.
        more: bool,
    },
    /// Names topics that match a watch and that the server has not yet named on it.
    Found {
        /// The watch.
        watch: WatchId,
        /// The topics.
        topics: Vec<Topic>,
    },
    /// Accepts a further lane.
    Joined,
    /// Reports that a lane is retired and no more chunks begin on it, after the client's `Retire` or because the server
    /// lost the lane. The client requests missing chunks with `Request`.
    Retired(LaneId),
    /// Asks the client to move to another server: this server finishes running transfers and begins no others. Needs
    /// [`Feature::Drain`](super::Feature::Drain).
    Drain {
        /// `host:port` of servers that have the same content and one of the ticket's keys.
        alternatives: Vec<String>,
    },
    /// Names peers that hold chunks of a version. Needs [`Feature::Peers`](super::Feature::Peers).
    Sources {
        /// The subscription.
        subscription: SubscriptionId,
        /// The topic's epoch.
        epoch: Epoch,
        /// The version.
        version: Version,
        /// The complete list: earlier sources that are missing here are no longer valid.
        sources: Vec<Source>,
        /// Whether the server pushes no further chunk of the version by itself: what no peer offers is to be requested of
        /// it.
        is_seeded: bool,
    },
    /// Names encodings of chunks of a version, so that the client can check what it takes from peers. Needs
    /// [`Feature::Peers`](super::Feature::Peers).
    Encodings {
        /// The subscription.
        subscription: SubscriptionId,
        /// The topic's epoch.
        epoch: Epoch,
        /// The version.
        version: Version,
        /// Encodings that were not named before: at most one for each chunk.
        entries: Vec<EncodingEntry>,
    },
    /// Names chunks that this end can send, if not all. Needs [`Feature::Peers`](super::Feature::Peers).
    Held(Held),
    /// Ends the right of a peer to take versions of the topic from the client, or restores it. Needs
    /// [`Feature::Peers`](super::Feature::Peers).
    Revoke {
        /// The subscription.
        subscription: SubscriptionId,
        /// The SHA-256 of the peer's public key.
        taker: [u8; 32],
        /// Whether it has its right again.
        restored: bool,
    },
    /// Answers `Check`, from a client's port for peers.
    Checked {
        /// The proof that the port belongs to the session, from the nonce and the session's lane grant.
        proof: [u8; 32],
    },
    /// Continues the list of the hashes of a version's selected chunks, which a `Request` asked for.
    Hashes {
        /// The subscription.
        subscription: SubscriptionId,
        /// The topic's epoch.
        epoch: Epoch,
        /// The version.
        version: Version,
        /// The number of hashes in the messages before.
        first: u32,
        /// The hashes of the next selected chunks, in the order of their index.
        hashes: Vec<ChunkHash>,
    },
}

/// A server's acceptance of a client, with the session's parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// The protocol revision of this session.
    pub revision: u32,
    /// The server's name and version, for logs.
    pub agent: String,
    /// The session's number, for logs and for further lanes.
    pub session: u64,
    /// The most subscriptions of this session at once.
    pub subscriptions_max: u32,
    /// The offer of further lanes; `None` from a server without them.
    pub lanes: Option<LaneOffer>,
    /// The server process, which further lanes must reach, too.
    pub instance: InstanceId,
    /// The addresses for further lanes; if empty, the address of the control connection.
    pub lane_addresses: Vec<LaneAddress>,
    /// The features that the client may use towards the server.
    pub features: FeatureSet,
}

/// The announcement of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announce {
    /// The subscription.
    pub subscription: SubscriptionId,
    /// The version.
    pub id: VersionId,
    /// The digest of the version's manifest. The manifest is sent on a data stream, unless it is the same as that of
    /// the subscription's previous version, or the one that `Subscribe` named.
    pub manifest: ManifestDigest,
    /// In mode `latest`: the number of this epoch's versions that the client missed since its last commit, or since
    /// `have`.
    pub skipped: u64,
    /// The publisher's metadata of this version.
    pub metadata: Metadata,
    /// Whether later versions may be encoded against this one. If not, the client need not keep a copy.
    pub may_be_base: bool,
    /// Whether the client named other content under this epoch and number, in `have` or `partial`. The client discards
    /// that content and receives the whole version.
    pub afresh: bool,
    /// Whether clients take most chunks from each other, on request. Needs [`Feature::Peers`](super::Feature::Peers).
    pub shared: bool,
    /// In mode `every`, on the first version of a named reader: the place that it had before it was given up. The
    /// reader misses the versions from there on that precede this one.
    pub lost_place: Option<Place>,
    /// How the bytes are passed to a client that asked for memory; `None` for chunks, and for any other client.
    pub lending: Option<Box<Lending>>,
    /// The relays that it came through.
    pub relays: RelayPath,
}

/// A reader's place: the first version that it had not acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The topic's epoch.
    pub epoch: Epoch,
    /// The version.
    pub version: Version,
}

reasons! {
    /// Why a subscription ended.
    EndReason:
    /// The publisher ended the topic.
    TopicEnded = 1, "the publisher ended the topic";
    /// The subscriber received no byte within the deadline.
    Evicted = 2, "this subscriber received no byte within the server's deadline and was evicted";
    /// The session has reached its limit of subscriptions.
    TooManySubscriptions = 3, "this session has reached the server's limit of subscriptions";
    /// In mode `every`: the publisher stopped waiting for this reader.
    TooSlow = 4, "this reader was too slow: it was evicted because the publisher's retention stayed full until its \
                  timeout; read faster, or let the publisher keep more versions";
    /// Nothing was published within the topic's time to live.
    Expired = 5, "nothing was published within the topic's time to live";
    /// The publisher withdrew the topic, or its server cannot read it any more.
    Withdrawn = 6, "the topic was withdrawn, by its publisher or because the server cannot read it any more; the \
                    reason is in the server's log";
    /// Another subscription took over this reader name.
    Replaced = 7, "another subscription has the same reader name";
    /// The single requested version was received.
    Done = 8, "the requested version was received or given up";
    /// The single requested version does not exist.
    NotFound = 9, "the server does not have the requested version";
    /// The client may not subscribe to this topic, whether it exists or not.
    Forbidden = 10, "the ticket, or the client's key, does not allow to subscribe to this topic; the server's \
                     operator can tell which topics it allows";
    /// A version needs a feature that the client did not offer.
    NotSupported = 11, "the publisher cuts tensors into pieces, or sends something else that this client cannot read: \
                        update the client";
}

/// An entry in the list of topics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicEntry {
    /// The topic's newest version.
    pub id: VersionId,
    /// The number of tensors in that version.
    pub tensors: u64,
    /// The size of that version's payload in bytes.
    pub payload_bytes: u64,
    /// The number of subscriptions to the topic.
    pub subscribers: u64,
    /// The relays that this version came through.
    pub relays: RelayPath,
}

message_kinds! {
    ServerMessage as FromServer, ServerKind: Welcome Announce Held;
    Complete { subscription, epoch, version, digest } => Complete { subscription, epoch, version, digest }
    Abort { subscription, epoch, version, reason } => Abort { subscription, epoch, version, reason }
    End { subscription, reason } => End { subscription, reason }
    Topics { topics, more } => Topics { topics, more }
    Found { watch, topics } => Found { watch, topics }
    Joined {} => Joined {}
    Retired(lane) => Retire { lane }
    Drain { alternatives } => Drain { alternatives }
    Sources { subscription, epoch, version, sources, is_seeded } =>
        Sources { subscription, epoch, version, sources, is_seeded }
    Encodings { subscription, epoch, version, entries } => Encodings { subscription, epoch, version, entries }
    Revoke { subscription, taker, restored } => Revoke { subscription, taker, restored }
    Checked { proof } => Checked { proof }
    Hashes { subscription, epoch, version, first, hashes } =>
        Hashes { subscription, epoch, version, first, hashes }
    Waiting { subscription, epoch, version } => Waiting { subscription, epoch, version }
}

message_fields! {
    Announce {
        subscription,
        id: VersionId { topic, epoch, version },
        manifest: manifest_digest,
        skipped,
        metadata,
        may_be_base,
        afresh,
        shared,
        lost_place,
        lending,
        relays,
    } =>
    Announce {
        subscription, topic, epoch, version, manifest_digest, skipped, metadata, may_be_base, afresh, shared,
        lost_place, lending, relays,
    }
}

message_fields! { Place { epoch, version } => Place { epoch, version } }

message_fields! {
    TopicEntry { id: VersionId { topic, epoch, version }, tensors, payload_bytes, subscribers, relays } =>
    TopicEntry { topic, epoch, version, tensors, payload_bytes, subscribers, relays }
}

impl Field for Welcome {
    type Wire = wire::Welcome;

    fn into_wire(self) -> wire::Welcome {
        wire::Welcome {
            revision: self.revision,
            agent: self.agent,
            session: self.session,
            subscriptions_max: self.subscriptions_max,
            lane_grant: self.lanes.map(|lanes| lanes.grant.into_wire()),
            lanes_max: self.lanes.map_or(0, |lanes| lanes.lanes_max),
            instance: self.instance.into_wire(),
            lane_addresses: self.lane_addresses.into_wire(),
            features: self.features.into_wire(),
        }
    }

    fn from_wire(_: &'static str, wire: wire::Welcome) -> Result<Self, MessageError> {
        let grant = Field::from_wire("lane_grant", wire.lane_grant)?;
        Ok(Self {
            revision: wire.revision,
            agent: wire.agent,
            session: wire.session,
            subscriptions_max: wire.subscriptions_max,
            lanes: Option::map(grant, |grant| LaneOffer { lanes_max: wire.lanes_max, grant }),
            instance: Field::from_wire("instance", wire.instance)?,
            lane_addresses: Field::from_wire("lane_addresses", wire.lane_addresses)?,
            features: Field::from_wire("features", wire.features)?,
        })
    }
}

impl Field for Metadata {
    type Wire = Vec<wire::Entry>;

    fn into_wire(self) -> Self::Wire {
        self.iter().map(Into::into).collect()
    }

    fn from_wire(_: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        let metadata = wire.into_iter().map(Into::into).collect();
        check_metadata(&metadata)?;
        Ok(metadata)
    }
}

/// The size of a frame limits the number of items.
impl Field for Vec<TopicEntry> {
    type Wire = Vec<wire::TopicEntry>;

    fn into_wire(self) -> Self::Wire {
        self.into_iter().map(Field::into_wire).collect()
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        wire.into_iter().map(|entry| Field::from_wire(field, entry)).collect()
    }
}

/// The size of a frame limits the number of items.
impl Field for Vec<Topic> {
    type Wire = Vec<String>;

    fn into_wire(self) -> Self::Wire {
        self.into_iter().map(Field::into_wire).collect()
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        wire.into_iter().map(|topic| Field::from_wire(field, topic)).collect()
    }
}

impl Field for Vec<ChunkHash> {
    type Wire = Vec<u8>;

    fn into_wire(self) -> Vec<u8> {
        self.into_iter().flat_map(|hash| hash.0).collect()
    }

    fn from_wire(field: &'static str, wire: Vec<u8>) -> Result<Self, MessageError> {
        list(field, HASHES_MAX, wire.chunks(16).collect(), |hash| exactly(field, hash).map(ChunkHash))
    }
}
