//! Test versions of a few chunks, with their messages.

use crate::{
    Announce, ChunkHash, ChunkHasher, ChunkHeader, ChunkIndex, CodecId, CodecSet, Dtype, Epoch, Glob, Limits,
    Manifest, Mode, RelayPath, Selection, Shape, Start, Subscribe, SubscriptionId, TensorName, TensorSpec,
    Topic, Verified, Version, VersionDigest, VersionId,
};
use std::{sync::Arc, time::Instant};

pub(crate) const CHUNK_BYTES: u32 = 256;
pub(crate) const SUBSCRIPTION: SubscriptionId = SubscriptionId(1);
pub(crate) const EPOCH: Epoch = Epoch(1);

/// An arbitrary instant.
#[expect(clippy::disallowed_methods, reason = "the clock is the only source of an instant")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// A manifest of `chunks` tensors `t0`, `t1`, … of one chunk each.
pub(crate) fn manifest(chunks: u32) -> Arc<Manifest> {
    let shape = Shape::new(&[CHUNK_BYTES.into()]).unwrap();
    let name = |chunk| TensorName::new(&format!("t{chunk}")).unwrap();
    let specs = (0..chunks).map(|chunk| TensorSpec::new(name(chunk), Dtype::U8, shape.clone()));
    Arc::new(Manifest::layout(specs.collect(), vec![], CHUNK_BYTES, &Limits::default()).unwrap())
}

/// The globs that select the tensors of `chunks`. One glob matches nothing, since an empty list selects everything.
pub(crate) fn globs(chunks: &[u32]) -> Vec<Glob> {
    let globs = chunks.iter().map(|chunk| format!("t{chunk}")).chain(["nothing".into()]);
    globs.map(|name| Glob::new(&name).unwrap()).collect()
}

pub(crate) fn select(manifest: Arc<Manifest>, chunks: &[u32]) -> Arc<Selection> {
    Arc::new(Selection::new(manifest, &globs(chunks)))
}

pub(crate) fn topic() -> Topic {
    Topic::new("t").unwrap()
}

pub(crate) fn id(version: u64) -> VersionId {
    VersionId { topic: topic(), epoch: EPOCH, version: Version(version) }
}

pub(crate) fn announce(version: u64, manifest: &Manifest) -> Announce {
    Announce {
        subscription: SUBSCRIPTION,
        id: id(version),
        manifest: manifest.digest(),
        skipped: 0,
        metadata: vec![],
        may_be_base: false,
        afresh: false,
        shared: false,
        lost_place: None,
        lending: None,
        relays: RelayPath::default(),
    }
}

pub(crate) fn request(mode: Mode, credit: u32) -> Subscribe {
    Subscribe { mode, start: Start::Oldest, window: 2, ..Subscribe::latest(SUBSCRIPTION, topic(), credit) }
}

pub(crate) fn codecs() -> CodecSet {
    CodecSet::from_codes(&[0, CodecId::Sparse.code().into()])
}

/// The header of chunk `chunk` of version `version`.
pub(crate) fn header(version: u64, chunk: u32) -> ChunkHeader {
    ChunkHeader {
        subscription: SUBSCRIPTION,
        epoch: EPOCH,
        version: Version(version),
        chunk: ChunkIndex(chunk),
        codec: CodecId::Raw,
        raw_bytes: CHUNK_BYTES,
        encoded_bytes: CHUNK_BYTES,
        hash: hash(chunk),
        base: None,
    }
}

pub(crate) fn hash(chunk: u32) -> ChunkHash {
    ChunkHash::of(&chunk.to_le_bytes())
}

pub(crate) fn verified(chunk: u32) -> Verified {
    let mut hasher = ChunkHasher::new();
    hasher.update(&chunk.to_le_bytes());
    hasher.verify(ChunkIndex(chunk), hash(chunk)).unwrap()
}

/// Other content of a chunk than [`hash`] and [`verified`] have.
pub(crate) fn other_verified(chunk: u32) -> Verified {
    let other = chunk + 1000;
    let mut hasher = ChunkHasher::new();
    hasher.update(&other.to_le_bytes());
    hasher.verify(ChunkIndex(chunk), hash(other)).unwrap()
}

/// The digest that the server sends in `Complete` to a subscription with this selection.
pub(crate) fn digest(selection: &Selection) -> VersionDigest {
    VersionDigest::of(selection.manifest().digest(), selection.chunks().iter().map(hash))
}
