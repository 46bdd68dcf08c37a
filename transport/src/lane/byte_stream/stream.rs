//! [`Stream`]: an incoming data stream, shared by the driver and the stream's reader.
//!
//! The reader of a chunk lends the chunk's memory to the driver, which then decrypts into this memory, without a copy
//! and without waking the reader before the end. Bytes received before the loan are queued in pieces.

use bytes::Bytes;
use std::{collections::VecDeque, sync::Arc};
use tensor_relay_device::Lock;
use tokio::sync::Notify;

use crate::receive_buffer::ReceiveBuffer;

/// One data stream. Its lock is held at most while one record is decrypted or one segment is copied.
#[derive(Debug, Default)]
pub(super) struct Stream {
    state: Lock<State>,
    /// Signals the reader.
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Unread pieces. Bounded by the limit of [`Unread`](super::receiving::Unread).
    pieces: VecDeque<Bytes>,
    /// The buffer lent by the reader. While there is one, `pieces` is empty.
    buffer: Option<ReceiveBuffer>,
    end: Option<StreamEnd>,
    /// Whether the reader was dropped.
    is_discarded: bool,
}

/// The end of a data stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamEnd {
    Complete,
    /// Reset, or the lane ended.
    Aborted,
}

impl Stream {
    /// Waits for a piece, or for the end after the last one. Cancel safe.
    pub(super) async fn next(&self) -> Result<Bytes, StreamEnd> {
        loop {
            match self.take_piece() {
                Some(next) => return next,
                None => self.changed.notified().await,
            }
        }
    }

    fn take_piece(&self) -> Option<Result<Bytes, StreamEnd>> {
        let mut state = self.state.lock();
        let piece = state.pieces.pop_front().map(Ok);
        piece.or_else(|| state.end.map(Err))
    }

    /// Lends `buffer` to the driver. If pieces are queued, returns the buffer and the next piece instead.
    pub(super) fn lend(&self, buffer: ReceiveBuffer) -> Option<(ReceiveBuffer, Bytes)> {
        let mut state = self.state.lock();
        match state.pieces.pop_front() {
            Some(piece) => Some((buffer, piece)),
            None => {
                state.buffer = Some(buffer);
                None
            }
        }
    }

    /// Waits until the stream ends or exceeds the lent buffer; returns the buffer and the end. If this is cancelled,
    /// [`discard`](Self::discard) drops the buffer.
    pub(super) async fn filled(&self) -> (Option<ReceiveBuffer>, Option<StreamEnd>) {
        loop {
            {
                let mut state = self.state.lock();
                let is_overfull = state.buffer.as_ref().is_none_or(ReceiveBuffer::is_overfull);
                if is_overfull || state.end.is_some() {
                    return (state.buffer.take(), state.end);
                }
            }
            self.changed.notified().await;
        }
    }

    /// Stops receiving and drops the lent buffer. Returns whether more bytes may arrive, and the unread pieces.
    pub(super) fn discard(&self) -> (bool, VecDeque<Bytes>) {
        let mut state = self.state.lock();
        state.is_discarded = true;
        state.buffer = None;
        (state.end.is_none(), std::mem::take(&mut state.pieces))
    }

    /// Whether a buffer is lent that has room for `bytes` more bytes.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        let mut state = self.state.lock();
        state.buffer.as_mut().is_some_and(|buffer| buffer.room().len() >= bytes)
    }

    /// Calls `decrypt` with the next `bytes` bytes of the lent buffer, if it has room for them. `decrypt` returns how
    /// many of them are data.
    pub(super) fn fill(&self, bytes: usize, decrypt: impl FnOnce(&mut [u8]) -> usize) {
        let mut state = self.state.lock();
        if let Some(buffer) = &mut state.buffer
            && let Some(room) = buffer.room().get_mut(..bytes)
        {
            let filled = decrypt(room);
            buffer.advance(filled);
        }
    }

    /// Copies `bytes` into the lent buffer; returns false if there is none.
    pub(super) fn put(&self, bytes: &[u8]) -> bool {
        self.put_locked(&mut self.state.lock(), bytes)
    }

    /// Queues a piece for the reader. Returns false if the piece was copied into a lent buffer instead, or the reader
    /// was dropped.
    pub(super) fn push(&self, bytes: &Bytes) -> bool {
        let mut state = self.state.lock();
        if state.is_discarded || self.put_locked(&mut state, bytes) {
            return false;
        }
        state.pieces.push_back(bytes.clone());
        self.changed.notify_one();
        true
    }

    fn put_locked(&self, state: &mut State, bytes: &[u8]) -> bool {
        let Some(buffer) = &mut state.buffer else { return false };
        buffer.put(bytes);
        if buffer.is_overfull() {
            self.changed.notify_one();
        }
        true
    }

    fn end(&self, end: StreamEnd) {
        self.state.lock().end.get_or_insert(end);
        self.changed.notify_one();
    }
}

/// The driver's handle of a data stream. Dropping it before `finish` marks the stream as aborted.
#[derive(Debug, Default)]
pub(super) struct StreamIn(pub(super) Arc<Stream>);

impl StreamIn {
    /// Marks the stream as complete.
    pub(super) fn finish(self) {
        self.0.end(StreamEnd::Complete);
    }
}

impl Drop for StreamIn {
    fn drop(&mut self) {
        self.0.end(StreamEnd::Aborted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Progress, receive_buffer::Memory};
    use std::sync::atomic::{AtomicU64, Ordering};
    use tensor_relay_device::{HostMemory, HostSink, Sink};
    use tensor_relay_protocol::{ChunkHash, ChunkHasher, ChunkIndex};

    const BYTES: usize = 1_000;

    async fn new_buffer(sink: &HostSink) -> ReceiveBuffer {
        let target = sink.open(0..BYTES as u64).await.unwrap();
        let progress: Progress = Arc::new(|_| ());
        ReceiveBuffer::new(Memory::Raw(target, Box::new(ChunkHasher::new())), BYTES, &progress)
    }

    fn new_sink() -> HostSink {
        HostSink::new(HostMemory::new(u64::MAX).allocate(BYTES).unwrap())
    }

    fn chunk_content() -> Vec<u8> {
        (0..BYTES).map(|byte| byte as u8).collect()
    }

    /// Fills like `open_record`, which needs room for one byte more than the data.
    fn fill(stream: &Stream, bytes: &[u8]) {
        stream.fill(bytes.len() + 1, |room| {
            room[..bytes.len()].copy_from_slice(bytes);
            bytes.len()
        });
    }

    /// Goal: queued pieces, bytes decrypted in place and copied bytes form one chunk, in order and hashed.
    #[tokio::test]
    async fn pieces_and_lent_memory_form_one_chunk() {
        let (sink, content) = (new_sink(), chunk_content());
        let driver = StreamIn::default();
        let stream = Arc::clone(&driver.0);
        assert!(!stream.has_room(1) && !stream.put(&content[..1]), "no buffer is lent");
        for piece in [&content[..100], &content[100..300]] {
            assert!(stream.push(&Bytes::copy_from_slice(piece)));
        }
        let mut lent = new_buffer(&sink).await;
        while let Some((returned, piece)) = stream.lend(lent) {
            lent = returned;
            lent.put(&piece);
        }
        assert!(stream.has_room(700) && !stream.has_room(701));
        fill(&stream, &content[300..600]);
        fill(&stream, &content[600..1_000]); // No room for the additional byte.
        assert!(stream.has_room(400));
        assert!(!stream.push(&Bytes::copy_from_slice(&content[600..900])), "it was copied");
        assert!(stream.put(&content[900..]));
        driver.finish();
        let (buffer, end) = stream.filled().await;
        let (memory, found) = buffer.unwrap().into_parts();
        assert_eq!((found, end), (BYTES, Some(StreamEnd::Complete)));
        let Memory::Raw(target, hasher) = memory else { panic!("it was lent raw") };
        assert!(*target == content);
        assert!(hasher.verify(ChunkIndex(0), ChunkHash::of(&content)).is_ok());
    }

    /// Goal: a cancelled reader reclaims its memory immediately, and later bytes are discarded.
    #[tokio::test]
    async fn a_cancelled_reader_reclaims_its_memory() {
        let sink = new_sink();
        let driver = StreamIn::default();
        assert!(driver.0.lend(new_buffer(&sink).await).is_none());
        fill(&driver.0, &chunk_content()[..500]);
        assert_eq!(driver.0.discard(), (true, VecDeque::new()));
        let again = new_buffer(&sink).await;
        fill(&driver.0, &chunk_content()[..100]);
        assert!(!driver.0.push(&Bytes::from_static(b"late")));
        drop(driver);
        assert_eq!(again.into_parts().1, 0);
    }

    /// Goal: a stream with too many bytes and an aborted stream are detected.
    #[tokio::test]
    async fn too_many_and_too_few_bytes_are_detected() {
        let received = Arc::new(AtomicU64::new(0));
        for (bytes, end) in [(BYTES + 1, None), (BYTES - 1, Some(StreamEnd::Aborted))] {
            let sink = new_sink();
            let driver = StreamIn::default();
            let stream = Arc::clone(&driver.0);
            let counted = Arc::clone(&received);
            let progress: Progress = Arc::new(move |bytes| {
                counted.fetch_add(bytes, Ordering::Relaxed);
            });
            let target = sink.open(0..BYTES as u64).await.unwrap();
            let memory = Memory::Raw(target, Box::new(ChunkHasher::new()));
            assert!(stream.lend(ReceiveBuffer::new(memory, BYTES, &progress)).is_none());
            let reading = tokio::spawn(async move { stream.filled().await });
            tokio::task::yield_now().await;
            assert!(driver.0.put(&vec![7; bytes]));
            let kept = end.is_none().then_some(driver);
            let (buffer, found_end) = reading.await.unwrap();
            assert_eq!((buffer.unwrap().into_parts().1, found_end), (bytes, end));
            drop(kept);
        }
        assert_eq!(
            received.load(Ordering::Relaxed),
            2 * BYTES as u64 - 1,
            "bytes without room are not progress"
        );
    }
}
