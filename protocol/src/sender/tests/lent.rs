//! Versions in memory that the client maps (PROTOCOL.md §3.19).

use super::messages::{
    VERSION, actions, chunks, committed, request, sender, subscribe, tell, topic, two_chunks,
};
use super::topic::{EPOCH, Numbered, Numbers};
use crate::*;

/// A version that was announced in memory, to a client with credit for both chunks.
fn lent() -> (Sender<Numbered>, Numbers) {
    let topic = topic();
    let mut sender = sender(&topic, &Subscribe { memory: true, ..subscribe(2) });
    assert!(sender.wants_memory());
    assert!(matches!(sender.poll(&topic, None), Some(SenderAction::Announce(_))));
    sender.handle_lent();
    sender.handle_selected(two_chunks());
    let sent = actions(&mut sender, &topic, 1);
    assert!(matches!(sent[..], [SenderAction::Send(SendAction::Manifest)]), "{sent:?}");
    (sender, topic)
}

fn decline(version: Version) -> ClientMessage {
    ClientMessage::Decline { subscription: subscribe(0).subscription, epoch: EPOCH, version }
}

#[test]
fn a_lent_version_is_committed_without_chunks() {
    let (mut sender, topic) = lent();
    tell(&mut sender, committed(VERSION)).unwrap();
    let sent = actions(&mut sender, &topic, 1);
    assert!(matches!(sent[..], [SenderAction::Committed { .. }]), "{sent:?}");
    assert_eq!(tell(&mut sender, decline(VERSION)), Ok(false), "it crossed nothing, and has no effect");
}

/// After `Decline`, or a request, the version comes in chunks, and may not be committed before.
#[test]
fn a_declined_version_comes_in_chunks() {
    let (mut sender, topic) = lent();
    assert_eq!(tell(&mut sender, decline(VERSION)), Ok(true));
    assert!(tell(&mut sender, decline(VERSION)).is_err(), "once");
    assert_eq!(chunks(&mut sender, &topic, 1), [0, 1]);
    assert!(tell(&mut sender, committed(VERSION)).is_err(), "nothing is complete");

    let (mut sender, topic) = lent();
    let second = RangeSet::from_range(1..2);
    tell(&mut sender, request(VERSION, second)).unwrap();
    assert_eq!(chunks(&mut sender, &topic, 2), [1]);
    assert!(tell(&mut sender, decline(VERSION)).is_err());
}

#[test]
fn only_a_lent_version_is_declined() {
    let topic = topic();
    let mut sender = sender(&topic, &subscribe(2));
    assert!(!sender.wants_memory());
    assert_eq!(chunks(&mut sender, &topic, 1), [0, 1]);
    assert!(tell(&mut sender, decline(VERSION)).is_err());
    assert!(tell(&mut sender, decline(Version(9))).is_err());
}

#[test]
fn a_description_is_not_lent() {
    let wanted = Subscribe { memory: true, describe: true, ..subscribe(0) };
    assert!(!sender(&topic(), &wanted).wants_memory());
}
