//! Tests of several sources of one version: lists of hashes, and sources that fail.

use super::{begin_of, subscriber};
use crate::{
    ChunkHash, ChunkHeader, Mode,
    subscriber::{
        fixtures::{self, EPOCH, SUBSCRIPTION, announce, hash, header, manifest, now, request, verified},
        *,
    },
};

const CHUNKS: u32 = 6;
const CREDIT: u32 = 2;
const SOURCE: SubscriptionId = SubscriptionId(9);
const VERSION: (Epoch, Version) = (EPOCH, Version(1));

fn messages(subscriber: &mut Subscriber) -> Vec<ClientMessage> {
    let actions = std::iter::from_fn(|| subscriber.poll());
    actions
        .filter_map(|action| if let Action::Send(message) = action { Some(message) } else { None })
        .collect()
}

fn actions(subscriber: &mut Subscriber) -> Vec<Action> {
    std::iter::from_fn(|| subscriber.poll())
        .filter(|action| !matches!(action, Action::Send(_)))
        .collect()
}

/// A subscriber of version 1 that has asked a second source for it.
fn asked() -> Subscriber {
    let mut subscriber = subscriber(request(Mode::Latest, CREDIT));
    begin_of(&mut subscriber, CHUNKS);
    assert!(actions(&mut subscriber).iter().any(|action| matches!(action, Action::Seek)));
    subscriber.ask_source(SOURCE);
    subscriber
}

/// A subscriber that requests chunks of version 1 of two sources, whose messages are removed.
fn two_sources() -> Subscriber {
    let mut subscriber = asked();
    answer(&mut subscriber, announce(1, &manifest(CHUNKS)));
    let _ = messages(&mut subscriber);
    subscriber
}

/// Handles the announcement of the second source.
fn answer(subscriber: &mut Subscriber, announced: Announce) {
    let announced = Announce { subscription: SOURCE, ..announced };
    subscriber.handle_announce(announced, now(), 0).unwrap();
}

fn requests(messages: &[ClientMessage]) -> Vec<(SubscriptionId, Vec<u32>, bool)> {
    let requested = messages.iter().filter_map(|message| match message {
        ClientMessage::Request { subscription, chunks, hashes, .. } => {
            Some((*subscription, chunks.iter().collect(), *hashes))
        }
        _ => None,
    });
    requested.collect()
}

/// A chunk arrives from a source and is verified.
fn receive(subscriber: &mut Subscriber, source: SubscriptionId, chunk: u32) {
    let stream = StreamToken(u64::from(source.0) << 32 | u64::from(chunk));
    subscriber
        .handle_chunk(ChunkHeader { subscription: source, ..header(1, chunk) }, stream)
        .unwrap();
    subscriber.handle_verified(stream, verified(chunk));
}

fn list(subscriber: &mut Subscriber, first: u32, hashes: &[ChunkHash]) -> Result<(), ProtocolViolation> {
    subscriber.handle_hashes(SUBSCRIPTION, VERSION, first, hashes)
}

fn hashes(chunks: std::ops::Range<u32>) -> Vec<ChunkHash> {
    chunks.map(hash).collect()
}

/// PROTOCOL.md §6.10 (1).
#[test]
fn a_source_is_asked_for_this_version_without_credit() {
    let mut subscriber = asked();
    let asked: Vec<_> = messages(&mut subscriber);
    let [ClientMessage::Subscribe(subscribe)] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!(subscribe.start, Start::Exactly(Some(EPOCH), Version(1)));
    assert_eq!((subscribe.subscription, subscribe.credit, subscribe.once), (SOURCE, 0, true));
    assert_eq!(subscribe.manifest, Some(manifest(CHUNKS).digest()));
    assert!(subscriber.has_source(SOURCE));
}

/// PROTOCOL.md §6.10 (2), (3): what the origin may have begun is ordered of it; nothing else is, until there is room.
#[test]
fn the_first_requests_end_the_pushing_and_ask_the_origin_for_hashes() {
    let mut subscriber = asked();
    answer(&mut subscriber, announce(1, &manifest(CHUNKS)));
    let first = requests(&messages(&mut subscriber));
    assert_eq!(first, [(SUBSCRIPTION, vec![0, 1], true), (SOURCE, vec![], false)]);
    receive(&mut subscriber, SUBSCRIPTION, 0);
    assert_eq!(requests(&messages(&mut subscriber)), [(SOURCE, vec![2], false)]);
    receive(&mut subscriber, SOURCE, 2);
    assert_eq!(requests(&messages(&mut subscriber)), [(SOURCE, vec![3], false)]);
    receive(&mut subscriber, SUBSCRIPTION, 1);
    assert_eq!(requests(&messages(&mut subscriber)), [(SUBSCRIPTION, vec![4], false)]);
}

/// PROTOCOL.md §6.5: the list decides, whatever arrived first.
#[test]
fn a_version_is_committed_by_the_list() {
    let mut subscriber = two_sources();
    list(&mut subscriber, 0, &hashes(0..3)).unwrap();
    for (source, chunk) in
        [(SUBSCRIPTION, 0), (SUBSCRIPTION, 1), (SOURCE, 2), (SOURCE, 3), (SOURCE, 4), (SOURCE, 5)]
    {
        receive(&mut subscriber, source, chunk);
        let _ = messages(&mut subscriber);
    }
    assert!(actions(&mut subscriber).is_empty());
    list(&mut subscriber, 3, &hashes(3..CHUNKS)).unwrap();
    assert!(matches!(actions(&mut subscriber)[..], [Action::Commit(_)]));
    subscriber.handle_committed(false);
    let last = messages(&mut subscriber);
    let is_left =
        |message: &ClientMessage| matches!(message, ClientMessage::Unsubscribe { subscription: SOURCE, .. });
    assert!(last.iter().any(is_left), "{last:?}");
}

/// PROTOCOL.md §6.10 (4): a chunk with another hash is requested again, and its source left; whether the list comes
/// before the chunk, or after it was verified.
#[test]
fn a_source_with_other_content_is_left() {
    let other = ChunkHash([7; 16]);
    for is_list_first in [true, false] {
        let mut subscriber = two_sources();
        receive(&mut subscriber, SUBSCRIPTION, 0);
        let _ = messages(&mut subscriber);
        let mut listed = hashes(0..CHUNKS);
        listed[2] = other;
        if is_list_first {
            list(&mut subscriber, 0, &listed).unwrap();
        }
        receive(&mut subscriber, SOURCE, 2);
        if !is_list_first {
            list(&mut subscriber, 0, &listed).unwrap();
        }
        let pending: Vec<_> = std::iter::from_fn(|| subscriber.poll()).collect();
        assert!(pending.iter().any(|action| matches!(action, Action::SourceDiffers(SOURCE))), "{pending:?}");
        assert!(!subscriber.has_source(SOURCE));
        assert_eq!(subscriber.held_bytes(), u64::from(fixtures::CHUNK_BYTES), "chunk 2 is missing again");
    }
}

/// PROTOCOL.md §6.10 (4).
#[test]
fn a_server_that_differs_from_its_own_list_fails_the_version() {
    let mut subscriber = two_sources();
    receive(&mut subscriber, SUBSCRIPTION, 0);
    let _ = messages(&mut subscriber);
    list(&mut subscriber, 0, &[ChunkHash([7; 16])]).unwrap();
    let fault = VersionFault::OtherHash(ChunkIndex(0));
    assert!(
        actions(&mut subscriber)
            .iter()
            .any(|action| matches!(action, Action::Fail(found) if *found == fault))
    );
}

/// PROTOCOL.md §6.10 (3).
#[test]
fn a_list_must_be_asked_for_and_continued() {
    let mut pushed = subscriber(request(Mode::Latest, CREDIT));
    begin_of(&mut pushed, CHUNKS);
    assert!(list(&mut pushed, 0, &hashes(0..1)).is_err(), "nobody asked for it");
    let mut subscriber = two_sources();
    for (first, count) in [(1, 1), (0, 0), (0, CHUNKS + 1)] {
        assert!(list(&mut subscriber, first, &hashes(0..count)).is_err(), "{count} hashes from {first}");
    }
    list(&mut subscriber, 0, &hashes(0..CHUNKS)).unwrap();
    assert!(list(&mut subscriber, CHUNKS, &hashes(0..1)).is_err(), "it is complete");
    assert_eq!(
        subscriber.handle_hashes(SOURCE, VERSION, 0, &hashes(0..1)),
        Ok(()),
        "it is ignored: another one was asked"
    );
}

/// PROTOCOL.md §6.10 (1): the version of another manifest is other content.
#[test]
fn a_source_with_another_manifest_is_left() {
    let mut subscriber = asked();
    let _ = messages(&mut subscriber);
    answer(&mut subscriber, announce(1, &manifest(CHUNKS + 1)));
    let pending: Vec<_> = std::iter::from_fn(|| subscriber.poll()).collect();
    assert!(matches!(pending[0], Action::SourceDiffers(SOURCE)), "{pending:?}");
    assert!(matches!(pending[1], Action::Send(ClientMessage::Unsubscribe { subscription: SOURCE, .. })));
    assert_eq!(pending.len(), 2, "the version is still pushed");
}

/// PROTOCOL.md §6.10 (6): only a source that owes chunks and is not the origin is disconnected, and `Waiting` excuses it.
#[test]
fn a_source_that_sends_nothing_is_closed() {
    for is_waiting in [false, true] {
        let mut subscriber = two_sources();
        receive(&mut subscriber, SUBSCRIPTION, 0);
        receive(&mut subscriber, SUBSCRIPTION, 1);
        let _ = messages(&mut subscriber);
        let mut closed = vec![];
        for second in 1..=29 {
            if is_waiting {
                subscriber.handle_source_waiting(SOURCE);
            }
            subscriber.handle_timeout(now() + Duration::from_secs(second), second);
            closed.extend(std::iter::from_fn(|| subscriber.poll()).filter_map(|action| match action {
                Action::CloseSource(source) => Some((second, source)),
                _ => None,
            }));
        }
        assert_eq!(closed.first().copied(), (!is_waiting).then_some((15, SOURCE)));
    }
}

/// PROTOCOL.md §6.10 (5): the list is asked of another source, from the beginning.
#[test]
fn a_lost_origin_is_replaced_as_the_source_of_the_list() {
    let mut subscriber = two_sources();
    list(&mut subscriber, 0, &hashes(0..2)).unwrap();
    subscriber.handle_detached(CREDIT);
    let asked = requests(&messages(&mut subscriber));
    assert_eq!(asked, [(SOURCE, vec![0, 1], true)]);
    assert_eq!(subscriber.handle_hashes(SOURCE, VERSION, 0, &hashes(0..CHUNKS)), Ok(()));
    for chunk in 0..CHUNKS {
        receive(&mut subscriber, SOURCE, chunk);
        let _ = messages(&mut subscriber);
    }
    subscriber.handle_verified(StreamToken(0), verified(0));
    assert!(subscriber.current_version().is_some());
}

/// PROTOCOL.md §6.10 (5): a new origin that announces a version which was committed without it gets its commit.
#[test]
fn a_version_that_was_committed_meanwhile_is_answered() {
    for afresh in [false, true] {
        let mut subscriber = two_sources();
        list(&mut subscriber, 0, &hashes(0..CHUNKS)).unwrap();
        subscriber.handle_detached(CREDIT);
        subscriber.subscribe(None);
        for chunk in 0..CHUNKS {
            let _ = messages(&mut subscriber);
            receive(&mut subscriber, SOURCE, chunk);
        }
        subscriber.handle_committed(true);
        let _ = messages(&mut subscriber);
        let announced = Announce { afresh, ..announce(1, &manifest(CHUNKS)) };
        subscriber.handle_announce(announced, now(), 0).unwrap();
        let answer = messages(&mut subscriber);
        match afresh {
            false => assert!(
                matches!(
                    &answer[..],
                    [
                        ClientMessage::Request { chunks, .. },
                        ClientMessage::Committed { kept: true, .. },
                        ClientMessage::Credit { chunks: CREDIT, .. },
                    ] if chunks.is_empty()
                ),
                "{answer:?}"
            ),
            true => assert!(
                matches!(&answer[..], [ClientMessage::Abort { .. }, ClientMessage::Credit { .. }]),
                "{answer:?}"
            ),
        }
        assert!(subscriber.current_version().is_none() && subscriber.has_committed());
    }
}

/// The order that a source cannot fulfil goes to the others.
#[test]
fn what_a_lost_source_owed_is_requested_of_the_origin() {
    let mut subscriber = two_sources();
    receive(&mut subscriber, SUBSCRIPTION, 0);
    assert_eq!(requests(&messages(&mut subscriber)), [(SOURCE, vec![2], false)]);
    subscriber.handle_source_lost(SOURCE);
    assert_eq!(requests(&messages(&mut subscriber)), [(SUBSCRIPTION, vec![2], false)]);
    assert!(!subscriber.has_other_sources());
}

/// A chunk that is not what its header promised is requested again, of the origin; a corrupt one of the origin is not.
#[test]
fn a_source_that_sends_a_corrupt_chunk_is_left() {
    let mut subscriber = two_sources();
    receive(&mut subscriber, SUBSCRIPTION, 0);
    let _ = messages(&mut subscriber);
    let (of_source, of_origin) = (StreamToken(1), StreamToken(2));
    subscriber
        .handle_chunk(ChunkHeader { subscription: SOURCE, ..header(1, 2) }, of_source)
        .unwrap();
    subscriber.handle_chunk(header(1, 1), of_origin).unwrap();
    assert_eq!(subscriber.handle_corrupt(of_origin), None);
    assert_eq!(subscriber.handle_corrupt(of_source), Some(SOURCE));
    assert_eq!(subscriber.handle_corrupt(of_source), None, "it is not received any more");
    let last = messages(&mut subscriber);
    let is_left =
        |message: &ClientMessage| matches!(message, ClientMessage::Unsubscribe { subscription: SOURCE, .. });
    assert!(last.iter().any(is_left) && !subscriber.has_source(SOURCE), "{last:?}");
    assert_eq!(requests(&last), [(SUBSCRIPTION, vec![2], false)]);
}

/// The credit is the origin's: a source cannot use it before it has announced the version.
#[test]
fn chunks_of_a_source_that_were_not_requested_are_refused() {
    let mut subscriber = asked();
    let unrequested = ChunkHeader { subscription: SOURCE, ..header(1, 5) };
    let refused = subscriber.handle_chunk(unrequested, StreamToken(1));
    assert_eq!(refused, Err(ProtocolViolation::UnknownSubscription(SOURCE)));
    for chunk in 0..CREDIT {
        receive(&mut subscriber, SUBSCRIPTION, chunk);
    }
}

/// A chunk whose header breaks a rule is requested again once its source is lost.
#[test]
fn an_invalid_header_of_a_source_loses_no_chunk() {
    let mut subscriber = two_sources();
    receive(&mut subscriber, SUBSCRIPTION, 0);
    assert_eq!(requests(&messages(&mut subscriber)), [(SOURCE, vec![2], false)]);
    let invalid = ChunkHeader { subscription: SOURCE, raw_bytes: 1, ..header(1, 2) };
    assert!(subscriber.handle_chunk(invalid, StreamToken(1)).is_err());
    subscriber.handle_source_lost(SOURCE);
    assert_eq!(requests(&messages(&mut subscriber)), [(SUBSCRIPTION, vec![2], false)]);
}

/// A source that was left is closed if it does not end the chunks that it had begun.
#[test]
fn a_source_that_was_left_is_closed_if_it_ends_no_chunk() {
    let mut subscriber = two_sources();
    receive(&mut subscriber, SUBSCRIPTION, 0);
    let _ = messages(&mut subscriber);
    subscriber
        .handle_chunk(ChunkHeader { subscription: SOURCE, ..header(1, 2) }, StreamToken(1))
        .unwrap();
    subscriber.handle_source_ended(SOURCE);
    let (mut at, mut received) = (now(), 0);
    let closed = (1..20).find(|_| {
        (at, received) = (at + Duration::from_secs(1), received + 1);
        subscriber.handle_timeout(at, received);
        actions(&mut subscriber)
            .iter()
            .any(|action| matches!(action, Action::CloseSource(SOURCE)))
    });
    assert_eq!(closed, Some(16), "half of the timeout after the check that sees the chunk's begin");
    subscriber.handle_source_lost(SOURCE);
    assert!(
        requests(&messages(&mut subscriber))
            .iter()
            .any(|(_, chunks, _)| chunks.contains(&2))
    );
}
