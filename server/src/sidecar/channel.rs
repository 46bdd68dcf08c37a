//! Frames and descriptors over a Unix socket, for producer and server.

use rustix::net::{Shutdown, shutdown};
use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};
use tensor_relay_protocol::{FRAME_MAX_BYTES, MessageError, decode_frame_length};
use tensor_relay_transport::unix::{LostDescriptors, receive, send};
use tokio::{
    io::Interest,
    net::UnixStream,
    time::{Instant, timeout, timeout_at},
};

/// The deadline for reading a message after its first byte, and for each write of a message or of what remains of it.
/// Both peers are on one machine.
pub(super) const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// The size of the length prefix.
const PREFIX_BYTES: usize = 4;

/// Why the channel can no longer be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum ChannelError {
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Message(#[from] MessageError),
    #[error("the peer closed the connection within a message")]
    Truncated,
    #[error("the peer did not finish a message within {} s", MESSAGE_TIMEOUT.as_secs())]
    Slow,
    #[error("the peer read no message within {} s", MESSAGE_TIMEOUT.as_secs())]
    Unread,
    #[error("the peer sent a descriptor without a message that needs it")]
    StrayDescriptors,
    #[error(transparent)]
    LostDescriptors(#[from] LostDescriptors),
}

/// Reads frames from a connection.
#[derive(Debug)]
pub(super) struct FrameReader {
    stream: Arc<UnixStream>,
    /// Bytes received, without the messages returned so far. Never more than one frame and the bytes received with its
    /// end.
    received: Vec<u8>,
    /// When the first of these bytes was received, or the message before them returned.
    since: Instant,
    descriptors: VecDeque<OwnedFd>,
}

/// Writes frames to a connection.
#[derive(Debug)]
pub(super) struct FrameWriter {
    stream: Arc<UnixStream>,
}

/// Splits `stream` into its directions.
pub(super) fn split(stream: UnixStream) -> (FrameReader, FrameWriter) {
    let stream = Arc::new(stream);
    let reader = FrameReader {
        stream: Arc::clone(&stream),
        received: Vec::new(),
        since: Instant::now(),
        descriptors: VecDeque::new(),
    };
    (reader, FrameWriter { stream })
}

impl FrameReader {
    /// The next message, without its length; `None` when the peer closed between messages. Waits indefinitely for a
    /// message to begin, and up to a deadline for its end. Cancel safe.
    pub(super) async fn next(&mut self) -> Result<Option<Vec<u8>>, ChannelError> {
        loop {
            if let Some(frame) = self.take_frame()? {
                return Ok(Some(frame));
            }
            // All complete messages are handled. A remaining descriptor belongs to the incomplete message, or was sent
            // with one that needs none: it must not be used for a later message.
            if self.descriptors.len() > usize::from(!self.received.is_empty()) {
                return Err(ChannelError::StrayDescriptors);
            }
            let bytes = match self.received.is_empty() {
                true => self.read_some().await?,
                false => timeout_at(self.since + MESSAGE_TIMEOUT, self.read_some())
                    .await
                    .map_err(|_| ChannelError::Slow)??,
            };
            match (bytes, self.received.is_empty()) {
                (0, true) => return Ok(None),
                (0, false) => return Err(ChannelError::Truncated),
                _ => {}
            }
        }
    }

    /// The descriptor sent with the last message, if any. Take it before reading the next one.
    pub(super) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop_front()
    }

    fn take_frame(&mut self) -> Result<Option<Vec<u8>>, ChannelError> {
        let Some(prefix) = self.received.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        let end = PREFIX_BYTES + decode_frame_length(*prefix)?;
        if self.received.len() < end {
            return Ok(None);
        }
        let remaining = self.received.split_off(end);
        let mut frame = std::mem::replace(&mut self.received, remaining);
        frame.drain(..PREFIX_BYTES);
        self.since = Instant::now(); // Further bytes begin another message.
        Ok(Some(frame))
    }

    /// Reads some bytes and their descriptors; returns 0 at the end.
    async fn read_some(&mut self) -> Result<usize, ChannelError> {
        let mut part = [0; 8192];
        let (bytes, descriptors) = self
            .stream
            .async_io(Interest::READABLE, || receive(&*self.stream, &mut part))
            .await?;
        if self.received.is_empty() {
            self.since = Instant::now();
        }
        self.received.extend_from_slice(&part[..bytes]);
        debug_assert!(
            self.received.len() <= PREFIX_BYTES + FRAME_MAX_BYTES + part.len(),
            "one frame, and a part"
        );
        self.descriptors.extend(descriptors?);
        Ok(bytes)
    }
}

impl FrameWriter {
    /// Writes `frame`, a message with its length prefix, and sends `descriptor` with the first byte. Not cancel safe:
    /// the frame could be truncated.
    pub(super) async fn write(
        &self,
        frame: &[u8],
        mut descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), ChannelError> {
        let mut remaining = frame;
        while !remaining.is_empty() {
            let written = self
                .stream
                .async_io(Interest::WRITABLE, || send(&*self.stream, remaining, descriptor.as_slice()));
            let bytes = timeout(MESSAGE_TIMEOUT, written).await.map_err(|_| ChannelError::Unread)??;
            remaining = &remaining[bytes..];
            descriptor = None; // It was sent with the first byte.
        }
        Ok(())
    }

    /// A guard that shuts the connection down when it is dropped.
    pub(super) fn shutdown_guard(&self) -> ShutdownGuard {
        ShutdownGuard(Arc::clone(&self.stream))
    }
}

/// Shuts a connection down when it is dropped. The peer is notified even if a forked child still has the descriptor.
#[derive(Debug)]
pub(super) struct ShutdownGuard(Arc<UnixStream>);

impl Drop for ShutdownGuard {
    fn drop(&mut self) {
        let _ = shutdown(&*self.0, Shutdown::Both); // Fails if it has ended already.
    }
}

impl AsFd for ShutdownGuard {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::sidecar::{ProducerMessage, PublicationId, encode_producer};

    fn frame(number: u64) -> Vec<u8> {
        encode_producer(ProducerMessage::Withdraw(PublicationId(number)))
    }

    fn pair() -> (FrameReader, FrameWriter, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        let (reader, writer) = split(near);
        (reader, writer, far)
    }

    fn some_file() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[tokio::test]
    async fn messages_are_complete_and_in_order() {
        let (mut reader, _writer, far) = pair();
        let (_, far) = split(far);
        let (one, two) = (frame(1), frame(u64::MAX));
        let bytes = [&one[..], &two[..], &one[..3]].concat();
        for byte in &bytes[..bytes.len() - 3] {
            far.write(&[*byte], None).await.unwrap();
        }
        assert_eq!(reader.next().await.unwrap().unwrap(), one[4..]);
        assert_eq!(reader.next().await.unwrap().unwrap(), two[4..]);
        far.write(&one[..3], None).await.unwrap();
        drop(far);
        assert!(matches!(reader.next().await, Err(ChannelError::Truncated)));
    }

    #[tokio::test]
    async fn a_close_between_messages_is_none() {
        let (mut reader, _writer, far) = pair();
        drop(far);
        assert!(reader.next().await.unwrap().is_none());
    }

    /// Goal: the peer is notified of the end although a child has the socket. Method: a second descriptor of the same
    /// socket, as after a fork.
    #[tokio::test]
    async fn a_shutdown_reaches_the_peer_despite_a_child() {
        let (mut reader, _writer, far) = pair();
        let (_far_reader, far) = split(far);
        let guard = far.shutdown_guard();
        let _child_descriptor = guard.as_fd().try_clone_to_owned().unwrap();
        drop((far, guard));
        let next = timeout(MESSAGE_TIMEOUT, reader.next()).await.expect("it ended");
        assert!(next.unwrap().is_none());
    }

    #[tokio::test]
    async fn an_incomplete_message_times_out() {
        tokio::time::pause();
        let (mut reader, _writer, far) = pair();
        let (_, far) = split(far);
        far.write(&frame(1)[..5], None).await.unwrap();
        assert!(matches!(reader.next().await, Err(ChannelError::Slow)));
    }

    #[tokio::test]
    async fn an_excessive_length_is_refused() {
        let (mut reader, _writer, far) = pair();
        let (_, far) = split(far);
        far.write(&u32::MAX.to_le_bytes(), None).await.unwrap();
        assert!(matches!(reader.next().await, Err(ChannelError::Message(MessageError::TooLarge { .. }))));
    }

    #[tokio::test]
    async fn descriptors_belong_to_their_messages() {
        let (mut reader, _writer, far) = pair();
        let (_, far) = split(far);
        let file = some_file();
        far.write(&frame(1), None).await.unwrap();
        far.write(&frame(2), Some(file.as_fd())).await.unwrap();
        assert_eq!(reader.next().await.unwrap().unwrap(), frame(1)[4..]);
        assert_eq!(reader.next().await.unwrap().unwrap(), frame(2)[4..]);
        assert!(reader.take_descriptor().is_some());
        assert!(reader.take_descriptor().is_none());
    }

    #[tokio::test]
    async fn a_descriptor_is_not_kept_for_a_later_message() {
        let (mut reader, _writer, far) = pair();
        let (_, far) = split(far);
        far.write(&frame(1), Some(some_file().as_fd())).await.unwrap();
        far.write(&frame(2), None).await.unwrap();
        assert_eq!(reader.next().await.unwrap().unwrap(), frame(1)[4..]);
        assert!(matches!(reader.next().await, Err(ChannelError::StrayDescriptors)));
    }

    #[tokio::test]
    async fn too_many_descriptors_end_the_connection() {
        let (mut reader, _writer, far) = pair();
        let (_, far) = split(far);
        let file = some_file();
        let flood = async move {
            for number in 0..40 {
                if far.write(&frame(number), Some(file.as_fd())).await.is_err() {
                    return;
                }
            }
        };
        let read = async {
            while reader.next().await?.is_some() {}
            Ok::<_, ChannelError>(())
        };
        let (_, ended) = tokio::join!(flood, read);
        assert!(matches!(ended, Err(ChannelError::StrayDescriptors)));
    }
}
