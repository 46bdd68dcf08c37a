//! [`Choice`]: which chunk a taker orders of which holder.

use super::{
    bits::{Bits, numbers, words},
    orders::Orders,
    random::Random,
};
use crate::{ChunkIndex, RangeSet, SOURCES_MAX, SubscriptionId};
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

#[cfg(test)]
mod tests;

/// The number of chunks that are drawn for one order, of which the rarest is taken: more would find rarer ones, and
/// take longer. The rarest tenth is found with a probability of 57 %.
const DRAWS: usize = 8;

/// The number of chunks of a slow near source that are looked through, from a random one on, for one that a far source
/// holds.
const HELD_BACK_LOOKS: usize = 64;

/// The choice of one taker, of one version: what it wants, who holds it, and what it has ordered of whom.
///
/// The taker calls `handle_*` with what it learns, and [`next`](Self::next) for each source as long as it has room for
/// more chunks; each chunk that `next` returns is ordered. Chunks wanted that no source holds are in
/// [`next_unheld`](Self::next_unheld).
///
/// An order takes the rarest of some chunks, drawn at random, that the source holds and that are wanted and not
/// ordered. When there is none, it repeats an order of another source that is late, once for each chunk. An order that
/// is much too late is taken away: its chunk may be ordered of every other source. A source has as many orders at once
/// as it delivers in a quarter of a second, and one more. A far source is asked only for what no near one has, or what
/// each near one that has it was asked for in vain; near ones that are behind, or much slower than it, do not count. One
/// that delivered nothing yet is tried with one order, if chunks of the near ones take a second or more.
///
/// Every call costs O(log n), with a factor of the number of sources where the wanted chunks change, except for those
/// that take sets, which cost as much for each number that changes. Memory: two bits for each chunk and source, and 20
/// bits for each chunk.
#[derive(Debug)]
pub struct Choice {
    random: Random,
    /// The chunks that have not arrived.
    wanted: Bits,
    /// The wanted chunks that are to be ordered.
    ready: Bits,
    /// Those of them that no source holds.
    unheld: Bits,
    /// The number of sources that hold each chunk.
    holders: Vec<u8>,
    /// The number of those that are near.
    near_holders: Vec<u8>,
    sources: BTreeMap<SubscriptionId, Source>,
    orders: Orders,
}

#[derive(Debug)]
struct Source {
    held: Bits,
    /// The chunks that may be ordered of it: it holds them, they are ready, and it was not asked for them; and no near
    /// source holds them, if it is far.
    ready: Bits,
    is_far: bool,
}

impl Choice {
    /// The choice among this many chunks, of which none is wanted. Takers with other seeds order other chunks first.
    pub fn new(chunks: u32, seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            wanted: Bits::new(chunks),
            ready: Bits::new(chunks),
            unheld: Bits::new(chunks),
            holders: vec![0; chunks as usize],
            near_holders: vec![0; chunks as usize],
            sources: BTreeMap::new(),
            orders: Orders::default(),
        }
    }

    /// Adds a source, which holds nothing yet. One more than [`SOURCES_MAX`] is not used.
    pub fn add_source(&mut self, source: SubscriptionId) {
        if self.sources.len() < SOURCES_MAX && !self.sources.contains_key(&source) {
            let none = || Bits::new(self.chunks());
            self.sources
                .insert(source, Source { held: none(), ready: none(), is_far: false });
            self.orders.add_source(source);
        }
    }

    /// Makes a source that holds nothing yet a far one: its chunks cost more than those of others.
    pub fn set_far(&mut self, source: SubscriptionId) {
        if let Some(source) = self.sources.get_mut(&source) {
            source.is_far = true;
        }
    }

    /// The usual time from an order to its chunk; `None` before the first one.
    pub fn usual(&self) -> Option<Duration> {
        self.orders.usual()
    }

    /// Removes a source. Chunks that were ordered of it alone are ordered again.
    pub fn remove_source(&mut self, source: SubscriptionId) {
        let Some(removed) = self.sources.remove(&source) else { return };
        for chunk in removed.held.iter() {
            self.release(chunk, removed.is_far);
        }
        for chunk in self.orders.remove_source(source) {
            self.make_ready(chunk);
        }
    }

    /// Records what a source can send now, and can send no longer; an order of that ends. Chunks that the version does
    /// not have are passed over.
    pub fn handle_held(&mut self, id: SubscriptionId, added: &RangeSet, withdrawn: &RangeSet) {
        let count = self.chunks();
        let Some(source) = self.sources.get_mut(&id) else { return };
        let (is_far, mut near) = (source.is_far, vec![]);
        for (word, mask) in words(added, count) {
            let new = mask & !source.held.word(word);
            for chunk in numbers(word, new) {
                source.held.insert(chunk);
                self.holders[chunk as usize] += 1;
                if !is_far {
                    self.near_holders[chunk as usize] += 1;
                    near.push(chunk);
                }
            }
            for chunk in numbers(word, new & self.ready.word(word)) {
                self.unheld.remove(chunk);
                if !self.orders.has(id, chunk) && (!is_far || self.near_holders[chunk as usize] == 0) {
                    source.ready.insert(chunk);
                }
            }
        }
        for far in self.sources.values_mut().filter(|source| source.is_far) {
            near.iter().for_each(|chunk| {
                far.ready.remove(*chunk);
            });
        }
        let Some(source) = self.sources.get_mut(&id) else { return };
        let mut lost = vec![];
        for (word, mask) in words(withdrawn, count) {
            for chunk in numbers(word, mask & source.held.word(word)) {
                source.held.remove(chunk);
                source.ready.remove(chunk);
                lost.push(chunk);
            }
        }
        for chunk in lost {
            self.release(chunk, is_far);
            self.handle_failed(id, ChunkIndex(chunk));
        }
    }

    /// The number of chunks.
    fn chunks(&self) -> u32 {
        self.holders.len() as u32
    }

    /// Records that one source fewer holds a chunk, a far one or not.
    fn release(&mut self, chunk: u32, is_far: bool) {
        let (holders, near) = (&mut self.holders[chunk as usize], &mut self.near_holders[chunk as usize]);
        *holders -= 1;
        *near -= u8::from(!is_far);
        let is_unheld = *holders == 0;
        match self.ready.contains(chunk) {
            true if is_unheld => drop(self.unheld.insert(chunk)),
            true if !is_far => self.offer(chunk),
            _ => {}
        }
    }

    /// Wants these chunks, which have not arrived: those with an encoding that the taker knows and can decode.
    pub fn want(&mut self, chunks: &RangeSet) {
        for (word, mask) in words(chunks, self.chunks()) {
            for chunk in numbers(word, mask & !self.wanted.word(word)) {
                self.wanted.insert(chunk);
                if !self.orders.is_placed(chunk) {
                    self.make_ready(chunk);
                }
            }
        }
    }

    /// Wants a chunk no longer: it has arrived, or comes from the origin. Orders of it stay orders until they end.
    pub fn drop_want(&mut self, chunk: ChunkIndex) {
        if self.wanted.remove(chunk.0) {
            self.make_unready(chunk.0);
            self.orders.forget_age(chunk.0);
        }
    }

    /// The next chunk to order of a source, which counts as ordered from now on; `None` if it should be asked for none
    /// at the moment: it has enough to do, or nothing of use.
    pub fn next(&mut self, source: SubscriptionId, now: Instant) -> Option<ChunkIndex> {
        while let Some(chunk) = self.orders.take_lost(now) {
            self.make_ready(chunk);
        }
        if !self.orders.has_room(source, now) || self.is_far_enough(source, now) {
            return None;
        }
        let chunk = self
            .rarest(source)
            .or_else(|| self.held_back(source, now))
            .or_else(|| self.late(source, now))?;
        self.orders.insert(source, chunk, now);
        self.make_unready(chunk);
        Some(ChunkIndex(chunk))
    }

    /// Whether another far source has orders and is not behind, and there are near ones: of several far ones at once, all at a
    /// site would order the same chunks.
    fn is_far_enough(&self, id: SubscriptionId, now: Instant) -> bool {
        let is_far = self.sources.get(&id).is_some_and(|source| source.is_far);
        let is_busy = |other| self.orders.count_of(other) > 0 && !self.orders.is_behind(other, now);
        is_far
            && self.sources.values().any(|source| !source.is_far)
            && self
                .sources
                .iter()
                .any(|(other, source)| source.is_far && *other != id && is_busy(*other))
    }

    /// Whether a near source leaves its chunks to a far one, because it is behind with an order or much slower.
    fn gives_way(&self, near: SubscriptionId, far: SubscriptionId, now: Instant) -> bool {
        self.orders.is_behind(near, now) || self.orders.is_slower(near, far)
    }

    /// Whether a chunk is left to near sources that hold it.
    fn is_left_to_near(&self, chunk: u32, far: SubscriptionId, now: Instant) -> bool {
        let mut near = self.sources.iter().filter(|(_, source)| !source.is_far);
        near.any(|(id, source)| source.held.contains(chunk) && !self.gives_way(*id, far, now))
    }

    /// Records that an ordered chunk arrived and is verified. The chunk is wanted no longer.
    pub fn handle_delivered(&mut self, source: SubscriptionId, chunk: ChunkIndex, now: Instant) {
        self.orders.handle_delivered(source, chunk.0, now);
        self.drop_want(chunk);
    }

    /// Ends an order that was not sent, since its chunk has arrived: how long that took says nothing of the source.
    pub fn take_back(&mut self, source: SubscriptionId, chunk: ChunkIndex) {
        self.drop_want(chunk);
        self.orders.end(source, chunk.0);
    }

    /// Records that an order will not be delivered: it was lost with its lane, or what arrived is discarded. The chunk
    /// is ordered again if it is wanted and was ordered of nobody else.
    pub fn handle_failed(&mut self, source: SubscriptionId, chunk: ChunkIndex) {
        if self.orders.end(source, chunk.0) || self.ready.contains(chunk.0) {
            self.make_ready(chunk.0);
        }
    }

    /// The number of chunks that are ordered of a source and have not arrived.
    pub fn ordered_of(&self, source: SubscriptionId) -> usize {
        self.orders.count_of(source)
    }

    /// Whether a chunk is ordered of a source.
    pub fn is_ordered_of(&self, source: SubscriptionId, chunk: ChunkIndex) -> bool {
        self.orders.has(source, chunk.0)
    }

    /// The number of wanted chunks that no source holds.
    pub fn unheld(&self) -> u32 {
        self.unheld.len()
    }

    /// One of the wanted chunks that no source holds and that are not ordered. Once it is requested of the origin, call
    /// [`drop_want`](Self::drop_want); if that is lost, [`want`](Self::want).
    pub fn next_unheld(&mut self) -> Option<ChunkIndex> {
        self.unheld.draw(&mut self.random).map(ChunkIndex)
    }

    /// One of the wanted chunks that are not ordered, held or not: their holders may be silent. As with
    /// [`next_unheld`](Self::next_unheld).
    pub fn next_ready(&mut self) -> Option<ChunkIndex> {
        self.ready.draw(&mut self.random).map(ChunkIndex)
    }

    /// The rarest of some chunks that may be ordered of a source.
    fn rarest(&mut self, source: SubscriptionId) -> Option<u32> {
        let ready = &self.sources.get(&source)?.ready;
        if ready.is_empty() {
            return None;
        }
        let drawn = (0..DRAWS).filter_map(|_| ready.draw(&mut self.random));
        drawn.min_by_key(|chunk| self.holders[*chunk as usize])
    }

    /// For a far source, a chunk that is to be ordered and that only near ones hold which give way to it.
    fn held_back(&mut self, id: SubscriptionId, now: Instant) -> Option<u32> {
        let Source { held, .. } = self.sources.get(&id).filter(|source| source.is_far)?;
        let near = self.sources.iter().filter(|(_, source)| !source.is_far);
        let slow: Vec<&Bits> = near
            .filter(|(near, _)| self.gives_way(**near, id, now))
            .map(|(_, source)| &source.ready)
            .collect();
        let random = &mut self.random;
        let firsts: Vec<_> = slow.iter().map(|ready| ready.draw(random)).collect();
        let chunks = slow.into_iter().zip(firsts).flat_map(|(ready, first)| {
            std::iter::successors(first, |last| ready.first_from(last + 1)).take(HELD_BACK_LOOKS)
        });
        let mut of_use = chunks.filter(|chunk| held.contains(*chunk) && !self.orders.has(id, *chunk));
        of_use.find(|chunk| !self.is_left_to_near(*chunk, id, now))
    }

    /// A chunk that is late at another source, and that this one holds. What is late at a near source is left to the others
    /// there, until it is taken away.
    fn late(&self, id: SubscriptionId, now: Instant) -> Option<u32> {
        let Source { held, is_far, .. } = self.sources.get(&id)?;
        self.orders.late(now, |chunk| {
            let is_of_use =
                held.contains(chunk) && self.wanted.contains(chunk) && !self.orders.has(id, chunk);
            is_of_use && !(*is_far && self.is_left_to_near(chunk, id, now))
        })
    }

    /// Lets a chunk be ordered, if it is wanted.
    fn make_ready(&mut self, chunk: u32) {
        if !self.wanted.contains(chunk) {
            return;
        }
        self.ready.insert(chunk);
        if self.holders[chunk as usize] == 0 {
            self.unheld.insert(chunk);
        }
        self.offer(chunk);
    }

    /// Lets the sources be asked for a chunk that is ready: those that hold it and were not asked for it; far ones only if no
    /// near one is left.
    fn offer(&mut self, chunk: u32) {
        let orders = &self.orders;
        let can_send =
            |id: &SubscriptionId, source: &Source| source.held.contains(chunk) && !orders.has(*id, chunk);
        let is_near = self.sources.iter().any(|(id, source)| !source.is_far && can_send(id, source));
        for (id, source) in &mut self.sources {
            if can_send(id, source) && !(source.is_far && is_near) {
                source.ready.insert(chunk);
            }
        }
    }

    fn make_unready(&mut self, chunk: u32) {
        if self.ready.remove(chunk) {
            self.unheld.remove(chunk);
            self.sources.values_mut().for_each(|source| {
                source.ready.remove(chunk);
            });
        }
    }
}
