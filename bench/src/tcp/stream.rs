//! A connection, plain or encrypted.

use super::{Encryption, PIECE_BYTES, buffered::BufferedSocket};
use crate::tls;
use anyhow::Result;
use rustls::{ClientConnection, ServerConnection, StreamOwned};
use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::Arc,
};

/// A TCP connection, with or without TLS.
pub(super) trait Stream: Read + Write + Send {}

impl<T: Read + Write + Send> Stream for T {}

/// The serving end of `socket`.
///
/// # Errors
/// When no certificate can be made.
pub(super) fn server(socket: TcpStream, encryption: Encryption) -> Result<Box<dyn Stream>> {
    if !encryption.tls {
        return Ok(Box::new(socket));
    }
    let mut connection = ServerConnection::new(Arc::new(tls::server()?))?;
    // rustls buffers at most this much plaintext: a complete piece is encrypted in one call.
    connection.set_buffer_limit(Some(PIECE_BYTES));
    Ok(Box::new(StreamOwned::new(connection, BufferedSocket::new(socket))))
}

/// The receiving end of `socket`.
///
/// # Errors
/// When rustls was built without TLS 1.3.
pub(super) fn client(socket: TcpStream, encryption: Encryption) -> Result<Box<dyn Stream>> {
    if !encryption.tls {
        return Ok(Box::new(socket));
    }
    let connection = ClientConnection::new(Arc::new(tls::client()?), tls::SERVER_NAME.try_into()?)?;
    Ok(Box::new(StreamOwned::new(connection, BufferedSocket::new(socket))))
}
