//! What a server says.

use super::{
    AbortReason, LaneGrant, LaneOffer, Metadata, SubscriptionId, WatchId, check_metadata, exactly, required,
    wire,
};
use crate::{Epoch, ManifestDigest, MessageError, Topic, Version, VersionDigest, VersionId};
use std::fmt;

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
    /// Accepts a further lane.
    Joined,
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
}

/// Why a subscription ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EndReason {
    /// The publisher ended the topic.
    TopicEnded,
    /// The subscriber took no byte within the deadline.
    Evicted,
    /// The session has as many subscriptions as it may.
    TooManySubscriptions,
    /// In mode `every`: the publisher could not wait for this reader any longer.
    TooSlow,
    /// Nothing was published for as long as the topic lives without.
    Expired,
    /// The publisher took the topic back, or its server cannot read it any more.
    Withdrawn,
    /// Another subscription came under the same reader name.
    Replaced,
    /// A reason of a later revision.
    Other(u32),
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

impl From<ServerMessage> for wire::FromServer {
    fn from(message: ServerMessage) -> Self {
        use wire::ServerKind as Kind;
        let kind = match message {
            ServerMessage::Welcome(welcome) => Kind::Welcome(wire::Welcome {
                revision: welcome.revision,
                agent: welcome.agent,
                session: welcome.session,
                subscriptions_max: welcome.subscriptions_max,
                lane_grant: welcome.lanes.map(|lanes| lanes.grant.bytes().to_vec()),
                lanes_max: welcome.lanes.map_or(0, |lanes| lanes.lanes_max),
            }),
            ServerMessage::Announce(announce) => Kind::Announce(wire::Announce {
                subscription: announce.subscription.0,
                topic: announce.id.topic.as_str().into(),
                epoch: announce.id.epoch.0,
                version: announce.id.version.0,
                manifest_digest: announce.manifest.0.to_vec(),
                skipped: announce.skipped,
                metadata: announce.metadata.iter().map(Into::into).collect(),
                may_be_base: announce.may_be_base,
            }),
            ServerMessage::Complete { subscription, epoch, version, digest } => {
                Kind::Complete(wire::Complete {
                    subscription: subscription.0,
                    epoch: epoch.0,
                    version: version.0,
                    digest: digest.0.to_vec(),
                })
            }
            ServerMessage::Abort { subscription, epoch, version, reason } => Kind::Abort(wire::Abort {
                subscription: subscription.0,
                epoch: epoch.0,
                version: version.0,
                reason: reason.code(),
            }),
            ServerMessage::End { subscription, reason } => {
                Kind::End(wire::End { subscription: subscription.0, reason: reason.code() })
            }
            ServerMessage::Topics { topics, more } => {
                Kind::Topics(wire::Topics { topics: topics.into_iter().map(Into::into).collect(), more })
            }
            ServerMessage::Found { watch, topics } => {
                let topics = topics.iter().map(|topic| topic.as_str().into()).collect();
                Kind::Found(wire::Found { watch: watch.0, topics })
            }
            ServerMessage::Joined => Kind::Joined(wire::Joined {}),
        };
        Self { kind: Some(kind) }
    }
}

impl TryFrom<wire::FromServer> for ServerMessage {
    type Error = MessageError;

    fn try_from(message: wire::FromServer) -> Result<Self, MessageError> {
        use wire::ServerKind as Kind;
        Ok(match required("kind", message.kind)? {
            Kind::Welcome(welcome) => Self::Welcome(welcome.try_into()?),
            Kind::Announce(announce) => Self::Announce(announce.try_into()?),
            Kind::Complete(complete) => Self::Complete {
                subscription: SubscriptionId(complete.subscription),
                epoch: Epoch(complete.epoch),
                version: Version(complete.version),
                digest: VersionDigest(exactly("digest", &complete.digest)?),
            },
            Kind::Abort(abort) => Self::Abort {
                subscription: SubscriptionId(abort.subscription),
                epoch: Epoch(abort.epoch),
                version: Version(abort.version),
                reason: AbortReason::from_code(abort.reason),
            },
            Kind::End(end) => Self::End {
                subscription: SubscriptionId(end.subscription),
                reason: EndReason::from_code(end.reason),
            },
            Kind::Topics(wire::Topics { topics, more }) => {
                let topics = topics.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?;
                Self::Topics { topics, more }
            }
            Kind::Found(wire::Found { watch, topics }) => {
                let topics = topics.iter().map(|topic| Topic::new(topic)).collect::<Result<_, _>>()?;
                Self::Found { watch: WatchId(watch), topics }
            }
            Kind::Joined(wire::Joined {}) => Self::Joined,
        })
    }
}

impl TryFrom<wire::Welcome> for Welcome {
    type Error = MessageError;

    fn try_from(wire: wire::Welcome) -> Result<Self, MessageError> {
        let grant = wire.lane_grant.map(|bytes| exactly("lane_grant", &bytes)).transpose()?;
        Ok(Self {
            revision: wire.revision,
            agent: wire.agent,
            session: wire.session,
            subscriptions_max: wire.subscriptions_max,
            lanes: grant.map(|bytes| LaneOffer { lanes_max: wire.lanes_max, grant: LaneGrant::new(bytes) }),
        })
    }
}

impl TryFrom<wire::Announce> for Announce {
    type Error = MessageError;

    fn try_from(wire: wire::Announce) -> Result<Self, MessageError> {
        let metadata: Metadata = wire.metadata.into_iter().map(Into::into).collect();
        check_metadata(&metadata)?;
        Ok(Self {
            subscription: SubscriptionId(wire.subscription),
            id: VersionId {
                topic: Topic::new(&wire.topic)?,
                epoch: Epoch(wire.epoch),
                version: Version(wire.version),
            },
            manifest: ManifestDigest(exactly("manifest_digest", &wire.manifest_digest)?),
            skipped: wire.skipped,
            metadata,
            may_be_base: wire.may_be_base,
        })
    }
}

impl From<TopicEntry> for wire::TopicEntry {
    fn from(entry: TopicEntry) -> Self {
        Self {
            topic: entry.id.topic.as_str().into(),
            epoch: entry.id.epoch.0,
            version: entry.id.version.0,
            tensors: entry.tensors,
            payload_bytes: entry.payload_bytes,
            subscribers: entry.subscribers,
        }
    }
}

impl TryFrom<wire::TopicEntry> for TopicEntry {
    type Error = MessageError;

    fn try_from(wire: wire::TopicEntry) -> Result<Self, MessageError> {
        let topic = Topic::new(&wire.topic)?;
        Ok(Self {
            id: VersionId { topic, epoch: Epoch(wire.epoch), version: Version(wire.version) },
            tensors: wire.tensors,
            payload_bytes: wire.payload_bytes,
            subscribers: wire.subscribers,
        })
    }
}

impl EndReason {
    fn code(self) -> u32 {
        match self {
            Self::TopicEnded => 1,
            Self::Evicted => 2,
            Self::TooManySubscriptions => 3,
            Self::TooSlow => 4,
            Self::Expired => 5,
            Self::Withdrawn => 6,
            Self::Replaced => 7,
            Self::Other(code) => code,
        }
    }

    fn from_code(code: u32) -> Self {
        match code {
            1 => Self::TopicEnded,
            2 => Self::Evicted,
            3 => Self::TooManySubscriptions,
            4 => Self::TooSlow,
            5 => Self::Expired,
            6 => Self::Withdrawn,
            7 => Self::Replaced,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TopicEnded => f.write_str("the publisher ended the topic"),
            Self::Evicted => {
                f.write_str("this subscriber took no byte within the server's deadline and was evicted")
            }
            Self::TooManySubscriptions => {
                f.write_str("this session has as many subscriptions as the server allows")
            }
            Self::TooSlow => f.write_str(
                "this reader did not keep up: the publisher's retention was full for as long as it waits, and the \
                 reader was evicted; read faster, or let the publisher keep more versions",
            ),
            Self::Expired => f.write_str("nothing was published for as long as the topic lives without"),
            Self::Withdrawn => f.write_str(
                "the topic was taken back, by its publisher or because the server cannot read it any more; the server's log \
                 says which",
            ),
            Self::Replaced => f.write_str("another subscription came under the same reader name"),
            Self::Other(code) => write!(f, "a reason with code {code} that this build does not know"),
        }
    }
}
