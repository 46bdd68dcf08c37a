use std::{
    collections::BTreeMap,
    fmt,
    future::ready,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;

use crate::{
    id::Id,
    region::Region,
    sink::{Lent, Sink, SinkError, Target, check_range},
    source::BoxFuture,
};

/// A sink in host memory, which the network fills in place: no copy, no slot, no waiting.
///
/// `open` cuts the range out of the sink's memory, and a target that is written or dropped puts it back. So
/// two writers can never have one byte, and [`commit`](Self::commit) cannot give away bytes that someone
/// still writes. Costs a lock and a few tree steps per chunk; the tree has at most one piece more than there
/// are open targets.
pub struct HostSink {
    id: Id,
    len_bytes: u64,
    home: Arc<Home>,
}

impl HostSink {
    /// Receives into `region`.
    pub fn new(region: Region) -> Self {
        let len_bytes = region.len() as u64;
        let mut pieces = Pieces::default();
        pieces.put_back(0, region);
        let home = Arc::new(Home { state: Mutex::new(State::Open(pieces)) });
        Self { id: Id::unique(), len_bytes, home }
    }

    /// Ends the writing and gives the bytes, without a copy.
    ///
    /// It succeeds when no byte is lent, whether or not all were ever filled: that is for the caller to know.
    /// While targets are out it fails and changes nothing. After it succeeded, everything fails with
    /// [`SinkError::Committed`].
    pub fn commit(&self) -> Result<Bytes, SinkError> {
        let mut state = self.home.state();
        let pieces = state.pieces()?;
        let lent_bytes = self.len_bytes - pieces.len_bytes();
        if lent_bytes > 0 {
            return Err(SinkError::StillLent { lent_bytes, len_bytes: self.len_bytes });
        }
        let region = pieces.take_whole();
        *state = State::Committed;
        Ok(region.freeze())
    }

    fn lend(&self, range: Range<u64>) -> Result<Target, SinkError> {
        check_range(&range, self.len_bytes)?;
        let Range { start, end } = range;
        let region = self
            .home
            .state()
            .pieces()?
            .cut(start, end)
            .ok_or(SinkError::Busy { start, end })?;
        let piece = Piece { start, region, home: Arc::clone(&self.home) };
        Ok(Target { sink: self.id, range, lent: Lent::Piece(piece) })
    }

    /// The bytes are where they belong; all that is left is to let the piece go home.
    fn take_back(&self, target: &Target) -> Result<(), SinkError> {
        if target.sink == self.id { Ok(()) } else { Err(SinkError::ForeignTarget) }
    }
}

impl Sink for HostSink {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn open(&self, range: Range<u64>) -> BoxFuture<'_, Result<Target, SinkError>> {
        Box::pin(ready(self.lend(range)))
    }

    fn write(&self, target: Target) -> BoxFuture<'_, Result<(), SinkError>> {
        Box::pin(ready(self.take_back(&target)))
    }
}

impl fmt::Debug for HostSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSink")
            .field("len_bytes", &self.len_bytes)
            .finish_non_exhaustive()
    }
}

/// A part of a host sink's memory on loan. Dropping it brings it home.
pub(crate) struct Piece {
    start: u64,
    region: Region,
    home: Arc<Home>,
}

impl Piece {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.region
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.region
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let region = std::mem::take(&mut self.region);
        // Only an empty piece can still be out when the sink is committed, and that has nothing to bring.
        if let Ok(pieces) = self.home.state().pieces() {
            pieces.put_back(self.start, region);
        }
    }
}

/// What a host sink shares with the pieces that it lent.
struct Home {
    state: Mutex<State>,
}

impl Home {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum State {
    Open(Pieces),
    Committed,
}

impl State {
    fn pieces(&mut self) -> Result<&mut Pieces, SinkError> {
        match self {
            Self::Open(pieces) => Ok(pieces),
            Self::Committed => Err(SinkError::Committed),
        }
    }
}

/// The parts of one region that are not lent, by their start in it. None is empty, and no two touch.
#[derive(Default)]
pub(crate) struct Pieces {
    by_start: BTreeMap<u64, Region>,
}

impl Pieces {
    fn len_bytes(&self) -> u64 {
        self.by_start.values().map(|region| region.len() as u64).sum()
    }

    /// Takes `start..end` out, where all of it is here.
    fn cut(&mut self, start: u64, end: u64) -> Option<Region> {
        if start == end {
            return Some(Region::default());
        }
        let (&before, region) = self.by_start.range(..=start).next_back()?;
        if end > before + region.len() as u64 {
            return None;
        }
        let mut piece = self.by_start.remove(&before)?;
        let mut cut = piece.split_off((start - before) as usize)?;
        let after = cut.split_off((end - start) as usize)?;
        self.put_back(before, piece);
        self.put_back(end, after);
        Some(cut)
    }

    /// Adds a part, and makes it one with the neighbours that it touches.
    fn put_back(&mut self, mut start: u64, mut region: Region) {
        if region.is_empty() {
            return;
        }
        if let Some(next) = self.by_start.remove(&(start + region.len() as u64)) {
            region = join(region, next);
        }
        let before = self.by_start.range(..start).next_back();
        if let Some((&before, _)) = before.filter(|(before, piece)| *before + piece.len() as u64 == start)
            && let Some(previous) = self.by_start.remove(&before)
        {
            (start, region) = (before, join(previous, region));
        }
        self.by_start.insert(start, region);
    }

    /// Takes everything, when nothing is lent: by then all parts have become one.
    fn take_whole(&mut self) -> Region {
        debug_assert!(self.by_start.len() <= 1);
        self.by_start.pop_first().map(|(_, region)| region).unwrap_or_default()
    }
}

/// Joins what `Pieces` cut apart.
fn join(first: Region, next: Region) -> Region {
    first
        .join(next)
        .expect("parts of one region whose ranges touch are neighbours in its memory")
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::HostMemory;

    fn sink(len: usize) -> HostSink {
        HostSink::new(HostMemory::new(u64::MAX).allocate(len).unwrap())
    }

    #[tokio::test]
    async fn a_target_is_the_destination_itself() {
        let region = HostMemory::new(u64::MAX).allocate(1000).unwrap();
        let address = region.as_ptr();
        let sink = HostSink::new(region);
        let mut target = sink.open(300..700).await.unwrap();
        assert_eq!(target.as_ptr(), address.wrapping_add(300));
        target.fill(7);
        sink.write(target).await.unwrap();
        let bytes = sink.commit().unwrap();
        assert_eq!(bytes.as_ptr(), address);
        assert!(bytes[300..700].iter().all(|&byte| byte == 7));
    }

    #[tokio::test]
    #[expect(clippy::reversed_empty_ranges, reason = "a writer may ask for any two numbers")]
    async fn ranges_outside_are_refused() {
        let sink = sink(4);
        for range in [0..5, 5..5, 3..2, u64::MAX..u64::MAX, 1..u64::MAX] {
            assert!(matches!(sink.open(range).await, Err(SinkError::OutOfBounds { len_bytes: 4, .. })));
        }
    }

    #[tokio::test]
    async fn a_sink_takes_only_its_own_targets() {
        let (mine, other) = (sink(10), sink(10));
        let target = mine.open(0..10).await.unwrap();
        assert!(matches!(other.write(target).await, Err(SinkError::ForeignTarget)));
        assert_eq!(mine.commit().unwrap().len(), 10);
    }

    #[tokio::test]
    async fn an_empty_sink_commits_once() {
        let sink = sink(0);
        let nothing = sink.open(0..0).await.unwrap();
        assert!(sink.commit().unwrap().is_empty());
        drop(nothing);
        assert!(matches!(sink.commit(), Err(SinkError::Committed)));
    }

    #[tokio::test]
    async fn a_target_outlives_its_sink() {
        let memory = HostMemory::new(u64::MAX);
        let sink = HostSink::new(memory.allocate(100).unwrap());
        let mut target = sink.open(10..20).await.unwrap();
        drop(sink);
        target.fill(1);
        drop(target);
        assert_eq!(memory.stats().in_use_bytes, 0);
    }

    #[derive(Debug, Clone)]
    enum Op {
        Open(u64, u64),
        Fill(usize, u8),
        Write(usize),
        Drop(usize),
        Commit,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0..LEN + 4, 0..LEN / 2).prop_map(|(start, len)| Op::Open(start, start + len)),
            2 => (any::<usize>(), any::<u8>()).prop_map(|(i, byte)| Op::Fill(i, byte)),
            2 => any::<usize>().prop_map(Op::Write),
            1 => any::<usize>().prop_map(Op::Drop),
            1 => Just(Op::Commit),
        ]
    }

    const LEN: u64 = 64;

    /// A sink beside its bytes as they should be.
    struct Model {
        sink: HostSink,
        bytes: Vec<u8>,
        lent: Vec<Target>,
    }

    impl Model {
        fn apply(&mut self, op: Op) {
            let count = self.lent.len();
            match op {
                Op::Open(start, end) => self.open(start, end),
                Op::Fill(i, byte) if count > 0 => {
                    let target = &mut self.lent[i % count];
                    let Range { start, end } = target.range();
                    target.fill(byte);
                    self.bytes[start as usize..end as usize].fill(byte);
                }
                Op::Write(i) if count > 0 => {
                    let target = self.lent.swap_remove(i % count);
                    self.sink.take_back(&target).unwrap();
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

        fn open(&mut self, start: u64, end: u64) {
            let overlaps = |lent: &Target| start.max(lent.range.start) < end.min(lent.range.end);
            match self.sink.lend(start..end) {
                Ok(target) => {
                    assert!(end <= LEN && !self.lent.iter().any(overlaps));
                    assert_eq!(target[..], self.bytes[start as usize..end as usize]);
                    self.lent.push(target);
                }
                Err(SinkError::OutOfBounds { .. }) => assert!(end > LEN),
                Err(SinkError::Busy { .. }) => assert!(self.lent.iter().any(overlaps)),
                Err(error) => panic!("{error}"),
            }
        }

        fn lent_bytes(&self) -> u64 {
            self.lent.iter().map(|target| target.len() as u64).sum()
        }

        /// Home pieces and lent ranges tile the sink, and no two home pieces touch.
        fn check(&self) {
            let mut state = self.sink.home.state();
            let pieces = state.pieces().unwrap();
            assert_eq!(pieces.len_bytes() + self.lent_bytes(), LEN);
            let ends = pieces.by_start.iter().map(|(start, region)| start + region.len() as u64);
            for (end, next) in ends.zip(pieces.by_start.keys().skip(1)) {
                assert!(end < *next);
            }
        }
    }

    proptest! {
        #[test]
        fn a_sink_is_what_its_writers_left(ops in vec(op(), 0..80)) {
            let (bytes, lent) = (vec![0; LEN as usize], Vec::new());
            let mut model = Model { sink: sink(LEN as usize), bytes, lent };
            for op in ops {
                model.apply(op);
                model.check();
            }
            model.lent.clear();
            prop_assert_eq!(&model.sink.commit().unwrap()[..], &model.bytes[..]);
            prop_assert!(matches!(model.sink.commit(), Err(SinkError::Committed)));
            prop_assert!(matches!(model.sink.lend(0..1), Err(SinkError::Committed)));
        }
    }
}
