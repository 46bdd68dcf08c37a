//! A TCP socket with a read buffer.

use std::{
    io::{self, BufReader, Read, Write},
    net::TcpStream,
};

/// A TCP socket with a buffer for reads, but not for writes. rustls reads 4 KiB at a time, which on a bare socket are
/// four system calls per record.
#[derive(Debug)]
pub(super) struct BufferedSocket(BufReader<TcpStream>);

impl BufferedSocket {
    pub(super) fn new(socket: TcpStream) -> Self {
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

/// The size of the buffer.
const BUFFER_BYTES: usize = 256 << 10;

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
