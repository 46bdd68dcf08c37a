//! Versions in memory that the server lends (PROTOCOL.md §3.19).

use super::{fixtures::EPOCH, subscriber};
use crate::subscriber::{
    fixtures::{announce, digest, header, manifest, now, request, verified},
    *,
};
use crate::{Announce, Lending, Lent, Mode};

const DIGEST: VersionDigest = VersionDigest([9; 32]);

/// The announcement of a version of two chunks in memory.
fn lent(version: u64) -> Announce {
    let lent = Lent { inode: 3, offset_bytes: 0, digest: DIGEST, why_not_gpu: None };
    Announce { lending: Some(Box::new(Lending::Memory(lent))), ..announce(version, &manifest(2)) }
}

fn actions(subscriber: &mut Subscriber) -> Vec<Action> {
    std::iter::from_fn(|| subscriber.poll()).collect()
}

/// A subscriber whose version 1 was announced in memory, and waits for its place.
fn placing() -> Subscriber {
    let mut subscriber = subscriber(request(Mode::Latest, 4));
    subscriber.subscribe(None);
    subscriber.handle_announce(lent(1), now(), 0).unwrap();
    subscriber.handle_manifest(Manifest::clone(&manifest(2))).unwrap();
    assert!(matches!(actions(&mut subscriber).last(), Some(Action::Place { resumes: false, .. })));
    subscriber
}

fn commit_of(subscriber: &mut Subscriber) -> Commit {
    match actions(subscriber).pop() {
        Some(Action::Commit(commit)) => commit,
        other => panic!("{other:?}"),
    }
}

/// Mapped at once, or copied to memory that was placed: committed without a chunk, under the server's digest.
#[test]
fn lent_bytes_are_committed_and_named_by_the_servers_digest() {
    for is_copied in [false, true] {
        let mut subscriber = placing();
        if is_copied {
            subscriber.handle_placed(None).unwrap();
            assert!(actions(&mut subscriber).is_empty(), "nothing is requested, and no source is sought");
        }
        subscriber.handle_lent();
        let commit = commit_of(&mut subscriber);
        assert_eq!((commit.digest, commit.chunks), (DIGEST, 0));
        subscriber.handle_committed(false);
        assert!(matches!(
            actions(&mut subscriber)[..],
            [Action::Send(ClientMessage::Committed { kept: false, .. })]
        ));
        subscriber.handle_detached(4);
        subscriber.subscribe(None);
        let sent = actions(&mut subscriber);
        let [Action::Send(ClientMessage::Subscribe(again))] = &sent[..] else { panic!("{sent:?}") };
        assert_eq!(again.have.unwrap().digest, DIGEST);
    }
}

#[test]
fn declined_memory_is_followed_by_chunks() {
    let mut subscriber = placing();
    subscriber.decline_memory();
    subscriber.decline_memory(); // Once.
    subscriber.handle_placed(None).unwrap();
    assert!(matches!(actions(&mut subscriber)[..], [Action::Send(ClientMessage::Decline { .. })]));
    for chunk in 0..2 {
        let stream = StreamToken(chunk.into());
        subscriber.handle_chunk(header(1, chunk), stream).unwrap();
        subscriber.handle_verified(stream, verified(chunk));
    }
    subscriber.handle_lent(); // It was declined, so this has no effect.
    let selection = subscriber.selection().cloned().unwrap();
    assert!(
        !actions(&mut subscriber)
            .iter()
            .any(|action| matches!(action, Action::Commit(_)))
    );
    subscriber.handle_complete((EPOCH, Version(1)), digest(&selection)).unwrap();
    assert_eq!(commit_of(&mut subscriber).chunks, 2);
}

/// A copy that ends after its connection was lost does not complete the version, which is announced again.
#[test]
fn a_late_copy_completes_nothing() {
    let mut subscriber = placing();
    subscriber.handle_placed(None).unwrap();
    subscriber.handle_detached(4);
    subscriber.handle_lent();
    assert!(
        !actions(&mut subscriber)
            .iter()
            .any(|action| matches!(action, Action::Commit(_)))
    );
    subscriber.subscribe(None);
    subscriber.handle_announce(lent(1), now(), 0).unwrap();
    assert!(matches!(actions(&mut subscriber).last(), Some(Action::Place { resumes: true, .. })));
    subscriber.handle_lent();
    assert_eq!(commit_of(&mut subscriber).digest, DIGEST);
}
