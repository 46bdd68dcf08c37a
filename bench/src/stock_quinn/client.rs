//! The receiving side of bare quinn.

use super::{CHUNK_BYTES, endpoint, request};
use crate::{
    contender::{Begun, Received, SmallMessages},
    latency::{self, Latencies},
    tls,
};
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use quinn::{Connection, Endpoint, RecvStream, SendStream};
use std::net::SocketAddr;
use tokio::task::JoinSet;

/// A client that receives the same bytes into the same memory, round after round.
#[derive(Debug)]
pub(super) struct Client {
    endpoint: Endpoint,
    connection: Connection,
    /// Memory for each chunk, written before the first round, so that no round includes page faults.
    chunks: Vec<Box<[u8]>>,
}

impl Client {
    /// Connects to the server at `remote`, which holds `bytes` bytes.
    ///
    /// # Errors
    /// When the server does not answer, or the settings are out of quinn's range.
    pub(super) async fn connect(remote: SocketAddr, bytes: u64, mtu: u16) -> Result<Self> {
        let endpoint = endpoint::client(mtu)?;
        let connecting = endpoint.connect(remote, tls::SERVER_NAME)?;
        let connection = connecting.await.with_context(|| format!("cannot connect to {remote}"))?;
        Ok(Self { endpoint, connection, chunks: touched_memory(bytes) })
    }

    /// Requests the payload and receives it into memory.
    ///
    /// # Errors
    /// When the connection breaks, or when the server sends more or less than expected.
    pub(super) async fn receive(&mut self, round: u32) -> Result<Received> {
        let begun = Begun::now();
        let mut response = self.request(request::ALL).await?;
        // The server opens a stream for each chunk in order, and quinn accepts them in that order.
        let mut streams = JoinSet::new();
        for (index, chunk) in self.chunks.iter_mut().enumerate() {
            let stream = self.connection.accept_uni().await?;
            let chunk = std::mem::take(chunk);
            streams.spawn(async move { read(stream, chunk).await.map(|chunk| (index, chunk)) });
        }
        while let Some(joined) = streams.join_next().await {
            let (index, chunk) = joined??;
            self.chunks[index] = chunk;
        }
        let bytes = self.chunks.iter().map(|chunk| chunk.len() as u64).sum();
        let received = Received::since(begun, round, bytes);
        response.read_to_end(0).await?;
        Ok(received)
    }

    /// Requests small messages, one after the other: those to warm up, then `count` that are counted.
    ///
    /// # Errors
    /// When the connection breaks, or a message is invalid.
    pub(super) async fn receive_small(&self, count: u32) -> Result<SmallMessages> {
        let mut latencies = Latencies::new(count);
        for _ in 0..latency::message_count(count) {
            let mut response = self.request(request::SMALL).await?;
            latencies.add(&response.read_to_end(latency::MESSAGE_BYTES).await?)?;
        }
        Ok(latencies.summary())
    }

    /// Every byte of the memory, in order.
    #[cfg(test)]
    pub(super) fn memory(&self) -> impl Iterator<Item = u8> {
        self.chunks.iter().flat_map(|chunk| chunk.iter().copied())
    }

    /// Closes the connection, so that the server does not wait for the idle timeout.
    pub(super) async fn close(self) {
        self.connection.close(0u32.into(), b"");
        self.endpoint.wait_idle().await;
    }

    /// Sends a request; the returned stream ends when the server has completed it.
    async fn request(&self, text: &[u8]) -> Result<RecvStream> {
        let (mut request, response): (SendStream, RecvStream) = self.connection.open_bi().await?;
        request.write_all(text).await?;
        request.finish()?;
        Ok(response)
    }
}

/// Memory for `bytes` bytes, in chunks, with every page allocated.
fn touched_memory(bytes: u64) -> Vec<Box<[u8]>> {
    let starts = (0..bytes).step_by(CHUNK_BYTES as usize);
    let lengths = starts.map(|start| CHUNK_BYTES.min(bytes - start) as usize);
    lengths.map(|length| vec![0xff; length].into_boxed_slice()).collect()
}

/// Fills `chunk` with the bytes of `stream`, which must have its length.
async fn read(mut stream: RecvStream, mut chunk: Box<[u8]>) -> Result<Box<[u8]>> {
    let mut pieces: [Bytes; PIECES_MAX] = std::array::from_fn(|_| Bytes::new());
    let mut filled = 0;
    while let Some(count) = stream.read_chunks(&mut pieces).await? {
        for piece in &mut pieces[..count] {
            let end = filled + piece.len();
            ensure!(end <= chunk.len(), "the server sends more than the {} bytes of a chunk", chunk.len());
            chunk[filled..end].copy_from_slice(piece);
            filled = end;
            // Frees the packet's memory before waiting for the next packet.
            *piece = Bytes::new();
        }
    }
    ensure!(filled == chunk.len(), "the server sent {filled} of the {} bytes of a chunk", chunk.len());
    Ok(chunk)
}

/// The maximum number of packets read at a time, which saves wake-ups and locks.
const PIECES_MAX: usize = 64;
