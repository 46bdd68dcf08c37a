//! [`SocketStream`]: a Unix stream socket as a lane's byte stream.

use std::{
    io,
    path::Path,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::UnixStream,
};

use super::{Descriptors, messages};
use crate::{ByteStream, LocalProcess};

/// A Unix stream socket as a lane's byte stream.
#[derive(Debug)]
pub(crate) struct SocketStream {
    stream: UnixStream,
    process: LocalProcess,
    descriptors: Descriptors,
    /// Whether descriptors are received. If not, the kernel drops them without giving them to this process, so that a
    /// hostile client cannot make a server close them, which may block.
    receives: bool,
}

impl SocketStream {
    /// Connects to the socket at `path`. Does not wait: `WouldBlock` if the server has not accepted enough others.
    pub(crate) async fn connect(path: &Path) -> io::Result<Self> {
        Self::new(UnixStream::connect(path).await?, true)
    }

    /// An accepted connection.
    pub(super) fn accepted(stream: UnixStream) -> io::Result<Self> {
        Self::new(stream, false)
    }

    fn new(stream: UnixStream, receives: bool) -> io::Result<Self> {
        let process = stream.peer_cred()?.into();
        Ok(Self { stream, process, descriptors: Descriptors::default(), receives })
    }

    /// The process that connected.
    pub(super) fn process(&self) -> LocalProcess {
        self.process
    }
}

impl ByteStream for SocketStream {
    fn local(&self) -> Option<(LocalProcess, Descriptors)> {
        Some((self.process, self.descriptors.clone()))
    }
}

impl AsyncRead for SocketStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            // Not tokio's `poll_read`, which waits for more after a short read: the kernel ends a read at descriptors.
            let received = self.stream.try_io(Interest::READABLE, || {
                let part = buf.initialize_unfilled();
                match self.receives {
                    true => messages::receive(&self.stream, part),
                    false => Ok((rustix::io::read(&self.stream, part)?, Ok(vec![]))),
                }
            });
            match received {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
                Ok((bytes, descriptors)) => {
                    buf.advance(bytes);
                    self.descriptors.handle_received(descriptors);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for SocketStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if bytes.is_empty() || !self.descriptors.has_outgoing() {
            return Pin::new(&mut self.stream).poll_write(cx, bytes);
        }
        loop {
            ready!(self.stream.poll_write_ready(cx))?;
            let sent = self
                .stream
                .try_io(Interest::WRITABLE, || self.descriptors.send_next(&self.stream, bytes));
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                sent => return Poll::Ready(sent),
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl Drop for SocketStream {
    fn drop(&mut self) {
        self.descriptors.end();
    }
}
