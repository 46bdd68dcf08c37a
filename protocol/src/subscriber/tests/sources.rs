//! Tests of several sources of one version: lists of hashes, and sources that fail.

use super::{begin_of, subscriber};
use crate::{
    Announce, ChunkHash, ChunkHeader, ChunkIndex, CodecId, Consumer, Mode,
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

/// The rest of the user's request holds for each source; what it says of later versions does not.
#[test]
fn a_source_is_asked_for_the_same_part_of_the_version() {
    let wanted = Subscribe {
        selection: fixtures::globs(&[0, 1, 2, 4, 5]),
        within: RangeSet::from_range(1..CHUNKS),
        codec: Some(CodecId::Sparse),
        consumer: Consumer::Named([3; 16]),
        ..request(Mode::Every, CREDIT)
    };
    let mut subscriber = subscriber(wanted.clone());
    begin_of(&mut subscriber, CHUNKS);
    let _ = messages(&mut subscriber);
    subscriber.ask_source(SOURCE);
    let expected = Subscribe {
        selection: wanted.selection,
        within: wanted.within,
        codec: wanted.codec,
        start: Start::Exactly(Some(EPOCH), Version(1)),
        once: true,
        consumer: Consumer::Nobody,
        manifest: Some(manifest(CHUNKS).digest()),
        ..Subscribe::latest(SOURCE, wanted.topic, 0)
    };
    assert_eq!(messages(&mut subscriber), [ClientMessage::Subscribe(expected)]);
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
        assert_eq!(subscriber.handle_manifest_header(), Ok(()));
        let second = subscriber.handle_manifest_header();
        assert_eq!(second.is_ok(), afresh, "the manifest of a version that was refused may end early");
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

/// PROTOCOL.md §6.10 (5).
#[test]
fn a_lost_origin_is_subscribed_to_again_without_credit() {
    let mut subscriber = two_sources();
    receive(&mut subscriber, SUBSCRIPTION, 0);
    let _ = messages(&mut subscriber);
    subscriber.handle_detached(CREDIT);
    let _ = messages(&mut subscriber);
    subscriber.subscribe(None);
    let sent = messages(&mut subscriber);
    let [ClientMessage::Subscribe(again)] = &sent[..] else { panic!("{sent:?}") };
    let partial = again.partial.as_ref().map(|partial| (partial.version, partial.chunks.clone()));
    assert_eq!((again.credit, partial), (0, Some((Version(1), RangeSet::from_range(0..1)))));
}

/// A version whose other source has ended still has one while a stream of it is received: if the origin is lost, the
/// version continues.
#[test]
fn chunks_of_a_source_that_ended_still_arrive() {
    let mut subscriber = two_sources();
    receive(&mut subscriber, SUBSCRIPTION, 0);
    let _ = messages(&mut subscriber);
    let stream = StreamToken(77);
    subscriber
        .handle_chunk(ChunkHeader { subscription: SOURCE, ..header(1, 2) }, stream)
        .unwrap();
    subscriber.handle_source_ended(SOURCE);
    assert!(subscriber.has_other_sources() && !subscriber.has_source(SOURCE));
    subscriber.handle_verified(stream, verified(2));
    assert!(!subscriber.has_other_sources());
}

/// The last chunk arrives from a source that has ended, after the origin was lost, too.
#[test]
fn the_last_chunk_of_a_source_that_ended_completes_the_version() {
    let mut subscriber = two_sources();
    list(&mut subscriber, 0, &hashes(0..CHUNKS)).unwrap();
    for (source, chunk) in [(SUBSCRIPTION, 0), (SUBSCRIPTION, 1), (SOURCE, 2), (SOURCE, 3), (SOURCE, 4)] {
        receive(&mut subscriber, source, chunk);
        let _ = messages(&mut subscriber);
    }
    let stream = StreamToken(77);
    subscriber
        .handle_chunk(ChunkHeader { subscription: SOURCE, ..header(1, 5) }, stream)
        .unwrap();
    subscriber.handle_source_ended(SOURCE);
    subscriber.handle_detached(CREDIT);
    subscriber.handle_verified(stream, verified(5));
    let pending = actions(&mut subscriber);
    assert!(matches!(pending.last(), Some(Action::Commit(_))), "{pending:?}");
    subscriber.handle_committed(false);
    assert!(subscriber.has_committed() && !subscriber.is_receiving());
}

/// PROTOCOL.md §6.10 (7).
#[test]
fn up_to_15_sources_are_sought_for_more_chunks_than_the_allowance() {
    for (credit, is_sought) in [(CHUNKS, false), (CHUNKS - 1, true)] {
        let mut subscriber = subscriber(request(Mode::Latest, credit));
        begin_of(&mut subscriber, CHUNKS);
        let is_seek = |action: &Action| matches!(action, Action::Seek);
        assert_eq!(actions(&mut subscriber).iter().any(is_seek), is_sought, "with credit for {credit}");
        subscriber.ask_source(SOURCE);
        assert_eq!(subscriber.has_source(SOURCE), is_sought);
        assert_eq!(messages(&mut subscriber).len(), usize::from(is_sought));
    }
    for mut subscriber in [asked(), two_sources()] {
        let _ = messages(&mut subscriber);
        (100..200).for_each(|source| subscriber.ask_source(SubscriptionId(source)));
        assert_eq!(messages(&mut subscriber).len(), 14, "there was one already");
        assert!(!subscriber.wants_sources());
    }
}

/// PROTOCOL.md §6.10 (1): the base is the client's for this version.
#[test]
fn a_source_is_told_the_base_of_the_version() {
    for base in [None, Some(Version(1))] {
        let mut subscriber = subscriber(request(Mode::Latest, CREDIT));
        begin_of(&mut subscriber, CHUNKS);
        (0..CHUNKS).for_each(|chunk| receive(&mut subscriber, SUBSCRIPTION, chunk));
        let digest = fixtures::digest(subscriber.selection().unwrap());
        subscriber.handle_complete(VERSION, digest).unwrap();
        subscriber.handle_committed(true);
        subscriber.handle_announce(announce(2, &manifest(CHUNKS)), now(), 0).unwrap();
        subscriber.handle_placed(base).unwrap();
        let _ = messages(&mut subscriber);
        subscriber.ask_source(SOURCE);
        let sent = messages(&mut subscriber);
        let [ClientMessage::Subscribe(asked)] = &sent[..] else { panic!("{sent:?}") };
        assert_eq!((asked.base.map(|have| have.version), asked.have), (base, None));
    }
}

/// An announcement of a source that is not asked any more has no effect, and the end of the version ends what was asked.
#[test]
fn sources_end_with_the_version() {
    let mut subscriber = asked();
    let _ = messages(&mut subscriber);
    subscriber.give_up(AbortReason::DeviceFailed);
    let is_left =
        |message: &ClientMessage| matches!(message, ClientMessage::Unsubscribe { subscription: SOURCE, .. });
    assert!(messages(&mut subscriber).iter().any(is_left));
    assert!(!subscriber.has_source(SOURCE));
    let mut subscriber = asked();
    let _ = messages(&mut subscriber);
    subscriber.handle_source_ended(SOURCE);
    answer(&mut subscriber, announce(1, &manifest(CHUNKS)));
    assert!(messages(&mut subscriber).is_empty() && !subscriber.has_other_sources());
}

/// A list may cross the end of its version; that of another version is an error.
#[test]
fn the_list_of_a_version_that_ended_is_passed_over() {
    let mut subscriber = two_sources();
    let other = (EPOCH, Version(2));
    assert!(subscriber.handle_hashes(SUBSCRIPTION, other, 0, &hashes(0..1)).is_err());
    subscriber.give_up(AbortReason::DeviceFailed);
    assert_eq!(list(&mut subscriber, 0, &hashes(0..1)), Ok(()));
    assert!(subscriber.handle_hashes(SUBSCRIPTION, other, 0, &hashes(0..1)).is_err());
}

/// PROTOCOL.md §6.10 (6): the sources that remain are told that bytes arrive; a lost origin gets no message.
#[test]
fn progress_is_reported_to_every_source() {
    let reported = |subscriber: &mut Subscriber| -> Vec<SubscriptionId> {
        let reports = messages(subscriber).into_iter().filter_map(|message| match message {
            ClientMessage::Credit { subscription, chunks: 0 } => Some(subscription),
            _ => None,
        });
        reports.collect()
    };
    let mut subscriber = two_sources();
    let began = now();
    subscriber.handle_timeout(began + Duration::from_secs(1), 1);
    assert_eq!(reported(&mut subscriber), [SUBSCRIPTION, SOURCE]);
    subscriber.handle_timeout(began + Duration::from_secs(2), 2);
    subscriber.handle_detached(CREDIT);
    assert_eq!(reported(&mut subscriber), [SOURCE], "the origin's message was not sent");
    subscriber.handle_timeout(began + Duration::from_secs(3), 3);
    assert_eq!(reported(&mut subscriber), [SOURCE]);
}

/// The origin that returns is one source more, if its content is the same. Each of its losses counts once.
#[test]
fn an_origin_that_returns_sends_again() {
    let mut other = two_sources();
    other.handle_detached(CREDIT);
    let announced = announce(1, &manifest(CHUNKS + 1));
    assert_eq!(other.handle_announce(announced, now(), 0), Err(ProtocolViolation::WrongManifest));

    let mut subscriber = two_sources();
    subscriber.handle_detached(CREDIT);
    subscriber.handle_detached(CREDIT); // The next connection is lost before the announcement.
    subscriber.subscribe(None);
    assert_eq!(requests(&messages(&mut subscriber)), [(SOURCE, vec![0, 1], true)]);
    subscriber.handle_announce(announce(1, &manifest(CHUNKS)), now(), 0).unwrap();
    subscriber.handle_hashes(SOURCE, VERSION, 0, &hashes(0..CHUNKS)).unwrap();
    let mut owed = VecDeque::from([(SOURCE, 0), (SOURCE, 1)]);
    let (mut commit, mut is_asked) = (None, false);
    while let Some((source, chunk)) = owed.pop_front() {
        receive(&mut subscriber, source, chunk);
        while let Some(action) = subscriber.poll() {
            match action {
                Action::Commit(done) => commit = Some(done),
                Action::Send(message) => {
                    for (source, chunks, _) in requests(&[message]) {
                        is_asked |= source == SUBSCRIPTION && !chunks.is_empty();
                        owed.extend(chunks.into_iter().map(|chunk| (source, chunk)));
                    }
                }
                _ => {}
            }
        }
    }
    assert!(is_asked, "chunks are requested of the origin");
    assert_eq!(commit.map(|commit| commit.reconnections), Some(1));
}

/// Of a chunk that arrives from both sources, the stream of the one that is not lost is received.
#[test]
fn a_lost_source_ends_its_streams() {
    let (first, second) = (StreamToken(50), StreamToken(51));
    for (sources, begins) in [([SOURCE, SUBSCRIPTION], true), ([SUBSCRIPTION, SOURCE], false)] {
        let mut subscriber = two_sources();
        for (source, stream) in sources.into_iter().zip([first, second]) {
            subscriber
                .handle_chunk(ChunkHeader { subscription: source, ..header(1, 0) }, stream)
                .unwrap();
        }
        let _ = messages(&mut subscriber);
        subscriber.handle_source_lost(SOURCE);
        let pending = actions(&mut subscriber);
        match begins {
            true => assert!(
                matches!(pending[..], [Action::Receive { stream, .. }] if stream == second),
                "{pending:?}"
            ),
            false => {
                assert!(matches!(pending[..], [Action::Discard(stream)] if stream == second), "{pending:?}")
            }
        }
        assert_eq!([first, second].map(|stream| subscriber.is_receiving_chunk(stream)), [!begins, begins]);
    }
}

/// Receives all chunks of the version from its origin, which announces it again, and returns the commit.
fn receive_again(subscriber: &mut Subscriber) -> Commit {
    let subscription = subscriber.options.subscription;
    subscriber.subscribe(None);
    let announced = Announce { subscription, ..announce(1, &manifest(CHUNKS)) };
    subscriber.handle_announce(announced, now(), 0).unwrap();
    subscriber.handle_placed(None).unwrap();
    (0..CHUNKS).for_each(|chunk| {
        let stream = StreamToken(1000 + u64::from(chunk));
        subscriber
            .handle_chunk(ChunkHeader { subscription, ..header(1, chunk) }, stream)
            .unwrap();
        subscriber.handle_verified(stream, verified(chunk));
    });
    let digest = fixtures::digest(subscriber.selection().unwrap());
    subscriber.handle_complete(VERSION, digest).unwrap();
    match actions(subscriber).pop() {
        Some(Action::Commit(commit)) => commit,
        other => panic!("{other:?}"),
    }
}

/// The origin is lost, and then the other source, too: what was received is resumed like after one lost connection.
#[test]
fn a_version_without_sources_waits_for_its_origin() {
    let mut subscriber = two_sources();
    subscriber.handle_detached(CREDIT);
    assert!(subscriber.current_version().is_some() && subscriber.timeout_at().is_some());
    subscriber.handle_source_lost(SOURCE);
    assert!(subscriber.timeout_at().is_none());
    assert_eq!(subscriber.resumable_chunks(), Some(RangeSet::new()));
    subscriber.handle_detached(CREDIT);
    assert_eq!(receive_again(&mut subscriber).reconnections, 1);
}

/// The loss of the origin counts, and leaving the memory does not.
#[test]
fn memory_that_is_left_without_an_origin_counts_the_lost_one() {
    for (is_lost, reconnections) in [(false, 0), (true, 1)] {
        let mut subscriber = two_sources();
        if is_lost {
            subscriber.handle_detached(CREDIT);
        }
        subscriber.leave_memory(SubscriptionId(5), CREDIT);
        let is_left = |message: &ClientMessage| {
            matches!(message, ClientMessage::Unsubscribe { subscription: SOURCE, .. })
        };
        assert!(messages(&mut subscriber).iter().any(is_left));
        assert_eq!(receive_again(&mut subscriber).reconnections, reconnections);
    }
}

/// PROTOCOL.md §6.10 (5): a new origin with another version, or with other content of this one.
#[test]
fn an_origin_that_returns_with_other_content_replaces_the_version() {
    for (version, afresh) in [(1, true), (2, false)] {
        let mut subscriber = two_sources();
        receive(&mut subscriber, SUBSCRIPTION, 0);
        subscriber.handle_detached(CREDIT);
        subscriber.subscribe(None);
        let _ = messages(&mut subscriber);
        let announced = Announce { afresh, ..announce(version, &manifest(CHUNKS)) };
        subscriber.handle_announce(announced, now(), 0).unwrap();
        assert!(!subscriber.has_source(SOURCE) && !subscriber.has_other_sources());
        assert_eq!(subscriber.held_bytes(), 0);
        let pending: Vec<_> = std::iter::from_fn(|| subscriber.poll()).collect();
        assert!(
            matches!(
                &pending[..],
                [
                    Action::Send(ClientMessage::Unsubscribe { subscription: SOURCE, .. }),
                    Action::Send(ClientMessage::Credit { subscription: SUBSCRIPTION, chunks: CREDIT }),
                    Action::Release { reason: Released::Replaced, .. },
                    Action::Place { resumes: false, .. },
                ]
            ),
            "{pending:?}"
        );
    }
}

/// A lost origin's `Complete` says nothing of what others send.
#[test]
fn the_digest_of_a_lost_origin_is_void() {
    let mut subscriber = two_sources();
    let digest = fixtures::digest(subscriber.selection().unwrap());
    subscriber.handle_complete(VERSION, digest).unwrap();
    subscriber.handle_detached(CREDIT);
    for chunk in 0..CHUNKS {
        let _ = messages(&mut subscriber);
        receive(&mut subscriber, SOURCE, chunk);
    }
    assert!(
        !actions(&mut subscriber)
            .iter()
            .any(|action| matches!(action, Action::Commit(_)))
    );
    subscriber.handle_hashes(SOURCE, VERSION, 0, &hashes(0..CHUNKS)).unwrap();
    assert!(matches!(actions(&mut subscriber)[..], [Action::Commit(_)]));
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
    assert!(!subscriber.handle_corrupt(of_origin));
    assert!(subscriber.handle_corrupt(of_source));
    assert!(!subscriber.handle_corrupt(of_source), "it is not received any more");
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
