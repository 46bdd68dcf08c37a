//! The client's messages, before, during and between transfers.

use super::topic::{EPOCH, Numbered, Numbers};
use crate::*;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const SUBSCRIPTION: SubscriptionId = SubscriptionId(1);
pub(super) const VERSION: Version = Version(1);
const MANIFEST: ManifestDigest = ManifestDigest([7; 32]);

fn all() -> RangeSet {
    RangeSet::from_range(0..u32::MAX)
}

pub(super) fn subscribe(credit: u32) -> Subscribe {
    Subscribe::latest(SUBSCRIPTION, Topic::new("t").unwrap(), credit)
}

/// A topic with one version of two chunks.
pub(super) fn topic() -> Numbers {
    let mut topic = Numbers::new(1, false);
    topic.publish(MANIFEST);
    topic
}

pub(super) fn sender(topic: &Numbers, subscribe: &Subscribe) -> Sender<Numbered> {
    Sender::new(topic, subscribe, FeatureSet::OF_CLIENT, topic.place(), None).unwrap()
}

/// The selection of both chunks of a version.
pub(super) fn two_chunks() -> Arc<Selection> {
    Arc::new(Selection::all(subscriber::fixtures::manifest(2)))
}

/// The next actions, each chunk on `lane`. A version that begins has two chunks.
pub(super) fn actions(
    sender: &mut Sender<Numbered>,
    topic: &Numbers,
    lane: u32,
) -> Vec<SenderAction<Numbered>> {
    let mut actions = vec![];
    while let Some(action) = sender.poll(topic, Some(LaneId(lane))) {
        if matches!(action, SenderAction::Announce(_)) {
            sender.handle_selected(two_chunks());
        }
        actions.push(action);
    }
    actions
}

/// The chunks begun next, on `lane`.
pub(super) fn chunks(sender: &mut Sender<Numbered>, topic: &Numbers, lane: u32) -> Vec<u32> {
    let sends = actions(sender, topic, lane).into_iter();
    let chunk = |action| match action {
        SenderAction::Send(SendAction::Chunk(chunk, LaneId(on))) if on == lane => Some(chunk.0),
        _ => None,
    };
    sends.filter_map(chunk).collect()
}

/// The first chunk of a version, as the client claims to hold it.
fn part(version: Version) -> Partial {
    let (chunks, digest) = (RangeSet::from_range(0..1), VersionDigest([1; 32]));
    Partial { epoch: EPOCH, version, chunks, digest }
}

/// Compares the claim that is due.
fn compare(sender: &mut Sender<Numbered>, topic: &Numbers, is_same: bool) {
    assert!(matches!(sender.poll(topic, None), Some(SenderAction::Compare(..))));
    sender.handle_compared(topic, is_same);
}

/// A version under way, whose two chunks were begun on lane 1.
fn begun() -> (Sender<Numbered>, Numbers) {
    let topic = topic();
    let mut sender = sender(&topic, &subscribe(2));
    assert_eq!(chunks(&mut sender, &topic, 1), [0, 1]);
    (sender, topic)
}

/// The same, with both chunks and `Complete` sent.
fn complete() -> (Sender<Numbered>, Numbers) {
    let (mut sender, topic) = begun();
    for chunk in 0..2 {
        sender.handle_sent(SendAction::Chunk(ChunkIndex(chunk), LaneId(1)));
    }
    let sent = actions(&mut sender, &topic, 1);
    assert!(matches!(sent[..], [SenderAction::Send(SendAction::Complete)]), "{sent:?}");
    (sender, topic)
}

/// Hands in a message, with lane 1 retired.
pub(super) fn tell(sender: &mut Sender<Numbered>, message: ClientMessage) -> Result<bool, ProtocolViolation> {
    let (subscription, message) = SubscriptionMessage::of(message).unwrap();
    assert_eq!(subscription, SUBSCRIPTION);
    sender.handle_message(message, |lane| lane != LaneId(1))
}

fn credit(chunks: u32) -> ClientMessage {
    ClientMessage::Credit { subscription: SUBSCRIPTION, chunks }
}

pub(super) fn request(version: Version, chunks: RangeSet) -> ClientMessage {
    ClientMessage::Request {
        subscription: SUBSCRIPTION,
        epoch: EPOCH,
        version,
        chunks,
        hashes: false,
        again: false,
    }
}

pub(super) fn committed(version: Version) -> ClientMessage {
    ClientMessage::Committed { subscription: SUBSCRIPTION, epoch: EPOCH, version, kept: true }
}

fn abort(version: Version) -> ClientMessage {
    let reason = AbortReason::Stalled;
    ClientMessage::Abort { subscription: SUBSCRIPTION, epoch: EPOCH, version, reason }
}

#[test]
fn a_request_begins_lost_chunks_again_once() {
    let (mut sender, topic) = begun();
    assert_eq!(tell(&mut sender, request(VERSION, RangeSet::from_range(0..1))), Ok(true));
    for _ in 0..3 {
        let again = tell(&mut sender, request(VERSION, RangeSet::from_range(0..1)));
        assert_eq!(again, Ok(false), "repetition is no progress");
    }
    assert_eq!(chunks(&mut sender, &topic, 0), [0], "without credit");
    assert_eq!(tell(&mut sender, request(VERSION, RangeSet::from_range(0..1))), Ok(false), "lane 0 lives");
    assert_eq!(tell(&mut sender, request(VERSION, RangeSet::from_range(2..u32::MAX))), Ok(false));
}

/// PROTOCOL.md §6.8: what may be pushed is not known to both ends after a loss.
#[test]
fn a_request_voids_the_credit() {
    let topic = topic();
    let mut sender = sender(&topic, &subscribe(1));
    assert_eq!(chunks(&mut sender, &topic, 0), [0]);
    assert_eq!(tell(&mut sender, credit(1)), Ok(true));
    assert_eq!(tell(&mut sender, request(VERSION, RangeSet::new())), Ok(false));
    assert_eq!(chunks(&mut sender, &topic, 0), [0; 0], "chunk 1 was not requested");
    assert_eq!(tell(&mut sender, request(VERSION, all())), Ok(true));
    assert_eq!(chunks(&mut sender, &topic, 0), [1]);
}

#[test]
fn only_the_version_under_way_may_be_named() {
    for version in [Version(0), Version(2)] {
        let wrong = Err(ProtocolViolation::WrongVersion { epoch: EPOCH, version });
        for message in [request(version, all()), committed(version), abort(version)] {
            assert_eq!(tell(&mut begun().0, message), wrong);
        }
        let mut idle = sender(&Numbers::new(1, false), &subscribe(1));
        assert_eq!(tell(&mut idle, request(version, all())), wrong, "nothing is under way");
    }
    assert_eq!(SubscriptionMessage::of(ClientMessage::List), Err(ClientMessage::List), "of the session");
}

#[test]
fn a_commit_before_complete_is_refused() {
    let (mut sender, _) = begun();
    assert!(matches!(tell(&mut sender, committed(VERSION)), Err(ProtocolViolation::OutOfTurn { .. })));
    let (mut sender, topic) = complete();
    assert_eq!(tell(&mut sender, committed(VERSION)), Ok(false));
    let next = actions(&mut sender, &topic, 0);
    assert!(matches!(&next[..], [SenderAction::Committed { kept: true, .. }]), "{next:?}");
}

#[test]
fn a_version_that_was_given_up_waits_for_the_client() {
    let (mut sender, mut topic) = begun();
    topic.publish(MANIFEST);
    for _ in 0..2 {
        sender.give_up(AbortReason::Withdrawn);
    }
    let given_up = actions(&mut sender, &topic, 0);
    assert!(matches!(&given_up[..], [SenderAction::Abort(_, AbortReason::Withdrawn)]), "once: {given_up:?}");
    assert_eq!(tell(&mut sender, credit(4)), Ok(false), "no progress");
    assert_eq!(tell(&mut sender, request(VERSION, all())), Ok(false));
    let subscription = SUBSCRIPTION;
    let acknowledge = ClientMessage::Acknowledge { subscription, epoch: EPOCH, version: VERSION };
    assert_eq!(tell(&mut sender, acknowledge), Ok(false));
    assert_eq!(actions(&mut sender, &topic, 0), [SenderAction::Acknowledge(EPOCH, VERSION)]);
    assert_eq!(tell(&mut sender, abort(VERSION)), Ok(false));
    assert_eq!(tell(&mut sender, credit(2)), Ok(false));
    let next = actions(&mut sender, &topic, 0);
    let [SenderAction::Aborted(..), SenderAction::ReleaseBase, SenderAction::Announce(second), ..] =
        &next[..]
    else {
        panic!("{next:?}")
    };
    assert_eq!((second.version.key(), second.skipped), ((EPOCH, Version(2)), 1));
    let manifest = SenderAction::Send(SendAction::Manifest);
    assert!(next.contains(&manifest), "it may not have arrived before the abort: {next:?}");
}

#[test]
fn the_manifest_of_the_last_commit_is_not_sent_again() {
    let (mut sender, mut topic) = complete();
    tell(&mut sender, committed(VERSION)).unwrap();
    topic.publish(MANIFEST);
    let manifest = SenderAction::Send(SendAction::Manifest);
    assert!(!actions(&mut sender, &topic, 0).contains(&manifest));
    let mut other = self::sender(&topic, &Subscribe { manifest: Some(MANIFEST), ..subscribe(1) });
    assert!(!actions(&mut other, &topic, 0).contains(&manifest), "the client has it");
    let mut other =
        self::sender(&topic, &Subscribe { manifest: Some(ManifestDigest([0; 32])), ..subscribe(1) });
    assert!(actions(&mut other, &topic, 0).contains(&manifest));
}

#[test]
fn messages_about_the_previous_version_are_passed_over() {
    let mut idle = sender(&Numbers::new(1, false), &subscribe(1));
    for message in [abort(VERSION), committed(VERSION), credit(4)] {
        assert_eq!(tell(&mut idle, message), Ok(false));
    }
}

#[test]
fn excessive_credit_is_refused() {
    let (mut sender, topic) = begun();
    assert_eq!(tell(&mut sender, credit(0)), Ok(true), "bytes arrived");
    assert_eq!(tell(&mut sender, credit(1)), Ok(true));
    assert!(matches!(tell(&mut sender, credit(Credit::MAX)), Err(ProtocolViolation::CreditOverflow(_))));
    let refused =
        Sender::new(&topic, &subscribe(Credit::MAX + 1), FeatureSet::OF_CLIENT, topic.place(), None);
    assert!(matches!(refused.map(drop), Err(ProtocolViolation::CreditOverflow(_))));
}

#[test]
fn a_newer_version_supersedes_one_under_way_if_the_client_asks_for_that() {
    for preempt in [false, true] {
        let mut topic = topic();
        let mut sender = sender(&topic, &Subscribe { preempt, ..subscribe(1) });
        let _ = actions(&mut sender, &topic, 0);
        sender.handle_changed(&topic);
        assert_eq!(actions(&mut sender, &topic, 0), []);
        topic.publish(MANIFEST);
        sender.handle_changed(&topic);
        let next = actions(&mut sender, &topic, 0);
        assert_eq!(
            matches!(&next[..], [SenderAction::Abort(_, AbortReason::Superseded)]),
            preempt,
            "{next:?}"
        );
    }
}

/// PROTOCOL.md §3.12 (1) and (4).
#[test]
fn one_version_ends_the_subscription() {
    let done = SenderAction::End(Ended::ByServer(EndReason::Done));
    let topic = topic();
    let once = Subscribe { once: true, ..subscribe(2) };
    let exactly = Subscribe { start: Start::Exactly(None, VERSION), ..once.clone() };
    for (request, ends_with_abort) in [(&once, false), (&exactly, true)] {
        let mut aborted = sender(&topic, request);
        let _ = actions(&mut aborted, &topic, 1);
        tell(&mut aborted, abort(VERSION)).unwrap();
        assert_eq!(actions(&mut aborted, &topic, 1).contains(&done), ends_with_abort);
        let mut whole = sender(&topic, request);
        let _ = actions(&mut whole, &topic, 1);
        (0..2).for_each(|chunk| whole.handle_sent(SendAction::Chunk(ChunkIndex(chunk), LaneId(1))));
        let _ = actions(&mut whole, &topic, 1);
        tell(&mut whole, committed(VERSION)).unwrap();
        assert_eq!(actions(&mut whole, &topic, 1).last(), Some(&done));
        assert_eq!(actions(&mut whole, &topic, 1), [], "no action follows");
    }
}

#[test]
fn a_client_that_unsubscribes_is_sent_no_end() {
    for keep_place in [false, true] {
        let (mut sender, topic) = begun();
        tell(&mut sender, ClientMessage::Unsubscribe { subscription: SUBSCRIPTION, keep_place }).unwrap();
        sender.end(EndReason::Evicted);
        assert_eq!(actions(&mut sender, &topic, 0), [SenderAction::End(Ended::ByClient { keep_place })]);
    }
}

/// While the server drains, mode `latest` begins no version, except the last one of a topic that ended.
#[test]
fn a_draining_server_begins_no_newest_version() {
    let mut topic = topic();
    let mut sender = sender(&topic, &subscribe(2));
    assert!(!sender.is_settled(&topic));
    sender.handle_draining();
    assert_eq!(actions(&mut sender, &topic, 0), []);
    assert!(sender.is_settled(&topic));
    topic.ended = Some(EndReason::TopicEnded);
    assert!(!sender.is_settled(&topic));
    assert!(matches!(actions(&mut sender, &topic, 0)[0], SenderAction::Announce(_)));
}

#[test]
fn a_subscription_is_settled_without_work_only() {
    let (mut sender, topic) = begun();
    sender.handle_draining();
    assert!(!sender.is_settled(&topic), "a version is under way");
    let have = Some(Have { epoch: EPOCH, version: VERSION, digest: VersionDigest([1; 32]) });
    let mut sender = self::sender(&topic, &Subscribe { have, ..subscribe(1) });
    assert!(matches!(sender.poll(&topic, None), Some(SenderAction::Compare(..))));
    sender.handle_draining();
    assert!(!sender.is_settled(&topic), "a claim is being compared");
    sender.handle_compared(&topic, true);
    assert!(sender.is_settled(&topic));
}

#[test]
fn a_draining_server_sends_what_readers_still_need() {
    let mut topic = Numbers::new(2, true);
    topic.publish(MANIFEST);
    let mut sender = sender(&topic, &Subscribe { mode: Mode::Every, start: Start::Oldest, ..subscribe(2) });
    sender.handle_draining();
    assert!(!sender.is_settled(&topic), "version 1 is to be sent");
    assert!(matches!(actions(&mut sender, &topic, 0)[0], SenderAction::Announce(_)));
}

/// An arbitrary instant.
#[expect(clippy::disallowed_methods, reason = "the clock is the only source of an instant")]
fn now() -> Instant {
    Instant::now()
}

#[test]
fn a_version_that_cannot_be_read_is_tried_again_while_no_other_waits() {
    let (mut sender, mut topic) = begun();
    let (send, began) = (SendAction::Chunk(ChunkIndex(0), LaneId(1)), now());
    let attempt = sender.handle_unread(&topic, send, began).unwrap();
    let version = topic.newest().unwrap().1;
    let expected = [SenderAction::Waiting(version), SenderAction::SendAgain(send, attempt.at)];
    assert_eq!(actions(&mut sender, &topic, 1), expected);
    sender.handle_unread(&topic, send, began).unwrap();
    let again = actions(&mut sender, &topic, 1);
    assert!(matches!(again[..], [SenderAction::SendAgain(..)]), "one message for a wait: {again:?}");
    topic.publish(MANIFEST);
    assert!(sender.handle_unread(&topic, send, attempt.at).is_none());
    let given_up = actions(&mut sender, &topic, 1);
    assert!(matches!(given_up[..], [SenderAction::Abort(_, AbortReason::SourceLost)]), "{given_up:?}");
}

/// In mode `every`, the next version waits for a while.
#[test]
fn a_version_that_cannot_be_read_delays_the_next_one_for_readers() {
    let mut topic = Numbers::new(9, true);
    topic.publish(MANIFEST);
    topic.publish(MANIFEST);
    let mut sender = sender(&topic, &Subscribe { mode: Mode::Every, start: Start::Oldest, ..subscribe(2) });
    let _ = actions(&mut sender, &topic, 1);
    let (send, began) = (SendAction::Chunk(ChunkIndex(0), LaneId(1)), now());
    assert!(sender.handle_unread(&topic, send, began).is_some());
    assert!(
        sender
            .handle_unread(&topic, send, began + super::super::UNREAD_TIMEOUT - Duration::from_millis(1))
            .is_some()
    );
    assert!(
        sender
            .handle_unread(&topic, send, began + super::super::UNREAD_TIMEOUT)
            .is_none()
    );
}

/// PROTOCOL.md §6.6 (8): what differs is not used, and what is the same is not sent again.
#[test]
fn claims_are_compared_before_the_first_version() {
    for is_same in [true, false] {
        let topic = topic();
        let partial = part(VERSION);
        let mut sender = sender(&topic, &Subscribe { partial: Some(partial), ..subscribe(2) });
        let compare = sender.poll(&topic, Some(LaneId(1)));
        let Some(SenderAction::Compare(claim, _)) = compare else { panic!("{compare:?}") };
        assert_eq!((claim.named, claim.chunks), (Named::Partial, Some(RangeSet::from_range(0..1))));
        assert_eq!(sender.poll(&topic, Some(LaneId(1))), None, "it waits for the result");
        sender.handle_compared(&topic, is_same);
        let next = actions(&mut sender, &topic, 1);
        let announced = next.iter().find_map(|action| match action {
            SenderAction::Announce(announcement) => Some(announcement),
            _ => None,
        });
        assert_eq!(announced.unwrap().afresh, !is_same);
        let expected: &[u32] = if is_same { &[1] } else { &[0, 1] };
        let sent: Vec<u32> = next
            .iter()
            .filter_map(|action| match action {
                SenderAction::Send(SendAction::Chunk(chunk, _)) => Some(chunk.0),
                _ => None,
            })
            .collect();
        assert_eq!(sent, expected);
        assert_eq!(next.contains(&SenderAction::ReleaseBase), !is_same);
    }
}

/// PROTOCOL.md §6.9 (3): the base of a partly received version is none for another.
#[test]
fn the_base_of_a_part_is_released_with_the_part() {
    let mut topic = Numbers::new(1, false);
    topic.publish(MANIFEST);
    topic.publish(MANIFEST);
    let partial = part(VERSION);
    let mut sender = sender(&topic, &Subscribe { partial: Some(partial), ..subscribe(2) });
    let next = actions(&mut sender, &topic, 1);
    assert!(matches!(next[..2], [SenderAction::ReleaseBase, SenderAction::Announce(_)]), "{next:?}");
    let sent = next
        .iter()
        .filter(|action| matches!(action, SenderAction::Send(SendAction::Chunk(..))))
        .count();
    assert_eq!(sent, 2, "no chunk of another version is held");
}

/// The actions up to the next announcement, which is the last of them.
fn announced(sender: &mut Sender<Numbered>, topic: &Numbers) -> Vec<SenderAction<Numbered>> {
    let mut actions = vec![];
    while let Some(action) = sender.poll(topic, None) {
        let is_last = matches!(action, SenderAction::Announce(_));
        actions.push(action);
        if is_last {
            break;
        }
    }
    actions
}

/// The announcement that is the next action but those of claims and acknowledgements.
fn announcement(sender: &mut Sender<Numbered>, topic: &Numbers) -> Announcement<Numbered> {
    match announced(sender, topic).pop() {
        Some(SenderAction::Announce(announcement)) => announcement,
        other => panic!("{other:?}"),
    }
}

fn have(version: u64) -> Option<Have> {
    Some(Have { epoch: EPOCH, version: Version(version), digest: VersionDigest([1; 32]) })
}

#[test]
fn only_the_newest_version_supersedes() {
    let mut topic = Numbers::new(9, true);
    topic.publish(MANIFEST);
    let preempt = Subscribe { preempt: true, start: Start::Oldest, ..subscribe(1) };
    for request in [
        Subscribe { mode: Mode::Every, ..preempt.clone() },
        Subscribe { start: Start::Exactly(None, VERSION), ..preempt },
    ] {
        let mut sender = sender(&topic, &request);
        let _ = actions(&mut sender, &topic, 0);
        topic.publish(MANIFEST);
        sender.handle_changed(&topic);
        assert_eq!(actions(&mut sender, &topic, 0), [], "{request:?}");
    }
}

/// PROTOCOL.md §3.12 (5): with `have`, `start` has no effect.
#[test]
fn a_version_by_its_number_has_no_effect_with_have() {
    let mut topic = Numbers::new(9, false);
    (0..3).for_each(|_| topic.publish(MANIFEST));
    let exactly = Start::Exactly(None, Version(9));
    let request = Subscribe { have: have(1), start: exactly, once: true, preempt: true, ..subscribe(2) };
    let mut sender = sender(&topic, &request);
    compare(&mut sender, &topic, true);
    assert_eq!(announcement(&mut sender, &topic).version.key(), (EPOCH, Version(3)));
    topic.publish(MANIFEST);
    sender.handle_changed(&topic);
    assert!(matches!(sender.poll(&topic, None), Some(SenderAction::Abort(_, AbortReason::Superseded))));
    let (subscription, reason) = (SUBSCRIPTION, AbortReason::Superseded);
    let abort = ClientMessage::Abort { subscription, epoch: EPOCH, version: Version(3), reason };
    tell(&mut sender, abort).unwrap();
    assert_eq!(announcement(&mut sender, &topic).version.key(), (EPOCH, Version(4)), "it has not ended");
}

#[test]
fn an_aborted_version_ends_only_what_wants_one() {
    let topic = topic();
    let mut sender = sender(&topic, &Subscribe { start: Start::Exactly(None, VERSION), ..subscribe(2) });
    let _ = actions(&mut sender, &topic, 1);
    tell(&mut sender, abort(VERSION)).unwrap();
    let ends = actions(&mut sender, &topic, 1)
        .iter()
        .any(|action| matches!(action, SenderAction::End(_)));
    assert!(!ends);
}

/// PROTOCOL.md §6.3 (9).
#[test]
fn a_reader_without_its_place_is_ended_during_a_transfer() {
    for (mode, ends) in [(Mode::Every, true), (Mode::Latest, false)] {
        let mut topic = Numbers::new(9, true);
        topic.publish(MANIFEST);
        let mut sender = sender(&topic, &Subscribe { mode, start: Start::Oldest, ..subscribe(2) });
        let _ = actions(&mut sender, &topic, 1);
        topic.lost_place = Some(EndReason::Replaced);
        sender.handle_changed(&topic);
        let expected = SenderAction::End(Ended::ByServer(EndReason::Replaced));
        assert_eq!(actions(&mut sender, &topic, 1).contains(&expected), ends, "{mode:?}");
    }
}

#[test]
fn a_read_that_succeeds_ends_the_failure() {
    let mut topic = Numbers::new(9, true);
    topic.publish(MANIFEST);
    let mut sender = sender(&topic, &Subscribe { mode: Mode::Every, start: Start::Oldest, ..subscribe(2) });
    let _ = actions(&mut sender, &topic, 1);
    let (send, began) = (SendAction::Chunk(ChunkIndex(0), LaneId(1)), now());
    let late = began + 2 * super::super::UNREAD_TIMEOUT;
    sender.handle_unread(&topic, send, began).unwrap();
    assert!(sender.handle_unread(&topic, send, late).is_some(), "no other version waits");
    topic.publish(MANIFEST);
    sender.handle_sent(send);
    let attempt = sender.handle_unread(&topic, send, late).expect("the first failure since then");
    assert!(attempt.failing.is_zero());
}

/// PROTOCOL.md §6.6 (8): a part with other content is not completed before the newest version.
#[test]
fn a_part_with_other_content_is_forgotten() {
    for (is_same, expected) in [(true, 1), (false, 2)] {
        let mut topic = Numbers::new(9, false);
        (0..2).for_each(|_| topic.publish(MANIFEST));
        let partial = part(VERSION);
        let mut sender = sender(&topic, &Subscribe { partial: Some(partial), ..subscribe(2) });
        compare(&mut sender, &topic, is_same);
        assert_eq!(announcement(&mut sender, &topic).version.key(), (EPOCH, Version(expected)));
    }
}

/// Claims are compared in this order, a base even if it is not retained.
#[test]
fn each_claim_is_compared() {
    let mut topic = Numbers::new(1, false);
    topic.publish(MANIFEST);
    topic.base = topic.newest().map(|(_, version)| version);
    topic.publish(MANIFEST);
    let partial = part(Version(2));
    let request = Subscribe { base: have(1), partial: Some(partial), have: have(2), ..subscribe(2) };
    let mut sender = sender(&topic, &request);
    for named in [Named::Base, Named::Partial, Named::Have] {
        let Some(SenderAction::Compare(claim, _)) = sender.poll(&topic, None) else { panic!("{named:?}") };
        assert_eq!((claim.named, claim.chunks.is_some()), (named, named == Named::Partial));
        sender.handle_compared(&topic, named != Named::Base);
        if named == Named::Base {
            assert_eq!(sender.poll(&topic, None), Some(SenderAction::ReleaseBase));
        }
    }
}

#[test]
fn a_client_is_told_of_its_lost_place_once() {
    let topic = topic();
    let place = Some(Place { epoch: EPOCH, version: Version(9) });
    let mut sender = Sender::new(&topic, &subscribe(2), FeatureSet::OF_CLIENT, topic.place(), place).unwrap();
    let first = announcement(&mut sender, &topic);
    assert_eq!((first.lost_place, first.is_ahead, first.afresh), (place, false, false));
    tell(&mut sender, abort(VERSION)).unwrap();
    let mut topic = topic;
    topic.publish(MANIFEST);
    assert_eq!(announcement(&mut sender, &topic).lost_place, None);
}

/// PROTOCOL.md §6.6 (8): the record from which the publisher continued was older than the client's version.
#[test]
fn a_client_that_is_ahead_receives_everything_afresh() {
    for (held, is_ahead) in [(2, false), (5, true)] {
        for mode in [Mode::Latest, Mode::Every] {
            let mut topic = Numbers::new(9, mode == Mode::Every);
            topic.is_behind = true;
            (0..2).for_each(|_| topic.publish(MANIFEST));
            let request = Subscribe { have: have(held), mode, window: 9, ..subscribe(2) };
            let mut sender = Sender::new(&topic, &request, FeatureSet::OF_CLIENT, Seq(2), None).unwrap();
            if !is_ahead {
                compare(&mut sender, &topic, true);
                assert_eq!(sender.poll(&topic, None), None, "{mode:?}: the client has version 2");
                continue;
            }
            let first = announcement(&mut sender, &topic);
            assert_eq!((first.is_ahead, first.afresh), (true, true));
            let expected = if mode == Mode::Every { 1 } else { 2 };
            assert_eq!(first.version.key(), (EPOCH, Version(expected)));
        }
    }
}

/// PROTOCOL.md §3.8 (4): what the client had acknowledged before the server published it again.
#[test]
fn versions_that_were_acknowledged_before_are_acknowledged_again() {
    for acknowledges in [true, false] {
        let mut topic = Numbers::new(9, true);
        let request = Subscribe { have: have(2), mode: Mode::Every, window: 9, ..subscribe(2) };
        let mut sender = sender(&topic, &request);
        if acknowledges {
            let subscription = SUBSCRIPTION;
            let acknowledge = ClientMessage::Acknowledge { subscription, epoch: EPOCH, version: Version(2) };
            tell(&mut sender, acknowledge).unwrap();
            let _ = sender.poll(&topic, None);
        }
        (0..3).for_each(|_| topic.publish(MANIFEST));
        compare(&mut sender, &topic, true);
        let told = announced(&mut sender, &topic);
        let acknowledged = |version| told.contains(&SenderAction::Acknowledge(EPOCH, Version(version)));
        assert_eq!([1, 2, 3].map(acknowledged), [acknowledges, acknowledges, false]);
    }
}

#[test]
fn versions_before_the_start_are_acknowledged() {
    let mut topic = Numbers::new(9, true);
    (0..3).for_each(|_| topic.publish(MANIFEST));
    let start = Start::At(None, Version(3));
    let mut sender = sender(&topic, &Subscribe { start, mode: Mode::Every, ..subscribe(2) });
    let expected = [1, 2].map(|version| SenderAction::Acknowledge(EPOCH, Version(version)));
    assert_eq!(announced(&mut sender, &topic)[..2], expected);
}

#[test]
fn a_version_that_was_given_up_does_not_fill_the_window() {
    let mut topic = Numbers::new(9, true);
    (0..3).for_each(|_| topic.publish(MANIFEST));
    let request = Subscribe { mode: Mode::Every, start: Start::Oldest, window: 1, ..subscribe(2) };
    let mut sender = sender(&topic, &request);
    let _ = actions(&mut sender, &topic, 1);
    tell(&mut sender, abort(VERSION)).unwrap();
    assert_eq!(announcement(&mut sender, &topic).version.key(), (EPOCH, Version(2)));
}

/// A resumed subscription goes on after what the client has, wherever it asked to start.
#[test]
fn what_the_client_has_decides_and_not_the_start() {
    let mut topic = Numbers::new(9, false);
    (0..2).for_each(|_| topic.publish(MANIFEST));
    let mut sender = sender(&topic, &Subscribe { have: have(1), start: Start::Next, ..subscribe(2) });
    compare(&mut sender, &topic, true);
    assert_eq!(announcement(&mut sender, &topic).version.key(), (EPOCH, Version(2)));
}

#[test]
fn with_preempt_a_part_of_an_older_version_is_not_completed() {
    for (preempt, expected) in [(false, 1), (true, 2)] {
        let mut topic = Numbers::new(9, false);
        (0..2).for_each(|_| topic.publish(MANIFEST));
        let partial = part(VERSION);
        let mut sender = sender(&topic, &Subscribe { partial: Some(partial), preempt, ..subscribe(2) });
        compare(&mut sender, &topic, true);
        assert_eq!(announcement(&mut sender, &topic).version.key(), (EPOCH, Version(expected)));
    }
}

/// The part of a version that was requested by its number does not hide the versions after it.
#[test]
fn the_newest_version_follows_one_by_its_number() {
    let mut topic = Numbers::new(9, false);
    topic.publish(MANIFEST);
    let partial = part(VERSION);
    let start = Start::Exactly(None, VERSION);
    let mut sender = sender(&topic, &Subscribe { partial: Some(partial), start, ..subscribe(2) });
    compare(&mut sender, &topic, true);
    assert_eq!(announcement(&mut sender, &topic).version.key(), (EPOCH, VERSION));
    topic.publish(MANIFEST);
    topic.ended = Some(EndReason::TopicEnded);
    tell(&mut sender, abort(VERSION)).unwrap();
    assert_eq!(announcement(&mut sender, &topic).version.key(), (EPOCH, Version(2)));
}
