//! A request for the versions of a topic, with all that it may ask for.

use super::{SubscriptionId, exactly, wire};
use crate::{CodecId, Epoch, Glob, ManifestDigest, MessageError, RangeSet, ReaderName, Topic, Version};

/// The most globs in one selection. A selection is matched against every tensor of every manifest.
pub const GLOBS_MAX: usize = 64;

/// The most bytes of all globs of a selection together, so that the message stays within its frame.
pub const SELECTION_MAX_BYTES: usize = 8 << 10;

/// The most ranges of chunks that a client may name. Its credit bounds how many holes there can be; beyond this it
/// forgets chunks instead.
pub const PARTIAL_RANGES_MAX: usize = 1024;

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
    /// The newest version the client already holds: only later ones are wanted.
    pub have: Option<(Epoch, Version)>,
    /// Which tensors, by globs over their names; all when there is none.
    pub selection: Vec<Glob>,
    /// Where to begin, for a client that holds nothing.
    pub start: Start,
    /// In mode `every`: how many versions may be announced beyond the newest one acknowledged; at least 1.
    pub window: u32,
    /// In mode `every`: under which name the server keeps the place of this reader when its connection is lost.
    pub reader: Option<ReaderName>,
    /// In mode `latest`: whether a version under way is given up when a newer one appears.
    pub preempt: bool,
    /// What the client holds of a version that it has not received whole.
    pub partial: Option<Partial>,
    /// The manifest that the client holds, if any: it need not be sent again.
    pub manifest: Option<ManifestDigest>,
    /// The version whose chunks the client holds as a base: those of the next version may be coded against them. Beside a
    /// `partial`, it is the base of the rest of that part alone.
    pub base: Option<(Epoch, Version)>,
    /// The codec that all chunks are wanted in, where it gains something; otherwise the sender chooses.
    pub codec: Option<CodecId>,
}

impl Subscribe {
    /// Asks for the newest versions of `topic`, whole.
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
        }
    }
}

/// Which versions a subscription delivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Always the newest; what is stale is skipped and counted.
    Latest,
    /// All of them, in order, without a gap that is not told.
    Every,
}

/// Where a subscription begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Start {
    /// With the newest retained version.
    Newest,
    /// With the first version published after the subscription.
    Next,
    /// With the oldest version that is retained.
    Oldest,
    /// With this version or, where it is not retained any more, with the oldest one after it. Without an epoch, of
    /// whichever epoch the topic is in.
    At(Option<Epoch>, Version),
}

/// The chunks of one version that a client holds, verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partial {
    /// The life of the topic.
    pub epoch: Epoch,
    /// Which publish.
    pub version: Version,
    /// Which of its chunks.
    pub chunks: RangeSet,
}

impl From<Subscribe> for wire::Subscribe {
    fn from(subscribe: Subscribe) -> Self {
        Self {
            subscription: subscribe.subscription.0,
            topic: subscribe.topic.as_str().into(),
            mode: subscribe.mode.code(),
            credit: subscribe.credit,
            have: subscribe.have.map(have),
            selection: subscribe.selection.iter().map(|glob| glob.as_str().to_owned()).collect(),
            start: Some(subscribe.start.into()),
            window: subscribe.window,
            reader: subscribe.reader.map(|name| name.as_str().to_owned()),
            preempt: subscribe.preempt,
            partial: subscribe.partial.map(Into::into),
            manifest: subscribe.manifest.map(|digest| digest.0.to_vec()),
            base: subscribe.base.map(have),
            codec: subscribe.codec.map(|codec| codec.code().into()),
        }
    }
}

fn have((epoch, version): (Epoch, Version)) -> wire::Have {
    wire::Have { epoch: epoch.0, version: version.0 }
}

impl TryFrom<wire::Subscribe> for Subscribe {
    type Error = MessageError;

    fn try_from(wire: wire::Subscribe) -> Result<Self, MessageError> {
        Ok(Self {
            subscription: SubscriptionId(wire.subscription),
            topic: Topic::new(&wire.topic)?,
            mode: Mode::from_code(wire.mode)?,
            credit: wire.credit,
            have: wire.have.map(|have| (Epoch(have.epoch), Version(have.version))),
            selection: selection(&wire.selection)?,
            start: wire.start.map_or(Ok(Start::Newest), TryInto::try_into)?,
            window: wire.window.max(1),
            reader: wire.reader.map(|name| ReaderName::new(&name)).transpose()?,
            preempt: wire.preempt,
            partial: wire.partial.map(TryInto::try_into).transpose()?,
            manifest: wire
                .manifest
                .map(|digest| exactly("manifest", &digest).map(ManifestDigest))
                .transpose()?,
            base: wire.base.map(|base| (Epoch(base.epoch), Version(base.version))),
            // A later client may know codecs that this build does not, and gets then what this one chooses.
            codec: wire.codec.and_then(|code| CodecId::from_code(u8::try_from(code).ok()?)),
        })
    }
}

/// Checks a list of globs, its number and its size.
fn selection(globs: &[String]) -> Result<Vec<Glob>, MessageError> {
    let too_large = |what, found, max| MessageError::TooLarge { what, bytes: found, max };
    if globs.len() > GLOBS_MAX {
        return Err(too_large("globs", globs.len(), GLOBS_MAX));
    }
    let bytes = globs.iter().map(String::len).sum();
    if bytes > SELECTION_MAX_BYTES {
        return Err(too_large("selection", bytes, SELECTION_MAX_BYTES));
    }
    globs.iter().map(|glob| Glob::new(glob).map_err(Into::into)).collect()
}

impl Mode {
    fn code(self) -> u32 {
        match self {
            Self::Latest => 1,
            Self::Every => 2,
        }
    }

    fn from_code(code: u32) -> Result<Self, MessageError> {
        match code {
            1 => Ok(Self::Latest),
            2 => Ok(Self::Every),
            other => Err(MessageError::UnknownValue { field: "mode", value: other }),
        }
    }
}

impl From<Start> for wire::Start {
    fn from(start: Start) -> Self {
        let (kind, epoch, version) = match start {
            Start::Newest => (1, None, 0),
            Start::Next => (2, None, 0),
            Start::Oldest => (3, None, 0),
            Start::At(epoch, version) => (4, epoch.map(|epoch| epoch.0), version.0),
        };
        Self { kind, epoch, version }
    }
}

impl TryFrom<wire::Start> for Start {
    type Error = MessageError;

    fn try_from(wire: wire::Start) -> Result<Self, MessageError> {
        match wire.kind {
            1 => Ok(Self::Newest),
            2 => Ok(Self::Next),
            3 => Ok(Self::Oldest),
            4 => Ok(Self::At(wire.epoch.map(Epoch), Version(wire.version))),
            other => Err(MessageError::UnknownValue { field: "start", value: other }),
        }
    }
}

impl From<Partial> for wire::Partial {
    fn from(partial: Partial) -> Self {
        let chunks = partial.chunks.ranges().iter();
        let chunks = chunks.map(|range| wire::ChunkRange { start: range.start, end: range.end });
        Self { epoch: partial.epoch.0, version: partial.version.0, chunks: chunks.collect() }
    }
}

impl TryFrom<wire::Partial> for Partial {
    type Error = MessageError;

    fn try_from(wire: wire::Partial) -> Result<Self, MessageError> {
        let (ranges, max) = (wire.chunks.len(), PARTIAL_RANGES_MAX);
        if ranges > max {
            return Err(MessageError::TooLarge { what: "chunk ranges", bytes: ranges, max });
        }
        let ranges = wire.chunks.iter().map(|range| range.start..range.end);
        let chunks = RangeSet::from_ranges(ranges)
            .ok_or_else(|| MessageError::Malformed("chunk ranges that are not a sorted set".into()))?;
        Ok(Self { epoch: Epoch(wire.epoch), version: Version(wire.version), chunks })
    }
}
