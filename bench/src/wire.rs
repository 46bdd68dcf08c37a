//! Lines of JSON between two processes, bounded in length, so that neither end can exhaust the other's memory.

use serde::{Serialize, de::DeserializeOwned};
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The maximum length of a line, except in the greeting of a node and its driver: longer than that of any side.
pub(crate) const LINE_MAX_BYTES: usize = 256 << 10;

/// The maximum length of a line of the greeting, whose sender is not yet trusted.
pub(crate) const GREETING_MAX_BYTES: usize = 1 << 10;

/// The length to which an invalid line is truncated in errors.
const SHOWN_MAX_CHARS: usize = 80;

/// The size of one read.
const PIECE_BYTES: usize = 4 << 10;

/// An error of a connection that carries lines. In its messages, `it` is the other end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    #[error(
        "it sent a line of more than {max_bytes} bytes: it is another program, or another version of this one"
    )]
    TooLong { max_bytes: usize },
    #[error("it sent {line:?}, which is no line of this protocol: it is another program, or another version")]
    InvalidLine { line: String, source: serde_json::Error },
    #[error("it disconnected in the middle of a line")]
    CutOff,
    #[error("the connection to it failed: {0}")]
    Failed(#[from] io::Error),
}

/// A reader of JSON values, one a line.
pub(crate) struct Lines<R> {
    reader: R,
    max_bytes: usize,
    /// Bytes read and not yet parsed: at most one incomplete line and one read.
    buffer: Vec<u8>,
    /// The length of the prefix of `buffer` that is known to have no line end.
    searched: usize,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    /// Reads lines of at most `max_bytes`.
    pub(crate) fn new(reader: R, max_bytes: usize) -> Self {
        Self { reader, max_bytes, buffer: Vec::new(), searched: 0 }
    }

    /// The same reader, with another maximum length for the following lines.
    pub(crate) fn with_max(self, max_bytes: usize) -> Self {
        Self { max_bytes, ..self }
    }

    /// The next value; `None` at the end of the stream. It has no deadline, but is cancel safe, so the caller can add
    /// one.
    ///
    /// # Errors
    /// [`WireError`], after which no more may be read.
    pub(crate) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, WireError> {
        let Some(line) = self.next_line().await? else { return Ok(None) };
        parse_line(&line).map(Some)
    }

    /// The next line as bytes, without its line end.
    ///
    /// # Errors
    /// [`WireError`], except [`WireError::InvalidLine`].
    pub(crate) async fn next_line(&mut self) -> Result<Option<Vec<u8>>, WireError> {
        loop {
            if let Some(length) = self.complete_line()? {
                let mut line: Vec<u8> = self.buffer.drain(..=length).collect();
                line.truncate(length);
                self.searched = 0;
                return Ok(Some(line));
            }
            let mut piece = [0; PIECE_BYTES];
            match self.reader.read(&mut piece).await? {
                0 if self.buffer.is_empty() => return Ok(None),
                0 => return Err(WireError::CutOff),
                read => self.buffer.extend_from_slice(&piece[..read]),
            }
        }
    }

    /// The length of the first line in the buffer; `None` while it is incomplete.
    fn complete_line(&mut self) -> Result<Option<usize>, WireError> {
        let end = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n');
        let end = end.map(|end| self.searched + end);
        self.searched = self.buffer.len();
        match end.unwrap_or(self.buffer.len()) > self.max_bytes {
            true => Err(WireError::TooLong { max_bytes: self.max_bytes }),
            false => Ok(end),
        }
    }
}

/// Sends `value` as a line. It has no deadline: the caller adds one, against a peer that does not read.
///
/// # Errors
/// When the other end is gone.
pub(crate) async fn send(to: &mut (impl AsyncWrite + Unpin), value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    to.write_all(&line).await?;
    to.flush().await
}

/// The value in `line`.
///
/// # Errors
/// [`WireError::InvalidLine`].
pub(crate) fn parse_line<T: DeserializeOwned>(line: &[u8]) -> Result<T, WireError> {
    serde_json::from_slice(line).map_err(|source| {
        let line = String::from_utf8_lossy(line).chars().take(SHOWN_MAX_CHARS).collect();
        WireError::InvalidLine { line, source }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokio::io::AsyncWriteExt;

    async fn read<T: DeserializeOwned>(bytes: &[u8], max_bytes: usize) -> Vec<Result<T, String>> {
        let mut lines = Lines::new(bytes, max_bytes);
        let mut all = Vec::new();
        loop {
            match lines.next::<T>().await {
                Ok(Some(value)) => all.push(Ok(value)),
                Ok(None) => return all,
                Err(error) => {
                    all.push(Err(error.to_string()));
                    return all;
                }
            }
        }
    }

    #[tokio::test]
    async fn sent_values_are_read() {
        let mut wire = Vec::new();
        send(&mut wire, &"a\nb").await.unwrap();
        send(&mut wire, &"c").await.unwrap();
        assert_eq!(read::<String>(&wire, 100).await, [Ok("a\nb".into()), Ok("c".into())]);
    }

    /// Goal: a peer that never ends its line costs a bounded amount of memory. Method: an endless line.
    #[tokio::test]
    async fn a_line_without_an_end_is_refused() {
        let (mut there, here) = tokio::io::duplex(1 << 10);
        tokio::spawn(async move { while there.write_all(&[b'1'; 1 << 10]).await.is_ok() {} });
        let mut lines = Lines::new(here, 10_000);
        let error = lines.next::<u64>().await.unwrap_err();
        assert!(matches!(error, WireError::TooLong { max_bytes: 10_000 }), "{error}");
        assert!(lines.buffer.len() <= 10_000 + PIECE_BYTES, "{} bytes were kept", lines.buffer.len());
    }

    #[tokio::test]
    async fn the_maximum_length_is_exact() {
        assert_eq!(read::<u64>(b"1234\n", 4).await, [Ok(1234)]);
        let refused = read::<u64>(b"12345\n", 4).await;
        assert!(matches!(&refused[..], [Err(error)] if error.contains("more than 4 bytes")), "{refused:?}");
    }

    #[tokio::test]
    async fn invalid_lines_are_truncated() {
        let long = format!("\"{}\"\n", "é".repeat(1000));
        let refused = read::<u64>(long.as_bytes(), 10_000).await;
        let [Err(error)] = &refused[..] else { panic!("{refused:?}") };
        assert!(error.contains("ééé") && error.len() < 400, "{error}");
        let cut = read::<u64>(b"12", 100).await;
        assert!(matches!(&cut[..], [Err(error)] if error.contains("in the middle")), "{cut:?}");
    }

    proptest! {
        /// Any bytes are read as values and at most one error, without a panic.
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..500)) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let all = runtime.block_on(read::<serde_json::Value>(&bytes, 64));
            prop_assert!(all.iter().rev().skip(1).all(Result::is_ok));
        }
    }
}
