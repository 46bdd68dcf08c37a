//! The versions that a subscription in mode `latest` skips.

use super::topic::{EPOCH, Numbers};
use crate::{
    sender::course::{Course, Step},
    *,
};

/// PROTOCOL.md §3.4 (5): the versions of the epoch between the client's last commit and the next version.
#[test]
fn versions_since_the_last_commit_are_counted() {
    let subscribe = Subscribe::latest(SubscriptionId(1), Topic::new("t").unwrap(), 1);
    let topic_of = |versions: u64| {
        let mut topic = Numbers::new(1, false);
        (0..versions).for_each(|_| topic.publish(ManifestDigest([7; 32])));
        topic
    };
    let mut course = Course::new(&topic_of(4), &subscribe, Seq::FIRST);
    let skipped = |course: &mut Course<_>, versions| match course.next(&topic_of(versions)) {
        Step::Send(next) => next.skipped,
        step => panic!("{step:?}"),
    };
    assert_eq!(skipped(&mut course, 4), 0, "the client has committed none");
    course.handle_committed((EPOCH, Version(1)));
    assert_eq!(skipped(&mut course, 4), 2);
    course.handle_given_up((EPOCH, Version(4)));
    assert_eq!(skipped(&mut course, 6), 4, "also the one that was given up");
    course.handle_committed((EPOCH, Version(6)));
    assert_eq!(skipped(&mut course, 7), 0);
    course.handle_committed((Epoch(9), Version(1)));
    assert_eq!(skipped(&mut course, 7), 0, "numbers of another epoch");
}
