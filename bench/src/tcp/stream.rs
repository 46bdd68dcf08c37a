//! TCP connections with the options of this contender, plain or encrypted.

use super::PIECE_BYTES;
use crate::tls;
use anyhow::{Context, Result};
use rustls::{ClientConnection, ServerConnection, StreamOwned};
use socket2::{Domain, Socket, Type};
use std::{
    io::{self, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::Duration,
};

/// A TCP connection, with or without TLS.
pub(super) trait Stream: Read + Write + Send {}

impl<T: Read + Write + Send> Stream for T {}

/// Listens on `address`.
///
/// # Errors
/// When the address is taken, or the kernel lacks CUBIC.
pub(super) fn listen(address: SocketAddr) -> Result<TcpListener> {
    let listener = new_socket(address)?;
    listener
        .bind(&address.into())
        .with_context(|| format!("cannot listen on {address}"))?;
    listener.listen(BACKLOG)?;
    Ok(listener.into())
}

/// The serving end of `socket`, which has inherited its listener's congestion control.
///
/// # Errors
/// When no certificate can be made.
pub(super) fn server(socket: TcpStream, tls: bool) -> Result<Box<dyn Stream>> {
    set_options(&socket)?;
    if !tls {
        return Ok(Box::new(socket));
    }
    let mut connection = ServerConnection::new(Arc::new(tls::server()?))?;
    // rustls buffers at most this much plaintext: a complete piece is encrypted in one call.
    connection.set_buffer_limit(Some(PIECE_BYTES));
    Ok(Box::new(StreamOwned::new(connection, BufferedSocket::new(socket))))
}

/// Connects to `remote`.
///
/// # Errors
/// When the server does not answer in time, or the kernel lacks CUBIC.
pub(super) fn client(remote: SocketAddr, tls: bool) -> Result<Box<dyn Stream>> {
    let socket = new_socket(remote)?;
    socket
        .connect_timeout(&remote.into(), CONNECT_TIMEOUT)
        .with_context(|| format!("cannot connect to {remote}"))?;
    let socket = socket.into();
    set_options(&socket)?;
    if !tls {
        return Ok(Box::new(socket));
    }
    let connection = ClientConnection::new(Arc::new(tls::client()?), tls::SERVER_NAME.try_into()?)?;
    Ok(Box::new(StreamOwned::new(connection, BufferedSocket::new(socket))))
}

/// A new socket with CUBIC. The kernel sizes its buffers: a fixed size was slower on every path.
fn new_socket(address: SocketAddr) -> Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket
        .set_tcp_congestion(b"cubic")
        .context("cannot set the congestion control to cubic, which the comparison requires: load the kernel module tcp_cubic")?;
    Ok(socket)
}

fn set_options(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE_TIMEOUT))?;
    stream.set_write_timeout(Some(SILENCE_TIMEOUT))?;
    Ok(())
}

/// A TCP socket with a buffer for reads, but not for writes. rustls reads 4 KiB at a time, which on a bare socket are
/// four system calls per record.
#[derive(Debug)]
struct BufferedSocket(BufReader<TcpStream>);

impl BufferedSocket {
    fn new(socket: TcpStream) -> Self {
        Self(BufReader::with_capacity(BUFFER_BYTES, socket))
    }
}

impl Read for BufferedSocket {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out)
    }
}

impl Write for BufferedSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.get_mut().write(bytes)
    }

    fn write_vectored(&mut self, pieces: &[io::IoSlice<'_>]) -> io::Result<usize> {
        self.0.get_mut().write_vectored(pieces)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.get_mut().flush()
    }
}

/// The size of the read buffer.
const BUFFER_BYTES: usize = 256 << 10;

const BACKLOG: i32 = 16;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The time without progress after which the other end counts as dead.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(120);
#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Goal: buffered bytes are neither lost nor returned twice, and writes bypass the buffer. Method: both ends on
    /// loopback, reads smaller than what was sent.
    #[test]
    fn small_reads_return_all_in_order() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut near = BufferedSocket::new(listener.accept().unwrap().0);
        far.write_all(b"abcdefgh").unwrap();
        let mut piece = [0; 3];
        near.read_exact(&mut piece).unwrap();
        near.write_all(&piece).unwrap();
        far.read_exact(&mut piece).unwrap();
        assert_eq!(&piece, b"abc");
        drop(far);
        let mut rest = Vec::new();
        near.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"defgh");
    }
}
