//! What a client says.

use super::{AbortReason, LaneGrant, Subscribe, SubscriptionId, WatchId, exactly, required, wire};
use crate::{CodecSet, Epoch, Glob, MessageError, Version};

/// A control message from a client.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
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
    /// The first message of a further lane: which session it joins.
    Join {
        /// The session, by its number in `Welcome`.
        session: u64,
        /// What the server granted with it.
        grant: LaneGrant,
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
    pub token: Option<String>,
}

impl From<ClientMessage> for wire::FromClient {
    fn from(message: ClientMessage) -> Self {
        use wire::ClientKind as Kind;
        let kind = match message {
            ClientMessage::Hello(hello) => Kind::Hello(wire::Hello {
                revision_min: hello.revision_min,
                revision_max: hello.revision_max,
                agent: hello.agent,
                codecs: hello.codecs.iter().map(|c| c.code().into()).collect(),
                token: hello.token,
            }),
            ClientMessage::Subscribe(subscribe) => Kind::Subscribe(subscribe.into()),
            ClientMessage::Credit { subscription, chunks } => {
                Kind::Credit(wire::Credit { subscription: subscription.0, chunks })
            }
            ClientMessage::Committed { subscription, epoch, version, kept } => {
                Kind::Committed(wire::Committed {
                    subscription: subscription.0,
                    epoch: epoch.0,
                    version: version.0,
                    kept,
                })
            }
            ClientMessage::Abort { subscription, epoch, version, reason } => Kind::Abort(wire::Abort {
                subscription: subscription.0,
                epoch: epoch.0,
                version: version.0,
                reason: reason.code(),
            }),
            ClientMessage::Unsubscribe { subscription, keep_place } => {
                Kind::Unsubscribe(wire::Unsubscribe { subscription: subscription.0, keep_place })
            }
            ClientMessage::List => Kind::List(wire::List {}),
            ClientMessage::Join { session, grant } => {
                Kind::Join(wire::Join { session, lane_grant: grant.bytes().to_vec() })
            }
            ClientMessage::Acknowledge { subscription, epoch, version } => {
                Kind::Acknowledge(wire::Acknowledge {
                    subscription: subscription.0,
                    epoch: epoch.0,
                    version: version.0,
                })
            }
            ClientMessage::Watch { watch, glob } => {
                Kind::Watch(wire::Watch { watch: watch.0, glob: glob.as_str().into() })
            }
            ClientMessage::Unwatch(watch) => Kind::Unwatch(wire::Unwatch { watch: watch.0 }),
        };
        Self { kind: Some(kind) }
    }
}

impl TryFrom<wire::FromClient> for ClientMessage {
    type Error = MessageError;

    fn try_from(message: wire::FromClient) -> Result<Self, MessageError> {
        use wire::ClientKind as Kind;
        Ok(match required("kind", message.kind)? {
            Kind::Hello(hello) => Self::Hello(Hello {
                revision_min: hello.revision_min,
                revision_max: hello.revision_max,
                agent: hello.agent,
                codecs: CodecSet::from_codes(&hello.codecs),
                token: hello.token,
            }),
            Kind::Subscribe(subscribe) => Self::Subscribe(subscribe.try_into()?),
            Kind::Credit(credit) => {
                Self::Credit { subscription: SubscriptionId(credit.subscription), chunks: credit.chunks }
            }
            Kind::Committed(committed) => Self::Committed {
                subscription: SubscriptionId(committed.subscription),
                epoch: Epoch(committed.epoch),
                version: Version(committed.version),
                kept: committed.kept,
            },
            Kind::Abort(abort) => Self::Abort {
                subscription: SubscriptionId(abort.subscription),
                epoch: Epoch(abort.epoch),
                version: Version(abort.version),
                reason: AbortReason::from_code(abort.reason),
            },
            Kind::Unsubscribe(unsubscribe) => Self::Unsubscribe {
                subscription: SubscriptionId(unsubscribe.subscription),
                keep_place: unsubscribe.keep_place,
            },
            Kind::List(wire::List {}) => Self::List,
            Kind::Join(join) => Self::Join {
                session: join.session,
                grant: LaneGrant::new(exactly("lane_grant", &join.lane_grant)?),
            },
            Kind::Acknowledge(acknowledge) => Self::Acknowledge {
                subscription: SubscriptionId(acknowledge.subscription),
                epoch: Epoch(acknowledge.epoch),
                version: Version(acknowledge.version),
            },
            Kind::Watch(watch) => Self::Watch { watch: WatchId(watch.watch), glob: Glob::new(&watch.glob)? },
            Kind::Unwatch(unwatch) => Self::Unwatch(WatchId(unwatch.watch)),
        })
    }
}
