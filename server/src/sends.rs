//! The concurrent sends of one version: its manifest, a few chunks at a time, and the last word.

use crate::{
    bases::Against,
    delivery::{Delivery, Unsettled},
    lanes::Lanes,
    link_rate::LinkMeter,
    session::Shared,
    stall::Progress,
    topic::Retained,
};
use std::sync::Arc;
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{ChunkIndex, CodecChoice, CodecSet, Selection, ServerMessage, SubscriptionId};
use tensor_relay_transport::{
    LaneError, Tally, control,
    egress::{self, Encoded, Wanted},
};
use tokio::task::{JoinError, JoinSet};

/// What every send of one version to one subscription needs.
#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    pub(crate) subscription: SubscriptionId,
    pub(crate) retained: Arc<Retained>,
    pub(crate) selection: Arc<Selection>,
    pub(crate) codec: CodecChoice,
    /// What the subscriber can decode.
    pub(crate) codecs: CodecSet,
    /// What the client holds that chunks may be coded against.
    pub(crate) base: Option<Against>,
    pub(crate) link: LinkMeter,
    /// Where what is sent of the topic is counted.
    pub(crate) tally: Arc<Tally>,
    pub(crate) lanes: Arc<Lanes>,
    pub(crate) sender: control::Sender<ServerMessage>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) progress: Progress,
}

/// What one send came to.
#[derive(Debug)]
pub(crate) enum Sent {
    Manifest,
    /// A chunk was written whole. What is named here has to arrive yet.
    Chunk(Option<Box<Unsettled>>),
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
    /// Chunks that were written to further lanes and have not arrived.
    settling: JoinSet<Result<(), SendError>>,
    given_up: bool,
}

impl Sends {
    pub(crate) fn new(outgoing: Outgoing) -> Self {
        Self { outgoing, running: JoinSet::new(), settling: JoinSet::new(), given_up: false }
    }

    /// How many are under way.
    pub(crate) fn len(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn begin_manifest(&mut self) {
        let outgoing = self.outgoing.clone();
        self.running.spawn(outgoing.send_manifest());
    }

    pub(crate) fn begin_chunk(&mut self, chunk: ChunkIndex) {
        let outgoing = self.outgoing.clone();
        self.running.spawn(outgoing.send_chunk(chunk));
    }

    pub(crate) fn begin_complete(&mut self) {
        let outgoing = self.outgoing.clone();
        self.running.spawn(outgoing.send_complete());
    }

    /// Cuts off what is under way, what was written and has not arrived included.
    pub(crate) fn give_up(&mut self) {
        self.given_up = true;
        self.running.abort_all();
        self.settling.abort_all();
    }

    /// Waits for one to end; `None` when none is under way. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<Result<Sent, SendError>> {
        loop {
            tokio::select! {
                Some(ended) = self.running.join_next() => return Some(self.handle_ended(ended)),
                Some(settled) = self.settling.join_next() => {
                    self.outgoing.progress.note(1);
                    let settled = settled.map(|settled| settled.map(|()| Sent::GivenUp));
                    if let Err(error) = settled.unwrap_or_else(cut_off) {
                        return Some(Err(error));
                    }
                }
                else => return None,
            }
        }
    }

    fn handle_ended(&mut self, ended: Result<Result<Sent, SendError>, JoinError>) -> Result<Sent, SendError> {
        self.outgoing.progress.note(1);
        match ended.unwrap_or_else(cut_off) {
            // It was written just before the rest was cut off.
            Ok(Sent::Chunk(Some(_))) if self.given_up => Ok(Sent::GivenUp),
            Ok(Sent::Chunk(Some(unsettled))) => {
                self.settling.spawn(unsettled.settle());
                Ok(Sent::Chunk(None))
            }
            Err(SendError::Lane(LaneError::StreamGivenUp)) => Ok(Sent::GivenUp),
            other => other,
        }
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
        let sent = egress::send_manifest(self.lanes.first(), self.subscription, manifest, &note).await;
        sent.map(|_| Sent::Manifest).map_err(SendError::Lane)
    }

    /// Reads, encodes and writes one chunk.
    async fn send_chunk(self, chunk: ChunkIndex) -> Result<Sent, SendError> {
        let encoded = self.encode(chunk).await.map_err(SendError::Source)?;
        self.progress.note(1); // From now on it is the subscriber who is waited for.
        Delivery::new(self, chunk, encoded).send().await
    }

    /// The base is held here alone: not while a slow subscriber takes what was made of it.
    async fn encode(&self, chunk: ChunkIndex) -> Result<Encoded, Arc<SourceError>> {
        let payload = &self.retained.payload;
        let against = self.base.as_ref().and_then(|against| Some((against, against.upgrade()?)));
        let base = against.as_ref().map(|(_, base)| &base.payload);
        let encoded = self.shared.encoder.encode_delta(payload, chunk, base, self.wanted()).await?;
        if let Some((against, _)) = &against {
            let (range, _) = payload.manifest().chunk(chunk);
            against.note(range.end - range.start, encoded.codec.needs_base());
        }
        Ok(encoded)
    }

    /// How the next chunk is wanted, as the link is now.
    fn wanted(&self) -> Wanted {
        match self.codec {
            CodecChoice::Auto => Wanted::Auto { offered: self.codecs, link: self.link.class() },
            CodecChoice::Fixed(codec) => Wanted::Fixed(codec),
        }
    }

    /// Counts a chunk that was sent.
    pub(crate) fn count(&self, chunk: ChunkIndex, encoded: &Encoded) {
        let (range, _) = self.retained.payload.manifest().chunk(chunk);
        let wire_bytes = encoded.bytes.len() as u64;
        for tally in [&*self.tally, &self.shared.tally] {
            tally.count(encoded.codec, range.end - range.start, wire_bytes, encoded.spent);
        }
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
