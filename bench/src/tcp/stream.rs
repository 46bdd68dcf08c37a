//! A connection, plain or encrypted.

use super::{Encryption, PIECE_BYTES, buffered::BufferedSocket};
use crate::tls;
use anyhow::Result;
use rustls::{ClientConnection, ServerConnection, StreamOwned};
use std::{
    io::{self, Read, Write},
    net::TcpStream,
    sync::Arc,
};

/// A TCP connection, with or without TLS.
#[derive(Debug)]
pub(super) enum Stream {
    Plain(TcpStream),
    TlsServer(Box<StreamOwned<ServerConnection, BufferedSocket>>),
    TlsClient(Box<StreamOwned<ClientConnection, BufferedSocket>>),
}

impl Stream {
    /// The serving end of `socket`.
    ///
    /// # Errors
    /// When no certificate can be made.
    pub(super) fn server(socket: TcpStream, encryption: Encryption) -> Result<Self> {
        if !encryption.tls {
            return Ok(Self::Plain(socket));
        }
        let mut connection = ServerConnection::new(Arc::new(tls::server()?))?;
        // rustls buffers at most this much plaintext: a complete piece is encrypted in one call.
        connection.set_buffer_limit(Some(PIECE_BYTES));
        Ok(Self::TlsServer(Box::new(StreamOwned::new(connection, BufferedSocket::new(socket)))))
    }

    /// The receiving end of `socket`.
    ///
    /// # Errors
    /// When rustls was built without TLS 1.3.
    pub(super) fn client(socket: TcpStream, encryption: Encryption) -> Result<Self> {
        if !encryption.tls {
            return Ok(Self::Plain(socket));
        }
        let connection = ClientConnection::new(Arc::new(tls::client()?), tls::SERVER_NAME.try_into()?)?;
        Ok(Self::TlsClient(Box::new(StreamOwned::new(connection, BufferedSocket::new(socket)))))
    }
}

impl Read for Stream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(out),
            Self::TlsServer(stream) => stream.read(out),
            Self::TlsClient(stream) => stream.read(out),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(bytes),
            Self::TlsServer(stream) => stream.write(bytes),
            Self::TlsClient(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.flush(),
            Self::TlsServer(stream) => stream.flush(),
            Self::TlsClient(stream) => stream.flush(),
        }
    }
}
