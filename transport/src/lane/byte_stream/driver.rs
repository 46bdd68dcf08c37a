//! [`Driver`]: the task that reads and writes a byte stream.

use bytes::Bytes;
use rustls::AlertDescription;
use std::{io, pin::pin, sync::Arc, sync::atomic::Ordering, time::Duration};
use tensor_relay_protocol::CloseCode;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf},
    sync::{
        mpsc::{self, error::TryRecvError},
        watch,
    },
    task::yield_now,
    time::{MissedTickBehavior, interval, timeout},
};

use super::{
    CloseNotice, End, LaneError, Role, Secured, Settings, Shared,
    batch::SegmentBatch,
    inbox::{Inbox, ReadError},
    receiving::{ControlPipe, Incoming},
    segment::{Received, Segment},
    sending::Queues,
    stream::StreamIn,
};

/// The maximum time to write the close notice, and for the peer to read it and end the stream.
const LINGER: Duration = Duration::from_secs(3);

/// The maximum time to read the peer's close notice after a failed write.
const FINAL_READ_TIMEOUT: Duration = Duration::from_millis(500);

/// The longest segment at the beginning of a stream that is copied: for a longer one the stream's reader runs first, so
/// that it is decrypted into memory that the reader lends.
const COPIED_BYTES_MAX: usize = 16 << 10;

/// The size of reads whose bytes are discarded.
const DRAIN_BYTES: usize = 16 << 10;

/// The initial state of a connection's driver.
pub(super) struct Driver {
    pub(super) shared: Arc<Shared>,
    pub(super) role: Role,
    pub(super) settings: Settings,
    pub(super) queues: Queues,
    pub(super) control: ControlPipe,
    /// Passes new data streams to `accept_data`.
    pub(super) begun: mpsc::UnboundedSender<Incoming>,
    /// The listener's signal to close its lanes, at a server.
    pub(super) closing: Option<watch::Receiver<Option<CloseCode>>>,
}

impl Driver {
    /// Drives a `secured` stream until the connection ends. Then writes the close notice, if any, and waits until the
    /// peer has ended the stream, at most for [`LINGER`].
    pub(super) async fn run(self, secured: Secured<impl AsyncRead + AsyncWrite>) {
        let Self { shared, role, settings, queues, control, begun, mut closing } = self;
        let (read, write) = tokio::io::split(secured.stream);
        let (sealer, opener) = secured.records.unzip();
        let mut reader = Reader {
            inbox: Inbox::new(read, opener, role),
            shared: Arc::clone(&shared),
            role,
            settings,
            control: Some(control),
            begun,
            next_stream: 0,
            current: None,
        };
        let batch = SegmentBatch::new(write, sealer);
        let writer = Writer { batch, shared: Arc::clone(&shared), queues, is_control_open: true };
        let mut writing = pin!(writer.run(settings.keep_alive));
        let mut has_writer_ended = false;
        {
            let mut reading = pin!(reader.run());
            tokio::select! {
                biased;
                _ = shared.wait_for_end() => {}
                end = &mut reading => shared.end(end),
                written = &mut writing => {
                    has_writer_ended = true;
                    // Without an error, it has written the close notice: another thread ended the connection just now.
                    if let Err(error) = written {
                        // The peer may have sent a close notice before it stopped reading.
                        let final_read = timeout(FINAL_READ_TIMEOUT, &mut reading).await;
                        shared.end(final_read.unwrap_or_else(|_| shared.io_failure(error)));
                    }
                }
                code = wait_for_listener_close(&mut closing) => {
                    let notice = CloseNotice::Close(code, String::new());
                    shared.end(End { error: LaneError::ClosedLocally, notice });
                }
            }
        }
        // Ends the incoming streams, whose readers then query the connection's error.
        let read = reader.into_read_half();
        if shared.wait_for_end().await.notice != CloseNotice::None {
            let lingering = async {
                if has_writer_ended || writing.await.is_ok() {
                    drain(read).await;
                }
            };
            let _ = timeout(LINGER, lingering).await;
        }
        shared.driver_ended.send_replace(true);
    }
}

/// Waits until the listener closes its lanes.
async fn wait_for_listener_close(closing: &mut Option<watch::Receiver<Option<CloseCode>>>) -> CloseCode {
    let Some(closing) = closing else { return std::future::pending().await };
    match closing.wait_for(Option::is_some).await.ok().and_then(|code| *code) {
        Some(code) => code,
        None => std::future::pending().await, // The listener was dropped without closing its lanes.
    }
}

/// Reads until the peer ends the stream. Dropping a TCP connection with unread bytes resets it, which can lose the last
/// sent bytes.
async fn drain(mut read: impl AsyncRead + Unpin) {
    let mut unwanted = vec![0; DRAIN_BYTES];
    while let Ok(1..) = read.read(&mut unwanted).await {}
}

/// The driver's receiving half.
struct Reader<S> {
    inbox: Inbox<ReadHalf<S>>,
    shared: Arc<Shared>,
    role: Role,
    settings: Settings,
    /// The incoming control stream; `None` once the peer has ended it.
    control: Option<ControlPipe>,
    /// Passes new data streams to `accept_data`.
    begun: mpsc::UnboundedSender<Incoming>,
    /// The number of the next data stream.
    next_stream: u64,
    /// The current data stream.
    current: Option<StreamIn>,
}

impl<S: AsyncRead + AsyncWrite> Reader<S> {
    async fn run(&mut self) -> End {
        loop {
            let current = self.current.as_ref().map(|stream| &stream.0);
            let handled = match self.inbox.next(current, self.settings.idle_timeout).await {
                Ok(Received::Segment(segment)) => self.handle(segment).await,
                Ok(Received::Filled { wire_bytes, last }) => {
                    self.handle_filled(wire_bytes, last);
                    Ok(())
                }
                Err(error) => Err(self.read_failure(error)),
            };
            if let Err(end) = handled {
                return end;
            }
        }
    }

    fn read_failure(&self, error: ReadError) -> End {
        let peer = self.shared.peer;
        match error {
            ReadError::Io(error) => self.shared.io_failure(error),
            ReadError::Ended => {
                let detail = "it ended TLS and not the lane".into();
                End { error: LaneError::ConnectionLost { peer, detail }, notice: CloseNotice::None }
            }
            ReadError::Record(error) => {
                let notice = error.alert().map_or(CloseNotice::None, CloseNotice::Alert);
                End { error: LaneError::Protocol { peer, detail: error.to_string() }, notice }
            }
            ReadError::Segment(error) => self.shared.violation(CloseCode::Malformed, &error),
        }
    }

    async fn handle(&mut self, segment: Segment) -> Result<(), End> {
        self.shared.received_bytes.fetch_add(segment.wire_bytes(), Ordering::Relaxed);
        match (segment, self.role) {
            (Segment::Control { bytes, last }, _) => self.handle_control(&bytes, last).await,
            (Segment::Data { bytes, first, last }, Role::Client) => {
                self.handle_data(bytes, first, last).await
            }
            (Segment::Reset, Role::Client) => match self.current.take() {
                Some(_) => Ok(()),
                None => Err(self.protocol_violation(&"it reset a data stream where none was open")),
            },
            (Segment::Stop { stream }, Role::Server) => match self.shared.outbox.handle_stop(stream) {
                true => Ok(()),
                false => Err(self.protocol_violation(&"it stopped a data stream that has not begun")),
            },
            (Segment::Data { .. } | Segment::Reset, Role::Server) => {
                Err(self.protocol_violation(&"it sent data, which only a server does"))
            }
            (Segment::Stop { .. }, Role::Client) => {
                Err(self.protocol_violation(&"it stopped a data stream, which only a client does"))
            }
            (Segment::Close { code, text }, _) => {
                let error = LaneError::closed_by(self.shared.peer, code.into(), &text);
                Err(End { error, notice: CloseNotice::None })
            }
            (Segment::Ping { number }, _) => {
                self.shared.outbox.queue_pong(number);
                Ok(())
            }
            (Segment::Pong { number }, _) => {
                self.shared.handle_pong(number);
                Ok(())
            }
        }
    }

    /// Passes control bytes to the control stream's reader; waits while the reader's pipe is full, at most for the idle
    /// timeout.
    async fn handle_control(&mut self, bytes: &Bytes, last: bool) -> Result<(), End> {
        let Some(pipe) = &mut self.control else {
            return Err(self.protocol_violation(&"it continued its control stream, which it had ended"));
        };
        // A write error means that the reader was dropped.
        let Ok(_) = timeout(self.settings.idle_timeout, pipe.write_all(bytes)).await else {
            let peer = self.shared.peer;
            let detail = "the control stream was not read here for the idle timeout".to_owned();
            let notice =
                CloseNotice::Close(CloseCode::TimedOut, "the control stream was not read".to_owned());
            return Err(End { error: LaneError::Protocol { peer, detail }, notice });
        };
        if last {
            self.control = None;
        }
        Ok(())
    }

    async fn handle_data(&mut self, bytes: Bytes, first: bool, last: bool) -> Result<(), End> {
        if first == self.current.is_some() {
            return Err(self.protocol_violation(&match first {
                true => "it began a data stream in the middle of another",
                false => "it continued a data stream that had not begun",
            }));
        }
        if !self.current.as_ref().is_some_and(|stream| stream.0.put(&bytes)) {
            self.queue(&bytes).await?;
        }
        if last {
            self.finish();
        } else if first && self.inbox.next_segment_bytes().is_none_or(|bytes| bytes > COPIED_BYTES_MAX) {
            yield_now().await; // The stream's reader runs and lends a buffer for the next segments.
        }
        Ok(())
    }

    /// Queues a segment for the reader of the current stream, or of a new stream if there is none.
    async fn queue(&mut self, bytes: &Bytes) -> Result<(), End> {
        let unread = &self.shared.unread;
        let counted = unread.count(bytes, self.settings.idle_timeout).await;
        counted.map_err(|error| self.protocol_violation(&error))?;
        let (begun, next_stream) = (&self.begun, &mut self.next_stream);
        let stream = self.current.get_or_insert_with(|| Incoming::begin(begun, next_stream));
        if !stream.0.push(bytes) {
            unread.release(bytes);
        }
        Ok(())
    }

    /// Handles a segment that was decrypted into the reader's buffer.
    fn handle_filled(&mut self, wire_bytes: u64, last: bool) {
        self.shared.received_bytes.fetch_add(wire_bytes, Ordering::Relaxed);
        if last {
            self.finish();
        }
    }

    /// Finishes the current data stream.
    fn finish(&mut self) {
        if let Some(stream) = self.current.take() {
            stream.finish();
        }
    }
}

impl<S> Reader<S> {
    fn protocol_violation(&self, why: &dyn std::fmt::Display) -> End {
        self.shared.violation(CloseCode::ProtocolViolation, why)
    }

    /// Takes the stream's read half and drops the other state, which ends all incoming streams.
    fn into_read_half(self) -> ReadHalf<S> {
        self.inbox.into_read()
    }
}

impl Shared {
    /// The end for a protocol violation, with a notice to the peer.
    fn violation(&self, code: CloseCode, why: &dyn std::fmt::Display) -> End {
        let detail = why.to_string();
        let error = LaneError::Protocol { peer: self.peer, detail: detail.clone() };
        End { error, notice: CloseNotice::Close(code, detail) }
    }

    /// The end for an I/O error. The peer cannot be notified.
    fn io_failure(&self, error: io::Error) -> End {
        let peer = self.peer;
        let error = match error.kind() {
            io::ErrorKind::TimedOut => LaneError::TimedOut { peer },
            io::ErrorKind::UnexpectedEof => {
                LaneError::ConnectionLost { peer, detail: "it ended without a close".into() }
            }
            _ => LaneError::ConnectionLost { peer, detail: error.to_string() },
        };
        End { error, notice: CloseNotice::None }
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Updates the round trip time. The number of a ping is the time at which it was sent.
    fn handle_pong(&self, sent_us: u64) {
        if let Some(rtt_us) = self.now_us().checked_sub(sent_us) {
            self.rtt_us.store(rtt_us, Ordering::Relaxed);
        }
    }
}

/// The driver's sending half.
struct Writer<W> {
    batch: SegmentBatch<W>,
    shared: Arc<Shared>,
    queues: Queues,
    /// Whether the outgoing control stream is still open.
    is_control_open: bool,
}

impl<W: AsyncWrite + Unpin> Writer<W> {
    /// Writes until the connection ends, then the close notice, if any. A close waits until the current batch is
    /// written.
    async fn run(mut self, keep_alive: Duration) -> io::Result<()> {
        let mut end = self.shared.end.subscribe();
        let mut pings = interval(keep_alive);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let segment = tokio::select! {
                biased;
                () = async { drop(end.wait_for(Option::is_some).await) } => return self.write_close().await,
                segment = self.shared.outbox.next_answer() => segment,
                _ = pings.tick() => {
                    self.batch.trim();
                    Segment::Ping { number: self.shared.now_us() }
                }
                part = self.queues.control.recv(), if self.is_control_open => self.control_segment(part),
                Some(segment) = self.queues.data.recv() => segment,
            };
            self.add(segment)?;
            self.add_queued()?;
            if self.batch.is_short() {
                // Runnable tasks queue their segments first, so that one write contains them and wakes the peer once.
                yield_now().await;
                self.add_queued()?;
            }
            self.batch.write_paced().await?;
            if !self.is_control_open {
                self.shared.outbox.handle_control_written();
            }
        }
    }

    /// Adds queued segments to the batch.
    fn add_queued(&mut self) -> io::Result<()> {
        while self.batch.has_room()
            && let Some(segment) = self.next_queued()
        {
            self.add(segment)?;
        }
        Ok(())
    }

    /// Takes the next queued segment.
    fn next_queued(&mut self) -> Option<Segment> {
        let answer = self.shared.outbox.take_answer();
        answer
            .or_else(|| self.next_control())
            .or_else(|| self.queues.data.try_recv().ok())
    }

    fn next_control(&mut self) -> Option<Segment> {
        if !self.is_control_open {
            return None;
        }
        match self.queues.control.try_recv() {
            Ok(part) => Some(self.control_segment(Some(part))),
            Err(TryRecvError::Disconnected) => Some(self.control_segment(None)),
            Err(TryRecvError::Empty) => None,
        }
    }

    /// The segment for a `part` of the control stream, or for its end.
    fn control_segment(&mut self, part: Option<Bytes>) -> Segment {
        self.is_control_open = part.is_some();
        Segment::Control { bytes: part.unwrap_or_default(), last: !self.is_control_open }
    }

    fn add(&mut self, segment: Segment) -> io::Result<()> {
        self.shared.sent_bytes.fetch_add(segment.wire_bytes(), Ordering::Relaxed);
        self.batch.add(segment)
    }

    /// Writes the close notice, if any: a close after the queued control messages, an alert without them. Drops queued
    /// data.
    async fn write_close(mut self) -> io::Result<()> {
        match self.shared.wait_for_end().await.notice {
            CloseNotice::None => return Ok(()),
            CloseNotice::Close(code, text) => {
                while let Ok(part) = self.queues.control.try_recv() {
                    let segment = self.control_segment(Some(part));
                    self.add(segment)?;
                    self.batch.write().await?;
                }
                self.add(Segment::close(code.code(), &text))?;
                self.batch.add_alert(AlertDescription::CloseNotify)?;
            }
            CloseNotice::Alert(alert) => self.batch.add_alert(alert)?,
        }
        self.batch.write().await?;
        self.batch.shutdown().await
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Connection, records::tests::pair},
        *,
    };
    use std::{
        pin::Pin,
        sync::OnceLock,
        task::{Context, Poll},
    };
    use tokio::io::ReadBuf;

    /// A stream that closes its connection when it is first read, and whose peer ends it then.
    struct ClosedWhenRead {
        connection: Arc<OnceLock<Connection>>,
        is_read: bool,
    }

    impl AsyncRead for ClosedWhenRead {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if self.is_read {
                return Poll::Ready(Ok(()));
            }
            self.is_read = true;
            self.connection.wait().close(CloseCode::Done, "");
            Poll::Pending
        }
    }

    impl AsyncWrite for ClosedWhenRead {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// Goal: the driver ends when another thread closes the connection after the driver has checked for that, and before
    /// the driver's writer does.
    #[tokio::test(start_paused = true)]
    async fn a_connection_may_be_closed_between_two_checks_of_its_driver() {
        let connection = Arc::new(OnceLock::new());
        let stream = ClosedWhenRead { connection: Arc::clone(&connection), is_read: false };
        let [keys, _] = pair(1);
        let peer = crate::Peer::Network("127.0.0.1:1".parse().unwrap());
        let settings = Settings { idle_timeout: Duration::MAX, keep_alive: Duration::from_secs(1) };
        let secured = Secured::with_keys(stream, keys);
        let started = Connection::start(secured, Role::Client, peer, settings, None);
        connection.set(started.clone()).unwrap();
        timeout(2 * LINGER, started.close_answered()).await.expect("the driver ends");
    }
}
