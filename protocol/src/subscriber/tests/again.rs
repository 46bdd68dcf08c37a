//! Tests of a version that is requested again: on another connection, or into other memory.

use super::{begin, subscriber};
use crate::subscriber::{
    fixtures::{announce, digest, header, manifest, now, request, verified},
    *,
};
use crate::{Announce, ChunkHeader, Mode};

fn actions(subscriber: &mut Subscriber) -> Vec<Action> {
    std::iter::from_fn(|| subscriber.poll()).collect()
}

/// The `Subscribe` that is sent next.
fn subscribe(subscriber: &mut Subscriber) -> Subscribe {
    subscriber.subscribe(None);
    let sent = actions(subscriber);
    let [Action::Send(ClientMessage::Subscribe(subscribe))] = &sent[..] else { panic!("{sent:?}") };
    subscribe.clone()
}

/// Receives these of the two chunks of version 1, each on the stream with its number.
fn receive(subscriber: &mut Subscriber, chunks: &[u32]) {
    for chunk in chunks {
        let stream = StreamToken((*chunk).into());
        let header = ChunkHeader { subscription: subscriber.options.subscription, ..header(1, *chunk) };
        subscriber.handle_chunk(header, stream).unwrap();
        subscriber.handle_verified(stream, verified(*chunk));
    }
}

/// Receives these chunks of version 1, announced again, and returns the commit; `resumes` is whether it continues in
/// its memory.
fn finish(subscriber: &mut Subscriber, chunks: &[u32], resumes: bool) -> Commit {
    let announced = Announce { subscription: subscriber.options.subscription, ..announce(1, &manifest(2)) };
    subscriber.handle_announce(announced, now(), 0).unwrap();
    let placed = actions(subscriber);
    assert!(matches!(placed[..], [Action::Place { resumes: again, .. }] if again == resumes), "{placed:?}");
    subscriber.handle_placed(None).unwrap();
    receive(subscriber, chunks);
    let complete = digest(subscriber.selection().unwrap());
    subscriber.handle_complete((fixtures::EPOCH, Version(1)), complete).unwrap();
    match actions(subscriber).pop() {
        Some(Action::Commit(commit)) => commit,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_next_connection_has_its_own_credit() {
    let mut subscriber = subscriber(request(Mode::Latest, 4));
    begin(&mut subscriber);
    subscriber.handle_detached(7);
    assert_eq!(subscribe(&mut subscriber).credit, 7);
    subscriber.handle_detached(4);
    assert_eq!(subscribe(&mut subscriber).credit, 4);
}

/// Another number, and nothing of what was received: the caller's memory is somebody else's.
#[test]
fn memory_that_is_left_is_received_again_in_full() {
    let mut subscriber = subscriber(request(Mode::Latest, 4));
    begin(&mut subscriber);
    receive(&mut subscriber, &[0]);
    let id = SubscriptionId(9);
    assert_eq!(subscriber.held_bytes(), u64::from(fixtures::CHUNK_BYTES));
    subscriber.leave_memory(id, 5);
    assert_eq!(subscriber.held_bytes(), 0);
    let again = subscribe(&mut subscriber);
    let partial = again.partial.map(|partial| (partial.version, partial.chunks));
    assert_eq!((again.subscription, again.credit), (id, 5));
    assert_eq!(partial, Some((Version(1), RangeSet::new())), "the same version, none of its chunks");
    let commit = finish(&mut subscriber, &[0, 1], true);
    assert_eq!((commit.reconnections, commit.chunks), (0, 2), "no connection was lost");
}

#[test]
fn memory_that_is_left_without_a_connection_counts_the_lost_one() {
    let mut subscriber = subscriber(request(Mode::Latest, 4));
    begin(&mut subscriber);
    receive(&mut subscriber, &[0]);
    subscriber.handle_detached(4);
    assert_eq!(subscriber.held_bytes(), u64::from(fixtures::CHUNK_BYTES));
    subscriber.leave_memory(SubscriptionId(9), 4);
    subscribe(&mut subscriber);
    assert_eq!(finish(&mut subscriber, &[0, 1], true).reconnections, 1);
}
