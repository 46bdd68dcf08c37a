//! A socket that is read in large pieces.

use std::{
    io::{self, BufReader, Read, Write},
    net::TcpStream,
};

/// A socket with room for what is read ahead. rustls reads 4 KiB at a time: on a bare socket that is four system calls
/// for each record.
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

/// The maximum size of one read.
const BUFFER_BYTES: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Goal: what was read ahead is neither lost nor given twice, and writing goes past it. Method: both ends on loopback,
    /// read in pieces smaller than what comes.
    #[test]
    fn small_reads_give_all_in_order() {
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
