//! [`Requests`]: the chunks that the receiver requests of a version that is not pushed any more, and of which source
//! (PROTOCOL.md §6.8, §6.10).

use super::{Arrivals, Assembly, shared::Shared};
use crate::{ChunkIndex, PARTIAL_RANGES_MAX, RangeSet, SubscriptionId};
use std::collections::BTreeMap;

mod sharing;
#[cfg(test)]
mod tests;

/// The requests of the current version. A version begins pushed: its origin begins chunks in order while there is
/// credit. After a loss, or with a second source, the receiver requests what it lacks, so many chunks at a time that
/// those ordered and those arriving stay within its allowance. A shared version is pushed *and* requested.
#[derive(Debug, Default)]
pub(super) struct Requests {
    /// Whether a lane was retired since the version began: until then, a stream that ends early belongs to a version
    /// that the server gave up.
    is_lane_retired: bool,
    /// Whether chunks that were pushed may have been lost.
    is_loss_possible: bool,
    /// The state once chunks are requested.
    pulled: Option<Pulled>,
    /// What is known of the version if it is shared.
    shared: Option<Box<Shared>>,
}

/// A version whose chunks are requested. Each wanted chunk is verified, arriving, ordered of at least one source, or in
/// `unordered`.
#[derive(Debug, Default)]
struct Pulled {
    /// The chunks to order.
    unordered: RangeSet,
    /// The chunks that were ordered of a second source, near the end.
    twice: RangeSet,
    /// The chunks that were discarded, to order again.
    discarded: RangeSet,
    sources: BTreeMap<SubscriptionId, Source>,
    /// The sources that were left. Chunks that they had begun may still arrive.
    left: BTreeMap<SubscriptionId, Progress>,
    list: List,
}

/// A source of the current version.
#[derive(Debug, Default)]
struct Source {
    /// The chunks that were ordered and whose headers have not arrived.
    ordered: RangeSet,
    /// Whether to send an order even if nothing can be added to it, because earlier ones may have been lost with a
    /// lane, or none was sent yet.
    is_order_due: bool,
    progress: Progress,
}

/// The progress of a source.
#[derive(Debug, Default)]
struct Progress {
    /// The number of events that show progress.
    events: u64,
    /// Whether a part of a chunk arrived since the last check.
    has_part: bool,
    /// That number at the last check, and the number of checks since it rose.
    checked: (u64, u32),
}

/// The list of chunk hashes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum List {
    /// The version comes from its origin alone, whose `Complete` has its digest.
    #[default]
    Unneeded,
    /// The next order asks for it.
    Due,
    /// It was asked of this source.
    Asked(SubscriptionId),
}

/// A request for chunks of the current version.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) source: SubscriptionId,
    pub(super) chunks: RangeSet,
    /// Whether it asks for the list of hashes.
    pub(super) hashes: bool,
    /// Whether the chunks were discarded, so that they are sent again, and without a base.
    pub(super) again: bool,
}

impl Requests {
    /// Records that a lane of a source was retired, so that chunks of the version may have been lost.
    pub(super) fn handle_retired(&mut self, source: SubscriptionId, origin: SubscriptionId) {
        match &mut self.pulled {
            None if source != origin => {} // It sends nothing yet.
            None => (self.is_lane_retired, self.is_loss_possible) = (true, true),
            Some(pulled) => {
                if let Some(source) = pulled.sources.get_mut(&source) {
                    source.is_order_due |= !source.ordered.is_empty();
                }
                if let Some(shared) = self.shared.as_mut().filter(|_| source == origin) {
                    shared.handle_loss();
                }
            }
        }
    }

    /// Whether chunks are requested, so that the version is not pushed any more.
    pub(super) fn is_pushing_ended(&self) -> bool {
        self.pulled.is_some() && self.shared.is_none()
    }

    /// Whether the version is pushed, and nothing is requested.
    pub(super) fn is_only_pushed(&self) -> bool {
        self.pulled.is_none()
    }

    /// The number of sources; none while the version is pushed.
    pub(super) fn sources(&self) -> usize {
        self.pulled.as_ref().map_or(0, |pulled| pulled.sources.len())
    }

    /// Whether chunks are requested of this source.
    pub(super) fn has_source(&self, source: SubscriptionId) -> bool {
        self.pulled.as_ref().is_some_and(|pulled| pulled.sources.contains_key(&source))
    }

    /// The sources except `origin`.
    pub(super) fn others(&self, origin: SubscriptionId) -> Vec<SubscriptionId> {
        let sources = self.pulled.iter().flat_map(|pulled| pulled.sources.keys());
        sources.copied().filter(|source| *source != origin).collect()
    }

    /// The source that was asked for the list of hashes.
    pub(super) fn lister(&self) -> Option<SubscriptionId> {
        match self.pulled.as_ref()?.list {
            List::Asked(source) => Some(source),
            List::Unneeded | List::Due => None,
        }
    }

    /// Ends the pushing by `origin`. The first `credit` of the missing chunks may be under way already, so they are
    /// ordered of it.
    pub(super) fn end_pushing(&mut self, origin: SubscriptionId, missing: &RangeSet, credit: u32) {
        if self.pulled.is_none() && self.shared.is_none() {
            let mut pulled = Pulled { unordered: missing.clone(), ..Pulled::default() };
            let ordered = take(&mut pulled.unordered, credit.min(PARTIAL_RANGES_MAX as u32));
            pulled
                .sources
                .insert(origin, Source { ordered, is_order_due: true, ..Source::default() });
            self.pulled = Some(pulled);
        }
    }

    /// Adds a source. From the second on, chunks are compared with a list of hashes.
    pub(super) fn add_source(&mut self, source: SubscriptionId) {
        let Some(pulled) = &mut self.pulled else { return };
        let is_order_due = self.shared.is_none();
        pulled.sources.insert(source, Source { is_order_due, ..Source::default() });
        if pulled.list == List::Unneeded && pulled.sources.len() > 1 {
            pulled.list = List::Due;
        }
    }

    /// Removes a source, whose streams may still arrive. Its orders go to others; the list that it had not completed is
    /// asked of another one.
    pub(super) fn remove_source(&mut self, source: SubscriptionId, assembly: &Assembly) {
        let Some(pulled) = &mut self.pulled else { return };
        let Some(removed) = pulled.sources.remove(&source) else { return };
        for chunk in removed.ordered.iter() {
            pulled.put_back(chunk, assembly, self.shared.as_deref_mut());
        }
        pulled.left.insert(source, removed.progress);
        if pulled.list == List::Asked(source) && !assembly.is_listed() {
            pulled.list = List::Due;
        }
    }

    /// Records that the header of a chunk arrived; returns whether the chunk was ordered.
    pub(super) fn handle_header(&mut self, source: SubscriptionId, chunk: ChunkIndex) -> bool {
        let pulled = self.pulled.as_mut();
        let Some(source) = pulled.and_then(|pulled| pulled.sources.get_mut(&source)) else { return false };
        source.progress.events += 1;
        source.ordered.remove(chunk.0)
    }

    /// Records progress of a source: a stream of it ended, verified or lost, or it waits for its own source.
    pub(super) fn note_progress(&mut self, source: SubscriptionId) {
        if let Some(progress) = self.progress_mut(source) {
            progress.events += 1;
        }
    }

    /// Records that a part of a chunk arrived from a source.
    pub(super) fn note_part(&mut self, source: SubscriptionId) {
        if let Some(progress) = self.progress_mut(source) {
            progress.has_part = true;
        }
    }

    /// The progress of a source, or of one that was left.
    fn progress_mut(&mut self, source: SubscriptionId) -> Option<&mut Progress> {
        let pulled = self.pulled.as_mut()?;
        let used = pulled.sources.get_mut(&source).map(|used| &mut used.progress);
        used.or_else(|| pulled.left.get_mut(&source))
    }

    /// Records that what was received of a chunk was discarded.
    pub(super) fn handle_discarded(&mut self, chunk: ChunkIndex) {
        if let Some(pulled) = &mut self.pulled {
            pulled.discarded.insert(chunk.0);
        }
        if let Some(shared) = &mut self.shared {
            shared.drop_chunk(chunk); // The origin sends it, without a base.
        }
    }

    /// Records that a chunk's stream was lost, so that the chunk may be missing.
    pub(super) fn handle_lost(&mut self, chunk: ChunkIndex, assembly: &Assembly) {
        match &mut self.pulled {
            None => self.is_loss_possible |= self.is_lane_retired,
            Some(pulled) => pulled.put_back(chunk.0, assembly, self.shared.as_deref_mut()),
        }
    }

    /// Checks, once a second, whether each source that owes chunks, or was left while it sent some, made progress. Returns
    /// one that made none in `checks_max` checks, or fewer if a chunk that it sends is here a second time and waits for it, when
    /// parts of chunks do not count; except `origin`, if there is another source or the version is shared.
    pub(super) fn check_sources(
        &mut self,
        origin: SubscriptionId,
        arrivals: &Arrivals,
        checks_max: u32,
    ) -> Option<SubscriptionId> {
        let Pulled { sources, left, .. } = self.pulled.as_mut()?;
        let held_up_max = self
            .shared
            .as_ref()
            .map_or(checks_max, |shared| shared.held_up_checks(checks_max));
        let mut stalled = vec![];
        let owing = sources
            .iter_mut()
            .map(|(id, source)| (*id, !source.ordered.is_empty(), &mut source.progress));
        for (id, owes, progress) in owing.chain(left.iter_mut().map(|(id, progress)| (*id, false, progress)))
        {
            let is_moving = std::mem::take(&mut progress.has_part);
            let (max, is_moving) = match arrivals.holds_up(id) {
                true => (held_up_max, false),
                false => (checks_max, is_moving),
            };
            let owes = owes || arrivals.receiving_of(id) > 0;
            let is_still = progress.check(owes && !is_moving, max);
            stalled.extend(Some(id).filter(|_| is_still && id != origin));
        }
        let is_shared = self.shared.is_some();
        stalled
            .into_iter()
            .find(|id| is_shared || sources.keys().any(|other| other != id))
    }

    /// The next order; `None` if there is none. Of `assembly`, `arrivals` are being received; those and the ordered ones
    /// are at most `allowance`, shared equally among the sources.
    pub(super) fn next(
        &mut self,
        origin: SubscriptionId,
        assembly: &Assembly,
        arrivals: &Arrivals,
        allowance: u32,
    ) -> Option<Order> {
        if std::mem::take(&mut self.is_loss_possible) {
            let missing = assembly.missing();
            if !missing.is_empty() {
                self.end_pushing(origin, &missing, arrivals.credit());
            }
        }
        match (&mut self.pulled, &mut self.shared) {
            (Some(pulled), None) => pulled.next(origin, assembly, arrivals, allowance),
            (Some(pulled), Some(shared)) => {
                pulled.next_of_shared(shared, origin, assembly, (arrivals, allowance))
            }
            (None, _) => None,
        }
    }
}

impl Progress {
    /// Checks a source, which `owes` chunks or not; returns whether it made no progress in `checks_max` checks.
    fn check(&mut self, owes: bool, checks_max: u32) -> bool {
        let is_still = owes && self.events == self.checked.0;
        self.checked = (self.events, if is_still { self.checked.1 + 1 } else { 0 });
        self.checked.1 >= checks_max
    }
}

impl Pulled {
    /// Puts a missing chunk back to those that are to be ordered. Of a source that was asked for it, it is ordered again:
    /// that source may have lost it with a lane while it was not missing.
    fn put_back(&mut self, chunk: u32, assembly: &Assembly, shared: Option<&mut Shared>) {
        if !assembly.is_missing(ChunkIndex(chunk)) || self.discarded.contains(chunk) {
            return;
        }
        let mut is_ordered = false;
        for source in self.sources.values_mut().filter(|source| source.ordered.contains(chunk)) {
            (source.is_order_due, is_ordered) = (true, true);
        }
        match shared {
            Some(shared) => shared.put_back(ChunkIndex(chunk), assembly),
            None if is_ordered => {}
            None => drop(self.unordered.insert(chunk)),
        }
    }

    fn next(
        &mut self,
        origin: SubscriptionId,
        assembly: &Assembly,
        arrivals: &Arrivals,
        allowance: u32,
    ) -> Option<Order> {
        // At most as many chunks as ranges, so that any of them may be ordered.
        let max = allowance.clamp(1, PARTIAL_RANGES_MAX as u32);
        let outstanding: u32 = self.sources.values().map(|source| source.ordered.len()).sum();
        let open = max.saturating_sub(outstanding + arrivals.receiving() as u32);
        let share = (max / self.sources.len().max(1) as u32).max(1);
        let lister = match self.sources.contains_key(&origin) {
            true => Some(origin),
            false => self.sources.keys().next().copied(),
        };
        let ids: Vec<_> = self.sources.keys().copied().collect();
        for id in ids {
            let source = &self.sources[&id];
            let busy = source.ordered.len() + arrivals.receiving_of(id) as u32;
            let room = share.saturating_sub(busy).min(open);
            if lister == Some(id) && room > 0 && !self.discarded.is_empty() {
                return Some(self.order_again(id, room));
            }
            let mut chunks = self.take_missing(room, assembly);
            if busy == 0 && room > 0 && chunks.is_empty() {
                chunks = self.order_twice(id, room, assembly);
            }
            let hashes = self.list == List::Due && lister == Some(id);
            if hashes {
                self.list = List::Asked(id);
            }
            let source = self.sources.get_mut(&id)?;
            let is_due = std::mem::take(&mut source.is_order_due);
            source.ordered = source.ordered.union(&chunks);
            if is_due {
                let missing = source.ordered.iter().filter(|chunk| assembly.is_missing(ChunkIndex(*chunk)));
                chunks = missing.map(|chunk| chunk..chunk + 1).collect();
            }
            if is_due || hashes || !chunks.is_empty() {
                return Some(Order { source: id, chunks, hashes, again: false });
            }
        }
        None
    }

    /// The order of up to `count` chunks that were discarded.
    fn order_again(&mut self, id: SubscriptionId, count: u32) -> Order {
        let chunks = take(&mut self.discarded, count);
        if let Some(source) = self.sources.get_mut(&id) {
            source.ordered = source.ordered.union(&chunks);
        }
        Order { source: id, chunks, hashes: false, again: true }
    }

    /// Takes up to `count` chunks that are to be ordered.
    fn take_missing(&mut self, count: u32, assembly: &Assembly) -> RangeSet {
        let mut taken = RangeSet::new();
        while taken.len() < count {
            let Some(chunk) = self.unordered.iter().next() else { break };
            self.unordered.remove(chunk);
            if assembly.is_missing(ChunkIndex(chunk)) {
                taken.insert(chunk);
            }
        }
        taken
    }

    /// Chunks for a source that has nothing to do, when every chunk is ordered: the last half of what another source
    /// owes and has not begun, each once.
    fn order_twice(&mut self, idle: SubscriptionId, count: u32, assembly: &Assembly) -> RangeSet {
        let others = self.sources.iter().filter(|(id, _)| **id != idle);
        let Some((_, slow)) = others.max_by_key(|(_, source)| source.ordered.len()) else {
            return RangeSet::new();
        };
        let is_owed = |chunk: &u32| !self.twice.contains(*chunk) && assembly.is_missing(ChunkIndex(*chunk));
        let owed: Vec<u32> = slow.ordered.iter().filter(is_owed).collect();
        let first = owed.len() - owed.len().div_ceil(2).min(count as usize);
        let chunks: RangeSet = owed[first..].iter().map(|chunk| *chunk..chunk + 1).collect();
        self.twice = self.twice.union(&chunks);
        chunks
    }
}

/// Takes the first `count` numbers of `set`.
fn take(set: &mut RangeSet, count: u32) -> RangeSet {
    let taken: RangeSet = set.iter().take(count as usize).map(|chunk| chunk..chunk + 1).collect();
    *set = set.difference(&taken);
    taken
}
