//! [`EncodingLog`]: the shared encodings of a version, which its members pass on to each other (PROTOCOL.md §3.15).

use std::collections::BTreeSet;
use tensor_relay_device::Lock;
use tensor_relay_protocol::{ChunkIndex, EncodingEntry};
use tokio::sync::watch;

/// The shared encoding of each chunk of one version: the first that was made of it for a member. Entries are appended in
/// the order in which they were made, and stay, so that every member is told all of them from its own position on. Takes
/// at most 64 bytes for each chunk.
#[derive(Debug)]
pub struct EncodingLog {
    state: Lock<LogState>,
    /// The number of entries.
    count: watch::Sender<usize>,
}

#[derive(Debug)]
struct LogState {
    entries: Vec<EncodingEntry>,
    /// The place of each chunk's entry, plus one; 0 for none.
    places: Box<[u32]>,
    /// The chunks whose encoding is being hashed.
    claimed: BTreeSet<u32>,
}

/// The permission to append the entry of one chunk. If it is dropped before, another encoding of the chunk may be the
/// shared one.
#[derive(Debug)]
pub struct EncodingClaim<'l> {
    log: &'l EncodingLog,
    chunk: ChunkIndex,
}

impl EncodingLog {
    /// The empty log of a version with so many chunks.
    pub fn new(chunks: u32) -> Self {
        let places = vec![0; chunks as usize].into();
        let state = LogState { entries: vec![], places, claimed: BTreeSet::new() };
        Self { state: Lock::new(state), count: watch::Sender::new(0) }
    }

    /// The entry of a chunk, if it has one.
    pub fn entry(&self, chunk: ChunkIndex) -> Option<EncodingEntry> {
        let state = self.state.lock();
        let place = *state.places.get(chunk.0 as usize)?;
        state.entries.get((place as usize).checked_sub(1)?).copied()
    }

    /// The permission to append the entry of a chunk; `None` if it has one, another encoding of it is being hashed, or
    /// there is no such chunk.
    pub fn claim(&self, chunk: ChunkIndex) -> Option<EncodingClaim<'_>> {
        let is_free = {
            let mut state = self.state.lock();
            state.places.get(chunk.0 as usize) == Some(&0) && state.claimed.insert(chunk.0)
        };
        is_free.then(|| EncodingClaim { log: self, chunk }) // Dropping one frees the chunk.
    }

    /// At most `max` entries from the place `from` on.
    pub fn entries(&self, from: usize, max: usize) -> Vec<EncodingEntry> {
        self.state.lock().entries.iter().skip(from).take(max).copied().collect()
    }

    /// Follows the number of entries.
    pub fn count(&self) -> watch::Receiver<usize> {
        self.count.subscribe()
    }
}

impl EncodingClaim<'_> {
    /// Appends the entry, which is that of the claimed chunk.
    pub fn append(self, entry: EncodingEntry) {
        let count = {
            let mut state = self.log.state.lock();
            state.entries.push(EncodingEntry { chunk: self.chunk, ..entry });
            let count = state.entries.len();
            state.places[self.chunk.0 as usize] = count as u32;
            count
        };
        self.log.count.send_modify(|known| *known = count.max(*known));
    }
}

impl Drop for EncodingClaim<'_> {
    fn drop(&mut self) {
        self.log.state.lock().claimed.remove(&self.chunk.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::{CodecId, EncodingHash};

    fn entry(chunk: u32, byte: u8) -> EncodingEntry {
        let hash = EncodingHash([byte; 32]);
        EncodingEntry { chunk: ChunkIndex(chunk), codec: CodecId::Raw, base: None, hash }
    }

    #[test]
    fn the_first_encoding_of_a_chunk_is_the_shared_one() {
        let log = EncodingLog::new(3);
        let first = log.claim(ChunkIndex(1)).unwrap();
        assert!(log.claim(ChunkIndex(1)).is_none(), "it is being hashed");
        drop(first);
        let again = log.claim(ChunkIndex(1)).expect("a claim that was given up leaves no trace");
        again.append(entry(1, 1));
        assert!(log.claim(ChunkIndex(1)).is_none());
        assert!(log.claim(ChunkIndex(3)).is_none(), "there is no such chunk");
        assert_eq!((log.entry(ChunkIndex(1)), log.entry(ChunkIndex(0))), (Some(entry(1, 1)), None));
        assert_eq!(log.entry(ChunkIndex(3)), None);
    }

    #[test]
    fn each_reader_gets_every_entry_once() {
        let log = EncodingLog::new(4);
        let count = log.count();
        let (second, first) = (log.claim(ChunkIndex(2)).unwrap(), log.claim(ChunkIndex(0)).unwrap());
        first.append(entry(0, 1));
        assert_eq!(log.entries(0, 9), [entry(0, 1)]);
        second.append(entry(2, 2));
        assert_eq!(*count.borrow(), 2);
        assert_eq!((log.entries(1, 9), log.entries(0, 1)), (vec![entry(2, 2)], vec![entry(0, 1)]));
        assert_eq!(log.entries(2, 9), []);
    }
}
