//! Lanes: one interface over connections of every kind.

pub(crate) mod byte_stream;
mod error;
mod quic;

use bytes::Bytes;
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tensor_relay_protocol::{CloseCode, HEADER_BYTES, StreamHeader};
use tokio::task::{AbortHandle, JoinHandle, JoinSet};

use crate::{
    ClientCertificate, KindReason, LaneKind, LaneThread, LaneThreads,
    network::lane_threads::{self, ThreadSlot},
    receive_buffer::ReceiveBuffer,
};

pub(crate) use byte_stream::{Connection as ByteStreamConnection, Role, Secured, Settings};
pub use error::{HeaderError, LaneError};
pub(crate) use quic::{Connection as QuicConnection, lane_error};

/// How long closing a lane waits at most for the peer to be notified.
const CLOSE_FLUSH: Duration = Duration::from_millis(500);

/// One connection of a session: a control stream and one-way data streams.
///
/// Cheap to clone; the connection lives until [`close`](Self::close) or the last clone is gone.
#[derive(Debug, Clone)]
pub struct Lane {
    connection: Connection,
    /// Its number in a client's session; 0 is the control connection.
    number: usize,
    reason: KindReason,
    /// The client's certificate, at a server.
    client: Option<ClientCertificate>,
    /// The thread that runs it, if lanes have threads of their own.
    thread: Option<Arc<ThreadSlot>>,
}

/// The connection under a lane. Each kind implements the same methods; its file documents the differences.
#[derive(Debug, Clone)]
enum Connection {
    Quic(QuicConnection),
    Tcp(ByteStreamConnection),
}

/// The counters of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneStats {
    /// The UDP payload in use: the result of MTU discovery. 0 over TCP.
    pub udp_payload_bytes: u16,
    /// The round trip time. Over TCP that of the last heartbeat, which queues behind earlier data; 0 before the first
    /// one.
    pub rtt: Duration,
    /// Bytes of UDP payload sent, retransmissions and control included. Over TCP the bytes given to TLS.
    pub sent_bytes: u64,
    /// Bytes of UDP payload received. Over TCP the bytes that came out of TLS.
    pub received_bytes: u64,
    /// Packets sent. 0 over TCP, where the system makes them.
    pub sent_packets: u64,
    /// Packets sent and lost; each was sent again as another packet. 0 over TCP.
    pub lost_packets: u64,
    /// Frames of data and pings sent, repetitions included: what the other end has to acknowledge. 0 over TCP, where
    /// the kernel handles acknowledgements.
    pub eliciting_frames: u64,
}

impl Lane {
    pub(crate) fn quic(connection: QuicConnection) -> Self {
        Self::over(Connection::Quic(connection))
    }

    pub(crate) fn tcp(connection: ByteStreamConnection) -> Self {
        Self::over(Connection::Tcp(connection))
    }

    fn over(connection: Connection) -> Self {
        Self { connection, number: 0, reason: KindReason::Forced, client: None, thread: None }
    }

    /// Adds the client's certificate.
    pub(crate) fn with_client(self, client: Option<ClientCertificate>) -> Self {
        Self { client, ..self }
    }

    /// The client's certificate, whose key it proved to hold; `None` at a client.
    pub fn client_certificate(&self) -> Option<&ClientCertificate> {
        self.client.as_ref()
    }

    /// Makes it a further lane, which runs on `thread`.
    pub(crate) fn further(self, number: usize, thread: Option<Arc<LaneThread>>) -> Self {
        Self { number, thread: thread.map(ThreadSlot::new).map(Arc::new), ..self }
    }

    /// Adds the reason of its kind.
    pub(crate) fn because(self, reason: KindReason) -> Self {
        Self { reason, ..self }
    }

    /// The kind of its connection.
    pub fn kind(&self) -> LaneKind {
        match &self.connection {
            Connection::Quic(_) => LaneKind::Quic,
            Connection::Tcp(_) => LaneKind::Tcp,
        }
    }

    /// The reason of its kind, at the end that chose. At the other end it is `Forced`.
    pub fn reason(&self) -> KindReason {
        self.reason
    }

    /// Its number in a client's session. 0 is the first, which carries control messages.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Moves the lane to the least used of `threads`, if there are any and its network has threads. Nothing on it is
    /// interrupted; earlier clones keep running where they were. The readiness of a TCP socket is still reported by the
    /// runtime that accepted it.
    pub fn spread(mut self, threads: &LaneThreads) -> Self {
        let moving = match &self.connection {
            Connection::Quic(connection) => connection.take_moving(),
            Connection::Tcp(connection) => connection.take_moving(),
        };
        if let Some(moving) = moving {
            self.thread = lane_threads::settle(&moving, threads).map(Arc::new);
        }
        self
    }

    /// Runs `work` on the lane's thread, if it has one, otherwise in place. Dropping the future aborts the work.
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

    /// Spawns `work` in `tasks` on the lane's thread, if it has one.
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

    /// The address of the other end.
    pub fn peer(&self) -> SocketAddr {
        match &self.connection {
            Connection::Quic(connection) => connection.peer(),
            Connection::Tcp(connection) => connection.peer(),
        }
    }

    /// Opens the control stream. The client does this once per session.
    pub(crate) async fn open_control(&self) -> Result<(ControlOut, ControlIn), LaneError> {
        match &self.connection {
            Connection::Quic(connection) => connection.open_control().await.map(ControlOut::of_quic),
            Connection::Tcp(connection) => connection.control().map(ControlOut::of_tcp),
        }
    }

    /// Waits for the client to open the control stream.
    pub(crate) async fn accept_control(&self) -> Result<(ControlOut, ControlIn), LaneError> {
        match &self.connection {
            Connection::Quic(connection) => connection.accept_control().await.map(ControlOut::of_quic),
            Connection::Tcp(connection) => connection.control().map(ControlOut::of_tcp),
        }
    }

    /// Opens a data stream. Streams of higher `priority` are sent first; of equal ones the one opened first. Over TCP they
    /// go one after another in the order in which they were opened, whatever their priority.
    ///
    /// # Errors
    /// [`LaneError`] when the lane ended. Waits while the peer has as many streams open as it allows, over TCP while another
    /// one is not finished or given up.
    pub async fn open_data(&self, priority: i32) -> Result<DataOut, LaneError> {
        Ok(DataOut(match &self.connection {
            Connection::Quic(connection) => Out::Quic(connection.open_data(priority).await?),
            Connection::Tcp(connection) => Out::Tcp(connection.open_data().await?),
        }))
    }

    /// Waits for the next data stream of the other end. Cancel safe.
    ///
    /// # Errors
    /// [`LaneError`] when the lane ended.
    pub async fn accept_data(&self) -> Result<DataIn, LaneError> {
        let stream = match &self.connection {
            Connection::Quic(connection) => In::Quic(connection.accept_data().await?),
            Connection::Tcp(connection) => In::Tcp(connection.accept_data().await?),
        };
        Ok(DataIn { stream, lane: self.clone() })
    }

    /// Closes the lane and everything on it, with a reason for the other end.
    pub fn close(&self, code: CloseCode, text: &str) {
        match &self.connection {
            Connection::Quic(connection) => connection.close(code, text),
            Connection::Tcp(connection) => connection.close(code, text),
        }
    }

    /// Closes the lane because the other end stopped reading its control stream, as `detail` says: everything on it
    /// then ends with [`LaneError::Unheard`].
    pub(crate) fn close_unheard(&self, code: CloseCode, detail: &'static str) {
        match &self.connection {
            Connection::Quic(connection) => connection.close_unheard(code, detail),
            Connection::Tcp(connection) => connection.close_unheard(code, detail),
        }
    }

    /// Waits for the acknowledgements of what is in flight, at most half a second. Closing while QUIC's congestion
    /// window is full would not reach the other end. Streams must be ended or dropped before. Over TCP there is nothing
    /// to wait for: a close is sent after everything else.
    pub async fn settle(&self) {
        match &self.connection {
            Connection::Quic(connection) => connection.settle(CLOSE_FLUSH).await,
            Connection::Tcp(_) => {}
        }
    }

    /// Waits until the other end has answered a [`close`](Self::close), for half a second at most. QUIC answers after
    /// one round trip with a close of its own; if that is lost, this waits for three probe timeouts (RFC 9000 §10.2),
    /// during which further packets are answered by the close again. Over TCP the other end ends the connection. A
    /// process that exits without this leaves its peers to their idle timeout.
    pub async fn flush_close(&self) {
        let told = async {
            match &self.connection {
                Connection::Quic(connection) => connection.close_answered().await,
                Connection::Tcp(connection) => connection.close_answered().await,
            }
        };
        let _ = tokio::time::timeout(CLOSE_FLUSH, told).await;
    }

    /// Why the lane ended, if it has.
    pub fn ended(&self) -> Option<LaneError> {
        match &self.connection {
            Connection::Quic(connection) => connection.ended(),
            Connection::Tcp(connection) => connection.ended(),
        }
    }

    /// Waits until the lane ended, and says why.
    pub async fn closed(&self) -> LaneError {
        match &self.connection {
            Connection::Quic(connection) => connection.closed().await,
            Connection::Tcp(connection) => connection.closed().await,
        }
    }

    /// Allows the other end to send `bytes` of payload that this end has not read: the bytes for which credit was
    /// granted. A reserve for control messages and manifests is added. Over TCP the limit never falls: what is in
    /// flight cannot be called back.
    pub fn allow_unread(&self, bytes: u64) {
        match &self.connection {
            Connection::Quic(connection) => connection.allow_unread(bytes),
            Connection::Tcp(connection) => connection.allow_unread(bytes),
        }
    }

    /// The counters of the lane.
    pub fn stats(&self) -> LaneStats {
        match &self.connection {
            Connection::Quic(connection) => connection.stats(),
            Connection::Tcp(connection) => connection.stats(),
        }
    }
}

/// Aborts a task on another thread when its waiter is dropped.
struct CutOff<T>(JoinHandle<T>);

impl<T> Drop for CutOff<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The sending half of a control stream, as raw bytes. Dropping it ends the stream.
#[derive(Debug)]
pub(crate) enum ControlOut {
    Quic(quic::ControlOut),
    Tcp(byte_stream::ControlOut),
}

/// The receiving half of a control stream, as raw bytes.
#[derive(Debug)]
pub(crate) enum ControlIn {
    Quic(quic::ControlIn),
    Tcp(byte_stream::ControlIn),
}

impl ControlOut {
    fn of_quic((out, incoming): (quic::ControlOut, quic::ControlIn)) -> (Self, ControlIn) {
        (Self::Quic(out), ControlIn::Quic(incoming))
    }

    fn of_tcp((out, incoming): (byte_stream::ControlOut, byte_stream::ControlIn)) -> (Self, ControlIn) {
        (Self::Tcp(out), ControlIn::Tcp(incoming))
    }

    /// Writes all of `frame`; waits while the connection takes none of it. False when nothing can be written any more.
    pub(crate) async fn write(&mut self, frame: Vec<u8>) -> bool {
        match self {
            Self::Quic(out) => out.write(&frame).await,
            Self::Tcp(out) => out.write(frame.into()).await,
        }
    }

    /// Ends the stream, and waits until the other end has all of it; over TCP until the connection has taken all of it.
    pub(crate) async fn finish(self) {
        match self {
            Self::Quic(out) => out.finish().await,
            Self::Tcp(out) => out.finish().await,
        }
    }
}

impl ControlIn {
    /// Waits for bytes; `None` when the stream ended and the lane has not. Cancel safe.
    pub(crate) async fn read(&mut self) -> Result<Option<Bytes>, LaneError> {
        match self {
            Self::Quic(incoming) => incoming.read().await,
            Self::Tcp(incoming) => incoming.read().await,
        }
    }
}

/// The sending end of a data stream. Dropped before it is finished, it resets the stream.
#[derive(Debug)]
pub struct DataOut(Out);

#[derive(Debug)]
enum Out {
    Quic(quic::DataOut),
    Tcp(byte_stream::DataOut),
}

impl DataOut {
    /// Sends the header. Waits while windows are full.
    pub(crate) async fn write_header(&mut self, header: &StreamHeader) -> Result<(), LaneError> {
        self.write(Bytes::copy_from_slice(&header.encode()), &|_| ()).await
    }

    /// Sends `bytes` without copying them: over QUIC they are held until the receiver acknowledged them, over TCP until
    /// they are encrypted. Waits while windows are full, because the receiver is slow. `progress` is called with the
    /// size of each piece that was taken.
    pub(crate) async fn write(
        &mut self,
        bytes: Bytes,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), LaneError> {
        match &mut self.0 {
            Out::Quic(out) => out.write(bytes, progress).await,
            Out::Tcp(out) => out.write(bytes, progress).await,
        }
    }

    /// Ends the stream: what was written arrives whole, if the lane lives that long.
    pub(crate) fn finish(self) -> Result<(), LaneError> {
        match self.0 {
            Out::Quic(mut out) => out.finish(),
            Out::Tcp(out) => out.finish(),
        }
    }
}

/// The receiving end of a data stream. Dropped early, it tells the sender to stop.
#[derive(Debug)]
pub struct DataIn {
    stream: In,
    lane: Lane,
}

#[derive(Debug)]
enum In {
    Quic(quic::DataIn),
    Tcp(byte_stream::DataIn),
}

impl DataIn {
    /// The lane that it came on.
    pub fn lane(&self) -> &Lane {
        &self.lane
    }

    /// Reads the header, which is the first thing on every stream.
    ///
    /// # Errors
    /// [`HeaderError`] when the stream ends before it or it is invalid.
    pub async fn read_header(&mut self) -> Result<StreamHeader, HeaderError> {
        let mut header = [0; HEADER_BYTES];
        match &mut self.stream {
            In::Quic(stream) => stream.read_exact(&mut header).await?,
            In::Tcp(stream) => stream.read_exact(&mut header).await?,
        }
        Ok(StreamHeader::decode(&header)?)
    }

    /// Fills `buffer` with the rest of the stream, until it ends or exceeds the buffer. Over TCP the lane decrypts into
    /// the buffer; dropping the future takes it back at once.
    pub(crate) async fn fill(self, mut buffer: ReceiveBuffer) -> Result<ReceiveBuffer, LaneError> {
        match self.stream {
            In::Quic(mut stream) => {
                while stream.read_pieces(|piece| buffer.put(piece)).await? && !buffer.is_overfull() {}
                Ok(buffer)
            }
            In::Tcp(stream) => stream.fill(buffer).await,
        }
    }

    /// Waits for bytes and passes all that arrived, in order, to `take`; returns false at the end of the stream.
    pub(crate) async fn read_pieces(&mut self, take: impl FnMut(&[u8])) -> Result<bool, LaneError> {
        match &mut self.stream {
            In::Quic(stream) => stream.read_pieces(take).await,
            In::Tcp(stream) => stream.read_pieces(take).await,
        }
    }
}
