use std::{fmt, future::ready, ops::Range, sync::Arc};

use bytes::Bytes;

use crate::{
    id::Id,
    parts::Parts,
    pieces::Home,
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
    home: Arc<Home>,
}

impl HostSink {
    /// Receives into `region`.
    pub fn new(region: Region) -> Self {
        Self { id: Id::unique(), home: Arc::new(Home::new(Parts::whole(region.len() as u64, region))) }
    }

    /// Ends the writing and gives the bytes, without a copy.
    ///
    /// It succeeds when no byte is lent, whether or not all were ever filled: that is for the caller to know.
    /// While targets are out it fails and changes nothing. After it succeeded, everything fails with
    /// [`SinkError::Committed`].
    pub fn commit(&self) -> Result<Bytes, SinkError> {
        let whole = self.home.commit()?.pop().unwrap_or_default();
        Ok(whole.freeze())
    }

    fn lend(&self, range: Range<u64>) -> Result<Target, SinkError> {
        check_range(&range, self.len_bytes())?;
        let piece = self.home.lend(&range)?;
        Ok(Target { sink: self.id, range, lent: Lent::Piece(piece) })
    }

    /// The bytes are where they belong; all that is left is to let the piece go home.
    fn take_back(&self, target: &Target) -> Result<(), SinkError> {
        if target.sink == self.id { Ok(()) } else { Err(SinkError::ForeignTarget) }
    }
}

impl Sink for HostSink {
    fn len_bytes(&self) -> u64 {
        self.home.parts().len_bytes()
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
            .field("len_bytes", &self.len_bytes())
            .finish_non_exhaustive()
    }
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

        fn check(&self) {
            self.sink.home.check(self.lent_bytes());
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
