//! The cache of chunks read from a device.

use std::collections::BTreeMap;
use tensor_relay_protocol::ChunkIndex;

/// The process-wide identity of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) payload: u64,
    pub(super) chunk: ChunkIndex,
}

/// The chunks of one device: those being read, and the most recently requested ones that were read, within a bound.
/// Pure.
///
/// Chunks being read count against the bound and evict others, but are never evicted: concurrent requests wait for
/// them, however small the bound is. Their number is that of running sends.
#[derive(Debug)]
pub(super) struct ChunkCache<T> {
    limit_bytes: u64,
    bytes: u64,
    next_turn: u64,
    by_place: BTreeMap<Place, Kept<T>>,
    /// Read chunks by the order of their requests: the oldest is evicted first.
    read: BTreeMap<CacheOrder, Place>,
}

/// The order in which chunks were first requested. Identifies a cached chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CacheOrder(u64);

#[derive(Debug)]
struct Kept<T> {
    turn: CacheOrder,
    bytes: u64,
    value: T,
}

impl<T> ChunkCache<T> {
    pub(super) fn new(limit_bytes: u64) -> Self {
        Self { limit_bytes, bytes: 0, next_turn: 0, by_place: BTreeMap::new(), read: BTreeMap::new() }
    }

    /// The cached or running read of this chunk.
    pub(super) fn get(&self, place: Place) -> Option<&T> {
        Some(&self.by_place.get(&place)?.value)
    }

    /// Adds a chunk whose read begins. `bytes` counts against the bound.
    pub(super) fn begin(&mut self, place: Place, bytes: u64, value: T) -> CacheOrder {
        let turn = CacheOrder(self.next_turn);
        self.next_turn += 1;
        self.bytes += bytes;
        let before = self.by_place.insert(place, Kept { turn, bytes, value });
        debug_assert!(before.is_none(), "a chunk is read by one at a time");
        self.push_out();
        turn
    }

    /// Records that a chunk was read, so that it may be evicted. No effect if it was removed meanwhile.
    pub(super) fn handle_read(&mut self, place: Place, turn: CacheOrder) {
        if self.has(place, turn) {
            self.read.insert(turn, place);
            self.push_out();
        }
    }

    /// Removes a chunk that could not be read: later requests read again.
    pub(super) fn handle_failed(&mut self, place: Place, turn: CacheOrder) {
        if self.has(place, turn) {
            self.remove(place);
        }
    }

    /// Removes the chunks of a payload that is no longer used.
    pub(super) fn forget(&mut self, payload: u64) {
        let all = |chunk| Place { payload, chunk };
        let of_payload = self.by_place.range(all(ChunkIndex(0))..=all(ChunkIndex(u32::MAX)));
        let places: Vec<Place> = of_payload.map(|(place, _)| *place).collect();
        places.into_iter().for_each(|place| self.remove(place));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_place.is_empty()
    }

    /// The total size.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn has(&self, place: Place, turn: CacheOrder) -> bool {
        self.by_place.get(&place).is_some_and(|kept| kept.turn == turn)
    }

    fn push_out(&mut self) {
        while self.bytes > self.limit_bytes
            && let Some((_, oldest)) = self.read.pop_first()
        {
            self.remove(oldest);
        }
    }

    fn remove(&mut self, place: Place) {
        if let Some(kept) = self.by_place.remove(&place) {
            self.read.remove(&kept.turn);
            self.bytes -= kept.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    #[derive(Debug, Clone)]
    enum Op {
        Begin(u64, u32, u64),
        Read(usize),
        Fail(usize),
        Forget(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0u64..3, 0u32..5, 1u64..40).prop_map(|(payload, chunk, bytes)| Op::Begin(payload, chunk, bytes)),
            4 => any::<usize>().prop_map(Op::Read),
            1 => any::<usize>().prop_map(Op::Fail),
            1 => (0u64..3).prop_map(Op::Forget),
        ]
    }

    /// One chunk as the model has it: its place and turn, its bytes, and whether it was read.
    type Model = Vec<(Place, CacheOrder, u64, bool)>;

    fn push_out(model: &mut Model, limit: u64) {
        let bytes = |model: &Model| model.iter().map(|(_, _, bytes, _)| bytes).sum::<u64>();
        while bytes(model) > limit
            && let Some(oldest) = model.iter().position(|(.., read)| *read)
        {
            model.remove(oldest);
        }
    }

    proptest! {
        #[test]
        fn the_newest_stay_and_what_is_being_read(limit in 0u64..100, ops in vec(op(), 0..60)) {
            let (mut shelf, mut model, mut begun) = (ChunkCache::new(limit), Model::new(), Vec::new());
            for op in ops {
                match op {
                    Op::Begin(payload, chunk, bytes) => {
                        let place = Place { payload, chunk: ChunkIndex(chunk) };
                        if shelf.get(place).is_none() {
                            let turn = shelf.begin(place, bytes, ());
                            begun.push((place, turn));
                            model.push((place, turn, bytes, false));
                        }
                    }
                    Op::Read(i) if !begun.is_empty() => {
                        let (place, turn) = begun[i % begun.len()];
                        shelf.handle_read(place, turn);
                        let kept = model.iter_mut().find(|kept| kept.1 == turn);
                        kept.into_iter().for_each(|kept| kept.3 = true);
                    }
                    Op::Fail(i) if !begun.is_empty() => {
                        let (place, turn) = begun.swap_remove(i % begun.len());
                        shelf.handle_failed(place, turn);
                        model.retain(|kept| kept.1 != turn);
                    }
                    Op::Forget(payload) => {
                        shelf.forget(payload);
                        model.retain(|kept| kept.0.payload != payload);
                    }
                    Op::Read(_) | Op::Fail(_) => {}
                }
                push_out(&mut model, limit);
                prop_assert_eq!(shelf.bytes(), model.iter().map(|kept| kept.2).sum::<u64>());
                prop_assert_eq!(shelf.by_place.len(), model.len());
                prop_assert!(model.iter().all(|kept| shelf.has(kept.0, kept.1)));
                prop_assert_eq!(shelf.read.len(), model.iter().filter(|kept| kept.3).count());
            }
        }
    }
}
