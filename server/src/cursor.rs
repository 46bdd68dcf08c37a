//! [`Cursor`]: selects the next version of a subscription, by its mode.

use crate::{
    places::PlaceName,
    retention::Seq,
    topic::{Reader, ReaderState, Retained, TopicState},
};
use std::sync::Arc;
use tensor_relay_protocol::{EndReason, Epoch, Mode, Place, Start, Subscribe, Version};

/// The next step of a subscription.
#[derive(Debug)]
pub(crate) enum Step {
    /// Send this version.
    Send {
        /// The version.
        retained: Arc<Retained>,
        /// The number of versions that the client missed before it.
        skipped: u64,
    },
    /// Wait until the topic changes or the client sends a message.
    Wait,
    /// The subscription has ended.
    End(EndReason),
}

/// A subscription's position in its topic.
#[derive(Debug)]
pub(crate) enum Cursor {
    /// Mode `latest`: always the newest.
    Latest(Latest),
    /// Mode `every`: all, in order.
    Every(Every),
}

impl Cursor {
    /// Starts as `subscribe` requests. Reader names are scoped by `owner`.
    pub(crate) fn new(topic: &Arc<TopicState>, subscribe: &Subscribe, owner: &str) -> Self {
        match subscribe.mode {
            Mode::Every => Self::Every(Every::new(Arc::clone(topic), subscribe, owner)),
            _ => Self::Latest(Latest::new(topic, subscribe)),
        }
    }

    /// The next step.
    pub(crate) fn next(&mut self, topic: &TopicState) -> Step {
        // Read before the versions, so that those published before the end are seen.
        let ended = topic.ended();
        let step = match self {
            Self::Latest(latest) => latest.next(topic),
            Self::Every(every) => every.next(topic),
        };
        match (step, ended) {
            (Step::Wait, Some(reason)) if !self.waits_for_client(topic) => Step::End(reason),
            (step, _) => step,
        }
    }

    /// Whether it is a reader in mode `every`.
    pub(crate) fn is_every(&self) -> bool {
        matches!(self, Self::Every(_))
    }

    /// Why a reader in mode `every` lost its place, which ends its subscription; `None` if it has not.
    pub(crate) fn lost_place(&self) -> Option<EndReason> {
        match self {
            Self::Latest(_) => None,
            Self::Every(every) => every.lost_place(),
        }
    }

    /// Whether another version waits until the transfer of `retained` ends.
    pub(crate) fn has_later(&self, topic: &TopicState, retained: &Retained) -> bool {
        match self {
            Self::Latest(_) => topic.newest().is_some_and(|(_, newest)| newest.id != retained.id),
            Self::Every(every) => topic.first_from(every.next).is_some(),
        }
    }

    /// Takes the place that the reader had before it was given up, to tell its client.
    pub(crate) fn take_lost_place(&mut self) -> Option<Place> {
        match self {
            Self::Latest(_) => None,
            Self::Every(every) => every.lost_place.take(),
        }
    }

    /// Records that the client committed `retained`.
    pub(crate) fn handle_committed(&mut self, retained: &Retained) {
        if let Self::Latest(latest) = self {
            latest.handle_committed(retained);
        }
    }

    /// Records that the transfer of `retained` to this client was aborted.
    pub(crate) fn handle_given_up(&mut self, retained: &Retained) {
        match self {
            Self::Latest(latest) => latest.handle_given_up(retained),
            Self::Every(every) => every.given_up.push(every.sent),
        }
    }

    /// Records whether the client's version equals the one of the same number on this server. If its content differs,
    /// the client counts as having the previous one.
    pub(crate) fn handle_compared(&mut self, topic: &TopicState, is_same: bool) {
        match self {
            Self::Latest(latest) if !is_same => latest.last = previous_version(latest.last),
            Self::Latest(_) => {}
            Self::Every(every) => every.handle_compared(topic, is_same),
        }
    }

    /// Records that the part of a version that the client holds has other content.
    pub(crate) fn forget_partial(&mut self) {
        if let Self::Latest(latest) = self {
            latest.partial = None;
        }
    }

    /// Records that the client acknowledged this version and all before it.
    pub(crate) fn handle_acknowledged(&mut self, epoch: Epoch, version: Version) {
        if let Self::Every(every) = self {
            every.handle_acknowledged(epoch, version);
        }
    }

    /// Releases the place of a named reader that will not reconnect.
    pub(crate) fn release_place(&mut self) {
        if let Self::Every(every) = self {
            every.reader.release_place();
        }
    }

    /// Whether versions remain to be sent in mode `every`: after [`Step::Wait`], they wait for the client's
    /// acknowledgements or for the comparison of its version.
    pub(crate) fn waits_for_client(&self, topic: &TopicState) -> bool {
        matches!(self, Self::Every(every) if topic.first_from(every.next).is_some())
    }
}

/// A subscription in mode `latest`.
#[derive(Debug)]
pub(crate) struct Latest {
    /// The first wanted version.
    from: Seq,
    /// The version that the client holds partly: it is completed first, while it is retained.
    partial: Option<(Epoch, Version)>,
    /// The version at which the client asked to start; `None` without one, or once a version was sent.
    awaited: Option<(Epoch, Version)>,
    /// The newest version that the client has, or whose transfer was aborted.
    last: Option<(Epoch, Version)>,
    /// The number of versions up to `last`, skipped or aborted, that the client missed since its last commit.
    missed: u64,
}

impl Latest {
    fn new(topic: &TopicState, subscribe: &Subscribe) -> Self {
        Self {
            from: match (subscribe.have, &subscribe.partial) {
                (None, None) => topic.start_of(None, subscribe.start),
                // The subscription is resumed: `last` and `partial` select the version, not `start`.
                _ => topic.start_of(None, Start::Oldest),
            },
            // With `preempt`, an older version is not completed.
            partial: subscribe
                .partial
                .as_ref()
                .filter(|_| !subscribe.preempt)
                .map(|partial| (partial.epoch, partial.version)),
            awaited: awaited_version(topic, subscribe),
            last: subscribe.have.map(|have| have.key()),
            missed: 0,
        }
    }

    fn next(&mut self, topic: &TopicState) -> Step {
        self.last = self.last.filter(|held| !topic.is_behind(*held));
        let partial = self.partial.take().and_then(|(epoch, version)| topic.find(epoch, version));
        let wanted = partial.or_else(|| topic.newest()).filter(|(seq, retained)| {
            *seq >= self.from && self.is_new(retained) && !is_before(retained, self.awaited)
        });
        match wanted {
            Some((_, retained)) => {
                self.awaited = None;
                Step::Send { skipped: self.skipped_before(&retained), retained }
            }
            None => Step::Wait,
        }
    }

    /// Whether `retained` is newer than `last`, or of another epoch.
    fn is_new(&self, retained: &Retained) -> bool {
        let (epoch, version) = (retained.id.epoch, retained.id.version);
        self.last.is_none_or(|(last_epoch, last)| last_epoch != epoch || last < version)
    }

    /// The number of versions that the client misses if it commits `retained` next.
    fn skipped_before(&self, retained: &Retained) -> u64 {
        let between = match self.last {
            Some((epoch, last)) if epoch == retained.id.epoch => {
                retained.id.version.0.saturating_sub(last.0 + 1)
            }
            _ => 0,
        };
        self.missed + between
    }

    fn handle_committed(&mut self, retained: &Retained) {
        self.last = Some((retained.id.epoch, retained.id.version));
        self.missed = 0;
    }

    fn handle_given_up(&mut self, retained: &Retained) {
        self.missed = self.skipped_before(retained) + 1;
        self.last = Some((retained.id.epoch, retained.id.version));
    }
}

/// A subscription in mode `every`.
#[derive(Debug)]
pub(crate) struct Every {
    reader: Reader,
    /// The place that it had before it was given up, until the client is told.
    lost_place: Option<Place>,
    /// The position after the last version that was sent or skipped.
    next: Seq,
    /// The version at which the client asked to start; `None` without one, or once a version was sent.
    awaited: Option<(Epoch, Version)>,
    /// The window: how many versions may be sent beyond the newest acknowledged one.
    window: usize,
    /// The last version sent.
    sent: Seq,
    /// Aborted versions: they will not be acknowledged, so they do not count against the window.
    given_up: Vec<Seq>,
    /// The newest version that the client had when it subscribed. A restarted server may publish it again.
    have: Option<(Epoch, Version)>,
    /// Whether `have` was compared with the version of the same number here, or is no longer relevant. Until then that
    /// version is not skipped.
    is_compared: bool,
    /// The newest acknowledged version, published here or before a restart.
    acknowledged: Option<(Epoch, Version)>,
}

impl Every {
    fn new(topic: Arc<TopicState>, subscribe: &Subscribe, owner: &str) -> Self {
        let awaited = awaited_version(&topic, subscribe);
        let (window, have) = (subscribe.window as usize, subscribe.have.map(|have| have.key()));
        let name = subscribe.reader.clone().map(|name| PlaceName { owner: owner.to_owned(), name });
        let (reader, next, lost_place) = Reader::join(topic, name, have, subscribe.start);
        Self {
            reader,
            lost_place,
            next,
            awaited,
            window,
            sent: next,
            given_up: vec![],
            have,
            is_compared: false,
            acknowledged: None,
        }
    }

    fn next(&mut self, topic: &TopicState) -> Step {
        if let Some(reason) = self.lost_place() {
            return Step::End(reason);
        }
        if self.have.is_some_and(|held| topic.is_behind(held)) {
            (self.have, self.next) = (None, topic.start_of(None, Start::Oldest));
        }
        self.skip_held_versions(topic);
        while let Some((seq, retained)) = topic.first_from(self.next)
            && is_before(&retained, self.awaited)
        {
            self.reader.acknowledge(retained.id.epoch, retained.id.version);
            self.next = seq.next();
        }
        match topic.first_from(self.next) {
            Some((_, retained)) if self.waits_for_comparison(&retained) => Step::Wait,
            Some((seq, retained)) if self.unacknowledged(seq) < self.window => {
                self.is_compared = true; // `have` is no longer relevant.
                (self.sent, self.next, self.awaited) = (seq, seq.next(), None);
                Step::Send { retained, skipped: 0 }
            }
            _ => Step::Wait,
        }
    }

    /// The number of versions before `seq` that the client may still acknowledge.
    fn unacknowledged(&mut self, seq: Seq) -> usize {
        self.reader.unacknowledged(seq, &mut self.given_up)
    }

    /// Skips versions that the client has; records those that it had acknowledged.
    fn skip_held_versions(&mut self, topic: &TopicState) {
        while let Some((seq, retained)) = topic.first_from(self.next)
            && is_up_to(&retained, self.have)
            && !self.waits_for_comparison(&retained)
        {
            if is_up_to(&retained, self.acknowledged) {
                self.reader.acknowledge(retained.id.epoch, retained.id.version);
            }
            self.next = seq.next();
        }
    }

    fn waits_for_comparison(&self, retained: &Retained) -> bool {
        !self.is_compared && self.have == Some((retained.id.epoch, retained.id.version))
    }

    fn handle_compared(&mut self, topic: &TopicState, is_same: bool) {
        self.is_compared = true;
        if let Some((epoch, version)) = self.have.filter(|_| !is_same) {
            let position = topic.find(epoch, version).map_or(self.next, |(seq, _)| seq);
            self.next = self.next.min(position);
            self.have = previous_version(self.have);
        }
    }

    fn handle_acknowledged(&mut self, epoch: Epoch, version: Version) {
        self.reader.acknowledge(epoch, version);
        self.acknowledged = Some((epoch, version));
    }

    fn lost_place(&self) -> Option<EndReason> {
        match self.reader.state() {
            ReaderState::Reading => None,
            ReaderState::Evicted => Some(EndReason::TooSlow),
            ReaderState::Replaced => Some(EndReason::Replaced),
        }
    }
}

fn previous_version(version: Option<(Epoch, Version)>) -> Option<(Epoch, Version)> {
    version.map(|(epoch, version)| (epoch, Version(version.0.saturating_sub(1))))
}

/// The first version of a subscription, perhaps not published yet: of the epoch in `start`, or of the topic's current
/// one.
fn awaited_version(topic: &TopicState, subscribe: &Subscribe) -> Option<(Epoch, Version)> {
    let Start::At(epoch, version) = subscribe.start else { return None };
    let epoch = epoch.or_else(|| Some(topic.newest()?.1.id.epoch))?;
    subscribe.have.is_none().then_some((epoch, version))
}

/// Whether `retained` precedes the first version to send.
fn is_before(retained: &Retained, awaited: Option<(Epoch, Version)>) -> bool {
    awaited.is_some_and(|(epoch, version)| epoch == retained.id.epoch && retained.id.version < version)
}

/// Whether `retained` is this version or an earlier one of its epoch.
fn is_up_to(retained: &Retained, version: Option<(Epoch, Version)>) -> bool {
    version.is_some_and(|(epoch, version)| retained.id.epoch == epoch && retained.id.version <= version)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Staged, Staging, bases::Bases, consumers::Consumers, retention::Keep, topic::TopicState};
    use std::time::Duration;
    use tensor_relay_device::HostMemory;
    use tensor_relay_protocol::{
        Dtype, Have, Limits, Partial, ReaderName, Shape, SubscriptionId, TensorName, TensorSpec, Topic,
        VersionDigest, VersionId,
    };
    use tokio::sync::watch;

    fn new_topic() -> Arc<TopicState> {
        let bases = Arc::new(Bases::new(0));
        Arc::new(TopicState::new(Topic::new("t").unwrap(), Duration::from_secs(30), bases))
    }

    fn retained(epoch: u64, version: u64) -> Retained {
        let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, Shape::new(&[8]).unwrap());
        let staging = Staging {
            memory: HostMemory::new(1 << 20),
            bases: Arc::default(),
            chunk_bytes: 256,
            limits: Limits::default(),
            workers: tensor_relay_transport::Workers::Inline,
        };
        let staged = Staged::new::<std::convert::Infallible>(&staging, vec![spec], vec![], |_, _| Ok(()));
        Retained {
            id: VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(epoch), version: Version(version) },
            payload: crate::Publishable::from(staged.unwrap()).payload,
            _charge: None,
            metadata: vec![],
            consumers: Consumers::default(),
            release_timeout: Duration::ZERO,
            abort_at: watch::Sender::new(None),
            failure: Arc::default(),
            base: Bases::new(0).terms(8, 0, Keep::default(), true),
        }
    }

    fn publish(topic: &TopicState, keep: u32, epoch: u64, versions: std::ops::RangeInclusive<u64>) {
        for version in versions {
            topic
                .push(retained(epoch, version), Keep { versions: keep, bytes: u64::MAX })
                .unwrap();
        }
    }

    fn subscribe(mode: Mode) -> Subscribe {
        let latest = Subscribe::latest(SubscriptionId(1), Topic::new("t").unwrap(), 4);
        Subscribe { mode, start: Start::Oldest, window: 100, ..latest }
    }

    fn begin(topic: &Arc<TopicState>, subscribe: &Subscribe) -> Cursor {
        Cursor::new(topic, subscribe, "anybody")
    }

    /// The versions that can be sent without waiting, as (epoch, version, skipped). Commits all of them.
    fn drain(cursor: &mut Cursor, topic: &TopicState) -> Vec<(u64, u64, u64)> {
        let mut sent = vec![];
        while let Step::Send { retained, skipped } = cursor.next(topic) {
            sent.push((retained.id.epoch.0, retained.id.version.0, skipped));
            cursor.handle_committed(&retained);
        }
        sent
    }

    #[test]
    fn latest_sends_the_newest_and_counts_skipped_versions() {
        let topic = new_topic();
        publish(&topic, 5, 1, 1..=3);
        let mut cursor = begin(&topic, &subscribe(Mode::Latest));
        assert_eq!(drain(&mut cursor, &topic), [(1, 3, 0)]);
        publish(&topic, 5, 1, 4..=6);
        assert_eq!(drain(&mut cursor, &topic), [(1, 6, 2)]);
        publish(&topic, 5, 2, 1..=1);
        assert_eq!(drain(&mut cursor, &topic), [(2, 1, 0)], "a new epoch is newer, whatever the number");
    }

    #[test]
    fn latest_from_next_skips_published_versions() {
        let topic = new_topic();
        publish(&topic, 5, 1, 1..=3);
        let mut cursor = begin(&topic, &Subscribe { start: Start::Next, ..subscribe(Mode::Latest) });
        assert!(drain(&mut cursor, &topic).is_empty());
        publish(&topic, 5, 1, 4..=4);
        assert_eq!(drain(&mut cursor, &topic), [(1, 4, 0)]);
    }

    #[test]
    fn a_partial_version_is_completed_first() {
        let topic = new_topic();
        publish(&topic, 5, 1, 1..=3);
        let chunks = tensor_relay_protocol::RangeSet::new();
        let digest = VersionDigest([7; 32]);
        let partial = Partial { epoch: Epoch(1), version: Version(2), chunks, digest };
        let mut cursor = begin(&topic, &Subscribe { partial: Some(partial), ..subscribe(Mode::Latest) });
        assert_eq!(drain(&mut cursor, &topic), [(1, 2, 0), (1, 3, 0)]);
    }

    #[test]
    fn every_sends_all_versions_of_all_epochs() {
        let topic = new_topic();
        publish(&topic, 5, 1, 1..=2);
        publish(&topic, 5, 2, 1..=2);
        let mut cursor = begin(&topic, &subscribe(Mode::Every));
        assert_eq!(drain(&mut cursor, &topic), [(1, 1, 0), (1, 2, 0), (2, 1, 0), (2, 2, 0)]);
    }

    #[test]
    fn every_begins_at_the_requested_start() {
        let topic = new_topic();
        publish(&topic, 3, 1, 1..=5);
        let versions_sent = |have: Option<(u64, u64)>, start| {
            let digest = VersionDigest([7; 32]);
            let have =
                have.map(|(epoch, version)| Have { epoch: Epoch(epoch), version: Version(version), digest });
            let mut cursor = begin(&topic, &Subscribe { have, start, ..subscribe(Mode::Every) });
            drain(&mut cursor, &topic).iter().map(|sent| sent.1).collect::<Vec<_>>()
        };
        assert_eq!(versions_sent(None, Start::Oldest), [3, 4, 5]);
        assert_eq!(versions_sent(None, Start::Newest), [5]);
        assert!(versions_sent(None, Start::Next).is_empty());
        assert_eq!(versions_sent(None, Start::At(None, Version(4))), [4, 5]);
        assert_eq!(
            versions_sent(None, Start::At(Some(Epoch(1)), Version(1))),
            [3, 4, 5],
            "the client sees the gap"
        );
        assert_eq!(versions_sent(None, Start::At(Some(Epoch(9)), Version(5))), [3, 4, 5]);
        assert!(versions_sent(None, Start::At(None, Version(9))).is_empty());
        assert_eq!(versions_sent(Some((1, 4)), Start::Oldest), [5]);
        assert!(versions_sent(Some((1, 5)), Start::Oldest).is_empty());
        assert_eq!(versions_sent(Some((7, 5)), Start::Next), [3, 4, 5], "another epoch begins at its oldest");
    }

    /// PROTOCOL.md §6.6: a version with other content does not count as held, whether it is published already or later;
    /// earlier versions stay skipped.
    #[test]
    fn other_content_counts_as_having_the_previous_version() {
        let digest = VersionDigest([7; 32]);
        let have = Some(Have { epoch: Epoch(1), version: Version(3), digest });
        for (mode, sent_if_other) in
            [(Mode::Latest, vec![(1, 4, 1)]), (Mode::Every, vec![(1, 3, 0), (1, 4, 0)])]
        {
            for (published_before, is_same) in [(4, true), (4, false), (0, true), (0, false)] {
                let topic = new_topic();
                publish(&topic, 5, 1, 1..=published_before);
                let mut cursor = begin(&topic, &Subscribe { have, ..subscribe(mode) });
                if published_before == 0 {
                    assert!(drain(&mut cursor, &topic).is_empty());
                    publish(&topic, 5, 1, 1..=4);
                }
                cursor.handle_compared(&topic, is_same);
                let sent = if is_same { vec![(1, 4, 0)] } else { sent_if_other.clone() };
                assert_eq!(drain(&mut cursor, &topic), sent, "{mode:?}, {published_before}, {is_same}");
            }
        }
    }

    /// The version named in `have` is not skipped before it was compared.
    #[test]
    fn the_version_in_have_waits_to_be_compared() {
        let topic = new_topic();
        let have = Some(Have { epoch: Epoch(1), version: Version(3), digest: VersionDigest([7; 32]) });
        let mut cursor = begin(&topic, &Subscribe { have, ..subscribe(Mode::Every) });
        publish(&topic, 5, 1, 1..=4);
        assert!(drain(&mut cursor, &topic).is_empty());
        cursor.handle_compared(&topic, true);
        assert_eq!(drain(&mut cursor, &topic), [(1, 4, 0)]);
    }

    #[test]
    fn a_version_not_yet_published_is_awaited() {
        for mode in [Mode::Latest, Mode::Every] {
            let topic = new_topic();
            publish(&topic, 5, 1, 1..=2);
            let start = Start::At(None, Version(4));
            let mut cursor = begin(&topic, &Subscribe { start, ..subscribe(mode) });
            assert!(drain(&mut cursor, &topic).is_empty());
            publish(&topic, 5, 1, 3..=3);
            assert!(drain(&mut cursor, &topic).is_empty(), "version 3 comes before 4");
            publish(&topic, 5, 1, 4..=4);
            assert_eq!(drain(&mut cursor, &topic), [(1, 4, 0)]);
            publish(&topic, 5, 2, 1..=1);
            assert_eq!(
                drain(&mut cursor, &topic),
                [(2, 1, 0)],
                "after the first version, the requested start no longer matters"
            );
        }
    }

    #[test]
    fn the_window_waits_for_acknowledgements() {
        let topic = new_topic();
        publish(&topic, 5, 1, 1..=5);
        let mut cursor = begin(&topic, &Subscribe { window: 2, ..subscribe(Mode::Every) });
        assert_eq!(drain(&mut cursor, &topic).len(), 2);
        cursor.handle_acknowledged(Epoch(1), Version(1));
        assert_eq!(drain(&mut cursor, &topic), [(1, 3, 0)]);
        topic.end(EndReason::TopicEnded);
        assert!(matches!(cursor.next(&topic), Step::Wait), "two more versions wait for the window");
        cursor.handle_acknowledged(Epoch(1), Version(3));
        assert_eq!(drain(&mut cursor, &topic).len(), 2);
        assert!(matches!(cursor.next(&topic), Step::End(EndReason::TopicEnded)));
    }

    #[test]
    fn a_named_reader_gets_its_place_back() {
        let topic = new_topic();
        let named = Subscribe { reader: Some(ReaderName::new("r").unwrap()), ..subscribe(Mode::Every) };
        publish(&topic, 2, 1, 1..=1);
        let mut cursor = begin(&topic, &named);
        drain(&mut cursor, &topic);
        cursor.handle_acknowledged(Epoch(1), Version(1));
        drop(cursor);
        publish(&topic, 2, 1, 2..=3);
        assert!(
            topic.push(retained(1, 4), Keep { versions: 2, bytes: u64::MAX }).is_err(),
            "its place holds version 2"
        );
        let mut back = begin(&topic, &named);
        assert_eq!(drain(&mut back, &topic), [(1, 2, 0), (1, 3, 0)]);
        let mut other = begin(&topic, &named);
        assert!(matches!(back.next(&topic), Step::End(EndReason::Replaced)));
        drop(back);
        assert!(other.lost_place().is_none(), "a replaced reader does not remove the place");
        other.release_place();
        drop(other);
        publish(&topic, 2, 1, 4..=9);
    }

    #[test]
    fn an_evicted_reader_is_informed() {
        let topic = new_topic();
        let mut cursor = begin(&topic, &subscribe(Mode::Every));
        publish(&topic, 1, 1, 1..=1);
        let blockers = topic.push(retained(1, 2), Keep::default()).unwrap_err();
        assert_eq!(topic.evict(&blockers.readers), 1);
        assert!(matches!(cursor.next(&topic), Step::End(EndReason::TooSlow)));
        publish(&topic, 1, 1, 2..=2);
    }
}
