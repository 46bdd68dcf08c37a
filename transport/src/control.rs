//! The control stream: messages in order, each with its length in front.

use crate::{
    Lane, LaneError,
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

/// How many messages wait to be written. Whoever has more to say waits: a session says little beside its chunks, and a
/// peer that reads nothing for the write deadline is closed.
const QUEUE_MAX: usize = 64;

/// How long the good-bye of a peer may take that stopped its control stream: a round trip or two where it is lost at first.
const GOOD_BYE: Duration = Duration::from_secs(1);

/// How long a lane that is about to be closed waits until what was queued is written.
const SETTLE: Duration = Duration::from_millis(500);

/// A message that can travel on a control stream.
pub trait Message: Sized + Send + 'static {
    /// The message with its length in front.
    fn into_frame(self) -> Vec<u8>;

    /// Reads the message from the bytes behind its length.
    ///
    /// # Errors
    /// [`MessageError`] when the bytes are no such message.
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

/// Waits for the control stream of a server's lane. The caller puts a deadline around it.
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
        writer: AbortOnDrop(task),
    };
    (sender, receiver)
}

#[derive(Debug)]
enum Queued {
    Frame(Vec<u8>),
    /// Told once all that was queued before is written.
    Mark(oneshot::Sender<()>),
}

/// The sending direction. Cheap to clone: every task of a session can speak, and a task that is cancelled while it does
/// leaves no half message behind.
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
    /// Queues `message`. It is written in the order in which messages were queued. Cancel safe.
    ///
    /// # Errors
    /// [`LaneError`] when the lane ended. Success means queued, not received.
    pub async fn send(&self, message: Out) -> Result<(), LaneError> {
        match self.queue.send(Queued::Frame(message.into_frame())).await {
            Ok(()) => Ok(()),
            Err(_) => Err(self.lane.closed().await),
        }
    }

    /// Waits until what was queued is on its way, so that a [`close`](Lane::close) after it does not overtake it: half a
    /// second for the queue, and half a second for [what is in flight](Lane::settle).
    pub async fn settle(&self) {
        let (written, is_written) = oneshot::channel();
        let queued = async {
            let _ = self.queue.send(Queued::Mark(written)).await;
            let _ = is_written.await; // Either fails only when the lane has ended.
        };
        let _ = tokio::time::timeout(SETTLE, queued).await;
        self.lane.settle().await;
    }
}

struct Writer {
    lane: Lane,
    stream: ControlOut,
    waiting: mpsc::Receiver<Queued>,
    write_timeout: Duration,
}

impl Writer {
    /// Writes until every sender is gone or the lane ends, and then until the peer has it all. What cannot be written within the deadline ends the lane: a
    /// peer that does not read its control stream cannot be served.
    async fn run(mut self) {
        while let Some(queued) = self.waiting.recv().await {
            let frame = match queued {
                Queued::Frame(frame) => frame,
                Queued::Mark(written) => {
                    let _ = written.send(()); // Nobody may wait any more.
                    continue;
                }
            };
            match tokio::time::timeout(self.write_timeout, self.stream.write(frame)).await {
                Ok(true) => {}
                Ok(false) => {
                    // A peer that ends stops its streams right before it says good-bye, and that may be lost at first. On
                    // a lane that lives on, nobody could ever speak to it again.
                    if tokio::time::timeout(GOOD_BYE, self.lane.closed()).await.is_err() {
                        self.lane.close_unheard(CloseCode::Misbehaved, "the control stream was stopped");
                    }
                    break;
                }
                Err(_) => {
                    self.lane.close_unheard(CloseCode::TimedOut, "the control stream was not read");
                    break;
                }
            }
        }
        let _ = tokio::time::timeout(self.write_timeout, self.stream.finish()).await;
    }
}

/// The receiving direction. Dropping it ends the control stream.
#[derive(Debug)]
pub struct Receiver<In> {
    stream: ControlIn,
    buffer: BytesMut,
    message: PhantomData<fn() -> In>,
    writer: AbortOnDrop,
}

/// Why no message came.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// The lane ended, or the other end finished its control stream.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// Bytes that are no message.
    #[error(transparent)]
    Message(#[from] MessageError),
}

impl<In: Message> Receiver<In> {
    /// Waits for the next message. Cancel safe: what was read stays.
    ///
    /// # Errors
    /// [`ControlError`] when the lane ended or what came is no message; nothing more can be read then.
    pub async fn next(&mut self) -> Result<In, ControlError> {
        loop {
            if let Some(message) = self.take_frame()? {
                return Ok(message);
            }
            match self.stream.read().await? {
                Some(bytes) => self.buffer.extend_from_slice(&bytes),
                None => return Err(LaneError::StreamGivenUp.into()),
            }
        }
    }

    /// Waits until the other end has everything that was queued, once every sender is gone; at most for the deadline of a
    /// write. A lane that is closed without it may take its last messages with it.
    pub async fn flush(mut self) {
        let _ = (&mut self.writer.0).await;
    }

    fn take_frame(&mut self) -> Result<Option<In>, MessageError> {
        let Some(prefix) = self.buffer.first_chunk::<4>() else {
            return Ok(None);
        };
        let bytes = decode_frame_length(*prefix)?;
        if self.buffer.len() < 4 + bytes {
            return Ok(None);
        }
        self.buffer.advance(4);
        In::from_body(&self.buffer.split_to(bytes)).map(Some)
    }
}

/// Ends a task with the value that owns it.
#[derive(Debug)]
struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
