use super::*;
use tensor_relay_protocol::{
    ChunkHash, ChunkHeader, ChunkIndex, CodecId, Dtype, EncodingEntry, EncodingHash, Limits, Manifest,
    PeerSecret, Published, RelayPath, Shape, SubscriptionId, TensorName, TensorSpec, VersionId,
};
use tensor_relay_transport::{forwarding::ReceivedMemory, sending::Offered};

const CHUNK_BYTES: u32 = 256;
const TAKER: [u8; 32] = [7; 32];
const EPOCH: Epoch = Epoch(1);

fn topic() -> Topic {
    Topic::new("m").unwrap()
}

fn member(forwarding: &Arc<Forwarding>, kept_bytes: Option<u64>) -> Arc<dyn Forward> {
    let options = ForwardOptions { key: Fingerprint([5; 32]), kept_bytes, rate: None };
    let forward = forwarding.join(options, Workers::Inline);
    forward.set_origin(Origin::Session(1, LaneGrant::new([1; 32])));
    forward
}

/// A version of 16 chunks, which is not received into one memory.
fn received(version: u64) -> ReceivedVersion {
    let shape = Shape::new(&[16 * u64::from(CHUNK_BYTES)]).unwrap();
    let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, shape);
    let manifest = Manifest::layout(vec![spec], vec![], CHUNK_BYTES, &Limits::default()).unwrap();
    let id = VersionId { topic: topic(), epoch: EPOCH, version: Version(version) };
    let (manifest, relays) = (Arc::new(manifest), RelayPath::default());
    ReceivedVersion { id, manifest, metadata: vec![], shared: true, relays, memory: None }
}

fn take(version: u64) -> Take {
    Take { topic: topic(), version: (EPOCH, Version(version)), taker: TAKER }
}

fn grant(version: u64) -> LaneGrant {
    PeerSecret::of(&LaneGrant::new([1; 32])).grant(&topic(), (EPOCH, Version(version)), &TAKER)
}

fn granted(forwarding: &Forwarding, version: u64) -> GrantedTake {
    forwarding.check(&take(version), &grant(version)).unwrap()
}

#[test]
fn a_grant_is_of_use_for_its_taker_and_version_alone() {
    let forwarding = Arc::<Forwarding>::default();
    assert!(!forwarding.is_active() && forwarding.check(&take(2), &grant(2)).is_none());
    let forward = member(&forwarding, None);
    assert!(forwarding.is_active() && forwarding.check(&take(2), &grant(2)).is_some());
    for other in [
        Take { taker: [8; 32], ..take(2) },
        Take { topic: Topic::new("n").unwrap(), ..take(2) },
        Take { version: (Epoch(2), Version(2)), ..take(2) },
        take(3),
    ] {
        assert!(forwarding.check(&other, &grant(2)).is_none(), "{other:?}");
    }
    let granted = granted(&forwarding, 2);
    assert_eq!(forwarding.validity(&granted), Validity::Valid);
    forward.revoke(&topic(), [8; 32], false);
    forward.revoke(&Topic::new("n").unwrap(), TAKER, false);
    assert_eq!(forwarding.validity(&granted), Validity::Valid, "others were meant");
    forward.revoke(&topic(), TAKER, false);
    assert_eq!(forwarding.validity(&granted), Validity::Ended);
    assert_eq!(forwarding.validity(&self::granted(&forwarding, 3)), Validity::Ended, "of every version");
    drop(forward);
    assert!(!forwarding.is_active());
}

/// Goal: a right that comes back undoes a revocation, whether the holder is told so or has another session with the origin.
#[test]
fn a_right_that_comes_back_is_a_right() {
    let forwarding = Arc::<Forwarding>::default();
    let forward = member(&forwarding, None);
    let first = granted(&forwarding, 2);
    forward.revoke(&topic(), TAKER, false);
    forward.revoke(&topic(), TAKER, true);
    assert_eq!(forwarding.validity(&first), Validity::Valid);
    forward.revoke(&topic(), TAKER, false);
    forward.set_origin(Origin::Session(2, LaneGrant::new([2; 32])));
    let by_second = PeerSecret::of(&LaneGrant::new([2; 32])).grant(&topic(), (EPOCH, Version(2)), &TAKER);
    let second = forwarding.check(&take(2), &by_second).unwrap();
    assert_eq!(forwarding.validity(&second), Validity::Valid, "the origin of this session told nothing");
    assert_eq!(forwarding.validity(&first), Validity::Ended);
}

#[test]
fn everything_ends_with_its_member() {
    let forwarding = Arc::<Forwarding>::default();
    let forward = member(&forwarding, None);
    let granted = granted(&forwarding, 2);
    assert!(matches!(forwarding.find(&granted), Found::NotYet));
    let offered = forward.begin(received(2)).unwrap();
    let Found::Version(version) = forwarding.find(&granted) else { panic!("it has begun") };
    assert_eq!(version.key(), (EPOCH, Version(2)));
    let mut changes = forwarding.changes();
    let newer = forward.begin(received(3)).unwrap();
    assert!(changes.has_changed().unwrap());
    drop(offered);
    assert!(version.abort_at().borrow().is_some(), "takes are aborted at once");
    assert!(matches!(forwarding.find(&granted), Found::Passed));
    changes.mark_unchanged();
    forward.end(&topic(), EndReason::Forbidden);
    let Found::Version(version) = forwarding.find(&self::granted(&forwarding, 3)) else {
        panic!("it is held")
    };
    assert_eq!(version.ended(), Some(EndReason::Forbidden));
    assert!(changes.has_changed().unwrap());
    drop((newer, forward));
    assert_eq!(forwarding.validity(&granted), Validity::Ended);
}

#[test]
fn a_version_that_begins_anew_is_not_withdrawn_with_the_old_one() {
    let forwarding = Arc::<Forwarding>::default();
    let forward = member(&forwarding, None);
    let old = forward.begin(received(2)).unwrap();
    let new = forward.begin(received(2)).unwrap();
    drop(old);
    assert!(matches!(forwarding.find(&granted(&forwarding, 2)), Found::Version(_)));
    drop(new);
    assert!(matches!(forwarding.find(&granted(&forwarding, 2)), Found::NotYet));
}

#[test]
fn versions_and_revocations_are_bounded() {
    let forwarding = Arc::<Forwarding>::default();
    let forward = member(&forwarding, None);
    let held: Vec<_> = (0..VERSIONS_MAX as u64)
        .map(|version| forward.begin(received(version)).unwrap())
        .collect();
    assert!(forward.begin(received(9_999)).is_none());
    drop(held);
    assert!(forward.begin(received(9_999)).is_some());
    for taker in 0..2 * REVOKED_MAX as u64 {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&taker.to_le_bytes());
        (0..2).for_each(|_| forward.revoke(&topic(), key, false));
    }
    assert_eq!(forwarding.members.lock().values().next().unwrap().revoked.len(), REVOKED_MAX);
}

fn header(chunk: u32, codec: CodecId, base: Option<u64>) -> ChunkHeader {
    ChunkHeader {
        subscription: SubscriptionId(1),
        epoch: EPOCH,
        version: Version(2),
        chunk: ChunkIndex(chunk),
        codec,
        raw_bytes: CHUNK_BYTES,
        encoded_bytes: 100,
        hash: ChunkHash::of(&chunk.to_le_bytes()),
        base: base.map(Version),
    }
}

fn entry(chunk: u32, codec: CodecId, base: Option<u64>) -> EncodingEntry {
    EncodingEntry { chunk: ChunkIndex(chunk), codec, base: base.map(Version), hash: EncodingHash([0; 32]) }
}

/// Goal: a chunk is offered if it is here and kept, and the origin named this encoding, in either order.
#[test]
fn only_what_the_origin_vouches_for_is_offered() {
    let forwarding = Arc::<Forwarding>::default();
    let forward = member(&forwarding, Some(u64::MAX));
    let offered = forward.begin(received(2)).unwrap();
    let arrive = |chunk, codec, base| {
        let header = header(chunk, codec, base);
        let kept = offered.keep(&header, &[1; 100]);
        offered.handle_verified(&header, kept)
    };
    assert!(arrive(0, CodecId::Zstd, None));
    assert!(offered.offered().is_empty(), "its entry is not here");
    let entries =
        [entry(0, CodecId::Zstd, None), entry(1, CodecId::Raw, None), entry(2, CodecId::Sparse, Some(1))];
    offered.handle_encodings(&entries);
    assert_eq!(offered.offered(), RangeSetOf([0]).into());
    assert!(arrive(1, CodecId::Raw, None) && arrive(2, CodecId::Sparse, Some(1)));
    assert_eq!(offered.offered(), RangeSetOf([0, 1, 2]).into());
    offered.handle_encodings(&[
        entry(3, CodecId::Zstd, None),
        entry(4, CodecId::Sparse, Some(1)),
        entry(16, CodecId::Raw, None),
        entry(u32::MAX, CodecId::Raw, None),
    ]);
    assert!(!arrive(3, CodecId::Raw, None), "another codec");
    assert!(!arrive(4, CodecId::Sparse, Some(0)), "another base");
    assert!(!offered.handle_verified(&header(5, CodecId::Zstd, None), None), "it was not kept");
    assert_eq!(offered.offered(), RangeSetOf([0, 1, 2]).into());
}

/// The set of these numbers.
struct RangeSetOf<const N: usize>([u32; N]);

impl<const N: usize> From<RangeSetOf<N>> for tensor_relay_protocol::RangeSet {
    fn from(set: RangeSetOf<N>) -> Self {
        set.0.into_iter().map(|number| number..number + 1).collect()
    }
}

#[test]
fn kept_encodings_stay_within_the_budget() {
    let forwarding = Arc::<Forwarding>::default();
    let forward = member(&forwarding, Some(3 * 4_096));
    let offered = forward.begin(received(2)).unwrap();
    let keep = |chunk| offered.keep(&header(chunk, CodecId::Zstd, None), &[1; 100]);
    let kept: Vec<_> = (0..5).filter_map(keep).collect();
    assert_eq!(kept.len(), 3, "each counts a page");
    drop(kept);
    assert!(keep(0).is_some());
}

/// Memory that has every chunk.
#[derive(Debug)]
struct Zeros;

impl ReceivedMemory for Zeros {
    fn copy(&self, _: std::ops::Range<u64>, _: &mut [u8]) -> bool {
        true
    }
}

/// Goal: a chunk in the version's memory can be sent on raw, whatever it came in, if that is its shared encoding.
#[tokio::test]
async fn what_is_in_memory_is_offered_raw() {
    let forwarding = Arc::<Forwarding>::default();
    let forward = member(&forwarding, Some(0));
    let memory: Arc<dyn ReceivedMemory> = Arc::new(Zeros);
    let offered = forward.begin(ReceivedVersion { memory: Some(memory), ..received(2) }).unwrap();
    let hash = ChunkHash::of(&[0; CHUNK_BYTES as usize]);
    for chunk in 0..2 {
        let header = ChunkHeader { hash, ..header(chunk, CodecId::Zstd, None) };
        assert!(offered.keep(&header, &[1; 100]).is_none(), "there is no room");
        assert!(offered.handle_verified(&header, None));
    }
    offered.handle_encodings(&[entry(0, CodecId::Raw, None), entry(1, CodecId::Zstd, None)]);
    assert_eq!(offered.offered(), RangeSetOf([0]).into());
    let Found::Version(version) = forwarding.find(&granted(&forwarding, 2)) else { panic!("it has begun") };
    let received = version.received().unwrap();
    let (header, bytes) = received.read(ChunkIndex(0)).await.unwrap();
    assert_eq!((header.codec, header.base, header.encoded_bytes), (CodecId::Raw, None, CHUNK_BYTES));
    assert_eq!(bytes[..], [0; CHUNK_BYTES as usize]);
    assert!(received.read(ChunkIndex(1)).await.is_none());
}
