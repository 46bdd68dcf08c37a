//! The ends of a topic and of its subscriptions.

use super::topic::{EPOCH, IN_PIECES, Numbered, Numbers};
use crate::*;
use std::sync::Arc;

const MANIFEST: ManifestDigest = ManifestDigest([7; 32]);
const ENDED: SenderAction<Numbered> = SenderAction::End(Ended::ByServer(EndReason::TopicEnded));

/// PROTOCOL.md §3.14: a client that cannot read a version's manifest is told so, and is sent nothing of it.
#[test]
fn a_version_that_the_client_cannot_read_ends_the_subscription() {
    let mut topic = Numbers::new(2, false);
    topic.publish(IN_PIECES);
    let begin = |offered| {
        Sender::new(&topic, &latest(), offered, topic.place(), None)
            .unwrap()
            .poll(&topic, None)
    };
    let not_supported = Some(SenderAction::End(Ended::ByServer(EndReason::NotSupported)));
    assert_eq!(begin(FeatureSet::from_codes(&[5])), not_supported);
    assert!(matches!(begin(FeatureSet::from_codes(&[3])), Some(SenderAction::Announce(_))));
}

fn new_sender(topic: &Numbers, subscribe: Subscribe) -> Sender<Numbered> {
    Sender::new(topic, &subscribe, FeatureSet::OF_CLIENT, topic.place(), None).unwrap()
}

fn latest() -> Subscribe {
    Subscribe::latest(SubscriptionId(1), Topic::new("t").unwrap(), 9)
}

/// Sends versions, which the client commits at once, until there is nothing to do. Returns the versions and the last
/// action.
fn send(sender: &mut Sender<Numbered>, topic: &Numbers) -> (Vec<u64>, Option<SenderAction<Numbered>>) {
    let (mut sent, mut last) = (vec![], None);
    while let Some(action) = sender.poll(topic, Some(LaneId(0))) {
        match &action {
            SenderAction::Announce(announcement) => {
                sent.push(announcement.version.key().1.0);
                sender.handle_selected(Arc::new(Selection::all(subscriber::fixtures::manifest(2))));
            }
            SenderAction::Send(SendAction::Complete) => {
                let version = Version(*sent.last().unwrap());
                let committed = SubscriptionMessage::Committed(EPOCH, version, false);
                sender.handle_message(committed, |_| true).unwrap();
            }
            SenderAction::Send(send) => sender.handle_sent(*send),
            _ => {}
        }
        last = Some(action);
    }
    (sent, last)
}

#[test]
fn a_subscription_ends_with_its_topic_once_it_has_the_newest_version() {
    let mut topic = Numbers::new(9, false);
    topic.publish(MANIFEST);
    let mut sender = new_sender(&topic, latest());
    topic.publish(MANIFEST);
    topic.ended = Some(EndReason::TopicEnded);
    assert_eq!(send(&mut sender, &topic), (vec![2], Some(ENDED)));
    assert_eq!(sender.poll(&topic, None), None, "no action follows");
}

/// A reader that has not acknowledged what fills its window still gets the versions after it.
#[test]
fn a_reader_gets_every_version_of_an_ended_topic() {
    let mut topic = Numbers::new(9, true);
    (0..2).for_each(|_| topic.publish(MANIFEST));
    topic.ended = Some(EndReason::TopicEnded);
    let request = Subscribe { mode: Mode::Every, start: Start::Oldest, window: 1, ..latest() };
    let mut sender = new_sender(&topic, request);
    let (sent, last) = send(&mut sender, &topic);
    assert_eq!(sent, [1]);
    assert!(matches!(last, Some(SenderAction::Committed { .. })), "version 2 waits: {last:?}");
    topic.acknowledge(EPOCH, Version(1));
    assert_eq!(send(&mut sender, &topic), (vec![2], Some(ENDED)));
}
