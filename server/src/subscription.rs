//! One subscription: sends the newest version of a topic, then the next newest, until it ends.

use crate::{
    catalogue::{Follower, Retained},
    session::Shared,
};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{
    AbortReason, Announce, ChunkHeader, ChunkIndex, CodecId, CodecSet, Credit, EndReason, Epoch,
    ManifestDigest, Misbehaved, SendAction, SendPlan, ServerMessage, SubscriptionId, Version,
};
use tensor_relay_transport::{Lane, LaneError, control, egress};
use tokio::{sync::mpsc, task::JoinSet, time::Instant};

/// What a client says to one of its subscriptions.
#[derive(Debug)]
pub(crate) enum Word {
    Credit(u32),
    Committed(Epoch, Version),
    Abort(Epoch, Version, AbortReason),
    Unsubscribe,
}

/// Where a subscription hears its client. The bound is small because a subscription is always listening; a client that
/// talks faster than it is heard waits on its own control stream.
#[derive(Debug)]
pub(crate) struct Inbox(mpsc::Receiver<Word>);

impl Inbox {
    const BOUND: usize = 16;

    pub(crate) fn channel() -> (Self, mpsc::Sender<Word>) {
        let (sender, receiver) = mpsc::channel(Self::BOUND);
        (Self(receiver), sender)
    }

    /// The next word; a session that is gone says good-bye.
    async fn next(&mut self) -> Word {
        self.0.recv().await.unwrap_or(Word::Unsubscribe)
    }
}

/// The server's side of one subscription.
#[derive(Debug)]
pub(crate) struct Subscription {
    pub(crate) id: SubscriptionId,
    pub(crate) codecs: CodecSet,
    pub(crate) credit: Credit,
    /// The newest version that the client has, or that was last sent to it.
    pub(crate) last: Option<(Epoch, Version)>,
    /// The manifest that the client holds for this subscription.
    pub(crate) manifest: Option<ManifestDigest>,
    pub(crate) follower: Follower,
    pub(crate) lane: Lane,
    pub(crate) sender: control::Sender<ServerMessage>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) inbox: Inbox,
}

/// Why a subscription ended.
#[derive(Debug)]
enum Ended {
    /// The client wanted it, or is gone.
    ByClient,
    /// For a reason that the client is told.
    Told(EndReason),
    /// The client broke a rule; the session ends with it.
    Misbehaved(Misbehaved),
}

impl From<LaneError> for Ended {
    fn from(_: LaneError) -> Self {
        Self::ByClient
    }
}

impl From<Misbehaved> for Ended {
    fn from(error: Misbehaved) -> Self {
        Self::Misbehaved(error)
    }
}

impl Subscription {
    /// Runs until the subscription ends; an error is the client's.
    pub(crate) async fn run(mut self) -> Result<(), Misbehaved> {
        let Err(ended) = self.send_versions().await;
        match ended {
            Ended::ByClient => Ok(()),
            Ended::Misbehaved(error) => Err(error),
            Ended::Told(reason) => {
                if reason == EndReason::Evicted {
                    self.shared.counters.evicted.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(subscription = %self.id, "A subscriber took no byte within the deadline and was evicted.");
                }
                let _ = self.sender.send(ServerMessage::End { subscription: self.id, reason }).await;
                Ok(())
            }
        }
    }

    async fn send_versions(&mut self) -> Result<std::convert::Infallible, Ended> {
        loop {
            let retained = self.next_version().await?;
            let _counted = Transfer::begin(&self.shared);
            self.send_version(&retained).await?;
            self.last = Some((retained.id.epoch, retained.id.version));
        }
    }

    /// Waits for a version that the client does not have.
    async fn next_version(&mut self) -> Result<Arc<Retained>, Ended> {
        let mut draining = self.shared.draining.subscribe();
        loop {
            let offer = self.follower.offer();
            let news = offer.newest.filter(|r| self.last != Some((r.id.epoch, r.id.version)));
            if let Some(retained) = news.filter(|_| !*draining.borrow_and_update()) {
                return Ok(retained);
            }
            if offer.ended {
                return Err(Ended::Told(EndReason::TopicEnded));
            }
            tokio::select! {
                () = self.follower.changed() => {}
                word = self.inbox.next() => self.handle_idle_word(word)?,
            }
        }
    }

    /// What a client may say while nothing is being sent to it.
    fn handle_idle_word(&mut self, word: Word) -> Result<(), Ended> {
        match word {
            Word::Credit(chunks) => Ok(self.credit.grant(chunks)?),
            // A word about the version before, which the other end gave up at the same time as this one did.
            Word::Abort(..) | Word::Committed(..) => Ok(()),
            Word::Unsubscribe => Err(Ended::ByClient),
        }
    }

    /// Sends one version whole and waits for the client's word on it.
    async fn send_version(&mut self, retained: &Arc<Retained>) -> Result<(), Ended> {
        let manifest = retained.payload.manifest();
        self.announce(retained).await?;
        let needs_manifest = self.manifest.replace(manifest.digest()) != Some(manifest.digest());
        let mut plan = SendPlan::new(manifest.chunking().count(), needs_manifest);
        let mut sends: JoinSet<Sent> = JoinSet::new();
        let mut watch = StallWatch::new(self.shared.config.stall_timeout);
        loop {
            while sends.len() < self.shared.config.chunks_in_flight {
                match plan.poll(&mut self.credit) {
                    Some(SendAction::Manifest) => self.spawn_manifest(&mut sends, retained),
                    Some(SendAction::Chunk(chunk)) => self.spawn_chunk(&mut sends, retained, chunk, &watch),
                    Some(SendAction::Complete) => self.complete(retained).await?,
                    None => break,
                }
            }
            tokio::select! {
                word = self.inbox.next() => {
                    watch.note(1);
                    if self.handle_word(word, retained, plan.is_complete())? {
                        return Ok(());
                    }
                }
                Some(sent) = sends.join_next() => {
                    watch.note(1);
                    match sent.unwrap_or_else(Sent::cut_off) {
                        Sent::Manifest(result) => result?,
                        Sent::Chunk(Ok(())) => plan.handle_sent(),
                        // One end gave the version up; the client's word on that is on the way.
                        Sent::Chunk(Err(ChunkError::Lane(LaneError::StreamGivenUp))) => {}
                        Sent::Chunk(Err(ChunkError::Lane(error))) => return Err(error.into()),
                        Sent::Chunk(Err(ChunkError::Source(error))) => {
                            sends.abort_all();
                            self.give_up(retained, &error).await?;
                        }
                    }
                }
                () = watch.stalled() => return Err(Ended::Told(EndReason::Evicted)),
            }
        }
    }

    async fn announce(&self, retained: &Retained) -> Result<(), LaneError> {
        let skipped = match self.last {
            Some((epoch, last)) if epoch == retained.id.epoch => {
                retained.id.version.0.saturating_sub(last.0 + 1)
            }
            _ => 0,
        };
        let announce = Announce {
            subscription: self.id,
            id: retained.id.clone(),
            manifest: retained.payload.manifest().digest(),
            skipped,
            metadata: retained.metadata.clone(),
        };
        self.sender.send(ServerMessage::Announce(announce)).await
    }

    fn spawn_manifest(&self, sends: &mut JoinSet<Sent>, retained: &Arc<Retained>) {
        let (lane, id, retained) = (self.lane.clone(), self.id, Arc::clone(retained));
        sends.spawn(async move {
            Sent::Manifest(egress::send_manifest(&lane, id, retained.payload.manifest()).await)
        });
    }

    fn spawn_chunk(
        &self,
        sends: &mut JoinSet<Sent>,
        retained: &Arc<Retained>,
        chunk: ChunkIndex,
        watch: &StallWatch,
    ) {
        let wanted = self.shared.config.codec;
        let send = ChunkSend {
            subscription: self.id,
            chunk,
            codec: if self.codecs.contains(wanted) { wanted } else { CodecId::Raw },
            retained: Arc::clone(retained),
            lane: self.lane.clone(),
            shared: Arc::clone(&self.shared),
            progress: Arc::clone(&watch.progress),
        };
        sends.spawn(async move { Sent::Chunk(send.run().await) });
    }

    async fn complete(&self, retained: &Retained) -> Result<(), LaneError> {
        let digest = retained
            .payload
            .digest()
            .expect("every chunk was sent, so every chunk was hashed");
        let (epoch, version) = (retained.id.epoch, retained.id.version);
        self.sender
            .send(ServerMessage::Complete { subscription: self.id, epoch, version, digest })
            .await
    }

    /// Takes a word during a transfer; returns whether it was the last one on this version.
    fn handle_word(&mut self, word: Word, retained: &Retained, complete: bool) -> Result<bool, Ended> {
        let id = &retained.id;
        match word {
            Word::Credit(chunks) => {
                self.credit.grant(chunks)?;
                Ok(false)
            }
            Word::Unsubscribe => Err(Ended::ByClient),
            Word::Committed(epoch, version) | Word::Abort(epoch, version, _)
                if (epoch, version) != (id.epoch, id.version) =>
            {
                Err(Misbehaved::WrongVersion { epoch, version }.into())
            }
            Word::Committed(..) if !complete => {
                Err(Misbehaved::OutOfTurn { found: "Committed", expected: "Complete to be sent first" }
                    .into())
            }
            Word::Committed(..) => {
                self.shared.counters.committed.fetch_add(1, Ordering::Relaxed);
                retained.committed.send_modify(|count| *count += 1);
                Ok(true)
            }
            Word::Abort(_, _, reason) => {
                tracing::warn!(subscription = %self.id, version = %id, "A subscriber gave a version up: {reason}.");
                // Some chunks may have been cut before their headers left, so neither end can say what their credit has
                // become: both forget it, and the client grants anew.
                self.credit = Credit::default();
                Ok(true)
            }
        }
    }

    /// Tells the client that a version cannot be sent to its end. Its own `Abort` is the answer, and the last word.
    async fn give_up(&self, retained: &Retained, error: &SourceError) -> Result<(), LaneError> {
        tracing::error!(version = %retained.id, %error, "A version cannot be read any more; its subscribers are told.");
        let (epoch, version) = (retained.id.epoch, retained.id.version);
        let reason = AbortReason::SourceLost;
        self.sender
            .send(ServerMessage::Abort { subscription: self.id, epoch, version, reason })
            .await
    }
}

/// What one of the concurrent sends of a version came to.
enum Sent {
    Manifest(Result<(), LaneError>),
    Chunk(Result<(), ChunkError>),
}

impl Sent {
    /// A send that was cut off because its version was given up. A panic is passed on.
    fn cut_off(error: tokio::task::JoinError) -> Self {
        match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Self::Chunk(Err(ChunkError::Lane(LaneError::StreamGivenUp))),
        }
    }
}

enum ChunkError {
    Lane(LaneError),
    Source(SourceError),
}

/// One chunk on its way: read, encoded, written.
struct ChunkSend {
    subscription: SubscriptionId,
    chunk: ChunkIndex,
    codec: CodecId,
    retained: Arc<Retained>,
    lane: Lane,
    shared: Arc<Shared>,
    progress: Arc<AtomicU64>,
}

impl ChunkSend {
    async fn run(self) -> Result<(), ChunkError> {
        let payload = &self.retained.payload;
        let encoded = self.shared.encoder.encode(payload, self.chunk, self.codec).await;
        let encoded = encoded.map_err(ChunkError::Source)?;
        let (range, _) = payload.manifest().chunk(self.chunk);
        let header = ChunkHeader {
            subscription: self.subscription,
            epoch: self.retained.id.epoch,
            version: self.retained.id.version,
            chunk: self.chunk,
            codec: encoded.codec,
            raw_bytes: (range.end - range.start) as u32,
            encoded_bytes: encoded.bytes.len() as u32,
            hash: encoded.hash,
            base: None,
        };
        let note = |bytes| _ = self.progress.fetch_add(bytes, Ordering::Relaxed);
        egress::send_chunk(&self.lane, header, &encoded, &note)
            .await
            .map_err(ChunkError::Lane)
    }
}

/// Notices that nothing moves. Whatever moves adds to `progress`; the watch looks once per deadline, so a stall is
/// noticed after one to two of them, and movement costs an addition and no timer.
struct StallWatch {
    progress: Arc<AtomicU64>,
    seen: u64,
    timeout: std::time::Duration,
    look: Instant,
}

impl StallWatch {
    fn new(timeout: std::time::Duration) -> Self {
        Self { progress: Arc::default(), seen: 0, timeout, look: Instant::now() + timeout }
    }

    fn note(&self, steps: u64) {
        self.progress.fetch_add(steps, Ordering::Relaxed);
    }

    /// Returns once nothing has moved for the timeout. Cancel safe.
    async fn stalled(&mut self) {
        loop {
            tokio::time::sleep_until(self.look).await;
            let now = self.progress.load(Ordering::Relaxed);
            if now == self.seen {
                return;
            }
            self.seen = now;
            self.look += self.timeout;
        }
    }
}

/// Counts a transfer for as long as it lives.
struct Transfer(Arc<Shared>);

impl Transfer {
    fn begin(shared: &Arc<Shared>) -> Self {
        shared.transfers.send_modify(|count| *count += 1);
        Self(Arc::clone(shared))
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.0.transfers.send_modify(|count| *count -= 1);
    }
}
