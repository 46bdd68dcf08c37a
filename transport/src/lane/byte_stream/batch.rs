//! [`SegmentBatch`]: gathers and encrypts outgoing segments, and writes them together.

use rustls::AlertDescription;
use std::{io, ops::RangeFrom, time::Duration};
use tensor_relay_device::{HostMemory, Region};
use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    time::Instant,
};

use super::{
    records::{RecordError, Sealer},
    segment::{SEGMENT_BYTES_MAX, SEGMENT_HEADER_BYTES, Segment},
    sending::SPAN_BYTES_MAX,
};

/// The number of segments of maximal length in a batch: a megabyte. A quarter of that is 10 % slower, since each write
/// ends with a partial packet.
const SEGMENTS: usize = 16;

/// If the connection takes longer for a batch, the next one holds less: a control message that comes meanwhile waits for it.
const BATCH_DURATION: Duration = Duration::from_millis(5);

/// The least that a batch may hold.
const QUANTUM_MIN: usize = SEGMENT_BYTES_MAX;

/// The length of an alert: level and description (RFC 8446 §6).
const ALERT_BYTES: usize = 2;

/// The longest segment whose bytes are copied behind its header. Longer ones are encrypted without a copy.
const JOINED_BYTES_MAX: usize = 1 << 10;

/// The longest record of short segments and headers, which are encrypted together: a record costs as much as a kilobyte.
pub(super) const SHORT_BYTES_MAX: usize = 2 << 10;

/// The maximum space for a segment: a record for its header, and the records of its bytes.
const SEGMENT_ROOM: usize =
    Sealer::sealed_bytes_max(SEGMENT_HEADER_BYTES) + Sealer::sealed_bytes_max(SEGMENT_BYTES_MAX);

/// The maximum space for one [`add`](SegmentBatch::add).
const SPAN_ROOM: usize = SPAN_BYTES_MAX / SEGMENT_BYTES_MAX * SEGMENT_ROOM;

/// The maximum space for a batch.
pub(super) const ROOM_MAX: usize = SEGMENTS * SEGMENT_ROOM + Sealer::sealed_bytes_max(SHORT_BYTES_MAX);

/// The initial size of the buffer, for control messages and small versions.
const ROOM_MIN: usize = 4 << 10;

/// The output buffer of a connection. It grows on demand: a connection without transfers takes little memory. It is
/// mapped directly from the system, because allocators would retain a megabyte for each connection that was ever busy.
pub(super) struct SegmentBatch<W> {
    write: W,
    /// `None` without TLS: the segments are copied.
    sealer: Option<Sealer>,
    memory: HostMemory,
    bytes: Region,
    filled: usize,
    /// The headers and short segments that are not encrypted yet.
    short: Vec<u8>,
    /// The maximum filled length since the last [`trim`](SegmentBatch::trim).
    peak: usize,
    /// The length from which a batch takes no more segments.
    quantum: usize,
}

impl<W: AsyncWrite + Unpin> SegmentBatch<W> {
    pub(super) fn new(write: W, sealer: Option<Sealer>) -> Self {
        let memory = HostMemory::on_demand(u64::MAX);
        let (bytes, short) = (Region::default(), Vec::with_capacity(SHORT_BYTES_MAX));
        Self { write, sealer, memory, bytes, filled: 0, short, peak: 0, quantum: ROOM_MAX }
    }

    /// Whether there is space for any [`add`](Self::add).
    pub(super) fn has_room(&self) -> bool {
        self.filled < self.quantum
            && ROOM_MAX - self.filled >= SPAN_ROOM + Sealer::sealed_bytes_max(SHORT_BYTES_MAX)
    }

    /// Whether the batch has less than a segment of maximal length and should wait for more.
    pub(super) fn is_short(&self) -> bool {
        self.filled + self.short.len() < SEGMENT_BYTES_MAX
    }

    /// Adds a segment; the caller checks [`has_room`](Self::has_room). Data of up to [`SPAN_BYTES_MAX`] is split into
    /// several segments.
    pub(super) fn add(&mut self, mut segment: Segment) -> io::Result<()> {
        while let Some(front) = segment.split_front() {
            self.add_one(front)?;
        }
        self.add_one(segment)
    }

    fn add_one(&mut self, segment: Segment) -> io::Result<()> {
        let (header, bytes) = segment.encode();
        let joined: &[u8] = if bytes.len() > JOINED_BYTES_MAX { &[] } else { &bytes };
        if self.short.len() + header.len() + joined.len() > SHORT_BYTES_MAX {
            self.seal_short()?;
        }
        self.short.extend_from_slice(&header);
        self.short.extend_from_slice(joined);
        if bytes.len() > JOINED_BYTES_MAX {
            self.seal_short()?;
            self.seal(&bytes)?;
        }
        Ok(())
    }

    /// Adds an alert of TLS; nothing without TLS.
    pub(super) fn add_alert(&mut self, alert: AlertDescription) -> io::Result<()> {
        self.seal_short()?;
        let room = self.room(Sealer::sealed_bytes_max(ALERT_BYTES))?;
        if let Some(sealer) = &mut self.sealer {
            let sealed = sealer.seal_alert(alert, &mut self.bytes[room]);
            self.filled += sealed.map_err(sealing_error)?;
        }
        Ok(())
    }

    /// Writes the added segments, and measures how long that takes: on a slow path the next batch is smaller.
    pub(super) async fn write_paced(&mut self) -> io::Result<()> {
        let began = Instant::now();
        self.seal_short()?;
        let written = self.filled;
        self.write().await?;
        let took = began.elapsed();
        let quantum = match took > BATCH_DURATION {
            true => (written as f64 * BATCH_DURATION.as_secs_f64() / took.as_secs_f64()) as usize,
            false => 2 * self.quantum,
        };
        self.quantum = quantum.clamp(QUANTUM_MIN, ROOM_MAX);
        Ok(())
    }

    /// Writes the added segments.
    pub(super) async fn write(&mut self) -> io::Result<()> {
        self.seal_short()?;
        let filled = std::mem::take(&mut self.filled);
        self.peak = self.peak.max(filled);
        self.write.write_all(&self.bytes[..filled]).await?;
        self.write.flush().await
    }

    pub(super) async fn shutdown(&mut self) -> io::Result<()> {
        self.write.shutdown().await
    }

    /// Frees the buffer if it is empty and at most half of it was needed since the last call. Call this periodically,
    /// but rarely: a freed buffer must be mapped again.
    pub(super) fn trim(&mut self) {
        let needed = std::mem::take(&mut self.peak).max(self.filled).max(ROOM_MIN);
        if self.filled == 0 && needed <= self.bytes.len() / 2 {
            self.bytes = Region::default();
        }
    }

    fn seal_short(&mut self) -> io::Result<()> {
        if self.short.is_empty() {
            return Ok(());
        }
        let mut short = std::mem::take(&mut self.short);
        let sealed = self.seal(&short);
        short.clear();
        self.short = short;
        sealed
    }

    fn seal(&mut self, bytes: &[u8]) -> io::Result<()> {
        let room = self.room(Sealer::sealed_bytes_max(bytes.len()))?;
        let room = &mut self.bytes[room];
        self.filled += match &mut self.sealer {
            Some(sealer) => sealer.seal(bytes, room).map_err(sealing_error)?,
            None => {
                room[..bytes.len()].copy_from_slice(bytes);
                bytes.len()
            }
        };
        Ok(())
    }

    /// The range of free space in the buffer. The buffer grows until this has at least `bytes` bytes. Fails when the
    /// system has no memory.
    fn room(&mut self, bytes: usize) -> io::Result<RangeFrom<usize>> {
        let needed = self.filled + bytes;
        if needed > self.bytes.len() {
            let len = needed.next_power_of_two().min(ROOM_MAX).max(needed).max(ROOM_MIN);
            let mut longer = self.memory.allocate(len).map_err(io::Error::other)?;
            longer[..self.filled].copy_from_slice(&self.bytes[..self.filled]);
            self.bytes = longer;
        }
        Ok(self.filled..)
    }
}

fn sealing_error(error: RecordError) -> io::Error {
    io::Error::other(error)
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            Role,
            inbox::{Inbox, ReadError},
            records::{record_bytes, tests::pair},
            segment::Received,
        },
        *,
    };
    use bytes::Bytes;
    use proptest::{collection::vec, prelude::*};
    use std::{
        pin::Pin,
        task::{Context, Poll, ready},
    };
    use tokio::time::{Sleep, sleep};

    fn control(bytes: usize) -> Segment {
        Segment::Control { bytes: vec![1; bytes].into(), last: false }
    }

    fn data(bytes: usize) -> Segment {
        Segment::Data { bytes: vec![2; bytes].into(), first: false, last: false }
    }

    /// Segments with lengths around the limits of records and segments.
    fn segment() -> impl Strategy<Value = Segment> {
        let limits = || prop_oneof![0..64usize, 1_000..1_100usize, 2_000..2_100usize];
        prop_oneof![
            limits().prop_map(control),
            limits().prop_map(data),
            (0..=SEGMENT_BYTES_MAX).prop_map(control),
            (0..=SPAN_BYTES_MAX).prop_map(data),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn segments_arrive_in_order_and_within_the_room(
            segments in vec(segment(), 1..40),
            records_per_key in 2u64..40,
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            runtime.block_on(async {
                let [(sealer, _), (_, opener)] = pair(records_per_key);
                let (mut batch, mut expected) = (SegmentBatch::new(Vec::new(), Some(sealer)), vec![]);
                for mut segment in segments {
                    if !batch.has_room() {
                        batch.write().await.unwrap();
                    }
                    batch.add(segment.clone()).unwrap();
                    assert!(batch.filled <= batch.bytes.len() && batch.bytes.len() <= ROOM_MAX);
                    assert!(batch.short.capacity() <= SHORT_BYTES_MAX);
                    expected.extend(std::iter::from_fn(|| segment.split_front()));
                    expected.push(segment);
                }
                let close = Segment::Close { code: 7, text: Bytes::from_static(b"end") };
                batch.add(close.clone()).unwrap();
                batch.add_alert(AlertDescription::CloseNotify).unwrap();
                batch.write().await.unwrap();
                assert!(batch.bytes.len() <= ROOM_MAX);
                let mut inbox = Inbox::new(&batch.write[..], Some(opener), Role::Client);
                for segment in expected.into_iter().chain([close]) {
                    let found = inbox.next(None, Duration::from_secs(1)).await.unwrap();
                    assert_eq!(found, Received::Segment(segment));
                }
                let end = inbox.next(None, Duration::from_secs(1)).await;
                assert!(matches!(end, Err(ReadError::Ended)), "the alert comes last: {end:?}");
            });
        }
    }

    #[tokio::test]
    async fn a_small_version_is_sent_in_three_records() {
        let [(sealer, _), _] = pair(100);
        let mut batch = SegmentBatch::new(Vec::new(), Some(sealer));
        for segment in [control(100), data(64), data(4096), control(50)] {
            batch.add(segment).unwrap();
        }
        batch.write().await.unwrap();
        let (mut wire, mut records) = (&batch.write[..], 0);
        while let Some(bytes) = record_bytes(wire).unwrap() {
            (wire, records) = (&wire[bytes..], records + 1);
        }
        assert_eq!((wire.len(), records), (0, 3), "one has the data, and those around it all that is short");
    }

    /// A connection that takes this time for each write.
    struct Slow(Duration, Option<Pin<Box<Sleep>>>);

    impl AsyncWrite for Slow {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            let duration = self.0;
            let sleep = self.1.get_or_insert_with(|| Box::pin(sleep(duration)));
            ready!(sleep.as_mut().poll(cx));
            self.1 = None;
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// Goal: a control message waits for little data on a slow path, and on a fast one batches are as long as ever.
    #[tokio::test(start_paused = true)]
    async fn a_batch_holds_less_where_writing_takes_long() {
        let mut batch = SegmentBatch::new(Slow(Duration::ZERO, None), None);
        let mut batched = async |took_ms| {
            batch.write.0 = Duration::from_millis(took_ms);
            let mut segments = 0;
            while batch.has_room() {
                batch.add(data(SEGMENT_BYTES_MAX)).unwrap();
                segments += 1;
            }
            batch.write_paced().await.unwrap();
            segments
        };
        let usual = batched(1).await;
        assert_eq!(
            [batched(4).await, batched(1_000).await],
            [usual; 2],
            "what takes long is known afterwards"
        );
        assert_eq!(batched(1_000).await, 1);
        let recovered =
            [batched(1).await, batched(1).await, batched(1).await, batched(1).await, batched(1).await];
        assert!(recovered.is_sorted() && recovered[4] == usual, "{recovered:?}");
    }
}
