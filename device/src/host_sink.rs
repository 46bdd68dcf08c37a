use std::{fmt, future::ready, ops::Range, sync::Arc};

use crate::{
    Lock,
    host_memory::HostMemory,
    id::Id,
    parts::{Parts, PartsError},
    pieces::{Piece, SinkMemory},
    region::Region,
    sink::{Lent, Sink, SinkError, Target, check_range},
    source::BoxFuture,
    spread::SpreadError,
    spread_parts::SpreadParts,
};

/// A sink in host memory: all of the payload in one region, or each tensor in a region of its own. Nearly
/// all bytes are received directly into that memory.
///
/// A range within one part is cut out of the part's memory: no copy, no slot, no waiting. Writing or dropping the
/// target puts the memory back. So no two writers have the same byte, and [`commit`](Self::commit) cannot return bytes
/// that are still being written. Costs a lock and a few steps in a tree of the memory that is not lent, per chunk; each
/// open target adds at most one piece to the tree.
///
/// A range that spans parts or padding (the bytes between parts) is staged, in memory of exactly its length, and copied
/// to the parts when it is written; large tensors start chunks of their own, so that affects few bytes. Padding is
/// dropped, and may be lent to several targets at a time.
///
/// A range that touches a spread part ([`SpreadParts`]) is staged, too, and its runs are copied when it is written, by the
/// caller's thread. Each memory of spread parts has a lock, which is taken for the copy of one chunk: chunks of one tensor
/// are copied one after the other, and a writer that comes meanwhile blocks its thread for as long as one copy takes, a
/// few milliseconds for 4 MiB in the shortest runs.
///
/// The parts are written before their bytes are verified: do not trust their content before the commit.
pub struct HostSink {
    id: Id,
    memory: Arc<SinkMemory>,
    staging: HostMemory,
}

/// The bytes that are copied out of a sink at a time.
const COPY_BYTES: usize = 256 << 10;

impl HostSink {
    /// Receives all of the payload into `region`.
    pub fn new(region: Region) -> Self {
        let parts = Parts::whole(region.len() as u64, region);
        let staging = HostMemory::new(0); // Every range lies in the one part.
        Self::of(parts, SpreadParts::default(), staging)
    }

    /// Receives a payload of `len_bytes` into `parts`: the range of each in the payload, and its memory. Ranges that
    /// span parts or padding are staged in memory of `staging`. Fails unless the parts are sorted, disjoint, within the
    /// payload, and each as long as its memory.
    pub fn scatter(
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, Region)>,
        staging: HostMemory,
    ) -> Result<Self, PartsError> {
        Self::spread(len_bytes, parts, SpreadParts::default(), staging)
    }

    /// Like [`scatter`](Self::scatter), with parts that lie spread over memories.
    pub fn spread(
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, Region)>,
        spread: SpreadParts<Region>,
        staging: HostMemory,
    ) -> Result<Self, PartsError> {
        spread.check_bounds(len_bytes)?;
        Ok(Self::of(Parts::new(len_bytes, parts)?, spread, staging))
    }

    fn of(parts: Parts<Region>, spread: SpreadParts<Region>, staging: HostMemory) -> Self {
        let spread = spread.map(Lock::new);
        Self { id: Id::unique(), memory: Arc::new(SinkMemory::new(parts, spread)), staging }
    }

    /// Ends the writing and returns the whole region of each part, in order; for an empty part the default region. After
    /// them come the memories of spread parts, in the order in which they were given.
    ///
    /// Succeeds when no byte of a part is lent. Whether all bytes were filled is for the caller to track. While bytes
    /// are lent, this fails and changes nothing. After success, opening a range and committing again fail with
    /// [`SinkError::Committed`].
    pub fn commit(&self) -> Result<Vec<Region>, SinkError> {
        self.memory.commit()
    }

    /// Copies bytes that were written to `out`, which is as long as `range`, before the commit: to pass them on while the
    /// rest arrives. Returns false, and `out` is unspecified, if `range` does not lie in one part, if a byte of it is lent,
    /// or after the commit.
    ///
    /// Copies under the sink's lock, 256 KiB at a time, so that no writer and no commit waits for longer than 50 µs.
    pub fn copy(&self, range: Range<u64>, out: &mut [u8]) -> bool {
        let is_readable = check_range(&range, self.len_bytes()).is_ok() && self.is_in_one_part(&range);
        let starts = (range.start..range.end).step_by(COPY_BYTES);
        is_readable
            && out.len() as u64 == range.end - range.start
            && starts.zip(out.chunks_mut(COPY_BYTES)).all(|(start, out)| {
                let end = start + out.len() as u64;
                self.memory.copy(&(start..end), out)
            })
    }

    fn lend(&self, range: Range<u64>) -> Result<Target, SinkError> {
        check_range(&range, self.len_bytes())?;
        let lent = if self.is_in_one_part(&range) {
            Lent::Piece(self.memory.lend(&range)?)
        } else {
            self.stage(&range)?
        };
        Ok(Target { sink: self.id, range, lent })
    }

    fn is_in_one_part(&self, range: &Range<u64>) -> bool {
        let first = self.memory.parts().common_with(range).next();
        let is_whole = first.is_some_and(|(common, ..)| common == *range);
        range.is_empty() || is_whole && self.memory.spread().touching(range).next().is_none()
    }

    /// Lends staging memory together with the pieces and the claim of what it will be copied to, so that nobody else
    /// writes that meanwhile.
    fn stage(&self, range: &Range<u64>) -> Result<Lent, SinkError> {
        let (pieces, claim) = self.memory.lend_common(range)?;
        // A length beyond the address space is refused by the allocation.
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let staging = self.staging.allocate(len)?;
        Ok(Lent::Scattered { staging, pieces, claim })
    }

    fn put(&self, target: Target) -> Result<(), SinkError> {
        if target.sink != self.id {
            return Err(SinkError::ForeignTarget);
        }
        if let Lent::Scattered { staging, pieces, claim: _claim } = target.lent {
            copy_to_pieces(&staging, target.range.start, pieces);
            self.copy_to_spread(&staging, &target.range)?;
        }
        Ok(())
    }

    /// Copies the bytes of `range`, which is claimed, to the spread parts that it touches.
    fn copy_to_spread(&self, staging: &[u8], range: &Range<u64>) -> Result<(), SpreadError> {
        self.memory.spread().touching(range).try_for_each(|(part, memory)| {
            let mut memory = memory.lock();
            part.rectangles(range, memory.len() as u64, |rectangle| rectangle.place(staging, &mut memory))
        })
    }
}

impl Sink for HostSink {
    fn len_bytes(&self) -> u64 {
        self.memory.parts().len_bytes()
    }

    fn open(&self, range: Range<u64>) -> BoxFuture<'_, Result<Target, SinkError>> {
        Box::pin(ready(self.lend(range)))
    }

    fn write(&self, target: Target) -> BoxFuture<'_, Result<(), SinkError>> {
        Box::pin(ready(self.put(target)))
    }
}

impl fmt::Debug for HostSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSink")
            .field("len_bytes", &self.len_bytes())
            .field("parts", &self.memory.parts().ranges().count())
            .field("spread", self.memory.spread())
            .finish_non_exhaustive()
    }
}

/// Copies the bytes of each piece from `staging`, whose first byte is at `start` in the payload.
fn copy_to_pieces(staging: &[u8], start: u64, pieces: Vec<Piece>) {
    for mut piece in pieces {
        // A piece lies within the staged range, whose length is a `usize`.
        let offset = (piece.start() - start) as usize;
        let len = piece.bytes().len();
        piece.bytes_mut().copy_from_slice(&staging[offset..offset + len]);
    }
}

#[cfg(test)]
mod spread_tests;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::{GiveBack, parts::tests::any_places};

    fn memory() -> HostMemory {
        HostMemory::new(u64::MAX)
    }

    /// Parts at 2..6 and 6..10 of a payload of 12 bytes, and handles that return their owners.
    fn new_sink() -> (HostSink, [GiveBack<Vec<u8>>; 2]) {
        let (first, first_back) = Region::lent_by(vec![0; 4]);
        let (second, second_back) = Region::lent_by(vec![0; 4]);
        let sink = HostSink::scatter(12, [(2..6, first), (6..10, second)], memory()).unwrap();
        (sink, [first_back, second_back])
    }

    #[tokio::test]
    async fn within_a_part_a_target_is_the_destination_itself() {
        let region = Region::from_owner(vec![0; 100]);
        let address = region.as_ptr();
        let sink = HostSink::scatter(200, [(50..150, region)], memory()).unwrap();
        for range in [50..150, 60..70, 149..150] {
            let target = sink.open(range.clone()).await.unwrap();
            assert_eq!(target.as_ptr(), address.wrapping_add(range.start as usize - 50));
        }
    }

    #[tokio::test]
    async fn a_range_over_several_parts_is_copied_when_it_is_written() {
        let (sink, mut owners) = new_sink();
        let mut target = sink.open(0..12).await.unwrap();
        target.copy_from_slice(&[9, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]);
        sink.write(target).await.unwrap();
        drop(sink.commit().unwrap());
        assert_eq!(owners[0].try_take(), Some(vec![1, 2, 3, 4]));
        assert_eq!(owners[1].try_take(), Some(vec![5, 6, 7, 8]));
    }

    #[tokio::test]
    async fn a_range_over_several_parts_that_is_dropped_changes_nothing() {
        let (sink, _) = new_sink();
        sink.open(4..8).await.unwrap().fill(7);
        let regions = sink.commit().unwrap();
        assert!(regions.iter().all(|region| region[..] == [0; 4]));
    }

    #[tokio::test]
    async fn a_busy_part_makes_the_whole_span_busy_and_lends_none_of_it() {
        let (sink, _) = new_sink();
        let held = sink.open(7..8).await.unwrap();
        assert!(matches!(sink.open(4..9).await, Err(SinkError::Busy { start: 4, end: 9 })));
        assert!(sink.open(2..6).await.is_ok());
        drop(held);
        let held = sink.open(4..9).await.unwrap();
        assert!(matches!(sink.open(4..5).await, Err(SinkError::Busy { .. })));
        assert!(matches!(sink.commit(), Err(SinkError::StillLent { lent_bytes: 5, len_bytes: 8 })));
        drop(held);
        assert!(sink.open(4..5).await.is_ok());
    }

    #[tokio::test]
    async fn padding_may_be_lent_twice_at_a_time_and_does_not_stop_a_commit() {
        let (sink, _) = new_sink();
        let one = sink.open(0..2).await.unwrap();
        let other = sink.open(0..2).await.unwrap();
        sink.write(one).await.unwrap();
        sink.commit().unwrap();
        sink.write(other).await.unwrap();
    }

    #[tokio::test]
    #[expect(clippy::reversed_empty_ranges, reason = "a writer may ask for any two numbers")]
    async fn ranges_outside_are_refused() {
        let (sink, _) = new_sink();
        for range in [0..13, 13..13, 3..2, u64::MAX..u64::MAX, 1..u64::MAX] {
            assert!(matches!(sink.open(range).await, Err(SinkError::OutOfBounds { len_bytes: 12, .. })));
        }
    }

    #[tokio::test]
    async fn a_span_that_cannot_be_staged_is_not_lent() {
        let region = Region::from_owner(vec![0; 4]);
        let sink = HostSink::scatter(12, [(2..6, region)], HostMemory::new(0)).unwrap();
        assert!(matches!(sink.open(0..6).await, Err(SinkError::NoMemory(_))));
        assert!(sink.open(2..6).await.is_ok());
        assert!(sink.commit().is_ok());
    }

    #[tokio::test]
    async fn a_sink_refuses_targets_of_another_sink() {
        let ((mine, _), (other, _)) = (new_sink(), new_sink());
        for range in [3..5, 3..9] {
            let target = mine.open(range).await.unwrap();
            assert!(matches!(other.write(target).await, Err(SinkError::ForeignTarget)));
        }
        assert_eq!(mine.commit().unwrap().len(), 2);
    }

    #[tokio::test]
    async fn a_single_region_is_filled_in_place_and_returned() {
        let region = memory().allocate(1000).unwrap();
        let address = region.as_ptr();
        let sink = HostSink::new(region);
        let mut target = sink.open(300..700).await.unwrap();
        assert_eq!(target.as_ptr(), address.wrapping_add(300));
        target.fill(7);
        sink.write(target).await.unwrap();
        let regions = sink.commit().unwrap();
        let [region] = &regions[..] else { panic!("{regions:?}") };
        assert_eq!(region.as_ptr(), address);
        assert!(region[300..700].iter().all(|&byte| byte == 7));
        assert!(matches!(sink.commit(), Err(SinkError::Committed)));
    }

    #[tokio::test]
    async fn what_was_written_can_be_copied_before_the_commit() {
        let len = 3 * COPY_BYTES as u64 + 7;
        let sink = HostSink::new(memory().allocate(len as usize).unwrap());
        let mut target = sink.open(0..len).await.unwrap();
        target
            .iter_mut()
            .zip(0..)
            .for_each(|(byte, at): (_, u64)| *byte = (at % 251) as u8);
        sink.write(target).await.unwrap();
        let held = sink.open(100..200).await.unwrap();
        let copy = |range: Range<u64>| {
            let mut out = vec![0; (range.end - range.start) as usize];
            sink.copy(range, &mut out).then_some(out)
        };
        let expected = |range: Range<u64>| Some(range.map(|at| (at % 251) as u8).collect::<Vec<u8>>());
        for range in [0..100, 200..len, 300..300] {
            assert_eq!(copy(range.clone()), expected(range));
        }
        for lent in [0..101, 150..160, 199..len, len - 1..len + 1] {
            assert_eq!(copy(lent), None);
        }
        drop(held);
        assert_eq!(copy(0..len), expected(0..len));
        assert!(!sink.copy(0..5, &mut [0; 4]), "another length");
        sink.commit().unwrap();
        assert_eq!(copy(0..1), None);
    }

    #[tokio::test]
    async fn an_empty_sink_commits_once() {
        let sink = HostSink::new(Region::default());
        let nothing = sink.open(0..0).await.unwrap();
        assert!(sink.commit().unwrap().iter().all(|region| region.is_empty()));
        drop(nothing);
        assert!(matches!(sink.commit(), Err(SinkError::Committed)));
    }

    #[tokio::test]
    async fn owners_are_returned_when_the_sink_and_its_targets_are_dropped() {
        let (sink, mut owners) = new_sink();
        let mut target = sink.open(3..5).await.unwrap();
        drop(sink);
        target.fill(1);
        assert_eq!(owners[0].try_take(), None);
        drop(target);
        assert_eq!(owners[0].wait().await, Some(vec![0, 1, 1, 0]));
        assert_eq!(owners[1].wait().await, Some(vec![0; 4]));
    }

    /// Goal: concurrent writers never share a byte, and a concurrent commit succeeds only after the last writer.
    /// Method: each writer checks that its bytes still have the value that it wrote.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn concurrent_writers_share_no_byte_and_commit_waits_for_them() {
        let parts = (0..16).map(|i| (i * 64 + i..i * 64 + i + 64, Region::from_owner(vec![0; 64])));
        let sink = Arc::new(HostSink::scatter(16 * 65, parts, memory()).unwrap());
        let (written, closing) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let write = |writer: u64| {
            let (sink, written, closing) = (Arc::clone(&sink), Arc::clone(&written), Arc::clone(&closing));
            async move {
                for step in 0.. {
                    if closing.load(Ordering::Relaxed) {
                        return;
                    }
                    let start = (writer * 31 + step * 37) % (15 * 65);
                    let mut target = match sink.open(start..start + 40).await {
                        Ok(target) => target,
                        Err(SinkError::Busy { .. }) => continue,
                        // The commit may come between the check of `closing` and this call.
                        Err(SinkError::Committed) => return assert!(closing.load(Ordering::Relaxed)),
                        Err(error) => panic!("{error}"),
                    };
                    target.fill(writer as u8);
                    tokio::task::yield_now().await;
                    assert!(target.iter().all(|&byte| byte == writer as u8));
                    sink.write(target).await.unwrap();
                    written.fetch_add(1, Ordering::Relaxed);
                }
            }
        };
        let writers: Vec<_> = (1..5).map(|writer| tokio::spawn(write(writer))).collect();
        while written.load(Ordering::Relaxed) < 200 {
            tokio::task::yield_now().await;
        }
        closing.store(true, Ordering::Relaxed);
        let regions = loop {
            match sink.commit() {
                Ok(regions) => break regions,
                Err(SinkError::StillLent { .. }) => tokio::task::yield_now().await,
                Err(error) => panic!("{error}"),
            }
        };
        assert!(regions.len() == 16 && regions.iter().all(|region| region.len() == 64));
        for writer in writers {
            writer.await.unwrap();
        }
    }

    #[derive(Debug, Clone)]
    enum Op {
        Open(u64, u64),
        Fill(usize, u8),
        Write(usize),
        Drop(usize),
        Commit,
    }

    fn any_op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0u64..180, 0u64..60).prop_map(|(start, len)| Op::Open(start, start + len)),
            2 => (any::<usize>(), any::<u8>()).prop_map(|(i, byte)| Op::Fill(i, byte)),
            2 => any::<usize>().prop_map(Op::Write),
            1 => any::<usize>().prop_map(Op::Drop),
            1 => Just(Op::Commit),
        ]
    }

    /// A sink, and the expected bytes of its parts. Padding stays zero in the model.
    struct Model {
        sink: HostSink,
        places: Vec<Range<u64>>,
        bytes: Vec<u8>,
        lent: Vec<Target>,
    }

    impl Model {
        /// With `shared`, all parts are cut from one region, so that adjacent parts are adjacent in memory too.
        fn new(len_bytes: u64, places: Vec<Range<u64>>, shared: bool) -> Self {
            let bytes = vec![0; len_bytes as usize];
            let mut whole = Region::from_owner(bytes.clone());
            let region = |place: &Range<u64>| {
                let len = (place.end - place.start) as usize;
                if shared { whole.split_to(len).unwrap() } else { Region::from_owner(vec![0; len]) }
            };
            let regions: Vec<_> = places.iter().map(region).collect();
            let parts = places.iter().cloned().zip(regions);
            let sink = HostSink::scatter(len_bytes, parts, memory()).unwrap();
            Self { sink, places, bytes, lent: Vec::new() }
        }

        fn apply(&mut self, op: Op) {
            let count = self.lent.len();
            match op {
                Op::Open(start, end) => self.open(start..end),
                Op::Fill(i, byte) if count > 0 => {
                    let target = &mut self.lent[i % count];
                    target.fill(byte);
                    if matches!(target.lent, Lent::Piece(_)) {
                        self.update_model(i % count);
                    }
                }
                Op::Write(i) if count > 0 => {
                    self.update_model(i % count);
                    self.sink.put(self.lent.swap_remove(i % count)).unwrap();
                }
                Op::Drop(i) if count > 0 => drop(self.lent.swap_remove(i % count)),
                Op::Commit if self.lent_bytes() > 0 => {
                    let lent = self.lent_bytes();
                    let refused = self.sink.commit();
                    assert!(
                        matches!(refused, Err(SinkError::StillLent { lent_bytes, .. }) if lent_bytes == lent)
                    );
                }
                _ => {}
            }
        }

        fn open(&mut self, range: Range<u64>) {
            let len_bytes = self.bytes.len() as u64;
            let overlaps = |lent: &Target| {
                let both = range.start.max(lent.range.start)..range.end.min(lent.range.end);
                self.placed_bytes(&both) > 0
            };
            match self.sink.lend(range.clone()) {
                Ok(target) => {
                    assert!(range.end <= len_bytes && !self.lent.iter().any(overlaps));
                    assert_eq!(target.len() as u64, range.end - range.start);
                    if self.is_in_one_place(&range) {
                        assert_eq!(target[..], self.bytes[range.start as usize..range.end as usize]);
                    }
                    self.lent.push(target);
                }
                Err(SinkError::OutOfBounds { .. }) => assert!(range.end > len_bytes),
                Err(SinkError::Busy { .. }) => assert!(self.lent.iter().any(overlaps)),
                Err(error) => panic!("{error}"),
            }
        }

        /// Copies the bytes of a written target to the model.
        fn update_model(&mut self, i: usize) {
            let target = &self.lent[i];
            for (offset, byte) in (target.range.start..).zip(target.iter()) {
                if self.places.iter().any(|place| place.contains(&offset)) {
                    self.bytes[offset as usize] = *byte;
                }
            }
        }

        fn is_in_one_place(&self, range: &Range<u64>) -> bool {
            self.places
                .iter()
                .any(|place| place.start <= range.start && range.end <= place.end)
        }

        fn placed_bytes(&self, range: &Range<u64>) -> u64 {
            let common =
                |place: &Range<u64>| place.end.min(range.end).saturating_sub(place.start.max(range.start));
            self.places.iter().map(common).sum()
        }

        fn lent_bytes(&self) -> u64 {
            self.lent.iter().map(|target| self.placed_bytes(&target.range)).sum()
        }
    }

    proptest! {
        #[test]
        fn a_sink_is_what_its_writers_left(
            (len_bytes, places) in any_places(),
            shared in any::<bool>(),
            ops in vec(any_op(), 0..80),
        ) {
            let mut model = Model::new(len_bytes, places, shared);
            for op in ops {
                model.apply(op);
                model.sink.memory.check(model.lent_bytes());
            }
            model.lent.clear();
            let regions = model.sink.commit().unwrap();
            prop_assert_eq!(regions.len(), model.places.len());
            for (region, place) in regions.iter().zip(&model.places) {
                prop_assert_eq!(&region[..], &model.bytes[place.start as usize..place.end as usize]);
            }
            prop_assert!(matches!(model.sink.commit(), Err(SinkError::Committed)));
            prop_assert!(matches!(model.sink.lend(0..0), Err(SinkError::Committed)));
        }
    }
}
