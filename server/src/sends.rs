//! The concurrent sends of one version: its manifest, a few chunks at a time, and the last word.

use crate::{session::Shared, stall::Progress, topic::Retained};
use std::sync::Arc;
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{ChunkHeader, ChunkIndex, CodecId, Selection, ServerMessage, SubscriptionId};
use tensor_relay_transport::{
    Lane, LaneError, control,
    egress::{self, Stage},
};
use tokio::task::{JoinError, JoinSet};

/// What every send of one version to one subscription needs.
#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    pub(crate) subscription: SubscriptionId,
    pub(crate) retained: Arc<Retained>,
    pub(crate) selection: Arc<Selection>,
    pub(crate) codec: CodecId,
    pub(crate) lane: Lane,
    pub(crate) sender: control::Sender<ServerMessage>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) progress: Progress,
}

/// What one send came to.
#[derive(Debug)]
pub(crate) enum Sent {
    Manifest,
    Chunk,
    Complete,
    /// One end gave the version up, and the stream with it.
    GivenUp,
}

/// Why a send failed.
#[derive(Debug)]
pub(crate) enum SendError {
    /// The lane is gone, and everything with it.
    Lane(LaneError),
    /// The chunk cannot be read.
    Source(Arc<SourceError>),
}

/// The sends under way. Dropping them cuts them off.
#[derive(Debug)]
pub(crate) struct Sends {
    outgoing: Outgoing,
    running: JoinSet<Result<Sent, SendError>>,
}

impl Sends {
    pub(crate) fn new(outgoing: Outgoing) -> Self {
        Self { outgoing, running: JoinSet::new() }
    }

    /// How many are under way.
    pub(crate) fn len(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn begin_manifest(&mut self) {
        let outgoing = self.outgoing.clone();
        self.running.spawn(async move { outgoing.send_manifest().await });
    }

    pub(crate) fn begin_chunk(&mut self, chunk: ChunkIndex) {
        let outgoing = self.outgoing.clone();
        self.running.spawn(async move { outgoing.send_chunk(chunk).await });
    }

    pub(crate) fn begin_complete(&mut self) {
        let outgoing = self.outgoing.clone();
        self.running.spawn(async move { outgoing.send_complete().await });
    }

    /// Cuts off what is under way.
    pub(crate) fn give_up(&mut self) {
        self.running.abort_all();
    }

    /// Waits for one to end; `None` when none is under way. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<Result<Sent, SendError>> {
        let ended = self.running.join_next().await?;
        self.outgoing.progress.note(1);
        Some(match ended.unwrap_or_else(cut_off) {
            Err(SendError::Lane(LaneError::StreamGivenUp)) => Ok(Sent::GivenUp),
            other => other,
        })
    }
}

/// A send that was cut off because its version was given up. A panic is passed on.
fn cut_off(error: JoinError) -> Result<Sent, SendError> {
    match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => Ok(Sent::GivenUp),
    }
}

impl Outgoing {
    async fn send_manifest(self) -> Result<Sent, SendError> {
        let manifest = self.retained.payload.manifest();
        let note = |bytes| self.progress.note(bytes);
        let sent = egress::send_manifest(&self.lane, self.subscription, manifest, &note).await;
        sent.map(|()| Sent::Manifest).map_err(SendError::Lane)
    }

    /// Reads, encodes and writes one chunk.
    async fn send_chunk(self, chunk: ChunkIndex) -> Result<Sent, SendError> {
        let payload = &self.retained.payload;
        let encoded = self.shared.encoder.encode(payload, chunk, self.codec).await;
        let encoded = encoded.map_err(SendError::Source)?;
        self.progress.note(1); // From now on it is the subscriber who is waited for.
        let _sending = self.shared.encoder.stages().begin(Stage::Send);
        let (range, _) = payload.manifest().chunk(chunk);
        let header = ChunkHeader {
            subscription: self.subscription,
            epoch: self.retained.id.epoch,
            version: self.retained.id.version,
            chunk,
            codec: encoded.codec,
            raw_bytes: (range.end - range.start) as u32,
            encoded_bytes: encoded.bytes.len() as u32,
            hash: encoded.hash,
            base: None,
        };
        let note = |bytes| self.progress.note(bytes);
        let sent = egress::send_chunk(&self.lane, header, &encoded, &note).await;
        sent.map(|()| Sent::Chunk).map_err(SendError::Lane)
    }

    /// Names the whole. Chunks that were not sent, because the client holds them since before a restart, may still have
    /// to be hashed for it.
    async fn send_complete(self) -> Result<Sent, SendError> {
        let payload = &self.retained.payload;
        let chunks = self.selection.chunks();
        let digest = self.shared.encoder.digest(payload, chunks).await.map_err(SendError::Source)?;
        let (epoch, version) = (self.retained.id.epoch, self.retained.id.version);
        let complete = ServerMessage::Complete { subscription: self.subscription, epoch, version, digest };
        self.sender
            .send(complete)
            .await
            .map(|()| Sent::Complete)
            .map_err(SendError::Lane)
    }
}
