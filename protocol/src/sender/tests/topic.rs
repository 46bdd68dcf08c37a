//! A topic in memory.

use crate::{
    ChunkIndex, EndReason, Epoch, Feature, Here, ManifestDigest, Pick, Published, RangeSet, Seq, Start,
    Topic, Version, VersionId, Versions,
};
use std::collections::BTreeMap;

pub(super) const EPOCH: Epoch = Epoch(1);

/// The manifest of a version with tensors in pieces.
pub(super) const IN_PIECES: ManifestDigest = ManifestDigest([2; 32]);

/// A version without content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Numbered {
    id: VersionId,
    manifest: ManifestDigest,
}

impl Published for Numbered {
    fn id(&self) -> &VersionId {
        &self.id
    }

    fn manifest_digest(&self) -> ManifestDigest {
        self.manifest
    }

    fn feature(&self) -> Option<Feature> {
        (self.manifest == IN_PIECES).then_some(Feature::Layout2)
    }
}

/// The retained versions of one epoch, and the place of one reader.
#[derive(Debug)]
pub(super) struct Numbers {
    keep: usize,
    retained: BTreeMap<Seq, Numbered>,
    next: Seq,
    last: Version,
    /// The first version that the reader has not acknowledged.
    place: Option<Seq>,
    pub(super) ended: Option<EndReason>,
    pub(super) lost_place: Option<EndReason>,
    pub(super) base: Option<Numbered>,
    /// Whether the publisher continued from an older record than the client knows.
    pub(super) is_behind: bool,
    /// What is picked of versions, which are shared.
    pub(super) picked: Option<Pick>,
    /// The chunks that can be sent, if not all can.
    pub(super) here: Here,
}

impl Numbers {
    /// A topic that retains `keep` versions. Those from the place of a reader on stay.
    pub(super) fn new(keep: usize, has_reader: bool) -> Self {
        let place = has_reader.then_some(Seq::FIRST);
        Self {
            keep,
            retained: BTreeMap::new(),
            next: Seq::FIRST,
            last: Version(0),
            place,
            ended: None,
            lost_place: None,
            base: None,
            is_behind: false,
            picked: None,
            here: Here::All,
        }
    }

    /// Publishes the next version, unless the reader needs one that would have to leave.
    pub(super) fn publish(&mut self, manifest: ManifestDigest) {
        while self.retained.len() >= self.keep {
            let oldest = *self.retained.first_key_value().unwrap().0;
            if self.place.is_some_and(|place| place <= oldest) {
                return;
            }
            self.retained.remove(&oldest);
        }
        self.last = self.last.next();
        let id = VersionId { topic: Topic::new("t").unwrap(), epoch: EPOCH, version: self.last };
        self.retained.insert(self.next, Numbered { id, manifest });
        self.next = self.next.next();
    }

    pub(super) fn acknowledge(&mut self, epoch: Epoch, version: Version) {
        assert_eq!(epoch, EPOCH);
        let covered = self.retained.iter().rfind(|(_, numbered)| numbered.id.version <= version);
        if let (Some((seq, _)), Some(place)) = (covered, &mut self.place) {
            *place = (*place).max(seq.next());
        }
    }

    /// The place of the reader.
    pub(super) fn place(&self) -> Seq {
        self.place.unwrap_or(Seq::FIRST)
    }

    pub(super) fn last(&self) -> Version {
        self.last
    }
}

impl Versions for Numbers {
    type Version = Numbered;

    fn newest(&self) -> Option<(Seq, Numbered)> {
        self.retained.last_key_value().map(|(seq, numbered)| (*seq, numbered.clone()))
    }

    fn first_from(&self, seq: Seq) -> Option<(Seq, Numbered)> {
        self.retained
            .range(seq..)
            .next()
            .map(|(seq, numbered)| (*seq, numbered.clone()))
    }

    fn find(&self, key: (Epoch, Version)) -> Option<(Seq, Numbered)> {
        let found = self.retained.iter().find(|(_, numbered)| numbered.key() == key);
        found.map(|(seq, numbered)| (*seq, numbered.clone()))
    }

    fn base(&self) -> Option<Numbered> {
        self.base.clone()
    }

    fn start(&self, start: Start) -> Seq {
        let oldest = self.retained.first_key_value().map_or(self.next, |(seq, _)| *seq);
        match start {
            Start::Newest => self.retained.last_key_value().map_or(self.next, |(seq, _)| *seq),
            Start::Next => self.next,
            _ => oldest,
        }
    }

    fn is_behind(&self, (_, version): (Epoch, Version)) -> bool {
        self.is_behind && self.last < version
    }

    fn ended(&self) -> Option<EndReason> {
        self.ended
    }

    fn unacknowledged(&self, seq: Seq, given_up: &mut Vec<Seq>) -> usize {
        let place = self.place().min(seq);
        given_up.retain(|given_up| *given_up >= place);
        self.retained
            .range(place..seq)
            .filter(|(seq, _)| !given_up.contains(seq))
            .count()
    }

    fn lost_place(&self) -> Option<EndReason> {
        self.lost_place
    }

    fn is_shared(&self, _: &Numbered) -> bool {
        self.picked.is_some()
    }

    fn pick(&self, _: &Numbered, wanted: &RangeSet) -> Pick {
        match self.picked {
            Some(Pick::Chunk(ChunkIndex(chunk))) if !wanted.contains(chunk) => Pick::Wait,
            picked => picked.expect("it is asked for shared versions"),
        }
    }

    fn here(&self, _: &Numbered) -> Here {
        self.here.clone()
    }
}
