//! [`VersionSender`]: sends one version to one subscription: its manifest, its chunks (a few at a time) and `Complete`.

use crate::{
    bases::DeltaBase,
    effort::EffortMeter,
    lanes::{LaneLoad, Lanes},
    shared::{ChunkCopy, Shared},
    stall::Progress,
    subscribers::SubscriberProgress,
    topic::Retained,
};
use futures_util::{StreamExt, stream::FuturesUnordered};
use std::{pin::Pin, sync::Arc};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{
    ChunkHeader, ChunkIndex, CodecChoice, CodecId, CodecSet, Effort, Selection, SendAction, ServerMessage,
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

/// The result of a send.
pub(crate) type Sent = Result<SentKind, Unread>;

/// A send that failed, because what it needs of the version could not be read.
#[derive(Debug)]
pub(crate) struct Unread {
    pub(crate) action: SendAction,
    pub(crate) error: Arc<SourceError>,
}

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
        let occupied = self.outgoing.occupy(action);
        self.running.push(Box::pin(Arc::clone(&self.outgoing).send(action, occupied)));
    }

    /// Adds the send of an action that could not be read before, to begin at `at`.
    pub(crate) fn begin_again(&mut self, action: SendAction, at: Instant) {
        let outgoing = Arc::clone(&self.outgoing);
        self.running.push(Box::pin(async move {
            tokio::time::sleep_until(at).await;
            let occupied = outgoing.occupy(action);
            outgoing.send(action, occupied).await
        }));
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

/// What a send occupies until it ends.
struct Occupied {
    /// The load of its lane; `None` for no chunk, or if the lane is retired.
    load: Option<LaneLoad>,
    /// Its part of the budget for copies.
    _copy: Option<ChunkCopy>,
}

impl Outgoing {
    /// What the send of an action occupies from now on.
    fn occupy(&self, action: SendAction) -> Occupied {
        let SendAction::Chunk(chunk, lane) = action else { return Occupied { load: None, _copy: None } };
        let raw_bytes = self.raw_bytes(chunk);
        Occupied {
            load: self.lanes.begin_chunk(lane, raw_bytes),
            _copy: self.is_copied.then(|| self.shared.copies.count(raw_bytes)),
        }
    }

    async fn send(self: Arc<Self>, action: SendAction, Occupied { load, _copy }: Occupied) -> Sent {
        let sent = match action {
            SendAction::Manifest => Ok(self.send_manifest().await),
            SendAction::Chunk(chunk, _) => {
                self.send_chunk(chunk, load)
                    .instrument(tracing::trace_span!("chunk", %chunk))
                    .await
            }
            SendAction::Complete => self.send_complete().await,
        };
        sent.map_err(|error| Unread { action, error })
    }

    /// Sends the manifest. Ignores errors: the loss of its lane ends the session, and a client that stops the stream
    /// has the manifest or aborts the version.
    async fn send_manifest(&self) -> SentKind {
        let manifest = self.retained.payload.manifest();
        let note = |bytes| self.progress.note(bytes);
        let _ = egress::send_manifest(self.lanes.control(), self.subscription, manifest, &note).await;
        SentKind::Manifest
    }

    /// Reads, encodes and writes one chunk on the lane of `load`, unless the lane is retired first.
    async fn send_chunk(
        self: Arc<Self>,
        chunk: ChunkIndex,
        load: Option<LaneLoad>,
    ) -> Result<SentKind, Arc<SourceError>> {
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
        let effort = self.effort.effort();
        let encoded = self.encode(chunk, effort).await?;
        drop(encoding);
        self.progress.note(1); // From here on, only the subscriber can delay the send.
        let _sending = (self.shared.encoder.stages().begin(Stage::Send), self.counters.begin_writing());
        let (outgoing, target) = (Arc::clone(&self), lane.clone());
        let estimate = self.estimate(chunk, encoded.clone());
        // A lane that fails loses the chunk; a client that stops the stream has aborted the version.
        let write = async move { outgoing.write(chunk, &encoded, &target, began, effort).await };
        let _ = tokio::join!(lane.run(write), estimate);
        Ok(())
    }

    /// Estimates what each level of effort would make of a chunk: from an estimate of similar chunks or, if one may be
    /// made now, from a sample of a raw chunk.
    async fn estimate(&self, chunk: ChunkIndex, encoded: Encoded) {
        let (encoder, payload) = (&self.shared.encoder, &self.retained.payload);
        if !self.is_chosen(encoded.codec) {
            return;
        }
        let estimate = match encoder.estimate(payload, chunk) {
            Some(estimate) => estimate,
            None if encoded.codec == CodecId::Raw && self.effort.may_sample() => {
                let (estimate, took) = encoder.sample(payload, chunk, encoded.bytes).await;
                self.effort.handle_sampled(took);
                estimate
            }
            None => return,
        };
        self.effort.handle_estimate(&estimate, self.codecs, self.raw_bytes(chunk));
    }

    /// Whether a chunk that was encoded in `codec` owes that to the effort: it is no delta, and no codec was requested.
    fn is_chosen(&self, codec: CodecId) -> bool {
        self.codec == CodecChoice::Auto && !codec.needs_base()
    }

    /// Encodes a chunk. Holds the base only during the encoding, not while a slow subscriber receives the result.
    async fn encode(&self, chunk: ChunkIndex, effort: Effort) -> Result<Encoded, Arc<SourceError>> {
        let payload = &self.retained.payload;
        let delta_base = self.base.as_ref().and_then(|base| Some((base, base.upgrade()?)));
        let base = delta_base.as_ref().map(|(_, retained)| &retained.payload);
        let encoded = self
            .shared
            .encoder
            .encode_delta(payload, chunk, base, self.codec_request(effort))
            .await?;
        if let Some((base, _)) = &delta_base {
            base.note(self.raw_bytes(chunk), encoded.codec.needs_base());
        }
        Ok(encoded)
    }

    /// The requested encoding of a chunk.
    fn codec_request(&self, effort: Effort) -> CodecRequest {
        match self.codec {
            CodecChoice::Auto => CodecRequest::Auto { offered: self.codecs, effort },
            CodecChoice::Fixed(codec) => CodecRequest::Fixed(codec),
        }
    }

    /// Writes a chunk whose send started at `began`, and counts it if it was written.
    async fn write(&self, chunk: ChunkIndex, encoded: &Encoded, lane: &Lane, began: Instant, effort: Effort) {
        let note = |bytes| self.progress.note(bytes);
        if egress::send_chunk(lane, self.header(chunk, encoded), encoded, &note)
            .await
            .is_ok()
        {
            let (raw_bytes, wire_bytes) = (self.raw_bytes(chunk), encoded.bytes.len() as u64);
            self.effort
                .handle_written(encoded, effort, raw_bytes, self.is_chosen(encoded.codec));
            for tally in [&*self.tally, &self.shared.tally] {
                tally.count(encoded.codec, raw_bytes, wire_bytes, encoded.worker_time);
            }
            self.counters.note_sent(raw_bytes, wire_bytes);
            self.shared.chunk_times.note(began.elapsed());
        }
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
    async fn send_complete(&self) -> Result<SentKind, Arc<SourceError>> {
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
