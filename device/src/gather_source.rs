use std::{fmt, ops::Range};

use bytes::Bytes;

use crate::{
    parts::{Parts, PartsError},
    source::{BoxFuture, Source, SourceError, check_range},
};

/// A source whose payload lies in many places of host memory: each tensor where its producer has it.
///
/// Why: a producer who lends its tensors saves the copy of all of them. The bytes between the parts are padding,
/// and zero. A read within one part shares its bytes; one that spans parts or padding is gathered into a fresh
/// buffer of exactly its length, a chunk's, which is copied where it is awaited. Large tensors start chunks of
/// their own, so nearly all bytes are shared.
///
/// To learn when no reader holds any byte any more, wrap the parts with a [`Loan`](crate::Loan).
pub struct GatherSource {
    parts: Parts<Bytes>,
}

impl GatherSource {
    /// Serves a payload of `len_bytes` from `parts`: where each lies in the payload, and its bytes. Fails unless
    /// they are sorted, disjoint, inside of the payload, and each as long as its bytes. Costs one look at each.
    pub fn new(
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, Bytes)>,
    ) -> Result<Self, PartsError> {
        Ok(Self { parts: Parts::new(len_bytes, parts)? })
    }

    fn bytes(&self, range: &Range<u64>) -> Result<Bytes, SourceError> {
        check_range(range, self.parts.len_bytes())?;
        match self.in_one_part(range) {
            Some(bytes) => Ok(bytes),
            None => self.gather(range),
        }
    }

    /// The bytes of `range`, where all of them are one part's.
    fn in_one_part(&self, range: &Range<u64>) -> Option<Bytes> {
        let (common, part, bytes) = self.parts.common_with(range).next()?;
        (common == *range).then(|| slice(&common, part, bytes))
    }

    fn gather(&self, range: &Range<u64>) -> Result<Bytes, SourceError> {
        let asked_bytes = range.end - range.start;
        // What no address can hold is refused by the reservation.
        let len = usize::try_from(asked_bytes).unwrap_or(usize::MAX);
        let mut gathered = Vec::new();
        gathered
            .try_reserve_exact(len)
            .map_err(|source| SourceError::NoMemory { asked_bytes, source })?;
        for (common, part, bytes) in self.parts.common_with(range) {
            gathered.resize((common.start - range.start) as usize, 0);
            gathered.extend_from_slice(&slice(&common, part, bytes));
        }
        gathered.resize(len, 0);
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

    fn is_in_place(&self, range: &Range<u64>) -> bool {
        check_range(range, self.parts.len_bytes()).is_ok() && self.in_one_part(range).is_some()
    }
}

impl fmt::Debug for GatherSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatherSource")
            .field("len_bytes", &self.len_bytes())
            .field("parts", &self.parts.ranges().count())
            .finish()
    }
}

/// The bytes of `common`, which lies in `part`, whose bytes are `bytes`.
fn slice(common: &Range<u64>, part: &Range<u64>, bytes: &Bytes) -> Bytes {
    // In bounds of a `usize` length, so neither end is cut.
    bytes.slice((common.start - part.start) as usize..(common.end - part.start) as usize)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Loan, parts::tests::places};

    fn source() -> (Bytes, GatherSource) {
        let bytes = Bytes::from(vec![1, 2, 3, 4, 5, 6, 7, 8]);
        let parts = [(2..6, bytes.slice(..4)), (6..10, bytes.slice(4..))];
        (bytes, GatherSource::new(12, parts).unwrap())
    }

    #[tokio::test]
    async fn a_read_within_a_part_shares_its_bytes() {
        let (bytes, source) = source();
        for (range, first) in [(2..6, 0), (3..5, 1), (6..10, 4), (9..10, 7)] {
            assert!(source.is_in_place(&range));
            assert_eq!(source.read(range).await.unwrap().as_ptr(), bytes[first..].as_ptr());
        }
    }

    #[tokio::test]
    async fn padding_is_zero() {
        let (_, source) = source();
        assert_eq!(source.read(0..12).await.unwrap()[..], [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0]);
        assert_eq!(source.read(10..12).await.unwrap()[..], [0, 0]);
        assert_eq!(source.read(9..11).await.unwrap()[..], [8, 0]);
        for range in [0..12, 10..12, 9..11, 5..7, 9..13] {
            assert!(!source.is_in_place(&range), "{range:?} is gathered, or is not there");
        }
    }

    #[tokio::test]
    #[expect(clippy::reversed_empty_ranges, reason = "a reader may ask for any two numbers")]
    async fn ranges_outside_are_refused() {
        let (_, source) = source();
        for range in [0..13, 13..13, 3..2, u64::MAX..u64::MAX, 1..u64::MAX] {
            assert!(matches!(source.read(range).await, Err(SourceError::OutOfBounds { len_bytes: 12, .. })));
        }
    }

    #[tokio::test]
    async fn more_than_there_is_memory_is_an_error() {
        let source = GatherSource::new(u64::MAX, []).unwrap();
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
            (len_bytes, places) in places(),
            start in any::<u64>(),
            len in any::<u64>(),
        ) {
            let mut payload = vec![0; len_bytes as usize];
            let mut parts = Vec::new();
            for range in places {
                let place = range.start as usize..range.end as usize;
                for byte in place.clone() {
                    payload[byte] = byte as u8 + 1;
                }
                parts.push((range, Bytes::copy_from_slice(&payload[place])));
            }
            let source = GatherSource::new(len_bytes, parts).unwrap();
            let start = start % (len_bytes + 1);
            let end = start + len % (len_bytes - start + 1);
            let read = source.bytes(&(start..end)).unwrap();
            prop_assert_eq!(&read[..], &payload[start as usize..end as usize]);
        }
    }
}
