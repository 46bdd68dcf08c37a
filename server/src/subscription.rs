//! One subscription: sends the newest version of a topic, then the next newest, until it ends.

use crate::{
    catalogue::{Follower, Retained},
    sends::{Outgoing, SendError, Sends, Sent},
    session::Shared,
    stall::StallWatch,
};
use std::{
    convert::Infallible,
    sync::{Arc, atomic::Ordering},
};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{
    AbortReason, Announce, CodecId, CodecSet, Credit, EndReason, Epoch, ManifestDigest, Misbehaved, RangeSet,
    SendAction, SendPlan, ServerMessage, SubscriptionId, Version,
};
use tensor_relay_transport::{Lane, LaneError, control};
use tokio::sync::mpsc;

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
    pub(crate) follower: Follower,
    pub(crate) lane: Lane,
    pub(crate) sender: control::Sender<ServerMessage>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) inbox: Inbox,
    pub(crate) history: History,
}

/// What the client has been through.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// The newest version that the client has, or that was last begun for it.
    last: Option<(Epoch, Version)>,
    /// The versions since its last commit that were begun for it and given up: it never saw them.
    missed: u64,
    /// The manifest of the version it committed last.
    manifest: Option<ManifestDigest>,
}

impl History {
    /// A client that comes with a version in hand.
    pub(crate) fn holding(have: Option<(Epoch, Version)>) -> Self {
        Self { last: have, ..Self::default() }
    }

    fn is_news(&self, retained: &Retained) -> bool {
        let (epoch, version) = (retained.id.epoch, retained.id.version);
        self.last.is_none_or(|(last_epoch, last)| last_epoch != epoch || last < version)
    }

    /// How many versions the client will not have seen when it commits `retained` next.
    fn skipped_before(&self, retained: &Retained) -> u64 {
        let between = match self.last {
            Some((epoch, last)) if epoch == retained.id.epoch => {
                retained.id.version.0.saturating_sub(last.0 + 1)
            }
            _ => 0,
        };
        self.missed + between
    }

    fn handle_committed(&mut self, retained: &Retained) {
        self.last = Some((retained.id.epoch, retained.id.version));
        self.missed = 0;
        self.manifest = Some(retained.payload.manifest().digest());
    }

    fn handle_given_up(&mut self, retained: &Retained) {
        self.missed = self.skipped_before(retained) + 1;
        self.last = Some((retained.id.epoch, retained.id.version));
        // Its manifest may have been cut off as well.
        self.manifest = None;
    }
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
                self.note_end(reason);
                let _ = self.sender.send(ServerMessage::End { subscription: self.id, reason }).await;
                Ok(())
            }
        }
    }

    fn note_end(&self, reason: EndReason) {
        if reason == EndReason::Evicted {
            self.shared.counters.evicted.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(subscription = %self.id, "A subscriber took no byte within the deadline and was evicted.");
        }
    }

    async fn send_versions(&mut self) -> Result<Infallible, Ended> {
        loop {
            let retained = self.next_version().await?;
            let _counted = Counted::begin(&self.shared);
            self.send_version(&retained).await?;
        }
    }

    /// Waits for a version that the client does not have.
    async fn next_version(&mut self) -> Result<Arc<Retained>, Ended> {
        loop {
            let offer = self.follower.offer();
            let draining = *self.shared.draining.borrow();
            match offer.newest.filter(|retained| self.history.is_news(retained)) {
                Some(retained) if !draining => return Ok(retained),
                None if offer.ended => return Err(Ended::Told(EndReason::TopicEnded)),
                _ => {}
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

    /// Sends one version and waits for the client's last word on it: `Committed` or `Abort`.
    async fn send_version(&mut self, retained: &Arc<Retained>) -> Result<(), Ended> {
        self.announce(retained).await?;
        let manifest = retained.payload.manifest();
        let wanted = RangeSet::from_range(0..manifest.chunking().count());
        let mut plan = SendPlan::new(wanted, self.history.manifest != Some(manifest.digest()));
        let mut watch = StallWatch::new(self.shared.config.stall_timeout);
        let mut sends = Sends::new(self.outgoing(retained, &watch));
        let mut given_up = false;
        loop {
            while !given_up && sends.len() < self.shared.config.chunks_in_flight {
                match plan.poll(&mut self.credit) {
                    Some(SendAction::Manifest) => sends.begin_manifest(),
                    Some(SendAction::Chunk(chunk)) => sends.begin_chunk(chunk),
                    Some(SendAction::Complete) => self.complete(retained).await?,
                    None => break,
                }
            }
            tokio::select! {
                word = self.inbox.next() => {
                    watch.progress().note(u64::from(!matches!(word, Word::Credit(0))));
                    if self.handle_word(word, retained, plan.is_complete())? {
                        return Ok(());
                    }
                }
                Some(sent) = sends.next() => match sent {
                    Ok(Sent::Chunk) => plan.handle_sent(),
                    // The client's word on a version that was given up is on the way.
                    Ok(Sent::Manifest | Sent::GivenUp) => {}
                    Err(SendError::Lane(error)) => return Err(error.into()),
                    Err(SendError::Source(_)) if given_up => {}
                    Err(SendError::Source(error)) => {
                        given_up = true;
                        sends.give_up();
                        self.give_up(retained, &error).await?;
                    }
                },
                () = watch.stalled() => return Err(Ended::Told(EndReason::Evicted)),
            }
        }
    }

    fn outgoing(&self, retained: &Arc<Retained>, watch: &StallWatch) -> Outgoing {
        let wanted = self.shared.config.codec;
        Outgoing {
            subscription: self.id,
            retained: Arc::clone(retained),
            codec: if self.codecs.contains(wanted) { wanted } else { CodecId::Raw },
            lane: self.lane.clone(),
            shared: Arc::clone(&self.shared),
            progress: watch.progress().clone(),
        }
    }

    async fn announce(&self, retained: &Retained) -> Result<(), LaneError> {
        let announce = Announce {
            subscription: self.id,
            id: retained.id.clone(),
            manifest: retained.payload.manifest().digest(),
            skipped: self.history.skipped_before(retained),
            metadata: retained.metadata.clone(),
        };
        self.sender.send(ServerMessage::Announce(announce)).await
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

    /// Tells the client that a version cannot be sent to its end. Its own `Abort` is the answer, and the last word.
    async fn give_up(&self, retained: &Retained, error: &SourceError) -> Result<(), LaneError> {
        tracing::error!(version = %retained.id, %error, "A version cannot be read any more; its subscribers are told.");
        let (epoch, version) = (retained.id.epoch, retained.id.version);
        let reason = AbortReason::SourceLost;
        self.sender
            .send(ServerMessage::Abort { subscription: self.id, epoch, version, reason })
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
                self.history.handle_committed(retained);
                Ok(true)
            }
            Word::Abort(_, _, reason) => {
                tracing::warn!(subscription = %self.id, version = %id, "A subscriber gave a version up: {reason}.");
                // Some chunks may have been cut before their headers left, so neither end can say what their credit has
                // become: both forget it, and the client grants anew.
                self.credit = Credit::default();
                self.history.handle_given_up(retained);
                Ok(true)
            }
        }
    }
}

/// Counts a transfer for as long as it lives.
struct Counted(Arc<Shared>);

impl Counted {
    fn begin(shared: &Arc<Shared>) -> Self {
        shared.transfers.send_modify(|count| *count += 1);
        Self(Arc::clone(shared))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.transfers.send_modify(|count| *count -= 1);
    }
}
