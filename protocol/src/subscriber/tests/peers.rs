//! Tests of shared versions: what is ordered of whom, peers that lie or are silent, and a lost origin (PROTOCOL.md §3.15).

use super::{begin_of, subscriber};
use crate::{
    Announce, ChunkHash, ChunkHeader, ChunkIndex, CodecId, Consumer, EncodingEntry, EncodingHash, Held,
    LaneGrant, Mode, Source,
    subscriber::{
        fixtures::{EPOCH, SUBSCRIPTION, announce, hash, header, manifest, now, request, verified},
        *,
    },
};

const CHUNKS: u32 = 8;
const CREDIT: u32 = 8;
const VERSION: (Epoch, Version) = (EPOCH, Version(1));
const FIRST: SubscriptionId = SubscriptionId(10);
const SECOND: SubscriptionId = SubscriptionId(11);

fn entry(chunk: u32) -> EncodingEntry {
    let hash = EncodingHash([chunk as u8; 32]);
    EncodingEntry { chunk: ChunkIndex(chunk), codec: CodecId::Raw, base: None, hash }
}

fn entries(chunks: std::ops::Range<u32>) -> Vec<EncodingEntry> {
    chunks.map(entry).collect()
}

fn key_of(peer: SubscriptionId) -> [u8; 32] {
    [peer.0 as u8; 32]
}

fn sources(peers: &[SubscriptionId]) -> Vec<Source> {
    let grant = LaneGrant::new([9; 32]);
    let source = |peer| {
        let (key, chunks) = (key_of(peer), RangeSet::new());
        Source { addresses: vec![], key, grant, chunks, is_near: false }
    };
    peers.iter().copied().map(source).collect()
}

/// A subscriber that is receiving a shared version.
fn shared() -> Subscriber {
    let mut subscriber = subscriber(request(Mode::Latest, CREDIT));
    subscriber.subscribe(None);
    subscriber.handle_announce(shared_announce(SUBSCRIPTION), now(), 0).unwrap();
    subscriber.handle_manifest(Manifest::clone(&manifest(CHUNKS))).unwrap();
    subscriber.handle_placed(None).unwrap();
    let _ = actions(&mut subscriber);
    subscriber
}

fn shared_announce(subscription: SubscriptionId) -> Announce {
    Announce { subscription, shared: true, ..announce(1, &manifest(CHUNKS)) }
}

/// A subscriber with these peers, which hold nothing yet, and the entries of all chunks.
fn with_peers(peers: &[SubscriptionId]) -> Subscriber {
    let mut subscriber = shared();
    subscriber.set_further_allowance(8);
    subscriber.handle_encodings(VERSION, &entries(0..CHUNKS)).unwrap();
    subscriber.handle_sources(VERSION, sources(peers), true).unwrap();
    for peer in peers {
        subscriber.ask_peer(*peer, key_of(*peer), LaneGrant::new([9; 32]));
        subscriber.handle_announce(shared_announce(*peer), now(), 0).unwrap();
    }
    let _ = actions(&mut subscriber);
    subscriber
}

#[test]
fn a_version_has_peers_once_some_are_named() {
    assert!(!shared().has_peers());
    let mut subscriber = with_peers(&[FIRST]);
    assert!(subscriber.has_peers());
    subscriber.handle_sources(VERSION, vec![], true).unwrap();
    assert!(!subscriber.has_peers());
}

fn actions(subscriber: &mut Subscriber) -> Vec<Action> {
    std::iter::from_fn(|| subscriber.poll()).collect()
}

/// The chunks that are requested of each source.
fn requested(actions: &[Action]) -> Vec<(SubscriptionId, Vec<u32>)> {
    let requests = actions.iter().filter_map(|action| match action {
        Action::Send(ClientMessage::Request { subscription, chunks, hashes: false, .. }) => {
            Some((*subscription, chunks.iter().collect()))
        }
        _ => None,
    });
    requests.collect()
}

fn lied(actions: &[Action]) -> Vec<SubscriptionId> {
    let lied = actions.iter().filter_map(|action| match action {
        Action::PeerLied(source) => Some(*source),
        _ => None,
    });
    lied.collect()
}

fn hold(subscriber: &mut Subscriber, peer: SubscriptionId, chunks: std::ops::Range<u32>) {
    let (added, withdrawn) = (RangeSet::from_range(chunks), RangeSet::new());
    let held = Held { subscription: peer, epoch: EPOCH, version: Version(1), added, withdrawn };
    subscriber.handle_held(peer, &held).unwrap();
}

fn header_of(source: SubscriptionId, chunk: u32) -> ChunkHeader {
    ChunkHeader { subscription: source, ..header(1, chunk) }
}

/// The header of a chunk arrives on the stream with the chunk's number.
fn begin(subscriber: &mut Subscriber, source: SubscriptionId, chunk: u32) {
    subscriber
        .handle_chunk(header_of(source, chunk), StreamToken(chunk.into()))
        .unwrap();
}

fn receive(subscriber: &mut Subscriber, source: SubscriptionId, chunk: u32) {
    begin(subscriber, source, chunk);
    subscriber.handle_verified(StreamToken(chunk.into()), verified(chunk));
}

fn hashes() -> Vec<ChunkHash> {
    (0..CHUNKS).map(hash).collect()
}

/// A second passes, in which bytes arrive.
fn tick(subscriber: &mut Subscriber, seconds: &mut u64) -> Vec<Action> {
    *seconds += 1;
    subscriber.handle_timeout(now() + Duration::from_secs(*seconds), *seconds);
    actions(subscriber)
}

#[test]
fn a_peer_is_asked_with_its_grant() {
    let mut subscriber = shared();
    subscriber.handle_sources(VERSION, sources(&[FIRST]), false).unwrap();
    let named = actions(&mut subscriber);
    assert!(matches!(&named[..], [Action::Peers(sources)] if sources[0].key == key_of(FIRST)), "{named:?}");
    let grant = LaneGrant::new([5; 32]);
    subscriber.ask_peer(FIRST, key_of(FIRST), grant);
    let sent = actions(&mut subscriber);
    let [Action::Send(ClientMessage::Subscribe(subscribe))] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((subscribe.subscription, subscribe.credit, subscribe.grant), (FIRST, 0, Some(grant)));
    assert_eq!(subscribe.start, Start::Exactly(Some(EPOCH), Version(1)));
    assert_eq!((subscribe.once, &subscribe.consumer), (true, &Consumer::Nobody));
}

/// Lists that come before the manifest are used once the version can be received.
#[test]
fn what_comes_before_the_manifest_is_kept() {
    let mut subscriber = subscriber(request(Mode::Latest, CREDIT));
    subscriber.subscribe(None);
    subscriber.handle_announce(shared_announce(SUBSCRIPTION), now(), 0).unwrap();
    subscriber.handle_encodings(VERSION, &entries(0..2)).unwrap();
    subscriber.handle_sources(VERSION, sources(&[FIRST]), true).unwrap();
    assert!(!subscriber.wants_peers());
    subscriber.handle_chunk(header(1, 5), StreamToken(5)).unwrap();
    let early = actions(&mut subscriber);
    assert!(!early.iter().any(|action| matches!(action, Action::Peers(_))), "{early:?}");
    subscriber.handle_manifest(Manifest::clone(&manifest(CHUNKS))).unwrap();
    subscriber.handle_placed(None).unwrap();
    let begun = actions(&mut subscriber);
    assert!(begun.iter().any(|action| matches!(action, Action::Peers(_))), "{begun:?}");
    subscriber.handle_verified(StreamToken(5), verified(5));
    let after = actions(&mut subscriber);
    assert!(matches!(after[..], [Action::Send(ClientMessage::Credit { chunks: 1, .. })]), "{after:?}");
    subscriber.ask_peer(FIRST, key_of(FIRST), LaneGrant::new([9; 32]));
    subscriber.handle_announce(shared_announce(FIRST), now(), 0).unwrap();
    hold(&mut subscriber, FIRST, 1..2);
    assert_eq!(requested(&actions(&mut subscriber)), [(FIRST, vec![1])]);
}

/// Chunks are ordered of peers that hold them, with the origin's hash; the list of hashes is asked of the origin alone.
#[test]
fn what_a_peer_holds_is_ordered_and_checked() {
    let mut subscriber = with_peers(&[FIRST, SECOND]);
    hold(&mut subscriber, FIRST, 3..4);
    assert_eq!(requested(&actions(&mut subscriber)), [(FIRST, vec![3])]);
    assert_eq!((subscriber.outstanding_of(FIRST), subscriber.outstanding_of(SECOND)), (1, 0));
    hold(&mut subscriber, SECOND, 3..4);
    assert_eq!(requested(&actions(&mut subscriber)), [], "it is ordered");
    begin(&mut subscriber, FIRST, 3);
    let begun = actions(&mut subscriber);
    let expected = Some(entry(3).hash);
    assert!(matches!(begun[..], [Action::Receive { encoding, .. }] if encoding == expected), "{begun:?}");
    subscriber.handle_verified(StreamToken(3), verified(3));
    assert_eq!(subscriber.held(), Some(RangeSet::from_range(3..4)));
    subscriber.handle_hashes(SUBSCRIPTION, VERSION, 0, &hashes()).unwrap();
    begin(&mut subscriber, SUBSCRIPTION, 0);
    let pushed = actions(&mut subscriber);
    assert!(matches!(pushed[..], [Action::Receive { encoding: None, .. }]), "{pushed:?}");
}

#[test]
fn the_origin_is_asked_for_the_list_of_hashes() {
    let mut subscriber = shared();
    subscriber.handle_sources(VERSION, sources(&[FIRST]), false).unwrap();
    subscriber.ask_peer(FIRST, key_of(FIRST), LaneGrant::new([9; 32]));
    subscriber.handle_announce(shared_announce(FIRST), now(), 0).unwrap();
    let asked = actions(&mut subscriber);
    let is_list = |action: &&Action| {
        matches!(action, Action::Send(ClientMessage::Request { subscription: SUBSCRIPTION, chunks, hashes: true, .. })
            if chunks.is_empty())
    };
    assert_eq!(asked.iter().filter(is_list).count(), 1, "{asked:?}");
    receive(&mut subscriber, SUBSCRIPTION, 2);
    let pushed = actions(&mut subscriber);
    assert!(!pushed.is_empty() && requested(&pushed).is_empty(), "it is still pushed: {pushed:?}");
}

/// A chunk is not ordered before its entry has come.
#[test]
fn chunks_without_entries_are_not_ordered() {
    let mut subscriber = shared();
    subscriber.handle_sources(VERSION, sources(&[FIRST]), false).unwrap();
    subscriber.ask_peer(FIRST, key_of(FIRST), LaneGrant::new([9; 32]));
    subscriber.handle_announce(shared_announce(FIRST), now(), 0).unwrap();
    hold(&mut subscriber, FIRST, 0..CHUNKS);
    assert_eq!(requested(&actions(&mut subscriber)), []);
    subscriber.handle_encodings(VERSION, &entries(6..7)).unwrap();
    assert_eq!(requested(&actions(&mut subscriber)), [(FIRST, vec![6])]);
}

/// Each of these costs the peer its place, and its chunk is ordered of the other one.
#[test]
fn a_peer_that_lies_is_not_used_any_more() {
    let honest = header_of(FIRST, 2);
    let headers = [
        ChunkHeader { codec: CodecId::Zstd, ..honest },
        ChunkHeader { codec: CodecId::Sparse, base: Some(Version(3)), ..honest },
        ChunkHeader { raw_bytes: 5, ..honest },
        ChunkHeader { encoded_bytes: 100_000, ..honest },
        ChunkHeader { version: Version(2), ..honest },
        ChunkHeader { chunk: ChunkIndex(CHUNKS), ..honest },
        ChunkHeader { hash: hash(3), ..honest },
        honest,
    ];
    for header in headers {
        let mut subscriber = with_peers(&[FIRST, SECOND]);
        subscriber.handle_hashes(SUBSCRIPTION, VERSION, 0, &hashes()).unwrap();
        hold(&mut subscriber, FIRST, 2..3);
        assert_eq!(requested(&actions(&mut subscriber)), [(FIRST, vec![2])]);
        hold(&mut subscriber, SECOND, 2..3);
        subscriber.handle_chunk(header, StreamToken(2)).unwrap();
        if header == honest {
            assert!(subscriber.handle_wrong_encoding(StreamToken(2)));
            assert!(!subscriber.handle_wrong_encoding(StreamToken(2)), "it is not received any more");
        }
        let after = actions(&mut subscriber);
        assert_eq!(lied(&after), [FIRST], "{header:?}");
        assert_eq!(requested(&after), [(SECOND, vec![2])], "{header:?}");
        subscriber.handle_source_lost(FIRST);
        subscriber.handle_sources(VERSION, sources(&[FIRST, SECOND]), true).unwrap();
        let named = actions(&mut subscriber);
        assert!(matches!(&named[..], [Action::Peers(usable)] if usable.len() == 1), "{named:?}");
        assert_eq!(subscriber.held(), Some(RangeSet::new()));
        receive(&mut subscriber, SECOND, 2);
        assert_eq!(subscriber.held(), Some(RangeSet::from_range(2..3)));
    }
}

/// What the origin named and cannot be decoded is not the peer's fault: the origin sends it again, without a base.
#[test]
fn a_corrupt_encoding_of_the_origin_is_requested_again() {
    let mut subscriber = with_peers(&[FIRST]);
    hold(&mut subscriber, FIRST, 2..3);
    let _ = actions(&mut subscriber);
    begin(&mut subscriber, FIRST, 2);
    assert!(subscriber.handle_corrupt(StreamToken(2)));
    let after = actions(&mut subscriber);
    assert_eq!(lied(&after), []);
    let is_again = |action: &Action| {
        matches!(action, Action::Send(ClientMessage::Request { subscription: SUBSCRIPTION, chunks, again: true, .. })
            if chunks.contains(2))
    };
    assert!(after.iter().any(is_again), "{after:?}");
}

#[test]
fn a_peer_sends_only_what_was_requested() {
    let mut subscriber = with_peers(&[FIRST]);
    let refused = subscriber.handle_chunk(header_of(FIRST, 2), StreamToken(2));
    assert!(matches!(refused, Err(ProtocolViolation::OutOfTurn { .. })), "{refused:?}");
    let held = Held {
        subscription: FIRST,
        epoch: EPOCH,
        version: Version(1),
        added: RangeSet::new(),
        withdrawn: RangeSet::new(),
    };
    let other = Held { version: Version(2), ..held.clone() };
    assert!(subscriber.handle_held(FIRST, &other).is_err());
    let flood = (0..1000).find_map(|_| subscriber.handle_held(FIRST, &held).err());
    assert!(matches!(flood, Some(ProtocolViolation::OutOfTurn { .. })), "{flood:?}");
}

/// A chunk that comes from the origin and a peer counts once.
#[test]
fn a_chunk_that_is_pushed_and_ordered_counts_once() {
    let mut subscriber = with_peers(&[FIRST]);
    hold(&mut subscriber, FIRST, 2..3);
    let _ = actions(&mut subscriber);
    begin(&mut subscriber, SUBSCRIPTION, 2);
    subscriber.handle_chunk(header_of(FIRST, 2), StreamToken(90)).unwrap();
    let both = actions(&mut subscriber);
    assert!(matches!(both[..], [Action::Receive { encoding: None, .. }]), "{both:?}");
    subscriber.handle_lost(StreamToken(2));
    let second = actions(&mut subscriber);
    let is_second = |action: &Action| {
        matches!(action, Action::Receive { stream: StreamToken(90), encoding: Some(_), .. })
    };
    assert!(second.iter().any(is_second), "it is checked: {second:?}");
    subscriber.handle_verified(StreamToken(90), verified(2));
    assert_eq!(subscriber.held(), Some(RangeSet::from_range(2..3)));
}

/// PROTOCOL.md §3.15 (13): at once without a peer.
#[test]
fn the_origin_is_asked_for_the_rest_at_once_without_peers() {
    let mut subscriber = shared();
    subscriber.handle_encodings(VERSION, &entries(0..4)).unwrap();
    subscriber.handle_sources(VERSION, vec![], false).unwrap();
    assert_eq!(requested(&actions(&mut subscriber)), [], "it pushes");
    subscriber.handle_sources(VERSION, vec![], true).unwrap();
    let mut asked: Vec<u32> = vec![];
    for _ in 0..CHUNKS {
        for (source, chunks) in requested(&actions(&mut subscriber)) {
            assert_eq!(source, SUBSCRIPTION);
            chunks.iter().for_each(|chunk| receive(&mut subscriber, SUBSCRIPTION, *chunk));
            asked.extend(chunks);
        }
    }
    asked.sort();
    assert_eq!(asked, Vec::from_iter(0..CHUNKS), "with and without entries");
}

/// PROTOCOL.md §3.15 (13): with peers, when nothing has arrived for a second; later if the origin pushes.
#[test]
fn the_origin_is_asked_for_what_no_peer_offers_when_nothing_comes() {
    for (is_seeded, expected) in [(true, 1), (false, 3)] {
        let mut subscriber = with_peers(&[FIRST]);
        subscriber.handle_sources(VERSION, sources(&[FIRST]), is_seeded).unwrap();
        let mut seconds = 0;
        let asked = std::iter::repeat_with(|| requested(&tick(&mut subscriber, &mut seconds)))
            .take(9)
            .position(|requested| !requested.is_empty());
        assert_eq!(asked.map(|at| at + 1), Some(expected));
        receive(&mut subscriber, SUBSCRIPTION, 7);
        assert!(requested(&actions(&mut subscriber)).iter().all(|(_, chunks)| chunks.len() <= 4));
    }
}

/// What a silent peer owes is ordered of another one that holds it, or else of the origin.
#[test]
fn a_silent_peer_delays_a_chunk_by_seconds() {
    for has_other in [true, false] {
        let mut subscriber = with_peers(&[FIRST, SECOND]);
        hold(&mut subscriber, FIRST, 2..3);
        assert_eq!(requested(&actions(&mut subscriber)), [(FIRST, vec![2])]);
        if has_other {
            hold(&mut subscriber, SECOND, 2..3);
        }
        let source = if has_other { SECOND } else { SUBSCRIPTION };
        let mut seconds = 0;
        let at = (1..12).find(|_| {
            let requested = requested(&tick(&mut subscriber, &mut seconds));
            for (_, chunks) in requested.iter().filter(|(of, _)| *of == SUBSCRIPTION) {
                chunks.iter().for_each(|chunk| receive(&mut subscriber, SUBSCRIPTION, *chunk));
            }
            requested.iter().any(|(of, chunks)| *of == source && chunks.contains(&2))
        });
        assert!(at.is_some_and(|at| at < 9), "{at:?}");
    }
}

/// PROTOCOL.md §3.15 (12): what cannot be decoded is requested of the origin.
/// A peer that begins a chunk and then sends nothing keeps another copy of it waiting, but not for long if chunks usually
/// come fast.
#[test]
fn a_peer_that_stalls_inside_a_chunk_is_closed_when_it_comes_from_another() {
    for is_second_copy_here in [true, false] {
        let (mut subscriber, mut seconds) = (with_peers(&[FIRST, SECOND]), 0);
        for chunk in 0..2 {
            hold(&mut subscriber, FIRST, chunk..chunk + 1);
            let _ = actions(&mut subscriber);
            receive(&mut subscriber, FIRST, chunk);
        }
        hold(&mut subscriber, FIRST, 2..3);
        assert_eq!(requested(&actions(&mut subscriber)), [(FIRST, vec![2])]);
        begin(&mut subscriber, FIRST, 2);
        if is_second_copy_here {
            subscriber.handle_chunk(header(1, 2), StreamToken(99)).unwrap(); // It crosses, from the origin.
        }
        let closed = (1..=20).find(|_| {
            let actions = tick(&mut subscriber, &mut seconds);
            actions.iter().any(|action| matches!(action, Action::CloseSource(FIRST)))
        });
        let closed = closed.expect("it is closed in the end");
        assert_eq!(closed <= 5, is_second_copy_here, "after {closed} s");
        if is_second_copy_here {
            subscriber.handle_source_lost(FIRST);
            let after = actions(&mut subscriber);
            let is_spare =
                |action: &Action| matches!(action, Action::Receive { stream: StreamToken(99), .. });
            assert!(after.iter().any(is_spare), "{after:?}");
        }
    }
}

#[test]
fn undecodable_chunks_are_requested_of_the_origin() {
    let mut subscriber = shared();
    subscriber.handle_sources(VERSION, sources(&[FIRST]), false).unwrap();
    let delta = EncodingEntry { codec: CodecId::Sparse, base: Some(Version(7)), ..entry(4) };
    let zstd = EncodingEntry { codec: CodecId::Zstd, ..entry(5) };
    subscriber.handle_encodings(VERSION, &[delta, zstd]).unwrap();
    assert_eq!(requested(&actions(&mut subscriber)), [(SUBSCRIPTION, vec![4])], "there is room for one");
    receive(&mut subscriber, SUBSCRIPTION, 4);
    assert_eq!(requested(&actions(&mut subscriber)), [(SUBSCRIPTION, vec![5])]);
}

/// Each pushed chunk is credited when it has ended, so that the origin knows what is outstanding; the last word on the
/// version resets the credit.
#[test]
fn the_credit_of_a_shared_version_is_renewed_and_reset_at_its_end() {
    let mut subscriber = with_peers(&[FIRST]);
    subscriber.handle_hashes(SUBSCRIPTION, VERSION, 0, &hashes()).unwrap();
    let mut granted = 0;
    for chunk in 0..CHUNKS {
        receive(&mut subscriber, SUBSCRIPTION, chunk);
        let sent = actions(&mut subscriber);
        granted += sent
            .iter()
            .filter(|action| matches!(action, Action::Send(ClientMessage::Credit { chunks: 1, .. })))
            .count();
        if chunk + 1 == CHUNKS {
            assert!(sent.iter().any(|action| matches!(action, Action::Commit(_))), "{sent:?}");
        }
    }
    assert_eq!(granted, CHUNKS as usize);
    subscriber.handle_committed(false);
    let ended = actions(&mut subscriber);
    assert!(
        matches!(
            ended[..],
            [
                Action::Send(ClientMessage::Unsubscribe { subscription: FIRST, .. }),
                Action::Send(ClientMessage::Committed { .. }),
                Action::Send(ClientMessage::Credit { subscription: SUBSCRIPTION, chunks: CREDIT }),
            ]
        ),
        "{ended:?}"
    );
}

#[test]
fn a_peer_that_is_no_longer_named_is_left() {
    let mut subscriber = with_peers(&[FIRST, SECOND]);
    hold(&mut subscriber, FIRST, 2..3);
    let _ = actions(&mut subscriber);
    hold(&mut subscriber, SECOND, 2..3);
    subscriber.handle_sources(VERSION, sources(&[SECOND]), true).unwrap();
    let after = actions(&mut subscriber);
    let is_left = |action: &Action| {
        matches!(action, Action::Send(ClientMessage::Unsubscribe { subscription: FIRST, .. }))
    };
    assert!(after.iter().any(is_left), "{after:?}");
    assert_eq!(requested(&after), [(SECOND, vec![2])]);
    subscriber.handle_chunk(header_of(FIRST, 2), StreamToken(2)).unwrap();
    let late = actions(&mut subscriber);
    assert!(matches!(late[..], [Action::Discard(StreamToken(2))]), "{late:?}");
}

/// PROTOCOL.md §3.15 (15).
#[test]
fn peers_complete_a_version_whose_origin_is_lost() {
    let mut subscriber = with_peers(&[FIRST]);
    subscriber.handle_hashes(SUBSCRIPTION, VERSION, 0, &hashes()).unwrap();
    subscriber.handle_detached(CREDIT);
    hold(&mut subscriber, FIRST, 0..CHUNKS);
    let mut pending = actions(&mut subscriber);
    for _ in 0..CHUNKS {
        for (source, chunks) in requested(&pending) {
            chunks.iter().for_each(|chunk| receive(&mut subscriber, source, *chunk));
        }
        pending = actions(&mut subscriber);
        if pending.iter().any(|action| matches!(action, Action::Commit(_))) {
            return;
        }
    }
    panic!("{pending:?}");
}

/// Without a chunk on its way, a version waits for its origin longer than for bytes; that pushes again when it returns.
#[test]
fn a_lost_origin_is_waited_for() {
    let mut subscriber = with_peers(&[FIRST]);
    subscriber.handle_detached(CREDIT);
    let began = now();
    for second in 1..90 {
        subscriber.handle_timeout(began + Duration::from_secs(second), 5);
        let stalled = actions(&mut subscriber);
        assert!(!stalled.iter().any(|action| matches!(action, Action::Fail(_))), "after {second} s");
    }
    subscriber.subscribe(None);
    let _ = actions(&mut subscriber);
    subscriber
        .handle_announce(shared_announce(SUBSCRIPTION), began + Duration::from_secs(90), 5)
        .unwrap();
    let returned = actions(&mut subscriber);
    let is_granted = |action: &Action| {
        matches!(action, Action::Send(ClientMessage::Credit { subscription: SUBSCRIPTION, chunks: 4 }))
    };
    assert!(returned.iter().any(is_granted), "{returned:?}");
    // The new session names another encoding of a chunk, which is then not ordered of peers.
    let other = EncodingEntry { hash: EncodingHash([77; 32]), ..entry(0) };
    subscriber.handle_encodings(VERSION, &[other]).unwrap();
    hold(&mut subscriber, FIRST, 0..1);
    assert_eq!(requested(&actions(&mut subscriber)), [(SUBSCRIPTION, vec![0])]);
}

#[test]
fn messages_about_sharing_are_for_shared_versions() {
    let mut unshared = subscriber(request(Mode::Latest, CREDIT));
    unshared.subscribe(None);
    begin_of(&mut unshared, CHUNKS);
    for refused in
        [unshared.handle_sources(VERSION, vec![], false), unshared.handle_encodings(VERSION, &entries(0..1))]
    {
        assert!(matches!(refused, Err(ProtocolViolation::OutOfTurn { .. })), "{refused:?}");
    }
    let mut subscriber = shared();
    let other = (EPOCH, Version(2));
    for refused in [subscriber.handle_sources(other, vec![], false), subscriber.handle_encodings(other, &[])]
    {
        assert!(matches!(refused, Err(ProtocolViolation::WrongVersion { .. })), "{refused:?}");
    }
    subscriber.handle_encodings(VERSION, &entries(0..1)).unwrap();
    let second = EncodingEntry { hash: EncodingHash([77; 32]), ..entry(0) };
    assert_eq!(
        subscriber.handle_encodings(VERSION, &[second]),
        Err(ProtocolViolation::OtherEncoding(ChunkIndex(0)))
    );
    assert!(matches!(
        subscriber.handle_encodings(VERSION, &entries(CHUNKS..CHUNKS + 1)),
        Err(ProtocolViolation::NoSuchChunk { .. })
    ));
    subscriber.give_up(AbortReason::DeviceFailed);
    assert_eq!(subscriber.handle_sources(VERSION, sources(&[FIRST]), true), Ok(()), "it crossed the end");
    assert_eq!(subscriber.handle_encodings(VERSION, &[second]), Ok(()));
    let ended = actions(&mut subscriber);
    assert!(!ended.iter().any(|action| matches!(action, Action::Peers(_))), "{ended:?}");
}
