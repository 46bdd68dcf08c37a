use crate::Lock;
use std::{collections::BTreeMap, ops::Range, sync::Arc};

use crate::{parts::Parts, region::Region, sink::SinkError, spread_parts::SpreadParts};

/// The memory of a host sink. It is lent in pieces, and given back by the commit, when no piece is lent.
///
/// A [`Piece`] is cut out of the [`FreePieces`] and put back when it is dropped. Therefore no two writers share a byte,
/// and memory is never returned while it is being written.
///
/// The runs of different chunks alternate in the memory of spread parts, so it is not cut: a writer has a [`Claim`] of its
/// bytes, and locks each memory while it copies to it.
pub(crate) struct SinkMemory {
    parts: Parts<()>,
    spread: SpreadParts<Lock<Region>>,
    state: Lock<State>,
}

impl SinkMemory {
    pub(crate) fn new(parts: Parts<Region>, spread: SpreadParts<Lock<Region>>) -> Self {
        let (parts, regions) = parts.split();
        let mut free = FreePieces::default();
        for (range, region) in parts.ranges().zip(regions) {
            free.put_back(range.start, region);
        }
        Self {
            parts,
            spread,
            state: Lock::new(State { is_committed: false, free, claimed: BTreeMap::new() }),
        }
    }

    pub(crate) fn parts(&self) -> &Parts<()> {
        &self.parts
    }

    pub(crate) fn spread(&self) -> &SpreadParts<Lock<Region>> {
        &self.spread
    }

    /// Lends `range`, which lies in one part.
    pub(crate) fn lend(self: &Arc<Self>, range: &Range<u64>) -> Result<Piece, SinkError> {
        let Range { start, end } = *range;
        let cut = self.state.lock().uncommitted()?.cut(range);
        let region = cut.ok_or(SinkError::Busy { start, end })?;
        Ok(Piece { start, region, memory: Arc::clone(self) })
    }

    /// Lends the intersections of `range` with the parts, and claims those with spread parts: all or nothing.
    pub(crate) fn lend_common(
        self: &Arc<Self>,
        range: &Range<u64>,
    ) -> Result<(Vec<Piece>, Option<Claim>), SinkError> {
        let Range { start, end } = *range;
        let common: Vec<_> = self.parts.common_with(range).map(|(common, ..)| common).collect();
        let spread = self.spread.hull_in(range);
        let lent = self.state.lock().lend(&common, &spread)?;
        let regions = lent.ok_or(SinkError::Busy { start, end })?;
        let piece = |(start, region)| Piece { start, region, memory: Arc::clone(self) };
        let claim = || Claim { start: spread.start, memory: Arc::clone(self) };
        Ok((regions.into_iter().map(piece).collect(), (!spread.is_empty()).then(claim)))
    }

    /// Copies the bytes of `range`, which lies in one part, to `out`, under the lock. Returns false if any is lent, or after
    /// the commit.
    pub(crate) fn copy(&self, range: &Range<u64>, out: &mut [u8]) -> bool {
        let state = self.state.lock();
        let around = state.free.by_start.range(..=range.start).next_back();
        let Some((start, region)) = around.filter(|_| state.free.has(range)) else { return range.is_empty() };
        let within = (range.start - start) as usize..(range.end - start) as usize;
        out.copy_from_slice(&region[within]);
        true
    }

    /// Ends the lending and returns the memory of each part, then that of the spread parts, unless some of it is lent.
    pub(crate) fn commit(&self) -> Result<Vec<Region>, SinkError> {
        let mut state = self.state.lock();
        let placed_bytes = self.parts.placed_bytes();
        let lent_bytes = placed_bytes - state.uncommitted()?.len_bytes() + state.claimed_bytes();
        if lent_bytes > 0 {
            return Err(SinkError::StillLent {
                lent_bytes,
                len_bytes: placed_bytes + self.spread.len_bytes(),
            });
        }
        let whole = |range| state.free.cut(range).expect("nothing is lent, so each part is complete");
        let regions = self.parts.ranges().map(whole);
        // Nothing is claimed, so nobody copies.
        let spread = self.spread.memories().iter().map(|memory| std::mem::take(&mut *memory.lock()));
        let all = regions.chain(spread).collect();
        state.is_committed = true;
        Ok(all)
    }

    fn take_back(&self, start: u64, region: Region) {
        // Only an empty piece can still be lent after the commit, and returning it changes nothing.
        self.state.lock().free.put_back(start, region);
    }

    /// Checks that the free pieces and `lent_bytes` add up to the parts, and that no two free pieces of one part touch.
    #[cfg(test)]
    pub(crate) fn check(&self, lent_bytes: u64) {
        let state = self.state.lock();
        assert_eq!(state.free.len_bytes() + lent_bytes, self.parts.placed_bytes());
        let ends = state.free.by_start.iter().map(|(start, region)| start + region.len() as u64);
        for (end, next) in ends.zip(state.free.by_start.keys().skip(1)) {
            let seam = self.parts.ranges().any(|part| part.start == end);
            assert!(end < *next || end == *next && seam);
        }
    }
}

/// A lent range of a sink's memory. Dropping it returns the memory to the sink.
pub(crate) struct Piece {
    start: u64,
    region: Region,
    memory: Arc<SinkMemory>,
}

impl Piece {
    /// Its start in the payload.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.region
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.region
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.memory.take_back(self.start, std::mem::take(&mut self.region));
    }
}

/// The claim of a range of spread parts. Dropping it gives the range back.
pub(crate) struct Claim {
    start: u64,
    memory: Arc<SinkMemory>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.memory.state.lock().claimed.remove(&self.start);
    }
}

struct State {
    is_committed: bool,
    free: FreePieces,
    /// The claimed ranges of spread parts, which are disjoint and not empty: their ends by their starts. An open target
    /// holds each, which bounds them.
    claimed: BTreeMap<u64, u64>,
}

impl State {
    /// The free pieces. Fails after the commit.
    fn uncommitted(&mut self) -> Result<&mut FreePieces, SinkError> {
        match self.is_committed {
            true => Err(SinkError::Committed),
            false => Ok(&mut self.free),
        }
    }

    /// Cuts out all of `ranges`, and claims `spread`; `None`, and nothing changes, if any byte of them is lent or claimed.
    fn lend(
        &mut self,
        ranges: &[Range<u64>],
        spread: &Range<u64>,
    ) -> Result<Option<Vec<(u64, Region)>>, SinkError> {
        let is_claimed = self.is_claimed(spread);
        let free = self.uncommitted()?;
        let cut = if is_claimed { None } else { free.cut_all(ranges) };
        if cut.is_some() && !spread.is_empty() {
            self.claimed.insert(spread.start, spread.end);
        }
        Ok(cut)
    }

    fn is_claimed(&self, range: &Range<u64>) -> bool {
        let before_end = self.claimed.range(..range.end).next_back();
        !range.is_empty() && before_end.is_some_and(|(_, end)| *end > range.start)
    }

    fn claimed_bytes(&self) -> u64 {
        self.claimed.iter().map(|(start, end)| end - start).sum()
    }
}

/// The memory that is not lent, by its start in the payload. No free piece is empty, and free pieces that are adjacent
/// both in the payload and in memory are joined.
#[derive(Default)]
struct FreePieces {
    by_start: BTreeMap<u64, Region>,
}

impl FreePieces {
    fn len_bytes(&self) -> u64 {
        self.by_start.values().map(|region| region.len() as u64).sum()
    }

    /// Whether one free piece contains `range`.
    fn has(&self, range: &Range<u64>) -> bool {
        let around = self.by_start.range(..=range.start).next_back();
        range.is_empty() || around.is_some_and(|(start, region)| range.end <= start + region.len() as u64)
    }

    /// Removes and returns the memory of `range`, if one free piece contains it.
    fn cut(&mut self, range: &Range<u64>) -> Option<Region> {
        if range.is_empty() {
            return Some(Region::default());
        }
        if !self.has(range) {
            return None;
        }
        let (&before, _) = self.by_start.range(..=range.start).next_back()?;
        let mut piece = self.by_start.remove(&before)?;
        let mut cut = piece.split_off((range.start - before) as usize)?;
        let after = cut.split_off((range.end - range.start) as usize)?;
        self.put_back(before, piece);
        self.put_back(range.end, after);
        Some(cut)
    }

    /// Removes all of `ranges`, which are disjoint, and returns them with their starts; `None`, and nothing changes, if
    /// any is lent.
    fn cut_all(&mut self, ranges: &[Range<u64>]) -> Option<Vec<(u64, Region)>> {
        let all_here = ranges.iter().all(|range| self.has(range));
        let cut = |range: &Range<u64>| Some((range.start, self.cut(range)?));
        all_here.then(|| ranges.iter().map(cut).collect())?
    }

    /// Adds a free piece, and joins it with those that are adjacent both in the payload and in memory.
    fn put_back(&mut self, mut start: u64, mut region: Region) {
        if region.is_empty() {
            return;
        }
        let end = start + region.len() as u64;
        if let Some(next) = self.by_start.remove(&end) {
            match region.join(next) {
                Ok(joined) => region = joined,
                Err((alone, next)) => {
                    region = alone;
                    self.by_start.insert(end, next);
                }
            }
        }
        if let Some((before, previous)) = self.take_ending_at(start) {
            match previous.join(region) {
                Ok(joined) => (start, region) = (before, joined),
                Err((previous, alone)) => {
                    region = alone;
                    self.by_start.insert(before, previous);
                }
            }
        }
        self.by_start.insert(start, region);
    }

    fn take_ending_at(&mut self, end: u64) -> Option<(u64, Region)> {
        let (&start, region) = self.by_start.range(..end).next_back()?;
        let touches = start + region.len() as u64 == end;
        touches.then(|| self.by_start.remove_entry(&start))?
    }
}
