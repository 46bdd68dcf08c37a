//! [`Lane`]: a common interface to QUIC connections, TCP connections and Unix sockets.

pub(crate) mod byte_stream;
mod error;
mod quic;

use bytes::Bytes;
use futures_util::{FutureExt, future::Either};
use std::{sync::Arc, time::Duration};
use tensor_relay_protocol::{CloseCode, HEADER_BYTES, StreamHeader};
use tokio::task::{AbortHandle, JoinSet};

use crate::{
    AbortOnDrop, ClientCertificate, LaneKind, LaneKindReason, LaneThread, LaneThreads, Peer,
    listener::canonical,
    network::lane_threads::{self, ThreadSlot},
    receive_buffer::ReceiveBuffer,
    unix::Descriptors,
};

pub(crate) use byte_stream::{Connection as ByteStreamConnection, Role, Secured, Settings};
pub use error::{HeaderError, LaneError};
pub(crate) use quic::{Connection as QuicConnection, lane_error};

/// The maximum time to flush data before a close, and to wait for the peer's answer to a close.
const CLOSE_FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// One connection of a session: a control stream and one-way data streams.
///
/// Cheap to clone. The connection is closed by [`close`](Self::close), or when the last clone and the last stream are
/// dropped.
#[derive(Debug, Clone)]
pub struct Lane {
    connection: Connection,
    /// The lane's number in a client's session; 0 is the control connection. Always 0 on the server's side.
    number: usize,
    reason: LaneKindReason,
    /// The client's certificate, on the server's side.
    client: Option<ClientCertificate>,
    /// The lane's thread; `None` if its tasks run on the caller's runtime.
    thread: Option<Arc<ThreadSlot>>,
}

/// A lane's connection; a Unix socket is a byte stream like TCP. The methods of [`Lane`] document the differences between the kinds.
#[derive(Debug, Clone)]
enum Connection {
    Quic(QuicConnection),
    Tcp(ByteStreamConnection),
}

/// The counters of a lane. Those of a Unix socket are as over TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneStats {
    /// The current UDP payload size, found by MTU discovery. 0 over TCP.
    pub udp_payload_bytes: u16,
    /// The round trip time. Over TCP that of the last ping, which queues behind earlier data; 0 before the first pong.
    pub rtt: Duration,
    /// Bytes of UDP payload sent, including retransmissions and control. Over TCP the bytes before encryption.
    pub sent_bytes: u64,
    /// Bytes of UDP payload received. Over TCP the bytes after decryption.
    pub received_bytes: u64,
    /// Packets sent. 0 over TCP, where the kernel sends them.
    pub sent_packets: u64,
    /// Packets that QUIC counted as lost. 0 over TCP.
    pub lost_packets: u64,
    /// Frames sent that the peer has to acknowledge: data, including retransmissions, pings, and requests for immediate
    /// acknowledgement, but not flow control. 0 over TCP, where the kernel handles acknowledgements.
    pub eliciting_frames: u64,
}

impl Lane {
    pub(crate) fn quic(connection: QuicConnection) -> Self {
        Self::over(Connection::Quic(connection))
    }

    pub(crate) fn byte_stream(connection: ByteStreamConnection) -> Self {
        Self::over(Connection::Tcp(connection))
    }

    fn over(connection: Connection) -> Self {
        Self { connection, number: 0, reason: LaneKindReason::Forced, client: None, thread: None }
    }

    /// Sets the client's certificate.
    pub(crate) fn with_client(self, client: Option<ClientCertificate>) -> Self {
        Self { client, ..self }
    }

    /// The client's certificate. The client proved possession of its key. `None` if the client has no certificate, and
    /// on the client's side.
    pub fn client_certificate(&self) -> Option<&ClientCertificate> {
        self.client.as_ref()
    }

    /// Sets the number and thread of a further lane.
    pub(crate) fn further(self, number: usize, thread: Option<Arc<LaneThread>>) -> Self {
        Self { number, thread: thread.map(ThreadSlot::new).map(Arc::new), ..self }
    }

    /// Sets the reason for the choice of its kind.
    pub(crate) fn with_reason(self, reason: LaneKindReason) -> Self {
        Self { reason, ..self }
    }

    /// The kind of connection.
    pub fn kind(&self) -> LaneKind {
        match &self.connection {
            Connection::Quic(_) => LaneKind::Quic,
            Connection::Tcp(connection) => connection.peer().stream_kind(),
        }
    }

    /// The reason for the choice of this kind. `Forced` on the server's side, which did not choose, and for further
    /// lanes, which have the kind of the first one.
    pub fn reason(&self) -> LaneKindReason {
        self.reason
    }

    /// The lane's number in a client's session. 0 is the first lane, which carries control messages. Always 0 on the
    /// server's side.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Moves the lane to the least used of `threads`, if its network allows lane threads. Does not interrupt streams.
    /// Clones made before still [run](Self::run) their work on the caller's runtime. The readiness of a TCP socket is
    /// still reported by the runtime that accepted it.
    pub fn spread(mut self, threads: &LaneThreads) -> Self {
        let mover = match &self.connection {
            Connection::Quic(connection) => connection.take_mover(),
            Connection::Tcp(connection) => connection.take_mover(),
        };
        if let Some(mover) = mover {
            self.thread = lane_threads::move_to_thread(&mover, threads).map(Arc::new);
        }
        self
    }

    /// Runs `work` on the lane's thread if it has one, where it starts at once, otherwise in place, with a future no larger
    /// than `work`. Dropping the future aborts `work`.
    ///
    /// # Errors
    /// [`LaneError::ClosedLocally`] when the thread ended first.
    pub fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> impl Future<Output = Result<T, LaneError>> {
        let Some(thread) = &self.thread else {
            return Either::Left(work.map(Ok));
        };
        let running = thread.handle().spawn(work);
        let abort = AbortOnDrop(running.abort_handle());
        Either::Right(async move {
            let _abort = abort;
            running.await.map_err(|ended| match ended.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => LaneError::ClosedLocally,
            })
        })
    }

    /// Spawns `work` in `tasks`, on the lane's thread if it has one.
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

    /// The peer: its address, or over a Unix socket its process.
    pub fn peer(&self) -> Peer {
        match &self.connection {
            Connection::Quic(connection) => canonical(connection.peer()).into(),
            Connection::Tcp(connection) => connection.peer(),
        }
    }

    /// The user of the peer's process, over a Unix socket, as the kernel noted it: see [`LocalProcess`](crate::LocalProcess). `None` on the
    /// network.
    pub fn local_user(&self) -> Option<u32> {
        self.peer().process().map(|process| process.uid)
    }

    /// Passes descriptors beside the lane's bytes; `None` unless it is a Unix socket.
    pub fn descriptors(&self) -> Option<&Descriptors> {
        match &self.connection {
            Connection::Quic(_) => None,
            Connection::Tcp(connection) => connection.descriptors(),
        }
    }

    /// Opens the control stream. The client does this once per lane.
    pub(crate) async fn open_control(&self) -> Result<(ControlOut, ControlIn), LaneError> {
        match &self.connection {
            Connection::Quic(connection) => connection.open_control().await.map(quic_halves),
            Connection::Tcp(connection) => connection.control().map(tcp_halves),
        }
    }

    /// Waits for the client to open the control stream.
    pub(crate) async fn accept_control(&self) -> Result<(ControlOut, ControlIn), LaneError> {
        match &self.connection {
            Connection::Quic(connection) => connection.accept_control().await.map(quic_halves),
            Connection::Tcp(connection) => connection.control().map(tcp_halves),
        }
    }

    /// Opens a data stream. Waits while the peer's limit of open streams is reached; over TCP until the previous stream
    /// is finished or reset.
    ///
    /// Streams of higher `priority` are sent first; those of equal priority in the order of opening. Over TCP all
    /// streams are sent one after another in the order of opening.
    ///
    /// # Errors
    /// [`LaneError`] when the lane ended.
    pub async fn open_data(&self, priority: i32) -> Result<DataOut, LaneError> {
        Ok(DataOut(match &self.connection {
            Connection::Quic(connection) => Out::Quic(connection.open_data(priority).await?),
            Connection::Tcp(connection) => Out::Tcp(connection.open_data().await?),
        }))
    }

    /// Waits for the next data stream of the peer. Cancel safe.
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

    /// Closes the lane and its streams, with a reason for the peer.
    pub fn close(&self, code: CloseCode, text: &str) {
        match &self.connection {
            Connection::Quic(connection) => connection.close(code, text),
            Connection::Tcp(connection) => connection.close(code, text),
        }
    }

    /// Closes the lane because the peer does not read its control stream; `detail` is the cause. All streams then fail
    /// with [`LaneError::ControlUnread`].
    pub(crate) fn close_unread_control(&self, code: CloseCode, detail: &'static str) {
        match &self.connection {
            Connection::Quic(connection) => connection.close_unread_control(code, detail),
            Connection::Tcp(connection) => connection.close_unread_control(code, detail),
        }
    }

    /// Waits for six round trips, between 20 ms and half a second, in which sent data is usually acknowledged: a close
    /// sent while QUIC's congestion window is full would not reach the peer. Finish or drop all streams before you call
    /// this. Over TCP it returns immediately, since a close is sent after queued control messages and drops other data.
    pub async fn flush(&self) {
        match &self.connection {
            Connection::Quic(connection) => connection.flush(CLOSE_FLUSH_TIMEOUT).await,
            Connection::Tcp(_) => {}
        }
    }

    /// Waits, at most half a second, until the peer has answered a [`close`](Self::close). A QUIC peer answers with its
    /// own close, which arrives after one round trip. If either close is lost, this waits until the closing period of
    /// three probe timeouts has passed (RFC 9000 §10.2), in which packets of the peer are answered with the close
    /// again. A TCP peer closes the connection. If a process exits without this, its peers may detect its end only by
    /// their idle timeout.
    pub async fn flush_close(&self) {
        let answered = async {
            match &self.connection {
                Connection::Quic(connection) => connection.close_answered().await,
                Connection::Tcp(connection) => connection.close_answered().await,
            }
        };
        let _ = tokio::time::timeout(CLOSE_FLUSH_TIMEOUT, answered).await;
    }

    /// Waits until a closed lane has no buffers left. Over TCP that takes up to three seconds, for the peer to read the
    /// close and to end the stream.
    pub async fn lingered(&self) {
        match &self.connection {
            Connection::Quic(_) => {}
            Connection::Tcp(connection) => connection.close_answered().await,
        }
    }

    /// The reason, if the lane has ended.
    pub fn ended(&self) -> Option<LaneError> {
        match &self.connection {
            Connection::Quic(connection) => connection.ended(),
            Connection::Tcp(connection) => connection.ended(),
        }
    }

    /// Waits until the lane has ended; returns the reason.
    pub async fn closed(&self) -> LaneError {
        match &self.connection {
            Connection::Quic(connection) => connection.closed().await,
            Connection::Tcp(connection) => connection.closed().await,
        }
    }

    /// Sets the limit of unread bytes from the peer: `bytes` for chunks, as many as the granted credit allows, plus a
    /// reserve for manifests and (over QUIC) control messages. Over TCP the limit never decreases, since data may be in
    /// flight.
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

fn quic_halves((out, incoming): (quic::ControlOut, quic::ControlIn)) -> (ControlOut, ControlIn) {
    (ControlOut::Quic(out), ControlIn::Quic(incoming))
}

fn tcp_halves((out, incoming): (byte_stream::ControlOut, byte_stream::ControlIn)) -> (ControlOut, ControlIn) {
    (ControlOut::Tcp(out), ControlIn::Tcp(incoming))
}

impl ControlOut {
    /// Writes all of `frame`; waits under backpressure. Returns false if the stream has been stopped or the lane has
    /// ended.
    pub(crate) async fn write(&mut self, frame: Vec<u8>) -> bool {
        match self {
            Self::Quic(out) => out.write(&frame).await,
            Self::Tcp(out) => out.write(frame.into()).await,
        }
    }

    /// Ends the stream and waits until the peer has received all data (over TCP, until the socket has accepted it) or
    /// the lane has ended.
    pub(crate) async fn finish(self) {
        match self {
            Self::Quic(out) => out.finish().await,
            Self::Tcp(out) => out.finish().await,
        }
    }
}

impl ControlIn {
    /// Waits for bytes; returns `None` when the stream ended on a live lane. Cancel safe.
    pub(crate) async fn read(&mut self) -> Result<Option<Bytes>, LaneError> {
        match self {
            Self::Quic(incoming) => incoming.read().await,
            Self::Tcp(incoming) => incoming.read().await,
        }
    }
}

/// The sending half of a data stream. Dropping it before `finish` resets the stream.
#[derive(Debug)]
pub struct DataOut(Out);

#[derive(Debug)]
enum Out {
    Quic(quic::DataOut),
    Tcp(byte_stream::DataOut),
}

impl DataOut {
    /// Sends the header. Waits while flow control windows are full.
    pub(crate) async fn write_header(&mut self, header: &StreamHeader) -> Result<(), LaneError> {
        self.write(Bytes::copy_from_slice(&header.encode()), &|_| ()).await
    }

    /// Sends `bytes` without a copy, except short ones over TCP. QUIC holds them until they are acknowledged, TCP until
    /// they are encrypted. Waits while flow control windows are full. Calls `progress` with the size of each piece that
    /// the connection accepts.
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

    /// Ends the stream. All written bytes arrive, unless the lane ends or the peer stops the stream before.
    pub(crate) fn finish(self) -> Result<(), LaneError> {
        match self.0 {
            Out::Quic(mut out) => out.finish(),
            Out::Tcp(out) => out.finish(),
        }
    }
}

/// The receiving half of a data stream. Dropping it early asks the sender to stop.
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
    /// The lane that carries the stream.
    pub fn lane(&self) -> &Lane {
        &self.lane
    }

    /// Reads the header, the first bytes of every data stream.
    ///
    /// # Errors
    /// [`HeaderError`] when the stream ends early or the header is invalid.
    pub async fn read_header(&mut self) -> Result<StreamHeader, HeaderError> {
        let mut header = [0; HEADER_BYTES];
        match &mut self.stream {
            In::Quic(stream) => stream.read_exact(&mut header).await?,
            In::Tcp(stream) => stream.read_exact(&mut header).await?,
        }
        Ok(StreamHeader::decode(&header)?)
    }

    /// Reads the stream into `buffer` until the stream ends or exceeds the buffer. Over TCP the lane's driver decrypts
    /// into the buffer; dropping the future takes the buffer back and drops it immediately.
    pub(crate) async fn fill(self, mut buffer: ReceiveBuffer) -> Result<ReceiveBuffer, LaneError> {
        match self.stream {
            In::Quic(mut stream) => {
                while stream.read_pieces(|piece| buffer.put(piece)).await? && !buffer.is_overfull() {}
                Ok(buffer)
            }
            In::Tcp(stream) => stream.fill(buffer).await,
        }
    }

    /// Waits for bytes and passes available ones, in order, to `take`; returns false at the end of the stream.
    pub(crate) async fn read_pieces(&mut self, take: impl FnMut(&[u8])) -> Result<bool, LaneError> {
        match &mut self.stream {
            In::Quic(stream) => stream.read_pieces(take).await,
            In::Tcp(stream) => stream.read_pieces(take).await,
        }
    }
}
