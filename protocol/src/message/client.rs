//! What a client says.

use super::{
    AbortReason, FeatureSet, Field, InstanceId, LaneGrant, LaneId, Subscribe, SubscriptionId, WatchId,
    field::{message_fields, message_kinds},
};
use crate::{CodecSet, Epoch, Glob, MessageError, RangeSet, Token, Version};

/// A control message from a client.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
#[expect(clippy::large_enum_variant, reason = "few are held at a time, and each for moments")]
pub enum ClientMessage {
    /// The first message of a session.
    Hello(Hello),
    /// Asks for the versions of a topic.
    Subscribe(Subscribe),
    /// Allows so many more chunks to be sent for a subscription.
    Credit {
        /// For which subscription.
        subscription: SubscriptionId,
        /// How many more.
        chunks: u32,
    },
    /// Says that a version is whole, verified and visible to the user.
    Committed {
        /// Of which subscription.
        subscription: SubscriptionId,
        /// The life of the topic.
        epoch: Epoch,
        /// Which publish.
        version: Version,
        /// Whether the client keeps it as a base, against which chunks of the next version may be coded.
        kept: bool,
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
    Unsubscribe {
        /// Which one.
        subscription: SubscriptionId,
        /// Whether a named reader will come back, so that its place in mode `every` is to be kept for a while.
        keep_place: bool,
    },
    /// Asks for the topics on offer.
    List,
    /// The first message of a lane that joins a session.
    Join {
        /// The session, by its number in `Welcome`.
        session: u64,
        /// How both ends will call the lane. Never used before in this session.
        lane: LaneId,
        /// What the server granted with it.
        grant: LaneGrant,
        /// The server process that the session runs on, by its name in `Welcome`.
        instance: InstanceId,
    },
    /// Says, in mode `every`, that the user is done with this version and all before it.
    Acknowledge {
        /// Of which subscription.
        subscription: SubscriptionId,
        /// The life of the topic.
        epoch: Epoch,
        /// Which publish.
        version: Version,
    },
    /// Asks for the names of topics that match, those of now and those that appear later.
    Watch {
        /// How both ends will call this watch.
        watch: WatchId,
        /// Which topics.
        glob: Glob,
    },
    /// Ends a watch.
    Unwatch(WatchId),
    /// Asks for chunks of the version under way that were lost with lanes that are retired.
    Fetch {
        /// Of which subscription.
        subscription: SubscriptionId,
        /// The life of the topic.
        epoch: Epoch,
        /// Which publish.
        version: Version,
        /// The chunks that the client lacks. Those that were not begun on a retired lane are on their way, and pass.
        chunks: RangeSet,
    },
    /// Says that the client has given a lane up: nothing more is to be begun on it.
    Retire(LaneId),
    /// Asks for bytes that mean nothing, to measure the rate of a lane. Needs [`Feature::Probe`](super::Feature::Probe).
    Probe {
        /// What the data stream with the bytes will name.
        probe: u32,
        /// Over which lane.
        lane: LaneId,
        /// How many.
        bytes: ProbeBytes,
    },
}

/// Who the client is and what it can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The oldest protocol revision it speaks.
    pub revision_min: u32,
    /// The newest protocol revision it speaks.
    pub revision_max: u32,
    /// Its name and version, for logs.
    pub agent: String,
    /// The codecs it can decode.
    pub codecs: CodecSet,
    /// What proves who it is, if its ticket carried one.
    pub token: Option<Token>,
    /// The features that the server may use towards it.
    pub features: FeatureSet,
}

/// How many bytes a probe asks for, within what one may: nobody is kept busy by a single message for long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeBytes(u32);

impl ProbeBytes {
    /// The most that one probe may ask for: a quarter of a second at 34 Gbit/s.
    pub const MAX: u32 = 1 << 30;

    /// `bytes`, unless they are too many.
    pub fn new(bytes: u32) -> Option<Self> {
        (bytes <= Self::MAX).then_some(Self(bytes))
    }

    /// The number.
    pub fn get(self) -> u32 {
        self.0
    }
}

message_fields! {
    Hello { revision_min, revision_max, agent, codecs, token, features } =>
    Hello { revision_min, revision_max, agent, codecs, token, features }
}

message_kinds! {
    ClientMessage as FromClient, ClientKind: Hello Subscribe;
    Credit { subscription, chunks } => Credit { subscription, chunks }
    Committed { subscription, epoch, version, kept } => Committed { subscription, epoch, version, kept }
    Abort { subscription, epoch, version, reason } => Abort { subscription, epoch, version, reason }
    Unsubscribe { subscription, keep_place } => Unsubscribe { subscription, keep_place }
    List {} => List {}
    Join { session, lane, grant: lane_grant, instance } => Join { session, lane_grant, lane, instance }
    Acknowledge { subscription, epoch, version } => Acknowledge { subscription, epoch, version }
    Watch { watch, glob } => Watch { watch, glob }
    Unwatch(watch) => Unwatch { watch }
    Fetch { subscription, epoch, version, chunks } => Fetch { subscription, epoch, version, chunks }
    Retire(lane) => Retire { lane }
    Probe { probe, lane, bytes } => Probe { probe, lane, bytes }
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
        self.0
    }

    fn from_wire(_: &'static str, wire: u32) -> Result<Self, MessageError> {
        let (bytes, max) = (wire as usize, Self::MAX as usize);
        Self::new(wire).ok_or(MessageError::TooLarge { what: "a probe", bytes, max })
    }
}
