//! The serving side of bare quinn.

use super::{CHUNK_BYTES, CHUNKS_IN_FLIGHT, Settings, client::Request};
use crate::{
    contender::{Begun, Sent},
    latency,
};
use anyhow::{Context, Result};
use bytes::Bytes;
use quinn::{Connection, ConnectionError, Endpoint, Incoming, SendStream};
use std::net::SocketAddr;
use tokio::task::JoinSet;

/// A server that sends the same memory to each client.
#[derive(Debug)]
pub(super) struct Server {
    endpoint: Endpoint,
    memory: Bytes,
}

impl Server {
    /// Listens on `address`.
    ///
    /// # Errors
    /// When the address is taken, or the settings are out of quinn's range.
    pub(super) fn bind(address: SocketAddr, memory: Bytes, settings: Settings) -> Result<Self> {
        let endpoint = settings
            .server(address)
            .with_context(|| format!("cannot listen on {address}"))?;
        Ok(Self { endpoint, memory })
    }

    /// The address that the server listens on.
    ///
    /// # Errors
    /// When the system does not report it.
    pub(super) fn local_addr(&self) -> Result<SocketAddr> {
        Ok(self.endpoint.local_addr()?)
    }

    /// Waits for the next client; `None` once the endpoint is closed.
    pub(super) async fn next(&self) -> Option<Incoming> {
        self.endpoint.accept().await
    }

    /// Serves one client until it disconnects, and calls `report` after each round.
    ///
    /// Each request has a bidirectional stream. For a round, the server finishes this stream once all chunks are
    /// acknowledged, so that no work of a round is measured in the next. A small message is sent on the stream itself.
    ///
    /// # Errors
    /// When the connection breaks, or when `report` fails.
    pub(super) async fn serve(
        &self,
        incoming: Incoming,
        mut report: impl FnMut(Sent) -> Result<()>,
    ) -> Result<()> {
        let connection = incoming.await?;
        loop {
            let (mut response, mut request) = match connection.accept_bi().await {
                Ok(streams) => streams,
                Err(ConnectionError::ApplicationClosed(_)) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            match &*request.read_to_end(Request::MAX_BYTES).await? {
                Request::SMALL => response.write_all(&latency::stamped()).await?,
                _ => report(self.serve_round(&connection).await?)?,
            }
            response.finish()?;
        }
    }

    async fn serve_round(&self, connection: &Connection) -> Result<Sent> {
        let begun = Begun::now();
        let mut streams = JoinSet::new();
        for chunk in pieces(&self.memory, CHUNK_BYTES as usize) {
            if streams.len() == CHUNKS_IN_FLIGHT {
                finish_one(&mut streams).await?;
            }
            streams.spawn(send(connection.open_uni().await?, chunk));
        }
        while !streams.is_empty() {
            finish_one(&mut streams).await?;
        }
        Ok(Sent::since(begun, self.memory.len() as u64))
    }
}

/// Divides `memory` into pieces of `piece_bytes`, without copying.
fn pieces(memory: &Bytes, piece_bytes: usize) -> impl Iterator<Item = Bytes> {
    let starts = (0..memory.len()).step_by(piece_bytes);
    starts.map(move |start| memory.slice(start..memory.len().min(start + piece_bytes)))
}

/// Sends `chunk` and waits until the last byte is acknowledged.
async fn send(mut stream: SendStream, chunk: Bytes) -> Result<()> {
    for piece in pieces(&chunk, WRITE_BYTES) {
        stream.write_chunk(piece).await?;
    }
    stream.finish()?;
    stream.stopped().await?;
    Ok(())
}

async fn finish_one(streams: &mut JoinSet<Result<()>>) -> Result<()> {
    streams.join_next().await.transpose()?.unwrap_or(Ok(()))
}

/// The size of one write to quinn.
const WRITE_BYTES: usize = 1 << 20;
