//! Lanes: the small interface over one QUIC connection that the rest of the code sees.

use bytes::Bytes;
use quinn::{ConnectionError, ReadError, VarInt, WriteError};
use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};
use tensor_relay_protocol::{CloseCode, HEADER_BYTES, MessageError, StreamHeader};
use tokio::task::{AbortHandle, JoinHandle, JoinSet};

use crate::{
    LaneThread, LaneThreads,
    control::Streams,
    network::{
        lane_threads::{self, Seated},
        moving::Moving,
    },
    tuning::WINDOW_RESERVE_BYTES,
    window::SendWindow,
};

/// How much of a `Bytes` is handed to QUIC at once. Whatever is written counts against the send window until all of it
/// is acknowledged, so pieces beyond a quarter of the window (4 MiB by default) would leave the lane idle at every end.
const SLICE_MAX_BYTES: usize = 1 << 20;

/// How many received pieces are taken out of QUIC at once. A piece is what one packet carried, so 64 of them are one
/// batch of the kernel's.
const PIECES_MAX: usize = 64;

/// How many round trips what is in flight gets before a lane is closed: one for it, the others for
/// what is lost on the way.
const SETTLE_ROUND_TRIPS: u32 = 6;

/// What it gets at least: packets leave on another thread, and where processors are short that waits for one much longer than
/// for the path.
const SETTLE_MIN: Duration = Duration::from_millis(20);

/// How long a closed lane waits at most until the peer knows.
const CLOSE_FLUSH: Duration = Duration::from_millis(500);

/// How often a closed lane looks for the peer's answer, which quinn tells of by a counter alone.
const ANSWER_POLL: Duration = Duration::from_millis(1);

/// One QUIC connection of a session: a control stream and one-way data streams.
///
/// Cheap to clone; the connection lives until [`close`](Self::close) or the last clone is gone.
#[derive(Debug, Clone)]
pub struct Lane {
    connection: quinn::Connection,
    endpoint: quinn::Endpoint,
    window: Arc<SendWindow>,
    /// How it is known that the other end does not hear its control stream, once this end closed the lane for it.
    unheard: Arc<OnceLock<&'static str>>,
    /// Its place among the lanes of a client's session; 0 is the first.
    number: usize,
    /// How its connection can be moved to another thread.
    moving: Option<Moving>,
    /// The thread that makes its packets, if that is one for lanes alone.
    thread: Option<Arc<Seated>>,
}

/// Why a lane ended. Everything on it ended with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaneError {
    /// No packet came within the idle timeout.
    #[error(
        "the other end ({peer}) has not answered for the idle timeout: it died, or the network between is down"
    )]
    TimedOut {
        /// Where the other end is, or was.
        peer: SocketAddr,
    },
    /// The other end closed the lane and said why.
    #[error("the other end ({peer}) closed the connection: {}", reason_text(*code, text))]
    ClosedByPeer {
        /// Where the other end is.
        peer: SocketAddr,
        /// Its reason, if this build knows it.
        code: Option<CloseCode>,
        /// Its reason in words.
        text: String,
    },
    /// The other end no longer knows the connection: it was restarted.
    #[error("the other end ({peer}) was restarted and does not know this connection any more")]
    Reset {
        /// Where the other end is.
        peer: SocketAddr,
    },
    /// This end closed the lane.
    #[error("this end closed the connection")]
    ClosedHere,
    /// This end closed the lane because the other one did not hear its control stream: it hangs, breaks the rules, or was
    /// ended with its good-bye lost on the way.
    #[error("the other end ({peer}) does not hear what it is told: {detail}")]
    Unheard {
        /// Where the other end is, or was.
        peer: SocketAddr,
        /// What became of the control stream.
        detail: &'static str,
    },
    /// QUIC itself failed.
    #[error("the connection to {peer} failed: {detail}")]
    Protocol {
        /// Where the other end is.
        peer: SocketAddr,
        /// What QUIC or TLS said.
        detail: String,
    },
    /// The other end gave up one data stream. The lane lives.
    #[error("the other end gave up a data stream")]
    StreamGivenUp,
}

fn reason_text(code: Option<CloseCode>, text: &str) -> String {
    match (code, text) {
        (Some(code), "") => code.to_string(),
        (Some(code), text) => format!("{code} ({text})"),
        (None, "") => "it gave a reason that this build does not know".into(),
        (None, text) => text.into(),
    }
}

/// What a lane has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneStats {
    /// The UDP payload in use: the result of MTU discovery.
    pub udp_payload_bytes: u16,
    /// The round trip time.
    pub rtt: Duration,
    /// Bytes of UDP payload sent, retransmissions and control included.
    pub sent_bytes: u64,
    /// Bytes of UDP payload received.
    pub received_bytes: u64,
    /// Packets sent.
    pub sent_packets: u64,
    /// Packets sent and lost; each was sent again as another packet.
    pub lost_packets: u64,
    /// Frames of data and pings sent, repetitions included: what the other end has to acknowledge.
    pub eliciting_frames: u64,
}

impl Lane {
    pub(crate) fn new(connection: quinn::Connection, endpoint: quinn::Endpoint, window: SendWindow) -> Self {
        let (window, unheard) = (Arc::new(window), Arc::default());
        Self { connection, endpoint, window, unheard, number: 0, moving: None, thread: None }
    }

    /// The same lane, whose connection `moving` moves.
    pub(crate) fn movable(self, moving: Option<Moving>) -> Self {
        Self { moving, ..self }
    }

    /// The same lane as a further one, which runs on `thread`.
    pub(crate) fn further(self, number: usize, thread: Option<Arc<LaneThread>>) -> Self {
        Self { number, thread: thread.map(Seated::new).map(Arc::new), ..self }
    }

    /// Its place among the lanes of a client's session. 0 is the first, which control messages travel on.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The same lane on the least used of `threads`, if there are any and its network has threads. Nothing on it is
    /// interrupted; clones that were made before run what they run where they were.
    pub fn spread(mut self, threads: &LaneThreads) -> Self {
        if let Some(moving) = self.moving.take() {
            self.thread = lane_threads::settle(&moving, threads).map(Arc::new);
        }
        self
    }

    /// Runs `work` to its end where the lane's packets are made: on its thread, if it has one, and else right here. Dropped
    /// early, it cuts the work off.
    ///
    /// # Errors
    /// [`LaneError::ClosedHere`] when the thread ended first.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, LaneError> {
        let Some(thread) = &self.thread else {
            return Ok(work.await);
        };
        let mut running = CutOff(thread.handle().spawn(work));
        (&mut running.0).await.map_err(|ended| match ended.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => LaneError::ClosedHere,
        })
    }

    /// Spawns `work` in `tasks` where the lane's packets are made: on its thread, if it has one.
    pub fn spawn_in<T: Send + 'static>(
        &self,
        tasks: &mut JoinSet<T>,
        work: impl Future<Output = T> + Send + 'static,
    ) -> AbortHandle {
        match &self.thread {
            Some(thread) => tasks.spawn_on(work, thread.handle()),
            None => tasks.spawn(work),
        }
    }

    /// Where the other end is.
    pub fn peer(&self) -> SocketAddr {
        self.connection.remote_address()
    }

    /// Opens the control stream. The client does this once per session.
    pub(crate) async fn open_control(&self) -> Result<Streams, LaneError> {
        let opened = self.connection.open_bi().await;
        opened.map_err(|error| self.error(error))
    }

    /// Waits for the client to open the control stream.
    pub(crate) async fn accept_control(&self) -> Result<Streams, LaneError> {
        let accepted = self.connection.accept_bi().await;
        accepted.map_err(|error| self.error(error))
    }

    /// Opens a data stream. Streams of higher `priority` are sent first; of equal ones the one opened first.
    ///
    /// # Errors
    /// [`LaneError`] when the lane ended. Waits while the peer has as many streams open as it allows.
    pub async fn open_data(&self, priority: i32) -> Result<DataOut, LaneError> {
        let stream = self.connection.open_uni().await.map_err(|error| self.error(error))?;
        if let Some(bytes) = self.window.handle_round_trip(self.connection.stats().path.min_rtt) {
            self.connection.set_send_window(bytes);
        }
        // Fails only for a stream that is closed already, which a new one is not.
        let _ = stream.set_priority(priority);
        Ok(DataOut { stream, lane: self.clone(), finished: false })
    }

    /// Waits for the next data stream of the other end. Cancel safe.
    ///
    /// # Errors
    /// [`LaneError`] when the lane ended.
    pub async fn accept_data(&self) -> Result<DataIn, LaneError> {
        let stream = self.connection.accept_uni().await.map_err(|error| self.error(error))?;
        Ok(DataIn { stream, lane: self.clone() })
    }

    /// Ends the lane and everything on it, and tells the other end why.
    pub fn close(&self, code: CloseCode, text: &str) {
        self.connection.close(VarInt::from_u32(code.code()), text.as_bytes());
    }

    /// Ends the lane because the other end does not hear its control stream, as `detail` says: everything on it then ends
    /// with [`LaneError::Unheard`].
    pub(crate) fn close_unheard(&self, code: CloseCode, detail: &'static str) {
        let _ = self.unheard.set(detail);
        self.close(code, detail);
    }

    /// Waits about as long as the acknowledgements of what is in flight need, and no longer than half a second. Closing
    /// while the congestion window is full would tell the other end nothing: quinn-proto 0.11 holds the close back until
    /// acknowledgements come, and takes none once it is closed. Streams must be ended or dropped before.
    pub async fn settle(&self) {
        let round_trips = self.connection.rtt() * SETTLE_ROUND_TRIPS;
        tokio::time::sleep(round_trips.clamp(SETTLE_MIN, CLOSE_FLUSH)).await;
    }

    /// Waits until the other end knows of a [`close`](Self::close), for half a second at most: it answers with a close of
    /// its own after one round trip. Where that is lost, waits for three probe timeouts (RFC 9000 §10.2), in which whatever
    /// the other end still sends is answered by the close again. A process that ends without it leaves its peers to their
    /// idle timeout.
    pub async fn flush_close(&self) {
        let answered = async {
            while self.connection.stats().frame_rx.connection_close == 0 {
                tokio::time::sleep(ANSWER_POLL).await;
            }
        };
        let told = async {
            tokio::select! {
                () = answered => {}
                () = self.endpoint.wait_idle() => {}
            }
        };
        let _ = tokio::time::timeout(CLOSE_FLUSH, told).await;
    }

    /// Why the lane ended, if it has.
    pub fn ended(&self) -> Option<LaneError> {
        self.connection.close_reason().map(|error| self.error(error))
    }

    /// Waits until the lane ended, and says why.
    pub async fn closed(&self) -> LaneError {
        let error = self.connection.closed().await;
        self.error(error)
    }

    /// Lets the other end have `bytes` of payload on their way that this end has not read: what credit was given for. A
    /// reserve for control messages and manifests is added.
    pub fn allow_unread(&self, bytes: u64) {
        let window = bytes.saturating_add(WINDOW_RESERVE_BYTES.into());
        self.connection
            .set_receive_window(VarInt::from_u64(window).unwrap_or(VarInt::MAX));
    }

    /// What the lane has done so far.
    pub fn stats(&self) -> LaneStats {
        let stats = self.connection.stats();
        LaneStats {
            udp_payload_bytes: stats.path.current_mtu,
            rtt: stats.path.rtt,
            sent_bytes: stats.udp_tx.bytes,
            received_bytes: stats.udp_rx.bytes,
            sent_packets: stats.path.sent_packets,
            lost_packets: stats.path.lost_packets,
            eliciting_frames: stats.frame_tx.stream + stats.frame_tx.ping + stats.frame_tx.immediate_ack,
        }
    }

    fn error(&self, error: ConnectionError) -> LaneError {
        match (&error, self.unheard.get()) {
            (ConnectionError::LocallyClosed, Some(detail)) => {
                LaneError::Unheard { peer: self.peer(), detail }
            }
            _ => lane_error(self.peer(), error),
        }
    }

    /// What a stream that ended without the lane means.
    fn stream_error(&self, error: Option<ConnectionError>) -> LaneError {
        error.map_or(LaneError::StreamGivenUp, |error| self.error(error))
    }
}

/// quinn's reasons in this project's words.
pub(crate) fn lane_error(peer: SocketAddr, error: ConnectionError) -> LaneError {
    match error {
        ConnectionError::TimedOut => LaneError::TimedOut { peer },
        ConnectionError::Reset => LaneError::Reset { peer },
        ConnectionError::LocallyClosed => LaneError::ClosedHere,
        ConnectionError::ApplicationClosed(close) => LaneError::ClosedByPeer {
            peer,
            code: CloseCode::from_code(close.error_code.into_inner()),
            text: String::from_utf8_lossy(&close.reason).escape_debug().to_string(),
        },
        other => LaneError::Protocol { peer, detail: other.to_string() },
    }
}

/// A task on another thread that ends with who waits for it.
struct CutOff<T>(JoinHandle<T>);

impl<T> Drop for CutOff<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The sending end of a data stream. Dropped before it was finished, it tells the receiver that the stream was given up.
#[derive(Debug)]
pub struct DataOut {
    stream: quinn::SendStream,
    lane: Lane,
    finished: bool,
}

impl DataOut {
    /// Sends the header. Waits while windows are full.
    pub(crate) async fn write_header(&mut self, header: &StreamHeader) -> Result<(), LaneError> {
        let written = self.stream.write_all(&header.encode()).await;
        written.map_err(|error| write_error(&self.lane, error))
    }

    /// Sends `bytes` without copying them: they are held until the receiver acknowledged them. Waits while windows are
    /// full, which is where a slow receiver is felt. `progress` is called with the size of each piece that was taken.
    pub(crate) async fn write(
        &mut self,
        mut bytes: Bytes,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), LaneError> {
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(SLICE_MAX_BYTES));
            let size = piece.len() as u64;
            self.stream
                .write_chunk(piece)
                .await
                .map_err(|error| write_error(&self.lane, error))?;
            progress(size);
        }
        Ok(())
    }

    /// Ends the stream: what was written will arrive whole, if the lane lives that long.
    pub(crate) fn finish(mut self) -> Result<Finished, LaneError> {
        self.finished = self.stream.finish().is_ok();
        match self.finished {
            true => Ok(Finished(self)),
            false => Err(self.lane.stream_error(self.lane.connection.close_reason())),
        }
    }
}

impl Drop for DataOut {
    fn drop(&mut self) {
        // quinn finishes dropped streams, which would make half a chunk look like a whole one.
        if !self.finished {
            let _ = self.stream.reset(VarInt::from_u32(CloseCode::Internal.code()));
        }
    }
}

/// A data stream that was written to its end and may still be on its way. Dropping it changes nothing.
#[derive(Debug)]
#[must_use = "what is on its way is lost with its lane"]
pub struct Finished(DataOut);

impl Finished {
    /// Waits until the other end has all of it, or does not want it.
    ///
    /// # Errors
    /// [`LaneError`] when the lane ended first.
    pub async fn arrived(&self) -> Result<(), LaneError> {
        match self.0.stream.stopped().await {
            Ok(_) => Ok(()),
            Err(_) => Err(self.0.lane.stream_error(self.0.lane.connection.close_reason())),
        }
    }

    /// Sends nothing more of it, and tells the other end so. Changes nothing once all of it has arrived.
    pub fn give_up(mut self) {
        // Fails only for a stream that is over: everything was acknowledged, or the other end stopped it.
        let _ = self.0.stream.reset(VarInt::from_u32(CloseCode::Internal.code()));
    }
}

/// The receiving end of a data stream. Dropped early, it tells the sender to stop.
#[derive(Debug)]
pub struct DataIn {
    stream: quinn::RecvStream,
    lane: Lane,
}

/// Why a stream's header could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The lane or the stream ended.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// The bytes are no header.
    #[error(transparent)]
    Message(#[from] MessageError),
}

impl DataIn {
    /// The lane that it came on.
    pub fn lane(&self) -> &Lane {
        &self.lane
    }

    /// Reads the header, which is the first thing on every stream.
    ///
    /// # Errors
    /// [`HeaderError`] when the stream ends before it or it is none.
    pub async fn read_header(&mut self) -> Result<StreamHeader, HeaderError> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header).await.map_err(|error| match error {
            quinn::ReadExactError::FinishedEarly(_) => LaneError::StreamGivenUp,
            quinn::ReadExactError::ReadError(error) => read_error(&self.lane, error),
        })?;
        Ok(StreamHeader::decode(&header)?)
    }

    /// Waits for bytes and gives all that came, in order, to `take`; returns false at the end of the stream.
    pub(crate) async fn read_pieces(&mut self, mut take: impl FnMut(&[u8])) -> Result<bool, LaneError> {
        let mut pieces: [Bytes; PIECES_MAX] = [const { Bytes::new() }; PIECES_MAX];
        let read = self.stream.read_chunks(&mut pieces).await;
        match read.map_err(|error| read_error(&self.lane, error))? {
            Some(count) => {
                pieces[..count].iter().for_each(|piece| take(piece));
                Ok(true)
            }
            None => Ok(false),
        }
    }
}

fn write_error(lane: &Lane, error: WriteError) -> LaneError {
    match error {
        WriteError::ConnectionLost(error) => lane.error(error),
        _ => lane.stream_error(lane.connection.close_reason()),
    }
}

fn read_error(lane: &Lane, error: ReadError) -> LaneError {
    match error {
        ReadError::ConnectionLost(error) => lane.error(error),
        _ => lane.stream_error(lane.connection.close_reason()),
    }
}
