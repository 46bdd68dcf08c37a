//! Subscription requests.

use crate::ClientError;
use std::{ops::Range, sync::Arc};
#[cfg(doc)]
use tensor_relay_protocol::EndReason;
use tensor_relay_protocol::{
    CodecId, Consumer, Epoch, GLOBS_MAX, Glob, Have, Manifest, Mode, RangeSet, ReaderName,
    SELECTION_MAX_BYTES, Start, Subscribe, SubscriptionId, TensorBox, Topic, Version, VersionDigest,
    check_boxes,
};

/// A request for versions of a topic. Create it with [`latest`](Self::latest) or [`every`](Self::every); for one
/// version, with [`newest`](Self::newest) or [`exactly`](Self::exactly).
///
/// ```
/// use tensor_relay_client::{Request, Start, Topic};
///
/// let topic = Topic::new("policy").unwrap();
/// let request = Request::every(topic).from(Start::Next).window(8);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub(crate) topic: Topic,
    pub(crate) mode: Mode,
    pub(crate) start: Start,
    pub(crate) selection: Vec<Glob>,
    pub(crate) boxes: Vec<TensorBox>,
    pub(crate) may_lack_boxes: bool,
    pub(crate) window: u32,
    pub(crate) reader: ReaderName,
    pub(crate) keep_place: bool,
    pub(crate) preempt: bool,
    pub(crate) codec: Option<CodecId>,
    pub(crate) part: Option<(Arc<Manifest>, Range<u32>)>,
    pub(crate) is_counted: bool,
    have: Option<Have>,
    once: bool,
    describe: bool,
}

/// The default window in mode `every`: the maximum number of versions received and not yet acknowledged.
const WINDOW_VERSIONS: u32 = 3;

impl Request {
    /// Requests the newest version each time; older versions are skipped and counted.
    pub fn latest(topic: Topic) -> Self {
        Self::new(topic, Mode::Latest, Start::Newest)
    }

    /// Requests every version in order, from the oldest that is retained. Missing ones are reported
    /// ([`SubscriptionError::Gap`](crate::SubscriptionError::Gap)).
    ///
    /// Requesting the next snapshot acknowledges the previous one, which the server retains until then.
    pub fn every(topic: Topic) -> Self {
        Self::new(topic, Mode::Every, Start::Oldest)
    }

    /// Requests one version, the newest, or the next one if there is none. The subscription then
    /// [ends](EndReason::Done). Needs a server that offers the feature `get`.
    pub fn newest(topic: Topic) -> Self {
        Self { once: true, ..Self::latest(topic) }
    }

    /// Requests this version and no other, of `epoch` or of the newest version's. The subscription then
    /// [ends](EndReason::Done), or with [`VersionNotFound`](crate::SubscriptionError::VersionNotFound) at once if the
    /// version is not retained. It stays retained until it is received. Needs a server that offers the feature `get`.
    pub fn exactly(topic: Topic, epoch: Option<Epoch>, version: Version) -> Self {
        let start = Start::Exactly(epoch, version);
        Self { once: true, start, window: 1, ..Self::every(topic) }
    }

    /// Of a request for [`exactly`](Self::exactly) one version: waits for it if it is not published yet, as long as its
    /// epoch lasts, and for its topic. Put a timeout around it if needed. If the topic has no version at all, its first
    /// one decides whether the requested one will come.
    #[must_use]
    pub fn awaited(self) -> Self {
        match self.start {
            Start::Exactly(epoch, version) => self.from(Start::At(epoch, version)),
            _ => self,
        }
    }

    /// Requests descriptions: snapshots with id, manifest and metadata but no tensor, for which no chunk is sent. Their
    /// commits are not counted. Needs a server that offers the feature `get`.
    #[must_use]
    pub fn describe(self) -> Self {
        Self { describe: true, is_counted: false, ..self }
    }

    /// The `Subscribe` message.
    pub(crate) fn message(&self, subscription: SubscriptionId, credit: u32, consumer: [u8; 16]) -> Subscribe {
        let Self {
            topic,
            mode,
            start,
            selection,
            boxes,
            window,
            reader,
            preempt,
            codec,
            part,
            have,
            once,
            describe,
            ..
        } = self.clone();
        let consumer = match (self.is_counted, self.keep_place) {
            (false, _) => Consumer::Nobody,
            (true, true) => Consumer::reader(&reader),
            (true, false) => Consumer::Named(consumer),
        };
        Subscribe {
            mode,
            selection,
            boxes,
            start,
            window,
            reader: (mode == Mode::Every).then_some(reader),
            preempt,
            codec,
            have,
            once,
            describe,
            consumer,
            within: part.map_or_else(RangeSet::new, |(_, chunks)| RangeSet::from_range(chunks)),
            ..Subscribe::latest(subscription, topic, credit)
        }
    }

    fn new(topic: Topic, mode: Mode, start: Start) -> Self {
        // A unique name, so that the server recognises an unnamed reader after a lost connection.
        let name = format!("{:032x}", rand::random::<u128>());
        let reader = ReaderName::new(&name).expect("hexadecimal digits make a name");
        Self {
            topic,
            mode,
            start,
            selection: vec![],
            boxes: vec![],
            may_lack_boxes: false,
            window: WINDOW_VERSIONS,
            reader,
            keep_place: false,
            preempt: false,
            codec: None,
            part: None,
            is_counted: true,
            have: None,
            once: false,
            describe: false,
        }
    }

    /// Sets the first version. Mode `latest` accepts only [`Start::Newest`], [`Start::Next`] and [`Start::Exactly`]: it
    /// skips older versions, so any other start is refused ([`ClientError::StartNeedsEvery`]).
    pub fn from(self, start: Start) -> Self {
        Self { start, ..self }
    }

    /// Names the version that this program has already, from an earlier run: the server sends later ones, or this one again
    /// if it has other content. Without a selection, `digest` is that of the whole version.
    #[must_use]
    pub fn having(self, epoch: Epoch, version: Version, digest: VersionDigest) -> Self {
        Self { have: Some(Have { epoch, version, digest }), ..self }
    }

    /// Selects the tensors whose name matches one of `globs`. Other tensors are sent only if they share a chunk with a
    /// selected one. Without globs, all tensors are selected.
    pub fn select(self, globs: impl IntoIterator<Item = Glob>) -> Self {
        Self { selection: globs.into_iter().collect(), ..self }
    }

    /// Requests boxes of tensors instead of whole ones: of each selected tensor, the box of the first of `boxes` whose
    /// glob matches its name; tensors without one come whole. Only chunks that contain a byte of a box are sent, so rows
    /// cost about their share of the bytes, and columns all of them, unless the publisher has cut the tensor for them.
    ///
    /// A version that a box does not fit fails with [`BoxMisfit`](crate::SubscriptionError::BoxMisfit): the first one before
    /// any chunk is sent. Needs a server that offers the feature `boxes`.
    #[must_use]
    pub fn boxes(self, boxes: impl IntoIterator<Item = TensorBox>) -> Self {
        Self { boxes: boxes.into_iter().collect(), ..self }
    }

    /// Allows versions to lack tensors of which [`boxes`](Self::boxes) are requested by name, as for buffers that
    /// [match](crate::NameMatch::Common) only what is there.
    #[must_use]
    pub fn allow_missing_boxes(self) -> Self {
        Self { may_lack_boxes: true, ..self }
    }

    /// In mode `every`: the maximum number of versions received and not yet acknowledged. Default 3: one being
    /// processed, one waiting, one being received. Each costs memory for a version.
    pub fn window(self, versions: u32) -> Self {
        Self { window: versions.max(1), ..self }
    }

    /// In mode `every`: a name under which the server keeps the place of a disconnected reader for a while
    /// (`server::Config::reader_linger`), so that a restarted program misses no version. Two simultaneous readers need
    /// two names: a second one with the same name takes over the place.
    pub fn reader(self, name: ReaderName) -> Self {
        Self { reader: name, keep_place: true, ..self }
    }

    /// In mode `latest`: whether the version in transfer is aborted for a newer one. Default: it is finished first, so
    /// that a fast publisher cannot starve a slow link.
    pub fn preempt(self, preempt: bool) -> Self {
        Self { preempt, ..self }
    }

    /// The codec for chunks that it makes smaller; other chunks are sent raw. Default: the server chooses for each
    /// chunk, by its content and the rate of the link. A server that does not know the codec ignores this.
    pub fn codec(self, codec: CodecId) -> Self {
        Self { codec: Some(codec), ..self }
    }

    /// Of the selected chunks of versions with this manifest, requests those within `chunks` alone: the tensors that
    /// lie completely in them. The server does not send the manifest again. Compare that of the received version, which
    /// may be another.
    pub fn part(self, manifest: Arc<Manifest>, chunks: Range<u32>) -> Self {
        Self { part: Some((manifest, chunks)), ..self }
    }

    /// Receives only a part of a version: a commit does not count as that of a consumer.
    pub fn uncounted(self) -> Self {
        Self { is_counted: false, ..self }
    }

    /// Refuses a selection or start that no server would accept.
    pub(crate) fn check(&self) -> Result<(), ClientError> {
        if self.mode == Mode::Latest && matches!(self.start, Start::Oldest | Start::At(..)) {
            return Err(ClientError::StartNeedsEvery);
        }
        let (globs, bytes) =
            (self.selection.len(), self.selection.iter().map(|glob| glob.as_str().len()).sum());
        if globs > GLOBS_MAX || bytes > SELECTION_MAX_BYTES {
            return Err(ClientError::SelectionTooLarge { globs, bytes });
        }
        check_boxes(&self.boxes).map_err(ClientError::Boxes)
    }

    /// The topic.
    pub fn topic(&self) -> &Topic {
        &self.topic
    }

    /// The mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_latest_starts_only_at_the_newest_or_the_next() {
        let topic = || Topic::new("t").unwrap();
        for start in [Start::Oldest, Start::At(None, Version(1))] {
            let refused = Request::latest(topic()).from(start).check();
            assert!(matches!(refused, Err(ClientError::StartNeedsEvery)));
            assert!(Request::every(topic()).from(start).check().is_ok());
        }
        for start in [Start::Next, Start::Exactly(None, Version(1))] {
            assert!(Request::latest(topic()).from(start).check().is_ok());
        }
    }

    /// PROTOCOL.md §3.12.
    #[test]
    fn a_request_for_one_version_says_so_on_the_wire() {
        let topic = Topic::new("t").unwrap();
        let message = |request: Request| request.message(SubscriptionId(1), 4, [7; 16]);
        let (newest, epoch) = (message(Request::newest(topic.clone())), Some(Epoch(5)));
        assert_eq!((newest.mode, newest.start, newest.once), (Mode::Latest, Start::Newest, true));
        let exactly = Request::exactly(topic.clone(), epoch, Version(3));
        let awaited = message(exactly.clone().awaited());
        assert_eq!((awaited.start, awaited.once), (Start::At(epoch, Version(3)), true));
        let described = message(exactly.clone().describe());
        assert_eq!((described.describe, described.consumer), (true, Consumer::Nobody));
        let exactly = message(exactly);
        assert_eq!(
            (exactly.mode, exactly.start, exactly.once),
            (Mode::Every, Start::Exactly(epoch, Version(3)), true)
        );
        assert_eq!((exactly.window, exactly.describe), (1, false));
        assert!(!message(Request::every(topic)).once);
    }
}
