use std::{ops::Range, sync::Arc};

use crate::{
    engine::{CopyEngine, CopySegment},
    parts::{Parts, PartsError},
    spread::{Rectangle, SpreadError},
    spread_parts::SpreadParts,
};

/// The parts of a payload in the memory of an engine's device.
pub(crate) struct DeviceParts<E: CopyEngine> {
    parts: Parts<Arc<E::Memory>>,
    spread: SpreadParts<Arc<E::Memory>>,
}

impl<E: CopyEngine> DeviceParts<E> {
    /// One part that is the whole payload.
    pub(crate) fn whole(engine: &E, memory: Arc<E::Memory>) -> Self {
        let parts = Parts::whole(engine.memory_len(&memory), memory);
        Self { parts, spread: SpreadParts::default() }
    }

    /// Checks the parts of a payload of `len_bytes`.
    pub(crate) fn new(
        engine: &E,
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, Arc<E::Memory>)>,
        spread: SpreadParts<Arc<E::Memory>>,
    ) -> Result<Self, PartsError> {
        spread.check_bounds(len_bytes)?;
        let parts = Parts::measured(len_bytes, parts, |memory| engine.memory_len(memory))?;
        Ok(Self { parts, spread })
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.parts.len_bytes()
    }

    /// The segments of `range`, which is no longer than a slot: those of the parts that it touches, in their order, then
    /// those of spread parts.
    pub(crate) fn segments(
        &self,
        engine: &E,
        range: &Range<u64>,
    ) -> Result<Vec<CopySegment<E::Memory>>, SpreadError> {
        let mut segments: Vec<_> = self.whole_segments(range).collect();
        for (part, memory) in self.spread.touching(range) {
            part.rectangles(range, engine.memory_len(memory), |rectangle| {
                segments.push(CopySegment { memory: Arc::clone(memory), rectangle });
            })?;
        }
        Ok(segments)
    }

    /// The bytes of `range` that may lie in no part, as offsets in it, in order: all of it, if it touches a spread part.
    pub(crate) fn gaps(&self, range: &Range<u64>) -> Vec<Range<usize>> {
        let is_spread = self.spread.touching(range).next().is_some();
        let mut end = 0;
        let before = |segment: CopySegment<E::Memory>| {
            let Rectangle { part, run_bytes, .. } = segment.rectangle;
            let gap = end..part as usize;
            end = gap.end + run_bytes as usize;
            gap
        };
        let known = self.whole_segments(range).filter(|_| !is_spread);
        let mut gaps: Vec<_> = known.map(before).collect();
        gaps.push(end..(range.end - range.start) as usize);
        gaps
    }

    /// The segments of `range` in the parts that are one run each.
    fn whole_segments(&self, range: &Range<u64>) -> impl Iterator<Item = CopySegment<E::Memory>> {
        let start = range.start;
        self.parts.common_with(range).map(move |(common, part, memory)| CopySegment {
            memory: Arc::clone(memory),
            rectangle: Rectangle::run(
                common.start - start,
                common.start - part.start,
                common.end - common.start,
            ),
        })
    }
}
