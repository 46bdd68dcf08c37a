//! What a server says.

use super::{
    AbortReason, FeatureSet, Field, InstanceId, LaneAddress, LaneId, LaneOffer, Metadata, Source,
    SubscriptionId, WatchId, check_metadata,
    field::{exactly, list, message_fields, message_kinds},
    reasons, wire,
};
use crate::{ChunkDigest, Epoch, ManifestDigest, MessageError, Topic, Version, VersionDigest, VersionId};

/// The most chunk hashes in one message, so that it stays within its frame.
pub const HASHES_MAX: usize = 2000;

/// A control message from a server.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerMessage {
    /// Accepts a client. Only now is it connected.
    Welcome(Welcome),
    /// Begins a version on a subscription; its chunks follow at once.
    Announce(Announce),
    /// Says that every chunk of a version is on its way, and what they must hash to together.
    Complete {
        /// Of which subscription.
        subscription: SubscriptionId,
        /// The life of the topic.
        epoch: Epoch,
        /// Which publish.
        version: Version,
        /// What the version is.
        digest: VersionDigest,
    },
    /// Gives up a version.
    Abort {
        /// Of which subscription.
        subscription: SubscriptionId,
        /// The life of the topic.
        epoch: Epoch,
        /// Which publish.
        version: Version,
        /// Why.
        reason: AbortReason,
    },
    /// Ends a subscription.
    End {
        /// Which one.
        subscription: SubscriptionId,
        /// Why.
        reason: EndReason,
    },
    /// A part of the answer to `List`; the answer is whole when `more` is false.
    Topics {
        /// Some of the topics.
        topics: Vec<TopicEntry>,
        /// Whether another part follows.
        more: bool,
    },
    /// Names topics that match a watch and were not named since they appeared.
    Found {
        /// Which watch.
        watch: WatchId,
        /// The topics.
        topics: Vec<Topic>,
    },
    /// Accepts a lane that joins a session.
    Joined,
    /// Says that nothing more is begun on a lane: the answer to the client's `Retire`, or the news that the server lost the
    /// lane. The client asks for what it lacks with `Fetch`.
    Retired(LaneId),
    /// Asks the client to go elsewhere: the server finishes what runs and begins nothing new. Needs
    /// [`Feature::Drain`](super::Feature::Drain).
    Drain {
        /// Addresses of servers with the same content and one of the ticket's keys, `host:port`.
        alternatives: Vec<String>,
    },
    /// Names peers that serve chunks of a subscription. Needs [`Feature::Peers`](super::Feature::Peers).
    Sources {
        /// Of which subscription.
        subscription: SubscriptionId,
        /// All of them: those that were named before and are not here are none any more.
        sources: Vec<Source>,
    },
    /// Tells what chunks of a version hash to, so that they can be taken from peers. Needs
    /// [`Feature::Peers`](super::Feature::Peers).
    Hashes {
        /// Of which subscription.
        subscription: SubscriptionId,
        /// The life of the topic.
        epoch: Epoch,
        /// Which publish.
        version: Version,
        /// The number of the first chunk.
        first: u32,
        /// Of this chunk and those after it.
        hashes: Vec<ChunkDigest>,
    },
}

/// What the server grants a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// The protocol revision that this session speaks.
    pub revision: u32,
    /// The server's name and version, for logs.
    pub agent: String,
    /// Names the session, for logs and for further lanes.
    pub session: u64,
    /// How many subscriptions this session may have at once.
    pub subscriptions_max: u32,
    /// What further lanes it may have; none from a server that knows of one alone.
    pub lanes: Option<LaneOffer>,
    /// Names the server process: a lane that lands at another one is told apart.
    pub instance: InstanceId,
    /// Where lanes may be opened; where there is none, as and where the control connection leads.
    pub lane_addresses: Vec<LaneAddress>,
    /// The features that the client may use towards the server.
    pub features: FeatureSet,
}

/// The beginning of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announce {
    /// On which subscription.
    pub subscription: SubscriptionId,
    /// Which publish.
    pub id: VersionId,
    /// What it holds. The manifest itself comes on a stream of its own, unless it is the one this subscription's last
    /// version had.
    pub manifest: ManifestDigest,
    /// How many versions this subscription missed since its last one, in mode `latest`.
    pub skipped: u64,
    /// What the publisher said of this version.
    pub metadata: Metadata,
    /// Whether later versions may be coded against this one, so that a copy of it is worth keeping.
    pub may_be_base: bool,
    /// Whether the client holds other content under this epoch and number, as it said in `have` or `partial`: it throws that
    /// away and receives this version whole.
    pub afresh: bool,
    /// Which part of a version this is, where several writers make one. Needs [`Feature::Parts`](super::Feature::Parts).
    pub part: Option<Part>,
}

/// One part of a version that several writers make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Which part, from 0.
    pub part: u32,
    /// How many there are.
    pub parts: u32,
    /// Which writer made it.
    pub writer: u64,
}

reasons! {
    /// Why a subscription ended.
    EndReason:
    /// The publisher ended the topic.
    TopicEnded = 1, "the publisher ended the topic";
    /// The subscriber took no byte within the deadline.
    Evicted = 2, "this subscriber took no byte within the server's deadline and was evicted";
    /// The session has as many subscriptions as it may.
    TooManySubscriptions = 3, "this session has as many subscriptions as the server allows";
    /// In mode `every`: the publisher could not wait for this reader any longer.
    TooSlow = 4, "this reader did not keep up: the publisher's retention was full for as long as it waits, and the \
                  reader was evicted; read faster, or let the publisher keep more versions";
    /// Nothing was published for as long as the topic lives without.
    Expired = 5, "nothing was published for as long as the topic lives without";
    /// The publisher took the topic back, or its server cannot read it any more.
    Withdrawn = 6, "the topic was taken back, by its publisher or because the server cannot read it any more; the server's \
                    log says which";
    /// Another subscription came under the same reader name.
    Replaced = 7, "another subscription came under the same reader name";
    /// The one version that was asked for was received.
    Done = 8, "the one version that was asked for was received";
    /// The one version that was asked for is not there.
    NotFound = 9, "the server does not have the version that was asked for";
    /// The client may not subscribe to this topic, whether it exists or not.
    Forbidden = 10, "the ticket, or the client's key, does not allow to subscribe to this topic; whoever runs the server \
                    can say which topics it allows";
}

/// One topic on offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicEntry {
    /// Its newest version.
    pub id: VersionId,
    /// How many tensors that has.
    pub tensors: u64,
    /// How many bytes that has.
    pub payload_bytes: u64,
    /// How many subscriptions follow the topic.
    pub subscribers: u64,
}

message_kinds! {
    ServerMessage as FromServer, ServerKind: Welcome Announce;
    Complete { subscription, epoch, version, digest } => Complete { subscription, epoch, version, digest }
    Abort { subscription, epoch, version, reason } => Abort { subscription, epoch, version, reason }
    End { subscription, reason } => End { subscription, reason }
    Topics { topics, more } => Topics { topics, more }
    Found { watch, topics } => Found { watch, topics }
    Joined {} => Joined {}
    Retired(lane) => Retire { lane }
    Drain { alternatives } => Drain { alternatives }
    Sources { subscription, sources } => Sources { subscription, sources }
    Hashes { subscription, epoch, version, first, hashes } =>
        Hashes { subscription, epoch, version, first, hashes }
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
        part,
    } =>
    Announce {
        subscription, topic, epoch, version, manifest_digest, skipped, metadata, may_be_base, afresh, part
    }
}

message_fields! { Part { part, parts, writer } => Part { part, parts, writer }, Part::check }

message_fields! {
    TopicEntry { id: VersionId { topic, epoch, version }, tensors, payload_bytes, subscribers } =>
    TopicEntry { topic, epoch, version, tensors, payload_bytes, subscribers }
}

impl Part {
    fn check(&self) -> Result<(), MessageError> {
        match self.part < self.parts {
            true => Ok(()),
            false => Err(MessageError::Malformed(format!("part {} of {}", self.part, self.parts))),
        }
    }
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

/// The frame bounds how many there are.
impl Field for Vec<TopicEntry> {
    type Wire = Vec<wire::TopicEntry>;

    fn into_wire(self) -> Self::Wire {
        self.into_iter().map(Field::into_wire).collect()
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        wire.into_iter().map(|entry| Field::from_wire(field, entry)).collect()
    }
}

/// The frame bounds how many there are.
impl Field for Vec<Topic> {
    type Wire = Vec<String>;

    fn into_wire(self) -> Self::Wire {
        self.into_iter().map(Field::into_wire).collect()
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        wire.into_iter().map(|topic| Field::from_wire(field, topic)).collect()
    }
}

impl Field for Vec<ChunkDigest> {
    type Wire = Vec<u8>;

    fn into_wire(self) -> Vec<u8> {
        self.into_iter().flat_map(|digest| digest.0).collect()
    }

    fn from_wire(field: &'static str, wire: Vec<u8>) -> Result<Self, MessageError> {
        list(field, HASHES_MAX, wire.chunks(32).collect(), |hash| exactly(field, hash).map(ChunkDigest))
    }
}
