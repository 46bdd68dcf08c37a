//! The serving side.

use super::{Encryption, PIECE_BYTES, socket, stream::Stream, word};
use crate::{
    contender::{Begun, Sent},
    latency,
};
use anyhow::{Result, bail, ensure};
use bytes::Bytes;
use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
};

/// Sends the same memory to whoever asks.
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
    /// When the address is taken.
    pub(super) fn bind(address: SocketAddr, memory: Bytes, encryption: Encryption) -> Result<Self> {
        Ok(Self { listener: socket::listen(address)?, memory, encryption })
    }

    /// The address that it listens on.
    ///
    /// # Errors
    /// When the system does not say.
    pub(super) fn local_addr(&self) -> Result<SocketAddr> {
        Ok(self.listener.local_addr()?)
    }

    /// The next client; waits for it as long as it takes.
    ///
    /// # Errors
    /// When the system is out of something.
    pub(super) fn accept(&self) -> Result<TcpStream> {
        socket::accept(&self.listener)
    }

    /// Serves one client until it closes, and gives `report` a line after each round.
    ///
    /// # Errors
    /// When the connection breaks, or when `report` fails.
    pub(super) fn serve(&self, client: TcpStream, mut report: impl FnMut(Sent) -> Result<()>) -> Result<()> {
        let mut stream = Stream::server(client, self.encryption)?;
        while let Some(asked) = next_word(&mut stream)? {
            match asked {
                word::ALL => report(self.serve_round(&mut stream)?)?,
                word::SMALL => stream.write_all(&latency::stamped())?,
                other => bail!("the client asks for {other:#04x}, which means nothing"),
            }
        }
        Ok(())
    }

    /// A round ends when the client has everything, so that no round's work falls into the next one's measurement.
    fn serve_round(&self, stream: &mut Stream) -> Result<Sent> {
        let begun = Begun::now();
        for piece in self.memory.chunks(PIECE_BYTES) {
            stream.write_all(piece)?;
        }
        stream.flush()?;
        ensure!(next_word(stream)? == Some(word::THANKS), "the client left before it had everything");
        Ok(Sent::since(begun, self.memory.len() as u64))
    }
}

/// The next request of the client; `None` if it has disconnected.
fn next_word(stream: &mut Stream) -> Result<Option<u8>> {
    let mut word = [0];
    match stream.read_exact(&mut word) {
        Ok(()) => Ok(Some(word[0])),
        // With TLS too: our client does not say goodbye.
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error.into()),
    }
}
