//! [`VersionSender`]: sends one version to one subscription: its manifest, its chunks (a few at a time) and `Complete`.

use crate::{
    bases::DeltaBase,
    effort_trial::{EffortMeter, InFlight},
    lanes::{LaneLoad, Lanes},
    shared::Shared,
    stall::Progress,
    subscribers::SubscriberProgress,
    topic::Retained,
};
use futures_util::{StreamExt, stream::FuturesUnordered};
use std::{pin::Pin, sync::Arc};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{
    ChunkHeader, ChunkIndex, CodecChoice, CodecSet, Effort, Selection, SendAction, ServerMessage,
    SubscriptionId,
};
use tensor_relay_transport::{
    Lane, Stage, Tally, control,
    egress::{self, CodecRequest, Encoded},
};
use tokio::time::Instant;
use tracing::Instrument;

/// The context of all sends of one version to one subscription.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) subscription: SubscriptionId,
    pub(crate) retained: Arc<Retained>,
    pub(crate) selection: Arc<Selection>,
    pub(crate) codec: CodecChoice,
    /// The codecs that the subscriber can decode.
    pub(crate) codecs: CodecSet,
    /// The client's base, if chunks may be encoded against it.
    pub(crate) base: Option<DeltaBase>,
    pub(crate) effort: EffortMeter,
    /// The counters of the topic.
    pub(crate) tally: Arc<Tally>,
    pub(crate) lanes: Arc<Lanes>,
    pub(crate) sender: control::Sender<ServerMessage>,
    pub(crate) shared: Arc<Shared>,
    /// The subscription's status counters.
    pub(crate) counters: Arc<SubscriberProgress>,
    pub(crate) progress: Progress,
    /// Whether its chunks are copied to be sent: they do not lie in memory in one piece.
    pub(crate) is_copied: bool,
}

/// Sends one version: its chunks, each read, encoded and written on one lane, its manifest and `Complete`. Sends run
/// concurrently within [`next`](Self::next), in the caller's task, so that no task is woken for a small chunk. Reading
/// files, hashing and encoding run on other threads; gathering a chunk from many places in memory does not. Dropping it
/// cancels the sends.
///
/// If a lane is lost or retired before its chunk is written, the chunk is lost, and the client fetches it again.
#[derive(Debug)]
pub(crate) struct VersionSender {
    outgoing: Arc<Outgoing>,
    running: FuturesUnordered<Pin<Box<dyn Future<Output = Sent> + Send>>>,
}

/// The result of a send. An error means that the version cannot be read.
pub(crate) type Sent = Result<SentKind, Arc<SourceError>>;

/// The kind of a send that ended, even if it was lost with its lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SentKind {
    Manifest,
    Chunk,
    Complete,
}

impl VersionSender {
    pub(crate) fn new(outgoing: Outgoing) -> Self {
        outgoing.effort.handle_version();
        Self { outgoing: Arc::new(outgoing), running: FuturesUnordered::new() }
    }

    /// Whether another send may begin: at most `sends_max` at a time, and one while there is no memory for more copies.
    pub(crate) fn has_room(&self, sends_max: usize) -> bool {
        let has_memory = || !self.outgoing.is_copied || self.outgoing.shared.copies.has_room();
        self.running.len() < sends_max && (self.running.is_empty() || has_memory())
    }

    /// Adds the send of an action.
    pub(crate) fn begin(&mut self, action: SendAction) {
        let outgoing = Arc::clone(&self.outgoing);
        self.running.push(match action {
            SendAction::Manifest => Box::pin(async move { outgoing.send_manifest().await }),
            SendAction::Chunk(chunk, lane) => {
                let load = outgoing.lanes.begin_chunk(lane, outgoing.raw_bytes(chunk));
                let copy = outgoing
                    .is_copied
                    .then(|| outgoing.shared.copies.count(outgoing.raw_bytes(chunk)));
                let span = tracing::trace_span!("chunk", %chunk);
                let send = async move {
                    let sent = outgoing.send_chunk(chunk, load).await;
                    drop(copy);
                    sent
                };
                Box::pin(send.instrument(span))
            }
            SendAction::Complete => Box::pin(async move { outgoing.send_complete().await }),
        });
    }

    /// Cancels all sends in progress without reporting them.
    pub(crate) fn give_up(&mut self) {
        self.running.clear();
    }

    /// Runs the sends until one ends; `None` if there is none. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<Sent> {
        let sent = self.running.next().await?;
        self.outgoing.progress.note(1);
        Some(sent)
    }
}

impl Outgoing {
    /// Sends the manifest. Ignores errors: the loss of its lane ends the session, and a client that stops the stream
    /// has the manifest or aborts the version.
    async fn send_manifest(&self) -> Sent {
        let manifest = self.retained.payload.manifest();
        let note = |bytes| self.progress.note(bytes);
        let _ = egress::send_manifest(self.lanes.control(), self.subscription, manifest, &note).await;
        Ok(SentKind::Manifest)
    }

    /// Reads, encodes and writes one chunk on the lane of `load`, unless the lane is retired first.
    async fn send_chunk(self: Arc<Self>, chunk: ChunkIndex, load: Option<LaneLoad>) -> Sent {
        let Some(load) = load else { return Ok(SentKind::Chunk) };
        tokio::select! {
            sent = self.encode_and_write(chunk, &load.lane().lane) => sent?,
            () = load.lane().retired() => {
                tracing::debug!(%chunk, "A chunk was lost with its lane.");
            }
        }
        Ok(SentKind::Chunk)
    }

    async fn encode_and_write(
        self: Arc<Self>,
        chunk: ChunkIndex,
        lane: &Lane,
    ) -> Result<(), Arc<SourceError>> {
        let (began, encoding) = (Instant::now(), self.counters.begin_encoding());
        let in_flight = self.effort.begin(self.raw_bytes(chunk));
        let encoded = self.encode(chunk, &in_flight).await?;
        drop(encoding);
        self.progress.note(1); // From here on, only the subscriber can delay the send.
        let _sending = (self.shared.encoder.stages().begin(Stage::Send), self.counters.begin_writing());
        let (outgoing, target) = (Arc::clone(&self), lane.clone());
        // A lane that fails loses the chunk; a client that stops the stream has aborted the version.
        let write = async move { outgoing.write(chunk, &encoded, &target, began, &in_flight).await };
        let _ = lane.run(write).await;
        Ok(())
    }

    /// Encodes a chunk. Holds the base only during the encoding, not while a slow subscriber receives the result.
    async fn encode(&self, chunk: ChunkIndex, in_flight: &InFlight) -> Result<Encoded, Arc<SourceError>> {
        let payload = &self.retained.payload;
        let delta_base = self.base.as_ref().and_then(|base| Some((base, base.upgrade()?)));
        let base = delta_base.as_ref().map(|(_, retained)| &retained.payload);
        let encoded = self
            .shared
            .encoder
            .encode_delta(payload, chunk, base, self.codec_request(in_flight))
            .await?;
        if let Some((base, _)) = &delta_base {
            base.note(self.raw_bytes(chunk), encoded.codec.needs_base());
        }
        Ok(encoded)
    }

    /// The requested encoding of a chunk.
    fn codec_request(&self, in_flight: &InFlight) -> CodecRequest {
        match self.codec {
            CodecChoice::Auto => CodecRequest::Auto { offered: self.codecs, effort: in_flight.effort() },
            CodecChoice::Fixed(codec) => CodecRequest::Fixed(codec),
        }
    }

    /// Writes a chunk whose send started at `began`, and counts it if it was written.
    async fn write(
        &self,
        chunk: ChunkIndex,
        encoded: &Encoded,
        lane: &Lane,
        began: Instant,
        in_flight: &InFlight,
    ) {
        let note = |bytes| self.progress.note(bytes);
        if egress::send_chunk(lane, self.header(chunk, encoded), encoded, &note)
            .await
            .is_ok()
        {
            in_flight.handle_sent(&self.equivalent_efforts(chunk, encoded, in_flight.effort()));
            let (raw_bytes, wire_bytes) = (self.raw_bytes(chunk), encoded.bytes.len() as u64);
            for tally in [&*self.tally, &self.shared.tally] {
                tally.count(encoded.codec, raw_bytes, wire_bytes, encoded.worker_time);
            }
            self.counters.note_sent(raw_bytes, wire_bytes);
            self.shared.chunk_times.note(began.elapsed());
        }
    }

    /// The levels of effort that encode a chunk with the same codec.
    fn equivalent_efforts(&self, chunk: ChunkIndex, encoded: &Encoded, effort: Effort) -> Vec<Effort> {
        if encoded.codec.needs_base() || matches!(self.codec, CodecChoice::Fixed(_)) {
            return Effort::ALL.into();
        }
        let estimate = self.shared.encoder.estimate(&self.retained.payload, chunk);
        let codec = |effort| estimate.map(|estimate| estimate.choose(self.codecs, effort));
        let is_equivalent =
            |other: &Effort| *other == effort || estimate.is_some() && codec(*other) == codec(effort);
        Effort::ALL.into_iter().filter(is_equivalent).collect()
    }

    fn header(&self, chunk: ChunkIndex, encoded: &Encoded) -> ChunkHeader {
        let base = self.base.as_ref().filter(|_| encoded.codec.needs_base());
        ChunkHeader {
            subscription: self.subscription,
            epoch: self.retained.id.epoch,
            version: self.retained.id.version,
            chunk,
            codec: encoded.codec,
            raw_bytes: self.raw_bytes(chunk) as u32,
            encoded_bytes: encoded.bytes.len() as u32,
            hash: encoded.hash,
            base: base.map(|base| base.version),
        }
    }

    fn raw_bytes(&self, chunk: ChunkIndex) -> u64 {
        let (range, _) = self.retained.payload.manifest().chunk(chunk);
        range.end - range.start
    }

    /// Sends `Complete` with the version's digest. Chunks that were not sent because the client already holds them may
    /// have to be hashed first.
    async fn send_complete(&self) -> Sent {
        let digest = self
            .shared
            .encoder
            .digest(&self.retained.payload, self.selection.chunks())
            .await?;
        let (epoch, version) = (self.retained.id.epoch, self.retained.id.version);
        let complete = ServerMessage::Complete { subscription: self.subscription, epoch, version, digest };
        let _ = self.sender.send(complete).await; // Fails only when the session ends.
        Ok(SentKind::Complete)
    }
}
