//! The receiving side.

use super::{CHUNK_BYTES, Settings};
use crate::{
    contender::{Begun, Received, Small},
    latency::{self, Latencies},
    tls,
};
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use quinn::{Connection, Endpoint, RecvStream, SendStream};
use std::net::SocketAddr;
use tokio::task::JoinSet;

/// Receives the same bytes into the same memory, round after round.
#[derive(Debug)]
pub(super) struct Client {
    endpoint: Endpoint,
    connection: Connection,
    /// Memory for each chunk, written to before the first round so that no round pays for page faults.
    chunks: Vec<Box<[u8]>>,
}

impl Client {
    /// Connects to the server at `remote`, which holds `bytes`.
    ///
    /// # Errors
    /// When nobody answers, or the settings are out of quinn's range.
    pub(super) async fn connect(remote: SocketAddr, bytes: u64, settings: Settings) -> Result<Self> {
        let endpoint = settings.client(remote)?;
        let connecting = endpoint.connect(remote, tls::SERVER_NAME)?;
        let connection = connecting.await.with_context(|| format!("cannot connect to {remote}"))?;
        Ok(Self { endpoint, connection, chunks: touched_memory(bytes) })
    }

    /// Asks for everything and waits until it is in place.
    ///
    /// # Errors
    /// When the connection breaks, or when the server sends more or less than expected.
    pub(super) async fn receive(&mut self, round: u32) -> Result<Received> {
        let begun = Begun::now();
        let mut answer = self.ask(Question::ALL).await?;
        // The server opens a stream for each chunk in order, and QUIC hands them over in that order.
        let mut streams = JoinSet::new();
        for (index, chunk) in self.chunks.iter_mut().enumerate() {
            let stream = self.connection.accept_uni().await?;
            let chunk = std::mem::take(chunk);
            streams.spawn(async move { read(stream, chunk).await.map(|chunk| (index, chunk)) });
        }
        while let Some(read) = streams.join_next().await {
            let (index, chunk) = read??;
            self.chunks[index] = chunk;
        }
        let bytes = self.memory_bytes();
        let received = Received::since(begun, round, bytes);
        answer.read_to_end(0).await?;
        Ok(received)
    }

    /// Asks for small messages, one after the other, until `count` of them count.
    ///
    /// # Errors
    /// When the connection breaks, or something else comes.
    pub(super) async fn receive_small(&self, count: u32) -> Result<Small> {
        let mut latencies = Latencies::new(count);
        for _ in 0..latency::messages(count) {
            let mut answer = self.ask(Question::SMALL).await?;
            latencies.add(&answer.read_to_end(latency::MESSAGE_BYTES).await?)?;
        }
        Ok(latencies.summary())
    }

    /// Every byte of the memory, in order.
    #[cfg(test)]
    pub(super) fn memory(&self) -> impl Iterator<Item = u8> {
        self.chunks.iter().flat_map(|chunk| chunk.iter().copied())
    }

    /// Says goodbye, so that the server need not wait for a timeout.
    pub(super) async fn close(self) {
        self.connection.close(0u32.into(), b"");
        self.endpoint.wait_idle().await;
    }

    /// Asks for `text`; the stream that is returned ends when the server has done it.
    async fn ask(&self, text: &[u8]) -> Result<RecvStream> {
        let (mut question, answer): (SendStream, RecvStream) = self.connection.open_bi().await?;
        question.write_all(text).await?;
        question.finish()?;
        Ok(answer)
    }

    fn memory_bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.len() as u64).sum()
    }
}

/// Memory for `bytes`, in chunks, each page of it really there.
fn touched_memory(bytes: u64) -> Vec<Box<[u8]>> {
    let starts = (0..bytes).step_by(CHUNK_BYTES as usize);
    let lengths = starts.map(|start| CHUNK_BYTES.min(bytes - start) as usize);
    lengths.map(|length| vec![0xff; length].into_boxed_slice()).collect()
}

/// Fills `chunk` with what `stream` brings, no less and no more.
async fn read(mut stream: RecvStream, mut chunk: Box<[u8]>) -> Result<Box<[u8]>> {
    let mut pieces: [Bytes; PIECES] = std::array::from_fn(|_| Bytes::new());
    let mut filled = 0;
    while let Some(count) = stream.read_chunks(&mut pieces).await? {
        for piece in &mut pieces[..count] {
            let end = filled + piece.len();
            ensure!(end <= chunk.len(), "the server sends more than the {} bytes of a chunk", chunk.len());
            chunk[filled..end].copy_from_slice(piece);
            filled = end;
            // Gives the packet's memory back before the next one is waited for.
            *piece = Bytes::new();
        }
    }
    ensure!(filled == chunk.len(), "the server sent {filled} of the {} bytes of a chunk", chunk.len());
    Ok(chunk)
}

/// The requests.
pub(super) struct Question;

impl Question {
    /// Everything that the server holds.
    pub(super) const ALL: &[u8] = b"all";
    /// A small message with the time in it.
    pub(super) const SMALL: &[u8] = b"small";
    /// No question is longer.
    pub(super) const MAX_BYTES: usize = 5;
}

/// The number of packets received at a time: fewer wake-ups and locks than one by one.
const PIECES: usize = 64;
