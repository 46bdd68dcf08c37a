//! The first version of a subscription.

use super::topic::{EPOCH, Numbered, Numbers};
use crate::{
    sender::course::{Course, Step},
    *,
};

const OTHER_EPOCH: Epoch = Epoch(9);

/// A topic that retains `versions` versions, also for a reader.
fn topic(versions: usize) -> Numbers {
    let mut topic = Numbers::new(9, true);
    (0..versions).for_each(|_| topic.publish(ManifestDigest([7; 32])));
    topic
}

fn new_sender(topic: &Numbers, mode: Mode, start: Start) -> Sender<Numbered> {
    let latest = Subscribe::latest(SubscriptionId(1), Topic::new("t").unwrap(), 1);
    Sender::new(
        topic,
        &Subscribe { mode, start, window: 9, ..latest },
        FeatureSet::OF_CLIENT,
        topic.place(),
        None,
    )
    .unwrap()
}

/// The first version, or why there is none; `None` while it is awaited.
fn first(sender: &mut Sender<Numbered>, topic: &Numbers) -> Option<Result<u64, Ended>> {
    loop {
        match sender.poll(topic, None)? {
            SenderAction::Announce(announcement) => return Some(Ok(announcement.version.key().1.0)),
            SenderAction::End(ended) => return Some(Err(ended)),
            SenderAction::Acknowledge(..) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// PROTOCOL.md §3.3 (10): versions of another epoch are not before the start.
#[test]
fn a_subscription_begins_at_its_start() {
    let topic = topic(3);
    for (start, every, latest) in [
        (Start::At(None, Version(2)), Some(2), Some(3)),
        (Start::At(Some(EPOCH), Version(3)), Some(3), Some(3)),
        (Start::At(None, Version(4)), None, None),
        (Start::At(Some(OTHER_EPOCH), Version(4)), Some(1), Some(3)),
    ] {
        for (mode, expected) in [(Mode::Every, every), (Mode::Latest, latest)] {
            let mut sender = new_sender(&topic, mode, start);
            assert_eq!(first(&mut sender, &topic), expected.map(Ok), "{start:?} {mode:?}");
        }
    }
}

#[test]
fn a_start_that_is_not_published_yet_is_awaited() {
    for mode in [Mode::Every, Mode::Latest] {
        let mut topic = topic(2);
        let mut sender = new_sender(&topic, mode, Start::At(None, Version(4)));
        assert_eq!(first(&mut sender, &topic), None);
        topic.publish(ManifestDigest([7; 32]));
        assert_eq!(first(&mut sender, &topic), None, "version 3 precedes it");
        topic.publish(ManifestDigest([7; 32]));
        assert_eq!(first(&mut sender, &topic), Some(Ok(4)), "{mode:?}");
    }
}

/// PROTOCOL.md §3.12 (5).
#[test]
fn no_other_version_replaces_one_by_its_number() {
    let topic = topic(3);
    let not_found = Some(Err(Ended::ByServer(EndReason::NotFound)));
    for (epoch, version, latest) in [
        (None, 2, Some(Ok(2))),
        (Some(EPOCH), 2, Some(Ok(2))),
        (None, 3, Some(Ok(3))),
        (None, 4, not_found),
        (Some(OTHER_EPOCH), 2, not_found),
    ] {
        let start = Start::Exactly(epoch, Version(version));
        assert_eq!(first(&mut new_sender(&topic, Mode::Latest, start), &topic), latest, "{start:?}");
        let every = first(&mut new_sender(&topic, Mode::Every, start), &topic);
        assert_eq!(every, not_found, "its place is version 1");
    }
    let start = Start::Exactly(None, Version(1));
    assert_eq!(first(&mut new_sender(&topic, Mode::Every, start), &topic), Some(Ok(1)));
}

/// It may be published after the sender looked for claims that can be compared.
#[test]
fn the_version_that_the_client_has_waits_for_its_comparison() {
    for is_same in [true, false] {
        let mut topic = topic(2);
        let have = Some(Have { epoch: EPOCH, version: Version(2), digest: VersionDigest([1; 32]) });
        let latest = Subscribe::latest(SubscriptionId(1), Topic::new("t").unwrap(), 1);
        let request = Subscribe { mode: Mode::Every, window: 9, have, ..latest };
        let mut course = Course::new(&topic, &request, topic.place());
        course.handle_acknowledged((EPOCH, Version(2)));
        let acknowledged = |step| match step {
            Step::Acknowledge(_, version) => Some(version.0),
            _ => None,
        };
        assert_eq!(acknowledged(course.next(&topic)), Some(1));
        assert!(matches!(course.next(&topic), Step::Wait), "version 2 may be other content");
        course.handle_compared(&topic, is_same);
        topic.publish(ManifestDigest([7; 32]));
        if is_same {
            assert_eq!(acknowledged(course.next(&topic)), Some(2));
        }
        let Step::Send(next) = course.next(&topic) else { panic!("version 3 is published") };
        assert_eq!(next.version.key(), (EPOCH, Version(if is_same { 3 } else { 2 })));
    }
}

/// PROTOCOL.md §6.6 (8): of other content, the client counts as having the version before.
#[test]
fn the_newest_version_is_sent_if_the_client_has_other_content_of_its_number() {
    for (is_same, expected) in [(true, None), (false, Some(2))] {
        let topic = topic(2);
        let have = Some(Have { epoch: EPOCH, version: Version(2), digest: VersionDigest([1; 32]) });
        let latest = Subscribe::latest(SubscriptionId(1), Topic::new("t").unwrap(), 1);
        let mut course = Course::new(&topic, &Subscribe { have, ..latest }, topic.place());
        course.handle_compared(&topic, is_same);
        let sent = match course.next(&topic) {
            Step::Send(next) => Some(next.version.key().1.0),
            _ => None,
        };
        assert_eq!(sent, expected, "the same content: {is_same}");
    }
}
