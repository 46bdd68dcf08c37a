//! Lanes over QUIC, with QUIC's streams, priorities and flow control.

use bytes::Bytes;
use quinn::{ConnectionError, ReadError, VarInt, WriteError};
use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::CloseCode;

use super::{LaneError, LaneStats};
use crate::{network::moving::TaskMover, tuning::WINDOW_RESERVE_BYTES, window::SendWindow};

/// The maximum length of a write to QUIC: a quarter of the default send window. The bytes of a write count against the
/// send window until all are acknowledged, so longer writes would leave the lane idle after each of them.
const SLICE_MAX_BYTES: usize = 1 << 20;

/// The maximum number of pieces in one read. A piece is the payload of one packet, and a receive batch of the kernel
/// has at most 64 packets.
const PIECES_MAX: usize = 64;

/// The size of reads from the control stream; a frame is at most 64 KiB and usually below 100 bytes.
const CONTROL_READ_BYTES: usize = 4 << 10;

/// The priority of control messages, which are sent before all queued manifests and chunks.
const CONTROL_PRIORITY: i32 = 1_000;

/// The number of round trips to wait before a lane is closed, for data in flight and its retransmissions.
const FLUSH_ROUND_TRIPS: u32 = 6;

/// The minimum time to wait: another thread may send the packets, and scheduling may take longer than the round trips.
const FLUSH_MIN: Duration = Duration::from_millis(20);

/// The interval at which a closed lane polls for the peer's close, which quinn reports only as a counter.
const ANSWER_POLL: Duration = Duration::from_millis(1);

/// One QUIC connection. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Connection(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    connection: quinn::Connection,
    endpoint: quinn::Endpoint,
    window: SendWindow,
    /// Why this process closed the lane, if the peer does not read its control stream.
    control_unread: OnceLock<&'static str>,
    /// Moves quinn's task for this connection to another thread; taken at the first move.
    mover: Lock<Option<TaskMover>>,
}

impl Connection {
    pub(crate) fn new(
        connection: quinn::Connection,
        endpoint: quinn::Endpoint,
        window: SendWindow,
        mover: Option<TaskMover>,
    ) -> Self {
        let (control_unread, mover) = (OnceLock::new(), Lock::new(mover));
        Self(Arc::new(Shared { connection, endpoint, window, control_unread, mover }))
    }

    pub(super) fn take_mover(&self) -> Option<TaskMover> {
        self.0.mover.lock().take()
    }

    pub(super) fn peer(&self) -> SocketAddr {
        self.0.connection.remote_address()
    }

    pub(super) async fn open_control(&self) -> Result<(ControlOut, ControlIn), LaneError> {
        let opened = self.0.connection.open_bi().await;
        opened.map(|streams| self.control(streams)).map_err(|error| self.error(error))
    }

    pub(super) async fn accept_control(&self) -> Result<(ControlOut, ControlIn), LaneError> {
        let accepted = self.0.connection.accept_bi().await;
        accepted.map(|streams| self.control(streams)).map_err(|error| self.error(error))
    }

    fn control(&self, (out, incoming): (quinn::SendStream, quinn::RecvStream)) -> (ControlOut, ControlIn) {
        // Fails only for a stream that is closed already, which a new one is not.
        let _ = out.set_priority(CONTROL_PRIORITY);
        (ControlOut(out), ControlIn { stream: incoming, connection: self.clone() })
    }

    pub(super) async fn open_data(&self, priority: i32) -> Result<DataOut, LaneError> {
        let stream = self.0.connection.open_uni().await.map_err(|error| self.error(error))?;
        if let Some(bytes) = self.0.window.handle_round_trip(self.0.connection.stats().path.min_rtt) {
            self.0.connection.set_send_window(bytes);
        }
        // Fails only for a stream that is closed already, which a new one is not.
        let _ = stream.set_priority(priority);
        Ok(DataOut { stream, connection: self.clone(), finished: false })
    }

    pub(super) async fn accept_data(&self) -> Result<DataIn, LaneError> {
        let stream = self.0.connection.accept_uni().await.map_err(|error| self.error(error))?;
        Ok(DataIn { stream, connection: self.clone() })
    }

    pub(super) fn close(&self, code: CloseCode, text: &str) {
        self.0.connection.close(VarInt::from_u32(code.code()), text.as_bytes());
    }

    pub(super) fn close_unread_control(&self, code: CloseCode, detail: &'static str) {
        let _ = self.0.control_unread.set(detail);
        self.close(code, detail);
    }

    /// Waits for acknowledgements: quinn-proto 0.11 sends no close while the congestion window is full, and processes
    /// no acknowledgements once the connection is closed.
    pub(super) async fn flush(&self, max_wait: Duration) {
        let round_trips = self.0.connection.rtt() * FLUSH_ROUND_TRIPS;
        tokio::time::sleep(round_trips.clamp(FLUSH_MIN, max_wait)).await;
    }

    pub(super) async fn close_answered(&self) {
        let answered = async {
            while self.0.connection.stats().frame_rx.connection_close == 0 {
                tokio::time::sleep(ANSWER_POLL).await;
            }
        };
        tokio::select! {
            () = answered => {}
            () = self.0.endpoint.wait_idle() => {}
        }
    }

    pub(super) fn ended(&self) -> Option<LaneError> {
        self.0.connection.close_reason().map(|error| self.error(error))
    }

    pub(super) async fn closed(&self) -> LaneError {
        let error = self.0.connection.closed().await;
        self.error(error)
    }

    pub(super) fn allow_unread(&self, bytes: u64) {
        let window = receive_window(bytes.saturating_add(WINDOW_RESERVE_BYTES.into()));
        self.0.connection.set_receive_window(window);
    }

    pub(super) fn stats(&self) -> LaneStats {
        let stats = self.0.connection.stats();
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
        match (&error, self.0.control_unread.get()) {
            (ConnectionError::LocallyClosed, Some(detail)) => {
                LaneError::ControlUnread { peer: self.peer().into(), detail }
            }
            _ => lane_error(self.peer(), error),
        }
    }

    /// The error for a stream that ended: the lane's error if the lane has ended too.
    fn stream_error(&self) -> LaneError {
        self.ended().unwrap_or(LaneError::StreamAborted)
    }

    fn write_error(&self, error: WriteError) -> LaneError {
        match error {
            WriteError::ConnectionLost(error) => self.error(error),
            _ => self.stream_error(),
        }
    }

    fn read_error(&self, error: ReadError) -> LaneError {
        match error {
            ReadError::ConnectionLost(error) => self.error(error),
            _ => self.stream_error(),
        }
    }
}

/// The receive window that always allows the peer `bytes` of unread data.
///
/// quinn announces read bytes only once they are an eighth of the window, so the peer may know of only seven eighths.
fn receive_window(bytes: u64) -> VarInt {
    let window = bytes.saturating_add(bytes.div_ceil(7));
    VarInt::from_u64(window).unwrap_or(VarInt::MAX)
}

/// The lane error for quinn's `error`.
pub(crate) fn lane_error(peer: SocketAddr, error: ConnectionError) -> LaneError {
    let peer = peer.into();
    match error {
        ConnectionError::TimedOut => LaneError::TimedOut { peer },
        ConnectionError::Reset => LaneError::Reset { peer },
        ConnectionError::LocallyClosed => LaneError::ClosedLocally,
        ConnectionError::ApplicationClosed(close) => {
            LaneError::closed_by(peer, close.error_code.into_inner(), &close.reason)
        }
        other => LaneError::Protocol { peer, detail: other.to_string() },
    }
}

/// The sending half of the control stream. Dropping it ends the stream.
#[derive(Debug)]
pub(crate) struct ControlOut(quinn::SendStream);

impl ControlOut {
    pub(super) async fn write(&mut self, frame: &[u8]) -> bool {
        self.0.write_all(frame).await.is_ok()
    }

    pub(super) async fn finish(mut self) {
        if self.0.finish().is_ok() {
            let _ = self.0.stopped().await;
        }
    }
}

/// The receiving half of the control stream.
#[derive(Debug)]
pub(crate) struct ControlIn {
    stream: quinn::RecvStream,
    connection: Connection,
}

impl ControlIn {
    pub(super) async fn read(&mut self) -> Result<Option<Bytes>, LaneError> {
        match self.stream.read_chunk(CONTROL_READ_BYTES, true).await {
            Ok(chunk) => Ok(chunk.map(|chunk| chunk.bytes)),
            Err(ReadError::ConnectionLost(_)) => Err(self.connection.closed().await),
            Err(_) => Ok(None),
        }
    }
}

/// The sending half of a data stream.
#[derive(Debug)]
pub(crate) struct DataOut {
    stream: quinn::SendStream,
    connection: Connection,
    finished: bool,
}

impl DataOut {
    pub(super) async fn write(
        &mut self,
        mut bytes: Bytes,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), LaneError> {
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(SLICE_MAX_BYTES));
            let size = piece.len() as u64;
            let written = self.stream.write_chunk(piece).await;
            written.map_err(|error| self.connection.write_error(error))?;
            progress(size);
        }
        Ok(())
    }

    pub(super) fn finish(&mut self) -> Result<(), LaneError> {
        self.finished = self.stream.finish().is_ok();
        match self.finished {
            true => Ok(()),
            false => Err(self.connection.stream_error()),
        }
    }

    pub(super) fn reset(&mut self) {
        // Fails only for a stream that has ended already.
        let _ = self.stream.reset(VarInt::from_u32(CloseCode::Internal.code()));
    }
}

impl Drop for DataOut {
    fn drop(&mut self) {
        // quinn finishes dropped streams, which would make a partial stream look complete.
        if !self.finished {
            self.reset();
        }
    }
}

/// The receiving half of a data stream. If it is dropped early, quinn asks the sender to stop.
#[derive(Debug)]
pub(crate) struct DataIn {
    stream: quinn::RecvStream,
    connection: Connection,
}

impl DataIn {
    pub(super) async fn read_exact(&mut self, out: &mut [u8]) -> Result<(), LaneError> {
        self.stream.read_exact(out).await.map_err(|error| match error {
            quinn::ReadExactError::FinishedEarly(_) => LaneError::StreamAborted,
            quinn::ReadExactError::ReadError(error) => self.connection.read_error(error),
        })
    }

    pub(super) async fn read_pieces(&mut self, mut take: impl FnMut(&[u8])) -> Result<bool, LaneError> {
        let mut pieces: [Bytes; PIECES_MAX] = [const { Bytes::new() }; PIECES_MAX];
        let read = self.stream.read_chunks(&mut pieces).await;
        match read.map_err(|error| self.connection.read_error(error))? {
            Some(count) => {
                pieces[..count].iter().for_each(|piece| take(piece));
                Ok(true)
            }
            None => Ok(false),
        }
    }
}
