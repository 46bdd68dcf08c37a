//! What a client says.

use super::{AbortReason, SubscriptionId, required, wire};
use crate::{CodecSet, Epoch, MessageError, Topic, Version};

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
    Unsubscribe(SubscriptionId),
    /// Asks for the topics on offer.
    List,
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

/// A request for the versions of one topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subscribe {
    /// How both ends will call this subscription.
    pub subscription: SubscriptionId,
    /// Which topic. It need not exist yet.
    pub topic: Topic,
    /// Which of its versions.
    pub mode: Mode,
    /// How many chunks may be sent before the first `Credit`.
    pub credit: u32,
    /// The newest version the client already holds: only others are wanted.
    pub have: Option<(Epoch, Version)>,
}

/// Which versions a subscription delivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Always the newest; what is stale is skipped and counted.
    Latest,
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
            ClientMessage::Subscribe(subscribe) => Kind::Subscribe(wire::Subscribe {
                subscription: subscribe.subscription.0,
                topic: subscribe.topic.as_str().into(),
                mode: subscribe.mode.code(),
                credit: subscribe.credit,
                have: subscribe
                    .have
                    .map(|(epoch, version)| wire::Have { epoch: epoch.0, version: version.0 }),
            }),
            ClientMessage::Credit { subscription, chunks } => {
                Kind::Credit(wire::Credit { subscription: subscription.0, chunks })
            }
            ClientMessage::Committed { subscription, epoch, version } => Kind::Committed(wire::Committed {
                subscription: subscription.0,
                epoch: epoch.0,
                version: version.0,
            }),
            ClientMessage::Abort { subscription, epoch, version, reason } => Kind::Abort(wire::Abort {
                subscription: subscription.0,
                epoch: epoch.0,
                version: version.0,
                reason: reason.code(),
            }),
            ClientMessage::Unsubscribe(subscription) => {
                Kind::Unsubscribe(wire::Unsubscribe { subscription: subscription.0 })
            }
            ClientMessage::List => Kind::List(wire::List {}),
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
            Kind::Subscribe(subscribe) => Self::Subscribe(Subscribe {
                subscription: SubscriptionId(subscribe.subscription),
                topic: Topic::new(&subscribe.topic)?,
                mode: Mode::from_code(subscribe.mode)?,
                credit: subscribe.credit,
                have: subscribe.have.map(|have| (Epoch(have.epoch), Version(have.version))),
            }),
            Kind::Credit(credit) => {
                Self::Credit { subscription: SubscriptionId(credit.subscription), chunks: credit.chunks }
            }
            Kind::Committed(committed) => Self::Committed {
                subscription: SubscriptionId(committed.subscription),
                epoch: Epoch(committed.epoch),
                version: Version(committed.version),
            },
            Kind::Abort(abort) => Self::Abort {
                subscription: SubscriptionId(abort.subscription),
                epoch: Epoch(abort.epoch),
                version: Version(abort.version),
                reason: AbortReason::from_code(abort.reason),
            },
            Kind::Unsubscribe(unsubscribe) => Self::Unsubscribe(SubscriptionId(unsubscribe.subscription)),
            Kind::List(wire::List {}) => Self::List,
        })
    }
}

impl Mode {
    fn code(self) -> u32 {
        match self {
            Self::Latest => 1,
        }
    }

    fn from_code(code: u32) -> Result<Self, MessageError> {
        match code {
            1 => Ok(Self::Latest),
            other => Err(MessageError::UnknownValue { field: "mode", value: other }),
        }
    }
}
