//! What was read of a device and is kept for whoever asks next.

use std::collections::BTreeMap;
use tensor_relay_protocol::ChunkIndex;

/// A chunk of a payload, among all of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) payload: u64,
    pub(super) chunk: ChunkIndex,
}

/// The chunks of one device that are being read, and of those that were read the newest, within a bound. Pure.
///
/// Chunks that are being read count against the bound as well, and push others out, but stay themselves: who asks for one
/// meanwhile waits for it, however small the bound is. There are as many of them as sends under way.
#[derive(Debug)]
pub(super) struct ChunkCache<T> {
    limit_bytes: u64,
    bytes: u64,
    next_turn: u64,
    by_place: BTreeMap<Place, Kept<T>>,
    /// Those that were read, by when they were asked for: the oldest goes first.
    read: BTreeMap<CacheOrder, Place>,
}

/// When a chunk was first asked for. Names it while it is on the shelf.
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

    /// What is kept or being read of this chunk.
    pub(super) fn get(&self, place: Place) -> Option<&T> {
        Some(&self.by_place.get(&place)?.value)
    }

    /// Puts a chunk on the shelf that begins to be read, and is not there yet. `bytes` is what it takes from others.
    pub(super) fn begin(&mut self, place: Place, bytes: u64, value: T) -> CacheOrder {
        let turn = CacheOrder(self.next_turn);
        self.next_turn += 1;
        self.bytes += bytes;
        let before = self.by_place.insert(place, Kept { turn, bytes, value });
        debug_assert!(before.is_none(), "a chunk is read by one at a time");
        self.push_out();
        turn
    }

    /// A chunk was read, and may go from now on. Nothing, where it was forgotten meanwhile.
    pub(super) fn handle_read(&mut self, place: Place, turn: CacheOrder) {
        if self.has(place, turn) {
            self.read.insert(turn, place);
            self.push_out();
        }
    }

    /// A chunk could not be read: who asks later begins anew.
    pub(super) fn handle_failed(&mut self, place: Place, turn: CacheOrder) {
        if self.has(place, turn) {
            self.remove(place);
        }
    }

    /// Nobody will ask for this payload again.
    pub(super) fn forget(&mut self, payload: u64) {
        let all = |chunk| Place { payload, chunk };
        let of_payload = self.by_place.range(all(ChunkIndex(0))..=all(ChunkIndex(u32::MAX)));
        let places: Vec<Place> = of_payload.map(|(place, _)| *place).collect();
        places.into_iter().for_each(|place| self.remove(place));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_place.is_empty()
    }

    /// What all that is on it takes.
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
