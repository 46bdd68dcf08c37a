//! Subscription requests and their options.

use super::{
    Field, LaneGrant, SubscriptionId, TensorBox, WantedGpu,
    field::{exactly, list, message_fields},
    wire,
};
use crate::{
    ChunkHash, CodecId, Epoch, Glob, ManifestDigest, MessageError, RangeSet, ReaderName, Topic, Version,
    VersionDigest,
};

/// The most globs in one selection. They are matched against every tensor of every manifest.
pub const GLOBS_MAX: usize = 64;

/// The most bytes of a selection's globs together, and of an order's, so that the message stays within its frame.
pub const SELECTION_MAX_BYTES: usize = 8 << 10;

/// The most globs in an order by layers. Models have about a hundred layers, and a few tensors before and behind them.
pub const LAYERS_MAX: usize = 256;

/// A request for the versions of one topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subscribe {
    /// The subscription's id.
    pub subscription: SubscriptionId,
    /// The topic. It need not exist yet.
    pub topic: Topic,
    /// The versions to deliver.
    pub mode: Mode,
    /// The number of chunks that may be sent before the first `Credit`.
    pub credit: u32,
    /// The newest version that the client holds. The server sends later ones, or this one afresh if its content
    /// differs.
    pub have: Option<Have>,
    /// The selected tensors, by globs over their names; empty for all.
    pub selection: Vec<Glob>,
    /// The first version, for a client that holds nothing.
    pub start: Start,
    /// In mode `every`: the number of versions that may be announced after the newest acknowledged one; at least 1.
    pub window: u32,
    /// In mode `every`: the name under which the server keeps this reader's place when its connection is lost.
    pub reader: Option<ReaderName>,
    /// In mode `latest`: whether the transfer of a version is aborted when a newer version appears.
    pub preempt: bool,
    /// The chunks of an incomplete version that the client holds.
    pub partial: Option<Partial>,
    /// The digest of the manifest that the client holds, if any. The server does not send that manifest.
    pub manifest: Option<ManifestDigest>,
    /// The version that the client holds as a base: chunks of the next version may be encoded against it. With a
    /// `partial`, it is a base for the missing chunks of that version only.
    pub base: Option<Have>,
    /// The codec for all chunks that it shrinks; `None` lets the sender choose.
    pub codec: Option<CodecId>,
    /// Whether the subscription ends after one version. Needs [`Feature::Get`](super::Feature::Get).
    pub once: bool,
    /// Whether the server sends manifests without chunks. Needs [`Feature::Get`](super::Feature::Get).
    pub describe: bool,
    /// The order of a version's chunks. [`Order::Layers`] needs [`Feature::Order`](super::Feature::Order).
    pub order: Order,
    /// For whom commits are counted.
    pub consumer: Consumer,
    /// The wanted chunks, of those that `selection` selects; empty for all.
    pub within: RangeSet,
    /// The wanted parts of tensors; empty for whole tensors. Needs [`Feature::Boxes`](super::Feature::Boxes).
    pub boxes: Vec<TensorBox>,
    /// Whether versions may be lent in memory. Needs [`Feature::Memory`](super::Feature::Memory).
    pub memory: bool,
    /// The GPU that versions are wanted on. Needs [`Feature::Memory`](super::Feature::Memory).
    pub gpu: Option<Box<WantedGpu>>,
    /// The grant of the origin, from a client that takes one version from a peer. Needs
    /// [`Feature::Peers`](super::Feature::Peers).
    pub grant: Option<LaneGrant>,
}

/// For whom the commits of a subscription are counted
/// (`Publication::committed` of the server: each consumer once for a version).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Consumer {
    /// For itself: the subscription is a consumer of its own.
    Own,
    /// For nobody: the subscription receives only a part of a version, or a description.
    Nobody,
    /// For the consumer with this id, unique among the clients with the same credentials: a process, or a named reader.
    Named([u8; 16]),
}

impl Consumer {
    /// The named reader, in whichever process it runs.
    pub fn reader(name: &ReaderName) -> Self {
        Self::Named(ChunkHash::of(format!("reader {name}").as_bytes()).0)
    }
}

impl Subscribe {
    /// A request in mode `latest` for all tensors of `topic`, with initial `credit` for this number of chunks.
    pub fn latest(subscription: SubscriptionId, topic: Topic, credit: u32) -> Self {
        Self {
            subscription,
            topic,
            mode: Mode::Latest,
            credit,
            have: None,
            selection: vec![],
            start: Start::Newest,
            window: 1,
            reader: None,
            preempt: false,
            partial: None,
            manifest: None,
            base: None,
            codec: None,
            once: false,
            describe: false,
            order: Order::Layout,
            consumer: Consumer::Own,
            within: RangeSet::new(),
            boxes: vec![],
            memory: false,
            gpu: None,
            grant: None,
        }
    }
}

/// The versions that a subscription delivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// The newest version each time that one can be sent; versions in between are skipped and counted.
    Latest,
    /// All versions, in order; gaps are reported.
    Every,
}

/// The first version of a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Start {
    /// The newest retained version.
    Newest,
    /// The first version published after the subscription.
    Next,
    /// The oldest retained version.
    Oldest,
    /// This version or, if it is no longer retained, the oldest retained version after it. Without an epoch, it is of
    /// the topic's current epoch.
    At(Option<Epoch>, Version),
    /// This version or, if it is not retained, none. Needs [`Feature::Get`](super::Feature::Get).
    Exactly(Option<Epoch>, Version),
}

/// The order in which the chunks of a version are sent.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Order {
    /// In the order of the payload.
    Layout,
    /// By layer. A layer consists of the tensors that match its glob and no earlier glob. Without globs, each tensor is
    /// a layer, in the order of the manifest.
    Layers(Vec<Glob>),
}

/// A complete version that a client holds, with its digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Have {
    /// The topic's epoch.
    pub epoch: Epoch,
    /// The version.
    pub version: Version,
    /// The digest of the selected chunks.
    pub digest: VersionDigest,
}

impl Have {
    /// The epoch and the version.
    pub fn key(&self) -> (Epoch, Version) {
        (self.epoch, self.version)
    }
}

/// The verified chunks of one version that a client holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partial {
    /// The topic's epoch.
    pub epoch: Epoch,
    /// The version.
    pub version: Version,
    /// The chunks.
    pub chunks: RangeSet,
    /// The digest of these chunks.
    pub digest: VersionDigest,
}

impl Field for Subscribe {
    type Wire = wire::Subscribe;

    fn into_wire(self) -> wire::Subscribe {
        let (order, layers) = match self.order {
            Order::Layout => (0, vec![]),
            Order::Layers(layers) => (1, globs_into_wire(layers)),
        };
        wire::Subscribe {
            subscription: self.subscription.into_wire(),
            topic: self.topic.into_wire(),
            mode: self.mode.into_wire(),
            credit: self.credit,
            have: self.have.into_wire(),
            selection: globs_into_wire(self.selection),
            start: Some(self.start.into_wire()),
            window: self.window,
            reader: self.reader.into_wire(),
            preempt: self.preempt,
            partial: self.partial.into_wire(),
            manifest: self.manifest.into_wire(),
            base: self.base.into_wire(),
            codec: self.codec.map(|codec| codec.code().into()),
            once: self.once,
            describe: self.describe,
            order,
            layers,
            consumer: self.consumer.into_wire(),
            within: self.within.into_wire(),
            boxes: self.boxes.into_wire(),
            memory: self.memory,
            gpu: self.gpu.into_wire(),
            grant: self.grant.map(Field::into_wire),
        }
    }

    fn from_wire(_: &'static str, wire: wire::Subscribe) -> Result<Self, MessageError> {
        let layers = globs_from_wire("layers", LAYERS_MAX, wire.layers)?;
        Ok(Self {
            subscription: SubscriptionId(wire.subscription),
            topic: Field::from_wire("topic", wire.topic)?,
            mode: Field::from_wire("mode", wire.mode)?,
            credit: wire.credit,
            have: Field::from_wire("have", wire.have)?,
            selection: globs_from_wire("selection", GLOBS_MAX, wire.selection)?,
            start: Option::from_wire("start", wire.start)?.unwrap_or(Start::Newest),
            window: wire.window.max(1),
            reader: Field::from_wire("reader", wire.reader)?,
            preempt: wire.preempt,
            partial: Field::from_wire("partial", wire.partial)?,
            manifest: Field::from_wire("manifest", wire.manifest)?,
            base: Field::from_wire("base", wire.base)?,
            // A codec that only later builds know: the sender chooses, as without a requested codec.
            codec: wire.codec.and_then(|code| CodecId::from_code(u8::try_from(code).ok()?)),
            once: wire.once,
            describe: wire.describe,
            order: match wire.order {
                0 => Order::Layout,
                1 => Order::Layers(layers),
                other => return Err(MessageError::UnknownValue { field: "order", value: other }),
            },
            consumer: Field::from_wire("consumer", wire.consumer)?,
            within: Field::from_wire("within", wire.within)?,
            boxes: Field::from_wire("boxes", wire.boxes)?,
            memory: wire.memory,
            gpu: Field::from_wire("gpu", wire.gpu)?,
            grant: Field::from_wire("grant", wire.grant)?,
        })
    }
}

impl Field for Consumer {
    type Wire = Option<Vec<u8>>;

    fn into_wire(self) -> Option<Vec<u8>> {
        match self {
            Self::Own => None,
            Self::Nobody => Some(vec![]),
            Self::Named(id) => Some(id.to_vec()),
        }
    }

    fn from_wire(field: &'static str, wire: Option<Vec<u8>>) -> Result<Self, MessageError> {
        match wire {
            None => Ok(Self::Own),
            Some(empty) if empty.is_empty() => Ok(Self::Nobody),
            Some(id) => exactly(field, &id).map(Self::Named),
        }
    }
}

message_fields! { Have { epoch, version, digest } => Have { epoch, version, digest } }
message_fields! { Partial { epoch, version, chunks, digest } => Partial { epoch, version, chunks, digest } }

fn globs_into_wire(globs: Vec<Glob>) -> Vec<String> {
    globs.into_iter().map(Field::into_wire).collect()
}

/// Converts a list of globs, after a check of their number and total size.
fn globs_from_wire(
    field: &'static str,
    globs_max: usize,
    wire: Vec<String>,
) -> Result<Vec<Glob>, MessageError> {
    let (bytes, max) = (wire.iter().map(String::len).sum(), SELECTION_MAX_BYTES);
    match bytes > max {
        true => Err(MessageError::TooLarge { what: field, bytes, max }),
        false => list(field, globs_max, wire, |glob| Field::from_wire(field, glob)),
    }
}

impl Field for Mode {
    type Wire = u32;

    fn into_wire(self) -> u32 {
        match self {
            Self::Latest => 1,
            Self::Every => 2,
        }
    }

    fn from_wire(field: &'static str, wire: u32) -> Result<Self, MessageError> {
        match wire {
            1 => Ok(Self::Latest),
            2 => Ok(Self::Every),
            other => Err(MessageError::UnknownValue { field, value: other }),
        }
    }
}

impl Field for Start {
    type Wire = wire::Start;

    fn into_wire(self) -> wire::Start {
        let (kind, epoch, version) = match self {
            Self::Newest => (1, None, 0),
            Self::Next => (2, None, 0),
            Self::Oldest => (3, None, 0),
            Self::At(epoch, version) => (4, epoch, version.0),
            Self::Exactly(epoch, version) => (5, epoch, version.0),
        };
        wire::Start { kind, epoch: epoch.into_wire(), version }
    }

    fn from_wire(field: &'static str, wire: wire::Start) -> Result<Self, MessageError> {
        let (epoch, version) = (wire.epoch.map(Epoch), Version(wire.version));
        match wire.kind {
            1 => Ok(Self::Newest),
            2 => Ok(Self::Next),
            3 => Ok(Self::Oldest),
            4 => Ok(Self::At(epoch, version)),
            5 => Ok(Self::Exactly(epoch, version)),
            other => Err(MessageError::UnknownValue { field, value: other }),
        }
    }
}
