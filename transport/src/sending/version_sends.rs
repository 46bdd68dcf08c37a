//! [`VersionSends`]: the sends of one version to one subscription: its manifest, its chunks (a few at a time) and `Complete`.

use super::{DeltaBase, EffortMeter, Lanes, Offered, SentChunks, lanes::LaneLoad, stall::ProgressCounter};
use crate::{
    Lane, Stage,
    egress::{self, CodecRequest, Egress, Encoded, Encoder, EncodingLog, Payload, ReceivedChunks},
    in_use::Used,
};
use futures_util::{StreamExt, stream::FuturesUnordered};
use std::{
    ops::Range,
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};
use tensor_relay_device::{BoxFuture, SourceError};
use tensor_relay_protocol::{
    ChunkHeader, ChunkIndex, CodecChoice, CodecId, CodecSet, Effort, EncodingEntry, SMALL_BYTES, Selection,
    SendAction, ServerMessage, SubscriptionId,
};
use tokio::time::Instant;
use tracing::Instrument;

/// The way to one subscription.
#[derive(Debug, Clone)]
pub struct Route {
    /// Its id.
    pub subscription: SubscriptionId,
    /// The lanes of its session.
    pub lanes: Arc<Lanes>,
}

/// How the chunks for one subscription are encoded.
#[derive(Debug, Clone)]
pub struct Coding {
    /// The codec that the client asks for.
    pub choice: CodecChoice,
    /// The codecs that the client can decode.
    pub offered: CodecSet,
    /// Chooses the effort where the codec is free.
    pub effort: EffortMeter,
}

/// The version that is sent.
#[derive(Debug)]
pub(crate) struct Content {
    pub(crate) version: Arc<dyn Offered>,
    pub(crate) selection: Arc<Selection>,
    /// The client's base, if chunks may be encoded against it.
    pub(crate) base: Option<Box<dyn DeltaBase>>,
    /// The encodings that its members pass on to each other, if the client is one.
    pub(crate) encodings: Option<Arc<EncodingLog>>,
}

/// Where sends are counted.
#[derive(Debug, Clone)]
pub(crate) struct Counters {
    pub(crate) egress: Arc<Egress>,
    /// Those of the subscription.
    pub(crate) sent: Arc<SentChunks>,
    pub(crate) progress: ProgressCounter,
}

/// Sends one version: its chunks, each read, encoded and written on one lane, its manifest and `Complete`. Sends run
/// concurrently within [`next`](Self::next), in the caller's task, so that no task is woken for a small chunk. Reading
/// files, hashing and encoding run on other threads; gathering a chunk from many places in memory does not. Dropping it
/// cancels the sends.
///
/// If a lane is lost or retired before its chunk is written, the chunk is lost, and the client requests it again.
#[derive(Debug)]
pub(crate) struct VersionSends {
    context: Arc<Context>,
    running: FuturesUnordered<Sending>,
}

/// A send in progress.
type Sending = Pin<Box<dyn Future<Output = Sent> + Send>>;

/// What all sends of one version use.
#[derive(Debug)]
struct Context {
    route: Route,
    coding: Coding,
    content: Content,
    counters: Counters,
    /// Whether its chunks are copied to be sent: they do not lie in memory in one piece.
    is_copied: bool,
}

/// A send that ended, even if it was lost with its lane.
pub(crate) type Sent = Result<SendAction, Unread>;

/// A send that failed, because what it needs of the version could not be read.
#[derive(Debug)]
pub(crate) struct Unread {
    pub(crate) action: SendAction,
    pub(crate) error: Arc<SourceError>,
}

impl VersionSends {
    pub(crate) fn new(route: Route, coding: Coding, content: Content, counters: Counters) -> Self {
        coding.effort.handle_version();
        let source = content.version.payload().source();
        let is_in_place = source.slots().is_some() || source.is_in_place(&(0..source.len_bytes()));
        let context = Context { route, coding, content, counters, is_copied: !is_in_place };
        Self { context: Arc::new(context), running: FuturesUnordered::new() }
    }

    /// Whether another send may begin: at most `sends_max` at a time, and one while there is no memory for more copies.
    pub(crate) fn has_room(&self, sends_max: usize) -> bool {
        let egress = &self.context.counters.egress;
        let has_memory = || !self.context.is_copied || egress.copies.get() < egress.copies_max_bytes;
        self.running.len() < sends_max && (self.running.is_empty() || has_memory())
    }

    /// Adds the send of an action.
    pub(crate) fn begin(&mut self, action: SendAction) {
        let occupied = self.context.occupy(action);
        self.running.push(Arc::clone(&self.context).send(action, occupied));
    }

    /// Adds the send of an action that could not be read before, to begin at `at`.
    pub(crate) fn begin_again(&mut self, action: SendAction, at: Instant) {
        let context = Arc::clone(&self.context);
        self.running.push(Box::pin(async move {
            tokio::time::sleep_until(at).await;
            let occupied = context.occupy(action);
            context.send(action, occupied).await
        }));
    }

    /// Cancels all sends in progress without reporting them.
    pub(crate) fn give_up(&mut self) {
        self.running.clear();
    }

    /// Runs the sends until one ends; `None` if there is none. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<Sent> {
        let sent = self.running.next().await?;
        self.context.counters.progress.note(1);
        Some(sent)
    }
}

/// What a send occupies until it ends.
struct Occupied {
    /// The load of its lane; `None` for no chunk, or if the lane is retired.
    load: Option<LaneLoad>,
    /// Its part of the budget for copies.
    _copy: Option<Used>,
}

impl Context {
    /// What the send of an action occupies from now on.
    fn occupy(&self, action: SendAction) -> Occupied {
        let (SendAction::Chunk(chunk, lane) | SendAction::Again(chunk, lane)) = action else {
            return Occupied { load: None, _copy: None };
        };
        let raw_bytes = self.raw_bytes(chunk);
        Occupied {
            load: self.route.lanes.begin_chunk(lane, raw_bytes),
            _copy: self.is_copied.then(|| self.counters.egress.copies.add(raw_bytes)),
        }
    }

    /// The send of an action. Each kind has a box of its own size: that of a chunk is kilobytes large.
    fn send(self: Arc<Self>, action: SendAction, Occupied { load, _copy }: Occupied) -> Sending {
        let sent = move |sent: Result<(), _>| sent.map(|()| action).map_err(|error| Unread { action, error });
        match action {
            SendAction::Manifest => Box::pin(async move {
                self.send_manifest().await;
                sent(Ok(()))
            }),
            SendAction::Chunk(chunk, _) | SendAction::Again(chunk, _) => {
                let may_be_delta = matches!(action, SendAction::Chunk(..));
                let send = async move {
                    let _copy = _copy;
                    sent(self.send_chunk(chunk, may_be_delta, load).await)
                };
                let send: Sending = Box::pin(send);
                match tracing::trace_span!("chunk", %chunk) {
                    span if span.is_disabled() => send,
                    span => Box::pin(send.instrument(span)),
                }
            }
            SendAction::Hashes { first, end } => {
                Box::pin(async move { sent(self.send_hashes(first..end).await) })
            }
            SendAction::Complete => Box::pin(async move { sent(self.send_complete().await) }),
        }
    }

    /// Sends the manifest. Ignores errors: the loss of its lane ends the session, and a client that stops the stream
    /// has the manifest or aborts the version.
    async fn send_manifest(&self) {
        let note = |bytes| self.counters.progress.note(bytes);
        let (control, manifest) = (self.route.lanes.control(), self.payload().manifest());
        let _ = egress::send_manifest(control, self.route.subscription, manifest, &note).await;
    }

    /// Reads, encodes and writes one chunk on the lane of `load`, unless the lane is retired first.
    async fn send_chunk(
        self: Arc<Self>,
        chunk: ChunkIndex,
        may_be_delta: bool,
        load: Option<LaneLoad>,
    ) -> Result<(), Arc<SourceError>> {
        let Some(load) = load else { return Ok(()) };
        tokio::select! {
            sent = self.encode_and_write(chunk, may_be_delta, &load.lane().lane) => sent?,
            () = load.lane().retired() => {
                tracing::debug!(%chunk, "A chunk was lost with its lane.");
            }
        }
        Ok(())
    }

    async fn encode_and_write(
        self: Arc<Self>,
        chunk: ChunkIndex,
        may_be_delta: bool,
        lane: &Lane,
    ) -> Result<(), Arc<SourceError>> {
        if let Some(received) = self.content.version.received().map(Arc::clone) {
            self.pass_on(&received, chunk, lane).await;
            return Ok(());
        }
        let (began, encoding) = (Instant::now(), self.counters.sent.encoding.add(1));
        let effort = self.coding.effort.effort();
        let encoded = self.encode(chunk, may_be_delta, effort).await?;
        drop(encoding);
        self.counters.progress.note(1); // From here on, only the subscriber can delay the send.
        let _sending = (self.encoder().stages().begin(Stage::Send), self.counters.sent.writing.add(1));
        let sampling = self.estimate(chunk, &encoded);
        let vouching = self.vouch(chunk, &encoded);
        let (context, target) = (Arc::clone(&self), lane.clone());
        // A lane that fails loses the chunk; a client that stops the stream has aborted the version.
        let write = async move { context.write(chunk, &encoded, &target, began, effort).await };
        let mut write = pin!(lane.run(write));
        let beside: Option<BoxFuture<'_, ()>> = match (sampling, vouching) {
            (Some(sampling), Some(vouching)) => Some(Box::pin(async move {
                tokio::join!(sampling, vouching);
            })),
            (sampling, vouching) => sampling.or(vouching),
        };
        let _ = match beside {
            Some(beside) => tokio::join!(write.as_mut(), beside).0,
            None => write.await,
        };
        Ok(())
    }

    /// Writes one chunk exactly as it was received. If it is not here any more, nothing is written: the taker learns it from
    /// `Held`.
    async fn pass_on(self: Arc<Self>, received: &ReceivedChunks, chunk: ChunkIndex, lane: &Lane) {
        let began = Instant::now();
        let Some((header, bytes)) = received.read(chunk).await else {
            tracing::debug!(%chunk, "A chunk that a taker requested is not here any more.");
            return;
        };
        self.counters.progress.note(1);
        let _sending = (self.encoder().stages().begin(Stage::Send), self.counters.sent.writing.add(1));
        let header = ChunkHeader { subscription: self.route.subscription, ..header };
        let encoded = Encoded { codec: header.codec, hash: header.hash, bytes, worker_time: Duration::ZERO };
        let (context, target) = (Arc::clone(&self), lane.clone());
        let write = async move {
            let note = |bytes| context.counters.progress.note(bytes);
            if egress::send_chunk(&target, header, &encoded, &note).await.is_ok() {
                context.count(chunk, &encoded, began);
            }
        };
        let _ = lane.run(write).await; // A lane that fails loses the chunk.
    }

    /// The work of making an encoding the shared one of its chunk, beside its sending; `None` if the chunk has one, or the
    /// version is not shared.
    fn vouch<'a>(&'a self, chunk: ChunkIndex, encoded: &Encoded) -> Option<BoxFuture<'a, ()>> {
        let claim = self.content.encodings.as_deref()?.claim(chunk)?;
        let (header, bytes) = (self.header(chunk, encoded), encoded.bytes.clone());
        Some(Box::pin(async move {
            let hash = self.encoder().vouch(header, bytes).await;
            claim.append(EncodingEntry { chunk, codec: header.codec, base: header.base, hash });
        }))
    }

    /// Estimates what each level of effort would make of a chunk: from an estimate of similar chunks or, if one may be
    /// made now, from a sample of a raw chunk, which is returned as work beside its sending. Small chunks are always sent
    /// raw, and those that were received are passed on.
    fn estimate<'a>(&'a self, chunk: ChunkIndex, encoded: &Encoded) -> Option<BoxFuture<'a, ()>> {
        let (encoder, payload, raw_bytes) = (self.encoder(), self.payload(), self.raw_bytes(chunk));
        let is_passed_on = payload.received(chunk).is_some();
        if raw_bytes < SMALL_BYTES as u64 || !self.is_chosen(encoded.codec) || is_passed_on {
            return None;
        }
        let Coding { effort, offered, .. } = &self.coding;
        if let Some(estimate) = encoder.estimate(payload, chunk) {
            effort.handle_estimate(&estimate, *offered, raw_bytes);
        } else if encoded.codec == CodecId::Raw && effort.may_sample() {
            let sample = encoder.sample(payload, chunk, encoded.bytes.clone());
            return Some(Box::pin(async move {
                let (estimate, took) = sample.await;
                effort.handle_sampled(took);
                effort.handle_estimate(&estimate, *offered, raw_bytes);
            }));
        }
        None
    }

    /// Whether a chunk that was encoded in `codec` owes that to the effort: it is no delta, and no codec was requested.
    fn is_chosen(&self, codec: CodecId) -> bool {
        self.coding.choice == CodecChoice::Auto && !codec.needs_base()
    }

    /// Encodes a chunk. Holds the base only during the encoding, not while a slow subscriber receives the result.
    async fn encode(
        &self,
        chunk: ChunkIndex,
        may_be_delta: bool,
        effort: Effort,
    ) -> Result<Encoded, Arc<SourceError>> {
        let (base, request) =
            (self.content.base.as_ref().filter(|_| may_be_delta), self.codec_request(effort));
        let (base, request) = match self.shared_codec(chunk) {
            Some(codec) => (None, CodecRequest::Fixed(codec)),
            None => (base, request),
        };
        let delta_base = base.and_then(|base| Some((base, base.upgrade()?)));
        let base = delta_base.as_ref().map(|(_, version)| version.payload());
        let encoded = self.encoder().encode_delta(self.payload(), chunk, base, request).await?;
        if let Some((base, _)) = &delta_base {
            base.note(self.raw_bytes(chunk), encoded.codec.needs_base());
        }
        Ok(encoded)
    }

    /// The codec of the shared encoding of a chunk, if it needs no base and the client can decode it: in another one the
    /// client could not pass the chunk on. Otherwise that in which the chunk was received, which costs no encoding. A delta
    /// comes of itself where the client has the base.
    fn shared_codec(&self, chunk: ChunkIndex) -> Option<CodecId> {
        let codec = match self.content.encodings.as_deref().and_then(|encodings| encodings.entry(chunk)) {
            Some(entry) => entry.base.is_none().then_some(entry.codec),
            None => self.payload().received(chunk),
        };
        codec.filter(|codec| self.coding.choice == CodecChoice::Auto && self.coding.offered.contains(*codec))
    }

    /// The requested encoding of a chunk.
    fn codec_request(&self, effort: Effort) -> CodecRequest {
        match self.coding.choice {
            CodecChoice::Auto => CodecRequest::Auto { offered: self.coding.offered, effort },
            CodecChoice::Fixed(codec) => CodecRequest::Fixed(codec),
        }
    }

    /// Writes a chunk whose send started at `began`, and counts it if it was written.
    async fn write(&self, chunk: ChunkIndex, encoded: &Encoded, lane: &Lane, began: Instant, effort: Effort) {
        let note = |bytes| self.counters.progress.note(bytes);
        if egress::send_chunk(lane, self.header(chunk, encoded), encoded, &note)
            .await
            .is_ok()
        {
            let is_chosen = self.is_chosen(encoded.codec);
            self.coding
                .effort
                .handle_written(encoded, effort, self.raw_bytes(chunk), is_chosen);
            self.count(chunk, encoded, began);
        }
    }

    /// Counts a chunk that was written, whose send started at `began`.
    fn count(&self, chunk: ChunkIndex, encoded: &Encoded, began: Instant) {
        let (raw_bytes, wire_bytes) = (self.raw_bytes(chunk), encoded.bytes.len() as u64);
        let Counters { egress, sent, .. } = &self.counters;
        egress.tally.count(encoded.codec, raw_bytes, wire_bytes, encoded.worker_time);
        sent.count(encoded, raw_bytes);
        egress.chunk_times.note(began.elapsed());
    }

    fn header(&self, chunk: ChunkIndex, encoded: &Encoded) -> ChunkHeader {
        let Content { version, base, .. } = &self.content;
        let (epoch, version) = version.key();
        let base = base.as_ref().filter(|_| encoded.codec.needs_base());
        ChunkHeader {
            subscription: self.route.subscription,
            epoch,
            version,
            chunk,
            codec: encoded.codec,
            raw_bytes: self.raw_bytes(chunk) as u32,
            encoded_bytes: encoded.bytes.len() as u32,
            hash: encoded.hash,
            base: base.map(|base| base.version()),
        }
    }

    fn raw_bytes(&self, chunk: ChunkIndex) -> u64 {
        let (range, _) = self.payload().manifest().chunk(chunk);
        range.end - range.start
    }

    /// Sends the hashes of the selected chunks at these places among them. Those that were not sent may have to be hashed
    /// first.
    async fn send_hashes(&self, places: Range<u32>) -> Result<(), Arc<SourceError>> {
        let Content { version, selection, .. } = &self.content;
        let (first, end) = (places.start, places.end);
        let chunks = selection.chunks().iter().skip(first as usize).take(places.len());
        let chunks = chunks.map(|chunk| chunk..chunk + 1).collect();
        let hashes = self.encoder().hashes(self.payload(), &chunks).await?;
        if end == selection.chunks().len() {
            version.note_digest(self.encoder().digest(self.payload(), selection.chunks()).await?);
        }
        let (subscription, (epoch, version)) = (self.route.subscription, version.key());
        // Fails only when the session ends.
        let _ = self
            .route
            .lanes
            .send(ServerMessage::Hashes { subscription, epoch, version, first, hashes })
            .await;
        Ok(())
    }

    /// Sends `Complete` with the version's digest. Chunks that were not sent because the client already holds them may
    /// have to be hashed first.
    async fn send_complete(&self) -> Result<(), Arc<SourceError>> {
        let Content { version, selection, .. } = &self.content;
        let digest = self.encoder().digest(self.payload(), selection.chunks()).await?;
        version.note_digest(digest);
        let (subscription, (epoch, version)) = (self.route.subscription, version.key());
        // Fails only when the session ends.
        let complete = ServerMessage::Complete { subscription, epoch, version, digest };
        let _ = self.route.lanes.send(complete).await;
        Ok(())
    }

    fn payload(&self) -> &Payload {
        self.content.version.payload()
    }

    fn encoder(&self) -> &Encoder {
        &self.counters.egress.encoder
    }
}
