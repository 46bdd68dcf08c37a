//! [`Entries`]: the shared encodings of a version's chunks, as its origin names them (PROTOCOL.md §3.15).

use crate::{ChunkIndex, CodecId, EncodingEntry, EncodingHash, ProtocolViolation, Version};
use std::collections::BTreeMap;

/// The most entries that are kept before the number of chunks is known.
const EARLY_MAX: usize = 1 << 20;

/// The entries of one version. Needs about 80 bytes of memory for each.
#[derive(Debug, Default)]
pub(super) struct Entries {
    by_chunk: BTreeMap<u32, Entry>,
    /// The number of chunks of the version, once its manifest is here.
    count: Option<u32>,
    /// The number of sessions with an origin that were lost while the version was under way.
    session: u32,
}

/// One shared encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    codec: CodecId,
    base: Option<Version>,
    hash: EncodingHash,
    /// The session in which it was named.
    session: u32,
    /// Whether an earlier session named another encoding: peers may hold either.
    is_contested: bool,
}

impl Entries {
    /// Begins a version of `count` chunks, some of whose entries may be here.
    ///
    /// # Errors
    /// [`ProtocolViolation::NoSuchChunk`] when there is one of a chunk that the version does not have.
    pub(super) fn begin(&mut self, count: u32) -> Result<(), ProtocolViolation> {
        self.count = Some(count);
        match self.by_chunk.last_key_value() {
            Some((chunk, _)) if *chunk >= count => {
                Err(ProtocolViolation::NoSuchChunk { chunk: ChunkIndex(*chunk), count })
            }
            _ => Ok(()),
        }
    }

    /// Begins another session with the origin, which may be another process and names its encodings afresh.
    pub(super) fn begin_session(&mut self) {
        self.session += 1;
    }

    /// Adds an entry. Returns whether that changes what peers may be asked for.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the version has no such chunk, the codec does not go with the base, the same session
    /// named another encoding of the chunk, or too many come before the manifest.
    pub(super) fn insert(&mut self, entry: EncodingEntry) -> Result<bool, ProtocolViolation> {
        let EncodingEntry { chunk, codec, base, hash } = entry;
        if let Some(count) = self.count.filter(|count| chunk.0 >= *count) {
            return Err(ProtocolViolation::NoSuchChunk { chunk, count });
        }
        if base.is_some() != codec.needs_base() {
            return Err(ProtocolViolation::CodecAndBase { chunk, codec: codec.name() });
        }
        let is_full = self.count.is_none() && self.by_chunk.len() >= EARLY_MAX;
        let session = self.session;
        match self.by_chunk.get_mut(&chunk.0) {
            None if is_full => {
                let (found, expected) = ("more encodings", "the manifest");
                Err(ProtocolViolation::OutOfTurn { found, expected })
            }
            None => {
                let entry = Entry { codec, base, hash, session, is_contested: false };
                self.by_chunk.insert(chunk.0, entry);
                Ok(true)
            }
            Some(known) if (known.codec, known.base, known.hash) == (codec, base, hash) => {
                known.session = session;
                Ok(false)
            }
            Some(known) if known.session == session => Err(ProtocolViolation::OtherEncoding(chunk)),
            Some(known) => {
                *known = Entry { codec, base, hash, session, is_contested: true };
                Ok(true)
            }
        }
    }

    /// The shared encoding of a chunk; `None` if it is not known, or not for certain.
    pub(super) fn get(&self, chunk: ChunkIndex) -> Option<(CodecId, Option<Version>, EncodingHash)> {
        let entry = self.by_chunk.get(&chunk.0).filter(|entry| !entry.is_contested)?;
        Some((entry.codec, entry.base, entry.hash))
    }

    /// Whether the origin named an encoding of a chunk.
    pub(super) fn contains(&self, chunk: u32) -> bool {
        self.by_chunk.contains_key(&chunk)
    }

    /// The chunks whose encodings were named, ascending.
    pub(super) fn chunks(&self) -> impl Iterator<Item = u32> + '_ {
        self.by_chunk.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(chunk: u32, byte: u8) -> EncodingEntry {
        let hash = EncodingHash([byte; 32]);
        EncodingEntry { chunk: ChunkIndex(chunk), codec: CodecId::Raw, base: None, hash }
    }

    #[test]
    fn one_session_names_one_encoding_of_a_chunk() {
        let mut entries = Entries::default();
        assert_eq!(entries.insert(entry(3, 1)), Ok(true));
        assert_eq!(entries.insert(entry(3, 1)), Ok(false), "the same again");
        assert_eq!(entries.insert(entry(3, 2)), Err(ProtocolViolation::OtherEncoding(ChunkIndex(3))));
        assert_eq!(entries.get(ChunkIndex(3)), Some((CodecId::Raw, None, EncodingHash([1; 32]))));
        let based = EncodingEntry { base: Some(Version(1)), ..entry(4, 1) };
        assert!(matches!(entries.insert(based), Err(ProtocolViolation::CodecAndBase { .. })));
        let baseless = EncodingEntry { codec: CodecId::Sparse, ..entry(4, 1) };
        assert!(matches!(entries.insert(baseless), Err(ProtocolViolation::CodecAndBase { .. })));
    }

    #[test]
    fn a_later_session_may_name_another_one_which_no_peer_is_asked_for() {
        let mut entries = Entries::default();
        entries.insert(entry(0, 1)).unwrap();
        entries.insert(entry(1, 1)).unwrap();
        entries.begin_session();
        assert_eq!(entries.insert(entry(0, 1)), Ok(false));
        assert_eq!(entries.insert(entry(1, 2)), Ok(true));
        assert_eq!(entries.get(ChunkIndex(1)), None, "peers may hold either");
        assert!(entries.contains(1) && entries.get(ChunkIndex(0)).is_some());
        assert!(entries.insert(entry(0, 2)).is_err(), "this session has named one");
    }

    #[test]
    fn entries_of_chunks_that_do_not_exist_are_refused() {
        let no_such = |chunk, count| ProtocolViolation::NoSuchChunk { chunk: ChunkIndex(chunk), count };
        let mut entries = Entries::default();
        entries.insert(entry(4, 1)).unwrap();
        assert_eq!(entries.begin(4), Err(no_such(4, 4)), "it came before the manifest");
        let mut entries = Entries::default();
        entries.insert(entry(3, 1)).unwrap();
        assert_eq!(entries.begin(4), Ok(()));
        assert_eq!(entries.insert(entry(4, 1)), Err(no_such(4, 4)));
    }

    #[test]
    fn early_entries_are_bounded() {
        let mut entries = Entries::default();
        (0..EARLY_MAX as u32).for_each(|chunk| assert_eq!(entries.insert(entry(chunk, 1)), Ok(true)));
        assert!(matches!(
            entries.insert(entry(EARLY_MAX as u32, 1)),
            Err(ProtocolViolation::OutOfTurn { .. })
        ));
        assert_eq!(entries.insert(entry(0, 1)), Ok(false));
    }
}
