//! The control stream: length-prefixed messages in order.

use crate::{
    AbortOnDrop, Lane, LaneError,
    lane::{ControlIn, ControlOut},
};
use bytes::{Buf, BytesMut};
use std::{marker::PhantomData, time::Duration};
use tensor_relay_protocol::{
    ClientMessage, CloseCode, MessageError, ServerMessage, decode_frame_length, encode_client, encode_server,
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

/// The maximum number of queued messages. Senders wait while the queue is full: a session sends few messages, and a
/// peer that reads nothing within the write timeout is disconnected.
const QUEUE_MAX: usize = 64;

/// The maximum time to wait for the close of a peer that stopped its control stream. A lost close can be retransmitted
/// within it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The maximum time to write queued messages before a lane is closed.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// A message of the control stream.
pub trait Message: Sized + Send + 'static {
    /// Encodes the message, prefixed by its length.
    fn into_frame(self) -> Vec<u8>;

    /// Decodes the message from the bytes after its length.
    ///
    /// # Errors
    /// [`MessageError`] when the bytes are not a valid message.
    fn from_body(body: &[u8]) -> Result<Self, MessageError>;
}

impl Message for ClientMessage {
    fn into_frame(self) -> Vec<u8> {
        encode_client(self)
    }

    fn from_body(body: &[u8]) -> Result<Self, MessageError> {
        Self::decode(body)
    }
}

impl Message for ServerMessage {
    fn into_frame(self) -> Vec<u8> {
        encode_server(self)
    }

    fn from_body(body: &[u8]) -> Result<Self, MessageError> {
        Self::decode(body)
    }
}

/// Opens the control stream of a client's lane.
///
/// # Errors
/// [`LaneError`] when the lane ended.
pub async fn open(
    lane: &Lane,
    write_timeout: Duration,
) -> Result<(Sender<ClientMessage>, Receiver<ServerMessage>), LaneError> {
    let streams = lane.open_control().await?;
    Ok(start(lane, streams, write_timeout))
}

/// Waits for the control stream of a server's lane. The caller adds a deadline.
///
/// # Errors
/// [`LaneError`] when the lane ended.
pub async fn accept(
    lane: &Lane,
    write_timeout: Duration,
) -> Result<(Sender<ServerMessage>, Receiver<ClientMessage>), LaneError> {
    let streams = lane.accept_control().await?;
    Ok(start(lane, streams, write_timeout))
}

fn start<Out: Message, In: Message>(
    lane: &Lane,
    (stream, incoming): (ControlOut, ControlIn),
    write_timeout: Duration,
) -> (Sender<Out>, Receiver<In>) {
    let (queue, waiting) = mpsc::channel(QUEUE_MAX);
    let writer = Writer { lane: lane.clone(), stream, waiting, write_timeout };
    let task = tokio::spawn(writer.run());
    let sender = Sender { queue, lane: lane.clone(), message: PhantomData };
    let receiver = Receiver {
        stream: incoming,
        buffer: BytesMut::new(),
        message: PhantomData,
        _abort: AbortOnDrop(task.abort_handle()),
        writer: task,
    };
    (sender, receiver)
}

#[derive(Debug)]
enum Queued {
    Frame(Vec<u8>),
    /// Signals when all messages queued before it are written.
    Flush(oneshot::Sender<()>),
}

/// The sending half of the control stream. Cheap to clone: every task of a session can send. Cancelling a task leaves
/// no partial message.
#[derive(Debug)]
pub struct Sender<Out> {
    queue: mpsc::Sender<Queued>,
    lane: Lane,
    message: PhantomData<fn(Out)>,
}

impl<Out> Clone for Sender<Out> {
    fn clone(&self) -> Self {
        Self { queue: self.queue.clone(), lane: self.lane.clone(), message: PhantomData }
    }
}

impl<Out: Message> Sender<Out> {
    /// Queues `message`. Messages are written in order. Cancel safe.
    ///
    /// # Errors
    /// [`LaneError`] when the lane ended. `Ok` means queued, not received.
    pub async fn send(&self, message: Out) -> Result<(), LaneError> {
        match self.queue.send(Queued::Frame(message.into_frame())).await {
            Ok(()) => Ok(()),
            Err(_) => Err(self.lane.closed().await),
        }
    }

    /// Waits until queued messages are sent, so that a following [`close`](Lane::close) does not overtake them: at most
    /// half a second for the queue, and half a second for [data in flight](Lane::flush).
    pub async fn flush(&self) {
        let (written, confirmation) = oneshot::channel();
        let queued = async {
            let _ = self.queue.send(Queued::Flush(written)).await;
            let _ = confirmation.await; // Both fail only when the writer has ended.
        };
        let _ = tokio::time::timeout(FLUSH_TIMEOUT, queued).await;
        self.lane.flush().await;
    }
}

struct Writer {
    lane: Lane,
    stream: ControlOut,
    waiting: mpsc::Receiver<Queued>,
    write_timeout: Duration,
}

impl Writer {
    /// Writes until every sender is dropped or the lane ends, then waits until the peer has received all messages (over
    /// TCP, until the socket has accepted them), at most for the write timeout. A write that exceeds the timeout closes
    /// the lane: a peer that does not read its control stream cannot be served.
    async fn run(mut self) {
        while let Some(queued) = self.waiting.recv().await {
            let frame = match queued {
                Queued::Frame(frame) => frame,
                Queued::Flush(written) => {
                    let _ = written.send(()); // The waiting task may be cancelled.
                    continue;
                }
            };
            match tokio::time::timeout(self.write_timeout, self.stream.write(frame)).await {
                Ok(true) => {}
                Ok(false) => {
                    // A closing peer stops its streams right before its close, which may have to be retransmitted. If
                    // the lane stays open, the peer has stopped only its control stream and receives no more messages.
                    if tokio::time::timeout(CLOSE_TIMEOUT, self.lane.closed()).await.is_err() {
                        self.lane.close_unread_control(
                            CloseCode::ProtocolViolation,
                            "the control stream was stopped",
                        );
                    }
                    break;
                }
                Err(_) => {
                    self.lane
                        .close_unread_control(CloseCode::TimedOut, "the control stream was not read");
                    break;
                }
            }
        }
        let _ = tokio::time::timeout(self.write_timeout, self.stream.finish()).await;
    }
}

/// The receiving half of the control stream. Dropping it ends both halves: messages that are still queued by senders
/// are lost.
#[derive(Debug)]
pub struct Receiver<In> {
    stream: ControlIn,
    buffer: BytesMut,
    message: PhantomData<fn() -> In>,
    writer: JoinHandle<()>,
    _abort: AbortOnDrop,
}

/// Why no message was received.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// The lane ended, or the peer finished its control stream.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// The received bytes are not a valid message.
    #[error(transparent)]
    Message(#[from] MessageError),
}

impl<In: Message> Receiver<In> {
    /// Waits for the next message. Cancel safe: partially read messages are kept.
    ///
    /// # Errors
    /// [`ControlError`] when the lane ended or the message is invalid; no more messages can be read then.
    pub async fn next(&mut self) -> Result<In, ControlError> {
        loop {
            if let Some(message) = self.take_message()? {
                return Ok(message);
            }
            match self.stream.read().await? {
                Some(bytes) => self.buffer.extend_from_slice(&bytes),
                None => return Err(LaneError::StreamAborted.into()),
            }
        }
    }

    /// Waits until every sender is dropped, and then until the peer has received all queued messages (over TCP, until
    /// the socket has accepted them). The write timeout bounds each write, and the wait after the last one. Closing a
    /// lane without this may lose its last messages.
    pub async fn flush(mut self) {
        let _ = (&mut self.writer).await;
    }

    fn take_message(&mut self) -> Result<Option<In>, MessageError> {
        let Some(prefix) = self.buffer.first_chunk::<4>() else {
            return Ok(None);
        };
        let bytes = decode_frame_length(*prefix)?;
        if self.buffer.len() < 4 + bytes {
            self.buffer.reserve(4 + bytes - self.buffer.len()); // At once: growing by parts takes up to twice as much.
            return Ok(None);
        }
        self.buffer.advance(4);
        In::from_body(&self.buffer.split_to(bytes)).map(Some)
    }
}
