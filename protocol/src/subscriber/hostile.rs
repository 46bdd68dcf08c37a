//! Tests of servers that break rules, which is an error, and of messages that cross, which is not.

use super::{
    fixtures::{announce, codecs, digest, header, id, manifest, now, request, select, topic, verified},
    *,
};
use crate::{Announce, ChunkHeader, ChunkIndex, CodecId, Credit, ManifestDigest, Mode, Topic};
use std::ops::Range;

/// The subscription's credit, in chunks.
const CREDIT: u32 = 3;
const CHUNKS: u32 = 4;
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

fn key_of(version: u64) -> (Epoch, Version) {
    key(&id(version))
}

/// A subscription in mode `latest` without an announcement.
fn idle() -> Subscriber {
    let mut subscriber = Subscriber::new(request(Mode::Latest, CREDIT), codecs(), STALL_TIMEOUT, now());
    subscriber.subscribe(None);
    assert!(matches!(subscriber.poll(), Some(Action::Send(ClientMessage::Subscribe(_)))));
    subscriber
}

/// A subscription that is receiving version 1, of [`CHUNKS`] chunks, none of which has arrived.
fn running() -> Subscriber {
    let mut subscriber = idle();
    subscriber.handle_announce(announce(1, &manifest(CHUNKS)), now(), 0).unwrap();
    subscriber.handle_manifest(Manifest::clone(&manifest(CHUNKS))).unwrap();
    assert!(matches!(subscriber.poll(), Some(Action::Place { resumes: false, .. })));
    subscriber.handle_placed(None).unwrap();
    assert!(actions(&mut subscriber).is_empty());
    subscriber
}

fn chunk(subscriber: &mut Subscriber, index: u32, stream: u64) -> Result<(), ProtocolViolation> {
    subscriber.handle_chunk(header(1, index), StreamToken(stream))
}

/// The pending actions. There is no other server that could be asked.
fn actions(subscriber: &mut Subscriber) -> Vec<Action> {
    std::iter::from_fn(|| subscriber.poll())
        .filter(|action| !matches!(action, Action::Seek))
        .collect()
}

/// The messages among the pending actions, all of which are removed.
fn messages(subscriber: &mut Subscriber) -> Vec<ClientMessage> {
    let pending = actions(subscriber).into_iter();
    let message = |action| if let Action::Send(message) = action { Some(message) } else { None };
    pending.filter_map(message).collect()
}

fn request_range(chunks: Range<u32>) -> ClientMessage {
    request_of(&[chunks])
}

fn request_of(chunks: &[Range<u32>]) -> ClientMessage {
    let (epoch, version) = key_of(1);
    let subscription = fixtures::SUBSCRIPTION;
    let chunks = RangeSet::from_ranges(chunks.iter().cloned()).unwrap();
    ClientMessage::Request { subscription, epoch, version, chunks, hashes: false, again: false }
}

#[test]
fn invalid_announcements_are_refused() {
    let mut subscriber = running();
    for version in [1, 2] {
        let second = subscriber.handle_announce(announce(version, &manifest(CHUNKS)), now(), 0);
        assert!(matches!(second, Err(ProtocolViolation::OutOfTurn { .. })), "{second:?}");
    }

    let other_topic = VersionId { topic: Topic::new("u").unwrap(), ..id(1) };
    let announced = Announce { id: other_topic, ..announce(1, &manifest(1)) };
    let refused = idle().handle_announce(announced, now(), 0);
    assert!(matches!(refused, Err(ProtocolViolation::OutOfTurn { .. })), "{refused:?}");
    assert_eq!(topic(), id(1).topic);

    let mut subscriber = running();
    subscriber.handle_abort(key_of(1), AbortReason::Withdrawn).unwrap();
    let repeated = subscriber.handle_announce(announce(1, &manifest(CHUNKS)), now(), 0);
    assert!(matches!(repeated, Err(ProtocolViolation::VersionNotRising { .. })), "{repeated:?}");
}

#[test]
fn invalid_manifests_are_refused() {
    let mut subscriber = idle();
    subscriber.handle_announce(announce(1, &manifest(CHUNKS)), now(), 0).unwrap();
    subscriber.handle_manifest_header().unwrap();
    assert!(matches!(subscriber.handle_manifest_header(), Err(ProtocolViolation::TwoManifests(_))));
    let other = Manifest::clone(&manifest(CHUNKS + 1));
    assert_eq!(subscriber.handle_manifest(other.clone()), Err(ProtocolViolation::WrongManifest));

    let mut subscriber = idle();
    subscriber.handle_manifest_header().unwrap();
    subscriber.handle_manifest_lost();
    assert_eq!(subscriber.handle_manifest_header(), Ok(()), "the first stream was cut off");

    let mut subscriber = running();
    assert!(matches!(subscriber.handle_manifest(other.clone()), Err(ProtocolViolation::OutOfTurn { .. })));
    assert_eq!(subscriber.handle_manifest(Manifest::clone(&manifest(CHUNKS))), Ok(()), "the same manifest");

    // After a version was given up, two late manifest events are excused.
    let mut subscriber = running();
    subscriber.handle_abort(key_of(1), AbortReason::Withdrawn).unwrap();
    subscriber.handle_announce(announce(2, &manifest(CHUNKS)), now(), 0).unwrap();
    for _ in 0..2 {
        assert_eq!(subscriber.handle_manifest(other.clone()), Ok(()));
    }
    assert!(subscriber.handle_manifest(other).is_err());
}

#[test]
fn invalid_chunks_are_refused() {
    let error = |header: ChunkHeader| running().handle_chunk(header, StreamToken(1)).unwrap_err();
    assert!(matches!(error(header(2, 0)), ProtocolViolation::WrongVersion { .. }));
    assert!(matches!(error(header(1, CHUNKS)), ProtocolViolation::NoSuchChunk { .. }));
    let zstd = ChunkHeader { codec: CodecId::Zstd, ..header(1, 0) };
    assert!(matches!(error(zstd), ProtocolViolation::CodecNotOffered(_)));
    let based = ChunkHeader { codec: CodecId::Sparse, base: Some(Version(9)), ..header(1, 0) };
    assert!(matches!(error(based), ProtocolViolation::UnknownBase { .. }));
    let baseless = ChunkHeader { codec: CodecId::Sparse, ..header(1, 0) };
    assert!(matches!(error(baseless), ProtocolViolation::CodecAndBase { .. }));

    let mut subscriber = running();
    chunk(&mut subscriber, 0, 1).unwrap();
    assert_eq!(chunk(&mut subscriber, 0, 2), Err(ProtocolViolation::DuplicateChunk(ChunkIndex(0))));
    let mut subscriber = running();
    for index in 0..CREDIT {
        chunk(&mut subscriber, index, index.into()).unwrap();
    }
    assert_eq!(chunk(&mut subscriber, CREDIT, 9), Err(ProtocolViolation::CreditExceeded));

    // Chunks that arrive before their announcement cost credit, and are checked once the version is placed.
    let mut subscriber = idle();
    for index in 0..CREDIT {
        chunk(&mut subscriber, index % 2, index.into()).unwrap();
    }
    assert_eq!(chunk(&mut subscriber, 3, 9), Err(ProtocolViolation::CreditExceeded));
    subscriber.handle_manifest(Manifest::clone(&manifest(CHUNKS))).unwrap();
    subscriber.handle_announce(announce(1, &manifest(CHUNKS)), now(), 0).unwrap();
    assert_eq!(subscriber.handle_placed(None), Err(ProtocolViolation::DuplicateChunk(ChunkIndex(0))));
}

#[test]
fn messages_about_other_versions_are_refused() {
    let version_digest = VersionDigest([0; 32]);
    let is_refused =
        |result: Result<(), ProtocolViolation>| matches!(result, Err(ProtocolViolation::WrongVersion { .. }));
    assert!(is_refused(idle().handle_complete(key_of(1), version_digest)));
    assert!(is_refused(running().handle_complete(key_of(2), version_digest)));
    assert!(is_refused(idle().handle_abort(key_of(1), AbortReason::Withdrawn)));
    assert!(is_refused(running().handle_abort(key_of(2), AbortReason::Withdrawn)));
    assert!(is_refused(idle().handle_waiting(key_of(1), now(), 0)));
    assert!(is_refused(running().handle_waiting(key_of(2), now(), 0)));
    // Messages that crossed this end's `Abort` are allowed.
    let mut subscriber = running();
    subscriber.give_up(AbortReason::DeviceFailed);
    assert_eq!(subscriber.handle_complete(key_of(1), version_digest), Ok(()));
    assert_eq!(subscriber.handle_abort(key_of(1), AbortReason::Withdrawn), Ok(()));
    assert_eq!(subscriber.handle_waiting(key_of(1), now(), 0), Ok(()));
    assert_eq!(chunk(&mut subscriber, 2, 7), Ok(()), "a chunk that was in flight");
    assert!(matches!(actions(&mut subscriber).last(), Some(Action::Discard(StreamToken(7)))));
}

/// `Complete` may overtake the manifest, which is sent on a data stream.
#[test]
fn complete_may_arrive_before_the_manifest() {
    let mut subscriber = idle();
    subscriber.handle_announce(announce(1, &manifest(CHUNKS)), now(), 0).unwrap();
    let version_digest = digest(&Selection::all(manifest(CHUNKS)));
    let refused = subscriber.handle_complete(key_of(2), version_digest);
    assert!(matches!(refused, Err(ProtocolViolation::WrongVersion { .. })), "{refused:?}");
    subscriber.handle_complete(key_of(1), version_digest).unwrap();
    subscriber.handle_manifest(Manifest::clone(&manifest(CHUNKS))).unwrap();
    subscriber.handle_placed(None).unwrap();
    for index in 0..CHUNKS {
        chunk(&mut subscriber, index, index.into()).unwrap();
        subscriber.handle_verified(StreamToken(index.into()), verified(index));
    }
    assert!(matches!(actions(&mut subscriber).pop(), Some(Action::Commit(_))));
}

#[test]
fn without_a_current_version_there_is_no_stall() {
    let mut subscriber = idle();
    for timeouts in 1..10 {
        subscriber.handle_timeout(now() + STALL_TIMEOUT * timeouts, 0);
        assert_eq!(actions(&mut subscriber).len(), 0, "after {timeouts} timeouts");
    }
}

/// `Subscribe` names the committed version as a base only if the client still holds a copy.
#[test]
fn a_discarded_base_is_not_named() {
    for base in [None, Some(key_of(1))] {
        let mut subscriber = running();
        commit(&mut subscriber);
        subscriber.handle_detached(CREDIT);
        subscriber.subscribe(base);
        let sent = messages(&mut subscriber);
        let [ClientMessage::Subscribe(subscribe)] = &sent[..] else { panic!("{sent:?}") };
        assert_eq!(subscribe.base.is_some(), base.is_some());
    }
}

#[test]
fn a_wrong_digest_is_never_committed() {
    let mut subscriber = running();
    subscriber.handle_complete(key_of(1), VersionDigest([7; 32])).unwrap();
    for index in 0..CHUNKS {
        chunk(&mut subscriber, index, index.into()).unwrap();
        subscriber.handle_verified(StreamToken(index.into()), verified(index));
    }
    let last = actions(&mut subscriber).pop();
    assert!(matches!(last, Some(Action::Fail(VersionFault::Mismatch { .. }))), "{last:?}");
}

#[test]
fn a_resumed_version_must_have_the_same_manifest() {
    let mut subscriber = running();
    chunk(&mut subscriber, 2, 2).unwrap();
    subscriber.handle_verified(StreamToken(2), verified(2));
    subscriber.handle_detached(CREDIT);
    subscriber.subscribe(None);
    let other = Announce { manifest: ManifestDigest([9; 32]), ..announce(1, &manifest(CHUNKS)) };
    assert_eq!(subscriber.handle_announce(other, now(), 0), Err(ProtocolViolation::WrongManifest));
}

#[test]
fn the_part_of_another_version_is_released() {
    let mut subscriber = running();
    subscriber.handle_detached(CREDIT);
    assert!(subscriber.is_receiving(), "version 1 may be resumed");
    subscriber.handle_announce(announce(2, &manifest(CHUNKS)), now(), 0).unwrap();
    let [Action::Release { id: released, reason: Released::Replaced }, Action::Place { resumes: false, .. }] =
        &actions(&mut subscriber)[..]
    else {
        panic!("not `Release` and `Place`")
    };
    assert_eq!(*released, id(1));
}

/// PROTOCOL.md §6.8: what is arriving is not requested, and what is lost afterwards is.
#[test]
fn missing_chunks_are_requested_within_the_allowance() {
    let mut subscriber = running();
    for index in 0..3 {
        chunk(&mut subscriber, index, index.into()).unwrap();
    }
    let _ = actions(&mut subscriber);
    subscriber.handle_lost(StreamToken(0));
    assert_eq!(messages(&mut subscriber), [], "its lane was not retired");
    subscriber.handle_retired(fixtures::SUBSCRIPTION);
    assert_eq!(messages(&mut subscriber), [request_range(0..1)], "chunks 1 and 2 arrive");
    subscriber.handle_lost(StreamToken(1));
    assert_eq!(messages(&mut subscriber), [request_range(1..2)]);
    subscriber.handle_verified(StreamToken(2), verified(2));
    assert_eq!(messages(&mut subscriber), [request_range(3..4)]);
    for index in [0, 1, 3] {
        assert_eq!(chunk(&mut subscriber, index, 9 + u64::from(index)), Ok(()), "requested, without credit");
    }
}

/// A chunk that was lost with its lane for the server may arrive all the same. The second stream is kept until the first
/// one ends, since that may still be lost.
#[test]
fn a_second_stream_of_a_chunk_replaces_a_lost_one() {
    let mut subscriber = running();
    subscriber.handle_retired(fixtures::SUBSCRIPTION);
    assert_eq!(messages(&mut subscriber), [request_range(0..CREDIT)]);
    let is_received =
        |action: &Action, token| matches!(action, Action::Receive { stream, .. } if stream.0 == token);
    chunk(&mut subscriber, 0, 1).unwrap();
    assert!(is_received(&actions(&mut subscriber)[0], 1));
    chunk(&mut subscriber, 0, 2).unwrap();
    assert!(actions(&mut subscriber).is_empty(), "it waits");
    chunk(&mut subscriber, 0, 3).unwrap();
    assert!(matches!(&actions(&mut subscriber)[..], [Action::Discard(StreamToken(3))]), "one is enough");
    subscriber.handle_lost(StreamToken(1));
    assert!(is_received(&actions(&mut subscriber)[0], 2));
    chunk(&mut subscriber, 0, 4).unwrap();
    subscriber.handle_verified(StreamToken(2), verified(0));
    assert!(matches!(actions(&mut subscriber)[0], Action::Discard(StreamToken(4))));
    for token in 5..5 + u64::from(2 * CREDIT) {
        chunk(&mut subscriber, 0, token).expect("it costs no credit");
        assert!(
            matches!(&actions(&mut subscriber)[..], [Action::Discard(discarded)] if discarded.0 == token)
        );
    }
}

/// The streams of a version that is given up are not read.
#[test]
fn second_streams_end_with_their_version() {
    let mut subscriber = running();
    subscriber.handle_retired(fixtures::SUBSCRIPTION);
    let _ = actions(&mut subscriber);
    chunk(&mut subscriber, 0, 1).unwrap();
    chunk(&mut subscriber, 0, 2).unwrap();
    subscriber.give_up(AbortReason::OverBudget);
    let discarded = actions(&mut subscriber);
    assert!(
        discarded.iter().any(|action| matches!(action, Action::Discard(StreamToken(2)))),
        "{discarded:?}"
    );
}

/// PROTOCOL.md §6.8: an allowance of any size asks for at least one chunk, and for no more than fit a message.
#[test]
fn requests_are_bounded() {
    for (allowance, requested) in [(0, 1), (1, 1), (Credit::MAX, PARTIAL_RANGES_MAX as u32)] {
        let manifest = manifest(3_000);
        let (codecs, timeout) = (codecs(), Duration::from_secs(30));
        let mut subscriber = Subscriber::new(request(Mode::Latest, allowance), codecs, timeout, now());
        subscriber.subscribe(None);
        subscriber.handle_announce(announce(1, &manifest), now(), 0).unwrap();
        subscriber.handle_manifest(Manifest::clone(&manifest)).unwrap();
        subscriber.handle_placed(None).unwrap();
        let _ = actions(&mut subscriber);
        subscriber.handle_retired(fixtures::SUBSCRIPTION);
        assert_eq!(messages(&mut subscriber), [request_range(0..requested)]);
    }
}

/// After a version that was requested, both ends begin with the whole credit again.
#[test]
fn credit_is_granted_again_after_a_requested_version() {
    let mut subscriber = running();
    subscriber.handle_retired(fixtures::SUBSCRIPTION);
    let _ = actions(&mut subscriber);
    subscriber.set_allowance(CREDIT + 1);
    for index in 0..CHUNKS {
        chunk(&mut subscriber, index, index.into()).unwrap();
        subscriber.handle_verified(StreamToken(index.into()), verified(index));
        let _ = actions(&mut subscriber);
    }
    subscriber
        .handle_complete(key_of(1), digest(&select(manifest(CHUNKS), &[0, 1, 2, 3])))
        .unwrap();
    assert!(matches!(&actions(&mut subscriber)[..], [Action::Commit(_)]));
    subscriber.handle_committed(false);
    let sent = messages(&mut subscriber);
    let credit = ClientMessage::Credit { subscription: fixtures::SUBSCRIPTION, chunks: CREDIT + 1 };
    assert!(matches!(&sent[..], [ClientMessage::Committed { .. }, last] if *last == credit), "{sent:?}");
    subscriber.handle_announce(announce(2, &manifest(CHUNKS)), now(), 0).unwrap();
    for index in 0..CREDIT + 1 {
        subscriber
            .handle_chunk(header(2, index), StreamToken(90 + u64::from(index)))
            .unwrap();
    }
    let exceeded = subscriber.handle_chunk(header(2, 0), StreamToken(99));
    assert_eq!(exceeded, Err(ProtocolViolation::CreditExceeded), "the credit of version 1 is void");
}

/// A lane is retired before the manifest arrives.
#[test]
fn chunks_lost_before_the_manifest_are_requested() {
    let mut subscriber = idle();
    subscriber.handle_announce(announce(1, &manifest(CHUNKS)), now(), 0).unwrap();
    chunk(&mut subscriber, 0, 0).unwrap();
    subscriber.handle_retired(fixtures::SUBSCRIPTION);
    assert!(actions(&mut subscriber).is_empty());
    subscriber.handle_manifest(Manifest::clone(&manifest(CHUNKS))).unwrap();
    subscriber.handle_placed(None).unwrap();
    assert_eq!(messages(&mut subscriber), [request_range(1..CREDIT)], "chunk 0 may arrive");
    subscriber.handle_lost(StreamToken(0));
    assert_eq!(messages(&mut subscriber), [request_range(0..1)]);
}

#[test]
fn lanes_retired_between_versions_cause_no_request() {
    let mut subscriber = idle();
    subscriber.handle_retired(fixtures::SUBSCRIPTION);
    subscriber.handle_announce(announce(1, &manifest(CHUNKS)), now(), 0).unwrap();
    subscriber.handle_manifest(Manifest::clone(&manifest(CHUNKS))).unwrap();
    subscriber.handle_placed(None).unwrap();
    assert_eq!(messages(&mut subscriber), []);
}

#[test]
fn a_version_that_is_given_up_is_released_and_its_credit_granted_again() {
    for by_server in [true, false] {
        let mut subscriber = running();
        subscriber.set_allowance(2 * CREDIT);
        chunk(&mut subscriber, 0, 0).unwrap();
        let _ = actions(&mut subscriber);
        match by_server {
            true => subscriber.handle_abort(key_of(1), AbortReason::Withdrawn).unwrap(),
            false => subscriber.give_up(AbortReason::Withdrawn),
        }
        let released =
            if by_server { Released::ByServer(AbortReason::Withdrawn) } else { Released::ByClient };
        let [Action::Release { reason, .. }, Action::Send(abort), Action::Send(credit)] =
            &actions(&mut subscriber)[..]
        else {
            panic!("not `Release`, `Abort` and `Credit`")
        };
        assert_eq!(*reason, released);
        assert!(matches!(abort, ClientMessage::Abort { reason: AbortReason::Withdrawn, .. }));
        assert!(matches!(credit, ClientMessage::Credit { chunks: 6, .. }), "{credit:?}");
        subscriber.handle_verified(StreamToken(0), verified(0));
        subscriber.handle_lost(StreamToken(0));
        assert!(subscriber.poll().is_none(), "a late chunk is ignored");
    }
}

#[test]
fn a_version_without_progress_fails() {
    let begun = now();
    let mut subscriber = idle();
    assert_eq!(subscriber.timeout_at(), None, "there is no version");
    subscriber.handle_announce(announce(1, &manifest(CHUNKS)), begun, 100).unwrap();
    assert_eq!(subscriber.timeout_at(), Some(begun + Duration::from_secs(1)));
    subscriber.handle_timeout(begun + STALL_TIMEOUT, 101);
    let sent = messages(&mut subscriber);
    assert!(matches!(sent[..], [ClientMessage::Credit { chunks: 0, .. }]), "a byte was received: {sent:?}");
    subscriber.handle_waiting(key_of(1), begun + 2 * STALL_TIMEOUT, 101).unwrap();
    assert!(matches!(actions(&mut subscriber)[..], [Action::Waiting]));
    subscriber.handle_timeout(begun + 2 * STALL_TIMEOUT + Duration::from_secs(1), 101);
    assert_eq!(actions(&mut subscriber).len(), 0, "the server waits too");
    subscriber.handle_timeout(begun + 3 * STALL_TIMEOUT, 101);
    assert!(matches!(subscriber.poll(), Some(Action::Fail(VersionFault::Stalled(STALL_TIMEOUT)))));
    subscriber.end_subscription(AbortReason::Stalled, true);
    let sent = messages(&mut subscriber);
    assert!(
        matches!(
            sent[..],
            [ClientMessage::Abort { .. }, ClientMessage::Unsubscribe { keep_place: true, .. }]
        ),
        "{sent:?}"
    );
}

/// PROTOCOL.md §6.6: `Complete` is not valid for the next connection.
#[test]
fn each_connection_needs_a_complete() {
    let mut subscriber = running();
    let version_digest = digest(subscriber.selection().unwrap());
    subscriber.handle_complete(key_of(1), version_digest).unwrap();
    for index in 0..CREDIT {
        chunk(&mut subscriber, index, index.into()).unwrap();
        subscriber.handle_verified(StreamToken(index.into()), verified(index));
    }
    subscriber.handle_detached(CREDIT);
    assert_eq!(subscriber.resumable_chunks(), Some(RangeSet::from_range(0..3)));
    subscriber.subscribe(None);
    let again = Announce { skipped: 2, ..announce(1, &manifest(CHUNKS)) };
    subscriber.handle_announce(again.clone(), now(), 0).unwrap();
    subscriber.handle_placed(None).unwrap();
    chunk(&mut subscriber, 3, 9).unwrap();
    subscriber.handle_verified(StreamToken(9), verified(3));
    assert!(
        !actions(&mut subscriber)
            .iter()
            .any(|action| matches!(action, Action::Commit(_)))
    );
    subscriber.handle_complete(key_of(1), version_digest).unwrap();
    let Some(Action::Commit(commit)) = actions(&mut subscriber).pop() else { panic!("not a commit") };
    assert_eq!((commit.reconnections, commit.chunks), (1, CHUNKS));
    assert_eq!(commit.announce, again, "the latest announcement counts");
}

/// An acknowledgement made without a connection is sent on the next one, after `Subscribe`.
#[test]
fn subscribe_is_the_first_message() {
    let mut subscriber = Subscriber::new(request(Mode::Every, CREDIT), codecs(), STALL_TIMEOUT, now());
    subscriber.acknowledge(fixtures::EPOCH, Version(3));
    subscriber.subscribe(None);
    let sent = messages(&mut subscriber);
    assert!(
        matches!(
            sent[..],
            [ClientMessage::Subscribe(_), ClientMessage::Acknowledge { version: Version(3), .. }]
        ),
        "{sent:?}"
    );
}

/// Receives all of version 1 and commits it.
fn commit(subscriber: &mut Subscriber) {
    let version_digest = digest(subscriber.selection().unwrap());
    for index in 0..CHUNKS {
        chunk(subscriber, index, index.into()).unwrap();
        subscriber.handle_verified(StreamToken(index.into()), verified(index));
    }
    subscriber.handle_complete(key_of(1), version_digest).unwrap();
    assert!(matches!(actions(subscriber).pop(), Some(Action::Commit(_))));
    assert!(!subscriber.has_committed());
    subscriber.handle_committed(true);
    assert!(subscriber.has_committed());
    let _ = actions(subscriber);
}

/// PROTOCOL.md §6.6: another server has other content under the number of the held version.
#[test]
fn a_version_with_other_content_is_received_afresh() {
    let afresh = Announce { afresh: true, ..announce(1, &manifest(CHUNKS)) };
    let mut subscriber = running();
    commit(&mut subscriber);
    let refused = subscriber.handle_announce(afresh.clone(), now(), 0);
    assert_eq!(refused, Err(ProtocolViolation::UnexpectedAfresh(Version(1))), "not named on this connection");

    let mut subscriber = running();
    commit(&mut subscriber);
    subscriber.handle_detached(CREDIT);
    subscriber.subscribe(Some(key_of(1)));
    let [ClientMessage::Subscribe(subscribe)] = &messages(&mut subscriber)[..] else {
        panic!("not a `Subscribe`")
    };
    let version_digest = digest(subscriber.selection().unwrap());
    assert_eq!(subscribe.have.map(|have| (have.key(), have.digest)), Some((key_of(1), version_digest)));
    assert_eq!(subscribe.base, subscribe.have);
    chunk(&mut subscriber, 0, 20).unwrap(); // Overtakes its announcement.
    subscriber.handle_announce(afresh, now(), 0).unwrap();
    subscriber.handle_placed(None).unwrap();
    assert!(
        actions(&mut subscriber)
            .iter()
            .any(|action| matches!(action, Action::Receive { .. }))
    );
    subscriber.handle_verified(StreamToken(20), verified(0));
    for index in 1..CHUNKS {
        chunk(&mut subscriber, index, index.into()).unwrap();
        subscriber.handle_verified(StreamToken(index.into()), verified(index));
    }
    subscriber.handle_complete(key_of(1), version_digest).unwrap();
    let Some(Action::Commit(commit)) = actions(&mut subscriber).pop() else { panic!("not a commit") };
    assert!(commit.new_epoch && commit.gap.is_none());
}

/// A partly received version is announced afresh: held chunks are discarded, and the manifest may differ.
#[test]
fn a_part_of_other_content_is_discarded() {
    let mut subscriber = running();
    chunk(&mut subscriber, 2, 2).unwrap();
    subscriber.handle_verified(StreamToken(2), verified(2));
    subscriber.handle_detached(CREDIT);
    subscriber.subscribe(None);
    let _ = actions(&mut subscriber);
    let afresh = Announce { afresh: true, ..announce(1, &manifest(CHUNKS + 1)) };
    subscriber.handle_announce(afresh, now(), 0).unwrap();
    let action = subscriber.poll();
    assert!(matches!(action, Some(Action::Release { reason: Released::Replaced, .. })), "{action:?}");
    assert_eq!((subscriber.held_bytes(), subscriber.is_receiving()), (0, false), "the manifest is missing");
}

#[test]
fn streams_of_a_lost_connection_are_cleared() {
    let mut subscriber = running();
    chunk(&mut subscriber, 0, 0).unwrap();
    subscriber.handle_detached(CREDIT);
    assert!(!subscriber.is_receiving_chunk(StreamToken(0)));
    subscriber.subscribe(None);
    subscriber.handle_announce(announce(1, &manifest(CHUNKS)), now(), 0).unwrap();
    subscriber.handle_placed(None).unwrap();
    let _ = actions(&mut subscriber);
    subscriber.handle_retired(fixtures::SUBSCRIPTION);
    assert_eq!(messages(&mut subscriber), [request_range(0..CREDIT)]);
}

/// A version given up on one connection may be sent and committed on the next.
#[test]
fn a_version_that_was_given_up_may_be_sent_again() {
    let mut subscriber = running();
    subscriber.give_up(AbortReason::OverBudget);
    subscriber.handle_detached(CREDIT);
    subscriber.subscribe(None);
    subscriber.handle_announce(announce(1, &manifest(CHUNKS)), now(), 0).unwrap();
    subscriber.handle_placed(None).unwrap();
    commit(&mut subscriber);
}
