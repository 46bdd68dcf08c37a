use std::{fmt, ops::Range};

use bytes::Bytes;

use crate::{
    foreign::ForeignBytes,
    loan::Loan,
    parts::{Parts, PartsError},
    source::{BoxFuture, Source, SourceError, check_range},
    spread::Rectangle,
    spread_parts::{SpreadPart, SpreadParts},
};

/// The bytes of one tensor, lent by its producer.
#[derive(Debug, Clone)]
pub enum LentBytes {
    /// Constant bytes, shared with readers.
    Stable(Bytes),
    /// Memory of another owner, who may write or free it: each reader gets a copy.
    Foreign(ForeignBytes),
}

impl LentBytes {
    /// The number of bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Stable(bytes) => bytes.len(),
            Self::Foreign(bytes) => bytes.len(),
        }
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same bytes, on loan. See [`Loan::lend`].
    pub fn on_loan(self, loan: &Loan) -> Self {
        match self {
            Self::Stable(bytes) => Self::Stable(loan.lend(bytes)),
            Self::Foreign(bytes) => Self::Foreign(loan.lend_foreign(bytes)),
        }
    }
}

impl From<Bytes> for LentBytes {
    fn from(bytes: Bytes) -> Self {
        Self::Stable(bytes)
    }
}

impl From<ForeignBytes> for LentBytes {
    fn from(bytes: ForeignBytes) -> Self {
        Self::Foreign(bytes)
    }
}

/// A source whose payload lies in many places of host memory: each tensor in its producer's memory.
///
/// Why: tensors need not be copied into one payload. The bytes between the parts are padding, and zero. A read within
/// one part shares its bytes; a read that spans parts or padding is gathered into a new buffer, by the task that awaits
/// the read. Large tensors start chunks of their own, so nearly all bytes are shared.
///
/// Another owner's memory ([`LentBytes::Foreign`]) is always copied. So are parts that lie spread over memories
/// ([`SpreadParts`]), after zeros were written to their place: bytes that no memory holds are zero.
///
/// To be notified when all readers have finished, lend the parts with a [`Loan`].
pub struct GatherSource {
    parts: Parts<LentBytes>,
    spread: SpreadParts<LentBytes>,
    has_foreign: bool,
}

impl GatherSource {
    /// Serves a payload of `len_bytes` from `parts`: the range of each in the payload, and its bytes. Fails unless they
    /// are sorted, disjoint, within the payload, and each as long as its bytes. Linear in the parts.
    pub fn new(
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, impl Into<LentBytes>)>,
    ) -> Result<Self, PartsError> {
        Self::spread(len_bytes, parts, SpreadParts::default())
    }

    /// Like [`new`](Self::new), with parts that lie spread over memories. Where parts overlap, their bytes must be the same.
    pub fn spread(
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, impl Into<LentBytes>)>,
        spread: SpreadParts<LentBytes>,
    ) -> Result<Self, PartsError> {
        spread.check_bounds(len_bytes)?;
        let parts: Vec<_> = parts.into_iter().map(|(range, bytes)| (range, bytes.into())).collect();
        let mut all = parts.iter().map(|(_, bytes)| bytes).chain(spread.memories());
        let has_foreign = all.any(|bytes| matches!(bytes, LentBytes::Foreign(_)));
        let parts = Parts::measured(len_bytes, parts, |bytes| bytes.len() as u64)?;
        Ok(Self { parts, spread, has_foreign })
    }

    fn bytes(&self, range: &Range<u64>) -> Result<Bytes, SourceError> {
        check_range(range, self.parts.len_bytes())?;
        match self.in_one_part(range) {
            Some(bytes) => Ok(bytes),
            None => self.gather(range),
        }
    }

    /// The bytes of `range`, if they lie in one part with constant bytes, which readers may share.
    fn in_one_part(&self, range: &Range<u64>) -> Option<Bytes> {
        match self.parts.common_with(range).next()? {
            (common, part, LentBytes::Stable(bytes)) if common == *range => {
                Some(bytes.slice(within(&common, part)))
            }
            _ => None,
        }
    }

    fn gather(&self, range: &Range<u64>) -> Result<Bytes, SourceError> {
        let asked_bytes = range.end - range.start;
        // A length beyond the address space is refused by the reservation.
        let len = usize::try_from(asked_bytes).unwrap_or(usize::MAX);
        let mut gathered = Vec::new();
        let no_memory = |source| SourceError::NoMemory { asked_bytes, source };
        gathered.try_reserve_exact(len).map_err(no_memory)?;
        for (common, part, bytes) in self.parts.common_with(range) {
            gathered.resize((common.start - range.start) as usize, 0);
            match bytes {
                LentBytes::Stable(bytes) => gathered.extend_from_slice(&bytes[within(&common, part)]),
                LentBytes::Foreign(bytes) => bytes
                    .append_to(within(&common, part), &mut gathered)
                    .map_err(|error| SourceError::of_foreign(&common, error))?,
            }
        }
        gathered.resize(len, 0);
        for (part, bytes) in self.spread.touching(range) {
            gather_spread(part, range, bytes, &mut gathered)?;
        }
        Ok(gathered.into())
    }
}

impl Source for GatherSource {
    fn len_bytes(&self) -> u64 {
        self.parts.len_bytes()
    }

    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        Box::pin(async move { self.bytes(&range) })
    }

    fn may_change(&self) -> bool {
        self.has_foreign
    }

    fn is_in_place(&self, range: &Range<u64>) -> bool {
        check_range(range, self.parts.len_bytes()).is_ok() && self.in_one_part(range).is_some()
    }
}

impl fmt::Debug for GatherSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatherSource")
            .field("len_bytes", &self.len_bytes())
            .field("parts", &self.parts.ranges().count())
            .field("spread", &self.spread)
            .finish()
    }
}

/// Copies the bytes that a spread part and `range` have in common to their places in `gathered`, the bytes of `range`.
fn gather_spread(
    part: &SpreadPart,
    range: &Range<u64>,
    bytes: &LentBytes,
    gathered: &mut [u8],
) -> Result<(), SourceError> {
    let mut copied = Ok(());
    let gather = |rectangle: Rectangle| match bytes {
        LentBytes::Stable(bytes) => rectangle.gather(bytes, gathered),
        LentBytes::Foreign(_) if copied.is_err() => {}
        LentBytes::Foreign(bytes) => copied = bytes.gather(rectangle, gathered),
    };
    part.rectangles(range, bytes.len() as u64, gather)?;
    copied.map_err(|error| SourceError::of_foreign(range, error))
}

/// The offsets of `common`, which lies in `part`, within that part's bytes.
fn within(common: &Range<u64>, part: &Range<u64>) -> Range<usize> {
    // Both ends are within the part, whose length is a `usize`.
    (common.start - part.start) as usize..(common.end - part.start) as usize
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        Spread,
        cases::{Grid, Places},
        mapping::{Mapping, PAGE_BYTES, PageSize},
        parts::tests::any_places,
        spread_parts::tests::any_spread,
    };

    fn new_source() -> (Bytes, GatherSource) {
        let bytes = Bytes::from(vec![1, 2, 3, 4, 5, 6, 7, 8]);
        let parts = [(2..6, bytes.slice(..4)), (6..10, bytes.slice(4..))];
        (bytes, GatherSource::new(12, parts).unwrap())
    }

    #[tokio::test]
    async fn a_read_within_a_part_shares_its_bytes() {
        let (bytes, source) = new_source();
        for (range, first) in [(2..6, 0), (3..5, 1), (6..10, 4), (9..10, 7)] {
            assert!(source.is_in_place(&range));
            assert_eq!(source.read(range).await.unwrap().as_ptr(), bytes[first..].as_ptr());
        }
    }

    #[tokio::test]
    async fn foreign_memory_is_copied() {
        let owner = vec![1, 2, 3, 4];
        let addresses = owner.as_ptr_range();
        let foreign = ForeignBytes::new(owner.as_ptr().addr(), owner.len(), owner);
        let source = GatherSource::new(8, [(2..6, foreign)]).unwrap();
        assert!(source.may_change() && !source.is_in_place(&(3..5)));
        let read = source.read(3..5).await.unwrap();
        assert_eq!(read[..], [2, 3]);
        assert!(!addresses.contains(&read.as_ptr()));
        assert_eq!(source.read(0..8).await.unwrap()[..], [0, 0, 1, 2, 3, 4, 0, 0]);
    }

    #[tokio::test]
    async fn padding_is_zero() {
        let (_, source) = new_source();
        assert_eq!(source.read(0..12).await.unwrap()[..], [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0]);
        assert_eq!(source.read(10..12).await.unwrap()[..], [0, 0]);
        assert_eq!(source.read(9..11).await.unwrap()[..], [8, 0]);
        for range in [0..12, 10..12, 9..11, 5..7, 9..13] {
            assert!(!source.is_in_place(&range), "{range:?} is gathered, or out of bounds");
        }
    }

    #[tokio::test]
    #[expect(clippy::reversed_empty_ranges, reason = "a reader may ask for any two numbers")]
    async fn ranges_outside_are_refused() {
        let (_, source) = new_source();
        for range in [0..13, 13..13, 3..2, u64::MAX..u64::MAX, 1..u64::MAX] {
            assert!(matches!(source.read(range).await, Err(SourceError::OutOfBounds { len_bytes: 12, .. })));
        }
    }

    #[tokio::test]
    async fn a_read_beyond_all_memory_is_an_error() {
        let source = GatherSource::new(u64::MAX, [] as [(_, Bytes); 0]).unwrap();
        let refused = source.read(0..u64::MAX).await;
        assert!(matches!(refused, Err(SourceError::NoMemory { asked_bytes: u64::MAX, .. })));
    }

    #[tokio::test]
    async fn a_reader_keeps_what_it_read_on_loan() {
        let (loan, returned) = Loan::new();
        let part = loan.lend(Bytes::from_static(b"tensor"));
        let source = GatherSource::new(10, [(2..8, part)]).unwrap();
        drop(loan);
        let (shared, gathered) = (source.read(3..5).await.unwrap(), source.read(0..10).await.unwrap());
        drop(source);
        assert!(!returned.is_returned());
        drop(shared);
        assert!(returned.is_returned());
        assert_eq!(gathered[..], *b"\0\0tensor\0\0");
    }

    proptest! {
        #[test]
        fn a_read_is_the_payload_cut_out(
            (len_bytes, places) in any_places(),
            start in any::<u64>(),
            len in any::<u64>(),
            foreign in any::<[bool; 4]>(),
        ) {
            let mut is_foreign = foreign.into_iter().cycle();
            let mut payload = vec![0; len_bytes as usize];
            let mut parts = Vec::new();
            for range in places {
                let place = range.start as usize..range.end as usize;
                for byte in place.clone() {
                    payload[byte] = byte as u8 + 1;
                }
                let bytes = payload[place].to_vec();
                parts.push((range, match is_foreign.next() {
                    Some(true) => ForeignBytes::new(bytes.as_ptr().addr(), bytes.len(), bytes).into(),
                    _ => LentBytes::from(Bytes::from(bytes)),
                }));
            }
            let source = GatherSource::new(len_bytes, parts).unwrap();
            let start = start % (len_bytes + 1);
            let end = start + len % (len_bytes - start + 1);
            let read = source.bytes(&(start..end)).unwrap();
            prop_assert_eq!(&read[..], &payload[start as usize..end as usize]);
        }

        /// Parts that overlap have the same bytes, since all of them are cut from one payload.
        #[test]
        fn spread_parts_are_gathered(
            (len_bytes, places) in any_places(),
            spread in any_spread(),
            (start, len) in (0u64..200, 0u64..90),
            foreign in any::<[bool; 4]>(),
        ) {
            let len_bytes = spread.parts.iter().map(|(range, ..)| range.end).fold(len_bytes, u64::max);
            let whole: Vec<u8> = (0..len_bytes).map(|at| (at as u8).wrapping_add(1)).collect();
            let mut held = vec![false; len_bytes as usize];
            let mut is_foreign = foreign.into_iter().cycle();
            let mut lend = |bytes: Vec<u8>| match is_foreign.next() {
                Some(true) => ForeignBytes::new(bytes.as_ptr().addr(), bytes.len(), bytes).into(),
                _ => LentBytes::from(Bytes::from(bytes)),
            };
            let mut parts = vec![];
            for range in places {
                let place = range.start as usize..range.end as usize;
                held[place.clone()].fill(true);
                parts.push((range, lend(whole[place].to_vec())));
            }
            let mut memories = cut(&whole, &spread).into_iter().map(&mut lend);
            spread.bytes(|at, _, _| held[at] = true);
            let spread = spread.over(|_| memories.next().unwrap());
            let source = GatherSource::spread(len_bytes, parts, spread).unwrap();
            let range = start.min(len_bytes)..(start + len).min(len_bytes);
            let read = source.bytes(&range).unwrap();
            let byte = |at: usize| if held[at] { whole[at] } else { 0 };
            let expected: Vec<u8> = (range.start as usize..range.end as usize).map(byte).collect();
            prop_assert_eq!(&read[..], &expected);
        }
    }

    /// The memories of spread parts, cut from a payload.
    fn cut(payload: &[u8], spread: &Places) -> Vec<Vec<u8>> {
        let mut memories: Vec<_> = spread.memories.iter().map(|len| vec![0; *len as usize]).collect();
        spread.bytes(|at, memory, byte| memories[memory][byte] = payload[at]);
        memories
    }

    #[tokio::test]
    async fn spread_memory_that_is_gone_is_an_error() {
        let mapping = Mapping::new(2 * PAGE_BYTES, PageSize::Small).unwrap();
        let bytes = ForeignBytes::new(mapping.start().addr().get(), mapping.len(), ());
        let rows = 2 * PAGE_BYTES as u64 / 64;
        let grid = Grid { rows, run_bytes: 16, part: 0, part_stride: 16, memory: 0, memory_stride: 64 };
        let part = (0..rows * 16, 0, Arc::new(grid) as Arc<dyn Spread>);
        let spread = SpreadParts::new(vec![bytes.into()], [part]).unwrap();
        let source = GatherSource::spread(rows * 16, [] as [(_, Bytes); 0], spread).unwrap();
        assert!(source.may_change() && !source.is_in_place(&(0..16)));
        assert!(source.read(0..rows * 16).await.is_ok());
        mapping.take_access();
        let gone = source.read(32..96).await;
        assert!(matches!(gone, Err(SourceError::Gone { start: 32, end: 96 })), "{gone:?}");
    }
}
