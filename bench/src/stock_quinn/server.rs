//! The serving side of bare quinn.

use super::{CHUNK_BYTES, CHUNKS_IN_FLIGHT, request};
use crate::{
    contender::{Begun, Sent},
    latency,
};
use anyhow::Result;
use bytes::Bytes;
use quinn::{Connection, ConnectionError, Incoming, SendStream};
use tokio::task::JoinSet;

/// Serves `memory` to one client until it disconnects, and calls `report` after each round.
///
/// Each request has a bidirectional stream. For a round, the server finishes this stream once all chunks are
/// acknowledged, so that no work of a round is measured in the next. A small message is sent on the stream itself.
///
/// # Errors
/// When the connection breaks, or when `report` fails.
pub(super) async fn serve(
    incoming: Incoming,
    memory: &Bytes,
    mut report: impl FnMut(Sent) -> Result<()>,
) -> Result<()> {
    let connection = incoming.await?;
    loop {
        let (mut response, mut request) = match connection.accept_bi().await {
            Ok(streams) => streams,
            Err(ConnectionError::ApplicationClosed(_)) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        match &*request.read_to_end(request::MAX_BYTES).await? {
            request::SMALL => response.write_all(&latency::stamped()).await?,
            _ => report(serve_round(&connection, memory).await?)?,
        }
        response.finish()?;
    }
}

async fn serve_round(connection: &Connection, memory: &Bytes) -> Result<Sent> {
    let begun = Begun::now();
    let mut streams = JoinSet::new();
    for chunk in pieces(memory, CHUNK_BYTES as usize) {
        if streams.len() == CHUNKS_IN_FLIGHT {
            streams.join_next().await.transpose()?.transpose()?;
        }
        streams.spawn(send(connection.open_uni().await?, chunk));
    }
    while let Some(sent) = streams.join_next().await {
        sent??;
    }
    Ok(Sent::since(begun, memory.len() as u64))
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

/// The size of one write to quinn.
const WRITE_BYTES: usize = 1 << 20;
