//! Tests of subscriptions to a topic: which versions they are sent.

use super::*;
use crate::{Staged, Staging, bases::Bases, consumers::Consumers, retention::Keep};
use std::time::Duration;
use tensor_relay_device::HostMemory;
use tensor_relay_protocol::{
    Announcement, Dtype, Ended, FeatureSet, Have, Limits, Partial, RangeSet, ReaderName, Selection,
    SendAction, SenderAction, Shape, SubscriptionId, SubscriptionMessage, TensorName, TensorSpec, Topic,
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
        layouts: Arc::default(),
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
        loads: Arc::default(),
        release_timeout: Duration::ZERO,
        abort_at: watch::Sender::new(None),
        failure: Arc::default(),
        stand_in: std::sync::OnceLock::new(),
        copies: crate::takers::Copies::default(),
        base: Bases::new(0).terms(8, 0, Keep::default(), true),
        shared: std::sync::OnceLock::new(),
        relayed: None,
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

/// A subscription, whose client commits each version at once.
struct Case {
    offer: Offer,
    machine: Sender<Arc<Retained>>,
    /// How claims compare.
    is_same: bool,
    ended: Option<Ended>,
}

fn begin(topic: &Arc<TopicState>, subscribe: &Subscribe) -> Case {
    let (offer, machine) = Offer::new(topic, subscribe, FeatureSet::OF_CLIENT, "anybody").unwrap();
    Case { offer, machine, is_same: true, ended: None }
}

impl Case {
    /// The versions that can be sent without waiting, as (epoch, version, skipped).
    fn drain(&mut self) -> Vec<(u64, u64, u64)> {
        let mut sent = vec![];
        while let Some(action) = self.machine.poll(&self.offer, None) {
            match action {
                SenderAction::Announce(Announcement { version, skipped, .. }) => {
                    sent.push((version.id.epoch.0, version.id.version.0, skipped));
                    let manifest = Arc::clone(version.payload.manifest());
                    self.machine.handle_selected(Arc::new(Selection::none(manifest)));
                }
                SenderAction::Compare(..) => self.machine.handle_compared(&self.offer, self.is_same),
                SenderAction::Acknowledge(epoch, version) => self.offer.acknowledge(epoch, version),
                SenderAction::Send(SendAction::Complete) => {
                    let (epoch, version, _) = *sent.last().unwrap();
                    self.tell(SubscriptionMessage::Committed(Epoch(epoch), Version(version), false));
                }
                SenderAction::End(ended) => self.ended = Some(ended),
                SenderAction::Send(_) | SenderAction::Committed { .. } | SenderAction::ReleaseBase => {}
                other => panic!("{other:?}"),
            }
        }
        sent
    }

    fn tell(&mut self, message: SubscriptionMessage) {
        self.machine.handle_message(message, |_| true).unwrap();
    }

    fn acknowledge(&mut self, epoch: u64, version: u64) {
        let (epoch, version) = (Epoch(epoch), Version(version));
        self.tell(SubscriptionMessage::Acknowledge(epoch, version));
        let acknowledged = self.machine.poll(&self.offer, None);
        assert!(matches!(acknowledged, Some(SenderAction::Acknowledge(..))), "{acknowledged:?}");
        self.offer.acknowledge(epoch, version);
    }

    /// Why the server ended the subscription, if it has; nothing can be sent.
    fn end(&mut self) -> Option<EndReason> {
        assert_eq!(self.drain(), []);
        match self.ended? {
            Ended::ByServer(reason) => Some(reason),
            ended => panic!("{ended:?}"),
        }
    }
}

#[test]
fn latest_sends_the_newest_and_counts_skipped_versions() {
    let topic = new_topic();
    publish(&topic, 5, 1, 1..=3);
    let mut case = begin(&topic, &subscribe(Mode::Latest));
    assert_eq!(case.drain(), [(1, 3, 0)]);
    publish(&topic, 5, 1, 4..=6);
    assert_eq!(case.drain(), [(1, 6, 2)]);
    publish(&topic, 5, 2, 1..=1);
    assert_eq!(case.drain(), [(2, 1, 0)], "a new epoch is newer, whatever the number");
}

#[test]
fn latest_from_next_skips_published_versions() {
    let topic = new_topic();
    publish(&topic, 5, 1, 1..=3);
    let mut case = begin(&topic, &Subscribe { start: Start::Next, ..subscribe(Mode::Latest) });
    assert!(case.drain().is_empty());
    publish(&topic, 5, 1, 4..=4);
    assert_eq!(case.drain(), [(1, 4, 0)]);
}

#[test]
fn a_partial_version_is_completed_first() {
    let topic = new_topic();
    publish(&topic, 5, 1, 1..=3);
    let chunks = RangeSet::new();
    let digest = VersionDigest([7; 32]);
    let partial = Partial { epoch: Epoch(1), version: Version(2), chunks, digest };
    let mut case = begin(&topic, &Subscribe { partial: Some(partial), ..subscribe(Mode::Latest) });
    assert_eq!(case.drain(), [(1, 2, 0), (1, 3, 0)]);
}

#[test]
fn every_sends_all_versions_of_all_epochs() {
    let topic = new_topic();
    publish(&topic, 5, 1, 1..=2);
    publish(&topic, 5, 2, 1..=2);
    let mut case = begin(&topic, &subscribe(Mode::Every));
    assert_eq!(case.drain(), [(1, 1, 0), (1, 2, 0), (2, 1, 0), (2, 2, 0)]);
}

/// As a relay does that gave a version up, and receives it again.
#[test]
fn a_version_that_is_published_again_is_not_sent_again_on_one_subscription() {
    for mode in [Mode::Latest, Mode::Every] {
        let topic = new_topic();
        publish(&topic, 9, 1, 1..=3);
        let mut case = begin(&topic, &subscribe(mode));
        assert_eq!(case.drain().last(), Some(&(1, 3, 0)));
        topic.give_up((Epoch(1), Version(3)));
        publish(&topic, 9, 1, 3..=3);
        assert!(case.drain().is_empty());
        publish(&topic, 9, 1, 4..=4);
        assert_eq!(case.drain(), [(1, 4, 0)]);
    }
}

#[test]
fn every_begins_at_the_requested_start() {
    let topic = new_topic();
    publish(&topic, 3, 1, 1..=5);
    let versions_sent = |have: Option<(u64, u64)>, start| {
        let digest = VersionDigest([7; 32]);
        let have =
            have.map(|(epoch, version)| Have { epoch: Epoch(epoch), version: Version(version), digest });
        let mut case = begin(&topic, &Subscribe { have, start, ..subscribe(Mode::Every) });
        case.drain().iter().map(|sent| sent.1).collect::<Vec<_>>()
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
    for (mode, sent_if_other) in [(Mode::Latest, vec![(1, 4, 1)]), (Mode::Every, vec![(1, 3, 0), (1, 4, 0)])]
    {
        for (published_before, is_same) in [(4, true), (4, false), (0, true), (0, false)] {
            let topic = new_topic();
            publish(&topic, 5, 1, 1..=published_before);
            let mut case = begin(&topic, &Subscribe { have, ..subscribe(mode) });
            case.is_same = is_same;
            if published_before == 0 {
                assert!(case.drain().is_empty());
                publish(&topic, 5, 1, 1..=4);
            }
            let sent = if is_same { vec![(1, 4, 0)] } else { sent_if_other.clone() };
            assert_eq!(case.drain(), sent, "{mode:?}, {published_before}, {is_same}");
        }
    }
}

/// The version named in `have` is not skipped before it was compared.
#[test]
fn the_version_in_have_waits_to_be_compared() {
    let topic = new_topic();
    let have = Some(Have { epoch: Epoch(1), version: Version(3), digest: VersionDigest([7; 32]) });
    let mut case = begin(&topic, &Subscribe { have, ..subscribe(Mode::Every) });
    publish(&topic, 5, 1, 1..=4);
    assert!(matches!(case.machine.poll(&case.offer, None), Some(SenderAction::Compare(..))));
    assert!(case.drain().is_empty());
    case.machine.handle_compared(&case.offer, true);
    assert_eq!(case.drain(), [(1, 4, 0)]);
}

#[test]
fn a_version_not_yet_published_is_awaited() {
    for mode in [Mode::Latest, Mode::Every] {
        let topic = new_topic();
        publish(&topic, 5, 1, 1..=2);
        let start = Start::At(None, Version(4));
        let mut case = begin(&topic, &Subscribe { start, ..subscribe(mode) });
        assert!(case.drain().is_empty());
        publish(&topic, 5, 1, 3..=3);
        assert!(case.drain().is_empty(), "version 3 comes before 4");
        publish(&topic, 5, 1, 4..=4);
        assert_eq!(case.drain(), [(1, 4, 0)]);
        publish(&topic, 5, 2, 1..=1);
        assert_eq!(
            case.drain(),
            [(2, 1, 0)],
            "after the first version, the requested start no longer matters"
        );
    }
}

/// PROTOCOL.md §3.12 (2): each retained version, and no other in its place; then those that follow in the mode.
#[test]
fn a_version_is_sent_by_its_number_or_none() {
    for mode in [Mode::Latest, Mode::Every] {
        let topic = new_topic();
        let begin_exactly = |epoch: Option<u64>, version| {
            let start = Start::Exactly(epoch.map(Epoch), Version(version));
            begin(&topic, &Subscribe { start, window: 1, ..subscribe(mode) })
        };
        let is_missing = |epoch, version| begin_exactly(epoch, version).end() == Some(EndReason::NotFound);
        assert!(is_missing(None, 1), "{mode:?}: nothing is published");
        publish(&topic, 4, 1, 1..=3);
        publish(&topic, 4, 2, 1..=2);
        for (epoch, version) in [(1, 2), (1, 3), (2, 1), (2, 2)] {
            let mut case = begin_exactly(Some(epoch), version);
            assert_eq!(case.drain()[0], (epoch, version, 0));
        }
        for (epoch, version) in [(Some(1), 1), (Some(1), 4), (Some(2), 0), (Some(9), 1), (None, 3)] {
            assert!(is_missing(epoch, version), "{mode:?}: {epoch:?}, {version}");
        }
        topic.end(EndReason::TopicEnded);
        assert!(is_missing(None, 3), "{mode:?}: the topic has ended");
        let mut case = begin_exactly(Some(1), 2);
        let all = [(1, 2, 0), (1, 3, 0), (2, 1, 0), (2, 2, 0)];
        match mode {
            Mode::Every => {
                assert_eq!(case.drain(), all[..1], "the window is full");
                let mut wide = begin(
                    &topic,
                    &Subscribe { start: Start::Exactly(Some(Epoch(1)), Version(2)), ..subscribe(mode) },
                );
                assert_eq!(wide.drain(), all);
            }
            _ => assert_eq!(case.drain(), [all[0], all[3]]),
        }
    }
}

/// PROTOCOL.md §3.12 (2): it was found, so it is sent.
#[test]
fn a_version_found_by_its_number_is_sent_after_it_left_retention() {
    let topic = new_topic();
    publish(&topic, 1, 1, 1..=1);
    let start = Start::Exactly(None, Version(1));
    let mut case = begin(&topic, &Subscribe { start, ..subscribe(Mode::Latest) });
    publish(&topic, 1, 1, 2..=2);
    assert_eq!(case.drain(), [(1, 1, 0), (1, 2, 0)]);
}

/// PROTOCOL.md §3.12 (5).
#[test]
fn a_version_by_its_number_has_no_effect_with_have() {
    let have = Some(Have { epoch: Epoch(1), version: Version(2), digest: VersionDigest([7; 32]) });
    for mode in [Mode::Latest, Mode::Every] {
        let topic = new_topic();
        publish(&topic, 4, 1, 1..=3);
        let start = Start::Exactly(None, Version(9));
        let mut case = begin(&topic, &Subscribe { have, start, ..subscribe(mode) });
        assert_eq!(case.drain(), [(1, 3, 0)], "{mode:?}");
    }
}

/// PROTOCOL.md §3.8 (4).
#[test]
fn a_named_reader_begins_with_the_version_that_it_names() {
    let topic = new_topic();
    let start = Start::Exactly(None, Version(2));
    let named = Subscribe { reader: Some(ReaderName::new("r").unwrap()), ..subscribe(Mode::Every) };
    publish(&topic, 3, 1, 1..=3);
    drop(begin(&topic, &named));
    let mut case = begin(&topic, &Subscribe { start, ..named });
    assert_eq!(case.drain(), [(1, 2, 0), (1, 3, 0)]);
    publish(&topic, 3, 1, 4..=4);
}

#[test]
fn the_window_waits_for_acknowledgements() {
    let topic = new_topic();
    publish(&topic, 5, 1, 1..=5);
    let mut case = begin(&topic, &Subscribe { window: 2, ..subscribe(Mode::Every) });
    assert_eq!(case.drain().len(), 2);
    case.acknowledge(1, 1);
    assert_eq!(case.drain(), [(1, 3, 0)]);
    topic.end(EndReason::TopicEnded);
    assert_eq!(case.end(), None, "two more versions wait for the window");
    case.acknowledge(1, 3);
    assert_eq!(case.drain().len(), 2);
    assert!(case.end() == Some(EndReason::TopicEnded));
}

#[test]
fn a_named_reader_gets_its_place_back() {
    let topic = new_topic();
    let named = Subscribe { reader: Some(ReaderName::new("r").unwrap()), ..subscribe(Mode::Every) };
    publish(&topic, 2, 1, 1..=1);
    let mut case = begin(&topic, &named);
    case.drain();
    case.acknowledge(1, 1);
    drop(case);
    publish(&topic, 2, 1, 2..=3);
    assert!(
        topic.push(retained(1, 4), Keep { versions: 2, bytes: u64::MAX }).is_err(),
        "its place holds version 2"
    );
    let mut back = begin(&topic, &named);
    assert_eq!(back.drain(), [(1, 2, 0), (1, 3, 0)]);
    let mut other = begin(&topic, &named);
    assert!(back.end() == Some(EndReason::Replaced));
    drop(back);
    assert!(other.offer.lost_place().is_none(), "a replaced reader does not remove the place");
    other.offer.release();
    drop(other);
    publish(&topic, 2, 1, 4..=9);
}

#[test]
fn an_evicted_reader_is_informed() {
    let topic = new_topic();
    let mut case = begin(&topic, &subscribe(Mode::Every));
    publish(&topic, 1, 1, 1..=1);
    let blockers = topic.push(retained(1, 2), Keep::default()).unwrap_err();
    assert_eq!(topic.evict(&blockers.readers), 1);
    assert!(case.end() == Some(EndReason::TooSlow));
    publish(&topic, 1, 1, 2..=2);
}

/// Goal: a version that is read in parts stays for the next part when it leaves retention, one of a topic, until its readers
/// are gone. Method: read parts of versions 1 and 2, publish versions 2 to 4 into a topic that retains one.
#[tokio::test(start_paused = true)]
async fn a_version_read_in_parts_stays_for_its_readers() {
    let (topic, keep) = (new_topic(), Keep::default());
    let publish = |version| {
        let release_timeout = Duration::from_secs(600);
        topic.push(Retained { release_timeout, ..retained(1, version) }, keep).unwrap();
    };
    let read = |version, part: std::ops::Range<u32>| {
        let start = Start::Exactly(Some(Epoch(1)), Version(version));
        let within = RangeSet::from_range(part);
        let mut case = begin(&topic, &Subscribe { start, once: true, within, ..subscribe(Mode::Latest) });
        case.drain().first().map(|(_, version, _)| *version)
    };
    publish(1);
    assert_eq!(read(1, 0..1), Some(1));
    publish(2);
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!((read(1, 0..1), read(2, 0..1)), (Some(1), Some(2)));
    }
    publish(3);
    assert_eq!((read(1, 0..1), read(2, 0..1)), (Some(1), None), "one of them stays");
    assert_eq!(
        begin(&topic, &Subscribe { start: Start::Oldest, ..subscribe(Mode::Every) })
            .drain()
            .len(),
        1
    );
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert_eq!((read(1, 0..1), read(3, 0..1)), (None, Some(3)));
    publish(4);
    assert_eq!(read(3, 0..1), Some(3), "the next one may stay");
    topic.end(EndReason::Withdrawn);
    assert_eq!(read(3, 0..1), None);
}
