//! The serving side of TCP.

use super::{
    Encryption, PIECE_BYTES, request, socket,
    stream::{self, Stream},
};
use crate::{
    contender::{Begun, Sent},
    latency,
};
use anyhow::{Result, bail, ensure};
use bytes::Bytes;
use std::{
    io::{ErrorKind, Write},
    net::{SocketAddr, TcpListener, TcpStream},
};

/// A server that sends the same memory to each client.
#[derive(Debug)]
pub(super) struct Server {
    listener: TcpListener,
    memory: Bytes,
    encryption: Encryption,
}

impl Server {
    /// Listens on `address`.
    ///
    /// # Errors
    /// When the address is taken, or the kernel lacks CUBIC.
    pub(super) fn bind(address: SocketAddr, memory: Bytes, encryption: Encryption) -> Result<Self> {
        Ok(Self { listener: socket::listen(address)?, memory, encryption })
    }

    /// The address that the server listens on.
    ///
    /// # Errors
    /// When the system does not report it.
    pub(super) fn local_addr(&self) -> Result<SocketAddr> {
        Ok(self.listener.local_addr()?)
    }

    /// Waits for the next client, without a deadline.
    ///
    /// # Errors
    /// When the system lacks a resource, e.g. file descriptors.
    pub(super) fn accept(&self) -> Result<TcpStream> {
        socket::accept(&self.listener)
    }

    /// Serves one client until it disconnects, and calls `report` after each round.
    ///
    /// # Errors
    /// When the connection breaks, or when `report` fails.
    pub(super) fn serve(&self, client: TcpStream, mut report: impl FnMut(Sent) -> Result<()>) -> Result<()> {
        let mut stream = stream::server(client, self.encryption)?;
        while let Some(byte) = next_request(&mut *stream)? {
            match byte {
                request::ALL => report(self.serve_round(&mut *stream)?)?,
                request::SMALL => stream.write_all(&latency::stamped())?,
                other => bail!("the client sent the unknown request {other:#04x}"),
            }
        }
        Ok(())
    }

    /// Sends the payload, and waits until the client has received it, so that no work of a round is measured in the
    /// next.
    fn serve_round(&self, stream: &mut dyn Stream) -> Result<Sent> {
        let begun = Begun::now();
        for piece in self.memory.chunks(PIECE_BYTES) {
            stream.write_all(piece)?;
        }
        stream.flush()?;
        let received = next_request(stream)? == Some(request::RECEIVED);
        ensure!(received, "the client disconnected before it had received everything");
        Ok(Sent::since(begun, self.memory.len() as u64))
    }
}

/// The next request of the client, a byte of [`request`]; `None` if the client has disconnected.
fn next_request(stream: &mut dyn Stream) -> Result<Option<u8>> {
    let mut byte = [0];
    match stream.read_exact(&mut byte) {
        Ok(()) => Ok(Some(byte[0])),
        // With TLS too: our client sends no close_notify.
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error.into()),
    }
}
