//! The sending half of a connection: its streams, and the driver's queues.

use bytes::Bytes;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use tensor_relay_device::Lock;
use tokio::sync::{Mutex as AsyncMutex, Notify, OwnedMutexGuard, mpsc, watch};

use super::{
    Connection, LaneError,
    segment::{SEGMENT_BYTES_MAX, Segment},
};

/// The maximum length of the data in a queue entry: four segments, so that senders are not woken for each of them.
pub(super) const SPAN_BYTES_MAX: usize = 4 * SEGMENT_BYTES_MAX;

/// The maximum number of entries in the data queue. Together they have two megabytes, enough to keep the driver busy.
const DATA_QUEUE_MAX: usize = 8;

/// The maximum length of consecutive writes that are copied together: a small chunk is copied behind its stream header,
/// so that both are one segment and wake the receiver once.
const COALESCED_BYTES_MAX: usize = 8 << 10;

/// The maximum number of queued parts of control messages. Further messages wait in the queue of
/// [`control`](crate::control).
pub(super) const CONTROL_QUEUE_MAX: usize = 4;

/// A part of the control stream, of at most [`SEGMENT_BYTES_MAX`].
pub(super) type ControlPart = Bytes;

/// Pending pong and stop for the peer, and the state of outgoing data streams.
#[derive(Debug)]
pub(super) struct Outbox {
    data: mpsc::Sender<Segment>,
    /// Serialises data streams, in the order of requests. Contains the number of begun streams.
    stream_lock: Arc<AsyncMutex<u64>>,
    /// The number of begun data streams, readable without the lock, to validate the peer's stops.
    begun: AtomicU64,
    /// One more than the number of the last stream that the peer has stopped. Earlier streams have ended.
    stopped: AtomicU64,
    answers: Lock<Answers>,
    answers_changed: Notify,
    /// Whether the end of the control stream was written.
    control_written: watch::Sender<bool>,
}

/// Pending pong and stop, at most one of each: a later pong replaces an earlier one, and the stop of a later stream
/// that of an earlier stream, which has ended.
#[derive(Debug, Default, PartialEq, Eq)]
struct Answers {
    pong: Option<u64>,
    stop: Option<u64>,
}

/// The driver's halves of the queues.
#[derive(Debug)]
pub(super) struct Queues {
    pub(super) control: mpsc::Receiver<ControlPart>,
    pub(super) data: mpsc::Receiver<Segment>,
}

impl Outbox {
    pub(super) fn new() -> (Self, mpsc::Receiver<Segment>) {
        let (data, queue) = mpsc::channel(DATA_QUEUE_MAX);
        let outbox = Self {
            data,
            stream_lock: Arc::default(),
            begun: AtomicU64::new(0),
            stopped: AtomicU64::new(0),
            answers: Lock::default(),
            answers_changed: Notify::new(),
            control_written: watch::Sender::new(false),
        };
        (outbox, queue)
    }

    pub(super) fn queue_pong(&self, number: u64) {
        self.answer(|answers| answers.pong = Some(number));
    }

    pub(super) fn queue_stop(&self, stream: u64) {
        self.answer(|answers| answers.stop = answers.stop.max(Some(stream)));
    }

    fn answer(&self, change: impl FnOnce(&mut Answers)) {
        change(&mut self.answers.lock());
        self.answers_changed.notify_one();
    }

    /// Waits for the next pending answer. Cancel safe.
    pub(super) async fn next_answer(&self) -> Segment {
        loop {
            match self.take_answer() {
                Some(segment) => return segment,
                None => self.answers_changed.notified().await,
            }
        }
    }

    pub(super) fn take_answer(&self) -> Option<Segment> {
        let mut answers = self.answers.lock();
        let stop = answers.stop.take().map(|stream| Segment::Stop { stream });
        stop.or_else(|| answers.pong.take().map(|number| Segment::Pong { number }))
    }

    /// Handles the peer's stop of `stream`. Returns false if that stream has not begun.
    pub(super) fn handle_stop(&self, stream: u64) -> bool {
        let has_begun = stream < self.begun.load(Ordering::Acquire);
        if has_begun {
            self.stopped.fetch_max(stream + 1, Ordering::Relaxed);
        }
        has_begun
    }

    /// Records that the end of the control stream was written.
    pub(super) fn handle_control_written(&self) {
        self.control_written
            .send_if_modified(|written| !std::mem::replace(written, true));
    }
}

/// The sending half of the control stream. Dropping it ends the stream.
#[derive(Debug)]
pub(crate) struct ControlOut {
    queue: mpsc::Sender<ControlPart>,
    connection: Connection,
}

impl ControlOut {
    pub(super) fn new(queue: mpsc::Sender<ControlPart>, connection: Connection) -> Self {
        Self { queue, connection }
    }

    pub(crate) async fn write(&mut self, mut frame: Bytes) -> bool {
        while !frame.is_empty() {
            let part = frame.split_to(frame.len().min(SEGMENT_BYTES_MAX));
            if self.queue.send(part).await.is_err() {
                return false;
            }
        }
        true
    }

    pub(crate) async fn finish(self) {
        let Self { queue, connection } = self;
        drop(queue);
        let mut written = connection.shared().outbox.control_written.subscribe();
        tokio::select! {
            _ = written.wait_for(|written| *written) => {}
            _ = connection.closed() => {}
        }
    }
}

/// The sending half of a data stream. Holds the lock of data streams until it is finished or dropped.
#[derive(Debug)]
pub(crate) struct DataOut {
    connection: Connection,
    stream_lock: OwnedMutexGuard<u64>,
    /// A reserved queue slot for the last segment or the reset, which are sent without waiting.
    end: Option<mpsc::OwnedPermit<Segment>>,
    /// The last written bytes, held until more follow or the stream is finished.
    held: Option<Bytes>,
    /// The stream's number, once its first segment is queued.
    number: Option<u64>,
}

impl DataOut {
    pub(super) async fn open(connection: Connection) -> Result<Self, LaneError> {
        let outbox = &connection.shared().outbox;
        let (lock, queue) = (Arc::clone(&outbox.stream_lock), outbox.data.clone());
        let opened = async { (lock.lock_owned().await, queue.reserve_owned().await) };
        tokio::select! {
            biased;
            error = connection.closed() => Err(error),
            (stream_lock, end) = opened => match end {
                Ok(end) => Ok(Self { connection, stream_lock, end: Some(end), held: None, number: None }),
                Err(_) => Err(connection.closed().await),
            },
        }
    }

    pub(crate) async fn write(
        &mut self,
        mut bytes: Bytes,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), LaneError> {
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(SPAN_BYTES_MAX));
            let size = piece.len() as u64;
            match &self.held {
                Some(held) if held.len() + piece.len() <= COALESCED_BYTES_MAX => {
                    self.held = Some([&held[..], &piece].concat().into());
                }
                _ => {
                    self.queue_held().await?;
                    self.held = Some(piece);
                }
            }
            progress(size);
        }
        Ok(())
    }

    /// Queues the held bytes, which others follow. Cancel safe.
    async fn queue_held(&mut self) -> Result<(), LaneError> {
        if self.held.is_none() {
            return Ok(());
        }
        let connection = self.connection.clone();
        let Ok(permit) = connection.shared().outbox.data.reserve().await else {
            return Err(connection.closed().await);
        };
        if self.is_stopped() {
            return Err(LaneError::StreamAborted);
        }
        let segment = self.next_segment(false);
        permit.send(segment);
        Ok(())
    }

    fn next_segment(&mut self, last: bool) -> Segment {
        let first = self.number.is_none();
        if first {
            self.number = Some(*self.stream_lock);
            *self.stream_lock += 1;
            self.connection
                .shared()
                .outbox
                .begun
                .store(*self.stream_lock, Ordering::Release);
        }
        Segment::Data { bytes: self.held.take().unwrap_or_default(), first, last }
    }

    fn is_stopped(&self) -> bool {
        let stopped = self.connection.shared().outbox.stopped.load(Ordering::Relaxed);
        self.number.is_some_and(|number| number < stopped)
    }

    pub(crate) fn finish(mut self) -> Result<(), LaneError> {
        if let Some(error) = self.connection.ended() {
            return Err(error);
        }
        if self.is_stopped() {
            return Err(LaneError::StreamAborted);
        }
        let (end, segment) = (self.end.take(), self.next_segment(true));
        end.map(|permit| permit.send(segment));
        Ok(())
    }
}

impl Drop for DataOut {
    fn drop(&mut self) {
        if let (Some(permit), Some(_)) = (self.end.take(), self.number) {
            permit.send(Segment::Reset);
        }
    }
}
